// SPDX-License-Identifier: Apache-2.0
//
// A tensor map as the played driver encodes it: the 128 bytes hold a mark and the address of one of these.
#pragma once

#include "machine.h"

namespace emulated {

struct TensorMap {
  unsigned char* base;
  int rank;
  u32 element;  // bytes
  u32 swizzle;  // 0: none, 1, 2, 3: 32, 64, 128 bytes
  u64 dims[5];
  u64 strides[4];  // bytes
  u32 box[5];

  u32 box_bytes() const {
    u32 bytes = element;
    for (int n = 0; n < rank; ++n) {
      bytes *= box[n];
    }
    return bytes;
  }
};

constexpr u64 kTensorMapMark = 0x70616d20726f736e;

// What the 128 bytes hold.
struct EncodedMap {
  u64 mark;
  const TensorMap* map;
  u64 rest[14];
};

inline const TensorMap& tensor_map(const void* bytes) {
  EncodedMap encoded;
  std::memcpy(&encoded, bytes, sizeof encoded);
  if (encoded.mark != kTensorMapMark) {
    fail("no tensor map at %p", bytes);
  }
  return *encoded.map;
}

}  // namespace emulated
