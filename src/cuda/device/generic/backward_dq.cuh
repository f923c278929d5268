// SPDX-License-Identifier: Apache-2.0
//
// dQ alone, by recomputing S and dP with queries as rows: with it a backward takes seven products instead of five, but
// no sum in memory, no atomics and no conversion, and gives the same bits every run. It serves deterministic calls, and
// those that want dQ only.
//
// A block owns warps * tiles * 16 queries of one head and walks over the keys that they meet, `step` at a time. Each
// warp owns `tiles` row tiles of 16 queries; dS is the next product's operand as it stands in registers:
//
//   wait for step n | barrier | copies of n + 1 start | S = Q K^T, dP = dO V^T, dS, dQ += dS K
//
// With Spec::row_sum the sums of dS over keys go to Args::row_sum, for the gradients of biases without keys; without
// Spec::dq nothing else. (In exact numbers they are dlse and the sink's part alone, but out is rounded.)
//
// Where dQ is wider than registers hold, grid_o blocks share its columns, each with all of S.
// Blocks: batch * heads_q * ceil(limit_q / queries) * grid_o, of warps * 32 threads.
#pragma once

#include "cuda/device/generic/backward_output.cuh"
#include "cuda/device/generic/grad_scores.cuh"
#include "cuda/device/work/query_block.cuh"

