// SPDX-License-Identifier: Apache-2.0
//
// Sums that become gradients once the backward's products are done.
//
//   reduce_columns     column_sum to the gradient of a bias that is broadcast over queries
//   reduce_rows        row_sum to the gradient of a bias that is broadcast over keys (and queries)
//   reduce_sink        sink_sum to the gradient of the sink
//
// Launches of 256 threads, no shared memory to be given. Spec: `grad_bias` (reduce_columns, reduce_rows),
// `fp32_results` (added to what is there). Blocks and what of Args beyond the call's own tensors:
//   reduce_columns     planes * ceil(bias_keys / 32): grad_bias, bias_keys, column_sum, column_pitch
//   reduce_rows        planes * ceil(bias_rows / 32): grad_bias, bias_rows, row_sum, padded_rows
//   reduce_sink        heads_q: sink_sum, grad_sink, grad_sink_stride
// planes: batch1, batch2 and heads of the gradient, 1 where grad_bias has stride 0 (summed over).
// Sums are made in a fixed order: two runs give the same bits.
#pragma once

#include "cuda/device/args.h"
#include "cuda/device/ptx/sm80.cuh"
#include "cuda/device/spec.h"
#include "cuda/device/tile/tile.cuh"

namespace fovea::cuda {

// All threads of a block, up to 256, add up in a fixed order; thread 0 gets the sum. `scratch`: 8 floats of shared
// memory.
template <int kThreads = 256>
__device__ __forceinline__ float sum_of_block(float x, float* scratch) {
  x = sum_of_lanes<32>(x);
  if (threadIdx.x % 32 == 0) {
    scratch[threadIdx.x / 32] = x;
  }
  sync();
  x = threadIdx.x < kThreads / 32 ? scratch[threadIdx.x] : 0.f;
  return sum_of_lanes<8>(x);
}

__device__ __forceinline__ void store_element(void* data, i64 at, BiasTile type, float x) {
  if (type == BiasTile::kFp32) {
    static_cast<float*>(data)[at] = x;
  } else {
    static_cast<u16*>(data)[at] =
        static_cast<u16>(type == BiasTile::kBf16 ? pack<Type::kBf16>(x, 0.f) : pack<Type::kFp16>(x, 0.f));
  }
}

// A number of a bias's gradient.
template <AroundSpec S>
__device__ __forceinline__ void store_sum(const Args& a, i64 at, float sum) {
  if constexpr (S.fp32_results) {
    sum += static_cast<const float*>(a.grad_bias.data)[at];
  }
  store_element(a.grad_bias.data, at, S.grad_bias, sum);
}

// Entries that a plane of a bias gradient sums over: (b, h) by number, b outside, h inside.
struct Shared {
  i64 b1, b2, h;      // of the first entry
  i64 n1, n2, heads;  // how many in each dimension

