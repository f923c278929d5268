// SPDX-License-Identifier: Apache-2.0
//
// Keep: dropout's decisions for a fragment of the generic kernels and of sm90_bias_gradient, by fovea's rule or by the
// rule of PyTorch's memory-efficient kernels. A fragment's rows and columns begin at multiples of 16 of queries and
// keys.
#pragma once

#include "cuda/device/tile/tile.cuh"
#include "math/dropout.h"

namespace fovea::cuda {

// The keys of rule fovea, of query head `head` of sequence b.
template <auto S>
__device__ __forceinline__ math::DropoutHead dropout_head(const Args& a, u32 b, u32 head) {
  const u64 offset = a.offset.now();
  const math::DropoutHead made = math::DropoutHead::make(a.seed.now(), offset, dropout_stream<S>(a, b, head));
  return {uniform(made.k0), uniform(made.k1), uniform(made.w0), uniform(made.w1)};
}

// Decisions for a fragment of kTiles row tiles and kColumns tiles of 8 columns.
template <auto S, bool kTransposed, int kTiles, int kColumns>
struct Keep {
  static constexpr bool kFovea = S.dropout == DropoutRule::kFovea;
  static constexpr bool kTorch = S.dropout == DropoutRule::kTorchMemEfficient;
  static_assert((kColumns & (kColumns - 1)) == 0);  // parts of a column's number have no bit in common
  static_assert(!kTorch || kColumns <= 8);          // a thread's decisions of a row tile are a word

  math::DropoutHead head{};
  u32 limit = 0;
  u32 folded_row = 0, folded_column = 0;  // shifted: of the positions of the first row and column
  math::DropoutRow<u32> rows[kTransposed ? 1 : kTiles];
  u64 seed = 0, base = 0, row_stride = 0;
  float p = 0;
  u32 bits[kTorch ? kTiles : 1];

  // Wherever the head changes; nothing without dropout.
  __device__ __forceinline__ void start(const Args& a, const Place& place, u32 query_head) {
    if constexpr (kFovea) {
      head = dropout_head<S>(a, place.b, query_head);
      if constexpr (S.shifted) {
        const u32 query = a.shard.folded_query(place.b);
        const u32 key = a.shard.folded_key(place.b);
        folded_row = kTransposed ? key : query;
        folded_column = kTransposed ? query : key;
      }
      limit = a.drop_threshold << 16;  // a threshold of 65536 becomes 0: the factor is 0 then
    }
    if constexpr (kTorch) {
      const u64 n = dropout_stream<S>(a, place.b, query_head);
      const u64 offset = a.offset.now();
      seed = a.seed.now();
      const math::Dropout dropout{math::Rng::kTorchMemEfficient, 0, a.drop_p, seed, offset};
      const u64 stride = a.rows.packed() ? place.k_len : a.rows.rows_k;
      base = math::DropoutOfHead{dropout, {}, offset + n * u64(a.dropout_plane), stride}.base;
      row_stride = stride;
      p = a.drop_p;
    }
  }

