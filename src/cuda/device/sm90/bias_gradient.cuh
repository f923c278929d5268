// SPDX-License-Identifier: Apache-2.0
//
// sm90_bias_gradient: the gradient of a bias with queries and keys on Hopper, by recomputing, for numbers of 16 bits.
//
// One persistent block a multiprocessor. A tile is 64 queries a warpgroup by 128 (or 64) keys of one plane of the bias;
// its sum stays in registers while the block walks over the list of (b, h) that share the plane:
//
//   S = Q K^T, dP = dO V^T, sum += P (dP - delta)             64 keys at a time
//
// and is written once. Where planes are few, lists are cut in chunks, whose fp32 sums bias_gradient_sum adds in order.
// Warpgroup 0 copies: a warp Q with K and takes the tiles' numbers, another dO with V and row vectors, both by TMA and
// alternately through one ring of buffers; two warps the bias (once a tile) and what else is added to scores (once an
// entry) by cp.async.
//
// bias_outside: exp(bias) is the same for all of the list, so it is taken out of the sum,
//
//   grad_ij = exp(bias_ij) * sum over the list of exp(s_ij - lse_i) (dp_ij - delta_i)
//
// and a tile's bias is needed at its end only, when it has long been there. What overflows (a row that has nothing but
// biases under -88, scores that far apart that the bias turns round) leaves an infinity or NaN; what underflows has P
// under exp(-55), unless its bias is over 32: tiles that have one or the other are flagged, and a second launch,
// without bias_outside, computes them again.
#pragma once

#include "cuda/device/score/dropout.cuh"
#include "cuda/device/score/mask_edge.cuh"
#include "cuda/device/score/scores.cuh"
#include "cuda/device/sm90/bias_gradient_copy.cuh"
#include "cuda/device/sm90/bias_gradient_output.cuh"
#include "cuda/device/tile/shared.cuh"

