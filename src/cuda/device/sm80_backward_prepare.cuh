// SPDX-License-Identifier: Apache-2.0
//
// What goes before and after the backward's products.
//
//   backward_prepare   per query: delta = <do, o> - dlse, the logsumexp as the products subtract it, both padded so
//                      that tiles of rows never cross a sequence; partial sums of the sink's gradient; dq_sum set to
//                      zero
//   backward_convert   dq_sum (fp32, in the order of the accumulators) to dq
//   reduce_columns     column_sum to the gradient of a bias that is broadcast over queries
//   reduce_rows        row_sum to the gradient of a bias that is broadcast over keys (and queries)
//   reduce_sink        sink_sum to the gradient of the sink
//
// Launches of 256 threads, no shared memory to be given. Spec: `type`, `d` (convert: fp32's dq_sum has scale in it
// already), `grad_bias` (reduce_columns, reduce_rows). Blocks and what of Args beyond the call's own tensors:
//   backward_prepare   batch * heads_q * ceil(limit_q / 128): head_dim_v (of `out`, real), out, grad_out (fp32: both as
//                      the caller gave them), lse, grad_lse, row_lse, row_delta, padded_rows, lse_factor; where wanted:
//                      dq_sum with Spec::d, turns, sink and sink_sum; fp32: sizes, whose last part it writes
//   backward_convert   batch * heads_q * ceil(limit_q / 16): dq_sum, padded_rows, grad_q, out_dim, vector_stores, scale
//   reduce_columns     planes * ceil(bias_keys / 32): grad_bias, bias_keys, column_sum, column_pitch
//   reduce_rows        planes * ceil(bias_rows / 32): grad_bias, bias_rows, row_sum, padded_rows
//   reduce_sink        heads_q: sink_sum, grad_sink, grad_sink_stride
// planes: batch1, batch2 and heads of the gradient, 1 where grad_bias has stride 0 (summed over).
// Sums are made in a fixed order: two runs give the same bits.
#ifndef FOVEA_CUDA_DEVICE_SM80_BACKWARD_PREPARE_CUH
#define FOVEA_CUDA_DEVICE_SM80_BACKWARD_PREPARE_CUH

#include "args.h"
#include "math/softmax.h"
#include "ptx.cuh"
#include "spec.h"
#include "tile.cuh"

namespace fovea::cuda {

// ---- small things ----

// 256 threads add up in a fixed order; thread 0 gets the sum. `scratch`: 8 floats of shared memory.
__device__ __forceinline__ float sum_of_block(float x, float* scratch) {
  x = sum_of_lanes<32>(x);
  if (threadIdx.x % 32 == 0) {
    scratch[threadIdx.x / 32] = x;
  }
  sync();
  x = threadIdx.x < 8 ? scratch[threadIdx.x] : 0.f;
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
};

// ---- before ----

template <Spec S>
__device__ __forceinline__ float dot8(const char* x, const char* y) {
  const uint4 a = *reinterpret_cast<const uint4*>(x);
  const uint4 b = *reinterpret_cast<const uint4*>(y);
  const u32 as[4] = {a.x, a.y, a.z, a.w};
  const u32 bs[4] = {b.x, b.y, b.z, b.w};
  float sum = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    sum += low<S.type>(as[e]) * low<S.type>(bs[e]) + high<S.type>(as[e]) * high<S.type>(bs[e]);
  }
  return sum;
}

template <Spec S>
__device__ __forceinline__ float element(const char* data, i64 at) {
  if constexpr (S.type == Type::kFp32) {
    return reinterpret_cast<const float*>(data)[at];
  } else {
    return low<S.type>(reinterpret_cast<const u16*>(data)[at]);
  }
}

