// SPDX-License-Identifier: Apache-2.0
//
// sm90_backward: dk, dv and dq of a call on Hopper, for numbers of 16 bits and head dimensions up to 192, of Q and V
// together up to 320.
//
// A block owns the keys of its warpgroups, tiles * 64 each, of one key head. It loops over the queries that attend to
// any of them, `step` at a time, of all query heads that share the key head. Warpgroup 0 copies: K and V once, Q, dO
// and the row vectors into a ring, a bias into the ring of dS. The others compute; but for `same_step` they have no
// barrier of their own:
//
//     S^T = K Q^T, dP^T = V dO^T | P^T, dS^T in registers | dV += P^T dO, dK += dS^T Q | dQ of the step before
//
// P^T and dS^T are operands of the next products from registers; where registers allow so are V and K. The ring of dS
// is used in place: TMA writes the bias as [query][key], ldmatrix.trans reads it in the layout of S^T, stmatrix.trans
// puts dS where the bias was, and there dS is an operand of dQ = dS K.
// dQ of a step is computed a step later, when the dS of all warpgroups has most likely arrived: by one warpgroup for 64
// queries, in turn (of steps of 128 queries each of two has 64). With `same_step` all warpgroups wait for each other
// instead, and each computes half of dQ's columns in the step itself, before dK; dQ is stored while the product of dK
// runs. dQ is added to dq_sum, in L2, in the order of the accumulators (backward_convert), by red instructions or in
// bulk through shared memory; with `ordered` by one block of keys after the other; with `direct` one block has all keys
// and stores dQ as it is.
//
// With dropout, P carries the decision in its sign: P >= 0 is kept. Where dK and dV take most registers, S and dP are
// made in two parts of a step (sm90_step_parts).
//
// A block stays for the whole call and takes key blocks from a counter, batch * heads_k * ceil(limit_k / keys) of them:
// Q and dO of the next are on their way while one ends. Where there are as many blocks as key blocks each has its own.
// With `key_parts` several blocks share a block of keys: each takes a range of its steps and leaves fp32 sums of dK and
// dV. backward_prepare comes before (with a mask of queries and keys sm90_backward_mask, too), backward_convert after;
// where there are sums of parts sm90_backward_parts, which adds them and converts dq.
#ifndef FOVEA_CUDA_DEVICE_SM90_BACKWARD_CUH
#define FOVEA_CUDA_DEVICE_SM90_BACKWARD_CUH

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/score/sm90_backward_scores.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_copy.cuh"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/tile/accumulator.cuh"
#include "cuda/device/tile/pipe.cuh"
#include "cuda/device/tile/shared.cuh"
#include "cuda/device/work/sm90_key_block.cuh"
#include "math/band.h"
#include "math/softmax.h"

