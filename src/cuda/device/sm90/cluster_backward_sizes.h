// SPDX-License-Identifier: Apache-2.0
//
// Where what lies in shared memory in sm90_wide_backward and sm90_split_backward, whose clusters are two blocks.
#pragma once

#include "cuda/device/sm90/backward_sizes.h"

namespace fovea::cuda {

inline constexpr int kSm90ClusterBarrierBytes = 256;

// ---- sm90_wide_backward: two blocks of a cluster, 64 keys each ----
// Spec: warps is 8, step 64, stages 2 and planes 2; warps * tiles * 16 are the keys of a cluster.

inline constexpr int kSm90WideKeys = 64;  // of a block

// Where one warpgroup can make P and the other dS: scores are dot products that at most a band hides.
constexpr bool sm90_can_have_roles(const Sm90BackwardSpec& s) {
  return s.dq && !s.ordered && s.dropout == DropoutRule::kNone && !s.softcap && !s.mask && !s.key_term &&
         !bool(s.positions) && s.bias == BiasTile::kNone && !s.row_sum;
}

// Columns of dQ that a warpgroup sums: a quarter, or, so that panels stay wide, a third (then one has none).
constexpr int sm90_dq_columns(int columns) { return columns % 128 == 0 ? columns / 4 : 64; }
// Of the panels of Q and K, which divide what a warpgroup has of dK and of dQ.
constexpr int sm90_wide_panel(int columns) { return columns % 256 == 0 ? 64 : 32; }

struct Sm90WideBackwardSizes {
  int threads;
  // Bytes of one buffer; k_other: half of the columns of the other block's K; tile: P or dS of one block.
  int k, v, k_other, q, grad_out, tile, rows;
  // Where the first of its buffers lies; grads: dS of both blocks, a plane after the other.
  int k_at, v_at, k_other_at, q_at, grad_out_at, weights_at, grads_at, lse_at, delta_at, barriers_at;
  int bytes;  // all of it
};

constexpr Sm90WideBackwardSizes sm90_wide_backward_sizes(const Sm90BackwardSpec& s) {
  constexpr int kNumber = 2;  // bytes
  constexpr int kKeys = kSm90WideKeys;
  Sm90WideBackwardSizes x{};
  x.threads = 128 * (s.warps / 4 + 1);
  x.k = kKeys * s.d * kNumber;
  x.v = kKeys * s.dv * kNumber;
  x.k_other = kKeys * 2 * sm90_dq_columns(s.d) * kNumber;
  x.q = s.step * s.d * kNumber;
  x.grad_out = s.step * s.dv * kNumber;
  x.tile = s.step * kKeys * kNumber;
  x.rows = s.step * 4;
  SharedPlan plan;
  x.k_at = plan.take(1, x.k);
  x.v_at = plan.take(1, x.v);
  x.k_other_at = plan.take(1, x.k_other);
  x.q_at = plan.take(s.stages, x.q);
  x.grad_out_at = plan.take(1, x.grad_out);
  x.weights_at = plan.take(2, x.tile);
  x.grads_at = plan.take(4, x.tile);
  x.lse_at = plan.take(s.stages, x.rows);
  x.delta_at = plan.take(s.stages, x.rows);
  x.barriers_at = plan.take(1, kSm90ClusterBarrierBytes);
  x.bytes = plan.bytes;
  return x;
}

struct Sm90SplitBackwardSizes {
  int threads;
  int k, v, q, grad_out, tile, sums, rows;  // bytes of a buffer; sums: of S or dP, that the other block sends
  int k_at, v_at, q_at, grad_out_at, weights_at, grads_at, sums_at, lse_at, delta_at, barriers_at;  // the first buffers
  int bytes;                                                                                        // all of it
};

constexpr Sm90SplitBackwardSizes sm90_split_backward_sizes(const Sm90BackwardSpec& s) {
  constexpr int kNumber = 2;  // bytes
  constexpr int kKeys = kSm90SplitKeys;
  Sm90SplitBackwardSizes x{};
  x.threads = 128 * (s.warps / 4 + 1);
  x.k = kKeys * s.d / 2 * kNumber;
  x.v = kKeys * s.dv / 2 * kNumber;
  x.q = s.step * s.d / 2 * kNumber;
  x.grad_out = s.step * s.dv / 2 * kNumber;
  x.tile = s.step * kKeys * kNumber;
  x.sums = s.step / 2 * kKeys * 4;
  x.rows = s.step * 4;
  SharedPlan plan;
  x.k_at = plan.take(1, x.k);
  x.v_at = plan.take(1, x.v);
  x.q_at = plan.take(s.stages, x.q);
  x.grad_out_at = plan.take(1, x.grad_out);
  x.weights_at = plan.take(2, x.tile);
  x.grads_at = plan.take(2, x.tile);
  x.sums_at = plan.take(4, x.sums);
  x.lse_at = plan.take(s.stages, x.rows);
  x.delta_at = plan.take(s.stages, x.rows);
  x.barriers_at = plan.take(1, kSm90ClusterBarrierBytes);
  x.bytes = plan.bytes;
  return x;
}

}  // namespace fovea::cuda
