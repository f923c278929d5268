// SPDX-License-Identifier: Apache-2.0
//
// sm90_forward: o = softmax(scores of q k^T) v on Hopper, for numbers of 16 bits and head dimensions up to 256.
//
// One persistent block a multiprocessor. Warpgroup 0 copies: its first thread takes tiles of queries from a counter and
// loads Q, K, V and what is added to scores by TMA, each into a ring of buffers with a barrier for full and one for
// empty. The other warpgroups compute, 64 queries each:
//
//     S of step n-1 = Q K^T issued, then O += P V of step n issued, and the turn is passed to the next warpgroup;
//     dropout's decisions are drawn between the two: while one warpgroup draws, the other's turn is the softmax
//     scores and a part of the softmax of n-1 | O of n awaited | the rest of it, P of n-1 in registers
//
//     tensor cores   S(n-1) O(n)   S(n-2) O(n-1) ...      of one warpgroup; the gaps are another's products
//     other units          softmax(n-1)   softmax(n-2)
//
// At the end O leaves by TMA through the buffer of Q that its tile no longer needs; the next tile's Q is in the other.
// Steps run from the last key to the first: the edges of the band and of the sequence come first.
#ifndef FOVEA_CUDA_DEVICE_SM90_FORWARD_CUH
#define FOVEA_CUDA_DEVICE_SM90_FORWARD_CUH

#include "math/band.h"
#include "sm90_copy.cuh"
#include "sm90_softmax.cuh"

namespace fovea::cuda {

template <Spec S>
__global__ void __launch_bounds__(sm90_forward_sizes(S).threads, 1)
    sm90_forward(const __grid_constant__ Args a, const __grid_constant__ Sm90ForwardArgs m) {
  // ---- sizes ----
  constexpr Sm90ForwardSizes kSizes = sm90_forward_sizes(S);
  constexpr int kGroups = kSizes.groups;
  constexpr int kRows = kSizes.rows;
  constexpr int kStep = S.step;
  constexpr int kPanelK = sm90_forward_panel(S.d);
  constexpr int kPanelV = sm90_forward_panel(S.dv);
  constexpr bool kPlanes = sm90_has_planes(S);
  constexpr bool kDropout = S.dropout != DropoutRule::kNone;
  // What a launch of 3 (4) warpgroups has is 3 x 168 (4 x 128) registers: more would wait for ever.
  constexpr int kRegistersToCopy = kGroups == 2 ? 40 : 32;
  constexpr int kRegisters = kGroups == 2 ? 232 : 160;
  static_assert(kGroups == 2 || kGroups == 3);
  static_assert(S.type != Type::kFp32 && !S.split);
  static_assert(S.d % 16 == 0 && S.dv % 16 == 0 && S.d <= 256 && S.dv <= 256 && kStep % 16 == 0);
  static_assert(S.stages <= 4 && S.planes <= 4 && S.q_buffers <= 4 && kPlanes == (S.planes > 0));

  // ---- shared memory and barriers ----
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 base = shared_address(memory);
  volatile Sm90Tile* const tiles = reinterpret_cast<Sm90Tile*>(memory + kSizes.tiles_at);
  const Sm90Barriers barriers{base + kSizes.barriers_at};
  const int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0);
  if (threadIdx.x == 0) {
    // Full: the thread that copies, and its bytes. Empty: every warp that reads, and (Q) every warpgroup that stores.
    const auto init = [](int buffers, u32 full, u32 empty, int readers) {
      for (int i = 0; i < buffers; ++i) {
        barrier_init(full + 8 * i, 1);
        barrier_init(empty + 8 * i, readers);
      }
    };
    init(S.q_buffers, barriers.q_full(0), barriers.q_empty(0), 5 * kGroups);
    init(S.stages, barriers.k_full(0), barriers.k_empty(0), 4 * kGroups);
    init(S.stages, barriers.v_full(0), barriers.v_empty(0), 4 * kGroups);
    init(S.planes, barriers.planes_full(0), barriers.planes_empty(0), 4 * kGroups);
    barrier_init_fence();
  }
  sync();
  wait_for_kernels_before();

