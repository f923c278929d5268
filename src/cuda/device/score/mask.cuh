// SPDX-License-Identifier: Apache-2.0
//
// Bits of a mask, from where a kernel finds them to the scores of a fragment, or to its weights.
//
//   mask_bits          the generic kernels and sm90_bias_gradient, of S or of S transposed: scores, from shared memory
//   Sm90ForwardMask    sm90_forward: scores, by words of 128 keys in global memory (sm90/forward_mask.cuh writes them)
//   Sm90BackwardMask   sm90_backward: weights, by words of 16 keys and 64 queries there (sm90/backward_mask.cuh)
//
// A mask of keys alone (key_mask) is one word for all rows of sm90_forward, or columns of K there
// (sm90/forward_prepare.cuh). sm90_backward clears P and dS with it (Sm90BackwardGradients::clear_hidden); the other
// kernels add it as a vector (score/scores.cuh).
#pragma once

#include "cuda/device/tile/tile.cuh"
#include "math/band.h"

namespace fovea::cuda {

// What bits of a mask hide. key0: the fragment's first key in the sequence.
template <class Inputs, bool kTransposed, int kTiles, int kColumns>
__device__ __forceinline__ void mask_bits(float (&s)[kTiles][kColumns][4], const Thread& thread, u32 words,
                                          int tile_row, int tile_column, int key0) {
  constexpr int kWords = Inputs::kWords;
  constexpr int kOfQuery = kTransposed ? (kTiles + 1) / 2 : (kColumns + 3) / 4;
  const int g = thread.g;
  const int t = thread.t;
  // Keys of the fragment begin at bit `first` of a word and stay in it, or are whole words.
  const int first = (kTransposed ? kTiles % 2 : kColumns % 4) == 0 && kWords > 1 ? 0 : key0 & 31;
  const int word = kWords > 1 ? (kTransposed ? tile_row : tile_column) / 32 : 0;
#pragma unroll
  for (int i = 0; i < (kTransposed ? kColumns : kTiles); ++i) {
    for (int x = 0; x < 2; ++x) {
      const int row = kTransposed ? tile_column + i * 8 + t * 2 + x : tile_row + i * 16 + x * 8 + g;
      const u32 query = words + (row * kWords + word) * 4;
#pragma unroll
      for (int w = 0; w < kOfQuery; ++w) {
        const u32 bits = load_shared_word(query + w * 4) >> (first + (kTransposed ? g : t * 2));
        if constexpr (kTransposed) {
          for (int n = 0; n < 4 && w * 2 + n / 2 < kTiles; ++n) {
            if ((bits >> n * 8 & 1) == 0) {
              s[w * 2 + n / 2][i][n % 2 * 2 + x] = -kInfinity;
            }
          }
        } else {
          for (int n = 0; n < 8 && w * 4 + n / 2 < kColumns; ++n) {
            if ((bits >> (n / 2 * 8 + n % 2) & 1) == 0) {
              s[i][w * 4 + n / 2][2 * x + n % 2] = -kInfinity;
            }
          }
        }
      }
    }
  }
}

// Words of 128 keys, of which a thread has the bits of its columns.
template <auto S>
struct Sm90ForwardMask {
  static constexpr int kRows = S.key_mask ? 1 : 2;  // of this thread
  static_assert(!S.mask || S.step == 32 || S.step == 64 || S.step == 128);

  const u32* rows[kRows] = {};  // this thread's words
  u32 words[kRows];             // of a tile of keys

  // Where they are. tile: a Sm90Tile. row: this thread's first, of the sequence.
  template <class QueryTile>
  __device__ __forceinline__ void find(const Args& a, const QueryTile& tile, const math::Band<int>& band, int row,
                                       int t) {
    if constexpr (S.mask) {
      for (int x = 0; x < kRows; ++x) {
        rows[x] =
            static_cast<const u32*>(a.mask.data) + t + tile.offset(a.mask.strides, min(row + 8 * x, band.seqlen_q - 1));
      }
    }
  }

  // Those of the tile that begins at key n0.
  __device__ __forceinline__ void load(int n0) {
    if constexpr (S.mask) {
#pragma unroll
      for (int x = 0; x < kRows; ++x) {
        words[x] = __ldg(rows[x] + n0 / 128 * 4);
        if constexpr (S.step < 128) {
          words[x] = words[x] >> n0 % 128 / 4 | ~0u << S.step / 4;
        }
      }
    }
  }

  // What they hide becomes -inf; in a warp whose bits are all set there is nothing to do.
  template <int kCount>
  __device__ __forceinline__ void hide(float (&s)[kCount]) const {
    if constexpr (S.mask) {
      if (__all_sync(~0u, (words[0] & words[kRows - 1]) == ~0u)) {
        return;
      }
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        // Row by row: seven bits of a word become predicates at once. Not if the compiler sees that both rows have the
        // same: then it asks for each bit.
        const u32 word = !S.key_mask ? words[x % kRows]
                         : x == 0    ? words[0]
                                     : __shfl_sync(~0u, words[0], threadIdx.x % 32);
#pragma unroll
        for (int c = 0; c < kCount / 2; ++c) {
          float& score = s[c / 2 * 4 + 2 * x + c % 2];
          score = (word & 1u << c) != 0 ? score : -kInfinity;
        }
      }
    }
  }
};

// Words of 16 keys and 64 queries, of which a thread has the bits of its fragment of S transposed.
template <auto S>
struct Sm90BackwardMask {
  static constexpr int M = S.step;

  const u32* of_head;           // of this lane and its warp's keys, of the first 64 queries
  u32 words[M == 128 ? 2 : 1];  // of a step: bit i of word j is that of s[32 * j + i]

  // key: this thread's first.
  __device__ __forceinline__ void begin_head(const Tensor& mask, const Place& place, int head, int key) {
    if constexpr (S.mask) {
      const int last = (place.k_len - 1) / 16;  // of its groups of keys
      of_head = static_cast<const u32*>(mask.data) + place.plane(mask.strides, head) + min(key / 16, last) * 32 +
                threadIdx.x % 32;
    }
  }

  // Ahead of a step: of queries from `query` on.
  __device__ __forceinline__ void load(const Tensor& mask, int query) {
    if constexpr (S.mask) {
#pragma unroll
      for (int i = 0; i < (M + 63) / 64; ++i) {
        words[i] = __ldg(of_head + i64(query / 64 + i) * mask.strides.row);
      }
    }
  }

  // Hidden weights become 0. Whether a thread of this warp has any.
  __device__ __forceinline__ bool hide(float (&s)[M / 2], int query) const {
    if constexpr (S.mask) {
      u32 bits[M == 128 ? 2 : 1] = {M == 32 ? words[0] >> (query & 32) / 2 | 0xffff0000u : words[0]};
      bool open = bits[0] == ~0u;
      if constexpr (M == 128) {
        bits[1] = words[1];
        open = open && bits[1] == ~0u;
      }
      if (__all_sync(~0u, open)) {
        return false;
      }
#pragma unroll
      for (int i = 0; i < M / 2; ++i) {
        s[i] = (bits[i / 32] >> i % 32 & 1) != 0 ? s[i] : 0;
      }
      return true;
    } else {
      return false;
    }
  }
};

}  // namespace fovea::cuda
