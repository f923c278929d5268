// SPDX-License-Identifier: Apache-2.0
//
// The operands of C (+)= A B where a processor multiplies bf16 and sums in fp32: A by rows. Of B, some consecutive
// terms of a column lie together in a word: two (AMX, AVX512-BF16) or four (NEON).
#pragma once

#include "cpu/isa/tile.h"

namespace fovea::cpu::FOVEA_ISA {

struct Bf16Rows {
  const u16* data;  // a(m, k) = data[m * stride + k]
  i64 stride;
};

template <class Word>
struct Bf16Columns {
  static constexpr i64 kTerms = sizeof(Word) / sizeof(u16);

  const Word* data;  // data[k * stride + n]: b(kTerms * k, n) and the terms after it, the first in the lowest bits
  i64 stride;
};

// C (+)= A B. Rows are multiples of kUnitRows, terms of kUnitDepth, columns of a vector of fp32.
template <class Word>
struct Bf16Product {
  i64 rows, cols, depth;
  Bf16Rows a;
  Bf16Columns<Word> b;
  float* c;
  i64 ldc;
  bool accumulate;  // else C = A B
};

}  // namespace fovea::cpu::FOVEA_ISA
