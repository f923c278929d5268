// SPDX-License-Identifier: Apache-2.0
//
// Are the gradients those of the loss? A small network in double precision, dropout included (the same step draws the
// same mask): every parameter is moved a little to either side and the loss's slope is compared with the gradient.
#pragma once

#include <string>
#include <vector>

#include "attention_layer.h"

namespace train_lm {

struct GradientError {
  std::string parameter;
  double largest_gradient = 0;
  double largest_error = 0;  // of any element, against the difference quotient
};

std::vector<GradientError> check_gradients(AttentionKind kind);

// Differences of losses that are right to about 1e-16 over steps of 1e-5 leave some 1e-10.
inline constexpr double kGradientTolerance = 1e-8;

}  // namespace train_lm
