// SPDX-License-Identifier: Apache-2.0
//
// Q, K and V of a forward task as its two products read them: VectorForward by vectors of T, from the caller's type
// converted to T; UnitForward by a matrix unit (AMX, VDPBF16PS, BFMMLA), in bf16. A few rows: isa/forward_rows.h.
#pragma once

#include "cpu/isa/gemm.h"
#include "cpu/isa/tile.h"
#ifdef FOVEA_MATRIX_UNIT
#include "cpu/isa/matrix_unit.h"
#endif

namespace fovea::cpu::FOVEA_ISA {

template <class T>
struct VectorForward {
  using Number = T;  // of scores and sums
  using Weight = T;  // of P as the second product reads it
  struct Unit {      // where the products find queries and values, and which key is the first one
    Operand<T> q, v;
    i64 key;
  };
  static constexpr i64 kStrip = kBlockRows;  // rows of a product
  static constexpr i64 kRowStep = 4;         // products round rows up to this
  static constexpr i64 kKeyStep = 16;        // where a strip's keys begin, from 0
  static constexpr bool kPacks = true;       // K and V, a block at a time
  static constexpr bool kBeside = false;     // whether products run beside vectors
  static constexpr i64 kMostTerms = 256;     // of a sum, whose rounding errors grow with them
  static constexpr i64 padded_keys(i64 keys) { return padded<T>(keys); }

  i64 ld_q, ld_v, ld_s;
  T* q;
  T* k_rows;  // a vector's worth of keys, before they are transposed
  T* k;       // transposed: head_dim rows
  T* v;

  VectorForward(Arena& arena, const Options& options)
      : ld_q(leading<T>(options.head_dim)),
        ld_v(leading<T>(options.head_dim_v)),
        ld_s(leading<T>(options.block_keys)),
        q(arena.take<T>(round_up(options.block_rows, kRowStep) * ld_q)),
        k_rows(arena.take<T>(lanes<T>() * ld_q)),
        k(arena.take<T>(padded<T>(options.head_dim) * ld_s)),
        v(arena.take<T>(options.block_keys * ld_v)) {}

  // Queries [begin, end) of a head as rows from `first` on, in place if they are all rows of the task.
  void load_queries(Unit& unit, const ForwardTask& task, const Matrix& m, i64 begin, i64 end, i64 first) const {
    const i64 cols = task.options->head_dim;
    const i64 rows = task.row_end - task.row_begin;
    if (end - begin == rows && rows % kRowStep == 0 && is_dense<T>(m, cols)) {
      unit.q = {reinterpret_cast<const T*>(address(m, begin, 0)), m.row};
      return;
    }
    load_tile(m, begin, end - begin, cols, q + first * ld_q, ld_q);
    fill(q + rows * ld_q, (round_up(rows, kRowStep) - rows) * ld_q, T(0));
    unit.q = {q, ld_q};
  }

  // Values that few rows meet are not worth a copy.
  void load_keys(Unit& unit, const ForwardTask& task, i64 key, i64 keys) const {
    const Options& options = *task.options;
    unit.key = key;
    load_transposed(task.k, key, keys, options.head_dim, k_rows, ld_q, k, ld_s);
    if (task.row_end - task.row_begin <= 8 * kStrip && is_dense<T>(task.v, options.head_dim_v) &&
        options.head_dim_v == padded<T>(options.head_dim_v)) {
      unit.v = {reinterpret_cast<const T*>(address(task.v, key, 0)), task.v.row};
      return;
    }
    load_tile(task.v, key, keys, options.head_dim_v, v, ld_v);
    unit.v = {v, ld_v};
  }

  // S = Q K^T for rows [row, row + strip) and columns [col, col + cols).
  void scores(Unit& unit, const Options& options, i64 row, i64 strip, i64 col, i64 cols, T* s) const {
    gemm_rows<Lhs::kByRows, T>(strip, cols, options.head_dim, unit.q.from_row(row), {k + col, ld_s}, s, ld_s, false);
  }

  // O += P V; P lies where S was. Sums end at the same keys whatever rows there are.
  void add_values(Unit& unit, const Options& options, i64 strip, i64 col, i64 depth, const T* p, T* o) const {
    for (i64 c = 0, end; c < depth; c = end) {
      const i64 key = unit.key + col + c;
      end = math::min(c + kMostTerms - key % kMostTerms, depth);
      const Operand<T> values = unit.v.from_row(col + c);
      gemm_rows<Lhs::kByRows, T>(strip, padded<T>(options.head_dim_v), end - c, {p + c, ld_s}, values, o, ld_v, true);
    }
  }
};

#ifdef FOVEA_MATRIX_UNIT
struct UnitForward {
  using Number = float;
  using Weight = Bfloat16;
  using Unit = MatrixUnit;
  static constexpr i64 kStrip = kUnitStrip;
  static constexpr i64 kRowStep = kUnitStrip;
  static constexpr i64 kKeyStep = kUnitDepth;
  static constexpr bool kPacks = true;
  static constexpr bool kBeside = kUnitBeside;
  using Steps = UnitSteps;
  static constexpr i64 padded_keys(i64 keys) { return round_up(keys, kUnitDepth); }
  static constexpr i64 padded_dim(const Options& options) { return round_up(options.head_dim, kUnitDepth); }

