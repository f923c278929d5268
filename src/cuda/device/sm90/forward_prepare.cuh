// SPDX-License-Identifier: Apache-2.0
//
// Masks of keys. Three warps of sm90_forward's copying warpgroup copy nothing: they prepare these ahead of the
// products.
//
//   Sm90Hide                a mask of keys as 16 more columns of K
//   sm90_forward_prepare    one of these warps
//   sm90_forward_constants  tiles that stay as they are
#pragma once

#include "cuda/device/sm90/forward_copy.cuh"
#include "cuda/device/tile/tile.cuh"
#include "math/band.h"

namespace fovea::cuda {

// A mask of keys as 16 more columns of K, whose first is -inf for keys that are hidden. Beside 64 queries whose 16 more
// columns are 1, 0, 0 ... the product hides them.
template <auto S>
struct Sm90Hide {
  static __device__ __forceinline__ u32 number(u32 bf16, u32 fp16) { return S.type == Type::kBf16 ? bf16 : fp16; }

  // words: as sm90_mask writes them.
  static __device__ __forceinline__ void columns(u32 to, const u32* words, int key, int n0) {
    const u32 at = u32(n0 + key);
    const u32 word = __ldg(words + at / 128 * 4 + at % 8 / 2);
    const bool visible = (word >> (at % 128 / 8 * 2 + at % 2) & 1) != 0;
    store_shared(to + swizzled<32>(key, 0), uint4{visible ? 0 : number(0xff80, 0xfc00), 0, 0, 0});
    store_shared(to + swizzled<32>(key, 1), uint4{0, 0, 0, 0});
  }
  static __device__ __forceinline__ void ones(u32 to, int thread) {
    store_shared(to + swizzled<32>(thread / 2, thread % 2),
                 uint4{thread % 2 == 0 ? number(0x3f80, 0x3c00) : 0, 0, 0, 0});
  }
};

// One of kSm90PreparingWarps warps.
template <auto S>
__device__ __forceinline__ void sm90_forward_prepare(const Args& a, u32 base, const volatile Sm90Tile* tiles,
                                                     const Sm90Barriers& barriers, int warp, int lane) {
  constexpr Sm90ForwardSizes kSizes = sm90_forward_sizes(S);
  Ring<S.q_buffers> ring_q;
  Ring<kSm90PreparedBuffers> ring;
  while (true) {
    barrier_wait(barriers.full(barriers.kQ, ring_q.buffer()), ring_q.parity());
    const volatile Sm90Tile& given = tiles[ring_q.buffer()];
    if (given.b < 0) {
      return;
    }
    Sm90Tile tile{};
    tile.head = given.head;
    tile.b1 = given.b1;
    tile.b2 = given.b2;
    const u32* const words = static_cast<const u32*>(a.mask.data) + tile.offset(a.mask.strides, 0);
    const math::Interval<int> steps{given.first_step, given.end_step};
    barrier_arrive(barriers.empty(barriers.kQ, ring_q.buffer()));  // every lane has read
    ring_q.next();
    for (int n = steps.end - 1; n >= steps.begin; --n) {
      barrier_wait(barriers.empty(barriers.kPrepared, ring.buffer()), ring.parity() ^ 1);
#pragma unroll 1
      for (int key = warp * 32 + lane; key < S.step; key += kSm90PreparingWarps * 32) {
        Sm90Hide<S>::columns(base + kSizes.hide_at + ring.buffer() * kSizes.hide, words, key, n * S.step);
      }
      fence_async();
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(barriers.full(barriers.kPrepared, ring.buffer()));
      }
      ring.next();
    }
  }
}

// Tiles that stay as they are: zeros as the first V, ones beside Q for what hides keys.
template <auto S>
__device__ __forceinline__ void sm90_forward_constants(u32 base) {
  constexpr Sm90ForwardSizes kSizes = sm90_forward_sizes(S);
  constexpr bool kPeels = sm90_peels(S);
  constexpr bool kHides = sm90_hides(S);
  constexpr int kPanelV = wide_panel_columns(S.dv);
  if constexpr (!kPeels) {
    for (int i = int(threadIdx.x) * 16; i < 16 * sm90_forward_panels(S.dv) * kPanelV * 2; i += int(blockDim.x) * 16) {
      store_shared(base + kSizes.zeros_at + i, uint4{0, 0, 0, 0});
    }
    fence_async();
  }
  if constexpr (kHides) {
    if (threadIdx.x < 128) {
      Sm90Hide<S>::ones(base + kSizes.ones_at, int(threadIdx.x));
      fence_async();
    }
  }
}

}  // namespace fovea::cuda
