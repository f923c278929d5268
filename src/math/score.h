// SPDX-License-Identifier: Apache-2.0
//
// The score of a query and a key, in the order that the specification fixes:
//
//     s = scale * dot                              dot = <q_i, k_j>
//     s = softcap * tanh(s / softcap)              if softcap > 0
//     s = s + bias + bias2 - slope * |i + shift - j|
//
// T is a float, a double, a vector of either, or a Dual of those; S is the scalar of T's lanes.
#ifndef FOVEA_MATH_SCORE_H
#define FOVEA_MATH_SCORE_H

#include "scalar.h"

namespace fovea::math {
inline namespace FOVEA_ISA {

// What depends on the dot product. Everything added after it (bias, ALiBi) has derivative 1.
template <class S>
struct Score {
  S scale;
  S softcap;          // 0: none
  S inverse_softcap;  // 1 / softcap

  static constexpr Score make(double scale, double softcap) {
    return {S(scale), S(softcap), softcap > 0 ? S(1 / softcap) : S(0)};
  }

  template <bool kSoftcap, class T>
  constexpr T of_dot(T dot) const {
    T s = dot * scale;
    if constexpr (kSoftcap) {
      s = tanh(s * inverse_softcap) * softcap;
    }
    return s;
  }

  // Score and derivative by the dot product, from the same formula. `one` is 1 as a T.
  template <bool kSoftcap, class T>
  constexpr Dual<T> of_dot_with_derivative(T dot, T one) const {
    return of_dot<kSoftcap>(Dual<T>{dot, one});
  }
};

// ---- softcap without tanh, for machines that have none that is fast and exact ----

// tanh(x) for |x| up to kSmallTanh, to 1e-7 of it: a least squares fit of tanh(x) / x, weighted to an even error.
inline constexpr float kSmallTanh = 0.7F;
template <class T>
constexpr T tanh_of_small(T x) {
  const T y = x * x;
  const T p = (((y * T(-0.00515509024F) + T(0.0201116297F)) * y + T(-0.0535669774F)) * y + T(0.133292422F)) * y +
              T(-0.333331972F);
  return x + x * (y * p);
}

// tanh(x) = 1 - 2 / (1 + 2^(2 log2(e) x)): near 0 what is left of the difference is less exact.
template <class T>
constexpr T tanh_by_exp2(T x) {
  return T(1) - T(2) * reciprocal(T(1) + exp2(x * T(2.88539008F)));
}

// ALiBi's term; `distance` is j - (i + shift), formed in integers before it is rounded to T.
template <class T, class S>
constexpr T alibi(T distance, S slope) {
  return abs(distance) * (-slope);
}

}  // namespace FOVEA_ISA
}  // namespace fovea::math

#endif  // FOVEA_MATH_SCORE_H
