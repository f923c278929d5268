// SPDX-License-Identifier: Apache-2.0
//
// Blocks of keys that several blocks share (key_parts): each leaves fp32 sums of dK and dV over its steps. They are
// added by sm90_backward_parts, or with last_parts here, by whichever part ends last, in the order of the parts, so
// that they have the same bits every time.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/tile/accumulator.cuh"
#include "cuda/device/tile/pipe.cuh"

namespace fovea::cuda {

// What all parts have of a warp's rows; part_size: floats of a part.
template <int kCount>
__device__ __forceinline__ void sm90_add_parts(float (&x)[kCount], const float* sums, i64 part_size, int parts) {
  set_zero(x);
#pragma unroll 1
  for (int part = 0; part < parts; ++part, sums += part_size) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const float4 y = load_summed(sums + j * 128);
      x[4 * j] += y.x;
      x[4 * j + 1] += y.y;
      x[4 * j + 2] += y.z;
      x[4 * j + 3] += y.w;
    }
  }
}

// key_parts: stores a warp's 16 rows of dK and dV, from row `row` of all sums on and from these columns on, where a
// part has them. With last_parts the warp that comes last takes the sums of all parts; true for it, and for whole
// blocks. piece: of the rows' columns, two at most.
template <auto S, int kCountD, int kCountV>
__device__ __forceinline__ bool sm90_join_parts(const Args& a, const KeyParts& parts, u32 number, i64 row,
                                                float (&dk)[kCountD], float (&dv)[kCountV], int piece, int lane) {
  if (S.last_parts && number < u32(parts.whole)) {
    return true;
  }
  float* const dk_sums = parts.dk + row * S.d + piece * 2 * kCountD * 16 + lane * 4;
  float* const dv_sums = parts.dv + row * S.dv + piece * 2 * kCountV * 16 + lane * 4;
  if (a.grad_k.data != nullptr) {
    store_fragments(dk_sums, dk);
  }
  if (a.grad_v.data != nullptr) {
    store_fragments(dv_sums, dv);
  }
  if constexpr (S.last_parts) {
    const PartOfKeys mine = part_of_keys<S>(parts, number);
    const i64 size = parts.rows;
    const i64 first_row = row - mine.part * size;
    if (!comes_last(BehindTurns(a).parts + first_row / 16 * 2 + piece, parts.count, lane)) {
      return false;
    }
    if (a.grad_k.data != nullptr) {
      sm90_add_parts(dk, dk_sums - mine.part * size * S.d, size * S.d, parts.count);
    }
    if (a.grad_v.data != nullptr) {
      sm90_add_parts(dv, dv_sums - mine.part * size * S.dv, size * S.dv, parts.count);
    }
    return true;
  }
  return false;
}

}  // namespace fovea::cuda
