// SPDX-License-Identifier: Apache-2.0
//
// Tiles: what the kernels compute on. Rows of T (float or double) in the caller's workspace, with a leading
// dimension that is an odd number of vectors, so that walking down a column does not fall on the same few sets of
// the cache. Loading converts from the caller's type and strides and pads with zeros; NaN that lies behind the end
// of a sequence is never read.
#pragma once

#include "cpu/arena.h"
#include "cpu/isa/simd.h"
#include "cpu/kernels.h"
#include "fovea/c.h"

namespace fovea::cpu::FOVEA_ISA {

constexpr i64 round_up(i64 value, i64 step) { return (value + step - 1) / step * step; }

template <class T>
constexpr i64 padded(i64 cols) {
  return round_up(cols, lanes<T>());
}

// The leading dimension of a tile of this many columns.
template <class T>
constexpr i64 leading(i64 cols) {
  return (math::max(padded<T>(cols), lanes<T>()) / lanes<T>() | 1) * lanes<T>();
}

// ---- conversions ----

// Vectors of T from the caller's types. The 16-bit types are told apart by these names.
struct Half {
  u16 bits;
};
struct Bfloat16 {
  u16 bits;
};

using F32 = Tag<float>;
using U32 = Tag<u32>;
using U16 = hn::Rebind<uint16_t, F32>;

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
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR
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
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR
  hn::StoreU(hn::TruncateTo(U16(), float_to_half(value.raw)), U16(), reinterpret_cast<uint16_t*>(to));
#else
  const hn::Rebind<hwy::float16_t, F32> halves;
  hn::StoreU(hn::DemoteTo(halves, value.raw), halves, reinterpret_cast<hwy::float16_t*>(to));
#endif
}
HWY_INLINE void store_as(Simd<float> value, Bfloat16* to) {
  hn::StoreU(hn::TruncateTo(U16(), float_to_bfloat16(value.raw)), U16(), reinterpret_cast<uint16_t*>(to));
}
HWY_INLINE void store_as(Simd<double> value, double* to) { value.store(to); }

template <class A, class B>
inline constexpr bool kSameType = false;
template <class A>
inline constexpr bool kSameType<A, A> = true;

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

// ---- the caller's rows ----

constexpr i64 element_size(i32 type) {
  return type == FOVEA_FP64 ? 8 : type == FOVEA_FP32 ? 4 : type == FOVEA_BOOL ? 1 : 2;
}

HWY_INLINE u8* address(const Matrix& m, i64 row, i64 col) {
  return static_cast<u8*>(m.data) + (row * m.row + col * m.col) * element_size(m.type);
}

// Moves elements of `size` bytes between strided and contiguous memory.
template <bool kGather>
void move_strided(u8* strided, i64 stride, u8* contiguous, i64 size, i64 count) {
  for (i64 n = 0; n < count; ++n) {
    u8* a = strided + n * stride * size;
    u8* b = contiguous + n * size;
    for (i64 byte = 0; byte < size; ++byte) {
      (kGather ? b : a)[byte] = (kGather ? a : b)[byte];
    }
  }
}

// Elements [col, col + count) of a row.
template <class T>
void load_row(const Matrix& m, i64 row, i64 col, i64 count, T* to) {
  if (m.col == 1) {
    return load_contiguous(address(m, row, col), m.type, to, count);
  }
  alignas(8) u8 chunk[kChunk * 8];
  for (i64 n = 0; n < count; n += kChunk) {
    const i64 some = math::min(kChunk, count - n);
    move_strided<true>(address(m, row, col + n), m.col, chunk, element_size(m.type), some);
    load_contiguous(chunk, m.type, to + n, some);
  }
}

template <class T>
void store_row(const T* from, const Matrix& m, i64 row, i64 col, i64 count) {
  if (m.col == 1) {
    return store_contiguous(from, m.type, address(m, row, col), count);
  }
  alignas(8) u8 chunk[kChunk * 8];
  for (i64 n = 0; n < count; n += kChunk) {
    const i64 some = math::min(kChunk, count - n);
    store_contiguous(from + n, m.type, chunk, some);
    move_strided<false>(address(m, row, col + n), m.col, chunk, element_size(m.type), some);
  }
}

template <class T>
void fill(T* to, i64 count, T value) {
  for (i64 n = 0; n < count; ++n) {
    to[n] = value;
  }
}

// ---- tiles ----

// Asks for the cache lines of a row's columns.
// Note: always inlined, like whatever calls it. g++ takes a function that only prefetches for one without effect and
// drops calls of it.
HWY_INLINE void prefetch_row(const Matrix& m, i64 row, i64 col, i64 cols, bool to_write = false) {
  constexpr i64 kLine = 64;
  if (m.col != 1) {
    return;
  }
  const u8* begin = address(m, row, col);
  const u8* end = begin + cols * element_size(m.type);
  for (const u8* line = begin; line < end; line += kLine) {
    to_write ? __builtin_prefetch(line, 1) : __builtin_prefetch(line, 0);
  }
}

