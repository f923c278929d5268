// SPDX-License-Identifier: Apache-2.0
//
// The gradient of a bias that many entries share, by additions in memory within the backward for Hopper
// (Sm90BackwardTiles::adds_bias): which calls have it there, and the launches before and after it.
#pragma once

#include "cuda/device/sm90/spec.h"
#include "cuda/kernels/backward_around.h"

namespace fovea::cuda {

bool sm90_adds_bias(const Call& call, const Sm90BackwardSpec& spec, const BackwardWants& wants);

// Memory for the sums, and what sets them to zero: before backward_prepare.
void add_sm90_added_bias_clear(Planner& planner);
// The gradient of the sums.
void add_sm90_added_bias_sum(Planner& planner);

}  // namespace fovea::cuda
