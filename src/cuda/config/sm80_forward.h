// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/config/kernel.h"
#include "cuda/config/operands.h"
#include "cuda/config/target.h"

namespace fovea::cuda {

// The generic forward with O in registers: head_dim up to 256, fp32 up to 128.
Choice sm80_forward(const Call& call, const Operands& operands, const Target& target);

// Blocks of its grid: tiles of queries of every head.
std::int64_t forward_blocks(const Call& call, const Spec& spec);

}  // namespace fovea::cuda
