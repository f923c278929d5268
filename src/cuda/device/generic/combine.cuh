// SPDX-License-Identifier: Apache-2.0
//
// generic_combine: the results of blocks that had a part of the keys each (Spec::split) become one.
//
// A part has o_p, normalised in itself, and sum_p, the sum of its weights relative to reference_p. With reference the
// largest of those and of the sink:
//
//     weight_p = sum_p exp(reference_p - reference),   sum = sum over p of weight_p + exp(sink - reference)
//     o = sum over p of weight_p / sum o_p,            lse = reference + log(sum)
//
// in the order of the parts, whatever came first: the same bits in every run. A warp has one row of one head; lanes
// run along its columns. Parts that met no key have reference_p = -inf, sum_p = 0 and o_p = 0.
#pragma once

#include "cuda/device/generic/sizes.h"
#include "cuda/device/tile/result.cuh"
#include "math/softmax.h"

namespace fovea::cuda {

template <AroundSpec S>
__global__ void __launch_bounds__(kCombineRows * 32) generic_combine(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  const Thread thread;
  const u32 tiles = (u32(a.rows.limit_q) + kCombineRows - 1) / kCombineRows;
  const u32 block = u32(a.first_block) + block_index();
  const u32 bh = block / tiles;
  const u32 heads = u32(a.rows.heads_q);
  const u32 head = bh % heads;
  const Place place = Place::make<S>(a, bh / heads);
  const int row = int(block % tiles) * kCombineRows + thread.warp;
  if (row >= place.q_len) {
    return;
  }
  const i64 padded = padded_row(a.rows, place.b, place.queries()) + row;
  const float2* const part_sum = reinterpret_cast<const float2*>(a.partial_sum) + head * a.padded_rows + padded;
  const i64 sum_stride = heads * a.padded_rows;
  const float* const part_out = a.partial_out + (padded * heads + head) * S.dv;
  const i64 out_stride = a.padded_rows * heads * S.dv;

  float top = a.sink != nullptr ? a.sink[head * a.sink_stride] : -kInfinity;
  for (int p = 0; p < a.splits; ++p) {
    top = math::max(part_sum[p * sum_stride].x, top);
  }
  const float reference = math::reference_of(top);
  const auto weight_of = [&](int p) {
    const float2 part = part_sum[p * sum_stride];
    return part.y * math::weight(part.x, reference);
  };
  float sum = 0;
  for (int p = 0; p < a.splits; ++p) {
    sum += weight_of(p);
  }
  if (a.sink != nullptr) {
    sum = math::sum_with_sink(sum, reference, a.sink[head * a.sink_stride]);
  }
  float inverse = math::inverse_of_sum(sum);
  float there = 0;  // what the O that is there is multiplied by
  if (S.fp32_results && a.results.out.adds) {
    float* const lse =
        static_cast<float*>(a.lse.data) + place.query_rows(a.lse.strides, head) + row * a.lse.strides.row;
    const math::Merge<float> merged = merge_row(lse, math::logsumexp(reference, sum), true, thread.lane == 0);
    inverse *= merged.of_new;
    there = merged.of_old;
  } else if (thread.lane == 0 && a.lse.data != nullptr) {
    static_cast<float*>(a.lse.data)[place.query_rows(a.lse.strides, head) + row * a.lse.strides.row] =
        math::logsumexp(reference, sum);
  }

  constexpr bool kFp32 = S.type == Type::kFp32 || S.fp32_results;
  constexpr int kElement = kFp32 ? 4 : 2;
  char* const out =
      static_cast<char*>(a.out.data) + (place.query_rows(a.out.strides, head) + row * a.out.strides.row) * kElement;
  for (int column = thread.lane * 4; column < a.out_dim_v; column += 128) {
    float4 o = {0, 0, 0, 0};
    for (int p = 0; p < a.splits; ++p) {
      const float weight = weight_of(p) * inverse;
      const float4 x = *reinterpret_cast<const float4*>(part_out + p * out_stride + column);
      o = {o.x + weight * x.x, o.y + weight * x.y, o.z + weight * x.z, o.w + weight * x.w};
    }
    if constexpr (kFp32) {
      float* const to = reinterpret_cast<float*>(out) + column * a.out.strides.col;
      if (S.fp32_results && a.results.out.adds) {
        float x[4] = {};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[e] = column + e < a.out_dim_v ? to[e * a.out.strides.col] * there : 0.f;
        }
        o = {o.x + x[0], o.y + x[1], o.z + x[2], o.w + x[3]};
      }
      if (a.vector_stores) {
        *reinterpret_cast<float4*>(to) = o;
      } else {
        const float values[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (column + e < a.out_dim_v) {
            to[e * a.out.strides.col] = values[e];
          }
        }
      }
    } else {
      u16* const to = reinterpret_cast<u16*>(out) + column * a.out.strides.col;
      const uint2 pairs = {pack<S.type>(o.x, o.y), pack<S.type>(o.z, o.w)};
      if (a.vector_stores) {
        *reinterpret_cast<uint2*>(to) = pairs;
      } else {
        const u32 words[2] = {pairs.x, pairs.y};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (column + e < a.out_dim_v) {
            to[e * a.out.strides.col] = u16(words[e / 2] >> e % 2 * 16);
          }
        }
      }
    }
  }
}

}  // namespace fovea::cuda
