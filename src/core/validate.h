// SPDX-License-Identifier: Apache-2.0
//
// What a call's memory must obey beyond what validate() (core/problem.h) checks.
#pragma once

#include <cstddef>

#include "core/problem.h"

namespace fovea {

// For a problem that validate() has passed: throws Error if the workspace is NULL but has bytes, or shares memory
// with any tensor of the call.
void check_workspace(const fovea_problem& problem, Direction direction, const void* workspace, std::size_t bytes);

}  // namespace fovea
