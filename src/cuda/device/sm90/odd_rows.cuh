// SPDX-License-Identifier: Apache-2.0
//
// Tiles of a bias with odd rows (odd_rows.h), by a warp.
//
//   odd_load    as they lie to shared memory, by TMA
//   odd_align   from there to panels of 64 columns, as TMA writes them where rows are aligned
//   odd_store   from such panels to rows of the gradient
#pragma once

#include "cuda/device/ptx/sm80.cuh"
#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/odd_rows.h"

namespace fovea::cuda {

// row: the number of the tile's first.
template <int kRows, int kColumns>
__device__ __forceinline__ void odd_load(u32 to, const OddRows& from, u32 full, int row, int column) {
#pragma unroll 1
  for (int i = 0; i < kRowClasses; ++i) {
    tensor_load(to + i * odd_tile(kRows, kColumns).of_class, from.maps[(row + i) & (kRowClasses - 1)], full,
                {column, (row + i) >> 3, 0, 0, 0});
  }
}

// Two columns of a panel for each lane: where they lie in a row of class r.
__device__ __forceinline__ u32 odd_word(int lane, int r) { return u32((lane / 4 ^ r) << 4 | lane % 4 * 4); }

// Words of kRowClasses lines of a class, of each panel; with kOdd halves of two words each. All reads are under way
// before the first is used: what these warps do takes as long as the reads take to come.
template <bool kOdd, int kPanels, class Low, class High>
__device__ __forceinline__ void odd_words(u32 (&words)[kPanels][kRowClasses], const Low& low, const High& high) {
  u32 others[kPanels][kOdd ? kRowClasses : 1];
#pragma unroll
  for (int p = 0; p < kPanels; ++p) {
#pragma unroll
    for (int k = 0; k < kRowClasses; ++k) {
      words[p][k] = load_shared_word(kOdd ? low(p, k) : high(p, k));
      if constexpr (kOdd) {
        others[p][k] = load_shared_word(high(p, k));
      }
    }
  }
  if constexpr (kOdd) {
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
#pragma unroll
      for (int k = 0; k < kRowClasses; ++k) {
        words[p][k] = __funnelshift_r(words[p][k], others[p][k], 16);
      }
    }
  }
}

// A class: `at` has this lane's first word of each line, `place` is where it goes.
template <bool kOdd, int kRows, int kColumns>
__device__ __forceinline__ void odd_align_class(u32 place, u32 at, int lines) {
  constexpr int kPanels = kColumns / 64;
  constexpr int kLine = odd_tile(kRows, kColumns).line;
  u32 words[kPanels][kRowClasses];
  odd_words<kOdd>(
      words, [&](int p, int k) { return at + k * kLine + p * 128; },
      [&](int p, int k) { return at + k * kLine + p * 128 + (kOdd ? 4 : 0); });
#pragma unroll
  for (int p = 0; p < kPanels; ++p) {
#pragma unroll
    for (int k = 0; k < kRowClasses; ++k) {
      store_shared(place + k * (kRowClasses * 128) + p * (kRows * 128), k < lines ? words[p][k] : 0);
    }
  }
}
// Classes from `first` on, `step` apart. exist: rows that do; the others become 0.
template <int kRows, int kColumns>
__device__ __forceinline__ void odd_align(u32 to, u32 from, const NumberedRows& rows, int row, int exist, int first,
                                          int step, int lane) {
  static_assert(kRows == kRowClasses * kRowClasses);
#pragma unroll 1
  for (int i = first; i < kRowClasses; i += step) {
    const int before = columns_before(math::u64(rows.data), rows.pitch, row + i);
    const u32 at = from + i * odd_tile(kRows, kColumns).of_class + before / 2 * 4 + lane * 4;
    const u32 place = to + i * 128 + odd_word(lane, i);
    const int lines = (exist - i + kRowClasses - 1) / kRowClasses;
    if (before % 2 != 0) {
      odd_align_class<true, kRows, kColumns>(place, at, lines);
    } else {
      odd_align_class<false, kRows, kColumns>(place, at, lines);
    }
  }
}

// A class by words of two columns. With kOdd the row's address is odd, and a word begins with a column before it. Then
// what is left: the first or the last number of each row.
template <bool kOdd, int kRows, int kColumns>
__device__ __forceinline__ void odd_store_class(u32 from, unsigned short* at, i64 further, int i, int lines,
                                                int columns, int lane) {
  constexpr int kPanels = kColumns / 64;
  constexpr int kPanel = kRows * 128;
  constexpr int kLine = kRowClasses * 128;
  static_assert(kRows == kRowClasses * kRowClasses);
  const u32 place = from + odd_word(lane, i);
  const u32 before = lane > 0 ? from + odd_word(lane - 1, i) : from + odd_word(31, i) - kPanel;
  const u32 first = lane > 0 ? before : place;  // of the first panel: nothing lies before it
  u32 words[kPanels][kRowClasses];
  odd_words<kOdd>(
      words, [&](int p, int k) { return (p == 0 ? first : before + p * kPanel) + k * kLine; },
      [&](int p, int k) { return place + p * kPanel + k * kLine; });
  unsigned short* to = at + lane * 2 - int{kOdd};
#pragma unroll
  for (int k = 0; k < kRowClasses; ++k, to += further) {
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      const int here = p * 64 + lane * 2 - int{kOdd};
      if (k < lines && here >= 0 && here + 1 < columns) {
        *reinterpret_cast<u32*>(to + p * 64) = words[p][k];
      }
    }
  }
  const int k = lane / 2;
  const int j = lane % 2 == 0 ? 0 : columns - 1;
  if (k < lines && (lane % 2 == 0 ? kOdd : (columns + int{kOdd}) % 2 != 0)) {
    at[k * further + j] = load_shared_half(from + k * kLine + j / 64 * kPanel + odd_word(j % 64 / 2, i) + j % 2 * 2);
  }
}
// Classes from `first` on, `step` apart. exist, columns: of the tile's, those that do.
template <int kRows, int kColumns>
__device__ __forceinline__ void odd_store(u32 from, const NumberedRows& to, int row, int column, int exist, int columns,
                                          int first, int step, int lane) {
#pragma unroll 1
  for (int i = first; i < kRowClasses; i += step) {
    unsigned short* const at = to.data + i64(row + i) * to.pitch + column;
    const i64 further = to.pitch * kRowClasses;
    const int lines = min((exist - i + kRowClasses - 1) / kRowClasses, kRows / kRowClasses);
    if ((math::u64(at) >> 1 & 1) != 0) {
      odd_store_class<true, kRows, kColumns>(from + i * 128, at, further, i, lines, min(columns, kColumns), lane);
    } else {
      odd_store_class<false, kRows, kColumns>(from + i * 128, at, further, i, lines, min(columns, kColumns), lane);
    }
  }
}

}  // namespace fovea::cuda
