// SPDX-License-Identifier: Apache-2.0
//
// What the planner knows of a GPU: numbers alone, so that plans can be made, and tested, without one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cuda/jit/driver.h"

namespace fovea::cuda {

struct Target {
  int capability = 0;  // 90 is 9.0
  int shared_per_block = 0;
  int shared_per_multiprocessor = 0;
  int multiprocessors = 0;

  // "sm_90"; code for one architecture alone, "sm_90a", where a kernel needs that.
  std::string architecture(bool specific = false) const;

  // Whether a multiprocessor has room for so many blocks of so many bytes each.
  bool holds(int shared_bytes, int blocks) const {
    constexpr int kReserved = 1024;  // what the system takes a block
    return shared_bytes <= shared_per_block && (shared_bytes + kReserved) * blocks <= shared_per_multiprocessor;
  }

  friend bool operator==(const Target&, const Target&) = default;
};

Target target_of(const jit::DeviceInfo& device);

// For compiling where there is no such GPU: "sm_80", "sm_90", "sm_90a", .... Throws Error(FOVEA_INVALID_ARGUMENT) with
// what is accepted.
Target target_of(std::string_view architecture);

// The same for its products that differ in their multiprocessors, the largest first: plans depend on how many there
// are (keys in parts do, which kernel takes short sequences, and whether several blocks of a backward share keys).
std::vector<Target> targets_of(std::string_view architecture);

}  // namespace fovea::cuda
