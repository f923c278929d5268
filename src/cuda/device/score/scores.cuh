// SPDX-License-Identifier: Apache-2.0
//
// From dot products to scores, for S (the forward: rows are queries, columns keys) and for S transposed (the backward:
// rows are keys). The formulas are math/'s; here is what a thread of a tensor core's fragment needs for them:
//
//   ScoreInputs   the tiles that travel with K and V: biases, mask words, the vector that runs along the columns
//   Scores        scale, softcap with its derivative, biases, key and query terms, ALiBi, mask bits
//   mask_edge     keys outside of the band or past the sequence's end
//   Keep          dropout's decisions
//
// Where nothing is added to them scores stay dot products, and the exponent scales them; elsewhere they are in natural
// units (natural_scores). A fragment's rows and columns begin at multiples of 16 of queries and keys.
#ifndef FOVEA_CUDA_DEVICE_SCORE_SCORES_CUH
#define FOVEA_CUDA_DEVICE_SCORE_SCORES_CUH

#include "cuda/device/generic/sizes.h"
#include "cuda/device/tile/tile.cuh"
#include "math/band.h"
#include "math/dropout.h"
#include "math/score.h"
#include "math/softmax.h"

namespace fovea::cuda {

// A float whose transcendental functions are the approximate instructions: what math/'s templates are given.
// exp2: two units in the last place. tanh: an absolute error near 2^-22; kNearZero, for |x| up to kNear, a relative one
// of 2^-23, by a polynomial (a least squares fit of tanh(x) / x, weighted to an even error).
template <bool kNearZero>
struct ApproxFloat {
  static constexpr float kNear = 0.7f;
  float x;
  __device__ __forceinline__ explicit ApproxFloat(float value) : x(value) {}

  friend __device__ __forceinline__ ApproxFloat operator+(ApproxFloat a, ApproxFloat b) {
    return ApproxFloat(a.x + b.x);
  }
  friend __device__ __forceinline__ ApproxFloat operator-(ApproxFloat a, ApproxFloat b) {
    return ApproxFloat(a.x - b.x);
  }
  friend __device__ __forceinline__ ApproxFloat operator*(ApproxFloat a, ApproxFloat b) {
    return ApproxFloat(a.x * b.x);
  }
  friend __device__ __forceinline__ ApproxFloat operator*(ApproxFloat a, float b) { return ApproxFloat(a.x * b); }
  friend __device__ __forceinline__ ApproxFloat exp2(ApproxFloat a) { return ApproxFloat(ex2(a.x)); }
  friend __device__ __forceinline__ ApproxFloat tanh(ApproxFloat a) {
    if constexpr (kNearZero) {
      const float y = a.x * a.x;
      float p = -0.00515509024f;
      p = p * y + 0.0201116297f;
      p = p * y - 0.0535669774f;
      p = p * y + 0.133292422f;
      p = p * y - 0.333331972f;
      return ApproxFloat(a.x + a.x * (y * p));
    } else {
      return ApproxFloat(1.f - 2.f * rcp(1.f + ex2(a.x * (2 * math::kLog2E))));
    }
  }
};
using Approx = ApproxFloat<false>;

// Exponents of the kernels.
__device__ __forceinline__ float weight_fused(float score, float unit, float reference_in_base_2) {
  return math::weight_base_2(Approx(score), Approx(unit), Approx(reference_in_base_2)).x;
}
__device__ __forceinline__ float weight_of_difference(float score, float reference, float unit, float lift = 0) {
  return math::weight_base_2_of_difference(Approx(score), Approx(reference), Approx(unit), Approx(lift)).x;
}

// A score and its derivative by the dot product, in the arithmetic of Scalar.
template <Spec S, class Scalar>
__device__ __forceinline__ float score_of_dot(const math::Score<float>& score, float dot) {
  if constexpr (S.type == Type::kFp32) {
    return score.of_dot<S.softcap>(dot);
  } else {
    return score.of_dot<S.softcap>(Scalar(dot)).x;
  }
}
template <Spec S, class Scalar>
__device__ __forceinline__ float score_of_dot(const math::Score<float>& score, float dot, float& derivative) {
  if constexpr (S.type == Type::kFp32) {
    const math::Dual<float> s = score.of_dot_with_derivative<S.softcap>(dot, 1.f);
    derivative = s.derivative;
    return s.value;
  } else {
    const math::Dual<Scalar> s = score.of_dot_with_derivative<S.softcap>(Scalar(dot), Scalar(1.f));
    derivative = s.derivative.x;
    return s.value.x;
  }
}

// ---- inputs ----

template <bool kFirst, class A, class B>
struct Select {
  using Type = A;
};
template <class A, class B>
struct Select<false, A, B> {
  using Type = B;
};

// For a tile of kQueries x kKeys; copied into the stage beside K and V (Q and dO).
template <Spec S, bool kTransposed, int kQueries, int kKeys, int kThreads>
struct ScoreInputs {
  static constexpr int kWords = kKeys >= 32 ? kKeys / 32 : 1;  // of the mask, a query
  static constexpr bool kHasVector = kTransposed ? S.query_term : S.key_term;
  static constexpr int kVectorSize = kTransposed ? kQueries : kKeys;
  static constexpr u32 kBias = 0;
  static constexpr u32 kBias2 = kBias + kQueries * kKeys * bias_bytes(S.bias);
  static constexpr u32 kMask = kBias2 + kQueries * kKeys * bias_bytes(S.bias2);
  static constexpr u32 kVector = kMask + (S.mask ? kQueries * kWords * 4 : 0);
  static constexpr u32 kBytes = kVector + (kHasVector ? kVectorSize * 4 : 0);
  static_assert(kBytes == score_input_bytes(S, kQueries, kKeys, kTransposed));

