// SPDX-License-Identifier: Apache-2.0
//
// What a warpgroup of sm90_forward does to V before its rows meet it and to O after: rows of V behind a sequence's end
// are cleared; O goes through the place of the warpgroup's Q, from where the tensor memory accelerator takes it or,
// where it cannot, the threads do.
#pragma once

#include "cuda/device/score/sm90_softmax.cuh"
#include "cuda/device/sm90/forward_copy.cuh"
#include "cuda/device/sm90/forward_pair.cuh"
#include "cuda/device/tile/accumulator.cuh"
#include "cuda/device/tile/result.cuh"
#include "math/merge.h"

namespace fovea::cuda {

// Of a tile that has a part of its keys: what generic_combine reads, for row `row`.
__device__ __forceinline__ i64 sm90_row_of_part(const Args& a, const Sm90Tile& tile, int row) {
  return padded_row(a.rows, tile.b, {.q_begin = tile.q_begin}) + row;
}

// Where out is merged: the logsumexp that is there. The first block of a pair reads it, since it replaces it later, and
// tells the other.
template <auto S>
__device__ __forceinline__ void sm90_forward_merged_lse(const Args& a, const Sm90Tile& tile, Sm90Pair<S>& pair,
                                                        int row0, float (&lse)[2]) {
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    const int row = row0 + 8 * x;
    const bool reads = a.results.out.adds && pair.rank == 0 && row < tile.q_len;
    lse[x] = reads ? static_cast<const float*>(a.lse.data)[tile.offset(a.lse.strides, tile.q_begin + row)] : -kInfinity;
  }
  pair.take_first(lse);
}

// The end of this thread's rows: what their O is multiplied by, and their logsumexp, which is stored. there: what an O
// that they are merged with is multiplied by. With Spec::split the reference and the sum, see generic_combine. Of a
// pair the first block stores, and merged_lse is what sm90_forward_merged_lse() found.
template <auto S>
__device__ __forceinline__ void sm90_forward_end_rows(const Args& a, const Sm90Tile& tile, Sm90Softmax<S>& softmax,
                                                      int rank, const float (&merged_lse)[2], float sink, int row0,
                                                      int t, float (&factor)[2], float (&there)[2]) {
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    float logsumexp;
    softmax.end(x, sink, keep_scale<S>(a), factor[x], logsumexp);
    const int row = row0 + 8 * x;
    const bool stores = t == 0 && rank == 0 && row < tile.q_len;
    if constexpr (S.split) {
      if (stores) {
        const i64 part = tile.part % a.splits;
        const i64 at = (part * a.rows.heads_q + tile.head) * a.padded_rows + sm90_row_of_part(a, tile, row);
        reinterpret_cast<float2*>(a.partial_sum)[at] = softmax.of_part(x);
      }
      continue;
    }
    float* const lse = static_cast<float*>(a.lse.data) + tile.offset(a.lse.strides, tile.q_begin + row);
    if constexpr (S.fp32_results) {
      if (a.results.out.adds) {
        const math::Merge<float> merged =
            S.pairs ? math::merge(merged_lse[x], logsumexp) : merge_row(lse, logsumexp, row < tile.q_len, t == 0);
        factor[x] *= merged.of_new;
        there[x] = merged.of_old;
        if (S.pairs && stores) {
          *lse = merged.lse;
        }
        continue;
      }
    }
    if (a.lse.data != nullptr && stores) {
      *lse = logsumexp;
    }
  }
}

// Rows of V from `live` on, in all panels; a warpgroup's barrier is to follow.
template <auto S>
__device__ __forceinline__ void sm90_clear_values(u32 to, int live, int thread) {
  constexpr int kKeys = sm90_step_keys(S);
  constexpr int kPanel = wide_panel_columns(S.dv);
  constexpr int kChunks = sm90_forward_panels(S.dv) * (kPanel / 8);
  for (int i = thread; i < (kKeys - live) * kChunks; i += 128) {
    const int row = live + i / kChunks;
    const int chunk = i % kChunks;
    // Rows of a panel keep their chunks, so that all chunks of a row may be zeroed unswizzled: all of a panel's.
    store_shared(to + chunk / (kPanel / 8) * kKeys * kPanel * 2 + row * kPanel * 2 + chunk % (kPanel / 8) * 16,
                 uint4{0, 0, 0, 0});
  }
  fence_async();
}

