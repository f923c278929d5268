// SPDX-License-Identifier: Apache-2.0
//
// The warpgroup of sm90_backward that copies: by TMA one thread for K, V, Q, dO and row vectors into rings of buffers.
// Others are for biases (sm90/backward_copy_bias.cuh), and for dQ (sm90/backward_add.cuh).
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_blocks.cuh"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/device/tile/pipe.cuh"
#include "cuda/device/work/sm90_key_block.cuh"

namespace fovea::cuda {

// All but the warp that copies inputs wait for the kernels before; its thread does where it needs what these wrote.
template <auto S>
__device__ __forceinline__ void sm90_begin_backward() {
  if (!sm90_loads_ahead(S) || threadIdx.x >= 32) {
    begin_kernel<S.arch>();
  }
}

// What the thread that copies keeps of a block of keys.
struct Sm90Loads {
  u32 number;
  int b1, b2, q_begin, k_row, head_k, row0, begin, count, skipped, padded_end;
};

template <auto S>
__device__ __forceinline__ void sm90_backward_copy(const Args& a, const Sm90BackwardArgs& m, u32 base,
                                                   volatile Sm90Loads* loads, const Sm90BackwardBarriers& barriers) {
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  constexpr int kPanelD = sm90_backward_panel_d(S);
  constexpr int kPanelV = sm90_backward_panel_v(S);
  constexpr int kPanelsD = panels_of(S.d, kPanelD);
  constexpr int kPanelsV = panels_of(S.dv, kPanelV);
  constexpr int kRowBytes = (kPanelsD * kPanelD + kPanelsV * kPanelV) * 2;
  constexpr int kGroupKeys = S.tiles * 64;
  static_assert(sizeof(Sm90Loads) <= kSm90LoadsBytes);
  const u32 blocks = u32(m.blocks);
  u32 number = blockIdx.x;
  int rounds = 0;
  if constexpr (S.summed > 1) {
    rounds = m.summed.rounds;
    const u32 cluster = blockIdx.x / S.summed;
    const u32 stride = u32(m.summed.stride);
    number = cluster / stride * u32(rounds) * stride + cluster % stride;
  }
  // A block waits only for blocks that began before it: in order every number is a ticket.
  const auto take = [&] {
    if constexpr (S.ordered) {
      return atomicAdd(a.turns, 1u);
    } else if constexpr (S.summed > 1) {
      return --rounds > 0 ? number + u32(m.summed.stride) : kNoBlock;
    } else if constexpr (S.makes_rows) {  // no kernel came before that would have cleared a counter
      return number + gridDim.x;
    } else {
      return gridDim.x < blocks ? gridDim.x + atomicAdd(a.turns, 1u) : kNoBlock;
    }
  };
  bool is_first = true;  // block of keys
  const auto await_kernels_before = [&] {
    if (sm90_loads_ahead(S) && is_first) {
      wait_for_kernels_before();
      is_first = false;
    }
  };
  Ring<S.stages> ring;
  if constexpr (S.ordered) {
    number = take();
  }
  u32 phase = 1;
#pragma unroll 1
  while (number < blocks) {
    const Sm90KeyBlock<S> block(a, m, number);
    if (block.outside()) {
      await_kernels_before();
      // No block takes the numbers between. Not with last_parts, which has no ragged sequences.
      const u32 next = block.number_after(m, number);
      const u32 begun = S.ordered ? 0 : S.summed > 1 ? blocks : gridDim.x;
      if (begun < blocks && next > begun) {
        atomicMax(a.turns, next - begun);
      }
      number = take();
      continue;
    }
    // What loads need is read from there again: this warpgroup has few registers.
    volatile Sm90Loads& here = *loads;
    here.number = number;
    here.b1 = int(block.place.b1);
    here.b2 = int(block.place.b2);
    here.q_begin = int(block.place.q_begin);
    here.k_row = int(block.place.k_begin) + block.key0;
    here.head_k = block.head_k;
    here.row0 = block.row0;
    here.begin = block.begin;
    here.count = block.count;
    if constexpr (Sm90KeyBlock<S>::kSkips) {
      here.skipped = block.skipped;
    }
    if constexpr (sm90_turns_dq(S)) {
      here.padded_end = padded(block.place.q_len);
    }
    const int steps = block.steps;
    const int group = block.group;
    int head = block.head0;
    const auto at = [&](const Has& has, int column, int row, int head) {
      return Coordinates{column, row, head * has.head, here.b2 * has.batch2, here.b1 * has.batch1};
    };
    const auto each_panel = [&](const auto& use) {
#pragma unroll 1
      for (int c = 0; c < kSizes.groups; ++c) {
        const int row = here.k_row + c * kGroupKeys;
#pragma unroll 1
        for (int p = 0; p < kPanelsD; ++p) {
          use(base + kSizes.k_at + (p * kSizes.keys + c * kGroupKeys) * kPanelD * 2, m.k,
              at(m.has_k, p * kPanelD, row, here.head_k));
        }
#pragma unroll 1
        for (int p = 0; p < kPanelsV; ++p) {
          use(base + kSizes.v_at + (p * kSizes.keys + c * kGroupKeys) * kPanelV * 2, m.v,
              at(m.has_v, p * kPanelV, row, here.head_k));
        }
      }
    };
    if constexpr (sm90_tells_ahead(S)) {
      sm90_tell_block<S>(base, barriers, number, phase ^ 1);
    }
    if (sm90_tells_ahead(S) && steps > 0) {
      each_panel([](u32, const TensorMap& map, const Coordinates& from) { tensor_prefetch(map, from); });
    }
    const auto load_keys = [&] {
      barrier_wait(barriers.kv_empty(), phase);
      if constexpr (!sm90_tells_ahead(S)) {
        sm90_tell_block<S>(base, barriers, here.number, phase ^ 1);
      }
      if (steps == 0) {
        barrier_arrive(barriers.kv_full());
        return;
      }
      barrier_expect(barriers.kv_full(), kSizes.keys * kRowBytes);
      each_panel([&](u32 to, const TensorMap& map, const Coordinates& from) {
        tensor_load(to, map, barriers.kv_full(), from);
      });
    };
    if (steps == 0) {
      load_keys();
    }
    int until_keys = min(S.stages, steps);  // buffers of Q that are free sooner than those of K and V
    if (sm90_loads_ahead(S) && is_first && steps > 0) {
      load_keys();
      until_keys = -1;
    }
    // Head by head, unlike the walks of other warps: this thread has the fewest registers.
#pragma unroll 1
    for (int i = 0; steps > 0 && i < group; ++i, ++head) {
      const auto of_head =
          Sm90KeyBlock<S>::steps_of_head(i, here.begin, here.count, Sm90KeyBlock<S>::kSkips ? here.skipped : 0, steps);
      int query = of_head.query;
#pragma unroll 1
      for (int n = of_head.count; n > 0; --n, query = Sm90KeyBlock<S>::after(query, S.step, here.count)) {
        constexpr int kVectors = S.makes_rows ? 0 : S.query_term ? 3 : 2;
        constexpr int kOut = S.makes_rows ? S.step * kPanelsV * kPanelV * 2 : 0;
        const u32 full = S.makes_rows ? barriers.inputs_full(ring.buffer()) : barriers.q_full(ring.buffer());
        barrier_wait(barriers.q_empty(ring.buffer()), ring.parity() ^ 1);
        int row_bytes = kSizes.rows;
        if constexpr (sm90_turns_dq(S)) {
          // Row vectors end with the padded sequence. What lies behind attends to nothing.
          row_bytes = min(S.step, here.padded_end - query) * 4;
          for (int at_byte = row_bytes; at_byte < kSizes.rows; at_byte += 16) {
            constexpr u32 kInfinite = 0x7f800000;
            store_shared(base + kSizes.lse_at + ring.buffer() * kSizes.rows + at_byte,
                         uint4{kInfinite, kInfinite, kInfinite, kInfinite});
            store_shared(base + kSizes.delta_at + ring.buffer() * kSizes.rows + at_byte, uint4{0, 0, 0, 0});
          }
          fence_async();
        }
        barrier_expect(full, S.step * kRowBytes + kOut + kVectors * row_bytes);
#pragma unroll 1
        for (int p = 0; p < kPanelsD; ++p) {
          tensor_load(base + kSizes.q_at + ring.buffer() * kSizes.q + p * S.step * kPanelD * 2, m.q, full,
                      at(m.has_q, p * kPanelD, here.q_begin + query, head));
        }
#pragma unroll 1
        for (int p = 0; p < kPanelsV; ++p) {
          tensor_load(base + kSizes.grad_out_at + ring.buffer() * kSizes.grad_out + p * S.step * kPanelV * 2,
                      m.grad_out, full, at(m.has_grad_out, p * kPanelV, here.q_begin + query, head));
          if constexpr (S.makes_rows) {
            tensor_load(base + kSizes.out_at + ring.buffer() * kSizes.grad_out + p * S.step * kPanelV * 2, m.out, full,
                        at(m.has_out, p * kPanelV, here.q_begin + query, head));
          }
        }
        await_kernels_before();
        const int row = here.row0 + head * int(a.padded_rows) + query;
        if constexpr (!S.makes_rows) {
          const u32 lse = base + kSizes.lse_at + ring.buffer() * kSizes.rows;
          const u32 delta = base + kSizes.delta_at + ring.buffer() * kSizes.rows;
          bulk_load(lse, a.row_lse + row, row_bytes, full);
          bulk_load(delta, a.row_delta + row, row_bytes, full);
        }
        if constexpr (S.query_term) {
          bulk_load(base + kSizes.terms_at + ring.buffer() * kSizes.rows, a.row_term + row, kSizes.rows, full);
        }
        ring.next();
        if (--until_keys == 0) {
          load_keys();
        }
      }
    }
    await_kernels_before();
    phase ^= 1;
    number = take();  // not sooner: the block that is free first takes it
  }
  if constexpr (sm90_tells_ahead(S)) {
    sm90_tell_block<S>(base, barriers, kNoBlock, phase ^ 1);
  }
  barrier_wait(barriers.kv_empty(), phase);
  if constexpr (!sm90_tells_ahead(S)) {
    sm90_tell_block<S>(base, barriers, kNoBlock, phase ^ 1);
  }
  barrier_arrive(barriers.kv_full());
}

}  // namespace fovea::cuda