template <Spec S>
__global__ void __launch_bounds__(256) backward_prepare(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  constexpr int kLanes = 8;  // of a row
  constexpr int kPass = 256 / kLanes;
  constexpr int kBytes = S.type == Type::kFp32 ? 4 : 2;
  __shared__ float scratch[8];

  // Place: 128 rows of one head.
  const i64 tiles = (a.rows.limit_q + kRowPad - 1) / kRowPad;
  const i64 block = a.first_block + blockIdx.x;
  const i64 bh = block / tiles;
  const i64 b = bh / a.rows.heads_q;
  const i64 h = bh % a.rows.heads_q;
  const int first = static_cast<int>(block % tiles) * kRowPad;
  const math::Sequence sequence = a.rows.sequence(b);
  const i64 place = row_of_head(a, b, h, sequence) + first;
  const bool inside = first < sequence.q_len;

  if (inside && a.dq_sum != nullptr) {
    float* sum = a.dq_sum + place * S.d;
    for (int i = threadIdx.x * 4; i < kRowPad * S.d; i += 1024) {
      store_global(sum + i, {});
    }
  }

  if (a.turns != nullptr) {
    if (inside && threadIdx.x < kRowPad / 64) {
      a.turns[1 + place / 64 + threadIdx.x] = 0;
    }
    if (block == 0 && threadIdx.x == 0) {
      a.turns[0] = 0;
    }
  }

  const int lane = threadIdx.x % kLanes;
  const char* out =
      static_cast<const char*>(a.out.data) + a.rows.offset(a.out.strides, b, h, sequence.q_begin) * kBytes;
  const char* grad =
      static_cast<const char*>(a.grad_out.data) + a.rows.offset(a.grad_out.strides, b, h, sequence.q_begin) * kBytes;
  const float* lse = static_cast<const float*>(a.lse.data) + a.rows.offset(a.lse.strides, b, h, sequence.q_begin);
  const float* grad_lse = static_cast<const float*>(a.grad_lse.data);
  if (grad_lse != nullptr) {
    grad_lse += a.rows.offset(a.grad_lse.strides, b, h, sequence.q_begin);
  }
  const float sink = a.sink != nullptr ? a.sink[h * a.sink_stride] : -kInfinity;
  float of_sink = 0;
  float largest = 0;
  for (int i = threadIdx.x / kLanes; inside && i < kRowPad; i += kPass) {
    const i64 row = first + i;
    const bool exists = row < sequence.q_len;
    float sum = 0;
    if (exists) {
      const char* x = out + row * a.out.strides.row * kBytes;
      const char* y = grad + row * a.grad_out.strides.row * kBytes;
      const bool vectors = kBytes == 2 && a.head_dim_v % 8 == 0 && a.out.strides.col == 1 &&
                           a.grad_out.strides.col == 1 &&
                           ((reinterpret_cast<u64>(x) | reinterpret_cast<u64>(y)) & 15) == 0;
      if (vectors) {
        for (int d = lane * 8; d < a.head_dim_v; d += kLanes * 8) {
          sum += dot8<S>(x + d * 2, y + d * 2);
        }
      } else {
        for (int d = lane; d < a.head_dim_v; d += kLanes) {
          sum += element<S>(x, d * a.out.strides.col) * element<S>(y, d * a.grad_out.strides.col);
        }
      }
    }
    sum = sum_of_lanes<kLanes>(sum);
    if (lane == 0) {
      const float grad_of_lse = exists && grad_lse != nullptr ? grad_lse[row * a.grad_lse.strides.row] : 0.f;
      const float delta = math::delta(sum, grad_of_lse);
      const float reference = exists ? math::backward_reference(lse[row * a.lse.strides.row]) : kInfinity;
      a.row_lse[place + i] = reference * a.lse_factor;
      a.row_delta[place + i] = delta;
      largest = fmaxf(largest, fabsf(delta));
      const float share = math::grad_sink(sink, reference, delta);  // -p_sink delta
      of_sink += exists ? share : 0.f;
    }
  }
  if constexpr (S.type == Type::kFp32) {
    largest = max_of_lanes<32>(largest);
    if (threadIdx.x % 32 == 0) {
      atomicMax(a.sizes + size_place(a.rows, Size::kDelta, b, h), __float_as_uint(largest));
    }
  }
  if (a.sink_sum != nullptr) {
    const float sum = sum_of_block(of_sink, scratch);
    if (threadIdx.x == 0) {
      a.sink_sum[(h * a.rows.batch() + b) * tiles + block % tiles] = sum;
    }
  }
}

// ---- after ----

