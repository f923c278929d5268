// SPDX-License-Identifier: Apache-2.0
//
// sm90_small_backward: every gradient of sequences of at most 64 queries and keys (windows of images) on Hopper, for
// numbers of 16 bits and head dimensions up to 64.
//
// A warpgroup has a whole head at a time: everything about it is in shared memory and registers, delta included, so
// that nothing comes before or after. Warpgroup 0 copies, a warp for each of the others: Q, K, V, dO and O by TMA. A
// block belongs to one plane of the bias: its warpgroups keep the bias, and the sum of its gradient, in registers over
// all of their heads. small_bias_sum (sm90/small_bias_sum.cuh) adds the warpgroups' sums in order.
//
//     S^T = K Q^T, dP^T = V dO^T | delta = <dO, O> meanwhile | P^T, dS^T | dV = P^T dO, dK = dS^T Q | dQ = dS K
//
// Blocks: planes by as many as keep every multiprocessor busy.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/score/approximation.cuh"
#include "cuda/device/sm90/small_backward_sizes.h"
#include "cuda/device/tile/accumulator.cuh"
#include "cuda/device/tile/pipe.cuh"
#include "cuda/device/tile/shared.cuh"
#include "math/band.h"
#include "math/score.h"
#include "math/softmax.h"

namespace fovea::cuda {

// Named barriers: each warpgroup that computes has its own.
inline constexpr NamedBarriers kSmallGroup{1, 4};
static_assert(are_apart({kSmallGroup}));

// Entry n of a plane's list.
struct SmallEntry {
  int b1, b2, head;

  static __device__ __forceinline__ SmallEntry make(const Args& a, const Sm90SmallBackwardArgs& m, u32 plane, u32 n) {
    const math::Strides& s = m.planes;
    const u32 heads = u32(a.rows.heads_q);
    const u32 of_plane = s.head != 0 ? heads : 1;
    const u32 batch2 = s.batch2 != 0 ? u32(a.rows.batch2) : 1;
    const u32 rest = plane / of_plane;
    const u32 outer = n / u32(m.heads);
    return {int((s.batch1 != 0 ? rest / batch2 : 0) + outer / u32(m.batch2)),
            int((s.batch2 != 0 ? rest % batch2 : 0) + outer % u32(m.batch2)),
            int((s.head != 0 ? plane % of_plane : 0) + n % u32(m.heads))};
  }
};

// The barrier of a full buffer of a warpgroup; that of an empty one lies 8 bytes behind it.
template <Sm90SmallSpec S>
__device__ __forceinline__ u32 small_full(u32 base, int group, u32 slot) {
  return base + sm90_small_backward_sizes(S).barriers_at + (group * S.stages + slot) * 16;
}

// The warpgroup that copies, a warp for each of those that compute: K, Q, V, dO and O of a head to one buffer.
template <Sm90SmallSpec S>
__device__ __forceinline__ void sm90_small_copy(const Args& a, const Sm90SmallBackwardArgs& m, u32 base, u32 plane,
                                                u32 number, u32 workers) {
  constexpr Sm90SmallBackwardSizes kSizes = sm90_small_backward_sizes(S);
  constexpr int kGroups = kSizes.groups;
  const int group = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
  if (group < kGroups && threadIdx.x % 32 == 0) {
    Ring<S.stages> ring;
    for (u32 n = number + group; n < u32(m.list); n += workers) {
      const SmallEntry e = SmallEntry::make(a, m, plane, n);
      const u32 at = base + group * kSizes.part + ring.buffer() * kSizes.head;
      const u32 barrier = small_full<S>(base, group, ring.buffer());
      const auto place = [&](const Has& has) {
        return Coordinates{0, 0, e.head * has.head, e.b2 * has.batch2, e.b1 * has.batch1};
      };
      barrier_wait(barrier + 8, ring.parity() ^ 1);
      barrier_expect(barrier, kSizes.head);
      tensor_load(at, m.k, barrier, place(m.has_k));
      tensor_load(at + kSizes.q, m.q, barrier, place(m.has_q));
      tensor_load(at + 2 * kSizes.q, m.v, barrier, place(m.has_v));
      tensor_load(at + 2 * kSizes.q + kSizes.v, m.grad_out, barrier, place(m.has_grad_out));
      tensor_load(at + 2 * kSizes.q + 2 * kSizes.v, m.out, barrier, place(m.has_out));
      ring.next();
    }
  }
}

// The bias of this thread's 32 elements, of fp32 or as pairs of 16 bits.
template <Sm90SmallSpec S, int kFloats, int kPairs>
__device__ __forceinline__ void load_small_bias(const Args& a, const SmallEntry& e, float (&bias)[kFloats],
                                                u32 (&pairs)[kPairs], const math::Band<int>& band, const int& key0,
                                                const int& query0) {
  const math::Strides& s = a.bias.strides;
  const i64 first = e.b1 * s.batch1 + e.b2 * s.batch2 + e.head * s.head;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int key = key0 + (i & 1) * 8;
    const int query = query0 + i / 2 * 8;
    const i64 at = first + query * s.row + key;
    const bool in0 = key < band.seqlen_k && query < band.seqlen_q;
    const bool in1 = key < band.seqlen_k && query + 1 < band.seqlen_q;
    if constexpr (S.bias == BiasTile::kFp32) {
      bias[2 * i] = in0 ? static_cast<const float*>(a.bias.data)[at] : 0.f;
      bias[2 * i + 1] = in1 ? static_cast<const float*>(a.bias.data)[at + s.row] : 0.f;
    } else {
      const u32 x = in0 ? static_cast<const u16*>(a.bias.data)[at] : 0;
      const u32 y = in1 ? static_cast<const u16*>(a.bias.data)[at + s.row] : 0;
      pairs[i] = x | y << 16;
    }
  }
}

