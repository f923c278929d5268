// SPDX-License-Identifier: Apache-2.0
//
// NEON's products of bf16 (FEAT_BF16): the instruction BFMMLA adds the product of two rows of four numbers and two
// columns of four to a vector of 2 x 2 sums in fp32. It multiplies four times as many numbers as an FMLA of fp32.
//
//     c(m, n) = odd(odd(c(m, n) + odd(a(m, 0) b(0, n) + a(m, 1) b(1, n))) + odd(a(m, 2) b(2, n) + a(m, 3) b(3, n)))
//
// where odd() rounds to odd: what is not exact has its last bit set. Denormals are 0 (Arm Architecture Reference Manual
// for A-profile, BFDotAdd(); with FPCR.EBF = 0, as Linux starts programs).
#pragma once

#include <arm_neon.h>

#include "cpu/isa/bf16.h"

namespace fovea::cpu::FOVEA_ISA {

using Word = u64;  // four terms: a vector has those of two columns
using WordNumber = double;
inline constexpr i64 kTerms = Bf16Columns<Word>::kTerms;

inline constexpr i64 kUnitRows = 8;         // products round rows up to this
inline constexpr i64 kUnitDepth = 16;       // and terms
inline constexpr bool kUnitBeside = false;  // these are vector instructions as well
class UnitSteps;

struct MatrixUnit {};

// a + b, rounded to odd.
HWY_INLINE Simd<float> add_to_odd(Simd<float> a, Simd<float> b) {
  const Tag<float> f32;
  const Tag<i32> s32;
  const Simd<float> sum = a + b;
  const Simd<float> of_b = sum - a;
  const Simd<float> error = (a - (sum - of_b)) + (b - of_b);  // Knuth's: exact
  const auto bits = hn::BitCast(s32, sum.raw);
  const auto one = hn::Set(s32, 1);
  // Where the sum is not exact and even, its odd neighbour on the side of the exact sum.
  const auto sign_bits = hn::Xor(bits, hn::BitCast(s32, error.raw));
  const auto step = hn::IfThenElse(hn::Lt(sign_bits, hn::Zero(s32)), hn::Set(s32, -1), one);
  const auto moved = hn::Add(bits, hn::IfThenElse(hn::Eq(hn::And(bits, one), one), hn::Zero(s32), step));
  const Mask<float> is_inexact = Simd<float>(0.0f) < abs(error);  // not where it is NaN: the sum is infinite
  return hn::IfThenElse(is_inexact, hn::BitCast(f32, moved), sum.raw);
}

// A dot product, lane by lane, in the order and with the roundings of the unit's sums.
class UnitDot {
 public:
  HWY_INLINE void add(Simd<float> a, Simd<float> b) {
    if (has_first_) {
      sum_ = add_to_odd(sum_, add_to_odd(first_, a * b));
    } else {
      first_ = a * b;
    }
    has_first_ = !has_first_;
  }
  HWY_INLINE Simd<float> total() const { return has_first_ ? add_to_odd(sum_, first_) : sum_; }