  // The plane's dimensions are those in which the gradient has a stride.
  static __device__ Shared make(const math::Rows& rows, const math::Strides& s, i64 plane) {
    const i64 kept2 = s.batch2 ? rows.batch2 : 1;
    const i64 kept_h = s.head ? rows.heads_q : 1;
    return {plane / kept_h / kept2,     plane / kept_h % kept2,     plane % kept_h,
            s.batch1 ? 1 : rows.batch1, s.batch2 ? 1 : rows.batch2, s.head ? 1 : rows.heads_q};
  }
  static __device__ i64 planes(const math::Rows& rows, const math::Strides& s) {
    return (s.batch1 ? rows.batch1 : 1) * (s.batch2 ? rows.batch2 : 1) * (s.head ? rows.heads_q : 1);
  }
  __device__ i64 count() const { return n1 * n2 * heads; }
  __device__ i64 batch(i64 n, const math::Rows& rows) const {
    const i64 x = n / heads;
    return (b1 + x / n2) * rows.batch2 + b2 + x % n2;
  }
  __device__ i64 head(i64 n) const { return h + n % heads; }
  // Where the plane begins in the gradient.
  __device__ i64 offset(const math::Strides& s) const { return b1 * s.batch1 + b2 * s.batch2 + h * s.head; }
};

// Sums of a plane, 32 neighbouring numbers of it from `first` on, `count` in all: number i to element `to` + i *
// `stride`. A warp of eight takes every eighth entry of the plane's list, a lane one number, and of(b, head, number) is
// what an entry has of it; then the eight are added in order.
template <AroundSpec S, class Of>
__device__ __forceinline__ void reduce_plane(const Args& a, const Shared& shared, i64 first, i64 count, i64 to,
                                             i64 stride, Of of) {
  __shared__ float partial[8][32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const i64 number = first + lane;
  float sum = 0;
  for (i64 n = warp; n < shared.count(); n += 8) {
    sum += of(shared.batch(n, a.rows), shared.head(n), number);
  }
  partial[warp][lane] = sum;
  sync();
  if (warp == 0 && number < count) {
    sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum += partial[i][lane];
    }
    store_sum<S>(a, to + number * stride, sum);
  }
}

template <AroundSpec S>
__global__ void __launch_bounds__(256) reduce_columns(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  const math::Strides& s = a.grad_bias.strides;
  const i64 tiles = (a.bias_keys + 31) / 32;
  const i64 block = a.first_block + blockIdx.x;
  const Shared shared = Shared::make(a.rows, s, block / tiles);
  reduce_plane<S>(a, shared, block % tiles * 32, a.bias_keys, shared.offset(s), s.col, [&](i64 b, i64 head, i64 key) {
    return key < a.rows.sequence(b).k_len ? a.column_sum[(b * a.rows.heads_q + head) * a.column_pitch + key] : 0.f;
  });
}

// The same over row_sum; where the bias has one row for all queries, their sums are added, too.
template <AroundSpec S>
__global__ void __launch_bounds__(256) reduce_rows(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  const math::Strides& s = a.grad_bias.strides;
  const i64 tiles = s.row == 0 ? 1 : (a.bias_rows + 31) / 32;
  const i64 block = a.first_block + blockIdx.x;
  const Shared shared = Shared::make(a.rows, s, block / tiles);
  if (s.row != 0) {
    reduce_plane<S>(a, shared, block % tiles * 32, a.bias_rows, shared.offset(s), s.row, [&](i64 b, i64 head, i64 row) {
      const math::Sequence sequence = a.rows.sequence(b);
      return row < sequence.q_len ? a.row_sum[row_of_head(a, b, head, sequence) + row] : 0.f;
    });
    return;
  }
  __shared__ float scratch[8];
  float sum = 0;
  for (i64 n = threadIdx.x / 32; n < shared.count(); n += 8) {  // a warp an entry
    const i64 b = shared.batch(n, a.rows);
    const math::Sequence sequence = a.rows.sequence(b);
    const float* rows = a.row_sum + row_of_head(a, b, shared.head(n), sequence);
#pragma unroll 16
    for (int i = threadIdx.x % 32; i < int(sequence.q_len); i += 32) {
      sum += rows[i];
    }
  }
  sum = sum_of_block(sum, scratch);
  if (threadIdx.x == 0) {
    store_sum<S>(a, shared.offset(s), sum);
  }
}

template <AroundSpec S>
__global__ void __launch_bounds__(256) reduce_sink(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  __shared__ float scratch[8];
  const i64 h = a.first_block + blockIdx.x;
  const i64 count = a.rows.batch() * ((a.rows.limit_q + kRowPad - 1) / kRowPad);
  float sum = 0;
  for (i64 i = threadIdx.x; i < count; i += 256) {
    sum += a.sink_sum[h * count + i];
  }
  sum = sum_of_block(sum, scratch);
  if (threadIdx.x == 0) {
    if constexpr (S.fp32_results) {
      sum += a.grad_sink[h * a.grad_sink_stride];
    }
    a.grad_sink[h * a.grad_sink_stride] = sum;
  }
}

}  // namespace fovea::cuda
