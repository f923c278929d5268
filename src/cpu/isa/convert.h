// SPDX-License-Identifier: Apache-2.0
//
// Between the caller's types and the types of computation: fp32, fp16 and bf16 to float and back, fp64 to double; and
// for biases of an fp64 problem, each of them to double and back. Every store rounds once, to nearest, ties to even.
#pragma once

#include "cpu/isa/simd.h"
#include "fovea/c.h"

namespace fovea::cpu::FOVEA_ISA {

// Vectors of T from the caller's types. The 16-bit types are told apart by these names.
struct Half {
  u16 bits;
};
struct Bfloat16 {
  u16 bits;
};

template <class A, class B>
inline constexpr bool kSameType = false;
template <class A>
inline constexpr bool kSameType<A, A> = true;

using F32 = Tag<float>;
using U32 = Tag<u32>;
using U16 = hn::Rebind<uint16_t, F32>;

// Where there are instructions for it: Highway's own code for other processors takes infinities for numbers.
#if defined(__F16C__) || HWY_ARCH_ARM_A64
#define FOVEA_CONVERTS_HALF 1
#else
#define FOVEA_CONVERTS_HALF 0
#endif

// Without conversion instructions: the exponents of half precision are moved to those of float by a multiplication.
HWY_INLINE hn::Vec<F32> half_to_float(hn::Vec<U32> half) {
  const F32 f32;
  const U32 d32;
  const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(d32, 0x8000u)));
  const auto magnitude = hn::And(half, hn::Set(d32, 0x7FFFu));
  const auto scaled = hn::Mul(hn::BitCast(f32, hn::ShiftLeft<13>(magnitude)), hn::Set(f32, 0x1p112f));
  const auto special = hn::BitCast(f32, hn::Or(hn::ShiftLeft<13>(magnitude), hn::Set(d32, 0x7F800000u)));
  const auto is_special = hn::Gt(hn::BitCast(Tag<i32>(), magnitude), hn::Set(Tag<i32>(), 0x7BFF));
  const auto value = hn::IfThenElse(hn::RebindMask(f32, is_special), special, scaled);
  return hn::Or(value, hn::BitCast(f32, sign));
}

HWY_INLINE hn::Vec<U32> float_to_half(hn::Vec<F32> value) {
  const F32 f32;
  const U32 d32;
  const Tag<i32> s32;
  const auto bits = hn::BitCast(d32, value);
  const auto sign = hn::ShiftRight<16>(hn::And(bits, hn::Set(d32, 0x80000000u)));
  const auto magnitude = hn::And(bits, hn::Set(d32, 0x7FFFFFFFu));
  const auto signed_magnitude = hn::BitCast(s32, magnitude);
  // Normal: to nearest even in the integers, exponent rebased; a carry goes up by itself, past 65504 to infinity.
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d32, 1u));
  const auto rounded = hn::Add(hn::Add(magnitude, hn::Set(d32, 0xFFFu - (112u << 23))), odd);
  const auto normal = hn::BitCast(s32, hn::ShiftRight<13>(rounded));
  const auto infinity = hn::Set(s32, 0x7C00);
  auto result = hn::Min(normal, infinity);
  // Below 2^-14: adding 0.5 leaves the rounded denormal in the low bits.
  const auto small = hn::BitCast(s32, hn::Add(hn::BitCast(f32, magnitude), hn::Set(f32, 0.5f)));
  const auto denormal = hn::Sub(small, hn::Set(s32, 0x3F000000));
  result = hn::IfThenElse(hn::Lt(signed_magnitude, hn::Set(s32, 0x38800000)), denormal, result);
  result = hn::IfThenElse(hn::Gt(signed_magnitude, hn::Set(s32, 0x477FFFFF)), infinity, result);
  result = hn::IfThenElse(hn::Gt(signed_magnitude, hn::Set(s32, 0x7F800000)), hn::Set(s32, 0x7E00), result);
  return hn::Or(hn::BitCast(d32, result), sign);
}

