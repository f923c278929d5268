// SPDX-License-Identifier: Apache-2.0
//
// The scores of the generic backward:
//
//   ProductLanes  dot products S, dP of whole rows
//   HeadState     what changes with the query head: slopes, terms, dropout's words, factors
//   grad_scores   dot products S, dP to P (as dV needs it) and dS, in registers
//   lift_small    fp32: where P and dS of a step are too small for pairs of fp16
//   make_operands, add_grad_query
//                 P and dS as operands of the next products, from registers or through shared memory
#pragma once

#include "cuda/device/generic/backward_step.cuh"
#include "cuda/device/score/dropout.cuh"
#include "cuda/device/score/mask_edge.cuh"
#include "cuda/device/score/scores.cuh"
#include "cuda/device/tile/products.cuh"

namespace fovea::cuda {

// A lane's addresses in rows of S's products: Q and K have Spec::d columns, dO and V Spec::dv.
template <auto S>
struct ProductLanes {
  using TileD = Tile<row_of_tile(S.type, S.d)>;
  using TileV = Tile<row_of_tile(S.type, S.dv)>;
  typename TileD::Lane rows_d, columns_d;
  typename TileV::Lane rows_v, columns_v;

  __device__ __forceinline__ explicit ProductLanes(int lane)
      : rows_d(0, lane), columns_d(0, lane, true), rows_v(0, lane), columns_v(0, lane, true) {}
  // S and dP: rows and columns, where those of the fragment begin in shared memory.
  template <int kTiles, int kColumns>
  __device__ __forceinline__ void add_scores(float (&s)[kTiles][kColumns][4], u32 rows, u32 columns) const {
    add_rows_by_rows<S.type, S.d>(s, rows, rows_d, columns, columns_d);
  }
  template <int kTiles, int kColumns>
  __device__ __forceinline__ void add_grads(float (&dp)[kTiles][kColumns][4], u32 rows, u32 columns) const {
    add_rows_by_rows<S.type, S.dv>(dp, rows, rows_v, columns, columns_v);
  }
};

// What changes with the query head.
template <auto S, bool kTransposed, int kTiles, int kColumns>
struct HeadState {
  GradFactors factors;
  Scores<S, kTransposed, kTiles> scores;
  Keep<S, kTransposed, kTiles, kColumns> keep;

  HeadState() = default;
  __device__ __forceinline__ HeadState(const Args& a, const Place& place, u32 head, u32 head_k, int row0, int g,
                                       bool natural_grads = false)
      : factors(GradFactors::make<S>(a, place.b, head, head_k, natural_grads)),
        scores(a, place, head, factors.score, row0, g) {
    keep.start(a, place, head);
    keep.start_rows(row0, g);
  }
};

// s: dot products, becomes P (with dropout, its factor left to keep_scale: what dV needs); dp: products, becomes dS by
// the dot product over the scale (kByScore: by the score). sums, if kSums: dS by the score, added up along the rows.
// The fragment begins at (tile_row, tile_column) of this step's tiles and at (row0, column0) of the sequence;
// row_vectors, inputs: addresses in shared memory, the former of the first query of the tile.
template <auto S, bool kTransposed, bool kSums, bool kByScore, class Inputs, int kQueries, int kKeys, int kTiles,
          int kColumns, class Head>
__device__ __forceinline__ void grad_scores(float (&s)[kTiles][kColumns][4], float (&dp)[kTiles][kColumns][4],
                                            float (&sums)[kTiles][2], const Args& a, const Thread& thread, Head& head,
                                            const math::Band<int>& band, bool edge, u32 row_vectors, u32 inputs,
                                            int tile_row, int tile_column, int row0, int column0) {
  constexpr bool kNatural = natural_scores(S);
  static_assert(kNatural || !is_pair(S.type));
  constexpr float kLift = is_pair(S.type) ? GradFactors::kLift : 0;
  constexpr bool kDerivative = S.softcap && !kByScore;
  float derivative[kDerivative ? kTiles : 1][kDerivative ? kColumns : 1][4];
  if constexpr (kDerivative) {
    head.scores.of_dots(s, derivative);
  } else {
    head.scores.of_dots(s);
  }
  head.scores.template add<Inputs, kKeys>(s, thread, inputs, tile_row, tile_column, row0, column0);
  if (edge || (kTransposed && kHidesQueries<S> && column0 + kColumns * 8 > band.seqlen_q)) {
    mask_edge<S, kTransposed, kByScore && S.ragged>(s, thread, band, row0, column0);
  }
  if constexpr (S.dropout != DropoutRule::kNone) {
    head.keep.prepare(thread, row0, column0);
  }
  const float unit = kNatural ? math::kLog2E : a.scale * math::kLog2E;

#pragma unroll
  for (int jj = 0; jj < (kColumns + 1) / 2; ++jj) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      bool keep[2][4];
      int first_half = 0;
      if constexpr (S.dropout != DropoutRule::kNone) {
        // One column tile alone is half of a block of 16.
        if constexpr (kColumns == 1 && S.dropout == DropoutRule::kFovea) {
          first_half = column0 >> 3 & 1;
        }
        head.keep.decide(keep, thread, i, jj, row0, column0 & ~15);
      }
#pragma unroll
      for (int half = 0; half < (kColumns == 1 ? 1 : 2); ++half) {
        const int j = 2 * jj + half;
        float lse[2];
        float delta[2];  // of columns 2t, 2t + 1; in S of rows g, g + 8
        if constexpr (kTransposed) {
          const u32 at = row_vectors + (tile_column + j * 8 + thread.t * 2) * 4;
          const float2 x = load_shared2(at);
          const float2 y = load_shared2(at + kQueries * 4);
          lse[0] = x.x;
          lse[1] = x.y;
          delta[0] = y.x;
          delta[1] = y.y;
        } else {
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            const u32 at = row_vectors + (tile_row + i * 16 + thread.g + x * 8) * 4;
            lse[x] = load_shared(at);
            delta[x] = load_shared(at + kQueries * 4);
          }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int n = kTransposed ? e & 1 : e >> 1;
          const float p = weight_of_score<kNatural>(s[i][j][e], unit, lse[n], kLift);
          float grad = dp[i][j][e];
          float kept = p;
          if constexpr (S.dropout != DropoutRule::kNone) {
            const bool kept_here = kColumns == 1 && first_half != 0 ? keep[1][e] : keep[half][e];
            const float factor = kept_here ? a.keep_scale : 0.f;
            kept = kept_here ? p : 0.f;
            grad *= factor;
          }
          if constexpr (is_pair(S.type)) {
            grad = math::grad_score<may_hide(S)>(p, grad * head.factors.dp, delta[n] * head.factors.delta);
          } else {
            grad = math::grad_score<may_hide(S)>(p, grad, delta[n]);
          }
          if constexpr (kSums) {
            sums[i][e >> 1] += grad;
          }
          if constexpr (kDerivative) {
            grad *= derivative[i][j][e];
          }
          s[i][j][e] = kept;
          dp[i][j][e] = grad;
        }
      }
    }
  }
}

