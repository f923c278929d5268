// SPDX-License-Identifier: Apache-2.0
// Attention backward for Hopper. A CTA owns groups * blocks * 64 keys of one (batch, head) and streams query blocks of `rows`.
//
//   warp group 0       warp 0: TMA of K, V (once a key block), Q, dO (ring)   warp 1: TMA of the bias tiles (ring)
//                      warps 2, 3: lse and delta = <o, do> straight from global memory (Spec::delta)
//   warp groups 1...   each owns blocks * 64 keys: S^T = K Q^T, dP^T = V dO^T, P^T and dS^T in registers, dV += P^T dO, dK += dS^T Q
//
// The tile ring is used in place: TMA writes the bias as [query][key], ldmatrix.trans hands it over in the layout of S^T, stmatrix.trans
// puts dS back where the bias was, and there it is a K-major A operand of dQ = dS K. The groups never meet at a barrier: the query block m
// is given to one of them in turn, which computes dQ of it a step later, when everybody's dS has most likely arrived.
#pragma once

enum DqMode { kDqFinal, kDqPasses, kDqReduce, kDqBulk };

struct Spec {
  int d;       // head dimension: 32, 64, 128
  int groups;  // consumer warp groups
  int blocks;  // 64-key blocks a group
  int rows;    // queries a step: 64 or 128; 80 at d = 128, dQ transposed
  int stages;  // ring of Q and dO
  int tiles;   // ring of bias / dS tiles
  int kv;      // buffers of K and V
  int dq;      // DqMode
  int early;   // 1: dQ of the step before is issued while this step's dV and dK are in flight; 2: and each of two groups does half of its columns; 3: after the first 64-key block
  bool bias, causal, delta, tail;  // tail: the last key block may pass the end
};

struct Params {
  const u16 *o, *dout;         // for delta inside the kernel
  const float* lse;            // B, H, S, natural (delta inside)
  float *lse_rows, *delta_rows;  // B * H, padded length: written by the kernel (delta inside) or by prepare
  float* dq_acc;               // fp32, register order
  u16 *dq, *dk, *dv;
  i64 o_b, o_s, o_h, do_b, do_s, do_h, dq_b, dq_s, dq_h, dk_b, dk_s, dk_h;  // strides in elements; dv as dk
  int B, H, S, padded, passes, items, b2, bias_b1, bias_b2, bias_h;  // bias plane = b / b2 * bias_b1 + b % b2 * bias_b2 + h * bias_h
  float scale;
};

constexpr float kLog2e = 1.4426950408889634f;

template <Spec S>
struct Shape {
  static constexpr int keys = S.groups * S.blocks * 64;
  static constexpr u32 width = S.d * 2 < 128 ? S.d * 2 : 128, panels = S.d * 2 / width, steps = width / 32;  // swizzle width, panels a tile, k16 steps a panel
  static constexpr u32 kv_bytes = keys * S.d * 2, q_bytes = S.rows * S.d * 2, tile_bytes = S.rows * keys * 2;
  static constexpr u32 stage_bytes = S.dq == kDqBulk ? (S.rows == 80 ? 80 * 64 : 64 * (S.early == 2 ? S.d / 2 : S.d)) * 4 : 0;
  static constexpr u32 k = 0, v = k + S.kv * kv_bytes, q = v + S.kv * kv_bytes, dout = q + S.stages * q_bytes, tile = dout + S.stages * q_bytes;
  static constexpr u32 out = tile + S.tiles * tile_bytes, stage = out + (S.delta ? S.stages * q_bytes : 0), lse = stage + S.groups * stage_bytes, delta = lse + S.stages * S.rows * 4, bars = delta + S.stages * S.rows * 4;
  static constexpr u32 kv_full = bars, kv_empty = kv_full + 8 * S.kv, q_full = kv_empty + 8 * S.kv, q_empty = q_full + 8 * S.stages;
  static constexpr u32 bias_full = q_empty + 8 * S.stages, ds_full = bias_full + 8 * S.tiles, ds_empty = ds_full + 8 * S.tiles, delta_full = ds_empty + 8 * S.tiles, bytes = delta_full + 8 * S.stages;
};

struct Item { int b, h, key0; };

