// SPDX-License-Identifier: Apache-2.0
//
// The warpgroup of sm90_forward that copies: which tile comes next, and Q, K, V and what is added to scores by TMA into
// rings of buffers. One thread does all of it. It decodes a tile's number and puts the result beside Q, so that it
// alone reads the list of ragged sequences.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/device/sm90/forward_tile.cuh"
#include "cuda/device/tile/pipe.cuh"

namespace fovea::cuda {

template <auto S>
__device__ __forceinline__ void sm90_forward_copy(const Args& a, const Sm90ForwardArgs& m, u32 base,
                                                  volatile Sm90Tile* tiles, const Sm90Barriers& barriers) {
  constexpr Sm90ForwardSizes kSizes = sm90_forward_sizes(S);
  constexpr int kRows = kSizes.rows;
  constexpr int kPanelK = wide_panel_columns(S.d);
  constexpr int kPanelV = wide_panel_columns(S.dv);
  constexpr int kPlaneBytes = kSizes.bias + kSizes.bias2;
  const int rank = S.pairs ? int(cluster_rank()) : 0;  // not uniform(): of one thread
  Ring<sm90_key_buffers(S)> ring_k;
  Ring<S.stages> ring_v;
  Ring<S.planes> ring_planes;
  Ring<S.q_buffers> ring_q;
  // Of all parts. Of ragged sequences all tiles have parts: how many there are is known here alone.
  const int count = S.ragged ? m.schedule->row_tiles * m.heads * (sm90_has_parts(S) ? a.splits : 1) : m.tiles;
  // A tile's number is decoded while those before it are computed; divisions, and the list in global memory, take long.
  static_assert((S.q_buffers + 1) * sizeof(Sm90Tile) <= kSm90TilesBytes);
  volatile Sm90Tile& later = tiles[S.q_buffers];
  const auto decode = [&](int number) {
    if (number < count) {
      int of = number;
      int part = -1;
      if (sm90_has_parts(S) && number >= m.whole) {
        part = number - m.whole;
        of = m.whole + int(u32(part) / u32(a.splits));
      }
      Sm90Tile tile = sm90_tile<S>(a, m, of);
      later.row = tile.row;
      later.head = tile.head;
      later.b = tile.b;
      later.q_begin = tile.q_begin;
      later.q_len = tile.q_len;
      later.k_begin = tile.k_begin;
      later.k_len = tile.k_len;
      later.head_k = int(u32(tile.head) / u32(opaque(m.group)));
      later.b1 = int(u32(tile.b) / u32(opaque(m.batch2)));
      later.b2 = tile.b - later.b1 * m.batch2;
      if constexpr (sm90_keeps_steps(S)) {
        tile.b1 = later.b1;
        tile.b2 = later.b2;
        math::Interval<int> steps = sm90_shown_steps<S>(a, tile);
        tile.first_step = steps.begin;
        tile.end_step = steps.end;
        steps = sm90_steps<S>(tile, sm90_band<S>(a, m, tile));
        if constexpr (sm90_has_parts(S)) {
          later.part = part;
          if (part >= 0) {
            steps = sm90_steps_of_part(steps, int(u32(part) % u32(a.splits)), a.splits);
          }
        }
        later.first_step = steps.begin;
        later.end_step = steps.end;
      }
    }
  };
  const int cluster = int(blockIdx.x) / sm90_forward_blocks(S);
  const int clusters = int(gridDim.x) / sm90_forward_blocks(S);
  // Where tiles take different times, the next is taken with the last loads: the block that is free first takes it.
  constexpr bool kLate = !S.pairs && (S.banded || S.ragged || sm90_skips(S));
  const auto take = [&](int number) {
    if constexpr (sm90_shares_tiles(S)) {
      return number + int(gridDim.x);
    }
    return S.ragged || m.schedule != nullptr ? int(gridDim.x + atomicAdd(&m.schedule->next, 1u)) : count;
  };
  bool forth = true;
  int next = cluster;
  for (int number = -1;; number = next) {
    if (number >= 0) {  // one place in the code for every tile's decode, the first one's too
      barrier_wait(barriers.empty(barriers.kQ, ring_q.buffer()), ring_q.parity() ^ 1);
      const u32 full = barriers.full(barriers.kQ, ring_q.buffer());
      if (number >= count) {
        tiles[ring_q.buffer()].b = -1;
        barrier_arrive(full);
        return;
      }
      if constexpr (S.pairs) {
        // Both blocks come to the same tiles by counting: to and fro, since the first of a round are the longest.
        next += 2 * (forth ? clusters - 1 - cluster : cluster) + 1;
        forth = !forth;
      } else {
        next = kLate ? next : take(number);
      }
      // What loads need is read from there again: this warpgroup has few registers.
      volatile Sm90Tile& here = tiles[ring_q.buffer()];
      here.row = later.row;
      here.head = later.head;
      here.b = later.b;
      here.q_begin = later.q_begin;
      here.q_len = later.q_len;
      here.k_begin = later.k_begin;
      here.k_len = later.k_len;
      here.head_k = later.head_k;
      here.b1 = later.b1;
      here.b2 = later.b2;
      if constexpr (sm90_has_parts(S)) {
        here.part = later.part;
      }
      if constexpr (sm90_keeps_steps(S)) {
        here.first_step = later.first_step;
        here.end_step = later.end_step;
      }
      math::Interval<int> steps;
      if constexpr (sm90_keeps_steps(S)) {
        steps = {here.first_step, here.end_step};
      } else {
        Sm90Tile tile{};
        tile.row = here.row;
        tile.q_len = here.q_len;
        tile.k_len = here.k_len;
        if constexpr (S.shifted) {
          tile.b = here.b;  // whose positions they are
        }
        steps = sm90_steps<S>(tile, sm90_band<S>(a, m, tile));
      }
      const auto at = [&](const Has& has, int column, int row, int head) {
        return Coordinates{column, row, head * has.head, here.b2 * has.batch2, here.b1 * has.batch1};
      };
      barrier_expect(full, kRows * sm90_forward_panels(S.d) * kPanelK * 2);
#pragma unroll 1
      for (int p = 0; p < sm90_forward_panels(S.d); ++p) {
        tensor_load(base + kSizes.q_at + ring_q.buffer() * kSizes.q + p * kRows * kPanelK * 2, m.q, full,
                    at(m.has_q, p * kPanelK, here.q_begin + here.row, here.head));
      }
      ring_q.next();

      const auto load_k = [&](int n) {
        constexpr int kPanels = sm90_forward_panels(sm90_key_columns(S));
#pragma unroll 1
        for (int part = 0; part < sm90_key_parts(S); ++part) {
          barrier_wait(barriers.empty(barriers.kK, ring_k.buffer()), ring_k.parity() ^ 1);
          const u32 k_full = barriers.full(barriers.kK, ring_k.buffer());
          barrier_expect(k_full, S.step * kPanels * kPanelK * 2);
#pragma unroll 1
          for (int p = 0; p < kPanels; ++p) {
            tensor_load(
                base + kSizes.k_at + ring_k.buffer() * kSizes.k + p * S.step * kPanelK * 2, m.k, k_full,
                at(m.has_k, (part * kPanels + p) * kPanelK, here.k_begin + sm90_first_key<S>(n, rank), here.head_k));
          }
          ring_k.next();
        }
        if constexpr (sm90_has_planes(S)) {
          const u32 buffer = ring_planes.buffer();
          const int key = sm90_first_key<S>(n, rank);
          barrier_wait(barriers.empty(barriers.kPlanes, buffer), ring_planes.parity() ^ 1);
          const u32 planes_full = barriers.full(barriers.kPlanes, buffer);
          int keys = 0;  // of the key term, whose rows are padded to 16 bytes
          if constexpr (S.key_term) {
            keys = min(S.step, (here.k_len - key + 3) / 4 * 4);
            keys = S.pairs ? max(keys, 0) : keys;
          }
          barrier_expect(planes_full, kPlaneBytes + keys * 4);
          const auto load_bias = [&](const TensorMap& map, const Has& has, int place, int bytes, int panel) {
#pragma unroll 1
            for (int p = 0; p < S.step / panel; ++p) {
              tensor_load(base + place + buffer * bytes + p * (bytes * panel / S.step), map, planes_full,
                          at(has, key + p * panel, here.row, here.head));
            }
          };
          if constexpr (S.bias != BiasTile::kNone) {
            load_bias(m.bias, m.has_bias, kSizes.bias_at, kSizes.bias, sm90_bias_panel(S, S.bias));
          }
          if constexpr (S.bias2 != BiasTile::kNone) {
            load_bias(m.bias2, m.has_bias2, kSizes.bias2_at, kSizes.bias2, sm90_bias_panel(S, S.bias2));
          }
          if constexpr (S.key_term) {
            const math::Strides& strides = a.key_term.strides;
            const float* const from = static_cast<const float*>(a.key_term.data) + here.b1 * strides.batch1 +
                                      here.b2 * strides.batch2 + here.head * strides.head;
            if (!S.pairs || keys > 0) {
              bulk_load(base + kSizes.key_term_at + buffer * kSizes.key_term, from + key, keys * 4, planes_full);
            }
          }
          ring_planes.next();
        }
      };
      const auto load_v = [&](int n) {
        barrier_wait(barriers.empty(barriers.kV, ring_v.buffer()), ring_v.parity() ^ 1);
        const u32 v_full = barriers.full(barriers.kV, ring_v.buffer());
        constexpr int kKeys = sm90_step_keys(S);
        barrier_expect(v_full, kKeys * sm90_forward_panels(S.dv) * kPanelV * 2);
#pragma unroll 1
        for (int p = 0; p < sm90_forward_panels(S.dv); ++p) {
          tensor_load(base + kSizes.v_at + ring_v.buffer() * kSizes.v + p * kKeys * kPanelV * 2, m.v, v_full,
                      at(m.has_v, rank * S.dv + p * kPanelV, here.k_begin + n * kKeys, here.head_k));
        }
        ring_v.next();
      };
      if (steps.end > steps.begin) {
        for (int n = steps.end; n >= steps.begin; --n) {
          if (n > steps.begin) {
            load_k(n - 1);
          }
          if (kLate && n == steps.begin) {
            next = take(number);
          }
          if (n < steps.end) {
            load_v(n);
          }
        }
      } else if (kLate) {
        next = take(number);
      }
    }
    decode(next);
  }
}

}  // namespace fovea::cuda
