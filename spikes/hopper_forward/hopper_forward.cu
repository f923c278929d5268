// SPDX-License-Identifier: Apache-2.0
// Attention forward for Hopper: the experiment behind sm90_forward; README.md beside it has the figures. No header is
// included: src/math (scalar.h, band.h, dropout.h) and the wgmma wrappers that wgmma.py prints come before this text.
//
// One persistent CTA an SM. Warpgroup 0 produces: its first thread takes tiles from a counter and loads Q (q_buffers
// deep, the tile's number travels beside it), K, V and the bias tile by TMA. The others own 64 query rows each:
//
//     S(n-1) = Q K(n-1)^T issued, then O += P(n) V(n) issued; the turn is passed; dropout's bits are drawn meanwhile;
//     half of the softmax of S(n-1); O awaited; the other half, and P(n-1) into registers as it comes.
//     At the end O leaves by TMA through the Q buffer that its tile no longer needs; the next tile's Q is in the other.
//
// Softmax, `lazy`: the reference point of a row need not be its maximum, it must only be near: p = 2^(s - ref) is as
// precise in bf16 at 2^6 as at 1. So an ordinary tile computes no maximum and rescales nothing (3.5 instructions an
// element instead of 6). A warp in which a row's sum over a tile leaves the safe range moves its reference points in
// place; where a weight even left fp32's range it forms its S again with mma.sync and takes the exact step (maximum,
// rescale). A row without a key so far, or with a reference point of 2^24 and more, goes through exact steps at once.
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
  bool guess = true;                // the first reference point from a few elements; false: the first tile takes the exact step
  int vote = 1;                     // 0: no check of the quick way (wrong; shows what the check costs)
  int early = keys / 32;            // blocks of 16 keys whose softmax runs before O of the tile before is awaited
};

struct alignas(64) TensorMap { u64 words[16]; };

struct Arguments {
  TensorMap q, k, v, o, bias;
  u16* out;
  float* lse;
  u32* counters;                    // two: next tile, CTAs done; zero before and after
  const int* cu_q;                  // varlen: prefix sums of lengths
  const int* cu_k;
  const u32* tile_list;             // varlen: row tile << 20 | batch << 8 | head
  const int* tile_count;
  i64 out_b, out_s, out_h;
  int batch, heads, group;          // group = query heads per key head
  int sq, sk;
  int shift, left, right;
  int row_tiles, tiles, heads_in_group, batch_inner;
  int bias_b, bias_h;               // 0 where the bias is broadcast
  float scale, scale_log2;          // the second times log2(e)
  float cap_in, cap_out, cap_log2;  // softcap: cap_out * tanh(dot * cap_in); the last times log2(e)
  float keep_scale;
  u32 threshold;                    // dropout T
  u64 seed, offset;
};

#define DEV __device__ __forceinline__
constexpr float kInfinity = __builtin_bit_cast(float, 0x7F800000u);
constexpr float kLazySum = 0x1p7f;    // a part of a row's sum over a tile beyond which its reference point is moved
constexpr float kLazyBelow = 0x1p24f; // and the reference points that the quick way is for
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