template <Spec S>
FOVEA_DEVICE Item item_of(int w, const Params& p) {
  if constexpr (S.dq == kDqFinal || S.dq == kDqPasses) return {w / p.H, w % p.H, 0};
  int nb = (p.S + Shape<S>::keys - 1) / Shape<S>::keys, bh = w / nb;
  return {bh / p.H, bh % p.H, (w % nb) * Shape<S>::keys};
}

struct Ring {
  u32 slot = 0, parity;
  FOVEA_DEVICE explicit Ring(u32 first) : parity(first) {}
  FOVEA_DEVICE void next(u32 n) { if (++slot == n) { slot = 0; parity ^= 1; } }
};

// 8 columns of rows r and r + 8 of a 64-row job, from a quad's 64 contiguous bytes of the accumulator.
template <int D>
FOVEA_DEVICE void convert_quad(const Params& p, i64 tile, int job, int bh, int task) {
  const int n = task % (D / 8), quad = task / (D / 8), row = job * 64 + quad / 8 * 16 + quad % 8;
  const F4* from = (const F4*)p.dq_acc + tile * (16 * D) + n * 128 + quad * 4;
  const F4 a = load_global_cg(from), b = load_global_cg(from + 1), c = load_global_cg(from + 2), d = load_global_cg(from + 3);
  u16* to = p.dq + bh / p.H * p.dq_b + bh % p.H * p.dq_h + row * p.dq_s + n * 8;
  const float s = p.scale;
  if (row < p.S) *(U4*)to = {pack_bf16(a.x * s, a.y * s), pack_bf16(b.x * s, b.y * s), pack_bf16(c.x * s, c.y * s), pack_bf16(d.x * s, d.y * s)};
  if (row + 8 < p.S) *(U4*)(to + 8 * p.dq_s) = {pack_bf16(a.z * s, a.w * s), pack_bf16(b.z * s, b.w * s), pack_bf16(c.z * s, c.w * s), pack_bf16(d.z * s, d.w * s)};
}

