// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of the backward share:
//
//   KeyBlock      which keys a block owns, which query tiles of which heads it walks over
//   StepLoader    copies of one step: Q, dO, row vectors, what the scores need
//   GradFactors   fp32: the powers of two that its pairs travel with
//   HeadState     what changes with the query head: slopes, terms, dropout's words, factors
//   grad_scores   dot products S, dP to P (as dV needs it) and dS, in registers
#ifndef FOVEA_CUDA_DEVICE_GENERIC_BACKWARD_STEP_CUH
#define FOVEA_CUDA_DEVICE_GENERIC_BACKWARD_STEP_CUH

#include "cuda/device/generic/backward_sizes.h"
#include "cuda/device/score/dropout.cuh"
#include "cuda/device/score/scores.cuh"
#include "cuda/device/tile/products.cuh"

namespace fovea::cuda {

// ---- places ----

// A step of a key block: a query head and a tile of queries, counted from the block's first.
struct StepPlace {
  u32 head;
  int tile;
};

template <auto S>
struct KeyBlock {
  Place place;
  u32 head_k, head0;  // the key head, its first query head
  int group;          // query heads that share it
  int n0;             // the first key
  int first, count;   // tiles of queries that meet any of the keys
  int start;          // which of them comes first
  int steps;
  math::Band<int> band;

  KeyBlock() = default;
  __device__ __forceinline__ KeyBlock(const Args& a, int keys) { make(a, keys, a.first_block + block_index()); }

  // Number `index` of batch * heads_k * ceil(limit_k / keys).
  __device__ __forceinline__ void make(const Args& a, int keys, u64 index) {
    const u32 blocks = (u32(a.rows.limit_k) + keys - 1) / keys;
    const u32 head_of_batch = u32(index / blocks);
    const int block = int(index % blocks);
    const u32 heads_k = u32(a.rows.heads_k);
    place = Place::make<S>(a, head_of_batch / heads_k);
    head_k = head_of_batch % heads_k;
    group = int(u32(a.rows.heads_q) / heads_k);
    head0 = head_k * group;
    n0 = block * keys;
    band = place.band<S>(a);
    math::Interval<int> queries{0, n0 < place.k_len ? place.q_len : 0};
    if constexpr (S.banded) {
      if (n0 < place.k_len) {
        queries = band.queries_of_keys(n0, min(n0 + keys, place.k_len));
      }
    }
    first = queries.begin / S.step;
    count = queries.empty() ? 0 : (queries.end + S.step - 1) / S.step - first;
    start = S.banded || count == 0 ? 0 : block * 2 % count;
    steps = count * group;
  }

  __device__ __forceinline__ bool outside() const { return n0 >= place.k_len; }
  __device__ __forceinline__ StepPlace first_step() const { return {head0, start}; }
  __device__ __forceinline__ void next(StepPlace& at) const {
    if (++at.tile == count) {
      at.tile = 0;
    }
    if (at.tile == start) {
      ++at.head;
    }
  }
  __device__ __forceinline__ int query(const StepPlace& at) const { return (first + at.tile) * S.step; }
  __device__ __forceinline__ bool begins_head(const StepPlace& at) const { return at.tile == start; }

