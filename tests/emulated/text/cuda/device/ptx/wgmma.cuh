// SPDX-License-Identifier: Apache-2.0
//
// src/cuda/device/ptx/wgmma.cuh for a kernel that runs on the CPU. See there. Descriptors are those of the hardware:
// matrices.cpp reads them as it does.
#pragma once

#include "cuda/device/ptx/sm80.cuh"

namespace fovea::cuda {

inline void wgmma_fence() { emulated::wgmma_fence(); }
inline void wgmma_commit() { emulated::wgmma_commit(); }
template <int kPending>
inline void wgmma_wait() {
  emulated::wgmma_wait(kPending);
}
template <int kCount>
inline void pin(float (&)[kCount]) {
  asm volatile("" ::: "memory");
}

constexpr u32 descriptor_high(int row_bytes) {
  return u32(row_bytes * 8 / 16) | (row_bytes == 128 ? 1u : row_bytes == 64 ? 2u : 3u) << 30;
}
inline u32 descriptor_low(u32 address, u32 panel_bytes) { return (address & 0x3ffff) >> 4 | panel_bytes >> 4 << 16; }
inline u64 descriptor(u32 low, u32 high) { return u64(high) << 32 | low; }

template <Type kType, bool kRowsInside = false, bool kColumns = false, int kCount>
inline void wgmma_shared(float (&d)[kCount], u64 a, u64 b, int accumulate) {
  emulated::wgmma({d, nullptr, a, b, 2 * kCount, accumulate != 0, kRowsInside, kColumns, kType == Type::kBf16});
}
template <Type kType, bool kRowsInside = true, int kCount>
inline void wgmma_registers(float (&d)[kCount], const u32* a, u64 b, int accumulate = 1) {
  emulated::wgmma({d, a, 0, b, 2 * kCount, accumulate != 0, kRowsInside, false, kType == Type::kBf16});
}

}  // namespace fovea::cuda
