// SPDX-License-Identifier: Apache-2.0
//
// Biases of 16 bits whose rows begin at any address. TMA moves pieces of 16 bytes from multiples of 16 bytes. Of rows
// whose numbers agree modulo 8 any two are such a multiple apart, so each of these eight classes has a tensor map of
// its own, which begins up to 7 columns before its first row. A tile comes to shared memory class by class as it lies,
// and a warp moves it to where aligned rows would have come. Read by the host and, without any header, by NVRTC.
#pragma once

#include "cuda/device/sm90/args.h"

namespace fovea::cuda {

inline constexpr int kRowClasses = 8;

// All planes' rows of a bias or its gradient, by one number.
struct NumberedRows {
  unsigned short* data = nullptr;  // row 0
  math::i64 pitch = 0;             // numbers of 16 bits from a row to the next
  int head = 0;                    // rows from a head to the next; 0 where it is broadcast
  int batch2 = 0;
  int batch1 = 0;
};

struct OddRows {
  TensorMap maps[kRowClasses];  // of rows r, r + 8, ...
  NumberedRows bias, gradient;
};

// Columns between a multiple of 16 bytes and this row.
constexpr int columns_before(math::u64 address, math::i64 pitch, int row) {
  return int(((address >> 1) + math::u64(row & (kRowClasses - 1)) * math::u64(pitch)) & 7);
}

// Arguments with or without these maps.
template <class Arguments, bool kOdd>
struct WithOddRows : Arguments {
  OddRows odd_rows;
};
template <class Arguments>
struct WithOddRows<Arguments, false> : Arguments {};

// A tile as it comes, in bytes. Its classes are counted from its own first row.
struct OddTile {
  int line;      // of one row, with 8 columns more
  int of_class;  // all lines of a class
  int bytes;     // all of it
};
constexpr OddTile odd_tile(int rows, int columns) {
  const int line = (columns + 8) * 2;
  return {line, rows / kRowClasses * line, rows * line};
}

}  // namespace fovea::cuda
