// SPDX-License-Identifier: Apache-2.0
//
// The one matrix product that everything is made of: C (+)= A B, all in tiles of this library's own making.
//
//     B and C have rows of vectors; their leading dimensions are multiples of a vector.
//     A is read an element at a time, broadcast to a vector: by rows, a(i, k) = a[i * lda + k]  (S, dP, O, dQ)
//     or by columns, a(i, k) = a[k * lda + i]  (dV = P^T dO, dK = dS^T Q).
//
// A block of C stays in registers for the whole depth. 32 registers hold 12 rows of 2 vectors, 16 hold 4 rows of
// 3, with SSE4, where a product needs a register before it is added, 4 rows of 2. On Zen 4 every shape from 8 x 2 to 4
// x 4 reaches the same speed, packed panels or not (the adds and multiplies are the limit, not the loads), so B is used
// as it lies and 12 x 2 is taken for processors with twice the units.
//
// C is of the operands' type T or, where they are words of several numbers, of their products' (isa/dpbf16.h).
//
// What C has is added at the end of the depth, so that rounding errors grow with the depth and the number of products
// apart, not with all terms of a long sum. Terms that are 0 (hidden keys before a row's first) change no bit.
//
// Note: rows are rounded up to 4 and columns to a vector. Buffers are padded accordingly.
#pragma once

#include "cpu/isa/simd.h"

namespace fovea::cpu::FOVEA_ISA {

inline constexpr bool kManyRegisters = HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM_A64;
inline constexpr int kBlockRows = kManyRegisters ? 12 : 4;
inline constexpr int kBlockVectors = kManyRegisters || HWY_TARGET == HWY_SSE4 ? 2 : 3;

enum class Lhs { kByRows, kByColumns };

template <class T>
struct Operand {
  const T* data;
  i64 stride;  // the leading dimension

  HWY_INLINE Operand from_row(i64 row) const { return {data + row * stride, stride}; }
};

template <Lhs kLhs, int kRows, int kVectors, class T, class Sum>
HWY_NOINLINE void gemm_block(i64 depth, Operand<T> a, Operand<T> b, Sum* c, i64 ldc, bool accumulate) {
  constexpr i64 kLanes = lanes<T>();
  Simd<Sum> sum[kRows][kVectors];
  FOVEA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    FOVEA_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      sum[i][v] = Simd<Sum>(Sum(0));
    }
  }
  const i64 lda = a.stride;
  const T* quads[kRows / 4];  // a pointer to every fourth row, so that addresses need few registers
  FOVEA_UNROLL
  for (int q = 0; q < kRows / 4; ++q) {
    quads[q] = a.data + (kLhs == Lhs::kByRows ? 4 * q * lda : 4 * q);
  }
  const T* row_b = b.data;
  for (i64 k = 0; k < depth; ++k) {
    Simd<T> vectors[kVectors];
    FOVEA_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      vectors[v] = Simd<T>::load(row_b + v * kLanes);
    }
    row_b += b.stride;
    FOVEA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Simd<T> factor(quads[i / 4][kLhs == Lhs::kByRows ? (i % 4) * lda + k : k * lda + i % 4]);
      FOVEA_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sum[i][v] = fma(factor, vectors[v], sum[i][v]);
      }
    }
  }
  FOVEA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    FOVEA_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      Sum* to = c + i * ldc + v * kLanes;
      (accumulate ? Simd<Sum>::load(to) + sum[i][v] : sum[i][v]).store(to);
    }
  }
}

// All columns of a strip of kRows rows.
template <Lhs kLhs, int kRows, class T, class Sum>
void gemm_strip(i64 cols, i64 depth, Operand<T> a, Operand<T> b, Sum* c, i64 ldc, bool accumulate) {
  constexpr i64 kLanes = lanes<T>();
  constexpr i64 kWidth = kBlockVectors * kLanes;
  // One vector at the end would load more than it multiplies, and its few sums would wait for one another: three
  // vectors are not two and one, four are not three and one but twice two.
  constexpr i64 kEnd = (kManyRegisters ? 3 : kBlockVectors == 3 ? 4 : 0) * kLanes;
  const i64 wide = kEnd > 0 && cols % kWidth == kLanes && cols > kLanes ? cols - kEnd : cols;
  i64 col = 0;
  for (; col + kWidth <= wide; col += kWidth) {
    gemm_block<kLhs, kRows, kBlockVectors, T>(depth, a, {b.data + col, b.stride}, c + col, ldc, accumulate);
  }
  if (kManyRegisters && wide < cols) {
    constexpr int kUpper = math::min(kRows, 8);
    gemm_block<kLhs, kUpper, 3, T>(depth, a, {b.data + col, b.stride}, c + col, ldc, accumulate);
    if constexpr (kRows > kUpper) {
      const Operand<T> lower{a.data + (kLhs == Lhs::kByRows ? kUpper * a.stride : kUpper), a.stride};
      gemm_block<kLhs, kRows - kUpper, 3, T>(depth, lower, {b.data + col, b.stride}, c + kUpper * ldc + col, ldc,
                                             accumulate);
    }
    return;
  }
  for (; kBlockVectors > 2 && col + 2 * kLanes <= cols; col += 2 * kLanes) {
    gemm_block<kLhs, kRows, 2, T>(depth, a, {b.data + col, b.stride}, c + col, ldc, accumulate);
  }
  if (col < cols) {
    gemm_block<kLhs, kRows, 1, T>(depth, a, {b.data + col, b.stride}, c + col, ldc, accumulate);
  }
}

// rows <= kBlockRows.
template <Lhs kLhs, class T, class Sum>
void gemm_rows(i64 rows, i64 cols, i64 depth, Operand<T> a, Operand<T> b, Sum* c, i64 ldc, bool accumulate) {
  if (kBlockRows >= 12 && rows > 8) {
    gemm_strip<kLhs, 12, T>(cols, depth, a, b, c, ldc, accumulate);
  } else if (kBlockRows >= 12 && rows > 4) {
    gemm_strip<kLhs, 8, T>(cols, depth, a, b, c, ldc, accumulate);
  } else {
    gemm_strip<kLhs, 4, T>(cols, depth, a, b, c, ldc, accumulate);
  }
}

}  // namespace fovea::cpu::FOVEA_ISA
