// SPDX-License-Identifier: Apache-2.0
//
// Simd<T>: one full vector of the instruction set that this object is compiled for, with the operators and
// functions that the templates of src/math call, so that a formula written there runs on a float, a double or a
// vector alike. A thin coat over Google Highway, which is used header-only and by static dispatch.
//
// exp: x = n ln 2 + r with |r| <= ln 2 / 2, e^r - 1 by a polynomial, 2^n put into the exponent's bits. Within 2 ulp;
// exp(-inf) = 0, NaN stays, results below 2^-125.5 are 0, and nothing touches the control register.
// exp_of_negative is for weights, which are never above 1, with a quarter fewer instructions.
#pragma once

// Where there are no vector instructions to count on, Highway emulates vectors of 128 bits in plain C++, which it
// refuses to g++ before 12.3 for a fault in recognising products of 16-bit integers: none are formed here.
#define HWY_BROKEN_EMU128 0
#include <hwy/base.h>
#ifdef __aarch64__
// Until 1.0.5 Highway's functions for NEON are compiled for processors with AES, which it uses in few of them. g++
// inlines no such function into one for every processor. The flags of this object alone decide.
#undef HWY_PUSH_ATTRIBUTES
#undef HWY_POP_ATTRIBUTES
#define HWY_PUSH_ATTRIBUTES(targets)
#define HWY_POP_ATTRIBUTES
#endif
#include <hwy/cache_control.h>
#include <hwy/highway.h>
#ifdef __aarch64__
#undef HWY_ATTR
#define HWY_ATTR
#endif

#include "math/dropout.h"
#include "math/scalar.h"

namespace fovea::cpu::FOVEA_ISA {

// An array stays in registers if every loop over it is unrolled early enough. Left alone, GCC does that too late: on
// x86-64 the sums of a product go to the stack and back around its inner loop, on aarch64 in every round of it. Clang
// has a limit that the 12 rows of a product exceed, and each sum then goes through memory, at half the speed.
#if defined(__clang__)
#define FOVEA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define FOVEA_UNROLL _Pragma("GCC unroll 16")
#endif

namespace hn = hwy::HWY_NAMESPACE;

using math::i32;
using math::i64;
using math::u32;
using math::u64;
using u8 = unsigned char;
using u16 = unsigned short;

template <class T>
using Tag = hn::ScalableTag<T>;

template <class T>
using Mask = hn::Mask<Tag<T>>;

template <class T>
constexpr i64 lanes() {
  return HWY_LANES(T);
}

template <class T>
struct Simd {
  using Raw = hn::Vec<Tag<T>>;
  Raw raw;

  Simd() = default;
  HWY_INLINE Simd(Raw value) : raw(value) {}
  HWY_INLINE Simd(T scalar) : raw(hn::Set(Tag<T>(), scalar)) {}

  static HWY_INLINE Simd load(const T* from) { return hn::LoadU(Tag<T>(), from); }
  HWY_INLINE void store(T* to) const { hn::StoreU(raw, Tag<T>(), to); }
  // 0, 1, 2, ... from `first` on.
  static HWY_INLINE Simd iota(T first) { return hn::Add(hn::Iota(Tag<T>(), T(0)), hn::Set(Tag<T>(), first)); }

  friend HWY_INLINE Simd operator+(Simd a, Simd b) { return hn::Add(a.raw, b.raw); }
  friend HWY_INLINE Simd operator-(Simd a, Simd b) { return hn::Sub(a.raw, b.raw); }
  friend HWY_INLINE Simd operator*(Simd a, Simd b) { return hn::Mul(a.raw, b.raw); }
  friend HWY_INLINE Simd operator/(Simd a, Simd b) { return hn::Div(a.raw, b.raw); }
  friend HWY_INLINE Simd operator-(Simd a) { return hn::Neg(a.raw); }
  friend HWY_INLINE Simd operator&(Simd a, Simd b) { return hn::And(a.raw, b.raw); }
  friend HWY_INLINE Simd operator|(Simd a, Simd b) { return hn::Or(a.raw, b.raw); }
  friend HWY_INLINE Simd operator^(Simd a, Simd b) { return hn::Xor(a.raw, b.raw); }
  friend HWY_INLINE Mask<T> operator==(Simd a, Simd b) { return hn::Eq(a.raw, b.raw); }
  friend HWY_INLINE Mask<T> operator<(Simd a, Simd b) { return hn::Lt(a.raw, b.raw); }
  friend HWY_INLINE Mask<T> operator<=(Simd a, Simd b) { return hn::Le(a.raw, b.raw); }

