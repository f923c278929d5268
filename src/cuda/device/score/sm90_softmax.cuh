// SPDX-License-Identifier: Apache-2.0
//
// The softmax of sm90_forward: from scores, 64 queries by S.step keys a warpgroup, to P as the A operand of the next
// product. A thread has two rows; the four lanes of a quad share them.
//
// `quick`: the reference of a row need not be its maximum, it must only be near: p = 2^(s - reference) is as precise in
// 16 bits at 2^6 as at 1. So an ordinary tile looks for no maximum and rescales nothing. A warp in which a part of a
// row's sum over a tile is larger than kLargestPart moves its references in place; where a weight even left the range
// of fp32 it forms its S again, by mma.sync and without its warpgroup, and takes the exact way (maximum, rescale). Rows
// that have met no key yet, and references of 2^24 and more, take the exact way at once.
//
// The bound on the sums is small on purpose: P's relative error does not depend on the reference, but where its largest
// element is exactly 1, a one-hot row has no error at all.
//
// Note: references are natural logarithms (times log2 e a bias of -3.4e38 would overflow). The quick way rounds
// reference * log2(e), the same for all of a row; what the rounding leaves out is carried (rest) wherever weights of
// both ways, or the logsumexp, meet.
#pragma once

#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/score/sm90_dropout.cuh"
#include "cuda/device/score/softmax.cuh"
#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/device/tile/accumulator.cuh"
#include "math/softmax.h"

namespace fovea::cuda {

template <auto S>
struct Sm90Softmax {
  static constexpr int kBlocks = S.step / 16;
  static constexpr bool kNatural = natural_scores(S);  // otherwise scores stay dot products
  static constexpr float kLargestPart = 0x1p7f;
  static constexpr float kLargestQuick = 0x1p24f;  // of references
  static constexpr float kLargestSum = 0x1p100f;   // beyond it a weight may have left the range

  float s[S.step / 2];  // dot products, then scores, then weights
  u32 p[S.step / 4];    // weights of 16 bits
  float reference[2], sum[2];

  __device__ __forceinline__ void start() {
    reference[0] = reference[1] = -kInfinity;
    sum[0] = sum[1] = 0;
  }

  // Some row of this warp has met no key, or its reference is not fit for the quick way.
  __device__ __forceinline__ bool must_be_exact() const {
    return __any_sync(~0u, !(fabsf(reference[0]) < kLargestQuick) || !(fabsf(reference[1]) < kLargestQuick));
  }

  static __device__ __forceinline__ float rest(float x) { return fabsf(x) < kLargestQuick ? rest_of_log2(x) : 0.f; }

  // ---- dot products once more ----

  // S of this warp's 16 rows once more, without the rest of its warpgroup: rare, and slow beside wgmma. `row`: as
  // ldmatrix takes it.
  __device__ __forceinline__ void form(u32 q, int row, u32 k, int lane) {
    constexpr int kPanel = wide_panel_columns(S.d);
    constexpr int kRows = sm90_forward_sizes(S).rows;
    set_zero(s);
#pragma unroll 1
    for (int i = 0; i < S.d / 16; ++i) {
      const int panel = i / (kPanel / 16);
      const int chunk = i % (kPanel / 16) * 2 + lane / 16;
      u32 x[4];
      ldmatrix(x, q + panel * kRows * kPanel * 2 + swizzled<kPanel * 2>(row, chunk));
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        u32 y[4];
        ldmatrix(y, k + panel * S.step * kPanel * 2 + swizzled<kPanel * 2>(16 * j + lane % 16, chunk));
        mma<S.type>(*reinterpret_cast<float(*)[4]>(s + 8 * j), x, y[0], y[2]);
        mma<S.type>(*reinterpret_cast<float(*)[4]>(s + 8 * j + 4), x, y[1], y[3]);
      }
    }
  }

  // ---- the quick way ----

