// SPDX-License-Identifier: Apache-2.0
//
// What leaves the registers of the generic backward: gradients through shared memory or directly, sums of dS.
#pragma once

#include "cuda/device/tile/products.cuh"
#include "cuda/device/tile/result.cuh"
#include "cuda/device/tile/tile.cuh"

namespace fovea::cuda {

// As store_fragment(), in fp32 to a tile of 32-bit numbers.
template <int kRow, int kTiles, int kColumns>
__device__ __forceinline__ void store_fragment32(u32 tile, const float (&x)[kTiles][kColumns][4], const Thread& thread,
                                                 int row = 0, int chunk = 0) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        store_shared(tile +
                         Tile32<kRow>::offset(row + i * 16 + thread.g + half * 8, (chunk + j) * 2 + (thread.t >> 1)) +
                         (thread.t & 1) * 8,
                     float2{x[i][j][2 * half], x[i][j][2 * half + 1]});
      }
    }
  }
}

// A gradient on its way out, in two parts with a barrier between them: times `factor` (pairs: as it is) to a tile of
// kColumns numbers a row in shared memory, from (row, chunk of 8 columns) on, and kRows of it to the tensor, from
// element `at` on. left, columns: what is left of both there; kThreads: that store. With Spec::fp32_results it goes
// straight there in the second part, from this warp's registers, as `how` says.
template <auto S, int kColumns, int kTiles, int kChunks>
__device__ __forceinline__ void put_gradient(u32 tile, const float (&x)[kTiles][kChunks][4], float factor,
                                             const Thread& thread, int row = 0, int chunk = 0) {
  constexpr Type kType = S.type;
  if constexpr (S.fp32_results) {
    return;
  } else if constexpr (is_pair(kType)) {
    store_fragment32<kColumns>(tile, x, thread, row, chunk);
  } else {
    store_fragment<kType, kColumns>(tile + row * kColumns * 2, x, thread, 0, chunk, factor);
  }
}
template <auto S, int kColumns, int kRows, int kThreads = 32, int kTiles, int kChunks>
__device__ __forceinline__ void store_gradient(const Tensor& to, i64 at, u32 tile, Result how,
                                               const float (&x)[kTiles][kChunks][4], float factor, int left,
                                               int columns, bool vectors, const Thread& thread, int row = 0,
                                               int chunk = 0) {
  constexpr Type kType = S.type;
  const int number = kThreads == 32 ? thread.lane : thread.index;
  if constexpr (S.fp32_results) {
    store_result<kType>(to, at + row * to.strides.row + chunk * 8 * to.strides.col, how, x,
                        is_pair(kType) ? 1.f : factor, left - row, columns - chunk * 8, thread);
  } else if constexpr (is_pair(kType)) {
    store_rows<Tile32<kColumns>, 4, kRows, kThreads>(static_cast<float*>(to.data) + at, to.strides, tile, left, columns,
                                                     vectors, number);
  } else {
    store_rows<Tile<kColumns>, 2, kRows, kThreads>(static_cast<u16*>(to.data) + at, to.strides, tile, left, columns,
                                                   vectors, number);
  }
}

// Sums of dS along the rows of a fragment, in natural units: store(sum, i, x) by one thread of each row 16 i + g + x,
// x 0 or 8. kAnew: they begin anew.
template <bool kAnew, int kTiles, class Store>
__device__ __forceinline__ void store_row_sums(float (&sums)[kTiles][2], float factor, const Thread& thread,
                                               const Store& store) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const float sum = quad_sum(sums[i][x]) * factor;
      if (thread.t == 0) {
        store(sum, i, x * 8);
      }
      if constexpr (kAnew) {
        sums[i][x] = 0;
      }
    }
  }
}

// Of keys, over the queries of a head: where that of the sequence's first key goes.
__device__ __forceinline__ float* column_sums(const Args& a, const Place& place, u32 head) {
  return a.column_sum + (i64(place.b) * a.rows.heads_q + head) * a.column_pitch;
}

}  // namespace fovea::cuda
