// SPDX-License-Identifier: Apache-2.0
//
// sm90_wide_backward: dk, dv and dq of a call on Hopper, for numbers of 16 bits and head dimensions up to 256, where
// the registers of one block do not hold dk, dv and what else is needed.
//
// Sums of dQ leave for L2 in fp32, and with few keys a block that is what takes longest. So two blocks form a cluster
// that owns 128 keys of one key head: each computes P and dS of its own 64, sends dS (8 KB a step) to the other, and
// sums half of dQ's columns over all 128. The two walk over the same queries, 64 at a time.
//
// Warpgroup 0 copies: K and V once, and half of the columns of the other block's K; Q and row vectors into a ring of
// two, dO into one buffer, a bias into the place of dS. Warpgroups 1 and 2 share the columns of dV, dK and dQ. With
// `roles` each has one (Sm90WideRole):
//
//     1: S^T = K Q^T   | dQ of the step before | P, to shared memory | dV += P^T dO | dQ leaves   | dK += dS^T Q
//     2: dP^T = V dO^T | dQ of the step before |                     | dV           | dS          | dK | dQ leaves
//
// They meet when P is there and when dS is, which then goes to the other block. Elsewhere each makes P and dS of half
// of the queries:
//
//     S^T = K Q^T, dP^T = V dO^T of 32 queries | dQ of the step before, beside the softmax | P, dS to shared memory |
//     both warpgroups meet; dS goes to the other block | dV += P^T dO, dK += dS^T Q of half of the columns | dQ leaves
//
// P and dS lie as [query][key], so that each is an operand as it stands and dS^T, P^T are read along columns. In
// order (`ordered`) a thread of warpgroup 0 lets warps add their parts of dQ once the clusters of all keys before have.
// The rest is as in sm90_backward, whose parts these are.
//
// Note: two ways that seemed better were slower at D=256. With S a step ahead, and dV before dS, by 8%: dO has room for
// one buffer only, and what takes longest is its way here. With Q and dO fetched once for both blocks (multicast) by
// 28%: then each waits for the slower of two at every buffer.
//
// Blocks: 2 * batch * heads_k * ceil(limit_k / 128), with `key_parts` each part by itself. backward_prepare comes
// before, backward_convert after (of parts, but for last_parts, sm90_backward_parts).
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/score/sm90_backward_scores.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/cluster_backward_sizes.h"
#include "cuda/device/sm90/wide_backward_copy.cuh"
#include "cuda/device/sm90/wide_backward_step.cuh"
#include "cuda/device/tile/shared.cuh"
#include "cuda/device/work/sm90_key_block.cuh"
#include "math/band.h"

namespace fovea::cuda {

template <Sm90BackwardSpec S>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(sm90_wide_backward_sizes(S).threads, 1)
    sm90_wide_backward(const __grid_constant__ Args a, const __grid_constant__ Sm90BackwardArgs m) {
  // ---- sizes ----
  constexpr Sm90WideBackwardSizes kSizes = sm90_wide_backward_sizes(S);
  constexpr Type kType = S.type;
  constexpr int D = S.d;
  constexpr int V = S.dv;
  constexpr int M = S.step;
  constexpr int kKeys = kSm90WideKeys;
  constexpr int kPanelD = sm90_wide_panel(D);
  constexpr int kPanelV = panel_columns(V / 2);
  constexpr int kRowD = kPanelD * 2;  // bytes
  constexpr int kRowV = kPanelV * 2;
  constexpr bool kRoles = S.roles;
  constexpr int kPart = sm90_wide_part(S);
  constexpr int kThreads = 256;
  constexpr bool kBias = S.bias != BiasTile::kNone;
  static_assert(kType != Type::kFp32 && S.dropout != DropoutRule::kTorchMemEfficient && S.dkv);
  static_assert(S.warps == 8 && S.tiles == 1 && M == 64 && S.stages == 2 && sm90_backward_sizes(S).keys == 2 * kKeys);
  static_assert(D % 64 == 0 && V % 64 == 0 && D <= 256 && V <= 256);
  static_assert(S.bias != BiasTile::kFp32 && S.bias2 == BiasTile::kNone && !S.query_term);
  static_assert(!S.column_sum && !S.dbias_store && (!S.roles || sm90_can_have_roles(S)));

  // ---- which keys: those of both blocks ----
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 base = shared_address(memory);
  begin_kernel<S.arch>();
  const int rank = int(uniform(cluster_rank()));
  const Sm90WideBackwardBarriers barriers{base + kSizes.barriers_at};
  u32 number = blockIdx.x / 2;
  if constexpr (S.ordered) {  // a cluster waits only for clusters that began before it: a ticket
    cluster_sync();
    if (rank == 0 && threadIdx.x == 0) {
      const u32 ticket = atomicAdd(a.turns, 1u);
      store_there(address_of(barriers.ticket(), 0), ticket);
      store_there(address_of(barriers.ticket(), 1), ticket);
    }
    cluster_sync();
    number = uniform(load_shared_word(barriers.ticket()));
  }
  const Sm90KeyBlock<S> block(a, m, number);
  if (block.outside()) {
    return;
  }
  const int key0 = block.key0 + rank * kKeys;
  const int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0);
  if (threadIdx.x == 0) {
    barriers.init(S.dq);
  }
  cluster_sync();

