// SPDX-License-Identifier: Apache-2.0
//
// Softcap where dot products stay far below the cap, by a polynomial with the scale and the cap in its coefficients:
// fewer operations than tanh of a scaled number, scaled again. See score.h for the formula.
#ifndef FOVEA_MATH_SMALL_CAP_H
#define FOVEA_MATH_SMALL_CAP_H

#include "scalar.h"

namespace fovea::math {
inline namespace FOVEA_ISA {

// softcap * tanh(scale * dot / softcap) of dot products up to `largest`: a polynomial like the one above, with the
// scale and the cap in its coefficients.
template <class S>
struct SmallCap {
  S c0, c1, c2, c3, c4;
  S largest;

  static constexpr SmallCap make(double scale, double softcap, int terms = 5) {
    const double factor = scale / softcap;
    const double square = factor * factor;
    constexpr double kFits[3][5] = {{0.999999895, -0.333285948, 0.130154849, 0, 0},
                                    {0.999999902, -0.333313644, 0.132710006, -0.0475544548, 0},
                                    {0.999999927, -0.333323111, 0.133101845, -0.0521018793, 0.0154759196}};
    const double limit = terms == 3 ? 0.2 : terms == 4 ? 0.4 : 0.6;
    const auto& fit = kFits[terms - 3];
    const double size = factor < 0 ? -factor : factor;
    // Beyond this numbers of 32 bits would not do.
    const bool fits = size >= 0x1p-16 && size <= 0x1p16 && softcap <= 0x1p20 && softcap >= 0x1p-20;
    return {S(fit[0] * scale),
            S(fit[1] * scale * square),
            S(fit[2] * scale * square * square),
            S(fit[3] * scale * square * square * square),
            S(fit[4] * scale * square * square * square * square),
            fits ? S(limit / size) : S(-1)};
  }

  template <int kTerms, class T>
  constexpr T of(T dot) const {
    const T y = dot * dot;
    if constexpr (kTerms == 5) {
      return dot * ((((y * c4 + c3) * y + c2) * y + c1) * y + c0);
    } else if constexpr (kTerms == 4) {
      return dot * (((y * c3 + c2) * y + c1) * y + c0);
    } else {
      return dot * ((y * c2 + c1) * y + c0);
    }
  }
};

}  // namespace FOVEA_ISA
}  // namespace fovea::math

#endif  // FOVEA_MATH_SMALL_CAP_H