namespace fovea::cuda {

// The bias of a tile, for this warp's rows.
template <auto S>
__device__ __forceinline__ void add_bias_of_tile(const Args& a, float (&s)[1][S.part / 8][4], const Thread& thread,
                                                 u32 inputs, int row) {
  Scores<bias_of_tile(S), false, 1>(a, {}, 0, 1.f, 0, 0)
      .template add<BiasTileInputs<S>, S.part>(s, thread, inputs, row, 0, 0, 0);
}

// Dot products become scores. Those far under the cap, the usual ones, by the polynomial that takes fewest
// instructions.
template <auto S>
__device__ __forceinline__ void of_dots(const Scores<scores_of_entry(S), false, 1>& scores,
                                        float (&s)[1][S.part / 8][4], const math::SmallCap<float>& small) {
  if constexpr (S.softcap) {
    const float largest = largest_magnitude(s[0]);
    if (__all_sync(~0u, largest <= small.largest)) {
      each(s[0], [&](float& x, int, int) { x = small.of(x); });
    } else {
      each(s[0], [&](float& x, int, int) { x = score_of_dot<S, Approx>(scores.score, x); });
    }
  } else {
    scores.of_dots(s);
  }
}

// What else is added, for queries from row0 and keys from `key` on.
template <auto S>
__device__ __forceinline__ void add_inputs_of_entry(const Scores<scores_of_entry(S), false, 1>& scores,
                                                    float (&s)[1][S.part / 8][4], const Thread& thread, u32 inputs,
                                                    int row, int row0, int key) {
  scores.template add<BiasEntryInputs<S>, S.part>(s, thread, inputs, row, 0, row0, key);
}

template <Sm90BiasSpec S>
__global__ void __launch_bounds__(sm90_bias_gradient_sizes(S).threads, 1)
    sm90_bias_gradient(const __grid_constant__ Args a, const __grid_constant__ Sm90BiasGradientArgs m) {
  // ---- sizes ----
  constexpr Sm90BiasGradientSizes kSizes = sm90_bias_gradient_sizes(S);
  constexpr Sm90BiasSpec kEntry = scores_of_entry(S);
  constexpr int kGroups = kSizes.groups;
  constexpr int kRows = kSizes.rows;
  constexpr int kParts = kSizes.parts;
  constexpr int kPart = kSizes.part;  // keys of a product
  constexpr int kColumns = kPart / 8;
  constexpr int kTileBytes = kSizes.tile;
  constexpr int kEntryBytes = kSizes.entry;
  constexpr u32 kTileAt = kSizes.tile_at;
  constexpr u32 kEntryAt = kSizes.entry_at;
  constexpr u32 kVectorsAt = kSizes.vectors_at;
  constexpr u32 kVectors = kSizes.vectors;
  constexpr bool kBias = S.bias != BiasTile::kNone;
  constexpr bool kNatural = natural_scores(kEntry);
  constexpr bool kDropout = S.dropout != DropoutRule::kNone;
  constexpr bool kUneven = S.banded || S.ragged;
  constexpr float kLargestOutside = 32;  // of a bias
  constexpr bool kMoves = kGroups > 1;   // a launch of two warpgroups has 255 registers already
  constexpr int kRegistersToCopy = kGroups == 3 ? 56 : kParts > 2 ? 40 : 88;
  constexpr int kRegisters = kGroups == 3 ? 152 : kParts > 2 ? 232 : 208;
  static_assert(kGroups >= 1 && kGroups <= 3 && S.type != Type::kFp32);
  static_assert(S.step % kPart == 0 && S.stages >= 2 && (S.planes > 0) == kBias);
  static_assert((S.entries > 0) == (kSizes.entry > 0));
  static_assert(kBias || !S.bias_outside);

  // ---- shared memory and barriers ----
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 base = shared_address(memory);
  const Sm90BiasBarriers barriers{base + kSizes.barriers_at, S.stages, S.planes, S.entries};
  const int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0);
  if (threadIdx.x == 0) {
    barriers.init(S.warps);
  }
  sync();
  // Of the main kernel nothing is read here: where that comes before, this one starts on multiprocessors that have
  // nothing left to do, and waits at its end, as what comes next counts on that. All that is read was complete when the
  // main kernel let this one start.
  if (m.waits_first) {
    wait_for_kernels_before();
  }
  let_next_kernel_start();
  if (!S.bias_outside && m.flags != nullptr) {  // mostly no tile of this block was flagged
    const int tiles = (m.tiles - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);
    u32 any = 0;
    for (int i = threadIdx.x; i < tiles * S.warps; i += kSizes.threads) {
      any |= m.flags[(blockIdx.x + i64(i / S.warps) * gridDim.x) * S.warps + i % S.warps];
    }
    if (!__syncthreads_or(int(any))) {
      return;
    }
  }

  if (warpgroup == 0) {
    if constexpr (kMoves) {
      fewer_registers<kRegistersToCopy>();
    }
    if (threadIdx.x < 32) {
      sm90_bias_copy_rows<S, false>(a, m, base, barriers);
    } else if (threadIdx.x < 64) {
      sm90_bias_copy_rows<S, true>(a, m, base, barriers);
    } else if (threadIdx.x >= 128 - kBiasCopyThreads) {
      sm90_bias_copy_inputs<S>(a, m, base, barriers, int(threadIdx.x) - (128 - kBiasCopyThreads));
      wait_for_kernels_before();
    }
    return;
  }

  // ---- the warpgroups that compute ----
  if constexpr (kMoves) {
    more_registers<kRegisters>();
  }
  const Thread thread;
  const int warp = thread.warp - 4;  // among those that compute
  const int group = warp / 4;
  const int row = warp * 16;  // of this warp in the tile
  const bool leader = thread.lane == 0;
  Ring<S.stages> ring;
  Ring<kSizes.vector_buffers> ring_vectors;
  Ring<S.planes> ring_tile;
  Ring<S.entries> ring_entry;
  const u32 low = descriptor_low(base, 16);

  // Rows times keys of a unit, 64 keys.
  const auto issue = [&](auto& to, u32 unit, int part, auto columns) {
    constexpr int kWidth = columns;
    constexpr int kPanel = panel_columns(kWidth);
    const SharedOperand<Inner::kColumns, kRows, kPanel> queries{low};
    const SharedOperand<Inner::kColumns, S.step, kPanel> keys{low};
    wgmma_fence();
    multiply<S.type, kWidth>(to, queries.buffer(unit, kSizes.unit).row(group * 64),
                             keys.buffer(unit, kSizes.unit).buffer(1, kRows * kWidth * 2).row(part * kPart));
    wgmma_commit();
  };

