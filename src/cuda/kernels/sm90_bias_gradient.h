// SPDX-License-Identifier: Apache-2.0
//
// Hopper's gradient of a bias with queries and keys: which problems it can compute, with which tiles, and its launches.
#pragma once

#include "cuda/kernels/generic_backward.h"

namespace fovea::cuda {

// The gradient of bias (which = 0) or bias2 (1), of this type. In its Spec the bias whose gradient it is is `bias`.
Choice sm90_bias_gradient(const Call& call, const Operands& operands, const Target& target, BiasTile type, int which,
                          const BiasList& list);

// Its launches: one, or where the bias is taken out of the sum a second that computes flagged tiles again with the
// bias inside, and the sum of the list's chunks.
void add_sm90_bias_gradient(Planner& planner, const Kernel& kernel, const BiasList& list, int which);

}  // namespace fovea::cuda
