// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of the generic backward share:
//
//   load_rows     copies of rows of q, k, v, do
//   KeyBlock      which keys a block owns, which query tiles of which heads it walks over
//   StepLoader    copies of one step: Q, dO, row vectors, what the scores need
//   GradFactors   fp32: the powers of two that its pairs travel with
#pragma once

#include "cuda/device/generic/backward_sizes.h"
#include "cuda/device/score/inputs.cuh"
#include "cuda/device/tile/products.cuh"
#include "cuda/device/work/head_turns.h"

namespace fovea::cuda {

// ---- copies of rows ----

// Where rows of one of q, k, v, do begin.
__device__ __forceinline__ const u16* query_data(const Tensor& x, const Place& place, u32 head) {
  return static_cast<const u16*>(x.data) + place.query_rows(x.strides, head);
}
__device__ __forceinline__ const u16* key_data(const Tensor& x, const Place& place, u32 head) {
  return static_cast<const u16*>(x.data) + place.key_rows(x.strides, head);
}

// kRows of them, of which `rows` exist, to a tile of kColumns numbers a row, of which head_dim exist; rows of pairs are
// zero-filled already. The stride is read here: as an argument of its own it would take registers through a loop.
template <auto S, int kColumns, int kRows>
__device__ __forceinline__ void load_rows(u32 tile, const Tensor& x, const u16* from, int rows, int head_dim,
                                          int thread) {
  load_tile<Tile<row_of_tile(S.type, kColumns)>, kRows, S.warps * 32>(
      tile, from, x.strides.row * 2, rows, is_pair(S.type) ? kColumns * 4 : head_dim * 2, thread);
}

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
    const u32 heads_k = u32(a.rows.heads_k);
    HeadTurn turn{u32(index / blocks), u32(index % blocks)};
    if constexpr (S.banded) {
      turn = head_turn(u32(index), u32(a.rows.batch()) * heads_k, blocks);
    }
    const int block = int(turn.number);
    place = Place::make<S>(a, turn.head / heads_k);
    head_k = turn.head % heads_k;
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
  // The end of sums over a head's queries: store(head, factor) for the last head or, where there is no step, with a
  // factor of 0 for all.
  template <class Store>
  __device__ __forceinline__ void end_sums(float factor, Store store) const {
    const bool some = steps > 0;
#pragma unroll 1
    for (int i = some ? group - 1 : 0; i < group; ++i) {
      store(head0 + i, some ? factor : 0);
    }
  }

  // All copies of K and V, N rows each.
  template <int N>
  __device__ __forceinline__ void load_keys(const Args& a, u32 keys, u32 values, int thread) const {
    const u16* const k = key_data(a.k, place, head_k) + n0 * a.k.strides.row;
    const u16* const v = key_data(a.v, place, head_k) + n0 * a.v.strides.row;
    load_rows<S, S.d, N>(keys, a.k, k, place.k_len - n0, a.head_dim, thread);
    load_rows<S, S.dv, N>(values, a.v, v, place.k_len - n0, a.head_dim_v, thread);
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
        q(query_data(args.q, key_block.place, 0)),
        grad_out(query_data(args.grad_out, key_block.place, 0)),
        row0(row_of_head(args, key_block.place.b, 0, key_block.place.queries())) {}

  __device__ __forceinline__ void load(u32 to, const StepPlace& at, int index) const {
    const int thread = opaque(index);
    const int m0 = block.query(at);
    const int rows = block.place.q_len - m0;
    load_rows<S, S.d, M>(to + kQueries, a.q, q + at.head * a.q.strides.head + m0 * a.q.strides.row, rows, a.head_dim,
                         thread);
    load_rows<S, S.dv, M>(to + kGradOut, a.grad_out,
                          grad_out + at.head * a.grad_out.strides.head + m0 * a.grad_out.strides.row, rows,
                          a.head_dim_v, thread);
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

}  // namespace fovea::cuda