 private:
  Simd<float> sum_{0.0f};
  Simd<float> first_{0.0f};
  bool has_first_ = false;
};

// ---- products ----

HWY_INLINE bfloat16x8_t as_bf16(uint16x8_t bits) { return vreinterpretq_bf16_u16(bits); }

// Two vectors of 2 x 2 sums, side by side, and their two rows: each is made of the other.
struct TwoRows {
  float32x4_t first, second;
};
HWY_INLINE TwoRows lower_and_upper_halves(float32x4_t a, float32x4_t b) {
  const float64x2_t a64 = vreinterpretq_f64_f32(a);
  const float64x2_t b64 = vreinterpretq_f64_f32(b);
  return {vreinterpretq_f32_f64(vtrn1q_f64(a64, b64)), vreinterpretq_f32_f64(vtrn2q_f64(a64, b64))};
}

// C (+)= A B for 2 * kPairs rows and 4 * kQuads columns, whose sums stay in registers.
template <int kPairs, int kQuads>
void unit_block(i64 depth, Bf16Rows a, Bf16Columns<Word> b, float* c, i64 ldc, bool accumulate) {
  float32x4_t sums[kPairs][2 * kQuads];
  FOVEA_UNROLL
  for (int m = 0; m < kPairs; ++m) {
    FOVEA_UNROLL
    for (int n = 0; n < kQuads; ++n) {
      sums[m][2 * n] = sums[m][2 * n + 1] = vdupq_n_f32(0);
    }
  }
  const Word* columns = b.data;
  for (i64 k = 0; k < depth; k += kTerms) {
    bfloat16x8_t rows[kPairs];
    FOVEA_UNROLL
    for (int m = 0; m < kPairs; ++m) {
      const u16* row = a.data + 2 * m * a.stride + k;
      rows[m] = as_bf16(vcombine_u16(vld1_u16(row), vld1_u16(row + a.stride)));
    }
    FOVEA_UNROLL
    for (int n = 0; n < 2 * kQuads; ++n) {
      const bfloat16x8_t two = as_bf16(vreinterpretq_u16_u64(vld1q_u64(columns + 2 * n)));
      FOVEA_UNROLL
      for (int m = 0; m < kPairs; ++m) {
        sums[m][n] = vbfmmlaq_f32(sums[m][n], rows[m], two);
      }
    }
    columns += b.stride;
  }
  FOVEA_UNROLL
  for (int m = 0; m < kPairs; ++m) {
    FOVEA_UNROLL
    for (int n = 0; n < kQuads; ++n) {
      const TwoRows rows = lower_and_upper_halves(sums[m][2 * n], sums[m][2 * n + 1]);
      float* to = c + 2 * m * ldc + 4 * n;
      vst1q_f32(to, accumulate ? vaddq_f32(vld1q_f32(to), rows.first) : rows.first);
      vst1q_f32(to + ldc, accumulate ? vaddq_f32(vld1q_f32(to + ldc), rows.second) : rows.second);
    }
  }
}

// Some columns of all rows. Eight rows and twelve columns take 24 of the 32 registers.
template <int kQuads>
void unit_columns(i64 rows, i64 depth, Bf16Rows a, Bf16Columns<Word> b, float* c, i64 ldc, bool accumulate) {
  i64 row = 0;
  for (; row + 8 <= rows; row += 8) {
    unit_block<4, kQuads>(depth, {a.data + row * a.stride, a.stride}, b, c + row * ldc, ldc, accumulate);
  }
  if (row < rows) {
    unit_block<2, kQuads>(depth, {a.data + row * a.stride, a.stride}, b, c + row * ldc, ldc, accumulate);
  }
}

// Columns are multiples of 4. The columns of B that a block reads stay in the first-level cache for all rows.
inline void unit_product(MatrixUnit&, const Bf16Product<Word>& product) {
  const auto [rows, cols, depth, a, b, c, ldc, accumulate] = product;
  i64 col = 0;
  for (; col + 12 <= cols; col += 12) {
    unit_columns<3>(rows, depth, a, {b.data + col, b.stride}, c + col, ldc, accumulate);
  }
  for (; col + 8 <= cols; col += 8) {
    unit_columns<2>(rows, depth, a, {b.data + col, b.stride}, c + col, ldc, accumulate);
  }
  if (col < cols) {
    unit_columns<1>(rows, depth, a, {b.data + col, b.stride}, c + col, ldc, accumulate);
  }
}

// ---- words ----

// kTerms rows of a vector of fp32 each, `ld_from` apart, to bf16: as words and, if `rows` is not NULL, as rows.
HWY_INLINE void round_rows(const float* from, i64 ld_from, Word* words, u16* rows, i64 ld) {
  uint16x4x4_t all;
  for (int n = 0; n < kTerms; ++n) {
    all.val[n] = vreinterpret_u16_bf16(vcvt_bf16_f32(vld1q_f32(from + n * ld_from)));
    if (rows != nullptr) {
      vst1_u16(rows + n * ld, all.val[n]);
    }
  }
  vst4_u16(reinterpret_cast<u16*>(words), all);
}

// Rows of bf16 as words; `rows` is a multiple of kTerms, `cols` one of a vector of fp32.
inline void interleave_rows(const u16* from, i64 ld, i64 rows, i64 cols, Word* to, i64 ld_to) {
  for (i64 r = 0; r < rows; r += kTerms) {
    Word* line = to + r / kTerms * ld_to;
    for (i64 c = 0; c < cols; c += lanes<float>()) {
      uint16x4x4_t all;
      for (int n = 0; n < kTerms; ++n) {
        all.val[n] = vld1_u16(from + (r + n) * ld + c);
      }
      vst4_u16(reinterpret_cast<u16*>(line + c), all);
    }
  }
}

}  // namespace fovea::cpu::FOVEA_ISA
