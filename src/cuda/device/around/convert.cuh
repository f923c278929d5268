// SPDX-License-Identifier: Apache-2.0
//
// dq_sum, fp32 in the order of the accumulators, to dq.
//
//   store_sums            a warp's 16 x 16 sums to rows of a result
//   convert_sums          such a piece of 64 rows of dq_sum to dq
//   convert_turned_sums   the same where sums lie transposed (AroundSpec::turned_dq)
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

// 16 x 16 numbers of 16 bits, pairs of columns: words 2 j + half are block j of row g + 8 half. Lane t stores the 16
// bytes with 2 j + half = t.
__device__ __forceinline__ void store_words(const Thread& thread, u32 (&words)[4], const Tensor& result, i64 at,
                                            int row, int column, int rows, int columns) {
  transpose(words, thread.t);
  const int at_row = row + (thread.t & 1) * 8;
  const int at_column = column + (thread.t >> 1) * 8;
  if (at_row < rows && at_column < columns) {
    store_global(static_cast<u16*>(result.data) + at + at_row * result.strides.row + at_column,
                 {words[0], words[1], words[2], words[3]});
  }
}

// Of 8 x 8 numbers of 16 bits, a pair of a row in each lane: the same of the transposed numbers.
__device__ __forceinline__ u32 transposed_pairs(u32 pair, int g, int t) {
  const u32 first = __shfl_sync(~0u, pair, 8 * t + g / 2);
  const u32 second = __shfl_sync(~0u, pair, 8 * t + 4 + g / 2);
  return (g & 1) == 0 ? (first & 0xffffu) | second << 16 : first >> 16 | (second & 0xffff0000u);
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
    u32 words[4] = {pack<kType>(x[0].x, x[0].y), pack<kType>(x[0].z, x[0].w), pack<kType>(x[1].x, x[1].y),
                    pack<kType>(x[1].z, x[1].w)};
    store_words(thread, words, result, at, row, column, rows, columns);
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
    // halves: the left half of the columns of all rows, then the right one
    const int at = n + i;
    const int place = S.halves ? (at % kPairs / kHalf * (kConvertRows / 16) + at / kPairs) * kHalf + at % kHalf : at;
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

// The same of sums that lie as sm90_turns_dq() says, from row `row` of dq_sum on, of results that 16-byte stores may
// write: a warp's 16 queries by 16 columns are two accumulators' fragments with columns as rows.
template <auto S, int kBatch>
__device__ __forceinline__ void convert_turned_sums(const Thread& thread, const Args& a, i64 row, bool stored, i64 to,
                                                    int first, int rows, int n) {
  constexpr int kPairs = S.d / 16;
  const auto queries = [&](int at) { return at / kPairs * 16; };
  const auto column = [&](int at) { return at % kPairs * 16; };
  const auto exists = [&](int at) { return first + queries(at) < rows && column(at) < a.out_dim; };
  float4 x[kBatch][2];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int at = n + i;
    const float* const sums = a.dq_sum + turned_sums(a, column(at) / kTurnedColumns, row + queries(at)) +
                              column(at) % kTurnedColumns * 8 + thread.lane * 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // of 8 queries; columns g and g + 8
      x[i][j] = stored && exists(at) ? load_summed(sums + j * 8 * kTurnedColumns) : float4{};
    }
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int at = n + i;
    if (!exists(at)) {
      continue;
    }
    u32 words[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4& y = x[i][j];
      words[j] = transposed_pairs(pack<S.type>(y.x * a.scale, y.y * a.scale), thread.g, thread.t);
      words[2 + j] = transposed_pairs(pack<S.type>(y.z * a.scale, y.w * a.scale), thread.g, thread.t);
    }
    store_words(thread, words, a.grad_q, to, first + queries(at) + thread.g, column(at), rows, a.out_dim);
  }
}

}  // namespace fovea::cuda
