// SPDX-License-Identifier: Apache-2.0
//
// The same formulas in a backend's own roundings: inputs as they are, P and dS rounded to the type of q, sums in
// fp32 (fp64 for fp64), one rounding of every output. How far this is from the reference is what tolerance.h takes
// for reasonable.
//
// Two evaluations in the same precision differ by the order of their sums and by the last bit of exp, tanh and log.
// In large problems the errors of both are alike; in small ones the naive evaluation may be right by luck: without what
// follows one result in a hundred fails by that alone. So it is made to err, by fixed pseudo-random signs: a dot
// product by half a unit in the last place of the sum of its terms' magnitudes (one rounding), an exp by one unit of
// its own. In fp64, where it would be the reference's twin and the reference errs as well, by twice that. dp and delta
// err by one unit, against each other, as where they cancel all that is left is their rounding.
#pragma once

#include "core/problem.h"

namespace fovea::check {

// The call's outputs are views of doubles; what is written there are values that the outputs' own types have.
void naive_forward(const Call& call);
void naive_backward(const Call& call);

}  // namespace fovea::check
