// SPDX-License-Identifier: Apache-2.0
//
// Tiles: what the kernels compute on. Rows of T (float or double) in the caller's workspace, with a leading
// dimension that is an odd number of vectors, so that walking down a column does not fall on the same few sets of
// the cache. Loading converts from the caller's type and strides and pads with zeros; NaN that lies behind the end
// of a sequence is never read.
#pragma once

#include "cpu/arena.h"
#include "cpu/isa/convert.h"
#include "cpu/kernels.h"

namespace fovea::cpu::FOVEA_ISA {

inline constexpr double kInfinity = __builtin_huge_val();

constexpr i64 round_up(i64 value, i64 step) { return (value + step - 1) / step * step; }

template <class T>
constexpr i64 padded(i64 cols) {
  return round_up(cols, lanes<T>());
}

// The leading dimension of a tile of this many columns.
template <class T>
constexpr i64 leading(i64 cols) {
  return (math::max(padded<T>(cols), lanes<T>()) / lanes<T>() | 1) * lanes<T>();
}

// ---- the caller's rows ----

template <class T>
constexpr i32 native_type() {
  return sizeof(T) == 4 ? FOVEA_FP32 : FOVEA_FP64;
}

constexpr i64 element_size(i32 type) {
  return type == FOVEA_FP64 ? 8 : type == FOVEA_FP32 ? 4 : type == FOVEA_BOOL ? 1 : 2;
}

HWY_INLINE u8* address(const Matrix& m, i64 row, i64 col) {
  return static_cast<u8*>(m.data) + (row * m.row + col * m.col) * element_size(m.type);
}

// Whether rows follow one another without gaps, in the type of computation.
template <class T>
HWY_INLINE bool is_dense(const Matrix& m, i64 cols) {
  return m.type == native_type<T>() && m.col == 1 && m.row == cols;
}

// Moves elements between strided and contiguous memory.
template <bool kGather, class Element>
void move_elements(void* strided, i64 stride, void* contiguous, i64 count) {
  Element* far = static_cast<Element*>(strided);
  Element* near = static_cast<Element*>(contiguous);
  for (i64 n = 0; n < count; ++n) {
    (kGather ? near[n] : far[n * stride]) = kGather ? far[n * stride] : near[n];
  }
}

template <bool kGather>
void move_strided(void* strided, i64 stride, void* contiguous, i64 size, i64 count) {
  switch (size) {
    case 1:
      return move_elements<kGather, u8>(strided, stride, contiguous, count);
    case 2:
      return move_elements<kGather, u16>(strided, stride, contiguous, count);
    case 4:
      return move_elements<kGather, u32>(strided, stride, contiguous, count);
    default:
      return move_elements<kGather, u64>(strided, stride, contiguous, count);
  }
}

// Elements [col, col + count) of a row. Tensors without elements may have no memory, and then rows no address.
template <class T>
void load_row(const Matrix& m, i64 row, i64 col, i64 count, T* to) {
  if (count == 0) {
    return;
  }
  if (m.col == 1) {
    return load_contiguous(address(m, row, col), m.type, to, count);
  }
  u64 chunk[kChunk] = {};
  for (i64 n = 0; n < count; n += kChunk) {
    const i64 some = math::min(kChunk, count - n);
    move_strided<true>(address(m, row, col + n), m.col, chunk, element_size(m.type), some);
    load_contiguous(chunk, m.type, to + n, some);
  }
}

// Adds, if `m` says so.
template <class T>
void store_row(const T* from, const Matrix& m, i64 row, i64 col, i64 count) {
  if (count == 0) {
    return;
  }
  if (m.add) {
    Matrix plain = m;
    plain.add = false;
    T chunk[kChunk];
    for (i64 n = 0; n < count; n += kChunk) {
      const i64 some = math::min(kChunk, count - n);
      load_row(m, row, col + n, some, chunk);
      for (i64 i = 0; i < some; ++i) {
        chunk[i] += from[n + i];
      }
      store_row(chunk, plain, row, col + n, some);
    }
    return;
  }
  if (m.col == 1) {
    return store_contiguous(from, m.type, address(m, row, col), count);
  }
  u64 chunk[kChunk] = {};
  for (i64 n = 0; n < count; n += kChunk) {
    const i64 some = math::min(kChunk, count - n);
    store_contiguous(from + n, m.type, chunk, some);
    move_strided<false>(address(m, row, col + n), m.col, chunk, element_size(m.type), some);
  }
}

template <class T>
void fill(T* to, i64 count, T value) {
  for (i64 n = 0; n < count; ++n) {
    to[n] = value;
  }
}

// ---- tiles ----

// Asks for the cache lines of a row's columns.
// Note: always inlined, like whatever calls it. g++ takes a function that only prefetches for one without effect and
// drops calls of it.
template <int kLocality = 3>
HWY_INLINE void prefetch_row(const Matrix& m, i64 row, i64 col, i64 cols, bool to_write = false) {
  constexpr i64 kLine = 64;
  if (m.col != 1 || cols == 0) {
    return;
  }
  const u8* begin = address(m, row, col);
  const u8* end = begin + cols * element_size(m.type);
  for (const u8* line = begin; line < end; line += kLine) {
    to_write ? __builtin_prefetch(line, 1) : __builtin_prefetch(line, 0, kLocality);
  }
}

// Rows are often far apart (other heads lie between), where the processor's own prefetching gives up at each row: rows
// are prefetched so many ahead.
inline constexpr i64 kRowsAhead = 8;

// Rows [row, row + rows) as a tile, zeros to the right up to a vector.
template <class T>
void load_tile(const Matrix& m, i64 row, i64 rows, i64 cols, T* tile, i64 ld) {
  for (i64 r = 0; r < math::min(kRowsAhead, rows); ++r) {
    prefetch_row(m, row + r, 0, cols);
  }
  for (i64 r = 0; r < rows; ++r) {
    if (r + kRowsAhead < rows) {
      prefetch_row(m, row + r + kRowsAhead, 0, cols);
    }
    load_row(m, row + r, 0, cols, tile + r * ld);
    fill(tile + r * ld + cols, padded<T>(cols) - cols, T(0));
  }
}

// Four (fp32) or two (fp64) elements from each of a vector's worth of rows, transposed. Row 4 b + q of the source
// gives lanes of block b; the interleaving then works within the blocks of 128 bits that every target has.
template <class T>
HWY_INLINE hn::Vec<Tag<T>> gather_blocks(const T* from, i64 ld) {
  constexpr i64 kInBlock = 16 / sizeof(T);
  if constexpr (lanes<T>() == kInBlock) {
    return hn::LoadU(Tag<T>(), from);
  } else {
    const hn::FixedTag<T, kInBlock> block;
    const hn::FixedTag<T, 2 * kInBlock> two;
    const auto low = hn::Combine(two, hn::LoadU(block, from + kInBlock * ld), hn::LoadU(block, from));
    if constexpr (lanes<T>() == 2 * kInBlock) {
      return low;
    } else {
      const T* upper = from + 2 * kInBlock * ld;
      const auto high = hn::Combine(two, hn::LoadU(block, upper + kInBlock * ld), hn::LoadU(block, upper));
      return hn::Combine(Tag<T>(), high, low);
    }
  }
}

HWY_INLINE void transpose_block(const float* from, i64 ld, float* to, i64 ld_to) {
  const Tag<float> d;
  const Tag<double> pairs;
  const auto row0 = gather_blocks(from, ld);
  const auto row1 = gather_blocks(from + ld, ld);
  const auto row2 = gather_blocks(from + 2 * ld, ld);
  const auto row3 = gather_blocks(from + 3 * ld, ld);
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, row0, row1));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, row2, row3));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, row0, row1));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, row2, row3));
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23)), d, to);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23)), d, to + ld_to);
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23)), d, to + 2 * ld_to);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23)), d, to + 3 * ld_to);
}

