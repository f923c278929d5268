// SPDX-License-Identifier: Apache-2.0
//
// sm90_forward: o = softmax(scores of q k^T) v on Hopper, for numbers of 16 bits.
//
// Persistent blocks, one a multiprocessor (short sequences: several, of one computing warpgroup each). Warpgroup 0
// copies: its first thread takes tiles of queries, mostly from a counter, and loads Q, K, V and what is added to scores
// by TMA, each into a ring of buffers with a barrier for full and one for empty. The other warpgroups compute, 64
// queries each:
//
//     S of step n-1 = Q K^T issued, then O += P V of step n issued, and the turn is passed to the next warpgroup
//     scores and softmax of n-1 | O of n awaited | P of n-1 in registers
//
//     tensor cores   S(n-1) O(n)   S(n-2) O(n-1) ...      of one warpgroup; the gaps are another's products
//     other units          softmax(n-1)   softmax(n-2)
//
// At the end O is stored by TMA through the buffer of Q that its tile no longer needs; the next tile's Q is in the
// other buffer. Where there is one buffer alone, O is stored from registers, and the next Q is loaded during the last P
// V. Steps run from the last key to the first: the edges of the band and of the sequence come first. Where tiles have
// parts of their keys, generic_combine puts them together, or with `joins` this kernel (forward_join.cuh).
//
// Heads wider than 256 (sm90_wide_forward) are computed by pairs of blocks, see forward_pair.cuh. Q of such a head_dim
// takes half of shared memory, and K comes in parts of 128 columns. Each part leaves when it is multiplied, so that no
// S can be formed again, and steps take the softmax's exact way. There are no turns: both warpgroups read the same
// part.
#pragma once

#include "cuda/device/sm90/forward_join.cuh"
#include "cuda/device/sm90/forward_output.cuh"
#include "cuda/device/sm90/forward_prepare.cuh"
#include "cuda/device/sm90/forward_step.cuh"
#include "cuda/device/tile/accumulator.cuh"
#include "cuda/device/tile/shared.cuh"
#include "math/band.h"

namespace fovea::cuda {

// The warpgroup that copies: one thread, and where masks of keys are prepared the other warps.
template <auto S>
__device__ __forceinline__ void sm90_forward_move(const Args& a, const Sm90ForwardArgs& m, u32 base,
                                                  volatile Sm90Tile* tiles, const Sm90Barriers& barriers) {
  if constexpr (sm90_hides(S)) {
    if (const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0); warp > 0) {
      sm90_forward_prepare<S>(a, base, tiles, barriers, warp - 1, int(threadIdx.x % 32));
      return;
    }
  }
  if (threadIdx.x == 0) {
    sm90_forward_copy<S>(a, m, base, tiles, barriers);
  }
}

