// SPDX-License-Identifier: Apache-2.0
// Backward for sequences of at most 64 (windowed attention: S = 49): a warp group does a whole (batch, head) by itself. A CTA belongs to one
// plane of the bias, so that each group keeps the bias in registers as bf16 and the bias's gradient as an fp32 sum over all of its batch
// entries. dq, dk, dv, dbias: one launch and a small fixed-order sum; no atomics, no fp32 dq, delta inside. Memory-bound.
#pragma once

struct SmallSpec {
  int d, groups, slots;  // slots: heads in flight a group
  bool bias, dbias;
};

struct SmallParams {
  const float* lse;   // B, H, S
  const u16* bias;    // planes, S, S
  float* partial;     // workers * planes, 4096 in register order
  u16 *dbias, *dq, *dk, *dv;
  i64 b, s, h;        // strides of dq, dk, dv
  int B, H, S, list;  // entry b belongs to plane b / list * H + h
  float scale;
};

template <SmallSpec S>
struct SmallShape {
  static constexpr u32 width = S.d * 2, tile = 64 * S.d * 2, slot = 5 * tile, ds_bytes = 64 * 64 * 2, group = S.slots * slot + ds_bytes;
  static constexpr u32 rows = S.groups * group, bars = rows + S.groups * 1024, bytes = bars + S.groups * S.slots * 16;
};

template <SmallSpec S>
__global__ void __launch_bounds__((S.groups + 1) * 128, 1)
backward_small(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v,
               const __grid_constant__ TensorMap map_do, const __grid_constant__ TensorMap map_o, const __grid_constant__ SmallParams p) {
  using Z = SmallShape<S>;
  constexpr int D = S.d, lanes = D / 8;
  constexpr u32 W = Z::width;
  extern __shared__ __align__(1024) u8 memory[];
  const u32 sm = shared_address(memory);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0), lane = threadIdx.x % 32;
  const int planes = p.B / p.list * p.H, plane = blockIdx.x % planes, h = plane % p.H, b0 = plane / p.H * p.list, workers = gridDim.x / planes * S.groups;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S.groups * S.slots; i++) { barrier_init(sm + Z::bars + 16 * i, 1); barrier_init(sm + Z::bars + 16 * i + 8, 4); }
    barrier_init_fence();
  }
  __syncthreads();
  launch_dependents();

  if (group == 0) {
    registers_down<S.groups == 3 ? 32 : 24>();
    if (warp < S.groups && lane == 0) {  // a warp loads for each consumer group
      Ring r(1);
      for (int j = blockIdx.x / planes * S.groups + warp; j < p.list; j += workers) {
        u32 full = sm + Z::bars + 16 * (warp * S.slots + r.slot), at = sm + warp * Z::group + r.slot * Z::slot;
        barrier_wait(full + 8, r.parity);
        barrier_expect(full, Z::slot);
        tma_load_4d(at, &map_k, full, 0, 0, h, b0 + j);
        tma_load_4d(at + Z::tile, &map_q, full, 0, 0, h, b0 + j);
        tma_load_4d(at + 2 * Z::tile, &map_v, full, 0, 0, h, b0 + j);
        tma_load_4d(at + 3 * Z::tile, &map_do, full, 0, 0, h, b0 + j);
        tma_load_4d(at + 4 * Z::tile, &map_o, full, 0, 0, h, b0 + j);
        r.next(S.slots);
      }
    }
  } else {
    registers_up<S.groups == 3 ? 160 : 240>();
    const int c = group - 1, tid = threadIdx.x % 128, r0 = warp * 16 + lane / 4, c0 = lane % 4 * 2;
    const float scale_log2 = p.scale * kLog2e, inf = __uint_as_float(0x7f800000u);
    const u32 base = sm + c * Z::group, ds = base + S.slots * Z::slot, rows = sm + Z::rows + c * 1024;
    const u64 mn = descriptor(base, 16, 8 * W, W), ds_rows = descriptor(ds, 16, 1024, 128);
    const u32 frag = ds + (lane / 16 * 8 + lane % 8) * 128 + (((warp * 2 + (lane / 8 & 1)) ^ (lane % 8)) * 16);
    u32 bias[16];  // [query pair][row half], keys past the end -inf
    float acc[32];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      int q = i / 2 * 8 + c0, k = r0 + (i & 1) * 8;
      u32 lo = 0, hi = 0;
      if (k >= p.S) lo = hi = 0xff80u;
      else if (S.bias) {
        const u16* at = p.bias + ((i64)plane * p.S + q) * p.S + k;
        if (q < p.S) lo = at[0];
        if (q + 1 < p.S) hi = at[p.S];
      }
      bias[i] = lo | hi << 16;
    }