  // Queries from m0 and keys from n0 on, of (place, head).
  static __device__ __forceinline__ void load(u32 to, const Args& a, const Place& place, u32 head, int m0, int n0,
                                              int thread) {
    if constexpr (S.bias != BiasTile::kNone) {
      load_bias<S.bias>(to + kBias, a.bias, place, head, m0, n0, thread);
    }
    if constexpr (S.bias2 != BiasTile::kNone) {
      load_bias<S.bias2>(to + kBias2, a.bias2, place, head, m0, n0, thread);
    }
    if constexpr (S.mask) {
      const u32* const words =
          static_cast<const u32*>(a.mask.data) + place.plane(a.mask.strides, head) + m0 * a.mask.strides.row + n0 / 32;
      const u32 stride = u32(a.mask.strides.row);  // words of 32 keys: far under 2^32
#pragma unroll
      for (int i = 0; i < (kQueries * kWords + kThreads - 1) / kThreads; ++i) {
        const int c = thread + i * kThreads;
        const int row = c / kWords;
        const int word = c % kWords;
        if (kQueries * kWords % kThreads == 0 || c < kQueries * kWords) {
          const bool in = m0 + row < place.q_len && (n0 / 32 + word) * 32 < place.k_len;
          copy4(to + kMask + c * 4, in ? words + u64(u32(row)) * stride + word : words, in ? 4 : 0);
        }
      }
    }
    if constexpr (kHasVector) {
      const Tensor& term = kTransposed ? a.query_term : a.key_term;
      const int first = kTransposed ? m0 : n0;
      load_vector<kVectorSize>(to + kVector,
                               static_cast<const float*>(term.data) + place.plane(term.strides, head) + first,
                               (kTransposed ? place.q_len : place.k_len) - first, thread);
    }
  }

 private:
  template <BiasTile kBiasType>
  static __device__ __forceinline__ void load_bias(u32 to, const Tensor& bias, const Place& place, u32 head, int m0,
                                                   int n0, int thread) {
    constexpr int kElement = bias_bytes(kBiasType);
    const i64 offset = place.plane(bias.strides, head) + m0 * bias.strides.row + n0;
    const char* const from = static_cast<const char*>(bias.data) + offset * kElement;
    const int rows = place.q_len - m0;
    const int bytes = min(place.k_len - n0, kKeys) * kElement;
    using Layout = typename Select<kElement == 4, Tile32<kKeys>, Tile<kKeys>>::Type;
    const i64 row = bias.strides.row * kElement;
    if (bytes == kKeys * kElement) {
      load_tile<Layout, kQueries, kThreads>(to, from, row, rows, bytes, thread);
    } else {
      load_tile<Layout, kQueries, kThreads, false>(to, from, row, rows, bytes, thread);
    }
  }
};

// ---- scores ----

// What a thread keeps for the kTiles row tiles of its fragment.
template <Spec S, bool kTransposed, int kTiles>
struct Scores {
  static constexpr bool kHasRowTerm = kTransposed ? S.key_term : S.query_term;

  math::Score<float> score;
  float slope = 0;
  int shift = 0;
  float row_term[kTiles][2] = {};

