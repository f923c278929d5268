// SPDX-License-Identifier: Apache-2.0
//
// Dropout's decisions for a fragment of the generic kernels and of sm90_bias_gradient. A fragment's rows and columns
// begin at multiples of 16 of queries and keys.
//
//   dropout_head   the keys of rule fovea, for all kernels
//   Keep           by fovea's rule (FoveaKeep) or by the rule of PyTorch's memory-efficient kernels
//                  (score/torch_dropout.cuh)
//   drop           weights that are dropped become zero
#pragma once

#include "cuda/device/score/torch_dropout.cuh"
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
struct FoveaKeep {
  static_assert((kColumns & (kColumns - 1)) == 0);  // parts of a column's number have no bit in common

  math::DropoutHead head{};
  u32 limit = 0;
  u32 folded_row = 0, folded_column = 0;  // shifted: of the positions of the first row and column
  math::DropoutRow<u32> rows[kTransposed ? 1 : kTiles];

  // Wherever the head changes.
  __device__ __forceinline__ void start(const Args& a, const Place& place, u32 query_head) {
    head = dropout_head<S>(a, place.b, query_head);
    if constexpr (S.shifted) {
      const u32 query = a.shard.folded_query(place.b);
      const u32 key = a.shard.folded_key(place.b);
      folded_row = kTransposed ? key : query;
      folded_column = kTransposed ? query : key;
    }
    limit = a.drop_threshold << 16;  // a threshold of 65536 becomes 0: the factor is 0 then
  }

  // In S what depends on the row alone.
  __device__ __forceinline__ void start_rows(int row0, int g) {
    if constexpr (!kTransposed) {
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

  // Once for a fragment; here each block asks for its own.
  __device__ __forceinline__ void prepare(const Thread&, int, int) {}

  // Of the 16 x 16 block (i, jj): keep[half] belongs to column tile 2 jj + half and is ordered as an accumulator.
  __device__ __forceinline__ void decide(bool (&keep)[2][4], const Thread& thread, int i, int jj, int row0,
                                         int column0) const {
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

 private:
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

// Without dropout. Nothing else of Keep is called then.
struct NoKeep {
  __device__ __forceinline__ void start(const Args&, const Place&, u32) {}
  __device__ __forceinline__ void start_rows(int, int) {}
};

template <auto S, bool kTransposed, int kTiles, int kColumns>
using Keep =
    typename Select<S.dropout == DropoutRule::kNone, NoKeep,
                    typename Select<S.dropout == DropoutRule::kFovea, FoveaKeep<S, kTransposed, kTiles, kColumns>,
                                    TorchKeep<S, kTransposed, kTiles, kColumns>>::Type>::Type;

// Weights of row tile i that are dropped become zero.
template <class Decisions, int kColumns>
__device__ __forceinline__ void drop(const Decisions& keep, float (&s)[kColumns][4], const Thread& thread, int i,
                                     int row0, int column0) {
#pragma unroll
  for (int jj = 0; jj < kColumns / 2; ++jj) {
    bool kept[2][4];
    keep.decide(kept, thread, i, jj, row0, column0);
    for (int e = 0; e < 8; ++e) {
      s[2 * jj + (e >> 2)][e & 3] = kept[e >> 2][e & 3] ? s[2 * jj + (e >> 2)][e & 3] : 0;
    }
  }
}

}  // namespace fovea::cuda
