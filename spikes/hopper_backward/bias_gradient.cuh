// SPDX-License-Identifier: Apache-2.0
// The gradient of a bias that is broadcast over a list of batch entries, by recomputing S and dP. A CTA owns 64 queries a warp group x 128 keys of one
// bias plane, fp32 in registers, and walks over the list: S = Q K^T, dP = dO V^T, p = exp(S + bias - lse), acc += p (dP - delta). The bias
// tile stays in shared memory. Lists are cut in chunks where there are too few tiles; their fp32 partials are summed in fixed order.
//
// The fast kernel takes the bias out of the sum: with m_i the largest bias of the row within the tile,
//   dbias_ij = exp(bias_ij - m_i) * sum_b exp(s_ij - (lse_i - m_i)) * (dp_ij - delta_i),
// four instructions an element instead of seven. What underflows there would in p; what overflows (scores of one row more than 88 apart
// that the bias turns round) leaves an inf or a NaN in the sum: such a tile is flagged, and a second launch of the exact kernel,
// which otherwise finds nothing to do, computes it again.
#pragma once

struct BiasSpec {
  int d, groups, n, stages, biases;  // n: keys of one wgmma, 64 or 128
  bool causal, convert, fast;  // convert: the producer group's idle warps turn the main kernel's fp32 dq into bf16
};

struct BiasParams {
  const float *lse_rows, *delta_rows;  // B * H, padded
  u16* out;                            // planes, S, S
  float* partial;                      // chunks, planes, S, S
  u32* flags;                          // items, a word a warp; null: the exact kernel does every tile
  int B, H, S, padded, list, chunks, items;  // planes = B / list * H; entry b belongs to plane b / list * H + h
  float scale;
  int lse_is_log2;
};

template <BiasSpec S>
struct BiasShape {
  static constexpr u32 width = S.d * 2 < 128 ? S.d * 2 : 128, panels = S.d * 2 / width, steps = width / 32;
  static constexpr u32 rows = S.groups * 64, q_bytes = rows * S.d * 2, unit_bytes = q_bytes + 128 * S.d * 2, bias_bytes = rows * 128 * 2;
  static constexpr u32 bias = S.stages * unit_bytes, bars = bias + S.biases * bias_bytes;
  static constexpr u32 full = bars, empty = full + 8 * S.stages, bias_full = empty + 8 * S.stages, bias_empty = bias_full + 8 * S.biases, bytes = bias_empty + 8 * S.biases;
};

struct BiasItem { int plane, h, first, last, q0, k0, chunk; };

template <BiasSpec S>
FOVEA_DEVICE BiasItem bias_item(int w, const BiasParams& p) {
  constexpr int rows = S.groups * 64;
  int nk = (p.S + 127) / 128, n = (p.S + rows - 1) / rows * nk, tile = w % n;
  w /= n;
  int planes = p.B / p.list * p.H, plane = w % planes, chunk = w / planes, b0 = plane / p.H * p.list;
  int q0 = tile / nk * rows, k0 = tile % nk * 128, first = b0 + (int)((i64)chunk * p.list / p.chunks), last = b0 + (int)((i64)(chunk + 1) * p.list / p.chunks);
  return {plane, plane % p.H, first, S.causal && k0 > q0 + rows - 1 ? first : last, q0, k0, chunk};  // an empty tile is written as zeros
}

