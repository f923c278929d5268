// SPDX-License-Identifier: Apache-2.0
//
// Barriers of sm90_split_backward, and the thread that copies K, V, Q, dO and row vectors for it.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/cluster_backward.cuh"
#include "cuda/device/sm90/cluster_backward_sizes.h"
#include "cuda/device/tile/pipe.cuh"
#include "cuda/device/work/sm90_key_block.cuh"

namespace fovea::cuda {

struct Sm90SplitBackwardBarriers : Sm90ClusterBarriers {
  __device__ __forceinline__ void init() const {
    init_copies(8);
    for (int i = 0; i < 2; ++i) {
      barrier_init(sums_full(i, 0), 1);
      barrier_init(sums_full(i, 1), 1);
      barrier_init(may_send(i), 4);
    }
    barrier_init_fence();
  }

  // Of warpgroup c: the other block's sums of S (0) or dP (1) are here; the other block has read those of this one.
  __device__ __forceinline__ u32 sums_full(int c, int which) const { return at + kBytes + 16 * c + 8 * which; }
  __device__ __forceinline__ u32 may_send(int c) const { return at + kBytes + 32 + 8 * c; }
  static_assert(kBytes + 48 <= kSm90ClusterBarrierBytes);
};

// Rows of K and V from `live` on, where they are no keys, become 0.
template <auto S, int kThreads>
__device__ __forceinline__ void sm90_split_clear_keys(u32 base, int live) {
  constexpr Sm90SplitBackwardSizes kSizes = sm90_split_backward_sizes(S);
  constexpr int kPanel = 64;
  zero_rows_behind<kSm90SplitKeys, kPanel * 2, S.d / 2 / kPanel, kPanel * 2, S.dv / 2 / kPanel, kThreads>(
      base + kSizes.k_at, base + kSizes.v_at, live);
}

template <auto S>
__device__ __forceinline__ void sm90_split_backward_copy(const Args& a, const Sm90BackwardArgs& m,
                                                         const Sm90KeyBlock<S>& block, int rank, u32 base,
                                                         const Sm90SplitBackwardBarriers& barriers) {
  constexpr Sm90SplitBackwardSizes kSizes = sm90_split_backward_sizes(S);
  constexpr int kPanel = 64;
  const Place& place = block.place;
  if (block.steps == 0) {
    return;
  }
  // This block's half of the columns of `rows` rows.
  const auto load = [&](u32 to, const TensorMap& map, const Has& has, u32 full, int columns, int row, int rows,
                        int head) {
#pragma unroll 1
    for (int p = 0; p < columns / kPanel; ++p) {
      tensor_load(
          to + p * rows * kPanel * 2, map, full,
          {rank * columns + p * kPanel, row, head * has.head, int(place.b2) * has.batch2, int(place.b1) * has.batch1});
    }
  };
  const int row_k = int(place.k_begin) + block.key0;
  barrier_expect(barriers.k_full(), kSizes.k);
  load(base + kSizes.k_at, m.k, m.has_k, barriers.k_full(), S.d / 2, row_k, kSm90SplitKeys, block.head_k);
  Ring<S.stages> ring;
  u32 turn = 1;  // parity of the one buffer of dO
  auto step = block.walk();
#pragma unroll 1
  for (int n = 0; n < block.steps; ++n, block.next(step)) {
    if (block.begins_head(step)) {
      block.begin_head(step);
    }
    const int row_q = int(place.q_begin) + step.query;
    const u32 full = barriers.q_full(ring.buffer());
    barrier_wait(barriers.q_empty(ring.buffer()), ring.parity() ^ 1);
    barrier_expect(full, kSizes.q + 2 * kSizes.rows);
    load(base + kSizes.q_at + ring.buffer() * kSizes.q, m.q, m.has_q, full, S.d / 2, row_q, S.step, step.head);
    const int row = block.row0 + step.head * int(a.padded_rows) + step.query;
    bulk_load(base + kSizes.lse_at + ring.buffer() * kSizes.rows, a.row_lse + row, kSizes.rows, full);
    bulk_load(base + kSizes.delta_at + ring.buffer() * kSizes.rows, a.row_delta + row, kSizes.rows, full);
    ring.next();
    if (n == 0) {
      barrier_expect(barriers.v_full(), kSizes.v);
      load(base + kSizes.v_at, m.v, m.has_v, barriers.v_full(), S.dv / 2, row_k, kSm90SplitKeys, block.head_k);
    }
    barrier_wait(barriers.grad_out_empty(), turn);
    turn ^= 1;
    barrier_expect(barriers.grad_out_full(), kSizes.grad_out);
    load(base + kSizes.grad_out_at, m.grad_out, m.has_grad_out, barriers.grad_out_full(), S.dv / 2, row_q, S.step,
         step.head);
  }
}

}  // namespace fovea::cuda
