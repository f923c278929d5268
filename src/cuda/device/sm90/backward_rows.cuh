// SPDX-License-Identifier: Apache-2.0
//
// The row vectors of a step within sm90_backward (Sm90BackwardTiles::makes_rows), by the idle warps of the copying
// warpgroup: the logsumexp in the unit of the scores, and delta = <dO, O> - dlse. O comes with dO, and a lane has a
// row. backward_prepare does the same for all other calls.
#pragma once

#include "cuda/device/ptx/sm80.cuh"
#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_blocks.cuh"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/tile/pipe.cuh"
#include "cuda/device/tile/tile.cuh"
#include "cuda/device/work/sm90_key_block.cuh"
#include "math/softmax.h"

namespace fovea::cuda {

// One of kSm90RowWarps warps.
template <auto S>
__device__ __forceinline__ void sm90_backward_make_rows(const Args& a, const Sm90BackwardArgs& m, u32 base,
                                                        const Sm90BackwardBarriers& barriers, int warp, int lane) {
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  constexpr int kPanel = sm90_backward_panel_v(S);
  constexpr int kTiles = S.step / 32;  // of 32 rows
  constexpr int kMine = (kTiles + kSm90RowWarps - 1) / kSm90RowWarps;
  Ring<S.stages> ring;
#pragma unroll 1
  for (u32 phase = 0;; phase ^= 1) {
    const u32 number = sm90_take_block<S>(base, barriers, phase, lane);
    if (number == kNoBlock) {
      return;
    }
    const Sm90KeyBlock<S> block(a, m, number);
    auto step = block.walk();
#pragma unroll 1
    for (int n = 0; n < block.steps; ++n, block.next(step)) {
      if (block.begins_head(step)) {
        block.begin_head(step);
      }
      // What is in global memory is on its way before the tiles are waited for.
      float reference[kMine];
      float grad_lse[kMine] = {};
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const int tile = warp + i * kSm90RowWarps;
        const int row = step.query + tile * 32 + lane;
        reference[i] = kInfinity;
        if (tile < kTiles && row < block.place.q_len) {
          const i64 at = block.place.query_rows(a.lse.strides, u32(step.head)) + row * a.lse.strides.row;
          reference[i] = math::backward_reference(static_cast<const float*>(a.lse.data)[at]);
          if (a.grad_lse.data != nullptr) {
            grad_lse[i] = static_cast<const float*>(
                a.grad_lse
                    .data)[block.place.query_rows(a.grad_lse.strides, u32(step.head)) + row * a.grad_lse.strides.row];
          }
        }
      }
      barrier_wait(barriers.inputs_full(ring.buffer()), ring.parity());
      const u32 grad_out = base + kSizes.grad_out_at + ring.buffer() * kSizes.grad_out;
      const u32 out = base + kSizes.out_at + ring.buffer() * kSizes.grad_out;
      const u32 vectors = base + kSizes.lse_at + ring.buffer() * kSizes.rows;
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const int tile = warp + i * kSm90RowWarps;
        if (tile >= kTiles) {
          continue;
        }
        const int row = tile * 32 + lane;
        float sum = 0;
#pragma unroll 2
        for (int column = 0; column < S.dv; column += 8) {
          const u32 at = u32(column / kPanel * S.step * kPanel * 2) + swizzled<kPanel * 2>(row, column % kPanel / 8);
          sum += dot8<S.type>(load_shared4(out + at), load_shared4(grad_out + at));
        }
        // A dead row's P of 0 would make NaN of what is not finite.
        const float delta = reference[i] == kInfinity ? 0.f : math::delta(sum, grad_lse[i]);
        store_shared(vectors + row * 4, reference[i] * a.lse_factor);
        store_shared(vectors + (kSizes.delta_at - kSizes.lse_at) + row * 4, delta);
      }
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(barriers.q_full(ring.buffer()));
      }
      ring.next();
    }
  }
}

}  // namespace fovea::cuda
