// SPDX-License-Identifier: Apache-2.0
//
// One (batch entry, query head) of a problem, as both directions of the reference see it: which pairs (i, j) take
// part, their scores, what dropout makes of them; rows of the caller's tensors; and the gradient of a bias in its
// own shape. T is double in the reference; the checks take float to see what fp32 sums would cost.
#pragma once

#include <vector>

#include "core/element.h"
#include "core/problem.h"
#include "math/merge.h"
#include "math/softmax.h"

namespace fovea::reference {

using math::i64;

// Rows [begin, begin + count) of a head, `width` elements each.
template <class T>
std::vector<T> read_rows(const Call& call, const View& view, i64 b, i64 head, i64 begin, i64 count, i64 width) {
  std::vector<T> values(static_cast<std::size_t>(count * width));
  for (i64 row = 0; row < count; ++row) {
    const i64 base = call.rows.offset(view.strides, b, head, begin + row);
    for (i64 col = 0; col < width; ++col) {
      values[static_cast<std::size_t>(row * width + col)] =
          static_cast<T>(load(view.data, view.type, base + col * view.strides.col));
    }
  }
  return values;
}

// `out` and its logsumexp become what is to be written over the result that is there. Returns the new logsumexp.
template <class T>
T merge_row(const Call& call, i64 b, i64 h, i64 row, T lse, std::vector<T>& out) {
  const auto before = read_rows<T>(call, call.out, b, h, row, 1, static_cast<i64>(out.size()));
  const math::Merge<T> merged = math::merge(read_rows<T>(call, call.lse, b, h, row, 1, 1)[0], lse);
  for (std::size_t d = 0; d < out.size(); ++d) {
    out[d] = out[d] * merged.of_new + before[d] * merged.of_old;
  }
  return merged.lse;
}

// Adds to what is there, or stores: rounded once.
inline void put(const View& view, i64 element, double value) {
  const double before = view.accumulate ? load(view.data, view.type, element) : 0;
  store(view.data, view.type, element, before + value);
}

// The inverse of read_rows.
template <class T>
void write_rows(const Call& call, const View& view, i64 b, i64 head, i64 begin, i64 count, i64 width, const T* values) {
  for (i64 row = 0; row < count; ++row) {
    const i64 base = call.rows.offset(view.strides, b, head, begin + row);
    for (i64 col = 0; col < width; ++col) {
      put(view, base + col * view.strides.col, values[row * width + col]);
    }
  }
}

template <class T>
T dot(const T* a, const T* b, i64 length) {
  T sum = 0;
  for (i64 d = 0; d < length; ++d) {
    sum += a[d] * b[d];
  }
  return sum;
}

template <class T>
void add_scaled(T* to, T factor, const T* from, i64 length) {
  for (i64 d = 0; d < length; ++d) {
    to[d] += factor * from[d];
  }
}

template <class T>
class Head {
 public:
  Head(const Call& call, i64 b, i64 h)
      : call_(call),
        b_(b),
        h_(h),
        sequence_(call.rows.sequence(b)),
        band_(call.problem.band(b, sequence_)),
        score_(math::Score<T>::make(call.problem.scale_or_default(), call.problem.softcap)),
        dropout_(call.dropout_of_head(b, h)),
        shift_(call.problem.shift(b, sequence_)),
        first_query_(call.problem.first_query(b)),
        first_key_(call.problem.first_key(b)),
        slope_(call.alibi_slopes ? at(call.alibi_slopes, 0, 0) : 0),
        sink_(call.sink ? at(call.sink, 0, 0) : -math::Limits<T>::infinity()) {}

  const math::Sequence& sequence() const { return sequence_; }
  T sink() const { return sink_; }  // -inf without one: exp(sink) = 0

  bool allowed(i64 i, i64 j) const { return band_.allowed(i, j) && (!call_.mask || at(call_.mask, i, j) != 0); }

  // The score and its derivative by the dot product.
  math::Dual<T> score(i64 i, i64 j, T dot) const {
    math::Dual<T> s = score_.softcap > 0 ? score_.template of_dot_with_derivative<true>(dot, T(1))
                                         : score_.template of_dot_with_derivative<false>(dot, T(1));
    if (call_.bias) {
      s = s + at(call_.bias, i, j);
    }
    if (call_.bias2) {
      s = s + at(call_.bias2, i, j);
    }
    if (call_.alibi_slopes) {
      s = s + math::alibi(static_cast<T>(j - (i + shift_)), slope_);
    }
    return s;
  }

  // keep / (1 - p_drop): 0 where the element is dropped.
  T keep(i64 i, i64 j) const {
    const math::Dropout& dropout = call_.dropout;
    const bool kept =
        !dropout.keeps_nothing() && (!dropout.active() || dropout_.keep(first_query_ + i, first_key_ + j));
    return kept ? static_cast<T>(dropout.factor()) : T(0);
  }

 private:
  T at(const View& view, i64 i, i64 j) const {
    const i64 element = call_.rows.offset(view.strides, b_, h_, i) + j * view.strides.col;
    return static_cast<T>(load(view.data, view.type, element));
  }

  const Call& call_;
  i64 b_;
  i64 h_;
  math::Sequence sequence_;
  math::Band<i64> band_;
  math::Score<T> score_;
  math::DropoutOfHead dropout_;
  i64 shift_;
  i64 first_query_;  // the positions of query 0 and key 0, from which dropout by rule fovea counts
  i64 first_key_;
  T slope_;
  T sink_;
};

// The gradient of a bias in its shape before broadcasting.
template <class T>
class BiasGradient {
 public:
  BiasGradient(const Call& call, const View& view, const PlaneTraits& traits)
      : call_(call),
        view_(view),
        batch1_(traits.extents.batch1 ? call.rows.batch1 : 1),
        batch2_(traits.extents.batch2 ? call.rows.batch2 : 1),
        heads_(traits.extents.head ? call.rows.heads_q : 1),
        queries_(traits.extents.query ? call.problem.seqlen_q : 1),
        keys_(traits.extents.key ? call.problem.seqlen_k : 1),
        sums_(static_cast<std::size_t>(view ? batch1_ * batch2_ * heads_ * queries_ * keys_ : 0)) {}

  void add(i64 b, i64 h, i64 i, i64 j, T grad) {
    if (view_) {
      const i64 b1 = b / call_.rows.batch2 % batch1_;
      const i64 b2 = b % call_.rows.batch2 % batch2_;
      const i64 plane = (b1 * batch2_ + b2) * heads_ + h % heads_;
      sums_[(plane * queries_ + i % queries_) * keys_ + j % keys_] += grad;
    }
  }

  std::vector<T>& sums() { return sums_; }

  void write() const {
    const math::Strides& s = view_.strides;
    for (std::size_t n = 0; n < sums_.size(); ++n) {
      i64 rest = static_cast<i64>(n);
      const i64 j = rest % keys_;
      const i64 i = (rest /= keys_) % queries_;
      const i64 h = (rest /= queries_) % heads_;
      const i64 b2 = (rest /= heads_) % batch2_;
      const i64 b1 = rest / batch2_;
      put(view_, b1 * s.batch1 + b2 * s.batch2 + h * s.head + i * s.row + j * s.col, sums_[n]);
    }
  }

 private:
  const Call& call_;
  const View& view_;
  i64 batch1_, batch2_, heads_, queries_, keys_;
  std::vector<T> sums_;
};

}  // namespace fovea::reference
