// SPDX-License-Identifier: Apache-2.0
#include "core/clear_rows.h"

#include <cstring>
#include <limits>

#include "math/missing.h"

namespace fovea {
namespace {

// `columns` elements, each the `size` bytes at `value`.
void fill(char* to, std::int64_t stride, std::int64_t columns, const char* value, std::size_t size) {
  for (std::int64_t column = 0; column < columns; ++column) {
    std::memcpy(to + column * stride * static_cast<std::int64_t>(size), value, size);
  }
}

}  // namespace

std::vector<RowOutput> outputs_to_clear(const Call& call) {
  std::vector<RowOutput> outputs;
  const Problem& p = call.problem;
  const RowOutput all[] = {
      {&call.out, false, p.heads_q, p.head_dim_v, false},   {&call.lse, false, p.heads_q, 1, true},
      {&call.grad_q, false, p.heads_q, p.head_dim, false},  {&call.grad_k, true, p.heads_k, p.head_dim, false},
      {&call.grad_v, true, p.heads_k, p.head_dim_v, false},
  };
  const bool forward = p.direction == Direction::kForward;
  for (const RowOutput& output : all) {
    const bool is_written = forward == (output.view == &call.out || output.view == &call.lse);
    const bool has_elements = output.heads > 0 && output.columns > 0;
    const bool is_kept = output.view->accumulate || (output.is_lse && p.accumulate.out);
    if (is_written && !is_kept && has_elements && *output.view && math::may_miss_rows(call.rows, output.of_keys)) {
      outputs.push_back(output);
    }
  }
  return outputs;
}

math::Rows rows_to_clear(const Call& call) {
  math::Rows rows = call.rows;
  if (rows.batch() == 0) {
    rows.batch1 = 0;
    rows.batch2 = 1;  // Rows::offset divides by it
  }
  return rows;
}

void clear_rows(const Call& call) {
  if (!call.problem.clear_rows) {
    return;
  }
  const math::Rows rows = rows_to_clear(call);
  const double infinity = -std::numeric_limits<double>::infinity();
  const float short_infinity = -std::numeric_limits<float>::infinity();
  for (const RowOutput& output : outputs_to_clear(call)) {
    const View& view = *output.view;
    const std::size_t size = size_of(view.type);
    char value[sizeof(double)] = {};
    if (output.is_lse) {
      std::memcpy(value, view.type == DType::kFp64 ? static_cast<const void*>(&infinity) : &short_infinity, size);
    }
    for (std::int64_t n = 0; n < math::gaps(rows); ++n) {
      const math::Gap gap = math::gap(rows, output.of_keys, n);
      for (std::int64_t row = gap.first; row < gap.end; ++row) {
        for (std::int64_t head = 0; head < output.heads; ++head) {
          const std::int64_t at = rows.offset(view.strides, gap.b, head, row);
          fill(static_cast<char*>(view.data) + at * static_cast<std::int64_t>(size), view.strides.col, output.columns,
               value, size);
        }
      }
    }
  }
}

}  // namespace fovea
