// SPDX-License-Identifier: Apache-2.0
//
// What sm90_backward and sm90_wide_backward take for a Spec: warpgroups, threads, where what lies in shared memory.
// Asked by the planner on the host and by the kernels themselves, so that the two cannot disagree.
#ifndef FOVEA_CUDA_DEVICE_SM90_BACKWARD_SIZES_H
#define FOVEA_CUDA_DEVICE_SM90_BACKWARD_SIZES_H

#include "cuda/device/generic/sizes.h"
#include "cuda/device/spec.h"
#include "cuda/device/tile/panels.h"

namespace fovea::cuda {

// A bias of 16 bits lies in the place of dS; others have buffers of their own.
constexpr bool sm90_bias_in_place(const Spec& s) { return s.bias == BiasTile::kBf16 || s.bias == BiasTile::kFp16; }
constexpr int sm90_outer_bytes(const Spec& s) {
  return (sm90_bias_in_place(s) ? 0 : bias_bytes(s.bias)) + bias_bytes(s.bias2);
}

// Where dK and dV take most registers the scores of a step are made in two parts.
constexpr int sm90_step_parts(const Spec& s) { return s.d + s.dv > 256 ? 2 : 1; }
// Columns of a panel of Q and K. Where each warpgroup sums half of dQ's columns, panels divide these.
constexpr int sm90_backward_panel_d(const Spec& s) {
  return s.halves ? panel_columns(s.d / 2) : wide_panel_columns(s.d);
}
constexpr int sm90_backward_panel_v(const Spec& s) { return wide_panel_columns(s.dv); }

// Spec: q_buffers are those of biases that do not lie in the place of dS; warps (a multiple of 4) compute; a warpgroup
// has tiles * 64 keys, a step `step` queries; stages are the buffers of Q and dO, planes those of dS.
struct Sm90BackwardSizes {
  int groups;   // warpgroups that compute
  int threads;  // with the one that copies
  int keys;     // of a block

  // Bytes of one buffer; `leaving`: a warpgroup's part of dQ on its way out.
  int k, v, q, grad_out, grads, leaving, outer, outer2, rows;
  // Where the first of its buffers lies. rows: logsumexp, then delta, then query terms, of every stage.
  int k_at, v_at, q_at, grad_out_at, grads_at, leaving_at, outer_at, outer2_at, lse_at, delta_at, terms_at, barriers_at,
      number_at, loads_at;
  int bytes;  // all of it
};

constexpr Sm90BackwardSizes sm90_backward_sizes(const Spec& s) {
  constexpr int kNumber = 2;  // bytes
  // A tile's panels begin where their swizzle does.
  constexpr auto whole = [](int bytes) { return (bytes + 1023) / 1024 * 1024; };
  Sm90BackwardSizes x{};
  x.groups = s.warps / 4;
  x.threads = 128 * (x.groups + 1);
  x.keys = 16 * s.warps * s.tiles;
  const int d = panels_of(s.d, sm90_backward_panel_d(s)) * sm90_backward_panel_d(s);
  const int dv = panels_of(s.dv, sm90_backward_panel_v(s)) * sm90_backward_panel_v(s);
  x.k = whole(x.keys * d * kNumber);
  x.v = whole(x.keys * dv * kNumber);
  x.q = whole(s.step * d * kNumber);
  x.grad_out = whole(s.step * dv * kNumber);
  x.grads = s.step * x.keys * kNumber;
  x.leaving = s.dq && s.bulk ? 64 * (s.halves ? s.d / 2 : s.d) * 4 : 0;
  x.rows = s.step * 4;
  x.v_at = x.k_at + x.k;
  x.q_at = x.v_at + x.v;
  x.grad_out_at = x.q_at + s.stages * x.q;
  x.grads_at = x.grad_out_at + s.stages * x.grad_out;
  x.leaving_at = x.grads_at + s.planes * x.grads;
  x.outer = sm90_bias_in_place(s) ? 0 : s.step * x.keys * bias_bytes(s.bias);
  x.outer2 = s.step * x.keys * bias_bytes(s.bias2);
  x.outer_at = x.leaving_at + x.groups * x.leaving;
  x.outer2_at = x.outer_at + s.q_buffers * x.outer;
  x.lse_at = x.outer2_at + s.q_buffers * x.outer2;
  x.delta_at = x.lse_at + s.stages * x.rows;
  x.terms_at = x.delta_at + s.stages * x.rows;
  x.barriers_at = x.terms_at + (s.query_term ? s.stages * x.rows : 0);
  x.number_at = x.barriers_at + 224;
  x.loads_at = x.barriers_at + 288;
  x.bytes = x.barriers_at + 352;
  return x;
}

// ---- sm90_wide_backward: two blocks of a cluster, 64 keys each ----
// Spec: warps is 8, step 64, stages 2 and planes 2; warps * tiles * 16 are the keys of a cluster.

inline constexpr int kSm90WideKeys = 64;  // of a block

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

constexpr Sm90WideBackwardSizes sm90_wide_backward_sizes(const Spec& s) {
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
  x.v_at = x.k_at + x.k;
  x.k_other_at = x.v_at + x.v;
  x.q_at = x.k_other_at + x.k_other;
  x.grad_out_at = x.q_at + s.stages * x.q;
  x.weights_at = x.grad_out_at + x.grad_out;
  x.grads_at = x.weights_at + 2 * x.tile;
  x.lse_at = x.grads_at + 4 * x.tile;
  x.delta_at = x.lse_at + s.stages * x.rows;
  x.barriers_at = x.delta_at + s.stages * x.rows;
  x.bytes = x.barriers_at + 256;
  return x;
}

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_SM90_BACKWARD_SIZES_H
