// SPDX-License-Identifier: Apache-2.0
//
// From dot products to P and dS for the accumulator of a warpgroup of sm90_backward: 64 keys by S.step queries, of
// which a thread has two rows (keys g and g + 8 of its warp's 16) and columns 8 n + 2 t + e.
//
//   Sm90BackwardGradients   the base, since both need the key terms: from P to dS (sm90_backward_gradients.cuh)
//   Sm90BackwardScores      to P: scale, softcap, bias, terms, dropout; masks, the band and the end of the sequence
//
// What is read from shared memory is loaded 16 queries ahead, the first of it while products run.
#pragma once

#include "cuda/device/score/bias.cuh"
#include "cuda/device/score/mask.cuh"
#include "cuda/device/score/mask_edge.cuh"
#include "cuda/device/score/sm90_backward_gradients.cuh"
#include "cuda/device/score/sm90_backward_inputs.cuh"
#include "cuda/device/score/sm90_dropout.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/tile/accumulator.cuh"
#include "math/score.h"

namespace fovea::cuda {

template <auto S>
struct Sm90BackwardScores : Sm90BackwardGradients<S> {
  static constexpr int M = S.step;
  static constexpr bool kNatural = natural_scores(S);
  static constexpr bool kBias = sm90_bias_in_place(S);
  static constexpr bool kDropout = S.dropout != DropoutRule::kNone;
  using Loaded = Sm90BackwardLoaded<S>;
  using Outer = Sm90OuterBias<S>;
  using Sm90BackwardGradients<S>::clear_hidden, Sm90BackwardGradients<S>::derivatives,
      Sm90BackwardGradients<S>::key_terms;
  using Positions = PositionScores<S.positions, true>;

  // Of a query head; of `mask` the words are of a step.
  math::Score<float> score;
  Positions positions;
  int shift;
  Sm90BackwardDropout<S> dropout;
  Sm90BackwardMask<S> mask;

  // key: this thread's first row.
  __device__ __forceinline__ void begin_head(const Args& a, const Sm90BackwardArgs& m, const Place& place, int head,
                                             int key) {
    if constexpr (S.softcap) {
      score = {1, a.softcap, 1 / a.softcap};
    }
    positions.start(a.positions, place, head);
    if constexpr (bool(S.positions)) {
      shift = place.template shift<S>(a);
    }
    if constexpr (S.key_term) {
      const float* const from = static_cast<const float*>(a.key_term.data) + place.plane(a.key_term.strides, head);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        key_terms[r] = key + 8 * r < place.k_len ? from[key + 8 * r] : -kInfinity;
      }
    }
    mask.begin_head(m.mask, place, head, key);
    dropout.begin_head(a, place.b, head);
    this->clear();
  }

  // P^T as an operand for dV, of pairs of queries.
  __device__ __forceinline__ void weights_of(u32 (&weights)[M / 4], const float (&p)[M / 2]) const {
#pragma unroll
    for (int j = 0; j < M / 4; ++j) {
      weights[j] = kDropout ? pack_positive<S.type>(p[2 * j], p[2 * j + 1]) : pack<S.type>(p[2 * j], p[2 * j + 1]);
    }
    clear_hidden(weights);
  }

