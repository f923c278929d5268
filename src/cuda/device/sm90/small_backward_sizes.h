// SPDX-License-Identifier: Apache-2.0
//
// What sm90_small_backward takes for a Spec: warpgroups, threads, where what lies in shared memory. Asked by the
// planner on the host and by the kernel itself, so that the two cannot disagree.
//
// Of its Spec d and dv are 16, 32 or 64.
#pragma once

#include "cuda/device/sm90/args.h"
#include "cuda/device/sm90/spec.h"
#include "cuda/device/tile/plan.h"

namespace fovea::cuda {

inline constexpr int kSmallRows = 64;  // the most queries, and keys, of a sequence
inline constexpr int kSmallSumThreads = 256;
inline constexpr int kSmallSumBlocks = 32;  // of small_bias_sum, a plane

struct Sm90SmallBackwardSizes {
  int groups;   // warpgroups that compute
  int threads;  // with the one that copies

  // Bytes: a head's Q, K (each), V, dO, O (each), all five, dS, logsumexp and delta (twice).
  int q, v, head, grads, rows;
  // Of a warpgroup's part: heads first.
  int grads_at, part;
  // In all: parts first.
  int rows_at, barriers_at, bytes;
};

constexpr Sm90SmallBackwardSizes sm90_small_backward_sizes(const Sm90SmallSpec& s) {
  Sm90SmallBackwardSizes x{};
  x.groups = s.warps / 4;
  x.threads = 128 * (x.groups + 1);
  x.q = kSmallRows * s.d * 2;
  x.v = kSmallRows * s.dv * 2;
  x.head = 2 * x.q + 3 * x.v;
  x.grads = kSmallRows * kSmallRows * 2;
  x.rows = 2 * 2 * kSmallRows * 4;
  SharedPlan part;
  part.take(s.stages, x.head);
  x.grads_at = part.take(1, x.grads);
  x.part = part.bytes;
  SharedPlan plan;
  plan.take(x.groups, x.part);
  x.rows_at = plan.take(x.groups, x.rows);
  x.barriers_at = plan.barriers(2 * x.groups * s.stages);
  x.bytes = plan.bytes;
  return x;
}

// Beside Args. A block belongs to one plane of the bias (the only one without a bias); its warpgroups take entries of
// the plane's list in turn.
struct Sm90SmallBackwardArgs {
  TensorMap q, k, v, grad_out, out, grad_q, grad_k, grad_v;
  Has has_q, has_k, has_v, has_grad_out, has_out, has_grad_q, has_grad_k, has_grad_v;
  bool store_tensors = false;  // the gradients that are wanted have tensor maps
  math::Strides planes;        // not 0 in those dimensions that planes differ in
  int count = 1;               // planes
  int list = 0;                // entries of a plane
  int heads = 1;               // of a list's entry: heads run fastest, then batch2
  int batch2 = 1;
  float* bias_sum = nullptr;  // [plane][warpgroup of the plane][4096], in register order
};

}  // namespace fovea::cuda
