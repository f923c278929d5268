// SPDX-License-Identifier: Apache-2.0
//
// dS of sm90_backward from P and dP, and its sums: those over queries, of each key, are kept until a head ends; those
// over keys leave at once.
#pragma once

#include "cuda/device/score/scores.cuh"
#include "cuda/device/score/sm90_backward_inputs.cuh"
#include "cuda/device/sm90/added_bias.h"
#include "cuda/device/work/sm90_key_block.cuh"

namespace fovea::cuda {

// The fragment is that of Sm90BackwardScores.
template <auto S>
struct Sm90BackwardGradients {
  static constexpr int M = S.step;
  static constexpr bool kDropout = S.dropout != DropoutRule::kNone;
  // A bias of -inf, or the term of a query, may hide any pair.
  static constexpr bool kHidesPairs = sm90_bias_in_place(S) || sm90_outer_bytes(S) > 0 || S.query_term;
  using Loaded = Sm90BackwardLoaded<S>;

  // Of a query head.
  float key_terms[2];  // of this thread's keys
  float sums[2];       // of dS over queries
  // Of a step: of the scores by the scaled dot products, pairs of fp16.
  u32 derivatives[S.softcap ? M / 4 : 1];

  __device__ __forceinline__ void clear() { sums[0] = sums[1] = 0; }

  // Some key of this warp is masked by its term.
  __device__ __forceinline__ bool has_hidden() const {
    if constexpr (S.key_term) {
      return __any_sync(~0u, key_terms[0] == -kInfinity || key_terms[1] == -kInfinity);
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
          pairs[j] = key_terms[j % 2] == -kInfinity ? 0 : pairs[j];
        }
      }
    }
  }
  // dS from P and dP, as pairs of 16 bits. loaded: the first 16 queries of delta; row: of the first in row vectors;
  // hidden: some pairs are. sums_of_bias: where adds_bias adds this thread's first, or null.
  __device__ __forceinline__ void gradients(u32 (&grads)[M / 4], const float (&s)[M / 2], float (&dp)[M / 2],
                                            const Args& a, Loaded& loaded, u32 delta, int row, bool hidden,
                                            float* sums_of_bias = nullptr) {
    // Note: what is hidden has P = 0, but dP of any size, and 0 * inf is NaN. Where that may be in any tile (a bias of
    // -inf hides, too) dS is looked at in the end.
    constexpr bool kAnywhere = kHidesPairs || S.mask;
    // Sums in memory get it at once, so that it is looked at as it is made.
    constexpr bool kAtOnce = S.adds_bias;
    constexpr bool kLater = kAnywhere && !S.column_sum && !S.row_sum && !kAtOnce;
    if constexpr (!kLater && !kAtOnce && (kAnywhere || S.banded || (S.key_term && S.row_sum))) {
      if (kHidesPairs || hidden) {
#pragma unroll
        for (int i = 0; i < M / 2; ++i) {
          dp[i] = s[i] == 0 ? 0 : dp[i];
        }
      }
    }
#pragma unroll
    for (int k = 0; k < M / 16; ++k) {
      if (k + 1 < M / 16) {
        loaded.load_rows(delta, k + 1);
      }
      float over_keys[4] = {};  // sums of this thread's keys, of queries 16 k + 8 i / 2 + 2 t + i % 2
#pragma unroll
      for (int n = 2 * k; n < 2 * k + 2; ++n) {
        [[maybe_unused]] float all[4];  // of both keys
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
            if constexpr (kAtOnce) {
              grad[e] = s[i] == 0 || (S.key_term && !S.row_sum && key_terms[r] == -kInfinity) ? 0 : grad[e];
              all[2 * r + e] = grad[e];
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
            if constexpr (kAtOnce) {  // 0 times a derivative of NaN
              grad[0] = s[4 * n + 2 * r] == 0 ? 0 : grad[0];
              grad[1] = s[4 * n + 2 * r + 1] == 0 ? 0 : grad[1];
            }
          }
          grads[2 * n + r] = pack<S.type>(grad[0], grad[1]);
        }
        if constexpr (S.adds_bias) {
          reduce4_if(sums_of_bias != nullptr, sums_of_bias + n * AddedBias::kOfEight, all);
        }
      }
      if constexpr (S.row_sum) {
        add_to_rows(a.row_sum + row + 16 * k, over_keys);
      }
    }
    clear_hidden(grads);
    if constexpr (kLater) {
      if (kHidesPairs || hidden) {
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
        sum = key_terms[r] == -kInfinity ? 0 : sum;
      }
      if (t == 0 && key + 8 * r < block.place.k_len) {
        to[key + 8 * r] = sum;
      }
    }
  }
};

}  // namespace fovea::cuda