namespace fovea::cuda {

template <Sm90BackwardSpec S>
__global__ void __launch_bounds__(sm90_backward_sizes(S).threads, 1)
    sm90_backward(const __grid_constant__ Args a, const __grid_constant__ Sm90BackwardArgs m) {
  // ---- sizes ----
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  constexpr Type kType = S.type;
  constexpr int D = S.d;
  constexpr int V = S.dv;
  constexpr int M = S.step;
  constexpr int kGroups = kSizes.groups;
  constexpr int kKeys = kSizes.keys;
  constexpr int kBlocks = S.tiles;            // of 64 keys, a warpgroup
  constexpr int kParts = sm90_step_parts(S);  // of a step's scores
  constexpr int P = M / kParts;
  constexpr int kPanelD = sm90_backward_panel_d(S);
  constexpr int kPanelV = sm90_backward_panel_v(S);
  constexpr int kPanelsD = panels_of(D, kPanelD);
  constexpr int kPanelsV = panels_of(V, kPanelV);
  constexpr int kRowD = kPanelD * 2;  // bytes
  constexpr int kRowV = kPanelV * 2;
  constexpr bool kBias = sm90_bias_in_place(S);
  constexpr bool kOuter = sm90_outer_bytes(S) > 0;
  constexpr bool kDropout = S.dropout != DropoutRule::kNone;
  // Products for dV and dK of one block of keys stay in flight during S and dP of the next, where registers allow.
  constexpr bool kOverlap = kGroups == 2 && (kBlocks * (D > V ? D : V) <= 96 || kParts > 1);
  // A block of keys that no query of the step meets is passed over. Elsewhere the branch makes ptxas wait for every
  // product (C7512).
  constexpr bool kSkip = S.banded && !S.same_step && ((D <= 64 && kBlocks == 1) || (S.halves && kParts == 1));
  constexpr int kColumns = S.halves ? D / 2 : D;  // of a job of dQ
  // Operands that stay in registers, by 16 columns of V and K: reading shared memory is what limits the products.
  constexpr bool kMuch = kDropout || S.softcap || S.mask || S.key_term || S.query_term || S.alibi || kBias || kOuter;
  constexpr bool kHolds =
      kGroups == 2 && kBlocks == 1 && kParts == 1 && D == V && !kMuch && (M == 64 ? D > 64 && D <= 96 : D <= 32);
  constexpr int kHeldV = kHolds ? V / 16 : 0;
  constexpr int kHeldK = kHolds && D <= 80 ? D / 16 : 0;
  // What a launch of 3 (4) warpgroups has is 3 x 168 (4 x 128) registers: more would wait for ever.
  // With 24 the threads that copy and add dQ spill; kMost, because what computes would be serialised with 232 (C7512).
  constexpr bool kMost = kParts > 1 || (S.same_step && (S.banded || kMuch));
  constexpr int kRegistersToCopy = kGroups == 3 ? 32 : kMost ? 24 : 40;
  constexpr int kRegisters = kGroups == 3 ? 160 : kMost ? 240 : 232;
  constexpr bool kLater = S.dq && !S.same_step;  // when dQ of a step is computed
  static_assert(kGroups == 2 || kGroups == 3);
  static_assert(kType != Type::kFp32 && S.dropout != DropoutRule::kTorchMemEfficient && (S.dkv || S.dq));
  static_assert(D % 16 == 0 && V % 16 == 0 && D + V <= 320);
  static_assert(kParts == 1 || (kGroups == 2 && kBlocks == 1 && M == 64 && (S.halves || !S.dq) && !S.delay && !kOuter));
  static_assert(M == 64 || (M == 128 && kGroups == 2));
  static_assert(!S.halves || (kGroups == 2 && M == 64 && D % 32 == 0));
  static_assert((!S.row_sum || !S.ordered) && (kParts == 1 || !S.query_term) && S.outer <= 2);
  static_assert(!S.direct || (S.dq && !S.bulk && !S.ragged));
  static_assert(!S.key_parts || !S.column_sum);
  static_assert(!S.same_step || (S.halves && S.bulk && S.dkv && !kOuter && !S.delay && !S.direct && !S.dbias_store &&
                                 kBlocks == 1 && kParts == 1 && S.planes >= 2));
  static_assert((!S.bulk && !S.ordered) || (S.dq && S.halves == S.same_step && (S.bulk || !S.ordered)));
  static_assert(!S.dbias_store || (S.dq && kBias && !S.softcap && !S.banded && !S.ragged));
  static_assert(kRowPad % M == 0 && S.stages <= 4 && S.planes <= 4);

  // ---- shared memory and barriers ----
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 base = shared_address(memory);
  const Sm90BackwardBarriers barriers{base + kSizes.barriers_at};
  const int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0);
  if (threadIdx.x == 0) {
    barrier_init(barriers.kv_full(), 1);
    // Every warp that is told which keys are next.
    barrier_init(barriers.kv_empty(), S.warps + int{kBias || kOuter} + int{S.bulk} + int{S.dbias_store});
    for (int i = 0; i < S.stages; ++i) {
      barrier_init(barriers.q_full(i), 1);
      barrier_init(barriers.q_empty(i), S.warps * 32);
    }
    for (int i = 0; i < S.planes; ++i) {
      barrier_init(barriers.bias_full(i), 1);
      barrier_init(barriers.grads_full(i), S.warps);
      // Every warp that reads dS, and the thread that stores it; without dQ every warp that has read the bias.
      barrier_init(barriers.grads_empty(i), (!S.dq ? S.warps : S.halves ? 8 : 4 * (M / 64)) + int{S.dbias_store});
    }
    for (int i = 0; kOuter && i < S.outer; ++i) {
      barrier_init(barriers.outer_full(i), 1);
      barrier_init(barriers.outer_empty(i), S.warps);
    }
    for (int i = 0; S.bulk && i < kGroups; ++i) {
      barrier_init(barriers.leaving_full(i), 4);
      barrier_init(barriers.leaving_empty(i), 1);
    }
    barrier_init_fence();
  }
  sync();
  begin_kernel<S.arch>();

