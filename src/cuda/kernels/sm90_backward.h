// SPDX-License-Identifier: Apache-2.0
//
// The backward for Hopper: which problems it can compute, with which tiles (sm90_backward.cpp), and its launches
// (sm90_backward_launch.cpp).
#pragma once

#include "cuda/kernels/backward_around.h"
#include "cuda/kernels/sm90_backward_order.h"
#include "cuda/kernels/sm90_summed_backward.h"

namespace fovea::cuda {

// dk, dv (and dq by additions in memory): 16-bit types, head_dim up to 256; sm90_wide_backward where one block has too
// few registers.
Choice sm90_backward(const Call& call, const Operands& operands, const Target& target, const BackwardWants& wants);

// Memory for partial sums and for the order of sums.
void reserve_sm90_backward(Planner& planner, const Sm90BackwardSpec& spec, const Sm90KeyOrder& order);
// Its launch; with a mask, one that writes the mask's bits for it comes before backward_prepare; the sums of parts are
// added after it, and dq is converted in the same launch, with so many blocks.
void add_sm90_backward_mask(Planner& planner);
void add_sm90_backward(Planner& planner, const Kernel& kernel, const Sm90KeyOrder& order);
void add_sm90_backward_parts(Planner& planner, const Sm90BackwardSpec& main, const Sm90KeyOrder& order,
                             std::int64_t convert_blocks);

}  // namespace fovea::cuda
