// SPDX-License-Identifier: Apache-2.0
//
// What leaves the registers of sm90_backward: dQ of a step, and dK and dV of a block of keys.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_join.cuh"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/tile/accumulator.cuh"
#include "cuda/device/work/sm90_key_block.cuh"

namespace fovea::cuda {

// Stores dQ of 64 queries (80: transposed; `direct`: of this head, from `row` on) or adds it to dq_sum, from its row
// `row` on. parity: of what leaves through shared memory.
template <Sm90BackwardSpec S, int kCount>
__device__ __forceinline__ void sm90_backward_send_dq(const Args& a, u32 base, const Sm90BackwardBarriers& barriers,
                                                      const Place& place, float (&dq)[kCount], int head, int row,
                                                      u32& parity, int c, int warp, int lane) {
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  constexpr int kColumns = 2 * kCount;  // of queries where dQ is transposed
  const int g = lane / 4;
  const int t = lane % 4;
  if constexpr (S.bulk) {
    constexpr bool kTurned = sm90_turns_dq(S);  // of every 8 queries all warps' parts lie together
    const u32 leaving =
        base + kSizes.leaving_at + c * kSizes.leaving + warp * (kTurned ? 512 : 64 * kColumns) + lane * 16;
    barrier_wait(barriers.leaving_empty(c), parity ^ 1);
    parity ^= 1;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      store_shared(leaving + j * (kTurned ? 2048 : 512),
                   uint4{__float_as_uint(dq[4 * j]), __float_as_uint(dq[4 * j + 1]), __float_as_uint(dq[4 * j + 2]),
                         __float_as_uint(dq[4 * j + 3])});
    }
    fence_async();
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(barriers.leaving_full(c));
    }
  } else if constexpr (S.direct) {
    store_gradient_rows<S>(
        a.grad_q, place.query_rows(a.grad_q.strides, u32(head)) + (S.halves ? c * (S.d / 2) : 0) * a.grad_q.strides.col,
        a.results.q, dq, a.scale, row + (S.step == 128 ? c * 64 : 0) + warp * 16 + g, place.q_len,
        a.out_dim - (S.halves ? c * (S.d / 2) : 0), a.vector_stores, t);
  } else {
    constexpr int kTile = 16 * S.d;  // floats of a warp's rows
    float* const mine = a.dq_sum + i64(row + (S.step == 128 ? c * 64 : 0)) * S.d + warp * kTile +
                        (S.halves ? c * (S.d / 16) * 128 : 0) + lane * 4;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      reduce4<90>(mine + j * 128, *reinterpret_cast<const float(*)[4]>(dq + 4 * j));
    }
  }
}

// tile_stores: where dK and dV of a block of keys go, kept in shared memory from its beginning on.
struct Sm90StoredKeys {
  int row, head, batch2, batch1;
};
static_assert(sizeof(Sm90StoredKeys) <= kSm90KeysBytes);

// A warp's 16 rows of an accumulator, from row `row` of a tile with kRows rows in panels on. As store_to_panels() with
// one factor, which gives other machine code here.
template <Type kType, int kRows, int kPanel, int kCount>
__device__ __forceinline__ void sm90_store_to_panels(u32 tile, const float (&x)[kCount], float factor, int row,
                                                     int lane) {
  constexpr int kBlocks = kPanel / 16;
  const auto pair = [&](int i) { return pack<kType>(x[i] * factor, x[i + 1] * factor); };
#pragma unroll
  for (int k = 0; k < kCount / 8; ++k) {
    stmatrix(
        tile + k / kBlocks * kRows * kPanel * 2 + swizzled<kPanel * 2>(row + lane % 16, k % kBlocks * 2 + lane / 16),
        pair(8 * k), pair(8 * k + 2), pair(8 * k + 4), pair(8 * k + 6));
  }
}

