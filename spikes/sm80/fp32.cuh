// SPDX-License-Identifier: Apache-2.0
// fp32 by three fp16 products. A number x, scaled by a power of two, is hi + lo with hi = fp16(x), lo = fp16(x - hi): 22 bits, the same as two
// TF32 numbers (10 + 1 bits of mantissa each), but fp16 products run at twice the rate of TF32's, and ldmatrix (transposed too) serves 16-bit data
// alone. x y = hi hi + hi lo + lo hi. The split is made once per tensor into a workspace as large as the tensor, not at each fragment.
// What fp16 lacks is range: each (b, h) of q, k, v, do is scaled so that its largest number is near 2^14; numbers down to 2^-29 of that keep all
// 22 bits, smaller ones an absolute error of 2^-39 of the largest. P travels as 2^12 p; dS scaled by a bound, |dS| <= 2 max|do_i| max|v_j|.
// Tensor cores truncate when they add, so that no chain is longer than one step: each step's product starts at 0 and is added to the sum with
// rounding.
namespace fovea {

__device__ __forceinline__ float power(int e) { return __int_as_float((min(max(e, -126), 127) + 127) << 23); }
__device__ __forceinline__ int exponent(u32 bits) { return (int)(bits >> 23) - 127; }
// 2^e with which a tensor is multiplied, from its largest magnitude.
__device__ __forceinline__ int scale_of(u32 bits) { return bits == 0 ? 0 : min(max(14 - exponent(bits), -100), 100); }

__device__ __forceinline__ void split(float x, float y, u32& hi, u32& lo) {
    hi = pack<Type::fp16>(x, y);
    lo = pack<Type::fp16>(x - low<Type::fp16>(hi), y - high<Type::fp16>(hi));
}

// blockIdx.y: 0 q, 1 k, 2 v, 3 do. One warp a row, 8 rows a CTA pass, 64 rows a CTA.
template <Spec S> __global__ void __launch_bounds__(256) fp32_measure(const __grid_constant__ Args a) {
    const int which = blockIdx.y, heads = which == 1 || which == 2 ? a.heads_k : a.heads, rows = which == 1 || which == 2 ? a.sk : a.sq;
    const int tiles = (rows + 63) / 64, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 bh = blockIdx.x / tiles, b = bh / heads, h = bh % heads;
    if (bh >= (u32)(a.batch * heads)) return;
    const Strides s = which == 0 ? a.qs : which == 1 ? a.ks : which == 2 ? a.vs : a.dos;
    const float* x = (const float*)(which == 0 ? a.q : which == 1 ? a.k : which == 2 ? a.v : a.d_o) + b * s.b + h * s.h;
    float top = 0, norm = 0;
    for (int i = 0; i < 8; ++i) {
        const int row = blockIdx.x % tiles * 64 + i * 8 + warp;
        if (row >= rows) break;
        float square = 0;
        for (int d = lane; d < S.d; d += 32) {
            float y = fabsf(x[row * s.s + d]);
            if (y < infinity) top = fmaxf(top, y), square += y * y;
        }
        for (int m = 16; m > 0; m /= 2) square += __shfl_xor_sync(~0u, square, m);
        norm = fmaxf(norm, square);
    }
    for (int m = 16; m > 0; m /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
    if (lane == 0) {
        const int stride = a.batch * a.heads;
        atomicMax(a.sizes + which * stride + bh, __float_as_uint(top));
        if (which >= 2) atomicMax(a.sizes + (which + 2) * stride + bh, __float_as_uint(sqrtf(norm) * 1.0001f));
    }
}

// Two elements a thread, high and low parts of a row beside each other.
template <Spec S> __global__ void __launch_bounds__(256) fp32_split(const __grid_constant__ Args a) {
    const int which = blockIdx.y, heads = which == 1 || which == 2 ? a.heads_k : a.heads, rows = which == 1 || which == 2 ? a.sk : a.sq;
    const i64 n = (i64)blockIdx.x * 256 + threadIdx.x;
    const int d = n % (S.d / 4) * 4, row = n / (S.d / 4) % rows;
    const i64 bh = n / (S.d / 4) / rows;
    if (bh >= (i64)a.batch * heads) return;
    const Strides s = which == 0 ? a.qs : which == 1 ? a.ks : which == 2 ? a.vs : a.dos;
    const float* x = (const float*)(which == 0 ? a.q : which == 1 ? a.k : which == 2 ? a.v : a.d_o) + bh / heads * s.b + bh % heads * s.h + row * s.s + d;
    const float f = power(scale_of(a.sizes[which * a.batch * a.heads + bh]));
    float4 v = *(const float4*)x;
    uint2 hi, lo;
    split(v.x * f, v.y * f, hi.x, lo.x);
    split(v.z * f, v.w * f, hi.y, lo.y);
    u16* to = (which == 0 ? a.qx : which == 1 ? a.kx : which == 2 ? a.vx : a.dox) + (bh * rows + row) * (2 * S.d) + d;
    *(uint2*)to = hi;
    *(uint2*)(to + S.d) = lo;
}

template <Spec S> __global__ void __launch_bounds__(S.warps * 32, S.ctas) fp32_forward(const __grid_constant__ Args a) {
    constexpr int D = S.d, T = S.tiles, N = S.step, threads = S.warps * 32, M = S.warps * T * 16, K = D / 16;
    constexpr u32 q_bytes = M * D * 4, kv_bytes = N * D * 4, stage_bytes = 2 * kv_bytes;
    constexpr Type F = Type::fp16;
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 sq = shared_address(memory), stage0 = sq + q_bytes;
    const int thread = threadIdx.x, lane = thread & 31, warp = __shfl_sync(~0u, thread >> 5, 0), g = lane >> 2, t = lane & 3;
    const int tiles = (a.sq + M - 1) / M, shift = a.sk - a.sq;
    const u32 bh = blockIdx.x / tiles;
    const int tile = S.causal ? tiles - 1 - (int)(blockIdx.x % tiles) : (int)(blockIdx.x % tiles);
    const int b = bh / a.heads, h = bh % a.heads, bhk = b * a.heads_k + h / (a.heads / a.heads_k), m0 = tile * M, row0 = m0 + warp * T * 16;
    const u16 *k = a.kx + (i64)bhk * a.sk * 2 * D, *v = a.vx + (i64)bhk * a.sk * 2 * D;
    const int keys = S.causal ? min(a.sk, m0 + M + shift) : a.sk, keys_warp = S.causal ? min(a.sk, row0 + T * 16 + shift) : a.sk;
    const int keys_full = S.causal ? min(a.sk, row0 + shift + 1) : a.sk, steps = keys <= 0 ? 0 : (keys + N - 1) / N;
    const u32* sizes = a.sizes;
    const int stride = a.batch * a.heads;
    const float cn = a.scale * power(-scale_of(sizes[bh])) * power(-scale_of(sizes[stride + bhk])), c = cn * log2e, fv = power(-scale_of(sizes[2 * stride + bhk]));

    auto load = [&](int n) {
        u32 to = stage0 + n % S.stages * stage_bytes;
        load_tile<N, 2 * D, threads>(to, k + (i64)n * N * 2 * D, 2 * D, a.sk - n * N, thread);
        load_tile<N, 2 * D, threads>(to + kv_bytes, v + (i64)n * N * 2 * D, 2 * D, a.sk - n * N, thread);
    };
    load_tile<M, 2 * D, threads>(sq, a.qx + ((i64)bh * a.sq + m0) * 2 * D, 2 * D, a.sq - m0, thread);
    if (steps > 0) load(0);
    copy_commit();

    float o[T][D / 8][4] = {}, top[T][2], sum[T][2] = {};
    for (int i = 0; i < T; ++i) top[i][0] = top[i][1] = -infinity;
    const typename Tile<2 * D>::Lane lanes(0, lane), lanes_k(0, lane, true);
    const u32 my_q = sq + warp * T * 16 * D * 4;

    for (int n = 0; n < steps; ++n) {
        copy_wait<0>();
        sync();
        if (n + 1 < steps) load(n + 1);
        copy_commit();
        const int n0 = n * N;
        if (n0 >= keys_warp) continue;
        const u32 sk = stage0 + n % S.stages * stage_bytes, sv = sk + kv_bytes;
        float s[T][N / 8][4] = {};
        // The small products first, over all of the row: what a truncating sum loses is relative to its size so far.
#pragma unroll
        for (int kk = 0; kk < K; ++kk) {
            u32 qh[T][4], ql[T][4];
            for (int i = 0; i < T; ++i) ldmatrix(qh[i], my_q + lanes.at(i * 16, kk)), ldmatrix(ql[i], my_q + lanes.at(i * 16, K + kk));
#pragma unroll
            for (int j = 0; j < N / 16; ++j) {
                u32 kh[4], kl[4];
                ldmatrix(kh, sk + lanes_k.at(j * 16, kk)), ldmatrix(kl, sk + lanes_k.at(j * 16, K + kk));
                for (int i = 0; i < T; ++i) mma<F>(s[i][2 * j], ql[i], kh[0], kh[1]), mma<F>(s[i][2 * j + 1], ql[i], kh[2], kh[3]);
                for (int i = 0; i < T; ++i) mma<F>(s[i][2 * j], qh[i], kl[0], kl[1]), mma<F>(s[i][2 * j + 1], qh[i], kl[2], kl[3]);
            }
        }
#pragma unroll
        for (int kk = 0; kk < K; ++kk) {
            u32 qh[T][4];
            for (int i = 0; i < T; ++i) ldmatrix(qh[i], my_q + lanes.at(i * 16, kk));
#pragma unroll
            for (int j = 0; j < N / 16; ++j) {
                u32 kh[4];
                ldmatrix(kh, sk + lanes_k.at(j * 16, kk));
                for (int i = 0; i < T; ++i) mma<F>(s[i][2 * j], qh[i], kh[0], kh[1]), mma<F>(s[i][2 * j + 1], qh[i], kh[2], kh[3]);
            }
        }
        if (n0 + N > keys_full) {
#pragma unroll
            for (int i = 0; i < T; ++i)
                for (int x = 0; x < 2; ++x) {
                    int row = row0 + i * 16 + g + x * 8, end = (S.causal ? min(a.sk, row + shift + 1) : a.sk) - n0 - t * 2;
                    for (int j = 0; j < N / 8; ++j)
                        for (int e = 0; e < 2; ++e)
                            if (j * 8 + e >= end) s[i][j][2 * x + e] = -infinity;
                }
        }
        float factor[T][2];
#pragma unroll
        for (int i = 0; i < T; ++i)
            for (int x = 0; x < 2; ++x) {
                float y = s[i][0][2 * x];
                for (int j = 0; j < N / 8; ++j) y = fmaxf(y, fmaxf(s[i][j][2 * x], s[i][j][2 * x + 1]));
                y = fmaxf(y, __shfl_xor_sync(~0u, y, 1));
                y = fmaxf(y, __shfl_xor_sync(~0u, y, 2));
                y = fmaxf(y, top[i][x]);
                const float base = y == -infinity ? 0.f : y;
                factor[i][x] = ex2((top[i][x] - base) * c);
                top[i][x] = y;
                sum[i][x] *= factor[i][x];
                // Subtracted before scaling: large scores keep their bits.
                for (int j = 0; j < N / 8; ++j)
                    for (int e = 0; e < 2; ++e) sum[i][x] += s[i][j][2 * x + e] = ex2(fmaf(s[i][j][2 * x + e] - base, c, 12.f));
            }
        float pv[T][D / 8][4] = {};
        u32 ph[N / 16][T][4];
#pragma unroll
        for (int kk = 0; kk < N / 16; ++kk) {
            u32 pl[T][4];
            for (int i = 0; i < T; ++i)
                for (int x = 0; x < 4; ++x) split(s[i][2 * kk + (x >> 1)][(x & 1) * 2], s[i][2 * kk + (x >> 1)][(x & 1) * 2 + 1], ph[kk][i][x], pl[i][x]);
#pragma unroll
            for (int j = 0; j < K; ++j) {
                u32 vh[4], vl[4];
                ldmatrix_trans(vh, sv + lanes.at(kk * 16, j)), ldmatrix_trans(vl, sv + lanes.at(kk * 16, K + j));
                for (int i = 0; i < T; ++i) mma<F>(pv[i][2 * j], pl[i], vh[0], vh[1]), mma<F>(pv[i][2 * j + 1], pl[i], vh[2], vh[3]);
                for (int i = 0; i < T; ++i) mma<F>(pv[i][2 * j], ph[kk][i], vl[0], vl[1]), mma<F>(pv[i][2 * j + 1], ph[kk][i], vl[2], vl[3]);
            }
        }
#pragma unroll
        for (int kk = 0; kk < N / 16; ++kk)
#pragma unroll
            for (int j = 0; j < K; ++j) {
                u32 vh[4];
                ldmatrix_trans(vh, sv + lanes.at(kk * 16, j));
                for (int i = 0; i < T; ++i) mma<F>(pv[i][2 * j], ph[kk][i], vh[0], vh[1]), mma<F>(pv[i][2 * j + 1], ph[kk][i], vh[2], vh[3]);
            }
#pragma unroll
        for (int i = 0; i < T; ++i)
            for (int j = 0; j < D / 8; ++j)
                for (int e = 0; e < 4; ++e) o[i][j][e] = fmaf(o[i][j][e], factor[i][e >> 1], pv[i][j][e]);
    }
    copy_wait<0>();
#pragma unroll
    for (int i = 0; i < T; ++i)
        for (int x = 0; x < 2; ++x) {
            float l = sum[i][x];
            l += __shfl_xor_sync(~0u, l, 1);
            l += __shfl_xor_sync(~0u, l, 2);
            const int row = row0 + i * 16 + g + x * 8;
            if (row >= a.sq) continue;
            if (t == 0) a.lse[(i64)bh * a.sq + row] = l == 0.f ? -infinity : fmaf(top[i][x], cn, (lg2(l) - 12.f) * ln2);
            const float inverse = l > 0.f ? fv / l : l;
            float* out = (float*)a.out + b * a.outs.b + h * a.outs.h + row * a.outs.s + t * 2;
            for (int j = 0; j < D / 8; ++j) *(float2*)(out + j * 8) = {o[i][j][2 * x] * inverse, o[i][j][2 * x + 1] * inverse};
        }
}

template <Spec S> __global__ void __launch_bounds__(256) fp32_prepare(const __grid_constant__ Args a) {
    constexpr int rows = 8;
    const int lane = threadIdx.x & 31, tiles = a.sq_pad / rows;
    const u32 bh = blockIdx.x / tiles, b = bh / a.heads, h = bh % a.heads;
    const int row = blockIdx.x % tiles * rows + (threadIdx.x >> 5);
    float delta = 0;
    for (int i = lane; i < S.d; i += 32) {
        if (row < a.sq) delta += ((const float*)a.o)[b * a.os.b + h * a.os.h + row * a.os.s + i] * ((const float*)a.d_o)[b * a.dos.b + h * a.dos.h + row * a.dos.s + i];
        a.dq_sum[((i64)bh * a.sq_pad + row) * S.d + i] = 0;
    }
    for (int x = 16; x > 0; x /= 2) delta += __shfl_xor_sync(~0u, delta, x);
    if (lane == 0) {
        float lse = row < a.sq ? a.lse[(i64)bh * a.sq + row] : infinity;
        a.lse_pad[(i64)bh * a.sq_pad + row] = lse == -infinity ? infinity : lse;
        a.delta_pad[(i64)bh * a.sq_pad + row] = delta;
    }
}

template <Spec S> __global__ void __launch_bounds__(256) fp32_convert(const __grid_constant__ Args a) {
    const i64 n = (i64)blockIdx.x * 256 + threadIdx.x, total = (i64)a.batch * a.heads * a.sq * (S.d / 2);
    if (n >= total) return;
    const int d = n % (S.d / 2) * 2, row = n / (S.d / 2) % a.sq;
    const i64 bh = n / (S.d / 2) / a.sq;
    float2 v = *(const float2*)(a.dq_sum + bh * a.sq_pad * S.d + ((row >> 4) * (S.d / 8) + d / 8) * 128 + (row & 7) * 16 + d % 8 / 2 * 4 + (row >> 3 & 1) * 2);
    *(float2*)((float*)a.dq + bh / a.heads * a.dqs.b + bh % a.heads * a.dqs.h + row * a.dqs.s + d) = v;
}

// As `backward`, each product three times.
template <Spec S> __global__ void __launch_bounds__(S.warps * 32, S.ctas) fp32_backward(const __grid_constant__ Args a) {
    constexpr int D = S.d, M = S.step, P = S.part, threads = S.warps * 32, N = S.warps * 16, K = D / 16;
    constexpr u32 kv_bytes = N * D * 4, q_bytes = M * D * 4, stage_bytes = 2 * q_bytes + M * 8, ds_bytes = N * M * 2;
    constexpr Type F = Type::fp16;
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 sk = shared_address(memory), sv = sk + kv_bytes, sds = sv + kv_bytes, stage0 = sds + 2 * ds_bytes;
    const int thread = threadIdx.x, lane = thread & 31, warp = __shfl_sync(~0u, thread >> 5, 0), g = lane >> 2, t = lane & 3;
    const int blocks = (a.sk + N - 1) / N, group = a.heads / a.heads_k, shift = a.sk - a.sq;
    const u32 bhk = blockIdx.x / blocks;
    const int block = blockIdx.x % blocks, b = bhk / a.heads_k, hk = bhk % a.heads_k, n0 = block * N, key0 = n0 + warp * 16;
    const int tiles = (a.sq + M - 1) / M, first = S.causal ? min(max(n0 - shift, 0) / M, tiles) : 0, count = tiles - first, steps = count * group;
    const int start = S.causal || count == 0 ? 0 : block * 2 % count, stride = a.batch * a.heads;
    const int ek = scale_of(a.sizes[stride + bhk]), ev = scale_of(a.sizes[2 * stride + bhk]);

    load_tile<N, 2 * D, threads>(sk, a.kx + ((i64)bhk * a.sk + n0) * 2 * D, 2 * D, a.sk - n0, thread);
    load_tile<N, 2 * D, threads>(sv, a.vx + ((i64)bhk * a.sk + n0) * 2 * D, 2 * D, a.sk - n0, thread);
    struct Place { int h, i; };
    auto next = [&](Place& x) {
        if (++x.i == count) x.i = 0;
        if (x.i == start) ++x.h;
    };
    auto load = [&](int n, Place x) {
        const i64 bh = b * a.heads + x.h, m0 = (first + x.i) * M;
        u32 to = stage0 + n % S.stages * stage_bytes;
        load_tile<M, 2 * D, threads>(to, a.qx + (bh * a.sq + m0) * 2 * D, 2 * D, a.sq - m0, thread);
        load_tile<M, 2 * D, threads>(to + q_bytes, a.dox + (bh * a.sq + m0) * 2 * D, 2 * D, a.sq - m0, thread);
        const i64 row = bh * a.sq_pad + m0;
        if (thread < M / 4) copy16(to + 2 * q_bytes + thread * 16, a.lse_pad + row + thread * 4);
        else if (thread < M / 2) copy16(to + 2 * q_bytes + thread * 16, a.delta_pad + row + thread * 4 - M);
    };
    Place now{hk * group, start}, after = now;
    if (steps > 0) load(0, now);
    copy_commit();
    float dk[D / 8][4] = {}, dv[D / 8][4] = {};
    const typename Tile<2 * D>::Lane lanes(0, lane), lanes_q(0, lane, true);
    const u32 my_k = sk + warp * 16 * D * 4, my_v = sv + warp * 16 * D * 4;

    for (int n = 0; n < steps; ++n, now = after) {
        copy_wait<0>();
        sync();
        next(after);
        if (n + 1 < steps) load(n + 1, after);
        copy_commit();
        const int h = now.h, m0 = (first + now.i) * M;
        const i64 bh = b * a.heads + h;
        const int eq = scale_of(a.sizes[bh]), eo = scale_of(a.sizes[3 * stride + bh]);
        // dS <= 2 |do| |v|, to 2^15
        const int eb = min(max(14 - 2 - exponent(a.sizes[4 * stride + bhk]) - exponent(a.sizes[5 * stride + bh]), -100), 100);
        const float c = a.scale * power(-eq) * power(-ek), cp = power(-eo - ev + eb - 12), cd = power(eb - 12), ck = a.scale * power(-eq) * power(-eb), cv = power(-eo - 12);
        const u32 sq = stage0 + n % S.stages * stage_bytes, sdo = sq + q_bytes, slse = sdo + q_bytes, sdelta = slse + M * 4;
#pragma unroll
        for (int part = 0; part < M; part += P) {
            float s[P / 8][4] = {}, dp[P / 8][4] = {};
#pragma unroll
            for (int kk = 0; kk < K; ++kk) {
                u32 ah[4], al[4];
                ldmatrix(ah, my_k + lanes.at(0, kk)), ldmatrix(al, my_k + lanes.at(0, K + kk));
                for (int j = 0; j < P / 16; ++j) {
                    u32 bhi[4], blo[4];
                    ldmatrix(bhi, sq + lanes_q.at(part + j * 16, kk)), ldmatrix(blo, sq + lanes_q.at(part + j * 16, K + kk));
                    mma<F>(s[2 * j], al, bhi[0], bhi[1]), mma<F>(s[2 * j + 1], al, bhi[2], bhi[3]);
                    mma<F>(s[2 * j], ah, blo[0], blo[1]), mma<F>(s[2 * j + 1], ah, blo[2], blo[3]);
                }
                ldmatrix(ah, my_v + lanes.at(0, kk)), ldmatrix(al, my_v + lanes.at(0, K + kk));
                for (int j = 0; j < P / 16; ++j) {
                    u32 bhi[4], blo[4];
                    ldmatrix(bhi, sdo + lanes_q.at(part + j * 16, kk)), ldmatrix(blo, sdo + lanes_q.at(part + j * 16, K + kk));
                    mma<F>(dp[2 * j], al, bhi[0], bhi[1]), mma<F>(dp[2 * j + 1], al, bhi[2], bhi[3]);
                    mma<F>(dp[2 * j], ah, blo[0], blo[1]), mma<F>(dp[2 * j + 1], ah, blo[2], blo[3]);
                }
            }
#pragma unroll
            for (int kk = 0; kk < K; ++kk) {
                u32 ak[4], av[4];
                ldmatrix(ak, my_k + lanes.at(0, kk)), ldmatrix(av, my_v + lanes.at(0, kk));
                for (int j = 0; j < P / 16; ++j) {
                    u32 bq[4], bo[4];
                    ldmatrix(bq, sq + lanes_q.at(part + j * 16, kk)), ldmatrix(bo, sdo + lanes_q.at(part + j * 16, kk));
                    mma<F>(s[2 * j], ak, bq[0], bq[1]), mma<F>(s[2 * j + 1], ak, bq[2], bq[3]);
                    mma<F>(dp[2 * j], av, bo[0], bo[1]), mma<F>(dp[2 * j + 1], av, bo[2], bo[3]);
                }
            }
            if (n0 + N > a.sk || (S.causal && m0 + part + shift < key0 + 15)) {
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    int key = key0 + g + x * 8, begin = key >= a.sk ? 1 << 30 : S.causal ? key - shift - m0 - part - t * 2 : -1;
                    for (int j = 0; j < P / 8; ++j)
                        for (int e = 0; e < 2; ++e)
                            if (j * 8 + e < begin) s[j][2 * x + e] = -infinity;
                }
            }
            u32 ph[P / 16][4], pl[P / 16][4], dh[P / 16][4], dl[P / 16][4];
#pragma unroll
            for (int j = 0; j < P / 8; ++j) {
                float2 lse = load_shared2(slse + (part + j * 8 + t * 2) * 4), delta = load_shared2(sdelta + (part + j * 8 + t * 2) * 4);
                float p[4], d[4];
                for (int e = 0; e < 4; ++e) {
                    p[e] = ex2(fmaf(fmaf(s[j][e], c, -(e & 1 ? lse.y : lse.x)), log2e, 12.f));  // natural units, subtracted before scaling
                    d[e] = p[e] * fmaf(dp[j][e], cp, -(e & 1 ? delta.y : delta.x) * cd);
                }
                for (int x = 0; x < 2; ++x) {
                    split(p[2 * x], p[2 * x + 1], ph[j / 2][(j & 1) * 2 + x], pl[j / 2][(j & 1) * 2 + x]);
                    split(d[2 * x], d[2 * x + 1], dh[j / 2][(j & 1) * 2 + x], dl[j / 2][(j & 1) * 2 + x]);
                    const u32 at = sds + Tile<M>::offset(warp * 16 + g + x * 8, part / 8 + j) + t * 4;
                    store_shared(at, dh[j / 2][(j & 1) * 2 + x]);
                    store_shared(at + ds_bytes, dl[j / 2][(j & 1) * 2 + x]);
                }
            }
#pragma unroll
            for (int j = 0; j < K; ++j) {
                float v0[4] = {}, v1[4] = {}, k0[4] = {}, k1[4] = {};
#pragma unroll
                for (int kk = 0; kk < P / 16; ++kk) {
                    u32 bhi[4], blo[4];
                    ldmatrix_trans(bhi, sdo + lanes.at(part + kk * 16, j)), ldmatrix_trans(blo, sdo + lanes.at(part + kk * 16, K + j));
                    mma<F>(v0, pl[kk], bhi[0], bhi[1]), mma<F>(v1, pl[kk], bhi[2], bhi[3]);
                    mma<F>(v0, ph[kk], blo[0], blo[1]), mma<F>(v1, ph[kk], blo[2], blo[3]);
                    mma<F>(v0, ph[kk], bhi[0], bhi[1]), mma<F>(v1, ph[kk], bhi[2], bhi[3]);
                    ldmatrix_trans(bhi, sq + lanes.at(part + kk * 16, j)), ldmatrix_trans(blo, sq + lanes.at(part + kk * 16, K + j));
                    mma<F>(k0, dl[kk], bhi[0], bhi[1]), mma<F>(k1, dl[kk], bhi[2], bhi[3]);
                    mma<F>(k0, dh[kk], blo[0], blo[1]), mma<F>(k1, dh[kk], blo[2], blo[3]);
                    mma<F>(k0, dh[kk], bhi[0], bhi[1]), mma<F>(k1, dh[kk], bhi[2], bhi[3]);
                }
                for (int e = 0; e < 4; ++e) {
                    dv[2 * j][e] = fmaf(v0[e], cv, dv[2 * j][e]), dv[2 * j + 1][e] = fmaf(v1[e], cv, dv[2 * j + 1][e]);
                    dk[2 * j][e] = fmaf(k0[e], ck, dk[2 * j][e]), dk[2 * j + 1][e] = fmaf(k1[e], ck, dk[2 * j + 1][e]);
                }
            }
        }
        sync();
        // dQ = dS K
        constexpr int WQ = S.split_q, WD = S.warps / WQ, R = M / WQ / 16, C = K / WD;
        static_assert(R >= 1 && C >= 1 && K % WD == 0);
        const int wq = warp % WQ, wd = warp / WQ;
        const float cq = a.scale * power(-ek) * power(-eb);
        float* to = a.dq_sum + (bh * a.sq_pad + m0) * D + (wq * R * (D / 8) + wd * C * 2) * 128 + lane * 4;
        float dq[R][2 * C][4] = {};
#pragma unroll
        for (int kk = 0; kk < N / 16; ++kk) {
            u32 ah[R][4], al[R][4];
            for (int i = 0; i < R; ++i) {
                const u32 at = sds + Tile<M>::offset(kk * 16 + ((lane & 7) | (lane >> 4) << 3), (wq * R + i) * 2 + (lane >> 3 & 1));
                ldmatrix_trans(ah[i], at), ldmatrix_trans(al[i], at + ds_bytes);
            }
            for (int j = 0; j < C; ++j) {
                u32 bhi[4], blo[4];
                ldmatrix_trans(bhi, sk + Tile<2 * D>::offset(kk * 16 + (lane & 15), (wd * C + j) * 2 + (lane >> 4)));
                ldmatrix_trans(blo, sk + Tile<2 * D>::offset(kk * 16 + (lane & 15), (K + wd * C + j) * 2 + (lane >> 4)));
                for (int i = 0; i < R; ++i) mma<F>(dq[i][2 * j], al[i], bhi[0], bhi[1]), mma<F>(dq[i][2 * j + 1], al[i], bhi[2], bhi[3]);
                for (int i = 0; i < R; ++i) mma<F>(dq[i][2 * j], ah[i], blo[0], blo[1]), mma<F>(dq[i][2 * j + 1], ah[i], blo[2], blo[3]);
                for (int i = 0; i < R; ++i) mma<F>(dq[i][2 * j], ah[i], bhi[0], bhi[1]), mma<F>(dq[i][2 * j + 1], ah[i], bhi[2], bhi[3]);
            }
        }
#pragma unroll
        for (int i = 0; i < R; ++i)
            for (int j = 0; j < 2 * C; ++j) {
                for (int e = 0; e < 4; ++e) dq[i][j][e] *= cq;
                reduce4<S.arch>(to + (i * (D / 8) + j) * 128, dq[i][j]);
            }
    }
    copy_wait<0>();
#pragma unroll
    for (int j = 0; j < D / 8; ++j)
        for (int x = 0; x < 2; ++x) {
            const int key = key0 + g + x * 8;
            if (key >= a.sk) continue;
            *(float2*)((float*)a.dk + b * a.dks.b + hk * a.dks.h + key * a.dks.s + j * 8 + t * 2) = {dk[j][2 * x], dk[j][2 * x + 1]};
            *(float2*)((float*)a.dv + b * a.dvs.b + hk * a.dvs.h + key * a.dvs.s + j * 8 + t * 2) = {dv[j][2 * x], dv[j][2 * x + 1]};
        }
}

}  // namespace fovea
