// SPDX-License-Identifier: Apache-2.0
// Forward: o = softmax(scale q k^T + bias) v.
// A CTA owns warps * tiles * 16 queries of one head; each warp owns `tiles` row tiles of 16 and shares nothing with the others but K and V.
// K, V (and the bias tile) of the next step are copied by cp.async while this step computes; one barrier a step:
//   wait for step n | barrier | start copies of n + 1 | S = Q K^T | mask, softmax | O += P V
// P goes from the accumulators of S to the A operand of O without leaving the registers.
namespace fovea {

template <Spec S> __global__ void __launch_bounds__(S.warps * 32, S.ctas) forward(const __grid_constant__ Args a) {
    constexpr int D = S.d, T = S.tiles, N = S.step, threads = S.warps * 32, M = S.warps * T * 16;
    constexpr u32 q_bytes = M * D * 2, kv_bytes = N * D * 2, bias_bytes = S.bias == Bias::tile ? M * N * 2 : 0;
    constexpr u32 stage_bytes = 2 * kv_bytes + bias_bytes;
    constexpr bool natural = S.bias != Bias::none;  // scores in natural units instead of multiples of `scale`
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 smem = shared_address(memory), sq = smem, stage0 = smem + q_bytes;
    const int thread = threadIdx.x, lane = thread & 31, warp = __shfl_sync(~0u, thread >> 5, 0), g = lane >> 2, t = lane & 3;

    // Which tile: the longest first under a causal mask.
    const int tiles = (a.sq + M - 1) / M;
    const u32 bh = blockIdx.x / tiles;
    const int tile = S.causal ? tiles - 1 - (int)(blockIdx.x % tiles) : (int)(blockIdx.x % tiles);
    const int b = bh / a.heads, h = bh % a.heads, hk = h / (a.heads / a.heads_k);
    const int m0 = tile * M, row0 = m0 + warp * T * 16;
    const u16* q = a.q + b * a.qs.b + h * a.qs.h + m0 * a.qs.s;
    const u16* k = a.k + b * a.ks.b + hk * a.ks.h;
    const u16* v = a.v + b * a.vs.b + hk * a.vs.h;
    const u16* bias = a.bias + b * a.biases.b + h * a.biases.h;
    // The keys that any row of the CTA meets, and of the warp.
    const math::Band<int> band{a.sq, a.sk, a.low, a.high};
    const math::Interval<int> all{0, a.sk}, keys = S.causal ? band.keys_of_rows(m0, min(m0 + M, a.sq)) : all;
    const math::Interval<int> keys_warp = S.causal ? row0 < a.sq ? band.keys_of_rows(row0, min(row0 + T * 16, a.sq)) : math::Interval<int>{0, 0} : all;
    const int first = keys.begin / N, steps = keys.empty() ? first : (keys.end + N - 1) / N;

    auto load = [&](int n) {
        u32 to = stage0 + (n % S.stages) * stage_bytes;
        load_tile<N, D, threads>(to, k + (i64)n * N * a.ks.s, a.ks.s, a.sk - n * N, thread);
        load_tile<N, D, threads>(to + kv_bytes, v + (i64)n * N * a.vs.s, a.vs.s, a.sk - n * N, thread);
        if constexpr (S.bias == Bias::tile)
            load_bias<M, N, threads>(to + 2 * kv_bytes, bias + m0 * a.biases.s + n * N, a.biases.s, a.sq - m0, a.sk - n * N, thread);
    };
    load_tile<M, D, threads>(sq, q, a.qs.s, a.sq - m0, thread);
    if (first < steps) load(first);
    copy_commit();

    float o[T][D / 8][4] = {}, top[T][2], sum[T][2] = {}, total[T][4] = {};
    const u32 one = pack<S.type>(1.f, 1.f);
    for (int i = 0; i < T; ++i) top[i][0] = top[i][1] = -infinity;
    const float c = natural ? log2e : a.scale * log2e;
    const Dropout random = S.dropout ? Dropout(a.seed, a.offset, bh) : Dropout();
    Dropout::Row rows[T];
    if constexpr (S.dropout)
        for (int i = 0; i < T; ++i) rows[i] = random.row(row0 + i * 16 + g);
    const typename Tile<D>::Lane lanes(0, lane), lanes_k(0, lane, true);
    const typename Tile<N>::Lane lanes_bias(0, lane);
    const u32 my_q = sq + warp * T * 16 * D * 2;
    u32 qr[S.q_registers ? T : 1][S.q_registers ? D / 16 : 1][4];

    for (int n = first; n < steps; ++n) {
        copy_wait<0>();
        sync();
        if (n + 1 < steps) load(n + 1);
        copy_commit();
        if constexpr (S.q_registers)
            if (n == first)
                for (int i = 0; i < T; ++i)
                    for (int kk = 0; kk < D / 16; ++kk) ldmatrix(qr[i][kk], my_q + lanes.at(i * 16, kk));
        const int n0 = n * N;
        if (S.causal && (n0 >= keys_warp.end || n0 + N <= keys_warp.begin)) continue;
        const u32 sk = stage0 + (n % S.stages) * stage_bytes, sv = sk + kv_bytes;

        uint2 words[S.early ? T : 1][S.early ? N / 8 : 1];
        if constexpr (S.early)
            for (int i = 0; i < T; ++i)
                for (int j = 0; j < N / 8; ++j) words[i][j] = random(rows[i], (n0 / 2 + t * 2) ^ ((j >> 1) * 8 + (j & 1)));

        // S = Q K^T
        float s[T][N / 8][4] = {};
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk) {
            u32 qa[T][4];
            for (int i = 0; i < T; ++i) {
                if constexpr (S.q_registers)
                    for (int e = 0; e < 4; ++e) qa[i][e] = qr[i][kk][e];
                else
                    ldmatrix(qa[i], my_q + lanes.at(i * 16, kk));
            }
#pragma unroll
            for (int nn = 0; nn < N / 16; ++nn) {
                u32 kb[4];
                ldmatrix(kb, sk + lanes_k.at(nn * 16, kk));
                for (int i = 0; i < T; ++i) {
                    mma<S.type>(s[i][2 * nn], qa[i], kb[0], kb[1]);
                    mma<S.type>(s[i][2 * nn + 1], qa[i], kb[2], kb[3]);
                }
            }
        }

        // Bias
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
        if constexpr (S.bias == Bias::element) {
            const bool inside = a.bias_k == 1 && n0 + N <= a.sk;  // then a row's elements lie at constant distances
#pragma unroll
            for (int i = 0; i < T; ++i)
                for (int x = 0; x < 2; ++x) {
                    const u16* p = bias + min(row0 + i * 16 + g + x * 8, a.sq - 1) * a.biases.s + (inside ? n0 + t * 2 : 0);
                    if (inside) {
                        for (int j = 0; j < N / 8; ++j)
                            for (int e = 0; e < 2; ++e) s[i][j][2 * x + e] = fmaf(s[i][j][2 * x + e], a.scale, low<S.type>(p[j * 8 + e]));
                    } else {
                        for (int j = 0; j < N / 8; ++j)
                            for (int e = 0; e < 2; ++e)
                                s[i][j][2 * x + e] = fmaf(s[i][j][2 * x + e], a.scale, low<S.type>(p[min(n0 + j * 8 + t * 2 + e, a.sk - 1) * a.bias_k]));
                    }
                }
        }

        // Mask: row by row an interval of keys
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

        // Softmax
#pragma unroll
        for (int i = 0; i < T; ++i) {
            float next[2], factor[2], base[2];
            for (int x = 0; x < 2; ++x) {
                float y = s[i][0][2 * x];
                for (int j = 0; j < N / 8; ++j) y = fmaxf(y, fmaxf(s[i][j][2 * x], s[i][j][2 * x + 1]));
                y = fmaxf(y, __shfl_xor_sync(~0u, y, 1));
                y = fmaxf(y, __shfl_xor_sync(~0u, y, 2));
                next[x] = fmaxf(y, top[i][x]);
            }
            bool rescale = true;
            if constexpr (S.lazy) {
                rescale = __any_sync(~0u, (next[0] - top[i][0]) * c > 8.f || (next[1] - top[i][1]) * c > 8.f);
                if (!rescale) next[0] = top[i][0], next[1] = top[i][1];
            }
            for (int x = 0; x < 2; ++x) base[x] = next[x] == -infinity ? 0.f : natural ? next[x] : next[x] * c;
            if (rescale) {
                for (int x = 0; x < 2; ++x) {
                    factor[x] = natural ? ex2((top[i][x] - base[x]) * c) : ex2(fmaf(top[i][x], c, -base[x]));
                    if constexpr (S.ones) total[i][2 * x] *= factor[x];
                    else sum[i][x] *= factor[x];
                    top[i][x] = next[x];
                }
                for (int j = 0; j < D / 8; ++j)
                    for (int e = 0; e < 4; ++e) o[i][j][e] *= factor[e >> 1];
            }
            // With a bias scores may be huge, and then base * c loses the difference: subtract first. Ordinary ones take one instruction.
            if (natural && __any_sync(~0u, fmaxf(fabsf(base[0]), fabsf(base[1])) > 1024.f)) {
                for (int j = 0; j < N / 8; ++j)
                    for (int e = 0; e < 4; ++e) s[i][j][e] = (s[i][j][e] - base[e >> 1]) * c;
            } else {
                const float b0 = natural ? base[0] * c : base[0], b1 = natural ? base[1] * c : base[1];
                for (int j = 0; j < N / 8; ++j)
                    for (int e = 0; e < 4; ++e) s[i][j][e] = fmaf(s[i][j][e], c, -(e < 2 ? b0 : b1));
            }
            for (int j = 0; j < N / 8; ++j)
                for (int e = 0; e < 4; ++e) {
                    s[i][j][e] = ex2(s[i][j][e]);
                    if constexpr (!S.ones) sum[i][e >> 1] += s[i][j][e];
                }
        }

        // O += P V, sum += P 1 (of the P that is multiplied, before dropout)
#pragma unroll
        for (int kk = 0; kk < N / 16; ++kk) {
            u32 pa[T][4];
            for (int i = 0; i < T; ++i)
                for (int x = 0; x < 4; ++x) pa[i][x] = pack<S.type>(s[i][2 * kk + (x >> 1)][(x & 1) * 2], s[i][2 * kk + (x >> 1)][(x & 1) * 2 + 1]);
            if constexpr (S.ones)
                for (int i = 0; i < T; ++i) mma<S.type>(total[i], pa[i], one, one);
            // Dropout: one call for rows {i, i + 8} x keys {j, j + 8}, which are one register of each of pa's four, one half a call
            if constexpr (S.dropout) {
                static_assert((N & N - 1) == 0);  // so that the column's parts have no bit in common
                const u32 drop = a.drop << 16;
#pragma unroll
                for (int i = 0; i < T; ++i) {
                    uint2 r[2];
                    for (int e = 0; e < 2; ++e) {
                        if constexpr (S.early) r[e] = words[i][kk * 2 + e];
                        else r[e] = random(rows[i], (n0 / 2 + t * 2) ^ (kk * 8 + e));
                    }
                    pa[i][0] &= ((r[0].x << 16) < drop ? 0 : 0xffffu) | ((r[1].x << 16) < drop ? 0 : 0xffff0000u);
                    pa[i][1] &= ((r[0].y << 16) < drop ? 0 : 0xffffu) | ((r[1].y << 16) < drop ? 0 : 0xffff0000u);
                    pa[i][2] &= (r[0].x < drop ? 0 : 0xffffu) | (r[1].x < drop ? 0 : 0xffff0000u);
                    pa[i][3] &= (r[0].y < drop ? 0 : 0xffffu) | (r[1].y < drop ? 0 : 0xffff0000u);
                }
            }
#pragma unroll
            for (int dd = 0; dd < D / 16; ++dd) {
                u32 vb[4];
                ldmatrix_trans(vb, sv + lanes.at(kk * 16, dd));
                for (int i = 0; i < T; ++i) {
                    mma<S.type>(o[i][2 * dd], pa[i], vb[0], vb[1]);
                    mma<S.type>(o[i][2 * dd + 1], pa[i], vb[2], vb[3]);
                }
            }
        }
    }
    copy_wait<0>();
    if (first >= steps) sync();