  if (warpgroup == 0) {
    fewer_registers<24>();
    if (threadIdx.x == 0) {
      sm90_wide_backward_copy<S>(a, m, block, rank, base, barriers);
    }
    if (kBias && threadIdx.x == 32) {
      sm90_cluster_copy_bias<S, kSizes.tile, 2 * kSizes.tile>(m, block, key0,
                                                              base + kSizes.grads_at + rank * kSizes.tile, barriers);
    }
    if (S.ordered && threadIdx.x == 64) {
      sm90_wide_backward_order<S>(a, block, barriers);
    }
    return;
  }

  // ---- the warpgroups that compute ----
  more_registers<240>();
  const int c = warpgroup - 1;
  const int warp = __shfl_sync(~0u, int(threadIdx.x % 128) / 32, 0);
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const bool leader = lane == 0;
  Ring<2> ring_q;      // of Q
  Ring<2> ring_grads;  // of P and dS
  u32 turn = 0;        // parity of the one buffer of dO

  // Rows: the inner dimension runs along them; inside: it is the rows, and of the columns this warpgroup's half.
  const SharedTile<M, D, kPanelD> q_tile{base + kSizes.q_at};
  const SharedTile<M, V, kPanelV> grad_out_tile{base + kSizes.grad_out_at};
  const int first_query = kRoles ? 0 : c * kPart;  // of a step
  const auto k_rows = SharedTile<kKeys, D, kPanelD>{base + kSizes.k_at}.along_columns();
  const auto v_rows = SharedTile<kKeys, V, kPanelV>{base + kSizes.v_at}.along_columns();
  const auto q_rows = q_tile.along_columns(first_query);
  const auto o_rows = grad_out_tile.along_columns(first_query);
  const auto q_inside = q_tile.along_rows(c * (D / 2 / kPanelD));
  const auto o_inside = grad_out_tile.along_rows(c * (V / 2 / kPanelV));
  const auto weights = SharedTile<M, kKeys, 64>{base + kSizes.weights_at}.along_columns();
  const auto grads = SharedTile<M, kKeys, 64>{base + kSizes.grads_at}.along_columns();
  // Where this lane's 16 bytes of a transposed 16 x 16 fragment lie in this warpgroup's part of a tile.
  const u32 fragment = first_query * 128 + swizzled<128>(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
  Sm90WideDq<S> dq(a, barriers, base, rank, c, warp, lane);

  const int key = key0 + warp * 16 + g;
  float dk[D / 4];
  float dv[V / 4];
  set_zero(dk);
  set_zero(dv);
  Sm90WideScores<S> scores;

  // ---- the steps ----
  Ring<2> grads_before = ring_grads;
  int row_before = 0;
  auto step = block.walk();
  if (block.steps > 0) {
    barrier_wait(barriers.k_full(), 0);
    if constexpr (S.ragged || !kRoles) {
      barrier_wait(barriers.v_full(), 0);
      barrier_wait(barriers.other_full(), 0);
    }
    if constexpr (S.ragged) {
      sm90_wide_clear_keys<S, kThreads>(base, block.place.k_len - block.key0, rank);
    }
  }
  const auto walk = [&](auto constant) {
    constexpr auto kRole = Sm90WideRole(int(constant));
    constexpr bool kWeighs = kRole != Sm90WideRole::kGradients;
    constexpr bool kDerives = kRole != Sm90WideRole::kWeights;
#pragma unroll 1
    for (int n = 0; n < block.steps; ++n) {
      if (block.begins_head(step)) {
        block.begin_head(step);
        scores.begin_head(a, m, block.place, step.head, key);
      }
      const u32 q_now = ring_q.buffer() * (kSizes.q / 16);
      const u32 lse = base + kSizes.lse_at + ring_q.buffer() * kSizes.rows + first_query * 4 + t * 8;
      const u32 grads_tile = base + kSizes.grads_at + (2 * ring_grads.buffer() + rank) * kSizes.tile;
      const u32 grads_empty = barriers.grads_empty(ring_grads.buffer());
      scores.mask.load(m.mask, step.query);
      barrier_wait(barriers.q_full(ring_q.buffer()), ring_q.parity());
      if constexpr (S.ragged) {
        const int live = block.place.q_len - step.query;
        if (live < M) {
          barrier_wait(barriers.grad_out_full(), turn);
          zero_rows_behind<M, kRowD, D / kPanelD, kRowV, V / kPanelV, kThreads>(
              base + kSizes.q_at + ring_q.buffer() * kSizes.q, base + kSizes.grad_out_at, live);
        }
      }
      // S, dP, and dQ of the step before.
      float s[kWeighs ? kPart / 2 : 1];
      float dp[kDerives ? kPart / 2 : 1];
      wgmma_fence();
      if constexpr (kWeighs) {
        multiply<kType, D>(s, k_rows, q_rows, q_now);
        wgmma_commit();
      }
      if constexpr (kDerives) {
        if constexpr (kRoles) {
          barrier_wait(barriers.v_full(), 0);
        }
        barrier_wait(barriers.grad_out_full(), turn);
        multiply<kType, V>(dp, v_rows, o_rows);
        wgmma_commit();
      }
      if constexpr (S.dq) {
        if (n > 0) {
          dq.issue(grads_before);
        }
        wgmma_commit();
      }
      if constexpr (!kDerives) {
        barrier_wait(barriers.grad_out_full(), turn);
      }
      if (block.may_be_dead) {
        zero_dead_rows<S, kRowV, V / kPanelV, kThreads>(base + kSizes.grad_out_at,
                                                        base + kSizes.lse_at + ring_q.buffer() * kSizes.rows);
      }
      // P and dS.
      if constexpr (kBias) {
        barrier_wait(barriers.bias_full(ring_grads.buffer()), ring_grads.parity());
      }
      const int query = step.query + first_query;
      bool edge = key0 + kKeys > block.place.k_len || (kMaskQueries<S> && step.query + M > block.place.q_len);
      if constexpr (S.banded) {
        edge = edge || block.band.tile(query, query + kPart, key0, key0 + kKeys) != math::TileClass::kFull;
      }
      const Sm90WidePart part{base + kSizes.weights_at + ring_grads.buffer() * kSizes.tile + fragment,
                              grads_tile + fragment,
                              lse,
                              lse + (kSizes.delta_at - kSizes.lse_at),
                              query,
                              key,
                              warp,
                              g,
                              t,
                              edge};
      const auto multiply_dv = [&] {
        wgmma_fence();
        multiply_add<kType, M>(dv, weights.buffer(ring_grads.buffer(), kSizes.tile).turned(), o_inside);
        wgmma_commit();
      };
      if constexpr (kRole == Sm90WideRole::kWeights) {
        sm90_wide_weights<S>(a, m, block, scores, s, part);
        fence_async();
        sync(kWeightsThere, kThreads);
        multiply_dv();
        wgmma_wait<1>();
        if (n > 0) {
          dq.add(grads_before, row_before);
        }
      } else if constexpr (kRole == Sm90WideRole::kGradients) {
        sync(kWeightsThere, kThreads);
        multiply_dv();
        barrier_wait(grads_empty, ring_grads.parity() ^ 1);
        wgmma_wait<2>();
        pin(dp);
        sm90_wide_gradients<S>(a, dp, part);
      } else {
        sm90_wide_both<S>(a, m, block, scores, s, dp, part, grads_empty, ring_grads.parity() ^ 1);
      }
      fence_async();
      sync(kGradsThere, kThreads);
      if (S.dq && threadIdx.x == 128) {
        const u32 full = barriers.grads_full(ring_grads.buffer());
        barrier_expect(full, kSizes.tile);
        bulk_copy_there(address_of(grads_tile, u32(1 - rank)), grads_tile, kSizes.tile,
                        address_of(full, u32(1 - rank)));
      }
      // dV, dK.
      if constexpr (kRole == Sm90WideRole::kBoth) {
        multiply_dv();
      }
      wgmma_fence();
      multiply_add<kType, M>(dk, grads.buffer(2 * ring_grads.buffer() + rank, kSizes.tile).turned(),
                             q_inside.moved(q_now));
      wgmma_commit();
      if constexpr (S.dq && kDerives) {
        wgmma_wait<2>();
        if (n > 0) {
          dq.add(grads_before, row_before);
        }
      }
      wgmma_wait<1>();
      pin(dv);
      __syncwarp();
      if (leader) {
        barrier_arrive(barriers.grad_out_empty());
      }
      wgmma_wait<0>();
      pin(dk);
      barrier_arrive(barriers.q_empty(ring_q.buffer()));  // all lanes: each has read row vectors
      if (!S.dq && leader) {
        barrier_arrive(grads_empty);
      }
      grads_before = ring_grads;
      row_before = block.row0 + step.head * int(a.padded_rows) + step.query;
      block.next(step);
      turn ^= 1;
      ring_q.next();
      ring_grads.next();
    }
  };
  if constexpr (!kRoles) {
    walk(Constant<int(Sm90WideRole::kBoth)>());
  } else if (c == 0) {
    walk(Constant<int(Sm90WideRole::kWeights)>());
  } else {
    walk(Constant<int(Sm90WideRole::kGradients)>());
  }
  if (block.steps > 0) {
    if constexpr (S.dq) {
      dq.issue(grads_before);
      wgmma_commit();
      wgmma_wait<0>();
      dq.add(grads_before, row_before);
    }
  }
  sm90_wide_store<S>(a, m, block.place, block.head_k, number,
                     S.key_parts ? block.sums_row + rank * kKeys + warp * 16 : 0, dk, dv, key, c, lane);
  if constexpr (S.dq) {
    cluster_sync();  // what the other block sends here has come, and it takes nothing more from here
  }
}

}  // namespace fovea::cuda