  for_each_tile<S, false>(a, m, base, barriers, [&](const Sm90BiasTile& tile, int number) {
    const int row0 = tile.m0 + row;  // of this warp in the sequence
    float sum[kParts][1][kColumns][4] = {};
    const u32 tile_inputs = base + kTileAt + ring_tile.buffer() * kParts * kTileBytes;
    // The bias itself, as the scores of dot products that are all 0. opaque: addresses that are made again after the
    // loop take no registers in it.
    const auto bias_of = [&](auto& b, int part) {
      each(b[0], [&](float& x, int, int) { x = 0; });
      add_bias_of_tile<S>(a, b, thread, u32(opaque(int(tile_inputs))) + part * kTileBytes, row);
    };
    if constexpr (kBias && !S.bias_outside) {
      barrier_wait(barriers.tile_full(ring_tile.buffer()), ring_tile.parity());
    }

    for_each_entry<S>(a, tile, [&](const BiasEntries::Entry& now, const Place& place) {
      const u32 unit_q = ring.buffer();
      const u32 parity_q = ring.parity();
      ring.next();
      const u32 unit_o = ring.buffer();
      const u32 parity_o = ring.parity();
      ring.next();
      Scores<kEntry, false, 1> scores(a, place, now.head, a.scale, row0, thread.g);
      Keep<scores_of_entry(S), false, 1, kColumns> keep;  // g++ 12 refuses kEntry here
      const math::Band<int> band = place.band<S>(a);
      const u32 entry_inputs = base + kEntryAt + ring_entry.buffer() * kParts * kEntryBytes;
      float lse[2];
      float delta[2];
      // Once dO is there, and with it the row vectors.
      const auto begin_entry = [&] {
        const u32 at = base + kVectorsAt + ring_vectors.buffer() * kVectors + (row + thread.g) * 4;
        ring_vectors.next();
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          // Rows behind a sequence's end may have anything.
          const bool there = !S.ragged || row0 + thread.g + x * 8 < place.q_len;
          lse[x] = there ? load_shared(at + x * 32) : kInfinity;
          delta[x] = there ? load_shared(at + x * 32 + kRows * 4) : 0.f;
          if constexpr (S.bias_outside && !kNatural) {
            lse[x] *= math::kLog2E;
          }
        }
        if constexpr (kEntryBytes > 0) {
          barrier_wait(barriers.entry_full(ring_entry.buffer()), ring_entry.parity());
        }
        keep.start(a, place, now.head);
        keep.start_rows(row0, thread.g);
      };
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const bool last = part == kParts - 1;
        const int key = tile.n0 + part * kPart;
        float s[1][kColumns][4];
        float dp[1][kColumns][4];
        float(&flat_s)[kColumns * 4] = *reinterpret_cast<float(*)[kColumns * 4]>(&s);
        float(&flat_dp)[kColumns * 4] = *reinterpret_cast<float(*)[kColumns * 4]>(&dp);
        if (part == 0) {
          barrier_wait(barriers.full(unit_q), parity_q);
        }
        if constexpr (kUneven) {
          if (part == 0) {
            barrier_wait(barriers.full(unit_o), parity_o);
            begin_entry();
          }
          // None of this warpgroup's queries meets any of these keys.
          if (!meets_tile<S, 64, kPart>(a, place, tile.m0 + group * 64, key)) {
            if (last) {
              __syncwarp();
              if (leader) {
                barrier_arrive(barriers.empty(unit_q));
                barrier_arrive(barriers.empty(unit_o));
                if constexpr (kEntryBytes > 0) {
                  barrier_arrive(barriers.entry_empty(ring_entry.buffer()));
                }
              }
            }
            continue;
          }
        }
        issue(flat_s, unit_q, part, Constant<S.d>{});
        if (part == 0 && !kUneven) {
          barrier_wait(barriers.full(unit_o), parity_o);
        }
        issue(flat_dp, unit_o, part, Constant<S.dv>{});
        if (part == 0 && !kUneven) {
          begin_entry();
        }
        if constexpr (kDropout) {
          keep.prepare(thread, row0, key);
        }
        wgmma_wait<1>();
        pin(flat_s);
        __syncwarp();
        if (last && leader) {
          barrier_arrive(barriers.empty(unit_q));
        }
        // What lies behind the ends of sequences may be anything.
        const bool ends = S.ragged && (row0 + 16 > place.q_len || key + kPart > place.k_len);
        const auto exists = [&](int j, int e) {
          return row0 + thread.g + (e >> 1) * 8 < place.q_len && key + j * 8 + thread.t * 2 + (e & 1) < place.k_len;
        };
        of_dots<S>(scores, s, m.small_cap);
        if constexpr (kBias && !S.bias_outside) {
          add_bias_of_tile<S>(a, s, thread, tile_inputs + part * kTileBytes, row);
        }
        add_inputs_of_entry<S>(scores, s, thread, entry_inputs + part * kEntryBytes, row, row0, key);
        if (key + kPart > place.k_len ||
            (S.banded && band.tile(row0, row0 + 16, key, key + kPart) != math::TileClass::kFull)) {
          mask_edge<S, false>(s, thread, band, row0, key);
        }
        if (ends) {
          each(s[0], [&](float& x, int j, int e) { x = exists(j, e) ? x : -kInfinity; });
        }
        const float unit = kNatural ? math::kLog2E : a.scale * math::kLog2E;
        each(s[0], [&](float& x, int, int e) { x = weight_of_score<kNatural>(x, unit, lse[e >> 1]); });
        pin(flat_s);  // before what is waited for next
        wgmma_wait<0>();
        pin(flat_dp);
        __syncwarp();  // what its lanes read of row vectors and inputs they have
        if (last && leader) {
          barrier_arrive(barriers.empty(unit_o));
          if constexpr (kEntryBytes > 0) {
            barrier_arrive(barriers.entry_empty(ring_entry.buffer()));
          }
        }
        if (ends) {
          each(dp[0], [&](float& x, int j, int e) { x = exists(j, e) ? x : 0.f; });
        }
#pragma unroll
        for (int jj = 0; jj < kColumns / 2; ++jj) {
          bool kept[2][4];
          if constexpr (kDropout) {
            keep.decide(kept, thread, 0, jj, row0, key);
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int j = 2 * jj + half;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              float grad = dp[0][j][e];
              if constexpr (kDropout) {
                grad *= kept[half][e] ? a.keep_scale : 0.f;
              }
              // dP of a hidden pair may be infinite; with the bias outside that is flagged.
              sum[part][0][j][e] += math::grad_score<!S.bias_outside>(s[0][j][e], grad, delta[e >> 1]);
            }
          }
        }
      }
      if constexpr (kEntryBytes > 0) {
        ring_entry.next();
      }
    });

    if constexpr (S.bias_outside) {
      barrier_wait(barriers.tile_full(ring_tile.buffer()), ring_tile.parity());
      // NaN and infinities alike leave something else than 0; a bias that is NaN or infinite, too.
      float worst = 0;
      float largest = 0;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float b[1][kColumns][4];
        bias_of(b, part);
        const int keys = a.bias_keys - tile.n0 - part * kPart - thread.t * 2;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          for (int e = 0; e < 4; ++e) {
            float& x = sum[part][0][j][e];
            x *= weight_of_difference(b[0][j][e], 0.f, math::kLog2E);
            if (row0 + thread.g + (e >> 1) * 8 < a.bias_rows && j * 8 + (e & 1) < keys) {
              worst = fmaf(x, 0.f, worst);
              largest = fmaxf(largest, b[0][j][e]);
            }
          }
        }
      }
      worst = largest < kLargestOutside ? worst : kInfinity;
      const bool flagged = __any_sync(~0u, !(worst == 0));
      if (leader) {
        m.flags[i64(number) * S.warps + warp] = flagged;
      }
    }

    store_sums<S>(a, m, tile, sum, tile_inputs, row, thread);
    if constexpr (kBias) {
      __syncwarp();
      if (leader) {
        barrier_arrive(barriers.tile_empty(ring_tile.buffer()));
      }
      ring_tile.next();
    }
  });
}

}  // namespace fovea::cuda
