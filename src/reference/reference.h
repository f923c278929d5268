// SPDX-License-Identifier: Apache-2.0
//
// The definition in fp64 and plain loops: slow and obvious. Every backend is compared with it. It computes a
// problem only if it is named ("reference"). It keeps one row of scores, one head of keys and values and the sums of
// the gradients, in memory of its own: it needs no workspace.
#pragma once

#include "core/problem.h"

namespace fovea::reference {

void forward(const Call& call);
void backward(const Call& call);

}  // namespace fovea::reference