  Scores() = default;
  // scale: of the call, for fp32 together with the powers of two of q and k. row0: the fragment's first row in the
  // sequence.
  __device__ __forceinline__ Scores(const Args& a, const Place& place, u32 head, float scale)
      : score{scale, a.softcap, 0}, shift(place.shift(a)) {
    if constexpr (S.softcap) {
      score.inverse_softcap = 1 / a.softcap;
    }
    if constexpr (S.alibi) {
      slope = static_cast<const float*>(a.alibi_slopes.data)[place.plane(a.alibi_slopes.strides, head)];
    }
  }

  // The term that runs along the rows; again wherever head or rows change.
  __device__ __forceinline__ void load_rows(const Args& a, const Place& place, u32 head, int row0, int g) {
    if constexpr (kHasRowTerm) {
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
        choose_tanh(s[i], [&](auto scalar) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            for (int e = 0; e < 4; ++e) {
              s[i][j][e] = score_of_dot<S, decltype(scalar)>(score, s[i][j][e]);
            }
          }
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
      choose_tanh(s[i], [&](auto scalar) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          for (int e = 0; e < 4; ++e) {
            s[i][j][e] = score_of_dot<S, decltype(scalar)>(of_scaled, s[i][j][e] * score.scale, derivative[i][j][e]);
          }
        }
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
      add_bias<S.bias, kKeys>(s, thread, inputs + Inputs::kBias, tile_row, tile_column);
    }
    if constexpr (S.bias2 != BiasTile::kNone) {
      add_bias<S.bias2, kKeys>(s, thread, inputs + Inputs::kBias2, tile_row, tile_column);
    }
    if constexpr (S.alibi) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        for (int x = 0; x < 2; ++x) {
          const int row = row0 + i * 16 + g + x * 8;
          const int column = column0 + t * 2;
          // j - (i + shift), or its opposite: exact while under 2^24.
          const float distance = float(kTransposed ? column + shift - row : column - row - shift);
          for (int j = 0; j < kColumns; ++j) {
            for (int e = 0; e < 2; ++e) {
              // fabsf: an operand's modifier, which alibi's own is not.
              s[i][j][2 * x + e] += math::alibi(fabsf(distance + float(j * 8 + e)), slope);
            }
          }
        }
      }
    }
    if constexpr (kHasRowTerm) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        for (int j = 0; j < kColumns; ++j) {
          for (int e = 0; e < 4; ++e) {
            s[i][j][e] = with_term<false>(s[i][j][e], row_term[i][e >> 1]);
          }
        }
      }
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
    if (S.mask && masked) {
      mask_bits<Inputs>(s, thread, inputs + Inputs::kMask, tile_row, tile_column, kTransposed ? row0 : column0);
    }
  }

 private:
  // compute(scalar) with the tanh that serves these dot products. Scores far under the cap, the usual ones, take the
  // one that is both cheaper and better.
  template <int kColumns, class Compute>
  __device__ __forceinline__ void choose_tanh(const float (&dots)[kColumns][4], Compute compute) const {
    if constexpr (S.softcap && S.type != Type::kFp32) {
      float largest = 0;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        for (int e = 0; e < 4; ++e) {
          largest = fmaxf(largest, fabsf(dots[j][e]));
        }
      }
      if (__all_sync(~0u, largest * fabsf(score.scale) * score.inverse_softcap <= ApproxFloat<true>::kNear)) {
        compute(ApproxFloat<true>(0));
        return;
      }
    }
    compute(Approx(0));
  }

  // A term of -inf is a mask: it hides what else was added, NaN included. kMask: the others are 0.
  template <bool kMask>
  static __device__ __forceinline__ float with_term(float s, float term) {
    return term == -kInfinity ? -kInfinity : kMask ? s : s + term;
  }

  template <BiasTile kBiasType, int kKeys, int kColumns>
  static __device__ __forceinline__ void add_bias(float (&s)[kTiles][kColumns][4], const Thread& thread, u32 bias,
                                                  int tile_row, int tile_column) {
    const int lane = thread.lane;
    const int g = thread.g;
    const int t = thread.t;
    if constexpr (kBiasType == BiasTile::kFp32 && !kTransposed) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        for (int x = 0; x < 2; ++x) {
          for (int j = 0; j < kColumns; ++j) {
            const u32 chunk = tile_column / 4 + j * 2 + (t >> 1);
            const float2 b =
                load_shared2(bias + Tile32<kKeys>::offset(tile_row + i * 16 + x * 8 + g, chunk) + (t & 1) * 8);
            s[i][j][2 * x] += b.x;
            s[i][j][2 * x + 1] += b.y;
          }
        }
      }
    } else if constexpr (kBiasType == BiasTile::kFp32) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        for (int e = 0; e < 4; ++e) {
          const int key = tile_row + i * 16 + (e >> 1) * 8 + g;
          const u32 first = bias + tile_column * Tile32<kKeys>::kRowBytes +
                            Tile32<kKeys>::offset(t * 2 + (e & 1), key / 4) + key % 4 * 4;
          for (int j = 0; j < kColumns; ++j) {
            s[i][j][e] += load_shared(first + j * 8 * Tile32<kKeys>::kRowBytes);
          }
        }
      }
    } else {
      constexpr Type kType = kBiasType == BiasTile::kBf16 ? Type::kBf16 : Type::kFp16;
      const typename Tile<kKeys>::Lane lanes(bias, lane);  // of whole rows of the tile
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        for (int jj = 0; jj < (kColumns + 1) / 2; ++jj) {
          u32 r[4];
          if constexpr (kTransposed) {
            constexpr int kRows = kColumns == 1 ? 7 : 15;  // one column tile alone: its eight rows, twice
            const u32 chunk = tile_row / 8 + i * 2 + (lane >> 4);
            ldmatrix_trans(
                r, bias + Tile<kKeys>::offset(lane & kRows, chunk) + (tile_column + jj * 16) * Tile<kKeys>::kRowBytes);
          } else if constexpr (kColumns * 8 == kKeys) {
            ldmatrix(r, lanes.at(0, jj) + (tile_row + i * 16) * Tile<kKeys>::kRowBytes);
          } else {
            const u32 chunk = tile_column / 8 + jj * 2 + (lane >> 4);
            ldmatrix(r, bias + Tile<kKeys>::offset(tile_row + i * 16 + (lane & 15), chunk));
          }
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            // Matrices come in the order (0, 0) (1, 0) (0, 1) (1, 1) of the tile's rows and columns.
            if (kTransposed && 2 * jj + (n & 1) >= kColumns) {
              continue;  // one column tile alone: the other half of a block is not asked for
            }
            float* const pair =
                kTransposed ? &s[i][2 * jj + (n & 1)][(n >> 1) * 2] : &s[i][2 * jj + (n >> 1)][(n & 1) * 2];
            pair[0] += low<kType>(r[n]);
            pair[1] += high<kType>(r[n]);
          }
        }
      }
    }
  }

  // key0: the fragment's first key in the sequence.
  template <class Inputs, int kColumns>
  static __device__ __forceinline__ void mask_bits(float (&s)[kTiles][kColumns][4], const Thread& thread, u32 words,
                                                   int tile_row, int tile_column, int key0) {
    constexpr int kWords = Inputs::kWords;
    const int g = thread.g;
    const int t = thread.t;
    if constexpr (kTransposed) {
      // Keys of the fragment begin at bit `first` of a word and stay in it, or are whole words.
      const int first = kTiles % 2 == 0 && kWords > 1 ? 0 : key0 & 31;
      const int word = kWords > 1 ? tile_row / 32 : 0;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        for (int e = 0; e < 2; ++e) {
          const u32 query = words + ((tile_column + j * 8 + t * 2 + e) * kWords + word) * 4;
#pragma unroll
          for (int w = 0; w < (kTiles + 1) / 2; ++w) {
            const u32 bits = load_shared_word(query + w * 4) >> (first + g);
            for (int n = 0; n < 4 && w * 2 + n / 2 < kTiles; ++n) {
              if ((bits >> n * 8 & 1) == 0) {
                s[w * 2 + n / 2][j][n % 2 * 2 + e] = -kInfinity;
              }
            }
          }
        }
      }
    } else {
      constexpr int kColumnWords = (kColumns + 3) / 4;
      const int first = kColumns % 4 == 0 && kWords > 1 ? 0 : key0 & 31;
      const int word = kWords > 1 ? tile_column / 32 : 0;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        for (int x = 0; x < 2; ++x) {
          const u32 query = words + ((tile_row + i * 16 + x * 8 + g) * kWords + word) * 4;
#pragma unroll
          for (int w = 0; w < kColumnWords; ++w) {
            const u32 bits = load_shared_word(query + w * 4) >> (first + t * 2);
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
};

// -inf for keys outside of the band and past the end of the sequence. Only where a tile is not inside of both.
template <Spec S, bool kTransposed, int kTiles, int kColumns>
__device__ __forceinline__ void mask_edge(float (&s)[kTiles][kColumns][4], const Thread& thread,
                                          const math::Band<int>& band, int row0, int column0) {
  row0 = opaque(row0);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    for (int x = 0; x < 2; ++x) {
      const int row = row0 + i * 16 + thread.g + x * 8;
      const int first = column0 + thread.t * 2;
      math::Interval<int> in{0, kTransposed ? 1 << 30 : band.seqlen_k};
      if constexpr (S.banded) {
        in = kTransposed ? band.queries_of(row) : band.keys_of(row);
      }
      if (kTransposed && row >= band.seqlen_k) {
        in = {1 << 30, 1 << 30};
      }
      const int begin = in.begin - first;
      const int end = in.end - first;
      for (int j = 0; j < kColumns; ++j) {
        for (int e = 0; e < 2; ++e) {
          if ((!(kTransposed && !S.banded) && j * 8 + e >= end) || ((kTransposed || S.banded) && j * 8 + e < begin)) {
            s[i][j][2 * x + e] = -kInfinity;
          }
        }
      }
    }
  }
}

// ---- dropout ----

// Decisions for a fragment of kTiles row tiles and kColumns tiles of 8 columns.
template <Spec S, bool kTransposed, int kTiles, int kColumns>
struct Keep {
  static constexpr bool kFovea = S.dropout == DropoutRule::kFovea;
  static constexpr bool kTorch = S.dropout == DropoutRule::kTorchMemEfficient;
  static constexpr bool kEarly = kFovea && S.early;
  static_assert((kColumns & (kColumns - 1)) == 0);  // parts of a column's number have no bit in common
  static_assert(!kTorch || kColumns <= 8);          // a thread's decisions of a row tile are a word

  math::DropoutHead head{};
  u32 limit = 0;
  math::DropoutRow<u32> rows[kTransposed ? 1 : kTiles];
  math::Words2<u32> words[kEarly ? kTiles : 1][kEarly ? kColumns : 1];
  u64 seed = 0, base = 0, row_stride = 0;
  float p = 0;
  u32 bits[kTorch ? kTiles : 1];

  __device__ __forceinline__ void start(const Args& a, const Place& place, u32 query_head) {
    const u64 n = u64(place.b) * u64(a.rows.heads_q) + query_head;
    const u64 offset = a.offset.value + (a.offset.pointer != nullptr ? *a.offset.pointer : 0);
    seed = a.seed.value + (a.seed.pointer != nullptr ? *a.seed.pointer : 0);
    if constexpr (kFovea) {
      const math::DropoutHead made = math::DropoutHead::make(seed, offset, n);
      head = {uniform(made.k0), uniform(made.k1), uniform(made.w0), uniform(made.w1)};
      limit = a.drop_threshold << 16;  // a threshold of 65536 becomes 0: the factor is 0 then
    }
    if constexpr (kTorch) {
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
        rows[i] = math::dropout_row<u32>(head, math::dropout_fold(u32(row0 + i * 16 + g)));
      }
    }
  }

  // Once for the fragment that begins at (row0, column0).
  __device__ __forceinline__ void prepare(const Thread& thread, int row0, int column0) {
    if constexpr (kEarly) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        for (int j = 0; j < kColumns; ++j) {
          words[i][j] = call(thread, i, j >> 1, j & 1, row0, column0);
        }
      }
    }
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
        const math::Words2<u32> w =
            kEarly ? words[kEarly ? i : 0][kEarly ? 2 * jj + e : 0] : call(thread, i, jj, e, row0, column0);
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

 private:
  // The torch rule's decision of element [n >> 2][n & 3] of a row tile has this bit, in the order in which they are
  // shared.
  static constexpr int bit_of(int n) {
    return kTransposed ? (n & 3) * 8 + (n >> 2) : (n >> 1 & 1) * 16 + (n >> 2) * 2 + (n & 1);
  }

  // Where four keys that begin at a multiple of four are one call's numbers (`shares`), they belong to kSharers
  // neighbours along the keys: each makes its share of the calls, packs the decisions by who needs them, and all hand
  // them round. Elsewhere each makes a call for every element of its own.
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
    const u32 column = (u32(column0) / 2 + thread.t * 2) ^ u32(jj * 8 + e);
    if constexpr (kTransposed) {
      return math::dropout_call<u32>(head, column, math::dropout_fold(u32(row0 + i * 16 + thread.g)));
    } else {
      return math::dropout_call<u32>(head, rows[i], column);
    }
  }
};

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_SCORE_SCORES_CUH
