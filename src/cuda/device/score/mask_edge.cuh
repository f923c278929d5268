// SPDX-License-Identifier: Apache-2.0
//
// What lies outside of the band, or past the end of the sequence.
//
//   hide_outside   of a row of a fragment, what is outside of an interval
//   mask_edge      for a fragment of S or of S transposed
//   kHidesQueries  where S transposed needs it at the last queries, too
#pragma once

#include "cuda/device/tile/tile.cuh"
#include "math/band.h"

namespace fovea::cuda {

// In row x (0 or 1) of a fragment, numbers outside of [begin, end) become `value`: of this thread's, whose first is
// number 0. kBegin, kEnd: which ends there are.
template <bool kBegin, bool kEnd, int kColumns>
__device__ __forceinline__ void hide_outside(float (&s)[kColumns][4], int x, int begin, int end, float value) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if ((kEnd && j * 8 + e >= end) || (kBegin && j * 8 + e < begin)) {
        s[j][2 * x + e] = value;
      }
    }
  }
}

// Whether S transposed has to hide queries behind the end of their sequence: their logsumexp of infinity does not hide
// NaN, and the term of a key may be NaN where no query that exists meets it. Of generic kernels; sm90_backward has the
// same rule for its tiles and terms, kMaskQueries (sm90/backward_sizes.h).
template <auto S>
constexpr bool kHidesQueries = S.key_term && (S.banded || S.query_term);

// -inf for keys outside of the band and past the end of the sequence. Only where a tile is not inside of both. kRows:
// for rows of S behind the last query as well, where rows of several sequences are added up.
template <auto S, bool kTransposed, bool kRows = false, int kTiles, int kColumns>
__device__ __forceinline__ void mask_edge(float (&s)[kTiles][kColumns][4], const Thread& thread,
                                          const math::Band<int>& band, int row0, int column0) {
  row0 = opaque(row0);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    for (int x = 0; x < 2; ++x) {
      const int row = row0 + i * 16 + thread.g + x * 8;
      const int first = column0 + thread.t * 2;
      math::Interval<int> in{0, !kTransposed ? band.seqlen_k : kHidesQueries<S> ? band.seqlen_q : 1 << 30};
      if constexpr (S.banded) {
        in = kTransposed ? band.queries_of(row) : band.keys_of(row);
      }
      if (kTransposed && row >= band.seqlen_k) {
        in = {1 << 30, 1 << 30};
      }
      if (kRows && row >= band.seqlen_q) {
        in = {0, 0};
      }
      const int begin = in.begin - first;
      const int end = in.end - first;
      constexpr bool kEnd = !kTransposed || S.banded || kHidesQueries<S>;
      hide_outside<kTransposed || S.banded, kEnd>(s[i], x, begin, end, -kInfinity);
    }
  }
}

}  // namespace fovea::cuda
