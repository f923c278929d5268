// SPDX-License-Identifier: Apache-2.0
//
// Which of the generic forwards takes a problem, and with which tiles: pure functions of the problem and the target.
#pragma once

#include "cuda/config/kernel.h"
#include "cuda/config/operands.h"
#include "cuda/config/target.h"

namespace fovea::cuda {

// The generic forward with O in registers: head_dim up to 256, fp32 up to 128.
Choice generic_forward(const Call& call, const Operands& operands, const Target& target);

// The generic forward with P in shared memory, for what the other has not the registers for: any head_dim.
Choice generic_wide_forward(const Call& call, const Operands& operands, const Target& target);

// Blocks of either's grid: tiles of queries of every head, and pieces of O's columns.
std::int64_t forward_blocks(const Call& call, const Kernel& kernel);

}  // namespace fovea::cuda
