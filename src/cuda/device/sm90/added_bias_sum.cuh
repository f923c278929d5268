// SPDX-License-Identifier: Apache-2.0
//
// What goes before and after the sums of a bias's gradient that sm90_backward makes in memory.
//
//   added_bias_clear   sets them to zero
//   added_bias_sum     makes the gradient of them
//
// Launches of 256 threads. Spec of the second: `grad_bias`, `fp32_results`. Blocks: a tile each, planes * tiles_q *
// tiles_k. Args beyond the call's own tensors: grad_bias, bias_rows, bias_keys, bias_sum.
#pragma once

#include "cuda/device/around/backward_reduce.cuh"
#include "cuda/device/sm90/added_bias.h"

namespace fovea::cuda {

template <AroundSpec S>
__global__ void __launch_bounds__(256) added_bias_clear(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  float* const to = a.bias_sum + (a.first_block + blockIdx.x) * AddedBias::kNumbers;
#pragma unroll
  for (int i = 0; i < AddedBias::kNumbers; i += 1024) {
    store_global(to + i + threadIdx.x * 4, uint4{});
  }
}

// A tile is turned in shared memory: it was added to by keys, and is written by rows.
template <AroundSpec S>
__global__ void __launch_bounds__(256) added_bias_sum(const __grid_constant__ Args a) {
  constexpr int kSide = AddedBias::kSide;
  __shared__ float tile[kSide][kSide + 1];
  begin_kernel<S.arch>();
  const AddedBias plan = AddedBias::make(a.bias_rows, a.bias_keys);
  const i64 block = a.first_block + blockIdx.x;
  const i64 column = block / plan.tiles_q;
  const int query0 = int(block % plan.tiles_q) * kSide;
  const int key0 = int(column % plan.tiles_k) * kSide;
#pragma unroll
  for (int n = 0; n < AddedBias::kNumbers / 1024; ++n) {
    const int place = n * 256 + int(threadIdx.x);
    const float4 x = load_summed(a.bias_sum + block * AddedBias::kNumbers + place * 4);
    const float all[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      tile[AddedBias::query(place % 128, place / 128, e)][AddedBias::key(place % 128, e)] = all[e];
    }
  }
  sync();
  const math::Strides& s = a.grad_bias.strides;
  const i64 first = Shared::make(a.rows, s, column / plan.tiles_k).offset(s);
  const int key = key0 + int(threadIdx.x) % kSide;
#pragma unroll 4
  for (int i = int(threadIdx.x) / kSide; i < kSide; i += 256 / kSide) {
    if (query0 + i < a.bias_rows && key < a.bias_keys) {
      store_sum<S>(a, first + (query0 + i) * s.row + key * s.col, tile[i][key - key0]);
    }
  }
}

}  // namespace fovea::cuda