  if (warpgroup == 0) {
    fewer_registers<kRegistersToCopy>();
    const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
    if (warp == 0 && threadIdx.x == 0) {
      sm90_backward_copy<S>(a, m, base, reinterpret_cast<Sm90Loads*>(memory + kSizes.loads_at), barriers);
    }
    if ((kBias || kOuter) && warp == 1 && threadIdx.x == 32) {
      sm90_backward_copy_bias<S>(a, m, base, barriers);
    }
    if (S.bulk && warp == 2 && threadIdx.x == 64) {
      sm90_backward_add<S>(a, m, base, barriers);
    }
    if (S.dbias_store && warp == 3 && threadIdx.x == 96) {
      sm90_backward_store_bias<S>(a, m, base, barriers);
    }
    return;
  }

  // ---- the warpgroups that compute ----
  more_registers<kRegisters>();
  const int c = warpgroup - 1;
  const int thread = threadIdx.x % 128;
  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const int lane = opaque(thread % 32);
  const int g = lane / 4;
  const int t = lane % 4;
  const bool leader = lane == 0;
  Ring<S.stages> ring_q;
  Ring<S.planes> ring_grads;
  Ring<S.outer> ring_outer;

  // Operands. rows: a product's inner dimension is the tile's columns; inside: it is the tile's rows.
  const SharedTile<kKeys, D, kPanelD> k_tile{base + kSizes.k_at};
  const SharedTile<kKeys, V, kPanelV> v_tile{base + kSizes.v_at};
  const SharedTile<M, D, kPanelD> q_tile{base + kSizes.q_at};
  const SharedTile<M, V, kPanelV> grad_out_tile{base + kSizes.grad_out_at};
  const SharedTile<M, kKeys, 64> grads_tile{base + kSizes.grads_at};
  const auto k_rows = k_tile.along_columns(c * kBlocks * 64);
  const auto v_rows = v_tile.along_columns(c * kBlocks * 64);
  const auto q_rows = q_tile.along_columns();
  const auto o_rows = grad_out_tile.along_columns();
  const auto q_inside = q_tile.along_rows();
  const auto o_inside = grad_out_tile.along_rows();
  const auto k_inside = k_tile.along_rows(S.halves ? c * (D / 2 / kPanelD) : 0);
  const auto grads_rows = grads_tile.along_columns(M == 128 ? c * 64 : 0);
  // Where this lane's 16 bytes of a transposed 16 x 16 fragment lie in a panel of dS (ldmatrix and stmatrix alike).
  const u32 fragment = swizzled<128>(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);

