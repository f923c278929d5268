// SPDX-License-Identifier: Apache-2.0
//
// The name of how q, k and v lie in memory.
#pragma once

#include "core/problem.h"

namespace fovea {

// Only a name for what the strides say: nothing is decided by it.
Layout layout_of(const fovea_problem& given, const Problem& problem);

}  // namespace fovea
