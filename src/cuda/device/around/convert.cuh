// SPDX-License-Identifier: Apache-2.0
//
// dq_sum, fp32 in the order of the accumulators, to dq.
//
//   store_sums         a warp's 16 x 16 sums to rows of a result
//   convert_sums       such a piece of 64 rows of dq_sum to dq
#pragma once

#include "cuda/device/args.h"
#include "cuda/device/around/backward_reduce.cuh"
#include "cuda/device/generic/backward_sizes.h"
#include "cuda/device/ptx/sm80.cuh"
#include "cuda/device/tile/result.cuh"

namespace fovea::cuda {

// Of four neighbouring lanes, each with four words: lane t gets word t of each.
__device__ __forceinline__ void transpose(u32 (&x)[4], int t) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) {
        continue;
      }
      const bool upper = (t & bit) != 0;
      const u32 received = __shfl_xor_sync(~0u, upper ? x[i] : x[i | bit], bit);
      x[i] = upper ? received : x[i];
      x[i | bit] = upper ? x[i | bit] : received;
    }
  }
}

// Sums in fp32 lie as accumulators: of each 16 x 8 block, lane by lane the four values of rows g, g + 8 of lane 4 g +
// t, columns 2t, 2t + 1. A warp's 16 x 16 of them, two such blocks, go to rows `row` and row + 8 of a result, from
// `column` on; `at` is where its row 0 lies. how: with Spec::fp32_results.
template <auto S>
__device__ __forceinline__ void store_sums(const Thread& thread, const float4 (&x)[2], const Tensor& result, Result how,
                                           i64 at, int row, int column, int rows, int columns, bool vectors) {
  constexpr Type kType = S.type;
  if constexpr (S.fp32_results) {
    const float flat[8] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w};
    store_result<kType>(result, at + column * result.strides.col, how, flat, 1.f, row, rows, columns - column,
                        thread.t);
    return;
  }
  if (kType != Type::kFp32 && vectors) {
    // Four pieces of 16 bytes, block j of row g + 8 half: lane t gets the one with 2 j + half = t.
    u32 words[4] = {pack<kType>(x[0].x, x[0].y), pack<kType>(x[0].z, x[0].w), pack<kType>(x[1].x, x[1].y),
                    pack<kType>(x[1].z, x[1].w)};
    transpose(words, thread.t);
    const int at_row = row + (thread.t & 1) * 8;
    const int at_column = column + (thread.t >> 1) * 8;
    if (at_row < rows && at_column < columns) {
      store_global(static_cast<u16*>(result.data) + at + at_row * result.strides.row + at_column,
                   {words[0], words[1], words[2], words[3]});
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at_row = row + half * 8;
      const int at_column = column + j * 8 + thread.t * 2;
      const i64 to = at + at_row * result.strides.row;
      const float2 pair = half == 0 ? float2{x[j].x, x[j].y} : float2{x[j].z, x[j].w};
      if (at_row >= rows) {
        continue;
      }
      if (kType == Type::kFp32 && vectors && at_column < columns) {
        *reinterpret_cast<float2*>(static_cast<float*>(result.data) + to + at_column) = pair;
        continue;
      }
      constexpr BiasTile kAs = kType == Type::kBf16   ? BiasTile::kBf16
                               : kType == Type::kFp16 ? BiasTile::kFp16
                                                      : BiasTile::kFp32;
      if (at_column < columns) {
        store_element(result.data, to + at_column * result.strides.col, kAs, pair.x);
      }
      if (at_column + 1 < columns) {
        store_element(result.data, to + (at_column + 1) * result.strides.col, kAs, pair.y);
      }
    }
  }
}

// Pieces of 16 x 16 sums, a warp's, in kConvertRows rows.
template <auto S>
inline constexpr int kConvertPieces = kConvertRows / 16 * (S.d / 16);

// kBatch pieces, from piece n on, of the kConvertRows rows of a head that begin at row `first`; their sums lie at
// `sums`. `to`: where the head's row 0 lies in dq. `stored`: there are sums; else dq is 0. `vectors`: Args'. All are
// read before any is written.
template <auto S, int kBatch>
__device__ __forceinline__ void convert_sums(const Thread& thread, const Args& a, const float* sums, bool stored,
                                             i64 to, int first, int rows, bool vectors, int n) {
  constexpr int kPairs = S.d / 16;  // of blocks of 8 columns, in 16 rows
  constexpr int kHalf = kPairs / 2;
  const float scale = S.type == Type::kFp32 ? 1.f : a.scale;
  const auto exists = [&](int at) { return first + at / kPairs * 16 < rows && at % kPairs * 16 < a.out_dim; };
  float4 x[kBatch][2];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    // same_step: the left half of the columns of all rows, then the right one
    const int at = n + i;
    const int place = S.same_step ? (at % kPairs / kHalf * (kConvertRows / 16) + at / kPairs) * kHalf + at % kHalf : at;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      x[i][j] = stored && exists(at) ? load_summed(sums + (place * 2 + j) * 128 + thread.lane * 4) : float4{};
    }
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int at = n + i;
    if (!exists(at)) {
      continue;
    }
#pragma unroll
    for (float4& y : x[i]) {
      y = {y.x * scale, y.y * scale, y.z * scale, y.w * scale};
    }
    store_sums<S>(thread, x[i], a.grad_q, a.results.q, to, first + at / kPairs * 16 + thread.g, at % kPairs * 16, rows,
                  a.out_dim, vectors);
  }
}

}  // namespace fovea::cuda
