// SPDX-License-Identifier: Apache-2.0
//
// What a Problem and a Call say about themselves: everything that is derived from their fields stands here, so
// that backends, planner and tests derive it alike.
#include "core/problem.h"

#include <cmath>

namespace fovea {

std::string_view name_of(DType type) {
  switch (type) {
    case DType::kNone:
      return "none";
    case DType::kFp32:
      return "fp32";
    case DType::kFp16:
      return "fp16";
    case DType::kBf16:
      return "bf16";
    case DType::kFp64:
      return "fp64";
    case DType::kBool:
      return "bool";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
  }
  return "unknown";
}

std::size_t size_of(DType type) {
  switch (type) {
    case DType::kNone:
      return 0;
    case DType::kBool:
      return 1;
    case DType::kFp16:
    case DType::kBf16:
      return 2;
    case DType::kFp32:
    case DType::kInt32:
      return 4;
    case DType::kFp64:
    case DType::kInt64:
      return 8;
  }
  return 0;
}

double Problem::scale_or_default() const {
  if (scale) {
    return *scale;
  }
  return head_dim > 0 ? 1 / std::sqrt(static_cast<double>(head_dim)) : 1;
}

math::Score<double> Problem::score() const { return math::Score<double>::make(scale_or_default(), softcap); }

math::Band<math::i64> Problem::band(std::int64_t queries, std::int64_t keys) const {
  return math::Band<math::i64>::make(queries, keys, causal, window_left, window_right, top_left);
}

math::DropoutOfHead Call::dropout_of_head(std::int64_t b, std::int64_t head) const {
  // The stream of torch_mem_efficient numbers the elements of a head: Sq * Sk of them if dense; packed,
  // max_seqlen_q * max_seqlen_k, with rows as long as the sequence has keys. Products wrap, as the stream does.
  const auto plane = static_cast<std::uint64_t>(problem.seqlen_q) * static_cast<std::uint64_t>(problem.seqlen_k);
  const std::int64_t row_stride = rows.packed() ? rows.sequence(b).k_len : rows.rows_k;
  return math::DropoutOfHead::make(dropout, dropout_stream(b, head), plane, static_cast<std::uint64_t>(row_stride));
}

}  // namespace fovea
