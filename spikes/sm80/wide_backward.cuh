// SPDX-License-Identifier: Apache-2.0
// Backward whose P and dS both go through shared memory, so that each product has its own grid of warps. For D over 64, where one warp
// cannot own both enough keys (to share what it loads) and all columns of dK and dV.
// A CTA owns split_k * tiles * 16 keys of one key head and walks over the queries of all its query heads, `step` at a time:
//   wait for step n | barrier | start copies of n + 1 | S^T = K Q^T, dP^T = V dO^T | P^T, dS^T to shared | barrier | dV += P^T dO, dK += dS^T Q, dQ = dS K
// prepare and convert are those of backward.cuh.
namespace fovea {

template <Spec S> __global__ void __launch_bounds__(S.warps * 32, S.ctas) wide_backward(const __grid_constant__ Args a) {
    constexpr int D = S.d, T = S.tiles, M = S.step, threads = S.warps * 32, KS = S.split_k, N = KS * T * 16;
    constexpr int QS = S.warps / KS, P = M / QS;                        // S: QS warps along the queries, P queries each
    constexpr int KO = S.split_o, TO = N / KO / 16, DO = S.warps / KO, CO = D / DO / 16;  // dV, dK: TO row tiles, CO column blocks of 16
    constexpr u32 kv_bytes = N * D * 2, q_bytes = M * D * 2, bias_bytes = S.bias == Bias::tile ? M * N * 2 : 0;
    constexpr u32 stage_bytes = 2 * q_bytes + M * 8 + bias_bytes, p_bytes = N * M * 2;
    constexpr bool natural = S.bias != Bias::none;
    static_assert(P % 8 == 0 && N % (KO * 16) == 0 && D % (DO * 16) == 0 && M % QS == 0);
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 sk = shared_address(memory), sv = sk + kv_bytes, sp = sv + kv_bytes, sds = sp + p_bytes, stage0 = sds + p_bytes;
    const int thread = threadIdx.x, lane = thread & 31, warp = __shfl_sync(~0u, thread >> 5, 0), g = lane >> 2, t = lane & 3;
    const int ks = warp % KS, qs = warp / KS, ko = warp % KO, od = warp / KO;

    const int blocks = (a.sk + N - 1) / N, group = a.heads / a.heads_k, shift = a.sk - a.sq;
    const u32 bh = blockIdx.x / blocks;
    const int block = blockIdx.x % blocks, b = bh / a.heads_k, hk = bh % a.heads_k, n0 = block * N, key0 = n0 + ks * T * 16;
    const int tiles = (a.sq + M - 1) / M, first = S.causal ? min(max(n0 - shift, 0) / M, tiles) : 0, count = tiles - first, steps = count * group;
    const int start = S.causal || count == 0 ? 0 : block * 2 % count;  // blocks start at different tiles, so that their sums do not meet

    load_tile<N, D, threads>(sk, a.k + b * a.ks.b + hk * a.ks.h + n0 * a.ks.s, a.ks.s, a.sk - n0, thread);
    load_tile<N, D, threads>(sv, a.v + b * a.vs.b + hk * a.vs.h + n0 * a.vs.s, a.vs.s, a.sk - n0, thread);
    struct Place { int h, i; };
    auto next = [&](Place& x) {
        if (++x.i == count) x.i = 0;
        if (x.i == start) ++x.h;
    };
    auto load = [&](int n, Place x) {
        const int h = x.h, m0 = (first + x.i) * M;
        u32 to = stage0 + n % S.stages * stage_bytes;
        load_tile<M, D, threads>(to, a.q + b * a.qs.b + h * a.qs.h + m0 * a.qs.s, a.qs.s, a.sq - m0, thread);
        load_tile<M, D, threads>(to + q_bytes, a.d_o + b * a.dos.b + h * a.dos.h + m0 * a.dos.s, a.dos.s, a.sq - m0, thread);
        const i64 row = (i64)(b * a.heads + h) * a.sq_pad + m0;
        if (thread < M / 4) copy16(to + 2 * q_bytes + thread * 16, a.lse_pad + row + thread * 4);
        else if (thread < M / 2) copy16(to + 2 * q_bytes + thread * 16, a.delta_pad + row + thread * 4 - M);
        if constexpr (S.bias == Bias::tile)
            load_bias<M, N, threads>(to + 2 * q_bytes + M * 8, a.bias + b * a.biases.b + h * a.biases.h + m0 * a.biases.s + n0, a.biases.s, a.sq - m0, a.sk - n0, thread);
    };
    Place now{hk * group, start}, after = now;
    if (steps > 0) load(0, now);
    copy_commit();

    float dk[TO][2 * CO][4] = {}, dv[TO][2 * CO][4] = {};
    const float c = natural ? log2e : a.scale * log2e;
    const typename Tile<D>::Lane lanes(0, lane), lanes_q(0, lane, true);
    const typename Tile<M>::Lane lanes_p(sp, lane);
    const u32 my_k = sk + ks * T * 16 * D * 2, my_v = sv + ks * T * 16 * D * 2;
    Dropout random;

    for (int n = 0; n < steps; ++n, now = after) {
        copy_wait<0>();
        sync();
        next(after);
        if (n + 1 < steps) load(n + 1, after);
        copy_commit();
        const int h = now.h, m0 = (first + now.i) * M, part = qs * P;
        const u32 sq = stage0 + n % S.stages * stage_bytes, sdo = sq + q_bytes, slse = sdo + q_bytes, sdelta = slse + M * 4, sbias = sdelta + M * 4;
        if constexpr (S.dropout)
            if (now.i == start) random = Dropout(a.seed, a.offset, b * a.heads + h);
        {
            float s[T][P / 8][4] = {}, dp[T][P / 8][4] = {};
            if constexpr (P == 8) {  // one column tile: its fragments of two k steps at once
#pragma unroll
                for (int kk = 0; kk < D / 16; kk += 2) {
                    const u32 at = Tile<D>::offset(part + (lane & 7), kk * 2 + (lane >> 3));
                    u32 qb[4], ob[4];
                    ldmatrix(qb, sq + at);
                    ldmatrix(ob, sdo + at);
                    for (int i = 0; i < T; ++i)
                        for (int x = 0; x < 2; ++x) {
                            u32 ka[4], va[4];
                            ldmatrix(ka, my_k + lanes.at(i * 16, kk + x));
                            mma<S.type>(s[i][0], ka, qb[2 * x], qb[2 * x + 1]);
                            ldmatrix(va, my_v + lanes.at(i * 16, kk + x));
                            mma<S.type>(dp[i][0], va, ob[2 * x], ob[2 * x + 1]);
                        }
                }
            } else {
#pragma unroll
                for (int kk = 0; kk < D / 16; ++kk) {
                    u32 ka[T][4];
                    for (int i = 0; i < T; ++i) ldmatrix(ka[i], my_k + lanes.at(i * 16, kk));
                    for (int j = 0; j < P / 16; ++j) {
                        u32 qb[4];
                        ldmatrix(qb, sq + part * D * 2 + lanes_q.at(j * 16, kk));
                        for (int i = 0; i < T; ++i) {
                            mma<S.type>(s[i][2 * j], ka[i], qb[0], qb[1]);
                            mma<S.type>(s[i][2 * j + 1], ka[i], qb[2], qb[3]);
                        }
                    }
                }
#pragma unroll
                for (int kk = 0; kk < D / 16; ++kk) {
                    u32 va[T][4];
                    for (int i = 0; i < T; ++i) ldmatrix(va[i], my_v + lanes.at(i * 16, kk));
                    for (int j = 0; j < P / 16; ++j) {
                        u32 ob[4];
                        ldmatrix(ob, sdo + part * D * 2 + lanes_q.at(j * 16, kk));
                        for (int i = 0; i < T; ++i) {
                            mma<S.type>(dp[i][2 * j], va[i], ob[0], ob[1]);
                            mma<S.type>(dp[i][2 * j + 1], va[i], ob[2], ob[3]);
                        }
                    }
                }
            }
            if constexpr (S.bias == Bias::tile) {
#pragma unroll
                for (int i = 0; i < T; ++i)
                    for (int j = 0; j < P / 16; ++j) {
                        u32 r[4], chunk = (ks * T + i) * 2 + (lane >> 4);
                        ldmatrix_trans(r, sbias + Tile<N>::offset(part + j * 16 + (lane & 15), chunk));
                        for (int x = 0; x < 4; ++x) {
                            float* e = &s[i][2 * j + (x & 1)][(x >> 1) * 2];
                            e[0] = fmaf(e[0], a.scale, low<S.type>(r[x]));
                            e[1] = fmaf(e[1], a.scale, high<S.type>(r[x]));
                        }
                    }
            }
            if (n0 + N > a.sk || (S.causal && m0 + part + shift < key0 + T * 16 - 1)) {
#pragma unroll
                for (int i = 0; i < T; ++i)
                    for (int x = 0; x < 2; ++x) {
                        int key = key0 + i * 16 + g + x * 8, begin = key >= a.sk ? 1 << 30 : S.causal ? key - shift - m0 - part - t * 2 : -1;
                        for (int j = 0; j < P / 8; ++j)
                            for (int e = 0; e < 2; ++e)
                                if (j * 8 + e < begin) s[i][j][2 * x + e] = -infinity;
                    }
            }
#pragma unroll
            for (int j = 0; j < P / 8; ++j) {
                float2 lse = load_shared2(slse + (part + j * 8 + t * 2) * 4), delta = load_shared2(sdelta + (part + j * 8 + t * 2) * 4);
                for (int i = 0; i < T; ++i) {
                    float p[4], d[4];
                    bool keep[4];
                    if constexpr (S.dropout) {
                        // Two calls for this thread's two queries and keys {g, g + 8}; j even takes x, j odd takes y of the same call.
                        for (int e = 0; e < 2; ++e) {
                            const int at = part / 8 + j;
                            uint2 r = random(m0 + (at & ~1) * 8 + t * 2 + e, key0 + i * 16 + g);
                            u32 w = at & 1 ? r.y : r.x;
                            keep[e] = (w << 16) >= a.drop << 16, keep[2 + e] = w >= a.drop << 16;
                        }
                    }
                    for (int e = 0; e < 4; ++e) {
                        const float l = e & 1 ? lse.y : lse.x, m = e & 1 ? delta.y : delta.x;
                        p[e] = natural ? ex2((s[i][j][e] - l) * c) : ex2(fmaf(s[i][j][e], c, -l));
                        if constexpr (S.dropout) {
                            const float factor = keep[e] ? a.keep_scale : 0.f;
                            d[e] = p[e] * fmaf(dp[i][j][e], factor, -m);
                            p[e] *= factor;
                        } else d[e] = p[e] * (dp[i][j][e] - m);
                    }
                    for (int x = 0; x < 2; ++x) {
                        const u32 at = Tile<M>::offset((ks * T + i) * 16 + g + x * 8, part / 8 + j) + t * 4;
                        store_shared(sp + at, pack<S.type>(p[2 * x], p[2 * x + 1]));
                        store_shared(sds + at, pack<S.type>(d[2 * x], d[2 * x + 1]));
                    }
                }
            }
        }
        sync();
        // dV += P^T dO, dK += dS^T Q
#pragma unroll
        for (int kk = 0; kk < M / 16; ++kk) {
            u32 pa[TO][4], da[TO][4];
            for (int i = 0; i < TO; ++i) ldmatrix(pa[i], lanes_p.at(i * 16, kk) + ko * TO * 16 * M * 2);
            for (int j = 0; j < CO; ++j) {
                u32 ob[4];
                ldmatrix_trans(ob, sdo + Tile<D>::offset(kk * 16 + (lane & 15), (od * CO + j) * 2 + (lane >> 4)));
                for (int i = 0; i < TO; ++i) {
                    mma<S.type>(dv[i][2 * j], pa[i], ob[0], ob[1]);
                    mma<S.type>(dv[i][2 * j + 1], pa[i], ob[2], ob[3]);
                }
            }
            for (int i = 0; i < TO; ++i) ldmatrix(da[i], lanes_p.at(i * 16, kk) + ko * TO * 16 * M * 2 + p_bytes);
            for (int j = 0; j < CO; ++j) {
                u32 qb[4];
                ldmatrix_trans(qb, sq + Tile<D>::offset(kk * 16 + (lane & 15), (od * CO + j) * 2 + (lane >> 4)));
                for (int i = 0; i < TO; ++i) {
                    mma<S.type>(dk[i][2 * j], da[i], qb[0], qb[1]);
                    mma<S.type>(dk[i][2 * j + 1], da[i], qb[2], qb[3]);
                }
            }
        }
        // dQ = dS K, `part` columns a warp at a time
        if constexpr (S.dq) {
            constexpr int WQ = S.split_q, WD = S.warps / WQ, R = M / WQ / 16, CA = D / WD / 16, C = R * CA * 8 > 48 ? 32 / (R * 8) : CA;
            static_assert(R >= 1 && C >= 1 && CA % C == 0 && D % (WD * 16) == 0 && M % (WQ * 16) == 0);
            const int wq = warp % WQ, wd = warp / WQ;
            float* to = a.dq_sum + ((i64)(b * a.heads + h) * a.sq_pad + m0) * D + (wq * R * (D / 8) + wd * CA * 2) * 128 + lane * 4;
#pragma unroll
            for (int j0 = 0; j0 < CA; j0 += C) {
                float dq[R][2 * C][4] = {};
#pragma unroll
                for (int kk = 0; kk < N / 16; ++kk) {
                    u32 da[R][4];
                    for (int i = 0; i < R; ++i) ldmatrix_trans(da[i], sds + Tile<M>::offset(kk * 16 + ((lane & 7) | (lane >> 4) << 3), (wq * R + i) * 2 + (lane >> 3 & 1)));
                    for (int j = 0; j < C; ++j) {
                        u32 kb[4];
                        ldmatrix_trans(kb, sk + Tile<D>::offset(kk * 16 + (lane & 15), (wd * CA + j0 + j) * 2 + (lane >> 4)));
                        for (int i = 0; i < R; ++i) {
                            mma<S.type>(dq[i][2 * j], da[i], kb[0], kb[1]);
                            mma<S.type>(dq[i][2 * j + 1], da[i], kb[2], kb[3]);
                        }
                    }
                }
                for (int i = 0; i < R; ++i)
                    for (int j = 0; j < 2 * C; ++j) reduce4<S.arch>(to + (i * (D / 8) + 2 * j0 + j) * 128, dq[i][j]);
            }
        }
    }
    copy_wait<0>();
    sync();

    // dk, dv through the K and V tiles, written in 16-byte pieces.
#pragma unroll
    for (int i = 0; i < TO; ++i)
#pragma unroll
        for (int j = 0; j < 2 * CO; ++j)
            for (int x = 0; x < 2; ++x) {
                const u32 at = Tile<D>::offset((ko * TO + i) * 16 + g + x * 8, od * CO * 2 + j) + t * 4;
                store_shared(sk + at, pack<S.type>(dk[i][j][2 * x] * a.scale, dk[i][j][2 * x + 1] * a.scale));
                store_shared(sv + at, pack<S.type>(dv[i][j][2 * x], dv[i][j][2 * x + 1]));
            }
    sync();
    u16 *dk_to = a.dk + b * a.dks.b + hk * a.dks.h + n0 * a.dks.s, *dv_to = a.dv + b * a.dvs.b + hk * a.dvs.h + n0 * a.dvs.s;
    for (int i = thread; i < N * (D / 8); i += threads) {
        int r = i / (D / 8), j = i % (D / 8);
        if (n0 + r < a.sk) {
            store_global(dk_to + r * a.dks.s + j * 8, load_shared4(sk + Tile<D>::offset(r, j)));
            store_global(dv_to + r * a.dvs.s + j * 8, load_shared4(sv + Tile<D>::offset(r, j)));
        }
    }
}

}  // namespace fovea
