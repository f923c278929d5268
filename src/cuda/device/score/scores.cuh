// SPDX-License-Identifier: Apache-2.0
//
// From dot products to scores, for S (the forward: rows are queries, columns keys) and for S transposed (the backward:
// rows are keys). The formulas are math/'s; here is what a thread of a tensor core's fragment needs for them:
//
//   Scores        scale, softcap with its derivative, biases, key and query terms, terms of positions, mask bits
//
// Where nothing is added to them scores stay dot products, and the exponent scales them; elsewhere they are in natural
// units (natural_scores). A fragment's rows and columns begin at multiples of 16 of queries and keys.
#pragma once

#include "cuda/device/score/approximation.cuh"
#include "cuda/device/score/bias.cuh"
#include "cuda/device/score/inputs.cuh"
#include "cuda/device/score/mask.cuh"

namespace fovea::cuda {

// What a thread keeps for the kTiles row tiles of its fragment.
template <auto S, bool kTransposed, int kTiles>
struct Scores {
  using Positions = PositionScores<S.positions, kTransposed>;
  static constexpr bool kHasRowTerm = kTransposed ? S.key_term : S.query_term;

  math::Score<float> score;
  Positions positions{};
  int shift = 0;
  float row_term[kTiles][2] = {};

  Scores() = default;
  // scale: of the call, for fp32 together with the powers of two of q and k. row0: the fragment's first row in the
  // sequence.
  __device__ __forceinline__ Scores(const Args& a, const Place& place, u32 head, float scale, int row0, int g)
      : score{scale, a.softcap, 0}, shift(place.template shift<S>(a)) {
    if constexpr (S.softcap) {
      score.inverse_softcap = 1 / a.softcap;
    }
    positions.start(a.positions, place, head);
    if constexpr (kHasRowTerm) {  // the term that runs along the rows
      const Tensor& term = kTransposed ? a.key_term : a.query_term;
      const int length = kTransposed ? place.k_len : place.q_len;
      const float* const from = static_cast<const float*>(term.data) + place.plane(term.strides, head);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        for (int x = 0; x < 2; ++x) {
          const int row = row0 + i * 16 + g + x * 8;
          row_term[i][x] = row < length ? from[row] : 0;
        }
      }
    }
  }

