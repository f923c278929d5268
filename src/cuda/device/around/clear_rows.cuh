// SPDX-License-Identifier: Apache-2.0
//
// clear_rows: rows of outputs that no sequence owns get zeros, those of lse -inf. Where sequences end lies on the
// device, so a block looks whether there is anything to do: most have nothing. Neighbouring threads write neighbouring
// columns.
#pragma once

#include "cuda/device/args.h"
#include "cuda/device/around/clear_rows_args.h"
#include "cuda/device/ptx/sm80.cuh"
#include "cuda/device/spec.h"

namespace fovea::cuda {

inline constexpr int kClearRowsThreads = 256;

template <AroundSpec S>
__global__ void __launch_bounds__(kClearRowsThreads) clear_rows(const __grid_constant__ ClearRowsArgs args) {
  begin_kernel<S.arch>();
  const ClearRowsJob& job = args.jobs[blockIdx.y];
  const i64 all = math::gaps(args.rows) * args.parts;
  for (i64 n = blockIdx.x; n < all; n += gridDim.x) {
    const math::Gap gap = math::gap(args.rows, job.of_keys, n / args.parts);
    const i64 of_row = job.heads * job.columns;
    const i64 elements = (gap.end - gap.first) * of_row;
    for (i64 i = n % args.parts * kClearRowsThreads + threadIdx.x; i < elements; i += args.parts * kClearRowsThreads) {
      const i64 row = gap.first + i / of_row;
      const i64 in_row = i % of_row;
      const i64 at =
          args.rows.offset(job.strides, gap.b, in_row / job.columns, row) + in_row % job.columns * job.strides.col;
      if (job.size == 4) {
        static_cast<u32*>(job.data)[at] = job.value;
      } else {
        static_cast<unsigned short*>(job.data)[at] = static_cast<unsigned short>(job.value);
      }
    }
  }
}

}  // namespace fovea::cuda
