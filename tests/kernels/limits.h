// SPDX-License-Identifier: Apache-2.0
//
// What a GPU kernel's machine code may take.
#pragma once

#include <string_view>

#include "cuda/config/kernel.h"

namespace fovea::cuda::limits {

// A few registers' worth, in kernels that have many features at once. Of sm90_backward with Spec::same_step and a band
// or a bias more: its warps that copy have 24 registers. Those that compute spill nothing.
inline int spilt(const Kernel& kernel) {
  constexpr int kUsual = 128;
  constexpr int kByCopies = 256;
  const Spec& spec = kernel.spec;
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
