// SPDX-License-Identifier: Apache-2.0
//
// What is added to the scores of a tile, in shared memory: the tiles that travel with K and V (Q and dO in the
// backward).
//
//   ScoreInputs   where they lie in a stage, and their copies
#pragma once

#include "cuda/device/generic/sizes.h"
#include "cuda/device/tile/tile.cuh"

namespace fovea::cuda {

// For a tile of kQueries x kKeys; copied into the stage beside K and V (Q and dO).
template <auto S, bool kTransposed, int kQueries, int kKeys, int kThreads>
struct ScoreInputs {
  static constexpr int kWords = kKeys >= 32 ? kKeys / 32 : 1;  // of the mask, a query
  static constexpr bool kHasVector = kTransposed ? S.query_term : S.key_term;
  static constexpr int kVectorSize = kTransposed ? kQueries : kKeys;
  static constexpr u32 kBias = 0;
  static constexpr u32 kBias2 = kBias + kQueries * kKeys * bias_bytes(S.bias);
  static constexpr u32 kMask = kBias2 + kQueries * kKeys * bias_bytes(S.bias2);
  static constexpr u32 kVector = kMask + (S.mask ? kQueries * kWords * 4 : 0);
  static constexpr u32 kBytes = kVector + (kHasVector ? kVectorSize * 4 : 0);
  static_assert(kBytes == score_input_bytes(S, kQueries, kKeys, kTransposed));

  // Queries from m0 and keys from n0 on, of (place, head).
  static __device__ __forceinline__ void load(u32 to, const Args& a, const Place& place, u32 head, int m0, int n0,
                                              int thread) {
    if constexpr (S.bias != BiasTile::kNone) {
      load_bias<S.bias>(to + kBias, a.bias, place, head, m0, n0, thread);
    }
    if constexpr (S.bias2 != BiasTile::kNone) {
      load_bias<S.bias2>(to + kBias2, a.bias2, place, head, m0, n0, thread);
    }
    if constexpr (S.mask) {
      const u32* const words =
          static_cast<const u32*>(a.mask.data) + place.plane(a.mask.strides, head) + m0 * a.mask.strides.row + n0 / 32;
      const u32 stride = u32(a.mask.strides.row);  // words of 32 keys: far under 2^32
#pragma unroll
      for (int i = 0; i < (kQueries * kWords + kThreads - 1) / kThreads; ++i) {
        const int c = thread + i * kThreads;
        const int row = c / kWords;
        const int word = c % kWords;
        if (kQueries * kWords % kThreads == 0 || c < kQueries * kWords) {
          const bool in = m0 + row < place.q_len && (n0 / 32 + word) * 32 < place.k_len;
          copy4(to + kMask + c * 4, in ? words + u64(u32(row)) * stride + word : words, in ? 4 : 0);
        }
      }
    }
    if constexpr (kHasVector) {
      const Tensor& term = kTransposed ? a.query_term : a.key_term;
      const int first = kTransposed ? m0 : n0;
      load_vector<kVectorSize>(to + kVector,
                               static_cast<const float*>(term.data) + place.plane(term.strides, head) + first,
                               (kTransposed ? place.q_len : place.k_len) - first, thread);
    }
  }

 private:
  template <BiasTile kBiasType>
  static __device__ __forceinline__ void load_bias(u32 to, const Tensor& bias, const Place& place, u32 head, int m0,
                                                   int n0, int thread) {
    constexpr int kElement = bias_bytes(kBiasType);
    const i64 offset = place.plane(bias.strides, head) + m0 * bias.strides.row + n0;
    const char* const from = static_cast<const char*>(bias.data) + offset * kElement;
    const int rows = place.q_len - m0;
    const int bytes = min(place.k_len - n0, kKeys) * kElement;
    using Layout = typename Select<kElement == 4, Tile32<kKeys>, Tile<kKeys>>::Type;
    const i64 row = bias.strides.row * kElement;
    if (bytes == kKeys * kElement) {
      load_tile<Layout, kQueries, kThreads>(to, from, row, rows, bytes, thread);
    } else {
      load_tile<Layout, kQueries, kThreads, false>(to, from, row, rows, bytes, thread);
    }
  }
};

}  // namespace fovea::cuda
