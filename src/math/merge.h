// SPDX-License-Identifier: Apache-2.0
//
// Results over some keys and over others, merged by their logsumexp: what accumulating into out means.
#ifndef FOVEA_MATH_MERGE_H
#define FOVEA_MATH_MERGE_H

#include "softmax.h"

namespace fovea::math {
inline namespace FOVEA_ISA {

template <class T>
struct Merge {
  T lse;
  T of_old;  // the factors of both results
  T of_new;
};

// A row without keys has the logsumexp -inf and the result 0, also merged with another one.
template <class T>
constexpr Merge<T> merge(T lse_old, T lse_new) {
  const T reference = reference_of(max(lse_old, lse_new));
  const T old_weight = weight(lse_old, reference);
  const T new_weight = weight(lse_new, reference);
  const T sum = old_weight + new_weight;
  const T inverse = inverse_of_sum(sum);
  return {logsumexp(reference, sum), old_weight * inverse, new_weight * inverse};
}

}  // namespace FOVEA_ISA
}  // namespace fovea::math

#endif  // FOVEA_MATH_MERGE_H