// The end of a block of keys with tile_stores: dV, then dK, each warp its own rows, to where V and K were, and from
// there on by tensor stores. V is read by its own warpgroup's products alone, K by those for dQ of all.
template <Sm90BackwardSpec S>
__device__ __forceinline__ void sm90_backward_place_dv(const Args& a, u32 base, const float (&dv)[S.tiles][S.dv / 2],
                                                       int c, int warp, int lane) {
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  constexpr Sm90BackwardChoices kHow = sm90_backward_choices(S);
  const int top = c * S.tiles * 64 + warp * 16;
  sync(kOwnDone[c], 128);
#pragma unroll
  for (int f = 0; f < S.tiles; ++f) {
    sm90_store_to_panels<S.type, kSizes.keys, kHow.panel_v>(base + kSizes.v_at, dv[f], keep_scale<S>(a), top + f * 64,
                                                            lane);
  }
}
template <Sm90BackwardSpec S>
__device__ __forceinline__ void sm90_backward_store_tiles(const Args& a, const Sm90BackwardArgs& m, u32 base,
                                                          const volatile Sm90StoredKeys& keys,
                                                          const float (&dk)[S.tiles][S.d / 2], int c, int warp,
                                                          int lane) {
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  constexpr Sm90BackwardChoices kHow = sm90_backward_choices(S);
  const int top = c * S.tiles * 64 + warp * 16;
  if constexpr (S.dq) {
    sync(kStepsDone, kHow.threads);
  }
#pragma unroll
  for (int f = 0; f < S.tiles; ++f) {
    sm90_store_to_panels<S.type, kSizes.keys, kHow.panel_d>(base + kSizes.k_at, dk[f], a.scale, top + f * 64, lane);
  }
  fence_async();
  __syncwarp();
  if (lane == 0) {
    const auto store = [&](const TensorMap& map, const Has& has, u32 tile, int panel, int panels) {
#pragma unroll 1
      for (int i = 0; i < panels * S.tiles; ++i) {
        const int row = top + i % S.tiles * 64;
        const int p = i / S.tiles;
        tensor_store(
            map, tile + (p * kSizes.keys + row) * panel * 2,
            {p * panel, keys.row + row, keys.head * has.head, keys.batch2 * has.batch2, keys.batch1 * has.batch1});
      }
    };
    if (a.grad_v.data != nullptr) {
      store(m.grad_v, m.has_grad_v, base + kSizes.v_at, kHow.panel_v, kHow.panels_v);
    }
    if (a.grad_k.data != nullptr) {
      store(m.grad_k, m.has_grad_k, base + kSizes.k_at, kHow.panel_d, kHow.panels_d);
    }
    bulk_commit();
  }
}

// The end of a block of keys: dK and dV, or their fp32 sums over this part of the queries; sums of dS over queries.
// head: the last query head.
template <Sm90BackwardSpec S, class Scores>
__device__ __forceinline__ void sm90_backward_store(const Args& a, const Sm90BackwardArgs& m,
                                                    const Sm90KeyBlock<S>& same, Scores (&scores)[S.tiles],
                                                    float (&dk)[S.tiles][S.d / 2], float (&dv)[S.tiles][S.dv / 2],
                                                    u32 number, int c, int head, int warp, int lane) {
  const int g = lane / 4;
  const int t = lane % 4;
#pragma unroll
  for (int f = 0; f < S.tiles; ++f) {
    const int key = same.key0 + (c * S.tiles + f) * 64 + warp * 16 + g;
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
      const i64 row = same.sums_row + (c * S.tiles + f) * 64 + warp * 16;
      if (!S.dkv || key - g >= same.place.k_len ||
          !sm90_join_parts<S>(a, m.parts, number, row, dk[f], dv[f], 0, lane)) {
        continue;
      }
    }
    if (S.dkv && a.grad_k.data != nullptr) {
      store_gradient_rows<S>(a.grad_k, same.place.key_rows(a.grad_k.strides, same.head_k), a.results.k, dk[f], a.scale,
                             key, same.place.k_len, a.out_dim, a.vector_stores, t);
    }
    if (S.dkv && a.grad_v.data != nullptr) {
      store_gradient_rows<S>(a.grad_v, same.place.key_rows(a.grad_v.strides, same.head_k), a.results.v, dv[f],
                             keep_scale<S>(a), key, same.place.k_len, a.out_dim_v, a.vector_stores, t);
    }
  }
}

}  // namespace fovea::cuda
