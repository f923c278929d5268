// SPDX-License-Identifier: Apache-2.0
//
// small_bias_sum: the gradient of a bias from the sums that the warpgroups of sm90_small_backward leave.
// Blocks: planes * kSmallSumBlocks.
#pragma once

#include "cuda/device/around/backward_reduce.cuh"
#include "cuda/device/sm90/small_backward_sizes.h"

namespace fovea::cuda {

// Adds a plane's sums, bias_chunks of them, in a fixed order: a warp of eight takes every eighth, a lane four numbers.
template <AroundSpec S>
__global__ void __launch_bounds__(kSmallSumThreads) small_bias_sum(const __grid_constant__ Args a) {
  __shared__ float4 partial[8][32];
  begin_kernel<S.arch>();
  const int lane = int(threadIdx.x) % 32;
  const int warp = int(threadIdx.x) / 32;
  const u32 block = u32(a.first_block + blockIdx.x);
  const int plane = int(block / kSmallSumBlocks);
  const int place = int(block % kSmallSumBlocks) * 32 + lane;  // of four numbers, in register order
  constexpr i64 kSize = kSmallRows * kSmallRows;
  const float* const from = a.bias_sum + plane * a.bias_chunks * kSize + place * 4;
  float4 sum{};
#pragma unroll 4
  for (int n = warp; n < a.bias_chunks; n += 8) {
    const float4 x = *reinterpret_cast<const float4*>(from + n * kSize);
    sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
  }
  partial[warp][lane] = sum;
  sync();
  if (warp != 0) {
    return;
  }
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    const float4 x = partial[i][lane];
    sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
  }
  const int thread = place % 128;  // whose registers they were
  const int key = thread / 32 * 16 + thread % 32 / 4;
  const int query = place / 128 * 8 + thread % 4 * 2;
  const math::Strides& s = a.grad_bias.strides;
  const Shared shared = Shared::make(a.rows, s, plane);
  const i64 first = shared.offset(s);
  const float all[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int i = query + (e & 1);
    const int j = key + (e >> 1) * 8;
    if (i < a.bias_rows && j < a.bias_keys) {
      store_sum<S>(a, first + i * s.row + j * s.col, all[e]);
    }
  }
}

}  // namespace fovea::cuda