#pragma unroll
    for (int i = 0; i < 32; i++) acc[i] = 0;
    Ring r(0);
    int flip = 0, j = blockIdx.x / planes * S.groups + c;
    float l = tid < p.S && j < p.list ? p.lse[((i64)(b0 + j) * p.H + h) * p.S + tid] : inf;
    for (; j < p.list; j += workers) {
      const u32 full = sm + Z::bars + 16 * (c * S.slots + r.slot), at = base + r.slot * Z::slot, slot = r.slot * (Z::slot / 16), row = rows + flip * 512;
      constexpr u32 T = Z::tile / 16;
      barrier_wait(full, r.parity);
      float s[32], dp[32];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < D / 16; k++) mma_ss(s, mn + (slot + k * 2), mn + (slot + T + k * 2), k > 0);
      wgmma_commit();
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < D / 16; k++) mma_ss(dp, mn + (slot + 2 * T + k * 2), mn + (slot + 3 * T + k * 2), k > 0);
      wgmma_commit();
      // lse and delta of the 64 rows, while the tensor cores work
      if (tid < 64) store_shared_f1(row + tid * 4, l < -3.0e38f ? inf : l);
#pragma unroll
      for (int n = 0; n < D / 16; n++) {
        U4 x = load_shared_u4(at + 4 * Z::tile + (n * 128 + tid) * 16), y = load_shared_u4(at + 3 * Z::tile + (n * 128 + tid) * 16);
        float sum = bf16_lo(x.x) * bf16_lo(y.x) + bf16_hi(x.x) * bf16_hi(y.x) + bf16_lo(x.y) * bf16_lo(y.y) + bf16_hi(x.y) * bf16_hi(y.y) +
                    bf16_lo(x.z) * bf16_lo(y.z) + bf16_hi(x.z) * bf16_hi(y.z) + bf16_lo(x.w) * bf16_lo(y.w) + bf16_hi(x.w) * bf16_hi(y.w);
#pragma unroll
        for (int i = 1; i < lanes; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
        if (lane % lanes == 0) store_shared_f1(row + 256 + (n * (128 / lanes) + tid / lanes) * 4, sum);
      }
      int next = j + workers;
      l = tid < p.S && next < p.list ? p.lse[((i64)(b0 + next) * p.H + h) * p.S + tid] : inf;
      named_sync(1 + c, 128);
      flip ^= 1;
      wgmma_wait<1>();
      pin(s);
#pragma unroll
      for (int n = 0; n < 8; n++) {
        Float2 e = load_shared_f2(row + (n * 8 + c0) * 4);
#pragma unroll
        for (int q = 0; q < 2; q++) {
          u32 z = bias[n * 2 + q];
          s[4 * n + 2 * q] = ex2(fmaf(s[4 * n + 2 * q], scale_log2, (bf16_lo(z) - e.x) * kLog2e));
          s[4 * n + 2 * q + 1] = ex2(fmaf(s[4 * n + 2 * q + 1], scale_log2, (bf16_hi(z) - e.y) * kLog2e));
        }
      }
      wgmma_wait<0>();
      pin(dp);
      u32 pb[16], db[16];
#pragma unroll
      for (int n = 0; n < 8; n++) {
        Float2 e = load_shared_f2(row + 256 + (n * 8 + c0) * 4);
#pragma unroll
        for (int q = 0; q < 2; q++) {
          float x = s[4 * n + 2 * q] * (dp[4 * n + 2 * q] - e.x), y = s[4 * n + 2 * q + 1] * (dp[4 * n + 2 * q + 1] - e.y);
          pb[2 * n + q] = pack_bf16(s[4 * n + 2 * q], s[4 * n + 2 * q + 1]);
          db[2 * n + q] = pack_bf16(x, y);
          if (S.dbias) { acc[4 * n + 2 * q] += x; acc[4 * n + 2 * q + 1] += y; }
        }
      }
#pragma unroll
      for (int k = 0; k < 4; k++) stmatrix_trans(frag + k * 2048, db + 4 * k);
      float dq[D / 2], dk[D / 2], dv[D / 2];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) mma_rs_t(dv, pb + 4 * k, mn + (slot + 3 * T + k * W), k > 0);
