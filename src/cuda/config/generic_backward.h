// SPDX-License-Identifier: Apache-2.0
//
// Tile sizes of the generic backward's kernels: pure functions of the features, the GPU's shared memory, and what is
// wanted of the kernel.
#pragma once

#include "cuda/config/kernel.h"
#include "cuda/config/operands.h"
#include "cuda/config/target.h"

namespace fovea::cuda {

// What a key-stationary kernel computes.
struct BackwardWants {
  bool dq = false;  // added to dq_sum; only together with dkv
  bool dkv = false;
  bool column_sum = false;
  bool row_sum = false;      // by atomics: sm90_backward
  bool dbias_store = false;  // dS is stored as the gradient of a bias: sm90_backward
  bool ordered = false;      // dq is added in a fixed order: sm90_backward
};

// Whether there is a kernel that makes dq together with dk and dv. Otherwise dq takes a kernel of its own.
bool backward_adds_dq(const Spec& features, const Target& target, bool column_sum);

// dk, dv (and dq by atomics): generic_backward up to head dimensions of 64, generic_wide_backward up to 512, beyond
// generic_chunked_backward, which has no dq.
Choice generic_backward(const Spec& features, const Target& target, const BackwardWants& wants);

// dq without atomics, sums of dS over keys, or both.
Choice generic_backward_dq(const Spec& features, const Target& target, bool dq, bool row_sum);

// The gradient of a bias with queries and keys, of this type.
Choice generic_bias_gradient(const Spec& features, const Target& target, BiasTile type);

// Blocks of their grids. For a bias gradient: of one plane and one chunk.
std::int64_t backward_blocks(const Call& call, const Kernel& kernel);
std::int64_t backward_dq_blocks(const Call& call, const Kernel& kernel);
std::int64_t bias_gradient_blocks(std::int64_t bias_rows, std::int64_t bias_keys, const Kernel& kernel);

// Pieces that the list of a plane is cut into, so that every multiprocessor has work.
int bias_gradient_chunks(std::int64_t blocks, std::int64_t list, const Spec& spec, const Target& target);

}  // namespace fovea::cuda
