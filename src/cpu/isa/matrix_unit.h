// SPDX-License-Identifier: Apache-2.0
//
// What multiplies bf16 in this object (amx.h, dpbf16.h or bfmmla.h), and how its operands are packed. A row of words
// has some consecutive rows of a tile, interleaved; a tile whose rows are read as words, and these transposed, has some
// consecutive columns.
#pragma once

#ifdef __aarch64__
#include "cpu/isa/bfmmla.h"
#elif defined(__AMX_TILE__) || defined(FOVEA_EMULATED_AMX)
#include "cpu/isa/amx.h"
#else
#include "cpu/isa/dpbf16.h"
#endif

namespace fovea::cpu::FOVEA_ISA {

inline constexpr i64 kUnitStrip = 32;  // rows of a product

// Rows of 16-bit numbers, copied, with zeros to the right up to `width` and below up to `height`.
inline void copy_rows(const Matrix& m, i64 row, i64 rows, i64 cols, u16* to, i64 ld, i64 width, i64 height) {
  for (i64 r = 0; r < math::min(kRowsAhead, rows); ++r) {
    prefetch_row(m, row + r, 0, cols);
  }
  for (i64 r = 0; r < rows; ++r) {
    if (r + kRowsAhead < rows) {
      prefetch_row(m, row + r + kRowsAhead, 0, cols);
    }
    u16* line = to + r * ld;
    if (m.col == 1) {
      __builtin_memcpy(line, address(m, row + r, 0), static_cast<size_t>(cols) * sizeof(u16));
    } else {
      move_strided<true>(address(m, row + r, 0), m.col, line, sizeof(u16), cols);
    }
    fill(line + cols, width - cols, u16(0));
  }
  for (i64 r = rows; r < height; ++r) {
    fill(to + r * ld, width, u16(0));
  }
}

// Where whole rows of bf16 can be read as they are: no padding, whole words.
HWY_INLINE const u16* rows_in_place(const Matrix& m, i64 row, i64 rows, i64 cols) {
  return m.col == 1 && rows == kUnitDepth && cols % kUnitDepth == 0 && m.row % kTerms == 0
             ? reinterpret_cast<const u16*>(address(m, row, 0))
             : nullptr;
}

// Words, transposed; rows and columns are multiples of 16 (of 4 where a word has 64 bits).
inline void transpose_words(const void* from, i64 ld, i64 rows, i64 cols, Word* to, i64 ld_to) {
  transpose_tile(static_cast<const WordNumber*>(from), ld, rows, cols, reinterpret_cast<WordNumber*>(to), ld_to);
}

}  // namespace fovea::cpu::FOVEA_ISA