template <BiasSpec S>
__global__ void __launch_bounds__((S.groups + 1) * 128, 1)
bias_gradient(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_do, const __grid_constant__ TensorMap map_k,
              const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_bias, const __grid_constant__ BiasParams p, const __grid_constant__ Params main) {
  using Z = BiasShape<S>;
  constexpr int D = S.d, N = S.n, ROWS = Z::rows, WARPS = S.groups * 4;
  constexpr u32 W = Z::width;
  extern __shared__ __align__(1024) u8 memory[];
  const u32 sm = shared_address(memory);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S.stages; i++) { barrier_init(sm + Z::full + 8 * i, 1); barrier_init(sm + Z::empty + 8 * i, WARPS); }
    for (int i = 0; i < S.biases; i++) { barrier_init(sm + Z::bias_full + 8 * i, 1); barrier_init(sm + Z::bias_empty + 8 * i, WARPS); }
    barrier_init_fence();
  }
  __syncthreads();
  wait_primary();
  launch_dependents();
  auto flagged = [&](int w) {
    u32 any = 0;
    for (int i = 0; i < WARPS; i++) any |= p.flags[w * WARPS + i];
    return any != 0;
  };
  if (!S.fast && p.flags) {  // mostly there is nothing to repair
    u32 any = 0;
    const int mine = (p.items - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x * WARPS;
    for (int i = threadIdx.x; i < mine; i += blockDim.x) any |= p.flags[(blockIdx.x + i / WARPS * gridDim.x) * WARPS + i % WARPS];
    if (!__syncthreads_or(any)) return;
  }

  if (group == 0) {
    registers_down<S.groups == 3 ? 32 : 24>();
    if (threadIdx.x == 0) {
      Ring u(1), t(1);
      for (int w = blockIdx.x; w < p.items; w += gridDim.x) {
        if (!S.fast && p.flags && !flagged(w)) continue;
        BiasItem it = bias_item<S>(w, p);
        u32 bf = sm + Z::bias_full + 8 * t.slot;
        barrier_wait(sm + Z::bias_empty + 8 * t.slot, t.parity);
        barrier_expect(bf, Z::bias_bytes);
        for (int i = 0; i < 2; i++) tma_load_3d(sm + Z::bias + t.slot * Z::bias_bytes + i * ROWS * 128, &map_bias, bf, it.k0 + i * 64, it.q0, it.plane);
        t.next(S.biases);
        for (int b = it.first; b < it.last; b++)
          for (int half = 0; half < 2; half++) {
            u32 full = sm + Z::full + 8 * u.slot, at = sm + u.slot * Z::unit_bytes;
            barrier_wait(sm + Z::empty + 8 * u.slot, u.parity);
            barrier_expect(full, Z::unit_bytes);
            for (u32 i = 0; i < Z::panels; i++) {
              tma_load_4d(at + i * ROWS * W, half ? &map_do : &map_q, full, i * (W / 2), it.q0, it.h, b);
              tma_load_4d(at + Z::q_bytes + i * 128 * W, half ? &map_v : &map_k, full, i * (W / 2), it.k0, it.h, b);
            }
            u.next(S.stages);
          }
      }
    }
    if constexpr (S.convert && S.fast) {
      if (warp > 0) {
        const int jobs = main.padded / 64, tasks = main.B * main.H * jobs * 4 * D;
        for (int t = blockIdx.x * 96 + threadIdx.x - 32; t < tasks; t += gridDim.x * 96) {
          const int tile = t / (4 * D);
          convert_quad<D>(main, tile, tile % jobs, tile / jobs, t % (4 * D));
        }
      }
    }
  } else {
    registers_up<S.groups == 3 ? 160 : 240>();
    const int c = group - 1, r0 = c * 64 + warp * 16 + lane / 4, c0 = lane % 4 * 2;
    const float scale_log2 = p.scale * kLog2e;
    const u64 rows = descriptor(sm + c * 64 * W, 16, 8 * W, W), cols = descriptor(sm + Z::q_bytes, 16, 8 * W, W);
    const int row = c * 64 + warp * 16 + lane % 16;  // ldmatrix: matrices 0, 1 are rows 0-7, 8-15 of 8 keys; 2, 3 of the next 8
    Ring u(0), t(0);
    for (int w = blockIdx.x; w < p.items; w += gridDim.x) {
      if (!S.fast && p.flags && !flagged(w)) continue;
      BiasItem it = bias_item<S>(w, p);
      float acc[128 / N][N / 2];
#pragma unroll
      for (int f = 0; f < 128 / N; f++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[f][i] = 0;
      barrier_wait(sm + Z::bias_full + 8 * t.slot, t.parity);
      const u32 bias = sm + Z::bias + t.slot * Z::bias_bytes + row * 128;
      auto bias_at = [&](int x, u32(&z)[4]) { ldmatrix(bias + x / 4 * (ROWS * 128) + (((x % 4 * 2 + lane / 16) ^ (row & 7)) * 16), z); };  // 16 keys
      float m0 = 0, m1 = 0;
      if constexpr (S.fast) {
        const float low = __uint_as_float(0xff800000u);
        m0 = m1 = low;
#pragma unroll
        for (int x = 0; x < 8; x++) {
          u32 z[4];
          bias_at(x, z);
          m0 = fmaxf(m0, fmaxf(fmaxf(bf16_lo(z[0]), bf16_hi(z[0])), fmaxf(bf16_lo(z[2]), bf16_hi(z[2]))));
          m1 = fmaxf(m1, fmaxf(fmaxf(bf16_lo(z[1]), bf16_hi(z[1])), fmaxf(bf16_lo(z[3]), bf16_hi(z[3]))));
        }
#pragma unroll
        for (int x = 1; x < 4; x *= 2) { m0 = fmaxf(m0, __shfl_xor_sync(~0u, m0, x)); m1 = fmaxf(m1, __shfl_xor_sync(~0u, m1, x)); }
        if (m0 == low) m0 = 0;
        if (m1 == low) m1 = 0;
      }
      const i64 at_row = (i64)(it.first * p.H + it.h) * p.padded + min(it.q0 + r0, p.padded - 9);  // rows past the end are not stored
      const float *lse = p.lse_rows + at_row, *delta = p.delta_rows + at_row;
      float l0 = lse[0], l1 = lse[8], d0 = delta[0], d1 = delta[8];
      for (int b = it.first; b < it.last; b++) {
        const u32 u0 = u.slot, at0 = u0 * (Z::unit_bytes / 16), full0 = sm + Z::full + 8 * u0, parity0 = u.parity;
        u.next(S.stages);
        const u32 u1 = u.slot, at1 = u1 * (Z::unit_bytes / 16), full1 = sm + Z::full + 8 * u1, parity1 = u.parity;
        u.next(S.stages);
#pragma unroll
        for (int f = 0; f < 128 / N; f++) {
          float s[N / 2], g[N / 2];
          if (f == 0) barrier_wait(full0, parity0);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < D / 16; k++) mma_ss(s, rows + (at0 + k / Z::steps * (ROWS * W / 16) + k % Z::steps * 2), cols + (at0 + f * (N * W / 16) + k / Z::steps * (8 * W) + k % Z::steps * 2), k > 0);
          wgmma_commit();
          if (f == 0) barrier_wait(full1, parity1);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < D / 16; k++) mma_ss(g, rows + (at1 + k / Z::steps * (ROWS * W / 16) + k % Z::steps * 2), cols + (at1 + f * (N * W / 16) + k / Z::steps * (8 * W) + k % Z::steps * 2), k > 0);
          wgmma_commit();
          wgmma_wait<1>();
          pin(s);
          if (f == 128 / N - 1 && lane == 0) barrier_arrive(sm + Z::empty + 8 * u0);
if constexpr (S.fast) {
            const float e0 = (l0 - m0) * kLog2e, e1 = (l1 - m1) * kLog2e;
#pragma unroll
            for (int i = 0; i < N / 2; i++) s[i] = ex2(fmaf(s[i], scale_log2, i & 2 ? -e1 : -e0));
          } else {
#pragma unroll
            for (int i = 0; i < N / 16; i++) {
              u32 z[4];
              bias_at(f * (N / 16) + i, z);
#pragma unroll
              for (int r = 0; r < 4; r++) {
                float l = r & 1 ? l1 : l0, &x = s[8 * i + 2 * r], &y = s[8 * i + 2 * r + 1];
                x = ex2(fmaf(x, scale_log2, (bf16_lo(z[r]) - l) * kLog2e));
                y = ex2(fmaf(y, scale_log2, (bf16_hi(z[r]) - l) * kLog2e));
              }
            }
          }
          if (S.causal && it.k0 + 127 > it.q0) {
#pragma unroll
            for (int i = 0; i < N / 2; i++)
              if (it.k0 + f * N + i / 4 * 8 + c0 + (i & 1) > it.q0 + r0 + (i >> 1 & 1) * 8) s[i] = 0;
          }
          wgmma_wait<0>();
          pin(g);
          if (f == 128 / N - 1 && lane == 0) barrier_arrive(sm + Z::empty + 8 * u1);
#pragma unroll
          for (int i = 0; i < N / 2; i++) acc[f][i] = fmaf(s[i], g[i] - (i & 2 ? d1 : d0), acc[f][i]);
        }
        if (b + 1 < it.last) {
          lse += (i64)p.H * p.padded;
          delta += (i64)p.H * p.padded;
          l0 = lse[0], l1 = lse[8], d0 = delta[0], d1 = delta[8];
        }
      }
      if constexpr (S.fast) {
        float worst = 0;  // NaN and inf alike fail the comparison below
#pragma unroll
        for (int i = 0; i < 64; i++) worst = fmaf(acc[i / (N / 2)][i % (N / 2)], 0.f, worst);
        const u32 bad = __any_sync(~0u, !(worst == 0));
        if (lane == 0) p.flags[w * WARPS + c * 4 + warp] = bad;
#pragma unroll
        for (int x = 0; x < 8; x++) {
          u32 z[4];
          bias_at(x, z);
#pragma unroll
          for (int r = 0; r < 4; r++) {
            float m = r & 1 ? m1 : m0;
            float &a = acc[x * 16 / N][x * 8 % (N / 2) + 2 * r], &b = acc[x * 16 / N][x * 8 % (N / 2) + 2 * r + 1];
            a *= ex2((bf16_lo(z[r]) - m) * kLog2e);
            b *= ex2((bf16_hi(z[r]) - m) * kLog2e);
          }
        }
      }
      if (lane == 0) barrier_arrive(sm + Z::bias_empty + 8 * t.slot);
      t.next(S.biases);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        int i = it.q0 + r0 + 8 * r;
        if (i >= p.S) continue;
        i64 o = ((i64)it.plane * p.S + i) * p.S + it.k0 + c0;
#pragma unroll
        for (int n = 0; n < 16; n++) {
          if (it.k0 + n * 8 + c0 >= p.S) continue;
          float x = acc[n / (N / 8)][n % (N / 8) * 4 + 2 * r], y = acc[n / (N / 8)][n % (N / 8) * 4 + 2 * r + 1];
          if (p.chunks == 1) *(u32*)(p.out + o + n * 8) = pack_bf16(x, y);
          else *(Float2*)(p.partial + (i64)it.chunk * (p.B / p.list * p.H) * p.S * p.S + o + n * 8) = {x, y};
        }
      }
    }
  }
}

// Sums the chunks' partials in order; eight elements a thread.
template <int Unused>
__global__ void __launch_bounds__(256) bias_sum(const __grid_constant__ BiasParams p) {
  wait_primary();
  i64 n = (i64)(p.B / p.list * p.H) * p.S * p.S, i = ((i64)blockIdx.x * 256 + threadIdx.x) * 4;
  if (i >= n) return;
  F4 a = *(const F4*)(p.partial + i);
#pragma unroll 4
  for (int c = 1; c < p.chunks; c++) {
    F4 x = *(const F4*)(p.partial + c * n + i);
    a.x += x.x; a.y += x.y; a.z += x.z; a.w += x.w;
  }
  u32* to = (u32*)(p.out + i);
  to[0] = pack_bf16(a.x, a.y);
  to[1] = pack_bf16(a.z, a.w);
}