  // All copies of K and V, N rows each.
  template <int N>
  __device__ __forceinline__ void load_keys(const Args& a, u32 keys, u32 values, int thread) const {
    constexpr int kThreads = S.warps * 32;
    const u16* k = static_cast<const u16*>(a.k.data) + place.key_rows(a.k.strides, head_k) + n0 * a.k.strides.row;
    const u16* v = static_cast<const u16*>(a.v.data) + place.key_rows(a.v.strides, head_k) + n0 * a.v.strides.row;
    load_tile<Tile<row_of_tile(S.type, S.d)>, N, kThreads>(keys, k, a.k.strides.row * 2, place.k_len - n0,
                                                           row_bytes(S.d, a.head_dim), thread);
    load_tile<Tile<row_of_tile(S.type, S.dv)>, N, kThreads>(values, v, a.v.strides.row * 2, place.k_len - n0,
                                                            row_bytes(S.dv, a.head_dim_v), thread);
  }
  // Bytes of a row that exist: rows of pairs are zero-filled already.
  static __device__ __forceinline__ int row_bytes(int columns, int head_dim) {
    return is_pair(S.type) ? columns * 4 : head_dim * 2;
  }
};

// Logsumexp and delta of kRows queries; vectors are padded: all rows of a tile exist.
template <int kRows, int kThreads>
__device__ __forceinline__ void load_row_vectors(u32 to, const Args& a, i64 row, int thread) {
#pragma unroll
  for (int i = thread; i < kRows / 2; i += kThreads) {
    copy16(to + i * 16, i < kRows / 4 ? a.row_lse + row + i * 4 : a.row_delta + row + i * 4 - kRows);
  }
}

// Rows of dO of queries that meet no key become zero: their P is 0, and 0 * inf would be NaN in dV. All threads of the
// block come here behind the barrier that shows them the tile; where there is such a row another barrier follows.
template <class Layout, int kRows, int kThreads>
__device__ __forceinline__ void clear_dead_rows(u32 tile, u32 lse, const Thread& thread) {
  bool some = false;
#pragma unroll
  for (int i = thread.lane; i < kRows; i += 32) {
    some = some || load_shared(lse + i * 4) == kInfinity;
  }
  if (!__any_sync(~0u, some)) {
    return;
  }
#pragma unroll 1
  for (int i = thread.index; i < kRows * Layout::kChunks; i += kThreads) {
    const int row = i / Layout::kChunks;
    if (load_shared(lse + row * 4) == kInfinity) {
      store_shared(tile + row * Layout::kRowBytes + i % Layout::kChunks * 16, uint4{});
    }
  }
  sync();
}

template <auto S, int kKeys, int kThreads>
struct StepLoader {
  static constexpr int M = S.step;
  static constexpr u32 kQueries = 0;
  static constexpr u32 kGradOut = kQueries + M * row_of_tile(S.type, S.d) * 2;
  static constexpr u32 kLse = kGradOut + M * row_of_tile(S.type, S.dv) * 2;
  static constexpr u32 kDelta = kLse + M * 4;
  static constexpr u32 kInputs = kDelta + M * 4;
  using Inputs = ScoreInputs<S, true, M, kKeys, kThreads>;
  static constexpr u32 kBytes = kInputs + Inputs::kBytes;

  const Args& a;
  const KeyBlock<S>& block;
  const u16* q;
  const u16* grad_out;
  i64 row0;  // of row_lse, in head 0

  __device__ __forceinline__ StepLoader(const Args& args, const KeyBlock<S>& key_block)
      : a(args),
        block(key_block),
        q(static_cast<const u16*>(args.q.data) + key_block.place.query_rows(args.q.strides, 0)),
        grad_out(static_cast<const u16*>(args.grad_out.data) + key_block.place.query_rows(args.grad_out.strides, 0)),
        row0(row_of_head(args, key_block.place.b, 0, key_block.place.queries())) {}

  __device__ __forceinline__ void load(u32 to, const StepPlace& at, int index) const {
    const int thread = opaque(index);
    const int m0 = block.query(at);
    const int rows = block.place.q_len - m0;
    load_tile<Tile<row_of_tile(S.type, S.d)>, M, kThreads>(
        to + kQueries, q + at.head * a.q.strides.head + m0 * a.q.strides.row, a.q.strides.row * 2, rows,
        KeyBlock<S>::row_bytes(S.d, a.head_dim), thread);
    load_tile<Tile<row_of_tile(S.type, S.dv)>, M, kThreads>(
        to + kGradOut, grad_out + at.head * a.grad_out.strides.head + m0 * a.grad_out.strides.row,
        a.grad_out.strides.row * 2, rows, KeyBlock<S>::row_bytes(S.dv, a.head_dim_v), thread);
    load_row_vectors<M, kThreads>(to + kLse, a, row0 + at.head * a.padded_rows + m0, thread);
    Inputs::load(to + kInputs, a, block.place, at.head, m0, block.n0, thread);
  }

