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
// two, dO into one buffer, a bias into the place of dS. Warpgroups 1 and 2 share the queries of S and the columns of
// everything else:
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
// Blocks: 2 * batch * heads_k * ceil(limit_k / 128), with `key_parts` for each part. backward_prepare comes before,
// backward_convert (of parts sm90_backward_parts) after.
#ifndef FOVEA_CUDA_DEVICE_SM90_WIDE_BACKWARD_CUH
#define FOVEA_CUDA_DEVICE_SM90_WIDE_BACKWARD_CUH

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/score/sm90_backward_scores.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/sm90/wide_backward_copy.cuh"
#include "cuda/device/tile/shared.cuh"
#include "cuda/device/work/sm90_key_block.cuh"
#include "math/band.h"
#include "math/softmax.h"

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
  constexpr int kPart = M / 2;  // queries of a warpgroup
  constexpr int kThreads = 256;
  constexpr bool kBias = S.bias != BiasTile::kNone;
  constexpr bool kDropout = S.dropout != DropoutRule::kNone;
  using Scores = Sm90BackwardScores<sm90_part_of_step(S, 2)>;
  static_assert(kType != Type::kFp32 && S.dropout != DropoutRule::kTorchMemEfficient && S.dkv);
  static_assert(S.warps == 8 && S.tiles == 1 && M == 64 && S.stages == 2 && sm90_backward_sizes(S).keys == 2 * kKeys);
  static_assert(D % 64 == 0 && V % 64 == 0 && D <= 256 && V <= 256);
  static_assert(S.bias != BiasTile::kFp32 && S.bias2 == BiasTile::kNone && !S.query_term);
  static_assert(!S.column_sum && !S.dbias_store);

  // ---- which keys: those of both blocks ----
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 base = shared_address(memory);
  begin_kernel<S.arch>();
  const int rank = int(uniform(cluster_rank()));
  u32 number = blockIdx.x / 2;
  if constexpr (S.ordered) {  // a cluster waits only for clusters that began before it: a ticket
    const u32 number_at = base + kSizes.barriers_at + 128;
    cluster_sync();
    if (rank == 0 && threadIdx.x == 0) {
      const u32 ticket = atomicAdd(a.turns, 1u);
      store_there(address_of(number_at, 0), ticket);
      store_there(address_of(number_at, 1), ticket);
    }
    cluster_sync();
    number = uniform(load_shared_word(number_at));
  }
  const Sm90KeyBlock<S> block(a, m, number);
  if (block.outside()) {
    return;
  }
  const int key0 = block.key0 + rank * kKeys;

  // ---- shared memory and barriers ----
  const Sm90WideBackwardBarriers barriers{base + kSizes.barriers_at};
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
      sm90_wide_backward_copy_bias<S>(m, block, rank, base, barriers);
    }
    if (S.ordered && threadIdx.x == 64) {
      sm90_wide_backward_order<S>(a, block, barriers);
    }
    return;
  }

  // ---- the warpgroups that compute ----
  more_registers<240>();
  const int c = warpgroup - 1;
  const int thread = threadIdx.x % 128;
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const int lane = thread % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const bool leader = lane == 0;
  const int key = key0 + warp * 16 + g;
  Ring<2> ring_q;      // of Q
  Ring<2> ring_grads;  // of P and dS

  // Rows: the inner dimension runs along them; inside: it is the rows; halves are this warpgroup's, or this block's.
  const SharedTile<kKeys, D, kPanelD> k_tile{base + kSizes.k_at};
  const SharedTile<kKeys, V, kPanelV> v_tile{base + kSizes.v_at};
  const SharedTile<kKeys, 2 * sm90_dq_columns(D), kPanelD> k_other_tile{base + kSizes.k_other_at};
  const SharedTile<M, D, kPanelD> q_tile{base + kSizes.q_at};
  const SharedTile<M, V, kPanelV> grad_out_tile{base + kSizes.grad_out_at};
  const auto k_rows = k_tile.along_columns();
  const auto v_rows = v_tile.along_columns();
  const auto q_rows = q_tile.along_columns(c * kPart);
  const auto o_rows = grad_out_tile.along_columns(c * kPart);
  const auto q_inside = q_tile.along_rows(c * (D / 2 / kPanelD));
  const auto o_inside = grad_out_tile.along_rows(c * (V / 2 / kPanelV));
  constexpr int kColumns = sm90_dq_columns(D);
  const int column = (2 * rank + c) * kColumns;  // the first of dQ
  const bool has_dq = S.dq && column < D;
  const auto k_own = k_tile.along_rows(column / kPanelD);
  const auto k_other = k_other_tile.along_rows(c * kColumns / kPanelD);
  const JoinedOperands<kKeys, SharedOperand<Inner::kRows, kKeys, kPanelD>> k_both{rank == 0 ? k_own : k_other,
                                                                                  rank == 0 ? k_other : k_own};
  const auto weights = SharedTile<M, kKeys, 64>{base + kSizes.weights_at}.along_columns();
  const auto grads = SharedTile<M, kKeys, 64>{base + kSizes.grads_at}.along_columns();
  // Where this lane's 16 bytes of a transposed 16 x 16 fragment lie in this warpgroup's part of a tile.
  const u32 fragment = c * kPart * 128 + swizzled<128>(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);

  float dk[D / 4] = {};
  float dv[V / 4] = {};
  Scores scores;

  // ---- dQ: a part of the columns, over the keys of both blocks ----
  float dq[kColumns / 2];
  const auto issue_dq = [&](const Ring<2>& tile) {
    // Note: warps that sum nothing wait, too. Otherwise a block without dQ would release a buffer that is not full yet.
    barrier_wait(barriers.grads_full(tile.buffer()), tile.parity());
    wgmma_fence();
    if (!has_dq) {
      return;
    }
    multiply<kType, 2 * kKeys>(dq, grads.buffer(2 * tile.buffer(), kSizes.tile), k_both);
  };
  u32 adding = 0;  // parity of may_add
  const auto add_dq = [&](const Ring<2>& tile, int row) {
    pin(dq);
    if (leader) {
      barrier_arrive(barriers.grads_empty(tile.buffer()));
      barrier_arrive_there(address_of(barriers.grads_empty(tile.buffer()), u32(1 - rank)));
    }
    if constexpr (S.ordered) {
      barrier_wait(barriers.may_add(), adding);
      adding ^= 1;
    }
    if (has_dq) {
      float* const to = a.dq_sum + i64(row + warp * 16) * D + column / 8 * 128 + lane * 4;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        reduce4<90>(to + j * 128, *reinterpret_cast<const float(*)[4]>(dq + 4 * j));
      }
    }
    if constexpr (S.ordered) {
      __syncwarp();
      if (leader) {
        barrier_arrive(barriers.added());
      }
    }
  };

  // ---- the steps ----
  Ring<2> grads_before = ring_grads;
  int row_before = 0;
  u32 turn = 0;  // parity of the one buffer of dO
  auto step = block.walk();
  if (block.steps > 0) {
    barrier_wait(barriers.kv_full(), 0);
    if constexpr (S.ragged) {
      const int consumer = threadIdx.x - 128;
      if (block.key0 + 2 * kKeys > block.place.k_len) {
        const int live = min(block.place.k_len - key0, kKeys);
        const int other = min(block.place.k_len - (block.key0 + (1 - rank) * kKeys), kKeys);
        zero_rows<kKeys, kRowD, D / kPanelD, kThreads>(base + kSizes.k_at, live, consumer);
        zero_rows<kKeys, kRowV, V / kPanelV, kThreads>(base + kSizes.v_at, live, consumer);
        if constexpr (S.dq) {
          zero_rows<kKeys, kRowD, 2 * kColumns / kPanelD, kThreads>(base + kSizes.k_other_at, other, consumer);
        }
        fence_async();
        sync(kCleared, kThreads);
      }
    }
  }
