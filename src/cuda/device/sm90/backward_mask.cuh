// SPDX-License-Identifier: Apache-2.0
//
// sm90_backward_mask: a mask's bits (prepare_mask: words of 32 keys) in the order of the accumulators of sm90_backward,
// S^T of 16 keys a warp. Of 64 queries and 16 keys lane (g, t) meets queries 8 n + 2 t + e and keys g + 8 r: bit
// 4 n + 2 r + e of its word. 32 words lie side by side, then the next 16 keys, then the next 64 queries.
//
// A warp makes two times 32 words from 64 words. What does not exist is masked.
#pragma once

#include "cuda/device/around/prepare_args.h"
#include "cuda/device/ptx/sm80.cuh"
#include "cuda/device/spec.h"

namespace fovea::cuda {

inline constexpr int kSm90BackwardMaskThreads = 256;

template <AroundSpec S>
__global__ void __launch_bounds__(kSm90BackwardMaskThreads)
    sm90_backward_mask(const __grid_constant__ MaskTilesArgs args) {
  begin_kernel<S.arch>();
  const Box& box = args.box;  // of the words that are read
  const u32 width = u32(box.width);
  const u32 tiles = (u32(box.rows) + 127) / 128 * 2;  // of 64 queries: steps may have 128
  const u64 total = u64(box.planes()) * tiles * width;
  const int lane = threadIdx.x & 31;
  const int g = lane / 4;
  const int t = lane % 4;
  for (u64 n = (u64(blockIdx.x) * kSm90BackwardMaskThreads + threadIdx.x) / 32; n < total;
       n += u64(gridDim.x) * (kSm90BackwardMaskThreads / 32)) {
    // Numbers of 32 bits where they do: division takes long.
    const u64 above = total >> 32 == 0 ? u64(u32(n) / width) : n / width;
    const u32 column = u32(n - above * width);
    const u64 plane = total >> 32 == 0 ? u64(u32(above) / tiles) : above / tiles;
    const u32 tile = u32(above - plane * tiles);
    const u32* const from = args.from + plane * u64(box.rows) * width + column;
    u32 rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 row = tile * 64 + i * 32 + lane;
      rows[i] = row < u32(box.rows) ? __ldg(from + u64(row) * width) : 0;
    }
    u32 words[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const u32 bits = __shfl_sync(~0u, rows[i / 4], 8 * (i % 4) + 2 * t + e) >> g;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 two = bits >> 16 * half & 0x101;
          words[half] |= ((two | two >> 6) & 5) << (4 * i + e);
        }
      }
    }
    u32* const to = args.to + (above * width + column) * 64 + lane;
    to[0] = words[0];
    to[32] = words[1];
  }
}

}  // namespace fovea::cuda
