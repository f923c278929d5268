// SPDX-License-Identifier: Apache-2.0
//
// The barriers of sm90_backward in shared memory: for each ring of buffers those for full, then those for empty.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_sizes.h"

namespace fovea::cuda {

struct Sm90BackwardBarriers {
  u32 at;

  template <auto S>
  __device__ __forceinline__ void init() const {
    constexpr bool kBias = sm90_bias_in_place(S);
    constexpr bool kOuter = sm90_outer_bytes(S) > 0;
    barrier_init(kv_full(), 1);
    for (int i = 0; sm90_tells_ahead(S) && i < 2; ++i) {
      barrier_init(number_full(i), 1);
    }
    if (sm90_counts_sums(S)) {
      barrier_init(sums_left(), S.warps);
    }
    constexpr int kStoring = sm90_storing_warps(S);
    constexpr int kAligning = sm90_aligning_warps(S);
    // Every warp that is told which keys are next.
    barrier_init(kv_empty(), S.warps + (kAligning > 0 ? kAligning : int{kBias || kOuter}) +
                                 (S.bulk ? sm90_adding_warps(S) : int{S.converts}) + kStoring +
                                 (S.makes_rows ? kSm90RowWarps : 0) + int{S.summed > 1});
    if (S.summed > 1) {
      barrier_init(sums_taken(), S.warps);
    }
    for (int i = 0; i < S.stages; ++i) {
      barrier_init(q_full(i), S.makes_rows ? kSm90RowWarps : 1);
      if (S.makes_rows) {
        barrier_init(inputs_full(i), 1);
      }
      barrier_init(q_empty(i), S.warps * 32);
    }
    for (int i = 0; i < S.planes; ++i) {
      barrier_init(bias_full(i), kAligning > 0 ? kAligning : 1);
      barrier_init(grads_full(i), S.warps);
      // Every warp that reads dS, and the thread or the warps that store it; without dQ every warp that has read the
      // bias. Where blocks sum it, also a thread of each.
      barrier_init(grads_empty(i), (!S.dq      ? S.warps
                                    : S.halves ? 8
                                               : 4 * (S.step / 64)) +
                                       kStoring + (S.summed > 1 ? S.summed : 0));
      if (S.summed > 1) {
        barrier_init(sums_full(i), 1);
      }
    }
    for (int i = 0; (kOuter || S.odd_rows) && i < S.outer; ++i) {
      barrier_init(outer_full(i), 1);
      barrier_init(outer_empty(i), kAligning > 0 ? kAligning : S.warps);
    }
    for (int i = 0; S.bulk && i < S.warps / 4; ++i) {
      barrier_init(leaving_full(i), 4);
      barrier_init(leaving_empty(i), 1);
    }
    barrier_init_fence();
  }

  // What a step reads of its queries.
  template <auto S>
  __device__ __forceinline__ void await_queries(int i, u32 parity) const {
    if constexpr (S.makes_rows) {
      barrier_wait(inputs_full(i), parity);
    }
    barrier_wait(q_full(i), parity);
  }

  __device__ __forceinline__ u32 kv_full() const { return at + kSm90BackwardBarriers.kv_full; }
  // Q, dO and O of a step; q_full then means its row vectors.
  __device__ __forceinline__ u32 inputs_full(int i) const { return at + kSm90BackwardBarriers.inputs_full + 8 * i; }
  __device__ __forceinline__ u32 q_full(int i) const { return at + kSm90BackwardBarriers.q_full + 8 * i; }
  __device__ __forceinline__ u32 q_empty(int i) const { return at + kSm90BackwardBarriers.q_empty + 8 * i; }
  __device__ __forceinline__ u32 bias_full(int i) const { return at + kSm90BackwardBarriers.bias_full + 8 * i; }
  __device__ __forceinline__ u32 grads_full(int i) const { return at + kSm90BackwardBarriers.grads_full + 8 * i; }
  __device__ __forceinline__ u32 grads_empty(int i) const { return at + kSm90BackwardBarriers.grads_empty + 8 * i; }
  __device__ __forceinline__ u32 leaving_full(int i) const { return at + kSm90BackwardBarriers.leaving_full + 8 * i; }
  __device__ __forceinline__ u32 leaving_empty(int i) const { return at + kSm90BackwardBarriers.leaving_empty + 8 * i; }
  __device__ __forceinline__ u32 kv_empty() const { return at + kSm90BackwardBarriers.kv_empty; }
  __device__ __forceinline__ u32 sums_full(u32 i) const { return at + kSm90BackwardBarriers.sums_full + 8 * i; }
  __device__ __forceinline__ u32 sums_taken() const { return at + kSm90BackwardBarriers.sums_taken; }
  __device__ __forceinline__ u32 sums_left() const { return at + kSm90BackwardBarriers.sums_left; }
  __device__ __forceinline__ u32 number_full(u32 i) const { return at + kSm90BackwardBarriers.number_full + 8 * i; }
  __device__ __forceinline__ u32 outer_full(int i) const {
    return at + kSm90BackwardBarriers.outer_full + 8 * i;
  }  // biases outside dS
  __device__ __forceinline__ u32 outer_empty(int i) const { return at + kSm90BackwardBarriers.outer_empty + 8 * i; }
};

}  // namespace fovea::cuda
