// SPDX-License-Identifier: Apache-2.0
// Thin wrappers around the PTX instructions that the sm80 kernels use, and the one tile layout they share.
// No header is included: NVRTC compiles this text as it stands.
namespace fovea {

using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;
using i64 = long long;

constexpr float infinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float log2e = 1.4426950408889634f;
constexpr float ln2 = 0.6931471805599453f;

// ---- copies, barriers -------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) {
    u32 a;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
    return a;
}
// cp.async: `bytes` of the 16 are read, the rest is zero.
__device__ __forceinline__ void copy16(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from));
}
__device__ __forceinline__ void copy4(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;"); }
template <int pending> __device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(pending) : "memory"); }
__device__ __forceinline__ void sync() { asm volatile("bar.sync 0;" ::: "memory"); }
__device__ __forceinline__ void sync(int id, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory"); }

// ---- shared memory ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}
__device__ __forceinline__ void ldmatrix_trans(u32 (&r)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}
__device__ __forceinline__ void store_shared(u32 a, u32 v) { asm volatile("st.shared.b32 [%0], %1;" :: "r"(a), "r"(v)); }
__device__ __forceinline__ void store_shared(u32 a, float v) { asm volatile("st.shared.f32 [%0], %1;" :: "r"(a), "f"(v)); }
__device__ __forceinline__ float load_shared(u32 a) { float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a)); return v; }
__device__ __forceinline__ float2 load_shared2(u32 a) { float2 v; asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a)); return v; }
__device__ __forceinline__ uint4 load_shared4(u32 a) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}

// ---- arithmetic -------------------------------------------------------------------------------------------------

