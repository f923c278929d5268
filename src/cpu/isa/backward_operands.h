// SPDX-License-Identifier: Apache-2.0
//
// What the five products of a backward tile read and write: VectorBackward by vectors of T, from the caller's type
// converted to T; UnitBackward by a matrix unit (AMX, VDPBF16PS, BFMMLA), in bf16. Rows of P and dS are formed in fp32
// (fp64), strip by strip, between begin_strip() and end_strip().
#pragma once

#include "cpu/isa/gemm.h"
#include "cpu/isa/tile.h"
#ifdef FOVEA_MATRIX_UNIT
#include "cpu/isa/matrix_unit.h"
#endif

namespace fovea::cpu::FOVEA_ISA {

// A dot product, lane by lane, in the order of these products' sums.
template <class T>
class VectorDot {
 public:
  HWY_INLINE void add(Simd<T> a, Simd<T> b) { sum_ = fma(a, b, sum_); }
  HWY_INLINE Simd<T> total() const { return sum_; }

 private:
  Simd<T> sum_{T(0)};
};

template <class T>
struct VectorBackward {
  using Number = T;
  struct Unit {};
  static constexpr i64 kStrip = kBlockRows;
  static constexpr i64 kRowStep = 4;
  static constexpr i64 kKeyStep = 16;
  static constexpr i64 kDepthStep = 1;  // where the queries or keys begin that are summed over
  using Dot = VectorDot<T>;
  static constexpr i64 padded_keys(i64 keys) { return padded<T>(keys); }

  i64 ld_q, ld_v, ld_s;  // of tiles with head_dim, head_dim_v and block_keys columns
  T* dk;
  T* dv;
  T* k;
  T* k_transposed;
  T* v_transposed;
  T* q;
  T* grad_out;
  T* p;
  T* ds;
  T* v_rows;  // a vector's worth of values, before they are transposed

  VectorBackward(Arena& arena, const Options& options)
      : ld_q(leading<T>(options.head_dim)),
        ld_v(leading<T>(options.head_dim_v)),
        ld_s(leading<T>(options.block_keys)),
        dk(arena.take<T>(all_keys(options) * ld_q)),
        dv(arena.take<T>(all_keys(options) * ld_v)),
        k(arena.take<T>(all_keys(options) * ld_q)),
        k_transposed(arena.take<T>(padded<T>(options.head_dim) * ld_s)),
        v_transposed(arena.take<T>(padded<T>(options.head_dim_v) * ld_s)),
        q(arena.take<T>(round_up(options.block_rows, kRowStep) * ld_q)),
        grad_out(arena.take<T>(round_up(options.block_rows, kRowStep) * ld_v)),
        p(arena.take<T>(round_up(options.block_rows, kRowStep) * ld_s)),
        ds(arena.take<T>(round_up(options.block_rows, kRowStep) * ld_s)),
        v_rows(arena.take<T>(lanes<T>() * ld_v)) {}

  static i64 all_keys(const Options& options) { return round_up(padded<T>(options.block_keys), kRowStep); }

  // K and V of the block, and zeros for the sums of dk and dv.
  void load_keys(const BackwardTask& task, i64 key, i64 keys) const {
    const Options& options = *task.options;
    load_tile(task.k, key, keys, options.head_dim, k, ld_q);
    fill(k + keys * ld_q, (padded<T>(keys) - keys) * ld_q, T(0));
    transpose_tile(k, ld_q, padded<T>(keys), padded<T>(options.head_dim), k_transposed, ld_s);
    load_transposed(task.v, key, keys, options.head_dim_v, v_rows, ld_v, v_transposed, ld_s);
    fill(dk, round_up(padded<T>(keys), kRowStep) * ld_q, T(0));
    fill(dv, round_up(padded<T>(keys), kRowStep) * ld_v, T(0));
  }

  // Nothing comes through a dead row, whose reference is infinite: not even NaN.
  void load_queries(const BackwardHead& head, const Options& options, i64 row, i64 rows, const T* reference) const {
    load_tile(head.head.q, row, rows, options.head_dim, q, ld_q);
    load_tile(head.grad_out, row, rows, options.head_dim_v, grad_out, ld_v);
    const i64 missing = round_up(rows, kRowStep) - rows;
    fill(q + rows * ld_q, missing * ld_q, T(0));
    fill(grad_out + rows * ld_v, missing * ld_v, T(0));
    for (i64 r = 0; r < rows; ++r) {
      if (reference[r] == T(kInfinity)) {
        fill(grad_out + r * ld_v, padded<T>(options.head_dim_v), T(0));
      }
    }
  }

