// SPDX-License-Identifier: Apache-2.0
//
// What TMA's tensor maps can describe: coordinates of 32 bits, strides under 2^40 bytes that are not negative.
#pragma once

#include <cstdint>

#include "math/rows.h"

namespace fovea::cuda {

inline constexpr std::int64_t kMostMapRows = std::int64_t{1} << 29;  // a tile's last row is counted in int, too

constexpr bool map_takes_stride(std::int64_t stride, std::int64_t element_bytes) {
  constexpr std::int64_t kMostBytes = std::int64_t{1} << 40;
  return stride >= 0 && stride * element_bytes < kMostBytes;
}

constexpr bool has_tensor_map(const math::Strides& s, std::int64_t element_bytes) {
  return map_takes_stride(s.batch1, element_bytes) && map_takes_stride(s.batch2, element_bytes) &&
         map_takes_stride(s.head, element_bytes) && map_takes_stride(s.row, element_bytes);
}

// Where a broadcast row is no row to copy: of tensors that have a row for each query or key.
constexpr bool has_row_map(const math::Strides& s, std::int64_t rows) {
  constexpr std::int64_t kBytes = 2;
  return has_tensor_map(s, kBytes) && (rows <= 1 || s.row > 0);
}

}  // namespace fovea::cuda
