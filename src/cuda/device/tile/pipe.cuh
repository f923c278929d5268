// SPDX-License-Identifier: Apache-2.0
//
// What the warps of a block wait for each other with on Hopper.
//
//   Ring            a ring of buffers: which one is next, and the parity of its barriers
//   Pipe            a ring with its barriers, as a warp that reads has it
//   NamedBarriers   barriers of bar.sync, which have numbers; each kernel lists its own, and no two may share one
//   comes_last      warps of several blocks: whose results are complete
#pragma once

#include "cuda/device/ptx/sm90.cuh"

namespace fovea::cuda {

// Both numbers in one register.
template <int kBuffers>
struct Ring {
  static constexpr int kCount = kBuffers;
  u32 at = 0;
  __device__ __forceinline__ u32 buffer() const { return at >> 1; }
  __device__ __forceinline__ u32 parity() const { return at & 1; }
  __device__ __forceinline__ void next() { at = at >= 2 * kBuffers - 2 ? (at & 1) ^ 1 : at + 2; }
};

// Barriers of a pipe of at most four buffers: 8 bytes each, first those for full, then those for empty.
inline constexpr int kPipeEmpty = 32;

// Its barriers begin kAt bytes behind `barriers`. Without buffers nothing is waited for.
template <int kBuffers, int kAt>
struct Pipe {
  static_assert(kBuffers <= 4);
  u32 barriers;
  bool leader;  // of its warp, for which it releases
  Ring<kBuffers> ring{};

  __device__ __forceinline__ u32 buffer() const { return ring.buffer(); }
  __device__ __forceinline__ void next() { ring.next(); }
  // Until the buffer is full.
  __device__ __forceinline__ void wait() const {
    if constexpr (kBuffers > 0) {
      barrier_wait(barriers + kAt + 8 * ring.buffer(), ring.parity());
    }
  }
  // This warp has read the buffer.
  __device__ __forceinline__ void release() const {
    if constexpr (kBuffers > 0) {
      if (leader) {
        barrier_arrive(barriers + kAt + kPipeEmpty + 8 * ring.buffer());
      }
    }
  }
  // The buffer is not needed. Nothing else keeps the lanes of a warp together: a leader ahead of the others would
  // release what they have not yet seen full.
  __device__ __forceinline__ void skip() {
    wait();
    __syncwarp();
    release();
    next();
  }
};

// Numbers first ... first + count - 1 of the 16 that a block has. Number 0 is that of sync() without arguments.
struct NamedBarriers {
  int first;
  int count = 1;
  constexpr int operator[](int i) const { return first + i; }
  constexpr operator int() const { return first; }
};

// Whether no two of a kernel's barriers have the same number.
template <int kCount>
constexpr bool are_apart(const NamedBarriers (&all)[kCount]) {
  for (int i = 0; i < kCount; ++i) {
    if (all[i].first < 1 || all[i].count < 1 || all[i].first + all[i].count > 16) {
      return false;
    }
    for (int j = 0; j < i; ++j) {
      if (all[i].first < all[j].first + all[j].count && all[j].first < all[i].first + all[i].count) {
        return false;
      }
    }
  }
  return true;
}

// Of `count` warps that come here, each with what it has stored in global memory before: true for the last, which may
// read what all have stored. The counter begins with 0.
__device__ __forceinline__ bool comes_last(u32* counter, int count, int lane) {
  __syncwarp();
  u32 before = 0;
  if (lane == 0) {
    fence_device();
    before = atomicAdd(counter, 1u);
    fence_device();
  }
  before = __shfl_sync(~0u, before, 0);
  __syncwarp();
  return before + 1 == u32(count);
}

}  // namespace fovea::cuda