#pragma unroll 1
  for (int n = 0; n < block.steps; ++n) {
    if (block.begins_head(step)) {
      block.begin_head(step);
      scores.begin_head(a, m, block.place, step.head, key);
    }
    const u32 q_now = ring_q.buffer() * (kSizes.q / 16);
    const u32 lse = base + kSizes.lse_at + ring_q.buffer() * kSizes.rows + c * kPart * 4 + t * 8;
    const u32 delta = lse + (kSizes.delta_at - kSizes.lse_at);
    const u32 weights_at = base + kSizes.weights_at + ring_grads.buffer() * kSizes.tile + fragment;
    const u32 grads_tile = base + kSizes.grads_at + (2 * ring_grads.buffer() + rank) * kSizes.tile;
    const int part = step.query + c * kPart;
    scores.load_mask(m, step.query);
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
    float s[kPart / 2];
    float dp[kPart / 2];
    wgmma_fence();
    multiply<kType, D>(s, k_rows, q_rows, q_now);
    wgmma_commit();
    barrier_wait(barriers.grad_out_full(), turn);
    multiply<kType, V>(dp, v_rows, o_rows);
    wgmma_commit();
    if constexpr (S.dq) {
      if (n > 0) {
        issue_dq(grads_before);
      }
      wgmma_commit();
    }
    if (block.may_be_dead) {
      zero_dead_rows<S, kRowV, V / kPanelV, kThreads>(base + kSizes.grad_out_at,
                                                      base + kSizes.lse_at + ring_q.buffer() * kSizes.rows);
    }
    // P and dS.
    if constexpr (kBias) {
      barrier_wait(barriers.bias_full(ring_grads.buffer()), ring_grads.parity());
    }
    typename Scores::Loaded loaded;
    loaded.load(grads_tile + fragment, lse, 0);
    wgmma_wait<S.dq ? 2 : 1>();
    pin(s);
    scores.weigh(s, a, m, loaded, typename Scores::Outer(0, 0, 0, warp, g, t), grads_tile + fragment, lse, part, key,
                 t);
    const bool masked = scores.hide(s, part);
    bool edge = key0 + kKeys > block.place.k_len || (kMaskQueries<S> && step.query + M > block.place.q_len);
    if constexpr (S.banded) {
      edge = edge || block.band.tile(part, part + kPart, key0, key0 + kKeys) != math::TileClass::kFull;
    }
    if (edge) {
      scores.mask_edge(s, block, part, key, t);
    }
    loaded.load_delta(delta, 0);
    wgmma_wait<S.dq ? 1 : 0>();
    pin(dp);
    u32 grad_words[kPart / 4];
    scores.gradients(grad_words, s, dp, a, loaded, delta, 0, edge || masked);
    if constexpr (!kBias) {
      barrier_wait(barriers.grads_empty(ring_grads.buffer()), ring_grads.parity() ^ 1);
    }
    u32 words[kPart / 4];
    scores.weights_of(words, s);
    store_transposed(weights_at, words);
    store_transposed(grads_tile + fragment, grad_words);
    fence_async();
    sync(kGradsThere, kThreads);
    if (S.dq && threadIdx.x == 128) {
      const u32 full = barriers.grads_full(ring_grads.buffer());
      barrier_expect(full, kSizes.tile);
      bulk_copy_there(address_of(grads_tile, u32(1 - rank)), grads_tile, kSizes.tile, address_of(full, u32(1 - rank)));
    }
    // dV, dK.
    wgmma_fence();
    multiply_add<kType, M>(dv, weights.buffer(ring_grads.buffer(), kSizes.tile).turned(), o_inside);
    wgmma_commit();
    multiply_add<kType, M>(dk, grads.buffer(2 * ring_grads.buffer() + rank, kSizes.tile).turned(),
                           q_inside.moved(q_now));
    wgmma_commit();
    if constexpr (S.dq) {
      wgmma_wait<2>();
      if (n > 0) {
        add_dq(grads_before, row_before);
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
      barrier_arrive(barriers.grads_empty(ring_grads.buffer()));
    }
    grads_before = ring_grads;
    row_before = block.row0 + step.head * int(a.padded_rows) + step.query;
    block.next(step);
    turn ^= 1;
    ring_q.next();
    ring_grads.next();
  }
  if constexpr (S.dq) {
    if (block.steps > 0) {
      issue_dq(grads_before);
      wgmma_commit();
      wgmma_wait<0>();
      add_dq(grads_before, row_before);
    }
    cluster_sync();  // what the other block sends here has come, and it takes nothing more from here
  }

  // ---- dK, dV: half of the columns ----
  if constexpr (S.key_parts) {
    const i64 row = block.sums_row + rank * kKeys + warp * 16;
    if (key - g >= block.place.k_len) {
      return;
    }
    if (a.grad_k.data != nullptr) {
      store_fragments(m.parts.dk + row * D + c * (D / 2) * 16 + lane * 4, dk);
    }
    if (a.grad_v.data != nullptr) {
      store_fragments(m.parts.dv + row * V + c * (V / 2) * 16 + lane * 4, dv);
    }
    return;
  }
  if (a.grad_k.data != nullptr) {
    const int half = c * (D / 2);
    store_accumulator<kType>(static_cast<u16*>(a.grad_k.data) + block.place.key_rows(a.grad_k.strides, block.head_k) +
                                 half * a.grad_k.strides.col,
                             a.grad_k.strides, dk, a.scale, key, block.place.k_len, a.out_dim - half, a.vector_stores,
                             t);
  }
  if (a.grad_v.data != nullptr) {
    const int half = c * (V / 2);
    store_accumulator<kType>(static_cast<u16*>(a.grad_v.data) + block.place.key_rows(a.grad_v.strides, block.head_k) +
                                 half * a.grad_v.strides.col,
                             a.grad_v.strides, dv, kDropout ? a.keep_scale : 1.f, key, block.place.k_len,
                             a.out_dim_v - half, a.vector_stores, t);
  }
}

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_SM90_WIDE_BACKWARD_CUH