template <Spec S>
__global__ void __launch_bounds__((S.groups + 1) * 128, 1)
backward(const __grid_constant__ TensorMap map_o, const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_do, const __grid_constant__ TensorMap map_k,
         const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_bias, const __grid_constant__ Params p) {
  using Z = Shape<S>;
  constexpr int D = S.d, G = S.groups, M = S.rows, KEYS = Z::keys, WARPS = G * 4;
  constexpr u32 W = Z::width;
  constexpr bool overlap = G == 2 && S.blocks * D <= 96;  // dV, dK of one block in flight during S, dP of the next: where registers allow
  constexpr bool early = S.early == 1 || S.early == 2, middle = S.early == 3, split = S.early == 2;
  constexpr bool dqt = M == 80;          // dQ^T = K^T dS^T: 64 of the 128 columns a group, so that rows need not be a multiple of 64
  constexpr int JOB = dqt ? 80 : 64;     // queries of a dQ job
  constexpr int DQ = split ? D / 2 : D;  // columns of dQ in a job
  constexpr int R = dqt ? 40 : DQ / 2;   // accumulators of a job
  constexpr bool whole = S.dq == kDqFinal || S.dq == kDqPasses;
  constexpr bool skip = S.causal && !whole && (D <= 64 || S.early == 2 || M == 80);  // elsewhere the branch serialises wgmma (C7512)
  extern __shared__ __align__(1024) u8 memory[];
  const u32 sm = shared_address(memory);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0), lane = threadIdx.x % 32;
  const int blocks_q = (p.S + M - 1) / M;

  if (threadIdx.x == 0) {
    for (int i = 0; i < S.kv; i++) { barrier_init(sm + Z::kv_full + 8 * i, 1); barrier_init(sm + Z::kv_empty + 8 * i, WARPS); }
    for (int i = 0; i < S.stages; i++) { barrier_init(sm + Z::q_full + 8 * i, 1); barrier_init(sm + Z::delta_full + 8 * i, 2); barrier_init(sm + Z::q_empty + 8 * i, WARPS); }
    for (int i = 0; i < S.tiles; i++) { barrier_init(sm + Z::bias_full + 8 * i, 1); barrier_init(sm + Z::ds_full + 8 * i, WARPS); barrier_init(sm + Z::ds_empty + 8 * i, split || dqt ? 8 : 4 * (M / 64)); }
    barrier_init_fence();
  }
  __syncthreads();
  wait_primary();  // programmatic dependent launch: everything before this overlaps the previous kernel's tail
  launch_dependents();

  if (group == 0) {
    registers_down<G == 3 ? 32 : 24>();
    if (warp == 0 && lane == 0) {  // K, V, Q, dO
      Ring q(1), kv(1);
      for (int w = blockIdx.x; w < p.items; w += gridDim.x)
        for (int pass = 0; pass < (S.dq == kDqPasses ? p.passes : 1); pass++) {
          Item it = item_of<S>(w, p);
          int key0 = it.key0 + pass * KEYS, m0 = S.causal ? key0 / M : 0;
          for (int m = m0; m < blocks_q; m++) {
            u32 full = sm + Z::q_full + 8 * q.slot;
            barrier_wait(sm + Z::q_empty + 8 * q.slot, q.parity);
            barrier_expect(full, (S.delta ? 3 * Z::q_bytes : 2 * Z::q_bytes + 2 * M * 4));
            for (u32 i = 0; i < Z::panels; i++) {
              tma_load_4d(sm + Z::q + q.slot * Z::q_bytes + i * M * W, &map_q, full, i * (W / 2), m * M, it.h, it.b);
              tma_load_4d(sm + Z::dout + q.slot * Z::q_bytes + i * M * W, &map_do, full, i * (W / 2), m * M, it.h, it.b);
              if (S.delta) tma_load_4d(sm + Z::out + q.slot * Z::q_bytes + i * M * W, &map_o, full, i * (W / 2), m * M, it.h, it.b);
            }
            if constexpr (!S.delta) {
              i64 row = (i64)(it.b * p.H + it.h) * p.padded + m * M;
              bulk_load(sm + Z::lse + q.slot * M * 4, p.lse_rows + row, M * 4, full);
              bulk_load(sm + Z::delta + q.slot * M * 4, p.delta_rows + row, M * 4, full);
            }
            q.next(S.stages);
            if (m == m0) {
              u32 kvf = sm + Z::kv_full + 8 * kv.slot;
              barrier_wait(sm + Z::kv_empty + 8 * kv.slot, kv.parity);
              barrier_expect(kvf, 2 * Z::kv_bytes);
              for (u32 i = 0; i < Z::panels; i++)
                for (int g = 0; g < G; g++) {
                  u32 at = kv.slot * Z::kv_bytes + i * KEYS * W + g * S.blocks * 64 * W;
                  tma_load_4d(sm + Z::k + at, &map_k, kvf, i * (W / 2), key0 + g * S.blocks * 64, it.h, it.b);
                  tma_load_4d(sm + Z::v + at, &map_v, kvf, i * (W / 2), key0 + g * S.blocks * 64, it.h, it.b);
                }
              kv.next(S.kv);
            }
          }
        }
    }
    if (S.bias && warp == 1 && lane == 0) {  // bias tiles
      Ring t(1);
      for (int w = blockIdx.x; w < p.items; w += gridDim.x)
        for (int pass = 0; pass < (S.dq == kDqPasses ? p.passes : 1); pass++) {
          Item it = item_of<S>(w, p);
          int key0 = it.key0 + pass * KEYS, plane = it.b / p.b2 * p.bias_b1 + it.b % p.b2 * p.bias_b2 + it.h * p.bias_h;
          for (int m = S.causal ? key0 / M : 0; m < blocks_q; m++) {
            u32 full = sm + Z::bias_full + 8 * t.slot;
            barrier_wait(sm + Z::ds_empty + 8 * t.slot, t.parity);
            barrier_expect(full, Z::tile_bytes);
            for (int i = 0; i < KEYS / 64; i++) tma_load_3d(sm + Z::tile + t.slot * Z::tile_bytes + i * M * 128, &map_bias, full, key0 + i * 64, m * M, plane);
            t.next(S.tiles);
          }
        }
    }
    if (S.delta && warp >= 2) {  // lse and delta; O and dO are swizzled alike, so a row's chunks meet in any order
      static_assert(!S.delta || (M == 64 && Z::panels == 1));
      constexpr int lanes = D / 8;
      Ring q(0);
      const int r = (warp - 2) * 32;
      for (int w = blockIdx.x; w < p.items; w += gridDim.x)
        for (int pass = 0; pass < (S.dq == kDqPasses ? p.passes : 1); pass++) {
          Item it = item_of<S>(w, p);
          const i64 bh = it.b * p.H + it.h;
          for (int m = S.causal ? (it.key0 + pass * KEYS) / M : 0; m < blocks_q; m++) {
            int i = m * M + r + lane;
            float l = i < p.S ? p.lse[bh * p.S + i] : __uint_as_float(0x7f800000u);
            if (l < -3.0e38f) l = __uint_as_float(0x7f800000u);  // a dead row: p = 0
            barrier_wait(sm + Z::q_full + 8 * q.slot, q.parity);
            store_shared_f1(sm + Z::lse + (q.slot * M + r + lane) * 4, S.bias ? l : l * kLog2e);
            if (pass == 0) p.lse_rows[bh * p.padded + i] = l;
            u32 at = q.slot * Z::q_bytes + r * W + lane * 16;
#pragma unroll 2
            for (int n = 0; n < lanes; n++) {  // 32 / lanes rows each
              U4 x = load_shared_u4(sm + Z::out + at + n * 512), y = load_shared_u4(sm + Z::dout + at + n * 512);
              float sum = bf16_lo(x.x) * bf16_lo(y.x) + bf16_hi(x.x) * bf16_hi(y.x) + bf16_lo(x.y) * bf16_lo(y.y) + bf16_hi(x.y) * bf16_hi(y.y) +
                          bf16_lo(x.z) * bf16_lo(y.z) + bf16_hi(x.z) * bf16_hi(y.z) + bf16_lo(x.w) * bf16_lo(y.w) + bf16_hi(x.w) * bf16_hi(y.w);
#pragma unroll
              for (int x = 1; x < lanes; x *= 2) sum += __shfl_xor_sync(~0u, sum, x);
              int row = r + n * (32 / lanes) + lane / lanes;
              if (lane % lanes == 0) {
                store_shared_f1(sm + Z::delta + (q.slot * M + row) * 4, sum);
                if (pass == 0) p.delta_rows[bh * p.padded + m * M + row] = sum;
              }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(sm + Z::delta_full + 8 * q.slot);
            q.next(S.stages);
          }
        }
    }
  } else {
    registers_up<G == 3 ? 160 : 240>();
    const int c = group - 1, tid = threadIdx.x % 128, r0 = warp * 16 + lane / 4, c0 = lane % 4 * 2;
    const float scale_log2 = p.scale * kLog2e;
    // Descriptors, of which only the low word moves. A rows of group c; B as [keys or queries][d].
    const u64 k_rows = descriptor(sm + Z::k + c * S.blocks * 64 * W, 16, 8 * W, W), v_rows = descriptor(sm + Z::v + c * S.blocks * 64 * W, 16, 8 * W, W);
    const u64 q_cols = descriptor(sm + Z::q, 16, 8 * W, W), do_cols = descriptor(sm + Z::dout, 16, 8 * W, W);
    const u64 q_mn = descriptor(sm + Z::q, M * W, 8 * W, W), do_mn = descriptor(sm + Z::dout, M * W, 8 * W, W);
    const u64 ds_rows = descriptor(sm + Z::tile, 16, 1024, 128), k_mn = descriptor(sm + Z::k, KEYS * W, 8 * W, W);
    // Where this lane's 16-byte row of a 16 x 16 transposed fragment lies in a tile (ldmatrix and stmatrix alike).
    const u32 frag = (lane / 16 * 8 + lane % 8) * 128 + (((warp * 2 + (lane / 8 & 1)) ^ (lane % 8)) * 16);
    Ring q(0), t(0), kv(0);

    for (int w = blockIdx.x; w < p.items; w += gridDim.x)
      for (int pass = 0; pass < (S.dq == kDqPasses ? p.passes : 1); pass++) {
        Item it = item_of<S>(w, p);
        const int key0 = it.key0 + pass * KEYS, m0 = S.causal ? key0 / M : 0;
        const u32 kv_at = kv.slot * (Z::kv_bytes / 16);
        float dk[S.blocks][D / 2], dv[S.blocks][D / 2];
#pragma unroll
        for (int f = 0; f < S.blocks; f++)
#pragma unroll
          for (int i = 0; i < D / 2; i++) dk[f][i] = dv[f][i] = 0;

        // dQ of query block m, 64 rows a job, by the group whose turn it is. `pending`: dV and dK of this group's own step are in flight.
        static_assert((M == 64 || G == 2) && (!dqt || (D == 128 && !whole)) && (!split || (G == 2 && M == 64 && D == 128)));
        auto job_of = [&](int m) { return m * (M / JOB) + (M == 128 ? c : 0); };
        auto my_turn = [&](int m) { return split || dqt || M == 128 || m % G == c; };
        auto finish_step = [&](u32 q_slot) {
#pragma unroll
          for (int f = 0; f < S.blocks; f++) { pin(dk[f]); pin(dv[f]); }
          if (lane == 0) barrier_arrive(sm + Z::q_empty + 8 * q_slot);
        };
        auto dq_job = [&](int m, u32 slot, u32 parity, bool pending, u32 q_slot) {
            const int job = job_of(m);
            float dq[R];
            float* partial = S.dq == kDqPasses ? p.dq_acc + ((i64)blockIdx.x * (p.padded / 64) + job) * (64 * D) + tid * 4 : nullptr;
            if constexpr (S.dq == kDqPasses) {  // what earlier passes summed is where this one starts
              if (pass > 0) {
#pragma unroll
                for (int n = 0; n < D / 8; n++) { F4 x = *(const F4*)(partial + n * 512); dq[4 * n] = x.x; dq[4 * n + 1] = x.y; dq[4 * n + 2] = x.z; dq[4 * n + 3] = x.w; }
              } else {
#pragma unroll
                for (int i = 0; i < D / 2; i++) dq[i] = 0;
              }
            }
            barrier_wait(sm + Z::ds_full + 8 * slot, parity);
            wgmma_fence();
            if constexpr (dqt) {
#pragma unroll
              for (int k = 0; k < KEYS / 16; k++) mma_ss_a(dq, k_mn + (kv_at + c * (KEYS * W / 16) + k * W), ds_rows + (slot * (Z::tile_bytes / 16) + k / 4 * (M * 8) + k % 4 * 2), k > 0);
            } else {
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++) mma_ss_t(dq, ds_rows + (slot * (Z::tile_bytes / 16) + (M == 128 ? c : 0) * 512 + k / 4 * (M * 8) + k % 4 * 2), k_mn + (kv_at + (split ? c * (KEYS * W / 16) : 0) + k * W), S.dq == kDqPasses || k > 0);
            }
            wgmma_commit();
            if (pending) { wgmma_wait<1>(); finish_step(q_slot); }
            wgmma_wait<0>();
            pin(dq);
            if (lane == 0) barrier_arrive(sm + Z::ds_empty + 8 * slot);
            if constexpr (S.dq == kDqPasses) {
              if (pass < (S.causal ? min(p.passes - 1, (job * 64 + 63) / KEYS) : p.passes - 1)) {
#pragma unroll
                for (int n = 0; n < D / 8; n++) *(F4*)(partial + n * 512) = {dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]};
                return;
              }
            }
            if constexpr (whole) {
              u16* g = p.dq + it.b * p.dq_b + it.h * p.dq_h + (split ? c * 64 : 0);
#pragma unroll
              for (int r = 0; r < 2; r++) {
                int i = job * 64 + r0 + 8 * r;
                u32 x[DQ / 8];
#pragma unroll
                for (int n = 0; n < DQ / 8; n++) x[n] = pack_bf16(dq[4 * n + 2 * r] * p.scale, dq[4 * n + 2 * r + 1] * p.scale);
                store_row_bf16(g + i * p.dq_s, x, i < p.S);
              }
            } else {
              float* g = p.dq_acc + ((i64)(it.b * p.H + it.h) * (p.padded / JOB) + job) * (JOB * D) + (split || dqt ? c * (JOB * 64) : 0);
              if constexpr (S.dq == kDqReduce) {
#pragma unroll
                for (int n = 0; n < R / 4; n++) add_global_f4(g + (n * 128 + tid) * 4, dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
              } else {
                u32 x = sm + Z::stage + c * Z::stage_bytes;
                if (tid == 0) bulk_wait_read();
                named_sync(1 + c, 128);
#pragma unroll
                for (int n = 0; n < R / 4; n++) store_shared_f4(x + (n * 128 + tid) * 16, dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
                proxy_fence();
                named_sync(1 + c, 128);
                if (tid == 0) bulk_add(g, x, R * 512);
              }
            }
        };

        barrier_wait(sm + Z::kv_full + 8 * kv.slot, kv.parity);
        u32 last_slot = 0, last_parity = 0;
        for (int m = m0; m < blocks_q; m++) {
          const u32 qa = q.slot * (Z::q_bytes / 16), tile = sm + Z::tile + t.slot * Z::tile_bytes;
          const u32 lse = sm + Z::lse + q.slot * M * 4 + c0 * 4, delta = sm + Z::delta + q.slot * M * 4 + c0 * 4;
          barrier_wait(sm + Z::q_full + 8 * q.slot, q.parity);
#pragma unroll
          for (int f = 0; f < S.blocks; f++) {
            float s[M / 2], dp[M / 2];
            const int key = key0 + (c * S.blocks + f) * 64;
            const u32 panel = tile + (c * S.blocks + f) * M * 128 + frag;
            if (skip && m * M + M <= key) {  // every query comes before every key: dS = 0, nothing to compute
              if (f == 0) {
                if constexpr (S.bias) barrier_wait(sm + Z::bias_full + 8 * t.slot, t.parity);
                else barrier_wait(sm + Z::ds_empty + 8 * t.slot, t.parity ^ 1);
              }
              const u32 zero[4] = {0, 0, 0, 0};
#pragma unroll
              for (int k = 0; k < M / 16; k++) stmatrix_trans(panel + k * 2048, zero);
              continue;
            }
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < D / 16; k++) mma_ss(s, k_rows + (kv_at + f * 4 * W + k / Z::steps * (KEYS * W / 16) + k % Z::steps * 2), q_cols + (qa + k / Z::steps * (M * W / 16) + k % Z::steps * 2), k > 0);
            wgmma_commit();
#pragma unroll
            for (int k = 0; k < D / 16; k++) mma_ss(dp, v_rows + (kv_at + f * 4 * W + k / Z::steps * (KEYS * W / 16) + k % Z::steps * 2), do_cols + (qa + k / Z::steps * (M * W / 16) + k % Z::steps * 2), k > 0);
            wgmma_commit();
            if (f == 0) {
              if constexpr (S.delta) barrier_wait(sm + Z::delta_full + 8 * q.slot, q.parity);
              if constexpr (S.bias) barrier_wait(sm + Z::bias_full + 8 * t.slot, t.parity);
              else barrier_wait(sm + Z::ds_empty + 8 * t.slot, t.parity ^ 1);
            }
            // What the softmax reads from shared memory is loaded a group of 16 queries ahead, the first while S is computed.
            u32 bias[2][4];
            Float2 row[2][2];
            auto load = [&](int g) {
              if constexpr (S.bias) ldmatrix_trans(panel + g * 2048, bias[g & 1]);
              row[g & 1][0] = load_shared_f2(lse + g * 64);
              row[g & 1][1] = load_shared_f2(lse + g * 64 + 32);
            };
            load(0);
            wgmma_wait<1>();
            pin(s);
            if (overlap && f > 0) { pin(dk[f > 0 ? f - 1 : 0]); pin(dv[f > 0 ? f - 1 : 0]); }
#pragma unroll
            for (int g = 0; g < M / 16; g++) {
              if (g + 1 < M / 16) load(g + 1);
#pragma unroll
              for (int n = 2 * g; n < 2 * g + 2; n++) {
                const Float2 l = row[g & 1][n & 1];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                  float &x = s[4 * n + 2 * r], &y = s[4 * n + 2 * r + 1];
                  if constexpr (S.bias) {
                    u32 z = bias[g & 1][(n & 1) * 2 + r];
                    x = ex2(fmaf(x, scale_log2, (bf16_lo(z) - l.x) * kLog2e));
                    y = ex2(fmaf(y, scale_log2, (bf16_hi(z) - l.y) * kLog2e));
                  } else {
                    x = ex2(fmaf(x, scale_log2, -l.x));
                    y = ex2(fmaf(y, scale_log2, -l.y));
                  }
                }
              }
            }
            if ((S.tail && key + 64 > p.S) || (S.causal && m * M < key + 63)) {
#pragma unroll
              for (int i = 0; i < M / 2; i++) {
                int j = key + r0 + (i >> 1 & 1) * 8, row = m * M + i / 4 * 8 + c0 + (i & 1);
                if ((S.tail && j >= p.S) || (S.causal && j > row)) s[i] = 0;
              }
            }
            auto load_delta = [&](int g) {
              row[g & 1][0] = load_shared_f2(delta + g * 64);
              row[g & 1][1] = load_shared_f2(delta + g * 64 + 32);
            };
            load_delta(0);
            wgmma_wait<0>();
            pin(dp);
            u32 db[M / 4];
#pragma unroll
            for (int g = 0; g < M / 16; g++) {
              if (g + 1 < M / 16) load_delta(g + 1);
#pragma unroll
              for (int n = 2 * g; n < 2 * g + 2; n++) {
                const Float2 d = row[g & 1][n & 1];
#pragma unroll
                for (int r = 0; r < 2; r++) db[2 * n + r] = pack_bf16(s[4 * n + 2 * r] * (dp[4 * n + 2 * r] - d.x), s[4 * n + 2 * r + 1] * (dp[4 * n + 2 * r + 1] - d.y));
              }
            }
            u32 pb[M / 4];
#pragma unroll
            for (int i = 0; i < M / 4; i++) pb[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < M / 16; k++) mma_rs_t(dv[f], pb + 4 * k, do_mn + (qa + k * W), 1);
            wgmma_commit();
#pragma unroll
            for (int k = 0; k < M / 16; k++) stmatrix_trans(panel + k * 2048, db + 4 * k);
#pragma unroll
            for (int k = 0; k < M / 16; k++) mma_rs_t(dk[f], db + 4 * k, q_mn + (qa + k * W), 1);
            wgmma_commit();
            if (!overlap && f + 1 < S.blocks) {
              wgmma_wait<0>();
              pin(dk[f]);
              pin(dv[f]);
              if (middle && f == 0 && m > m0 && my_turn(m - 1)) dq_job(m - 1, last_slot, last_parity, false, 0);
            }
          }
          proxy_fence();
          __syncwarp();
          if (lane == 0) barrier_arrive(sm + Z::ds_full + 8 * t.slot);
          if (early && m > m0 && my_turn(m - 1)) dq_job(m - 1, last_slot, last_parity, true, q.slot);
          else {
            wgmma_wait<0>();
            finish_step(q.slot);
            if (!early && !middle && m > m0 && my_turn(m - 1)) dq_job(m - 1, last_slot, last_parity, false, 0);
          }
          last_slot = t.slot;
          last_parity = t.parity;
          q.next(S.stages);
          t.next(S.tiles);
        }
        if (my_turn(blocks_q - 1)) dq_job(blocks_q - 1, last_slot, last_parity, false, 0);
        if (lane == 0) barrier_arrive(sm + Z::kv_empty + 8 * kv.slot);
        kv.next(S.kv);
#pragma unroll
        for (int f = 0; f < S.blocks; f++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            int j = key0 + (c * S.blocks + f) * 64 + r0 + 8 * r;
            i64 at = it.b * p.dk_b + it.h * p.dk_h + j * p.dk_s;
            u32 x[D / 8];
#pragma unroll
            for (int n = 0; n < D / 8; n++) x[n] = pack_bf16(dk[f][4 * n + 2 * r] * p.scale, dk[f][4 * n + 2 * r + 1] * p.scale);
            store_row_bf16(p.dk + at, x, j < p.S);
#pragma unroll
            for (int n = 0; n < D / 8; n++) x[n] = pack_bf16(dv[f][4 * n + 2 * r], dv[f][4 * n + 2 * r + 1]);
            store_row_bf16(p.dv + at, x, j < p.S);
          }
      }
    if (S.dq == kDqBulk && tid == 0) bulk_wait();
  }
}

