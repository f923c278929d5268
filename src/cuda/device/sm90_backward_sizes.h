// SPDX-License-Identifier: Apache-2.0
//
// What sm90_backward takes for a Spec: warpgroups, threads, where what lies in shared memory. Asked by the planner on
// the host and by the kernel itself, so that the two cannot disagree.
#ifndef FOVEA_CUDA_DEVICE_SM90_BACKWARD_SIZES_H
#define FOVEA_CUDA_DEVICE_SM90_BACKWARD_SIZES_H

#include "sm80_sizes.h"
#include "spec.h"

namespace fovea::cuda {

// Spec: warps (a multiple of 4) compute; a warpgroup has tiles * 64 keys, a step `step` queries; stages are the buffers
// of Q and dO, planes those of dS.
struct Sm90BackwardSizes {
  int groups;   // warpgroups that compute
  int threads;  // with the one that copies
  int keys;     // of a block

  // Bytes of one buffer; `leaving`: a warpgroup's part of dQ on its way out.
  int k, v, q, grad_out, grads, leaving, rows;
  // Where the first of its buffers lies. rows: logsumexp, then delta, of every stage.
  int k_at, v_at, q_at, grad_out_at, grads_at, leaving_at, lse_at, delta_at, barriers_at, number_at;
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
  x.k = whole(x.keys * s.d * kNumber);
  x.v = whole(x.keys * s.dv * kNumber);
  x.q = whole(s.step * s.d * kNumber);
  x.grad_out = whole(s.step * s.dv * kNumber);
  x.grads = s.step * x.keys * kNumber;
  x.leaving = s.dq && s.bulk ? 64 * s.d * 4 : 0;
  x.rows = s.step * 4;
  x.v_at = x.k_at + x.k;
  x.q_at = x.v_at + x.v;
  x.grad_out_at = x.q_at + s.stages * x.q;
  x.grads_at = x.grad_out_at + s.stages * x.grad_out;
  x.leaving_at = x.grads_at + s.planes * x.grads;
  x.lse_at = x.leaving_at + x.groups * x.leaving;
  x.delta_at = x.lse_at + s.stages * x.rows;
  x.barriers_at = x.delta_at + s.stages * x.rows;
  x.number_at = x.barriers_at + 224;
  x.bytes = x.barriers_at + 256;
  return x;
}

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_SM90_BACKWARD_SIZES_H
