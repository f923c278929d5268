// SPDX-License-Identifier: Apache-2.0
//
// The definition in fp64 and plain loops: slow, obvious, and what every backend is judged by. It serves only who
// asks for it by name ("reference"). It keeps one row of scores, one head of keys and values and the sums of the
// gradients, in memory of its own: it needs no workspace.
#pragma once

#include "core/problem.h"

namespace fovea::reference {

void forward(const Call& call);
void backward(const Call& call);

}  // namespace fovea::reference
