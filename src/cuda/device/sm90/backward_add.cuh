// SPDX-License-Identifier: Apache-2.0
//
// The threads of sm90_backward that add dQ to its sums in memory, or store it as the first.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_blocks.cuh"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/work/sm90_key_block.cuh"

namespace fovea::cuda {

// Adds dQ to dq_sum, 64 or 80 queries at a time (`halves`: half of the columns, then the other half), as the warpgroups
// hand them over. The number at turn_of() says how far these queries are.
//
// ordered: it counts the blocks of keys that have added. A block waits until all blocks that come before it and meet
// the queries have added their sums, and counts itself when its own sums have arrived.
//
// stores_first: dq_sum is not cleared before. 0: nothing is there; 1: a block stores; 2: its sums have arrived. The
// block that changes 0 to 1 stores, and a block that finds 1 waits for 2, then adds. This cannot deadlock: a thread
// that has changed a 0 to 1 stores what is there already, and waits for nobody before it changes 1 to 2.
//
// Sums of another block are added to by the asynchronous proxy. Its stores happen before ours where we see its
// release with an acquire, and a proxy fence comes between the acquire and our copy.
//
// adder: this thread's number among sm90_adding_warps(). In order each of them waits only for blocks with earlier
// tickets, which run, and never for the other one, so that this cannot deadlock either.
template <auto S>
__device__ __forceinline__ void sm90_backward_add(const Args& a, const Sm90BackwardArgs& m, u32 base,
                                                  const Sm90BackwardBarriers& barriers, int adder) {
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  constexpr int kRows = sm90_leaving_rows(S);
  constexpr int kParts = S.step / kRows;
  constexpr int kHalves = S.halves ? 2 : 1;  // of the columns, one after the other in dq_sum
  // A place is free once it has been read. With `halves`, and with 128 queries a step, it is kept until the next one is
  // on its way, too: the warpgroups are faster where one is behind the other (docs/design/tried.md).
  constexpr bool kKeeps = S.halves || kParts > 1;
  constexpr bool kShared = sm90_adding_warps(S) > 1;
  constexpr bool kFirsts = S.stores_first && !S.ordered;
  static_assert(!kShared || kHalves == 1);
  u32 parity = 0;  // a bit for each place that sums leave from
  u32 phase = 0;
#pragma unroll 1
  for (u32 number = sm90_take_block<S>(base, barriers, phase); number != kNoBlock;
       number = sm90_take_block<S>(base, barriers, phase)) {
    const Sm90KeyBlock<S> block(a, m, number);
    int place = 0;
    int place_before = -1;
    const auto turn_of = [&](int i, int query) {
      return a.turns + 1 + turn_of_row(block.row0 + (block.head0 + i) * int(a.padded_rows) + query);
    };
    // Whether rows have been stored is looked up while this thread would wait anyway, a step ahead, or with two threads
    // before their sums are there: most have.
    u32 ahead = 2;
    const auto look_up = [&](const u32* turn) {
      ahead = load_acquire(turn);
      fence_async_all();
    };
    if (kFirsts && !kShared && block.steps > 0) {
      look_up(turn_of(0, block.steps_of_head(0).query));
    }
#pragma unroll 1
    for (int i = 0; i < block.group; ++i) {
      const auto of_head = block.steps_of_head(i);
      int query = of_head.query;
#pragma unroll 1
      for (int n = of_head.count * kParts - 1; n >= 0; --n, query = block.after(query, kRows, block.count)) {
        const int row = block.row0 + (block.head0 + i) * int(a.padded_rows) + query;
        u32* const turn = turn_of(i, query);
        if (kShared && (place > 0) != (adder > 0)) {
          place = place + 1 == kSizes.groups ? 0 : place + 1;
          continue;
        }
        if constexpr (kFirsts && kShared) {
          look_up(turn);
        }
        u32 before = ahead;
#pragma unroll 1
        for (int half = 0; half < kHalves; ++half) {
          barrier_wait(barriers.leaving_full(place), parity >> place & 1);
          parity ^= 1u << place;
          if constexpr (kFirsts) {
            if (half == 0 && before != 2) {
              before = atomicCAS(turn, 0u, 1u);
              while (before != 0 && load_acquire(turn) != 2) {
              }
              fence_async_all();
            }
          }
          if constexpr (S.ordered) {
            if (half == 0) {
              before = block.blocks_before(query);
              while (load_acquire(turn) < before) {  // more only where sequences overlap by mistake
              }
              fence_async_all();
            }
          }
          const bool last = half + 1 == kHalves;
          const u32 from = base + kSizes.leaving_at + place * kSizes.leaving;
          float* to = a.dq_sum + i64(row) * S.d + half * 32 * S.d;
          int bytes = kSizes.leaving;
          if constexpr (sm90_turns_dq(S)) {
            to = a.dq_sum + turned_sums(a, half, row);
            bytes = min(S.step, padded(block.place.q_len) - query) * kTurnedColumns * 4;
          }
          const bool store = S.stores_first && before == 0;
          if (store) {
            bulk_store(to, from, bytes);
          } else {
            bulk_add(to, from, bytes);
          }
          bulk_commit();
          if constexpr (kKeeps) {
            bulk_wait_read<1>();
            if (place_before >= 0) {
              barrier_arrive(barriers.leaving_empty(place_before));
            }
            place_before = place;
          } else {
            bulk_wait_read();
            barrier_arrive(barriers.leaving_empty(place));
          }
          if (last && (S.ordered || store)) {
            bulk_wait();
            if constexpr (kShared && S.ordered && S.converts) {  // see sm90_backward_count()
              fence_device();
              add_relaxed(BehindTurns(a).added + turn_of_row(row), 1);
              add_relaxed(turn, 1);
            } else {
              add_release(turn, 1);
            }
          }
          if (kFirsts && !kShared && last && (n > 0 || i + 1 < block.group)) {
            look_up(n > 0 ? turn_of(i, block.after(query, kRows, block.count)) : turn_of(i + 1, block.begin));
          }
          place = place + 1 == kSizes.groups ? 0 : place + 1;
        }
      }
    }
    if (kKeeps && place_before >= 0) {
      bulk_wait_read();
      barrier_arrive(barriers.leaving_empty(place_before));
    }
    if constexpr (!kShared || !S.ordered) {
      sm90_backward_count<S>(a, block, adder);
    }
  }
  bulk_wait();
}

}  // namespace fovea::cuda
