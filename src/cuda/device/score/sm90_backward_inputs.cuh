// SPDX-License-Identifier: Apache-2.0
//
// What sm90_backward's scores take from shared memory 16 queries ahead, as a thread of their fragment
// (sm90_backward_scores.cuh) finds it: biases in the place of dS, row vectors, query terms.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/score/bias.cuh"
#include "cuda/device/sm90/backward_sizes.h"

namespace fovea::cuda {

// Of 16 queries and the 16 after them. A bias lies as [query][key], 128 bytes a query; of its four matrices two are of
// the first 8 queries, the first of them of the first 8 keys.
template <auto S>
struct Sm90BackwardLoaded {
  BiasMatrices<S.bias> bias[2];
  float2 rows[2][2];
  float2 query_terms[S.query_term ? 2 : 1][2];

  __device__ __forceinline__ void load(u32 panel, u32 lse, int k) {
    if constexpr (sm90_bias_in_place(S)) {
      ldmatrix_trans(bias[k & 1].pairs, panel + k * 2048);
    }
    if constexpr (S.query_term) {
      constexpr u32 kFromLse = sm90_backward_sizes(S).terms_at - sm90_backward_sizes(S).lse_at;
      query_terms[k & 1][0] = load_shared2(lse + kFromLse + k * 64);
      query_terms[k & 1][1] = load_shared2(lse + kFromLse + k * 64 + 32);
    }
    load_rows(lse, k);
  }
  // vector: logsumexp, or delta.
  __device__ __forceinline__ void load_rows(u32 vector, int k) {
    rows[k & 1][0] = load_shared2(vector + k * 64);
    rows[k & 1][1] = load_shared2(vector + k * 64 + 32);
  }
};

}  // namespace fovea::cuda
