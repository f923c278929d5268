// SPDX-License-Identifier: Apache-2.0
//
// An accumulator of a warpgroup: as a fragment, and on its way to rows of any alignment.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/tile/result.cuh"

namespace fovea::cuda {

// The accumulator of a warpgroup as a fragment (tile/tile.cuh) of one row tile, the 16 rows of a warp.
template <int kCount>
__device__ __forceinline__ float (&fragment_of(float (&x)[kCount]))[kCount / 4][4] {
  return reinterpret_cast<float(&)[kCount / 4][4]>(x);
}

template <class Number, int kCount>
__device__ __forceinline__ void set_zero(Number (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = 0;
  }
}

// Pairs of 16 bits, 16 rows of an accumulator, transposed to a panel of 64 columns in shared memory; to: where this
// lane's 16 bytes of the first 16 x 16 numbers lie.
template <int kCount>
__device__ __forceinline__ void store_transposed(u32 to, const u32 (&pairs)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount / 4; ++k) {
    stmatrix_trans(to + k * 2048, pairs[4 * k], pairs[4 * k + 1], pairs[4 * k + 2], pairs[4 * k + 3]);
  }
}

// A warp's 16 rows of an accumulator to a tile with kRows rows in panels: times the factors of the thread's two rows.
// row, half: of this lane in the tile, as stmatrix takes them.
template <Type kType, int kRows, int kPanel, int kCount>
__device__ __forceinline__ void store_to_panels(u32 tile, const float (&x)[kCount], const float (&factor)[2], int row,
                                                int half) {
  constexpr int kBlocks = kPanel / 16;
  const auto pair = [&](int j, int r) {
    return pack<kType>(x[4 * j + 2 * r] * factor[r], x[4 * j + 2 * r + 1] * factor[r]);
  };
#pragma unroll
  for (int k = 0; k < kCount / 8; ++k) {
    stmatrix(tile + k / kBlocks * kRows * kPanel * 2 + swizzled<kPanel * 2>(row, k % kBlocks * 2 + half),
             pair(2 * k, 0), pair(2 * k, 1), pair(2 * k + 1, 0), pair(2 * k + 1, 1));
  }
}

// A warp's 16 rows of an accumulator, from this thread's row `first` of `rows`. The four lanes that hold a row's pairs
// of columns transpose blocks of 8 columns among themselves, so that 16 bytes leave at a time; every lane comes here.
template <Type kType, int kCount>
__device__ __forceinline__ void store_accumulator(u16* to, const math::Strides& strides, const float (&x)[kCount],
                                                  float factor, int first, int rows, int columns, bool vectors, int t) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first + 8 * r;
    u16* const at = to + row * strides.row;
    u16* by_numbers = at + 2 * t * strides.col;
    const auto pair = [&](int j) {
      return j < kCount / 4 ? pack<kType>(x[j < kCount / 4 ? 4 * j + 2 * r : 0] * factor,
                                          x[j < kCount / 4 ? 4 * j + 2 * r + 1 : 0] * factor)
                            : 0u;
    };
#pragma unroll
    for (int j = 0; j < kCount / 4; j += 4) {
      const u32 v[4] = {pair(j), pair(j + 1), pair(j + 2), pair(j + 3)};
      if (vectors) {
        const bool odd = t & 1;
        const bool upper = t & 2;
        const u32 p = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1);
        const u32 q = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
        const u32 w0 = odd ? p : v[0];
        const u32 w1 = odd ? v[1] : p;
        const u32 w2 = odd ? q : v[2];
        const u32 w3 = odd ? v[3] : q;
        const u32 y = __shfl_xor_sync(~0u, upper ? w0 : w2, 2);
        const u32 z = __shfl_xor_sync(~0u, upper ? w1 : w3, 2);
        if (row < rows && (j + t) * 8 < columns) {
          store_global(at + (j + t) * 8, upper ? uint4{y, z, w2, w3} : uint4{w0, w1, y, z});
        }
      } else if (row < rows) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = (j + i) * 8 + 2 * t;
          if (j + i < kCount / 4 && column < columns) {
            *by_numbers = u16(v[i]);
          }
          if (j + i < kCount / 4 && column + 1 < columns) {
            by_numbers[strides.col] = u16(v[i] >> 16);
          }
          by_numbers += 8 * strides.col;
        }
      }
    }
  }
}

// A gradient, from element `at` of its tensor on: the same, or as `how` says with Spec::fp32_results.
template <auto S, int kCount>
__device__ __forceinline__ void store_gradient_rows(const Tensor& to, i64 at, Result how, const float (&x)[kCount],
                                                    float factor, int first, int rows, int columns, bool vectors,
                                                    int t) {
  if constexpr (S.fp32_results) {
    store_result<S.type>(to, at, how, x, factor, first, rows, columns, t);
  } else {
    store_accumulator<S.type>(static_cast<u16*>(to.data) + at, to.strides, x, factor, first, rows, columns, vectors, t);
  }
}

// Accumulators in fp32 as they stand: of each 8 columns a lane's four numbers, lane by lane; `to` is this lane's place.
template <int kCount>
__device__ __forceinline__ void store_fragments(float* to, const float (&x)[kCount]) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    store_global(to + j * 128, uint4{__float_as_uint(x[4 * j]), __float_as_uint(x[4 * j + 1]),
                                     __float_as_uint(x[4 * j + 2]), __float_as_uint(x[4 * j + 3])});
  }
}

}  // namespace fovea::cuda
