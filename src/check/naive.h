// SPDX-License-Identifier: Apache-2.0
//
// The same formulas in a backend's own roundings: inputs as they are, P and dS rounded to the type of q, sums in
// fp32 (fp64 for fp64), one rounding of every output. tolerance.h derives the allowed error from
// its distance to the reference.
//
// Two evaluations in the same precision differ by the order of their sums and by the last bit of exp, tanh and log.
// In large problems their errors are about equal. In small problems the naive evaluation may be exact by chance, and
// then one result in a hundred would fail for that reason alone. So errors with fixed pseudo-random signs are added: to
// a dot product half a unit in the last place of the sum of its terms' magnitudes (one rounding), to an exp one unit.
// In fp64 they are twice that, because the reference has the same precision and errs as well. dp and delta get one
// unit with opposite signs: where they cancel, only their rounding errors remain.
#pragma once

#include "core/problem.h"

namespace fovea::check {

// The call's outputs are views of doubles; what is written there are values that the outputs' own types have.
void naive_forward(const Call& call);
void naive_backward(const Call& call);

}  // namespace fovea::check
