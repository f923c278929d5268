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
// With FOVEA_EMULATED_AMX the same by vectors, for tests on machines without AMX.
#pragma once

#include "cpu/isa/pairs.h"

namespace fovea::cpu::FOVEA_ISA {

inline constexpr i64 kUnitRows = 16;   // of a register
inline constexpr i64 kUnitDepth = 32;  // terms of a product
inline constexpr i64 kUnitPiece = 32;  // the unit works beside the vectors: see forward.h

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

// C (+)= A B for kTall * 16 rows and kWide * 16 columns.
template <int kTall, int kWide>
void unit_block(MatrixUnit& unit, i64 depth, Bf16Rows a, Bf16Columns<Word> b, float* c, i64 ldc, bool accumulate) {
  const i64 c_bytes = ldc * i64(sizeof(float));
  const i64 a_bytes = a.stride * i64(sizeof(u16));
  const i64 b_bytes = b.stride * i64(sizeof(u32));
  float* lower_c = c + kUnitRows * ldc;
  if (accumulate) {
    unit.load<0>(c, c_bytes);
    if constexpr (kWide == 2) {
      unit.load<1>(c + 16, c_bytes);
    }
    if constexpr (kTall == 2) {
      unit.load<2>(lower_c, c_bytes);
    }
    if constexpr (kTall == 2 && kWide == 2) {
      unit.load<3>(lower_c + 16, c_bytes);
    }
  } else {
    unit.clear<0>();
    unit.clear<1>();
    unit.clear<2>();
    unit.clear<3>();
  }
  for (i64 k = 0; k < depth; k += kUnitDepth) {
    const u16* rows = a.data + k;
    const u32* pairs = b.data + k / 2 * b.stride;
    unit.load<4>(rows, a_bytes);
    unit.load<6>(pairs, b_bytes);
    unit.multiply<0, 4, 6>();
    if constexpr (kWide == 2) {
      unit.load<7>(pairs + 16, b_bytes);
      unit.multiply<1, 4, 7>();
    }
    if constexpr (kTall == 2) {
      unit.load<5>(rows + kUnitRows * a.stride, a_bytes);
      unit.multiply<2, 5, 6>();
    }
    if constexpr (kTall == 2 && kWide == 2) {
      unit.multiply<3, 5, 7>();
    }
  }
  unit.store<0>(c, c_bytes);
  if constexpr (kWide == 2) {
    unit.store<1>(c + 16, c_bytes);
  }
  if constexpr (kTall == 2) {
    unit.store<2>(lower_c, c_bytes);
  }
  if constexpr (kTall == 2 && kWide == 2) {
    unit.store<3>(lower_c + 16, c_bytes);
  }
}

// C (+)= A B. Rows and columns are multiples of 16, the depth one of 32. The columns of B that a block reads stay in
// the first-level cache for all rows.
inline void unit_product(MatrixUnit& unit, i64 rows, i64 cols, i64 depth, Bf16Rows a, Bf16Columns<Word> b, float* c,
                         i64 ldc, bool accumulate) {
  for (i64 col = 0; col < cols; col += 32) {
    const Bf16Columns<Word> some{b.data + col, b.stride};
    for (i64 row = 0; row < rows; row += 32) {
      const Bf16Rows strip{a.data + row * a.stride, a.stride};
      float* to = c + row * ldc + col;
      if (rows - row > 16) {
        cols - col > 16 ? unit_block<2, 2>(unit, depth, strip, some, to, ldc, accumulate)
                        : unit_block<2, 1>(unit, depth, strip, some, to, ldc, accumulate);
      } else {
        cols - col > 16 ? unit_block<1, 2>(unit, depth, strip, some, to, ldc, accumulate)
                        : unit_block<1, 1>(unit, depth, strip, some, to, ldc, accumulate);
      }
    }
  }
}

}  // namespace fovea::cpu::FOVEA_ISA
