// SPDX-License-Identifier: Apache-2.0
//
// A row of a score tile: from dot products to scores, to weights (forward) or to the gradient of the scores
// (backward). The formulas are those of src/math, here with vectors for scalars; what this file adds is where the
// terms of a row lie: bias and mask rows (used in place where they can be read as vectors, otherwise converted into
// a buffer), the interval of the band, the bits of dropout.
#pragma once

#include "cpu/isa/keep.h"
#include "math/band.h"
#include "math/score.h"
#include "math/softmax.h"

namespace fovea::cpu::FOVEA_ISA {

HWY_INLINE math::Band<i64> band_of(const SequenceArgs& sequence) {
  return {sequence.q_len, sequence.k_len, sequence.band_low, sequence.band_high};
}

// ---- the terms of a row ----

// What a row of scores needs beside scale and softcap: nothing; biases or ALiBi; a choice of elements as well.
enum class Work { kPlain, kAdd, kMask };

template <class T>
struct RowTerms {
  const T* bias[2];     // NULL: none
  const u8* mask_bits;  // NULL: none
  bool alibi;
  T slope;
  i64 distance;    // of column 0: j - (i + shift)
  i64 begin, end;  // the columns inside the band and the sequence

  // How much there is to do for each of the columns [0, cols).
  Work work(i64 cols) const {
    if (begin > 0 || end < cols || mask_bits != nullptr) {
      return Work::kMask;
    }
    return bias[0] != nullptr || bias[1] != nullptr || alibi ? Work::kAdd : Work::kPlain;
  }
};

template <class T>
struct RowBuffers {
  T* bias[2];
  u8* mask_bits;
  u8* mask_bytes;

