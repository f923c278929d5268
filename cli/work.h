// SPDX-License-Identifier: Apache-2.0
//
// What `run` and `bench` have in common: calls of the C ABI that throw, and how much work a problem is.
#pragma once

#include "check/run.h"
#include "core/problem.h"

namespace fovea::cli {

using check::Caller;
using check::flops;
using check::require;

// Seconds that a problem of so many FLOPs may take here, from a short measurement of a small problem of its kind.
double expected_seconds(const Problem& problem, Direction direction);

}  // namespace fovea::cli
