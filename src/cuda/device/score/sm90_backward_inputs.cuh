// SPDX-License-Identifier: Apache-2.0
//
// What sm90_backward's scores take from shared memory, as a thread of their fragment (sm90_backward_scores.cuh) finds
// it:
//
//   Sm90BackwardLoaded   of 16 queries ahead: biases in the place of dS, row vectors, query terms
//   Sm90OuterBias        biases that lie elsewhere
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_sizes.h"

namespace fovea::cuda {

// Of 16 queries and the 16 after them.
template <auto S>
struct Sm90BackwardLoaded {
  u32 bias[2][4];
  float2 rows[2][2];
  float2 terms[S.query_term ? 2 : 1][2];

  __device__ __forceinline__ void load(u32 panel, u32 lse, int k) {
    if constexpr (sm90_bias_in_place(S)) {
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

// Biases that do not lie in the place of dS: where a thread finds its own in a tile of their type.
template <auto S>
struct Sm90OuterBias {
  static constexpr int M = S.step;

  u32 bias = 0;   // of fp32: of this lane's first key and query 2 t
  u32 bias2 = 0;  // of fp32 the same, of 16 bits as ldmatrix takes it
  u32 chunk = 0;  // of fp32: 16 bytes of this lane's first key, for query 0

  // tiles: of 64 keys; fragment: in a tile of 16 bits.
  __device__ __forceinline__ Sm90OuterBias(u32 tiles, u32 tiles2, u32 fragment, int warp, int g, int t) {
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

}  // namespace fovea::cuda