  // To be called where a step's copies are seen.
  static __device__ __forceinline__ void clear_dead(u32 stage, const Thread& thread) {
    if constexpr (S.dkv && may_hide(S)) {
      clear_dead_rows<Tile<row_of_tile(S.type, S.dv)>, M, kThreads>(stage + kGradOut, stage + kLse, thread);
    }
  }
};

// What dV is multiplied by where it leaves, and not P before: the factor may be beyond what fp16 holds.
template <auto S>
__device__ __forceinline__ float keep_scale(const Args& a) {
  return S.dropout != DropoutRule::kNone ? a.keep_scale : 1.f;
}

// ---- fp32 ----

// Pairs travel multiplied by powers of two: q, k, v, do by those of their largest numbers, P by 2^15, dS so that its
// bound |P (dP - delta)| <= |do| |v| / keep + |delta| is near 2^15.
struct GradFactors {
  float score;      // dot product to score before the softcap
  float dp, delta;  // dP and delta to what dS is made of, P being lifted
  float q, k, v;    // what products for dQ, dK, dV are multiplied by
  float sum;        // dS to natural units

  template <auto S>
  static __device__ __forceinline__ GradFactors make(const Args& a, u32 b, u32 head, u32 head_k,
                                                     bool natural_grads = false) {
    if constexpr (!is_pair(S.type)) {
      return {a.scale, 1, 1, a.scale, a.scale, keep_scale<S>(a), 1};
    } else {
      // As size_place() has it, in 32 bits.
      const u32 stride = u32(a.rows.batch()) * u32(a.rows.heads_q);
      const u32 query = b * u32(a.rows.heads_q) + head;
      const u32 key = b * u32(a.rows.heads_k) + head_k;
      const auto size = [&](Size which, u32 place) { return a.sizes[u32(which) * stride + place]; };
      const int q = scale_exponent(size(Size::kQ, query));
      const int k = scale_exponent(size(Size::kK, key));
      const int v = scale_exponent(size(Size::kV, key));
      const int o = scale_exponent(size(Size::kGradOut, query));
      const float bound = __uint_as_float(size(Size::kRowOfV, key)) *
                              __uint_as_float(size(Size::kRowOfGradOut, query)) * max(a.keep_scale, 1.f) +
                          __uint_as_float(size(Size::kDelta, query));
      const int s = natural_grads ? 0 : scale_exponent(__float_as_uint(bound));
      return {a.scale * power_of_two(-q) * power_of_two(-k),
              power_of_two(s - o - v - kLift),
              power_of_two(s - kLift),
              a.scale * power_of_two(-k) * power_of_two(-s),
              a.scale * power_of_two(-q) * power_of_two(-s),
              power_of_two(-o - kLift) * keep_scale<S>(a),
              power_of_two(-s)};
    }
  }
  static constexpr int kLift = 15;
};

// ---- scores ----

// What changes with the query head.
template <auto S, bool kTransposed, int kTiles, int kColumns>
struct HeadState {
  GradFactors factors;
  Scores<S, kTransposed, kTiles> scores;
  Keep<S, kTransposed, kTiles, kColumns> keep;

