// SPDX-License-Identifier: Apache-2.0
//
// Wrappers of the PTX instructions that the generic kernels (compute capability 8.0 and later) are made of, one each,
// and nothing more. Named are the instruction and its section in the PTX ISA manual. NVRTC compiles this text as it
// stands: there is no header but our own. Reads and writes of shared memory are volatile, so that their order stays,
// and barriers alone clobber memory. tests/gpu/test_device.py has a test of each.
#pragma once

#include "cuda/device/args.h"
#include "cuda/device/spec.h"
#include "math/scalar.h"

namespace fovea::cuda {

using u16 = unsigned short;

constexpr float kInfinity = math::Limits<float>::infinity();

// ---- addresses, copies, barriers ----

// %ctaid.x (Special Registers): the block's number. Volatile: what is made from it after a loop is made again instead
// of staying in registers through the loop.
__device__ __forceinline__ u32 block_index() {
  u32 index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// No instruction: hides from the compiler where a value comes from. What is rarely computed from it is then computed
// where it is used, and not hoisted before a loop, where it would take registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// cvta.to.shared (Data Movement: cvta): a pointer into shared memory as the 32-bit address that the rest takes.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
  u32 address;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(address) : "l"(pointer));
  return address;
}

// cp.async.cg (Data Movement: cp.async): 16 bytes from global to shared memory, past L1. The first `bytes` are read,
// the rest becomes zero.
__device__ __forceinline__ void copy16(u32 to, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

// cp.async.ca: 4 bytes, zero where `bytes` is 0.
__device__ __forceinline__ void copy4(u32 to, const void* from, u32 bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

// cp.async.commit_group, cp.async.wait_group (Data Movement): copies are waited for in groups; all but the
// newest kPending of this thread's groups have arrived.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// bar.sync (Parallel Synchronization: bar): all threads of the block, or `threads` of them at barrier `id`.
__device__ __forceinline__ void sync() { asm volatile("bar.sync 0;" ::: "memory"); }
__device__ __forceinline__ void sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// griddepcontrol.wait, griddepcontrol.launch_dependents (Parallel Synchronization: griddepcontrol), from 9.0 on: what a
// kernel does first. It may have been started before the one before it has ended; here it waits until that has, and its
// writes are seen. Then the next may be started, which waits in turn. Nothing where kernels are launched as usual.
template <int kArch>
__device__ __forceinline__ void begin_kernel() {
  if constexpr (kArch >= 90) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
}

// ---- shared memory ----

// ldmatrix (Warp-level Matrix Load: ldmatrix): four 8 x 8 matrices of 16 bits; lane l gives the address of row l % 8 of
// matrix l / 8 and gets elements 2 (l % 4), +1 of row l / 4 of each.
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// ld.shared, st.shared (Data Movement: ld, st).
__device__ __forceinline__ void store_shared(u32 address, u32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value));
}
__device__ __forceinline__ void store_shared(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value));
}
__device__ __forceinline__ void store_shared(u32 address, float2 value) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(value.x), "f"(value.y));
}
__device__ __forceinline__ void store_shared(u32 address, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w));
}
__device__ __forceinline__ float load_shared(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}
__device__ __forceinline__ u32 load_shared_word(u32 address) {
  u32 value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}
__device__ __forceinline__ u16 load_shared_half(u32 address) {
  u16 value;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(value) : "r"(address));
  return value;
}
__device__ __forceinline__ float2 load_shared2(u32 address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address));
  return value;
}
__device__ __forceinline__ uint4 load_shared4(u32 address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}

// ---- arithmetic ----

// redux.sync.or (Parallel Synchronization: redux.sync; of the operands' bits, all the same): a value that all lanes
// share, in a uniform register.
__device__ __forceinline__ u32 uniform(u32 x) {
  u32 y;
  asm("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

// ex2.approx.ftz (Floating Point: ex2): 2^x, two units in the last place; -inf gives 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lg2.approx.ftz (Floating Point: lg2).
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx.ftz (Floating Point: rcp): 1 / x, one unit in the last place.
__device__ __forceinline__ float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// cvt.rn (Data Movement: cvt): two floats as a pair of 16-bit values, x in the low half. fp32 travels as fp16.
template <Type kType>
__device__ __forceinline__ u32 pack(float x, float y) {
  u32 r;
  if constexpr (kType == Type::kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  }
  return r;
}
// The halves of such a pair as floats.
template <Type kType>
__device__ __forceinline__ float low(u32 v) {
  if constexpr (kType == Type::kBf16) {
    return __uint_as_float(v << 16);
  } else {
    float r;
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a; }" : "=f"(r) : "r"(v));
    return r;
  }
}
template <Type kType>
__device__ __forceinline__ float high(u32 v) {
  if constexpr (kType == Type::kBf16) {
    return __uint_as_float(v & 0xffff0000u);
  } else {
    float r;
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b; }" : "=f"(r) : "r"(v));
    return r;
  }
}

// mma.sync.m16n8k16 (Warp-level Matrix Multiply-Accumulate: mma): d += a b. With g = lane / 4, t = lane % 4:
//   a: four pairs, rows g, g + 8, g, g + 8 and columns 2t, 2t, 2t + 8, 2t + 8
//   b: two pairs, rows 2t, 2t + 8 and column g
//   d: (g, 2t) (g, 2t + 1) (g + 8, 2t) (g + 8, 2t + 1)
// The tensor core adds with truncation: long chains of fp32 accuracy are cut and added outside.
template <Type kType>
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kType == Type::kBf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// ---- global memory ----

// st.global.v4 (Data Movement: st).
__device__ __forceinline__ void store_global(void* to, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// ld.global.cg: past L1, what other blocks have added up in L2.
__device__ __forceinline__ float4 load_summed(const float* from) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

// red.global.add (Parallel Synchronization: red): four neighbouring floats added in L2: one instruction from 9.0 on,
// four before.
template <int kArch>
__device__ __forceinline__ void reduce4(float* to, const float (&v)[4]) {
  if constexpr (kArch >= 90) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]),
                 "f"(v[3])
                 : "memory");
  } else {
    for (int e = 0; e < 4; ++e) {
      asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to + e), "f"(v[e]) : "memory");
    }
  }
}

}  // namespace fovea::cuda
