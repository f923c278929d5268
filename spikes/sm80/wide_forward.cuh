// SPDX-License-Identifier: Apache-2.0
// Forward for head dimensions whose O does not fit in the registers of the warps that own its rows (D over 128, up to 512).
// A CTA of 8 warps owns M = 64 queries. The warps form one grid for S (split_q row groups x the rest along the keys) and another for O
// (2 row groups x 4 along the columns); P goes from one to the other through shared memory in 16 bits, with each row's factor and maximum.
// K and V have one buffer each: V(n) travels during S(n), K(n+1) during O(n).
//   K(n) here | S, row maxima to shared | barrier | P, factors to shared; start K(n+1) | V(n) here | barrier | O = O * factor + P V | barrier | start V(n+1)
namespace fovea {

template <Spec S> __global__ void __launch_bounds__(S.warps * 32, 1) wide_forward(const __grid_constant__ Args a) {
    constexpr int D = S.d, N = S.step, threads = S.warps * 32, WQ = S.split_q, WK = S.warps / WQ, T = S.tiles, M = WQ * T * 16, W = N / WK;
    constexpr int OQ = M / 32, OD = S.warps / OQ, C = D / OD;  // O: OQ row groups of 32, C columns a warp
    constexpr u32 q_bytes = M * D * 2, kv_bytes = N * D * 2;
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 sq = shared_address(memory), sk = sq + q_bytes, sv = sk + kv_bytes, sp = sv + kv_bytes, smax = sp + M * N * 2, sfactor = smax + M * WK * 4;
    const int thread = threadIdx.x, lane = thread & 31, warp = __shfl_sync(~0u, thread >> 5, 0), g = lane >> 2, t = lane & 3;
    const int wq = warp % WQ, wk = warp / WQ, oq = warp % OQ, od = warp / OQ;

    const int tiles = (a.sq + M - 1) / M, shift = a.sk - a.sq;
    const u32 bh = blockIdx.x / tiles;
    const int tile = S.causal ? tiles - 1 - (int)(blockIdx.x % tiles) : (int)(blockIdx.x % tiles);
    const int b = bh / a.heads, h = bh % a.heads, hk = h / (a.heads / a.heads_k), m0 = tile * M;
    const u16 *k = a.k + b * a.ks.b + hk * a.ks.h, *v = a.v + b * a.vs.b + hk * a.vs.h;
    const int keys = S.causal ? min(a.sk, m0 + M + shift) : a.sk, steps = keys <= 0 ? 0 : (keys + N - 1) / N;
    auto load_k = [&](int n) { load_tile<N, D, threads>(sk, k + (i64)n * N * a.ks.s, a.ks.s, a.sk - n * N, thread); copy_commit(); };
    auto load_v = [&](int n) { load_tile<N, D, threads>(sv, v + (i64)n * N * a.vs.s, a.vs.s, a.sk - n * N, thread); copy_commit(); };
    load_tile<M, D, threads>(sq, a.q + b * a.qs.b + h * a.qs.h + m0 * a.qs.s, a.qs.s, a.sq - m0, thread);
    if (steps > 0) load_k(0), load_v(0);

    float o[2][C / 8][4] = {}, top[T][2], sum[T][2] = {};
    for (int i = 0; i < T; ++i) top[i][0] = top[i][1] = -infinity;
    const float c = a.scale * log2e;
    const typename Tile<D>::Lane lanes(0, lane), lanes_k(0, lane, true);
    const typename Tile<N>::Lane lanes_p(sp, lane);
    const u32 my_q = sq + wq * T * 16 * D * 2, my_k = sk + wk * W * D * 2;

    for (int n = 0; n < steps; ++n) {
        copy_wait<1>();
        sync();
        float s[T][W / 8][4] = {};
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk) {
            u32 qa[T][4];
            for (int i = 0; i < T; ++i) ldmatrix(qa[i], my_q + lanes.at(i * 16, kk));
            for (int j = 0; j < W / 16; ++j) {
                u32 kb[4];
                ldmatrix(kb, my_k + lanes_k.at(j * 16, kk));
                for (int i = 0; i < T; ++i) {
                    mma<S.type>(s[i][2 * j], qa[i], kb[0], kb[1]);
                    mma<S.type>(s[i][2 * j + 1], qa[i], kb[2], kb[3]);
                }
            }
        }
        const int n0 = n * N + wk * W;
        if (n0 + W > a.sk || (S.causal && n0 + W - 1 > m0 + shift)) {
#pragma unroll
            for (int i = 0; i < T; ++i)
                for (int j = 0; j < W / 8; ++j)
                    for (int e = 0; e < 4; ++e) {
                        int row = m0 + (wq * T + i) * 16 + g + (e >> 1) * 8, key = n0 + j * 8 + t * 2 + (e & 1);
                        if (key >= a.sk || (S.causal && key > row + shift)) s[i][j][e] = -infinity;
                    }
        }
#pragma unroll
        for (int i = 0; i < T; ++i)
            for (int x = 0; x < 2; ++x) {
                float y = s[i][0][2 * x];
                for (int j = 0; j < W / 8; ++j) y = fmaxf(y, fmaxf(s[i][j][2 * x], s[i][j][2 * x + 1]));
                y = fmaxf(y, __shfl_xor_sync(~0u, y, 1));
                y = fmaxf(y, __shfl_xor_sync(~0u, y, 2));
                if (t == 0) store_shared(smax + (((wq * T + i) * 16 + g + x * 8) * WK + wk) * 4, y);
            }
        sync();
        if (n + 1 < steps) load_k(n + 1);
        else copy_commit();
#pragma unroll
        for (int i = 0; i < T; ++i) {
            float base[2];
            for (int x = 0; x < 2; ++x) {
                const int row = (wq * T + i) * 16 + g + x * 8;
                float y = top[i][x];
                for (int w = 0; w < WK; ++w) y = fmaxf(y, load_shared(smax + (row * WK + w) * 4));
                base[x] = y == -infinity ? 0.f : y * c;
                const float factor = ex2(fmaf(top[i][x], c, -base[x]));
                top[i][x] = y;
                sum[i][x] *= factor;
                if (t == 0 && wk == 0) store_shared(sfactor + row * 4, factor);
            }
            for (int j = 0; j < W / 8; ++j)
                for (int x = 0; x < 2; ++x) {
                    float p0 = ex2(fmaf(s[i][j][2 * x], c, -base[x])), p1 = ex2(fmaf(s[i][j][2 * x + 1], c, -base[x]));
                    sum[i][x] += p0 + p1;
                    store_shared(sp + Tile<N>::offset((wq * T + i) * 16 + g + x * 8, wk * W / 8 + j) + t * 4, pack<S.type>(p0, p1));
                }
        }
        copy_wait<1>();
        sync();
#pragma unroll
        for (int i = 0; i < 2; ++i)
            for (int x = 0; x < 2; ++x) {
                const float factor = load_shared(sfactor + (oq * 32 + i * 16 + g + x * 8) * 4);
                for (int j = 0; j < C / 8; ++j) o[i][j][2 * x] *= factor, o[i][j][2 * x + 1] *= factor;
            }
#pragma unroll
        for (int kk = 0; kk < N / 16; ++kk) {
            u32 pa[2][4];
            for (int i = 0; i < 2; ++i) ldmatrix(pa[i], lanes_p.at(0, kk) + (oq * 32 + i * 16) * N * 2);
            for (int j = 0; j < C / 16; ++j) {
                u32 vb[4];
                ldmatrix_trans(vb, sv + lanes.at(kk * 16, j) + od * C * 2);
                for (int i = 0; i < 2; ++i) {
                    mma<S.type>(o[i][2 * j], pa[i], vb[0], vb[1]);
                    mma<S.type>(o[i][2 * j + 1], pa[i], vb[2], vb[3]);
                }
            }
        }
        sync();
        if (n + 1 < steps) load_v(n + 1);
        else copy_commit();
    }
    copy_wait<0>();
    sync();