// Rows are often far apart (other heads lie between), where the processor's own prefetching gives up at each row: rows
// are asked for so many ahead.
inline constexpr i64 kRowsAhead = 8;

// Rows [row, row + rows) as a tile, zeros to the right up to a vector.
template <class T>
void load_tile(const Matrix& m, i64 row, i64 rows, i64 cols, T* tile, i64 ld) {
  for (i64 r = 0; r < math::min(kRowsAhead, rows); ++r) {
    prefetch_row(m, row + r, 0, cols);
  }
  for (i64 r = 0; r < rows; ++r) {
    if (r + kRowsAhead < rows) {
      prefetch_row(m, row + r + kRowsAhead, 0, cols);
    }
    load_row(m, row + r, 0, cols, tile + r * ld);
    fill(tile + r * ld + cols, padded<T>(cols) - cols, T(0));
  }
}

// Four (fp32) or two (fp64) elements from each of a vector's worth of rows, transposed. Row 4 b + q of the source
// gives lanes of block b; the interleaving then works within the blocks of 128 bits that every target has.
template <class T>
HWY_INLINE hn::Vec<Tag<T>> gather_blocks(const T* from, i64 ld) {
  constexpr i64 kInBlock = 16 / sizeof(T);
  if constexpr (lanes<T>() == kInBlock) {
    return hn::LoadU(Tag<T>(), from);
  } else {
    const hn::FixedTag<T, kInBlock> block;
    const hn::FixedTag<T, 2 * kInBlock> two;
    const auto low = hn::Combine(two, hn::LoadU(block, from + kInBlock * ld), hn::LoadU(block, from));
    if constexpr (lanes<T>() == 2 * kInBlock) {
      return low;
    } else {
      const T* upper = from + 2 * kInBlock * ld;
      const auto high = hn::Combine(two, hn::LoadU(block, upper + kInBlock * ld), hn::LoadU(block, upper));
      return hn::Combine(Tag<T>(), high, low);
    }
  }
}

HWY_INLINE void transpose_block(const float* from, i64 ld, float* to, i64 ld_to) {
  const Tag<float> d;
  const Tag<double> pairs;
  const auto row0 = gather_blocks(from, ld);
  const auto row1 = gather_blocks(from + ld, ld);
  const auto row2 = gather_blocks(from + 2 * ld, ld);
  const auto row3 = gather_blocks(from + 3 * ld, ld);
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, row0, row1));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, row2, row3));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, row0, row1));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, row2, row3));
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23)), d, to);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23)), d, to + ld_to);
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23)), d, to + 2 * ld_to);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23)), d, to + 3 * ld_to);
}

HWY_INLINE void transpose_block(const double* from, i64 ld, double* to, i64 ld_to) {
  const Tag<double> d;
  const auto row0 = gather_blocks(from, ld);
  const auto row1 = gather_blocks(from + ld, ld);
  hn::StoreU(hn::InterleaveLower(d, row0, row1), d, to);
  hn::StoreU(hn::InterleaveUpper(d, row0, row1), d, to + ld_to);
}

// `rows` and `cols` are multiples of a vector; `to` gets cols rows.
template <class T>
void transpose_tile(const T* from, i64 ld, i64 rows, i64 cols, T* to, i64 ld_to) {
  constexpr i64 kInBlock = 16 / sizeof(T);
  for (i64 row = 0; row < rows; row += lanes<T>()) {
    for (i64 col = 0; col < cols; col += kInBlock) {
      transpose_block(from + row * ld + col, ld, to + col * ld_to + row, ld_to);
    }
  }
}

// Rows of the caller's memory as columns; up to a vector, missing ones are zero. `buffer` holds a vector's worth of
// rows.
template <class T>
void load_transposed(const Matrix& m, i64 row, i64 rows, i64 cols, T* buffer, i64 ld, T* to, i64 ld_to) {
  for (i64 r = 0; r < rows; r += lanes<T>()) {
    const i64 some = math::min(lanes<T>(), rows - r);
    for (i64 next = r + some; next < math::min(r + some + kRowsAhead, rows); ++next) {
      prefetch_row(m, row + next, 0, cols);
    }
    load_tile(m, row + r, some, cols, buffer, ld);
    fill(buffer + some * ld, (lanes<T>() - some) * ld, T(0));
    transpose_tile(buffer, ld, lanes<T>(), padded<T>(cols), to + r, ld_to);
  }
}

}  // namespace fovea::cpu::FOVEA_ISA
