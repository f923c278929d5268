// SPDX-License-Identifier: Apache-2.0
//
// Words of two terms, as AMX and VDPBF16PS multiply them.
#pragma once

#include "cpu/isa/bf16.h"

namespace fovea::cpu::FOVEA_ISA {

using Word = u32;  // a pair of terms
using WordNumber = float;
inline constexpr i64 kTerms = Bf16Columns<Word>::kTerms;

// kTerms rows of a vector of fp32 each, `ld_from` apart, to bf16: as words and, if `rows` is not NULL, as rows.
HWY_INLINE void round_rows(const float* from, i64 ld_from, Word* words, u16* rows, i64 ld) {
  const Simd<float> first = Simd<float>::load(from);
  const Simd<float> second = Simd<float>::load(from + ld_from);
#ifdef __AVX512BF16__
  const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.raw.raw, first.raw.raw));
  alignas(64) static constexpr u16 kInterleaved[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  _mm512_storeu_si512(words, _mm512_permutexvar_epi16(_mm512_load_si512(kInterleaved), both));
  if (rows != nullptr) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows), _mm512_castsi512_si256(both));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows + ld), _mm512_extracti64x4_epi64(both, 1));
  }
#else
  const U32 d;
  const auto low = float_to_bfloat16(first.raw);
  const auto high = float_to_bfloat16(second.raw);
  hn::StoreU(hn::Or(low, hn::ShiftLeft<16>(high)), d, words);
  if (rows != nullptr) {
    hn::StoreU(hn::TruncateTo(U16(), low), U16(), rows);
    hn::StoreU(hn::TruncateTo(U16(), high), U16(), rows + ld);
  }
#endif
}

// Rows of bf16 as words; `rows` is a multiple of kTerms, `cols` one of a vector of fp32.
inline void interleave_rows(const u16* from, i64 ld, i64 rows, i64 cols, Word* to, i64 ld_to) {
  const U32 d;
  for (i64 r = 0; r < rows; r += kTerms) {
    const u16* first = from + r * ld;
    Word* line = to + r / kTerms * ld_to;
    for (i64 c = 0; c < cols; c += lanes<float>()) {
      const auto low = hn::PromoteTo(d, hn::LoadU(U16(), first + c));
      const auto high = hn::PromoteTo(d, hn::LoadU(U16(), first + ld + c));
      hn::StoreU(hn::Or(low, hn::ShiftLeft<16>(high)), d, line + c);
    }
  }
}

}  // namespace fovea::cpu::FOVEA_ISA
