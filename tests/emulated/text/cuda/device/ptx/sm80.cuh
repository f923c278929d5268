// SPDX-License-Identifier: Apache-2.0
//
// src/cuda/device/ptx/sm80.cuh for a kernel that runs on the CPU: the same functions, which mean what the instructions
// do. See there.
#pragma once

#include "cuda/device/args.h"
#include "cuda/device/spec.h"
#include "machine.h"
#include "math/scalar.h"

namespace fovea::cuda {

using u16 = unsigned short;

constexpr float kInfinity = math::Limits<float>::infinity();

// ---- addresses, copies, barriers ----

inline u32 block_index() { return emulated::block_index().x; }
inline int opaque(int x) { return x; }
inline u32 shared_address(const void* pointer) { return emulated::shared_address(pointer); }

inline void copy16(u32 to, const void* from, u32 bytes) { emulated::thread_copy(to, from, bytes, 16); }
inline void copy16(u32 to, const void* from) { emulated::thread_copy(to, from, 16, 16); }
inline void copy4(u32 to, const void* from, u32 bytes) { emulated::thread_copy(to, from, bytes, 4); }
inline void copy_commit() { emulated::thread_copy_commit(); }
template <int kPending>
inline void copy_wait() {
  emulated::thread_copy_wait(kPending);
}

inline void sync() { emulated::sync(0, emulated::block_size().x); }
inline void sync(int id, int threads) { emulated::sync(u32(id), u32(threads)); }

template <int kArch>
inline void begin_kernel() {}  // a launch begins when the one before has ended

// ---- shared memory ----

inline void ldmatrix(u32 (&r)[4], u32 address) { emulated::load_matrices(r, address, false); }
inline void ldmatrix_trans(u32 (&r)[4], u32 address) { emulated::load_matrices(r, address, true); }

inline void store_shared(u32 address, u32 value) { emulated::write_shared(address, &value, 4); }
inline void store_shared(u32 address, float value) { emulated::write_shared(address, &value, 4); }
inline void store_shared(u32 address, float2 value) { emulated::write_shared(address, &value, 8); }
inline void store_shared(u32 address, uint4 value) { emulated::write_shared(address, &value, 16); }
template <class T>
inline T load_shared_as(u32 address) {
  T value;
  emulated::read_shared(address, &value, sizeof value);
  return value;
}
inline float load_shared(u32 address) { return load_shared_as<float>(address); }
inline u32 load_shared_word(u32 address) { return load_shared_as<u32>(address); }
inline u16 load_shared_half(u32 address) { return load_shared_as<u16>(address); }
inline float2 load_shared2(u32 address) { return load_shared_as<float2>(address); }
inline uint4 load_shared4(u32 address) { return load_shared_as<uint4>(address); }

// ---- arithmetic ----

inline u32 uniform(u32 x) { return emulated::any_bits(x); }
inline float ex2(float x) { return ::exp2f(x); }
inline float lg2(float x) { return ::log2f(x); }
inline float rcp(float x) { return 1 / x; }

template <Type kType>
inline u32 pack(float x, float y) {
  if constexpr (kType == Type::kBf16) {
    return emulated::to_bf16(x) | u32(emulated::to_bf16(y)) << 16;
  } else {
    return emulated::to_fp16(x) | u32(emulated::to_fp16(y)) << 16;
  }
}
template <Type kType>
inline float low(u32 v) {
  return kType == Type::kBf16 ? emulated::of_bf16(u16(v)) : emulated::of_fp16(u16(v));
}
template <Type kType>
inline float high(u32 v) {
  return low<kType>(v >> 16);
}

template <Type kType>
inline void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emulated::mma(d, a, b0, b1, kType == Type::kBf16);
}

// ---- global memory ----

inline void check_alignment(const void* address) {
  if (reinterpret_cast<unsigned long>(address) % 16 != 0) {
    emulated::fail("an access to global memory at %p is not aligned", address);
  }
}
inline void store_global(void* to, uint4 v) {
  check_alignment(to);
  *static_cast<uint4*>(to) = v;
}
inline float4 load_summed(const float* from) {
  check_alignment(from);
  return *reinterpret_cast<const float4*>(from);
}
template <int kArch>
inline void reduce4(float* to, const float (&v)[4]) {
  if constexpr (kArch >= 90) {
    check_alignment(to);
  }
  for (int e = 0; e < 4; ++e) {
    to[e] += v[e];
  }
}

}  // namespace fovea::cuda
