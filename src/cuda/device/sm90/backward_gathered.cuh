// SPDX-License-Identifier: Apache-2.0
//
// dQ of a step within sm90_summed_backward where the blocks of a cluster have all keys of a head, 128 each
// (Sm90BackwardTiles::gathered): each block copies to every block that block's share of its dQ, which sums what has
// come in the order of the blocks, and stores it as it is. No sums of dQ lie in memory, and no other kernel converts
// them.
//
//     dQ of a step, 64 queries in fp32, where it leaves from | shares of it, contiguous pieces | a step later: their
//     sums
//
// A place that dQ leaves from and the place of what comes belong together: once the sums are made a block tells all
// others, and only then the next dQ and the next copy may come there.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_barriers.cuh"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/tile/tile.cuh"
#include "cuda/device/work/sm90_key_block.cuh"

namespace fovea::cuda {

// The idle warp that would add dQ to sums in memory: dQ on its way to the other blocks, and word to them that theirs is
// summed.
template <Sm90BackwardSpec S>
__device__ __forceinline__ void sm90_backward_send_gathered(const Args& a, const Sm90BackwardArgs& m, u32 base,
                                                            const Sm90BackwardBarriers& barriers, int lane) {
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  constexpr u32 kShare = kSizes.leaving / S.gathered;
  constexpr int kPlaces = kSizes.groups;
  const u32 rank = cluster_rank();
  u32 parity = 0;  // a bit for each place that dQ leaves from
  u32 taken = 0;   // parity of sums_taken
  int last = -1;   // the place that was sent last
  const auto expect = [&](int place) {
    if (lane == 0) {
      barrier_expect(barriers.sums_full(u32(place)), kSizes.sums);
    }
  };
  for (int i = 0; i < kPlaces; ++i) {
    expect(i);
  }
  const auto release_last = [&] {
    if (last < 0) {
      return;
    }
    barrier_wait(barriers.sums_taken(), taken);
    taken ^= 1;
    expect(last);
    __syncwarp();
    if (lane < S.gathered) {
      barrier_arrive_there(address_of(barriers.leaving_empty(last), u32(lane)));
    }
  };
#pragma unroll 1
  for (u32 phase = 0;; phase ^= 1) {
    const u32 number = sm90_await_block<S>(base, barriers, phase);
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(barriers.kv_empty());
    }
    if (number == kNoBlock) {
      break;
    }
    const int steps = Sm90KeyBlock<S>(a, m, number).steps;
    int place = 0;
#pragma unroll 1
    for (int n = 0; n < steps; ++n) {
      release_last();
      barrier_wait(barriers.leaving_full(place), parity >> place & 1);
      parity ^= 1u << place;
      if (lane < S.gathered) {
        const u32 to = u32(lane);
        const u32 here = base + kSizes.leaving_at + u32(place) * kSizes.leaving + to * kShare;
        const u32 there = base + kSizes.sums_at + u32(place) * kSizes.sums + rank * kShare;
        bulk_copy_there(address_of(there, to), here, kShare, address_of(barriers.sums_full(u32(place)), to));
      }
      __syncwarp();
      last = place;
      place = place + 1 == kPlaces ? 0 : place + 1;
    }
  }
  release_last();
  // The other blocks have read what this one sent, and arrive here no more.
  for (int i = 0; i < kPlaces; ++i) {
    barrier_wait(barriers.leaving_empty(i), (parity >> i & 1) ^ 1);
  }
}

// Of a thread that computes.
template <Sm90BackwardSpec S>
struct Sm90GatheredDq {
  static constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  static constexpr int kShare = kSizes.leaving / S.gathered;
  static constexpr int kFours = kShare / 16;  // of numbers, in a share
  static constexpr int kThreads = kSizes.groups * 128;

  const Sm90BackwardBarriers& barriers;
  u32 sums;  // where this thread's first four numbers lie, of the first block
  int thread;
  int rank;
  u32 parity = 0;  // a bit for each place
  int place = 0;
  // The step whose dQ was sent last, and is not summed yet.
  bool waits = false;
  int head = 0;
  int query = 0;

  __device__ __forceinline__ Sm90GatheredDq(u32 base, const Sm90BackwardBarriers& all, int number)
      : barriers(all),
        sums(base + kSizes.sums_at + u32(number) * 16),
        thread(number),
        rank(S.gathered > 1 ? int(uniform(cluster_rank())) : 0) {}

  __device__ __forceinline__ void begin_block() { place = 0; }

  __device__ __forceinline__ void sent(int of_head, int first_query) {
    waits = true;
    head = of_head;
    query = first_query;
  }

  __device__ __forceinline__ void take(const Args& a, const Sm90KeyBlock<S>& block) {
    if (!waits) {
      return;
    }
    waits = false;
    barrier_wait(barriers.sums_full(u32(place)), parity >> place & 1);
    parity ^= 1u << place;
#pragma unroll
    for (int i = 0; i < kFours; i += kThreads) {
      if (kFours % kThreads != 0 && i + thread >= kFours) {
        break;
      }
      float x[4] = {};
#pragma unroll
      for (int from = 0; from < S.gathered; ++from) {
        const uint4 v = load_shared4(sums + u32(place) * kSizes.sums + u32(from * kShare + i * 16));
        x[0] += __uint_as_float(v.x);
        x[1] += __uint_as_float(v.y);
        x[2] += __uint_as_float(v.z);
        x[3] += __uint_as_float(v.w);
      }
      // As sm90_backward_send_dq() has put them: of a warp's 16 rows 8 columns after the other, four numbers a lane.
      const int at = rank * kFours + i + thread;
      const int lane = at % 32;
      const int column = at / 32 % (S.d / 8) * 8 + lane % 4 * 2;
      const int row = query + at / (4 * S.d) * 16 + lane / 4;
      u16* const to = static_cast<u16*>(a.grad_q.data) + block.place.query_rows(a.grad_q.strides, u32(head)) + column;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (row + 8 * r < block.place.q_len) {
          *reinterpret_cast<u32*>(to + (row + 8 * r) * a.grad_q.strides.row) =
              pack<S.type>(x[2 * r] * a.scale, x[2 * r + 1] * a.scale);
        }
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(barriers.sums_taken());
    }
    place = place + 1 == kSizes.groups ? 0 : place + 1;
  }
};

}  // namespace fovea::cuda
