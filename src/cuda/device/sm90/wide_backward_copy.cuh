// SPDX-License-Identifier: Apache-2.0
//
// Barriers of sm90_wide_backward, and the warpgroup that copies for it: one thread for K, V, Q, dO and row vectors, one
// for the bias, by TMA.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/cluster_backward_sizes.h"
#include "cuda/device/tile/pipe.cuh"
#include "cuda/device/work/sm90_key_block.cuh"

namespace fovea::cuda {

struct Sm90WideBackwardBarriers {
  u32 at;

  __device__ __forceinline__ void init(bool has_dq) const {
    barrier_init(k_full(), 1);
    barrier_init(v_full(), 1);
    barrier_init(other_full(), 1);
    barrier_init(grad_out_full(), 1);
    barrier_init(grad_out_empty(), 8);
    barrier_init(may_add(), 1);
    barrier_init(added(), 8);
    for (int i = 0; i < 2; ++i) {
      barrier_init(q_full(i), 1);
      barrier_init(q_empty(i), 8 * 32);
      barrier_init(bias_full(i), 1);
      barrier_init(grads_full(i), 1);
      barrier_init(grads_empty(i), has_dq ? 16 : 8);  // warps of both blocks
    }
    barrier_init_fence();
  }

  __device__ __forceinline__ u32 k_full() const { return at; }
  __device__ __forceinline__ u32 grad_out_full() const { return at + 8; }
  __device__ __forceinline__ u32 grad_out_empty() const { return at + 16; }
  __device__ __forceinline__ u32 q_full(int i) const { return at + 24 + 8 * i; }
  __device__ __forceinline__ u32 q_empty(int i) const { return at + 40 + 8 * i; }
  __device__ __forceinline__ u32 bias_full(int i) const { return at + 56 + 8 * i; }
  __device__ __forceinline__ u32 grads_full(int i) const { return at + 72 + 8 * i; }   // the other block's dS is here
  __device__ __forceinline__ u32 grads_empty(int i) const { return at + 88 + 8 * i; }  // read by both blocks
  __device__ __forceinline__ u32 may_add() const { return at + 104; }                  // in order: to these queries
  __device__ __forceinline__ u32 added() const { return at + 112; }
  __device__ __forceinline__ u32 v_full() const { return at + 120; }
  __device__ __forceinline__ u32 other_full() const { return at + 128; }  // the other block's K
  __device__ __forceinline__ u32 ticket() const { return at + 136; }
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

template <auto S>
__device__ __forceinline__ void sm90_wide_backward_copy_bias(const Sm90BackwardArgs& m, const Sm90KeyBlock<S>& block,
                                                             int rank, u32 base,
                                                             const Sm90WideBackwardBarriers& barriers) {
  constexpr Sm90WideBackwardSizes kSizes = sm90_wide_backward_sizes(S);
  Ring<2> ring;
  auto step = block.walk();
#pragma unroll 1
  for (int n = 0; n < block.steps; ++n, block.next(step)) {
    if (block.begins_head(step)) {
      block.begin_head(step);
    }
    const u32 full = barriers.bias_full(ring.buffer());
    barrier_wait(barriers.grads_empty(ring.buffer()), ring.parity() ^ 1);
    barrier_expect(full, kSizes.tile);
    tensor_load(base + kSizes.grads_at + (2 * ring.buffer() + rank) * kSizes.tile, m.bias, full,
                {block.key0 + rank * kSm90WideKeys, step.query, step.head * m.has_bias.head,
                 int(block.place.b2) * m.has_bias.batch2, int(block.place.b1) * m.has_bias.batch1});
    ring.next();
  }
}

}  // namespace fovea::cuda
