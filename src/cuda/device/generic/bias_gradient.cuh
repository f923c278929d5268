// SPDX-License-Identifier: Apache-2.0
//
// The gradient of a bias with queries and keys, by recomputing.
//
// A block owns grid_s * tiles * 16 queries by `step` keys of one plane of the bias and walks over the list of (b, h)
// that share it (one entry where nothing is broadcast):
//
//   S = Q K^T, dP = dO V^T, sum += P (dP - delta)
//
// The sum stays in registers and is written once: no atomics, no scratch, the same bits every run. Where planes are
// few the list is cut into bias_chunks pieces, whose fp32 sums bias_gradient_sum adds in order.
//
// Warps form a grid of grid_s along the queries by the rest along the keys, and have S of `part` keys at a time.
//   stages = 2   all operands of the next entry are copied while this one computes
//   stages = 1   where those do not fit (part is all of a warp's keys then): Q and K of the next entry are copied
//                during dP, dO and V of the next during the arithmetic and the next S
//
// Blocks: planes * bias_chunks * ceil(bias_rows / queries) * ceil(bias_keys / keys), of warps * 32 threads;
// bias_gradient_sum: planes * ceil(bias_rows * bias_keys / 256), of 256.
#pragma once

#include "cuda/device/around/backward_reduce.cuh"
#include "cuda/device/generic/backward_output.cuh"
#include "cuda/device/generic/grad_scores.cuh"

namespace fovea::cuda {

// Entries of a plane's list. Counted up, since divisions would cost as much as the products.
struct BiasEntries {
  struct Entry {
    u32 b1, b2, head;
  };
  u32 first_b2, last_b2, first_head, last_head;

  __device__ __forceinline__ BiasEntries(const Args& a, const Shared& shared)
      : first_b2(u32(shared.b2)),
        last_b2(u32(shared.b2 + shared.n2)),
        first_head(u32(shared.h)),
        last_head(u32(shared.h + shared.heads)) {}
  static __device__ __forceinline__ Entry at(const Args& a, const Shared& shared, int n) {
    const u32 b = u32(shared.batch(n, a.rows));
    const u32 batch2 = u32(a.rows.batch2);
    return {b / batch2, b % batch2, u32(shared.head(n))};
  }
  __device__ __forceinline__ void advance(Entry& e) const {
    if (++e.head == last_head) {
      e.head = first_head;
      if (++e.b2 == last_b2) {
        e.b2 = first_b2;
        ++e.b1;
      }
    }
  }
};

// What a block has: a tile of a plane from (m0, n0) on, and entries [begin, end) of its list, chunk number `chunk`.
struct BiasBlock {
  int m0, n0;
  int chunk;
  i64 plane;
  Shared shared;
  int begin, end;