template <Sm90SmallSpec S>
__global__ void __launch_bounds__(sm90_small_backward_sizes(S).threads, 1)
    sm90_small_backward(const __grid_constant__ Args a, const __grid_constant__ Sm90SmallBackwardArgs m) {
  // ---- sizes ----
  constexpr Sm90SmallBackwardSizes kSizes = sm90_small_backward_sizes(S);
  constexpr Type kType = S.type;
  constexpr int D = S.d;
  constexpr int V = S.dv;
  constexpr int kGroups = kSizes.groups;
  // What a launch of 3 (4, 5) warpgroups has is 3 x 168 (4 x 128, 5 x 96) registers: more would wait for ever.
  constexpr int kRegistersToCopy = kGroups > 2 ? 32 : 40;
  constexpr int kRegisters = kGroups == 4 ? 112 : kGroups == 3 ? 160 : 232;
  constexpr bool kBias = S.bias != BiasTile::kNone;
  constexpr bool kSum = S.grad_bias != BiasTile::kNone;
  static_assert(kGroups >= 2 && kGroups <= 4);
  static_assert(kType != Type::kFp32 && (D == 16 || D == 32 || D == 64) && (V == 16 || V == 32 || V == 64));
  static_assert(!S.softcap && !S.ragged && S.bias2 == BiasTile::kNone && !S.mask && !S.key_term && !S.query_term);
  static_assert(!S.positions && !S.shifted && S.dropout == DropoutRule::kNone && (kBias || !kSum));

  // ---- shared memory and barriers ----
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 base = shared_address(memory);
  const int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kGroups * S.stages; ++i) {
      barrier_init(small_full<S>(base, 0, i), 1);
      barrier_init(small_full<S>(base, 0, i) + 8, 1);
    }
    barrier_init_fence();
  }
  sync();
  begin_kernel<S.arch>();
  const u32 blocks = gridDim.x / u32(m.count);  // of a plane
  const u32 plane = blockIdx.x / blocks;
  const u32 number = blockIdx.x % blocks * kGroups;  // of the block's first warpgroup among those of the plane
  const u32 workers = blocks * kGroups;

  if (warpgroup == 0) {
    fewer_registers<kRegistersToCopy>();
    sm90_small_copy<S>(a, m, base, plane, number, workers);
    return;
  }

  // ---- the warpgroups that compute ----
  more_registers<kRegisters>();
  const int c = warpgroup - 1;
  const int thread = threadIdx.x % 128;
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const int lane = thread % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int key0 = warp * 16 + g;  // this thread's first key; the other is key0 + 8
  const int query0 = 2 * t;        // its first query
  const u32 part = base + c * kSizes.part;
  const u32 grads = part + kSizes.grads_at;
  const u32 rows = base + kSizes.rows_at + c * kSizes.rows;
  // Of buffer 0: K, Q, V, dO and O, one after the other.
  const auto keys_first = SharedTile<kSmallRows, D, D>{part}.along_columns();
  const auto grads_rows = SharedTile<kSmallRows, kSmallRows, 64>{grads}.along_columns();
  const u32 fragment = grads + swizzled<128>(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
  const math::Band<int> band = math::Band<int>::make(int(a.rows.rows_q), int(a.rows.rows_k), a.causal, a.window_left,
                                                     a.window_right, a.top_left);
  const math::Score<float> score{a.scale, 0, 0};

  // The bias stays: element 4 n + 2 x + e belongs to key key0 + 8 x and query query0 + 8 n + e. -inf hides.
  float bias[kBias && S.bias == BiasTile::kFp32 ? 32 : 1];
  u32 pairs[kBias && S.bias != BiasTile::kFp32 ? 16 : 1];
  constexpr Type kBiasType = S.bias == BiasTile::kFp16 ? Type::kFp16 : Type::kBf16;
  if constexpr (kBias) {
    load_small_bias<S>(a, SmallEntry::make(a, m, plane, 0), bias, pairs, band, key0, query0);
  }
  const auto bias_of = [&](int i) {  // of element i
    if constexpr (!kBias) {
      return 0.f;
    } else if constexpr (S.bias == BiasTile::kFp32) {
      return bias[i];
    } else {
      return i & 1 ? high<kBiasType>(pairs[i / 2]) : cuda::low<kBiasType>(pairs[i / 2]);
    }
  };
  // Keys that do not exist, or that the band or a bias of -inf hides: a bit an element.
  u32 hidden = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int key = key0 + (i >> 1 & 1) * 8;
    const int query = query0 + i / 4 * 8 + (i & 1);
    hidden |= u32(key >= band.seqlen_k || (S.banded && !band.allowed(query, key))) << i;
  }
  const bool some_hidden = __any_sync(~0u, hidden != 0);

  float sum[kSum ? 32 : 1] = {};
  Ring<S.stages> ring;
  u32 flip = 0;
  // Of the next head, loaded while this one is computed: the logsumexp of a row, which this thread hands over, and the
  // gradients of those whose delta this lane makes.
  constexpr int kLanes = V / 8;  // of a row of dO
  constexpr int kPasses = kLanes / 2;
  float lse = kInfinity;
  float grad_lse[kPasses] = {};
  const auto delta_row = [&](int pass) { return pass * (128 / kLanes) + thread / kLanes; };
  const auto row_at = [&](const SmallEntry& e, const math::Strides& s, int row) {
    return e.b1 * s.batch1 + e.b2 * s.batch2 + e.head * s.head + row * s.row;
  };
  const auto lse_of = [&](const SmallEntry& e, int row) {
    return math::backward_reference(static_cast<const float*>(a.lse.data)[row_at(e, a.lse.strides, row)]);
  };
  const auto load_rows = [&](const SmallEntry& e) {
    if (thread < band.seqlen_q) {
      lse = lse_of(e, thread);
    }
    if (a.grad_lse.data != nullptr) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        if (delta_row(i) < band.seqlen_q) {
          grad_lse[i] = static_cast<const float*>(a.grad_lse.data)[row_at(e, a.grad_lse.strides, delta_row(i))];
        }
      }
    }
  };
  u32 leaving = 0;  // the barrier of tiles that gradients leave through
  SmallEntry next{};
  if (number + c < u32(m.list)) {
    next = SmallEntry::make(a, m, plane, number + c);
    load_rows(next);
  }

