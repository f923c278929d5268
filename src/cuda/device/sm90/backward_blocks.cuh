// SPDX-License-Identifier: Apache-2.0
//
// Which keys are next: the thread that copies K and V of sm90_backward tells all other warps of its block.
//
//   sm90_tell_block    by that thread
//   sm90_await_block   by a warp that computes
//   sm90_take_block    by others, a warp or a thread
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_barriers.cuh"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/tile/tile.cuh"

namespace fovea::cuda {

// Tells every warp but the one that copies K and V which keys are next; `phase` counts blocks of keys up to 3, for a
// single thread up to 1. Where the keys are told ahead, by two places in turn, warps that compute know them before K
// and V arrive.
constexpr u32 kNoBlock = ~u32(0);
template <auto S>
__device__ __forceinline__ u32 sm90_number_place(u32 base, u32 phase) {
  return base + sm90_backward_sizes(S).number_at + (sm90_tells_ahead(S) ? phase * 4 : 0);
}
template <auto S>
__device__ __forceinline__ void sm90_tell_block(u32 base, const Sm90BackwardBarriers& barriers, u32 number, u32 phase) {
  store_shared(sm90_number_place<S>(base, phase), number);
  if constexpr (sm90_tells_ahead(S)) {
    barrier_arrive(barriers.number_full(phase));
  }
}
template <auto S>
__device__ __forceinline__ u32 sm90_await_block(u32 base, const Sm90BackwardBarriers& barriers, u32 phase) {
  if constexpr (sm90_tells_ahead(S)) {
    barrier_wait(barriers.number_full(phase & 1), phase >> 1);
  } else {
    barrier_wait(barriers.kv_full(), phase);
  }
  u32 number = 0;
  if (threadIdx.x % 32 == 0) {  // this lane will also release the number for its warp
    number = load_shared_word(sm90_number_place<S>(base, phase & 1));
  }
  return uniform(number);
}
// The same for a warp that needs no keys itself: it need not be waited for.
template <auto S>
__device__ __forceinline__ u32 sm90_take_block(u32 base, const Sm90BackwardBarriers& barriers, u32 phase, int lane) {
  const u32 number = sm90_await_block<S>(base, barriers, phase);
  __syncwarp();
  if (lane == 0) {
    barrier_arrive(barriers.kv_empty());
  }
  return number;
}
// The same for a single thread, which then need not be waited for: it waits for K and V, so that it is never ahead.
template <auto S>
__device__ __forceinline__ u32 sm90_take_block(u32 base, const Sm90BackwardBarriers& barriers, u32& phase) {
  barrier_wait(barriers.kv_full(), phase);
  const u32 number = load_shared_word(sm90_number_place<S>(base, phase));
  phase ^= 1;
  barrier_arrive(barriers.kv_empty());
  return number;
}

}  // namespace fovea::cuda
