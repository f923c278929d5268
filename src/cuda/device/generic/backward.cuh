// SPDX-License-Identifier: Apache-2.0
//
// Backward for head dimensions up to 512: dk and dv, and dq where Spec::dq says so.
//
// A block owns keys of one key head and walks over the queries of all its query heads, `step` at a time:
//
//   S^T = K Q^T, dP^T = V dO^T, P^T, dS^T; dV += P^T dO, dK += dS^T Q, dQ = dS K
//
// dQ is shared out among the warps (grid_q of them along the queries, the rest along the columns) and added to dq_sum,
// in L2, in the order of the accumulators (backward_convert). There are two ways from P and dS to what they are
// multiplied by (backward_in_registers):
//
//   in registers       up to 64 columns. Each warp owns `tiles` row tiles of 16 keys of every product, so that P^T and
//                      dS^T are operands as they stand in registers, `part` queries at a time; only dS^T of dQ goes
//                      through shared memory. `delay` takes dQ of a step during the next: one barrier a step, but two
//                      buffers of dS.
//
//   wait for step n | barrier | copies of n + 1 start | [dQ of n - 1] | S, dP, P, dS, dV, dK | [barrier | dQ of n]
//
//   in shared memory   beyond, where one warp cannot own both enough keys (to share what it loads) and all columns of
//                      dK and dV: each product has a grid of warps of its own.
//
//   wait for step n | barrier | copies of n + 1 start | S, dP, P, dS to shared memory | barrier | dV, dK, dQ
//
//                      S, dP    grid_s warps along the keys (tiles * 16 each) by step / part along the queries
//                      dV, dK   grid_o warps along the keys, the rest along the columns; sums stay in registers
//
// Without a band the blocks begin at different query tiles, so that their sums do not meet.
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

// dk, dv through the K and V tiles; in registers, each warp its own rows.
template <BackwardSpec S, int TO, int kChunksD, int kChunksV>
__device__ __forceinline__ void store_key_gradients(const Args& a, const float (&dk)[TO][kChunksD][4],
                                                    const float (&dv)[TO][kChunksV][4], u32 keys, u32 values,
                                                    int row_warp, int column_warp, const Thread& thread) {
  constexpr bool kInRegisters = backward_in_registers(S);
  constexpr int N = backward_keys(S);
  constexpr int kRows = kInRegisters ? TO * 16 : N;
  constexpr int kThreads = kInRegisters ? 32 : S.warps * 32;
  const KeyBlock<S> block(a, N);  // made anew: it need not stay in registers through the loop
  const int own = kInRegisters ? row_warp * TO * 16 : 0;
  const int row = kInRegisters ? 0 : row_warp * TO * 16;
  const int first_key = block.n0 + own;
  const int left = block.place.k_len - first_key;
  const i64 to_k = block.place.key_rows(a.grad_k.strides, block.head_k) + first_key * a.grad_k.strides.row;
  const i64 to_v = block.place.key_rows(a.grad_v.strides, block.head_k) + first_key * a.grad_v.strides.row;
  const u32 tile_k = keys + own * row_of_tile(S.type, S.d) * 2;
  const u32 tile_v = values + own * row_of_tile(S.type, S.dv) * 2;
  put_gradient<S, S.d>(tile_k, dk, a.scale, thread, row, column_warp * kChunksD);
  put_gradient<S, S.dv>(tile_v, dv, keep_scale<S>(a), thread, row, column_warp * kChunksV);
  if constexpr (kInRegisters) {
    __syncwarp();
  } else {
    sync();
  }
  if (a.grad_k.data != nullptr) {
    store_gradient<S, S.d, kRows, kThreads>(a.grad_k, to_k, tile_k, a.results.k, dk, a.scale, left, a.out_dim,
                                            a.vector_stores, thread, row, column_warp * kChunksD);
  }
  if (a.grad_v.data != nullptr) {
    store_gradient<S, S.dv, kRows, kThreads>(a.grad_v, to_v, tile_v, a.results.v, dv, keep_scale<S>(a), left,
                                             a.out_dim_v, a.vector_stores, thread, row, column_warp * kChunksV);
  }
}

