// SPDX-License-Identifier: Apache-2.0
//
// Which backwards Hopper's kernel for short sequences serves, and how its blocks share the work: pure functions of a
// problem and a target.
#pragma once

#include "cuda/config/kernel.h"
#include "cuda/config/operands.h"
#include "cuda/config/target.h"

namespace fovea::cuda {

// All gradients of sequences of at most 64 queries and keys at once.
Choice sm90_small_backward(const Call& call, const Operands& operands, const Target& target);

// A plane: heads that share a bias (all of them where there is none). Warpgroups of a plane take its entries in turn.
struct SmallOrder {
  std::int64_t planes = 1;
  std::int64_t list = 0;      // entries of a plane
  std::int64_t blocks = 1;    // of a plane
  std::int64_t workers = 1;   // warpgroups of a plane
  math::Strides is_of_plane;  // not 0 in the dimensions that planes differ in
};
SmallOrder sm90_small_order(const Call& call, const Spec& spec, const Target& target);

}  // namespace fovea::cuda
