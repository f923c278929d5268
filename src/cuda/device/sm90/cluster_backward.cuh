// SPDX-License-Identifier: Apache-2.0
//
// What sm90_wide_backward and sm90_split_backward share: the barriers of what is copied, the thread that copies the
// bias, and how dK and dV leave.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/tile/accumulator.cuh"
#include "cuda/device/tile/pipe.cuh"
#include "cuda/device/work/sm90_key_block.cuh"

namespace fovea::cuda {

struct Sm90ClusterBarriers {
  u32 at;

  static constexpr u32 kBytes = 96;  // what a kernel has besides comes after these

  // readers: warps that say when a buffer of the bias, and of dS in its place, is free.
  __device__ __forceinline__ void init_copies(int readers) const {
    barrier_init(k_full(), 1);
    barrier_init(v_full(), 1);
    barrier_init(grad_out_full(), 1);
    barrier_init(grad_out_empty(), 8);
    for (int i = 0; i < 2; ++i) {
      barrier_init(q_full(i), 1);
      barrier_init(q_empty(i), 8 * 32);
      barrier_init(bias_full(i), 1);
      barrier_init(grads_empty(i), readers);
    }
  }

  __device__ __forceinline__ u32 k_full() const { return at; }
  __device__ __forceinline__ u32 v_full() const { return at + 8; }
  __device__ __forceinline__ u32 grad_out_full() const { return at + 16; }
  __device__ __forceinline__ u32 grad_out_empty() const { return at + 24; }
  __device__ __forceinline__ u32 q_full(int i) const { return at + 32 + 8 * i; }
  __device__ __forceinline__ u32 q_empty(int i) const { return at + 48 + 8 * i; }
  __device__ __forceinline__ u32 bias_full(int i) const { return at + 64 + 8 * i; }
  __device__ __forceinline__ u32 grads_empty(int i) const { return at + 80 + 8 * i; }
};

// The bias of keys from `key` on, step by step, to buffers from `to` on, of kBytes each and kApart bytes apart.
template <auto S, int kBytes, int kApart>
__device__ __forceinline__ void sm90_cluster_copy_bias(const Sm90BackwardArgs& m, const Sm90KeyBlock<S>& block, int key,
                                                       u32 to, const Sm90ClusterBarriers& barriers) {
  Ring<2> ring;
  auto step = block.walk();
#pragma unroll 1
  for (int n = 0; n < block.steps; ++n, block.next(step)) {
    if (block.begins_head(step)) {
      block.begin_head(step);
    }
    const u32 full = barriers.bias_full(ring.buffer());
    barrier_wait(barriers.grads_empty(ring.buffer()), ring.parity() ^ 1);
    barrier_expect(full, kBytes);
    tensor_load(to + ring.buffer() * kApart, m.bias, full,
                {key, step.query, step.head * m.has_bias.head, int(block.place.b2) * m.has_bias.batch2,
                 int(block.place.b1) * m.has_bias.batch1});
    ring.next();
  }
}

// dK and dV of a warp's rows of keys: of each the columns that this warpgroup has, part number `part` of head_dim.
template <auto S, int kCountD, int kCountV>
__device__ __forceinline__ void sm90_cluster_store(const Args& a, const Place& place, u32 head_k, int part,
                                                   const float (&dk)[kCountD], const float (&dv)[kCountV], int key,
                                                   int t) {
  const int first_d = part * 2 * kCountD;
  const int first_v = part * 2 * kCountV;
  if (a.grad_k.data != nullptr) {
    store_gradient_rows<S>(a.grad_k, place.key_rows(a.grad_k.strides, head_k) + first_d * a.grad_k.strides.col,
                           a.results.k, dk, a.scale, key, place.k_len, a.out_dim - first_d, a.vector_stores, t);
  }
  if (a.grad_v.data != nullptr) {
    store_gradient_rows<S>(a.grad_v, place.key_rows(a.grad_v.strides, head_k) + first_v * a.grad_v.strides.col,
                           a.results.v, dv, keep_scale<S>(a), key, place.k_len, a.out_dim_v - first_v, a.vector_stores,
                           t);
  }
}

}  // namespace fovea::cuda
