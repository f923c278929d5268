// SPDX-License-Identifier: Apache-2.0
//
// A bias with queries and keys, from shared memory to the scores of a fragment.
//
//   BiasMatrices    16 x 16 of it, of 16 bits, in registers
//   add_bias        the generic kernels and sm90_bias_gradient: to a fragment of S, or of S transposed
//   Sm90PanelBias   sm90_forward
//   Sm90OuterBias   sm90_backward: a bias of fp32, and a second bias. A first one of 16 bits lies in the place of dS
//                   (score/sm90_backward_inputs.cuh)
//
// sm90_small_backward keeps its bias in registers (sm90/small_backward.cuh).
#pragma once

#include "cuda/device/tile/tile.cuh"

namespace fovea::cuda {

// As ldmatrix loads it: of four matrices of 8 x 8 this thread's two numbers each.
template <BiasTile kBias>
struct BiasMatrices {
  static constexpr Type kType = kBias == BiasTile::kBf16 ? Type::kBf16 : Type::kFp16;

  u32 pairs[4];

  __device__ __forceinline__ float of(int matrix, int e) const {
    return e == 0 ? low<kType>(pairs[matrix]) : high<kType>(pairs[matrix]);
  }
};

// A bias is added to a fragment that begins at (tile_row, tile_column) of its tile, which has kKeys keys.
template <BiasTile kBiasType, bool kTransposed, int kKeys, int kTiles, int kColumns>
__device__ __forceinline__ void add_bias(float (&s)[kTiles][kColumns][4], const Thread& thread, u32 bias, int tile_row,
                                         int tile_column) {
  const int lane = thread.lane;
  const int g = thread.g;
  const int t = thread.t;
  if constexpr (kBiasType == BiasTile::kFp32 && !kTransposed) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      for (int x = 0; x < 2; ++x) {
        for (int j = 0; j < kColumns; ++j) {
          const u32 chunk = tile_column / 4 + j * 2 + (t >> 1);
          const float2 b =
              load_shared2(bias + Tile32<kKeys>::offset(tile_row + i * 16 + x * 8 + g, chunk) + (t & 1) * 8);
          s[i][j][2 * x] += b.x;
          s[i][j][2 * x + 1] += b.y;
        }
      }
    }
  } else if constexpr (kBiasType == BiasTile::kFp32) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      for (int e = 0; e < 4; ++e) {
        const int key = tile_row + i * 16 + (e >> 1) * 8 + g;
        const u32 first = bias + tile_column * Tile32<kKeys>::kRowBytes +
                          Tile32<kKeys>::offset(t * 2 + (e & 1), key / 4) + key % 4 * 4;
        for (int j = 0; j < kColumns; ++j) {
          s[i][j][e] += load_shared(first + j * 8 * Tile32<kKeys>::kRowBytes);
        }
      }
    }
  } else {
    constexpr Type kType = BiasMatrices<kBiasType>::kType;
    const typename Tile<kKeys>::Lane lanes(bias, lane);  // of whole rows of the tile
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      for (int jj = 0; jj < (kColumns + 1) / 2; ++jj) {
        u32 r[4];
        if constexpr (kTransposed) {
          constexpr int kRows = kColumns == 1 ? 7 : 15;  // one column tile alone: its eight rows, twice
          const u32 chunk = tile_row / 8 + i * 2 + (lane >> 4);
          ldmatrix_trans(
              r, bias + Tile<kKeys>::offset(lane & kRows, chunk) + (tile_column + jj * 16) * Tile<kKeys>::kRowBytes);
        } else if constexpr (kColumns * 8 == kKeys) {
          ldmatrix(r, lanes.at(0, jj) + (tile_row + i * 16) * Tile<kKeys>::kRowBytes);
        } else {
          const u32 chunk = tile_column / 8 + jj * 2 + (lane >> 4);
          ldmatrix(r, bias + Tile<kKeys>::offset(tile_row + i * 16 + (lane & 15), chunk));
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          // Matrices come in the order (0, 0) (1, 0) (0, 1) (1, 1) of the tile's rows and columns.
          if (kTransposed && 2 * jj + (n & 1) >= kColumns) {
            continue;  // one column tile alone: the other half of a block is not asked for
          }
          float* const pair =
              kTransposed ? &s[i][2 * jj + (n & 1)][(n >> 1) * 2] : &s[i][2 * jj + (n >> 1)][(n & 1) * 2];
          pair[0] += low<kType>(r[n]);
          pair[1] += high<kType>(r[n]);
        }
      }
    }
  }
}

// A bias of sm90_forward: in panels as TMA writes them, for the accumulator of a warpgroup.
// kRows: of a tile. kPanel: the columns of a panel of a bias of 16 bits.
template <int kRows, int kPanel>
struct Sm90PanelBias {
  u32 row_offset, swizzle;   // this lane's place for ldmatrix in a panel
  int wide_row, wide_chunk;  // and in one of fp32
  u32 wide_half;

  // own_row: this thread's first; fragment_row, half: row and 8 columns, by lane as ldmatrix takes them.
  __device__ __forceinline__ Sm90PanelBias(int own_row, int fragment_row, int half, int t)
      : row_offset(fragment_row * kPanel * 2),
        swizzle(swizzled<kPanel * 2>(fragment_row, half) - fragment_row * kPanel * 2),
        wide_row(own_row),
        wide_chunk(t / 2),
        wide_half(t % 2 * 8) {}

  // Block k of 16 columns, elements as an accumulator has them. kSet: they become what is added.
  template <BiasTile kBias, bool kSet>
  __device__ __forceinline__ void add(float (&x)[8], u32 place, int k) const {
    if constexpr (kBias == BiasTile::kFp32) {
      // Two numbers at a time: row, then chunk of four columns, as the panel's swizzle has them.
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        const int at = wide_row + (e & 2) * 4;
        const int chunk = (16 * k + (e & 4) * 2) % 32 / 4 + wide_chunk;
        const float2 b = load_shared2(place + k / 2 * (kRows * 128) + swizzled<128>(at, chunk) + wide_half);
        put<kSet>(x[e], b.x);
        put<kSet>(x[e + 1], b.y);
      }
    } else if constexpr (kBias != BiasTile::kNone) {
      constexpr Type kType = BiasMatrices<kBias>::kType;
      u32 b[4];
      constexpr int kBlocks = kPanel / 16;
      ldmatrix(b, place + row_offset + k / kBlocks * (kRows * kPanel * 2) + (swizzle ^ (k % kBlocks << 5)));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        put<kSet>(x[2 * e], low<kType>(b[e]));
        put<kSet>(x[2 * e + 1], high<kType>(b[e]));
      }
    }
  }

 private:
  template <bool kSet>
  static __device__ __forceinline__ void put(float& x, float term) {
    x = kSet ? term : x + term;
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
