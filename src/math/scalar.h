// SPDX-License-Identifier: Apache-2.0
//
// The scalars of the definition: integer names, the functions that score.h and softmax.h call, and Dual.
//
// Everything in src/math is written once for four readers: the fp64 reference, the CPU kernels (where T is a
// vector of one instruction set), the GPU kernels (text given to NVRTC) and the tests. Hence three rules:
//   - no header is included, not even a standard one: NVRTC has none;
//   - everything lives in an inline namespace named by FOVEA_ISA, so that an object compiled for AVX-512 never
//     lends its instantiations to code that must run without it;
//   - functions are called unqualified, so that a vector type brings its own exp, tanh, select by ADL.
#ifndef FOVEA_MATH_SCALAR_H
#define FOVEA_MATH_SCALAR_H

#ifndef FOVEA_ISA
#define FOVEA_ISA baseline
#endif

namespace fovea::math {
inline namespace FOVEA_ISA {

#if defined(__CUDACC_RTC__)
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
#else
using i32 = __INT32_TYPE__;
using u32 = __UINT32_TYPE__;
using i64 = __INT64_TYPE__;
using u64 = __UINT64_TYPE__;
#endif

#if defined(__CUDACC_RTC__)
constexpr float exp(float x) { return ::expf(x); }
constexpr double exp(double x) { return ::exp(x); }
constexpr float exp2(float x) { return ::exp2f(x); }
constexpr double exp2(double x) { return ::exp2(x); }
constexpr float log(float x) { return ::logf(x); }
constexpr double log(double x) { return ::log(x); }
constexpr float tanh(float x) { return ::tanhf(x); }
constexpr double tanh(double x) { return ::tanh(x); }
#else
inline float exp(float x) { return __builtin_expf(x); }
inline double exp(double x) { return __builtin_exp(x); }
inline float exp2(float x) { return __builtin_exp2f(x); }
inline double exp2(double x) { return __builtin_exp2(x); }
inline float log(float x) { return __builtin_logf(x); }
inline double log(double x) { return __builtin_log(x); }
inline float tanh(float x) { return __builtin_tanhf(x); }
inline double tanh(double x) { return __builtin_tanh(x); }
#endif

constexpr float abs(float x) { return x < 0 ? -x : x; }
constexpr double abs(double x) { return x < 0 ? -x : x; }

// The larger one; `b` where either is NaN, as the max instructions of x86 have it.
constexpr float max(float a, float b) { return a > b ? a : b; }
constexpr double max(double a, double b) { return a > b ? a : b; }

constexpr float select(bool condition, float yes, float no) { return condition ? yes : no; }
constexpr double select(bool condition, double yes, double no) { return condition ? yes : no; }

constexpr i64 min(i64 a, i64 b) { return a < b ? a : b; }
constexpr i64 max(i64 a, i64 b) { return a > b ? a : b; }
constexpr i32 min(i32 a, i32 b) { return a < b ? a : b; }
constexpr i32 max(i32 a, i32 b) { return a > b ? a : b; }

// +infinity as a scalar of the type that T's lanes have; a vector type specialises this.
template <class T>
struct Limits {
  static constexpr T infinity() { return T(__builtin_bit_cast(float, 0x7F800000u)); }
};

// A value and its derivative by one variable. A formula of score.h that is handed Dual{dot, 1} gives the score
// and its derivative by the dot product, so the backward has no second copy of it.
template <class T>
struct Dual {
  T value;
  T derivative;

  friend constexpr Dual operator+(Dual a, Dual b) { return {a.value + b.value, a.derivative + b.derivative}; }
  friend constexpr Dual operator-(Dual a, Dual b) { return {a.value - b.value, a.derivative - b.derivative}; }
  friend constexpr Dual operator*(Dual a, Dual b) {
    return {a.value * b.value, a.derivative * b.value + a.value * b.derivative};
  }
  // With what does not depend on the variable: a scalar, or a T.
  template <class S>
  friend constexpr Dual operator+(Dual a, S b) {
    return {a.value + b, a.derivative};
  }
  template <class S>
  friend constexpr Dual operator-(Dual a, S b) {
    return {a.value - b, a.derivative};
  }
  template <class S>
  friend constexpr Dual operator*(Dual a, S b) {
    return {a.value * b, a.derivative * b};
  }
  friend constexpr Dual tanh(Dual a) {
    const T t = tanh(a.value);
    return {t, a.derivative - a.derivative * (t * t)};
  }
};

}  // namespace FOVEA_ISA
}  // namespace fovea::math

#endif  // FOVEA_MATH_SCALAR_H