    // Normalise; o through this warp's own rows of the Q tile, so that it is written in 16-byte pieces.
    __syncwarp();
#pragma unroll
    for (int i = 0; i < T; ++i) {
        for (int x = 0; x < 2; ++x) {
            float l = S.ones ? total[i][2 * x] : sum[i][x];
            if constexpr (!S.ones) l += __shfl_xor_sync(~0u, l, 1);
            if constexpr (!S.ones) l += __shfl_xor_sync(~0u, l, 2);
            const int r = i * 16 + g + x * 8, row = row0 + r;
            const float inverse = l > 0.f ? (S.dropout ? a.keep_scale : 1.f) / l : l == 0.f ? 0.f : l;
            if (t == 0 && row < a.sq) a.lse[(i64)bh * a.sq + row] = l == 0.f ? -infinity : (natural ? top[i][x] : top[i][x] * a.scale) + lg2(l) * ln2;
            for (int j = 0; j < D / 8; ++j)
                store_shared(my_q + Tile<D>::offset(r, j) + t * 4, pack<S.type>(o[i][j][2 * x] * inverse, o[i][j][2 * x + 1] * inverse));
        }
    }
    __syncwarp();
    u16* out = a.out + b * a.outs.b + h * a.outs.h + row0 * a.outs.s;
    for (int i = lane; i < T * 16 * (D / 8); i += 32) {
        int r = i / (D / 8), j = i % (D / 8);
        if (row0 + r < a.sq) store_global(out + r * a.outs.s + j * 8, load_shared4(my_q + Tile<D>::offset(r, j)));
    }
}

template <Spec S> constexpr int forward_bytes = S.warps * S.tiles * 16 * S.d * 2 + S.stages * (2 * S.step * S.d * 2 + (S.bias == Bias::tile ? S.warps * S.tiles * 16 * S.step * 2 : 0));

}  // namespace fovea
