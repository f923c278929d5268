// SPDX-License-Identifier: Apache-2.0
//
// Backward whose P and dS both go through shared memory, so that each product has a grid of warps of its own: for head
// dimensions over 64, where one warp cannot own both enough keys (to share what it loads) and all columns of dK and dV.
//
// A block owns grid_s * tiles * 16 keys of one key head and walks over the queries of all its query heads, `step` at a
// time:
//
//   wait for step n | barrier | copies of n + 1 start | S^T = K Q^T, dP^T = V dO^T, P^T, dS^T to shared memory
//                   | barrier | dV += P^T dO, dK += dS^T Q, dQ = dS K
//
//   S, dP    grid_s warps along the keys (tiles * 16 each) by step / part along the queries (`part` each)
//   dV, dK   grid_o warps along the keys, the rest along the columns; sums stay in registers
//   dQ       grid_q warps along the queries, the rest along the columns; added to dq_sum as in generic/backward.cuh
//
// Blocks: batch * heads_k * ceil(limit_k / keys), of warps * 32 threads.
#pragma once

#include "cuda/device/generic/backward_output.cuh"
#include "cuda/device/generic/grad_scores.cuh"

namespace fovea::cuda {

// How many of `blocks` column blocks a warp takes at a time, so that its sums stay under 64 registers.
constexpr int blocks_at_once(int row_tiles, int blocks) {
  int best = blocks;
  while (best > 1 && (best * row_tiles > 7 || blocks % best != 0)) {
    --best;
  }
  return best;
}

template <BackwardSpec S>
__global__ void __launch_bounds__(S.warps * 32, S.ctas) generic_wide_backward(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  constexpr int D = S.d;
  constexpr int V = S.dv;
  constexpr int T = S.tiles;
  constexpr int M = S.step;
  constexpr int P = S.part;
  constexpr int N = wide_backward_keys(S);
  constexpr Type kType = S.type;
  constexpr int kRowD = row_of_tile(kType, D);
  constexpr int kRowV = row_of_tile(kType, V);
  constexpr int kWarpsS = S.grid_s * (M / P);  // warps that S and dP take
  constexpr int TO = N / S.grid_o / 16;        // dV, dK: row tiles of a warp
  constexpr int kWarpsO = S.warps / S.grid_o;  //   warps along the columns
  constexpr int CD = D / kWarpsO / 16;         //   and column blocks of a warp
  constexpr int CV = V / kWarpsO / 16;
  constexpr u32 kLo = N * M * 2;  // pairs: from hi to lo of P, dS
  constexpr u32 kGradBytes = N * M * element_bytes(kType);
  constexpr u32 kSumBytes = S.column_sum ? N * (M / P) * 4 : 0;
  using Loader = StepLoader<S, N, S.warps * 32>;
  static_assert(M % P == 0 && kRowPad % M == 0 && M % 16 == 0 && kWarpsS <= S.warps);
  static_assert(N % (S.grid_o * 16) == 0 && D % (kWarpsO * 16) == 0 && V % (kWarpsO * 16) == 0);
  static_assert(N * (kRowD + kRowV) * 2 + 2 * kGradBytes + kSumBytes + S.stages * Loader::kBytes ==
                wide_backward_shared_bytes(S));

  extern __shared__ __align__(128) unsigned char memory[];
  const u32 keys = shared_address(memory);
  const u32 values = keys + N * kRowD * 2;
  const u32 weights = values + N * kRowV * 2;
  const u32 grads = weights + kGradBytes;
  const u32 stages = grads + kGradBytes;
  const u32 all_sums = stages + S.stages * Loader::kBytes;
  const Thread thread;
  const int key_warp = thread.warp % S.grid_s;    // in S
  const int query_warp = thread.warp / S.grid_s;  // in S
  const int row_warp = thread.warp % S.grid_o;    // in dV, dK
  const int column_warp = thread.warp / S.grid_o;

  const KeyBlock<S> block(a, N);
  if (block.outside()) {
    return;
  }
  const Place& place = block.place;
  const int key0 = block.n0 + key_warp * T * 16;
  const Loader loader(a, block);
  block.template load_keys<N>(a, keys, values, thread.index);
  StepPlace now = block.first_step();
  StepPlace after = now;

  float dk[TO][2 * CD][4] = {};
  float dv[TO][2 * CV][4] = {};
  float sums[T][2] = {};  // of dS over queries
  const typename Tile<kRowD>::Lane rows_d(0, thread.lane);
  const typename Tile<kRowD>::Lane columns_d(0, thread.lane, true);
  const typename Tile<kRowV>::Lane rows_v(0, thread.lane);
  const typename Tile<kRowV>::Lane columns_v(0, thread.lane, true);
  const typename Tile<M>::Lane rows_p(row_warp * TO * 16 * M * 2, thread.lane);
  const BlockLane<kRowD, CD> blocks_d(column_warp * CD, thread.lane);
  const BlockLane<kRowV, CV> blocks_v(column_warp * CV, thread.lane);
  const u32 my_keys = keys + key_warp * T * 16 * kRowD * 2;
  const u32 my_values = values + key_warp * T * 16 * kRowV * 2;
  HeadState<S, true, T, P / 8> head;

  // Sums over the queries of a head: each warp's, then those of one key in order.
  const auto store_sums = [&](u32 of_head, float factor) {
#pragma unroll
    for (int i = 0; i < T; ++i) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const float sum = quad_sum(sums[i][x]) * factor;
        if (thread.t == 0 && thread.warp < kWarpsS) {
          store_shared(all_sums + (query_warp * N + (key_warp * T + i) * 16 + thread.g + x * 8) * 4, sum);
        }
        sums[i][x] = 0;
      }
    }
    sync();
    float* const to = a.column_sum + (i64(place.b) * a.rows.heads_q + of_head) * a.column_pitch + block.n0;
    for (int i = thread.index; i < N; i += S.warps * 32) {
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < M / P; ++warp) {
        sum += load_shared(all_sums + (warp * N + i) * 4);
      }
      if (block.n0 + i < place.k_len) {
        to[i] = sum;
      }
    }
    sync();
  };

