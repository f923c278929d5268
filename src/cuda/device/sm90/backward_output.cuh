// SPDX-License-Identifier: Apache-2.0
//
// What leaves the registers of sm90_backward: dQ of a step, and dK and dV of a block of keys.
#ifndef FOVEA_CUDA_DEVICE_SM90_BACKWARD_OUTPUT_CUH
#define FOVEA_CUDA_DEVICE_SM90_BACKWARD_OUTPUT_CUH

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/tile/accumulator.cuh"
#include "cuda/device/work/sm90_key_block.cuh"

namespace fovea::cuda {

// Stores dQ of 64 queries (`direct`: of this head, from `row` on) or adds it to dq_sum, from its row `row` on. parity:
// of what leaves through shared memory.
template <Sm90BackwardSpec S, int kCount>
__device__ __forceinline__ void sm90_backward_send_dq(const Args& a, u32 base, const Sm90BackwardBarriers& barriers,
                                                      const Place& place, float (&dq)[kCount], int head, int row,
                                                      u32& parity, int c, int warp, int lane) {
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  constexpr int kColumns = 2 * kCount;
  const int g = lane / 4;
  const int t = lane % 4;
  if constexpr (S.bulk) {
    const u32 leaving = base + kSizes.leaving_at + c * kSizes.leaving + (warp * 16 * kColumns + lane * 4) * 4;
    barrier_wait(barriers.leaving_empty(c), parity ^ 1);
    parity ^= 1;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      store_shared(leaving + j * 512, uint4{__float_as_uint(dq[4 * j]), __float_as_uint(dq[4 * j + 1]),
                                            __float_as_uint(dq[4 * j + 2]), __float_as_uint(dq[4 * j + 3])});
    }
    fence_async();
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(barriers.leaving_full(c));
    }
  } else if constexpr (S.direct) {
    store_accumulator<S.type>(static_cast<u16*>(a.grad_q.data) + place.query_rows(a.grad_q.strides, u32(head)) +
                                  (S.halves ? c * (S.d / 2) : 0) * a.grad_q.strides.col,
                              a.grad_q.strides, dq, a.scale, row + (S.step == 128 ? c * 64 : 0) + warp * 16 + g,
                              place.q_len, a.out_dim - (S.halves ? c * (S.d / 2) : 0), a.vector_stores, t);
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

// The end of a block of keys: dK and dV, or their fp32 sums over this part of the queries; sums of dS over queries.
// head: the last query head.
template <Sm90BackwardSpec S, class Scores>
__device__ __forceinline__ void sm90_backward_store(const Args& a, const Sm90BackwardArgs& m,
                                                    const Sm90KeyBlock<S>& same, Scores (&scores)[S.tiles],
                                                    const float (&dk)[S.tiles][S.d / 2],
                                                    const float (&dv)[S.tiles][S.dv / 2], int c, int head, int warp,
                                                    int lane) {
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
      if (key - g >= same.place.k_len) {
        continue;
      }
      if (S.dkv && a.grad_k.data != nullptr) {
        store_fragments(m.parts.dk + row * S.d + lane * 4, dk[f]);
      }
      if (S.dkv && a.grad_v.data != nullptr) {
        store_fragments(m.parts.dv + row * S.dv + lane * 4, dv[f]);
      }
      continue;
    }
    if (S.dkv && a.grad_k.data != nullptr) {
      store_accumulator<S.type>(static_cast<u16*>(a.grad_k.data) + same.place.key_rows(a.grad_k.strides, same.head_k),
                                a.grad_k.strides, dk[f], a.scale, key, same.place.k_len, a.out_dim, a.vector_stores, t);
    }
    if (S.dkv && a.grad_v.data != nullptr) {
      store_accumulator<S.type>(static_cast<u16*>(a.grad_v.data) + same.place.key_rows(a.grad_v.strides, same.head_k),
                                a.grad_v.strides, dv[f], S.dropout != DropoutRule::kNone ? a.keep_scale : 1.f, key,
                                same.place.k_len, a.out_dim_v, a.vector_stores, t);
    }
  }
}

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_SM90_BACKWARD_OUTPUT_CUH