  // Dot products of queries [at, at + strip) of the tile and columns [col, col + cols): with keys, of grad_out with
  // values.
  void begin_strip(Unit&, const Options& options, i64 at, i64 strip, i64 col, i64 cols, bool needs_ds) const {
    gemm_rows<Lhs::kByRows, T>(strip, cols, options.head_dim, {q + at * ld_q, ld_q}, {k_transposed + col, ld_s},
                               p_row(at) + col, ld_s, false);
    if (needs_ds) {
      gemm_rows<Lhs::kByRows, T>(strip, cols, options.head_dim_v, {grad_out + at * ld_v, ld_v},
                                 {v_transposed + col, ld_s}, ds_row(at) + col, ld_s, false);
    }
  }
  T* p_row(i64 r) const { return p + r * ld_s; }
  T* ds_row(i64 r) const { return ds + r * ld_s; }
  void end_strip(i64, i64, i64, bool) const {}

  // dV += P^T dO and dK += dS^T Q for keys [col, col + strip) and `depth` queries from `begin` on.
  void add_to_keys(Unit&, const Options& options, i64 col, i64 strip, i64 begin, i64 depth) const {
    if (options.need_v) {
      gemm_rows<Lhs::kByColumns, T>(strip, padded<T>(options.head_dim_v), depth, {p + begin * ld_s + col, ld_s},
                                    {grad_out + begin * ld_v, ld_v}, dv + col * ld_v, ld_v, true);
    }
    if (options.need_k) {
      gemm_rows<Lhs::kByColumns, T>(strip, padded<T>(options.head_dim), depth, {ds + begin * ld_s + col, ld_s},
                                    {q + begin * ld_q, ld_q}, dk + col * ld_q, ld_q, true);
    }
  }

  // dQ = dS K for queries [at, at + strip) and `depth` keys from `begin` on.
  void form_dq(Unit&, const Options& options, i64 at, i64 strip, i64 begin, i64 depth, T* dq) const {
    gemm_rows<Lhs::kByRows, T>(strip, padded<T>(options.head_dim), depth, {ds + at * ld_s + begin, ld_s},
                               {k + begin * ld_q, ld_q}, dq + at * ld_q, ld_q, false);
  }

  // The sums of the block's keys as rows, ld_q and ld_v apart.
  T* dk_rows(const Options&, i64) const { return dk; }
  T* dv_rows(const Options&, i64) const { return dv; }
};

#ifdef FOVEA_MATRIX_UNIT
// dV^T = dO^T P and dK^T = Q^T dS: what is transposed is the smaller operand, and rows of P are interleaved.
struct UnitBackward {
  using Number = float;
  using Unit = MatrixUnit;
  static constexpr i64 kStrip = kUnitStrip;
  static constexpr i64 kRowStep = kUnitStrip;
  static constexpr i64 kKeyStep = kUnitDepth;
  static constexpr i64 kDepthStep = kUnitDepth;
  using Dot = UnitDot;
  static constexpr i64 padded_keys(i64 keys) { return round_up(keys, kUnitDepth); }

  i64 ld_q, ld_v, ld_s;  // of tiles with head_dim, head_dim_v and block_keys columns
  i64 ld_r;              // of tiles with block_rows columns, in words
  float* dk;             // transposed
  float* dv;
  Word* k_words;       // interleaved
  Word* k_transposed;  // a key's numbers as words
  Word* v_transposed;
  u16* q;
  u16* grad_out;
  Word* q_transposed;  // the rows are interleaved, then transposed
  Word* grad_out_transposed;
  float* p;  // a strip
  float* ds;
  Word* p_words;  // interleaved
  Word* ds_words;
  u16* ds_rows;
  float* buffer;  // a tile on its way into another form