  if (warpgroup == 0) {
    fewer_registers<kRegistersToCopy>();
    if (threadIdx.x == 0) {
      sm90_forward_copy<S>(a, m, base, tiles, barriers);
    }
    return;
  }

  // ---- the warpgroups that compute ----
  more_registers<kRegisters>();
  const int c = warpgroup - 1;
  const int thread = threadIdx.x % 128;
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const bool leader = lane == 0;
  Ring<S.stages> ring_k, ring_v;
  Ring<S.planes> ring_planes;
  Ring<S.q_buffers> ring_q;

  // Turns: barrier 1 + c is this warpgroup's, passed on by the one before it.
  constexpr bool kTurns = S.turns;
  const int own_barrier = 4 + c;
  const auto turn_wait = [&] {
    if constexpr (kTurns) {
      sync(1 + c, 256);
    }
  };
  const auto turn_pass = [&] {
    if constexpr (kTurns) {
      arrive(1 + (c + 1 == kGroups ? 0 : c + 1), 256);
    }
  };
  if (kTurns && c == kGroups - 1) {
    arrive(1, 256);
  }
  const auto next_k = [&] {
    if (leader) {
      barrier_arrive(barriers.k_empty(ring_k.buffer()));
    }
    ring_k.next();
  };
  const auto next_v = [&] {
    if (leader) {
      barrier_arrive(barriers.v_empty(ring_v.buffer()));
    }
    ring_v.next();
  };
  const auto wait_planes = [&] {
    if constexpr (kPlanes) {
      barrier_wait(barriers.planes_full(ring_planes.buffer()), ring_planes.parity());
    }
  };
  const auto next_planes = [&] {
    if constexpr (kPlanes) {
      if (leader) {
        barrier_arrive(barriers.planes_empty(ring_planes.buffer()));
      }
      ring_planes.next();
    }
  };

  const u32 q_low = descriptor_low(base + kSizes.q_at + c * 64 * kPanelK * 2, 16);
  const u32 k_low = descriptor_low(base + kSizes.k_at, 16);
  const u32 v_low = descriptor_low(base + kSizes.v_at, kStep * kPanelV * 2);
  constexpr u32 kHighK = descriptor_high(kPanelK * 2);
  constexpr u32 kHighV = descriptor_high(kPanelV * 2);
  const int fragment_row = warp * 16 + lane % 16;  // of this warpgroup's 64, as ldmatrix and stmatrix take it
  const int fragment_half = lane / 16;

  int stored = -1;  // the buffer of Q that an O of ours may still be leaving through
  const auto release_stored = [&] {
    if (stored >= 0 && thread == 0) {
      bulk_wait_read();
      barrier_arrive(barriers.q_empty(stored));
    }
    stored = -1;
  };

  Sm90Softmax<S> softmax;
  Sm90Decisions<S> dropout;
  Sm90Inputs<S> inputs(base, c * 64 + warp * 16 + g, c * 64 + fragment_row, fragment_half, t);
  float o[S.dv / 2];

