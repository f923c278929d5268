// SPDX-License-Identifier: Apache-2.0
//
// The pass before the backward: what its tiles need of each query, logsumexp and delta_i = <do_i, o_i> - dlse_i, and
// the gradient of the sink, which needs nothing else.
#pragma once

#include "cpu/isa/backward_operands.h"
#include "math/softmax.h"

namespace fovea::cpu::FOVEA_ISA {

// <do_i, o_i> of a vector's worth of rows, lane by lane and column by column: summed by `Dot` exactly as the products
// sum dP, so that dp - delta is 0, not a rounding error, where a row has one key.
template <class T, class Dot>
struct RowDots {
  i64 ld;
  T* rows;
  T* out;
  T* grad_out;

  RowDots(Arena& arena, i64 cols)
      : ld(leading<T>(cols)),
        rows(arena.take<T>(lanes<T>() * ld)),
        out(arena.take<T>(padded<T>(cols) * lanes<T>())),
        grad_out(arena.take<T>(padded<T>(cols) * lanes<T>())) {}

  Simd<T> dot(const Matrix& a, const Matrix& b, i64 row, i64 count, i64 cols) const {
    load_transposed(a, row, count, cols, rows, ld, out, lanes<T>());
    load_transposed(b, row, count, cols, rows, ld, grad_out, lanes<T>());
    Dot dot;
    for (i64 c = 0; c < cols; ++c) {
      dot.add(Simd<T>::load(grad_out + c * lanes<T>()), Simd<T>::load(out + c * lanes<T>()));
    }
    return dot.total();
  }
};

template <class Operands>
void prepare(const PrepareTask& task, void* scratch) {
  using T = typename Operands::Number;
  const Options& options = *task.options;
  const i64 rows = task.row_end - task.row_begin;
  Arena arena(scratch);
  const RowDots<T, typename Operands::Dot> dots(arena, options.head_dim_v);
  T* dot = arena.take<T>(padded<T>(options.block_rows));
  T* grad_lse = arena.take<T>(options.block_rows);
  T* reference = static_cast<T*>(task.reference) + task.row_begin;
  T* delta = static_cast<T*>(task.delta) + task.row_begin;
  load_row(task.lse, 0, task.row_begin, rows, reference);
  if (task.grad_lse.type != 0) {
    load_row(task.grad_lse, 0, task.row_begin, rows, grad_lse);
  } else {
    fill(grad_lse, rows, T(0));
  }
  for (i64 r = 0; r < rows; r += lanes<T>()) {
    const i64 some = math::min(lanes<T>(), rows - r);
    dots.dot(task.out, task.grad_out, task.row_begin + r, some, options.head_dim_v).store(dot + r);
  }
  double sink_sum = 0;
  for (i64 r = 0; r < rows; ++r) {
    reference[r] = math::backward_reference(reference[r]);
    const bool dead = reference[r] == T(kInfinity);
    delta[r] = dead ? T(0) : math::delta(dot[r], grad_lse[r]);
    if (task.grad_sink != nullptr && !dead) {
      sink_sum += math::grad_sink<double>(task.sink, static_cast<double>(reference[r]), static_cast<double>(delta[r]));
    }
  }
  if (task.grad_sink != nullptr) {
    *task.grad_sink = sink_sum;
  }
}

}  // namespace fovea::cpu::FOVEA_ISA