  UnitBackward(Arena& arena, const Options& options)
      : ld_q(leading<float>(round_up(options.head_dim, kUnitDepth))),
        ld_v(leading<float>(round_up(options.head_dim_v, kUnitDepth))),
        ld_s(leading<float>(padded_keys(options.block_keys))),
        ld_r(leading<float>(all_rows(options) / kTerms)),
        dk(arena.take<float>(padded<float>(options.head_dim) * ld_s)),
        dv(arena.take<float>(padded<float>(options.head_dim_v) * ld_s)),
        k_words(arena.take<Word>(padded_keys(options.block_keys) / kTerms * ld_q)),
        k_transposed(arena.take<Word>(round_up(options.head_dim, kUnitDepth) / kTerms * ld_s)),
        v_transposed(arena.take<Word>(round_up(options.head_dim_v, kUnitDepth) / kTerms * ld_s)),
        q(arena.take<u16>(all_rows(options) * ld_q)),
        grad_out(arena.take<u16>(all_rows(options) * ld_v)),
        q_transposed(arena.take<Word>(padded<float>(options.head_dim) * ld_r)),
        grad_out_transposed(arena.take<Word>(padded<float>(options.head_dim_v) * ld_r)),
        p(arena.take<float>(kStrip * ld_s)),
        ds(arena.take<float>(kStrip * ld_s)),
        p_words(arena.take<Word>(all_rows(options) / kTerms * ld_s)),
        ds_words(arena.take<Word>(all_rows(options) / kTerms * ld_s)),
        ds_rows(arena.take<u16>(all_rows(options) * ld_s)),
        buffer(
            arena.take<float>(math::max(padded_keys(options.block_keys), all_rows(options)) * math::max(ld_q, ld_v))) {}

  static i64 all_rows(const Options& options) { return round_up(options.block_rows, kRowStep); }

  void load_keys(const BackwardTask& task, i64 key, i64 keys) const {
    const Options& options = *task.options;
    u16* rows = reinterpret_cast<u16*>(buffer);
    const i64 all = padded_keys(keys);
    const i64 dim = round_up(options.head_dim, kUnitDepth);
    copy_rows(task.k, key, keys, options.head_dim, rows, ld_q, dim, all);
    transpose_words(rows, ld_q / kTerms, all, dim / kTerms, k_transposed, ld_s);
    interleave_rows(rows, ld_q, all, padded<float>(options.head_dim), k_words, ld_q);
    const i64 dim_v = round_up(options.head_dim_v, kUnitDepth);
    copy_rows(task.v, key, keys, options.head_dim_v, rows, ld_v, dim_v, all);
    transpose_words(rows, ld_v / kTerms, all, dim_v / kTerms, v_transposed, ld_s);
    for (i64 r = 0; r < padded<float>(options.head_dim); ++r) {
      fill(dk + r * ld_s, all, 0.0f);
    }
    for (i64 r = 0; r < padded<float>(options.head_dim_v); ++r) {
      fill(dv + r * ld_s, all, 0.0f);
    }
  }

  void load_queries(const BackwardHead& head, const Options& options, i64 row, i64 rows, const float* reference) const {
    const i64 all = round_up(rows, kRowStep);
    const i64 dim = round_up(options.head_dim, kUnitDepth);
    const i64 dim_v = round_up(options.head_dim_v, kUnitDepth);
    copy_rows(head.head.q, row, rows, options.head_dim, q, ld_q, dim, all);
    copy_rows(head.grad_out, row, rows, options.head_dim_v, grad_out, ld_v, dim_v, all);
    for (i64 r = 0; r < rows; ++r) {
      if (reference[r] == float(kInfinity)) {
        fill(grad_out + r * ld_v, dim_v, u16(0));
      }
    }
    Word* interleaved = reinterpret_cast<Word*>(buffer);
    if (options.need_k) {
      interleave_rows(q, ld_q, all, padded<float>(dim), interleaved, ld_q);
      transpose_words(interleaved, ld_q, all / kTerms, padded<float>(options.head_dim), q_transposed, ld_r);
    }
    if (options.need_v) {
      interleave_rows(grad_out, ld_v, all, padded<float>(dim_v), interleaved, ld_v);
      transpose_words(interleaved, ld_v, all / kTerms, padded<float>(options.head_dim_v), grad_out_transposed, ld_r);
    }
  }

