// SPDX-License-Identifier: Apache-2.0
//
// Which gradients of biases with queries and keys Hopper's kernel serves, with which tiles: pure functions of a problem
// and a target.
#pragma once

#include "cuda/config/kernel.h"
#include "cuda/config/operands.h"
#include "cuda/config/target.h"

namespace fovea::cuda {

// What a plane of the gradient is the sum of.
struct BiasList {
  std::int64_t planes = 0;
  std::int64_t entries = 0;  // (b, h) pairs that share a plane
  std::int64_t queries = 0;
  std::int64_t keys = 0;
};

// The gradient of bias (which = 0) or bias2 (1), of this type. In its Spec the bias whose gradient it is is `bias`.
Choice sm90_bias_gradient(const Call& call, const Operands& operands, const Target& target, BiasTile type, int which,
                          const BiasList& list);

// The same tiles with the bias inside of the sum: what computes the tiles again that bias_outside flags.
Kernel sm90_bias_gradient_inside(const Kernel& outside);

// Tiles of a plane, and the pieces that its list is cut into.
std::int64_t sm90_bias_gradient_tiles(const BiasList& list, const Spec& spec);
int sm90_bias_gradient_chunks(const BiasList& list, const Spec& spec, const Target& target);

}  // namespace fovea::cuda
