// SPDX-License-Identifier: Apache-2.0
// The gradient of a bias that is broadcast over batch and / or heads, by recomputing.
// A CTA owns M queries x N keys of one plane of the bias and walks over the list of (b, h) that share it:
//   S = Q K^T, dP = dO V^T, p = exp(scale S + bias - lse), sum += p (dP - delta)
// The sum stays in registers and is written once: no atomics, no scratch, the same bits every run. Where planes are few, the list is cut
// into chunks whose fp32 sums `bias_gradient_sum` adds in fixed order.
// Warps form a grid of M / (tiles * 16) x the rest. stages = 2: all four operand tiles of the next entry are copied while this one computes.
// stages = 1, where those do not fit: Q and K of the next while dP computes, dO and V of the next during the arithmetic and the next S.
namespace fovea {

template <Spec S> __global__ void __launch_bounds__(S.warps * 32, S.ctas) bias_gradient(const __grid_constant__ Args a) {
    // step: keys of the tile; split_q: warps along the queries
    constexpr int D = S.d, T = S.tiles, WQ = S.split_q, WK = S.warps / WQ, M = WQ * T * 16, N = S.step, W = N / WK, threads = S.warps * 32;
    constexpr u32 q_bytes = M * D * 2, k_bytes = N * D * 2, stage_bytes = 2 * q_bytes + 2 * k_bytes, bias_bytes = M * N * 2;
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 sbias = shared_address(memory), srows = sbias + bias_bytes, stage0 = srows + 2 * M * 8;  // srows: lse, delta of two entries
    const int thread = threadIdx.x, lane = thread & 31, warp = __shfl_sync(~0u, thread >> 5, 0), g = lane >> 2, t = lane & 3;
    const int wq = warp % WQ, wk = warp / WQ;

    // Place: tile of the plane, plane (bias_b, bias_h), chunk of the list.
    const int tiles_k = (a.sk + N - 1) / N, tiles_q = (a.sq + M - 1) / M, shift = a.sk - a.sq;
    int x = blockIdx.x;
    const int n0 = x % tiles_k * N; x /= tiles_k;
    const int m0 = x % tiles_q * M; x /= tiles_q;
    const int chunk = x % a.chunks, plane = x / a.chunks;
    const bool over_b = a.biases.b == 0, over_h = a.biases.h == 0;
    const int planes_h = over_h ? 1 : a.heads, plane_b = plane / planes_h, plane_h = plane % planes_h;
    const int inner = over_h ? a.heads : 1;  // entries: b outer, h inner
    const int per = (a.list + a.chunks - 1) / a.chunks, begin = chunk * per, end = min(begin + per, a.list);
    const bool empty = S.causal && n0 > m0 + M - 1 + shift;

    auto load = [&](int n, int which) {  // which: 1 Q and K, 2 dO, V, lse and delta
        const int b = over_b ? n / inner : plane_b, h = over_h ? n % inner : plane_h, hk = h / (a.heads / a.heads_k);
        const u32 to = stage0 + n % S.stages * stage_bytes;
        if (which & 1) {
            load_tile<M, D, threads>(to, a.q + b * a.qs.b + h * a.qs.h + m0 * a.qs.s, a.qs.s, a.sq - m0, thread);
            load_tile<N, D, threads>(to + 2 * q_bytes, a.k + b * a.ks.b + hk * a.ks.h + n0 * a.ks.s, a.ks.s, a.sk - n0, thread);
        }
        if (which & 2) {
            load_tile<M, D, threads>(to + q_bytes, a.d_o + b * a.dos.b + h * a.dos.h + m0 * a.dos.s, a.dos.s, a.sq - m0, thread);
            load_tile<N, D, threads>(to + 2 * q_bytes + k_bytes, a.v + b * a.vs.b + hk * a.vs.h + n0 * a.vs.s, a.vs.s, a.sk - n0, thread);
            const i64 row = (i64)(b * a.heads + h) * a.sq_pad + m0;
            const u32 rows = srows + (n & 1) * M * 8;
            if (thread < M / 4) copy16(rows + thread * 16, a.lse_pad + row + thread * 4);
            else if (thread < M / 2) copy16(rows + thread * 16, a.delta_pad + row + thread * 4 - M);
        }
        copy_commit();
    };
    const u16* bias = a.bias + plane_b * a.biases.b + plane_h * a.biases.h;
    if (!empty) {
        for (int i = thread; i < M * (N / 8); i += threads) {
            int r = i / (N / 8), j = i % (N / 8), left = a.sk - n0 - j * 8;
            bool in = m0 + r < a.sq && left > 0;
            copy16(sbias + Tile<N>::offset(r, j), in ? bias + (m0 + r) * a.biases.s + n0 + j * 8 : bias, in ? min(left, 8) * 2 : 0);
        }
        if constexpr (S.stages == 1) { if (begin < end) load(begin, 1), load(begin, 2); }
        else if (begin < end) load(begin, 3);
    }

    float sum[T][W / 8][4] = {};
    const typename Tile<D>::Lane lanes(0, lane), lanes_k(0, lane, true);
    const bool edge = n0 + N > a.sk || (S.causal && n0 + N - 1 > m0 + shift);
    if (!empty)
        for (int n = begin; n < end; ++n) {
            if constexpr (S.stages > 1) {
                copy_wait<0>();
                sync();
                if (n + 1 < end) load(n + 1, 3);
            } else if (n == begin) {
                copy_wait<1>();
                sync();
            }
            const u32 sq = stage0 + n % S.stages * stage_bytes + wq * T * 16 * D * 2, sdo = sq + q_bytes;
            const u32 sk = stage0 + n % S.stages * stage_bytes + 2 * q_bytes + wk * W * D * 2, sv = sk + k_bytes;
            const u32 slse = srows + (n & 1) * M * 8 + wq * T * 64;
            Dropout random;
            if constexpr (S.dropout) {
                const int b = over_b ? n / inner : plane_b, h = over_h ? n % inner : plane_h;
                random = Dropout(a.seed, a.offset, b * a.heads + h);
            }
            // S and dP of `part` keys at a time
            constexpr int P = S.part < W ? S.part : W;
#pragma unroll
            for (int part = 0; part < W; part += P) {
                float s[T][P / 8][4] = {}, dp[T][P / 8][4] = {};
#pragma unroll
                for (int kk = 0; kk < D / 16; ++kk) {
                    u32 qa[T][4];
                    for (int i = 0; i < T; ++i) ldmatrix(qa[i], sq + lanes.at(i * 16, kk));
                    for (int j = 0; j < P / 16; ++j) {
                        u32 b[4];
                        ldmatrix(b, sk + lanes_k.at(part + j * 16, kk));
                        for (int i = 0; i < T; ++i) {
                            mma<S.type>(s[i][2 * j], qa[i], b[0], b[1]);
                            mma<S.type>(s[i][2 * j + 1], qa[i], b[2], b[3]);
                        }
                    }
                }
                if constexpr (S.stages == 1) {
                    static_assert(P == W);
                    copy_wait<0>();
                    sync();
                    if (n + 1 < end) load(n + 1, 1);
                }
#pragma unroll
                for (int kk = 0; kk < D / 16; ++kk) {
                    u32 oa[T][4];
                    for (int i = 0; i < T; ++i) ldmatrix(oa[i], sdo + lanes.at(i * 16, kk));
                    for (int j = 0; j < P / 16; ++j) {
                        u32 b[4];
                        ldmatrix(b, sv + lanes_k.at(part + j * 16, kk));
                        for (int i = 0; i < T; ++i) {
                            mma<S.type>(dp[i][2 * j], oa[i], b[0], b[1]);
                            mma<S.type>(dp[i][2 * j + 1], oa[i], b[2], b[3]);
                        }
                    }
                }
                if constexpr (S.stages == 1) {
                    copy_wait<0>();
                    sync();
                    if (n + 1 < end) load(n + 1, 2);
                }
#pragma unroll
                for (int i = 0; i < T; ++i) {
                    float lse[2], delta[2];
                    for (int y = 0; y < 2; ++y) lse[y] = load_shared(slse + (i * 16 + g + y * 8) * 4), delta[y] = load_shared(slse + M * 4 + (i * 16 + g + y * 8) * 4);
                    for (int j = 0; j < P / 16; ++j) {
                        u32 r[4], at = (wk * W + part) / 8 + 2 * j + (lane >> 4);
                        ldmatrix(r, sbias + Tile<N>::offset((wq * T + i) * 16 + (lane & 15), at));
                        for (int y = 0; y < 4; ++y) {
                            float* e = &s[i][2 * j + (y >> 1)][(y & 1) * 2];
                            e[0] = fmaf(e[0], a.scale, low<S.type>(r[y]));
                            e[1] = fmaf(e[1], a.scale, high<S.type>(r[y]));
                        }
                        if (edge)
                            for (int y = 0; y < 8; ++y) {
                                int row = m0 + (wq * T + i) * 16 + g + (y >> 1 & 1) * 8, key = n0 + wk * W + part + j * 16 + (y >> 2) * 8 + t * 2 + (y & 1);
                                if (key >= a.sk || (S.causal && key > row + shift)) s[i][2 * j + (y >> 2)][y & 3] = -infinity;
                            }
                        if constexpr (S.dropout) {
                            const u32 drop = a.drop << 16;
                            for (int e = 0; e < 2; ++e) {
                                uint2 u = random(m0 + (wq * T + i) * 16 + g, n0 + wk * W + part + j * 16 + t * 2 + e);
                                float(&d0)[4] = dp[i][2 * j], (&d1)[4] = dp[i][2 * j + 1];
                                d0[e] = (u.x << 16) < drop ? 0.f : d0[e] * a.keep_scale;
                                d1[e] = u.x < drop ? 0.f : d1[e] * a.keep_scale;
                                d0[2 + e] = (u.y << 16) < drop ? 0.f : d0[2 + e] * a.keep_scale;
                                d1[2 + e] = u.y < drop ? 0.f : d1[2 + e] * a.keep_scale;
                            }
                        }
                        for (int y = 0; y < 2; ++y)
                            for (int e = 0; e < 4; ++e) {
                                const float p = ex2((s[i][2 * j + y][e] - lse[e >> 1]) * log2e);
                                float& to = sum[i][part / 8 + 2 * j + y][e];
                                to = fmaf(p, dp[i][2 * j + y][e] - delta[e >> 1], to);
                            }
                    }
                }
            }
        }

    // Written once: through shared memory to 16-byte pieces of dbias, or as fp32 partial sums.
    copy_wait<0>();
    sync();
    if (a.chunks > 1) {
        float* to = a.dbias_sum + ((i64)chunk * (gridDim.x / (tiles_k * tiles_q * a.chunks)) + plane) * a.sq * a.sk;
#pragma unroll
        for (int i = 0; i < T; ++i)
#pragma unroll
            for (int j = 0; j < W / 8; ++j)
                for (int e = 0; e < 4; ++e) {
                    int row = m0 + (wq * T + i) * 16 + g + (e >> 1) * 8, key = n0 + wk * W + j * 8 + t * 2 + (e & 1);
                    if (row < a.sq && key < a.sk) to[(i64)row * a.sk + key] = sum[i][j][e];
                }
        return;
    }
#pragma unroll
    for (int i = 0; i < T; ++i)
#pragma unroll
        for (int j = 0; j < W / 8; ++j)
            for (int y = 0; y < 2; ++y)
                store_shared(sbias + Tile<N>::offset((wq * T + i) * 16 + g + y * 8, wk * W / 8 + j) + t * 4, pack<S.type>(sum[i][j][2 * y], sum[i][j][2 * y + 1]));
    sync();
    u16* dbias = a.dbias + plane_b * a.biases.b + plane_h * a.biases.h;
    for (int i = thread; i < M * (N / 8); i += threads) {
        int r = i / (N / 8), j = i % (N / 8), left = a.sk - n0 - j * 8;
        if (m0 + r >= a.sq || left <= 0) continue;
        u16* to = dbias + (m0 + r) * a.biases.s + n0 + j * 8;
        uint4 v = load_shared4(sbias + Tile<N>::offset(r, j));
        if (left >= 8) store_global(to, v);
        else {
            const u32 words[4] = {v.x, v.y, v.z, v.w};
            for (int e = 0; e < 8; ++e)
                if (e < left) to[e] = (u16)(words[e >> 1] >> (e & 1) * 16);
        }
    }
}

// dbias = the sum of the chunks, in order.
template <Spec S> __global__ void __launch_bounds__(256) bias_gradient_sum(const __grid_constant__ Args a) {
    const i64 n = (i64)blockIdx.x * 256 + threadIdx.x, plane = (i64)a.sq * a.sk;
    const int planes_h = a.biases.h == 0 ? 1 : a.heads, planes_b = a.biases.b == 0 ? 1 : a.batch;
    const i64 total = plane * planes_h * planes_b;
    if (n >= total) return;
    float sum = 0;
    for (int c = 0; c < a.chunks; ++c) sum += a.dbias_sum[c * total + n];
    const int p = n / plane, key = n % plane % a.sk, row = n % plane / a.sk;
    a.dbias[p / planes_h * a.biases.b + p % planes_h * a.biases.h + row * a.biases.s + key] = (u16)pack<S.type>(sum, 0.f);
}

}  // namespace fovea
