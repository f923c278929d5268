// SPDX-License-Identifier: Apache-2.0
//
// Where a thread is in its block, and where a batch entry's rows are in the tensors.
#pragma once

#include "cuda/device/ptx/sm80.cuh"
#include "math/band.h"

namespace fovea::cuda {

// A number that is known when the kernel is compiled, as an argument.
template <int kValue>
struct Constant {
  constexpr operator int() const { return kValue; }
};

// A type that is chosen when the kernel is compiled.
template <bool kFirst, class A, class B>
struct Select {
  using Type = A;
};
template <class A, class B>
struct Select<false, A, B> {
  using Type = B;
};

// What O and dV are multiplied by where they leave, and not P before: the factor may be beyond what fp16 holds.
template <auto S>
__device__ __forceinline__ float keep_scale(const Args& a) {
  return S.dropout != DropoutRule::kNone ? a.keep_scale : 1.f;
}

// A thread's place in its block. The warp is known to be uniform to the compiler.
struct Thread {
  int index, lane, warp, g, t;
  __device__ __forceinline__ Thread()
      : index(threadIdx.x),
        lane(threadIdx.x & 31),
        warp(__shfl_sync(~0u, int(threadIdx.x >> 5), 0)),
        g(lane >> 2),
        t(lane & 3) {}
};

// A batch entry and its sequence; offsets of rows that begin at row 0 of the sequence. 32-bit division only.
struct Place {
  u32 b = 0, b1 = 0, b2 = 0;
  int q_len = 0, k_len = 0;
  i64 q_begin = 0, k_begin = 0;

  template <auto S>
  static __device__ __forceinline__ Place make(const Args& a, u32 b) {
    const u32 batch2 = u32(a.rows.batch2);
    return make<S>(a, b / batch2, b % batch2);
  }
  template <auto S>
  static __device__ __forceinline__ Place make(const Args& a, u32 b1, u32 b2) {
    const u32 b = b1 * u32(a.rows.batch2) + b2;
    Place place{b, b1, b2, int(a.rows.rows_q), int(a.rows.rows_k), 0, 0};
    if constexpr (S.ragged) {
      const math::Sequence sequence = a.rows.sequence(b);
      place.q_len = int(sequence.q_len);
      place.k_len = int(sequence.k_len);
      place.q_begin = sequence.q_begin;
      place.k_begin = sequence.k_begin;
    }
    return place;
  }
  // Of tensors without rows of their own in packed memory: biases, masks, terms.
  __device__ __forceinline__ i64 plane(const math::Strides& s, u32 head) const {
    return i64(b1) * s.batch1 + i64(b2) * s.batch2 + i64(head) * s.head;
  }
  __device__ __forceinline__ i64 query_rows(const math::Strides& s, u32 head) const {
    return plane(s, head) + q_begin * s.row;
  }
  __device__ __forceinline__ i64 key_rows(const math::Strides& s, u32 head) const {
    return plane(s, head) + k_begin * s.row;
  }
  template <auto S>
  __device__ __forceinline__ math::Band<int> band(const Args& a) const {
    if constexpr (S.shifted) {
      return shifted_band<S>(a, b, q_len, k_len);
    }
    return math::Band<int>::make(q_len, k_len, a.causal, a.window_left, a.window_right, a.top_left);
  }
  __device__ __forceinline__ math::Sequence queries() const { return {q_begin, q_len, 0, 0}; }
  // What aligns queries with keys: query i stands at key i + shift.
  template <auto S>
  __device__ __forceinline__ int shift(const Args& a) const {
    return shift_of<S>(a, b, q_len, k_len);
  }
};

}  // namespace fovea::cuda