    // Row sums: quad, then the warps along the keys, through the space of the maxima.
#pragma unroll
    for (int i = 0; i < T; ++i)
        for (int x = 0; x < 2; ++x) {
            float l = sum[i][x];
            l += __shfl_xor_sync(~0u, l, 1);
            l += __shfl_xor_sync(~0u, l, 2);
            const int row = (wq * T + i) * 16 + g + x * 8;
            if (t == 0) store_shared(smax + (row * WK + wk) * 4, l);
            if (t == 0 && wk == 0) store_shared(sfactor + row * 4, top[i][x]);
        }
    sync();
#pragma unroll
    for (int i = 0; i < 2; ++i)
        for (int x = 0; x < 2; ++x) {
            const int r = oq * 32 + i * 16 + g + x * 8, row = m0 + r;
            float l = 0;
            for (int w = 0; w < WK; ++w) l += load_shared(smax + (r * WK + w) * 4);
            const float inverse = l > 0.f ? 1.f / l : l;
            if (t == 0 && od == 0 && row < a.sq) a.lse[(i64)bh * a.sq + row] = l == 0.f ? -infinity : load_shared(sfactor + r * 4) * a.scale + lg2(l) * ln2;
            for (int j = 0; j < C / 8; ++j)
                store_shared(sq + Tile<D>::offset(r, od * C / 8 + j) + t * 4, pack<S.type>(o[i][j][2 * x] * inverse, o[i][j][2 * x + 1] * inverse));
        }
    sync();
    u16* out = a.out + b * a.outs.b + h * a.outs.h + m0 * a.outs.s;
    for (int i = thread; i < M * (D / 8); i += threads) {
        int r = i / (D / 8), j = i % (D / 8);
        if (m0 + r < a.sq) store_global(out + r * a.outs.s + j * 8, load_shared4(sq + Tile<D>::offset(r, j)));
    }
}

}  // namespace fovea
