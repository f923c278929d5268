// SPDX-License-Identifier: Apache-2.0
//
// Backward for head dimensions up to 64: dk and dv, and dq where Spec::dq says so.
//
// A block owns warps * tiles * 16 keys of one key head and walks over the queries of all its query heads, `step` at a
// time. Each warp owns `tiles` row tiles of 16 keys of S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are
// operands of dV += P^T dO and dK += dS^T Q as they stand in registers, `part` queries at a time. Only dS^T goes
// through shared memory: dQ = dS K is shared out among the warps anew (grid_q of them along the queries) and added to
// dq_sum, in L2, in the order of the accumulators (backward_convert).
//
//   wait for step n | barrier | copies of n + 1 start | [dQ of n - 1] | S, dP, P, dS, dV, dK | [barrier | dQ of n]
//
// `delay` takes dQ of a step during the next: one barrier a step, but two buffers of dS. Without a band the blocks
// begin at different query tiles, so that their sums do not meet.
//
// Blocks: batch * heads_k * ceil(limit_k / keys), of warps * 32 threads.
#pragma once

#include "cuda/device/generic/backward_output.cuh"
#include "cuda/device/generic/grad_scores.cuh"

namespace fovea::cuda {

template <BackwardSpec S>
__global__ void __launch_bounds__(S.warps * 32, S.ctas) generic_backward(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  constexpr int D = S.d;
  constexpr int V = S.dv;
  constexpr int T = S.tiles;
  constexpr int M = S.step;
  constexpr int P = S.part;
  constexpr int N = backward_keys(S);
  constexpr Type kType = S.type;
  constexpr int kRowD = row_of_tile(kType, D);
  constexpr int kRowV = row_of_tile(kType, V);
  constexpr u32 kGradBytes = N * M * element_bytes(kType);  // of one buffer of dS
  using Loader = StepLoader<S, N, S.warps * 32>;
  static_assert(M % P == 0 && P % 16 == 0 && kRowPad % M == 0);
  static_assert(N * (kRowD + kRowV) * 2 + (S.dq ? kGradBytes * (S.delay ? 2 : 1) : 0) + S.stages * Loader::kBytes ==
                backward_shared_bytes(S));

  extern __shared__ __align__(128) unsigned char memory[];
  const u32 keys = shared_address(memory);
  const u32 values = keys + N * kRowD * 2;
  const u32 grads = values + N * kRowV * 2;
  const u32 stages = grads + (S.dq ? kGradBytes * (S.delay ? 2 : 1) : 0);
  const Thread thread;

  const KeyBlock<S> block(a, N);
  if (block.outside()) {
    return;
  }
  const Place& place = block.place;
  const int key0 = block.n0 + thread.warp * T * 16;
  const Loader loader(a, block);
  block.template load_keys<N>(a, keys, values, thread.index);
  StepPlace now = block.first_step();
  StepPlace after = now;
  StepPlace before = now;
  if (block.steps > 0) {
    loader.load(stages, now, thread.index);
  }
  copy_commit();

  float dk[T][D / 8][4] = {};
  float dv[T][V / 8][4] = {};
  float sums[T][2] = {};  // of dS over queries
  const typename Tile<kRowD>::Lane rows_d(0, thread.lane);
  const typename Tile<kRowD>::Lane columns_d(0, thread.lane, true);
  const typename Tile<kRowV>::Lane rows_v(0, thread.lane);
  const typename Tile<kRowV>::Lane columns_v(0, thread.lane, true);
  const u32 my_keys = keys + thread.warp * T * 16 * kRowD * 2;
  const u32 my_values = values + thread.warp * T * 16 * kRowV * 2;
  HeadState<S, true, T, P / 8> head(a, place, block.head0, block.head_k, key0, thread.g);
  float query_factor_before = head.factors.q;

  // dQ = dS K of one step.
  const auto add_dq = [&](int n, const StepPlace& at, float factor) {
    if constexpr (S.dq) {
      constexpr int kWarpsQ = S.grid_q;
      constexpr int kWarpsD = S.warps / kWarpsQ;
      constexpr int R = M / kWarpsQ / 16;
      constexpr int C = D / kWarpsD / 16;
      static_assert(R >= 1 && C >= 1 && D % (kWarpsD * 16) == 0 && M % (kWarpsQ * 16) == 0);
      const int wq = thread.warp % kWarpsQ;
      const int wd = thread.warp / kWarpsQ;
      float dq[R][2 * C][4] = {};
      add_grad_query<S, R, C, N, M>(dq, grads + (S.delay ? n & 1 : 0) * kGradBytes, wq * R, keys, wd * C, thread.lane,
                                    factor);
      float* const to = a.dq_sum + (loader.row0 + at.head * a.padded_rows + block.query(at)) * D +
                        (wq * R * (D / 8) + wd * C * 2) * 128 + opaque(thread.lane) * 4;
#pragma unroll
      for (int i = 0; i < R; ++i) {
#pragma unroll
        for (int j = 0; j < 2 * C; ++j) {
          reduce4<S.arch>(to + (i * (D / 8) + j) * 128, dq[i][j]);
        }
      }
    }
  };
  // Sums over the queries of a head.
  const auto store_sums = [&](u32 of_head, float factor) {
    store_column_sums(a, place, of_head, key0, sums, factor, thread);
  };

#pragma unroll 1
  for (int n = 0; n < block.steps; ++n, before = now, now = after) {
    copy_wait<0>();
    sync();
    block.next(after);
    if (n + 1 < block.steps) {
      loader.load(stages + (n + 1) % S.stages * Loader::kBytes, after, thread.index);
    }
    copy_commit();
    if constexpr (S.dq && S.delay) {
      if (n > 0) {
        add_dq(n - 1, before, query_factor_before);
      }
    }

    const u32 stage = stages + n % S.stages * Loader::kBytes;
    Loader::clear_dead(stage, thread);
    const u32 queries = stage + Loader::kQueries;
    const u32 grad_out = stage + Loader::kGradOut;
    const u32 grads_to = grads + (S.delay ? n & 1 : 0) * kGradBytes;
    const int m0 = block.query(now);
    if (n > 0 && block.begins_head(now)) {
      if constexpr (S.column_sum) {
        store_sums(now.head - 1, head.factors.sum);
      }
      head = HeadState<S, true, T, P / 8>(a, place, now.head, block.head_k, key0, thread.g);
    }
    query_factor_before = head.factors.q;
#pragma unroll
    for (int part = 0; part < M; part += P) {
      Operand<kType> p_operand[T][P / 16];
      Operand<kType> ds_operand[T][P / 16];
      float lowered = 1;
      math::TileClass kind = math::TileClass::kFull;
      if constexpr (S.banded) {
        kind = block.band.tile(m0 + part, m0 + part + P, key0, key0 + T * 16);
        if (kind == math::TileClass::kEmpty) {
          if constexpr (S.dq) {
            const float zero[T][P / 8][4] = {};
            store_pairs<kType, M>(grads_to, N * M * 2, zero, thread.warp * T * 16, part / 8, thread);
          }
          continue;
        }
      }
      {
        float s[T][P / 8][4] = {};
        float dp[T][P / 8][4] = {};
        add_rows_by_rows<kType, D>(s, my_keys, rows_d, queries + part * kRowD * 2, columns_d);
        add_rows_by_rows<kType, V>(dp, my_values, rows_v, grad_out + part * kRowV * 2, columns_v);
        const bool edge = kind == math::TileClass::kEdge || key0 + T * 16 > place.k_len;
        grad_scores<S, true, S.column_sum, false, typename Loader::Inputs, M, N>(
            s, dp, sums, a, thread, head, block.band, edge, stage + Loader::kLse, stage + Loader::kInputs,
            thread.warp * T * 16, part, key0, m0 + part);
        if constexpr (is_pair(kType) && !S.dq) {
          lowered = lift_small<false>(a, s, dp);
        }
        if constexpr (S.dq) {
          store_pairs<kType, M>(grads_to, N * M * 2, dp, thread.warp * T * 16, part / 8, thread);
        }
        make_operands(p_operand, s);
        make_operands(ds_operand, dp);
      }
      if constexpr (S.dkv) {
        add_columns<kType, T, V / 8, P / 16>(
            dv, [&](int i, int kk) { return p_operand[i][kk]; },
            [&](int kk, int j) { return grad_out + rows_v.at(part + kk * 16, j); }, V / 16, head.factors.v * lowered);
        add_columns<kType, T, D / 8, P / 16>(
            dk, [&](int i, int kk) { return ds_operand[i][kk]; },
            [&](int kk, int j) { return queries + rows_d.at(part + kk * 16, j); }, D / 16, head.factors.k * lowered);
      }
    }
    if constexpr (S.dq && !S.delay) {
      sync();
      add_dq(n, now, head.factors.q);
    }
  }
  copy_wait<0>();
  sync();
  if constexpr (S.dq && S.delay) {
    if (block.steps > 0) {
      add_dq(block.steps - 1, before, query_factor_before);
    }
    sync();
  }
  if constexpr (S.column_sum) {
    block.end_sums(head.factors.sum, store_sums);
  }

  // dk, dv through the K and V tiles, each warp its own rows.
  if constexpr (S.dkv) {
    const KeyBlock<S> same(a, N);  // made anew: it need not stay in registers through the loop
    const int first_key = same.n0 + thread.warp * T * 16;
    const int left = same.place.k_len - first_key;
    const i64 to_k = same.place.key_rows(a.grad_k.strides, same.head_k) + first_key * a.grad_k.strides.row;
    const i64 to_v = same.place.key_rows(a.grad_v.strides, same.head_k) + first_key * a.grad_v.strides.row;
    put_gradient<S, D>(my_keys, dk, a.scale, thread);
    put_gradient<S, V>(my_values, dv, keep_scale<S>(a), thread);
    __syncwarp();
    if (a.grad_k.data != nullptr) {
      store_gradient<S, D, T * 16>(a.grad_k, to_k, my_keys, a.results.k, dk, a.scale, left, a.out_dim, a.vector_stores,
                                   thread);
    }
    if (a.grad_v.data != nullptr) {
      store_gradient<S, V, T * 16>(a.grad_v, to_v, my_values, a.results.v, dv, keep_scale<S>(a), left, a.out_dim_v,
                                   a.vector_stores, thread);
    }
  }
}

}  // namespace fovea::cuda
