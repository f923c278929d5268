// SPDX-License-Identifier: Apache-2.0
//
// The warpgroup of sm90_backward that does not compute: which of its threads and warps does what.
#pragma once

#include "cuda/device/sm90/backward_add.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_convert.cuh"
#include "cuda/device/sm90/backward_copy.cuh"
#include "cuda/device/sm90/backward_copy_bias.cuh"
#include "cuda/device/sm90/backward_odd_rows.cuh"
#include "cuda/device/sm90/backward_rows.cuh"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/sm90/backward_summed.cuh"

namespace fovea::cuda {

// It copies, adds dQ to its sums, and does whatever else needs no products: a thread or a warp for each.
template <Sm90BackwardSpec S>
__device__ __forceinline__ void sm90_backward_move(const Args& a, const Sm90BackwardArgs& m, u32 base, Sm90Loads* loads,
                                                   const Sm90BackwardBarriers& barriers) {
  constexpr Sm90BackwardChoices kHow = sm90_backward_choices(S);
  const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
  if (warp == 0 && threadIdx.x == 0) {
    sm90_backward_copy<S>(a, m, base, loads, barriers);
  }
  if constexpr (S.odd_rows) {
    sm90_backward_move_odd<S>(a, m, base, barriers, warp, int(threadIdx.x % 32));
  } else if ((kHow.bias_in_place || kHow.outer) && warp == 1 && threadIdx.x == 32) {
    sm90_backward_copy_bias<S>(a, m, base, barriers);
  }
  constexpr int kAdding = sm90_adding_warps(S);
  if constexpr (kAdding > 0) {
    if (warp >= 2 && warp - 2 < kAdding && threadIdx.x % 32 == 0) {
      sm90_backward_add<S>(a, m, base, barriers, warp - 2);
    }
  }
  if constexpr (sm90_counts_sums(S)) {
    if (warp == 2 && threadIdx.x == 64) {
      sm90_backward_count_sums<S>(a, m, base, barriers);
    }
  }
  if constexpr (S.summed > 1) {
    if (warp == 3) {
      sm90_backward_send_shares<S>(a, m, base, barriers, int(threadIdx.x % 32));
    }
  }
  if (S.dbias_store && !S.odd_rows && warp == 3 && threadIdx.x == 96) {
    sm90_backward_store_bias<S>(a, m, base, barriers);
  }
  if constexpr (S.makes_rows) {
    if (warp > 0) {
      sm90_backward_make_rows<S>(a, m, base, barriers, warp - 1, int(threadIdx.x % 32));
    }
  }
  if constexpr (kHow.batch_to_convert > 0) {
    if (warp == 1 || (warp == 3 && kAdding < 2)) {
      sm90_backward_convert<S, kHow.batch_to_convert>(a, m);
    }
  }
}

}  // namespace fovea::cuda