  HeadState() = default;
  __device__ __forceinline__ HeadState(const Args& a, const Place& place, u32 head, u32 head_k, int row0, int g,
                                       bool natural_grads = false)
      : factors(GradFactors::make<S>(a, place.b, head, head_k, natural_grads)), scores(a, place, head, factors.score) {
    scores.load_rows(a, place, head, row0, g);
    if constexpr (S.dropout != DropoutRule::kNone) {
      keep.start(a, place, head);
      keep.start_rows(row0, g);
    }
  }
};

// s: dot products, becomes P (with dropout, its factor left to keep_scale: what dV needs); dp: products, becomes dS by
// the dot product over the scale (kByScore: by the score). sums, if kSums: dS by the score, added up along the rows.
// The fragment begins at (tile_row, tile_column) of this step's tiles and at (row0, column0) of the sequence;
// row_vectors, inputs: addresses in shared memory, the former of the first query of the tile.
template <auto S, bool kTransposed, bool kSums, bool kByScore, class Inputs, int kQueries, int kKeys, int kTiles,
          int kColumns, class Head>
__device__ __forceinline__ void grad_scores(float (&s)[kTiles][kColumns][4], float (&dp)[kTiles][kColumns][4],
                                            float (&sums)[kTiles][2], const Args& a, const Thread& thread, Head& head,
                                            const math::Band<int>& band, bool edge, u32 row_vectors, u32 inputs,
                                            int tile_row, int tile_column, int row0, int column0) {
  constexpr bool kNatural = natural_scores(S);
  static_assert(kNatural || !is_pair(S.type));
  constexpr float kLift = is_pair(S.type) ? GradFactors::kLift : 0;
  constexpr bool kDerivative = S.softcap && !kByScore;
  float derivative[kDerivative ? kTiles : 1][kDerivative ? kColumns : 1][4];
  if constexpr (kDerivative) {
    head.scores.of_dots(s, derivative);
  } else {
    head.scores.of_dots(s);
  }
  head.scores.template add<Inputs, kKeys>(s, thread, inputs, tile_row, tile_column, row0, column0);
  if (edge) {
    mask_edge<S, kTransposed>(s, thread, band, row0, column0);
  }
  if constexpr (S.dropout != DropoutRule::kNone) {
    head.keep.prepare(thread, row0, column0);
  }
  const float unit = kNatural ? math::kLog2E : a.scale * math::kLog2E;

#pragma unroll
  for (int jj = 0; jj < (kColumns + 1) / 2; ++jj) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      bool keep[2][4];
      int first_half = 0;
      if constexpr (S.dropout != DropoutRule::kNone) {
        // One column tile alone is half of a block of 16.
        if constexpr (kColumns == 1 && S.dropout == DropoutRule::kFovea) {
          first_half = column0 >> 3 & 1;
        }
        head.keep.decide(keep, thread, i, jj, row0, column0 & ~15);
      }
#pragma unroll
      for (int half = 0; half < (kColumns == 1 ? 1 : 2); ++half) {
        const int j = 2 * jj + half;
        float lse[2];
        float delta[2];  // of columns 2t, 2t + 1; in S of rows g, g + 8
        if constexpr (kTransposed) {
          const u32 at = row_vectors + (tile_column + j * 8 + thread.t * 2) * 4;
          const float2 x = load_shared2(at);
          const float2 y = load_shared2(at + kQueries * 4);
          lse[0] = x.x;
          lse[1] = x.y;
          delta[0] = y.x;
          delta[1] = y.y;
        } else {
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            const u32 at = row_vectors + (tile_row + i * 16 + thread.g + x * 8) * 4;
            lse[x] = load_shared(at);
            delta[x] = load_shared(at + kQueries * 4);
          }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int n = kTransposed ? e & 1 : e >> 1;
          float p =
              kNatural ? weight_of_difference(s[i][j][e], lse[n], unit, kLift) : weight_fused(s[i][j][e], unit, lse[n]);
          float grad = dp[i][j][e];
          float kept = p;
          if constexpr (S.dropout != DropoutRule::kNone) {
            const bool kept_here = kColumns == 1 && first_half != 0 ? keep[1][e] : keep[half][e];
            const float factor = kept_here ? a.keep_scale : 0.f;
            kept = kept_here ? p : 0.f;
            grad *= factor;
          }
          if constexpr (is_pair(S.type)) {
            grad = math::grad_score<may_hide(S)>(p, grad * head.factors.dp, delta[n] * head.factors.delta);
          } else {
            grad = math::grad_score<may_hide(S)>(p, grad, delta[n]);
          }
          if constexpr (kSums) {
            sums[i][e >> 1] += grad;
          }
          if constexpr (kDerivative) {
            grad *= derivative[i][j][e];
          }
          s[i][j][e] = kept;
          dp[i][j][e] = grad;
        }
      }
    }
  }
}

