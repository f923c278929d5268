// SPDX-License-Identifier: Apache-2.0
//
// The conversion of dq_sum to dq within sm90_backward (Sm90BackwardTiles::converts), while the sums are in L2.
//
// A counter gives 64 rows (of 80 queries a step: 80) at a time to any warp that comes here: idle warps of the copying
// warpgroup from the start, the others when they find no more blocks of keys. A warp waits until every block of keys
// that meets its rows has added to them (Args::turns, BehindTurns). The rows are in the order of heads, in which blocks
// of keys are begun, too. It is made for results that 16-byte stores may write, as nearly all are: the code of others
// would be as long again. No block waits for a warp that converts. All blocks of keys have been taken, by blocks that
// run, before a block ends, so that a warp waits for running blocks alone, however few of the launch run at a time.
#pragma once

#include "cuda/device/around/convert.cuh"
#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_blocks.cuh"
#include "cuda/device/work/sm90_key_block.cuh"

namespace fovea::cuda {

// By the thread that adds: counts that a block of keys has added to all of its rows; where two threads add
// (sm90_adding_warps), to every second 64. Once for all of them, since the fence waits for whatever this multiprocessor
// writes. Without the fence sums may arrive after their count. Not where two threads add in order: each counts its sums
// as they arrive.
template <Sm90BackwardSpec S>
__device__ __forceinline__ void sm90_backward_count(const Args& a, const Sm90KeyBlock<S>& block, int adder) {
  constexpr int kRows = sm90_converted_rows(S);
  constexpr int kThreads = sm90_adding_warps(S) > 1 ? 2 : 1;
  static_assert(kThreads == 1 || (sm90_backward_sizes(S).groups == 2 && !Sm90KeyBlock<S>::kRotates));
  if constexpr (S.converts) {
    bulk_wait();
    fence_device();
#pragma unroll 1
    for (int i = 0; i < block.group; ++i) {
      const i64 row = block.row0 + (block.head0 + i) * a.padded_rows + block.first;
      u32* const added = BehindTurns(a).added;
      const int count = S.last_parts ? block.steps_of_head(i).count : block.count;
#pragma unroll 4
      for (int n = (adder + i * block.count) % kThreads; n < count * (S.step / kRows); n += kThreads) {
        // With last_parts, which have no band, `first` is 0.
        const int query = S.last_parts ? block.within(block.begin + n * kRows, block.count) : n * kRows;
        add_relaxed(added + turn_of_row(row + query), 1);
      }
    }
  }
}

// The same by a thread of its own where the warps that compute add to dq_sum themselves. What they have added is
// ordered before their arrival, and that before the fence. K and V of the next block come only when it has been told.
template <Sm90BackwardSpec S>
__device__ __forceinline__ void sm90_backward_count_sums(const Args& a, const Sm90BackwardArgs& m, u32 base,
                                                         const Sm90BackwardBarriers& barriers) {
#pragma unroll 1
  for (u32 phase = 0;; phase ^= 1) {
    barrier_wait(barriers.kv_full(), phase);
    const u32 number = load_shared_word(sm90_number_place<S>(base, phase));
    if (number == kNoBlock) {
      return;
    }
    barrier_wait(barriers.sums_left(), phase);
    barrier_arrive(barriers.kv_empty());
    sm90_backward_count<S>(a, Sm90KeyBlock<S>(a, m, number), 0);
  }
}

// kBatch: pieces of 16 x 16 sums that are read at once, 8 registers each.
template <Sm90BackwardSpec S, int kBatch>
__device__ __forceinline__ void sm90_backward_convert(const Args& a, const Sm90BackwardArgs& m) {
  constexpr int kRows = sm90_converted_rows(S);
  constexpr int kPieces = kRows / 16 * (S.d / 16);
  static_assert(kPieces % kBatch == 0);
  const Thread thread;
  const BehindTurns counts(a);
  const u32 tiles = u32(a.rows.limit_q + kRows - 1) / kRows;
  const u32 tasks = u32(a.rows.batch()) * u32(a.rows.heads_q) * tiles;
#pragma unroll 1
  for (;;) {
    u32 task = 0;
    if (thread.lane == 0) {
      task = atomicAdd(counts.taken, 1u);
    }
    task = __shfl_sync(~0u, task, 0);
    if (task >= tasks) {
      return;
    }
    const u32 head_of_batch = task / tiles;
    const u32 entry = head_of_batch / u32(a.rows.heads_q);
    const u32 b = S.longest_first ? counts.order[entry] : entry;
    const u32 head = head_of_batch - entry * u32(a.rows.heads_q);
    const int first = int(task - head_of_batch * tiles) * kRows;
    const Place place = Place::make<S>(a, b);
    if (first >= place.q_len) {  // nor do the tiles up to the head's end have rows
      if (thread.lane == 0) {
        atomicMax(counts.taken, (head_of_batch + 1) * tiles);
      }
      continue;
    }
    const u32 all = Sm90KeyBlock<S>::adders(place, Sm90KeyBlock<S>::band_of(a, m, place), first);
    if (all == 0) {  // backward_prepare has cleared dq
      continue;
    }
    const i64 row = row_of_head(a, b, head, place.queries()) + first;
    while (load_relaxed(counts.added + turn_of_row(row)) < all) {
      __nanosleep(400);
    }
    fence_device();
    __syncwarp();
    const i64 to = place.query_rows(a.grad_q.strides, head);
#pragma unroll 1
    for (int n = 0; n < kPieces; n += kBatch) {
      if constexpr (sm90_turns_dq(S)) {
        convert_turned_sums<S, kBatch>(thread, a, row, true, to, first, place.q_len, n);
        continue;
      }
      convert_sums<S, kBatch>(thread, a, a.dq_sum + row * S.d, true, to, first, place.q_len, true, n);
    }
  }
}

}  // namespace fovea::cuda
