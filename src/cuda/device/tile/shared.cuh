// SPDX-License-Identifier: Apache-2.0
//
// Tiles of 16-bit numbers in shared memory, and their products by wgmma.
//
//   SharedTile      kRows by kColumns numbers in panels of kPanel columns, one panel after the other
//   SharedOperand   a tile as one side of a product. The inner dimension is what the product sums over: it runs along
//                   the tile's columns (Q and K of Q K^T) or along its rows (V of P V).
//   multiply        d = a b^T, over kInner columns or rows of both operands
//   multiply_add    d += a b^T. In either a is a tile, or registers as mma has them.
//
// An operand is the lower word of a descriptor, the only one that moves. So an operand is made once, before a loop, and
// moved to a buffer or a row by one addition.
#pragma once

#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/tile/panels.h"

namespace fovea::cuda {

enum class Inner { kColumns, kRows };

template <Inner kAlong, int kRows, int kPanel>
struct SharedOperand {
  static constexpr Inner kInner = kAlong;
  static constexpr int kRowBytes = kPanel * 2;
  static constexpr int kPanelBytes = kRows * kRowBytes;
  u32 low;  // word of the descriptor; it counts 16 bytes

  // Number i of the 16 columns (rows) that one instruction takes, along the inner dimension.
  __device__ __forceinline__ u64 operator()(int i) const {
    constexpr int kInPanel = kPanel / 16;
    const u32 at =
        kAlong == Inner::kRows ? low + i * kRowBytes : low + i / kInPanel * (kPanelBytes / 16) + i % kInPanel * 2;
    constexpr u32 kHigh = descriptor_high(kRowBytes);
    return descriptor(at, kHigh);
  }
  // From this row on: a multiple of 8, or the swizzle would begin elsewhere.
  __device__ __forceinline__ SharedOperand row(int first) const { return {low + first * (kRowBytes / 16)}; }
  // By so many times 16 bytes.
  __device__ __forceinline__ SharedOperand moved(u32 by) const { return {low + by}; }
  // Number `number` of several tiles, `bytes` from one to the next.
  __device__ __forceinline__ SharedOperand buffer(u32 number, int bytes) const { return {low + number * (bytes / 16)}; }
  // The same tile, one panel wide, with the other inner dimension.
  __device__ __forceinline__ SharedOperand<kAlong == Inner::kRows ? Inner::kColumns : Inner::kRows, kRows, kPanel>
  turned() const {
    return {low};
  }
};

// Two operands with kRows of the inner dimension each, the second behind the first.
template <int kRows, class Each>
struct JoinedOperands {
  static constexpr Inner kInner = Each::kInner;
  Each first, second;
  __device__ __forceinline__ JoinedOperands moved(u32 by) const { return {first.moved(by), second.moved(by)}; }
  __device__ __forceinline__ u64 operator()(int i) const { return i < kRows / 16 ? first(i) : second(i - kRows / 16); }
};

template <int kRows, int kColumns, int kPanel>
struct SharedTile {
  static constexpr int kRowBytes = kPanel * 2;
  static constexpr int kPanels = panels_of(kColumns, kPanel);
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static_assert(kPanel == 16 || kPanel == 32 || kPanel == 64);
  u32 address;

  __device__ __forceinline__ u32 panel(int n) const { return address + n * kPanelBytes; }
  // Its columns are the inner dimension; from row `first` on.
  __device__ __forceinline__ SharedOperand<Inner::kColumns, kRows, kPanel> along_columns(int first = 0) const {
    constexpr int kUnused = 16;  // panels are as far apart as the operand says
    return {descriptor_low(address + first * kRowBytes, kUnused)};
  }
  // Its rows are the inner dimension; from panel `first` on.
  __device__ __forceinline__ SharedOperand<Inner::kRows, kRows, kPanel> along_rows(int first = 0) const {
    return {descriptor_low(panel(first), kPanelBytes)};
  }
};

// The first kHeld times 16 columns of 16 rows of a tile, as an operand in registers. row, half: of this lane, as
// ldmatrix takes them.
template <int kHeld, int kRows, int kPanel, int kRegisters>
__device__ __forceinline__ void hold_rows(u32 (&held)[kRegisters][4], u32 tile, int row, int half) {
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    constexpr int kInPanel = kPanel / 16;
    ldmatrix(held[k], tile + k / kInPanel * (kRows * kPanel * 2) + swizzled<kPanel * 2>(row, k % kInPanel * 2 + half));
  }
}

// Of b, moved by `by` times 16 bytes.
template <Type kType, int kInner, int kCount, class A, class B>
__device__ __forceinline__ void multiply(float (&d)[kCount], const A& a, const B& b, u32 by = 0) {
#pragma unroll
  for (int k = 0; k < kInner / 16; ++k) {
    wgmma_shared<kType, B::kInner == Inner::kRows, A::kInner == Inner::kRows>(d, a(k), b.moved(by)(k), k > 0);
  }
}
// The first kHeld times 16 columns of a are in registers.
template <Type kType, int kInner, int kHeld, int kCount, int kRegisters, class A, class B>
__device__ __forceinline__ void multiply(float (&d)[kCount], const u32 (&held)[kRegisters][4], const A& a, const B& b) {
#pragma unroll
  for (int k = 0; k < kInner / 16; ++k) {
    const u64 right = b(k);
    if (k < kHeld) {
      wgmma_registers<kType, B::kInner == Inner::kRows>(d, held[k < kHeld ? k : 0], right, k > 0);
    } else {
      wgmma_shared<kType, B::kInner == Inner::kRows, A::kInner == Inner::kRows>(d, a(k), right, k > 0);
    }
  }
}

template <Type kType, int kInner, int kCount, class A, class B>
__device__ __forceinline__ void multiply_add(float (&d)[kCount], const A& a, const B& b) {
#pragma unroll
  for (int k = 0; k < kInner / 16; ++k) {
    wgmma_shared<kType, B::kInner == Inner::kRows, A::kInner == Inner::kRows>(d, a(k), b(k), 1);
  }
}
// Of b, moved by `by` times 16 bytes, from number `first` of its 16 rows or columns on.
template <Type kType, int kInner, int kCount, int kWords, class B>
__device__ __forceinline__ void multiply_add(float (&d)[kCount], const u32 (&a)[kWords], const B& b, u32 by = 0,
                                             int first = 0) {
  static_assert(kWords >= kInner / 4);
#pragma unroll
  for (int k = 0; k < kInner / 16; ++k) {
    wgmma_registers<kType, B::kInner == Inner::kRows>(d, a + 4 * k, b.moved(by)(first + k));
  }
}

}  // namespace fovea::cuda
