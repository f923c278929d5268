// SPDX-License-Identifier: Apache-2.0
//
// How a tile's sums leave sm90_bias_gradient: of 16 bits through shared memory, by 16 bytes where rows of the gradient
// begin at multiples of them, else by words; partial sums and gradients of fp32 from registers.
#pragma once

#include "cuda/device/sm90/bias_gradient_copy.cuh"

namespace fovea::cuda {

// An accumulator of fp32 to rows, of which `rows` by `columns` numbers exist.
template <int kTiles, int kColumns>
__device__ __forceinline__ void store_floats(const float (&x)[kTiles][kColumns][4], float* to,
                                             const math::Strides& strides, int rows, int columns, bool vectors,
                                             const Thread& thread) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = i * 16 + thread.g + half * 8;
      if (r >= rows) {
        continue;
      }
      float* const at = to + r * strides.row;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int c = j * 8 + thread.t * 2;
        if (vectors && c + 1 < columns) {
          *reinterpret_cast<float2*>(at + c) = {x[i][j][2 * half], x[i][j][2 * half + 1]};
        } else {
          if (c < columns) {
            at[c * strides.col] = x[i][j][2 * half];
          }
          if (c + 1 < columns) {
            at[(c + 1) * strides.col] = x[i][j][2 * half + 1];
          }
        }
      }
    }
  }
}

// Rows of 64 contiguous numbers that begin anywhere, by a warp: words where memory has them, halves at the ends.
template <class Layout, int kRows>
__device__ __forceinline__ void store_rows_by_words(u16* to, i64 row_stride, u32 tile, int rows, int columns,
                                                    int lane) {
  constexpr int kColumns = 64;
  static_assert(Layout::kRowBytes == kColumns * 2);
#pragma unroll 4
  for (int row = 0; row < kRows; ++row) {
    u16* const at = to + row * row_stride;
    const int column = 2 * lane + int(reinterpret_cast<u64>(at) >> 1 & 1);
    const int after = (column + 1) % kColumns;  // of a row that begins between words the last lane has the first, too
    const u16 first = load_shared_half(tile + Layout::offset(row, column / 8) + column % 8 * 2);
    const u16 second = load_shared_half(tile + Layout::offset(row, after / 8) + after % 8 * 2);
    if (row < rows && after > column && after < columns) {
      *reinterpret_cast<u32*>(at + column) = first | u32(second) << 16;
    } else if (row < rows) {
      if (column < columns) {
        at[column] = first;
      }
      if (after < columns) {
        at[after] = second;
      }
    }
  }
}

// A warp's 16 rows of a part leave through `place` in shared memory, which is its own.
template <auto S, Type kAs>
__device__ __forceinline__ void store_bias_part(const float (&sum)[1][S.part / 8][4], u32 place, u16* to,
                                                const math::Strides& strides, int rows, int keys, bool vectors,
                                                const Thread& thread) {
  __syncwarp();
  store_fragment<kAs, S.part>(place, sum, thread);
  __syncwarp();
  if (!vectors && strides.col == 1) {
    store_rows_by_words<Tile<S.part>, 16>(to, strides.row, place, rows, keys, thread.lane);
  } else {
    store_rows<Tile<S.part>, 2, 16>(to, strides, place, rows, keys, vectors, thread.lane);
  }
}

// This warp's rows, from `row` of the tile on. Numbers of 16 bits go through its rows of the bias (tile_inputs), which
// are no longer needed.
template <auto S>
__device__ __forceinline__ void store_sums(const Args& a, const Sm90BiasGradientArgs& m, const Sm90BiasTile& tile,
                                           float (&sum)[S.step / S.part][1][S.part / 8][4], u32 tile_inputs, int row,
                                           const Thread& thread) {
  constexpr int kParts = S.step / S.part;
  constexpr int kPart = S.part;
  constexpr int kTileBytes = sm90_bias_gradient_sizes(S).tile;
  constexpr bool kBias = S.bias != BiasTile::kNone;
  // opaque: what is made from these would else be made before the loop, and take registers in it.
  const math::Strides& to = a.grad_bias.strides;
  const int plane = opaque(tile.plane);
  const int first_row = opaque(tile.m0 + row);
  const int first_key = opaque(tile.n0);
  const Shared shared = Shared::make(a.rows, to, plane);
  const int rows = a.bias_rows - first_row;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int key = first_key + part * kPart;
    const int keys = a.bias_keys - key;
    const i64 at = shared.b1 * to.batch1 + shared.b2 * to.batch2 + shared.h * to.head + i64(first_row) * to.row +
                   i64(key) * to.col;
    if (a.bias_chunks > 1) {
      float* const first =
          a.bias_sum + ((i64(tile.chunk) * m.planes + plane) * a.bias_rows + first_row) * a.bias_keys + key;
      store_floats(sum[part], first, {0, 0, 0, a.bias_keys, 1}, rows, keys, a.bias_keys % 2 == 0, thread);
    } else if constexpr (S.grad_bias == BiasTile::kFp32) {
      if constexpr (S.fp32_results) {
        store_result<Type::kFp32>(a.grad_bias, at, {true, true}, sum[part], 1.f, rows, keys, thread);
      } else {
        float* const first = static_cast<float*>(a.grad_bias.data) + at;
        const bool vectors = to.col == 1 && to.row % 2 == 0 && (reinterpret_cast<u64>(first) & 7) == 0;
        store_floats(sum[part], first, to, rows, keys, vectors, thread);
      }
    } else {
      constexpr Type kAs = S.grad_bias == BiasTile::kBf16 ? Type::kBf16 : Type::kFp16;
      u16* const first = static_cast<u16*>(a.grad_bias.data) + at;
      if constexpr (kBias) {
        const bool vectors = to.col == 1 && to.row % 8 == 0 && (reinterpret_cast<u64>(first) & 15) == 0;
        const u32 result = tile_inputs + part * kTileBytes + row * kPart * 2;
        store_bias_part<S, kAs>(sum[part], result, first, to, rows, keys, vectors, thread);
      } else {
        each(sum[part][0], [&](float x, int j, int e) {
          const int r = thread.g + (e >> 1) * 8;
          const int column = j * 8 + thread.t * 2 + (e & 1);
          if (r < rows && column < keys) {
            first[r * to.row + column * to.col] = u16(pack<kAs>(x, 0.f));
          }
        });
      }
    }
  }
}

}  // namespace fovea::cuda