#pragma unroll
      for (int k = 0; k < 4; k++) mma_rs_t(dk, db + 4 * k, mn + (slot + T + k * W), k > 0);
      wgmma_commit();
      proxy_fence();
      named_sync(1 + c, 128);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) mma_ss_t(dq, ds_rows + k * 2, mn + (slot + k * W), k > 0);
      wgmma_commit();
      wgmma_wait<0>();
      pin(dq);
      pin(dk);
      pin(dv);
      if (lane == 0) barrier_arrive(full + 8);
      r.next(S.slots);
#pragma unroll
      for (int q = 0; q < 2; q++) {
        const bool valid = r0 + 8 * q < p.S;
        const i64 to = (b0 + j) * p.b + h * p.h + (r0 + 8 * q) * p.s;
        u32 x[D / 8];
#pragma unroll
        for (int n = 0; n < D / 8; n++) x[n] = pack_bf16(dq[4 * n + 2 * q] * p.scale, dq[4 * n + 2 * q + 1] * p.scale);
        store_row_bf16(p.dq + to, x, valid);
#pragma unroll
        for (int n = 0; n < D / 8; n++) x[n] = pack_bf16(dk[4 * n + 2 * q] * p.scale, dk[4 * n + 2 * q + 1] * p.scale);
        store_row_bf16(p.dk + to, x, valid);
#pragma unroll
        for (int n = 0; n < D / 8; n++) x[n] = pack_bf16(dv[4 * n + 2 * q], dv[4 * n + 2 * q + 1]);
        store_row_bf16(p.dv + to, x, valid);
      }
    }
    if (S.dbias) {
      float* to = p.partial + ((i64)plane * workers + blockIdx.x / planes * S.groups + c) * 4096 + tid * 4;
#pragma unroll
      for (int n = 0; n < 8; n++) *(F4*)(to + n * 512) = {acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3]};
    }
  }
}

// Sums a plane's partials in order: a block a plane and eighth of the tile.
template <int Unused>
__global__ void __launch_bounds__(128) small_bias_sum(const __grid_constant__ SmallParams p, const int workers) {
  wait_primary();
  int plane = blockIdx.x / 8, n = blockIdx.x % 8, tid = threadIdx.x, k = tid / 32 * 16 + tid % 32 / 4, q = n * 8 + tid % 4 * 2;
  const F4* from = (const F4*)p.partial + (i64)plane * workers * 1024 + n * 128 + tid;
  F4 a = {0, 0, 0, 0};
#pragma unroll 8
  for (int w = 0; w < workers; w++) {
    F4 x = from[w * 1024];
    a.x += x.x; a.y += x.y; a.z += x.z; a.w += x.w;
  }
  u16* to = p.dbias + ((i64)plane * p.S + q) * p.S + k;
  u32 top = pack_bf16(a.x, a.y), low = pack_bf16(a.z, a.w);
  if (q < p.S && k < p.S) to[0] = (u16)top;
  if (q + 1 < p.S && k < p.S) to[p.S] = (u16)(top >> 16);
  if (q < p.S && k + 8 < p.S) to[8] = (u16)low;
  if (q + 1 < p.S && k + 8 < p.S) to[p.S + 8] = (u16)(low >> 16);
}
