// SPDX-License-Identifier: Apache-2.0
// Attention forward for Hopper: the experiment behind sm90_forward. No header is included; the wgmma wrappers that
// wgmma.py prints come before this text.
//
// One persistent CTA an SM. Warpgroup 0 produces: its first thread takes tiles from a counter and loads Q (q_buffers
// deep, the tile's number travels beside it), K, V and the bias tile by TMA. The others own 64 query rows each:
//
//     S(n+1) = Q K(n+1)^T   issued, then   O += P(n) V(n)   issued; softmax of S(n+1) while O is still in flight;
//     P(n+1) from S(n+1) in registers.                      O leaves through the Q buffer that its tile no longer needs.
//
// Softmax, `lazy`: the reference point of a row need not be its maximum, it must only be near: p = 2^(s - ref) is as
// precise in bf16 at 2^30 as at 1. So an ordinary tile computes no maximum and rescales nothing; a row sum that
// leaves the safe range makes the warpgroup form S again and take the exact step (maximum, rescale).
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct Spec {
  int d, dv;                        // head dimensions
  int rows, keys;                   // a tile of scores
  int k_stages, v_stages, q_buffers;
  bool causal = false;              // right edge of the band
  bool window = false;              // left edge of the band
  bool varlen = false;
  int bias_stages = 0;              // 0: no bias
  bool softcap = false;
  bool dropout = false;
  bool turns = true;                // the consumer warpgroups take turns at issuing products
  bool lazy = true;
  bool direct = false;              // O straight from registers
  int cluster = 1;                  // CTAs that share bias tiles (a cluster along the batch)
  bool q_registers = false;         // Q as register operand
  int vote = 1;                     // how a warpgroup agrees on the exact step: 1 barrier
};

struct alignas(64) TensorMap { u64 words[16]; };

struct Arguments {
  TensorMap q, k, v, o, bias;
  u16* out;
  float* lse;
  u32* counters;                    // two: next tile, CTAs done; zero before and after
  const int* cu_q;                  // varlen: prefix sums of lengths
  const int* cu_k;
  i64 out_b, out_s, out_h;
  int batch, heads, group;          // group = query heads per key head
  int sq, sk;
  int shift, left, right;
  int row_tiles, tiles, heads_in_l2;
  int bias_b, bias_h;               // 0 where the bias is broadcast
  float scale_log2;                 // scale * log2(e)
  float cap_in, cap_out;            // softcap: cap_out * tanh(s * cap_in), cap_out in log2 units
  float keep_scale;
  u32 threshold;                    // dropout T
  u64 seed, offset;
};

