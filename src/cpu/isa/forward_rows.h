// SPDX-License-Identifier: Apache-2.0
//
// The operands of a forward task of a few rows (decoding): K and V are read from where they are. To pack them costs
// more than the products, which wait for memory.
#pragma once

#include "cpu/isa/gemm.h"
#include "cpu/isa/tile.h"

namespace fovea::cpu::FOVEA_ISA {

template <class V>
using HalfOf = hn::Half<hn::DFromV<V>>;

// The sum of a vector's blocks of 128 bits.
template <class V>
HWY_INLINE auto sum_of_blocks(V v) {
  using D = hn::DFromV<V>;
  if constexpr (hn::MaxLanes(D()) * sizeof(hn::TFromD<D>) <= 16) {
    return v;
  } else {
    return sum_of_blocks(hn::Add(hn::LowerHalf(HalfOf<V>(), v), hn::UpperHalf(HalfOf<V>(), v)));
  }
}

// The sums of the lanes of four vectors.
HWY_INLINE void sums_of_lanes(const Simd<float>* from, float* to) {
  const Tag<float> f32;
  const hn::Repartition<u64, Tag<float>> pairs;
  const auto interleaved = [&](Simd<float> a, Simd<float> b) HWY_ATTR {
    const auto sum = hn::Add(hn::InterleaveLower(f32, a.raw, b.raw), hn::InterleaveUpper(f32, a.raw, b.raw));
    return hn::BitCast(pairs, sum);
  };
  const auto low = interleaved(from[0], from[1]);
  const auto high = interleaved(from[2], from[3]);
  const auto sums = sum_of_blocks(hn::Add(hn::BitCast(f32, hn::InterleaveLower(pairs, low, high)),
                                          hn::BitCast(f32, hn::InterleaveUpper(pairs, low, high))));
  hn::StoreU(sums, hn::DFromV<decltype(sums)>(), to);
}
HWY_INLINE void sums_of_lanes(const Simd<double>* from, double* to) {
  for (int n = 0; n < 4; ++n) {
    to[n] = sum_of_lanes(from[n]);
  }
}

// Lengths of rows that are not whole vectors end with a vector that begins before the end of the last whole one; of
// that vector only the lanes that are new count.
template <class T>
struct RowsForward {
  using Number = T;
  using Weight = T;
  struct Unit {  // where a block of keys lies
    const ForwardTask* task;
    i64 key, keys;
  };
  static constexpr i64 kStrip = 4;
  static constexpr i64 kRowStep = 4;
  static constexpr i64 kKeyStep = 16;
  static constexpr bool kPacks = false;
  static constexpr bool kBeside = false;
  static constexpr i64 padded_keys(i64 keys) { return padded<T>(keys); }

  static bool takes(const ForwardTask& task) {
    const Options& options = *task.options;
    return task.k.col == 1 && task.v.col == 1 &&
           has_few_rows(task.all_rows, options.head_dim, options.head_dim_v, lanes<T>());
  }

  i64 ld_q, ld_v, ld_s;
  T* q;

  RowsForward(Arena& arena, const Options& options)
      : ld_q(leading<T>(options.head_dim)),
        ld_v(leading<T>(options.head_dim_v)),
        ld_s(leading<T>(options.block_keys)),
        q(arena.take<T>(round_up(options.block_rows, kRowStep) * ld_q)) {}

  void load_queries(Unit&, const ForwardTask& task, const Matrix& m, i64 begin, i64 end, i64 first) const {
    const i64 rows = task.row_end - task.row_begin;
    load_tile(m, begin, end - begin, task.options->head_dim, q + first * ld_q, ld_q);
    fill(q + rows * ld_q, (round_up(rows, kRowStep) - rows) * ld_q, T(0));
  }
  void load_keys(Unit& unit, const ForwardTask& task, i64 key, i64 keys) const { unit = {&task, key, keys}; }

  void scores(Unit& unit, const Options& options, i64 row, i64 strip, i64 col, i64 cols, T* s) const {
    const i64 keys = math::min(cols, unit.keys - col);
    with_type(unit.task->k.type, [&](auto* type) HWY_ATTR {
      strip == 1 ? dots<1, 4>(unit, options, row, col, keys, s, type)
                 : dots<kStrip, 2>(unit, options, row, col, keys, s, type);
    });
    for (i64 r = 0; r < strip; ++r) {
      fill(s + r * ld_s + keys, cols - keys, T(0));
    }
  }

  // Each block of keys is read once for all columns: the rest of a row would otherwise come from memory again.
  void add_values(Unit& unit, const Options& options, i64 strip, i64 col, i64 depth, const T* p, T* o) const {
    constexpr i64 kKeys = 32;
    with_type(unit.task->v.type, [&](auto* type) HWY_ATTR {
      for (i64 c = 0; c < depth; c += kKeys) {
        const i64 keys = math::min(kKeys, depth - c);
        strip == 1 ? add_keys<1, 8>(unit, options, col + c, keys, p + c, o, type)
                   : add_keys<kStrip, kManyRegisters ? 4 : 2>(unit, options, col + c, keys, p + c, o, type);
      }
    });
  }

 private:
  static constexpr i64 kLanes = lanes<T>();

  // function(a pointer to the type of K and V)
  template <class Function>
  static HWY_INLINE void with_type(i32 type, Function function) {
    if constexpr (sizeof(T) == 8) {
      function(static_cast<const double*>(nullptr));
    } else if (type == FOVEA_FP32) {
      function(static_cast<const float*>(nullptr));
    } else if (type == FOVEA_FP16) {
      function(static_cast<const Half*>(nullptr));
    } else {
      function(static_cast<const Bfloat16*>(nullptr));
    }
  }

