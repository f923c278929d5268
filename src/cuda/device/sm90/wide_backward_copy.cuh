// SPDX-License-Identifier: Apache-2.0
//
// Barriers of sm90_wide_backward, the thread that copies K, V, Q, dO and row vectors for it, and the one that keeps the
// order of dQ's sums.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/cluster_backward.cuh"
#include "cuda/device/sm90/cluster_backward_sizes.h"
#include "cuda/device/tile/pipe.cuh"
#include "cuda/device/work/sm90_key_block.cuh"

namespace fovea::cuda {

struct Sm90WideBackwardBarriers : Sm90ClusterBarriers {
  __device__ __forceinline__ void init(bool has_dq) const {
    init_copies(has_dq ? 16 : 8);  // of both blocks
    barrier_init(other_full(), 1);
    barrier_init(may_add(), 1);
    barrier_init(added(), 8);
    barrier_init(grads_full(0), 1);
    barrier_init(grads_full(1), 1);
    barrier_init_fence();
  }

  __device__ __forceinline__ u32 other_full() const { return at + kBytes; }                   // the other block's K
  __device__ __forceinline__ u32 grads_full(int i) const { return at + kBytes + 8 + 8 * i; }  // the other block's dS
  __device__ __forceinline__ u32 may_add() const { return at + kBytes + 24; }  // in order: to these queries
  __device__ __forceinline__ u32 added() const { return at + kBytes + 32; }
  __device__ __forceinline__ u32 ticket() const { return at + kBytes + 40; }
  static_assert(kBytes + 44 <= kSm90ClusterBarrierBytes);
};

// Rows of K and V from `live` keys of the cluster on, where they are no keys, become 0.
template <auto S, int kThreads>
__device__ __forceinline__ void sm90_wide_clear_keys(u32 base, int live, int rank) {
  constexpr Sm90WideBackwardSizes kSizes = sm90_wide_backward_sizes(S);
  constexpr int kKeys = kSm90WideKeys;
  constexpr int kPanelD = sm90_wide_panel(S.d);
  constexpr int kPanelV = panel_columns(S.dv / 2);
  if (live < 2 * kKeys) {
    const int thread = threadIdx.x - 128;
    const int own = min(live - rank * kKeys, kKeys);
    const int other = min(live - (1 - rank) * kKeys, kKeys);
    zero_rows<kKeys, kPanelD * 2, S.d / kPanelD, kThreads>(base + kSizes.k_at, own, thread);
    zero_rows<kKeys, kPanelV * 2, S.dv / kPanelV, kThreads>(base + kSizes.v_at, own, thread);
    if constexpr (S.dq) {
      zero_rows<kKeys, kPanelD * 2, 2 * sm90_dq_columns(S.d) / kPanelD, kThreads>(base + kSizes.k_other_at, other,
                                                                                  thread);
    }
    fence_async();
    sync(kCleared, kThreads);
  }
}

template <auto S>
__device__ __forceinline__ void sm90_wide_backward_copy(const Args& a, const Sm90BackwardArgs& m,
                                                        const Sm90KeyBlock<S>& block, int rank, u32 base,
                                                        const Sm90WideBackwardBarriers& barriers) {
  constexpr Sm90WideBackwardSizes kSizes = sm90_wide_backward_sizes(S);
  constexpr int kKeys = kSm90WideKeys;
  constexpr int kPanelD = sm90_wide_panel(S.d);
  constexpr int kPanelV = panel_columns(S.dv / 2);
  const Place& place = block.place;
  const auto at = [&](const Has& has, int column, int row, int head) {
    return Coordinates{column, row, head * has.head, int(place.b2) * has.batch2, int(place.b1) * has.batch1};
  };
  if (block.steps == 0) {
    return;
  }
  const int row_k = int(place.k_begin) + block.key0;
  // Of the other block's K what this one's part of dQ takes.
  constexpr int kPart = 2 * sm90_dq_columns(S.d);
  const int first_column = rank * kPart;
  const int part = S.dq ? min(kPart, S.d - first_column) : 0;
  const auto load_keys = [&] {
    barrier_expect(barriers.k_full(), kSizes.k);
#pragma unroll 1
    for (int p = 0; p < S.d / kPanelD; ++p) {
      tensor_load(base + kSizes.k_at + p * kKeys * kPanelD * 2, m.k, barriers.k_full(),
                  at(m.has_k, p * kPanelD, row_k + rank * kKeys, block.head_k));
    }
    barrier_expect(barriers.v_full(), kSizes.v);
#pragma unroll 1
    for (int p = 0; p < S.dv / kPanelV; ++p) {
      tensor_load(base + kSizes.v_at + p * kKeys * kPanelV * 2, m.v, barriers.v_full(),
                  at(m.has_v, p * kPanelV, row_k + rank * kKeys, block.head_k));
    }
  };
  const auto load_other = [&] {
    barrier_expect(barriers.other_full(), max(part, 0) * kKeys * 2);
#pragma unroll 1
    for (int column = 0; column < part; column += kPanelD) {
      tensor_load(base + kSizes.k_other_at + column * kKeys * 2, m.k, barriers.other_full(),
                  at(m.has_k, first_column + column, row_k + (1 - rank) * kKeys, block.head_k));
    }
  };
  // By roles what is needed first is loaded first: K with Q, V with dO. Elsewhere this thread would spill.
  constexpr bool kFirst = S.roles;
  if constexpr (!kFirst) {
    load_keys();
    load_other();
  }
  Ring<S.stages> ring;
  u32 turn = 1;  // parity of the one buffer of dO
  auto step = block.walk();
#pragma unroll 1
  for (int n = 0; n < block.steps; ++n, block.next(step)) {
    if (block.begins_head(step)) {
      block.begin_head(step);
    }
    const u32 full = barriers.q_full(ring.buffer());
    barrier_wait(barriers.q_empty(ring.buffer()), ring.parity() ^ 1);
    barrier_expect(full, kSizes.q + 2 * kSizes.rows);
#pragma unroll 1
    for (int p = 0; p < S.d / kPanelD; ++p) {
      tensor_load(base + kSizes.q_at + ring.buffer() * kSizes.q + p * S.step * kPanelD * 2, m.q, full,
                  at(m.has_q, p * kPanelD, int(place.q_begin) + step.query, step.head));
    }
    const int row = block.row0 + step.head * int(a.padded_rows) + step.query;
    bulk_load(base + kSizes.lse_at + ring.buffer() * kSizes.rows, a.row_lse + row, kSizes.rows, full);
    bulk_load(base + kSizes.delta_at + ring.buffer() * kSizes.rows, a.row_delta + row, kSizes.rows, full);
    ring.next();
    if (kFirst && n == 0) {
      load_keys();
    }
    barrier_wait(barriers.grad_out_empty(), turn);
    turn ^= 1;
    barrier_expect(barriers.grad_out_full(), kSizes.grad_out);
#pragma unroll 1
    for (int p = 0; p < S.dv / kPanelV; ++p) {
      tensor_load(base + kSizes.grad_out_at + p * S.step * kPanelV * 2, m.grad_out, barriers.grad_out_full(),
                  at(m.has_grad_out, p * kPanelV, int(place.q_begin) + step.query, step.head));
    }
    if (kFirst && n == 0) {
      load_other();
    }
  }
}

// In order: waits until all clusters before this one have added to a step's queries, lets the warps of this block add,
// and counts this cluster when they have. So the warps that compute never wait for memory.
template <auto S>
__device__ __forceinline__ void sm90_wide_backward_order(const Args& a, const Sm90KeyBlock<S>& block,
                                                         const Sm90WideBackwardBarriers& barriers) {
  u32 parity = 0;
  auto step = block.walk();
#pragma unroll 1
  for (int n = 0; n < block.steps; ++n, block.next(step)) {
    if (block.begins_head(step)) {
      block.begin_head(step);
    }
    u32* const done = a.turns + 1 + (block.row0 + step.head * int(a.padded_rows) + step.query) / 64;
    const u32 before = block.blocks_before(step.query) * 2;  // blocks of a cluster
    while (load_acquire(done) < before) {                    // more only where sequences overlap by mistake
    }
    barrier_arrive(barriers.may_add());
    barrier_wait(barriers.added(), parity);
    parity ^= 1;
    add_release(done, 1);
  }
}

}  // namespace fovea::cuda
