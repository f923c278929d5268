// SPDX-License-Identifier: Apache-2.0
//
// What sm90_forward adds to scores, for the accumulator of a warpgroup: 64 queries by S.step keys, of which a thread
// has two rows.
//
//   Sm90Inputs         biases and key terms from shared memory, ALiBi, query terms, mask words from global memory
#pragma once

#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/score/bias.cuh"
#include "cuda/device/score/scores.cuh"
#include "cuda/device/sm90/forward_copy.cuh"
#include "cuda/device/sm90/forward_sizes.h"
#include "math/dropout.h"
#include "math/score.h"

namespace fovea::cuda {

// ---- scores ----

// What is added to this thread's scores, beside biases: constants of a tile of queries, words of a tile of keys.
template <auto S>
struct Sm90Inputs {
  static constexpr Sm90ForwardSizes kSizes = sm90_forward_sizes(S);
  static constexpr int kMaskRows = S.key_mask ? 1 : 2;  // of this thread
  static_assert(!S.mask || S.step == 32 || S.step == 64 || S.step == 128);
  using Positions = PositionScores<S.positions, false>;

  u32 base;  // of shared memory
  Sm90PanelBias<S> bias;
  u32 key_term;  // of this lane's first column
  Positions positions{};
  typename Positions::Row position;  // this thread's first row, for keys from its first column on
  float query_terms[2] = {};
  const u32* mask_rows[kMaskRows] = {};  // this thread's words of 128 keys each, as sm90_mask writes them
  u32 words[kMaskRows];                  // of a tile of keys, a bit for each of this thread's columns

  // row: this thread's first row of the tile; fragment_row, half: row and 8 columns, by lane as ldmatrix takes them.
  __device__ __forceinline__ Sm90Inputs(u32 memory, int row, int fragment_row, int half, int t)
      : base(memory), bias(row, fragment_row, half, t), key_term(memory + kSizes.key_term_at + t * 8) {}

  // row: this thread's first, of the sequence.
  __device__ __forceinline__ void start(const Args& a, const Sm90Tile& tile, const math::Band<int>& band, int row,
                                        int t) {
    positions.start(a.positions, tile, tile.head);
    if constexpr (bool(S.positions)) {
      position = {row, 2 * t, shift_of<S>(a, u32(tile.b), tile.q_len, tile.k_len)};
    }
    if constexpr (!sm90_hides(S)) {
      find_words(a, tile, band, row, t);
    }
    if constexpr (S.query_term) {
      const float* const from = static_cast<const float*>(a.query_term.data) + tile.offset(a.query_term.strides, 0);
      for (int x = 0; x < 2; ++x) {
        query_terms[x] = from[min(row + 8 * x, tile.q_len - 1) * a.query_term.strides.row];
      }
    }
  }

  // Where the words of the mask are.
  __device__ __forceinline__ void find_words(const Args& a, const Sm90Tile& tile, const math::Band<int>& band, int row,
                                             int t) {
    if constexpr (S.mask) {
      for (int x = 0; x < kMaskRows; ++x) {
        mask_rows[x] =
            static_cast<const u32*>(a.mask.data) + t + tile.offset(a.mask.strides, min(row + 8 * x, band.seqlen_q - 1));
      }
    }
  }

  // Mask words of the tile that begins at key n0.
  __device__ __forceinline__ void load_words(int n0) {
    if constexpr (S.mask) {
#pragma unroll
      for (int x = 0; x < kMaskRows; ++x) {
        words[x] = __ldg(mask_rows[x] + n0 / 128 * 4);
        if constexpr (S.step < 128) {
          words[x] = words[x] >> n0 % 128 / 4 | ~0u << S.step / 4;
        }
      }
    }
  }

  // Bits of the mask; in a warp whose bits are all set there is nothing to do.
  template <int kCount>
  __device__ __forceinline__ void hide(float (&s)[kCount]) const {
    if constexpr (S.mask) {
      if (__all_sync(~0u, (words[0] & words[kMaskRows - 1]) == ~0u)) {
        return;
      }
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        // Row by row: seven bits of a word become predicates at once. Not if the compiler sees that both rows have the
        // same: then it asks for each bit.
        const u32 word = !S.key_mask ? words[x % kMaskRows]
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

  // Block k. kSet: where there is a bias.
  template <bool kSet = false>
  __device__ __forceinline__ void add(float (&x)[8], int stage, int n0, int k) const {
    bias.template add<S.bias, kSet>(x, base + kSizes.bias_at + stage * kSizes.bias, k);
    bias.template add<S.bias2, false>(x, base + kSizes.bias2_at + stage * kSizes.bias2, k);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int column = 16 * k + 8 * h;
      float2 term{};
      if constexpr (S.key_term) {
        term = load_shared2(key_term + stage * kSizes.key_term + column * 4);
      }
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        float& first = x[4 * h + 2 * y];
        float& second = x[4 * h + 2 * y + 1];
        if constexpr (S.key_term) {
          first += term.x;
          second += term.y;
        }
        if constexpr (bool(S.positions)) {
          const auto pair = typename Positions::Pair(position, n0).further(8 * y, column);
          first += positions.of(pair);
          second += positions.of(pair.further(0, 1));
        }
        if constexpr (S.query_term) {
          first = with_term(first, query_terms[y]);
          second = with_term(second, query_terms[y]);
        }
      }
    }
  }
};

// ---- dropout ----

// A u32 whose wide product is one instruction and two register names, for math/dropout.h.
struct Word {
  u32 bits;
  Word() = default;
  __device__ __forceinline__ explicit constexpr Word(u32 x) : bits(x) {}
  friend __device__ __forceinline__ Word operator^(Word a, Word b) { return Word(a.bits ^ b.bits); }
  friend __device__ __forceinline__ Word operator^(Word a, u32 b) { return Word(a.bits ^ b); }
};
// mul.wide (Integer: mul).
__device__ __forceinline__ void mul_wide(Word a, u32 b, Word& high, Word& low) {
  asm("{\n.reg .b64 t;\nmul.wide.u32 t, %2, %3;\nmov.b64 {%1, %0}, t;\n}"
      : "=r"(high.bits), "=r"(low.bits)
      : "r"(a.bits), "r"(b));
}

}  // namespace fovea::cuda
