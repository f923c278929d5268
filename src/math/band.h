// SPDX-License-Identifier: Apache-2.0
//
// Causal and windowed attention as intervals: query i may meet the keys
//
//     i + low <= j <= i + high,   0 <= j < seqlen_k
//
// with low = shift - left and high = shift + right. Element predicate, loop bounds, tile classes and the
// backward's range of queries are all derived from these two numbers, so they cannot disagree.
// A mask tensor is not part of the band: it is an element's own matter.
#ifndef FOVEA_MATH_BAND_H
#define FOVEA_MATH_BAND_H

#include "scalar.h"

namespace fovea::math {
inline namespace FOVEA_ISA {

// Half-open: begin <= index < end; empty where end == begin (never less).
template <class Int>
struct Interval {
  Int begin;
  Int end;

  constexpr Int size() const { return end - begin; }
  constexpr bool empty() const { return end <= begin; }
  constexpr bool contains(Int index) const { return begin <= index && index < end; }
  // Steps begin at multiples of `step`: where the first that meets it does, and how many from there on meet it.
  constexpr Int first_step(Int step) const { return begin / step * step; }
  constexpr Int steps_from(Int first, Int step) const { return empty() ? 0 : (end - first + step - 1) / step; }
  friend constexpr bool operator==(Interval a, Interval b) { return a.begin == b.begin && a.end == b.end; }
};

// How much of a tile is inside the band: nothing (skip it), everything (no test an element), or a part.
enum class TileClass { kEmpty, kFull, kEdge };

template <class Int>
struct Band {
  // Beyond any difference of two lengths, and far enough from overflow to be added to one.
  static constexpr Int kUnbounded = Int(1) << (sizeof(Int) * 8 - 3);

  Int seqlen_q;
  Int seqlen_k;
  Int low;   // the first allowed key of query 0, before clamping
  Int high;  // its last one

  // left, right: -1 is unbounded. top_left: shift 0; otherwise seqlen_k - seqlen_q.
  static constexpr Band make(Int seqlen_q, Int seqlen_k, bool causal, i64 left, i64 right, bool top_left) {
    const Int shift = top_left ? 0 : seqlen_k - seqlen_q;
    if (causal) {
      right = 0;
    }
    const Int reach_left = left < 0 || left > i64(kUnbounded) ? kUnbounded : Int(left);
    const Int reach_right = right < 0 || right > i64(kUnbounded) ? kUnbounded : Int(right);
    return {seqlen_q, seqlen_k, shift - reach_left, shift + reach_right};
  }

  // A shift and sides of a window of any size: what no sequence reaches is clamped.
  static constexpr Band of_any_shift(Int seqlen_q, Int seqlen_k, bool causal, i64 left, i64 right, i64 shift) {
    constexpr i64 kFar = i64(1) << 61;  // the sum of two fits
    constexpr i64 kMost = i64(kUnbounded);
    const auto within = [](i64 number, i64 most) { return min(max(number, -most), most); };
    shift = within(shift, kFar);
    right = causal ? 0 : right;
    const i64 low = left < 0 ? -kMost : within(shift - min(left, kFar), kMost);
    const i64 high = right < 0 ? kMost : within(shift + min(right, kFar), kMost);
    return {seqlen_q, seqlen_k, Int(low), Int(high)};
  }

  constexpr bool allowed(Int i, Int j) const { return keys_of(i).contains(j); }

  // The keys that query i meets.
  constexpr Interval<Int> keys_of(Int i) const { return clamped(i + low, i + high + 1, seqlen_k); }

  // The queries that meet key j.
  constexpr Interval<Int> queries_of(Int j) const { return clamped(j - high, j - low + 1, seqlen_q); }

  // The keys that any query of [begin, end) meets, begin < end: the forward's key loop.
  constexpr Interval<Int> keys_of_rows(Int begin, Int end) const {
    return clamped(begin + low, end - 1 + high + 1, seqlen_k);
  }

  // The queries that meet any key of [begin, end), begin < end: the backward's query loop.
  constexpr Interval<Int> queries_of_keys(Int begin, Int end) const {
    return clamped(begin - high, end - 1 - low + 1, seqlen_q);
  }

  // Rows [i, i_end) by keys [j, j_end), both not empty and inside the sequences.
  constexpr TileClass tile(Int i, Int i_end, Int j, Int j_end) const {
    const Int last_i = i_end - 1;
    const Int last_j = j_end - 1;
    if (last_j < i + low || j > last_i + high) {
      return TileClass::kEmpty;
    }
    if (j >= last_i + low && last_j <= i + high) {
      return TileClass::kFull;
    }
    return TileClass::kEdge;
  }

 private:
  static constexpr Interval<Int> clamped(Int begin, Int end, Int length) {
    begin = min(max(begin, Int(0)), length);
    end = min(max(end, begin), length);
    return {begin, end};
  }
};

}  // namespace FOVEA_ISA
}  // namespace fovea::math

#endif  // FOVEA_MATH_BAND_H
