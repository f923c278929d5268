// SPDX-License-Identifier: Apache-2.0
//
// Tiles in shared memory and fragments in registers.
//
//   Tile<C>, Tile32<C>   rows of C numbers of 16 (32) bits, in chunks of 16 bytes; the low bits of the chunk are
//                        exchanged by the row, so that reading along rows and along columns meets no bank twice
//   swizzled             where a chunk of a panel's row lies (Hopper's kernels)
//   load_tile            global to shared memory by all threads, zero where the tensor ends
//   a fragment           float[T][C / 8][4]: T row tiles of 16 by C columns of an mma accumulator; this thread has
//                        rows 16 i + g + 8 x and columns 8 j + 2 t + e in [i][j][2 x + e], g = lane / 4, t = lane % 4
#pragma once

#include "cuda/device/tile/place.cuh"

namespace fovea::cuda {

// ---- layouts ----

constexpr bool is_pair(Type type) { return type == Type::kFp32; }

// Numbers of 16 bits in a row of a tile.
constexpr int row_of_tile(Type type, int columns) { return is_pair(type) ? 2 * columns : columns; }

// Numbers of 16 bits.
template <int kColumns>
struct Tile {
  static constexpr int kChunks = kColumns / 8;  // of 16 bytes, a row
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kWidth = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;  // chunks that are exchanged
  static constexpr int kShift = kWidth == 8 ? 0 : kWidth == 4 ? 1 : 2;
  static_assert(kColumns % 16 == 0);

  static __device__ __forceinline__ u32 offset(u32 row, u32 chunk) {
    return row * kRowBytes + ((chunk ^ (row >> kShift & (kWidth - 1))) << 4);
  }

  // A lane's addresses for ldmatrix on blocks of 16 x 16. Two orders of the four matrices, so that registers come as
  // mma wants them (B is an aligned pair; in a wrong order it costs two moves an ldmatrix):
  //   rows first      A as it is;               B of two column tiles, transposed, is (r0, r1), (r2, r3)
  //   columns first   A where it is transposed; B of two column tiles as it is
  struct Lane {
    u32 base[kWidth / 2];

    __device__ __forceinline__ Lane(u32 tile, int lane, bool columns_first = false) {
      const u32 row = columns_first ? (lane & 7) | (lane >> 4) << 3 : lane & 15;
      const u32 x = (row >> kShift & (kWidth - 1)) ^ (columns_first ? lane >> 3 & 1 : lane >> 4);
#pragma unroll
      for (int j = 0; j < kWidth / 2; ++j) {
        base[j] = tile + row * kRowBytes + ((2 * j ^ x) << 4);
      }
    }
    // row: a multiple of 16; block: of 16 columns.
    __device__ __forceinline__ u32 at(int row, int block) const {
      return base[block % (kWidth / 2)] + row * kRowBytes + block / (kWidth / 2) * (kWidth * 16);
    }
  };
};

// Numbers of 32 bits, read as pairs along rows or one by one along columns.
template <int kColumns>
struct Tile32 {
  static constexpr int kChunks = kColumns / 4;
  static constexpr int kRowBytes = kColumns * 4;
  static_assert(kColumns % 16 == 0);