// fp32 with a sink: where that takes nearly all of a row, the P that are left may be smaller than a pair of fp16
// resolves. Then P and dS of a step are multiplied by 2^n, so that the largest is near 2^10; what products are to be
// multiplied by for it is returned. kBlock: one n for the block, and each of its warps comes here or to
// lift_of_others(); otherwise one for the warp. A sum over keys of a step that others made has no such factor: a
// kernel that adds dQ to memory does not serve a sink in fp32.
template <bool kBlock>
__device__ __forceinline__ int small_lift(float largest) {
  constexpr int kStep = 10;
  constexpr int kMost = 100;
  int lift = 0;
  for (; lift < kMost; lift += kStep) {
    const bool large = largest >= power_of_two(kStep / 2 - lift);
    if (kBlock ? __syncthreads_or(large) != 0 : __any_sync(~0u, large)) {
      break;
    }
  }
  return lift;
}
template <bool kBlock, int kTiles, int kColumns>
__device__ __forceinline__ float lift_small(const Args& a, float (&s)[kTiles][kColumns][4],
                                            float (&dp)[kTiles][kColumns][4]) {
  if (a.sink == nullptr) {
    return 1;
  }
  float largest = 0;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    for (int j = 0; j < kColumns; ++j) {
      for (int e = 0; e < 4; ++e) {
        largest = fmaxf(largest, fmaxf(s[i][j][e], fabsf(dp[i][j][e])));
      }
    }
  }
  const int lift = small_lift<kBlock>(largest);
  const float factor = power_of_two(lift);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    for (int j = 0; j < kColumns; ++j) {
      for (int e = 0; e < 4; ++e) {
        s[i][j][e] *= factor;
        dp[i][j][e] *= factor;
      }
    }
  }
  return power_of_two(-lift);
}
__device__ __forceinline__ float lift_of_others(const Args& a) {
  return a.sink == nullptr ? 1 : power_of_two(-small_lift<true>(0));
}

// A 16 x 16 block of an accumulator as an operand.
template <Type kType, int kColumns>
__device__ __forceinline__ void make_operand(Operand<kType>& to, const float (&s)[kColumns][4], int kk) {
  if constexpr (is_pair(kType)) {
    operand_pair(to.hi, to.lo, s, kk);
  } else {
    operand<kType>(to.hi, s, kk);
  }
}

// Operands of kTiles x kBlocks to shared memory, rows as they are, from (row, column block) on; lo lies lo_bytes
// further.
template <Type kType, int kColumns, int kTiles, int kBlocks>
__device__ __forceinline__ void store_operands(u32 tile, u32 lo_bytes, const Operand<kType> (&from)[kTiles][kBlocks],
                                               int row, int block, const Thread& thread) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int kk = 0; kk < kBlocks; ++kk) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const u32 at = tile +
                       Tile<kColumns>::offset(row + i * 16 + thread.g + (x & 1) * 8, (block + kk) * 2 + (x >> 1)) +
                       thread.t * 4;
        store_shared(at, from[i][kk].hi[x]);
        if constexpr (is_pair(kType)) {
          store_shared(at + lo_bytes, from[i][kk].lo[x]);
        }
      }
    }
  }
}

// The same from a fragment of fp32, from (row, chunk of 8 columns) on.
template <Type kType, int kColumns, int kTiles, int kChunks>
__device__ __forceinline__ void store_pairs(u32 tile, u32 lo_bytes, const float (&x)[kTiles][kChunks][4], int row,
                                            int chunk, const Thread& thread) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 at = tile + Tile<kColumns>::offset(row + i * 16 + thread.g + half * 8, chunk + j) + thread.t * 4;
        if constexpr (is_pair(kType)) {
          u32 hi;
          u32 lo;
          split(x[i][j][2 * half], x[i][j][2 * half + 1], hi, lo);
          store_shared(at, hi);
          store_shared(at + lo_bytes, lo);
        } else {
          store_shared(at, pack<kType>(x[i][j][2 * half], x[i][j][2 * half + 1]));
        }
      }
    }
  }
}

// dq[R][2 C] (+)= dS K for queries 16 (row_block + i) and columns 16 (column_block + j): dS lies as [key][query].
template <auto S, int R, int C, int kKeys, int kQueries>
__device__ __forceinline__ void add_grad_query(float (&dq)[R][2 * C][4], u32 grads, int row_block, u32 keys,
                                               int column_block, int lane, float factor) {
  constexpr int kRowD = row_of_tile(S.type, S.d);
  constexpr u32 kLo = kKeys * kQueries * 2;
  u32 rows[R];
#pragma unroll
  for (int i = 0; i < R; ++i) {
    rows[i] = grads + Tile<kQueries>::offset((lane & 7) | (lane >> 4) << 3, (row_block + i) * 2 + (lane >> 3 & 1));
  }
  const BlockLane<kRowD, C> columns(column_block, lane);
  const BlockLane<kRowD, C> columns_lo(column_block + S.d / 16, lane);
  const auto load = [&](int i, int kk) {
    Operand<S.type> x;
    ldmatrix_trans(x.hi, rows[i] + kk * 16 * kQueries * 2);
    if constexpr (is_pair(S.type)) {
      ldmatrix_trans(x.lo, rows[i] + kLo + kk * 16 * kQueries * 2);
    }
    return x;
  };
  const auto address = [&](int kk, int j) {
    return keys + (j < C ? columns.at(kk * 16, j) : columns_lo.at(kk * 16, j - C));
  };
  add_columns<S.type, R, 2 * C, kKeys / 16>(dq, load, address, C, factor);
}

