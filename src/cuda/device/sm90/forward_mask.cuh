// SPDX-License-Identifier: Apache-2.0
//
// sm90_mask: bools into bits as the threads of sm90_forward take them. Of 128 keys lane t of a quad meets columns
// 8 j + 2 t and 8 j + 2 t + 1, j = 0 ... 15: their bits are word t of the four, in this order.
//
//     16 keys a lane, 16 bytes at once where possible | four numbers of 4 bits, one a word | eight lanes make 128 keys
#pragma once

#include "cuda/device/around/prepare.cuh"

namespace fovea::cuda {

// Bytes that are not 0 become 1, the others 0.
__device__ __forceinline__ u32 ones_of(u32 bytes) {
  return (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) >> 7 & 0x01010101u;
}

template <AroundSpec S>
__global__ void __launch_bounds__(kPrepareThreads) sm90_mask(const __grid_constant__ MaskArgs args) {
  begin_kernel<S.arch>();
  const int lane = threadIdx.x & 31;
  for_each_bools(args, [&](const uint4& bytes, i64 row, i64 first) {
    // Keys c and c + 8 of a lane: bits 0 and 2 of byte c, then bits 0 ... 3 of bytes 0 and 2 (t = 0, 1; 2, 3).
    u32 low = ones_of(bytes.x) | ones_of(bytes.z) << 2;
    u32 high = ones_of(bytes.y) | ones_of(bytes.w) << 2;
    low |= low >> 7;
    high |= high >> 7;
    // Byte t is what this lane has of word t.
    u32 mine = (low & 0xf) | (low >> 8 & 0xf00) | (high & 0xf) << 16 | (high >> 16 & 0xf) << 24;
    mine |= __shfl_down_sync(~0u, mine, 1) << 4;  // of even lanes: 32 keys
    // Four even lanes have the four bytes of each of four words: each takes a word.
    const int place = lane / 2 % 4;
    u32 word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u32 other = __shfl_sync(~0u, mine, (lane & 24) | 2 * j);
      word |= (other >> 8 * place & 0xff) << 8 * j;
    }
    const i64 at = first + lane / 8 * 4 + place;
    if (lane % 2 == 0 && at < args.box.width) {
      args.to[row * args.box.width + at] = word;
    }
  });
}

}  // namespace fovea::cuda