HWY_INLINE void transpose_block(const double* from, i64 ld, double* to, i64 ld_to) {
  const Tag<double> d;
  const auto row0 = gather_blocks(from, ld);
  const auto row1 = gather_blocks(from + ld, ld);
  hn::StoreU(hn::InterleaveLower(d, row0, row1), d, to);
  hn::StoreU(hn::InterleaveUpper(d, row0, row1), d, to + ld_to);
}

// `rows` and `cols` are multiples of a vector; `to` gets cols rows.
template <class T>
void transpose_tile(const T* from, i64 ld, i64 rows, i64 cols, T* to, i64 ld_to) {
  constexpr i64 kInBlock = 16 / sizeof(T);
  for (i64 row = 0; row < rows; row += lanes<T>()) {
    for (i64 col = 0; col < cols; col += kInBlock) {
      transpose_block(from + row * ld + col, ld, to + col * ld_to + row, ld_to);
    }
  }
}

// Rows of the caller's memory as columns; up to a vector, missing ones are zero. `buffer` holds a vector's worth of
// rows.
template <class T>
void load_transposed(const Matrix& m, i64 row, i64 rows, i64 cols, T* buffer, i64 ld, T* to, i64 ld_to) {
  for (i64 r = 0; r < rows; r += lanes<T>()) {
    const i64 some = math::min(lanes<T>(), rows - r);
    if (some == lanes<T>() && m.col == 1 && m.type == native_type<T>() && cols == padded<T>(cols)) {
      transpose_tile(reinterpret_cast<const T*>(address(m, row + r, 0)), m.row, some, cols, to + r, ld_to);
      continue;
    }
    for (i64 next = r + some; next < math::min(r + some + kRowsAhead, rows); ++next) {
      prefetch_row(m, row + next, 0, cols);
    }
    load_tile(m, row + r, some, cols, buffer, ld);
    fill(buffer + some * ld, (lanes<T>() - some) * ld, T(0));
    transpose_tile(buffer, ld, lanes<T>(), padded<T>(cols), to + r, ld_to);
  }
}

}  // namespace fovea::cpu::FOVEA_ISA
