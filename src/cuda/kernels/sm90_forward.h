// SPDX-License-Identifier: Apache-2.0
//
// The forward for Hopper: which problems it can compute, with which tiles, in which order its blocks take them, and its
// launch.
#pragma once

#include "cuda/planner.h"

namespace fovea::cuda {

// The forward for Hopper: 16-bit types, head_dim up to 256.
Choice sm90_forward(const Call& call, const Operands& operands, const Target& target);

// Its launch, and that of what its blocks take their tiles from.
void add_sm90_forward(Planner& planner, const Kernel& kernel);

}  // namespace fovea::cuda