// lse and delta as padded rows (a bias: natural units; none: times log2 e), dq accumulator set to zero. D / 8 lanes a row.
template <int D, bool Bias>
__global__ void __launch_bounds__(256) prepare(const __grid_constant__ Params p) {
  constexpr int lanes = D / 8;
  launch_dependents();
  const int n = blockIdx.x * 256 + threadIdx.x, row = n / lanes, part = n % lanes, h = row % p.H, i = row / p.H, b = blockIdx.y;  // a grid row a batch entry: 32-bit divisions
  if (i >= p.padded) return;
  const i64 bh = (i64)b * p.H + h;
  float sum = 0, l = __uint_as_float(0x7f800000u);
  if (i < p.S) {
    U4 x = *(const U4*)(p.o + b * p.o_b + i * p.o_s + h * p.o_h + part * 8), y = *(const U4*)(p.dout + b * p.do_b + i * p.do_s + h * p.do_h + part * 8);
    l = p.lse[bh * p.S + i];
    sum = bf16_lo(x.x) * bf16_lo(y.x) + bf16_hi(x.x) * bf16_hi(y.x) + bf16_lo(x.y) * bf16_lo(y.y) + bf16_hi(x.y) * bf16_hi(y.y) +
          bf16_lo(x.z) * bf16_lo(y.z) + bf16_hi(x.z) * bf16_hi(y.z) + bf16_lo(x.w) * bf16_lo(y.w) + bf16_hi(x.w) * bf16_hi(y.w);
    if (l < -3.0e38f) l = __uint_as_float(0x7f800000u);
  }
  for (int x = 1; x < lanes; x *= 2) sum += __shfl_xor_sync(~0u, sum, x);
  if (part == 0) { p.lse_rows[bh * p.padded + i] = Bias ? l : l * kLog2e; p.delta_rows[bh * p.padded + i] = sum; }
  F4* z = (F4*)(p.dq_acc + (bh * p.padded + i) * D + part * 8);
  z[0] = z[1] = {0, 0, 0, 0};
}

