// SPDX-License-Identifier: Apache-2.0
//
// sm90_backward_parts: what comes after sm90_backward where several blocks share a block of keys (Spec::key_parts
// without last_parts). The sums of dK and dV that the parts left are added in the order of the parts, so that they have
// the same bits every time, and dq_sum is converted by the same launch.
//
// Blocks of 256 threads: sm90_parts_blocks of dK, whose warps have 16 x 16 numbers each; as many by Spec::dv of dV;
// backward_convert's own, with Spec::dq.
#pragma once

#include "cuda/device/around/backward_prepare.cuh"
#include "cuda/device/sm90/backward_args.h"

namespace fovea::cuda {

// Of block `block` of a result with kColumns columns. `sums` are those of the first part.
template <auto S, int kColumns>
__device__ __forceinline__ void add_parts(const Args& a, const KeyParts& parts, const float* sums, const Tensor& result,
                                          Result how, u32 block, int columns, float scale) {
  constexpr u32 kPairs = kColumns / 16;  // of blocks of 8 columns
  const Thread thread;
  const u32 tile = block * 8 + thread.warp;
  const u32 first = tile / kPairs * 16;  // row of a part
  const int column = int(tile % kPairs) * 16;
  if (result.data == nullptr || first >= u32(parts.rows) || column >= columns) {
    return;
  }
  const u32 head_of_batch = first / u32(parts.head_rows);
  const int row = int(first - head_of_batch * u32(parts.head_rows));
  const u32 b = head_of_batch / u32(a.rows.heads_k);
  const Place place = Place::make<with_lengths()>(a, b);
  if (row >= place.k_len) {
    return;
  }
  const float* const from = sums + i64(tile) * 256 + thread.lane * 4;
  const i64 pitch = i64(parts.rows) * kColumns;
  float4 x[2] = {};
#pragma unroll 8
  for (int part = 0; part < parts.count; ++part) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 y = *reinterpret_cast<const float4*>(from + part * pitch + j * 128);
      x[j] = {x[j].x + y.x, x[j].y + y.y, x[j].z + y.z, x[j].w + y.w};
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    x[j] = {x[j].x * scale, x[j].y * scale, x[j].z * scale, x[j].w * scale};
  }
  store_sums<S>(thread, x, result, how, place.key_rows(result.strides, head_of_batch - b * u32(a.rows.heads_k)),
                row + thread.g, column, place.k_len, columns, a.vector_stores);
}

template <AroundSpec S>
__global__ void __launch_bounds__(256)
    sm90_backward_parts(const __grid_constant__ Args a, const __grid_constant__ KeyParts m) {
  begin_kernel<S.arch>();
  const u32 number = block_index();
  const u32 of_dk = u32(sm90_parts_blocks(m.rows, S.d));
  const u32 of_both = of_dk + u32(sm90_parts_blocks(m.rows, S.dv));
  if (number < of_dk) {
    add_parts<S, S.d>(a, m, m.dk, a.grad_k, a.results.k, number, a.out_dim, a.scale);
  } else if (number < of_both) {
    add_parts<S, S.dv>(a, m, m.dv, a.grad_v, a.results.v, number - of_dk, a.out_dim_v, a.keep_scale);
  } else if constexpr (S.dq) {
    convert_queries<S>(a, of_both);
  }
}

}  // namespace fovea::cuda