  friend HWY_INLINE Simd select(Mask<T> condition, Simd yes, Simd no) {
    return hn::IfThenElse(condition, yes.raw, no.raw);
  }
  friend HWY_INLINE Simd abs(Simd a) { return hn::Abs(a.raw); }
};

// a * b + c, rounded once where the processor can.
template <class T>
HWY_INLINE Simd<T> fma(Simd<T> a, Simd<T> b, Simd<T> c) {
  return hn::MulAdd(a.raw, b.raw, c.raw);
}

// Highway's emulated vectors drop a NaN in either place; real ones keep it in b, as math::max does.
inline constexpr bool kMaxKeepsNan = HWY_TARGET != HWY_EMU128;

// The larger one; a NaN in b stays.
template <class T>
HWY_INLINE Simd<T> max(Simd<T> a, Simd<T> b) {
  if constexpr (kMaxKeepsNan) {
    return hn::Max(a.raw, b.raw);
  } else {
    return select(b < a, a, b);
  }
}

template <class T>
HWY_INLINE Simd<T> min(Simd<T> a, Simd<T> b) {
  if constexpr (kMaxKeepsNan) {
    return hn::Min(a.raw, b.raw);
  } else {
    return select(a < b, a, b);
  }
}

template <class T>
HWY_INLINE T max_of_lanes(Simd<T> a) {
  return hn::GetLane(hn::MaxOfLanes(Tag<T>(), a.raw));
}

template <class T>
HWY_INLINE T sum_of_lanes(Simd<T> a) {
  return hn::GetLane(hn::SumOfLanes(Tag<T>(), a.raw));
}

// Lanes 0 to count - 1; any count, also negative, or beyond 32 bits, which Highway takes for an integer of a lane.
template <class T>
HWY_INLINE Mask<T> first_lanes(i64 count) {
  return hn::FirstN(Tag<T>(), static_cast<size_t>(math::min(math::max(count, i64(0)), lanes<T>())));
}

// ---- exponentials ----

template <class T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  using Bits = u32;
  static constexpr int kMantissa = 23;
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  static constexpr float kLog2e = 1.44269504089f;
  static constexpr float kLn2High = 0.693359375f;  // short enough that n * kLn2High is exact
  static constexpr float kLn2Low = -2.12194440e-4f;
  static constexpr float kLowest = -87.5f;  // gives 0, as all from -87 on does
  static constexpr float kHighest = 89.0f;  // gives infinity
  static constexpr Bits kBiasLess1 = 126;
  // (e^r - 1 - r) / r^2, interpolated at Chebyshev's nodes: e^r within 8e-9.
  static constexpr int kTerms = 5;
  static constexpr float kSeries[kTerms] = {0.5f, 0.1666657031f, 0.04166654497f, 0.008364380337f, 0.001392768463f};
  // 2^r: the relative error is 2e-9 at most.
  static constexpr float kLowestPower = -88.0f;  // its exponent's bits are 0
  static constexpr float kRoundAndBias = kRound + 127.0f;
  static constexpr int kPowerTerms = 7;
  static constexpr float kPowerSeries[kPowerTerms] = {1.0f,         0.6931472029f,   0.2402264791f,   0.05550332471f,
                                                      0.009618437f, 0.001339887452f, 0.0001535336159f};
};

template <>
struct ExpConstants<double> {
  using Bits = u64;
  static constexpr int kMantissa = 52;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLog2e = 1.4426950408889634;
  static constexpr double kLn2High = 0x1.62e42feep-1;
  static constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr double kLowest = -708.7;
  static constexpr double kHighest = 710.0;
  static constexpr Bits kBiasLess1 = 1022;
  // Taylor's: 1 / (k + 2)!.
  static constexpr int kTerms = 12;
  static constexpr double kSeries[kTerms] = {1.0 / 2,         1.0 / 6,          1.0 / 24,          1.0 / 120,
                                             1.0 / 720,       1.0 / 5040,       1.0 / 40320.0,     1.0 / 362880.0,
                                             1.0 / 3628800.0, 1.0 / 39916800.0, 1.0 / 479001600.0, 1.0 / 6227020800.0};
  // Taylor's: (ln 2)^k / k!.
  static constexpr double kLowestPower = -709.1;
  static constexpr double kRoundAndBias = kRound + 1023.0;
  static constexpr int kPowerTerms = 14;
  static constexpr double kPowerSeries[kPowerTerms] = {1.0,
                                                       0.6931471805599453,
                                                       0.2402265069591007,
                                                       0.055504108664821576,
                                                       0.009618129107628477,
                                                       0.0013333558146428441,
                                                       0.00015403530393381606,
                                                       1.5252733804059838e-05,
                                                       1.3215486790144305e-06,
                                                       1.0178086009239696e-07,
                                                       7.054911620801121e-09,
                                                       4.44553827187081e-10,
                                                       2.5678435993488196e-11,
                                                       1.3691488853904124e-12};
};

// e^x = 2 * half_power * (1 + rest), rest = e^r - 1.
template <class T>
struct ExpParts {
  Simd<T> half_power;
  Simd<T> rest;
};

