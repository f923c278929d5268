// SPDX-License-Identifier: Apache-2.0
//
// What a GPU kernel's machine code may take.
#pragma once

#include <string_view>

#include "cuda/config/kernel.h"

namespace fovea::cuda::limits {

// Bytes, stores and loads together: a few registers' worth, in kernels that have many features at once. More have
//   sm90_backward with Spec::same_step and a band or a bias: its warps that copy have 24 registers, and those that
//   compute spill nothing;
//   three kinds of kernel that the benchmark's rows, not the case table, take. Theirs are known and not yet mended.
inline int spilt(const Kernel& kernel) {
  constexpr int kUsual = 128;
  constexpr int kByCopies = 256;
  constexpr int kTwoBiases = 384;          // MSA rows: a bias and a term of keys
  constexpr int kHalvesWithDropout = 272;  // D=192/128 and 160
  constexpr int kSummed = 288;             // the gradient of an fp32 bias, or with dropout at D=128
  const Spec& spec = kernel.spec;
  const std::string_view name = kernel.name;
  const bool drops = spec.dropout != DropoutRule::kNone;
  if (name == "sm90_backward" && spec.bias != BiasTile::kNone && spec.key_term && spec.warps == 12 && spec.tiles == 2) {
    return kTwoBiases;
  }
  if (name == "sm90_backward" && spec.halves && !spec.same_step && drops) {
    return kHalvesWithDropout;
  }
  if (name == "sm90_bias_gradient" &&
      ((drops && spec.d == 128 && !spec.banded && !spec.ragged) || spec.bias == BiasTile::kFp32)) {
    return kSummed;
  }
  return spec.same_step && (spec.banded || spec.bias != BiasTile::kNone) ? kByCopies : kUsual;
}

inline constexpr int kLocal = 160;  // bytes of local memory a thread

// Registers of a thread, with as many blocks on a multiprocessor as the kernel counts on. Hopper's kernels but the
// forward share a multiprocessor's registers among the warpgroups of one block.
inline int registers(const Kernel& kernel) {
  constexpr int kOfMultiprocessor = 65536;
  const std::string_view name = kernel.name;
  const bool alone = name.starts_with("sm90_") && name != "sm90_forward";
  return kOfMultiprocessor / (kernel.threads * (alone ? 1 : kernel.spec.ctas));
}

}  // namespace fovea::cuda::limits
