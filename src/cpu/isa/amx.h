// SPDX-License-Identifier: Apache-2.0
//
// AMX: eight registers of 16 rows of 64 bytes each, and a product of two of them. C has 16 x 16 numbers of fp32, A
// 16 rows of 32 numbers of bf16, B 16 rows of 16 pairs of bf16: pair n of row k is b(2 k, n) and b(2 k + 1, n). Even
// and odd terms of an element are summed apart, and then are added to it:
//
//     c(m, n) += (a(m, 0) b(0, n) + a(m, 2) b(2, n) + ...) + (a(m, 1) b(1, n) + ...)
//
// rounded to nearest whatever the caller's rounding mode is, denormals are 0 (Intel 64 and IA-32 Architectures Software
// Developer's Manual, volume 2, TDPBF16PS).
//
// With FOVEA_EMULATED_AMX the same sums in the same order by vectors, for tests on machines without AMX; there rounding
// follows the caller's mode, and sums that are denormal stay.
#pragma once

#include "cpu/isa/pairs.h"

namespace fovea::cpu::FOVEA_ISA {

inline constexpr i64 kUnitRows = 16;       // of a register
inline constexpr i64 kUnitDepth = 32;      // terms of a product
inline constexpr bool kUnitBeside = true;  // the unit works beside the vectors: see forward.h

#ifdef FOVEA_EMULATED_AMX
class MatrixUnit {
 public:
  template <int kRegister>
  void clear() {
    registers_[kRegister] = {};
  }
  template <int kRegister>
  void load(const void* from, i64 stride) {
    for (i64 row = 0; row < kUnitRows; ++row) {
      __builtin_memcpy(registers_[kRegister].row[row], static_cast<const u8*>(from) + row * stride, 64);
    }
  }
  template <int kRegister>
  void store(void* to, i64 stride) const {
    for (i64 row = 0; row < kUnitRows; ++row) {
      __builtin_memcpy(static_cast<u8*>(to) + row * stride, registers_[kRegister].row[row], 64);
    }
  }
  template <int kC, int kA, int kB>
  void multiply() {
    for (i64 m = 0; m < kUnitRows; ++m) {
      for (i64 n = 0; n < kUnitRows; n += lanes<float>()) {
        Simd<float> even(0.0f);
        Simd<float> odd(0.0f);
        for (i64 k = 0; k < kUnitRows; ++k) {
          const U32 d;
          const u32 a = registers_[kA].row[m][k];
          const auto b = hn::LoadU(d, registers_[kB].row[k] + n);
          even = fma(number(hn::Set(d, a << 16)), number(hn::ShiftLeft<16>(b)), even);
          odd = fma(number(hn::Set(d, a & kHigh)), number(hn::And(b, hn::Set(d, kHigh))), odd);
        }
        float* c = reinterpret_cast<float*>(registers_[kC].row[m]) + n;
        (Simd<float>::load(c) + (even + odd)).store(c);
      }
    }
  }

 private:
  static constexpr u32 kHigh = 0xFFFF0000u;

  static HWY_INLINE Simd<float> number(hn::Vec<U32> bits) {
    const Simd<float> value = hn::BitCast(F32(), bits);
    return select(abs(value) < Simd<float>(0x1p-126f), Simd<float>(0.0f), value);
  }

  struct Register {
    alignas(64) u32 row[kUnitRows][16];
  };
  Register registers_[8];
};
#else
// The registers hold what is loaded from the first to the last of these calls: no more than one of these objects at a
// time. Note: inline assembly, since g++ 12's own functions do not say that a load reads memory.
class MatrixUnit {
 public:
  MatrixUnit() {
    struct alignas(64) {
      u8 palette = 1;
      u8 first_row = 0;
      u8 reserved[14] = {};
      u16 bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      u8 rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const config;
    static_assert(sizeof config == 64);
    __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;
  ~MatrixUnit() { __asm__ volatile("tilerelease"); }

  template <int kRegister>
  HWY_INLINE void clear() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(kRegister));
  }
  template <int kRegister>
  HWY_INLINE void load(const void* from, i64 stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kRegister) : "memory");
  }
  template <int kRegister>
  HWY_INLINE void store(void* to, i64 stride) const {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kRegister) : "memory");
  }
  template <int kC, int kA, int kB>
  HWY_INLINE void multiply() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
};
#endif

// A dot product, lane by lane, in the order of the unit's sums.
class UnitDot {
 public:
  HWY_INLINE void add(Simd<float> a, Simd<float> b) {
    Simd<float>& half = terms_ % 2 == 0 ? even_ : odd_;
    half = fma(a, b, half);
    if (++terms_ % kUnitDepth == 0) {
      sum_ = total();
      even_ = odd_ = Simd<float>(0.0f);
    }
  }
  HWY_INLINE Simd<float> total() const { return sum_ + (even_ + odd_); }

 private:
  Simd<float> sum_{0.0f};
  Simd<float> even_{0.0f};
  Simd<float> odd_{0.0f};
  i64 terms_ = 0;
};

