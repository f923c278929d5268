// SPDX-License-Identifier: Apache-2.0
//
// Softmax over a row whose keys come in blocks, its logsumexp, and its backward. A row that meets no key
// ("dead") has maximum -inf and sum 0 and must give output 0, logsumexp -inf and gradients 0: never NaN. NaN in
// a score that takes part stays NaN. T is a scalar or a vector of scalars, as everywhere in math/.
#ifndef FOVEA_MATH_SOFTMAX_H
#define FOVEA_MATH_SOFTMAX_H

#include "scalar.h"

namespace fovea::math {
inline namespace FOVEA_ISA {

// What exponents are taken relative to: the running maximum; 0 for a row without a finite score so far, where
// -inf - (-inf) would be NaN.
template <class T>
constexpr T reference_of(T running_max) {
  return select(running_max == T(-Limits<T>::infinity()), T(0), running_max);
}

// The weight of a score relative to a reference. Subtracted before anything is scaled: with biases of 1e30 a
// fused multiply-add of scaled numbers is off by more than the whole range of exp.
template <class T>
constexpr T weight(T score, T reference) {
  return exp(score - reference);
}

// What sums taken relative to `before` are multiplied by when the maximum rises to `after`.
template <class T>
constexpr T correction(T max_before, T max_after) {
  return exp(max_before - reference_of(max_after));
}

// A sink is one more logit with no value: it joins the sum after the last key.
template <class T>
constexpr T sum_with_sink(T sum, T reference, T sink) {
  return sum + weight(sink, reference);
}

// log of the sum of exp(score); -inf for a dead row.
template <class T>
constexpr T logsumexp(T reference, T sum) {
  return select(sum == T(0), T(-Limits<T>::infinity()), reference + log(sum));
}

// 1 / sum, and 0 for a dead row.
template <class T>
constexpr T inverse_of_sum(T sum) {
  return select(sum == T(0), T(0), T(1) / sum);
}

// ---- in base 2 ----
// For kernels whose exponential is of base 2 and whose scores are multiples of some positive number; `unit` is log2(e)
// times it. exp(natural score) is exp2(score * unit).

inline constexpr float kLog2E = 1.44269504F;

// weight() by one fused multiply-add; reference_in_base_2 is reference * unit. That product is rounded: all weights of
// a row are off by one common factor, which is harmless while the reference is small.
template <class T>
constexpr T weight_base_2(T score, T unit, T reference_in_base_2) {
  return exp2(score * unit - reference_in_base_2);
}

// Where a reference (in base 2) is larger, weights are made by the next forms.
inline constexpr float kLargestFusedReference = 1024;

// weight() times 2^lift for any score: subtracted before it is scaled.
template <class T>
constexpr T weight_base_2_of_difference(T score, T reference, T unit, T lift) {
  return exp2((score - reference) * unit + lift);
}

// ---- backward: p from the saved logsumexp ----

// The logsumexp that the backward subtracts: +inf for a dead row, so that every p there is exp(-inf) = 0.
template <class T>
constexpr T backward_reference(T lse) {
  return select(lse == T(-Limits<T>::infinity()), T(Limits<T>::infinity()), lse);
}

// p = exp(s - lse): the weight relative to the logsumexp.
template <class T>
constexpr T probability(T score, T reference) {
  return weight(score, reference);
}

// delta_i = <do_i, o_i> - dlse_i: what every dp of the row is lowered by.
template <class T>
constexpr T delta(T dot_of_grad_out_and_out, T grad_lse) {
  return dot_of_grad_out_and_out - grad_lse;
}

// ds = p * (dp - delta), dp = keep / (1 - p_drop) * <do_i, v_j>. kMayHide: 0 where p is, since dp of a hidden pair may
// be infinite; to be left out only where no pair is hidden.
template <bool kMayHide = false, class T>
constexpr T grad_score(T p, T dp, T delta) {
  const T ds = p * (dp - delta);
  if constexpr (kMayHide) {
    return select(p == T(0), T(0), ds);
  }
  return ds;
}

// One row's share of the sink's gradient.
template <class T>
constexpr T grad_sink(T sink, T reference, T delta) {
  return T(0) - probability(sink, reference) * delta;
}

}  // namespace FOVEA_ISA
}  // namespace fovea::math

#endif  // FOVEA_MATH_SOFTMAX_H