  while (true) {
    // ---- which tile ----
    barrier_wait(barriers.q_full(ring_q.buffer()), ring_q.parity());
    const volatile Sm90Tile& given = tiles[ring_q.buffer()];
    const Sm90Tile tile{given.row,     given.head,  given.b,      given.q_begin, given.q_len,
                        given.k_begin, given.k_len, given.head_k, given.b1,      given.b2};
    if (tile.b < 0) {
      break;
    }
    __syncwarp();
    if (leader) {  // the tile is read; Q itself is not yet
      barrier_arrive(barriers.q_empty(ring_q.buffer()));
    }
    const math::Band<int> band = sm90_band<S>(a, m, tile);
    const math::Interval<int> steps = sm90_steps<S>(band, tile.row, kRows);
    const int top = tile.row + c * 64;
    const int row0 = top + warp * 16 + g;
    const u32 q_now = q_low + ring_q.buffer() * (kSizes.q / 16);
    if constexpr (kDropout) {
      dropout.start(a, tile.b, tile.head, tile.k_len, row0);
    }
    if constexpr (S.alibi) {
      inputs.slope = static_cast<const float*>(a.alibi_slopes.data)[tile.offset(a.alibi_slopes.strides, 0)];
      inputs.diagonal = row0 + (a.top_left ? 0 : tile.k_len - tile.q_len) - 2 * t;
    }
    if constexpr (S.mask) {
      for (int x = 0; x < inputs.kMaskRows; ++x) {
        inputs.mask_rows[x] = static_cast<const u32*>(a.mask.data) + t +
                              tile.offset(a.mask.strides, min(row0 + 8 * x, band.seqlen_q - 1));
      }
    }
    if constexpr (S.query_term) {
      const float* const from = static_cast<const float*>(a.query_term.data) + tile.offset(a.query_term.strides, 0);
      for (int x = 0; x < 2; ++x) {
        inputs.query_terms[x] = from[min(row0 + 8 * x, tile.q_len - 1) * a.query_term.strides.row];
      }
    }

    // ---- products ----
    const auto issue_scores = [&] {
      const u32 k_now = k_low + ring_k.buffer() * (kSizes.k / 16);
      constexpr int kBlocks = kPanelK / 16;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < S.d / 16; ++k) {
        const u32 in_panel = k % kBlocks * 2;
        wgmma_shared<S.type>(softmax.s, descriptor(q_now + k / kBlocks * (kRows * kPanelK * 2 / 16) + in_panel, kHighK),
                             descriptor(k_now + k / kBlocks * (kStep * kPanelK * 2 / 16) + in_panel, kHighK), k > 0);
      }
      wgmma_commit();
    };
    const auto issue_output = [&] {
      const u32 v_now = v_low + ring_v.buffer() * (kSizes.v / 16);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kStep / 16; ++k) {
        wgmma_registers<S.type>(o, softmax.p + 4 * k, descriptor(v_now + k * (16 * kPanelV * 2 / 16), kHighV));
      }
      wgmma_commit();
    };
    // S of this warp's 16 rows once more, without the rest of its warpgroup: rare, and slow beside wgmma.
    const auto form_scores = [&] {
#pragma unroll
      for (int i = 0; i < kStep / 2; ++i) {
        softmax.s[i] = 0;
      }
#pragma unroll 1
      for (int k = 0; k < S.d / 16; ++k) {
        constexpr int kBlocks = kPanelK / 16;
        const int chunk = k % kBlocks * 2 + fragment_half;
        u32 x[4];
        ldmatrix(x, base + kSizes.q_at + ring_q.buffer() * kSizes.q + k / kBlocks * kRows * kPanelK * 2 +
                        swizzled<kPanelK * 2>(c * 64 + fragment_row, chunk));
#pragma unroll
        for (int j = 0; j < kStep / 16; ++j) {
          u32 y[4];
          ldmatrix(y, base + kSizes.k_at + ring_k.buffer() * kSizes.k + k / kBlocks * kStep * kPanelK * 2 +
                          swizzled<kPanelK * 2>(16 * j + lane % 16, chunk));
          mma<S.type>(*reinterpret_cast<float(*)[4]>(softmax.s + 8 * j), x, y[0], y[2]);
          mma<S.type>(*reinterpret_cast<float(*)[4]>(softmax.s + 8 * j + 4), x, y[1], y[3]);
        }
      }
    };

    // ---- steps that no row of this warpgroup meets are passed over ----
    int own_end = steps.end;
    if constexpr (S.banded) {
      own_end = min(steps.end, sm90_steps<S>(band, top, 64).end);
    }
    if (top >= band.seqlen_q) {
      own_end = steps.begin;
    }
    softmax.start();
    for (int n = steps.end - 1; n >= own_end && n >= steps.begin; --n) {
      turn_wait();
      barrier_wait(barriers.k_full(ring_k.buffer()), ring_k.parity());
      next_k();
      wait_planes();
      next_planes();
      barrier_wait(barriers.v_full(ring_v.buffer()), ring_v.parity());
      next_v();
      turn_pass();
    }
    float sink = -kInfinity;
    if (own_end > steps.begin) {
      int n = own_end - 1;
      bool careful = false;  // a warp's own matter: it takes the exact way

      // From the dot products of step n to P.
      const auto soften = [&](auto first_step) {
        constexpr bool kFirst = first_step != 0;
        constexpr bool kQuick = S.guess || !kFirst;
        constexpr Constant<0> kNone;
        constexpr Constant<S.ahead> kAhead;
        constexpr Constant<kStep / 16> kAll;
        const auto await_output = [&] {
          wgmma_wait<0>();
          pin(o);
          if (!kFirst) {
            next_v();
          }
        };
        const auto finish = [&](auto again) {
          softmax.template finish<again>(a, m, inputs, ring_planes.buffer(), n * kStep);
          softmax.mask(band, top, row0, n * kStep, t);
        };
        wait_planes();
        finish(kNone);
        if constexpr (kQuick && kFirst) {
          softmax.guess(a);
          careful = softmax.must_be_exact();
          if (careful) {
            softmax.start();
          }
        }
        if (kQuick && !careful) {
          const float unit = softmax.kNatural ? math::kLog2E : m.scale_log2;
          const float bases[2] = {softmax.reference[0] * math::kLog2E, softmax.reference[1] * math::kLog2E};
          float parts[4] = {};
          softmax.weigh(kNone, kAhead, unit, bases, parts);
          await_output();
          softmax.convert(kNone, kAhead, dropout);
          softmax.weigh(kAhead, kAll, unit, bases, parts);
          softmax.convert(kAhead, kAll, dropout);
          const float part0 = parts[0] + parts[1];
          const float part1 = parts[2] + parts[3];
          if (__any_sync(~0u, !(part0 < softmax.kLargestPart) || !(part1 < softmax.kLargestPart))) {
            if (__any_sync(~0u, !(part0 + part1 < softmax.kLargestSum))) {
              form_scores();
              finish(Constant<1>{});
              careful = true;
            } else {
              softmax.sum[0] += part0;
              softmax.sum[1] += part1;
              softmax.move_references(o);
              softmax.convert(kNone, kAll, dropout);
            }
          } else {
            softmax.sum[0] += part0;
            softmax.sum[1] += part1;
          }
        } else {
          await_output();
        }
        if (!kQuick || careful) {
          softmax.exactly(a, o);
          softmax.convert(kNone, kAll, dropout);
          careful = softmax.must_be_exact();
        }
        next_k();
        next_planes();
      };
      const auto decide = [&] {
        if constexpr (kDropout) {
          asm volatile("" : "+r"(dropout.first()));  // not before
          dropout.draw(n * kStep, t);
          dropout.pin();  // not later
        }
      };

      // ---- the first step ----
      barrier_wait(barriers.k_full(ring_k.buffer()), ring_k.parity());
      turn_wait();
      issue_scores();
      turn_pass();
      decide();
      inputs.load_words(n * kStep);
#pragma unroll
      for (int i = 0; i < S.dv / 2; ++i) {
        o[i] = 0;
      }
      wgmma_wait<0>();
      pin(softmax.s);
      soften(Constant<1>{});
      release_stored();
      // 0 * NaN is NaN: what lies behind the sequence's end must not be there. Every warpgroup writes the same zeros.
      if constexpr (S.ragged) {
        const int live = band.seqlen_k - n * kStep;
        if (live < kStep) {
          barrier_wait(barriers.v_full(ring_v.buffer()), ring_v.parity());
          const u32 to = base + kSizes.v_at + ring_v.buffer() * kSizes.v;
          constexpr int kChunks = sm90_forward_panels(S.dv) * (kPanelV / 8);
          for (int i = thread; i < (kStep - live) * kChunks; i += 128) {
            const int row = live + i / kChunks;
            const int chunk = i % kChunks;
            // Rows of a panel keep their chunks, so that all chunks of a row may be zeroed unswizzled: all of a
            // panel's.
            store_shared(
                to + chunk / (kPanelV / 8) * kStep * kPanelV * 2 + row * kPanelV * 2 + chunk % (kPanelV / 8) * 16,
                uint4{0, 0, 0, 0});
          }
          fence_async();
          sync(own_barrier, 128);
        }
      }

      // ---- the others ----
#pragma unroll 1
      while (n > steps.begin) {
        --n;
        barrier_wait(barriers.k_full(ring_k.buffer()), ring_k.parity());
        turn_wait();
        issue_scores();
        decide();
        barrier_wait(barriers.v_full(ring_v.buffer()), ring_v.parity());
        issue_output();
        turn_pass();
        inputs.load_words(n * kStep);
        wgmma_wait<1>();
        pin(softmax.s);
        soften(Constant<0>{});
      }
      barrier_wait(barriers.v_full(ring_v.buffer()), ring_v.parity());
      issue_output();
      softmax.sum[0] = quad_sum(softmax.sum[0]);
      softmax.sum[1] = quad_sum(softmax.sum[1]);
      wgmma_wait<0>();
      pin(o);
      next_v();
    } else {
      release_stored();
#pragma unroll
      for (int i = 0; i < S.dv / 2; ++i) {
        o[i] = 0;
      }
    }

    // ---- the end of the rows ----
    if (a.sink != nullptr) {
      sink = a.sink[tile.head * a.sink_stride];
    }
    float factor[2];
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      float logsumexp;
      softmax.end(x, sink, kDropout ? a.keep_scale : 1.f, factor[x], logsumexp);
      const int row = row0 + 8 * x;
      if (a.lse.data != nullptr && t == 0 && row < tile.q_len) {
        static_cast<float*>(a.lse.data)[tile.offset(a.lse.strides, tile.q_begin + row)] = logsumexp;
      }
    }
    const auto pair = [&](int j, int x) {
      return pack<S.type>(o[4 * j + 2 * x] * factor[x], o[4 * j + 2 * x + 1] * factor[x]);
    };

    // A tensor store would run over into the next sequence.
    if (!m.store_tensor || (S.ragged && top + 64 > tile.q_len)) {
      sync(own_barrier, 128);
      if (thread == 0) {
        barrier_arrive(barriers.q_empty(ring_q.buffer()));
      }
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int row = row0 + 8 * x;
        if (row < tile.q_len) {
          u16* const to = static_cast<u16*>(a.out.data) + tile.offset(a.out.strides, tile.q_begin + row) +
                          2 * t * a.out.strides.col;
#pragma unroll
          for (int j = 0; j < S.dv / 8; ++j) {
            const u32 both = pair(j, x);
            if (a.vector_stores) {
              if (8 * j < a.out_dim_v) {
                *reinterpret_cast<u32*>(to + 8 * j) = both;
              }
            } else {
              if (8 * j + 2 * t < a.out_dim_v) {
                to[8 * j * a.out.strides.col] = u16(both);
              }
              if (8 * j + 2 * t + 1 < a.out_dim_v) {
                to[(8 * j + 1) * a.out.strides.col] = u16(both >> 16);
              }
            }
          }
        }
      }
    } else {
      const u32 to = base + kSizes.q_at + ring_q.buffer() * kSizes.q;
      constexpr int kBlocks = kPanelV / 16;
#pragma unroll
      for (int k = 0; k < S.dv / 16; ++k) {
        stmatrix(to + k / kBlocks * kRows * kPanelV * 2 +
                     swizzled<kPanelV * 2>(c * 64 + fragment_row, k % kBlocks * 2 + fragment_half),
                 pair(2 * k, 0), pair(2 * k, 1), pair(2 * k + 1, 0), pair(2 * k + 1, 1));
      }
      fence_async();
      sync(own_barrier, 128);
      if (thread == 0) {
        for (int i = 0; i < sm90_forward_panels(S.dv); ++i) {
          tensor_store(m.out, to + (i * kRows + c * 64) * kPanelV * 2,
                       {i * kPanelV, tile.q_begin + top, tile.head * m.has_out.head, tile.b2 * m.has_out.batch2,
                        tile.b1 * m.has_out.batch1});
        }
        bulk_commit();
        if constexpr (S.q_buffers == 1) {
          bulk_wait_read();
          barrier_arrive(barriers.q_empty(ring_q.buffer()));
        }
      }
      if constexpr (S.q_buffers > 1) {
        stored = int(ring_q.buffer());
      }
    }
    ring_q.next();
  }
  if (kTurns && c == 0) {
    sync(1, 256);  // the last turn that was passed
  }
  if (thread == 0) {
    bulk_wait_read();
  }
}

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_SM90_FORWARD_CUH