// Warpgroup c of those that compute.
template <auto S>
__device__ __forceinline__ void sm90_forward_compute(const Args& a, const Sm90ForwardArgs& m, u32 base,
                                                     const Sm90Barriers& barriers, int c) {
  // ---- sizes ----
  constexpr Sm90ForwardSizes kSizes = sm90_forward_sizes(S);
  constexpr int kPanelK = wide_panel_columns(S.d);
  constexpr int kPanelV = wide_panel_columns(S.dv);
  constexpr int kKeyParts = sm90_key_parts(S);
  constexpr int kKeyBuffers = sm90_key_buffers(S);
  constexpr bool kHides = sm90_hides(S);  // K has 16 more columns, which warps of the warpgroup that copies make
  constexpr bool kPeels = sm90_peels(S);
  constexpr bool kDirect = sm90_stores_directly(S);
  // Warps of a warpgroup may join parts of different tiles: each stores its own rows.
  const bool direct = S.fp32_results || S.pairs || sm90_has_parts(S) || (kDirect && a.vector_stores);

  const int thread = threadIdx.x % 128;
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const bool leader = lane == 0;
  const int rank = sm90_forward_rank<S>();
  Sm90Pair<S> pair(base, barriers, rank, c * 4 + warp, lane);
  Pipe<kKeyBuffers, Sm90Barriers::kK> k_pipe{barriers.first, leader};
  Pipe<S.stages, Sm90Barriers::kV> v_pipe{barriers.first, leader};
  Pipe<sm90_has_planes(S) ? S.planes : 0, Sm90Barriers::kPlanes> planes{barriers.first, leader};
  Pipe<S.q_buffers, Sm90Barriers::kQ> q_pipe{barriers.first, leader};
  Pipe<kHides ? kSm90PreparedBuffers : 0, Sm90Barriers::kPrepared> prepared{barriers.first, leader};

  const int own_barrier = kForwardGroup[c];
  const Sm90Turns<S> turns{c};
  turns.begin();
  Sm90Decisions<S> dropout;
  const auto next_prepared = [&] {
    if constexpr (kHides) {
      __syncwarp();
      prepared.release();
      prepared.next();
    }
  };

  const auto q_rows = SharedTile<kSizes.rows, S.d, kPanelK>{base + kSizes.q_at}.along_columns(c * 64);
  const auto k_rows = SharedTile<S.step, sm90_key_columns(S), kPanelK>{base + kSizes.k_at}.along_columns();
  const auto v_inside = SharedTile<sm90_step_keys(S), S.dv, kPanelV>{base + kSizes.v_at}.along_rows();
  const auto zeros_inside = SharedTile<16, S.dv, kPanelV>{base + kSizes.zeros_at}.along_rows();
  const int fragment_row = warp * 16 + lane % 16;  // of this warpgroup's 64, as ldmatrix and stmatrix take it
  const int fragment_half = lane / 16;

  int stored = -1;  // the buffer of Q that an O of ours may still be leaving through
  // Q is no longer needed.
  const auto leave_q = [&](bool now) {
    if constexpr (S.pairs) {
      // Without a branch: nothing that a warp without rows does later would join its lanes again.
      barrier_arrive_if(leader && now, barriers.empty(barriers.kQ, int(q_pipe.buffer())));
    } else if constexpr (kDirect) {
      __syncwarp();
      if (now) {
        q_pipe.release();
      }
    }
  };
  const auto release_stored = [&] {
    if (stored >= 0 && thread == 0) {
      bulk_wait_read();
      barrier_arrive(barriers.empty(barriers.kQ, stored));
    }
    stored = -1;
  };

  Sm90Softmax<S> softmax;
  Sm90ForwardScores<S> scores(base, c * 64 + warp * 16 + g, c * 64 + fragment_row, fragment_half, t);
  float o[S.dv / 2];
  constexpr int kHeld = S.resident ? S.d / 16 : 0;  // of Q as the A operand: S then reads K alone from shared memory
  u32 q_held[kHeld > 0 ? kHeld : 1][4];
  u32 p_there[S.pairs ? S.step / 4 : 1];  // the other block's weights

  while (true) {
    // ---- which tile ----
    q_pipe.wait();
    const Sm90Tile tile =
        sm90_read_tile<sm90_has_parts(S)>(base + kSizes.tiles_at + q_pipe.buffer() * u32(sizeof(Sm90Tile)));
    if (tile.b < 0) {
      break;
    }
    q_pipe.release();  // the tile is read; Q itself is not yet
    const math::Band<int> band = sm90_band<S>(a, m, tile);
    const math::Interval<int> steps = sm90_steps<S>(tile, band);
    const int top = tile.row + c * 64;
    const int row0 = top + warp * 16 + g;
    const auto q_now = q_rows.buffer(q_pipe.buffer(), kSizes.q);
    if constexpr (S.resident) {
      constexpr int kBlocks = kPanelK / 16;
#pragma unroll
      for (int k = 0; k < S.d / 16; ++k) {
        const u32 panel = base + kSizes.q_at + q_pipe.buffer() * kSizes.q + k / kBlocks * (kSizes.rows * kPanelK * 2);
        const int chunk = k % kBlocks * 2 + fragment_half;
        ldmatrix(q_held[k], panel + swizzled<kPanelK * 2>(c * 64 + fragment_row, chunk));
      }
    }
    if constexpr (S.dropout != DropoutRule::kNone) {
      dropout.start(a, tile.b, tile.head, tile.k_len, row0);
    }
    scores.start(a, tile, band, row0, t);

    // ---- products ----
    const auto issue_scores = [&] {
      prepared.wait();
      wgmma_fence();
      if constexpr (S.pairs) {
        sm90_multiply_parts<S>(softmax.s, q_now, k_rows, k_pipe);
        return;
      }
      const auto k_now = k_rows.buffer(k_pipe.buffer(), kSizes.k);
      multiply<S.type, S.d, kHeld>(softmax.s, q_held, q_now, k_now);
      if constexpr (kHides) {
        const SharedTile<S.step, 16, 16> hide{base + kSizes.hide_at + prepared.buffer() * kSizes.hide};
        const SharedTile<64, 16, 16> ones{base + kSizes.ones_at};
        multiply_add<S.type, 16>(softmax.s, ones.along_columns(), hide.along_columns());
      }
      wgmma_commit();
    };
    const auto issue_output = [&](bool first = false) {
      // Of the tile of zeros, which has 16 rows, every instruction takes the same.
      const u32 v_now = first ? zeros_inside.low : v_inside.buffer(v_pipe.buffer(), kSizes.v).low;
      const u32 v_next = first ? 0 : v_inside.kRowBytes;
      const auto multiply_values = [&](const u32* p, int block) {
#pragma unroll
        for (int k = 0; k < S.step / 16; ++k) {
          const u32 at = v_now + (block * (S.step / 16) + k) * v_next;
          wgmma_registers<S.type>(o, p + 4 * k, descriptor(at, descriptor_high(kPanelV * 2)));
        }
      };
      if constexpr (S.pairs) {
        pair.hear_weights(p_there);
      }
      wgmma_fence();
      multiply_values(softmax.p, rank);
      if constexpr (S.pairs) {
        multiply_values(p_there, rank ^ 1);
      }
      wgmma_commit();
    };
    // ---- steps that no row of this warpgroup meets are passed over ----
    int own_end = steps.end;
    if constexpr (S.banded) {
      own_end = min(steps.end, sm90_steps<S>(tile, band, top, 64).end);
    }
    if (top >= band.seqlen_q) {
      own_end = steps.begin;
    }
    softmax.start();
    float merged_lse[2] = {};
    if constexpr (S.pairs && S.fp32_results) {
      sm90_forward_merged_lse<S>(a, tile, pair, row0, merged_lse);
      own_end = int(uniform(u32(own_end)));  // behind a wait ptxas does not see that it is, and serialises products
    }
    // V of a step comes behind what the next step needs. Where not all of that is there at once (parts of K, one
    // buffer) it is passed over a step later: what it waits for leaves with a turn that this warpgroup would be
    // holding.
    constexpr bool kLate = kKeyBuffers < kKeyParts || (S.banded && S.turns && (S.stages == 1 || S.planes == 1));
    bool owed = false;
    for (int n = steps.end - 1; n >= own_end && n >= steps.begin; --n) {
      turns.wait();
#pragma unroll
      for (int part = 0; part < kKeyParts; ++part) {
        k_pipe.skip();
      }
      planes.skip();
      if (!kLate || owed) {
        v_pipe.skip();
      }
      owed = true;
      turns.pass();
      prepared.wait();
      next_prepared();
    }
    float sink = -kInfinity;
    if (own_end > steps.begin) {
      int n = own_end - 1;
      bool careful = !S.guess;
      const float unit = softmax.kNatural ? math::kLog2E : m.scale_log2;

      using Step = Sm90ForwardStep<S>;
      using Left = typename Step::Left;
      Step step{a,      m,    tile, band, softmax, scores,       dropout, pair, k_pipe, v_pipe, planes, o,
                q_pipe, base, c,    top,  row0,    fragment_row, lane,    t,    unit,   n,      careful};
      // 0 * NaN is NaN: what lies behind the sequence's end must not be there. Every warpgroup writes the same zeros.
      const auto clear_values = [&](int of) {
        constexpr int kKeys = sm90_step_keys(S);
        if (const int live = band.seqlen_k - of * kKeys; S.ragged && live < kKeys) {
          v_pipe.wait();
          sm90_clear_values<S>(base + kSizes.v_at + v_pipe.buffer() * kSizes.v, live, thread);
          sync(own_barrier, 128);
        }
      };
      // V is loaded behind K of the next step and what comes with it. Where these have one buffer, which this step
      // still has, or K comes in parts, nothing may wait for V before it has taken them.
      constexpr bool kClearsLate = S.pairs || S.stages == 1 || S.planes == 1;
      const auto await_values = [&](int of) {
        v_pipe.wait();
        if constexpr (kClearsLate) {
          clear_values(of);
        }
      };
      const auto after_first = [&] {
        if (kLate && owed) {
          v_pipe.skip();
        }
        release_stored();
        if constexpr (!kClearsLate) {
          clear_values(n);
        }
      };
      set_zero(o);
      bool first = true;
      Left left = Left::kNothing;
      if constexpr (kPeels) {
        k_pipe.wait();
        turns.wait();
        issue_scores();
        turns.pass();
        if constexpr (!kHides) {
          scores.mask.load(step.key());
        }
        sm90_await_scores<S, 0>(k_pipe);
        pin(softmax.s);
        next_prepared();
        left = step.template soften<true>(true);
        after_first();
        first = false;
      } else {
        set_zero(softmax.p);
      }

      // ---- steps, and the end of the one before ----
#pragma unroll 1
      while (true) {
        if (kPeels || !first) {
          step.settle(left);
          if (n == steps.begin) {
            break;
          }
          --n;
        }
        k_pipe.wait();
        turns.wait();
        issue_scores();
        if (!first) {
          await_values(n + 1);
        }
        issue_output(first);
        turns.pass();
        if constexpr (!kHides) {
          scores.mask.load(step.key());
        }
        sm90_await_scores<S, 1>(k_pipe);
        pin(softmax.s);
        next_prepared();
        left = step.template soften<!kPeels>(first);
        if (!first) {
          v_pipe.next();
        }
        if (!kPeels && first) {
          after_first();
          first = false;
        }
      }
      leave_q(direct);
      await_values(n);
      issue_output();
      softmax.sum[0] = quad_sum(softmax.sum[0]);
      softmax.sum[1] = quad_sum(softmax.sum[1]);
      if constexpr (S.pairs) {
        pair.add(softmax.sum);
      }
      wgmma_wait<0>();
      pin(o);
      v_pipe.release();
      v_pipe.next();
    } else {
      if (kLate && owed) {
        v_pipe.skip();
      }
      leave_q(direct);
      release_stored();
      set_zero(o);
    }

    // ---- the end of the rows ----
    if (!sm90_forward_join<S>(a, m, tile.part, softmax, o, rank * S.warps + c * 4 + warp, lane)) {
      q_pipe.next();
      continue;
    }
    if (!S.split && a.sink != nullptr) {
      sink = a.sink[tile.head * a.sink_stride];
    }
    float factor[2];
    float there[2] = {};
    sm90_forward_end_rows<S>(a, tile, softmax, rank, merged_lse, sink, row0, t, factor, there);
    if (direct) {
      sm90_forward_store_directly<S>(a, tile, rank, row0, t, o, factor, there);
    } else {
      const bool leaving =
          sm90_forward_store<S>(a, m, tile, base + kSizes.q_at + q_pipe.buffer() * kSizes.q, c, thread, o, factor);
      if (leaving && S.q_buffers > 1) {
        stored = int(q_pipe.buffer());
      } else if (thread == 0) {
        bulk_wait_read();
        if constexpr (!kDirect) {
          barrier_arrive(barriers.empty(barriers.kQ, q_pipe.buffer()));
        }
      }
      leave_q(true);
    }
    q_pipe.next();
  }
  turns.end();
  if (thread == 0) {
    bulk_wait_read();
  }
}

