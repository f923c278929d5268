// SPDX-License-Identifier: Apache-2.0
//
// A Spec as text: the template argument that a kernel is compiled with, and that a cached one is found by.
#pragma once

#include <string>

#include "cuda/config/kernel.h"

namespace fovea::cuda {

// "fovea::cuda::ForwardSpec{{.arch = 90, .d = 128}, {.step = 32}}": what is not at its default.
std::string print(const Spec& spec);

}  // namespace fovea::cuda