  static __device__ __forceinline__ u32 offset(u32 row, u32 chunk) {
    const u32 x = (row ^ row >> 2 & 1) & (kChunks % 8 == 0 ? 3 : 1);
    return row * kRowBytes + ((chunk ^ x << 1) << 4);
  }
};

// A chunk of 16 bytes in a panel of rows of 128, 64 or 32 bytes, as TMA writes and wgmma reads it: swizzled by the row.
template <int kRowBytes>
__device__ __forceinline__ u32 swizzled(int row, int chunk) {
  return row * kRowBytes + ((chunk ^ (row * kRowBytes / 128 & (kRowBytes / 16 - 1))) << 4);
}

// ---- copies ----

// A tile of kRows rows. `from` is its first row; of it `rows` rows exist (not positive: none), of each `bytes` bytes;
// the rest becomes zero and is not read. kWhole: `bytes` is a multiple of 16. Rows are aligned to 16 bytes, and their
// distance is under kRowBytesLimit, so that offsets in a tile have 32 bits.
template <class Layout, int kRows, int kThreads, bool kWhole = true>
__device__ __forceinline__ void load_tile(u32 tile, const void* from, i64 stride_bytes, int rows, int bytes,
                                          int thread) {
  constexpr int kChunks = Layout::kChunks;
  constexpr int kTotal = kRows * kChunks;
  const char* const first = static_cast<const char*>(from);
  if constexpr (kWhole && kThreads % kChunks == 0 && kTotal % kThreads == 0 && (kThreads / kChunks) % 8 == 0) {
    constexpr int kStep = kThreads / kChunks;  // a thread's chunk of a row stays, and so does its place in the exchange
    const int row = thread / kChunks;
    const int chunk = thread % kChunks;
    const u32 to = tile + Layout::offset(row, chunk);
    const char* p = first + (u32(row) * u32(stride_bytes) + chunk * 16);
    const int left = chunk * 16 < bytes ? rows - row : 0;
#pragma unroll
    for (int i = 0; i < kTotal / kThreads; ++i, p += kStep * stride_bytes) {
      copy16(to + i * kStep * Layout::kRowBytes, p, i * kStep < left ? 16 : 0);
    }
  } else {
    constexpr int kCount = (kTotal + kThreads - 1) / kThreads;
    constexpr int kUnrolled = !kWhole ? 1 : kCount <= 16 ? kCount : 4;
#pragma unroll(kUnrolled)
    for (int i = 0; i < kCount; ++i) {
      const int c = thread + i * kThreads;
      if (kTotal % kThreads != 0 && c >= kTotal) {
        break;
      }
      const int row = c / kChunks;
      const int chunk = c % kChunks;
      const int left = row < rows ? bytes - chunk * 16 : 0;
      copy16(tile + Layout::offset(row, chunk), first + (u32(row) * u32(stride_bytes) + chunk * 16),
             kWhole ? (left > 0 ? 16 : 0) : min(max(left, 0), 16));
    }
  }
}

// kThreads threads write kRows rows of a tile of numbers of kElement bytes, of which `rows` exist with `columns`
// numbers each: by 16 bytes where `vectors` says that the tensor's rows allow it, and what is left one by one.
template <class Layout, int kElement, int kRows, int kThreads = 32>
__device__ __forceinline__ void store_rows(void* to, const math::Strides& strides, u32 tile, int rows, int columns,
                                           bool vectors, int thread) {
  constexpr int kEach = 16 / kElement;
  constexpr int kColumns = Layout::kRowBytes / kElement;
  char* const first = static_cast<char*>(to);
  const i64 row_bytes = strides.row * kElement;
  if (vectors) {
#pragma unroll 1
    for (int i = thread; i < kRows * Layout::kChunks; i += kThreads) {
      const int row = i / Layout::kChunks;
      const int chunk = i % Layout::kChunks;
      if (row < rows && (chunk + 1) * kEach <= columns) {
        store_global(first + row * row_bytes + chunk * 16, load_shared4(tile + Layout::offset(row, chunk)));
      }
    }
    if (columns % kEach == 0) {
      return;
    }
  }
  const i64 column_bytes = strides.col * kElement;
  const int left_from = vectors ? columns / kEach * kEach : 0;
#pragma unroll 1
  for (int i = thread; i < kRows * kColumns; i += kThreads) {
    const int row = i / kColumns;
    const int column = i % kColumns;
    if (row < rows && column >= left_from && column < columns) {
      const u32 from = tile + Layout::offset(row, column / kEach) + column % kEach * kElement;
      char* const at = first + row * row_bytes + column * column_bytes;
      if constexpr (kElement == 4) {
        *reinterpret_cast<float*>(at) = load_shared(from);
      } else {
        *reinterpret_cast<u16*>(at) = load_shared_half(from);
      }
    }
  }
}

// kCount floats, of which `count` exist.
template <int kCount>
__device__ __forceinline__ void load_vector(u32 to, const float* from, int count, int thread) {
  if (thread < kCount / 4) {
    const int left = min(max(count - thread * 4, 0), 4);
    copy16(to + thread * 16, left > 0 ? from + thread * 4 : from, left * 4);
  }
}

// ---- fragments ----

// visit(x[i][j][e], i, j, e) for all of a fragment; of one row tile alone visit(x[j][e], j, e).
template <int kTiles, int kColumns, class Visit>
__device__ __forceinline__ void each(float (&x)[kTiles][kColumns][4], const Visit& visit) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        visit(x[i][j][e], i, j, e);
      }
    }
  }
}
template <int kColumns, class Visit>
__device__ __forceinline__ void each(float (&x)[kColumns][4], const Visit& visit) {
  each(reinterpret_cast<float(&)[1][kColumns][4]>(x), [&](float& y, int, int j, int e) { visit(y, j, e); });
}

