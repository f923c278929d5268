// SPDX-License-Identifier: Apache-2.0
//
// The generic kernels' matrix products on 16 x 16 blocks. Numbers of 16 bits are multiplied once. fp32 stands as a pair
// [hi | lo] of fp16 (tile/tile.cuh) and takes three products, hi lo and lo hi before hi hi, since what a truncating sum
// loses is relative to its size so far.
//
// Operands in shared memory are rows of a Tile whose columns run along the row; for pairs the row is twice as long,
// lo behind hi.
//
//   add_rows_by_rows      acc += A B^T      A, B: rows along the dimension that is summed over
//   add_columns           acc += A B        A in registers, B: rows are what is summed over
#pragma once

#include "cuda/device/tile/tile.cuh"

namespace fovea::cuda {

// Addresses for transposed loads of kBlocks blocks of 16 columns, the first of which is known at run time only.
template <int kColumns, int kBlocks>
struct BlockLane {
  using Layout = Tile<kColumns>;
  static constexpr bool kWhole = kBlocks * 2 % Layout::kWidth == 0;  // blocks begin where the exchange begins anew
  u32 base[kWhole ? Layout::kWidth / 2 : kBlocks];

  __device__ __forceinline__ BlockLane(int first_block, int lane) {
#pragma unroll
    for (int j = 0; j < (kWhole ? Layout::kWidth / 2 : kBlocks); ++j) {
      base[j] = Layout::offset(lane & 15, (first_block + j) * 2 + (lane >> 4));
    }
  }
  __device__ __forceinline__ u32 at(int row, int block) const {
    if constexpr (kWhole) {
      constexpr int kRound = Layout::kWidth / 2;
      return base[block % kRound] + row * Layout::kRowBytes + block / kRound * (Layout::kWidth * 16);
    } else {
      return base[block] + row * Layout::kRowBytes;
    }
  }
};

// The same in rows of kColumns numbers that may be pairs: blocks from kBlocks on are the lo parts of the first ones.
template <Type kType, int kColumns, int kBlocks>
struct ColumnLane {
  BlockLane<row_of_tile(kType, kColumns), kBlocks> hi, lo;

  __device__ __forceinline__ ColumnLane(int first_block, int lane)
      : hi(first_block, lane), lo(first_block + kColumns / 16, lane) {}
  __device__ __forceinline__ u32 at(int row, int block) const {
    return block < kBlocks ? hi.at(row, block) : lo.at(row, block < kBlocks ? 0 : block - kBlocks);
  }
};

// Addresses in a tile of kRows rows, or for pairs in two: lo behind hi.
template <int kColumns, int kRows>
struct HalfLane {
  typename Tile<kColumns>::Lane lane;

  __device__ __forceinline__ HalfLane(int index, bool columns_first = false) : lane(0, index, columns_first) {}
  __device__ __forceinline__ u32 at(int row, int block) const {
    constexpr int kBlocks = kColumns / 16;
    return block < kBlocks ? lane.at(row, block) : lane.at(row, block - kBlocks) + kRows * kColumns * 2;
  }
};

// An A operand of one row tile of 16 x 16: hi, and lo for pairs.
template <Type kType>
struct Operand {
  u32 hi[4];
  u32 lo[is_pair(kType) ? 4 : 1];
};

// Steps along a dimension of kSteps that are written out: all of them, or four at a time (and then what is left) where
// a compiler that sees more would keep too much in registers and take too long.
// Lane::at(row, step + 4 n) is 128 n bytes further than Lane::at(row, step).
template <Type kType, int kSteps>
inline constexpr int kUnrolled = kSteps > (is_pair(kType) ? 4 : 16) ? 4 : kSteps;

// step(bytes, kk) for each of kSteps steps: kk is known, what comes to its addresses is not.
template <Type kType, int kSteps, class Step>
__device__ __forceinline__ void for_each_step(const Step& step) {
  constexpr int kInner = kUnrolled<kType, kSteps>;
  constexpr int kWhole = kSteps / kInner * kInner;
#pragma unroll 1
  for (int k0 = 0; k0 < kWhole; k0 += kInner) {
#pragma unroll
    for (int kk = 0; kk < kInner; ++kk) {
      step(u32(k0) * 32, kk);
    }
  }
#pragma unroll
  for (int kk = kWhole; kk < kSteps; ++kk) {
    step(0, kk);
  }
}

// acc[i][j] += A[rows 16 i ...] . B[rows 8 j ...], over 16 columns: block kk (of hi). A in registers.
template <Type kType, int kRows, int kColumns, class LaneB>
__device__ __forceinline__ void add_block(float (&acc)[kRows][kColumns][4], const u32 (&a)[kRows][4], u32 b,
                                          const LaneB& lanes_b, int kk) {
#pragma unroll
  for (int j = 0; j < kColumns / 2; ++j) {
    u32 bh[4];
    ldmatrix(bh, b + lanes_b.at(j * 16, kk));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      mma<kType>(acc[i][2 * j], a[i], bh[0], bh[1]);
      mma<kType>(acc[i][2 * j + 1], a[i], bh[2], bh[3]);
    }
  }
}
template <Type kType, int kRows, int kColumns, class LaneA, class LaneB>
__device__ __forceinline__ void add_step(float (&acc)[kRows][kColumns][4], u32 a, const LaneA& lanes_a, u32 b,
                                         const LaneB& lanes_b, int kk) {
  u32 ah[kRows][4];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    ldmatrix(ah[i], a + lanes_a.at(i * 16, kk));
  }
  add_block<kType>(acc, ah, b, lanes_b, kk);
}

