// SPDX-License-Identifier: Apache-2.0
//
// What writes a call's tensors into the workspace as the main kernels read them (packed rows, mask bits, terms along
// keys and queries, fp32 as pairs of fp16), and what clears rows of results that no sequence has.
#pragma once

#include "cuda/planner.h"

namespace fovea::cuda {

// Rows outside of all sequences, first of all launches: calls that do not ask for it leave it out.
void add_clear_rows(Planner& planner);

// Everything that Operands name as prepared.
void add_preparation(Planner& planner);

// Copies the gradient of the bias from where the bias was packed (Operands::grad_bias_pack).
void add_unpack(Planner& planner);

}  // namespace fovea::cuda