  // s: dot products, becomes P. loaded: the first 16 queries of panel and lse.
  __device__ __forceinline__ void weigh(float (&s)[M / 2], const Args& a, const Sm90BackwardArgs& m, Loaded& loaded,
                                        const Outer& outer, u32 panel, u32 lse, int query, int key, int t) {
    if constexpr (S.softcap) {
      cap(s, a.scale);
    }
    typename Positions::Pair first;
    if constexpr (bool(S.positions)) {
      first = {query + 2 * t, key, shift};
    }
#pragma unroll
    for (int k = 0; k < M / 16; ++k) {
      if (k + 1 < M / 16) {
        loaded.load(panel, lse, k + 1);
      }
      BiasMatrices<S.bias2> second;
      if constexpr (S.bias2 == BiasTile::kBf16 || S.bias2 == BiasTile::kFp16) {
        ldmatrix_trans(second.pairs, outer.bias2 + k * 2048);
      }
#pragma unroll
      for (int n = 2 * k; n < 2 * k + 2; ++n) {
        const float references[2] = {loaded.rows[k & 1][n & 1].x, loaded.rows[k & 1][n & 1].y};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = i / 2;
          const int e = i % 2;
          float& x = s[4 * n + i];
          if constexpr (kNatural) {
            if constexpr (!S.softcap) {
              x *= a.scale;
            }
            if constexpr (kBias) {
              x += loaded.bias[k & 1].of((n & 1) * 2 + r, e);
            }
            if constexpr (S.bias == BiasTile::kFp32) {
              x += outer.wide(outer.bias, n, r, e);
            }
            if constexpr (S.bias2 == BiasTile::kFp32) {
              x += outer.wide(outer.bias2, n, r, e);
            } else if constexpr (S.bias2 != BiasTile::kNone) {
              x += second.of((n & 1) * 2 + r, e);
            }
            if constexpr (bool(S.positions)) {
              // Not by a modifier: fewer instructions, but another order of them, which nobody has measured.
              x += positions.template of<false>(first.further(8 * n + e, 8 * r));
            }
            if constexpr (S.key_term && !S.key_mask) {
              x += key_terms[r];
            }
            if constexpr (S.query_term) {  // last: as a mask it hides NaN of what was added before
              const float2 pair = loaded.query_terms[k & 1][n & 1];
              x = with_term(x, e == 0 ? pair.x : pair.y);
            }
          }
          x = weight_of_score<kNatural>(x, kNatural ? math::kLog2E : m.scale_log2, references[e]);
        }
      }
      dropout.draw(s, query, key, t, k);
    }
  }

  // What the band, the sequence or a key term hides becomes 0.
  template <class Block>
  __device__ __forceinline__ void mask_edge(float (&s)[M / 2], const Block& block, int query, int key, int t) const {
    key = opaque(key);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = key + 8 * r;
      math::Interval<int> in{0, block.place.q_len};
      if constexpr (S.banded) {
        in = block.band.queries_of(row);
      }
      bool hidden = row >= block.place.k_len;
      if constexpr (S.key_term && S.row_sum) {
        hidden = hidden || key_terms[r] == -kInfinity;
      }
      const int begin = hidden ? 1 << 30 : in.begin - query - 2 * t;
      const int end = in.end - query - 2 * t;
      hide_outside<true, kMaskQueries<S> || S.left_edge>(fragment_of(s), r, begin, end, 0);
    }
  }

 private:
  // Dot products become capped scores; their derivatives by the scaled dot products are kept.
  __device__ __forceinline__ void cap(float (&s)[M / 2], float scale) {
#pragma unroll
    for (int i = 0; i < M / 2; ++i) {
      s[i] *= scale;
    }
    choose_tanh(largest_magnitude(fragment_of(s)) * score.inverse_softcap,
                [&](auto scalar) { cap_by<decltype(scalar)>(s); });
  }
  template <class Scalar>
  __device__ __forceinline__ void cap_by(float (&s)[M / 2]) {
#pragma unroll
    for (int i = 0; i < M / 4; ++i) {
      float derivative[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        s[2 * i + e] = score_of_dot<S, Scalar>(score, s[2 * i + e], derivative[e]);
      }
      derivatives[i] = pack<Type::kFp16>(derivative[0], derivative[1]);
    }
  }
};

// dS from dP and from P as packed for a product, 16 queries at a time. delta: of the first query.
template <Sm90BackwardSpec S, int kCount, int kWords>
__device__ __forceinline__ void gradients_of_packed(u32 (&grads)[kWords], const u32 (&weights)[kWords],
                                                    float (&dp)[kCount], const Args& a, u32 delta, bool hidden) {
  static_assert(kCount == 2 * kWords && kCount % 8 == 0);
#pragma unroll
  for (int k = 0; k < kCount / 8; ++k) {
    Sm90BackwardScores<sm90_part_of_step(S, S.step / 16)> scores;
    typename decltype(scores)::Loaded loaded;
    loaded.load_rows(delta + k * 64, 0);
    float p[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[2 * i] = low<S.type>(weights[4 * k + i]);
      p[2 * i + 1] = high<S.type>(weights[4 * k + i]);
    }
    scores.gradients(*reinterpret_cast<u32(*)[4]>(grads + 4 * k), p, *reinterpret_cast<float(*)[8]>(dp + 8 * k), a,
                     loaded, delta, 0, hidden);
  }
}

}  // namespace fovea::cuda