  // A first reference: the largest of a few elements. Any element of the row would be right.
  __device__ __forceinline__ void guess(const Args& a) {
    float m[2] = {-kInfinity, -kInfinity};
#pragma unroll
    for (int k = 0; k < kBlocks; k += 4) {
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        m[e >> 1 & 1] = fmaxf(m[e >> 1 & 1], s[8 * k + e]);
      }
    }
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      reference[x] = quad_max(m[x]) * (kNatural ? 1.f : a.scale);
    }
  }

  // Weights relative to the references as they are; parts of their sums.
  __device__ __forceinline__ void weigh(float unit, float (&parts)[4]) {
    const float base[2] = {reference[0] * math::kLog2E, reference[1] * math::kLog2E};
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int x = e >> 1 & 1;
        s[8 * k + e] = weight_fused(s[8 * k + e], unit, base[x]);
        parts[2 * x + (e & 1)] += s[8 * k + e];
      }
    }
  }

  // The largest weight of each row becomes 1: the answer to a row that has outgrown its reference.
  template <int kCount>
  __device__ __forceinline__ void move_references(float (&o)[kCount]) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const float m = largest_of_row(fragment_of(s), x, 1.f);
      const float before = reference[x] * math::kLog2E;
      reference[x] += lg2(m) * (1 / math::kLog2E);
      const float factor = ex2(before - reference[x] * math::kLog2E);
      sum[x] *= factor;
      scale_row(fragment_of(s), x, factor);
      scale_row(fragment_of(o), x, factor);
    }
  }

  // ---- the exact way: running maxima ----

  // The largest score of row x so far. It turns dot products of the row into scores, so it is called once a step.
  __device__ __forceinline__ float largest(const Args& a, int x) {
    return largest_of_row<!kNatural>(fragment_of(s), x, reference[x], a.scale);
  }

  // Scores of row x, the largest of which is `next`, become weights; what its O is to be multiplied by.
  __device__ __forceinline__ float raise_row(int x, float next) {
    const float base = math::reference_of(next);
    const float lift = rest(base);
    const float factor = raise(reference[x], sum[x], next, base, math::kLog2E,
                               reference[x] == -kInfinity ? 0.f : lift - rest(reference[x]));
    float parts[2] = {};
#pragma unroll
    for (int j = 0; j < S.step / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& weight = s[4 * j + 2 * x + e];
        weight = weight_of_difference(weight, base, math::kLog2E, lift);
        parts[e] += weight;
      }
    }
    sum[x] += parts[0] + parts[1];
    return factor;
  }

  template <int kCount>
  __device__ __forceinline__ void exactly(const Args& a, float (&o)[kCount]) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const float factor = raise_row(x, largest(a, x));
      scale_row(fragment_of(o), x, factor);
    }
  }

  // ---- P ----

  __device__ __forceinline__ void convert(const Sm90Decisions<S>& dropout) {
#pragma unroll
    for (int i = 0; i < S.step / 4; ++i) {
      p[i] = dropout.apply(i, pack<S.type>(s[2 * i], s[2 * i + 1]));
    }
  }

  // ---- the end of a row ----

  // Of a part of its keys: the reference, and the sum of the weights relative to it.
  __device__ __forceinline__ float2 of_part(int x) const { return {reference[x], sum[x] * ex2(-rest(reference[x]))}; }
  // What the sum of a part and its O are multiplied by where its reference becomes `top`.
  static __device__ __forceinline__ float factor_of_part(float reference, float sum, float top) {
    return sum == 0 ? 0.f : ex2((reference - top) * math::kLog2E - rest(reference) + rest(top));
  }

  // With the sink: what O is multiplied by, and the logsumexp. A row without a key: O is 0.
  __device__ __forceinline__ void end(int x, float sink, float keep_scale, float& factor, float& logsumexp) {
    const float base = reference[x];
    const float total = sum[x];
    float left_out = rest(base);
    const float top = fmaxf(base, sink);
    float own = 1;
    float all = total;
    if (sink != -kInfinity) {
      own = total == 0 ? 0.f : ex2((base - top) * math::kLog2E - left_out);
      all = total * own + (sink == top ? 1.f : ex2((sink - top) * math::kLog2E));
      left_out = 0;
    }
    factor = all == 0 ? 0.f : own * keep_scale * rcp(all);  // the sum is near 1 or larger
    logsumexp = all == 0 ? -kInfinity : fmaf(lg2(all) - left_out, 1 / math::kLog2E, top);
  }
};

}  // namespace fovea::cuda