// A value that all lanes share, in a uniform register.
__device__ __forceinline__ u32 uniform(u32 x) { u32 y; asm("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x)); return y; }
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float lg2(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

enum class Type : int { bf16, fp16, fp32 };

// Two floats as a pair of 16-bit values, x in the low half.
template <Type T> __device__ __forceinline__ u32 pack(float x, float y) {
    u32 r;
    if constexpr (T == Type::bf16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
    return r;
}
template <Type T> __device__ __forceinline__ float low(u32 v) {
    if constexpr (T == Type::bf16) return __uint_as_float(v << 16);
    float r;
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a; }" : "=f"(r) : "r"(v));
    return r;
}
template <Type T> __device__ __forceinline__ float high(u32 v) {
    if constexpr (T == Type::bf16) return __uint_as_float(v & 0xffff0000u);
    float r;
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b; }" : "=f"(r) : "r"(v));
    return r;
}

// d += a b: 16 x 8 x 16. a: rows g, g+8 / columns 2t, 2t+8; d: (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1), g = lane / 4, t = lane % 4.
template <Type T> __device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (T == Type::bf16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- global memory ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void store_global(void* p, uint4 v) {
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Four neighbouring floats added in L2: one instruction from sm_90 on, four before.
template <int arch> __device__ __forceinline__ void reduce4(float* p, const float (&v)[4]) {
    if constexpr (arch >= 90)
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" :: "l"(p), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
    else
        for (int e = 0; e < 4; ++e) asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" :: "l"(p + e), "f"(v[e]) : "memory");
}

// ---- tiles ------------------------------------------------------------------------------------------------------

// A tile of 16-bit values, [rows][columns], in chunks of 16 bytes. The low bits of the chunk are exchanged by the row so that eight
// rows of one column chunk lie in different banks; the width of the exchange follows from the row length (128, 64 or 32 bytes).
template <int columns> struct Tile {
    static constexpr int chunks = columns / 8, bytes_row = columns * 2;
    static constexpr int width = chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : 2;
    static constexpr int shift = width == 8 ? 0 : width == 4 ? 1 : 2;
    static_assert(columns % 16 == 0);
    static __device__ __forceinline__ u32 offset(u32 row, u32 chunk) { return row * bytes_row + ((chunk ^ (row >> shift & (width - 1))) << 4); }

    // One lane's addresses for ldmatrix.x4 on 16 x 16 blocks. Two orders of the four 8 x 8 matrices, so that the registers come as mma wants
    // them (B is an aligned pair: a wrong order costs two moves an ldmatrix):
    //   rows first:    A = r0 r1 r2 r3 as it is;     B of two column tiles = (r0, r1), (r2, r3) where it is transposed; bias of S
    //   columns first: A where it is transposed;     B of two column tiles as it is
    struct Lane {
        u32 base[width / 2];
        __device__ __forceinline__ Lane(u32 tile, int lane, bool columns_first = false) {
            u32 row = columns_first ? (lane & 7) | (lane >> 4) << 3 : lane & 15, c = columns_first ? lane >> 3 & 1 : lane >> 4;
            u32 x = (row >> shift & (width - 1)) ^ c;
#pragma unroll
            for (int j = 0; j < width / 2; ++j) base[j] = tile + row * bytes_row + ((2 * j ^ x) << 4);
        }
        __device__ __forceinline__ u32 at(int row, int block) const {  // row: a multiple of 16; block: of 16 columns
            return base[block % (width / 2)] + row * bytes_row + block / (width / 2) * (width * 16);
        }
    };
};

// rows x columns from global to shared memory by all threads; rows from `valid` on become zero.
template <int rows, int columns, int threads>
__device__ __forceinline__ void load_tile(u32 tile, const u16* from, i64 stride, int valid, int thread) {
    constexpr int chunks = columns / 8, total = rows * chunks;
    if constexpr (threads % chunks == 0 && total % threads == 0 && (threads / chunks) % 8 == 0) {
        constexpr int step = threads / chunks;
        int row = thread / chunks, chunk = thread % chunks;
        u32 to = tile + Tile<columns>::offset(row, chunk);
        const u16* p = from + (u32)(row * (int)stride + chunk * 8);  // 32 bits: (rows of a pass) * stride stays under 2^31
        const int left = valid - row;
#pragma unroll
        for (int i = 0; i < total / threads; ++i, p += step * stride)
            copy16(to + i * step * columns * 2, i * step < left ? p : from, i * step < left ? 16 : 0);
    } else {
#pragma unroll
        for (int i = 0; i < (total + threads - 1) / threads; ++i) {
            int c = thread + i * threads;
            if (total % threads != 0 && c >= total) break;
            int row = c / chunks, chunk = c % chunks;
            copy16(tile + Tile<columns>::offset(row, chunk), row < valid ? from + row * stride + chunk * 8 : from, row < valid ? 16 : 0);
        }
    }
}

// A tile of the bias: as load_tile, but its rows also end, at `left` columns; rows are readable to a multiple of 8.
template <int rows, int columns, int threads>
__device__ __forceinline__ void load_bias(u32 tile, const u16* from, i64 stride, int valid, int left, int thread) {
    if (left >= columns) return load_tile<rows, columns, threads>(tile, from, stride, valid, thread);
#pragma unroll 1
    for (int c = thread; c < rows * (columns / 8); c += threads) {
        int row = c / (columns / 8), chunk = c % (columns / 8), n = min(left - chunk * 8, 8);
        bool in = row < valid && n > 0;
        copy16(tile + Tile<columns>::offset(row, chunk), in ? from + row * stride + chunk * 8 : from, in ? n * 2 : 0);
    }
}

// ---- dropout (rule `fovea`) -------------------------------------------------------------------------------------

struct Dropout {
    u32 k0, k1, w0, w1;
    __device__ __forceinline__ Dropout() {}
    __device__ Dropout(u64 seed, u64 offset, u64 n) {  // Philox-4x32-10
        u32 c0 = (u32)offset, c1 = (u32)(offset >> 32), c2 = (u32)n, c3 = (u32)(n >> 32) ^ 0x666F7665u, a = (u32)seed, b = (u32)(seed >> 32);
        for (int r = 0; r < 10; ++r) {
            u64 p = (u64)0xD2511F53u * c0, q = (u64)0xCD9E8D57u * c2;
            u32 n0 = (u32)(q >> 32) ^ c1 ^ a, n2 = (u32)(p >> 32) ^ c3 ^ b;
            c0 = n0, c1 = (u32)q, c2 = n2, c3 = (u32)p;
            a += 0x9E3779B9u, b += 0xBB67AE85u;
        }
        k0 = uniform(c0), k1 = uniform(c1), w0 = uniform(c2), w1 = uniform(c3);
    }
    // The 64 bits of rows {i, i + 8} x columns {j, j + 8}; i and j with bit 3 clear. x: row i, y: row i + 8; low half: column j.
    // In two parts: what depends on the row alone, made once, and the rest. column: j' = (j >> 4) * 8 + (j & 7).
    struct Row { u32 high, low; };
    __device__ __forceinline__ Row row(u32 i) const {
        u64 p = (u64)0xD256D193u * (((i >> 4) * 8 + (i & 7)) ^ w0);
        return {(u32)(p >> 32) ^ k0 ^ w1, (u32)p};
    }
    __device__ __forceinline__ uint2 operator()(Row r0, u32 column) const {
        u32 x = r0.high ^ column, y = r0.low;
#pragma unroll
        for (int r = 1; r < 8; ++r) {
            u64 p = (u64)0xD256D193u * x;
            x = (u32)(p >> 32) ^ y ^ ((r & 1 ? k1 : k0) + r * 0x9E3779B9u);
            y = (u32)p;
        }
        return {x, y};
    }
    __device__ __forceinline__ uint2 operator()(u32 i, u32 j) const { return (*this)(row(i), (j >> 4) * 8 + (j & 7)); }
};

}  // namespace fovea
