// SPDX-License-Identifier: Apache-2.0
//
// A Spec as text: the template argument that a kernel is compiled with, and that a cached one is found by.
#pragma once

#include <string>

#include "cuda/device/spec.h"

namespace fovea::cuda {

// A Spec as the text of a template argument: "fovea::cuda::Spec{.arch = 90, .d = 128}", what is not at its default.
std::string print(const Spec& spec);

}  // namespace fovea::cuda
