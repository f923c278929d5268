// SPDX-License-Identifier: Apache-2.0
//
// math/'s formulas in the arithmetic of the approximate instructions: powers, tanh and reciprocals by one instruction
// or a short polynomial, and what the kernels make from them.
//
//   ApproxFloat      a float with these functions, as math/'s templates take it
//   weight_...       P of a score
//   score_of_dot     a score, and its derivative, of a dot product
#ifndef FOVEA_CUDA_DEVICE_SCORE_APPROXIMATION_CUH
#define FOVEA_CUDA_DEVICE_SCORE_APPROXIMATION_CUH

#include "cuda/device/generic/sizes.h"
#include "cuda/device/tile/tile.cuh"
#include "math/score.h"
#include "math/softmax.h"

namespace fovea::cuda {

// A float whose transcendental functions are the approximate instructions: what math/'s templates are given.
// exp2: two units in the last place. tanh: an absolute error near 2^-22; kNearZero, for |x| up to kNear, a relative one
// of 2^-23, by a polynomial (a least squares fit of tanh(x) / x, weighted to an even error).
template <bool kNearZero>
struct ApproxFloat {
  static constexpr float kNear = 0.7f;
  float x;
  __device__ __forceinline__ explicit ApproxFloat(float value) : x(value) {}

  friend __device__ __forceinline__ ApproxFloat operator+(ApproxFloat a, ApproxFloat b) {
    return ApproxFloat(a.x + b.x);
  }
  friend __device__ __forceinline__ ApproxFloat operator-(ApproxFloat a, ApproxFloat b) {
    return ApproxFloat(a.x - b.x);
  }
  friend __device__ __forceinline__ ApproxFloat operator*(ApproxFloat a, ApproxFloat b) {
    return ApproxFloat(a.x * b.x);
  }
  friend __device__ __forceinline__ ApproxFloat operator*(ApproxFloat a, float b) { return ApproxFloat(a.x * b); }
  friend __device__ __forceinline__ ApproxFloat exp2(ApproxFloat a) { return ApproxFloat(ex2(a.x)); }
  friend __device__ __forceinline__ ApproxFloat tanh(ApproxFloat a) {
    if constexpr (kNearZero) {
      const float y = a.x * a.x;
      float p = -0.00515509024f;
      p = p * y + 0.0201116297f;
      p = p * y - 0.0535669774f;
      p = p * y + 0.133292422f;
      p = p * y - 0.333331972f;
      return ApproxFloat(a.x + a.x * (y * p));
    } else {
      return ApproxFloat(1.f - 2.f * rcp(1.f + ex2(a.x * (2 * math::kLog2E))));
    }
  }
};
using Approx = ApproxFloat<false>;

// Exponents of the kernels.
__device__ __forceinline__ float weight_fused(float score, float unit, float reference_in_base_2) {
  return math::weight_base_2(Approx(score), Approx(unit), Approx(reference_in_base_2)).x;
}
__device__ __forceinline__ float weight_of_difference(float score, float reference, float unit, float lift = 0) {
  return math::weight_base_2_of_difference(Approx(score), Approx(reference), Approx(unit), Approx(lift)).x;
}

// A score and its derivative by the dot product, in the arithmetic of Scalar.
template <auto S, class Scalar>
__device__ __forceinline__ float score_of_dot(const math::Score<float>& score, float dot) {
  if constexpr (S.type == Type::kFp32) {
    return score.of_dot<S.softcap>(dot);
  } else {
    return score.of_dot<S.softcap>(Scalar(dot)).x;
  }
}
template <auto S, class Scalar>
__device__ __forceinline__ float score_of_dot(const math::Score<float>& score, float dot, float& derivative) {
  if constexpr (S.type == Type::kFp32) {
    const math::Dual<float> s = score.of_dot_with_derivative<S.softcap>(dot, 1.f);
    derivative = s.derivative;
    return s.value;
  } else {
    const math::Dual<Scalar> s = score.of_dot_with_derivative<S.softcap>(Scalar(dot), Scalar(1.f));
    derivative = s.derivative.x;
    return s.value.x;
  }
}

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_SCORE_APPROXIMATION_CUH