// fp32 with a sink: where that takes nearly all of a row, the P that are left may be smaller than a pair of fp16
// resolves. Then P and dS of a step are multiplied by 2^n, so that the largest is near 2^10; what products are to be
// multiplied by for it is returned. kBlock: one n for the block, and each of its warps comes here or to
// lift_of_others(); otherwise one for the warp. A sum over keys of a step that others made has no such factor: a
// kernel that adds dQ to memory does not serve a sink in fp32.
template <bool kBlock>
__device__ __forceinline__ int small_lift(float largest) {
  constexpr int kStep = 10;
  constexpr int kMost = 100;
  int lift = 0;
  for (; lift < kMost; lift += kStep) {
    const bool large = largest >= power_of_two(kStep / 2 - lift);
    if (kBlock ? __syncthreads_or(large) != 0 : __any_sync(~0u, large)) {
      break;
    }
  }
  return lift;
}
template <bool kBlock, int kTiles, int kColumns>
__device__ __forceinline__ float lift_small(const Args& a, float (&s)[kTiles][kColumns][4],
                                            float (&dp)[kTiles][kColumns][4]) {
  if (a.sink == nullptr) {
    return 1;
  }
  float largest = 0;
  each(s, [&](float p, int i, int j, int e) { largest = fmaxf(largest, fmaxf(p, fabsf(dp[i][j][e]))); });
  const int lift = small_lift<kBlock>(largest);
  const float factor = power_of_two(lift);
  each(s, [&](float& p, int i, int j, int e) {
    p *= factor;
    dp[i][j][e] *= factor;
  });
  return power_of_two(-lift);
}
__device__ __forceinline__ float lift_of_others(const Args& a) {
  return a.sink == nullptr ? 1 : power_of_two(-small_lift<true>(0));
}

// A 16 x 16 block of an accumulator as an operand.
template <Type kType, int kColumns>
__device__ __forceinline__ void make_operand(Operand<kType>& to, const float (&s)[kColumns][4], int kk) {
  if constexpr (is_pair(kType)) {
    operand_pair(to.hi, to.lo, s, kk);
  } else {
    operand<kType>(to.hi, s, kk);
  }
}

template <Type kType, int kTiles, int kBlocks, int kColumns>
__device__ __forceinline__ void make_operands(Operand<kType> (&to)[kTiles][kBlocks],
                                              const float (&s)[kTiles][kColumns][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int kk = 0; kk < kBlocks; ++kk) {
      make_operand(to[i][kk], s[i], kk);
    }
  }
}

// dq[R][2 C] (+)= dS K for queries 16 (row_block + i) and columns 16 (column_block + j): dS lies as [key][query].
template <auto S, int R, int C, int kKeys, int kQueries>
__device__ __forceinline__ void add_grad_query(float (&dq)[R][2 * C][4], u32 grads, int row_block, u32 keys,
                                               int column_block, int lane, float factor) {
  constexpr u32 kLo = kKeys * kQueries * 2;
  u32 rows[R];
#pragma unroll
  for (int i = 0; i < R; ++i) {
    rows[i] = grads + Tile<kQueries>::offset((lane & 7) | (lane >> 4) << 3, (row_block + i) * 2 + (lane >> 3 & 1));
  }
  const ColumnLane<S.type, S.d, C> columns(column_block, lane);
  const auto load = [&](int i, int kk) {
    Operand<S.type> x;
    ldmatrix_trans(x.hi, rows[i] + kk * 16 * kQueries * 2);
    if constexpr (is_pair(S.type)) {
      ldmatrix_trans(x.lo, rows[i] + kLo + kk * 16 * kQueries * 2);
    }
    return x;
  };
  add_columns<S.type, R, 2 * C, kKeys / 16>(
      dq, load, [&](int kk, int j) { return keys + columns.at(kk * 16, j); }, C, factor);
}

}  // namespace fovea::cuda
