// SPDX-License-Identifier: Apache-2.0
//
// Backward for any head dimension: nothing of a row stays in shared memory longer than one product needs it.
//
// generic_chunked_backward: a block owns warps * tiles * 16 keys of one key head and Spec::dv columns of dK or of dV,
// and walks over the queries of all its query heads, `step` at a time. generic_chunked_backward_dq: the same with
// queries and keys exchanged, for dQ. A step is a chain of phases, each of which needs one pair of tiles, copied while
// the phase before computes:
//
//   S += K[:, c] Q[:, c]^T for every chunk c of Spec::d columns | dP += V[:, c] dO[:, c]^T, not for dV
//   | P or dS, then dK += dS^T Q[:, its columns] (dV += P^T dO)
//
// S is made anew for every block of columns: it is the price of a row that fits nowhere. No atomics: the same bits
// every run.
//
// generic_chunked_bias_gradient: what generic_bias_gradient is, in the same way.
//
// Blocks: of keys, batch * heads_k * ceil(limit_k / rows) * (ceil(head_dim / Spec::dv) + ceil(head_dim_v / Spec::dv)),
// of queries batch * heads_q * ceil(limit_q / rows) * ceil(head_dim / Spec::dv), of a bias as generic_bias_gradient has
// them; of warps * 32 threads.
#pragma once

#include "cuda/device/generic/backward_output.cuh"
#include "cuda/device/generic/bias_gradient.cuh"
#include "cuda/device/generic/grad_scores.cuh"
#include "cuda/device/work/head_turns.h"

namespace fovea::cuda {

// Rows of one of q, k, v, do from `row` of a head on: where they begin, and how many there are.
struct RowsOf {
  const u16* data;
  i64 stride;
  int left;