  RowBuffers(Arena& arena, i64 cols) {
    bias[0] = arena.take<T>(padded<T>(cols));
    bias[1] = arena.take<T>(padded<T>(cols));
    mask_bits = arena.take<u8>(bit_row(cols));
    mask_bytes = arena.take<u8>(round_up(cols, 64));
  }
};

template <class T>
const T* bias_row(const Matrix& bias, i64 row, i64 col, i64 cols, i64 k_len, T* buffer) {
  if (bias.type == native_type<T>() && bias.col == 1 && col + cols <= k_len) {
    return reinterpret_cast<const T*>(address(bias, row, col));
  }
  const i64 valid = math::min(cols, k_len - col);
  load_row(bias, row, col, valid, buffer);
  fill(buffer + valid, cols - valid, T(0));
  return buffer;
}

inline const u8* mask_row(const Matrix& mask, i64 row, i64 col, i64 cols, i64 k_len, u8* bytes, u8* bits) {
  constexpr i64 kLanes = lanes<u8>();
  const i64 valid = math::min(cols, k_len - col);
  const u8* from = address(mask, row, col);
  if (mask.col != 1 || valid % kLanes != 0) {
    move_strided<true>(address(mask, row, col), mask.col, bytes, 1, valid);
    fill(bytes + valid, round_up(valid, kLanes) - valid, u8(0));
    from = bytes;
  }
  for (i64 c = 0; c < valid; c += kLanes) {
    const auto takes_part = hn::Ne(hn::LoadU(Tag<u8>(), from + c), hn::Zero(Tag<u8>()));
    hn::StoreMaskBits(Tag<u8>(), takes_part, bits + c / 8);
  }
  return bits;
}

// Columns [col, col + cols) of row `row`; cols is a multiple of a vector.
template <class T>
HWY_INLINE RowTerms<T> terms_of_row(const HeadArgs& head, const SequenceArgs& sequence, i64 row, i64 col, i64 cols,
                                    const RowBuffers<T>& buffers) {
  const math::Interval<i64> keys = band_of(sequence).keys_of(row);
  RowTerms<T> terms;
  for (int n = 0; n < 2; ++n) {
    terms.bias[n] =
        head.bias[n].type != 0 ? bias_row(head.bias[n], row, col, cols, sequence.k_len, buffers.bias[n]) : nullptr;
  }
  terms.mask_bits = head.mask.type != 0
                        ? mask_row(head.mask, row, col, cols, sequence.k_len, buffers.mask_bytes, buffers.mask_bits)
                        : nullptr;
  terms.alibi = head.alibi;
  terms.slope = static_cast<T>(head.slope);
  terms.distance = col - (row + sequence.shift);
  terms.begin = keys.begin - col;
  terms.end = keys.end - col;
  return terms;
}

// The rows of a bias or mask are far apart, often on different pages, and only the kernel knows which comes next. It
// prefetches one row at a time, so that the requests spread over the arithmetic of a strip.
HWY_INLINE void prefetch_terms(const HeadArgs& head, i64 row, i64 col, i64 cols) {
  const Matrix* terms[] = {&head.bias[0], &head.bias[1], &head.mask};
  for (const Matrix* m : terms) {
    if (m->type != 0) {
      prefetch_row(*m, row, col, cols);
    }
  }
}

// j - (i + shift) of consecutive columns, exact as integers.
HWY_INLINE Simd<float> distances(i64 first, float) {
  constexpr i64 kMost = i64(1) << 30;
  if (first < -kMost || first > kMost) {  // what is rounded is the sum, which may not fit 32 bits
    float rounded[lanes<float>()];
    for (i64 n = 0; n < lanes<float>(); ++n) {
      rounded[n] = static_cast<float>(first + n);
    }
    return Simd<float>::load(rounded);
  }
  return hn::ConvertTo(Tag<float>(), Simd<i32>::iota(static_cast<i32>(first)).raw);
}
HWY_INLINE Simd<double> distances(i64 first, double) { return Simd<double>::iota(static_cast<double>(first)); }

template <class T>
struct Scored {
  math::Dual<Simd<T>> score;  // -inf where the element takes no part
  Mask<T> allowed;            // where Work::kMask is compiled in
};

// The scores of columns [col, col + lanes) of a row, and their derivative by the dot product.
template <bool kSoftcap, Work kWork, class T>
HWY_INLINE Scored<T> score_at(const math::Score<T>& score, const RowTerms<T>& terms, i64 col, Simd<T> dot) {
  Scored<T> scored{score.template of_dot_with_derivative<kSoftcap>(dot, Simd<T>(T(1))), {}};
  if constexpr (kWork != Work::kPlain) {
    for (const T* bias : terms.bias) {
      if (bias != nullptr) {
        scored.score = scored.score + Simd<T>::load(bias + col);
      }
    }
    if (terms.alibi) {
      scored.score = scored.score + math::alibi(distances(terms.distance + col, T()), terms.slope);
    }
  }
  if constexpr (kWork == Work::kMask) {
    scored.allowed = hn::AndNot(first_lanes<T>(terms.begin - col), first_lanes<T>(terms.end - col));
    if (terms.mask_bits != nullptr) {
      scored.allowed = hn::And(scored.allowed, bits_at<T>(terms.mask_bits, col));
    }
    scored.score.value = select(scored.allowed, scored.score.value, Simd<T>(T(-kInfinity)));
  }
  return scored;
}

// Calls function<kSoftcap, kWork>(arguments ...), with as much compiled in as a row needs. Softcap dwarfs the rest.
template <class T, class Function>
HWY_INLINE void with_work(const math::Score<T>& score, Work work, Function function) {
  if (score.softcap > 0) {
    work == Work::kMask ? function.template operator()<true, Work::kMask>()
                        : function.template operator()<true, Work::kAdd>();
  } else if (work == Work::kPlain) {
    function.template operator()<false, Work::kPlain>();
  } else if (work == Work::kAdd) {
    function.template operator()<false, Work::kAdd>();
  } else {
    function.template operator()<false, Work::kMask>();
  }
}

// ---- forward ----

// Dot products to scores, in place; the largest of them.
template <bool kSoftcap, Work kWork, class T>
T score_row(const math::Score<T>& score, const RowTerms<T>& terms, i64 cols, T* row) {
  constexpr int kChains = 4;  // a maximum waits for the one before it
  Simd<T> largest[kChains];
  for (Simd<T>& one : largest) {
    one = Simd<T>(T(-kInfinity));
  }
  const auto next = [&](i64 c, Simd<T>& one) HWY_ATTR {
    const Simd<T> s = score_at<kSoftcap, kWork>(score, terms, c, Simd<T>::load(row + c)).score.value;
    one = max(s, one);
    s.store(row + c);
  };
  i64 c = 0;
  for (; c + kChains * lanes<T>() <= cols; c += kChains * lanes<T>()) {
    FOVEA_UNROLL
    for (int n = 0; n < kChains; ++n) {
      next(c + n * lanes<T>(), largest[n]);
    }
  }
  for (; c < cols; c += lanes<T>()) {
    next(c, largest[0]);
  }
  return max_of_lanes(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
}

template <class T>
T score_row(const math::Score<T>& score, const RowTerms<T>& terms, i64 cols, T* row) {
  T largest;
  with_work(score, terms.work(cols),
            [&]<bool kSoftcap, Work kWork>() { largest = score_row<kSoftcap, kWork>(score, terms, cols, row); });
  return largest;
}

// Scores to weights, which may lie where the scores were, those that dropout drops to 0. Returns the sum of all
// weights, dropped or not, in lanes. The weight of the largest score is 1 exactly: a row of a single key has its value
// and its logsumexp to the last bit.
template <class T, class Weight>
Simd<T> weigh_row(T reference, const u8* keep, i64 cols, const T* row, Weight* to) {
  Simd<T> sum(T(0));
  const auto weight = [&](i64 c) HWY_ATTR {
    Simd<T> p = exp_of_negative(Simd<T>::load(row + c) - Simd<T>(reference));
    sum = sum + p;
    return keep != nullptr ? select(bits_at<T>(keep, c), p, Simd<T>(T(0))) : p;
  };
  i64 c = 0;
  for (; c + 2 * lanes<T>() <= cols; c += 2 * lanes<T>()) {
    const Simd<T> first = weight(c);
    store_as(first, weight(c + lanes<T>()), to + c);
  }
  for (; c < cols; c += lanes<T>()) {
    store_as(weight(c), to + c);
  }
  return sum;
}

// ---- backward ----

// Whether a vector that is stored here covers whole parts of a cache line.
template <class T>
bool is_aligned(const T* to) {
  return reinterpret_cast<u64>(to) % (sizeof(T) * lanes<T>()) == 0;
}

// What a row of the backward reads and writes; `p` comes as dot products of queries and keys, `ds` as those of
// grad_out and values.
template <class T>
struct GradRow {
  T reference;
  T delta;
  const u8* keep;  // NULL: no dropout
  T keep_factor;
  T* p;          // becomes what dv is summed with: keep / (1 - p_drop) * p
  T* ds;         // becomes the gradient of the dot products; NULL: not needed
  T* ds_bias;    // gets the gradient of the scores; NULL: not needed
  bool streams;  // ds_bias is not read again: written past the caches
};

template <bool kSoftcap, Work kWork, class T>
void grad_row(const math::Score<T>& score, const RowTerms<T>& terms, i64 cols, const GradRow<T>& row) {
  const Simd<T> zero(T(0));
  for (i64 c = 0; c < cols; c += lanes<T>()) {
    const Scored<T> scored = score_at<kSoftcap, kWork>(score, terms, c, Simd<T>::load(row.p + c));
    Simd<T> p = math::probability(scored.score.value, Simd<T>(row.reference));
    if constexpr (kWork == Work::kMask) {
      p = select(scored.allowed, p, zero);  // where the logsumexp is NaN, -inf minus it is NaN
    }
    const auto after_dropout = [&](Simd<T> x) {
      return row.keep != nullptr ? select(bits_at<T>(row.keep, c), x * Simd<T>(row.keep_factor), zero) : x;
    };
    after_dropout(p).store(row.p + c);
    if (row.ds != nullptr) {
      const Simd<T> dp = after_dropout(Simd<T>::load(row.ds + c));
      const Simd<T> ds = math::grad_score<true>(p, dp, Simd<T>(row.delta));
      (ds * scored.score.derivative).store(row.ds + c);
      if (row.streams) {
        hn::Stream(ds.raw, Tag<T>(), row.ds_bias + c);
      } else if (row.ds_bias != nullptr) {
        ds.store(row.ds_bias + c);
      }
    }
  }
}

template <class T>
void grad_row(const math::Score<T>& score, const RowTerms<T>& terms, i64 cols, const GradRow<T>& row) {
  with_work(score, terms.work(cols),
            [&]<bool kSoftcap, Work kWork>() { grad_row<kSoftcap, kWork>(score, terms, cols, row); });
}

}  // namespace fovea::cpu::FOVEA_ISA
