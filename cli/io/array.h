// SPDX-License-Identifier: Apache-2.0
//
// A tensor as it lies in a file: its bytes, and how to read them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "fovea/c.h"

namespace fovea::cli {

struct Array {
  fovea_dtype dtype = FOVEA_FP32;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // in elements
  std::vector<std::byte> bytes;
};

using Arrays = std::map<std::string, Array>;

// A shape without elements may have dimensions of any size beside its 0: strides wrap there, and nothing reads them.
inline std::vector<std::int64_t> row_major_strides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) {
    strides[d - 1] =
        static_cast<std::int64_t>(static_cast<std::uint64_t>(strides[d]) * static_cast<std::uint64_t>(shape[d]));
  }
  return strides;
}

}  // namespace fovea::cli
