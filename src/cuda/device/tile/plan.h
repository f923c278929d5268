// SPDX-License-Identifier: Apache-2.0
//
// SharedPlan: where things lie in a block's shared memory. Each takes what comes next, so that no two overlap. The host
// and the kernels read the same plans.
#pragma once

namespace fovea::cuda {

struct SharedPlan {
  int bytes = 0;  // taken so far

  // `count` times `size` bytes; where they begin, at a multiple of `alignment`.
  constexpr int take(int count, int size, int alignment = 1) {
    const int at = (bytes + alignment - 1) / alignment * alignment;
    bytes = at + count * size;
    return at;
  }
  // Barriers, of 8 bytes.
  constexpr int barriers(int count) { return take(count, 8, 8); }
};

// Panels of a tile begin where the pattern of their swizzle does.
constexpr int whole_patterns(int bytes) { return (bytes + 1023) / 1024 * 1024; }

}  // namespace fovea::cuda