// O times `factor` from registers: this block's columns of it, and `there` times what out is merged with. With
// Spec::split it is what generic_combine reads.
template <auto S>
__device__ __forceinline__ void sm90_forward_store_directly(const Args& a, const Sm90Tile& tile, int rank, int row,
                                                            int t, float (&o)[S.dv / 2], const float (&factor)[2],
                                                            const float (&there)[2]) {
  const int first = rank * S.dv;
  const int columns = S.pairs ? min(a.out_dim_v - first, S.dv) : a.out_dim_v;
  const RowFactors factors{{factor[0], factor[1]}, {there[0], there[1]}};
  const i64 at = tile.offset(a.out.strides, tile.q_begin) + first * a.out.strides.col;
  if constexpr (S.split) {
    constexpr int kColumns = sm90_all_columns(S);
    const i64 heads = a.rows.heads_q;
    const i64 part = (tile.part % a.splits * a.padded_rows + sm90_row_of_part(a, tile, 0)) * heads + tile.head;
    store_result_by_fours(a.partial_out + part * kColumns + first, heads * kColumns, false, o, factors, row, tile.q_len,
                          S.dv, t);
  } else if constexpr (S.fp32_results) {
    store_result<S.type>(a.out, at, a.results.out, o, factors, row, tile.q_len, columns, t);
  } else {
#pragma unroll
    for (int i = 0; i < S.dv / 2; ++i) {
      o[i] *= factor[i / 2 % 2];
    }
    store_accumulator<S.type>(static_cast<u16*>(a.out.data) + at, a.out.strides, o, 1.f, row, tile.q_len, columns,
                              (!sm90_has_parts(S) && !S.pairs) || a.vector_stores, t);
  }
}

// O times `factor`, of warpgroup c's rows, through `place`, the tile's buffer of Q. True: a tensor store that thread 0
// has begun reads it yet. Otherwise the place is free.
template <auto S>
__device__ __forceinline__ bool sm90_forward_store(const Args& a, const Sm90ForwardArgs& m, const Sm90Tile& tile,
                                                   u32 place, int c, int thread, const float (&o)[S.dv / 2],
                                                   const float (&factor)[2]) {
  constexpr int kRows = sm90_forward_sizes(S).rows;
  constexpr int kPanel = wide_panel_columns(S.dv);
  const int own_barrier = kForwardGroup[c];
  const int top = tile.row + c * 64;
  // Rows of O lie where this warp's own rows of Q do, if the panels of both are as wide.
  if constexpr (wide_panel_columns(S.d) != kPanel) {
    sync(kForwardGroups, 128 * sm90_forward_sizes(S).groups);
  }
  store_to_panels<S.type, kRows, kPanel>(place, o, factor, c * 64 + thread / 32 * 16 + thread % 16, thread % 32 / 16);
  fence_async();
  sync(own_barrier, 128);
  // A tensor store would run over into the next sequence.
  if (m.store_tensor && !(S.ragged && top + 64 > tile.q_len)) {
    if (thread == 0) {
      for (int i = 0; i < sm90_forward_panels(S.dv); ++i) {
        tensor_store(m.out, place + (i * kRows + c * 64) * kPanel * 2,
                     {i * kPanel, tile.q_begin + top, tile.head * m.has_out.head, tile.b2 * m.has_out.batch2,
                      tile.b1 * m.has_out.batch1});
      }
      bulk_commit();
    }
    return true;
  }
  const auto address = [&](int row, int column) {  // of 8 columns
    return place + column / kPanel * kRows * kPanel * 2 + swizzled<kPanel * 2>(c * 64 + row, column % kPanel / 8);
  };
  const auto left_of = [&](int row, int column) { return top + row < tile.q_len ? a.out_dim_v - column : 0; };
  u16* const out = static_cast<u16*>(a.out.data) + tile.offset(a.out.strides, tile.q_begin + top);
  if (a.vector_stores) {
    constexpr int kChunks = S.dv / 8;
#pragma unroll 1
    for (int i = thread; i < 64 * kChunks; i += 128) {
      const int row = i / kChunks;
      const int column = i % kChunks * 8;
      if (left_of(row, column) > 0) {
        *reinterpret_cast<uint4*>(out + row * a.out.strides.row + column) = load_shared4(address(row, column));
      }
    }
  } else {
    // Words of neighbouring lanes: pieces of 16 bytes that must be written in parts would take as many writes each.
    constexpr int kWords = S.dv / 2;
#pragma unroll 1
    for (int i = thread; i < 64 * kWords; i += 128) {
      const int row = i / kWords;
      const int column = i % kWords * 2;
      const int left = left_of(row, column);
      const u32 word = load_shared_word(address(row, column) + column % 8 * 2);
      u16* const to = out + row * a.out.strides.row + column * a.out.strides.col;
      if (left > 1 && a.out.strides.col == 1 && (reinterpret_cast<u64>(to) & 3) == 0) {
        *reinterpret_cast<u32*>(to) = word;
      } else {
        if (left > 0) {
          to[0] = u16(word);
        }
        if (left > 1) {
          to[a.out.strides.col] = u16(word >> 16);
        }
      }
    }
  }
  sync(own_barrier, 128);
  return false;
}

}  // namespace fovea::cuda