#pragma unroll 1
  for (int n = -1; n < block.steps; ++n) {  // -1: copies alone
    if (n >= 0) {
      copy_wait<0>();
      sync();
      block.next(after);
    }
    if (n + 1 < block.steps) {
      loader.load(stages + (n + 1) % S.stages * Loader::kBytes, after, thread.index);
    }
    copy_commit();
    if (n < 0) {
      continue;
    }
    if (block.begins_head(now)) {
      if constexpr (S.column_sum) {
        if (n > 0) {
          store_sums(now.head - 1, head.factors.sum);
        }
      }
      head = HeadState<S, true, T, P / 8>(a, place, now.head, block.head_k, key0, thread.g);
    }

    // P^T and dS^T
    const u32 stage = stages + n % S.stages * Loader::kBytes;
    Loader::clear_dead(stage, thread);
    const u32 queries = stage + Loader::kQueries;
    const u32 grad_out = stage + Loader::kGradOut;
    const int m0 = block.query(now);
    constexpr bool kLifts = is_pair(kType) && !S.dq;
    float lowered = 1;
    if (kWarpsS == S.warps || thread.warp < kWarpsS) {
      const int part = query_warp * P;
      float s[T][P / 8][4] = {};
      float dp[T][P / 8][4] = {};
      math::TileClass kind = math::TileClass::kFull;
      if constexpr (S.banded) {
        kind = block.band.tile(m0 + part, m0 + part + P, key0, key0 + T * 16);
      }
      if (!S.banded || kind != math::TileClass::kEmpty) {
        if constexpr (P == 8) {
          add_rows_by_8_rows<kType, D>(s, my_keys, rows_d, queries, part, thread.lane);
          add_rows_by_8_rows<kType, V>(dp, my_values, rows_v, grad_out, part, thread.lane);
        } else {
          add_rows_by_rows<kType, D>(s, my_keys, rows_d, queries + part * kRowD * 2, columns_d);
          add_rows_by_rows<kType, V>(dp, my_values, rows_v, grad_out + part * kRowV * 2, columns_v);
        }
        const bool edge = kind == math::TileClass::kEdge || key0 + T * 16 > place.k_len;
        grad_scores<S, true, S.column_sum, false, typename Loader::Inputs, M, N>(
            s, dp, sums, a, thread, head, block.band, edge, stage + Loader::kLse, stage + Loader::kInputs,
            key_warp * T * 16, part, key0, m0 + part);
      }
      if constexpr (kLifts) {
        lowered = lift_small<true>(a, s, dp);
      }
      store_pairs<kType, M>(weights, kLo, s, key_warp * T * 16, part / 8, thread);
      store_pairs<kType, M>(grads, kLo, dp, key_warp * T * 16, part / 8, thread);
    } else if constexpr (kLifts) {
      lowered = lift_of_others(a);
    }
    sync();

    // dV += P^T dO, dK += dS^T Q
    if constexpr (S.dkv) {
      const auto operand_at = [&](u32 tile, int i, int kk) {
        Operand<kType> x;
        ldmatrix(x.hi, tile + rows_p.at(i * 16, kk));
        if constexpr (is_pair(kType)) {
          ldmatrix(x.lo, tile + kLo + rows_p.at(i * 16, kk));
        }
        return x;
      };
      const BlockLane<kRowV, CV> lo_v(column_warp * CV + V / 16, thread.lane);
      const BlockLane<kRowD, CD> lo_d(column_warp * CD + D / 16, thread.lane);
      add_columns<kType, TO, 2 * CV, M / 16>(
          dv, [&](int i, int kk) { return operand_at(weights, i, kk); },
          [&](int kk, int j) {
            return grad_out + (j < CV ? blocks_v.at(kk * 16, j) : lo_v.at(kk * 16, j < CV ? 0 : j - CV));
          },
          CV, head.factors.v * lowered);
      add_columns<kType, TO, 2 * CD, M / 16>(
          dk, [&](int i, int kk) { return operand_at(grads, i, kk); },
          [&](int kk, int j) {
            return queries + (j < CD ? blocks_d.at(kk * 16, j) : lo_d.at(kk * 16, j < CD ? 0 : j - CD));
          },
          CD, head.factors.k * lowered);
    }
    // dQ = dS K, some columns of a warp at a time
    if constexpr (S.dq) {
      constexpr int kWarpsD = S.warps / S.grid_q;
      constexpr int R = M / S.grid_q / 16;
      constexpr int kBlocks = D / kWarpsD / 16;
      constexpr int C = blocks_at_once(R, kBlocks);
      static_assert(R >= 1 && D % (kWarpsD * 16) == 0 && M % (S.grid_q * 16) == 0);
      const int wq = thread.warp % S.grid_q;
      const int wd = thread.warp / S.grid_q;
      float* const to = a.dq_sum + (loader.row0 + now.head * a.padded_rows + m0) * D +
                        (wq * R * (D / 8) + wd * kBlocks * 2) * 128 + thread.lane * 4;
#pragma unroll
      for (int j0 = 0; j0 < kBlocks; j0 += C) {
        float dq[R][2 * C][4] = {};
        add_grad_query<S, R, C, N, M>(dq, grads, wq * R, keys, wd * kBlocks + j0, thread.lane, head.factors.q);
#pragma unroll
        for (int i = 0; i < R; ++i) {
#pragma unroll
          for (int j = 0; j < 2 * C; ++j) {
            reduce4<S.arch>(to + (i * (D / 8) + 2 * j0 + j) * 128, dq[i][j]);
          }
        }
      }
    }
    now = after;
  }
  copy_wait<0>();
  sync();
  if constexpr (S.column_sum) {
    block.end_sums(head.factors.sum, store_sums);
  }

  // dk, dv through the K and V tiles.
  if constexpr (S.dkv) {
    const KeyBlock<S> same(a, N);  // made anew: it need not stay in registers through the loop
    const int left = same.place.k_len - same.n0;
    const i64 to_k = same.place.key_rows(a.grad_k.strides, same.head_k) + same.n0 * a.grad_k.strides.row;
    const i64 to_v = same.place.key_rows(a.grad_v.strides, same.head_k) + same.n0 * a.grad_v.strides.row;
    const int row = row_warp * TO * 16;  // of this warp's part
    const int chunk_k = column_warp * CD * 2;
    const int chunk_v = column_warp * CV * 2;
    put_gradient<S, D>(keys, dk, a.scale, thread, row, chunk_k);
    put_gradient<S, V>(values, dv, keep_scale<S>(a), thread, row, chunk_v);
    sync();
    if (a.grad_k.data != nullptr) {
      store_gradient<S, D, N, S.warps * 32>(a.grad_k, to_k, keys, a.results.k, dk, a.scale, left, a.out_dim,
                                            a.vector_stores, thread, row, chunk_k);
    }
    if (a.grad_v.data != nullptr) {
      store_gradient<S, V, N, S.warps * 32>(a.grad_v, to_v, values, a.results.v, dv, keep_scale<S>(a), left,
                                            a.out_dim_v, a.vector_stores, thread, row, chunk_v);
    }
  }
}

}  // namespace fovea::cuda
