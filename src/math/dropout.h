// SPDX-License-Identifier: Apache-2.0
//
// Dropout as a pure function of (seed, offset, b, h, i, j): the same on every backend, whatever the tiles, the
// type or the direction. Two rules:
//
//   fovea                 docs/semantics.md gives it bit by bit. Eight rounds of a 64-bit Philox give the four
//                         elements {i, i + 8} x {j, j + 8} 16 bits each; they meet in one thread of a tensor
//                         core's accumulator both in S and in S transposed.
//   torch_mem_efficient   the mask of PyTorch's memory-efficient kernel: element n of the head takes number
//                         offset + n of the Philox-4x32-10 stream of the seed.
//
// U is u32 or a vector of u32 lanes that brings mul_wide(U, u32, U& high, U& low), ^ and + by ADL.
#ifndef FOVEA_MATH_DROPOUT_H
#define FOVEA_MATH_DROPOUT_H

#include "scalar.h"

namespace fovea::math {
inline namespace FOVEA_ISA {

enum class Rng : i32 { kFovea = 0, kTorchMemEfficient = 1 };

constexpr void mul_wide(u32 a, u32 b, u32& high, u32& low) {
  const u64 product = u64(a) * b;
  high = u32(product >> 32);
  low = u32(product);
}

template <class U>
struct Words4 {
  U w0, w1, w2, w3;
};

template <class U>
struct Words2 {
  U x, y;
};

inline constexpr u32 kPhiloxWeyl0 = 0x9E3779B9;  // Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
inline constexpr u32 kPhiloxWeyl1 = 0xBB67AE85;

// Philox-4x32-10.
template <class U>
constexpr Words4<U> philox4x32(Words4<U> counter, u32 key0, u32 key1) {
  for (int round = 0; round < 10; ++round) {
    U high0, low0, high1, low1;
    mul_wide(counter.w0, 0xD2511F53u, high0, low0);
    mul_wide(counter.w2, 0xCD9E8D57u, high1, low1);
    counter = {high1 ^ counter.w1 ^ key0, low1, high0 ^ counter.w3 ^ key1, low0};
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return counter;
}

// Rounds kFirst ... kRounds - 1 of Philox-2x32 with two alternating keys.
template <int kFirst, int kRounds, class U>
constexpr Words2<U> philox2x32_rounds(Words2<U> counter, u32 key0, u32 key1) {
  for (u32 round = kFirst; round < u32(kRounds); ++round) {
    U high, low;
    mul_wide(counter.x, 0xD256D193u, high, low);
    const u32 key = (round % 2 == 0 ? key0 : key1) + round * kPhiloxWeyl0;
    counter = {high ^ counter.y ^ key, low};
  }
  return counter;
}

// All of them; with key0 == key1 it is Random123's of that many rounds.
template <int kRounds, class U>
constexpr Words2<U> philox2x32(Words2<U> counter, u32 key0, u32 key1) {
  return philox2x32_rounds<0, kRounds>(counter, key0, key1);
}

// ---- rule fovea ----

// The four words of a head; n = b * Hq + h.
struct DropoutHead {
  u32 k0, k1, w0, w1;

  static constexpr DropoutHead make(u64 seed, u64 offset, u64 n) {
    const Words4<u32> words = philox4x32<u32>({u32(offset), u32(offset >> 32), u32(n), u32(n >> 32) ^ 0x666F7665u},
                                              u32(seed), u32(seed >> 32));
    return {words.w0, words.w1, words.w2, words.w3};
  }
};

// Rows (columns) i and i + 8 share a call: bit 3 is taken out.
template <class U>
constexpr U dropout_fold(U index) {
  return ((index >> 4) << 3) + (index & U(7));
}

// The 64 bits of one call; x is for rows with bit 3 clear, y for the others; each word's low half is for columns
// with bit 3 clear, its high half the others.
template <class U>
constexpr Words2<U> dropout_call(const DropoutHead& head, U folded_i, U folded_j) {
  return philox2x32<8>(Words2<U>{folded_i ^ U(head.w0), folded_j ^ U(head.w1)}, head.k0, head.k1);
}

// A call in two parts, where many columns meet one row: what depends on the row alone, the first round, and the rest.
template <class U>
struct DropoutRow {
  U high, low;
};

template <class U>
constexpr DropoutRow<U> dropout_row(const DropoutHead& head, U folded_i) {
  const Words2<U> first = philox2x32_rounds<0, 1>(Words2<U>{folded_i ^ U(head.w0), U(head.w1)}, head.k0, head.k1);
  return {first.x, first.y};
}

template <class U>
constexpr Words2<U> dropout_call(const DropoutHead& head, DropoutRow<U> row, U folded_j) {
  return philox2x32_rounds<1, 8>(Words2<U>{row.high ^ folded_j, row.low}, head.k0, head.k1);
}

// u(i, j), 16 bits.
constexpr u32 dropout_value(const DropoutHead& head, u32 i, u32 j) {
  const Words2<u32> bits = dropout_call<u32>(head, dropout_fold(i), dropout_fold(j));
  const u32 word = (i & 8u) != 0 ? bits.y : bits.x;
  return (j & 8u) != 0 ? word >> 16 : word & 0xFFFFu;
}

// ---- rule torch_mem_efficient ----

// A random word as a number, uniform in (0, 1], rounded as PyTorch's kernel does. It never falls as the word grows.
constexpr float torch_uniform_of_word(u32 word) {
  return float(word) * 2.3283064365386963e-10f + 1.16415321826934814e-10f;  // 2^-32, 2^-33
}

// Numbers 4 block ... 4 block + 3 of the Philox-4x32-10 stream of the seed.
constexpr Words4<u32> torch_words(u64 seed, u64 block) {
  return philox4x32<u32>({u32(block), u32(block >> 32), 0u, 0u}, u32(seed), u32(seed >> 32));
}

// Number `index` of that stream.
constexpr float torch_uniform(u64 seed, u64 index) {
  const Words4<u32> words = torch_words(seed, index >> 2);
  const u32 lane = u32(index) & 3u;
  const u32 word = lane == 0 ? words.w0 : lane == 1 ? words.w1 : lane == 2 ? words.w2 : words.w3;
  return torch_uniform_of_word(word);
}

// ---- both ----

// The decision of a problem: which rule, how likely, with which factor.
struct Dropout {
  Rng rng;
  u32 threshold;  // fovea: keep iff u >= threshold; 65536 keeps nothing
  float p;        // torch_mem_efficient: keep iff uniform > p
  u64 seed;
  u64 offset;

  static constexpr Dropout make(Rng rng, double p, u64 seed, u64 offset) {
    return {rng, u32(p * 65536 + 0.5), float(p), seed, offset};
  }

  constexpr bool active() const { return rng == Rng::kFovea ? threshold != 0 : p > 0; }
  constexpr bool keeps_nothing() const { return rng == Rng::kFovea ? threshold >= 65536 : p >= 1; }

  // What kept values are multiplied by; 0 where nothing is kept.
  constexpr double factor() const {
    if (keeps_nothing()) {
      return 0;
    }
    return rng == Rng::kFovea ? 65536.0 / (65536 - threshold) : 1.0 / (1.0 - double(p));
  }
};

// The decisions of one head. Scores are addressed by rows i and columns j from 0 within the sequence.
struct DropoutOfHead {
  Dropout dropout;
  DropoutHead head;  // fovea
  u64 base;          // torch_mem_efficient: the stream's number for i = j = 0
  u64 row_stride;    //   and how far the next row is: Sk

  // n = b * Hq + h; plane: Sq * Sk, packed max_sq * max_sk; row_stride: Sk of this sequence.
  static constexpr DropoutOfHead make(const Dropout& dropout, u64 n, u64 plane, u64 row_stride) {
    return {dropout, DropoutHead::make(dropout.seed, dropout.offset, n), dropout.offset + n * plane, row_stride};
  }

  constexpr bool keep(i64 i, i64 j) const {
    if (dropout.rng == Rng::kFovea) {
      return dropout_value(head, u32(i), u32(j)) >= dropout.threshold;
    }
    return torch_uniform(dropout.seed, base + u64(i) * row_stride + u64(j)) > dropout.p;
  }
};

}  // namespace FOVEA_ISA
}  // namespace fovea::math

#endif  // FOVEA_MATH_DROPOUT_H