  u32 left = 0;  // parity of what leaves through shared memory
  using Scores = Sm90BackwardScores<sm90_part_of_step(S, kParts)>;
  Scores scores[kBlocks];

#pragma unroll 1
  for (u32 phase = 0;; phase ^= 1) {
    // ---- which keys ----
    const u32 number = sm90_await_block<S>(base, barriers, phase);
    if (number == kNoBlock) {
      break;
    }
    const Sm90KeyBlock<S> block(a, m, number);
    float dk[kBlocks][D / 2];
    float dv[kBlocks][V / 2];
#pragma unroll
    for (int f = 0; f < kBlocks; ++f) {
#pragma unroll
      for (int i = 0; i < D / 2; ++i) {
        dk[f][i] = 0;
      }
#pragma unroll
      for (int i = 0; i < V / 2; ++i) {
        dv[f][i] = 0;
      }
    }

    // ---- dQ ----
    // Of the step whose dS lies in `grads`, from row `row` of dq_sum (`direct`: of the head) on. pending: dV and dK of
    // this warpgroup's own step are in flight, whose Q is then released.
    int head_before = 0;
    const auto my_turn = [&](int turn) { return S.halves || M == 128 || turn == c; };
    const auto finish_step = [&] {
#pragma unroll
      for (int f = 0; f < kBlocks; ++f) {
        pin(dk[f]);
        pin(dv[f]);
      }
      barrier_arrive(barriers.q_empty(ring_q.buffer()));  // all lanes: each has read row vectors
    };
    const auto multiply_dq = [&](const Ring<S.planes>& grads, float(&dq)[kColumns / 2]) {
      wgmma_fence();
      multiply<kType, kKeys>(dq, grads_rows.buffer(grads.buffer(), kSizes.grads), k_inside);
      wgmma_commit();
    };
    const auto send_dq = [&](float(&dq)[kColumns / 2], int row) {
      constexpr int kTile = 16 * D;  // floats of a warp's rows
      if constexpr (S.bulk) {
        const u32 leaving = base + kSizes.leaving_at + c * kSizes.leaving + (warp * 16 * kColumns + lane * 4) * 4;
        barrier_wait(barriers.leaving_empty(c), left ^ 1);
        left ^= 1;
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          store_shared(leaving + j * 512, uint4{__float_as_uint(dq[4 * j]), __float_as_uint(dq[4 * j + 1]),
                                                __float_as_uint(dq[4 * j + 2]), __float_as_uint(dq[4 * j + 3])});
        }
        fence_async();
        __syncwarp();
        if (leader) {
          barrier_arrive(barriers.leaving_full(c));
        }
      } else if constexpr (S.direct) {
        const Place& place = block.place;
        store_accumulator<kType>(static_cast<u16*>(a.grad_q.data) +
                                     place.query_rows(a.grad_q.strides, u32(head_before)) +
                                     (S.halves ? c * (D / 2) : 0) * a.grad_q.strides.col,
                                 a.grad_q.strides, dq, a.scale, row + (M == 128 ? c * 64 : 0) + warp * 16 + g,
                                 place.q_len, a.out_dim - (S.halves ? c * (D / 2) : 0), a.vector_stores, t);
      } else {
        float* const mine = a.dq_sum + i64(row + (M == 128 ? c * 64 : 0)) * D + warp * kTile +
                            (S.halves ? c * (D / 16) * 128 : 0) + lane * 4;
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          reduce4<90>(mine + j * 128, *reinterpret_cast<const float(*)[4]>(dq + 4 * j));
        }
      }
    };
    const auto add_dq = [&](const Ring<S.planes>& grads, int row, bool pending) {
      float dq[kColumns / 2];
      barrier_wait(barriers.grads_full(grads.buffer()), grads.parity());
      multiply_dq(grads, dq);
      if (pending) {
        wgmma_wait<1>();
        finish_step();
      }
      wgmma_wait<0>();
      pin(dq);
      if (leader) {
        barrier_arrive(barriers.grads_empty(grads.buffer()));
      }
      send_dq(dq, row);
    };

    // ---- the steps ----
    Ring<S.planes> grads_before = ring_grads;
    int row_before = 0;
    int turn = 0;         // of this step's dQ
    int turn_before = 0;  // of that of the step before
    int head = block.head0 - 1;
    int query = 0;
    int left = S.key_parts ? -block.skipped : 0;  // steps of this head
    if constexpr (S.ragged) {
      if (block.steps > 0) {
        const int live = block.place.k_len - block.key0;
        if (live < kKeys) {
          zero_rows<kKeys, kRowD, kPanelsD, kGroups * 128>(base + kSizes.k_at, live, threadIdx.x - 128);
          zero_rows<kKeys, kRowV, kPanelsV, kGroups * 128>(base + kSizes.v_at, live, threadIdx.x - 128);
          fence_async();
          sync(kCleared, kGroups * 128);
        }
      }
    }
    u32 v_held[kHeldV > 0 ? kHeldV : 1][4];
    u32 k_held[kHeldK > 0 ? kHeldK : 1][4];
    if constexpr (kHeldV > 0) {
      if (block.steps > 0) {
        const int row = c * 64 + warp * 16 + lane % 16;
#pragma unroll
        for (int k = 0; k < kHeldV; ++k) {
          constexpr int kInPanel = kPanelV / 16;
          ldmatrix(v_held[k], base + kSizes.v_at + k / kInPanel * (kKeys * kRowV) +
                                  swizzled<kRowV>(row, k % kInPanel * 2 + lane / 16));
        }
#pragma unroll
        for (int k = 0; k < kHeldK; ++k) {
          constexpr int kInPanel = kPanelD / 16;
          ldmatrix(k_held[k], base + kSizes.k_at + k / kInPanel * (kKeys * kRowD) +
                                  swizzled<kRowD>(row, k % kInPanel * 2 + lane / 16));
        }
      }
    }