  // Dot products become scores, but for what is added to them.
  template <int kColumns>
  __device__ __forceinline__ void of_dots(float (&s)[kTiles][kColumns][4]) const {
    if constexpr (natural_scores(S)) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        choose(s[i], [&](auto scalar) {
          each(s[i], [&](float& x, int, int) { x = score_of_dot<S, decltype(scalar)>(score, x); });
        });
      }
    }
  }
  // The same, with the derivatives of the scores by the scaled dot products: 1 without a softcap. The scale itself is
  // applied where gradients leave.
  template <int kColumns>
  __device__ __forceinline__ void of_dots(float (&s)[kTiles][kColumns][4],
                                          float (&derivative)[kTiles][kColumns][4]) const {
    const math::Score<float> of_scaled{1, score.softcap, score.inverse_softcap};
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      choose(s[i], [&](auto scalar) {
        each(s[i], [&](float& x, int j, int e) {
          x = score_of_dot<S, decltype(scalar)>(of_scaled, x * score.scale, derivative[i][j][e]);
        });
      });
    }
  }

  // What masks leave of a fragment of S with all columns of the tile: nothing (the step may be skipped), everything
  // (nothing need be added for them), or a part. A few loads and votes; where there is no mask, everything.
  template <class Inputs, int kKeys>
  static __device__ __forceinline__ math::TileClass classify(const Thread& thread, u32 inputs, int tile_row) {
    static_assert(!kTransposed);
    bool none = false;
    bool all = true;
    if constexpr (S.key_mask) {
      bool hidden = true;
      bool open = true;
      for (int c = thread.lane % kKeys; c < kKeys; c += 32) {
        const bool in = load_shared(inputs + Inputs::kVector + c * 4) == 0;
        hidden = hidden && !in;
        open = open && in;
      }
      none = __all_sync(~0u, hidden);
      all = __all_sync(~0u, open);
    }
    if constexpr (S.mask && kKeys >= 32) {
      u32 any = 0;
      u32 every = ~0u;
      for (int c = thread.lane; c < kTiles * 16 * Inputs::kWords; c += 32) {
        const u32 word = load_shared_word(inputs + Inputs::kMask + (tile_row * Inputs::kWords + c) * 4);
        any |= word;
        every &= word;
      }
      none = none || __all_sync(~0u, any == 0);
      all = all && __all_sync(~0u, every == ~0u);
    } else if constexpr (S.mask) {
      all = false;
    }
    return none ? math::TileClass::kEmpty : all ? math::TileClass::kFull : math::TileClass::kEdge;
  }

  // What is added, and bits of the mask. inputs: address of this step's ScoreInputs, whose tile has kKeys keys; in it
  // the fragment begins at (tile_row, tile_column), in the sequence at (row0, column0).
  // masked: false where classify() said that masks hide nothing.
  template <class Inputs, int kKeys, int kColumns>
  __device__ __forceinline__ void add(float (&s)[kTiles][kColumns][4], const Thread& thread, u32 inputs, int tile_row,
                                      int tile_column, int row0, int column0, bool masked = true) const {
    const int g = thread.g;
    const int t = thread.t;
    if constexpr (S.bias != BiasTile::kNone) {
      add_bias<S.bias, kTransposed, kKeys>(s, thread, inputs + Inputs::kBias, tile_row, tile_column);
    }
    if constexpr (S.bias2 != BiasTile::kNone) {
      add_bias<S.bias2, kTransposed, kKeys>(s, thread, inputs + Inputs::kBias2, tile_row, tile_column);
    }
    if constexpr (bool(S.positions)) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        for (int x = 0; x < 2; ++x) {
          const int row = row0 + i * 16 + g + x * 8;
          const int column = column0 + t * 2;
          const typename Positions::Pair first(kTransposed ? column : row, kTransposed ? row : column, shift);
          for (int j = 0; j < kColumns; ++j) {
            for (int e = 0; e < 2; ++e) {
              const int n = j * 8 + e;
              s[i][j][2 * x + e] += positions.of(kTransposed ? first.further(n, 0) : first.further(0, n));
            }
          }
        }
      }
    }
    if constexpr (kHasRowTerm) {
      each(s, [&](float& x, int i, int, int e) {
        x = Inputs::kHasVector ? x + row_term[i][e >> 1] : with_term(x, row_term[i][e >> 1]);
      });
    }
    if (Inputs::kHasVector && (masked || !S.key_mask)) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const float2 term = load_shared2(inputs + Inputs::kVector + (tile_column + j * 8 + t * 2) * 4);
        for (int i = 0; i < kTiles; ++i) {
          for (int x = 0; x < 2; ++x) {
            s[i][j][2 * x] = with_term<S.key_mask>(s[i][j][2 * x], term.x);
            s[i][j][2 * x + 1] = with_term<S.key_mask>(s[i][j][2 * x + 1], term.y);
          }
        }
      }
    }
    if constexpr (kHasRowTerm && Inputs::kHasVector) {  // as a mask, a term of -inf hides NaN of the other term
      each(s, [&](float& x, int i, int, int e) { x = row_term[i][e >> 1] == -kInfinity ? -kInfinity : x; });
    }
    if (S.mask && masked) {
      mask_bits<Inputs, kTransposed>(s, thread, inputs + Inputs::kMask, tile_row, tile_column,
                                     kTransposed ? row0 : column0);
    }
  }

 private:
  template <int kColumns, class Compute>
  __device__ __forceinline__ void choose(float (&dots)[kColumns][4], Compute compute) const {
    if constexpr (S.softcap && S.type != Type::kFp32) {
      choose_tanh(largest_magnitude(dots) * fabsf(score.scale) * score.inverse_softcap, compute);
    } else {
      compute(Approx(0));
    }
  }
};

}  // namespace fovea::cuda