#define DEV __device__ __forceinline__
constexpr float kInfinity = __builtin_bit_cast(float, 0x7F800000u);
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// ---- PTX wrappers ----
DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void barrier_init(u32 b, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(count)); }
DEV void barrier_expect(u32 b, int bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory"); }
DEV void barrier_arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
DEV void barrier_wait(u32 b, u32 parity) {
  asm volatile("{\n.reg .pred P;\nLOOP:\nmbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n@P bra DONE;\nbra LOOP;\nDONE:\n}" ::"r"(b), "r"(parity) : "memory");
}
DEV void tma_load(u32 to, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
DEV void tma_load_multicast(u32 to, const TensorMap* map, u32 bar, u16 mask, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
               ::"r"(to), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(mask) : "memory");
}
DEV void tma_store(const TensorMap* map, u32 from, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               ::"l"(map), "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
DEV void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEV void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEV void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEV void named_sync(int id, int n) { asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(n) : "memory"); }
DEV void named_arrive(int id, int n) { asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(n) : "memory"); }
DEV bool named_or(int id, int n, bool x) {
  u32 r;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbarrier.cta.red.or.pred.aligned q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
               : "=r"(r) : "r"((u32)x), "r"(id), "r"(n) : "memory");
  return r != 0;
}
DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEV void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
template <int N> DEV void pin(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
DEV float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV float log2_fast(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV float tanh_fast(float x) { float y; asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV u32 pack_bf16(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
DEV void load_matrix4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEV void store_matrix4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
template <int N> DEV void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEV void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
DEV u64 join(u32 lo, u32 hi) { u64 r; asm("mov.b64 %0, {%1, %2};" : "=l"(r) : "r"(lo), "r"(hi)); return r; }
DEV float bits_float(u32 x) { return __uint_as_float(x); }
DEV int imin(int a, int b) { return a < b ? a : b; }
DEV int imax(int a, int b) { return a > b ? a : b; }

// ---- shared-memory tiles: panels of `width` bytes a row, swizzled over 16-byte chunks ----
template <int Width> DEV u32 swizzled(int row, int chunk) {
  return row * Width + ((chunk ^ ((row * Width / 128) & (Width / 16 - 1))) << 4);
}
constexpr int panel_columns(int d) { return d % 64 == 0 ? 64 : d % 32 == 0 ? 32 : 16; }
constexpr u32 descriptor_high(int width) { return (u32)(width * 8 / 16) | (width == 128 ? 1u << 30 : width == 64 ? 2u << 30 : 3u << 30); }

template <Spec S> struct Shape {
  static constexpr int kGroups = S.rows / 64;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kQBytes = S.rows * (S.d > S.dv ? S.d : S.dv) * 2;
  static constexpr int kKBytes = S.keys * S.d * 2, kVBytes = S.keys * S.dv * 2;
  static constexpr int kBiasBytes = S.rows * S.keys * 2;
  static constexpr int kQ = 0, kK = kQ + S.q_buffers * kQBytes, kV = kK + S.k_stages * kKBytes;
  static constexpr int kBias = kV + S.v_stages * kVBytes, kBarriers = kBias + S.bias_stages * kBiasBytes;
  static constexpr int kBytes = kBarriers + 512;
};

// Which tile: a group of heads whose K and V fit in L2; within it the longest first where rows differ in length.
struct Tile { int row, head, batch; };
template <Spec S> DEV Tile decode(const Arguments& a, int t) {
  Tile r;
  int bh, m;
  if constexpr (S.causal) {
    int per = a.row_tiles * a.heads_in_l2, g = t / per, rest = t - g * per;
    int in_group = imin(a.heads_in_l2, a.batch * a.heads - g * a.heads_in_l2);
    m = rest / in_group;
    bh = g * a.heads_in_l2 + rest - m * in_group;
    m = a.row_tiles - 1 - m;
  } else {
    bh = t / a.row_tiles;
    m = t - bh * a.row_tiles;
  }
  r.batch = bh / a.heads;
  r.head = bh - r.batch * a.heads;
  r.row = m * S.rows;
  return r;
}
struct Keys { int begin, end; };  // tiles of keys
template <Spec S> DEV Keys key_tiles(const Arguments& a, int row, int rows) {
  Keys k{0, (a.sk + S.keys - 1) / S.keys};
  int last = imin(row + rows, a.sq) - 1;
  if constexpr (S.causal) k.end = (imax(0, imin(a.sk, last + a.shift + a.right + 1)) + S.keys - 1) / S.keys;
  if constexpr (S.window) k.begin = imax(0, row + a.shift - a.left) / S.keys;
  return k;
}

template <Spec S>
__global__ void __launch_bounds__(Shape<S>::kThreads, 1) forward(const __grid_constant__ Arguments a) {
  using L = Shape<S>;
  constexpr int G = L::kGroups, BM = S.rows, BN = S.keys, D = S.d, DV = S.dv;
  constexpr int PK = panel_columns(D), PV = panel_columns(DV);         // columns of a panel
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 base = shared_address(memory);
  const u32 bars = base + L::kBarriers;
  auto q_full = [&](int i) { return bars + 8 * i; };
  auto q_empty = [&](int i) { return bars + 16 + 8 * i; };
  auto k_full = [&](int i) { return bars + 32 + 8 * i; };
  auto k_empty = [&](int i) { return bars + 64 + 8 * i; };
  auto v_full = [&](int i) { return bars + 96 + 8 * i; };
  auto v_empty = [&](int i) { return bars + 128 + 8 * i; };
  auto b_full = [&](int i) { return bars + 160 + 8 * i; };
  auto b_empty = [&](int i) { return bars + 192 + 8 * i; };
  volatile int* tile_slot = (volatile int*)(memory + L::kBarriers + 256);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

  if (threadIdx.x == 0) {
    for (int i = 0; i < S.q_buffers; i++) barrier_init(q_full(i), 1), barrier_init(q_empty(i), G);
    for (int i = 0; i < S.k_stages; i++) barrier_init(k_full(i), 1), barrier_init(k_empty(i), 4 * G);
    for (int i = 0; i < S.v_stages; i++) barrier_init(v_full(i), 1), barrier_init(v_empty(i), 4 * G);
    for (int i = 0; i < S.bias_stages; i++) barrier_init(b_full(i), 1), barrier_init(b_empty(i), 4 * G);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  // ---- producer ----
  if (warpgroup == 0) {
    fewer_registers<G == 2 ? 40 : 32>();   // 2 x 232 + 40 = 3 x 168, 3 x 160 + 32 = 4 x 128: more would wait for ever
    if (threadIdx.x != 0) return;
    int ks = 0, kp = 0, vs = 0, vp = 0, bs = 0, bp = 0, qs = 0, qp = 0;
    int t = blockIdx.x;
    while (true) {
      barrier_wait(q_empty(qs), qp ^ 1);
      if (t >= a.tiles) {
        tile_slot[qs] = -1;
        barrier_arrive(q_full(qs));
        break;
      }
      int following = (int)(gridDim.x + atomicAdd(a.counters, 1u));
      Tile w = decode<S>(a, t);
      Keys keys = key_tiles<S>(a, w.row, BM);
      tile_slot[qs] = t;
      barrier_expect(q_full(qs), BM * D * 2);
      for (int p = 0; p < D / PK; p++) tma_load(base + L::kQ + qs * L::kQBytes + p * BM * PK * 2, &a.q, q_full(qs), p * PK, w.row, w.head, w.batch);
      if (++qs == S.q_buffers) qs = 0, qp ^= 1;
      const int head_k = w.head / a.group;
      auto load_k = [&](int n) {
        barrier_wait(k_empty(ks), kp ^ 1);
        barrier_expect(k_full(ks), L::kKBytes);
        for (int p = 0; p < D / PK; p++) tma_load(base + L::kK + ks * L::kKBytes + p * BN * PK * 2, &a.k, k_full(ks), p * PK, n * BN, head_k, w.batch);
        if (++ks == S.k_stages) ks = 0, kp ^= 1;
        if constexpr (S.bias_stages > 0) {
          barrier_wait(b_empty(bs), bp ^ 1);
          barrier_expect(b_full(bs), L::kBiasBytes);
          for (int p = 0; p < BN / 64; p++)
            tma_load(base + L::kBias + bs * L::kBiasBytes + p * BM * 128, &a.bias, b_full(bs), n * BN + p * 64, w.row, w.head * a.bias_h, w.batch * a.bias_b);
          if (++bs == S.bias_stages) bs = 0, bp ^= 1;
        }
      };
      auto load_v = [&](int n) {
        barrier_wait(v_empty(vs), vp ^ 1);
        barrier_expect(v_full(vs), L::kVBytes);
        for (int p = 0; p < DV / PV; p++) tma_load(base + L::kV + vs * L::kVBytes + p * BN * PV * 2, &a.v, v_full(vs), p * PV, n * BN, head_k, w.batch);
        if (++vs == S.v_stages) vs = 0, vp ^= 1;
      };
      int n = keys.end - 1;
      if (n >= keys.begin) {
        load_k(n);
        for (; n > keys.begin; n--) load_k(n - 1), load_v(n);
        load_v(n);
      }
      t = following;
    }
    // the last CTA leaves the counters as it found them
    if (atomicAdd(a.counters + 1, 1u) == gridDim.x - 1) a.counters[0] = 0, a.counters[1] = 0;
    return;
  }

  // ---- consumers ----
  more_registers<G == 2 ? 232 : 160>();
  const int c = warpgroup - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const bool leader = lane == 0;
  int ks = 0, kp = 0, vs = 0, vp = 0, bs = 0, bp = 0, qs = 0, qp = 0;
  const int own_barrier = 4 + c;
  auto turn_wait = [&] { if constexpr (S.turns && G > 1) named_sync(1 + c, 256); };
  auto turn_pass = [&] { if constexpr (S.turns && G > 1) named_arrive(1 + (c + 1 == G ? 0 : c + 1), 256); };
  if (S.turns && G > 1 && c == G - 1) named_arrive(1, 256);

  const u32 q_low = (((base + L::kQ + c * 64 * PK * 2) & 0x3FFFF) >> 4) | (1u << 16);
  const u32 k_low = (((base + L::kK) & 0x3FFFF) >> 4) | (1u << 16);
  const u32 v_low = (((base + L::kV) & 0x3FFFF) >> 4) | ((u32)(BN * PV * 2 / 16) << 16);
  constexpr u32 qk_high = descriptor_high(PK * 2), v_high = descriptor_high(PV * 2);
  const int fragment_row = warp * 16 + lane % 16, fragment_half = lane / 16;   // ldmatrix / stmatrix row of this lane
  bool stored = false;                                                        // an O of ours may still be read by TMA
  int stored_slot = 0;

  float o[DV / 2], s[BN / 2];
  u32 p[BN / 4];
  float ref[2], sum[2];

  while (true) {
    barrier_wait(q_full(qs), qp);
    const int t = tile_slot[qs];
    if (t < 0) break;
    const Tile w = decode<S>(a, t);
    const Keys keys = key_tiles<S>(a, w.row, BM);
    const int row0 = w.row + c * 64 + warp * 16 + lane / 4;
    const u32 q_now = q_low + qs * (L::kQBytes / 16);

    auto issue_scores = [&](int stage) {
      const u32 k_now = k_low + stage * (L::kKBytes / 16);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
        constexpr int per = PK / 16;
        wgmma_ss(s, join(q_now + (k / per) * (BM * PK * 2 / 16) + (k % per) * 2, qk_high), join(k_now + (k / per) * (BN * PK * 2 / 16) + (k % per) * 2, qk_high), k > 0);
      }
      wgmma_commit();
    };
    auto issue_output = [&](int stage) {
      const u32 v_now = v_low + stage * (L::kVBytes / 16);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < BN / 16; k++) wgmma_rs(o, p + 4 * k, join(v_now + k * (16 * PV * 2 / 16), v_high), 1);
      wgmma_commit();
    };
    auto mask_scores = [&](int n) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = row0 + 8 * r;
        int end = a.sk, begin = 0;
        if constexpr (S.causal) end = imin(end, row + a.shift + a.right + 1);
        if constexpr (S.window) begin = imax(0, row + a.shift - a.left);
        const int column = n * BN + (lane % 4) * 2;
        end -= column, begin -= column;
#pragma unroll
        for (int j = 0; j < BN / 8; j++) {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            bool keep = 8 * j + e < end;
            if constexpr (S.window) keep = keep && 8 * j + e >= begin;
            if (!keep) s[4 * j + 2 * r + e] = -kInfinity;
          }
        }
      }
    };
    const u32 bias_row = base + L::kBias + c * 64 * 128 + fragment_row * 128;
    const u32 bias_swizzle = (u32)(fragment_half ^ (fragment_row & 7)) << 4;
    auto load_bias = [&](u32 (&b)[4], int stage, int k) {
      load_matrix4(b, bias_row + stage * L::kBiasBytes + (k / 4) * BM * 128 + (bias_swizzle ^ ((k % 4) << 5)));
    };
    // s in log2 units, every feature in it; for the exact step
    auto finish_scores = [&](int bias_stage) {
      if constexpr (S.softcap) {
#pragma unroll
        for (int i = 0; i < BN / 2; i++) s[i] = a.cap_out * tanh_fast(s[i] * a.cap_in);
      } else {
#pragma unroll
        for (int i = 0; i < BN / 2; i++) s[i] *= a.scale_log2;
      }
      if constexpr (S.bias_stages > 0) {
#pragma unroll
        for (int k = 0; k < BN / 16; k++) {
          u32 b[4];
          load_bias(b, bias_stage, k);
#pragma unroll
          for (int e = 0; e < 4; e++) {
            s[8 * k + 2 * e] = fmaf(bits_float(b[e] << 16), kLog2e, s[8 * k + 2 * e]);
            s[8 * k + 2 * e + 1] = fmaf(bits_float(b[e] & 0xFFFF0000u), kLog2e, s[8 * k + 2 * e + 1]);
          }
        }
      }
    };
    // online softmax with the row's true maximum; returns the factor that brings O and sums up to date
    auto exact_step = [&](float (&factor)[2]) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float m0 = ref[r], m1 = -kInfinity;
#pragma unroll
        for (int j = 0; j < BN / 8; j++) m0 = fmaxf(m0, s[4 * j + 2 * r]), m1 = fmaxf(m1, s[4 * j + 2 * r + 1]);
        float m = fmaxf(m0, m1);
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
        const float safe = m == -kInfinity ? 0.f : m;
        factor[r] = exp2_fast(ref[r] - safe);
        ref[r] = m;
        float t0 = 0, t1 = 0;
#pragma unroll
        for (int j = 0; j < BN / 8; j++) {
          float x = exp2_fast(s[4 * j + 2 * r] - safe), y = exp2_fast(s[4 * j + 2 * r + 1] - safe);
          s[4 * j + 2 * r] = x, s[4 * j + 2 * r + 1] = y;
          t0 += x, t1 += y;
        }
        sum[r] = sum[r] * factor[r] + (t0 + t1);
      }
    };
    // a first reference point: the largest of a few elements; any element of the row would be right
    auto guess_reference = [&](int bias_stage) {
      float m[2] = {-kInfinity, -kInfinity};
#pragma unroll
      for (int k = 0; k < BN / 16; k += 2) {
        u32 b[4];
        if constexpr (S.bias_stages > 0) load_bias(b, bias_stage, k);
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
          float x = s[8 * k + e];
          if constexpr (S.softcap) x = x == -kInfinity ? x : a.cap_out * tanh_fast(x * a.cap_in);
          else x *= a.scale_log2;
          if constexpr (S.bias_stages > 0) x = fmaf(bits_float(b[e / 2] << 16), kLog2e, x);
          m[(e >> 1) & 1] = fmaxf(m[(e >> 1) & 1], x);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        m[r] = fmaxf(m[r], __shfl_xor_sync(~0u, m[r], 1));
        ref[r] = fmaxf(m[r], __shfl_xor_sync(~0u, m[r], 2));
      }
    };
    // the same with the reference point left where it is; true where that was not safe (s is then spoiled)
    auto lazy_step = [&](int bias_stage, bool masked) {
      float t[4] = {0, 0, 0, 0};
      const float minus[2] = {-ref[0], -ref[1]};
#pragma unroll
      for (int k = 0; k < BN / 16; k++) {
        u32 b[4];
        if constexpr (S.bias_stages > 0) load_bias(b, bias_stage, k);
#pragma unroll
        for (int e = 0; e < 8; e++) {
          const int r = (e >> 1) & 1;
          float x = s[8 * k + e];
          float from = minus[r];
          if constexpr (S.bias_stages > 0) from = fmaf(bits_float(e & 1 ? b[e / 2] & 0xFFFF0000u : b[e / 2] << 16), kLog2e, from);
          if constexpr (S.softcap) x = masked && x == -kInfinity ? x : fmaf(tanh_fast(x * a.cap_in), a.cap_out, from);
          else x = fmaf(x, a.scale_log2, from);
          x = exp2_fast(x);
          s[8 * k + e] = x;
          t[2 * r + (e & 1)] += x;
        }
      }
      const float s0 = t[0] + t[1], s1 = t[2] + t[3];
      const float limit0 = fabsf(ref[0]) < 0x1p24f ? 0x1p40f : -1.f, limit1 = fabsf(ref[1]) < 0x1p24f ? 0x1p40f : -1.f;
      const bool bad = !(s0 < limit0) || !(s1 < limit1);
      const bool any = named_or(own_barrier, 128, bad);
      if (!any) sum[0] += s0, sum[1] += s1;
      return any;
    };
    auto convert = [&] {
#pragma unroll
      for (int i = 0; i < BN / 4; i++) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
    };
    auto rescale = [&](const float (&factor)[2]) {
#pragma unroll
      for (int i = 0; i < DV / 8; i++) o[4 * i] *= factor[0], o[4 * i + 1] *= factor[0], o[4 * i + 2] *= factor[1], o[4 * i + 3] *= factor[1];
    };
    auto next_k = [&] { if (leader) barrier_arrive(k_empty(ks)); if (++ks == S.k_stages) ks = 0, kp ^= 1; };
    auto next_v = [&] { if (leader) barrier_arrive(v_empty(vs)); if (++vs == S.v_stages) vs = 0, vp ^= 1; };
    auto next_bias = [&] { if constexpr (S.bias_stages > 0) { if (leader) barrier_arrive(b_empty(bs)); if (++bs == S.bias_stages) bs = 0, bp ^= 1; } };
    auto release_stored = [&] {                     // the O of the tile before has left its buffer
      if (stored && thread == 0) { bulk_wait_read(); barrier_arrive(q_empty(stored_slot)); }
      stored = false;
    };

    // Tiles that no row of this warpgroup reaches are passed over.
    int own_end = keys.end;
    if constexpr (S.causal) own_end = key_tiles<S>(a, w.row + c * 64, 64).end;
    if (w.row + c * 64 >= a.sq) own_end = keys.begin;
    ref[0] = ref[1] = -kInfinity;
    sum[0] = sum[1] = 0;
    for (int n = keys.end - 1; n >= own_end && n >= keys.begin; n--) {
      turn_wait();
      barrier_wait(k_full(ks), kp);
      next_k();
      if constexpr (S.bias_stages > 0) barrier_wait(b_full(bs), bp), next_bias();
      barrier_wait(v_full(vs), vp);
      next_v();
      turn_pass();
    }
    if (own_end > keys.begin) {
      int n = own_end - 1;
      // softmax of tile n; `again` runs where the quick way was not safe: O and S are then nobody else's
      auto soften = [&](bool masked, bool start, bool exact) {
        if constexpr (S.bias_stages > 0) barrier_wait(b_full(bs), bp);
        bool again = true;
        if (!exact) {
          if (masked) mask_scores(n);
          if (start) guess_reference(bs);
          again = lazy_step(bs, masked);
        }
        wgmma_wait<0>();
        pin(o);
        if (!start) next_v();
        if (again) {
          if (!exact) {
            issue_scores(ks);
            wgmma_wait<0>();
            pin(s);
          }
          finish_scores(bs);
          if (masked) mask_scores(n);
          float factor[2];
          exact_step(factor);
          rescale(factor);
        }
        next_k();
        next_bias();
        convert();
      };
      barrier_wait(k_full(ks), kp);
      turn_wait();
      issue_scores(ks);
      turn_pass();
#pragma unroll
      for (int i = 0; i < DV / 2; i++) o[i] = 0;
      wgmma_wait<0>();
      pin(s);
      soften(true, true, !S.lazy);
      release_stored();
      auto step = [&](bool masked) {
        n--;
        barrier_wait(k_full(ks), kp);
        turn_wait();
        issue_scores(ks);
        barrier_wait(v_full(vs), vp);
        issue_output(vs);
        turn_pass();
        wgmma_wait<1>();
        pin(s);
        soften(masked, false, !S.lazy);
      };
      if constexpr (S.causal) {
        // tiles that cross the diagonal of this warpgroup's rows
        const int free_end = (w.row + c * 64 + a.shift + a.right + 1) / BN;   // tiles below this are full at the right
#pragma unroll 1
        while (n > keys.begin && n - 1 >= free_end) step(true);
      }
      int left_edge = keys.begin;
      if constexpr (S.window) left_edge = imax(keys.begin, imin(keys.end, (imax(0, w.row + c * 64 + 63 + a.shift - a.left) + BN - 1) / BN));
#pragma unroll 1
      while (n > left_edge) step(false);
      if constexpr (S.window) {
#pragma unroll 1
        while (n > keys.begin) step(true);
      }
      barrier_wait(v_full(vs), vp);
      issue_output(vs);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      }
      wgmma_wait<0>();
      pin(o);
      next_v();
    } else {
      release_stored();
#pragma unroll
      for (int i = 0; i < DV / 2; i++) o[i] = 0;
    }

    // ---- epilogue ----
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      inverse[r] = sum[r] == 0.f ? 0.f : 1.f / sum[r];
      const int row = row0 + 8 * r;
      if (lane % 4 == 0 && row < a.sq)
        a.lse[((i64)w.batch * a.heads + w.head) * a.sq + row] = sum[r] == 0.f ? -kInfinity : (ref[r] + log2_fast(sum[r])) * kLn2;
    }
    if constexpr (S.direct) {
      if (thread == 0) barrier_arrive(q_empty(qs));
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = row0 + 8 * r;
        if (row < a.sq) {
          u16* to = a.out + w.batch * a.out_b + row * a.out_s + w.head * a.out_h + (lane % 4) * 2;
#pragma unroll
          for (int i = 0; i < DV / 8; i++) *(u32*)(to + i * 8) = pack_bf16(o[4 * i + 2 * r] * inverse[r], o[4 * i + 2 * r + 1] * inverse[r]);
        }
      }
    } else {
      const u32 to = base + L::kQ + qs * L::kQBytes;
#pragma unroll
      for (int k = 0; k < DV / 16; k++) {
        constexpr int per = PV / 16;
        store_matrix4(to + (k / per) * BM * PV * 2 + swizzled<PV * 2>(c * 64 + fragment_row, (k % per) * 2 + fragment_half),
                      pack_bf16(o[8 * k] * inverse[0], o[8 * k + 1] * inverse[0]), pack_bf16(o[8 * k + 2] * inverse[1], o[8 * k + 3] * inverse[1]),
                      pack_bf16(o[8 * k + 4] * inverse[0], o[8 * k + 5] * inverse[0]), pack_bf16(o[8 * k + 6] * inverse[1], o[8 * k + 7] * inverse[1]));
      }
      fence_async();
      named_sync(own_barrier, 128);
      if (thread == 0) {
        for (int i = 0; i < DV / PV; i++) tma_store(&a.o, to + i * BM * PV * 2 + c * 64 * PV * 2, i * PV, w.row + c * 64, w.head, w.batch);
        bulk_commit();
        if constexpr (S.q_buffers == 1) { bulk_wait_read(); barrier_arrive(q_empty(qs)); }
      }
      if constexpr (S.q_buffers > 1) stored = true, stored_slot = qs;
    }
    if (++qs == S.q_buffers) qs = 0, qp ^= 1;
  }
  if (S.turns && G > 1 && c == 0) named_sync(1, 256);   // take the last pass
  if (thread == 0) bulk_wait_read();
}
