// SPDX-License-Identifier: Apache-2.0
//
// A bias with odd rows in sm90_backward: warps of the copying warpgroup bring it to where one with aligned rows would
// have come, in the place of dS, and dS from there to its gradient.
#pragma once

#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_blocks.cuh"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/sm90/odd_rows.cuh"
#include "cuda/device/tile/pipe.cuh"
#include "cuda/device/work/sm90_key_block.cuh"

namespace fovea::cuda {

template <class Block>
__device__ __forceinline__ int odd_row(const NumberedRows& rows, const Block& block, int head, int query) {
  return head * rows.head + int(block.place.b2) * rows.batch2 + int(block.place.b1) * rows.batch1 + query;
}

// Warp number `warp` of those that align; the first of them loads.
template <auto S>
__device__ __forceinline__ void sm90_backward_align_bias(const Args& a, const Sm90BackwardArgsOf<S>& m, u32 base,
                                                         const Sm90BackwardBarriers& barriers, int warp, int lane) {
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  const NumberedRows& rows = m.odd_rows.bias;
  Ring<S.planes> ring;
  Ring<S.outer> ring_outer;
#pragma unroll 1
  for (u32 phase = 0;; phase ^= 1) {
    const u32 number = sm90_take_block<S>(base, barriers, phase, lane);
    if (number == kNoBlock) {
      return;
    }
    const Sm90KeyBlock<S> block(a, m, number);
    const auto begin = [&](auto& step) {
      if (block.begins_head(step)) {
        block.begin_head(step);
      }
    };
    auto later = block.walk();  // of the loads, S.outer steps ahead
    auto ring_later = ring_outer;
    int loaded = 0;
    const auto load = [&] {
      if (warp == 0 && loaded < block.steps) {
        begin(later);
        if (lane == 0) {
          const u32 full = barriers.outer_full(ring_later.buffer());
          barrier_wait(barriers.outer_empty(ring_later.buffer()), ring_later.parity() ^ 1);
          barrier_expect(full, kSizes.outer);
          odd_load<S.step, kSizes.keys>(base + kSizes.outer_at + ring_later.buffer() * kSizes.outer, m.odd_rows, full,
                                        odd_row(rows, block, later.head, later.query), block.key0);
        }
        block.next(later);
        ring_later.next();
        ++loaded;
      }
    };
    for (int i = 0; i < S.outer; ++i) {
      load();
    }
    auto step = block.walk();
#pragma unroll 1
    for (int n = 0; n < block.steps; ++n, block.next(step)) {
      begin(step);
      barrier_wait(barriers.outer_full(ring_outer.buffer()), ring_outer.parity());
      barrier_wait(barriers.grads_empty(ring.buffer()), ring.parity() ^ 1);
      odd_align<S.step, kSizes.keys>(base + kSizes.grads_at + ring.buffer() * kSizes.grads,
                                     base + kSizes.outer_at + ring_outer.buffer() * kSizes.outer, rows,
                                     odd_row(rows, block, step.head, step.query), block.place.q_len - step.query, warp,
                                     sm90_aligning_warps(S), lane);
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(barriers.bias_full(ring.buffer()));
        barrier_arrive(barriers.outer_empty(ring_outer.buffer()));
      }
      load();
      ring.next();
      ring_outer.next();
    }
  }
}

// Warp number `warp` of those that store.
template <auto S>
__device__ __forceinline__ void sm90_backward_store_odd(const Args& a, const Sm90BackwardArgsOf<S>& m, u32 base,
                                                        const Sm90BackwardBarriers& barriers, int warp, int lane) {
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  const NumberedRows& rows = m.odd_rows.gradient;
  Ring<S.planes> ring;
#pragma unroll 1
  for (u32 phase = 0;; phase ^= 1) {
    const u32 number = sm90_take_block<S>(base, barriers, phase, lane);
    if (number == kNoBlock) {
      return;
    }
    const Sm90KeyBlock<S> block(a, m, number);
    auto step = block.walk();
#pragma unroll 1
    for (int n = 0; n < block.steps; ++n, block.next(step)) {
      if (block.begins_head(step)) {
        block.begin_head(step);
      }
      barrier_wait(barriers.grads_full(ring.buffer()), ring.parity());
      odd_store<S.step, kSizes.keys>(base + kSizes.grads_at + ring.buffer() * kSizes.grads, rows,
                                     odd_row(rows, block, step.head, step.query), block.key0,
                                     block.place.q_len - step.query, block.place.k_len - block.key0, warp,
                                     sm90_storing_warps(S), lane);
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(barriers.grads_empty(ring.buffer()));
      }
      ring.next();
    }
  }
}

// What the warps of the copying warpgroup behind the first do, and those of a warpgroup that stores.
template <auto S>
__device__ __forceinline__ void sm90_backward_move_odd(const Args& a, const Sm90BackwardArgs& m, u32 base,
                                                       const Sm90BackwardBarriers& barriers, int warp, int lane) {
  constexpr int kAligning = sm90_aligning_warps(S);
  const auto& odd = static_cast<const Sm90BackwardArgsOf<S>&>(m);
  if (warp > 0 && warp <= kAligning) {
    sm90_backward_align_bias<S>(a, odd, base, barriers, warp - 1, lane);
  } else if (S.dbias_store && warp > kAligning) {
    sm90_backward_store_odd<S>(a, odd, base, barriers, sm90_stores_apart(S) ? warp % 4 : warp - 1 - kAligning, lane);
  }
}

}  // namespace fovea::cuda