#pragma unroll 1
    for (int n = 0; n < block.steps; ++n) {
      if (S.key_parts ? left <= 0 : left == 0) {
        if constexpr (S.column_sum) {
#pragma unroll
          for (int f = 0; f < kBlocks; ++f) {
            if (n > 0) {
              scores[f].store_sums(a, block, head, block.key0 + (c * kBlocks + f) * 64 + warp * 16 + g, t);
            }
          }
        }
        ++head;
        if constexpr (S.key_parts) {
          left += block.count;
          query = block.begin + (block.count - left) * M;
        } else {
          query = block.begin;
          left = block.count;
        }
#pragma unroll
        for (int f = 0; f < kBlocks; ++f) {
          scores[f].begin_head(a, m, block.place, head, block.key0 + (c * kBlocks + f) * 64 + warp * 16 + g);
        }
      }
      const u32 q_now = ring_q.buffer() * (kSizes.q / 16);
      const u32 o_now = ring_q.buffer() * (kSizes.grad_out / 16);
      const u32 tile = base + kSizes.grads_at + ring_grads.buffer() * kSizes.grads;
      const u32 lse = base + kSizes.lse_at + ring_q.buffer() * kSizes.rows + t * 8;
      const u32 delta = lse + (kSizes.delta_at - kSizes.lse_at);
#pragma unroll
      for (int f = 0; f < kBlocks; ++f) {
        scores[f].load_mask(m, query);
      }
      barrier_wait(barriers.q_full(ring_q.buffer()), ring_q.parity());
      if constexpr (S.ragged) {
        const int live = block.place.q_len - query;
        if (live < M) {
          const int consumer = threadIdx.x - 128;
          zero_rows<M, kRowD, kPanelsD, kGroups * 128>(base + kSizes.q_at + ring_q.buffer() * kSizes.q, live, consumer);
          zero_rows<M, kRowV, kPanelsV, kGroups * 128>(base + kSizes.grad_out_at + ring_q.buffer() * kSizes.grad_out,
                                                       live, consumer);
          fence_async();
          sync(kCleared, kGroups * 128);
        }
      }
      const auto clear_dead = [&] {
        if (block.may_be_dead) {
          zero_dead_rows<S, kRowV, kPanelsV, kGroups * 128>(
              base + kSizes.grad_out_at + ring_q.buffer() * kSizes.grad_out,
              base + kSizes.lse_at + ring_q.buffer() * kSizes.rows);
        }
      };
      if constexpr (kSkip) {  // one barrier for all warpgroups, whatever their own keys meet; else behind the products
        clear_dead();
      }
#pragma unroll
      for (int i = 0; i < kBlocks * kParts; ++i) {
        const int f = i / kParts;
        const int part = i % kParts;
        const int key = block.key0 + (c * kBlocks + f) * 64;
        const int first = query + part * P;
        const u32 panel = tile + (c * kBlocks + f) * M * 128 + part * P * 128 + fragment;
        const u32 lse_here = lse + part * P * 4;
        const u32 delta_here = delta + part * P * 4;
        const auto await_tile = [&] {
          if (i == 0) {
            if constexpr (kBias) {
              barrier_wait(barriers.bias_full(ring_grads.buffer()), ring_grads.parity());
            } else if constexpr (kLater) {
              barrier_wait(barriers.grads_empty(ring_grads.buffer()), ring_grads.parity() ^ 1);
            }
          }
        };
        math::TileClass kind = math::TileClass::kFull;
        if constexpr (S.banded) {
          kind = block.band.tile(first, first + P, key, key + 64);
        }
        if (kSkip && kind == math::TileClass::kEmpty) {
          await_tile();
          if (kOuter && i == 0) {
            barrier_wait(barriers.outer_full(ring_outer.buffer()), ring_outer.parity());
          }
          if constexpr (S.dq) {
#pragma unroll
            for (int k = 0; k < P / 16; ++k) {
              stmatrix_trans(panel + k * 2048, 0, 0, 0, 0);
            }
          }
          continue;
        }
        float s[P / 2];
        float dp[P / 2];
        wgmma_fence();
        multiply<kType, D, kHeldK>(s, k_held, k_rows.row(f * 64), q_rows.moved(q_now).row(part * P));
        wgmma_commit();
        multiply<kType, V, kHeldV>(dp, v_held, v_rows.row(f * 64), o_rows.moved(o_now).row(part * P));
        wgmma_commit();
        if (!kSkip && i == 0) {
          clear_dead();
        }
        await_tile();
        typename Scores::Loaded loaded;
        loaded.load(panel, lse_here, 0);
        wgmma_wait<1>();
        pin(s);
        if constexpr (kOverlap) {
          if (i > 0) {
            pin(dk[i > 0 ? (i - 1) / kParts : 0]);
            pin(dv[i > 0 ? (i - 1) / kParts : 0]);
          }
        }
        const auto outer_tile = [&](int at, int bytes, BiasTile type) {
          return base + at + ring_outer.buffer() * bytes + (c * kBlocks + f) * M * 64 * bias_bytes(type);
        };
        const typename Scores::Outer outer(outer_tile(kSizes.outer_at, kSizes.outer, S.bias),
                                           outer_tile(kSizes.outer2_at, kSizes.outer2, S.bias2), fragment, warp, g, t);
        if (kOuter && i == 0) {
          barrier_wait(barriers.outer_full(ring_outer.buffer()), ring_outer.parity());
        }
        scores[f].weigh(s, a, m, loaded, outer, panel, lse_here, first, key + warp * 16 + g, t);
        const bool masked = scores[f].hide(s, first);
        const bool edge = kind != math::TileClass::kFull || key + 64 > block.place.k_len ||
                          (S.row_sum && scores[f].has_hidden()) || (kMaskQueries<S> && query + M > block.place.q_len);
        if (edge) {
          scores[f].mask_edge(s, block, first, key + warp * 16 + g, t);
        }
        loaded.load_delta(delta_here, 0);
        wgmma_wait<0>();
        pin(dp);
        u32 grads[P / 4];
        scores[f].gradients(grads, s, dp, a, loaded, delta_here, block.row0 + head * int(a.padded_rows) + first,
                            edge || masked);
        if constexpr (S.dkv) {
          u32 weights[P / 4];
#pragma unroll
          for (int j = 0; j < P / 4; ++j) {
            weights[j] = kDropout ? pack_positive<kType>(s[2 * j], s[2 * j + 1]) : pack<kType>(s[2 * j], s[2 * j + 1]);
          }
          scores[f].clear_hidden(weights);
          wgmma_fence();
          multiply_add<kType, P>(dv[f], weights, o_inside, o_now, part * P / 16);
          wgmma_commit();
        }
        if constexpr (S.dq) {
          if constexpr (kBias) {
            __syncwarp();  // the bias, which lies there, has been read
          }
#pragma unroll
          for (int k = 0; k < P / 16; ++k) {
            stmatrix_trans(panel + k * 2048, grads[4 * k], grads[4 * k + 1], grads[4 * k + 2], grads[4 * k + 3]);
          }
        }
        float dq[S.same_step ? kColumns / 2 : 1];
        if constexpr (S.same_step) {
          fence_async();
          sync(kGradsThere, kGroups * 128);  // all of dS is there, and that of the step before has been read
          multiply_dq(ring_grads, dq);
        }
        if constexpr (S.dkv) {
          multiply_add<kType, P>(dk[f], grads, q_inside, q_now, part * P / 16);
          wgmma_commit();
        }
        if constexpr (S.same_step) {
          wgmma_wait<1>();
          pin(dq);
          if (kBias && leader) {
            barrier_arrive(barriers.grads_empty(ring_grads.buffer()));
          }
          send_dq(dq, block.row0 + head * int(a.padded_rows) + query);
        }
        if (!kOverlap && i + 1 < kBlocks * kParts) {
          wgmma_wait<0>();
          pin(dk[f]);
          pin(dv[f]);
        }
      }
      if constexpr (kOuter) {
        __syncwarp();
        if (leader) {
          barrier_arrive(barriers.outer_empty(ring_outer.buffer()));
        }
        ring_outer.next();
      }
      const int row_now = S.direct ? query : block.row0 + head * int(a.padded_rows) + query;
      if constexpr (kLater) {
        fence_async();
        __syncwarp();
        if (leader) {
          barrier_arrive(barriers.grads_full(ring_grads.buffer()));
        }
        if (S.delay && n > 0 && my_turn(turn_before)) {
          add_dq(grads_before, row_before, true);
        } else {
          wgmma_wait<0>();
          finish_step();
          if (!S.delay && n > 0 && my_turn(turn_before)) {
            add_dq(grads_before, row_before, false);
          }
        }
      } else {
        wgmma_wait<0>();
        finish_step();
        if (kBias && !S.same_step) {
          __syncwarp();
          if (leader) {
            barrier_arrive(barriers.grads_empty(ring_grads.buffer()));
          }
        }
      }
      grads_before = ring_grads;
      row_before = row_now;
      head_before = head;
      turn_before = turn;
      turn = turn + 1 == kGroups ? 0 : turn + 1;
      query = block.after(query, M, block.count);
      --left;
      ring_q.next();
      ring_grads.next();
    }
    if constexpr (kLater) {
      if (block.steps > 0 && my_turn(turn_before)) {
        add_dq(grads_before, row_before, false);
      }
    }
    __syncwarp();
    if (leader) {
      barrier_arrive(barriers.kv_empty());
    }

    // ---- dK, dV, and sums over queries ----
    const Sm90KeyBlock<S> same(a, m, u32(opaque(int(number))));  // made anew: it need not stay in registers
