// SPDX-License-Identifier: Apache-2.0
//
// Parts of a step of sm90_wide_backward, by the warpgroups that compute:
//
//   Sm90WideDq             dQ: a part of the columns, over the keys of both blocks
//   sm90_wide_weights      P of all queries from S, to shared memory (Sm90WideRole::kWeights)
//   sm90_wide_gradients    dS of all queries from dP and from P as it lies there (kGradients)
//   sm90_wide_both         P and dS of half of the queries (kBoth)
//   sm90_wide_store        dK and dV of a block of keys: half of the columns
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/score/sm90_backward_scores.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_join.cuh"
#include "cuda/device/sm90/cluster_backward_sizes.h"
#include "cuda/device/sm90/wide_backward_copy.cuh"
#include "cuda/device/tile/accumulator.cuh"
#include "cuda/device/tile/shared.cuh"
#include "cuda/device/work/sm90_key_block.cuh"

namespace fovea::cuda {

inline constexpr NamedBarriers kWeightsThere{10};  // P of a step is in shared memory
static_assert(are_apart({kCleared, kGradsThere, kWeightsThere}));

// What a warpgroup makes (`roles`).
enum class Sm90WideRole { kWeights, kGradients, kBoth };
// Queries of the scores that a warpgroup makes, of a step.
constexpr int sm90_wide_part(const Sm90BackwardSpec& s) { return s.roles ? s.step : s.step / 2; }
template <Sm90BackwardSpec S>
using Sm90WideScores = Sm90BackwardScores<sm90_part_of_step(S, S.step / sm90_wide_part(S))>;

// What a part of a step is about.
struct Sm90WidePart {
  u32 weights, grads;  // where this lane's 16 bytes of P and of dS lie
  u32 lse, delta;      // of its first query
  int query, key;      // its first
  int warp, g, t;
  bool edge;  // some pairs may be hidden
};

template <Sm90BackwardSpec S>
struct Sm90WideDq {
  static constexpr Sm90WideBackwardSizes kSizes = sm90_wide_backward_sizes(S);
  static constexpr int kColumns = sm90_dq_columns(S.d);
  static constexpr int kPanel = sm90_wide_panel(S.d);
  using Keys = SharedOperand<Inner::kRows, kSm90WideKeys, kPanel>;

  const Args& a;
  const Sm90WideBackwardBarriers& barriers;
  SharedOperand<Inner::kColumns, S.step, 64> grads;
  JoinedOperands<kSm90WideKeys, Keys> keys;
  int rank, warp, lane;
  int column;      // its first
  u32 adding = 0;  // parity of may_add
  float sums[kColumns / 2];

  __device__ __forceinline__ Sm90WideDq(const Args& a, const Sm90WideBackwardBarriers& barriers, u32 base, int rank,
                                        int c, int warp, int lane)
      : a(a),
        barriers(barriers),
        grads(SharedTile<S.step, kSm90WideKeys, 64>{base + kSizes.grads_at}.along_columns()),
        rank(rank),
        warp(warp),
        lane(lane),
        column((2 * rank + c) * kColumns) {
    const SharedTile<kSm90WideKeys, S.d, kPanel> own{base + kSizes.k_at};
    const SharedTile<kSm90WideKeys, 2 * kColumns, kPanel> other{base + kSizes.k_other_at};
    const Keys of_own = own.along_rows(column / kPanel);
    const Keys of_other = other.along_rows(c * kColumns / kPanel);
    keys = {rank == 0 ? of_own : of_other, rank == 0 ? of_other : of_own};
  }

  __device__ __forceinline__ bool exists() const { return S.dq && column < S.d; }
  __device__ __forceinline__ void issue(const Ring<2>& tile) {
    // Note: warps that sum nothing wait, too. Otherwise a block without dQ would release a buffer that is not full yet.
    if constexpr (S.roles) {
      barrier_wait(barriers.other_full(), 0);
    }
    barrier_wait(barriers.grads_full(tile.buffer()), tile.parity());
    wgmma_fence();
    if (!exists()) {
      return;
    }
    multiply<S.type, 2 * kSm90WideKeys>(sums, grads.buffer(2 * tile.buffer(), kSizes.tile), keys);
  }
  __device__ __forceinline__ void add(const Ring<2>& tile, int row) {
    pin(sums);
    if (lane == 0) {
      barrier_arrive(barriers.grads_empty(tile.buffer()));
      barrier_arrive_there(address_of(barriers.grads_empty(tile.buffer()), u32(1 - rank)));
    }
    if constexpr (S.ordered) {
      barrier_wait(barriers.may_add(), adding);
      adding ^= 1;
    }
    if (exists()) {
      float* const to = a.dq_sum + i64(row + warp * 16) * S.d + column / 8 * 128 + lane * 4;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        reduce4<90>(to + j * 128, *reinterpret_cast<const float(*)[4]>(sums + 4 * j));
      }
    }
    if constexpr (S.ordered) {
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(barriers.added());
      }
    }
  }
};