// ---- what leaves ----

// An accumulator times a factor, rounded, to a tile of 16-bit numbers from its (0, 0) on.
template <Type kType, int kRow, int kTiles, int kColumns>
__device__ __forceinline__ void store_fragment(u32 tile, const float (&x)[kTiles][kColumns][4], float factor,
                                               const Thread& thread, int chunk = 0) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_shared(tile + Tile<kRow>::offset(i * 16 + thread.g + half * 8, chunk + j) + thread.t * 4,
                     pack<kType>(x[i][j][2 * half] * factor, x[i][j][2 * half + 1] * factor));
      }
    }
  }
}

// The same in fp32, as it is, to a tile of 32-bit numbers from (row, chunk of 8 columns) on.
template <int kRow, int kTiles, int kColumns>
__device__ __forceinline__ void store_fragment32(u32 tile, const float (&x)[kTiles][kColumns][4], const Thread& thread,
                                                 int row = 0, int chunk = 0) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        store_shared(tile +
                         Tile32<kRow>::offset(row + i * 16 + thread.g + half * 8, (chunk + j) * 2 + (thread.t >> 1)) +
                         (thread.t & 1) * 8,
                     float2{x[i][j][2 * half], x[i][j][2 * half + 1]});
      }
    }
  }
}

// Sums along the rows of a fragment of S transposed, over the queries of a head; they begin anew. key0: its first key.
template <int kTiles>
__device__ __forceinline__ void store_column_sums(const Args& a, const Place& place, u32 head, int key0,
                                                  float (&sums)[kTiles][2], float factor, const Thread& thread,
                                                  bool stores = true) {
  float* const to = a.column_sum + (i64(place.b) * a.rows.heads_q + head) * a.column_pitch;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int key = key0 + i * 16 + thread.g + x * 8;
      const float sum = quad_sum(sums[i][x]) * factor;
      if (thread.t == 0 && key < place.k_len && stores) {
        to[key] = sum;
      }
      sums[i][x] = 0;
    }
  }
}

// Sums along the rows of a fragment, of all its rows: vectors of rows are padded.
template <int kTiles>
__device__ __forceinline__ void store_row_sums(float* to, const float (&sums)[kTiles][2], float factor,
                                               const Thread& thread) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const float sum = quad_sum(sums[i][x]) * factor;
      if (thread.t == 0) {
        to[i * 16 + thread.g + x * 8] = sum;
      }
    }
  }
}

// An accumulator of fp32 to rows; row and column: of the fragment's first element in `to`.
template <int kTiles, int kColumns>
__device__ __forceinline__ void store_floats(const float (&x)[kTiles][kColumns][4], float* to,
                                             const math::Strides& strides, int row, int column, int rows, int columns,
                                             bool vectors, const Thread& thread) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + i * 16 + thread.g + half * 8;
      if (r >= rows) {
        continue;
      }
      float* const at = to + r * strides.row;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int c = column + j * 8 + thread.t * 2;
        if (vectors && c + 1 < columns) {
          *reinterpret_cast<float2*>(at + c) = {x[i][j][2 * half], x[i][j][2 * half + 1]};
        } else {
          if (c < columns) {
            at[c * strides.col] = x[i][j][2 * half];
          }
          if (c + 1 < columns) {
            at[(c + 1) * strides.col] = x[i][j][2 * half + 1];
          }
        }
      }
    }
  }
}

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_GENERIC_BACKWARD_STEP_CUH
