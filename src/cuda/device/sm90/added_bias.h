// SPDX-License-Identifier: Apache-2.0
//
// Where sm90_backward adds dS up in memory for the gradient of a bias (Spec::adds_bias): in fp32, planes of tiles of 64
// queries by 64 keys, each in the order in which a warpgroup's registers have it, so that 32 lanes add to 512
// neighbouring bytes. Read by the host and, without any header, by NVRTC.
#pragma once

#include "math/scalar.h"

namespace fovea::cuda {

struct AddedBias {
  static constexpr int kSide = 64;
  static constexpr int kNumbers = kSide * kSide;  // of a tile
  static constexpr int kOfEight = 8 * kSide;      // of 8 queries, which follow one another

  int tiles_q, tiles_k;  // of a plane

  static constexpr AddedBias make(int queries, int keys) {
    return {(queries + kSide - 1) / kSide, (keys + kSide - 1) / kSide};
  }
  constexpr math::i64 of_plane() const { return math::i64(tiles_q) * tiles_k * kNumbers; }
  // Its tiles with the same keys follow one another.
  constexpr math::i64 tile(math::i64 plane, int query, int key) const {
    return plane * of_plane() + (math::i64(key / kSide) * tiles_q + query / kSide) * kNumbers;
  }

  // Four numbers lie together: two queries by two keys. Number e of a thread's four number i, of 128 threads:
  static constexpr int query(int thread, int i, int e) { return i * 8 + thread % 4 * 2 + e % 2; }
  static constexpr int key(int thread, int e) { return thread / 32 * 16 + thread % 32 / 4 + e / 2 * 8; }
};

}  // namespace fovea::cuda
