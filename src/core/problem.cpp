// SPDX-License-Identifier: Apache-2.0
//
// What a Problem and a Call say about themselves: everything that is derived from their fields stands here, so
// that backends, planner and tests derive it alike.
#include "core/problem.h"

#include <cmath>
#include <cstring>

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

std::int64_t Problem::first_query(std::int64_t b) const {
  return position_q + (positions_q.empty() ? 0 : positions_q[static_cast<std::size_t>(b)]);
}

std::int64_t Problem::first_key(std::int64_t b) const {
  return position_k + (positions_k.empty() ? 0 : positions_k[static_cast<std::size_t>(b)]);
}

std::int64_t Problem::shift(std::int64_t b, const math::Sequence& sequence) const {
  if (positions) {
    return first_query(b) - first_key(b);
  }
  return top_left ? 0 : sequence.k_len - sequence.q_len;
}

math::Band<math::i64> Problem::band(std::int64_t b, const math::Sequence& sequence) const {
  const auto make = [&](bool no_shift) {
    return math::Band<math::i64>::make(sequence.q_len, sequence.k_len, causal, window_left, window_right, no_shift);
  };
  if (!positions) {
    return make(top_left);
  }
  math::Band<math::i64> band = make(true);
  band.low += shift(b, sequence);
  band.high += shift(b, sequence);
  return band;
}

Results every_gradient(const Problem& problem) {
  Results all;
  all.q = all.k = all.v = true;
  all.bias = bool(problem.bias);
  all.bias2 = bool(problem.bias2);
  all.sink = problem.sink;
  return all;
}

Problem backward_of(Problem problem) {
  if (problem.direction == Direction::kForward) {
    problem.direction = Direction::kBackward;
    problem.lse = false;
    problem.accumulate = {};
    problem.need = every_gradient(problem);
  }
  return problem;
}

std::uint64_t Call::dropout_stream(std::int64_t b, std::int64_t head) const {
  if (streams && streams.data != nullptr) {
    std::int64_t number = 0;
    std::memcpy(&number, static_cast<const std::int64_t*>(streams.data) + rows.offset(streams.strides, b, head, 0),
                sizeof(number));
    return static_cast<std::uint64_t>(number);
  }
  return static_cast<std::uint64_t>(b) * static_cast<std::uint64_t>(problem.heads_q) + static_cast<std::uint64_t>(head);
}

math::DropoutOfHead Call::dropout_of_head(std::int64_t b, std::int64_t head) const {
  // The stream of torch_mem_efficient numbers the elements of a head: Sq * Sk of them if dense; packed,
  // max_seqlen_q * max_seqlen_k, with rows as long as the sequence has keys. Products wrap, as the stream does.
  const auto plane = static_cast<std::uint64_t>(problem.seqlen_q) * static_cast<std::uint64_t>(problem.seqlen_k);
  const std::int64_t row_stride = rows.packed() ? rows.sequence(b).k_len : rows.rows_k;
  return math::DropoutOfHead::make(dropout, dropout_stream(b, head), plane, static_cast<std::uint64_t>(row_stride));
}

}  // namespace fovea
