// SPDX-License-Identifier: Apache-2.0
//
// The end of a step in sm90_backward, and dQ of the step before.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/sm90/backward_output.cuh"
#include "cuda/device/tile/pipe.cuh"
#include "cuda/device/tile/shared.cuh"
#include "cuda/device/work/sm90_key_block.cuh"

namespace fovea::cuda {

// Everything that it reads and changes lies in the kernel.
template <Sm90BackwardSpec S>
struct Sm90BackwardStep {
  static constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  static constexpr Sm90BackwardChoices kHow = sm90_backward_choices(S);
  static constexpr int kColumns = S.halves ? S.d / 2 : S.d;  // of a product of dQ
  static constexpr int kSums = (sm90_turns_dq(S) ? S.step : kColumns) / 2;

  const Args& a;
  const Sm90KeyBlock<S>& block;
  const Sm90BackwardBarriers& barriers;
  const SharedOperand<Inner::kRows, kSizes.keys, kHow.panel_d>& k_inside;
  const SharedOperand<Inner::kColumns, S.step, 64>& grads_rows;
  float (&dk)[S.tiles][S.d / 2];
  float (&dv)[S.tiles][S.dv / 2];
  Ring<S.stages>& ring_q;
  Ring<S.planes>& ring_grads;
  int& head_before;  // whose dQ is to be computed
  u32& left;         // parity of what leaves through shared memory
  const u32& base;
  const int &c, &warp, &lane;
  const bool& leader;

