// SPDX-License-Identifier: Apache-2.0
//
// A kernel as a plan names it: where its text is, what it is compiled for, and what a launch of it takes.
#pragma once

#include <string_view>

#include "cuda/device/spec.h"

namespace fovea::cuda {

struct Kernel {
  const char* file = "";  // of src/cuda/device
  const char* name = "";  // in fovea::cuda
  Spec spec;
  int threads = 256;
  int shared_bytes = 0;           // dynamic
  bool one_architecture = false;  // needs code for this architecture alone: "sm_90a"

  friend bool operator==(const Kernel& a, const Kernel& b) {
    return std::string_view(a.name) == b.name && a.spec == b.spec && a.shared_bytes == b.shared_bytes;
  }
};

// A candidate that was passed over, or taken, and why.
struct Choice {
  Kernel kernel;
  const char* why_not = nullptr;  // null: it serves
};

}  // namespace fovea::cuda
