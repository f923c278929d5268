// SPDX-License-Identifier: Apache-2.0
//
// Hopper's backward for short sequences: which problems it can compute, how its blocks share the work, and its
// launches.
#pragma once

#include "cuda/planner.h"

namespace fovea::cuda {

// All gradients of sequences of at most 64 queries and keys at once.
Choice sm90_small_backward(const Call& call, const Operands& operands, const Target& target);

// Its launch: everything, but for the sum of a bias's gradient, which is another.
void add_sm90_small_backward(Planner& planner, const Kernel& kernel);

}  // namespace fovea::cuda
