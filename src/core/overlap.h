// SPDX-License-Identifier: Apache-2.0
//
// Do two elements share memory? Outputs may have any strides "that do not overlap", interleaved ones included
// (dq, dk and dv as views of one tensor), so ranges of addresses do not answer it; a small search does.
#pragma once

#include <cstdint>

#include "fovea/c.h"

namespace fovea {

// The bytes [base + sum of index_d * stride_d, ... + width) for all 0 <= index_d < extent_d. All extents >= 1.
struct Footprint {
  std::intptr_t base = 0;
  std::int64_t width = 1;
  int rank = 0;
  std::int64_t extent[FOVEA_MAX_RANK] = {};
  std::int64_t stride[FOVEA_MAX_RANK] = {};  // bytes, multiples of the width
};

// The lowest address and one past the highest.
struct Range {
  __extension__ typedef __int128 Wide;
  Wide begin;
  Wide end;

  bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
};
Range range_of(const Footprint& a);

// Both are exact, except that after kOverlapSteps steps of search, which only strides that nest in no order at all
// need, the answer is yes.
inline constexpr int kOverlapSteps = 1 << 16;

// Whether two different indices lead to one element.
bool overlaps_itself(const Footprint& a);

// Whether a and b have a byte in common.
bool overlap(const Footprint& a, const Footprint& b);

}  // namespace fovea
