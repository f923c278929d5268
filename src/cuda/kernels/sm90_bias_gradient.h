// SPDX-License-Identifier: Apache-2.0
//
// Hopper's gradient of a bias with queries and keys: which problems it can compute, with which tiles, and its launches.
#pragma once

#include "cuda/kernels/backward_around.h"

namespace fovea::cuda {

// The gradient of a bias, of this type. In its Spec and its arguments the bias whose gradient it is is `bias`, also
// where the call has it as bias2.
Choice sm90_bias_gradient(const Call& call, const Operands& operands, const Target& target, BiasTile type,
                          const BiasList& list);

// Its launches: one, or where the bias is taken out of the sum a second that computes flagged tiles again with the
// bias inside, and the sum of the list's chunks.
void add_sm90_bias_gradient(Planner& planner, const Kernel& kernel, const BiasList& list);

}  // namespace fovea::cuda
