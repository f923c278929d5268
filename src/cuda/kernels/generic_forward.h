// SPDX-License-Identifier: Apache-2.0
//
// The generic forwards: which of them takes a problem, with which tiles, and their launches.
#pragma once

#include "cuda/planner.h"

namespace fovea::cuda {

// The generic forward with O in registers: head_dim up to 256, fp32 up to 128.
Choice generic_forward(const Call& call, const Operands& operands, const Target& target);

// The generic forward with P in shared memory, for what the other has not the registers for: any head_dim.
Choice generic_wide_forward(const Call& call, const Operands& operands, const Target& target);

// The launch of either, and of what puts the parts of split keys together.
void add_generic_forward(Planner& planner, const Kernel& kernel);

// Of any forward whose keys are split: memory for the parts, of V's `columns` each; its arguments; and, behind it, the
// launch that puts them together.
void add_memory_of_parts(Planner& planner, int columns, std::int64_t parts);
void set_parts(Args& args, const Launcher& launcher, const Launch& launch);
void add_combine(Planner& planner, const Features& spec, std::int64_t parts);

}  // namespace fovea::cuda
