// SPDX-License-Identifier: Apache-2.0
//
// One (batch entry, query head) of a problem, as both directions of the reference see it: which pairs (i, j) take
// part, their scores, what dropout makes of them, and rows of the caller's tensors as doubles.
#pragma once

#include <vector>

#include "core/element.h"
#include "core/problem.h"
#include "math/softmax.h"

namespace fovea::reference {

using math::i64;

// Rows [begin, begin + count) of a head, `width` elements each, as doubles.
inline std::vector<double> read_rows(const Call& call, const View& view, i64 b, i64 head, i64 begin, i64 count,
                                     i64 width) {
  std::vector<double> values(static_cast<std::size_t>(count * width));
  for (i64 row = 0; row < count; ++row) {
    const i64 base = call.rows.offset(view.strides, b, head, begin + row);
    for (i64 col = 0; col < width; ++col) {
      values[static_cast<std::size_t>(row * width + col)] = load(view.data, view.type, base + col * view.strides.col);
    }
  }
  return values;
}

// The inverse: each element is rounded once.
inline void write_rows(const Call& call, const View& view, i64 b, i64 head, i64 begin, i64 count, i64 width,
                       const double* values) {
  for (i64 row = 0; row < count; ++row) {
    const i64 base = call.rows.offset(view.strides, b, head, begin + row);
    for (i64 col = 0; col < width; ++col) {
      store(view.data, view.type, base + col * view.strides.col, values[row * width + col]);
    }
  }
}

inline double dot(const double* a, const double* b, i64 length) {
  double sum = 0;
  for (i64 d = 0; d < length; ++d) {
    sum += a[d] * b[d];
  }
  return sum;
}

class Head {
 public:
  Head(const Call& call, i64 b, i64 h)
      : call_(call),
        b_(b),
        h_(h),
        sequence_(call.rows.sequence(b)),
        band_(call.problem.band(sequence_.q_len, sequence_.k_len)),
        score_(call.problem.score()),
        dropout_(call.dropout_of_head(b, h)),
        shift_(call.problem.top_left ? 0 : sequence_.k_len - sequence_.q_len),
        slope_(call.alibi_slopes ? at(call.alibi_slopes, 0, 0) : 0),
        sink_(call.sink ? at(call.sink, 0, 0) : -math::Limits<double>::infinity()) {}

  const math::Sequence& sequence() const { return sequence_; }
  double sink() const { return sink_; }  // -inf without one: exp(sink) = 0

  bool allowed(i64 i, i64 j) const { return band_.allowed(i, j) && (!call_.mask || at(call_.mask, i, j) != 0); }

  // The score and its derivative by the dot product.
  math::Dual<double> score(i64 i, i64 j, double dot) const {
    math::Dual<double> s = score_.softcap > 0 ? score_.of_dot_with_derivative<true>(dot, 1.0)
                                              : score_.of_dot_with_derivative<false>(dot, 1.0);
    if (call_.bias) {
      s = s + at(call_.bias, i, j);
    }
    if (call_.bias2) {
      s = s + at(call_.bias2, i, j);
    }
    if (call_.alibi_slopes) {
      s = s + math::alibi(static_cast<double>(j - (i + shift_)), slope_);
    }
    return s;
  }

  // keep / (1 - p_drop): 0 where the element is dropped.
  double keep(i64 i, i64 j) const {
    const math::Dropout& dropout = call_.dropout;
    return !dropout.active() ? 1 : !dropout.keeps_nothing() && dropout_.keep(i, j) ? dropout.factor() : 0;
  }

 private:
  double at(const View& view, i64 i, i64 j) const {
    return load(view.data, view.type, call_.rows.offset(view.strides, b_, h_, i) + j * view.strides.col);
  }

  const Call& call_;
  i64 b_;
  i64 h_;
  math::Sequence sequence_;
  math::Band<i64> band_;
  math::Score<double> score_;
  math::DropoutOfHead dropout_;
  i64 shift_;
  double slope_;
  double sink_;
};

}  // namespace fovea::reference
