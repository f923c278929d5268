// SPDX-License-Identifier: Apache-2.0
//
// What counts as right. For every output, in the maximum and in the mean over its elements:
//
//     error against the fp64 reference  <=  2 * (the naive evaluation's error)  +  a small absolute term
//
// naive.h says what the naive evaluation is. The absolute term is kUnits units in the last place of the output's
// type at the size of its largest (mean) element: a naive evaluation may be right by luck. Where the reference is
// infinite or NaN, the result has to be the same.
#pragma once

#include <string>
#include <vector>

#include "check/materialise.h"

namespace fovea::check {

struct Deviation {
  std::string tensor;
  double max_error = 0;
  double max_allowed = 0;
  double mean_error = 0;
  double mean_allowed = 0;
  std::string mismatch;  // an infinity or NaN where there is to be none, or the other way round; "" if none
  bool within() const;
};
std::string to_text(const Deviation& deviation);

// `reference` and `naive` hold the value of every element of the tensor's buffer.
Deviation compare(const Tensor& actual, const std::vector<double>& reference, const std::vector<double>& naive);

}  // namespace fovea::check