template <auto S>
__device__ __forceinline__ void sm90_forward_block(const Args& a, const Sm90ForwardArgs& m) {
  constexpr Sm90ForwardSizes kSizes = sm90_forward_sizes(S);
  constexpr int kGroups = kSizes.groups;
  constexpr bool kHides = sm90_hides(S);
  // The sum is what a launch has; with more it would wait for ever.
  constexpr bool kNarrow = kGroups < 3 || S.step < 128;
  constexpr int kRegistersToCopy = kHides && kNarrow ? 56 : kGroups < 3 && S.ctas < 4 ? 40 : 32;
  constexpr int kRegisters = sm90_forward_registers(S, kRegistersToCopy);
  static_assert(S.type != Type::kFp32 && kGroups <= 3 && (kGroups > 1 || !S.turns));
  static_assert(S.d % 16 == 0 && S.dv % 16 == 0 && S.d <= 512 && S.dv <= 256 && S.step % 16 == 0);
  static_assert(!S.pairs || (kGroups == 2 && sm90_stores_directly(S) && !S.turns && !S.guess && !S.ahead && !kHides &&
                             !S.resident && S.d % sm90_key_columns(S) == 0));
  static_assert(S.stages <= 4 && S.planes <= 4 && S.q_buffers <= 4 && sm90_has_planes(S) == (S.planes > 0));

  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 base = shared_address(memory);
  volatile Sm90Tile* const tiles = reinterpret_cast<Sm90Tile*>(memory + kSizes.tiles_at);
  const Sm90Barriers barriers{base + kSizes.barriers_at};
  const int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0);
  if (threadIdx.x == 0) {
    barriers.init<S>();
    barrier_init_fence();
  }
  sm90_forward_constants<S>(base);
  if constexpr (S.pairs) {
    cluster_sync();
  } else {
    sync();
  }
  wait_for_kernels_before();

  if (warpgroup == 0) {
    fewer_registers<kRegistersToCopy>();
    sm90_forward_move<S>(a, m, base, tiles, barriers);
    return;
  }

  more_registers<kRegisters>();
  sm90_forward_compute<S>(a, m, base, barriers, warpgroup - 1);
}

template <Sm90ForwardSpec S>
__global__ void __launch_bounds__(sm90_forward_sizes(S).threads, sm90_forward_sizes(S).ctas)
    sm90_forward(const __grid_constant__ Args a, const __grid_constant__ Sm90ForwardArgs m) {
  sm90_forward_block<S>(a, m);
}

// Heads wider than 256: in clusters.
template <Sm90ForwardSpec S>
__global__ void __cluster_dims__(sm90_forward_blocks(S), 1, 1) __launch_bounds__(sm90_forward_sizes(S).threads, 1)
    sm90_wide_forward(const __grid_constant__ Args a, const __grid_constant__ Sm90ForwardArgs m) {
  sm90_forward_block<S>(a, m);
}

}  // namespace fovea::cuda
