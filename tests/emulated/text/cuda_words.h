// SPDX-License-Identifier: Apache-2.0
//
// CUDA's own words, for the text of a kernel that runs on the CPU: included before it. The attributes mean nothing
// here. Only what the kernels use is there: a word that is missing is an error of the compiler.
#pragma once

#include <cmath>

#include "machine.h"

#define __CUDACC_RTC__ 1
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// Arrays that a kernel declares: its blocks run one at a time, see launch() in driver.cpp.
#define __shared__ static

#define threadIdx (emulated::thread_index())
#define blockIdx (emulated::block_index())
#define gridDim (emulated::grid_size())
#define blockDim (emulated::block_size())

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct int4 {
  int x, y, z, w;
};

template <class A, class B>
constexpr auto min(A a, B b) {
  using T = decltype(a + b);
  return T(a) < T(b) ? T(a) : T(b);
}
template <class A, class B>
constexpr auto max(A a, B b) {
  using T = decltype(a + b);
  return T(a) > T(b) ? T(a) : T(b);
}

inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return unsigned(((emulated::u64(high) << 32) | low) >> (by % 32));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
  const emulated::u64 both = (emulated::u64(b) << 32) | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= unsigned(both >> 8 * ((which >> 4 * i) & 7) & 0xff) << 8 * i;
  }
  return result;
}
// Of each byte: 1 where they differ.
inline unsigned __vsetne4(unsigned a, unsigned b) {
  unsigned result = 0;
  for (int shift = 0; shift < 32; shift += 8) {
    result |= ((a ^ b) >> shift & 0xff) != 0 ? 1u << shift : 0;
  }
  return result;
}
template <class T>
T __ldg(const T* from) {
  return *from;
}

// ---- threads ----

inline void __syncthreads() { emulated::sync(0, blockDim.x); }
inline int __syncthreads_or(int mine) { return emulated::sync_or(mine); }
inline void __syncwarp(unsigned = ~0u) { emulated::warp_sync(); }
inline void __nanosleep(unsigned) { emulated::pause(); }

template <class T>
T shuffled(T x, int from) {
  static_assert(sizeof(T) % 4 == 0);
  unsigned words[sizeof(T) / 4];
  std::memcpy(words, &x, sizeof x);
  for (unsigned& word : words) {
    word = emulated::shuffle(word, from);
  }
  std::memcpy(&x, words, sizeof x);
  return x;
}
inline int lane_of_thread() { return int(threadIdx.x % 32); }
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  return shuffled(x, lane);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int bits) {
  return shuffled(x, lane_of_thread() ^ bits);
}
template <class T>
T __shfl_down_sync(unsigned, T x, int by) {
  return shuffled(x, min(lane_of_thread() + by, 31));
}
inline unsigned __ballot_sync(unsigned, bool mine) { return emulated::ballot(mine); }
inline bool __any_sync(unsigned, bool mine) { return emulated::ballot(mine) != 0; }
inline bool __all_sync(unsigned, bool mine) { return emulated::ballot(mine) == ~0u; }

// Threads run one at a time, so that each of these is one operation as it stands.
template <class T>
T atomicAdd(T* to, T value) {
  const T before = *to;
  *to = before + value;
  return before;
}
template <class T>
T atomicMax(T* to, T value) {
  const T before = *to;
  *to = max(before, value);
  return before;
}
inline unsigned atomicCAS(unsigned* to, unsigned expected, unsigned value) {
  const unsigned before = *to;
  if (before == expected) {
    *to = value;
  }
  return before;
}