  static __device__ __forceinline__ RowsOf queries(const Tensor& x, const Place& place, u32 head, int row) {
    return {query_data(x, place, head) + row * x.strides.row, x.strides.row, place.q_len - row};
  }
  static __device__ __forceinline__ RowsOf keys(const Tensor& x, const Place& place, u32 head, int row) {
    return {key_data(x, place, head) + row * x.strides.row, x.strides.row, place.k_len - row};
  }
};

// kColumns columns from `first` on of rows that have `head_dim` of them (rounded up to 8).
template <auto S, int kColumns, int kRows>
__device__ __forceinline__ void load_columns(u32 tile, const RowsOf& x, int first, int head_dim, int other_dim,
                                             int thread) {
  constexpr int kThreads = S.warps * 32;
  if constexpr (is_pair(S.type)) {
    const int half = backward_columns(S.type, head_dim, other_dim);
    const int bytes = max(half - first, 0) * 2;
    load_tile<Tile<kColumns>, kRows, kThreads>(tile, x.data + first, x.stride * 2, x.left, bytes, thread);
    load_tile<Tile<kColumns>, kRows, kThreads>(tile + kRows * kColumns * 2, x.data + half + first, x.stride * 2, x.left,
                                               bytes, thread);
  } else {
    load_tile<Tile<kColumns>, kRows, kThreads>(tile, x.data + first, x.stride * 2, x.left, max(head_dim - first, 0) * 2,
                                               thread);
  }
}

// kTransposed: rows of the block are keys, steps are tiles of queries. Otherwise the reverse.
template <auto S, bool kTransposed>
__device__ __forceinline__ void chunked_backward(const Args& a) {
  constexpr int C = S.d;   // columns of a phase
  constexpr int W = S.dv;  // columns of the result
  constexpr int T = S.tiles;
  constexpr int N = chunked_backward_rows(S);
  constexpr int M = S.step;
  constexpr int kThreads = S.warps * 32;
  constexpr Type kType = S.type;
  constexpr int kQueries = kTransposed ? M : N;
  constexpr int kKeys = kTransposed ? N : M;
  constexpr u32 kBufferBytes = chunked_backward_buffer_bytes(S);
  constexpr u32 kSecond = N * C * element_bytes(kType);  // the moving tile of a buffer
  using Inputs = ScoreInputs<S, kTransposed, kQueries, kKeys, kThreads>;
  constexpr u32 kStepBytes = kQueries * 8 + Inputs::kBytes;
  static_assert(2 * kBufferBytes + 2 * kStepBytes == chunked_backward_shared_bytes(S, kTransposed));
  static_assert(kRowPad % kQueries == 0 && M % 16 == 0 && C % 16 == 0 && W % 16 == 0);

  extern __shared__ __align__(128) unsigned char memory[];
  const u32 buffers = shared_address(memory);
  const u32 step_inputs = buffers + 2 * kBufferBytes;
  const Thread thread;

  // Place: columns of a result, rows of a head.
  const int results_d = (a.head_dim + W - 1) / W;
  const int results_v = kTransposed ? (a.head_dim_v + W - 1) / W : 0;
  const u64 number = a.first_block + block_index();
  const int result = int(number % u32(results_d + results_v));
  const bool of_v = result >= results_d;  // dV; otherwise dK or dQ
  const int column0 = (of_v ? result - results_d : result) * W;
  const u64 index = number / u32(results_d + results_v);

  KeyBlock<S> block;
  u32 head_q = 0;
  int m0 = 0;
  int first_key = 0;
  if constexpr (kTransposed) {
    block.make(a, N, index);
    if (block.outside()) {
      return;
    }
    if ((of_v ? a.grad_v.data : a.grad_k.data) == nullptr && !(S.column_sum && result == 0)) {
      return;
    }
  } else {
    const u32 tiles = (u32(a.rows.limit_q) + N - 1) / N;
    const u32 heads = u32(a.rows.heads_q);
    HeadTurn turn{u32(index / tiles), u32(index % tiles)};
    if constexpr (S.banded) {
      turn = head_turn(u32(index), u32(a.rows.batch()) * heads, tiles);
      turn.number = tiles - 1 - turn.number;
    }
    head_q = turn.head % heads;
    block.place = Place::make<S>(a, turn.head / heads);
    block.head_k = head_q / (heads / u32(a.rows.heads_k));
    block.band = block.place.template band<S>(a);
    m0 = int(turn.number) * N;
    if (m0 >= block.place.q_len || (!S.dq && result != 0)) {
      return;
    }
    math::Interval<int> keys{0, block.place.k_len};
    if constexpr (S.banded) {
      keys = block.band.keys_of_rows(m0, min(m0 + N, block.place.q_len));
    }
    first_key = keys.begin / M * M;
    block.steps = keys.empty() ? 0 : (keys.end + M - 1) / M - keys.begin / M;
  }
  const Place& place = block.place;
  const int row0 = (kTransposed ? block.n0 : m0) + thread.warp * T * 16;
  const int chunks_d = (a.head_dim + C - 1) / C;
  const int chunks_v = of_v ? 0 : (a.head_dim_v + C - 1) / C;
  const int phases = chunks_d + chunks_v + 1;

  // Tiles of a phase, and with the first one what the step's scores need.
  const auto load = [&](int n, const StepPlace& at, int phase, int buffer) {
    const int position = opaque(thread.index);
    const u32 head = kTransposed ? at.head : head_q;
    const int moving = kTransposed ? block.query(at) : first_key + n * M;
    const u32 to = buffers + buffer * kBufferBytes;
    const auto queries = [&](const Tensor& x, int row) { return RowsOf::queries(x, place, head, row); };
    const auto keys = [&](const Tensor& x, int row) { return RowsOf::keys(x, place, block.head_k, row); };
    if (phase == 0) {
      const u32 inputs = step_inputs + (n & 1) * kStepBytes;
      const int query = kTransposed ? moving : m0;
      load_row_vectors<kQueries, kThreads>(inputs, a, row_of_head(a, place.b, head, place.queries()) + query, position);
      Inputs::load(inputs + kQueries * 8, a, place, head, query, kTransposed ? block.n0 : moving, position);
    }
    if (phase < chunks_d + chunks_v) {
      const bool scores = phase < chunks_d;
      const int column = (scores ? phase : phase - chunks_d) * C;
      const int dim = scores ? a.head_dim : a.head_dim_v;
      const int other = scores ? a.head_dim_v : a.head_dim;
      const RowsOf own = kTransposed ? keys(scores ? a.k : a.v, block.n0) : queries(scores ? a.q : a.grad_out, m0);
      const RowsOf others = kTransposed ? queries(scores ? a.q : a.grad_out, moving) : keys(scores ? a.k : a.v, moving);
      load_columns<S, C, N>(to, own, column, dim, other, position);
      load_columns<S, C, M>(to + kSecond, others, column, dim, other, position);
    } else {
      const RowsOf x = kTransposed ? queries(of_v ? a.grad_out : a.q, moving) : keys(a.k, moving);
      load_columns<S, W, M>(to, x, column0, of_v ? a.head_dim_v : a.head_dim, of_v ? a.head_dim : a.head_dim_v,
                            position);
    }
    copy_commit();
  };

  float sum[T][W / 8][4] = {};
  float sums[T][2] = {};  // of dS along the rows
  const HalfLane<C, N> lanes_own(thread.lane);
  const HalfLane<C, M> lanes_moving(thread.lane, true);
  const HalfLane<W, M> lanes_result(thread.lane);
  const u32 head0 = kTransposed ? block.head0 : head_q;
  HeadState<S, kTransposed, T, M / 8> head(a, place, head0, block.head_k, row0, thread.g);
  StepPlace now = kTransposed ? block.first_step() : StepPlace{head_q, 0};
  StepPlace after = now;
  const auto store_sums = [&](u32 of_head, float factor) {
    float* const to = column_sums(a, place, of_head);
    store_row_sums<true>(sums, factor, thread, [&](float sum, int i, int x) {
      const int key = row0 + i * 16 + thread.g + x;
      if (key < place.k_len && result == 0) {
        to[key] = sum;
      }
    });
  };

  int buffer = 0;
  if (block.steps > 0) {
    load(0, now, 0, 0);
  }
#pragma unroll 1
  for (int n = 0; n < block.steps; ++n, now = after) {
    if constexpr (kTransposed) {
      block.next(after);
      if (n > 0 && block.begins_head(now)) {
        if constexpr (S.column_sum) {
          store_sums(now.head - 1, head.factors.sum);
        }
        head = HeadState<S, kTransposed, T, M / 8>(a, place, now.head, block.head_k, row0, thread.g);
      }
    }
    const int column = kTransposed ? block.query(now) : first_key + n * M;  // the step's first, in the sequence
    float s[T][M / 8][4] = {};
    float dp[T][M / 8][4] = {};
#pragma unroll 1
    for (int phase = 0; phase < phases - 1; ++phase, buffer ^= 1) {
      copy_wait<0>();
      sync();
      load(n, now, phase + 1, buffer ^ 1);
      const u32 own = buffers + buffer * kBufferBytes + thread.warp * T * 16 * C * 2;
      const u32 moving = buffers + buffer * kBufferBytes + kSecond;
      if (phase < chunks_d) {
        add_rows_by_rows<kType, C>(s, own, lanes_own, moving, lanes_moving);
      } else {
        add_rows_by_rows<kType, C>(dp, own, lanes_own, moving, lanes_moving);
      }
    }
    copy_wait<0>();
    sync();
    if (n + 1 < block.steps) {
      load(n + 1, after, 0, buffer ^ 1);
    }
    const u32 inputs = step_inputs + (n & 1) * kStepBytes;
    const int own_end = row0 + T * 16;
    bool edge = (kTransposed ? own_end : column + M) > place.k_len;
    if constexpr (S.banded) {
      edge = edge || (kTransposed ? block.band.tile(column, column + M, row0, own_end)
                                  : block.band.tile(row0, own_end, column, column + M)) != math::TileClass::kFull;
    }
    grad_scores<S, kTransposed, kTransposed ? S.column_sum : S.row_sum, false, Inputs, kQueries, kKeys>(
        s, dp, sums, a, thread, head, block.band, edge, inputs, inputs + kQueries * 8, thread.warp * T * 16, 0, row0,
        column);
    float lowered = 1;
    if constexpr (is_pair(kType)) {
      lowered = lift_small<false>(a, s, dp);
    }
    Operand<kType> operands[T][M / 16];
    if (of_v) {
      make_operands(operands, s);
    } else {
      make_operands(operands, dp);
    }
    const u32 moving = buffers + buffer * kBufferBytes;
    if constexpr (kTransposed && may_hide(S)) {
      if (of_v) {
        clear_dead_rows<Tile<W>, M, kThreads>(moving, inputs, thread);
        if constexpr (is_pair(kType)) {
          clear_dead_rows<Tile<W>, M, kThreads>(moving + M * W * 2, inputs, thread);
        }
      }
    }
    add_columns<kType, T, W / 8, M / 16>(
        sum, [&](int i, int kk) { return operands[i][kk]; },
        [&](int kk, int j) { return moving + lanes_result.at(kk * 16, j); }, W / 16,
        lowered * (!kTransposed ? head.factors.q
                   : of_v       ? head.factors.v
                                : head.factors.k));
    buffer ^= 1;
  }
  copy_wait<0>();
  sync();
  if constexpr (kTransposed && S.column_sum) {
    block.end_sums(head.factors.sum, store_sums);
  }

  if constexpr (!kTransposed && S.row_sum) {
    if (result == 0) {
      float* const to = a.row_sum + row_of_head(a, place.b, head_q, place.queries()) + row0;
      store_row_sums<false>(sums, head.factors.sum, thread,
                            [&](float sum, int i, int x) { to[i * 16 + thread.g + x] = sum; });
    }
  }

  const Tensor& to = !kTransposed ? a.grad_q : of_v ? a.grad_v : a.grad_k;
  const int left = (kTransposed ? place.k_len : place.q_len) - row0;
  const int columns = (of_v ? a.out_dim_v : a.out_dim) - column0;
  const i64 at = (kTransposed ? place.key_rows(to.strides, block.head_k) : place.query_rows(to.strides, head_q)) +
                 row0 * to.strides.row + column0 * to.strides.col;
  if (to.data == nullptr || (!kTransposed && !S.dq)) {
    return;
  }
  static_assert(N * W * element_bytes(kType) <= 2 * kBufferBytes);
  const u32 tile = buffers + thread.warp * T * 16 * W * element_bytes(kType);
  const Result how = !kTransposed ? a.results.q : of_v ? a.results.v : a.results.k;
  const float factor = of_v ? keep_scale<S>(a) : a.scale;
  put_gradient<S, W>(tile, sum, factor, thread);
  __syncwarp();
  store_gradient<S, W, T * 16>(to, at, tile, how, sum, factor, left, columns, a.vector_stores, thread);
}

template <BackwardSpec S>
__global__ void __launch_bounds__(S.warps * 32, S.ctas) generic_chunked_backward(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  chunked_backward<S, true>(a);
}

template <BackwardSpec S>
__global__ void __launch_bounds__(S.warps * 32, S.ctas) generic_chunked_backward_dq(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  chunked_backward<S, false>(a);
}

template <BackwardSpec S>
__global__ void __launch_bounds__(S.warps * 32, S.ctas) generic_chunked_bias_gradient(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  constexpr int C = S.d;
  constexpr int T = S.tiles;
  constexpr int M = chunked_backward_rows(S);  // queries
  constexpr int N = S.step;                    // keys
  constexpr int kThreads = S.warps * 32;
  constexpr Type kType = S.type;
  constexpr u32 kSecond = M * C * element_bytes(kType);
  constexpr u32 kBufferBytes = kSecond + N * C * element_bytes(kType);
  using Inputs = ScoreInputs<S, false, M, N, kThreads>;
  constexpr u32 kStepBytes = M * 8 + Inputs::kBytes;
  static_assert(2 * kBufferBytes + 2 * kStepBytes == chunked_bias_gradient_shared_bytes(S));
  static_assert(M * N * 4 <= 2 * kBufferBytes && kRowPad % M == 0 && N % 16 == 0);

  extern __shared__ __align__(128) unsigned char memory[];
  const u32 buffers = shared_address(memory);
  const u32 step_inputs = buffers + 2 * kBufferBytes;
  const Thread thread;

  const auto [m0, n0, chunk, plane, shared, begin, end] = BiasBlock::make<M, N>(a);
  const u32 group = u32(a.rows.heads_q) / u32(a.rows.heads_k);
  const int row0 = m0 + thread.warp * T * 16;
  const int chunks_d = (a.head_dim + C - 1) / C;
  const int phases = chunks_d + (a.head_dim_v + C - 1) / C;

  // Only entries whose sequences meet the tile are visited.
  const BiasEntries entries(a, shared);
  struct Visit {
    int n;
    BiasEntries::Entry entry;
  };
  const auto place_of = [&](const Visit& at) { return Place::make<S>(a, at.entry.b1, at.entry.b2); };
  const auto settle = [&](Visit& at) {
    while (at.n < end && !meets_tile<S, M, N>(a, place_of(at), m0, n0)) {
      ++at.n;
      entries.advance(at.entry);
    }
  };
  const auto load = [&](int visit, const Visit& at, int phase, int buffer) {
    const int position = opaque(thread.index);
    const Place place = place_of(at);
    const u32 head = at.entry.head;
    const u32 to = buffers + buffer * kBufferBytes;
    if (phase == 0) {
      const u32 inputs = step_inputs + (visit & 1) * kStepBytes;
      load_row_vectors<M, kThreads>(inputs, a, row_of_head(a, place.b, head, place.queries()) + m0, position);
      Inputs::load(inputs + M * 8, a, place, head, m0, n0, position);
    }
    const bool scores = phase < chunks_d;
    const int column = (scores ? phase : phase - chunks_d) * C;
    const int dim = scores ? a.head_dim : a.head_dim_v;
    const int other = scores ? a.head_dim_v : a.head_dim;
    const RowsOf queries = RowsOf::queries(scores ? a.q : a.grad_out, place, head, m0);
    const RowsOf keys = RowsOf::keys(scores ? a.k : a.v, place, head / group, n0);
    load_columns<S, C, M>(to, queries, column, dim, other, position);
    load_columns<S, C, N>(to + kSecond, keys, column, dim, other, position);
    copy_commit();
  };

  float sum[T][N / 8][4] = {};
  float unused[T][2];
  const HalfLane<C, M> lanes_queries(thread.lane);
  const HalfLane<C, N> lanes_keys(thread.lane, true);
  Visit now{begin, BiasEntries::at(a, shared, begin)};
  settle(now);
  int buffer = 0;
  if (now.n < end) {
    load(0, now, 0, 0);
  }
#pragma unroll 1
  for (int visit = 0; now.n < end; ++visit) {
    Visit after{now.n + 1, now.entry};
    entries.advance(after.entry);
    settle(after);
    float s[T][N / 8][4] = {};
    float dp[T][N / 8][4] = {};
#pragma unroll 1
    for (int phase = 0; phase < phases; ++phase, buffer ^= 1) {
      copy_wait<0>();
      sync();
      if (phase + 1 < phases) {
        load(visit, now, phase + 1, buffer ^ 1);
      } else if (after.n < end) {
        load(visit + 1, after, 0, buffer ^ 1);
      }
      const u32 queries = buffers + buffer * kBufferBytes + thread.warp * T * 16 * C * 2;
      const u32 keys = buffers + buffer * kBufferBytes + kSecond;
      if (phase < chunks_d) {
        add_rows_by_rows<kType, C>(s, queries, lanes_queries, keys, lanes_keys);
      } else {
        add_rows_by_rows<kType, C>(dp, queries, lanes_queries, keys, lanes_keys);
      }
    }
    const Place place = place_of(now);
    const u32 head_q = now.entry.head;
    HeadState<S, false, T, N / 8> head(a, place, head_q, head_q / group, row0, thread.g, true);
    const math::Band<int> band = place.band<S>(a);
    const bool edge = n0 + N > place.k_len || (S.ragged && row0 + T * 16 > place.q_len) ||
                      (S.banded && band.tile(row0, row0 + T * 16, n0, n0 + N) != math::TileClass::kFull);
    const u32 inputs = step_inputs + (visit & 1) * kStepBytes;
    grad_scores<S, false, false, true, Inputs, M, N>(s, dp, unused, a, thread, head, band, edge, inputs, inputs + M * 8,
                                                     thread.warp * T * 16, 0, row0, n0);
    add_fragment(sum, dp);
    now = after;
  }
  copy_wait<0>();
  sync();
  store_bias_sums<S, M, N>(a, sum, buffers, shared, plane, chunk, m0, n0, thread.warp * T * 16, 0, thread);
}

}  // namespace fovea::cuda
