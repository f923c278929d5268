// SPDX-License-Identifier: Apache-2.0
// Backward for D up to 128, in three kernels: prepare (delta, padded lse, dq sum set to zero), backward, convert (dq sum to dq).
// A CTA of `backward` owns warps * tiles * 16 keys of one key head and walks over the queries of all its query heads, `step` at a time.
// Each warp owns `tiles` row tiles of 16 keys in S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are A operands of dV += P^T dO and
// dK += dS^T Q as they stand in registers. Only dS^T goes to shared memory, for dQ = dS K, which the warps split among themselves and
// add to dq_sum in L2.
//   wait for step n | barrier | start copies of n + 1 | [dQ of n - 1] | S, dP, P, dS, dV, dK | [barrier | dQ of n]
namespace fovea {

// One warp a row: delta = <do, o> (given dlse would be subtracted here), lse padded; rows past the end get lse = +inf, so that p = 0.
template <Spec S> __global__ void __launch_bounds__(256) prepare(const __grid_constant__ Args a) {
    constexpr int lanes = S.d / 8 < 32 ? (S.d / 8 & -(S.d / 8)) == S.d / 8 ? S.d / 8 : 32 : 32, rows = 256 / lanes;
    const int lane = threadIdx.x % lanes, tiles = (a.sq_pad + rows - 1) / rows;
    const u32 bh = blockIdx.x / tiles, b = bh / a.heads, h = bh % a.heads;
    const int row = blockIdx.x % tiles * rows + threadIdx.x / lanes;
    if (row >= a.sq_pad) return;
    float delta = 0;
    float* sum = a.dq_sum + ((i64)bh * a.sq_pad + row) * S.d;
    for (int i = lane; i < S.d / 8; i += lanes) {
        if (row < a.sq) {
            uint4 x = *(const uint4*)(a.o + b * a.os.b + h * a.os.h + row * a.os.s + i * 8), y = *(const uint4*)(a.d_o + b * a.dos.b + h * a.dos.h + row * a.dos.s + i * 8);
            const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
            for (int e = 0; e < 4; ++e) delta += low<S.type>(xs[e]) * low<S.type>(ys[e]) + high<S.type>(xs[e]) * high<S.type>(ys[e]);
        }
        if constexpr (S.dq) {
            store_global(sum + i * 8, {});
            store_global(sum + i * 8 + 4, {});
        }
    }
    for (int x = lanes / 2; x > 0; x /= 2) delta += __shfl_xor_sync(~0u, delta, x);
    if (lane == 0) {
        float lse = row < a.sq ? a.lse[(i64)bh * a.sq + row] : infinity;
        if (lse == -infinity) lse = infinity;
        a.lse_pad[(i64)bh * a.sq_pad + row] = S.bias == Bias::none ? lse * log2e : lse;
        a.delta_pad[(i64)bh * a.sq_pad + row] = delta;
    }
}

// dq_sum holds, for each 16 x 8 block, lane by lane the four values of its mma accumulator.
template <Spec S> __global__ void __launch_bounds__(256) convert(const __grid_constant__ Args a) {
    constexpr int chunks = S.d / 8;
    const i64 n = (i64)blockIdx.x * 256 + threadIdx.x, total = (i64)a.batch * a.heads * a.sq * chunks;
    if (n >= total) return;
    const int j = n % chunks, row = n / chunks % a.sq;
    const i64 bh = n / chunks / a.sq;
    const float* sum = a.dq_sum + bh * a.sq_pad * S.d + ((row >> 4) * chunks + j) * 128 + (row & 7) * 16 + (row >> 3 & 1) * 2;
    u32 r[4];
    for (int e = 0; e < 4; ++e) {
        float2 v = *(const float2*)(sum + e * 4);
        r[e] = pack<S.type>(v.x * a.scale, v.y * a.scale);
    }
    store_global(a.dq + bh / a.heads * a.dqs.b + bh % a.heads * a.dqs.h + row * a.dqs.s + j * 8, {r[0], r[1], r[2], r[3]});
}

template <Spec S> __global__ void __launch_bounds__(S.warps * 32, S.ctas) backward(const __grid_constant__ Args a) {
    constexpr int D = S.d, T = S.tiles, M = S.step, P = S.part, threads = S.warps * 32, N = S.warps * T * 16;
    constexpr u32 kv_bytes = N * D * 2, q_bytes = M * D * 2, bias_bytes = S.bias == Bias::tile ? M * N * 2 : 0;
    constexpr u32 stage_bytes = 2 * q_bytes + M * 8 + bias_bytes, ds_bytes = N * M * 2;
    constexpr bool natural = S.bias != Bias::none;
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 sk = shared_address(memory), sv = sk + kv_bytes, stage0 = sv + kv_bytes, sds = stage0 + S.stages * stage_bytes;
    const int thread = threadIdx.x, lane = thread & 31, warp = __shfl_sync(~0u, thread >> 5, 0), g = lane >> 2, t = lane & 3;

    const int blocks = (a.sk + N - 1) / N, group = a.heads / a.heads_k, shift = a.sk - a.sq;
    const u32 bh = blockIdx.x / blocks;
    const int block = blockIdx.x % blocks, b = bh / a.heads_k, hk = bh % a.heads_k, n0 = block * N, key0 = n0 + warp * T * 16;
    const int tiles = (a.sq + M - 1) / M, first = S.causal ? min(max(n0 - shift, 0) / M, tiles) : 0, count = tiles - first, steps = count * group;

    load_tile<N, D, threads>(sk, a.k + b * a.ks.b + hk * a.ks.h + n0 * a.ks.s, a.ks.s, a.sk - n0, thread);
    load_tile<N, D, threads>(sv, a.v + b * a.vs.b + hk * a.vs.h + n0 * a.vs.s, a.vs.s, a.sk - n0, thread);
    // A step's query head and tile. Without a mask the blocks start at different tiles, so that their sums do not meet.
    struct Place { int h, i; };
    const int start = S.causal || count == 0 ? 0 : block * 2 % count;
    auto next = [&](Place& x) {
        if (++x.i == count) x.i = 0;
        if (x.i == start) ++x.h;
    };
    Place now{hk * group, start}, after = now, before = now;
    auto load = [&](int n, Place x) {
        const int h = x.h, m0 = (first + x.i) * M;
        u32 to = stage0 + (n % S.stages) * stage_bytes;
        load_tile<M, D, threads>(to, a.q + b * a.qs.b + h * a.qs.h + m0 * a.qs.s, a.qs.s, a.sq - m0, thread);
        load_tile<M, D, threads>(to + q_bytes, a.d_o + b * a.dos.b + h * a.dos.h + m0 * a.dos.s, a.dos.s, a.sq - m0, thread);
        const i64 row = (i64)(b * a.heads + h) * a.sq_pad + m0;
        if (thread < M / 4) copy16(to + 2 * q_bytes + thread * 16, a.lse_pad + row + thread * 4);
        else if (thread < M / 2) copy16(to + 2 * q_bytes + thread * 16, a.delta_pad + row + thread * 4 - M);
        if constexpr (S.bias == Bias::tile)
            load_bias<M, N, threads>(to + 2 * q_bytes + M * 8, a.bias + b * a.biases.b + h * a.biases.h + m0 * a.biases.s + n0, a.biases.s, a.sq - m0, a.sk - n0, thread);
    };
    if (steps > 0) load(0, now);
    copy_commit();

    float dk[T][D / 8][4] = {}, dv[T][D / 8][4] = {};
    const float c = natural ? log2e : a.scale * log2e;
    const typename Tile<D>::Lane lanes(0, lane), lanes_q(0, lane, true);
    const u32 my_k = sk + warp * T * 16 * D * 2, my_v = sv + warp * T * 16 * D * 2;
    Dropout random;

    // dQ = dS K of one step: the warps split M queries x D columns.
    auto add_dq = [&](int n, Place x) {
        const int h = x.h, m0 = (first + x.i) * M;
        constexpr int WQ = S.split_q, WD = S.warps / WQ, R = M / WQ / 16, C = D / WD / 16;
        static_assert(R >= 1 && C >= 1 && D % (WD * 16) == 0 && M % (WQ * 16) == 0);
        const int wq = warp % WQ, wd = warp / WQ;
        const u32 ds = sds + (S.delay ? n & 1 : 0) * ds_bytes;
        // The warp's share of columns starts at a multiple of 16 * C: through its own lane addresses.
        u32 ads[C];
        for (int j = 0; j < C; ++j) { u32 chunk = (wd * C + j) * 2 + (lane >> 4), r = lane & 15; ads[j] = sk + Tile<D>::offset(r, chunk); }
        u32 ars[R];
        for (int i = 0; i < R; ++i) { u32 chunk = (wq * R + i) * 2 + (lane >> 3 & 1), r = (lane & 7) | (lane >> 4) << 3; ars[i] = ds + Tile<M>::offset(r, chunk); }
        float dq[R][2 * C][4] = {};
#pragma unroll
        for (int kk = 0; kk < N / 16; ++kk) {
            u32 da[R][4];
            for (int i = 0; i < R; ++i) {
                ldmatrix_trans(da[i], ars[i] + kk * 16 * M * 2);
            }
            // The A fragments are dS itself, [query][key]: each of the warps that hold the same ones stores its share.
            if constexpr (S.store_ds) {
                if (kk % WD == wd)
                    for (int i = 0; i < R; ++i)
                        for (int y = 0; y < 4; ++y) {
                            const int row = m0 + (wq * R + i) * 16 + g + (y & 1) * 8, key = n0 + kk * 16 + t * 2 + (y >> 1) * 8;
                            u16* at = a.dbias + b * a.biases.b + h * a.biases.h + row * a.biases.s + key;
                            if (row < a.sq && key + 1 < a.sk) *(u32*)at = da[i][y];
                            else if (row < a.sq && key < a.sk) *at = (u16)da[i][y];
                        }
            }
            for (int j = 0; j < C; ++j) {
                u32 kb[4];
                ldmatrix_trans(kb, ads[j] + kk * 16 * D * 2);
                for (int i = 0; i < R; ++i) {
                    mma<S.type>(dq[i][2 * j], da[i], kb[0], kb[1]);
                    mma<S.type>(dq[i][2 * j + 1], da[i], kb[2], kb[3]);
                }
            }
        }
        float* to = a.dq_sum + ((i64)(b * a.heads + h) * a.sq_pad + m0) * D + (wq * R * (D / 8) + wd * C * 2) * 128 + lane * 4;
#pragma unroll
        for (int i = 0; i < R; ++i)
            for (int j = 0; j < 2 * C; ++j) reduce4<S.arch>(to + (i * (D / 8) + j) * 128, dq[i][j]);
    };

    for (int n = 0; n < steps; ++n, before = now, now = after) {
        copy_wait<0>();
        sync();
        next(after);
        if (n + 1 < steps) load(n + 1, after);
        copy_commit();
        if constexpr (S.dq && S.delay) {
            if (n > 0) add_dq(n - 1, before);
        }

        const int h = now.h, m0 = (first + now.i) * M;
        const u32 sq = stage0 + (n % S.stages) * stage_bytes, sdo = sq + q_bytes, slse = sdo + q_bytes, sdelta = slse + M * 4, sbias = sdelta + M * 4;
        const u32 ds_to = sds + (S.delay ? n & 1 : 0) * ds_bytes;
        if constexpr (S.dropout)
            if (now.i == start) random = Dropout(a.seed, a.offset, b * a.heads + h);
#pragma unroll
        for (int part = 0; part < M; part += P) {
            float s[T][P / 8][4] = {}, dp[T][P / 8][4] = {};
            // S^T = K Q^T
#pragma unroll
            for (int kk = 0; kk < D / 16; ++kk) {
                u32 ka[T][4];
                for (int i = 0; i < T; ++i) ldmatrix(ka[i], my_k + lanes.at(i * 16, kk));
                for (int j = 0; j < P / 16; ++j) {
                    u32 qb[4];
                    ldmatrix(qb, sq + lanes_q.at(part + j * 16, kk));
                    for (int i = 0; i < T; ++i) {
                        mma<S.type>(s[i][2 * j], ka[i], qb[0], qb[1]);
                        mma<S.type>(s[i][2 * j + 1], ka[i], qb[2], qb[3]);
                    }
                }
            }
            // dP^T = V dO^T
#pragma unroll
            for (int kk = 0; kk < D / 16; ++kk) {
                u32 va[T][4];
                for (int i = 0; i < T; ++i) ldmatrix(va[i], my_v + lanes.at(i * 16, kk));
                for (int j = 0; j < P / 16; ++j) {
                    u32 ob[4];
                    ldmatrix(ob, sdo + lanes_q.at(part + j * 16, kk));
                    for (int i = 0; i < T; ++i) {
                        mma<S.type>(dp[i][2 * j], va[i], ob[0], ob[1]);
                        mma<S.type>(dp[i][2 * j + 1], va[i], ob[2], ob[3]);
                    }
                }
            }
            // Bias: the tile is [query][key], its transposed fragment is S^T's
            if constexpr (S.bias == Bias::tile) {
#pragma unroll
                for (int i = 0; i < T; ++i)
                    for (int j = 0; j < P / 16; ++j) {
                        u32 r[4], chunk = (warp * T + i) * 2 + (lane >> 4);
                        ldmatrix_trans(r, sbias + Tile<N>::offset(part + j * 16 + (lane & 15), chunk));
                        for (int x = 0; x < 4; ++x) {
                            float* e = &s[i][2 * j + (x & 1)][(x >> 1) * 2];
                            e[0] = fmaf(e[0], a.scale, low<S.type>(r[x]));
                            e[1] = fmaf(e[1], a.scale, high<S.type>(r[x]));
                        }
                    }
            }
            if constexpr (S.bias == Bias::element) {
                const u16* bias = a.bias + b * a.biases.b + h * a.biases.h;
                const bool inside = a.bias_k == 1 && n0 + N <= a.sk;
#pragma unroll
                for (int j = 0; j < P / 8; ++j)
                    for (int e = 0; e < 2; ++e) {
                        const u16* p = bias + min(m0 + part + j * 8 + t * 2 + e, a.sq - 1) * a.biases.s + (inside ? key0 + g : 0);
                        for (int i = 0; i < T; ++i)
                            for (int x = 0; x < 2; ++x) {
                                float& y = s[i][j][2 * x + e];
                                if (inside) y = fmaf(y, a.scale, low<S.type>(p[i * 16 + x * 8]));
                                else y = fmaf(y, a.scale, low<S.type>(p[min(key0 + i * 16 + g + x * 8, a.sk - 1) * a.bias_k]));
                            }
                    }
            }
            // Mask: key by key an interval of queries
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
            // P and dS
            u32 pa[T][P / 16][4], da[T][P / 16][4];
#pragma unroll
            for (int j = 0; j < P / 8; ++j) {
                float2 lse = load_shared2(slse + (part + j * 8 + t * 2) * 4), delta = load_shared2(sdelta + (part + j * 8 + t * 2) * 4);
                for (int i = 0; i < T; ++i) {
                    float p[4], d[4];
                    for (int e = 0; e < 4; ++e) {
                        const float l = e & 1 ? lse.y : lse.x;
                        p[e] = natural ? ex2((s[i][j][e] - l) * c) : ex2(fmaf(s[i][j][e], c, -l));
                    }
                    if constexpr (S.dropout) {
                        // One call serves column tiles j (queries with bit 3 clear) and j + 1.
                        s[i][j][0] = p[0], s[i][j][1] = p[1], s[i][j][2] = p[2], s[i][j][3] = p[3];
                    } else {
                        for (int e = 0; e < 4; ++e) d[e] = p[e] * (dp[i][j][e] - (e & 1 ? delta.y : delta.x));
                        for (int x = 0; x < 2; ++x) {
                            pa[i][j / 2][(j & 1) * 2 + x] = pack<S.type>(p[2 * x], p[2 * x + 1]);
                            da[i][j / 2][(j & 1) * 2 + x] = pack<S.type>(d[2 * x], d[2 * x + 1]);
                        }
                    }
                }
            }
            if constexpr (S.dropout) {
                const u32 drop = a.drop << 16;
#pragma unroll
                for (int jj = 0; jj < P / 16; ++jj)
                    for (int i = 0; i < T; ++i) {
                        bool keep[2][4];
                        for (int e = 0; e < 2; ++e) {
                            uint2 r = random(m0 + part + jj * 16 + t * 2 + e, key0 + i * 16 + g);
                            keep[0][e] = (r.x << 16) >= drop, keep[0][2 + e] = r.x >= drop;
                            keep[1][e] = (r.y << 16) >= drop, keep[1][2 + e] = r.y >= drop;
                        }
                        for (int y = 0; y < 2; ++y) {
                            const int j = 2 * jj + y;
                            float2 delta = load_shared2(sdelta + (part + j * 8 + t * 2) * 4);
                            float d[4], p[4];
                            for (int e = 0; e < 4; ++e) {
                                const float factor = keep[y][e] ? a.keep_scale : 0.f;
                                d[e] = s[i][j][e] * fmaf(dp[i][j][e], factor, -(e & 1 ? delta.y : delta.x));
                                p[e] = s[i][j][e] * factor;
                            }
                            for (int x = 0; x < 2; ++x) {
                                pa[i][jj][y * 2 + x] = pack<S.type>(p[2 * x], p[2 * x + 1]);
                                da[i][jj][y * 2 + x] = pack<S.type>(d[2 * x], d[2 * x + 1]);
                            }
                        }
                    }
            }
            // dS^T to shared memory, [key][query]
#pragma unroll
            for (int i = 0; i < T; ++i)
                for (int j = 0; j < (S.dq ? P / 8 : 0); ++j)
                    for (int x = 0; x < 2; ++x)
                        store_shared(ds_to + Tile<M>::offset((warp * T + i) * 16 + g + x * 8, part / 8 + j) + t * 4, da[i][j / 2][(j & 1) * 2 + x]);
            // dV += P^T dO, dK += dS^T Q
#pragma unroll
            for (int kk = 0; kk < P / 16; ++kk)
                for (int j = 0; j < D / 16; ++j) {
                    u32 ob[4], qb[4];
                    ldmatrix_trans(ob, sdo + lanes.at(part + kk * 16, j));
                    for (int i = 0; i < T; ++i) {
                        mma<S.type>(dv[i][2 * j], pa[i][kk], ob[0], ob[1]);
                        mma<S.type>(dv[i][2 * j + 1], pa[i][kk], ob[2], ob[3]);
                    }
                    ldmatrix_trans(qb, sq + lanes.at(part + kk * 16, j));
                    for (int i = 0; i < T; ++i) {
                        mma<S.type>(dk[i][2 * j], da[i][kk], qb[0], qb[1]);
                        mma<S.type>(dk[i][2 * j + 1], da[i][kk], qb[2], qb[3]);
                    }
                }
        }
        if constexpr (S.dq && !S.delay) {
            sync();
            add_dq(n, now);
        }
    }
    copy_wait<0>();
    sync();
    if constexpr (S.dq && S.delay) {
        if (steps > 0) add_dq(steps - 1, before);
        sync();
    }

    // dk, dv through the K and V tiles (each warp its own rows), written in 16-byte pieces.
#pragma unroll
    for (int i = 0; i < T; ++i)
        for (int j = 0; j < D / 8; ++j)
            for (int x = 0; x < 2; ++x) {
                const u32 at = Tile<D>::offset(i * 16 + g + x * 8, j) + t * 4;
                store_shared(my_k + at, pack<S.type>(dk[i][j][2 * x] * a.scale, dk[i][j][2 * x + 1] * a.scale));
                store_shared(my_v + at, pack<S.type>(dv[i][j][2 * x], dv[i][j][2 * x + 1]));
            }
    __syncwarp();
    u16 *dk_to = a.dk + b * a.dks.b + hk * a.dks.h + key0 * a.dks.s, *dv_to = a.dv + b * a.dvs.b + hk * a.dvs.h + key0 * a.dvs.s;
    for (int i = lane; i < T * 16 * (D / 8); i += 32) {
        int r = i / (D / 8), j = i % (D / 8);
        if (key0 + r < a.sk) {
            store_global(dk_to + r * a.dks.s + j * 8, load_shared4(my_k + Tile<D>::offset(r, j)));
            store_global(dv_to + r * a.dvs.s + j * 8, load_shared4(my_v + Tile<D>::offset(r, j)));
        }
    }
}

// dQ alone, by recomputing S and dP with the queries in the warps' rows: seven products in all instead of five, but no fp32 sum in memory, no
// atomics, no conversion, the same bits every run. As `forward`: P's place is taken by dS, V's by K.
template <Spec S> __global__ void __launch_bounds__(S.warps * 32, S.ctas) backward_dq(const __grid_constant__ Args a) {
    constexpr int D = S.d, T = S.tiles, N = S.step, threads = S.warps * 32, M = S.warps * T * 16;
    constexpr u32 q_bytes = M * D * 2, kv_bytes = N * D * 2, bias_bytes = S.bias == Bias::tile ? M * N * 2 : 0, stage_bytes = 2 * kv_bytes + bias_bytes;
    constexpr bool natural = S.bias != Bias::none;
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 sq = shared_address(memory), sdo = sq + q_bytes, stage0 = sdo + q_bytes;
    const int thread = threadIdx.x, lane = thread & 31, warp = __shfl_sync(~0u, thread >> 5, 0), g = lane >> 2, t = lane & 3;
    const int tiles = (a.sq + M - 1) / M;
    const u32 bh = blockIdx.x / tiles;
    const int tile = S.causal ? tiles - 1 - (int)(blockIdx.x % tiles) : (int)(blockIdx.x % tiles);
    const int b = bh / a.heads, h = bh % a.heads, hk = h / (a.heads / a.heads_k), m0 = tile * M, row0 = m0 + warp * T * 16;
    const u16 *k = a.k + b * a.ks.b + hk * a.ks.h, *v = a.v + b * a.vs.b + hk * a.vs.h;
    const math::Band<int> band{a.sq, a.sk, a.low, a.high};
    const math::Interval<int> all{0, a.sk}, keys = S.causal ? band.keys_of_rows(m0, min(m0 + M, a.sq)) : all;
    const math::Interval<int> keys_warp = S.causal ? row0 < a.sq ? band.keys_of_rows(row0, min(row0 + T * 16, a.sq)) : math::Interval<int>{0, 0} : all;
    const int first = keys.begin / N, steps = keys.empty() ? first : (keys.end + N - 1) / N;
    auto load = [&](int n) {
        u32 to = stage0 + n % S.stages * stage_bytes;
        load_tile<N, D, threads>(to, k + (i64)n * N * a.ks.s, a.ks.s, a.sk - n * N, thread);
        load_tile<N, D, threads>(to + kv_bytes, v + (i64)n * N * a.vs.s, a.vs.s, a.sk - n * N, thread);
        if constexpr (S.bias == Bias::tile)
            load_bias<M, N, threads>(to + 2 * kv_bytes, a.bias + b * a.biases.b + h * a.biases.h + m0 * a.biases.s + n * N, a.biases.s, a.sq - m0, a.sk - n * N, thread);
    };
    load_tile<M, D, threads>(sq, a.q + b * a.qs.b + h * a.qs.h + m0 * a.qs.s, a.qs.s, a.sq - m0, thread);
    load_tile<M, D, threads>(sdo, a.d_o + b * a.dos.b + h * a.dos.h + m0 * a.dos.s, a.dos.s, a.sq - m0, thread);
    if (first < steps) load(first);
    copy_commit();
    float dq[T][D / 8][4] = {}, lse[T][2], delta[T][2];
    for (int i = 0; i < T; ++i)
        for (int x = 0; x < 2; ++x) {
            const i64 row = (i64)bh * a.sq_pad + min(row0 + i * 16 + g + x * 8, a.sq_pad - 1);
            lse[i][x] = a.lse_pad[row], delta[i][x] = a.delta_pad[row];
        }
    const float c = natural ? log2e : a.scale * log2e;
    const Dropout random = S.dropout ? Dropout(a.seed, a.offset, bh) : Dropout();
    Dropout::Row rows[T];
    if constexpr (S.dropout)
        for (int i = 0; i < T; ++i) rows[i] = random.row(row0 + i * 16 + g);
    const typename Tile<D>::Lane lanes(0, lane), lanes_k(0, lane, true);
    const typename Tile<N>::Lane lanes_bias(0, lane);
    const u32 my_q = sq + warp * T * 16 * D * 2, my_do = my_q + q_bytes;

    for (int n = first; n < steps; ++n) {
        copy_wait<0>();
        sync();
        if (n + 1 < steps) load(n + 1);
        copy_commit();
        const int n0 = n * N;
        if (S.causal && (n0 >= keys_warp.end || n0 + N <= keys_warp.begin)) continue;
        const u32 sk = stage0 + n % S.stages * stage_bytes, sv = sk + kv_bytes;
        float s[T][N / 8][4] = {}, dp[T][N / 8][4] = {};
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk) {
            u32 qa[T][4];
            for (int i = 0; i < T; ++i) ldmatrix(qa[i], my_q + lanes.at(i * 16, kk));
            for (int j = 0; j < N / 16; ++j) {
                u32 kb[4];
                ldmatrix(kb, sk + lanes_k.at(j * 16, kk));
                for (int i = 0; i < T; ++i) mma<S.type>(s[i][2 * j], qa[i], kb[0], kb[1]), mma<S.type>(s[i][2 * j + 1], qa[i], kb[2], kb[3]);
            }
        }
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk) {
            u32 oa[T][4];
            for (int i = 0; i < T; ++i) ldmatrix(oa[i], my_do + lanes.at(i * 16, kk));
            for (int j = 0; j < N / 16; ++j) {
                u32 vb[4];
                ldmatrix(vb, sv + lanes_k.at(j * 16, kk));
                for (int i = 0; i < T; ++i) mma<S.type>(dp[i][2 * j], oa[i], vb[0], vb[1]), mma<S.type>(dp[i][2 * j + 1], oa[i], vb[2], vb[3]);
            }
        }
        if constexpr (S.bias == Bias::tile) {
#pragma unroll
            for (int i = 0; i < T; ++i)
                for (int nn = 0; nn < N / 16; ++nn) {
                    u32 r[4];
                    ldmatrix(r, sk + 2 * kv_bytes + lanes_bias.at(0, nn) + (warp * T + i) * 16 * N * 2);
                    for (int x = 0; x < 4; ++x) {
                        float* e = &s[i][2 * nn + (x >> 1)][(x & 1) * 2];
                        e[0] = fmaf(e[0], a.scale, low<S.type>(r[x]));
                        e[1] = fmaf(e[1], a.scale, high<S.type>(r[x]));
                    }
                }
        }
        if (n0 + N > a.sk || (S.causal && band.tile(row0, row0 + T * 16, n0, n0 + N) == math::TileClass::kEdge)) {
#pragma unroll
            for (int i = 0; i < T; ++i)
                for (int x = 0; x < 2; ++x) {
                    const math::Interval<int> row = S.causal ? band.keys_of(row0 + i * 16 + g + x * 8) : all;
                    const int begin = row.begin - n0 - t * 2, end = row.end - n0 - t * 2;
                    for (int j = 0; j < N / 8; ++j)
                        for (int e = 0; e < 2; ++e)
                            if (j * 8 + e >= end || (S.causal && j * 8 + e < begin)) s[i][j][2 * x + e] = -infinity;
                }
        }
        if constexpr (S.dropout) {
            const u32 drop = a.drop << 16;
#pragma unroll
            for (int i = 0; i < T; ++i)
                for (int nn = 0; nn < N / 16; ++nn)
                    for (int e = 0; e < 2; ++e) {
                        uint2 r = random(rows[i], (n0 / 2 + t * 2) ^ (nn * 8 + e));
                        float(&d0)[4] = dp[i][2 * nn], (&d1)[4] = dp[i][2 * nn + 1];
                        d0[e] *= (r.x << 16) < drop ? 0.f : a.keep_scale;
                        d1[e] *= r.x < drop ? 0.f : a.keep_scale;
                        d0[2 + e] *= (r.y << 16) < drop ? 0.f : a.keep_scale;
                        d1[2 + e] *= r.y < drop ? 0.f : a.keep_scale;
                    }
        }
#pragma unroll
        for (int i = 0; i < T; ++i)
            for (int j = 0; j < N / 8; ++j)
                for (int e = 0; e < 4; ++e) {
                    const float p = natural ? ex2((s[i][j][e] - lse[i][e >> 1]) * c) : ex2(fmaf(s[i][j][e], c, -lse[i][e >> 1]));
                    s[i][j][e] = p * (dp[i][j][e] - delta[i][e >> 1]);
                }
#pragma unroll
        for (int kk = 0; kk < N / 16; ++kk) {
            u32 da[T][4];
            for (int i = 0; i < T; ++i)
                for (int x = 0; x < 4; ++x) da[i][x] = pack<S.type>(s[i][2 * kk + (x >> 1)][(x & 1) * 2], s[i][2 * kk + (x >> 1)][(x & 1) * 2 + 1]);
            for (int j = 0; j < D / 16; ++j) {
                u32 kb[4];
                ldmatrix_trans(kb, sk + lanes.at(kk * 16, j));
                for (int i = 0; i < T; ++i) mma<S.type>(dq[i][2 * j], da[i], kb[0], kb[1]), mma<S.type>(dq[i][2 * j + 1], da[i], kb[2], kb[3]);
            }
        }
    }
    copy_wait<0>();
    if (first >= steps) sync();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < T; ++i)
        for (int j = 0; j < D / 8; ++j)
            for (int x = 0; x < 2; ++x)
                store_shared(my_q + Tile<D>::offset(i * 16 + g + x * 8, j) + t * 4, pack<S.type>(dq[i][j][2 * x] * a.scale, dq[i][j][2 * x + 1] * a.scale));
    __syncwarp();
    u16* out = a.dq + b * a.dqs.b + h * a.dqs.h + row0 * a.dqs.s;
    for (int i = lane; i < T * 16 * (D / 8); i += 32) {
        int r = i / (D / 8), j = i % (D / 8);
        if (row0 + r < a.sq) store_global(out + r * a.dqs.s + j * 8, load_shared4(my_q + Tile<D>::offset(r, j)));
    }
}

}  // namespace fovea