namespace math = fovea::math;

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
DEV void tma_store(const TensorMap* map, u32 from, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               ::"l"(map), "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
DEV void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEV void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEV void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEV void named_sync(int id, int n) { asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(n) : "memory"); }
DEV void named_arrive(int id, int n) { asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(n) : "memory"); }
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
DEV void mma(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEV void store_matrix4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEV void store_zero16(u32 address) { asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory"); }
template <int N> DEV void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEV void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
DEV u64 join(u32 lo, u32 hi) { u64 r; asm("mov.b64 %0, {%1, %2};" : "=l"(r) : "r"(lo), "r"(hi)); return r; }
DEV float bf16_low(u32 x) { return __uint_as_float(x << 16); }
DEV float bf16_high(u32 x) { return __uint_as_float(x & 0xFFFF0000u); }
// all ones in each half of u that is at least T's; T in both halves of `threshold`, at most 0x7C00
DEV u32 keep_pair(u32 u, u32 threshold) {
  u32 r;
  asm("{\n.reg .b32 m;\nmin.u16x2 m, %1, %2;\nset.eq.u32.f16x2 %0, m, %2;\n}" : "=r"(r) : "r"(u), "r"(threshold));
  return r;
}
// A place in a ring of N buffers and the parity of its barrier, in one register.
template <int N> struct Place {
  u32 at = 0;
  DEV u32 stage() const { return at >> 1; }
  DEV u32 parity() const { return at & 1; }
  DEV void next() { at = at >= 2 * N - 2 ? (at & 1) ^ 1 : at + 2; }
};
// u32 whose wide product is one instruction and two register names, for math/dropout.h
struct Word {
  u32 bits;
  Word() = default;
  DEV explicit constexpr Word(u32 x) : bits(x) {}
  friend DEV Word operator^(Word a, Word b) { return Word(a.bits ^ b.bits); }
  friend DEV Word operator^(Word a, u32 b) { return Word(a.bits ^ b); }
};
DEV void mul_wide(Word a, u32 b, Word& high, Word& low) {
  asm("{\n.reg .b64 t;\nmul.wide.u32 t, %2, %3;\nmov.b64 {%1, %0}, t;\n}" : "=r"(high.bits), "=r"(low.bits) : "r"(a.bits), "r"(b));
}
template <int N> struct Constant { constexpr operator int() const { return N; } };
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

using Band = math::Band<int>;
// Which tile. Dense: heads in groups (whose K and V fit in L2, or that share a bias), in a group the row tiles one after
// the other for all its heads, the longest first where rows differ in length. Packed: a list made beforehand.
struct Tile {
  int row, head, batch;
  int q_begin, k_begin;   // where the sequences lie in packed tensors
  Band band;
};
template <Spec S> DEV Tile decode(const Arguments& a, int t) {
  Tile r;
  if constexpr (S.varlen) {
    const u32 packed = a.tile_list[t];
    r.head = packed & 0xFF;
    r.batch = packed >> 8 & 0xFFF;
    r.row = (packed >> 20) * S.rows;
    r.q_begin = a.cu_q[r.batch], r.k_begin = a.cu_k[r.batch];
    const int sq = a.cu_q[r.batch + 1] - r.q_begin, sk = a.cu_k[r.batch + 1] - r.k_begin;
    r.band = {sq, sk, sk - sq - a.left, sk - sq + a.right};
  } else {
    const int per = a.row_tiles * a.heads_in_group, g = t / per, rest = t - g * per;
    const int in_group = imin(a.heads_in_group, a.batch * a.heads - g * a.heads_in_group);
    const int m = rest / in_group, bh = g * a.heads_in_group + rest - m * in_group;
    r.row = (S.causal ? a.row_tiles - 1 - m : m) * S.rows;
    const int inner = a.batch_inner ? a.batch : a.heads, outer = bh / inner;
    r.batch = a.batch_inner ? bh - outer * inner : outer;
    r.head = a.batch_inner ? outer : bh - outer * inner;
    r.q_begin = r.k_begin = 0;
    r.band = {a.sq, a.sk, a.shift - a.left, a.shift + a.right};
  }
  return r;
}
struct Keys { int begin, end; };  // tiles of keys
template <Spec S> DEV Keys key_tiles(const Band& band, int row, int rows) {
  const auto keys = band.keys_of_rows(row, imin(row + rows, band.seqlen_q));
  return {S.window ? keys.begin / S.keys : 0, ((S.causal ? keys.end : band.seqlen_k) + S.keys - 1) / S.keys};
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
    Place<S.k_stages> kr;
    Place<S.v_stages> vr;
    Place<S.bias_stages> br;
    Place<S.q_buffers> qr;
    int t = blockIdx.x;
    const int tiles = S.varlen ? *a.tile_count : a.tiles;
    while (true) {
      barrier_wait(q_empty(qr.stage()), qr.parity() ^ 1);
      if (t >= tiles) {
        tile_slot[qr.stage()] = -1;
        barrier_arrive(q_full(qr.stage()));
        break;
      }
      int following = (int)(gridDim.x + atomicAdd(a.counters, 1u));
      Tile w = decode<S>(a, t);
      Keys keys = key_tiles<S>(w.band, w.row, BM);
      const int batch = S.varlen ? 0 : w.batch;
      tile_slot[qr.stage()] = t;
      barrier_expect(q_full(qr.stage()), BM * D * 2);
#pragma unroll 1
      for (int p = 0; p < D / PK; p++) tma_load(base + L::kQ + qr.stage() * L::kQBytes + p * BM * PK * 2, &a.q, q_full(qr.stage()), p * PK, w.q_begin + w.row, w.head, batch);
      qr.next();
      const int head_k = w.head / a.group;
      auto load_k = [&](int n) {
        barrier_wait(k_empty(kr.stage()), kr.parity() ^ 1);
        barrier_expect(k_full(kr.stage()), L::kKBytes);
#pragma unroll 1
        for (int p = 0; p < D / PK; p++) tma_load(base + L::kK + kr.stage() * L::kKBytes + p * BN * PK * 2, &a.k, k_full(kr.stage()), p * PK, w.k_begin + n * BN, head_k, batch);
        kr.next();
        if constexpr (S.bias_stages > 0) {
          barrier_wait(b_empty(br.stage()), br.parity() ^ 1);
          barrier_expect(b_full(br.stage()), L::kBiasBytes);
  #pragma unroll 1
        for (int p = 0; p < BN / 64; p++)
            tma_load(base + L::kBias + br.stage() * L::kBiasBytes + p * BM * 128, &a.bias, b_full(br.stage()), n * BN + p * 64, w.row, w.head * a.bias_h, w.batch * a.bias_b);
          br.next();
        }
      };
      auto load_v = [&](int n) {
        barrier_wait(v_empty(vr.stage()), vr.parity() ^ 1);
        barrier_expect(v_full(vr.stage()), L::kVBytes);
#pragma unroll 1
        for (int p = 0; p < DV / PV; p++) tma_load(base + L::kV + vr.stage() * L::kVBytes + p * BN * PV * 2, &a.v, v_full(vr.stage()), p * PV, w.k_begin + n * BN, head_k, batch);
        vr.next();
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
  Place<S.k_stages> kr;
  Place<S.v_stages> vr;
  Place<S.bias_stages> br;
  Place<S.q_buffers> qr;
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
    barrier_wait(q_full(qr.stage()), qr.parity());
    const int t = tile_slot[qr.stage()];
    if (t < 0) break;
    const Tile w = decode<S>(a, t);
    const Keys keys = key_tiles<S>(w.band, w.row, BM);
    const int row0 = w.row + c * 64 + warp * 16 + lane / 4;
    const u32 q_now = q_low + qr.stage() * (L::kQBytes / 16);

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
    // Forbidden elements become -inf. Each edge is asked for only where this warpgroup's rows meet it.
    auto mask_scores = [&](int n) {
      const int top = w.row + c * 64;
      const int free_end = S.causal ? imin(w.band.seqlen_k, top + w.band.high + 1) : w.band.seqlen_k;
      if ((n + 1) * BN > free_end) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int end = (S.causal ? w.band.keys_of(row0 + 8 * r).end : w.band.seqlen_k) - n * BN - (lane % 4) * 2;
#pragma unroll
          for (int j = 0; j < BN / 8; j++) {
            if (8 * j >= end) s[4 * j + 2 * r] = -kInfinity;
            if (8 * j + 1 >= end) s[4 * j + 2 * r + 1] = -kInfinity;
          }
        }
      }
      if constexpr (S.window) {
        if (n * BN < top + 63 + w.band.low) {
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const int begin = w.band.keys_of(row0 + 8 * r).begin - n * BN - (lane % 4) * 2;
#pragma unroll
            for (int j = 0; j < BN / 8; j++) {
              if (8 * j < begin) s[4 * j + 2 * r] = -kInfinity;
              if (8 * j + 1 < begin) s[4 * j + 2 * r + 1] = -kInfinity;
            }
          }
        }
      }
    };
    math::DropoutHead dropout;
    u32 folded_i = 0;
    const u32 threshold = a.threshold * 0x10001u;
    if constexpr (S.dropout) {
      dropout = math::DropoutHead::make(a.seed, a.offset, (u64)w.batch * a.heads + w.head);
      folded_i = math::dropout_fold<u32>(row0);
    }
    const u32 bias_row = base + L::kBias + c * 64 * 128 + fragment_row * 128;
    const u32 bias_swizzle = (u32)(fragment_half ^ (fragment_row & 7)) << 4;
    auto load_bias = [&](u32 (&b)[4], int stage, int k) {
      load_matrix4(b, bias_row + stage * L::kBiasBytes + (k / 4) * BM * 128 + (bias_swizzle ^ ((k % 4) << 5)));
    };
    // s in natural units with every feature in it, for the exact step
    auto finish_scores = [&](int bias_stage) {
#pragma unroll
      for (int i = 0; i < BN / 2; i++) s[i] = S.softcap ? a.cap_out * tanh_fast(s[i] * a.cap_in) : s[i] * a.scale;
      if constexpr (S.bias_stages > 0) {
#pragma unroll
        for (int k = 0; k < BN / 16; k++) {
          u32 b[4];
          load_bias(b, bias_stage, k);
#pragma unroll
          for (int e = 0; e < 4; e++) s[8 * k + 2 * e] += bf16_low(b[e]), s[8 * k + 2 * e + 1] += bf16_high(b[e]);
        }
      }
    };
    // Weights are taken relative to 2^(ref * log2e rounded); what the rounding left out, where it can matter.
    auto residual = [&](float x) { return fabsf(x) < kLazyBelow ? fmaf(x, kLog2e, -(x * kLog2e)) : 0.f; };
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
        const float safe = m == -kInfinity ? 0.f : m, rest = residual(safe);
        factor[r] = ref[r] == -kInfinity ? 0.f : exp2_fast((ref[r] - safe) * kLog2e + (rest - residual(ref[r])));
        ref[r] = m;
        float t0 = 0, t1 = 0;
#pragma unroll
        for (int j = 0; j < BN / 8; j++) {
          float x = exp2_fast(fmaf(s[4 * j + 2 * r] - safe, kLog2e, rest)), y = exp2_fast(fmaf(s[4 * j + 2 * r + 1] - safe, kLog2e, rest));
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
      for (int k = 0; k < BN / 16; k += 4) {
        u32 b[4];
        if constexpr (S.bias_stages > 0) load_bias(b, bias_stage, k);
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
          float x = s[8 * k + e];
          if constexpr (S.softcap) x = x == -kInfinity ? x : a.cap_out * tanh_fast(x * a.cap_in);
          else x *= a.scale;
          if constexpr (S.bias_stages > 0) x += bf16_low(b[e / 2]);
          m[(e >> 1) & 1] = fmaxf(m[(e >> 1) & 1], x);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        m[r] = fmaxf(m[r], __shfl_xor_sync(~0u, m[r], 1));
        ref[r] = fmaxf(m[r], __shfl_xor_sync(~0u, m[r], 2));
      }
    };
    // Weights of blocks [from, to) of 16 keys relative to the reference as it is; parts of their sums into t.
    auto lazy_weights = [&](auto from, auto to, int bias_stage, const float (&minus)[2], float (&t)[4]) {
#pragma unroll
      for (int k = from; k < to; k++) {
        u32 b[4];
        if constexpr (S.bias_stages > 0) load_bias(b, bias_stage, k);
#pragma unroll
        for (int e = 0; e < 8; e++) {
          const int r = (e >> 1) & 1;
          float x = s[8 * k + e];
          float start = minus[r];
          if constexpr (S.bias_stages > 0) start = fmaf(e & 1 ? bf16_high(b[e / 2]) : bf16_low(b[e / 2]), kLog2e, start);
          if constexpr (S.softcap) x = x == -kInfinity ? x : fmaf(tanh_fast(x * a.cap_in), a.cap_log2, start);
          else x = fmaf(x, a.scale_log2, start);
          x = exp2_fast(x);
          s[8 * k + e] = x;
          t[2 * r + (e & 1)] += x;
        }
      }
    };
    // Dropout does not wait for S: all ones or zeros for each pair of elements, formed while the products run.
    u32 keep[S.dropout ? BN / 4 : 1];
    auto draw = [&](int n) {
      if constexpr (S.dropout) {
        asm volatile("" : "+r"(folded_i));   // not before the products are issued and the turn is passed
#pragma unroll
        for (int k = 0; k < BN / 16; k++) {
          const u32 folded_j = n * (BN / 2) + 8 * k + (lane % 4) * 2;   // dropout_fold of this lane's first column
          const auto first = math::dropout_call<Word>(dropout, Word(folded_i), Word(folded_j)), second = math::dropout_call<Word>(dropout, Word(folded_i), Word(folded_j + 1));
          keep[4 * k] = keep_pair(__byte_perm(first.x.bits, second.x.bits, 0x5410), threshold);
          keep[4 * k + 1] = keep_pair(__byte_perm(first.y.bits, second.y.bits, 0x5410), threshold);
          keep[4 * k + 2] = keep_pair(__byte_perm(first.x.bits, second.x.bits, 0x7632), threshold);
          keep[4 * k + 3] = keep_pair(__byte_perm(first.y.bits, second.y.bits, 0x7632), threshold);
        }
      }
    };
    // P in bf16, dropped elements 0
    auto convert = [&](auto from, auto to) {
#pragma unroll
      for (int k = from; k < to; k++) {
#pragma unroll
        for (int i = 4 * k; i < 4 * k + 4; i++) {
          p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
          if constexpr (S.dropout) p[i] &= keep[i];
        }
      }
    };
    // The largest weight becomes 1, in place: the quick way's answer to a row that has outgrown its reference point.
    auto move_reference = [&] {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float m = 1;
#pragma unroll
        for (int j = 0; j < BN / 8; j++) m = fmaxf(m, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
        const float before = ref[r] * kLog2e;
        ref[r] += log2_fast(m) * kLn2;
        const float factor = exp2_fast(before - ref[r] * kLog2e);
        sum[r] *= factor;
#pragma unroll
        for (int j = 0; j < BN / 8; j++) s[4 * j + 2 * r] *= factor, s[4 * j + 2 * r + 1] *= factor;
#pragma unroll
        for (int i = 0; i < DV / 8; i++) o[4 * i + 2 * r] *= factor, o[4 * i + 2 * r + 1] *= factor;
      }
    };
    // S of this warp's 16 rows once more, without the rest of its warpgroup (rare, and slow beside wgmma)
    auto form_scores = [&] {
#pragma unroll
      for (int i = 0; i < BN / 2; i++) s[i] = 0;
#pragma unroll 1
      for (int k = 0; k < D / 16; k++) {
        constexpr int per = PK / 16;
        u32 x[4];
        load_matrix4(x, base + L::kQ + qr.stage() * L::kQBytes + (k / per) * BM * PK * 2 + swizzled<PK * 2>(c * 64 + fragment_row, (k % per) * 2 + fragment_half));
#pragma unroll
        for (int j = 0; j < BN / 16; j++) {
          u32 y[4];
          load_matrix4(y, base + L::kK + kr.stage() * L::kKBytes + (k / per) * BN * PK * 2 + swizzled<PK * 2>(16 * j + lane % 16, (k % per) * 2 + fragment_half));
          mma(s + 8 * j, x, y[0], y[2]);
          mma(s + 8 * j + 4, x, y[1], y[3]);
        }
      }
    };
    auto rescale = [&](const float (&factor)[2]) {
#pragma unroll
      for (int i = 0; i < DV / 8; i++) o[4 * i] *= factor[0], o[4 * i + 1] *= factor[0], o[4 * i + 2] *= factor[1], o[4 * i + 3] *= factor[1];
    };
    auto next_k = [&] { if (leader) barrier_arrive(k_empty(kr.stage())); kr.next(); };
    auto next_v = [&] { if (leader) barrier_arrive(v_empty(vr.stage())); vr.next(); };
    auto next_bias = [&] { if constexpr (S.bias_stages > 0) { if (leader) barrier_arrive(b_empty(br.stage())); br.next(); } };
    auto release_stored = [&] {                     // the O of the tile before has left its buffer
      if (stored && thread == 0) { bulk_wait_read(); barrier_arrive(q_empty(stored_slot)); }
      stored = false;
    };

    // Tiles that no row of this warpgroup reaches are passed over.
    int own_end = keys.end;
    if constexpr (S.causal) own_end = imin(keys.end, key_tiles<S>(w.band, w.row + c * 64, 64).end);
    if (w.row + c * 64 >= w.band.seqlen_q) own_end = keys.begin;
    ref[0] = ref[1] = -kInfinity;
    sum[0] = sum[1] = 0;
    for (int n = keys.end - 1; n >= own_end && n >= keys.begin; n--) {
      turn_wait();
      barrier_wait(k_full(kr.stage()), kr.parity());
      next_k();
      if constexpr (S.bias_stages > 0) barrier_wait(b_full(br.stage()), br.parity()), next_bias();
      barrier_wait(v_full(vr.stage()), vr.parity());
      next_v();
      turn_pass();
    }
    if (own_end > keys.begin) {
      int n = own_end - 1;
      bool careful = false;
      // Softmax of tile n and P. `careful` is a warp's own matter: some row's reference point is not fit for the quick
      // way (no key so far, or too large), or the quick way met a weight beyond every range.
      auto soften = [&](bool start) {
        if constexpr (S.bias_stages > 0) barrier_wait(b_full(br.stage()), br.parity());
        constexpr Constant<0> none;
        constexpr Constant<S.early> early;
        constexpr Constant<BN / 16> all;
        const bool quick = S.lazy && (S.guess || !start);
        if (quick) {
          mask_scores(n);
          if (start) {
            guess_reference(br.stage());
            careful = __any_sync(~0u, !(fabsf(ref[0]) < kLazyBelow) || !(fabsf(ref[1]) < kLazyBelow));
            if (careful) ref[0] = ref[1] = -kInfinity;
          }
        }
        if (quick && !careful) {
          const float minus[2] = {-(ref[0] * kLog2e), -(ref[1] * kLog2e)};
          float t[4] = {0, 0, 0, 0};
          lazy_weights(none, early, br.stage(), minus, t);
          wgmma_wait<0>();
          pin(o);
          if (!start) next_v();
          convert(none, early);
          lazy_weights(early, all, br.stage(), minus, t);
          convert(early, all);
          const float s0 = t[0] + t[1], s1 = t[2] + t[3];
          if (S.vote && __any_sync(~0u, !(s0 < kLazySum) || !(s1 < kLazySum))) {
            if (__any_sync(~0u, !(s0 + s1 < 0x1p100f))) {
              form_scores();
              careful = true;
            } else {
              sum[0] += s0, sum[1] += s1;
              move_reference();
              convert(none, all);
            }
          } else {
            sum[0] += s0, sum[1] += s1;
          }
        } else {
          wgmma_wait<0>();
          pin(o);
          if (!start) next_v();
        }
        if (!quick || careful) {
          finish_scores(br.stage());
          mask_scores(n);
          float factor[2];
          exact_step(factor);
          rescale(factor);
          convert(none, all);
          if (S.lazy) careful = __any_sync(~0u, !(fabsf(ref[0]) < kLazyBelow) || !(fabsf(ref[1]) < kLazyBelow));
        }
        next_k();
        next_bias();
      };
      barrier_wait(k_full(kr.stage()), kr.parity());
      turn_wait();
      issue_scores(kr.stage());
      turn_pass();
      draw(n);
#pragma unroll
      for (int i = 0; i < DV / 2; i++) o[i] = 0;
      wgmma_wait<0>();
      pin(s);
      soften(true);
      release_stored();
      // 0 * NaN is NaN: whatever lies behind the sequence's end must not be there. Every warpgroup writes the same zeros.
      if constexpr (S.varlen) {
        const int live = w.band.seqlen_k - n * BN;
        if (live < BN) {
          barrier_wait(v_full(vr.stage()), vr.parity());
          for (int i = thread; i < (BN - live) * (DV / 8); i += 128) {
            const int row = live + i / (DV / 8), chunk = i % (DV / 8);
            store_zero16(base + L::kV + vr.stage() * L::kVBytes + chunk / (PV / 8) * BN * PV * 2 + row * PV * 2 + chunk % (PV / 8) * 16);
          }
          fence_async();
          named_sync(own_barrier, 128);
        }
      }
      auto step = [&] {
        n--;
        barrier_wait(k_full(kr.stage()), kr.parity());
        turn_wait();
        issue_scores(kr.stage());
        barrier_wait(v_full(vr.stage()), vr.parity());
        issue_output(vr.stage());
        turn_pass();
        draw(n);
        wgmma_wait<1>();
        pin(s);
        soften(false);
      };
#pragma unroll 1
      while (n > keys.begin) step();
      barrier_wait(v_full(vr.stage()), vr.parity());
      issue_output(vr.stage());
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
      inverse[r] = sum[r] == 0.f ? 0.f : (S.dropout ? a.keep_scale : 1.f) / sum[r];
      const int row = row0 + 8 * r;
      if (lane % 4 == 0 && row < w.band.seqlen_q)
        a.lse[S.varlen ? (i64)w.head * a.sq + w.q_begin + row : ((i64)w.batch * a.heads + w.head) * a.sq + row] = sum[r] == 0.f ? -kInfinity : fmaf(log2_fast(sum[r]) - residual(ref[r]), kLn2, ref[r]);
    }
    // a TMA store would run over into the next sequence
    if (S.direct || (S.varlen && w.row + c * 64 + 64 > w.band.seqlen_q)) {
      named_sync(own_barrier, 128);
      if (thread == 0) barrier_arrive(q_empty(qr.stage()));
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = row0 + 8 * r;
        if (row < w.band.seqlen_q) {
          u16* to = a.out + (S.varlen ? 0 : w.batch * a.out_b) + (w.q_begin + row) * a.out_s + w.head * a.out_h + (lane % 4) * 2;
#pragma unroll
          for (int i = 0; i < DV / 8; i++) *(u32*)(to + i * 8) = pack_bf16(o[4 * i + 2 * r] * inverse[r], o[4 * i + 2 * r + 1] * inverse[r]);
        }
      }
    } else {
      const u32 to = base + L::kQ + qr.stage() * L::kQBytes;
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
        for (int i = 0; i < DV / PV; i++) tma_store(&a.o, to + i * BM * PV * 2 + c * 64 * PV * 2, i * PV, w.q_begin + w.row + c * 64, w.head, S.varlen ? 0 : w.batch);
        bulk_commit();
        if constexpr (S.q_buffers == 1) { bulk_wait_read(); barrier_arrive(q_empty(qr.stage())); }
      }
      if constexpr (S.q_buffers > 1) stored = true, stored_slot = qr.stage();
    }
    qr.next();
  }
  if (S.turns && G > 1 && c == 0) named_sync(1, 256);   // take the last pass
  if (thread == 0) bulk_wait_read();
}