  i64 ld_q;        // of q, in bf16
  i64 ld_v, ld_s;  // of tiles with head_dim_v and block_keys columns: words or fp32
  u16* q;
  u16* rows;  // some keys or values as they come
  Word* k;    // keys as words, transposed: head_dim / kTerms rows
  Word* v;    // interleaved: as many rows as keys / kTerms

  UnitForward(Arena& arena, const Options& options)
      : ld_q(kTerms * leading<float>(padded_dim(options) / kTerms)),
        ld_v(leading<float>(options.head_dim_v)),
        ld_s(leading<float>(padded_keys(options.block_keys))),
        q(arena.take<u16>(round_up(options.block_rows, kRowStep) * ld_q)),
        rows(arena.take<u16>(kUnitDepth * math::max(ld_q, 2 * ld_v))),
        k(arena.take<Word>(padded_dim(options) / kTerms * ld_s)),
        v(arena.take<Word>(padded_keys(options.block_keys) / kTerms * ld_v)) {}

  void load_queries(Unit&, const ForwardTask& task, const Matrix& m, i64 begin, i64 end, i64 first) const {
    const i64 cols = task.options->head_dim;
    const i64 rows = task.row_end - task.row_begin;
    copy_rows(m, begin, end - begin, cols, q + first * ld_q, ld_q, round_up(cols, kUnitDepth), end - begin);
    fill(q + rows * ld_q, (round_up(rows, kRowStep) - rows) * ld_q, u16(0));
  }

  void load_keys(Unit&, const ForwardTask& task, i64 key, i64 keys) const {
    const Options& options = *task.options;
    const i64 width = padded<float>(options.head_dim_v);
    for (i64 n = 0; n < keys; n += kUnitDepth) {
      const i64 some = math::min(kUnitDepth, keys - n);
      for (i64 next = n + some; next < math::min(n + some + kUnitDepth, keys); ++next) {
        prefetch_row(task.k, key + next, 0, options.head_dim);
        prefetch_row(task.v, key + next, 0, options.head_dim_v);
      }
      if (const u16* in_place = rows_in_place(task.k, key + n, some, options.head_dim)) {
        transpose_words(in_place, task.k.row / kTerms, kUnitDepth, padded_dim(options) / kTerms, k + n, ld_s);
      } else {
        copy_rows(task.k, key + n, some, options.head_dim, rows, ld_q, padded_dim(options), kUnitDepth);
        transpose_words(rows, ld_q / kTerms, kUnitDepth, padded_dim(options) / kTerms, k + n, ld_s);
      }
      if (const u16* in_place = rows_in_place(task.v, key + n, some, options.head_dim_v)) {
        interleave_rows(in_place, task.v.row, kUnitDepth, width, v + n / kTerms * ld_v, ld_v);
      } else {
        copy_rows(task.v, key + n, some, options.head_dim_v, rows, 2 * ld_v, width, kUnitDepth);
        interleave_rows(rows, 2 * ld_v, kUnitDepth, width, v + n / kTerms * ld_v, ld_v);
      }
    }
  }

  Bf16Product<Word> scores(const Options& options, i64 row, i64 strip, i64 col, i64 cols, float* s) const {
    return {
        round_up(strip, kUnitRows), cols, padded_dim(options), {q + row * ld_q, ld_q}, {k + col, ld_s}, s, ld_s, false};
  }
  void scores(Unit& unit, const Options& options, i64 row, i64 strip, i64 col, i64 cols, float* s) const {
    unit_product(unit, scores(options, row, strip, col, cols, s));
  }

  Bf16Product<Word> values(const Options& options, i64 strip, i64 col, i64 depth, const float* p, float* o) const {
    return {.rows = round_up(strip, kUnitRows),
            .cols = padded<float>(options.head_dim_v),
            .depth = padded_keys(depth),
            .a = {reinterpret_cast<const u16*>(p), 2 * ld_s},
            .b = {v + col / kTerms * ld_v, ld_v},
            .c = o,
            .ldc = ld_v,
            .accumulate = true};
  }
  void add_values(Unit& unit, const Options& options, i64 strip, i64 col, i64 depth, const float* p, float* o) const {
    unit_product(unit, values(options, strip, col, depth, p, o));
  }
};
#endif

}  // namespace fovea::cpu::FOVEA_ISA
