// SPDX-License-Identifier: Apache-2.0
//
// Biases on their way into sm90_backward, and dS on its way out where it is the gradient of one (dbias_store): one
// thread loads, another one stores, by TMA.
//
//     ring of `grads`    (S.planes buffers) the first bias, if it has 16 bits; dS comes to lie where it was, and leaves
//                        from there
//     ring of `outer`    (S.outer buffers) a bias of fp32, and the second bias
//
// With odd_rows a bias comes to `outer` first, and warps move it to `grads` (backward_odd_rows.cuh).
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_blocks.cuh"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/tile/pipe.cuh"
#include "cuda/device/work/sm90_key_block.cuh"

namespace fovea::cuda {

template <auto S>
__device__ __forceinline__ void sm90_backward_copy_bias(const Args& a, const Sm90BackwardArgs& m, u32 base,
                                                        const Sm90BackwardBarriers& barriers) {
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  constexpr int kOuter = kSizes.outer + kSizes.outer2;
  Ring<S.planes> ring;
  Ring<S.outer> ring_outer;
  u32 phase = 0;
#pragma unroll 1
  for (u32 number = sm90_take_block<S>(base, barriers, phase); number != kNoBlock;
       number = sm90_take_block<S>(base, barriers, phase)) {
    const Sm90KeyBlock<S> block(a, m, number);
    auto step = block.walk();
#pragma unroll 1
    for (int n = 0; n < block.steps; ++n, block.next(step)) {
      if (block.begins_head(step)) {
        block.begin_head(step);
      }
      const auto load = [&](const TensorMap& map, const Has& has, u32 to, int columns, u32 full) {
#pragma unroll 1
        for (int p = 0; p < kSizes.keys / columns; ++p) {
          tensor_load(to + p * S.step * 128, map, full,
                      {block.key0 + p * columns, step.query, step.head * has.head, int(block.place.b2) * has.batch2,
                       int(block.place.b1) * has.batch1});
        }
      };
      if constexpr (sm90_bias_in_place(S)) {
        const u32 full = barriers.bias_full(ring.buffer());
        barrier_wait(barriers.grads_empty(ring.buffer()), ring.parity() ^ 1);
        barrier_expect(full, kSizes.grads);
        load(m.bias, m.has_bias, base + kSizes.grads_at + ring.buffer() * kSizes.grads, 64, full);
        ring.next();
      }
      if constexpr (kOuter > 0) {
        const u32 full = barriers.outer_full(ring_outer.buffer());
        barrier_wait(barriers.outer_empty(ring_outer.buffer()), ring_outer.parity() ^ 1);
        barrier_expect(full, kOuter);
        if constexpr (kSizes.outer > 0) {
          load(m.bias, m.has_bias, base + kSizes.outer_at + ring_outer.buffer() * kSizes.outer,
               bias_panel_columns(S.bias), full);
        }
        if constexpr (kSizes.outer2 > 0) {
          load(m.bias2, m.has_bias2, base + kSizes.outer2_at + ring_outer.buffer() * kSizes.outer2,
               bias_panel_columns(S.bias2), full);
        }
        ring_outer.next();
      }
    }
  }
  // The other blocks of the cluster have read what this one sent, and arrive here no more.
  for (int i = 0; S.summed > 1 && i < S.planes; ++i, ring.next()) {
    barrier_wait(barriers.grads_empty(ring.buffer()), ring.parity() ^ 1);
  }
}

// Tiles of dS leave as they are: the gradient of a bias that nothing shares.
template <auto S>
__device__ __forceinline__ void sm90_backward_store_bias(const Args& a, const Sm90BackwardArgs& m, u32 base,
                                                         const Sm90BackwardBarriers& barriers) {
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  Ring<S.planes> ring;
  u32 phase = 0;
#pragma unroll 1
  for (u32 number = sm90_take_block<S>(base, barriers, phase); number != kNoBlock;
       number = sm90_take_block<S>(base, barriers, phase)) {
    const Sm90KeyBlock<S> block(a, m, number);
    auto step = block.walk();
#pragma unroll 1
    for (int n = 0; n < block.steps; ++n, block.next(step)) {
      if (block.begins_head(step)) {
        block.begin_head(step);
      }
      barrier_wait(barriers.grads_full(ring.buffer()), ring.parity());
#pragma unroll 1
      for (int p = 0; p < kSizes.keys / 64; ++p) {
        tensor_store(m.grad_bias, base + kSizes.grads_at + ring.buffer() * kSizes.grads + p * S.step * 128,
                     {block.key0 + p * 64, step.query, step.head * m.has_grad_bias.head,
                      int(block.place.b2) * m.has_grad_bias.batch2, int(block.place.b1) * m.has_grad_bias.batch1});
      }
      bulk_commit();
      bulk_wait_read();
      barrier_arrive(barriers.grads_empty(ring.buffer()));
      ring.next();
    }
  }
}

}  // namespace fovea::cuda
