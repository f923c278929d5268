// SPDX-License-Identifier: Apache-2.0
// Thin wrappers: one PTX instruction each (PTX ISA sections 9.7.*). No header is included, so that NVRTC compiles this text as it stands.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define FOVEA_DEVICE __device__ __forceinline__

struct alignas(64) TensorMap { u8 opaque[128]; };
struct alignas(8) Float2 { float x, y; };
struct alignas(16) U4 { u32 x, y, z, w; };
struct alignas(16) F4 { float x, y, z, w; };

FOVEA_DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// mbarrier
FOVEA_DEVICE void barrier_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count)); }
FOVEA_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
FOVEA_DEVICE void barrier_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
FOVEA_DEVICE void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
FOVEA_DEVICE void barrier_wait(u32 bar, u32 parity) {
  asm volatile("{\n.reg .pred P;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n@P bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(bar), "r"(parity) : "memory");
}
FOVEA_DEVICE void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// TMA and bulk copies
FOVEA_DEVICE void tma_load_4d(u32 to, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], [%2];" ::"r"(to), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
FOVEA_DEVICE void tma_load_3d(u32 to, const TensorMap* map, u32 bar, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5}], [%2];" ::"r"(to), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
FOVEA_DEVICE void bulk_load(u32 to, const void* from, u32 bytes, u32 bar) { asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory"); }
FOVEA_DEVICE void bulk_add(void* to, u32 from, u32 bytes) { asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to), "r"(from), "r"(bytes) : "memory"); }
FOVEA_DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
FOVEA_DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
FOVEA_DEVICE void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
FOVEA_DEVICE void prefetch_map(const TensorMap* m) { asm volatile("prefetch.tensormap [%0];" ::"l"(m) : "memory"); }

// registers and launches
template <int N> FOVEA_DEVICE void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> FOVEA_DEVICE void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
FOVEA_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
FOVEA_DEVICE void wait_primary() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// wgmma
FOVEA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FOVEA_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> FOVEA_DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
template <int R> FOVEA_DEVICE void pin(float (&a)[R]) {
#pragma unroll
  for (int i = 0; i < R; i++) asm volatile("" : "+f"(a[i])::"memory");
}
// Matrix descriptor: leading and stride byte offsets, width of the swizzle (128 or 64 bytes).
FOVEA_DEVICE u64 descriptor(u32 address, u32 leading, u32 stride, u32 width) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(leading >> 4) << 16) | ((u64)(stride >> 4) << 32) | ((u64)(width == 128 ? 1 : 2) << 62);
}

// elementwise and shared memory
FOVEA_DEVICE float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
FOVEA_DEVICE u32 pack_bf16(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
FOVEA_DEVICE float bf16_lo(u32 x) { return __uint_as_float(x << 16); }
FOVEA_DEVICE float bf16_hi(u32 x) { return __uint_as_float(x & 0xffff0000u); }
FOVEA_DEVICE Float2 load_shared_f2(u32 a) { Float2 v; asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a)); return v; }
FOVEA_DEVICE U4 load_shared_u4(u32 a) { U4 v; asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a)); return v; }
FOVEA_DEVICE void store_shared_f1(u32 a, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(x) : "memory"); }
FOVEA_DEVICE void store_shared_f4(u32 a, float x, float y, float z, float w) { asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(a), "f"(x), "f"(y), "f"(z), "f"(w) : "memory"); }
FOVEA_DEVICE void stmatrix_trans(u32 a, const u32* r) { asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory"); }
FOVEA_DEVICE void ldmatrix_trans(u32 a, u32 (&r)[4]) { asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory"); }
FOVEA_DEVICE void ldmatrix(u32 a, u32 (&r)[4]) { asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory"); }

// global memory
FOVEA_DEVICE F4 load_global_cg(const F4* g) { F4 v; asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(g) : "memory"); return v; }
FOVEA_DEVICE void add_global_f4(float* g, float x, float y, float z, float w) { asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(g), "f"(x), "f"(y), "f"(z), "f"(w) : "memory"); }

// Stores columns 0 ... 8 * N - 1 of one row of an accumulator tile as bf16, 16 bytes a lane: the four lanes that hold a row's pairs of
// columns transpose four 8-column blocks among themselves. `row` points at column 0; every lane of the warp must come here.
template <int N>
FOVEA_DEVICE void store_row_bf16(u16* row, const u32 (&v)[N], bool valid) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int g = 0; g < N; g += 4) {
    u32 a = __shfl_xor_sync(~0u, q & 1 ? v[g] : v[g + 1], 1), b = __shfl_xor_sync(~0u, q & 1 ? v[g + 2] : v[g + 3], 1);
    u32 t0 = q & 1 ? a : v[g], t1 = q & 1 ? v[g + 1] : a, t2 = q & 1 ? b : v[g + 2], t3 = q & 1 ? v[g + 3] : b;
    u32 c = __shfl_xor_sync(~0u, q & 2 ? t0 : t2, 2), d = __shfl_xor_sync(~0u, q & 2 ? t1 : t3, 2);
    if (valid) *(U4*)(row + (g + q) * 8) = q & 2 ? U4{c, d, t2, t3} : U4{t0, t1, c, d};
  }
}