// dq_sum holds, for each 16 x 8 block, lane by lane the four values of its accumulator: rows g, g + 8 of lane
// 4 g + t, columns 2t, 2t + 1.
template <Spec S>
__global__ void __launch_bounds__(256) backward_convert(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  constexpr int kChunks = S.d / 8;
  const i64 tiles = (a.rows.limit_q + 15) / 16;
  const i64 block = a.first_block + blockIdx.x;
  const i64 bh = block / tiles;
  const i64 b = bh / a.rows.heads_q;
  const i64 h = bh % a.rows.heads_q;
  const int first = static_cast<int>(block % tiles) * 16;
  const math::Sequence sequence = a.rows.sequence(b);
  if (first >= sequence.q_len) {
    return;
  }
  const float* sum = a.dq_sum + (row_of_head(a, b, h, sequence) + first) * S.d;
  const i64 to = a.rows.offset(a.grad_q.strides, b, h, sequence.q_begin + first);
  const float scale = S.type == Type::kFp32 ? 1.f : a.scale;
  for (int n = threadIdx.x; n < 16 * kChunks; n += 256) {
    const int j = n % kChunks;
    const int row = n / kChunks;
    const int left = a.out_dim - j * 8;
    if (first + row >= sequence.q_len || left <= 0) {
      continue;
    }
    const float* from = sum + j * 128 + (row & 7) * 16 + (row >> 3 & 1) * 2;
    float2 v[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      v[e] = *reinterpret_cast<const float2*>(from + e * 4);
      v[e].x *= scale;
      v[e].y *= scale;
    }
    const i64 at = to + row * a.grad_q.strides.row;
    if (a.vector_stores && left >= 8) {
      if constexpr (S.type == Type::kFp32) {
        float4* p = reinterpret_cast<float4*>(static_cast<float*>(a.grad_q.data) + at + j * 8);
        p[0] = {v[0].x, v[0].y, v[1].x, v[1].y};
        p[1] = {v[2].x, v[2].y, v[3].x, v[3].y};
      } else {
        store_global(static_cast<u16*>(a.grad_q.data) + at + j * 8,
                     {pack<S.type>(v[0].x, v[0].y), pack<S.type>(v[1].x, v[1].y), pack<S.type>(v[2].x, v[2].y),
                      pack<S.type>(v[3].x, v[3].y)});
      }
      continue;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (e < left) {
        constexpr BiasTile kAs = S.type == Type::kBf16   ? BiasTile::kBf16
                                 : S.type == Type::kFp16 ? BiasTile::kFp16
                                                         : BiasTile::kFp32;
        store_element(a.grad_q.data, at + (j * 8 + e) * a.grad_q.strides.col, kAs, e & 1 ? v[e / 2].y : v[e / 2].x);
      }
    }
  }
}

// A warp of eight takes every eighth entry of a plane's list, a lane one column; then the eight are added in order.
template <Spec S>
__global__ void __launch_bounds__(256) reduce_columns(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  __shared__ float partial[8][32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const i64 tiles = (a.bias_keys + 31) / 32;
  const i64 block = a.first_block + blockIdx.x;
  const i64 plane = block / tiles;
  const i64 key = block % tiles * 32 + lane;
  const Shared shared = Shared::make(a.rows, a.grad_bias.strides, plane);
  float sum = 0;
  for (i64 n = warp; n < shared.count(); n += 8) {
    const i64 b = shared.batch(n, a.rows);
    if (key < a.rows.sequence(b).k_len) {
      sum += a.column_sum[(b * a.rows.heads_q + shared.head(n)) * a.column_pitch + key];
    }
  }
  partial[warp][lane] = sum;
  sync();
  if (warp == 0 && key < a.bias_keys) {
    sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum += partial[i][lane];
    }
    const math::Strides& s = a.grad_bias.strides;
    store_element(a.grad_bias.data, shared.b1 * s.batch1 + shared.b2 * s.batch2 + shared.h * s.head + key * s.col,
                  S.grad_bias, sum);
  }
}

// The same over row_sum; where the bias has one row for all queries, their sums are added, too.
template <Spec S>
__global__ void __launch_bounds__(256) reduce_rows(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  __shared__ float partial[8][32];
  __shared__ float scratch[8];
  const math::Strides& s = a.grad_bias.strides;
  const i64 block = a.first_block + blockIdx.x;
  if (s.row == 0) {
    const Shared shared = Shared::make(a.rows, s, block);
    float sum = 0;
    for (i64 n = 0; n < shared.count(); ++n) {
      const i64 b = shared.batch(n, a.rows);
      const math::Sequence sequence = a.rows.sequence(b);
      const float* rows = a.row_sum + row_of_head(a, b, shared.head(n), sequence);
      for (i64 i = threadIdx.x; i < sequence.q_len; i += 256) {
        sum += rows[i];
      }
    }
    sum = sum_of_block(sum, scratch);
    if (threadIdx.x == 0) {
      store_element(a.grad_bias.data, shared.b1 * s.batch1 + shared.b2 * s.batch2 + shared.h * s.head, S.grad_bias,
                    sum);
    }
    return;
  }
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const i64 tiles = (a.bias_rows + 31) / 32;
  const i64 plane = block / tiles;
  const i64 row = block % tiles * 32 + lane;
  const Shared shared = Shared::make(a.rows, s, plane);
  float sum = 0;
  for (i64 n = warp; n < shared.count(); n += 8) {
    const i64 b = shared.batch(n, a.rows);
    const math::Sequence sequence = a.rows.sequence(b);
    if (row < sequence.q_len) {
      sum += a.row_sum[row_of_head(a, b, shared.head(n), sequence) + row];
    }
  }
  partial[warp][lane] = sum;
  sync();
  if (warp == 0 && row < a.bias_rows) {
    sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum += partial[i][lane];
    }
    store_element(a.grad_bias.data, shared.b1 * s.batch1 + shared.b2 * s.batch2 + shared.h * s.head + row * s.row,
                  S.grad_bias, sum);
  }
}

template <Spec S>
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
    a.grad_sink[h * a.grad_sink_stride] = sum;
  }
}

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_SM80_BACKWARD_PREPARE_CUH