template <BackwardSpec S>
__global__ void __launch_bounds__(S.warps * 32, S.ctas) generic_backward(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  constexpr bool kInRegisters = backward_in_registers(S);
  constexpr int D = S.d;
  constexpr int V = S.dv;
  constexpr int T = S.tiles;
  constexpr int M = S.step;
  constexpr int P = S.part;
  constexpr int N = backward_keys(S);
  constexpr Type kType = S.type;
  constexpr int kRowD = row_of_tile(kType, D);
  constexpr int kRowV = row_of_tile(kType, V);
  constexpr int kThreads = S.warps * 32;
  constexpr int kWarpsS = kInRegisters ? S.warps : S.grid_s * (M / P);  // warps that S and dP take
  constexpr int kGridO = kInRegisters ? S.warps : S.grid_o;
  constexpr int TO = N / kGridO / 16;        // dV, dK: row tiles of a warp
  constexpr int kWarpsO = S.warps / kGridO;  //   warps along the columns
  constexpr int CD = D / kWarpsO / 16;       //   and column blocks of a warp
  constexpr int CV = V / kWarpsO / 16;
  constexpr u32 kLo = N * M * 2;                            // pairs: from hi to lo of P, dS
  constexpr u32 kGradBytes = N * M * element_bytes(kType);  // of one buffer of P or of dS
  using Loader = StepLoader<S, N, kThreads>;
  using Head = HeadState<S, true, T, P / 8>;
  static_assert(M % P == 0 && kRowPad % M == 0 && M % 16 == 0 && kWarpsS <= S.warps && (kInRegisters || !S.delay));
  static_assert(N % (kGridO * 16) == 0 && D % (kWarpsO * 16) == 0 && V % (kWarpsO * 16) == 0);

  extern __shared__ __align__(128) unsigned char memory[];
  const u32 keys = shared_address(memory);
  const u32 values = keys + N * kRowD * 2;
  const u32 weights = values + N * kRowV * 2;
  const u32 grads = weights + (kInRegisters ? 0 : kGradBytes);
  const u32 stages = weights + backward_grad_bytes(S);
  const u32 all_sums = stages + S.stages * Loader::kBytes;
  static_assert(N * (kRowD + kRowV) * 2 + backward_grad_bytes(S) + S.stages * Loader::kBytes + backward_sum_bytes(S) ==
                backward_shared_bytes(S));
  const Thread thread;
  const int key_warp = kInRegisters ? thread.warp : thread.warp % S.grid_s;  // in S
  const int query_warp = kInRegisters ? 0 : thread.warp / S.grid_s;          // in S
  const int row_warp = kInRegisters ? thread.warp : thread.warp % S.grid_o;  // in dV, dK
  const int column_warp = kInRegisters ? 0 : thread.warp / S.grid_o;

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
  StepPlace before = now;
  if constexpr (kInRegisters) {
    if (block.steps > 0) {
      loader.load(stages, now, thread.index);
    }
    copy_commit();
  }

  float dk[TO][2 * CD][4] = {};
  float dv[TO][2 * CV][4] = {};
  float sums[T][2] = {};  // of dS over queries
  const ProductLanes<S> lanes(thread.lane);
  const ColumnLane<kType, D, CD> blocks_d(column_warp * CD, thread.lane);
  const ColumnLane<kType, V, CV> blocks_v(column_warp * CV, thread.lane);
  const typename Tile<M>::Lane rows_p(row_warp * TO * 16 * M * 2, thread.lane);
  const u32 my_keys = keys + key_warp * T * 16 * kRowD * 2;
  const u32 my_values = values + key_warp * T * 16 * kRowV * 2;
  Head head;
  if constexpr (kInRegisters) {
    head = Head(a, place, block.head0, block.head_k, key0, thread.g);
  }
  float query_factor_before = 0;

  // What the keys of this warp meet of the queries from m on.
  const auto tile_class = [&](int m) {
    if constexpr (S.banded) {
      return block.band.tile(m, m + P, key0, key0 + T * 16);
    }
    return math::TileClass::kFull;
  };
  // P^T and dS^T of queries `part` of a step on.
  const auto make_grads = [&](float(&s)[T][P / 8][4], float(&dp)[T][P / 8][4], math::TileClass kind, u32 stage, int m0,
                              int part) {
    const u32 queries = stage + Loader::kQueries;
    const u32 grad_out = stage + Loader::kGradOut;
    if constexpr (P == 8) {
      add_rows_by_8_rows<kType, D>(s, my_keys, lanes.rows_d, queries, part, thread.lane);
      add_rows_by_8_rows<kType, V>(dp, my_values, lanes.rows_v, grad_out, part, thread.lane);
    } else {
      lanes.add_scores(s, my_keys, queries + part * kRowD * 2);
      lanes.add_grads(dp, my_values, grad_out + part * kRowV * 2);
    }
    const bool edge = kind == math::TileClass::kEdge || key0 + T * 16 > place.k_len;
    grad_scores<S, true, S.column_sum, false, typename Loader::Inputs, M, N>(
        s, dp, sums, a, thread, head, block.band, edge, stage + Loader::kLse, stage + Loader::kInputs,
        key_warp * T * 16, part, key0, m0 + part);
  };
  // dV += P^T dO, dK += dS^T Q over kSteps times 16 queries from `part` on; p(i, kk), ds(i, kk): operands.
  const auto add_keys = [&]<int kSteps>(Constant<kSteps>, const auto& p, const auto& ds, u32 stage, int part,
                                        float lowered) {
    if constexpr (S.dkv) {
      const u32 queries = stage + Loader::kQueries;
      const u32 grad_out = stage + Loader::kGradOut;
      const auto in_v = [&](int row, int j) { return kInRegisters ? lanes.rows_v.at(row, j) : blocks_v.at(row, j); };
      const auto in_d = [&](int row, int j) { return kInRegisters ? lanes.rows_d.at(row, j) : blocks_d.at(row, j); };
      add_columns<kType, TO, 2 * CV, kSteps>(
          dv, p, [&](int kk, int j) { return grad_out + in_v(part + kk * 16, j); }, CV, head.factors.v * lowered);
      add_columns<kType, TO, 2 * CD, kSteps>(
          dk, ds, [&](int kk, int j) { return queries + in_d(part + kk * 16, j); }, CD, head.factors.k * lowered);
    }
  };
  // dQ = dS K of one step, some columns of a warp at a time.
  const auto add_dq = [&](int n, const StepPlace& at, float factor) {
    if constexpr (S.dq) {
      constexpr int kWarpsD = S.warps / S.grid_q;
      constexpr int R = M / S.grid_q / 16;
      constexpr int kBlocks = D / kWarpsD / 16;
      constexpr int C = blocks_at_once(R, kBlocks);
      static_assert(R >= 1 && D % (kWarpsD * 16) == 0 && M % (S.grid_q * 16) == 0);
      const int wq = thread.warp % S.grid_q;
      const int wd = thread.warp / S.grid_q;
#pragma unroll
      for (int j0 = 0; j0 < kBlocks; j0 += C) {
        float dq[R][2 * C][4] = {};
        add_grad_query<S, R, C, N, M>(dq, grads + (S.delay ? n & 1 : 0) * kGradBytes, wq * R, keys, wd * kBlocks + j0,
                                      thread.lane, factor);
        float* const to = a.dq_sum + (loader.row0 + at.head * a.padded_rows + block.query(at)) * D +
                          (wq * R * (D / 8) + wd * kBlocks * 2) * 128 +
                          (kInRegisters ? opaque(thread.lane) : thread.lane) * 4;
#pragma unroll
        for (int i = 0; i < R; ++i) {
#pragma unroll
          for (int j = 0; j < 2 * C; ++j) {
            reduce4<S.arch>(to + (i * (D / 8) + 2 * j0 + j) * 128, dq[i][j]);
          }
        }
      }
    }
  };
  // Sums over the queries of a head. Where several warps have a key: each warp's, then those of the key in order.
  const auto store_sums = [&](u32 of_head, float factor) {
    if constexpr (kInRegisters) {
      float* const to = column_sums(a, place, of_head);
      store_row_sums<true>(sums, factor, thread, [&](float sum, int i, int x) {
        const int key = key0 + i * 16 + thread.g + x;
        if (key < place.k_len) {
          to[key] = sum;
        }
      });
    } else {
      store_row_sums<true>(sums, factor, thread, [&](float sum, int i, int x) {
        if (thread.warp < kWarpsS) {
          store_shared(all_sums + (query_warp * N + (key_warp * T + i) * 16 + thread.g + x) * 4, sum);
        }
      });
      sync();
      float* const to = column_sums(a, place, of_head) + block.n0;
      for (int i = thread.index; i < N; i += kThreads) {
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
    }
  };
  // Called before or after a step's addresses are made, whichever leaves more registers.
  const auto begin_head = [&](int n) {
    if ((!kInRegisters || n > 0) && block.begins_head(now)) {
      if constexpr (S.column_sum) {
        if (n > 0) {
          store_sums(now.head - 1, head.factors.sum);
        }
      }
      head = Head(a, place, now.head, block.head_k, key0, thread.g);
    }
  };

#pragma unroll 1
  for (int n = kInRegisters ? 0 : -1; n < block.steps; ++n) {  // -1: copies alone
    if (kInRegisters || n >= 0) {
      copy_wait<0>();
      sync();
      block.next(after);
    }
    if (n + 1 < block.steps) {
      loader.load(stages + (n + 1) % S.stages * Loader::kBytes, after, thread.index);
    }
    copy_commit();
    if (!kInRegisters && n < 0) {
      continue;
    }
    if constexpr (S.dq && S.delay) {
      if (n > 0) {
        add_dq(n - 1, before, query_factor_before);
      }
    }
    if constexpr (!kInRegisters) {
      begin_head(n);
    }
    const u32 stage = stages + n % S.stages * Loader::kBytes;
    Loader::clear_dead(stage, thread);
    const u32 grads_to = grads + (S.delay ? n & 1 : 0) * kGradBytes;
    const int m0 = block.query(now);
    if constexpr (kInRegisters) {
      begin_head(n);
    }
    query_factor_before = head.factors.q;
    constexpr bool kLifts = is_pair(kType) && !S.dq;

    if constexpr (kInRegisters) {
#pragma unroll
      for (int part = 0; part < M; part += P) {
        const math::TileClass kind = tile_class(m0 + part);
        float s[T][P / 8][4] = {};
        float dp[T][P / 8][4] = {};
        if (kind == math::TileClass::kEmpty) {
          if constexpr (S.dq) {
            store_fragment<kType, M>(grads_to, dp, thread, key_warp * T * 16, part / 8, 1, kLo);
          }
          continue;
        }
        make_grads(s, dp, kind, stage, m0, part);
        float lowered = 1;
        if constexpr (kLifts) {
          lowered = lift_small<false>(a, s, dp);
        }
        if constexpr (S.dq) {
          store_fragment<kType, M>(grads_to, dp, thread, key_warp * T * 16, part / 8, 1, kLo);
        }
        Operand<kType> p_operand[T][P / 16];
        Operand<kType> ds_operand[T][P / 16];
        make_operands(p_operand, s);
        make_operands(ds_operand, dp);
        add_keys(
            Constant<P / 16>(), [&](int i, int kk) { return p_operand[i][kk]; },
            [&](int i, int kk) { return ds_operand[i][kk]; }, stage, part, lowered);
      }
      if constexpr (S.dq && !S.delay) {
        sync();
        add_dq(n, now, head.factors.q);
      }
    } else {
      float lowered = 1;
      if (kWarpsS == S.warps || thread.warp < kWarpsS) {
        const int part = query_warp * P;
        float s[T][P / 8][4] = {};
        float dp[T][P / 8][4] = {};
        const math::TileClass kind = tile_class(m0 + part);
        if (kind != math::TileClass::kEmpty) {
          make_grads(s, dp, kind, stage, m0, part);
        }
        if constexpr (kLifts) {
          lowered = lift_small<true>(a, s, dp);
        }
        store_fragment<kType, M>(weights, s, thread, key_warp * T * 16, part / 8, 1, kLo);
        store_fragment<kType, M>(grads_to, dp, thread, key_warp * T * 16, part / 8, 1, kLo);
      } else if constexpr (kLifts) {
        lowered = lift_of_others(a);
      }
      sync();
      const auto operand_at = [&](u32 tile, int i, int kk) {
        Operand<kType> x;
        ldmatrix(x.hi, tile + rows_p.at(i * 16, kk));
        if constexpr (is_pair(kType)) {
          ldmatrix(x.lo, tile + kLo + rows_p.at(i * 16, kk));
        }
        return x;
      };
      add_keys(
          Constant<M / 16>(), [&](int i, int kk) { return operand_at(weights, i, kk); },
          [&](int i, int kk) { return operand_at(grads_to, i, kk); }, stage, 0, lowered);
      add_dq(n, now, head.factors.q);
    }
    before = now;
    now = after;
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

  if constexpr (S.dkv) {
    store_key_gradients<S>(a, dk, dv, keys, values, row_warp, column_warp, thread);
  }
}

}  // namespace fovea::cuda
