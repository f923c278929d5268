// SPDX-License-Identifier: Apache-2.0
//
// What clear_rows (around/clear_rows.cuh) is called with. Read by the host and, without any header, by NVRTC.
#pragma once

#include "math/missing.h"

namespace fovea::cuda {

struct ClearRowsJob {
  void* data = nullptr;
  math::Strides strides;
  math::i64 heads = 0;
  math::i64 columns = 0;
  int size = 0;         // bytes of an element: 2 or 4
  math::u32 value = 0;  // its bits
  bool of_keys = false;
};

struct ClearRowsArgs {
  math::Rows rows;
  ClearRowsJob jobs[3];  // by blockIdx.y
  math::i64 parts = 1;   // blocks that share a gap
};

}  // namespace fovea::cuda
