// SPDX-License-Identifier: Apache-2.0
//
// The generic backward's kernels: tile sizes, from the features, the GPU's shared memory and what a kernel is wanted
// for; and their launches.
#pragma once

#include "cuda/kernels/backward_around.h"

namespace fovea::cuda {

// Whether there is a kernel that makes dq together with dk and dv. Otherwise dq takes a kernel of its own.
bool backward_adds_dq(const Features& features, const Target& target, bool column_sum);

// dk, dv (and dq by atomics): generic_backward up to head dimensions of 512, beyond generic_chunked_backward, which has
// no dq.
Choice generic_backward(const Features& features, const Target& target, const BackwardWants& wants);

// dq without atomics, sums of dS over keys, or both.
Choice generic_backward_dq(const Features& features, const Target& target, bool dq, bool row_sum);

// The gradient of a bias with queries and keys, of this type.
Choice generic_bias_gradient(const Features& features, const Target& target, BiasTile type);

// Their launches.
void add_generic_backward(Planner& planner, const Kernel& kernel);
void add_generic_backward_dq(Planner& planner, const Kernel& kernel);

// The gradient of a bias, and the sum of its list's chunks.
void add_generic_bias_gradient(Planner& planner, const Kernel& kernel, const BiasList& list);

}  // namespace fovea::cuda
