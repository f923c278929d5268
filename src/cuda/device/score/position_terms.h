// SPDX-License-Identifier: Apache-2.0
//
// Terms of a score that are computed from the positions of its query and its key. All that device text knows of them is
// in this file, so a new one changes nothing else there:
//
//   PositionTerms    which of them a problem has, a field of Features
//   PositionArgs     their arguments, a field of Args
//   PositionScores   what a thread keeps of them for a head, and what they add to a score
//
// Read by the host and by NVRTC.
#pragma once

#include "cuda/device/fields.h"
#include "cuda/device/tensor.h"
#include "math/score.h"

namespace fovea::cuda {

struct PositionTerms {
  bool alibi = false;

  constexpr int count() const { return int{alibi}; }
  constexpr explicit operator bool() const { return count() > 0; }
  friend constexpr bool operator==(const PositionTerms&, const PositionTerms&) = default;
};
FOVEA_FIELDS(PositionTerms, alibi)

struct PositionArgs {
  Tensor alibi_slopes;  // fp32: batch1, batch2, head
};

#if defined(__CUDACC_RTC__)

// kTransposed: columns are queries, and distances grow along them, not along keys.
template <PositionTerms kTerms, bool kTransposed>
struct PositionScores {
  // A query, for keys that are counted from `key` on. shift: the query at i stands where the key at i + shift does.
  struct Row {
    int diagonal = 0;

    Row() = default;
    __device__ __forceinline__ Row(int query, int key, int shift) : diagonal(query + shift - key) {}
  };

  // A query i and a key j. Beside a Row `key` is counted from the Row's.
  struct Pair {
    float distance = 0;  // j - (i + shift), with kTransposed (i + shift) - j; exact while under 2^24

    Pair() = default;
    __device__ __forceinline__ Pair(int query, int key, int shift)
        : distance(float(kTransposed ? query + shift - key : key - query - shift)) {}
    __device__ __forceinline__ Pair(const Row& row, int key) : distance(float(key - row.diagonal)) {
      static_assert(!kTransposed);
    }
    // So many queries and keys further.
    __device__ __forceinline__ Pair further(int queries, int keys) const {
      Pair pair = *this;
      pair.distance += float(kTransposed ? queries - keys : keys - queries);
      return pair;
    }
  };

  float of_head;

  // Before the first score of a head. place: what knows where the numbers of a head begin.
  template <class Place, class Head>
  __device__ __forceinline__ void start(const PositionArgs& a, const Place& place, Head head) {
    if constexpr (kTerms.alibi) {
      of_head = static_cast<const float*>(a.alibi_slopes.data)[place.plane(a.alibi_slopes.strides, head)];
    }
  }

  // What is added to a score. kByModifier: magnitudes by fabsf, an operand's modifier, which math's abs is not.
  template <bool kByModifier = true>
  __device__ __forceinline__ float of(const Pair& pair) const {
    float term = 0;
    if constexpr (kTerms.alibi) {
      term = math::alibi(kByModifier ? fabsf(pair.distance) : pair.distance, of_head);
    }
    return term;
  }
};

#endif

}  // namespace fovea::cuda
