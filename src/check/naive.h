// SPDX-License-Identifier: Apache-2.0
//
// The same formulas in a backend's own roundings: inputs as they are, P and dS rounded to the type of q, sums in
// fp32 (fp64 for fp64), one rounding of every output. How far this is from the reference is what tolerance.h takes
// for reasonable.
//
// Two evaluations in the same precision differ by the order of their sums and by the last bit of exp, tanh and log.
// In large problems the errors of both are alike; in small ones the naive evaluation may be right by luck, and in
// fp64 it would be the reference's twin. So it is made to err, by fixed pseudo-random signs: a dot product by one unit
// in the last place of the sum of its terms' magnitudes, an exp or a log by two of its own, which is what vector
// mathematics is expected to keep.
#pragma once

#include "core/problem.h"

namespace fovea::check {

// The call's outputs are views of doubles; what is written there are values that the outputs' own types have.
void naive_forward(const Call& call);
void naive_backward(const Call& call);

}  // namespace fovea::check