#pragma unroll
    for (int f = 0; f < kBlocks; ++f) {
      const int key = same.key0 + (c * kBlocks + f) * 64 + warp * 16 + g;
      if constexpr (S.column_sum) {
        if (same.steps > 0) {
          scores[f].store_sums(a, same, head, key, t);
        } else {
          for (int i = 0; i < same.group; ++i) {
            scores[f].clear();
            scores[f].store_sums(a, same, same.head0 + i, key, t);
          }
        }
      }
      if constexpr (S.key_parts) {
        const i64 row = same.sums_row + (c * kBlocks + f) * 64 + warp * 16;
        if (key - g >= same.place.k_len) {
          continue;
        }
        if (S.dkv && a.grad_k.data != nullptr) {
          store_fragments(m.parts.dk + row * D + lane * 4, dk[f]);
        }
        if (S.dkv && a.grad_v.data != nullptr) {
          store_fragments(m.parts.dv + row * V + lane * 4, dv[f]);
        }
        continue;
      }
      if (S.dkv && a.grad_k.data != nullptr) {
        store_accumulator<kType>(static_cast<u16*>(a.grad_k.data) + same.place.key_rows(a.grad_k.strides, same.head_k),
                                 a.grad_k.strides, dk[f], a.scale, key, same.place.k_len, a.out_dim, a.vector_stores,
                                 t);
      }
      if (S.dkv && a.grad_v.data != nullptr) {
        store_accumulator<kType>(static_cast<u16*>(a.grad_v.data) + same.place.key_rows(a.grad_v.strides, same.head_k),
                                 a.grad_v.strides, dv[f], kDropout ? a.keep_scale : 1.f, key, same.place.k_len,
                                 a.out_dim_v, a.vector_stores, t);
      }
    }
  }
}

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_SM90_BACKWARD_CUH
