// SPDX-License-Identifier: Apache-2.0
//
// A kernel as a plan names it: where its text is, what it is compiled for, and what a launch of it takes.
#pragma once

#include <charconv>
#include <string_view>
#include <variant>

#include "cuda/device/generic/spec.h"
#include "cuda/device/sm90/spec.h"
#include "cuda/device/spec.h"

namespace fovea::cuda {

// Each kernel has one of these.
using Spec = std::variant<AroundSpec, ForwardSpec, WideForwardSpec, BackwardSpec, Sm90ForwardSpec, Sm90BackwardSpec,
                          Sm90BiasSpec, Sm90SmallSpec>;

struct Kernel {
  const char* file = "";  // of src/cuda/device
  const char* name = "";  // in fovea::cuda
  Spec spec;
  int threads = 256;
  int shared_bytes = 0;           // dynamic
  bool one_architecture = false;  // needs code for this architecture alone: "sm_90a"

  // Of the kind that it has.
  template <class T>
  const T& as() const {
    return std::get<T>(spec);
  }

  friend bool operator==(const Kernel& a, const Kernel& b) {
    return std::string_view(a.name) == b.name && a.spec == b.spec && a.shared_bytes == b.shared_bytes;
  }
};

// The compute capability that a family of kernels is for, from the name of one: 90 for "sm90_forward". Kernels whose
// name says nothing run everywhere: 80, the least.
inline int family_of(std::string_view kernel) {
  constexpr int kGeneric = 80;
  int family = kGeneric;
  if (kernel.starts_with("sm")) {
    std::from_chars(kernel.data() + 2, kernel.data() + kernel.size(), family);
  }
  return family;
}

// A candidate that was passed over, or taken, and why.
struct Choice {
  Kernel kernel;
  const char* why_not = nullptr;  // null: it can compute the call
};

}  // namespace fovea::cuda
