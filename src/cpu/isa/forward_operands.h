// SPDX-License-Identifier: Apache-2.0
//
// Q, K and V of a forward task as its two products read them: VectorForward by vectors of T, from the caller's type
// converted to T; UnitForward by a matrix unit (AMX), in bf16. A few rows: isa/forward_rows.h.
#pragma once

#include "cpu/isa/gemm.h"
#include "cpu/isa/tile.h"
#ifdef FOVEA_MATRIX_UNIT
#include "cpu/isa/matrix_unit.h"
#endif

namespace fovea::cpu::FOVEA_ISA {

template <class T>
struct VectorForward {
  using Number = T;                          // of scores and sums
  using Weight = T;                          // of P as the second product reads it
  struct Unit {};                            // what products need beside operands
  static constexpr i64 kStrip = kBlockRows;  // rows of a product
  static constexpr i64 kRowStep = 4;         // products round rows up to this
  static constexpr i64 kKeyStep = 16;        // where a strip's keys begin, from 0
  static constexpr bool kPacks = true;       // K and V, a block at a time
  static constexpr i64 kPiece = 0;           // columns of a piece of a product, where products run beside vectors
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

  // Queries [begin, end) of a head as rows from `first` on.
  void load_queries(const Matrix& m, i64 begin, i64 end, i64 cols, i64 first) const {
    load_tile(m, begin, end - begin, cols, q + first * ld_q, ld_q);
  }
  void clear_queries(i64 rows) const { fill(q + rows * ld_q, (round_up(rows, kRowStep) - rows) * ld_q, T(0)); }

  void load_keys(Unit&, const ForwardTask& task, i64 key, i64 keys) const {
    const Options& options = *task.options;
    load_transposed(task.k, key, keys, options.head_dim, k_rows, ld_q, k, ld_s);
    load_tile(task.v, key, keys, options.head_dim_v, v, ld_v);
  }

  // S = Q K^T for rows [row, row + strip) and columns [col, col + cols).
  void scores(Unit&, const Options& options, i64 row, i64 strip, i64 col, i64 cols, T* s) const {
    gemm_rows<Lhs::kByRows, T>(strip, cols, options.head_dim, {q + row * ld_q, ld_q}, {k + col, ld_s}, s, ld_s, false);
  }

  // O += P V in columns [from, from + cols); P lies where S was.
  void add_values(Unit&, const Options&, i64 strip, i64 col, i64 depth, const T* p, T* o, i64 from, i64 cols) const {
    gemm_rows<Lhs::kByRows, T>(strip, cols, depth, {p, ld_s}, {v + col * ld_v + from, ld_v}, o + from, ld_v, true);
  }
};

#ifdef FOVEA_MATRIX_UNIT
struct UnitForward {
  using Number = float;
  using Weight = Bfloat16;
  using Unit = MatrixUnit;
  static constexpr i64 kStrip = 2 * kUnitRows;
  static constexpr i64 kRowStep = 2 * kUnitRows;
  static constexpr i64 kKeyStep = kUnitDepth;
  static constexpr bool kPacks = true;
  static constexpr i64 kPiece = 32;
  static constexpr i64 padded_keys(i64 keys) { return round_up(keys, kUnitDepth); }
  static constexpr i64 padded_dim(const Options& options) { return round_up(options.head_dim, kUnitDepth); }

  i64 ld_q;  // in words of 32 bits, like all of these
  i64 ld_v, ld_s;
  u16* q;
  u16* rows;  // some keys or values as they come
  u32* k;     // pairs of a key's numbers, transposed: half of head_dim rows
  u32* v;     // pairs of values: half of the keys' rows

  UnitForward(Arena& arena, const Options& options)
      : ld_q(leading<float>(padded_dim(options) / 2)),
        ld_v(leading<float>(options.head_dim_v)),
        ld_s(leading<float>(padded_keys(options.block_keys))),
        q(arena.take<u16>(round_up(options.block_rows, kRowStep) * 2 * ld_q)),
        rows(arena.take<u16>(kUnitDepth * 2 * math::max(ld_q, ld_v))),
        k(arena.take<u32>(padded_dim(options) / 2 * ld_s)),
        v(arena.take<u32>(padded_keys(options.block_keys) / 2 * ld_v)) {}

  void load_queries(const Matrix& m, i64 begin, i64 end, i64 cols, i64 first) const {
    copy_rows(m, begin, end - begin, cols, q + first * 2 * ld_q, 2 * ld_q, round_up(cols, kUnitDepth), end - begin);
  }
  void clear_queries(i64 count) const {
    fill(q + count * 2 * ld_q, (round_up(count, kRowStep) - count) * 2 * ld_q, u16(0));
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
        transpose_words(in_place, task.k.row / 2, kUnitDepth, padded_dim(options) / 2, k + n, ld_s);
      } else {
        copy_rows(task.k, key + n, some, options.head_dim, rows, 2 * ld_q, padded_dim(options), kUnitDepth);
        transpose_words(rows, ld_q, kUnitDepth, padded_dim(options) / 2, k + n, ld_s);
      }
      if (const u16* in_place = rows_in_place(task.v, key + n, some, options.head_dim_v)) {
        pair_rows(in_place, task.v.row, kUnitDepth, width, v + n / 2 * ld_v, ld_v);
      } else {
        copy_rows(task.v, key + n, some, options.head_dim_v, rows, 2 * ld_v, width, kUnitDepth);
        pair_rows(rows, 2 * ld_v, kUnitDepth, width, v + n / 2 * ld_v, ld_v);
      }
    }
  }

  void scores(Unit& unit, const Options& options, i64 row, i64 strip, i64 col, i64 cols, float* s) const {
    unit_product(unit, round_up(strip, kUnitRows), cols, padded_dim(options), {q + row * 2 * ld_q, 2 * ld_q},
                 {k + col, ld_s}, s, ld_s, false);
  }

  void add_values(Unit& unit, const Options&, i64 strip, i64 col, i64 depth, const float* p, float* o, i64 from,
                  i64 cols) const {
    unit_product(unit, round_up(strip, kUnitRows), cols, padded_keys(depth),
                 {reinterpret_cast<const u16*>(p), 2 * ld_s}, {v + col / 2 * ld_v + from, ld_v}, o + from, ld_v, true);
  }
};
#endif

}  // namespace fovea::cpu::FOVEA_ISA
