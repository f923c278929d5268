// SPDX-License-Identifier: Apache-2.0
//
// Softcap where dot products stay far below the cap, by a polynomial with the scale and the cap in its coefficients:
// fewer operations than tanh of a scaled number, scaled again. See score.h for the formula.
#ifndef FOVEA_MATH_SMALL_CAP_H
#define FOVEA_MATH_SMALL_CAP_H

#include "scalar.h"

namespace fovea::math {
inline namespace FOVEA_ISA {

// softcap * tanh(scale * dot / softcap), to 1e-7 of it, of dot products up to `largest`; of none where that is
// negative.
template <class S>
struct SmallCap {
  S c0 = 0, c1 = 0, c2 = 0, c3 = 0;
  S largest = -1;

  static constexpr SmallCap make(double scale, double softcap) {
    // tanh(x) / x in powers of x^2, for x up to kLimit.
    constexpr double kLimit = 0.4;
    constexpr double kFit[] = {0.999999902, -0.333313644, 0.132710006, -0.0475544548};
    const double factor = scale / softcap;
    const double size = factor < 0 ? -factor : factor;
    const double square = factor * factor;
    // Beyond this powers of it leave the range of S = float.
    const bool fits = size >= 0x1p-16 && size <= 0x1p16 && softcap <= 0x1p20 && softcap >= 0x1p-20;
    return {S(kFit[0] * scale), S(kFit[1] * scale * square), S(kFit[2] * scale * square * square),
            S(kFit[3] * scale * square * square * square), fits ? S(kLimit / size) : S(-1)};
  }

  template <class T>
  constexpr T of(T dot) const {
    const T y = dot * dot;
    return dot * (((y * c3 + c2) * y + c1) * y + c0);
  }

  // In as many operations on a GPU: the term goes into the last of them.
  template <class T>
  constexpr T of_plus(T dot, T term) const {
    return of(dot) + term;
  }
};

}  // namespace FOVEA_ISA
}  // namespace fovea::math

#endif  // FOVEA_MATH_SMALL_CAP_H