  static HWY_INLINE void prefetch_ahead(const Unit& unit, const Matrix& m, i64 key, i64 cols) {
    if (const i64 next = key + 2 * kRowsAhead; next < unit.task->sequence.k_len) {
      prefetch_row(m, next, 0, cols);
    }
  }

  template <class Element>
  static HWY_INLINE const Element* row_of(const Matrix& m, i64 row) {
    return reinterpret_cast<const Element*>(address(m, row, 0));
  }

  // S = Q K^T for kRows rows and columns [col, col + keys).
  template <int kRows, int kKeys, class Element>
  void dots(const Unit& unit, const Options& options, i64 row, i64 col, i64 keys, T* s, const Element*) const {
    const T* rows = q + row * ld_q;
    const i64 whole = options.head_dim / kLanes * kLanes;
    for (i64 c = 0; c < keys; c += kKeys) {
      const Element* k[kKeys];
      Simd<T> sums[kKeys * kRows];
      FOVEA_UNROLL
      for (int n = 0; n < kKeys; ++n) {
        const i64 key = unit.key + col + math::min(c + n, keys - 1);
        prefetch_ahead(unit, unit.task->k, key, options.head_dim);
        k[n] = row_of<Element>(unit.task->k, key);
        FOVEA_UNROLL
        for (int r = 0; r < kRows; ++r) {
          sums[n * kRows + r] = Simd<T>(T(0));
        }
      }
      const auto add = [&](i64 d, auto numbers_at) HWY_ATTR {
        FOVEA_UNROLL
        for (int n = 0; n < kKeys; ++n) {
          const Simd<T> numbers = numbers_at(k[n] + d);
          FOVEA_UNROLL
          for (int r = 0; r < kRows; ++r) {
            sums[n * kRows + r] = fma(Simd<T>::load(rows + r * ld_q + d), numbers, sums[n * kRows + r]);
          }
        }
      };
      for (i64 d = 0; d < whole; d += kLanes) {
        add(d, [](const Element* from) HWY_ATTR { return load_as(from, T()); });
      }
      if (whole < options.head_dim) {
        const Mask<T> known = first_lanes<T>(whole + kLanes - options.head_dim);
        add(options.head_dim - kLanes,
            [&](const Element* from) HWY_ATTR { return select(known, Simd<T>(T(0)), load_as(from, T())); });
      }
      T dot[kKeys * kRows];
      FOVEA_UNROLL
      for (int n = 0; n < kKeys * kRows; n += 4) {
        sums_of_lanes(sums + n, dot + n);
      }
      for (int n = 0; n < math::min(i64(kKeys), keys - c); ++n) {
        for (int r = 0; r < kRows; ++r) {
          s[r * ld_s + c + n] = dot[n * kRows + r];
        }
      }
    }
  }

  // O += P V for kRows rows, all columns, and the keys from column `col` on.
  template <int kRows, int kVectors, class Element>
  void add_keys(const Unit& unit, const Options& options, i64 col, i64 keys, const T* p, T* o,
                const Element* type) const {
    const i64 dim = options.head_dim_v;
    const i64 whole = dim / kLanes * kLanes;
    i64 c = 0;
    for (; c + kVectors * kLanes <= whole; c += kVectors * kLanes) {
      add_columns<kRows, kVectors>(unit, col, keys, p, o, c, 0, type);
    }
    for (; c + kVectors / 2 * kLanes <= whole; c += kVectors / 2 * kLanes) {
      add_columns<kRows, kVectors / 2>(unit, col, keys, p, o, c, 0, type);
    }
    for (; c < whole; c += kLanes) {
      add_columns<kRows, 1>(unit, col, keys, p, o, c, 0, type);
    }
    if (whole < dim) {
      add_columns<kRows, 1>(unit, col, keys, p, o, dim - kLanes, whole + kLanes - dim, type);
    }
  }

  // The first lanes of the first vector may be known already: they stay.
  template <int kRows, int kVectors, class Element>
  void add_columns(const Unit& unit, i64 col, i64 keys, const T* p, T* o, i64 column, i64 known, const Element*) const {
    Simd<T> sums[kRows][kVectors];
    FOVEA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      FOVEA_UNROLL
      for (int n = 0; n < kVectors; ++n) {
        sums[r][n] = Simd<T>(T(0));
      }
    }
    for (i64 c = 0; c < keys; ++c) {
      const i64 key = unit.key + col + c;
      if (column == 0) {
        prefetch_ahead(unit, unit.task->v, key, unit.task->options->head_dim_v);
      }
      const Element* v = row_of<Element>(unit.task->v, key) + column;
      FOVEA_UNROLL
      for (int n = 0; n < kVectors; ++n) {
        const Simd<T> numbers = load_as(v + n * kLanes, T());
        FOVEA_UNROLL
        for (int r = 0; r < kRows; ++r) {
          sums[r][n] = fma(Simd<T>(p[r * ld_s + c]), numbers, sums[r][n]);
        }
      }
    }
    FOVEA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      T* to = o + r * ld_v + column;
      if (known > 0) {
        sums[r][0] = select(first_lanes<T>(known), Simd<T>(T(0)), sums[r][0]);
      }
      FOVEA_UNROLL
      for (int n = 0; n < kVectors; ++n) {
        (Simd<T>::load(to + n * kLanes) + sums[r][n]).store(to + n * kLanes);
      }
    }
  }
};

}  // namespace fovea::cpu::FOVEA_ISA
