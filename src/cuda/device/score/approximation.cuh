// SPDX-License-Identifier: Apache-2.0
//
// math/'s formulas in the arithmetic of the approximate instructions: powers, tanh and reciprocals by one instruction
// or a short polynomial, and what the kernels make from them.
//
//   ApproxFloat      a float with these functions, as math/'s templates take it
//   weight_...       P of a score
//   score_of_dot     a score, and its derivative, of a dot product
#pragma once

#include "cuda/device/tile/tile.cuh"
#include "math/score.h"
#include "math/softmax.h"

namespace fovea::cuda {

// A float whose transcendental functions are the approximate instructions: what math/'s templates are given.
// exp2: two units in the last place. tanh: by kTanh.
//   kByExp2    an absolute error near 2^-22
//   kOfSmall   a relative one of 2^-23, for |x| up to math::kSmallTanh: fewer instructions
//   kBoth      either, by x
enum class TanhBy { kByExp2, kOfSmall, kBoth };

template <TanhBy kTanh>
struct ApproxFloat {
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
  friend __device__ __forceinline__ ApproxFloat reciprocal(ApproxFloat a) { return ApproxFloat(rcp(a.x)); }
  friend __device__ __forceinline__ ApproxFloat tanh(ApproxFloat a) {
    if constexpr (kTanh == TanhBy::kOfSmall) {
      return math::tanh_of_small(a);
    } else if constexpr (kTanh == TanhBy::kByExp2) {
      return math::tanh_by_exp2(a);
    } else {
      const ApproxFloat small = math::tanh_of_small(a);
      return fabsf(a.x) <= math::kSmallTanh ? small : math::tanh_by_exp2(a);
    }
  }
};
using Approx = ApproxFloat<TanhBy::kByExp2>;
using ApproxOfSmall = ApproxFloat<TanhBy::kOfSmall>;
using ApproxOfBoth = ApproxFloat<TanhBy::kBoth>;

// The largest magnitude of a fragment. fmaxf passes over a NaN, which stays one by any tanh.
template <int kColumns>
__device__ __forceinline__ float largest_magnitude(float (&x)[kColumns][4]) {
  float largest = 0;
  each(x, [&](float y, int, int) { largest = fmaxf(largest, fabsf(y)); });
  return largest;
}

// compute(scalar) with the tanh for scores that are at most `largest` times the cap. Scores far under the cap, the
// usual ones, take the one that is both cheaper and better.
template <class Compute>
__device__ __forceinline__ void choose_tanh(float largest, Compute compute) {
  if (__all_sync(~0u, largest <= math::kSmallTanh)) {
    compute(ApproxOfSmall(0));
  } else {
    compute(Approx(0));
  }
}

// A term that is added to a score. -inf is a mask: it hides what else was added, NaN included. kMask: others are 0.
template <bool kMask = false>
__device__ __forceinline__ float with_term(float s, float term) {
  return term == -kInfinity ? -kInfinity : kMask ? s : s + term;
}

// Exponents of the kernels.
__device__ __forceinline__ float weight_fused(float score, float unit, float reference_in_base_2) {
  return math::weight_base_2(Approx(score), Approx(unit), Approx(reference_in_base_2)).x;
}
__device__ __forceinline__ float weight_of_difference(float score, float reference, float unit, float lift = 0) {
  return math::weight_base_2_of_difference(Approx(score), Approx(reference), Approx(unit), Approx(lift)).x;
}
// P of a score in a backward. kNatural: scores and references are in natural units, and P is multiplied by 2^lift.
// Otherwise scores are dot products and references logarithms to base 2, and there is no lift.
template <bool kNatural>
__device__ __forceinline__ float weight_of_score(float score, float unit, float reference, float lift = 0) {
  return kNatural ? weight_of_difference(score, reference, unit, lift) : weight_fused(score, unit, reference);
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
