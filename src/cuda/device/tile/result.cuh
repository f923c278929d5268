// SPDX-License-Identifier: Apache-2.0
//
// How results leave kernels with Features::fp32_results: in q's type or in fp32, added to what is there or not, as
// ResultArgs says. fp32 leaves by 16 bytes where rows allow; else threads store what they have, which is slow.
#pragma once

#include "cuda/device/tile/tile.cuh"
#include "math/merge.h"

namespace fovea::cuda {

// What the two rows of a thread are multiplied by before they are stored, and what is there before it is added.
struct RowFactors {
  float own[2];
  float there[2];
};

// fp32 to rows whose columns are adjacent and begin at multiples of 16 bytes: two lanes that share a row exchange what
// they have of two blocks of 8 columns, so that each has 4 adjacent ones. Every lane comes here.
template <int kCount>
__device__ __forceinline__ void store_result_by_fours(float* to, i64 row_stride, bool adds, const float (&x)[kCount],
                                                      const RowFactors& factors, int first, int rows, int columns,
                                                      int t) {
  const bool odd = t & 1;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first + 8 * r;
    float* const line = to + row * row_stride + t / 2 * 4;
    const auto value = [&](int j, int e) {
      return j < kCount / 4 ? x[j < kCount / 4 ? 4 * j + 2 * r + e : 0] * factors.own[r] : 0.f;
    };
#pragma unroll
    for (int j = 0; j < kCount / 4; j += 2) {
      const float own[4] = {value(j, 0), value(j, 1), value(j + 1, 0), value(j + 1, 1)};
      const float other0 = __shfl_xor_sync(~0u, odd ? own[0] : own[2], 1);
      const float other1 = __shfl_xor_sync(~0u, odd ? own[1] : own[3], 1);
      float4 four = odd ? float4{other0, other1, own[2], own[3]} : float4{own[0], own[1], other0, other1};
      const int column = (j + odd) * 8;
      if (row < rows && column + t / 2 * 4 < columns) {
        float4* const place = reinterpret_cast<float4*>(line + column);
        if (adds) {
          const float4 there = *place;
          four = {four.x + there.x * factors.there[r], four.y + there.y * factors.there[r],
                  four.z + there.z * factors.there[r], four.w + there.w * factors.there[r]};
        }
        *place = four;
      }
    }
  }
}

// 16 rows of an accumulator to rows of a result, as `how` says, from its element `at` and this thread's row `first` of
// `rows` on: of each 8 columns a thread has columns 2t and 2t + 1 of that row, then of the row 8 below. What is there
// is read some columns at a time.
template <Type kType, int kCount>
__device__ __forceinline__ void store_result(const Tensor& to, i64 at, Result how, const float (&x)[kCount],
                                             const RowFactors& factors, int first, int rows, int columns, int t) {
  constexpr int kAtOnce = 4;  // of 8 columns
  const i64 col = to.strides.col;
  if (how.fp32) {
    float* const begin = static_cast<float*>(to.data) + at;
    if (col == 1 && columns % 4 == 0 && (reinterpret_cast<u64>(begin) | u64(to.strides.row) * 4) % 16 == 0) {
      return store_result_by_fours(begin, to.strides.row, how.adds, x, factors, first, rows, columns, t);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first + 8 * r;
    if (row >= rows) {
      continue;
    }
    const i64 element = at + row * to.strides.row + 2 * t * col;
    const auto value = [&](int j, int e) { return x[4 * j + 2 * r + e] * factors.own[r]; };
    const auto exists = [&](int j, int e) { return 8 * j + 2 * t + e < columns; };
    if (how.fp32) {
      float* next = static_cast<float*>(to.data) + element;
#pragma unroll
      for (int j = 0; j < kCount / 4; j += kAtOnce) {
        float there[2 * kAtOnce] = {};
        if (how.adds) {
#pragma unroll
          for (int i = 0; i < 2 * kAtOnce && j + i / 2 < kCount / 4; ++i) {
            there[i] = exists(j + i / 2, i % 2) ? next[(i / 2 * 8 + i % 2) * col] * factors.there[r] : 0.f;
          }
        }
#pragma unroll
        for (int i = 0; i < 2 * kAtOnce && j + i / 2 < kCount / 4; ++i) {
          if (exists(j + i / 2, i % 2)) {
            next[(i / 2 * 8 + i % 2) * col] = value(j + i / 2, i % 2) + there[i];
          }
        }
        next += 8 * kAtOnce * col;
      }
    } else if constexpr (kType != Type::kFp32) {
      u16* next = static_cast<u16*>(to.data) + element;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j, next += 8 * col) {
        const u32 pair = pack<kType>(value(j, 0), value(j, 1));
        if (exists(j, 0)) {
          next[0] = u16(pair);
        }
        if (exists(j, 1)) {
          next[col] = u16(pair >> 16);
        }
      }
    }
  }
}

// A gradient: times `factor`, and what is there as it is.
template <Type kType, int kCount>
__device__ __forceinline__ void store_result(const Tensor& to, i64 at, Result how, const float (&x)[kCount],
                                             float factor, int first, int rows, int columns, int t) {
  store_result<kType>(to, at, how, x, RowFactors{{factor, factor}, {1, 1}}, first, rows, columns, t);
}

// Tiles of 16 rows, as warps of the generic kernels have them, from row 0 at `at` on.
template <Type kType, int kTiles, int kColumns>
__device__ __forceinline__ void store_result(const Tensor& to, i64 at, Result how,
                                             const float (&x)[kTiles][kColumns][4], float factor, int rows, int columns,
                                             const Thread& thread) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    float flat[kColumns * 4];
#pragma unroll
    for (int n = 0; n < kColumns * 4; ++n) {
      flat[n] = x[i][n / 4][n % 4];
    }
    store_result<kType>(to, at, how, flat, factor, i * 16 + thread.g, rows, columns, thread.t);
  }
}

// The end of a row whose result is merged with one that is there (Result::adds): the logsumexp of both, which replaces
// the one at `lse`, and the factors of both. Lanes that share a row come here together, and one of them `writes`.
__device__ __forceinline__ math::Merge<float> merge_row(float* lse, float own, bool exists, bool writes) {
  const math::Merge<float> merged = math::merge(exists ? *lse : -kInfinity, own);
  __syncwarp();  // all have read
  if (exists && writes) {
    *lse = merged.lse;
  }
  return merged;
}

}  // namespace fovea::cuda