HWY_INLINE hn::Vec<U32> float_to_bfloat16(hn::Vec<F32> value) {
  const U32 d32;
  const auto bits = hn::BitCast(d32, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1u));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(d32, 0x7FFFu)), odd);
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x400000u));
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(value));
  return hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, rounded));
}

HWY_INLINE Simd<float> load_as(const float* from, float) { return Simd<float>::load(from); }
HWY_INLINE Simd<float> load_as(const Half* from, float) {
#if !FOVEA_CONVERTS_HALF
  return half_to_float(hn::PromoteTo(U32(), hn::LoadU(U16(), reinterpret_cast<const uint16_t*>(from))));
#else
  const hn::Rebind<hwy::float16_t, F32> halves;
  return hn::PromoteTo(F32(), hn::LoadU(halves, reinterpret_cast<const hwy::float16_t*>(from)));
#endif
}
HWY_INLINE Simd<float> load_as(const Bfloat16* from, float) {
  const auto bits = hn::PromoteTo(U32(), hn::LoadU(U16(), reinterpret_cast<const uint16_t*>(from)));
  return hn::BitCast(F32(), hn::ShiftLeft<16>(bits));
}
HWY_INLINE Simd<double> load_as(const double* from, double) { return Simd<double>::load(from); }

HWY_INLINE void store_as(Simd<float> value, float* to) { value.store(to); }
HWY_INLINE void store_as(Simd<float> value, Half* to) {
#if !FOVEA_CONVERTS_HALF
  hn::StoreU(hn::TruncateTo(U16(), float_to_half(value.raw)), U16(), reinterpret_cast<uint16_t*>(to));
#else
  const hn::Rebind<hwy::float16_t, F32> halves;
  hn::StoreU(hn::DemoteTo(halves, value.raw), halves, reinterpret_cast<hwy::float16_t*>(to));
#endif
}
HWY_INLINE void store_as(Simd<float> value, Bfloat16* to) {
#ifdef __AVX512BF16__  // with a matrix unit, which like this instruction takes denormals for 0
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value.raw.raw)));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  vst1_u16(reinterpret_cast<u16*>(to), vreinterpret_u16_bf16(vcvt_bf16_f32(value.raw.raw)));
#else
  hn::StoreU(hn::TruncateTo(U16(), float_to_bfloat16(value.raw)), U16(), reinterpret_cast<uint16_t*>(to));
#endif
}
HWY_INLINE void store_as(Simd<double> value, double* to) { value.store(to); }

// Two vectors, side by side.
template <class T, class To>
HWY_INLINE void store_as(Simd<T> first, Simd<T> second, To* to) {
#ifdef __AVX512BF16__
  if constexpr (kSameType<To, Bfloat16>) {
    _mm512_storeu_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.raw.raw, first.raw.raw)));
    return;
  }
#endif
  store_as(first, to);
  store_as(second, to + lanes<T>());
}

// Rows of any length: what is left after whole vectors goes by masks where a masked access cannot fault, else through
// a buffer.
template <class From, class T>
void convert_in(const From* from, T* to, i64 count) {
  constexpr i64 kLanes = lanes<T>();
  i64 n = 0;
  for (; n + kLanes <= count; n += kLanes) {
    load_as(from + n, T()).store(to + n);
  }
#if !HWY_MEM_OPS_MIGHT_FAULT
  if constexpr (kSameType<From, T>) {
    const Mask<T> rest = first_lanes<T>(count - n);
    hn::BlendedStore(hn::MaskedLoad(rest, Tag<T>(), from + n), rest, Tag<T>(), to + n);
    return;
  }
#endif
  if (n < count) {
    From rest[kLanes] = {};
    T values[kLanes];
    for (i64 i = n; i < count; ++i) {
      rest[i - n] = from[i];
    }
    load_as(rest, T()).store(values);
    for (i64 i = n; i < count; ++i) {
      to[i] = values[i - n];
    }
  }
}