namespace fovea::cuda {

template <BackwardSpec S>
__global__ void __launch_bounds__(S.warps * 32, S.ctas) generic_backward_dq(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  constexpr int D = S.d;
  constexpr int V = S.dv;
  constexpr int T = S.tiles;
  constexpr int N = S.step;
  constexpr int M = backward_dq_rows(S);
  constexpr int kThreads = S.warps * 32;
  constexpr Type kType = S.type;
  constexpr int kRowD = row_of_tile(kType, D);
  constexpr int kRowV = row_of_tile(kType, V);
  constexpr int C = D / S.grid_o / 16;  // column blocks of dQ in this block of threads
  using Inputs = ScoreInputs<S, false, M, N, kThreads>;
  constexpr u32 kValues = N * kRowD * 2;
  constexpr u32 kInputs = kValues + N * kRowV * 2;
  constexpr u32 kStageBytes = kInputs + Inputs::kBytes;
  static_assert(D % (S.grid_o * 16) == 0 && N % 16 == 0 && kRowPad % M == 0);
  static_assert(M * (kRowD + kRowV) * 2 + M * 8 + S.stages * kStageBytes == backward_dq_shared_bytes(S));

  extern __shared__ __align__(128) unsigned char memory[];
  const u32 queries = shared_address(memory);
  const u32 grad_out = queries + M * kRowD * 2;
  const u32 row_vectors = grad_out + M * kRowV * 2;
  const u32 stages = row_vectors + M * 8;
  const Thread thread;

  const QueryBlock<S, M, S.grid_o> block(a);
  const Place& place = block.place;
  const int first_column = block.chunk * C;
  const u32 h = block.head;
  const u32 head_k = block.head_k(a);
  const int m0 = block.m0;
  if (m0 >= place.q_len) {
    return;
  }
  const int row0 = m0 + thread.warp * T * 16;
  const math::Band<int> band = place.band<S>(a);
  const auto [first, last] = block.template steps<N>(a, band);

  const u16* const k = key_data(a.k, place, head_k);
  const u16* const v = key_data(a.v, place, head_k);
  const auto load = [&](int n) {
    const u32 to = stages + n % S.stages * kStageBytes;
    const int n0 = n * N;
    const int position = opaque(thread.index);
    load_rows<S, D, N>(to, a.k, k + n0 * a.k.strides.row, place.k_len - n0, a.head_dim, position);
    load_rows<S, V, N>(to + kValues, a.v, v + n0 * a.v.strides.row, place.k_len - n0, a.head_dim_v, position);
    Inputs::load(to + kInputs, a, place, h, m0, n0, position);
  };
  const int rows = place.q_len - m0;
  load_rows<S, D, M>(queries, a.q, query_data(a.q, place, h) + m0 * a.q.strides.row, rows, a.head_dim, thread.index);
  load_rows<S, V, M>(grad_out, a.grad_out, query_data(a.grad_out, place, h) + m0 * a.grad_out.strides.row, rows,
                     a.head_dim_v, thread.index);
  load_row_vectors<M, kThreads>(row_vectors, a, row_of_head(a, place.b, h, place.queries()) + m0, thread.index);
  if (first < last) {
    load(first);
  }
  copy_commit();

  float dq[T][2 * C][4] = {};
  float sums[T][2] = {};  // of dS over keys
  const ProductLanes<S> lanes(thread.lane);
  const ColumnLane<kType, D, C> blocks(first_column, thread.lane);
  const u32 my_queries = queries + thread.warp * T * 16 * kRowD * 2;
  const u32 my_grad_out = grad_out + thread.warp * T * 16 * kRowV * 2;
  HeadState<S, false, T, N / 8> head(a, place, h, head_k, row0, thread.g);

#pragma unroll 1
  for (int n = first; n < last; ++n) {
    if constexpr (S.stages == 1) {
      if (n > first) {
        sync();
        load(n);
        copy_commit();
      }
    }
    copy_wait<0>();
    sync();
    if constexpr (S.stages > 1) {
      if (n + 1 < last) {
        load(n + 1);
      }
      copy_commit();
    }
    const int n0 = n * N;
    math::TileClass kind = math::TileClass::kFull;
    if constexpr (S.banded) {
      kind = band.tile(row0, row0 + T * 16, n0, n0 + N);
      if (kind == math::TileClass::kEmpty) {
        continue;
      }
    }
    const u32 stage = stages + n % S.stages * kStageBytes;
    Operand<kType> ds[T][N / 16];
    float lowered = 1;
    {
      float s[T][N / 8][4] = {};
      float dp[T][N / 8][4] = {};
      lanes.add_scores(s, my_queries, stage);
      lanes.add_grads(dp, my_grad_out, stage + kValues);
      const bool edge = kind == math::TileClass::kEdge || n0 + N > place.k_len;
      grad_scores<S, false, S.row_sum, false, Inputs, M, N>(s, dp, sums, a, thread, head, band, edge, row_vectors,
                                                            stage + kInputs, thread.warp * T * 16, 0, row0, n0);
      if constexpr (is_pair(kType)) {
        lowered = lift_small<false>(a, s, dp);
      }
      make_operands(ds, dp);
    }
    if constexpr (S.dq) {
      add_columns<kType, T, 2 * C, N / 16>(
          dq, [&](int i, int kk) { return ds[i][kk]; }, [&](int kk, int j) { return stage + blocks.at(kk * 16, j); }, C,
          head.factors.q * lowered);
    }
  }
  copy_wait<0>();
  sync();

  if constexpr (S.row_sum) {
    if (first_column == 0) {
      float* const to = a.row_sum + row_of_head(a, place.b, h, place.queries()) + row0;  // padded: all rows exist
      store_row_sums<false>(sums, head.factors.sum, thread,
                            [&](float sum, int i, int x) { to[i * 16 + thread.g + x] = sum; });
    }
  }
  if constexpr (!S.dq) {
    return;
  }

  // dq through the Q tile, each warp its own rows.
  const int left = place.q_len - row0;
  const i64 to = place.query_rows(a.grad_q.strides, h) + row0 * a.grad_q.strides.row;
  constexpr int kColumns = C * 16;
  put_gradient<S, kColumns>(my_queries, dq, a.scale, thread);
  __syncwarp();
  store_gradient<S, kColumns, T * 16>(a.grad_q, to + first_column * 16 * a.grad_q.strides.col, my_queries, a.results.q,
                                      dq, a.scale, left, a.out_dim - first_column * 16, a.vector_stores, thread);
}

}  // namespace fovea::cuda
