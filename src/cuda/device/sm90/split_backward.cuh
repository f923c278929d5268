// SPDX-License-Identifier: Apache-2.0
//
// sm90_split_backward: dk, dv and dq of a call on Hopper, for numbers of 16 bits and head dimensions over 256, both
// that of Q and K and that of V.
//
// Two blocks form a cluster that owns 64 keys of one key head. Each has half of the columns of K, V, Q, dO, and of all
// gradients: of S = Q K^T and dP = dO V^T it has the sum over its own columns. Each sends its sums to the other, so
// both have the same S and dP (a + b = b + a), and make the same P and dS. No product is computed twice, and nothing of
// dK, dV and dQ has to be exchanged.
//
// Warpgroup 0 copies: K and V once, Q and row vectors into a ring of two, dO into one buffer, a bias into the place of
// dS. Warpgroups 1 and 2 make P and dS of half of the queries each, and dV, dK and dQ of half of the block's columns:
//
//     S^T = K Q^T, dP^T = V dO^T of 32 queries | their sums to the other block, and those of the other block |
//     P, dS to shared memory, both meet | dV += P^T dO, dK += dS^T Q, dQ = dS K of a quarter of all columns | dQ leaves
//
// Sums travel by st.async into a place of their own for S and for dP of each warpgroup. A block sends those of a step
// when the other one has read those of the step before.
//
// Blocks: 2 * batch * heads_k * ceil(limit_k / 64). backward_prepare comes before, backward_convert after.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/score/sm90_backward_scores.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/cluster_backward_sizes.h"
#include "cuda/device/sm90/split_backward_copy.cuh"
#include "cuda/device/tile/accumulator.cuh"
#include "cuda/device/tile/shared.cuh"
#include "cuda/device/work/sm90_key_block.cuh"
#include "math/band.h"

namespace fovea::cuda {

// Sums over half of the columns for those over all: four at a time, of neighbouring threads side by side.
template <int kCount>
__device__ __forceinline__ void sm90_send_sums(const float (&x)[kCount], u32 there, u32 barrier, int thread) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    store_there_counted(there + (j * 128 + thread) * 16, *reinterpret_cast<const float(*)[4]>(x + 4 * j), barrier);
  }
}
template <int kCount>
__device__ __forceinline__ void sm90_add_sums(float (&x)[kCount], u32 here, int thread) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const uint4 other = load_shared4(here + (j * 128 + thread) * 16);
    x[4 * j] += __uint_as_float(other.x);
    x[4 * j + 1] += __uint_as_float(other.y);
    x[4 * j + 2] += __uint_as_float(other.z);
    x[4 * j + 3] += __uint_as_float(other.w);
  }
}