#pragma unroll 1
  for (u32 n = number + c; n < u32(m.list); n += workers) {
    const SmallEntry now = next;
    const u32 barrier = small_full<S>(base, c, ring.buffer());
    const auto k_rows = keys_first.buffer(ring.buffer(), kSizes.head);
    const auto q_rows = k_rows.buffer(1, kSizes.q);
    const SharedOperand<Inner::kColumns, kSmallRows, V> v_rows{q_rows.buffer(1, kSizes.q).low};
    const auto o_rows = v_rows.buffer(1, kSizes.v);
    const u32 row = rows + flip * (kSmallRows * 8);
    if constexpr (kBias && S.bias != BiasTile::kFp32) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        pairs[i] = u32(opaque(int(pairs[i])));  // otherwise both halves are made before the loop, and take registers
      }
    }
    barrier_wait(barrier, ring.parity());
    float s[32];
    float dp[32];
    wgmma_fence();
    multiply<kType, D>(s, k_rows, q_rows);
    wgmma_commit();
    multiply<kType, V>(dp, v_rows, o_rows);
    wgmma_commit();

    if (leaving != 0 && thread == 0) {  // the gradients of the head before have left its tiles
      bulk_wait_read();
      barrier_arrive(leaving);
    }

    // ---- logsumexp and delta; dO and O are swizzled alike, so that chunks of 16 bytes pair up at equal places ----
    // A row without keys has O = 0 and P = 0. Where its dO is not finite <dO, O> is NaN, and P dO would bring NaN to
    // dV: such rows of dO become 0.
    constexpr bool kHides = kBias || S.banded;
    bool hurts = false;
    const u32 grad_out = part + ring.buffer() * kSizes.head + 2 * kSizes.q + kSizes.v;
    if (thread < kSmallRows) {
      store_shared(row + thread * 4, lse);
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const u32 at = grad_out + (i * 128 + thread) * 16;
      const float dot = sum_of_lanes<kLanes>(dot8<kType>(load_shared4(at), load_shared4(at + kSizes.v)));
      hurts |= dot != dot;
      if (lane % kLanes == 0) {
        store_shared(row + (kSmallRows + delta_row(i)) * 4, math::delta(dot, grad_lse[i]));
      }
    }
    if (kHides && __any_sync(~0u, hurts)) {  // dP may have read either: there P is 0
#pragma unroll 1
      for (int i = 0; i < kPasses; ++i) {
        if (delta_row(i) < band.seqlen_q && lse_of(now, delta_row(i)) == kInfinity) {
          store_shared(grad_out + (i * 128 + thread) * 16, uint4{});
        }
      }
      fence_async();
    }
    if (n + workers < u32(m.list)) {
      next = SmallEntry::make(a, m, plane, n + workers);
      load_rows(next);
    }
    sync(kSmallGroup[c], 128);
    flip ^= 1;

    // ---- P and dS ----
    wgmma_wait<1>();
    pin(s);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 reference = load_shared2(row + (i * 8 + query0) * 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = s[4 * i + e];
        x = weight_of_difference(score.of_dot<false>(x) + bias_of(4 * i + e), e & 1 ? reference.y : reference.x,
                                 math::kLog2E);
      }
    }
    if (some_hidden) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        s[i] = (hidden >> i & 1) != 0 ? 0.f : s[i];
      }
    }
    wgmma_wait<0>();
    pin(dp);
    u32 weights[16];
    u32 ds[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 delta = load_shared2(row + (kSmallRows + i * 8 + query0) * 4);
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int at = 4 * i + 2 * x;
        const float first = math::grad_score<kHides>(s[at], dp[at], delta.x);
        const float second = math::grad_score<kHides>(s[at + 1], dp[at + 1], delta.y);
        weights[2 * i + x] = pack<kType>(s[at], s[at + 1]);
        ds[2 * i + x] = pack<kType>(first, second);
        if constexpr (kSum) {
          sum[at] += first;
          sum[at + 1] += second;
        }
      }
    }
    store_transposed(fragment, ds);

    // ---- gradients ----
    float dv[V / 2];
    float dk[D / 2];
    float dq[D / 2];
    set_zero(dv);
    set_zero(dk);
    wgmma_fence();
    multiply_add<kType, kSmallRows>(dv, weights, o_rows.turned());
    multiply_add<kType, kSmallRows>(dk, ds, q_rows.turned());
    wgmma_commit();
    fence_async();
    sync(kSmallGroup[c], 128);
    wgmma_fence();
    multiply<kType, kSmallRows>(dq, grads_rows, k_rows.turned());
    wgmma_commit();
    wgmma_wait<0>();
    pin(dq);
    pin(dk);
    pin(dv);
    sync(kSmallGroup[c], 128);  // all warps have read this head's tiles
    if (m.store_tensors) {
      // By TMA, through the places of Q, K and V.
      const u32 q_place = part + ring.buffer() * kSizes.head + kSizes.q;
      const u32 k_place = q_place - kSizes.q;
      const u32 v_place = q_place + kSizes.q;
      const int row_here = warp * 16 + lane % 16;
      store_to_panels<kType, kSmallRows, D>(q_place, dq, {a.scale, a.scale}, row_here, lane / 16);
      store_to_panels<kType, kSmallRows, D>(k_place, dk, {a.scale, a.scale}, row_here, lane / 16);
      store_to_panels<kType, kSmallRows, V>(v_place, dv, {1.f, 1.f}, row_here, lane / 16);
      fence_async();
      sync(kSmallGroup[c], 128);
      if (thread == 0) {
        const auto send = [&](const Tensor& to, const TensorMap& map, const Has& has, u32 place) {
          if (to.data != nullptr) {
            tensor_store(map, place, {0, 0, now.head * has.head, now.b2 * has.batch2, now.b1 * has.batch1});
          }
        };
        send(a.grad_q, m.grad_q, m.has_grad_q, q_place);
        send(a.grad_k, m.grad_k, m.has_grad_k, k_place);
        send(a.grad_v, m.grad_v, m.has_grad_v, v_place);
        bulk_commit();
      }
      leaving = barrier + 8;
      ring.next();
      continue;
    }
    if (thread == 0) {
      barrier_arrive(barrier + 8);
    }
    ring.next();
    const auto store = [&](const Tensor& to, const auto& from, float factor, int rows_of, int columns) {
      if (to.data != nullptr) {
        const math::Strides& strides = to.strides;
        store_accumulator<kType>(
            static_cast<u16*>(to.data) + now.b1 * strides.batch1 + now.b2 * strides.batch2 + now.head * strides.head,
            strides, from, factor, key0, rows_of, columns, a.vector_stores, t);
      }
    };
    store(a.grad_q, dq, a.scale, band.seqlen_q, a.out_dim);
    store(a.grad_k, dk, a.scale, band.seqlen_k, a.out_dim);
    store(a.grad_v, dv, 1.f, band.seqlen_k, a.out_dim_v);
  }
  if (thread == 0) {
    bulk_wait_read();
  }
  if constexpr (kSum) {
    float* const to = m.bias_sum + (i64(plane) * workers + number + c) * (kSmallRows * kSmallRows) + thread * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      *reinterpret_cast<float4*>(to + i * 512) = {sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]};
    }
  }
}

}  // namespace fovea::cuda
