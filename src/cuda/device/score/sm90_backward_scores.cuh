// SPDX-License-Identifier: Apache-2.0
//
// From dot products to P and dS for the accumulator of a warpgroup of sm90_backward: 64 keys by S.step queries, of
// which a thread has two rows (keys g and g + 8 of its warp's 16) and columns 8 n + 2 t + e.
//
//   Sm90BackwardScores   scale, softcap, bias, ALiBi, key and query terms, dropout; the band and the end of the
//                        sequence; sums of dS over queries and over keys
//
// What is read from shared memory is loaded 16 queries ahead, the first of it while products run.
#ifndef FOVEA_CUDA_DEVICE_SCORE_SM90_BACKWARD_SCORES_CUH
#define FOVEA_CUDA_DEVICE_SCORE_SM90_BACKWARD_SCORES_CUH

#include "cuda/device/score/scores.cuh"
#include "cuda/device/score/sm90_scores.cuh"
#include "cuda/device/score/softmax.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/tile/accumulator.cuh"
#include "cuda/device/work/sm90_key_block.cuh"
#include "math/dropout.h"
#include "math/score.h"

namespace fovea::cuda {

template <auto S>
struct Sm90BackwardScores {
  static constexpr int M = S.step;
  static constexpr bool kNatural = natural_scores(S);
  static constexpr bool kBias = sm90_bias_in_place(S);
  static constexpr bool kOuter = sm90_outer_bytes(S) > 0;
  static constexpr Type kBiasType = S.bias == BiasTile::kBf16 ? Type::kBf16 : Type::kFp16;
  static constexpr bool kDropout = S.dropout != DropoutRule::kNone;
  static constexpr bool kPlane = kBias || kOuter || S.query_term;  // what may hide any pair
  using Positions = PositionScores<S.positions, true>;

  // Of 16 queries and the 16 after them.
  struct Loaded {
    u32 bias[2][4];
    float2 rows[2][2];
    float2 terms[S.query_term ? 2 : 1][2];

    __device__ __forceinline__ void load(u32 panel, u32 lse, int k) {
      if constexpr (kBias) {
        ldmatrix_trans(bias[k & 1], panel + k * 2048);
      }
      if constexpr (S.query_term) {
        constexpr u32 kFromLse = sm90_backward_sizes(S).terms_at - sm90_backward_sizes(S).lse_at;
        terms[k & 1][0] = load_shared2(lse + kFromLse + k * 64);
        terms[k & 1][1] = load_shared2(lse + kFromLse + k * 64 + 32);
      }
      load_delta(lse, k);
    }
    __device__ __forceinline__ void load_delta(u32 delta, int k) {
      rows[k & 1][0] = load_shared2(delta + k * 64);
      rows[k & 1][1] = load_shared2(delta + k * 64 + 32);
    }
  };

  // Of a query head.
  math::Score<float> score;
  Positions positions;
  int shift;
  float terms[2];
  math::DropoutHead random;
  u32 threshold;
  float sums[2];
  const u32* mask_words;  // of this lane and its warp's keys, of the first 64 queries
  // Of a step.
  u32 mask[M == 128 ? 2 : 1];              // bit i of word j is that of s[32 * j + i]
  u32 derivatives[S.softcap ? M / 4 : 1];  // pairs of fp16

  __device__ __forceinline__ void clear() { sums[0] = sums[1] = 0; }

