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
//
// On a GPU, a score of 16-bit numbers is a sum of tensor cores, which cut off what is beyond the sum's last place at
// each 16 terms, towards zero: it is smaller by half a unit of the sum for each 16 terms. A softcap's tanh errs by one
// unit.
#pragma once

#include "check/tolerance.h"
#include "core/problem.h"

namespace fovea::check {

// The call's outputs are views of doubles; what is written there are values that the outputs' own types have.
// `draw` chooses the signs of the errors.
void naive_forward(const Call& call, Arithmetic arithmetic = Arithmetic::kCpu, int draw = 0);
void naive_backward(const Call& call, Arithmetic arithmetic = Arithmetic::kCpu, int draw = 0);

}  // namespace fovea::check
