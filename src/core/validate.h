// SPDX-License-Identifier: Apache-2.0
//
// From a fovea_problem to a Call. Every argument is checked here, once; backends trust what comes out.
#pragma once

#include <cstddef>

#include "core/problem.h"

namespace fovea {

// Throws Error and writes nothing. With `shapes_only` the tensors' data may be NULL: for what only plans.
Call validate(const fovea_problem& problem, Direction direction, bool shapes_only);

// Of a call that runs. Also throws Error if the workspace is NULL but has bytes, or shares memory with any tensor of
// the call.
Call validate(const fovea_problem& problem, Direction direction, const void* workspace, std::size_t bytes);

}  // namespace fovea