// The same over kDim columns. `a`, `b`: where the tiles' first rows lie;
// lanes_a: rows first, lanes_b: columns first, both built for address 0.
template <Type kType, int kDim, int kRows, int kColumns, class LaneA, class LaneB>
__device__ __forceinline__ void add_rows_by_rows(float (&acc)[kRows][kColumns][4], u32 a, const LaneA& lanes_a, u32 b,
                                                 const LaneB& lanes_b) {
  constexpr int K = kDim / 16;
  static_assert(kColumns % 2 == 0);
  for_each_step<kType, K>([&](u32 bytes, int kk) {
    if constexpr (is_pair(kType)) {
      // A fresh sum for every block of 16, which is then added with rounding: the tensor core truncates.
      u32 ah[kRows][4];
      u32 al[kRows][4];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        ldmatrix(ah[i], a + bytes + lanes_a.at(i * 16, kk));
        ldmatrix(al[i], a + bytes + lanes_a.at(i * 16, K + kk));
      }
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j) {
        u32 bh[4];
        u32 bl[4];
        ldmatrix(bh, b + bytes + lanes_b.at(j * 16, kk));
        ldmatrix(bl, b + bytes + lanes_b.at(j * 16, K + kk));
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          float sum[2][4] = {};
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            mma<kType>(sum[x], al[i], bh[2 * x], bh[2 * x + 1]);
            mma<kType>(sum[x], ah[i], bl[2 * x], bl[2 * x + 1]);
            mma<kType>(sum[x], ah[i], bh[2 * x], bh[2 * x + 1]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              acc[i][2 * j + x][e] += sum[x][e];
            }
          }
        }
      }
    } else {
      add_step<kType>(acc, a + bytes, lanes_a, b + bytes, lanes_b, kk);
    }
  });
}

// The same for one column tile of 8: the fragments of two steps along the dimension come with one ldmatrix.
template <Type kType, int kDim, int kRows, class LaneA>
__device__ __forceinline__ void add_rows_by_8_rows(float (&acc)[kRows][1][4], u32 a, const LaneA& lanes_a, u32 b,
                                                   int row_b, int lane) {
  constexpr int K = kDim / 16;
  constexpr int kInner = kUnrolled<kType, K>;
  static_assert(!is_pair(kType) && kInner % 2 == 0 && K % kInner == 0);
#pragma unroll 1
  for (int k0 = 0; k0 < K; k0 += kInner) {
#pragma unroll
    for (int kk = 0; kk < kInner; kk += 2) {
      u32 bh[4];
      ldmatrix(bh, b + k0 * 32 + Tile<kDim>::offset(row_b + (lane & 7), kk * 2 + (lane >> 3)));
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          u32 ah[4];
          ldmatrix(ah, a + k0 * 32 + lanes_a.at(i * 16, kk + x));
          mma<kType>(acc[i][0], ah, bh[2 * x], bh[2 * x + 1]);
        }
      }
    }
  }
}

// acc[i][2 j, 2 j + 1] (+)= sum over kk of A[i][kk] B[rows 16 kk ..., column block j]; address(kk, block) is this
// lane's place in B, block in 16 columns from the tile's first. Pairs: a fresh sum, multiplied by `factor` and added
// with rounding; the lo half lies `lo_block` blocks further.
template <Type kType, int kRows, int kColumns, int kSteps, class Address, class Load>
__device__ __forceinline__ void add_columns(float (&acc)[kRows][kColumns][4], const Load& load_a,
                                            const Address& address, int lo_block = 0, float factor = 1) {
  static_assert(kColumns % 2 == 0);
  if constexpr (is_pair(kType)) {
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) {
      float sum[kRows][2][4] = {};
      u32 bh[kSteps][4];
#pragma unroll
      for (int kk = 0; kk < kSteps; ++kk) {
        u32 bl[4];
        ldmatrix_trans(bh[kk], address(kk, j));
        ldmatrix_trans(bl, address(kk, lo_block + j));
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const Operand<kType> a = load_a(i, kk);
          mma<kType>(sum[i][0], a.lo, bh[kk][0], bh[kk][1]);
          mma<kType>(sum[i][1], a.lo, bh[kk][2], bh[kk][3]);
          mma<kType>(sum[i][0], a.hi, bl[0], bl[1]);
          mma<kType>(sum[i][1], a.hi, bl[2], bl[3]);
        }
      }
#pragma unroll
      for (int kk = 0; kk < kSteps; ++kk) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const Operand<kType> a = load_a(i, kk);
          mma<kType>(sum[i][0], a.hi, bh[kk][0], bh[kk][1]);
          mma<kType>(sum[i][1], a.hi, bh[kk][2], bh[kk][3]);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          acc[i][2 * j][e] = fmaf(sum[i][0][e], factor, acc[i][2 * j][e]);
          acc[i][2 * j + 1][e] = fmaf(sum[i][1][e], factor, acc[i][2 * j + 1][e]);
        }
      }
    }
  } else {
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      Operand<kType> a[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        a[i] = load_a(i, kk);
      }
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j) {
        u32 b[4];
        ldmatrix_trans(b, address(kk, j));
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          mma<kType>(acc[i][2 * j], a[i].hi, b[0], b[1]);
          mma<kType>(acc[i][2 * j + 1], a[i].hi, b[2], b[3]);
        }
      }
    }
  }
}

}  // namespace fovea::cuda
