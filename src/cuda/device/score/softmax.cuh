// SPDX-License-Identifier: Apache-2.0
//
// The running softmax of all forwards: rows whose keys come in steps. A fragment has two rows of a thread, 8 columns a
// block, as the tensor cores lay it out; the four lanes of a quad share a row.
//
//   largest_of_row    its maximum
//   RunningSoftmax    the maxima so far and the sums of weights relative to them: raise() where maxima rise, weigh()
//                     turns scores into weights, step() does both
#pragma once

#include "cuda/device/score/approximation.cuh"
#include "cuda/device/tile/tile.cuh"
#include "math/softmax.h"

namespace fovea::cuda {

// The largest of row x (0 or 1) of a fragment, and of `start`. kScales: it is multiplied by `scale` before.
template <bool kScales = false, int kColumns>
__device__ __forceinline__ float largest_of_row(float (&s)[kColumns][4], int x, float start, float scale = 1) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    if constexpr (kScales) {
      s[j][2 * x] *= scale;
      s[j][2 * x + 1] *= scale;
    }
    start = fmaxf(start, fmaxf(s[j][2 * x], s[j][2 * x + 1]));
  }
  return quad_max(start);
}

template <int kColumns>
__device__ __forceinline__ void scale_row(float (&s)[kColumns][4], int x, float factor) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    s[j][2 * x] *= factor;
    s[j][2 * x + 1] *= factor;
  }
}

// What the rounding of x * log2(e) leaves out.
__device__ __forceinline__ float rest_of_log2(float x) { return fmaf(x, math::kLog2E, -(x * math::kLog2E)); }

// The maximum of a row becomes `next`, and weights relative to `base` (reference_of(next)). What its sum so far, and O,
// are multiplied by; the sum is. lift: from the row's earlier weights to these, if they are made in another way, too.
__device__ __forceinline__ float raise(float& top, float& sum, float next, float base, float unit, float lift = 0) {
  const float factor = weight_of_difference(top, base, unit, lift);
  sum *= factor;
  top = next;
  return factor;
}

// How weights are made of differences to the maximum: by one fused multiply-add unless the maximum is huge, or always
// by a subtraction first.
enum class Weights { kFused, kByDifference };

// kLift: weights are multiplied by 2^kLift.
template <Weights kWeights, bool kLazy = false, int kLift = 0>
struct RunningSoftmax {
  float top[2] = {-kInfinity, -kInfinity};  // in units of the scores
  float sum[2] = {};

  // Scores become weights, which are added up.
  template <int kColumns>
  __device__ __forceinline__ void weigh(float (&s)[kColumns][4], const float (&base)[2], float unit) {
    if constexpr (kWeights == Weights::kByDifference) {
      each(s, [&](float& x, int, int e) { x = weight_of_difference(x, base[e >> 1], unit, kLift); });
    } else {
      // Scores may be huge, and then a fused multiply-add alone would lose the difference.
      float scaled[2] = {base[0] * unit, base[1] * unit};
      if (fmaxf(fabsf(scaled[0]), fabsf(scaled[1])) > math::kLargestFusedReference) {
        each(s, [&](float& x, int, int e) { x -= base[e >> 1]; });
        scaled[0] = 0;
        scaled[1] = 0;
      }
      each(s, [&](float& x, int, int e) { x = weight_fused(x, unit, scaled[e >> 1]); });
    }
    each(s, [&](float x, int, int e) { sum[e >> 1] += x; });
  }

  // Both. false: no maximum has risen enough to matter (kLazy: weights up to 2^8 are as good as weights up to 1), and
  // the factors are 1.
  template <int kColumns>
  __device__ __forceinline__ bool step(float (&s)[kColumns][4], float unit, float (&factor)[2]) {
    float next[2];
    for (int x = 0; x < 2; ++x) {
      next[x] = fmaxf(largest_of_row(s, x, s[0][2 * x]), top[x]);
    }
    bool rises = true;
    if constexpr (kLazy) {
      rises = __any_sync(~0u, (next[0] - top[0]) * unit > 8.f || (next[1] - top[1]) * unit > 8.f);
      if (!rises) {
        next[0] = top[0];
        next[1] = top[1];
      }
    }
    const float base[2] = {math::reference_of(next[0]), math::reference_of(next[1])};
    if (rises) {
      for (int x = 0; x < 2; ++x) {
        factor[x] = raise(top[x], sum[x], next[x], base[x], unit);
      }
    }
    weigh(s, base, unit);
    return rises;
  }
};

}  // namespace fovea::cuda
