// SPDX-License-Identifier: Apache-2.0
//
// Rows that belong to no sequence: between a sequence's last row and the next one's first, and after the last. They
// exist where sequences are packed or only a part of their rows is used.
#ifndef FOVEA_MATH_MISSING_H
#define FOVEA_MATH_MISSING_H

#include "rows.h"

namespace fovea::math {
inline namespace FOVEA_ISA {

// Rows [first, end) of batch entry b, counted as Rows::offset counts them.
struct Gap {
  i64 b;
  i64 first;
  i64 end;
};

constexpr bool may_miss_rows(const Rows& rows, bool of_keys) {
  return rows.is_packed || (of_keys ? rows.used_k : rows.used_q);
}

constexpr i64 gaps(const Rows& rows) { return rows.batch() + (rows.is_packed ? 1 : 0); }

// Gap number n < gaps(rows): behind sequence n; packed, the last one is what lies behind them all where there are none.
constexpr Gap gap(const Rows& rows, bool of_keys, i64 n) {
  const Lengths& starts = of_keys ? rows.cu_k : rows.cu_q;
  const i64 all = of_keys ? rows.rows_k : rows.rows_q;
  if (n == rows.batch()) {
    return {0, min(max(starts[n], i64(0)), all), all};
  }
  const Sequence sequence = rows.sequence(n);
  const i64 begin = of_keys ? sequence.k_begin : sequence.q_begin;
  const i64 length = of_keys ? sequence.k_len : sequence.q_len;
  return {n, begin + length, rows.is_packed ? min(max(starts[n + 1], begin), all) : all};
}

}  // namespace FOVEA_ISA
}  // namespace fovea::math

#endif  // FOVEA_MATH_MISSING_H
