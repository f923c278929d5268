// SPDX-License-Identifier: Apache-2.0
//
// Where the rows of a call are in a larger problem (positions), and which streams of random numbers its heads have:
// kernels of Features::shifted read it, others do not. Read by the host and by NVRTC.
#pragma once

#include "cuda/device/tensor.h"
#include "math/band.h"

namespace fovea::cuda {

using math::i64;
using math::u32;
using math::u64;

struct ShardArgs {
  bool has_positions = false;
  i64 position_q = 0;
  i64 position_k = 0;
  math::Lengths positions_q;  // added to these, by batch entry
  math::Lengths positions_k;
  Tensor streams;  // int64: batch1, batch2, head; without data b * Hq + h

#if defined(__CUDACC_RTC__)
  // Of row 0 of batch entry b. On the device numbers are what they are: sums wrap.
  static __device__ __forceinline__ i64 first(i64 position, const math::Lengths& each, u32 b) {
    return each ? i64(u64(position) + u64(each[b])) : position;
  }
  __device__ __forceinline__ i64 shift(u32 b) const {
    return i64(u64(first(position_q, positions_q, b)) - u64(first(position_k, positions_k, b)));
  }
  // What is added to math::dropout_fold of a row or column: of a position that is rounded down to a multiple of 16.
  static __device__ __forceinline__ u32 folded(i64 position) { return u32(position) >> 4 << 3; }
  __device__ __forceinline__ u32 folded_query(u32 b) const { return folded(first(position_q, positions_q, b)); }
  __device__ __forceinline__ u32 folded_key(u32 b) const { return folded(first(position_k, positions_k, b)); }
#endif
};

#if defined(__CUDACC_RTC__)

// What aligns the queries of batch entry b with its keys. Far beyond every sequence it is clamped.
template <auto S>
__device__ __forceinline__ int shift_of(const auto& a, u32 b, int q_len, int k_len) {
  if constexpr (S.shifted) {
    if (a.shard.has_positions) {
      constexpr i64 kFar = i64(1) << 30;
      return int(math::min(math::max(a.shard.shift(b), -kFar), kFar));
    }
  }
  return a.top_left ? 0 : k_len - q_len;
}

// The keys that queries meet, by a shift of any size.
template <auto S>
__device__ __forceinline__ math::Band<int> shifted_band(const auto& a, u32 b, int q_len, int k_len) {
  const i64 shift = a.shard.has_positions ? a.shard.shift(b) : a.top_left ? 0 : i64(k_len) - q_len;
  return math::Band<int>::of_any_shift(q_len, k_len, a.causal, a.window_left, a.window_right, shift);
}

// The number of a head's stream of random numbers.
template <auto S>
__device__ __forceinline__ u64 dropout_stream(const auto& a, u32 b, u32 head) {
  if constexpr (S.shifted) {
    if (a.shard.streams.data != nullptr) {
      return u64(static_cast<const i64*>(a.shard.streams.data)[a.rows.offset(a.shard.streams.strides, b, head, 0)]);
    }
  }
  return u64(b) * u64(a.rows.heads_q) + head;
}

#endif

}  // namespace fovea::cuda
