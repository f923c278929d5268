// SPDX-License-Identifier: Apache-2.0
//
// Decisions as bits: those of a mask, and which elements dropout keeps. Dropout is decided for a block of rows and keys
// at once, by the formulas of math/dropout.h on vectors of words, and both directions read the same bits.
#pragma once

#include "cpu/isa/tile.h"

namespace fovea::cpu::FOVEA_ISA {

// ---- bits ----

// Decisions of elements, one bit each, eight to a byte. Readers may touch 8 bytes past the end.
constexpr i64 bit_row(i64 cols) { return round_up(cols, 64) / 8 + 8; }

// The bits of elements [col, col + lanes).
template <class T>
HWY_INLINE Mask<T> bits_at(const u8* bits, i64 col) {
  if constexpr (lanes<T>() >= 8) {
    return hn::LoadMaskBits(Tag<T>(), bits + col / 8);
  } else {
    const u8 shifted[8] = {static_cast<u8>(bits[col / 8] >> (col % 8))};
    return hn::LoadMaskBits(Tag<T>(), shifted);
  }
}

// Writes a vector's bits in groups of eight, `step` bytes apart. Fewer lanes than eight fill a byte by parts, in order.
template <class T>
HWY_INLINE void put_bits(Mask<T> mask, i64 col, u8* bits, i64 step) {
  u8 bytes[8];
  hn::StoreMaskBits(Tag<T>(), mask, bytes);
  if constexpr (lanes<T>() >= 8) {
    for (i64 n = 0; n < lanes<T>() / 8; ++n) {
      bits[(col / 8 + n) * step] = bytes[n];
    }
  } else {
    u8& byte = bits[col / 8 * step];
    byte = static_cast<u8>((col % 8 == 0 ? 0 : byte) | bytes[0] << (col % 8));
  }
}

// ---- dropout ----

// Rows [row, row + rows) of a head, columns [col, col + cols); col is a multiple of 16.
inline void keep_bits_fovea(const Options& options, const HeadArgs& head, i64 row, i64 rows, i64 col, i64 cols,
                            u8* bits, i64 stride) {
  const math::DropoutHead words{head.drop_words[0], head.drop_words[1], head.drop_words[2], head.drop_words[3]};
  const Simd<u32> threshold(options.drop_below << 16);
  const u32 folded_col = math::dropout_fold(head.drop_column + static_cast<u32>(col));
  for (i64 group = row / 16 * 16; group < row + rows; group += 16) {
    for (i64 upper = group; upper < group + 8; ++upper) {
      const i64 lower = upper + 8;  // shares its calls
      u8* upper_bits = upper >= row && upper < row + rows ? bits + (upper - row) * stride : nullptr;
      u8* lower_bits = lower >= row && lower < row + rows ? bits + (lower - row) * stride : nullptr;
      if (upper_bits == nullptr && lower_bits == nullptr) {
        continue;
      }
      const Simd<u32> folded_row(math::dropout_fold(head.drop_row + static_cast<u32>(upper)));
      for (i64 n = 0; n < (cols + 15) / 16 * 8; n += lanes<u32>()) {
        const Simd<u32> columns = Simd<u32>::iota(folded_col + static_cast<u32>(n));
        const math::Words2<Simd<u32>> call = math::dropout_call(words, folded_row, columns);
        const auto decide = [&](Simd<u32> word, u8* to) {
          if (to != nullptr) {
            const Simd<u32> low_half = hn::ShiftLeft<16>(word.raw);
            put_bits<u32>(at_least(low_half, threshold), n, to, 2);
            put_bits<u32>(at_least(word, threshold), n, to + 1, 2);
          }
        };
        decide(call.x, upper_bits);
        decide(call.y, lower_bits);
      }
    }
  }
}

inline void keep_bits_torch(const Options& options, const HeadArgs& head, i64 row, i64 rows, i64 col, i64 cols,
                            u8* bits, i64 stride) {
  constexpr i64 kLanes = lanes<u32>();
  const Tag<u32> d;
  const Simd<u32> lowest_kept(options.drop_below);
  u32 words[kChunk + 8 * kLanes];
  for (i64 r = 0; r < rows; ++r) {
    for (i64 c = 0; c < cols; c += kChunk) {
      const u64 first = head.drop_base + static_cast<u64>(row + r) * head.drop_stride + static_cast<u64>(col + c);
      const i64 skip = static_cast<i64>(first & 3);  // a block of the stream is four numbers
      const i64 some = math::min(kChunk, cols - c);
      for (i64 n = 0; n < skip + some; n += 4 * kLanes) {
        const u64 block = (first >> 2) + static_cast<u64>(n / 4);
        const Simd<u32> low = Simd<u32>::iota(static_cast<u32>(block));
        const Simd<u32> high(static_cast<u32>(block >> 32));
        const Mask<u32> no_carry = at_least(low, Simd<u32>(static_cast<u32>(block)));
        // An element's number wraps at 2^64, so its block at 2^62.
        const Simd<u32> carried = select(no_carry, high, high + Simd<u32>(1u)) & Simd<u32>(0x3FFFFFFFu);
        const auto random =
            math::philox4x32<Simd<u32>>({low, carried, Simd<u32>(0u), Simd<u32>(0u)}, static_cast<u32>(options.seed),
                                        static_cast<u32>(options.seed >> 32));
        hn::StoreInterleaved4(random.w0.raw, random.w1.raw, random.w2.raw, random.w3.raw, d, words + n);
      }
      for (i64 n = 0; n < some; n += kLanes) {
        put_bits<u32>(at_least(Simd<u32>::load(words + skip + n), lowest_kept), c + n, bits + r * stride, 1);
      }
    }
  }
}

inline void keep_bits(const Options& options, const HeadArgs& head, i64 row, i64 rows, i64 col, i64 cols, u8* bits,
                      i64 stride) {
  if (options.dropping == Dropping::kFovea) {
    keep_bits_fovea(options, head, row, rows, col, cols, bits, stride);
  } else if (options.dropping == Dropping::kTorch) {
    keep_bits_torch(options, head, row, rows, col, cols, bits, stride);
  } else {
    fill(bits, rows * stride, u8(0));
  }
}

}  // namespace fovea::cpu::FOVEA_ISA