  template <int M, int N>
  static __device__ __forceinline__ BiasBlock make(const Args& a) {
    const u32 tiles_k = (u32(a.bias_keys) + N - 1) / N;
    const u32 tiles_q = (u32(a.bias_rows) + M - 1) / M;
    u64 number = a.first_block + block_index();
    const int n0 = int(number % tiles_k) * N;
    number /= tiles_k;
    const int m0 = int(number % tiles_q) * M;
    number /= tiles_q;
    const int chunk = int(number % a.bias_chunks);
    const i64 plane = i64(number / a.bias_chunks);
    const Shared shared = Shared::make(a.rows, a.grad_bias.strides, plane);
    const int count = int(shared.count());
    const int per = (count + a.bias_chunks - 1) / a.bias_chunks;
    const int begin = min(chunk * per, count);
    return {m0, n0, chunk, plane, shared, begin, min(begin + per, count)};
  }
};

// Whether any query of the tile meets any of its keys.
template <auto S, int M, int N>
__device__ __forceinline__ bool meets_tile(const Args& a, const Place& place, int m0, int n0) {
  if (m0 >= place.q_len || n0 >= place.k_len) {
    return false;
  }
  if constexpr (S.banded) {
    return place.band<S>(a).tile(m0, min(m0 + M, place.q_len), n0, min(n0 + N, place.k_len)) != math::TileClass::kEmpty;
  }
  return true;
}

// A tile of sums, M x N numbers of a plane from (m0, n0) on; this warp's fragment begins at (row, column) of it.
// Partial sums are stored in fp32, the gradient in its type, through `result` in shared memory, which nothing else uses
// by now.
template <auto S, int M, int N, int T, int kColumns>
__device__ __forceinline__ void store_bias_sums(const Args& a, const float (&sum)[T][kColumns][4], u32 result,
                                                const Shared& shared, i64 plane, int chunk, int m0, int n0, int row,
                                                int column, const Thread& thread) {
  const int rows = a.bias_rows - m0;
  const int keys = a.bias_keys - n0;
  const math::Strides& to = a.grad_bias.strides;
  const i64 at = shared.offset(to) + m0 * to.row + n0 * to.col;
  if (S.fp32_results && a.bias_chunks == 1) {
    store_result<Type::kFp32>(a.grad_bias, at + row * to.row + column * to.col, {true, true}, sum, 1.f, rows - row,
                              keys - column, thread);
  } else if (S.grad_bias == BiasTile::kFp32 || a.bias_chunks > 1) {
    const i64 planes = Shared::planes(a.rows, to);
    const bool partial = a.bias_chunks > 1;
    float* const first = partial ? a.bias_sum + ((chunk * planes + plane) * a.bias_rows + m0) * a.bias_keys + n0
                                 : static_cast<float*>(a.grad_bias.data) + at;
    const math::Strides strides{0, 0, 0, partial ? a.bias_keys : to.row, partial ? 1 : to.col};
    const bool vectors = strides.col == 1 && strides.row % 4 == 0 && (reinterpret_cast<u64>(first) & 15) == 0;
    store_fragment32<N>(result, sum, thread, row, column / 8);
    sync();
    store_rows<Tile32<N>, 4, M, S.warps * 32>(first, strides, result, rows, keys, vectors, thread.index);
  } else if constexpr (S.grad_bias != BiasTile::kFp32) {
    constexpr Type kAs = S.grad_bias == BiasTile::kBf16 ? Type::kBf16 : Type::kFp16;
    u16* const first = static_cast<u16*>(a.grad_bias.data) + at;
    const bool vectors = to.col == 1 && to.row % 8 == 0 && (reinterpret_cast<u64>(first) & 15) == 0;
    store_fragment<kAs, N>(result + row * N * 2, sum, thread, 0, column / 8);
    sync();
    store_rows<Tile<N>, 2, M, S.warps * 32>(first, to, result, rows, keys, vectors, thread.index);
  }
}

// To sums from column tile `first` on.
template <int kTiles, int kAll, int kColumns>
__device__ __forceinline__ void add_fragment(float (&sum)[kTiles][kAll][4], float (&x)[kTiles][kColumns][4],
                                             int first = 0) {
  each(x, [&](float y, int i, int j, int e) { sum[i][first + j][e] += y; });
}

template <BackwardSpec S>
__global__ void __launch_bounds__(S.warps * 32, S.ctas) generic_bias_gradient(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  constexpr int D = S.d;
  constexpr int V = S.dv;
  constexpr int T = S.tiles;
  constexpr int N = S.step;
  constexpr int M = bias_gradient_rows(S);
  constexpr int W = N / (S.warps / S.grid_s);  // keys of a warp
  constexpr int P = S.part < W ? S.part : W;
  constexpr int kThreads = S.warps * 32;
  constexpr Type kType = S.type;
  constexpr int kRowD = row_of_tile(kType, D);
  constexpr int kRowV = row_of_tile(kType, V);
  constexpr bool kOnce = bias_gradient_once(S);
  using Inputs = ScoreInputs<S, false, M, N, kThreads>;
  constexpr u32 kKeys = M * kRowD * 2;  // of a stage
  constexpr u32 kGradOut = kKeys + N * kRowD * 2;
  constexpr u32 kValues = kGradOut + M * kRowV * 2;
  constexpr u32 kStageBytes = kValues + N * kRowV * 2;
  static_assert(W % P == 0 && P % 16 == 0 && (S.stages > 1 || P == W) && kRowPad % M == 0);
  static_assert(2 * M * 8 + (kOnce ? 1 : 2) * Inputs::kBytes + S.stages * kStageBytes <= bias_gradient_shared_bytes(S));

  extern __shared__ __align__(128) unsigned char memory[];
  const u32 result = shared_address(memory);  // at the end: the sums, rounded
  const u32 stages = result;
  const u32 inputs = stages + S.stages * kStageBytes;
  const u32 row_vectors = inputs + (kOnce ? 1 : 2) * Inputs::kBytes;
  const Thread thread;
  const int wq = thread.warp % S.grid_s;
  const int wk = thread.warp / S.grid_s;

  const auto [m0, n0, chunk, plane, shared, begin, end] = BiasBlock::make<M, N>(a);
  const u32 group = u32(a.rows.heads_q) / u32(a.rows.heads_k);

  const BiasEntries entries(a, shared);
  using Entry = BiasEntries::Entry;
  const auto place_of = [&](const Entry& e) { return Place::make<S>(a, e.b1, e.b2); };
  const auto meets = [&](const Place& place) { return meets_tile<S, M, N>(a, place, m0, n0); };
  // which: 1 Q and K, 2 everything else.
  const auto load = [&](int n, const Entry& e, int which) {
    const int index = opaque(thread.index);
    const Place place = place_of(e);
    const u32 head_k = e.head / group;
    if (meets(place)) {
      const u32 to = stages + n % S.stages * kStageBytes;
      if (which & 1) {
        const u16* const q = query_data(a.q, place, e.head);
        const u16* const k = key_data(a.k, place, head_k);
        load_rows<S, D, M>(to, a.q, q + m0 * a.q.strides.row, place.q_len - m0, a.head_dim, index);
        load_rows<S, D, N>(to + kKeys, a.k, k + n0 * a.k.strides.row, place.k_len - n0, a.head_dim, index);
      }
      if (which & 2) {
        const u16* const g = query_data(a.grad_out, place, e.head);
        const u16* const v = key_data(a.v, place, head_k);
        load_rows<S, V, M>(to + kGradOut, a.grad_out, g + m0 * a.grad_out.strides.row, place.q_len - m0, a.head_dim_v,
                           index);
        load_rows<S, V, N>(to + kValues, a.v, v + n0 * a.v.strides.row, place.k_len - n0, a.head_dim_v, index);
        load_row_vectors<M, kThreads>(row_vectors + (n & 1) * M * 8, a,
                                      row_of_head(a, place.b, e.head, place.queries()) + m0, index);
        if (!kOnce || n == begin) {
          Inputs::load(inputs + (kOnce ? 0 : n & 1) * Inputs::kBytes, a, place, e.head, m0, n0, index);
        }
      }
    }
    copy_commit();
  };

  float sum[T][W / 8][4] = {};
  float unused[T][2];
  const ProductLanes<S> lanes(thread.lane);
  const int row = wq * T * 16;  // in the tile
  const int column = wk * W;
  Entry now = entries.at(a, shared, begin);
  Entry after = now;
#pragma unroll 1
  for (int n = begin < end ? begin - 1 : end; n < end; ++n, now = after) {  // begin - 1: copies alone
    if (n >= begin) {
      entries.advance(after);
    }
    if constexpr (S.stages > 1) {
      if (n >= begin) {
        copy_wait<0>();
        sync();
      }
      if (n + 1 < end) {
        load(n + 1, after, 3);
      }
      if (n < begin) {
        continue;
      }
    }
    const Place place = place_of(now);
    const bool some = n >= begin && (!(S.banded || S.ragged) || meets(place));
    const u32 stage = stages + n % S.stages * kStageBytes;
    const u32 vectors = row_vectors + (n & 1) * M * 8;
    const u32 scores = inputs + (kOnce ? 0 : n & 1) * Inputs::kBytes;
    HeadState<S, false, T, P / 8> head(a, place, now.head, now.head / group, m0 + row, thread.g, true);
    const math::Band<int> band = place.band<S>(a);
#pragma unroll
    for (int part = 0; part < W; part += P) {
      const int key = n0 + column + part;
      float s[T][P / 8][4] = {};
      float dp[T][P / 8][4] = {};
      if (some) {
        lanes.add_scores(s, stage + row * kRowD * 2, stage + kKeys + (column + part) * kRowD * 2);
      }
      if constexpr (S.stages == 1) {
        copy_wait<0>();
        sync();
        if (n + 1 < end) {
          load(n + 1, after, 1);
        }
      }
      if (some) {
        lanes.add_grads(dp, stage + kGradOut + row * kRowV * 2, stage + kValues + (column + part) * kRowV * 2);
      }
      if constexpr (S.stages == 1) {
        copy_wait<0>();
        sync();
        if (n + 1 < end) {
          load(n + 1, after, 2);
        }
      }
      if (some) {
        const bool edge = key + P > place.k_len || (S.ragged && m0 + row + T * 16 > place.q_len) ||
                          (S.banded && band.tile(m0 + row, m0 + row + T * 16, key, key + P) != math::TileClass::kFull);
        grad_scores<S, false, false, true, Inputs, M, N>(s, dp, unused, a, thread, head, band, edge, vectors, scores,
                                                         row, column + part, m0 + row, key);
        add_fragment(sum, dp, part / 8);
      }
    }
  }

  copy_wait<0>();
  sync();
  store_bias_sums<S, M, N>(a, sum, result, shared, plane, chunk, m0, n0, row, column, thread);
}

// The chunks of every number, in order.
template <AroundSpec S>
__global__ void __launch_bounds__(256) bias_gradient_sum(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  const i64 size = i64(a.bias_rows) * a.bias_keys;
  const i64 blocks = (size + 255) / 256;
  const i64 block = a.first_block + blockIdx.x;
  const i64 plane = block / blocks;
  const i64 n = block % blocks * 256 + threadIdx.x;
  if (n >= size) {
    return;
  }
  const math::Strides& s = a.grad_bias.strides;
  const Shared shared = Shared::make(a.rows, s, plane);
  const i64 planes = Shared::planes(a.rows, s);
  float sum = 0;
  for (int chunk = 0; chunk < a.bias_chunks; ++chunk) {
    sum += a.bias_sum[(chunk * planes + plane) * size + n];
  }
  store_sum<S>(a, shared.offset(s) + n / a.bias_keys * s.row + n % a.bias_keys * s.col, sum);
}

}  // namespace fovea::cuda
