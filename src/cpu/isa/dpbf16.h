// SPDX-License-Identifier: Apache-2.0
//
// AVX512-BF16: the instruction VDPBF16PS multiplies 16 pairs of bf16 by 16 others and adds both products of a pair to
// a sum in fp32, the second term first:
//
//     c(m, n) = fma(a(m, 0), b(0, n), fma(a(m, 1), b(1, n), c(m, n)))
//
// each fma rounded to nearest whatever the caller's rounding mode is, denormals are 0 (Intel 64 and IA-32 Architectures
// Software Developer's Manual, volume 2, VDPBF16PS; a Zen 4 gives the same bits).
#pragma once

#include "cpu/isa/gemm.h"
#include "cpu/isa/pairs.h"

namespace fovea::cpu::FOVEA_ISA {

inline constexpr i64 kUnitRows = 16;        // products round rows and columns up to this: a vector
inline constexpr i64 kUnitDepth = 32;       // and terms: a vector of words that is transposed
inline constexpr bool kUnitBeside = false;  // these are vector instructions as well
class UnitSteps;

struct MatrixUnit {};

// A dot product, lane by lane, in the order of the unit's sums.
class UnitDot {
 public:
  HWY_INLINE void add(Simd<float> a, Simd<float> b) {
    if (has_first_) {
      sum_ = fma(first_a_, first_b_, fma(a, b, sum_));
    } else {
      first_a_ = a;
      first_b_ = b;
    }
    has_first_ = !has_first_;
  }
  HWY_INLINE Simd<float> total() const { return has_first_ ? fma(first_a_, first_b_, sum_) : sum_; }

 private:
  Simd<float> sum_{0.0f};
  Simd<float> first_a_{0.0f};
  Simd<float> first_b_{0.0f};
  bool has_first_ = false;
};

// The sums and the products of two vectors of words.
HWY_INLINE Simd<float> fma(Simd<Word> a, Simd<Word> b, Simd<float> sum) {
  return Simd<float>::Raw{
      _mm512_dpbf16_ps(sum.raw.raw, reinterpret_cast<__m512bh>(a.raw.raw), reinterpret_cast<__m512bh>(b.raw.raw))};
}

inline void unit_product(MatrixUnit&, const Bf16Product<Word>& product) {
  const auto [rows, cols, depth, a, b, c, ldc, accumulate] = product;
  const Operand<Word> words{reinterpret_cast<const Word*>(a.data), a.stride / kTerms};
  for (i64 row = 0; row < rows; row += kBlockRows) {
    gemm_rows<Lhs::kByRows, Word>(math::min(i64(kBlockRows), rows - row), cols, depth / kTerms, words.from_row(row),
                                  {b.data, b.stride}, c + row * ldc, ldc, accumulate);
  }
}

}  // namespace fovea::cpu::FOVEA_ISA
