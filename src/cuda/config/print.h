// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "cuda/device/spec.h"

namespace fovea::cuda {

// A Spec as the text of a template argument: "fovea::cuda::Spec{.arch = 90, .d = 128}", what is not at its default.
std::string print(const Spec& spec);

}  // namespace fovea::cuda
