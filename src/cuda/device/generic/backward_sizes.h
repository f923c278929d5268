// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of the backward take for a Spec: keys and queries of a block, bytes of shared memory. Asked by the
// planner on the host and by the kernels themselves, so that the two cannot disagree.
#pragma once

#include "cuda/device/generic/sizes.h"
#include "cuda/device/generic/spec.h"

namespace fovea::cuda {

// Row vectors of a step: logsumexp and delta.
constexpr int row_vector_bytes(int queries) { return 8 * queries; }

// Of a block of backward_prepare.
constexpr int kBackwardPrepareThreads = 128;

// Rows of dq that a block of backward_convert has.
constexpr int kConvertRows = 64;

// Columns that the kernels are compiled for, which their grids of warps divide: of a tensor of `columns`, beside one of
// `others`. Rows of pairs are twice as long.
constexpr int kMostBackwardColumns = 512;
constexpr int backward_columns(Type type, int columns, int others) {
  const int widest = columns > others ? columns : others;
  const int step = widest > 256 ? 128 : type == Type::kFp32 || widest > 128 ? 32 : 16;
  return (columns + step - 1) / step * step;
}

// ---- generic_backward: keys x queries of a step, K and V once ----

// Whether P and dS are operands as they stand in registers; otherwise both go through shared memory.
constexpr bool backward_in_registers(const BackwardSpec& s) { return s.d <= 64 && s.dv <= 64; }

constexpr int backward_keys(const BackwardSpec& s) {
  return (backward_in_registers(s) ? s.warps : s.grid_s) * s.tiles * 16;
}
// P and dS of a step, as far as they go through shared memory.
constexpr int backward_grad_bytes(const BackwardSpec& s) {
  const int buffers = !backward_in_registers(s) || s.delay ? 2 : 1;
  return backward_in_registers(s) && !s.dq ? 0 : buffers * backward_keys(s) * s.step * element_bytes(s.type);
}
// Sums over queries, of each warp that has a key's.
constexpr int backward_sum_bytes(const BackwardSpec& s) {
  return s.column_sum && !backward_in_registers(s) ? backward_keys(s) * (s.step / s.part) * 4 : 0;
}
constexpr int backward_shared_bytes(const BackwardSpec& s) {
  const int keys = backward_keys(s);
  const int stage = s.step * (s.d + s.dv) * element_bytes(s.type) + row_vector_bytes(s.step) +
                    score_input_bytes(s, s.step, keys, true);
  return keys * (s.d + s.dv) * element_bytes(s.type) + backward_grad_bytes(s) + backward_sum_bytes(s) +
         s.stages * stage;
}

// ---- generic_backward_dq: warps * tiles * 16 queries, `step` keys a step ----

constexpr int backward_dq_rows(const BackwardSpec& s) { return s.warps * s.tiles * 16; }

constexpr int backward_dq_shared_bytes(const BackwardSpec& s) {
  const int rows = backward_dq_rows(s);
  const int stage = s.step * (s.d + s.dv) * element_bytes(s.type) + score_input_bytes(s, rows, s.step, false);
  return rows * (s.d + s.dv) * element_bytes(s.type) + row_vector_bytes(rows) + s.stages * stage;
}

// ---- generic_bias_gradient: grid_s * tiles * 16 queries by `step` keys of one plane ----

constexpr int bias_gradient_rows(const BackwardSpec& s) { return s.grid_s * s.tiles * 16; }

// Whether all entries of a plane's list have the same inputs: then they are copied once.
constexpr bool bias_gradient_once(const BackwardSpec& s) {
  return s.bias != BiasTile::kNone && s.bias2 == BiasTile::kNone && !s.mask && !s.key_term && !s.query_term &&
         !s.ragged;
}
constexpr int bias_gradient_shared_bytes(const BackwardSpec& s) {
  const int rows = bias_gradient_rows(s);
  const int stage = (rows + s.step) * (s.d + s.dv) * element_bytes(s.type);
  const int inputs = score_input_bytes(s, rows, s.step, false) * (bias_gradient_once(s) ? 1 : 2);
  const int work = 2 * row_vector_bytes(rows) + inputs + s.stages * stage;
  const int result = rows * s.step * 4;  // leaves through shared memory
  return work > result ? work : result;
}

// ---- generic_chunked_backward, generic_chunked_backward_dq ----
// Rows by `step`; Spec::d columns at a time, Spec::dv of a result.

constexpr int chunked_backward_rows(const BackwardSpec& s) { return s.warps * s.tiles * 16; }

// One phase's tiles.
constexpr int chunked_backward_buffer_bytes(const BackwardSpec& s) {
  const int products = (chunked_backward_rows(s) + s.step) * s.d * element_bytes(s.type);
  const int result = s.step * s.dv * element_bytes(s.type);
  const int leaving = chunked_backward_rows(s) * s.dv;  // half of what leaves through both buffers
  const int most = products > result ? products : result;
  return most > leaving ? most : leaving;
}
constexpr int chunked_backward_shared_bytes(const BackwardSpec& s, bool transposed) {
  const int rows = chunked_backward_rows(s);
  const int queries = transposed ? s.step : rows;
  const int keys = transposed ? rows : s.step;
  return 2 * chunked_backward_buffer_bytes(s) +
         2 * (row_vector_bytes(queries) + score_input_bytes(s, queries, keys, transposed));
}

// ---- generic_chunked_bias_gradient: warps * tiles * 16 queries by `step` keys ----

constexpr int chunked_bias_gradient_shared_bytes(const BackwardSpec& s) {
  const int rows = chunked_backward_rows(s);
  return 2 * (rows + s.step) * s.d * element_bytes(s.type) +
         2 * (row_vector_bytes(rows) + score_input_bytes(s, rows, s.step, false));
}

}  // namespace fovea::cuda