// dq from the accumulator: 64 rows a block. A thread takes a quad's 64 contiguous bytes: 8 columns of rows r and r + 8.
template <int D>
__global__ void __launch_bounds__(32 * D / 8) convert(const __grid_constant__ Params p) {
  wait_primary();
  const int jobs = p.padded / 64;
  convert_quad<D>(p, blockIdx.x, blockIdx.x % jobs, blockIdx.x / jobs, threadIdx.x);
}

// The same for transposed tiles of 80 queries (d = 128), turned round in shared memory.
template <int Unused>
__global__ void __launch_bounds__(256) convert_80(const __grid_constant__ Params p) {
  __shared__ float x[80][132];
  wait_primary();
  const int jobs = p.padded / 80, job = blockIdx.x % jobs, bh = blockIdx.x / jobs, tid = threadIdx.x % 128, c = threadIdx.x / 128;
  const F4* from = (const F4*)p.dq_acc + (i64)blockIdx.x * 2560 + c * 1280 + tid;
  const int d = c * 64 + tid / 32 * 16 + tid % 32 / 4;
#pragma unroll
  for (int n = 0; n < 10; n++) {
    F4 v = from[n * 128];
    int q = n * 8 + tid % 4 * 2;
    x[q][d] = v.x; x[q + 1][d] = v.y; x[q][d + 8] = v.z; x[q + 1][d + 8] = v.w;
  }
  __syncthreads();
  const float s = p.scale;
#pragma unroll
  for (int t = threadIdx.x; t < 1280; t += 256) {
    int q = t / 16, i = job * 80 + q;
    const float* v = &x[q][t % 16 * 8];
    if (i < p.S) *(U4*)(p.dq + bh / p.H * p.dq_b + bh % p.H * p.dq_h + i * p.dq_s + t % 16 * 8) = {pack_bf16(v[0] * s, v[1] * s), pack_bf16(v[2] * s, v[3] * s), pack_bf16(v[4] * s, v[5] * s), pack_bf16(v[6] * s, v[7] * s)};
  }
}
