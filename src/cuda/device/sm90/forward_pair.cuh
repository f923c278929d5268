// SPDX-License-Identifier: Apache-2.0
//
// Heads wider than 256 (Sm90ForwardTiles::pairs): a tile of 128 queries belongs to a cluster of two blocks. Each makes
// the scores of half of a step's keys, with all of Q, and the sums of half of the columns, with all keys' weights:
//
//     block 0    S of the first keys      largest of rows ->      P ->      O of the first columns
//     block 1    S of the last keys    <- largest of rows      <- P         O of the last columns
//
// So no score is made twice, and O fits in registers. A warp tells the warp of the same number in the other block,
// which has the same rows, lane by lane: by st.async, which counts at a barrier of that warp.
//
// Nothing else says that what was told has been read. Numbers of rows have two places: whoever hears the second has
// been told by a warp that has read the first. Weights have one, since numbers are told between any two of them.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/forward_tile.cuh"
#include "cuda/device/tile/pipe.cuh"

namespace fovea::cuda {

template <auto S>
struct Sm90Pair {
  static constexpr int kWords = S.step / 4;  // of a thread's weights
  static constexpr int kWeights = 2 * kSm90PairRows;
  static constexpr int kWeightBarrier = 16;

  int rank;  // of this block; 0 where there is one
  int lane;
  u32 here, here_barriers;    // of this warp
  u32 there, there_barriers;  // of the other block's
  Ring<2> rows{};
  Ring<1> weights{};

  // warp: of those that compute.
  __device__ __forceinline__ Sm90Pair(u32 base, const Sm90Barriers& all, int own_rank, int warp, int own_lane)
      : rank(own_rank), lane(own_lane) {
    if constexpr (S.pairs) {
      here = base + sm90_forward_sizes(S).pair_at + warp * sm90_pair_bytes(S);
      here_barriers = all.first + all.kPair + warp * (kSm90PairBarriers * 8);
      there = address_of(here, rank ^ 1);
      there_barriers = address_of(here_barriers, rank ^ 1);
    }
  }

  // A number of each of this thread's two rows, the same in all lanes that share them.
  __device__ __forceinline__ void tell(const float (&x)[2]) const {
    if (lane % 4 == 0) {
      const float all[4] = {x[0], x[1], 0, 0};
      store_there_counted(there + rows.buffer() * kSm90PairRows + lane * 4, all, there_barriers + 8 * rows.buffer());
    }
  }
  __device__ __forceinline__ float2 hear() {
    const u32 barrier = here_barriers + 8 * rows.buffer();
    if (lane == 0) {
      barrier_expect(barrier, kSm90PairRows);
    }
    barrier_wait(barrier, rows.parity());
    const float2 told = load_shared2(here + rows.buffer() * kSm90PairRows + lane / 4 * 16);
    __syncwarp();  // all have read
    rows.next();
    return told;
  }
  // The numbers of both blocks added up.
  __device__ __forceinline__ void add(float (&x)[2]) {
    tell(x);
    const float2 told = hear();
    x[0] += told.x;
    x[1] += told.y;
  }
  // Those of the first block.
  __device__ __forceinline__ void take_first(float (&x)[2]) {
    tell(x);
    const float2 told = hear();
    x[0] = rank == 0 ? x[0] : told.x;
    x[1] = rank == 0 ? x[1] : told.y;
  }

  // P, as the A operand of the next product.
  __device__ __forceinline__ void tell_weights(const u32 (&p)[kWords]) const {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const float four[4] = {__uint_as_float(p[i]), __uint_as_float(p[i + 1]), __uint_as_float(p[i + 2]),
                             __uint_as_float(p[i + 3])};
      store_there_counted(there + kWeights + i * 128 + lane * 16, four, there_barriers + kWeightBarrier);
    }
  }
  __device__ __forceinline__ void hear_weights(u32 (&p)[kWords]) {
    const u32 barrier = here_barriers + kWeightBarrier;
    if (lane == 0) {
      barrier_expect(barrier, sm90_pair_weights(S));
    }
    barrier_wait(barrier, weights.parity());
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 four = load_shared4(here + kWeights + i * 128 + lane * 16);
      p[i] = four.x;
      p[i + 1] = four.y;
      p[i + 2] = four.z;
      p[i + 3] = four.w;
    }
    __syncwarp();
    weights.next();
  }
};

}  // namespace fovea::cuda