template <Sm90BackwardSpec S>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(sm90_split_backward_sizes(S).threads, 1)
    sm90_split_backward(const __grid_constant__ Args a, const __grid_constant__ Sm90BackwardArgs m) {
  // ---- sizes: those of a block ----
  constexpr Sm90SplitBackwardSizes kSizes = sm90_split_backward_sizes(S);
  constexpr Type kType = S.type;
  constexpr int D = S.d / 2;
  constexpr int V = S.dv / 2;
  constexpr int M = S.step;
  constexpr int kKeys = kSm90SplitKeys;
  constexpr int kPart = M / 2;  // queries of a warpgroup's scores
  constexpr int kPanel = 64;
  constexpr int kRow = kPanel * 2;  // bytes
  constexpr int kThreads = 256;
  constexpr bool kBias = S.bias != BiasTile::kNone;
  static_assert(kType != Type::kFp32 && S.dropout != DropoutRule::kTorchMemEfficient && S.dkv && !S.ordered);
  static_assert(S.warps == 8 && S.tiles == 1 && M == 64 && S.stages == 2 && sm90_backward_sizes(S).keys == kKeys);
  static_assert(D % 128 == 0 && V % 128 == 0 && D <= 256 && V <= 256);
  static_assert(S.bias != BiasTile::kFp32 && S.bias2 == BiasTile::kNone && !S.query_term);
  static_assert(!S.column_sum && !S.row_sum && !S.dbias_store && !S.roles && !S.key_parts);

  // ---- which keys ----
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 base = shared_address(memory);
  begin_kernel<S.arch>();
  const int rank = int(uniform(cluster_rank()));
  const Sm90SplitBackwardBarriers barriers{base + kSizes.barriers_at};
  const Sm90KeyBlock<S> block(a, m, blockIdx.x / 2);
  if (block.outside()) {
    return;
  }
  const int key0 = block.key0;
  const int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0);
  if (threadIdx.x == 0) {
    barriers.init();
  }
  cluster_sync();

  if (warpgroup == 0) {
    fewer_registers<24>();
    if (threadIdx.x == 0) {
      sm90_split_backward_copy<S>(a, m, block, rank, base, barriers);
    }
    if (kBias && threadIdx.x == 32) {
      sm90_cluster_copy_bias<S, kSizes.tile, kSizes.tile>(m, block, key0, base + kSizes.grads_at, barriers);
    }
    return;
  }

  // ---- the warpgroups that compute ----
  more_registers<240>();
  const int c = warpgroup - 1;
  const int thread = threadIdx.x % 128;
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const bool leader = lane == 0;
  const u32 other = address_of(base, u32(1 - rank)) - base;  // from a place here to that of the other block
  Ring<2> ring_q;
  Ring<2> ring_grads;  // of P and dS
  u32 turn = 0;        // parity of what has one buffer

  // Rows: the inner dimension runs along them; inside: it is the rows, and of the columns this warpgroup's half.
  const SharedTile<M, D, kPanel> q_tile{base + kSizes.q_at};
  const SharedTile<M, V, kPanel> grad_out_tile{base + kSizes.grad_out_at};
  const SharedTile<kKeys, D, kPanel> k_tile{base + kSizes.k_at};
  const int first_query = c * kPart;  // of a step
  const auto k_rows = k_tile.along_columns();
  const auto v_rows = SharedTile<kKeys, V, kPanel>{base + kSizes.v_at}.along_columns();
  const auto q_rows = q_tile.along_columns(first_query);
  const auto o_rows = grad_out_tile.along_columns(first_query);
  const auto q_inside = q_tile.along_rows(c * (D / 2 / kPanel));
  const auto o_inside = grad_out_tile.along_rows(c * (V / 2 / kPanel));
  const auto k_inside = k_tile.along_rows(c * (D / 2 / kPanel));
  const auto weights = SharedTile<M, kKeys, 64>{base + kSizes.weights_at}.along_columns();
  const auto grads = SharedTile<M, kKeys, 64>{base + kSizes.grads_at}.along_columns();
  // Where this lane's 16 bytes of a transposed 16 x 16 fragment lie in this warpgroup's part of a tile.
  const u32 fragment = first_query * 128 + swizzled<128>(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
  const u32 sums_s = base + kSizes.sums_at + 2 * c * kSizes.sums;
  const u32 sums_dp = sums_s + kSizes.sums;

  const int key = key0 + warp * 16 + g;
  float dk[D / 4];
  float dv[V / 4];
  set_zero(dk);
  set_zero(dv);
  using Scores = Sm90BackwardScores<sm90_part_of_step(S, M / kPart)>;
  Scores scores;

  // ---- the steps ----
  auto step = block.walk();
  if (block.steps > 0) {
    barrier_wait(barriers.k_full(), 0);
    barrier_wait(barriers.v_full(), 0);
    if constexpr (S.ragged) {
      sm90_split_clear_keys<S, kThreads>(base, block.place.k_len - key0);
    }
  }
#pragma unroll 1
  for (int n = 0; n < block.steps; ++n) {
    if (block.begins_head(step)) {
      block.begin_head(step);
      scores.begin_head(a, m, block.place, step.head, key);
    }
    if (thread == 0) {
      barrier_expect(barriers.sums_full(c, 0), kSizes.sums);
      barrier_expect(barriers.sums_full(c, 1), kSizes.sums);
    }
    const u32 q_now = ring_q.buffer() * (kSizes.q / 16);
    const u32 lse = base + kSizes.lse_at + ring_q.buffer() * kSizes.rows + first_query * 4 + t * 8;
    const u32 delta = lse + (kSizes.delta_at - kSizes.lse_at);
    const u32 weights_now = base + kSizes.weights_at + ring_grads.buffer() * kSizes.tile + fragment;
    const u32 grads_now = base + kSizes.grads_at + ring_grads.buffer() * kSizes.tile + fragment;
    scores.mask.load(m.mask, step.query);
    barrier_wait(barriers.q_full(ring_q.buffer()), ring_q.parity());
    if constexpr (S.ragged) {
      const int live = block.place.q_len - step.query;
      if (live < M) {
        barrier_wait(barriers.grad_out_full(), turn);
        zero_rows_behind<M, kRow, D / kPanel, kRow, V / kPanel, kThreads>(
            base + kSizes.q_at + ring_q.buffer() * kSizes.q, base + kSizes.grad_out_at, live);
      }
    }
    // The sums of S and dP over this block's columns.
    float s[kPart / 2];
    float dp[kPart / 2];
    wgmma_fence();
    multiply<kType, D>(s, k_rows, q_rows, q_now);
    wgmma_commit();
    barrier_wait(barriers.grad_out_full(), turn);
    multiply<kType, V>(dp, v_rows, o_rows);
    wgmma_commit();
    if (block.may_be_dead) {
      zero_dead_rows<S, kRow, V / kPanel, kThreads>(base + kSizes.grad_out_at,
                                                    base + kSizes.lse_at + ring_q.buffer() * kSizes.rows);
    }
    if constexpr (kBias) {
      barrier_wait(barriers.bias_full(ring_grads.buffer()), ring_grads.parity());
    }
    typename Scores::Loaded loaded;
    loaded.load(grads_now, lse, 0);
    barrier_wait(barriers.may_send(c), turn ^ 1);
    wgmma_wait<1>();
    pin(s);
    sm90_send_sums(s, sums_s + other, barriers.sums_full(c, 0) + other, thread);
    wgmma_wait<0>();
    pin(dp);
    sm90_send_sums(dp, sums_dp + other, barriers.sums_full(c, 1) + other, thread);

    // P.
    const int query = step.query + first_query;
    bool edge = key0 + kKeys > block.place.k_len || (kMaskQueries<S> && step.query + M > block.place.q_len);
    if constexpr (S.banded) {
      edge = edge || block.band.tile(query, query + kPart, key0, key0 + kKeys) != math::TileClass::kFull;
    }
    barrier_wait(barriers.sums_full(c, 0), turn);
    sm90_add_sums(s, sums_s, thread);
    const typename Scores::Outer none(0, 0, 0, warp, g, t);
    scores.weigh(s, a, m, loaded, none, grads_now, lse, query, key, t);
    const bool masked = scores.mask.hide(s, query);
    if (edge) {
      scores.mask_edge(s, block, query, key, t);
    }
    loaded.load_rows(delta, 0);
    // dS.
    barrier_wait(barriers.sums_full(c, 1), turn);
    sm90_add_sums(dp, sums_dp, thread);
    __syncwarp();
    if (leader) {
      barrier_arrive_there(barriers.may_send(c) + other);
    }
    u32 words[kPart / 4];
    scores.gradients(words, s, dp, a, loaded, delta, 0, edge || masked);
    store_transposed(grads_now, words);
    scores.weights_of(words, s);
    store_transposed(weights_now, words);
    fence_async();
    sync(kGradsThere, kThreads);

    // dV, dK, dQ.
    wgmma_fence();
    multiply_add<kType, M>(dv, weights.buffer(ring_grads.buffer(), kSizes.tile).turned(), o_inside);
    wgmma_commit();
    multiply_add<kType, M>(dk, grads.buffer(ring_grads.buffer(), kSizes.tile).turned(), q_inside.moved(q_now));
    wgmma_commit();
    float dq[S.dq ? D / 4 : 1];
    if constexpr (S.dq) {
      multiply<kType, kKeys>(dq, grads.buffer(ring_grads.buffer(), kSizes.tile), k_inside);
    }
    wgmma_commit();
    wgmma_wait<2>();
    pin(dv);
    __syncwarp();
    if (leader) {
      barrier_arrive(barriers.grad_out_empty());
    }
    wgmma_wait<1>();
    pin(dk);
    barrier_arrive(barriers.q_empty(ring_q.buffer()));  // all lanes: each has read row vectors
    wgmma_wait<0>();
    if constexpr (S.dq) {
      pin(dq);
      const int row = block.row0 + step.head * int(a.padded_rows) + step.query + warp * 16;
      float* const to = a.dq_sum + i64(row) * S.d + (rank * D + c * (D / 2)) / 8 * 128 + lane * 4;
#pragma unroll
      for (int j = 0; j < D / 2 / 8; ++j) {
        reduce4<90>(to + j * 128, *reinterpret_cast<const float(*)[4]>(dq + 4 * j));
      }
    }
    if (kBias && leader) {
      barrier_arrive(barriers.grads_empty(ring_grads.buffer()));
    }
    block.next(step);
    turn ^= 1;
    ring_q.next();
    ring_grads.next();
  }
  sm90_cluster_store<S>(a, block.place, block.head_k, 2 * rank + c, dk, dv, key, t);
  // The other block has read what it was sent, and says nothing more in this one.
  barrier_wait(barriers.may_send(c), turn ^ 1);
}

}  // namespace fovea::cuda
