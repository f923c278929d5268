// SPDX-License-Identifier: Apache-2.0
//
// From dot products to the scores of sm90_forward, for the accumulator of a warpgroup: 64 queries by S.step keys, of
// which a thread has two rows.
//
//   add         what is added to a block of 16 columns: biases, key terms, terms of positions, query terms
//   cap         the softcap of all columns
//   finish      all columns: scale or softcap, what is added, masks
//   mask_edge   the band and the end of the sequence
#pragma once

#include "cuda/device/score/approximation.cuh"
#include "cuda/device/score/bias.cuh"
#include "cuda/device/score/mask.cuh"
#include "cuda/device/score/position_terms.h"
#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/device/sm90/forward_tile.cuh"
#include "math/score.h"

namespace fovea::cuda {

// The members are what a thread keeps for its scores: constants of a tile of queries, words of a tile of keys.
template <auto S>
struct Sm90ForwardScores {
  static constexpr Sm90ForwardSizes kSizes = sm90_forward_sizes(S);
  static constexpr int kBlocks = S.step / 16;
  static constexpr bool kNatural = natural_scores(S);  // otherwise scores stay dot products
  static_assert((S.bias == BiasTile::kNone && S.bias2 == BiasTile::kNone) || S.step == 32 || S.step % 64 == 0);
  using Positions = PositionScores<S.positions, false>;

  u32 base;  // of shared memory
  Sm90PanelBias<kSizes.rows, sm90_bias_panel(S, BiasTile::kBf16)> bias;
  u32 key_term;  // of this lane's first column
  Positions positions{};
  typename Positions::Row position;  // this thread's first row, for keys from its first column on
  float query_terms[2] = {};
  Sm90ForwardMask<S> mask;

  // row: this thread's first row of the tile; fragment_row, half: row and 8 columns, by lane as ldmatrix takes them.
  __device__ __forceinline__ Sm90ForwardScores(u32 memory, int row, int fragment_row, int half, int t)
      : base(memory), bias(row, fragment_row, half, t), key_term(memory + kSizes.key_term_at + t * 8) {}

  // row: this thread's first, of the sequence.
  __device__ __forceinline__ void start(const Args& a, const Sm90Tile& tile, const math::Band<int>& band, int row,
                                        int t) {
    positions.start(a.positions, tile, tile.head);
    if constexpr (bool(S.positions)) {
      position = {row, 2 * t, shift_of<S>(a, u32(tile.b), tile.q_len, tile.k_len)};
    }
    if constexpr (!sm90_hides(S)) {
      mask.find(a, tile, band, row, t);
    }
    if constexpr (S.query_term) {
      const float* const from = static_cast<const float*>(a.query_term.data) + tile.offset(a.query_term.strides, 0);
      for (int x = 0; x < 2; ++x) {
        query_terms[x] = from[min(row + 8 * x, tile.q_len - 1) * a.query_term.strides.row];
      }
    }
  }

  // Block k. kSet, for problems with a bias: x becomes what is added.
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

  // kSmall: no score comes near the cap. kLoop, for rare steps: less code, a loop over a few scores at a time.
  template <bool kSmall, bool kLoop>
  __device__ __forceinline__ void cap(float (&s)[S.step / 2], const Args& a, const Sm90ForwardArgs& m) const {
    constexpr int kAll = S.step / 2;
    constexpr int kPart = kLoop ? 16 : kAll;
    static_assert(kAll % kPart == 0);
#pragma unroll 1
    for (int n = 0; n < kAll; n += kPart) {
      float made[kPart];
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        if constexpr (kSmall) {
          made[i] = m.small_cap.of(s[i]);
        } else {
          made[i] = score_of_dot<S, ApproxOfBoth>({m.scale_of_cap, a.softcap, 1}, s[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kAll; ++i) {
        s[i] = i + kPart < kAll ? s[i + kPart] : made[i + kPart - kAll];
      }
    }
  }

  // Dot products become scores, but for the band and the end of the sequence (mask_edge).
  // kAgain: of dot products that Sm90Softmax::form() has made again. kRare: this code runs in few steps.
  template <bool kAgain, bool kRare>
  __device__ __forceinline__ void finish(float (&s)[S.step / 2], const Args& a, const Sm90ForwardArgs& m, int stage,
                                         int n0) const {
    // Where the cap is a polynomial its last product takes in what is added.
    constexpr bool kFused = S.softcap && !kAgain && S.bias != BiasTile::kNone && !S.query_term;
    bool added = false;
    if constexpr (S.softcap && kAgain) {
      cap<false, kRare>(s, a, m);
    } else if constexpr (S.softcap) {
      float largest[4] = {};  // one would be a chain of as many waits
#pragma unroll
      for (int i = 0; i < S.step / 2; ++i) {
        largest[i % 4] = fmaxf(largest[i % 4], fabsf(s[i]));
      }
      const float all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
      if (!__all_sync(~0u, all <= m.small_cap.largest)) {
        cap<false, kRare>(s, a, m);
      } else if constexpr (kFused) {
        added = true;
#pragma unroll
        for (int k = 0; k < kBlocks; ++k) {
          float terms[8];
          add<true>(terms, stage, n0, k);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            s[8 * k + i] = m.small_cap.of_plus(s[8 * k + i], terms[i]);
          }
        }
      } else {
        cap<true, false>(s, a, m);
      }
    } else if constexpr (kNatural) {
#pragma unroll
      for (int i = 0; i < S.step / 2; ++i) {
        s[i] *= a.scale;
      }
    }
    if constexpr (sm90_has_planes(S) || bool(S.positions) || S.query_term) {
      if (!kFused || !added) {
#pragma unroll
        for (int k = 0; k < kBlocks; ++k) {
          add(*reinterpret_cast<float(*)[8]>(s + 8 * k), stage, n0, k);
        }
      }
    }
    if constexpr (!sm90_hides(S)) {
      mask.hide(s);
    }
  }

  // Forbidden elements become -inf. Each edge is looked for only where the rows of this warpgroup, 64 from `top` on,
  // meet it; `row` is this thread's first. Without a band only the first step (kAtEnd) meets the sequence's end.
  template <bool kAtEnd>
  __device__ __forceinline__ void mask_edge(float (&s)[S.step / 2], const math::Band<int>& band, int top, int row,
                                            int n0, int t) const {
    const int free_end = S.banded ? min(band.seqlen_k, top + band.high + 1) : band.seqlen_k;
    if ((S.banded || kAtEnd) && n0 + S.step > free_end) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int end = (S.banded ? band.keys_of(row + 8 * x).end : band.seqlen_k) - n0 - 2 * t;
#pragma unroll
        for (int j = 0; j < S.step / 8; ++j) {
          s[4 * j + 2 * x] = 8 * j >= end ? -kInfinity : s[4 * j + 2 * x];
          s[4 * j + 2 * x + 1] = 8 * j + 1 >= end ? -kInfinity : s[4 * j + 2 * x + 1];
        }
      }
    }
    if constexpr (S.left_edge) {
      if (n0 < top + 63 + band.low) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const int begin = band.keys_of(row + 8 * x).begin - n0 - 2 * t;
#pragma unroll
          for (int j = 0; j < S.step / 8; ++j) {
            s[4 * j + 2 * x] = 8 * j < begin ? -kInfinity : s[4 * j + 2 * x];
            s[4 * j + 2 * x + 1] = 8 * j + 1 < begin ? -kInfinity : s[4 * j + 2 * x + 1];
          }
        }
      }
    }
  }
};

}  // namespace fovea::cuda
