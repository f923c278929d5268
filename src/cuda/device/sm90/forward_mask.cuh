// SPDX-License-Identifier: Apache-2.0
//
// sm90_mask: bools into bits as the threads of sm90_forward take them. Of 128 keys lane t of a quad meets columns
// 8 j + 2 t and 8 j + 2 t + 1, j = 0 ... 15: their bits are word t of the four, in this order.
//
//     16 keys a lane, 16 bytes at once where possible | four numbers of 4 bits, one a word | eight lanes make 128 keys
#pragma once

#include "cuda/device/args.h"
#include "cuda/device/around/prepare_args.h"
#include "cuda/device/ptx/sm80.cuh"
#include "cuda/device/spec.h"

namespace fovea::cuda {

inline constexpr int kSm90MaskThreads = 256;

// Bytes that are not 0 become 1, the others 0.
__device__ __forceinline__ u32 ones_of(u32 bytes) {
  return (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) >> 7 & 0x01010101u;
}

template <AroundSpec S>
__global__ void __launch_bounds__(kSm90MaskThreads) sm90_mask(const __grid_constant__ MaskArgs args) {
  begin_kernel<S.arch>();
  constexpr int kKeys = 16;   // of a lane
  constexpr int kWords = 16;  // of a warp, from 512 keys
  constexpr int kAtOnce = 4;  // such pieces of a row that a warp has under way
  const Box& box = args.box;
  const int lane = threadIdx.x & 31;
  const u64 parts = (u64(box.width) + kAtOnce * kWords - 1) / (kAtOnce * kWords);  // of a row
  const u64 total = u64(box.all_rows()) * parts;
  const math::Strides& strides = args.from.strides;
  const bool by_vectors =
      strides.col == 1 &&
      ((u64(args.from.data) | u64(strides.row) | u64(strides.head) | u64(strides.batch2) | u64(strides.batch1)) & 15) ==
          0;
  // Numbers of 32 bits where they do: division takes long.
  const auto split = [&](u64 number, u64 by, u64& rest) {
    const u64 quotient = total >> 32 == 0 ? u64(u32(number) / u32(by)) : number / by;
    rest = number - quotient * by;
    return quotient;
  };
  for (u64 n = (u64(blockIdx.x) * kSm90MaskThreads + threadIdx.x) / 32; n < total;
       n += u64(gridDim.x) * (kSm90MaskThreads / 32)) {
    u64 part, row, head, batch2;
    const u64 all = split(n, parts, part);
    const u64 batch1 = split(split(split(all, u64(box.rows), row), u64(box.heads), head), u64(box.batch2), batch2);
    const unsigned char* const data = static_cast<const unsigned char*>(args.from.data) + i64(batch1) * strides.batch1 +
                                      i64(batch2) * strides.batch2 + i64(head) * strides.head + i64(row) * strides.row;
    const i64 first_word = i64(part) * (kAtOnce * kWords);
    u32* const to = args.to + i64(all) * box.width + first_word;
    const i64 words = box.width - first_word;
    uint4 ones[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const i64 key = first_word * 32 + i * (32 * kKeys) + lane * kKeys;
      ones[i] = uint4{0, 0, 0, 0};
      if (by_vectors && key + kKeys <= args.columns) {
        ones[i] = __ldg(reinterpret_cast<const uint4*>(data + key));
      } else if (key < args.columns) {
        u32 bytes[4] = {};
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
          if (key + j < args.columns && data[(key + j) * strides.col] != 0) {
            bytes[j / 4] |= 1u << j % 4 * 8;
          }
        }
        ones[i] = uint4{bytes[0], bytes[1], bytes[2], bytes[3]};
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // Keys c and c + 8 of a lane: bits 0 and 2 of byte c, then bits 0 ... 3 of bytes 0 and 2 (t = 0, 1; 2, 3).
      u32 low = ones_of(ones[i].x) | ones_of(ones[i].z) << 2;
      u32 high = ones_of(ones[i].y) | ones_of(ones[i].w) << 2;
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
      const int at = i * kWords + lane / 8 * 4 + place;
      if (lane % 2 == 0 && at < words) {
        to[at] = word;
      }
    }
  }
}

}  // namespace fovea::cuda
