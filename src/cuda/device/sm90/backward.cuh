// SPDX-License-Identifier: Apache-2.0
//
// sm90_backward: dk, dv and dq of a call on Hopper, for numbers of 16 bits and head dimensions up to 192, of Q and V
// together up to 320.
//
// A block owns the keys of its warpgroups, tiles * 64 each, of one key head. It loops over the queries that attend to
// any of them, `step` at a time, of all query heads that share the key head. Warpgroup 0 copies: K and V once, Q, dO
// and the row vectors into a ring, a bias into the ring of dS. The others compute; but for `same_step` they have no
// barrier of their own:
//
//     S^T = K Q^T, dP^T = V dO^T | P^T, dS^T in registers | dV += P^T dO, dK += dS^T Q | dQ of the step before
//
// P^T and dS^T are operands of the next products, from registers; where registers allow so are V and K. The ring of dS
// is used in place: TMA writes the bias as [query][key], ldmatrix.trans reads it in the layout of S^T, stmatrix.trans
// puts dS where the bias was, and there dS is an operand of dQ = dS K. With dropout, P carries the decision in its
// sign: P >= 0 is kept.
//
// dQ of a step is computed one step later, when the dS of all warpgroups has most likely arrived: by one warpgroup for
// 64 queries, in turn. It is added to dq_sum, in L2, in the order of the accumulators, which backward_convert knows: by
// red instructions, or in bulk through shared memory.
//
// A block stays for the whole call and takes blocks of keys from a counter, batch * heads_k * ceil(limit_k / keys) of
// them. Q and dO of the next are on their way while one ends. Where there are as many thread blocks as blocks of keys
// each has its own. backward_prepare runs before (with a mask of queries and keys sm90_backward_mask, too), and
// backward_convert after.
//
// What options of the Spec change (sm90/spec.h has all of them):
//
//     step = 128             two warpgroups compute dQ of a step, 64 queries each
//     step = 80              dQ is computed transposed, dQ^T = K^T dS^T (sm90_turns_dq)
//     halves                 each of two warpgroups computes dQ of all queries, half of the columns
//     same_step              dQ is computed in its own step, before dK: all warpgroups wait for one another
//     bulk, ordered, direct  dQ leaves in bulk; blocks of keys add one after the other; one block has all keys and
//                            stores dQ as it is
//     converts               warps that do not compute make dq of dq_sum (backward_convert.cuh)
//     makes_rows             logsumexp and delta are made here (backward_rows.cuh), without backward_prepare
//     dbias_store            dS is the gradient of the bias, without `scale`, which dQ and dK get where they leave. Not
//                            with a softcap, whose derivative dS has, nor with a band, which leaves tiles out
//     adds_bias              dS is added to sums in memory (backward_added.cuh)
//     summed                 sm90_summed_backward: a cluster sums the gradient of a shared bias (backward_summed.cuh)
//     odd_rows               rows of the bias begin anywhere: warps move it, and dS (backward_odd_rows.cuh)
//     key_parts              several thread blocks share a block of keys. Each takes a range of its steps and leaves
//                            sums in fp32, which sm90_backward_parts adds
//     last_parts             only the last blocks are shared, and the part that ends last adds (backward_join.cuh)
//     tile_stores            dK and dV leave by tensor stores from where K and V were
//
// Where dK and dV take most registers, S and dP are made in two parts of a step (sm90_step_parts), or P is rounded
// before dS is made of it (Sm90BackwardChoices::packs).
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/score/sm90_backward_scores.cuh"
#include "cuda/device/sm90/backward_added.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_blocks.cuh"
#include "cuda/device/sm90/backward_convert.cuh"
#include "cuda/device/sm90/backward_move.cuh"
#include "cuda/device/sm90/backward_output.cuh"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/sm90/backward_step.cuh"
#include "cuda/device/sm90/backward_summed.cuh"
#include "cuda/device/tile/accumulator.cuh"
#include "cuda/device/tile/pipe.cuh"
#include "cuda/device/tile/shared.cuh"
#include "cuda/device/work/sm90_key_block.cuh"
#include "math/band.h"
#include "math/softmax.h"