template <class T>
HWY_INLINE ExpParts<T> exp_parts(Simd<T> x) {
  using C = ExpConstants<T>;
  using Bits = typename C::Bits;
  x = max(Simd<T>(C::kLowest), min(Simd<T>(C::kHighest), x));
  const Simd<T> shifted = fma(x, Simd<T>(C::kLog2e), Simd<T>(C::kRound));
  const Simd<T> n = shifted - Simd<T>(C::kRound);
  Simd<T> r = fma(n, Simd<T>(-C::kLn2High), x);
  r = fma(n, Simd<T>(-C::kLn2Low), r);
  Simd<T> series(C::kSeries[C::kTerms - 1]);
  for (int k = C::kTerms - 2; k >= 0; --k) {
    series = fma(series, r, Simd<T>(C::kSeries[k]));
  }
  const Simd<T> rest = fma(r * r, series, r);
  const Tag<Bits> bits;
  const auto exponent = hn::ShiftLeft<C::kMantissa>(hn::BitCast(bits, shifted.raw));
  const auto bias = hn::Set(bits, C::kBiasLess1 << C::kMantissa);
  return {Simd<T>(hn::BitCast(Tag<T>(), hn::Add(exponent, bias))), rest};
}

template <class T>
HWY_INLINE Simd<T> exp(Simd<T> x) {
  const ExpParts<T> parts = exp_parts(x);
  return fma(parts.rest, Simd<T>(T(2)), Simd<T>(T(2))) * parts.half_power;
}

// e^x for x <= 0: x log2(e) = n + r with |r| <= 1/2, of which only r is rounded, and 2^r by a polynomial. log2(e) is
// rounded, for which the result is off by a quarter of a unit in the last place for each unit of x.
template <class T>
HWY_INLINE Simd<T> exp_of_negative(Simd<T> x) {
  using C = ExpConstants<T>;
  x = max(Simd<T>(C::kLowestPower), x);
  const Simd<T> shifted = fma(x, Simd<T>(C::kLog2e), Simd<T>(C::kRoundAndBias));  // n and the exponent's bias: low bits
  const Simd<T> n = shifted - Simd<T>(C::kRoundAndBias);
  const Simd<T> r = fma(x, Simd<T>(C::kLog2e), -n);
  Simd<T> series(C::kPowerSeries[C::kPowerTerms - 1]);
  for (int k = C::kPowerTerms - 2; k >= 0; --k) {
    series = fma(series, r, Simd<T>(C::kPowerSeries[k]));
  }
  const Tag<typename C::Bits> bits;
  const Simd<T> power = hn::BitCast(Tag<T>(), hn::ShiftLeft<C::kMantissa>(hn::BitCast(bits, shifted.raw)));
  return series * power;
}

// With E = e^2|x| - 1: E / (E + 2), which keeps its relative precision near 0, and 1 - 2 / (E + 2) from one half on,
// which is rounded once: the derivative 1 - tanh^2 is made of its last digits.
template <class T>
HWY_INLINE Simd<T> tanh(Simd<T> x) {
  const Simd<T> one(T(1));
  const Simd<T> two(T(2));
  const Simd<T> doubled = min(Simd<T>(T(sizeof(T) == 4 ? 30 : 60)), abs(x) + abs(x));
  const ExpParts<T> parts = exp_parts(doubled);
  const Simd<T> power = parts.half_power + parts.half_power;
  const Simd<T> less1 = fma(power, parts.rest, power - one);
  const Simd<T> inverse = one / (less1 + two);
  const Simd<T> magnitude = select(two < less1, fma(-two, inverse, one), less1 * inverse);
  return hn::CopySign(magnitude.raw, x.raw);
}

// ---- integers of dropout ----

// 64-bit products of 32-bit lanes, as high and low words.
HWY_INLINE void mul_wide(Simd<u32> a, u32 b, Simd<u32>& high, Simd<u32>& low) {
  const Tag<u32> d32;
  const Tag<u64> d64;
  const auto factor = hn::Set(d32, b);
  const auto even = hn::MulEven(a.raw, factor);
  const auto odd = hn::MulEven(hn::BitCast(d32, hn::ShiftRight<32>(hn::BitCast(d64, a.raw))), factor);
  high = hn::OddEven(hn::BitCast(d32, odd), hn::BitCast(d32, hn::ShiftRight<32>(even)));
  low = hn::OddEven(hn::BitCast(d32, hn::ShiftLeft<32>(odd)), hn::BitCast(d32, even));
}

// Lanes where a >= b, unsigned.
HWY_INLINE Mask<u32> at_least(Simd<u32> a, Simd<u32> b) { return hn::Eq(hn::Max(a.raw, b.raw), a.raw); }

}  // namespace fovea::cpu::FOVEA_ISA