  // key: this thread's first row.
  __device__ __forceinline__ void begin_head(const Args& a, const Sm90BackwardArgs& m, const Place& place, int head,
                                             int key) {
    if constexpr (S.softcap) {
      score = {1, a.softcap, 1 / a.softcap};
    }
    positions.start(a.positions, place, head);
    if constexpr (bool(S.positions)) {
      shift = place.shift(a);
    }
    if constexpr (S.key_term) {
      const float* const from = static_cast<const float*>(a.key_term.data) + place.plane(a.key_term.strides, head);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        terms[r] = key + 8 * r < place.k_len ? from[key + 8 * r] : 0;
      }
    }
    if constexpr (S.mask) {
      const int last = (place.k_len - 1) / 16;  // of its groups of keys
      mask_words = static_cast<const u32*>(m.mask.data) + place.plane(m.mask.strides, head) + min(key / 16, last) * 32 +
                   threadIdx.x % 32;
    }
    if constexpr (kDropout) {
      const u64 seed = a.seed.value + (a.seed.pointer != nullptr ? *a.seed.pointer : 0);
      const u64 offset = a.offset.value + (a.offset.pointer != nullptr ? *a.offset.pointer : 0);
      const math::DropoutHead made =
          math::DropoutHead::make(seed, offset, u64(place.b) * u64(a.rows.heads_q) + u64(head));
      random = {uniform(made.k0), uniform(made.k1), uniform(made.w0), uniform(made.w1)};
      threshold = a.drop_threshold;
    }
    clear();
  }

  // Some key of this warp is masked by its term.
  __device__ __forceinline__ bool has_hidden() const {
    if constexpr (S.key_term) {
      return __any_sync(~0u, terms[0] == -kInfinity || terms[1] == -kInfinity);
    } else {
      return false;
    }
  }
  // Of pairs of P or dS, whatever they are, what belongs to such a key becomes 0.
  __device__ __forceinline__ void clear_hidden(u32 (&pairs)[M / 4]) const {
    if constexpr (S.key_term && !S.row_sum) {
      if (has_hidden()) {
#pragma unroll
        for (int j = 0; j < M / 4; ++j) {
          pairs[j] = terms[j % 2] == -kInfinity ? 0 : pairs[j];
        }
      }
    }
  }
  // P^T as an operand for dV, of pairs of queries.
  __device__ __forceinline__ void weights_of(u32 (&weights)[M / 4], const float (&p)[M / 2]) const {
#pragma unroll
    for (int j = 0; j < M / 4; ++j) {
      weights[j] = kDropout ? pack_positive<S.type>(p[2 * j], p[2 * j + 1]) : pack<S.type>(p[2 * j], p[2 * j + 1]);
    }
    clear_hidden(weights);
  }

  // The random words of queries 16 k + 2 t + e and those 8 further.
  __device__ __forceinline__ math::Words2<Word> call(int query, int key, int t, int k, int e) const {
    return math::dropout_call<Word>(random, Word(u32(query) / 2 + 8 * k + 2 * t + e),
                                    Word(math::dropout_fold(u32(key))));
  }
  // Ahead of a step: what the mask says of queries from `query` on.
  __device__ __forceinline__ void load_mask(const Sm90BackwardArgs& m, int query) {
    if constexpr (S.mask) {
#pragma unroll
      for (int i = 0; i < (M + 63) / 64; ++i) {
        mask[i] = __ldg(mask_words + i64(query / 64 + i) * m.mask.strides.row);
      }
    }
  }

  // Biases that do not lie in the place of dS: where a thread finds its own in a tile of their type.
  struct Outer {
    u32 bias = 0;   // of fp32: of this lane's first key and query 2 t
    u32 bias2 = 0;  // of fp32 the same, of 16 bits as ldmatrix takes it
    u32 chunk = 0;  // of fp32: 16 bytes of this lane's first key, for query 0