namespace fovea::cuda {

// Warpgroup c of those that compute.
template <Sm90BackwardSpec S>
__device__ __forceinline__ void sm90_backward_compute(const Args& a, const Sm90BackwardArgs& m, unsigned char* memory,
                                                      u32 base, const Sm90BackwardBarriers& barriers, int c) {
  // ---- sizes ----
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  constexpr Sm90BackwardChoices kHow = sm90_backward_choices(S);
  constexpr Type kType = S.type;
  constexpr int D = S.d;
  constexpr int V = S.dv;
  constexpr int M = S.step;
  constexpr int kGroups = kSizes.groups;
  constexpr int kKeys = kSizes.keys;
  constexpr int kBlocks = S.tiles;    // of 64 keys, a warpgroup
  constexpr int kParts = kHow.parts;  // of a step's scores
  constexpr int P = kHow.part;
  constexpr int kPanelD = kHow.panel_d;
  constexpr int kPanelV = kHow.panel_v;
  constexpr bool kBias = kHow.bias_in_place;
  constexpr bool kOuter = kHow.outer;

  const int thread = threadIdx.x % 128;
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const int lane = opaque(thread % 32);
  const int g = lane / 4;
  const int t = lane % 4;
  const bool leader = lane == 0;
  Ring<S.stages> ring_q;
  Ring<S.planes> ring_grads;
  Ring<S.outer> ring_outer;

  // Operands. rows: a product's inner dimension is the tile's columns; inside: it is the tile's rows.
  const SharedTile<kKeys, D, kPanelD> k_tile{base + kSizes.k_at};
  const SharedTile<kKeys, V, kPanelV> v_tile{base + kSizes.v_at};
  const SharedTile<M, D, kPanelD> q_tile{base + kSizes.q_at};
  const SharedTile<M, V, kPanelV> grad_out_tile{base + kSizes.grad_out_at};
  const SharedTile<M, kKeys, 64> grads_tile{base + kSizes.grads_at};
  const auto k_rows = k_tile.along_columns(c * kBlocks * 64);
  const auto v_rows = v_tile.along_columns(c * kBlocks * 64);
  const auto q_rows = q_tile.along_columns();
  const auto o_rows = grad_out_tile.along_columns();
  const auto q_inside = q_tile.along_rows();
  const auto o_inside = grad_out_tile.along_rows();
  const auto k_inside = k_tile.along_rows(S.halves ? c * (D / 2 / kPanelD) : 0);
  const auto grads_rows = grads_tile.along_columns(M == 128 ? c * 64 : 0);
  // Where this lane's 16 bytes of a transposed 16 x 16 fragment lie in a panel of dS (ldmatrix and stmatrix alike).
  const u32 fragment = swizzled<128>(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);

  u32 left = 0;  // parity of what leaves through shared memory
  volatile Sm90StoredKeys& stored_keys =
      *reinterpret_cast<Sm90StoredKeys*>(memory + kSizes.keys_at + c * kSm90KeysBytes);
  using Scores = Sm90BackwardScores<sm90_part_of_step(S, kParts)>;
  Scores scores[kBlocks];
  Sm90SummedBias<S> summed(base, barriers, c * 128 + thread);
  Sm90AddedBias<S> added;

#pragma unroll 1
  for (u32 phase = 0;; phase = sm90_tells_ahead(S) ? (phase + 1) & 3 : phase ^ 1) {
    // ---- which keys ----
    const u32 number = sm90_await_block<S>(base, barriers, phase);
    if (number == kNoBlock) {
      break;
    }
    const Sm90KeyBlock<S> block(a, m, number);
    if constexpr (sm90_tells_ahead(S)) {
      barrier_wait(barriers.kv_full(), phase & 1);
    }
    if (S.tile_stores && thread == 0) {  // what was there has been read: K came later
      stored_keys.row = int(block.place.k_begin) + block.key0;
      stored_keys.head = block.head_k;
      stored_keys.batch2 = int(block.place.b2);
      stored_keys.batch1 = int(block.place.b1);
    }
    float dk[kBlocks][D / 2];
    float dv[kBlocks][V / 2];
#pragma unroll
    for (int f = 0; f < kBlocks; ++f) {
      set_zero(dk[f]);
      set_zero(dv[f]);
    }

    int head_before = 0;
    Sm90BackwardStep<S> work{a,          block,       barriers, k_inside, grads_rows, dk,   dv,   ring_q,
                             ring_grads, head_before, left,     base,     c,          warp, lane, leader};

    if constexpr (S.summed > 1) {
      summed.begin_block(a, m.summed, part_of_keys<S>(m.parts, number).block);
      summed.clear_unmet(a, m.summed, block);
    }

    // ---- the steps ----
    Ring<S.planes> grads_before = ring_grads;
    int row_before = 0;
    int turn = 0;         // of this step's dQ
    int turn_before = 0;  // of that of the step before
    auto step = block.walk();
    if constexpr (S.ragged) {
      if (block.steps > 0) {
        zero_rows_behind<kKeys, kHow.row_d, kHow.panels_d, kHow.row_v, kHow.panels_v, kGroups * 128>(
            base + kSizes.k_at, base + kSizes.v_at, block.place.k_len - block.key0);
      }
    }
    u32 v_held[kHow.held_v > 0 ? kHow.held_v : 1][4];
    u32 k_held[kHow.held_k > 0 ? kHow.held_k : 1][4];
    if constexpr (kHow.held_v > 0) {
      if (block.steps > 0) {
        const int row = c * 64 + warp * 16 + lane % 16;
        hold_rows<kHow.held_v, kKeys, kPanelV>(v_held, base + kSizes.v_at, row, lane / 16);
        hold_rows<kHow.held_k, kKeys, kPanelD>(k_held, base + kSizes.k_at, row, lane / 16);
      }
    }
#pragma unroll 1
    for (int n = 0; n < block.steps; ++n) {
      if (block.begins_head(step)) {
        if constexpr (S.column_sum) {
#pragma unroll
          for (int f = 0; f < kBlocks; ++f) {
            if (n > 0) {
              scores[f].store_sums(a, block, step.head, block.key0 + (c * kBlocks + f) * 64 + warp * 16 + g, t);
            }
          }
        }
        block.begin_head(step);
        added.begin_head(a, block.place, step.head, block.key0 + c * kBlocks * 64, thread);
#pragma unroll
        for (int f = 0; f < kBlocks; ++f) {
          scores[f].begin_head(a, m, block.place, step.head, block.key0 + (c * kBlocks + f) * 64 + warp * 16 + g);
        }
      }
      const u32 q_now = ring_q.buffer() * (kSizes.q / 16);
      const u32 o_now = ring_q.buffer() * (kSizes.grad_out / 16);
      const u32 tile = base + kSizes.grads_at + ring_grads.buffer() * kSizes.grads;
      const u32 lse = base + kSizes.lse_at + ring_q.buffer() * kSizes.rows + t * 8;
      const u32 delta = lse + (kSizes.delta_at - kSizes.lse_at);
#pragma unroll
      for (int f = 0; f < kBlocks; ++f) {
        scores[f].mask.load(m.mask, step.query);
      }
      barriers.template await_queries<S>(ring_q.buffer(), ring_q.parity());
      if constexpr (S.ragged) {
        zero_rows_behind<M, kHow.row_d, kHow.panels_d, kHow.row_v, kHow.panels_v, kGroups * 128>(
            base + kSizes.q_at + ring_q.buffer() * kSizes.q,
            base + kSizes.grad_out_at + ring_q.buffer() * kSizes.grad_out, block.place.q_len - step.query);
      }
      // One barrier for all warpgroups, whatever their own keys meet; else behind the products.
      if constexpr (kHow.skips) {
        work.clear_dead();
      }
#pragma unroll
      for (int i = 0; i < kBlocks * kParts; ++i) {
        const int f = i / kParts;
        const int part = i % kParts;
        const int key = block.key0 + (c * kBlocks + f) * 64;
        const int first = step.query + part * P;
        const u32 panel = tile + (c * kBlocks + f) * M * 128 + part * P * 128 + fragment;
        const u32 lse_here = lse + part * P * 4;
        const u32 delta_here = delta + part * P * 4;
        math::TileClass kind = math::TileClass::kFull;
        if constexpr (S.banded) {
          kind = block.band.tile(first, first + P, key, key + 64);
        }
        if (kHow.skips && kind == math::TileClass::kEmpty) {
          work.await_tile(i);
          if (kOuter && i == 0) {
            barrier_wait(barriers.outer_full(ring_outer.buffer()), ring_outer.parity());
          }
          if constexpr (S.dq) {
            constexpr u32 kNone[P / 4] = {};
            store_transposed(panel, kNone);
          }
          if constexpr (S.summed > 1) {
            summed.take(a, m.summed, block);
          }
          continue;
        }
        float s[P / 2];
        float dp[P / 2];
        wgmma_fence();
        multiply<kType, D, kHow.held_k>(s, k_held, k_rows.row(f * 64), q_rows.moved(q_now).row(part * P));
        wgmma_commit();
        const auto multiply_dp = [&] {
          multiply<kType, V, kHow.held_v>(dp, v_held, v_rows.row(f * 64), o_rows.moved(o_now).row(part * P));
          wgmma_commit();
        };
        if constexpr (!kHow.dp_behind) {
          multiply_dp();
        }
        if (!kHow.skips && i == 0) {
          work.clear_dead();
        }
        if constexpr (S.summed > 1 && S.planes == 2) {
          summed.take(a, m.summed, block);
        }
        work.await_tile(i);
        typename Scores::Loaded loaded;
        loaded.load(panel, lse_here, 0);
        wgmma_wait<kHow.dp_behind ? 0 : 1>();
        pin(s);
        if constexpr (kHow.overlaps) {
          if (i > 0) {
            pin(dk[i > 0 ? (i - 1) / kParts : 0]);
            pin(dv[i > 0 ? (i - 1) / kParts : 0]);
          }
        }
        const auto outer_tile = [&](int at, int bytes, BiasTile type) {
          return base + at + ring_outer.buffer() * bytes + (c * kBlocks + f) * M * 64 * bias_bytes(type);
        };
        const typename Scores::Outer outer(outer_tile(kSizes.outer_at, kSizes.outer, S.bias),
                                           outer_tile(kSizes.outer2_at, kSizes.outer2, S.bias2), fragment, warp, g, t);
        if (kOuter && i == 0) {
          barrier_wait(barriers.outer_full(ring_outer.buffer()), ring_outer.parity());
        }
        scores[f].weigh(s, a, m, loaded, outer, panel, lse_here, first, key + warp * 16 + g, t);
        const bool masked = scores[f].mask.hide(s, first);
        const bool edge = kind != math::TileClass::kFull || key + 64 > block.place.k_len ||
                          (S.row_sum && scores[f].has_hidden()) ||
                          (kMaskQueries<S> && step.query + M > block.place.q_len);
        if (edge) {
          scores[f].mask_edge(s, block, first, key + warp * 16 + g, t);
        }
        u32 weights[P / 4];
        u32 grads[P / 4];
        const auto multiply_dv = [&] {
          multiply_add<kType, P>(dv[f], weights, o_inside, o_now, part * P / 16);
          wgmma_commit();
        };
        if constexpr (kHow.packs) {
          scores[f].weights_of(weights, s);
          if constexpr (kHow.dp_behind) {
            wgmma_fence();
            multiply_dp();
            multiply_dv();
            wgmma_wait<1>();
            pin(dp);
          } else {
            wgmma_wait<0>();
            pin(dp);
            wgmma_fence();
            multiply_dv();
          }
          gradients_of_packed<S>(grads, weights, dp, a, delta_here, edge);
        } else {
          loaded.load_rows(delta_here, 0);
          wgmma_wait<0>();
          pin(dp);
          scores[f].gradients(grads, s, dp, a, loaded, delta_here, block.row0 + step.head * int(a.padded_rows) + first,
                              edge || masked, added.at(a, first, key, f));
          if constexpr (S.dkv) {
            scores[f].weights_of(weights, s);
            wgmma_fence();
            multiply_dv();
          }
        }
        if constexpr (S.dq) {
          if constexpr (kBias) {
            __syncwarp();  // the bias, which lies there, has been read
          }
          store_transposed(panel, grads);
        }
        float dq[S.same_step ? Sm90BackwardStep<S>::kSums : 1];
        work.begin_own_dq(dq);
        if constexpr (S.dkv) {
          multiply_add<kType, P>(dk[f], grads, q_inside, q_now, part * P / 16);
          wgmma_commit();
        }
        work.end_own_dq(dq, block.row0 + step.head * int(a.padded_rows) + step.query);
        if constexpr (S.summed > 1 && S.planes > 2) {
          summed.take(a, m.summed, block);
        }
        if (!kHow.overlaps && i + 1 < kBlocks * kParts) {
          wgmma_wait<0>();
          pin(dk[f]);
          pin(dv[f]);
        }
      }
      work.release_outer(ring_outer);
      const int row_now = S.direct ? step.query : block.row0 + step.head * int(a.padded_rows) + step.query;
      work.end(n, grads_before, row_before, turn_before);
      grads_before = ring_grads;
      row_before = row_now;
      if constexpr (S.summed > 1) {
        summed.sent(step.head, step.query);
      }
      head_before = step.head;
      turn_before = turn;
      turn = turn + 1 == kGroups ? 0 : turn + 1;
      block.next(step);
      ring_q.next();
      ring_grads.next();
    }
    work.end_block(m, stored_keys, grads_before, row_before, turn_before);
    if constexpr (!S.tile_stores) {
      // Made anew: the block need not stay in registers.
      sm90_backward_store<S>(a, m, Sm90KeyBlock<S>(a, m, u32(opaque(int(number)))), scores, dk, dv, number, c,
                             step.head, warp, lane);
    }
    if constexpr (S.summed > 1) {
      if (summed.ends) {
        summed.take(a, m.summed, Sm90KeyBlock<S>(a, m, u32(opaque(int(number)))));
      }
    }
  }
  if constexpr (S.converts) {
    sm90_backward_convert<S, 2>(a, m);
  }
}

template <Sm90BackwardSpec S>
__device__ __forceinline__ void sm90_backward_block(const Args& a, const Sm90BackwardArgs& m) {
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  constexpr Sm90BackwardChoices kHow = sm90_backward_choices(S);
  static_assert(kHow.valid && (sm90_turns_dq(S) || kRowPad % S.step == 0));

  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 base = shared_address(memory);
  const Sm90BackwardBarriers barriers{base + kSizes.barriers_at};
  const int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0);
  if (threadIdx.x == 0) {
    barriers.template init<S>();
  }
  if constexpr (S.summed > 1) {
    cluster_sync();
  } else {
    sync();
  }
  sm90_begin_backward<S>();

  if (warpgroup == 0 || (sm90_stores_apart(S) && warpgroup > kSizes.groups)) {
    fewer_registers<kHow.registers_to_copy>();
    sm90_backward_move<S>(a, m, base, reinterpret_cast<Sm90Loads*>(memory + kSizes.loads_at), barriers);
    return;
  }
  more_registers<kHow.registers>();
  sm90_backward_compute<S>(a, m, memory, base, barriers, warpgroup - 1);
}

template <Sm90BackwardSpec S>
__global__ void __launch_bounds__(sm90_backward_sizes(S).threads, 1)
    sm90_backward(const __grid_constant__ Args a, const __grid_constant__ Sm90BackwardArgsOf<S> m) {
  sm90_backward_block<S>(a, m);
}

// The gradient of a bias that batch entries share, too: in clusters.
template <Sm90BackwardSpec S>
__global__ void __cluster_dims__(S.summed, 1, 1) __launch_bounds__(sm90_backward_sizes(S).threads, 1)
    sm90_summed_backward(const __grid_constant__ Args a, const __grid_constant__ Sm90BackwardArgs m) {
  sm90_backward_block<S>(a, m);
}

}  // namespace fovea::cuda
