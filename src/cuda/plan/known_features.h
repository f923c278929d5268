// SPDX-License-Identifier: Apache-2.0
//
// Which features of a problem the text of each kernel reads. A feature that is added to Features (device/spec.h) and
// not to a list here is refused by every kernel whose list it is not in, so that none ignores it.
#pragma once

#include "cuda/config/kernel.h"

namespace fovea::cuda {

// The first feature that a kernel is compiled for and does not know; null: it knows all of them, or forms no scores.
const char* unknown_feature(const Kernel& kernel);

}  // namespace fovea::cuda
