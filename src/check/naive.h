// SPDX-License-Identifier: Apache-2.0
//
// The same formulas in a backend's own roundings: inputs as they are, P and dS rounded to the type of q, sums in
// fp32 (fp64 for fp64) and in another order than the reference's, one rounding of every output. How far this is
// from the reference is what tolerance.h takes for reasonable.
#pragma once

#include "core/problem.h"

namespace fovea::check {

// The call's outputs are views of doubles; what is written there are values that the outputs' own types have.
void naive_forward(const Call& call);
void naive_backward(const Call& call);

}  // namespace fovea::check