  void begin_strip(Unit& unit, const Options& options, i64 at, i64 strip, i64 col, i64 cols, bool needs_ds) const {
    const i64 rows = round_up(strip, kUnitRows);
    unit_product(unit, {.rows = rows,
                        .cols = cols,
                        .depth = round_up(options.head_dim, kUnitDepth),
                        .a = {q + at * ld_q, ld_q},
                        .b = {k_transposed + col, ld_s},
                        .c = p + col,
                        .ldc = ld_s,
                        .accumulate = false});
    if (needs_ds) {
      unit_product(unit, {.rows = rows,
                          .cols = cols,
                          .depth = round_up(options.head_dim_v, kUnitDepth),
                          .a = {grad_out + at * ld_v, ld_v},
                          .b = {v_transposed + col, ld_s},
                          .c = ds + col,
                          .ldc = ld_s,
                          .accumulate = false});
    }
  }
  float* p_row(i64 r) const { return p + r % kStrip * ld_s; }
  float* ds_row(i64 r) const { return ds + r % kStrip * ld_s; }

  // Rounds the strip. Rows up to a whole strip are 0.
  void end_strip(i64 at, i64 strip, i64 cols, bool needs_ds) const {
    for (i64 r = strip; r < kStrip; ++r) {
      fill(p + r * ld_s, cols, 0.0f);
      fill(ds + r * ld_s, needs_ds ? cols : 0, 0.0f);
    }
    for (i64 r = 0; r < kStrip; r += kTerms) {
      const i64 line = (at + r) / kTerms * ld_s;
      for (i64 c = 0; c < cols; c += lanes<float>()) {
        round_rows(p + r * ld_s + c, ld_s, p_words + line + c, nullptr, 0);
      }
      for (i64 c = 0; needs_ds && c < cols; c += lanes<float>()) {
        round_rows(ds + r * ld_s + c, ld_s, ds_words + line + c, ds_rows + (at + r) * ld_s + c, ld_s);
      }
    }
  }

  void add_to_keys(Unit& unit, const Options& options, i64 col, i64 strip, i64 begin, i64 depth) const {
    const i64 keys = round_up(strip, kUnitRows);
    const i64 queries = round_up(depth, kUnitDepth);
    if (options.need_v) {
      unit_product(unit, {.rows = padded<float>(options.head_dim_v),
                          .cols = keys,
                          .depth = queries,
                          .a = {reinterpret_cast<const u16*>(grad_out_transposed) + begin, kTerms * ld_r},
                          .b = {p_words + begin / kTerms * ld_s + col, ld_s},
                          .c = dv + col,
                          .ldc = ld_s,
                          .accumulate = true});
    }
    if (options.need_k) {
      unit_product(unit, {.rows = padded<float>(options.head_dim),
                          .cols = keys,
                          .depth = queries,
                          .a = {reinterpret_cast<const u16*>(q_transposed) + begin, kTerms * ld_r},
                          .b = {ds_words + begin / kTerms * ld_s + col, ld_s},
                          .c = dk + col,
                          .ldc = ld_s,
                          .accumulate = true});
    }
  }

  void form_dq(Unit& unit, const Options& options, i64 at, i64 strip, i64 begin, i64 depth, float* dq) const {
    unit_product(unit, {.rows = round_up(strip, kUnitRows),
                        .cols = padded<float>(options.head_dim),
                        .depth = padded_keys(depth),
                        .a = {ds_rows + at * ld_s + begin, ld_s},
                        .b = {k_words + begin / kTerms * ld_q, ld_q},
                        .c = dq + at * ld_q,
                        .ldc = ld_q,
                        .accumulate = false});
  }

  float* dk_rows(const Options& options, i64 keys) const { return rows_of(dk, options.head_dim, ld_q, keys); }
  float* dv_rows(const Options& options, i64 keys) const { return rows_of(dv, options.head_dim_v, ld_v, keys); }
  float* rows_of(const float* transposed, i64 cols, i64 ld, i64 keys) const {
    transpose_tile(transposed, ld_s, padded<float>(cols), padded_keys(keys), buffer, ld);
    return buffer;
  }
};
#endif

}  // namespace fovea::cpu::FOVEA_ISA
