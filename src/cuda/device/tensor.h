// SPDX-License-Identifier: Apache-2.0
//
// A tensor as kernels are given it. Read by the host and, without any header, by NVRTC.
#pragma once

#include "math/rows.h"

namespace fovea::cuda {

// By logical coordinates (math::Rows::offset); strides in elements, 0 where it is broadcast or absent.
struct Tensor {
  void* data = nullptr;
  math::Strides strides;
};

}  // namespace fovea::cuda
