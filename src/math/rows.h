// SPDX-License-Identifier: Apache-2.0
//
// The addresses of rows: dense or packed sequences, grouped heads and the two-level batch are coordinate systems, not
// features. A kernel uses only the sequence of a batch entry, and offsets.
#ifndef FOVEA_MATH_ROWS_H
#define FOVEA_MATH_ROWS_H

#include "scalar.h"

namespace fovea::math {
inline namespace FOVEA_ISA {

// Element strides of a tensor by logical coordinates; 0 where it is broadcast. `row` runs over queries (keys
// for k and v), `col` over head_dim; for bias and mask `row` is the query and `col` the key.
struct Strides {
  i64 batch1 = 0;
  i64 batch2 = 0;
  i64 head = 0;
  i64 row = 0;
  i64 col = 0;
};

// The rows of one batch entry: where they begin in a packed tensor (0 if dense) and how many exist.
struct Sequence {
  i64 q_begin;
  i64 q_len;
  i64 k_begin;
  i64 k_len;
};

// An int32 or int64 vector in the caller's memory, or nothing.
struct Lengths {
  const void* data = nullptr;
  bool is_64_bit = false;
  i64 stride = 1;

  constexpr explicit operator bool() const { return data != nullptr; }
  constexpr i64 operator[](i64 index) const {
    return is_64_bit ? static_cast<const i64*>(data)[index * stride] : static_cast<const i32*>(data)[index * stride];
  }
};

struct Rows {
  i64 batch1 = 1;
  i64 batch2 = 1;
  i64 heads_q = 1;
  i64 heads_k = 1;
  i64 rows_q = 0;  // dense: Sq; packed: total_q
  i64 rows_k = 0;
  i64 limit_q = 0;  // the longest that a sequence may be: Sq, or packed, the lesser of max_seqlen_q and total_q
  i64 limit_k = 0;
  bool is_packed = false;  // by cu_q and cu_k, which may lie where they cannot be read yet
  Lengths cu_q;
  Lengths cu_k;
  Lengths used_q;
  Lengths used_k;

  constexpr bool packed() const { return is_packed; }
  constexpr i64 batch() const { return batch1 * batch2; }
  constexpr i64 head_k(i64 head_q) const { return head_q / (heads_q / heads_k); }

  // Lengths that lie on a device cannot be checked beforehand: they are clamped, so that nothing outside the
  // tensors is ever touched.
  constexpr Sequence sequence(i64 b) const {
    const Extent q = extent(cu_q, used_q, rows_q, limit_q, b);
    const Extent k = extent(cu_k, used_k, rows_k, limit_k, b);
    return {q.begin, q.length, k.begin, k.length};
  }

  constexpr i64 offset(const Strides& strides, i64 b, i64 head, i64 row) const {
    return (b / batch2) * strides.batch1 + (b % batch2) * strides.batch2 + head * strides.head + row * strides.row;
  }

 private:
  struct Extent {
    i64 begin;
    i64 length;
  };

  static constexpr Extent extent(const Lengths& cu, const Lengths& used, i64 rows, i64 limit, i64 b) {
    i64 begin = 0;
    i64 length = rows;
    if (cu) {
      begin = min(max(cu[b], i64(0)), rows);
      length = min(min(max(cu[b + 1], begin), rows) - begin, limit);
    }
    if (used) {
      length = min(length, max(used[b], i64(0)));
    }
    return {begin, length};
  }
};

}  // namespace FOVEA_ISA
}  // namespace fovea::math

#endif  // FOVEA_MATH_ROWS_H