// ---- products ----

// Registers 0 to 3 hold kTall * 16 rows and kWide * 16 columns of C. Registers without a part in it are left alone.
template <int kTall, int kWide, class Function>
HWY_INLINE void for_each_sum(float* c, i64 ldc, Function function) {
  float* lower = c + kUnitRows * ldc;
  function.template operator()<0>(c);
  if constexpr (kWide == 2) {
    function.template operator()<1>(c + 16);
  }
  if constexpr (kTall == 2) {
    function.template operator()<2>(lower);
  }
  if constexpr (kTall == 2 && kWide == 2) {
    function.template operator()<3>(lower + 16);
  }
}

// kUnitDepth terms of these sums.
template <int kTall, int kWide>
HWY_INLINE void unit_step(MatrixUnit& unit, const u16* a, i64 lda, const Word* b, i64 ldb) {
  const i64 a_bytes = lda * i64(sizeof(u16));
  const i64 b_bytes = ldb * i64(sizeof(Word));
  unit.load<4>(a, a_bytes);
  unit.load<6>(b, b_bytes);
  unit.multiply<0, 4, 6>();
  if constexpr (kWide == 2) {
    unit.load<7>(b + 16, b_bytes);
    unit.multiply<1, 4, 7>();
  }
  if constexpr (kTall == 2) {
    unit.load<5>(a + kUnitRows * lda, a_bytes);
    unit.multiply<2, 5, 6>();
  }
  if constexpr (kTall == 2 && kWide == 2) {
    unit.multiply<3, 5, 7>();
  }
}

// C (+)= A B in steps of kUnitDepth terms, between which the vectors may do other work: 32 columns of C at a time,
// whose sums stay in the unit meanwhile. At most 32 rows. Without terms C = A B is 0, in one step.
class UnitSteps {
 public:
  UnitSteps() = default;
  explicit UnitSteps(const Bf16Product<Word>& product) : product_(product) {}

  HWY_INLINE i64 count() const { return (product_.cols + 31) / 32 * steps_of_columns(); }

  // The next `count` steps, or as many as are left. Returns how many that were.
  i64 advance(MatrixUnit& unit, i64 count) {
    i64 done = 0;
    while (done < count && col_ < product_.cols) {
      const i64 some = math::min(count - done, steps_of_columns() - term_ / kUnitDepth);
      const bool wide = product_.cols - col_ > 16;
      if (product_.rows > 16) {
        wide ? advance<2, 2>(unit, some) : advance<2, 1>(unit, some);
      } else {
        wide ? advance<1, 2>(unit, some) : advance<1, 1>(unit, some);
      }
      done += some;
    }
    return done;
  }
  void finish(MatrixUnit& unit) { advance(unit, count()); }

 private:
  HWY_INLINE i64 steps_of_columns() const { return math::max(product_.depth / kUnitDepth, i64(1)); }

  template <int kTall, int kWide>
  void advance(MatrixUnit& unit, i64 count) {
    const auto [rows, cols, depth, a, b, c, ldc, accumulate] = product_;
    const i64 c_bytes = ldc * i64(sizeof(float));
    if (term_ == 0) {
      for_each_sum<kTall, kWide>(c + col_, ldc, [&, add = accumulate]<int kRegister>(const float* sums) HWY_ATTR {
        add ? unit.load<kRegister>(sums, c_bytes) : unit.clear<kRegister>();
      });
    }
    for (const i64 end = math::min(term_ + count * kUnitDepth, depth); term_ < end; term_ += kUnitDepth) {
      unit_step<kTall, kWide>(unit, a.data + term_, a.stride, b.data + term_ / kTerms * b.stride + col_, b.stride);
    }
    if (term_ == depth) {
      for_each_sum<kTall, kWide>(c + col_, ldc,
                                 [&]<int kRegister>(float* sums) HWY_ATTR { unit.store<kRegister>(sums, c_bytes); });
      term_ = 0;
      col_ += 32;
    }
  }

  Bf16Product<Word> product_{};
  i64 col_ = 0;  // of the next step
  i64 term_ = 0;
};

// The columns of B that are read stay in the first-level cache for all rows.
inline void unit_product(MatrixUnit& unit, const Bf16Product<Word>& product) {
  const auto [rows, cols, depth, a, b, c, ldc, accumulate] = product;
  for (i64 col = 0; col < cols; col += 32) {
    for (i64 row = 0; row < rows; row += 32) {
      UnitSteps({.rows = math::min(rows - row, i64(32)),
                 .cols = math::min(cols - col, i64(32)),
                 .depth = depth,
                 .a = {a.data + row * a.stride, a.stride},
                 .b = {b.data + col, b.stride},
                 .c = c + row * ldc + col,
                 .ldc = ldc,
                 .accumulate = accumulate})
          .finish(unit);
    }
  }
}

}  // namespace fovea::cpu::FOVEA_ISA