  // In S what depends on the row alone.
  __device__ __forceinline__ void start_rows(int row0, int g) {
    if constexpr (kFovea && !kTransposed) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        u32 row = math::dropout_fold(u32(row0 + i * 16 + g));
        if constexpr (S.shifted) {
          row += folded_row;
        }
        rows[i] = math::dropout_row<u32>(head, row);
      }
    }
  }

  // Once for the fragment that begins at (row0, column0).
  __device__ __forceinline__ void prepare(const Thread& thread, int row0, int column0) {
    if constexpr (kTorch) {
      const bool shares = ((base | row_stride) & 3) == 0;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        bits[i] = torch_bits(thread, row0 + i * 16, column0, shares);
      }
    }
  }

  // Of the 16 x 16 block (i, jj): keep[half] belongs to column tile 2 jj + half and is ordered as an accumulator.
  __device__ __forceinline__ void decide(bool (&keep)[2][4], const Thread& thread, int i, int jj, int row0,
                                         int column0) const {
    if constexpr (kFovea) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const math::Words2<u32> w = call(thread, i, jj, e, row0, column0);
        // Words are queries without and with bit 3, their halves keys.
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int half = n >> 1;
          const int x = n & 1;
          const u32 word = (kTransposed ? half : x) != 0 ? w.y : w.x;
          keep[half][2 * x + e] = ((kTransposed ? x : half) != 0 ? word : word << 16) >= limit;
        }
      }
    }
    if constexpr (kTorch) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        keep[n >> 2][n & 3] = (bits[i] >> bit_of(jj * 8 + n) & 1) != 0;
      }
    }
  }

  // Weights of row tile i that are dropped become zero.
  __device__ __forceinline__ void drop(float (&s)[kColumns][4], const Thread& thread, int i, int row0,
                                       int column0) const {
    if constexpr (S.dropout != DropoutRule::kNone) {
#pragma unroll
      for (int jj = 0; jj < kColumns / 2; ++jj) {
        bool kept[2][4];
        decide(kept, thread, i, jj, row0, column0);
        for (int e = 0; e < 8; ++e) {
          s[2 * jj + (e >> 2)][e & 3] = kept[e >> 2][e & 3] ? s[2 * jj + (e >> 2)][e & 3] : 0;
        }
      }
    }
  }

 private:
  // The torch rule's decision of element [n >> 2][n & 3] of a row tile has this bit, in the order in which they are
  // shared.
  static constexpr int bit_of(int n) {
    return kTransposed ? (n & 3) * 8 + (n >> 2) : (n >> 1 & 1) * 16 + (n >> 2) * 2 + (n & 1);
  }

  // Where four keys that begin at a multiple of four are one call's numbers (`shares`), they belong to kSharers
  // neighbours along the keys: each makes its share of the calls, packs the decisions by the lane that needs them, and
  // all exchange them. Elsewhere each makes a call for every element of its own.
  __device__ __forceinline__ u32 torch_bits(const Thread& thread, int row0, int column0, bool shares) const {
    constexpr int kSharers = kTransposed ? 4 : 2;
    constexpr int kStride = kTransposed ? 4 : 1;  // of lanes
    constexpr int kEach = 4 / kSharers;           // numbers of a call for each
    constexpr int kBits = 32 / kSharers;
    const int rank = (kTransposed ? thread.g : thread.t) % kSharers;
    u32 made = 0;
#pragma unroll 1
    for (int n = 0; n < (shares ? kColumns : kColumns * 4); ++n) {
      // Element [j][x] of the accumulator. Sharing, in S transposed x is the rank, in S it is 0 or 2 by the rank.
      const int j = shares ? n : n >> 2;
      const int x = !shares ? n & 3 : kTransposed ? rank : rank * 2;
      int row = row0 + thread.g + (x >> 1) * 8;
      int column = column0 + j * 8 + thread.t * 2 + (x & 1);
      (kTransposed ? row : column) &= shares ? ~3 : ~0;
      const u64 index =
          base + (kTransposed ? u64(column) * row_stride + u64(row) : u64(row) * row_stride + u64(column));
      const math::Words4<u32> words = math::torch_words(seed, index >> 2);
      const u32 four[4] = {words.w0, words.w1, words.w2, words.w3};
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const bool mine = shares || m == int(index & 3);
        const int bit = shares ? m / kEach * kBits + j * kEach + m % kEach : bit_of(n);
        made |= u32(mine && math::torch_uniform_of_word(four[m]) > p) << bit;
      }
    }
    if (!shares) {
      return made;
    }
    u32 mine = 0;
#pragma unroll
    for (int from = 0; from < kSharers; ++from) {
      const int lane = (thread.lane & ~((kSharers - 1) * kStride)) | from * kStride;
      const u32 of_from = __shfl_sync(~0u, made, lane) >> rank * kBits;
      mine |= (of_from & ((1u << kBits) - 1)) << from * kBits;
    }
    return mine;
  }

  // The call of this thread's row of row tile i and column 16 jj + 2 t + e.
  __device__ __forceinline__ math::Words2<u32> call(const Thread& thread, int i, int jj, int e, int row0,
                                                    int column0) const {
    u32 column = (u32(column0) / 2 + thread.t * 2) ^ u32(jj * 8 + e);
    if constexpr (S.shifted) {
      column += folded_column;
    }
    if constexpr (kTransposed) {
      u32 row = math::dropout_fold(u32(row0 + i * 16 + thread.g));
      if constexpr (S.shifted) {
        row += folded_row;
      }
      return math::dropout_call<u32>(head, column, row);
    } else {
      return math::dropout_call<u32>(head, rows[i], column);
    }
  }
};

}  // namespace fovea::cuda