// The product S is in flight, and one more.
template <Sm90BackwardSpec S, class Block, int kCount>
__device__ __forceinline__ void sm90_wide_weights(const Args& a, const Sm90BackwardArgs& m, const Block& block,
                                                  Sm90WideScores<S>& scores, float (&s)[kCount],
                                                  const Sm90WidePart& part) {
  typename Sm90WideScores<S>::Loaded loaded;
  loaded.load(0, part.lse, 0);
  wgmma_wait<1>();
  pin(s);
  const typename Sm90WideScores<S>::Outer none(0, 0, 0, part.warp, part.g, part.t);
  scores.weigh(s, a, m, loaded, none, 0, part.lse, part.query, part.key, part.t);
  if (part.edge) {
    scores.mask_edge(s, block, part.query, part.key, part.t);
  }
  u32 words[kCount / 2];
  scores.weights_of(words, s);
  store_transposed(part.weights, words);
}

// The product dP has ended, and P is there.
template <Sm90BackwardSpec S, int kCount>
__device__ __forceinline__ void sm90_wide_gradients(const Args& a, float (&dp)[kCount], const Sm90WidePart& part) {
  constexpr int kQueries = 16;  // at once: P takes few registers
#pragma unroll
  for (int k = 0; k < S.step / kQueries; ++k) {
    u32 weights[4];
    ldmatrix_trans(weights, part.weights + k * 2048);
    u32 grads[4];
    gradients_of_packed<S>(grads, weights, *reinterpret_cast<float(*)[8]>(dp + 8 * k), a, part.delta + k * 64,
                           part.edge);
    stmatrix_trans(part.grads + k * 2048, grads[0], grads[1], grads[2], grads[3]);
  }
}

// The products S and dP are in flight, and with dQ one more.
template <Sm90BackwardSpec S, class Block, int kCount>
__device__ __forceinline__ void sm90_wide_both(const Args& a, const Sm90BackwardArgs& m, const Block& block,
                                               Sm90WideScores<S>& scores, float (&s)[kCount], float (&dp)[kCount],
                                               const Sm90WidePart& part, u32 grads_empty, u32 parity) {
  typename Sm90WideScores<S>::Loaded loaded;
  loaded.load(part.grads, part.lse, 0);
  wgmma_wait<S.dq ? 2 : 1>();
  pin(s);
  const typename Sm90WideScores<S>::Outer none(0, 0, 0, part.warp, part.g, part.t);
  scores.weigh(s, a, m, loaded, none, part.grads, part.lse, part.query, part.key, part.t);
  const bool masked = scores.mask.hide(s, part.query);
  if (part.edge) {
    scores.mask_edge(s, block, part.query, part.key, part.t);
  }
  loaded.load_rows(part.delta, 0);
  wgmma_wait<S.dq ? 1 : 0>();
  pin(dp);
  u32 grads[kCount / 2];
  scores.gradients(grads, s, dp, a, loaded, part.delta, 0, part.edge || masked);
  if constexpr (S.bias == BiasTile::kNone) {
    barrier_wait(grads_empty, parity);
  }
  u32 weights[kCount / 2];
  scores.weights_of(weights, s);
  store_transposed(part.weights, weights);
  store_transposed(part.grads, grads);
}

// row: where sums of a part of the steps lie (key_parts).
template <Sm90BackwardSpec S, int kCountD, int kCountV>
__device__ __forceinline__ void sm90_wide_store(const Args& a, const Sm90BackwardArgs& m, const Place& place,
                                                u32 head_k, u32 number, i64 row, float (&dk)[kCountD],
                                                float (&dv)[kCountV], int key, int c, int lane) {
  if constexpr (S.key_parts) {
    if (key - lane / 4 >= place.k_len || !sm90_join_parts<S>(a, m.parts, number, row, dk, dv, c, lane)) {
      return;
    }
  }
  sm90_cluster_store<S>(a, place, head_k, c, dk, dv, key, lane % 4);
}

}  // namespace fovea::cuda