template <class To, class T>
void convert_out(const T* from, To* to, i64 count) {
  constexpr i64 kLanes = lanes<T>();
  i64 n = 0;
  for (; n + kLanes <= count; n += kLanes) {
    store_as(Simd<T>::load(from + n), to + n);
  }
#if !HWY_MEM_OPS_MIGHT_FAULT
  if constexpr (kSameType<To, T>) {
    const Mask<T> rest = first_lanes<T>(count - n);
    hn::BlendedStore(hn::MaskedLoad(rest, Tag<T>(), from + n), rest, Tag<T>(), to + n);
    return;
  }
#endif
  if (n < count) {
    T rest[kLanes] = {};
    To values[kLanes];
    for (i64 i = n; i < count; ++i) {
      rest[i - n] = from[i];
    }
    store_as(Simd<T>::load(rest), values);
    for (i64 i = n; i < count; ++i) {
      to[i] = values[i - n];
    }
  }
}

// How many elements go through a buffer on the stack at a time.
inline constexpr i64 kChunk = 128;

HWY_INLINE void load_contiguous(const void* from, i32 type, float* to, i64 count) {
  switch (type) {
    case FOVEA_FP32:
      return convert_in(static_cast<const float*>(from), to, count);
    case FOVEA_FP16:
      return convert_in(static_cast<const Half*>(from), to, count);
    default:
      return convert_in(static_cast<const Bfloat16*>(from), to, count);
  }
}

// fp32 and 16-bit biases of an fp64 problem take two steps.
inline void load_contiguous(const void* from, i32 type, double* to, i64 count) {
  if (type == FOVEA_FP64) {
    return convert_in(static_cast<const double*>(from), to, count);
  }
  const i64 size = type == FOVEA_FP32 ? 4 : 2;
  float chunk[kChunk];
  for (i64 n = 0; n < count; n += kChunk) {
    const i64 some = math::min(kChunk, count - n);
    load_contiguous(static_cast<const u8*>(from) + n * size, type, chunk, some);
    for (i64 i = 0; i < some; ++i) {
      to[n + i] = static_cast<double>(chunk[i]);
    }
  }
}

HWY_INLINE void store_contiguous(const float* from, i32 type, void* to, i64 count) {
  switch (type) {
    case FOVEA_FP32:
      return convert_out(from, static_cast<float*>(to), count);
    case FOVEA_FP16:
      return convert_out(from, static_cast<Half*>(to), count);
    default:
      return convert_out(from, static_cast<Bfloat16*>(to), count);
  }
}

// To fp32 with the last bit set where the value is not exact: rounding that to 16 bits rounds the double once.
inline float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  u32 bits;
  __builtin_memcpy(&bits, &nearest, 4);
  if (back == value || back != back || (bits & 1) != 0) {
    return nearest;
  }
  const bool above = (back > value) == (value > 0);  // the magnitude was rounded up
  bits = above ? bits - 1 : bits + 1;
  float odd;
  __builtin_memcpy(&odd, &bits, 4);
  return odd;
}

inline void store_contiguous(const double* from, i32 type, void* to, i64 count) {
  if (type == FOVEA_FP64) {
    return convert_out(from, static_cast<double*>(to), count);
  }
  const i64 size = type == FOVEA_FP32 ? 4 : 2;
  float chunk[kChunk];
  for (i64 n = 0; n < count; n += kChunk) {
    const i64 some = math::min(kChunk, count - n);
    for (i64 i = 0; i < some; ++i) {
      chunk[i] = type == FOVEA_FP32 ? static_cast<float>(from[n + i]) : round_to_odd(from[n + i]);
    }
    store_contiguous(chunk, type, static_cast<u8*>(to) + n * size, some);
  }
}

}  // namespace fovea::cpu::FOVEA_ISA