  // dQ of the step whose dS lies in `grads`, from row `row` of dq_sum (`direct`: of the head) on. pending: dV and dK of
  // this warpgroup's own step are in flight, whose Q is then released.
  __device__ __forceinline__ bool my_turn(int turn) const { return S.halves || S.step == 128 || turn == c; }
  __device__ __forceinline__ void finish_step() {
#pragma unroll
    for (int f = 0; f < S.tiles; ++f) {
      pin(dk[f]);
      pin(dv[f]);
    }
    barrier_arrive(barriers.q_empty(ring_q.buffer()));  // all lanes: each has read row vectors
  }
  __device__ __forceinline__ void multiply_dq(const Ring<S.planes>& grads, float (&dq)[kSums]) {
    wgmma_fence();
    const auto grads_now = grads_rows.buffer(grads.buffer(), kSizes.grads);
    if constexpr (sm90_turns_dq(S)) {
      multiply<S.type, kSizes.keys>(dq, k_inside, grads_now);
    } else {
      multiply<S.type, kSizes.keys>(dq, grads_now, k_inside);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void send_dq(float (&dq)[kSums], int row) {
    sm90_backward_send_dq<S>(a, base, barriers, block.place, dq, head_before, row, left, c, warp, lane);
  }
  __device__ __forceinline__ void add_dq(const Ring<S.planes>& grads, int row, bool pending) {
    float dq[kSums];
    begin_dq(grads, dq);
    if (pending) {
      wgmma_wait<1>();
      finish_step();
    }
    await_dq(grads, dq);
    send_dq(dq, row);
  }
  __device__ __forceinline__ void begin_dq(const Ring<S.planes>& grads, float (&dq)[kSums]) {
    barrier_wait(barriers.grads_full(grads.buffer()), grads.parity());
    multiply_dq(grads, dq);
  }
  __device__ __forceinline__ void await_dq(const Ring<S.planes>& grads, float (&dq)[kSums]) {
    wgmma_wait<0>();
    pin(dq);
    if (leader) {
      barrier_arrive(barriers.grads_empty(grads.buffer()));
    }
  }

  // With same_step: dQ of this step, and its way out once dK's product is in flight.
  template <int kCount>
  __device__ __forceinline__ void begin_own_dq(float (&dq)[kCount]) {
    if constexpr (S.same_step) {
      fence_async();
      if constexpr (S.summed > 1) {
        __syncwarp();
        if (leader) {
          barrier_arrive(barriers.grads_full(ring_grads.buffer()));
        }
      }
      sync(kGradsThere, kHow.threads);  // all of dS is there, and that of the step before has been read
      multiply_dq(ring_grads, dq);
    }
  }
  template <int kCount>
  __device__ __forceinline__ void end_own_dq(float (&dq)[kCount], int row) {
    if constexpr (S.same_step) {
      wgmma_wait<1>();
      pin(dq);
      if (kHow.bias_in_place && leader) {
        barrier_arrive(barriers.grads_empty(ring_grads.buffer()));
      }
      send_dq(dq, row);
    }
  }
  __device__ __forceinline__ void release_outer(Ring<S.outer>& ring) const {
    if constexpr (kHow.outer) {
      __syncwarp();
      if (leader) {
        barrier_arrive(barriers.outer_empty(ring.buffer()));
      }
      ring.next();
    }
  }

  __device__ __forceinline__ void clear_dead() {
    static_assert(S.step % 64 == 0 || !may_hide(S));  // it looks at 64 rows a time
    if (block.may_be_dead) {
      zero_dead_rows<S, kHow.row_v, kHow.panels_v, kHow.threads>(
          base + kSizes.grad_out_at + ring_q.buffer() * kSizes.grad_out,
          base + kSizes.lse_at + ring_q.buffer() * kSizes.rows);
    }
  }
  __device__ __forceinline__ void await_tile(int i) {
    if (i == 0) {
      if constexpr (kHow.bias_in_place) {
        barrier_wait(barriers.bias_full(ring_grads.buffer()), ring_grads.parity());
      } else if constexpr (kHow.dq_later) {
        barrier_wait(barriers.grads_empty(ring_grads.buffer()), ring_grads.parity() ^ 1);
      }
    }
  }

  // The end of step n: dV and dK are awaited, and dQ of the step before is computed if it is this warpgroup's turn.
  __device__ __forceinline__ void end(const int& n, const Ring<S.planes>& grads_before, const int& row_before,
                                      const int& turn_before) {
    if constexpr (kHow.dq_later) {
      fence_async();
      __syncwarp();
      if (leader) {
        barrier_arrive(barriers.grads_full(ring_grads.buffer()));
      }
      if (S.delay && n > 0 && my_turn(turn_before)) {
        add_dq(grads_before, row_before, true);
      } else {
        wgmma_wait<0>();
        finish_step();
        if (!S.delay && n > 0 && my_turn(turn_before)) {
          add_dq(grads_before, row_before, false);
        }
      }
    } else {
      wgmma_wait<0>();
      finish_step();
      if (kHow.bias_in_place && !S.same_step) {
        __syncwarp();
        if (leader) {
          barrier_arrive(barriers.grads_empty(ring_grads.buffer()));
        }
      }
    }
  }

  // The end of a block of keys with tile_stores. adds: this warpgroup has dQ of the last step still to compute. dV is
  // stored during its product, and its sums leave behind dK: K and V of the next block come sooner.
  __device__ __forceinline__ void store_tiles(const Sm90BackwardArgs& m, const volatile Sm90StoredKeys& keys, bool adds,
                                              const Ring<S.planes>& grads_before, int row_before) {
    bool placed = false;
    if constexpr (kHow.dq_later) {
      if (adds) {
        float dq[kSums];
        begin_dq(grads_before, dq);
        sm90_backward_place_dv<S>(a, base, dv, c, warp, lane);
        await_dq(grads_before, dq);
        sm90_backward_store_tiles<S>(a, m, base, keys, dk, c, warp, lane);
        send_dq(dq, row_before);
        placed = true;
      }
    }
    if (!placed) {
      sm90_backward_place_dv<S>(a, base, dv, c, warp, lane);
      sm90_backward_store_tiles<S>(a, m, base, keys, dk, c, warp, lane);
    }
    if (leader) {
      bulk_wait_read();
    }
  }

  // The end of a block of keys: dQ of the last step, dK and dV with tile_stores, and K and V have been read.
  __device__ __forceinline__ void end_block(const Sm90BackwardArgs& m, const volatile Sm90StoredKeys& keys,
                                            const Ring<S.planes>& grads_before, int row_before, int turn_before) {
    const bool adds = kHow.dq_later && block.steps > 0 && my_turn(turn_before);
    if constexpr (S.tile_stores) {
      store_tiles(m, keys, adds, grads_before, row_before);
    } else if constexpr (kHow.dq_later) {
      if (adds) {
        add_dq(grads_before, row_before, false);
      }
    }
    if constexpr (sm90_counts_sums(S)) {
      __syncwarp();
      if (leader) {
        barrier_arrive(barriers.sums_left());
      }
    }
    __syncwarp();
    if (leader) {
      barrier_arrive(barriers.kv_empty());
    }
  }
};

}  // namespace fovea::cuda