// Over each group of kLanes lanes, a power of two; all get it.
template <int kLanes>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    x += __shfl_xor_sync(~0u, x, mask);
  }
  return x;
}
template <int kLanes>
__device__ __forceinline__ float max_of_lanes(float x) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
  }
  return x;
}

// The dot product of eight numbers of 16 bits.
template <Type kType>
__device__ __forceinline__ float dot8(const uint4& x, const uint4& y) {
  const u32 xs[4] = {x.x, x.y, x.z, x.w};
  const u32 ys[4] = {y.x, y.y, y.z, y.w};
  float sum = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    sum += low<kType>(xs[e]) * low<kType>(ys[e]) + high<kType>(xs[e]) * high<kType>(ys[e]);
  }
  return sum;
}

// Over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Columns 16 kk ... 16 kk + 15 of an accumulator as an A operand: P goes from one product to the next in registers.
template <Type kType, int kColumns>
__device__ __forceinline__ void operand(u32 (&a)[4], const float (&s)[kColumns][4], int kk) {
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    a[x] = pack<kType>(s[2 * kk + (x >> 1)][(x & 1) * 2], s[2 * kk + (x >> 1)][(x & 1) * 2 + 1]);
  }
}

// ---- fp32 as pairs of fp16 ----
// A number x, scaled by a power of two, is hi + lo with hi = fp16(x), lo = fp16(x - hi): 22 bits. Products of two are
// hi hi + hi lo + lo hi. Each (b, h) of a tensor is scaled so that its largest number is near 2^14; see
// around/prepare.cuh.

// 2^e, exact down to the least denormal number, and 0 below it.
__device__ __forceinline__ float power_of_two(int e) {
  return __int_as_float(e >= -126 ? (min(e, 127) + 127) << 23 : e >= -149 ? 1 << (e + 149) : 0);
}
__device__ __forceinline__ int exponent_of(u32 bits) { return int(bits >> 23 & 255) - 127; }

// e, where a tensor is multiplied by 2^e; from the bits of its largest magnitude. Denormal numbers keep all their bits.
__device__ __forceinline__ int scale_exponent(u32 bits) {
  return bits == 0 ? 0 : min(max(14 - exponent_of(bits), -113), 126);
}

// Two numbers as hi and lo pairs.
__device__ __forceinline__ void split(float x, float y, u32& hi, u32& lo) {
  hi = pack<Type::kFp16>(x, y);
  lo = pack<Type::kFp16>(x - low<Type::kFp16>(hi), y - high<Type::kFp16>(hi));
}

// An accumulator, rounded, to a tile of 16-bit numbers in shared memory, from (row, chunk of 8 columns) on: times
// `factor`, or pairs as they are, lo lo_bytes further.
template <Type kType, int kRow, int kTiles, int kColumns>
__device__ __forceinline__ void store_fragment(u32 tile, const float (&x)[kTiles][kColumns][4], const Thread& thread,
                                               int row = 0, int chunk = 0, float factor = 1, u32 lo_bytes = 0) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 at = tile + Tile<kRow>::offset(row + i * 16 + thread.g + half * 8, chunk + j) + thread.t * 4;
        if constexpr (is_pair(kType)) {
          u32 hi;
          u32 lo;
          split(x[i][j][2 * half], x[i][j][2 * half + 1], hi, lo);
          store_shared(at, hi);
          store_shared(at + lo_bytes, lo);
        } else {
          store_shared(at, pack<kType>(x[i][j][2 * half] * factor, x[i][j][2 * half + 1] * factor));
        }
      }
    }
  }
}

// As operand(), hi and lo.
template <int kColumns>
__device__ __forceinline__ void operand_pair(u32 (&hi)[4], u32 (&lo)[4], const float (&s)[kColumns][4], int kk) {
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    split(s[2 * kk + (x >> 1)][(x & 1) * 2], s[2 * kk + (x >> 1)][(x & 1) * 2 + 1], hi[x], lo[x]);
  }
}

}  // namespace fovea::cuda