    // tiles: of 64 keys; fragment: in a tile of 16 bits.
    __device__ __forceinline__ Outer(u32 tiles, u32 tiles2, u32 fragment, int warp, int g, int t) {
      const u32 wide = u32(warp / 2 * M * 128 + 2 * t * 128 + g % 4 * 4);
      bias = tiles + wide;
      bias2 = tiles2 + (S.bias2 == BiasTile::kFp32 ? wide : fragment);
      chunk = u32((warp % 2 * 4 + g / 4) ^ (2 * t)) << 4;
    }
    // Of query 8 n + 2 t + e and the first key (r = 0) or that 8 further.
    __device__ __forceinline__ float wide(u32 tile, int n, int r, int e) const {
      return load_shared(tile + (8 * n + e) * 128 + (chunk ^ u32((2 * r) ^ e) << 4));
    }
  };

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
      u32 second[4];
      if constexpr (S.bias2 == BiasTile::kBf16 || S.bias2 == BiasTile::kFp16) {
        ldmatrix_trans(second, outer.bias2 + k * 2048);
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
            if constexpr (S.query_term) {
              const float2 pair = loaded.terms[k & 1][n & 1];
              x += e == 0 ? pair.x : pair.y;
            }
            if constexpr (kBias) {
              const u32 pair = loaded.bias[k & 1][(n & 1) * 2 + r];
              x += e == 0 ? low<kBiasType>(pair) : high<kBiasType>(pair);
            }
            if constexpr (S.bias == BiasTile::kFp32) {
              x += outer.wide(outer.bias, n, r, e);
            }
            if constexpr (S.bias2 == BiasTile::kFp32) {
              x += outer.wide(outer.bias2, n, r, e);
            } else if constexpr (S.bias2 != BiasTile::kNone) {
              constexpr Type kSecond = S.bias2 == BiasTile::kBf16 ? Type::kBf16 : Type::kFp16;
              const u32 pair = second[(n & 1) * 2 + r];
              x += e == 0 ? low<kSecond>(pair) : high<kSecond>(pair);
            }
            if constexpr (bool(S.positions)) {
              // Not by a modifier: fewer instructions, but another order of them, which nobody has measured.
              x += positions.template of<false>(first.further(8 * n + e, 8 * r));
            }
            if constexpr (S.key_term && !S.key_mask) {
              x += terms[r];
            }
            x = weight_of_difference(x, references[e], math::kLog2E);
          } else {
            x = weight_fused(x, m.scale_log2, references[e]);
          }
        }
      }
      if constexpr (kDropout) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const math::Words2<Word> w = call(query, key, t, k, e);
          // Words are queries without and with bit 3, their halves keys. What is below the threshold gets a sign.
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int n = 2 * k + i / 2;
            const int r = i % 2;
            const u32 word = i / 2 == 0 ? w.x.bits : w.y.bits;
            const u32 below = (r == 0 ? word & 0xffffu : word >> 16) - threshold;
            float& x = s[4 * n + 2 * r + e];
            x = __uint_as_float(__float_as_uint(x) | (below & 0x80000000u));
          }
        }
      }
    }
  }

  // What the mask hides becomes 0: whether that was anything.
  __device__ __forceinline__ bool hide(float (&s)[M / 2], int query) const {
    if constexpr (S.mask) {
      u32 words[M == 128 ? 2 : 1] = {M == 32 ? mask[0] >> (query & 32) / 2 | 0xffff0000u : mask[0]};
      bool open = words[0] == ~0u;
      if constexpr (M == 128) {
        words[1] = mask[1];
        open = open && words[1] == ~0u;
      }
      if (__all_sync(~0u, open)) {
        return false;
      }
#pragma unroll
      for (int i = 0; i < M / 2; ++i) {
        s[i] = (words[i / 32] >> i % 32 & 1) != 0 ? s[i] : 0;
      }
      return true;
    } else {
      return false;
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
        hidden = hidden || terms[r] == -kInfinity;
      }
      const int begin = hidden ? 1 << 30 : in.begin - query - 2 * t;
      const int end = in.end - query - 2 * t;
#pragma unroll
      for (int n = 0; n < M / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (8 * n + e < begin || ((kMaskQueries<S> || S.left_edge) && 8 * n + e >= end)) {
            s[4 * n + 2 * r + e] = 0;
          }
        }
      }
    }
  }

  // dS from P and dP, as pairs of 16 bits. loaded: the first 16 queries of delta; row: of the first in row vectors;
  // hidden: some pairs are.
  __device__ __forceinline__ void gradients(u32 (&grads)[M / 4], const float (&s)[M / 2], float (&dp)[M / 2],
                                            const Args& a, Loaded& loaded, u32 delta, int row, bool hidden) {
    // Note: what is hidden has P = 0, but dP of any size, and 0 * inf is NaN. Where that may be in any tile (a bias of
    // -inf hides, too) dS is looked at in the end.
    constexpr bool kAnywhere = kPlane || S.mask;
    constexpr bool kLater = kAnywhere && !S.column_sum && !S.row_sum;
    if constexpr (!kLater && (kAnywhere || S.banded || (S.key_term && S.row_sum))) {
      if (kPlane || hidden) {
#pragma unroll
        for (int i = 0; i < M / 2; ++i) {
          dp[i] = s[i] == 0 ? 0 : dp[i];
        }
      }
    }
#pragma unroll
    for (int k = 0; k < M / 16; ++k) {
      if (k + 1 < M / 16) {
        loaded.load_delta(delta, k + 1);
      }
      float over_keys[4] = {};  // sums of this thread's keys, of queries 16 k + 8 i / 2 + 2 t + i % 2
#pragma unroll
      for (int n = 2 * k; n < 2 * k + 2; ++n) {
        const float deltas[2] = {loaded.rows[k & 1][n & 1].x, loaded.rows[k & 1][n & 1].y};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float grad[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int i = 4 * n + 2 * r + e;
            if constexpr (kDropout) {
              grad[e] = math::grad_score(fabsf(s[i]), (s[i] >= 0 ? dp[i] : 0.f) * a.keep_scale, deltas[e]);
            } else {
              grad[e] = math::grad_score(s[i], dp[i], deltas[e]);
            }
            if constexpr (S.column_sum) {
              sums[r] += grad[e];
            }
            if constexpr (S.row_sum) {
              over_keys[(n & 1) * 2 + e] += grad[e];
            }
          }
          if constexpr (S.softcap) {
            grad[0] *= low<Type::kFp16>(derivatives[2 * n + r]);
            grad[1] *= high<Type::kFp16>(derivatives[2 * n + r]);
          }
          grads[2 * n + r] = pack<S.type>(grad[0], grad[1]);
        }
      }
      if constexpr (S.row_sum) {
        add_to_rows(a.row_sum + row + 16 * k, over_keys);
      }
    }
    clear_hidden(grads);
    if constexpr (kLater) {
      if (kPlane || hidden) {
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < M / 4; ++i) {
          largest = largest_or_nan<S.type>(largest, grads[i]);
        }
        const float either = low<S.type>(largest) + high<S.type>(largest);
        if (__any_sync(~0u, either != either)) {
#pragma unroll
          for (int i = 0; i < M / 4; ++i) {
            grads[i] &= (s[2 * i] == 0 ? 0 : 0xffffu) | (s[2 * i + 1] == 0 ? 0 : 0xffff0000u);
          }
        }
      }
    }
  }

  // Sums over this warp's keys, of 16 queries: lanes halve what they hold as they add up.
  static __device__ __forceinline__ void add_to_rows(float* to, const float (&x)[4]) {
    const int lane = threadIdx.x % 32;
    const auto half = [&](float low, float high, int bit) {
      const bool upper = (lane & bit) != 0;
      return (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, bit);
    };
    float sum = half(half(x[0], x[2], 16), half(x[1], x[3], 16), 8);
    sum += __shfl_xor_sync(~0u, sum, 4);
    if ((lane & 4) == 0) {
      atomicAdd(to + (lane / 16 * 8 + lane % 4 * 2 + lane / 8 % 2), sum);
    }
  }

  // key: this thread's first row.
  __device__ __forceinline__ void store_sums(const Args& a, const Sm90KeyBlock<S>& block, int head, int key, int t) {
    float* const to = a.column_sum + (i64(block.place.b) * a.rows.heads_q + head) * a.column_pitch;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = quad_sum(sums[r]);
      if constexpr (S.key_term) {
        sum = terms[r] == -kInfinity ? 0 : sum;
      }
      if (t == 0 && key + 8 * r < block.place.k_len) {
        to[key + 8 * r] = sum;
      }
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

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_SCORE_SM90_BACKWARD_SCORES_CUH
