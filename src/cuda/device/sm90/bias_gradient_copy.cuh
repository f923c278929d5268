// SPDX-License-Identifier: Apache-2.0
//
// What a block of sm90_bias_gradient is about, and the warpgroup that copies for it.
//
//   for_each_tile, for_each_entry   the block's tiles, the (b, h) that each is the sum of: all roles walk alike
//   copies                          by TMA, a warp for Q and K, which takes the tiles' numbers as well, and a warp for
//                                   dO, V and row vectors; by cp.async, two warps for what is added to scores
#pragma once

#include "cuda/device/generic/bias_gradient.cuh"
#include "cuda/device/sm90/bias_gradient_sizes.h"
#include "cuda/device/tile/panels.h"
#include "cuda/device/tile/pipe.cuh"

namespace fovea::cuda {

// The two warps of warpgroup 0 that copy by cp.async.
constexpr int kBiasCopyThreads = 64;

struct Sm90BiasBarriers {
  u32 first;
  int stages, planes, entries;
  __device__ __forceinline__ u32 full(int i) const { return first + 16 * i; }
  __device__ __forceinline__ u32 empty(int i) const { return first + 16 * i + 8; }
  __device__ __forceinline__ u32 tile_full(int i) const { return full(stages + i); }
  __device__ __forceinline__ u32 tile_empty(int i) const { return empty(stages + i); }
  __device__ __forceinline__ u32 entry_full(int i) const { return full(stages + planes + i); }
  __device__ __forceinline__ u32 entry_empty(int i) const { return empty(stages + planes + i); }
  __device__ __forceinline__ u32 number_full(int i) const { return full(stages + planes + entries + i); }
  __device__ __forceinline__ u32 number_empty(int i) const { return empty(stages + planes + entries + i); }

  __device__ __forceinline__ void init(int warps) const {
    for (int i = 0; i < stages + planes + entries; ++i) {
      barrier_init(full(i), i < stages ? 1 : kBiasCopyThreads);
      barrier_init(empty(i), warps);
    }
    for (int i = 0; i < kBiasTileNumbers; ++i) {
      barrier_init(number_full(i), 1);
      barrier_init(number_empty(i), warps + 3);  // and those that copy, but the one that takes them
    }
    barrier_init_fence();
  }
};

// A tile, and the entries begin ... end - 1 of its plane's list.
struct Sm90BiasTile {
  int plane, m0, n0, chunk, begin, end;

  __device__ __forceinline__ Shared shared(const Args& a) const {
    return Shared::make(a.rows, a.grad_bias.strides, plane);
  }

  template <auto S>
  static __device__ __forceinline__ Sm90BiasTile make(const Args& a, const Sm90BiasGradientArgs& m, int number) {
    constexpr int kRows = sm90_bias_gradient_sizes(S).rows;
    const u32 tiles_k = (u32(a.bias_keys) + S.step - 1) / S.step;
    const u32 tiles_q = (u32(a.bias_rows) + kRows - 1) / kRows;
    u32 n = u32(number);
    Sm90BiasTile tile{};
    const auto take_plane = [&] {
      tile.plane = int(n % u32(m.planes));
      n /= u32(m.planes);
    };
    // Where tiles take different times each block gets some of every place, and not every fourth column of each plane.
    constexpr bool kUneven = S.banded || S.ragged;
    if (kUneven) {
      take_plane();
    }
    tile.n0 = int(n % tiles_k) * S.step;
    n /= tiles_k;
    tile.m0 = int(n % tiles_q) * kRows;
    n /= tiles_q;
    if (!kUneven) {
      take_plane();
    }
    tile.chunk = int(n);
    const i64 list = a.bias_list;
    tile.begin = int(tile.chunk * list / a.bias_chunks);
    tile.end = int((tile.chunk + 1) * list / a.bias_chunks);
    return tile;
  }
};

// visit(entry, place) for the entries of a tile's list that meet it. Where lengths differ, by whole warps: each lane
// looks up one entry, and the warp visits those that meet the tile.
template <auto S, class Visit>
__device__ __forceinline__ void for_each_entry(const Args& a, const Sm90BiasTile& tile, Visit visit) {
  constexpr int kRows = sm90_bias_gradient_sizes(S).rows;
  const Shared shared = tile.shared(a);
  const BiasEntries entries(a, shared);
  if constexpr (S.ragged) {
#pragma unroll 1
    for (int first = tile.begin; first < tile.end; first += 32) {
      const int n = first + int(threadIdx.x % 32);
      const u32 outer = u32(n) / u32(shared.heads);
      const u32 b1 = u32(shared.b1) + outer / u32(shared.n2);
      const u32 b2 = entries.first_b2 + outer % u32(shared.n2);
      const u32 head = entries.first_head + u32(n) - outer * u32(shared.heads);
      Place mine{};
      if (n < tile.end) {
        mine = Place::make<S>(a, b1, b2);
      }
#pragma unroll 1
      for (u32 left = __ballot_sync(~0u, meets_tile<S, kRows, S.step>(a, mine, tile.m0, tile.n0)); left != 0;
           left &= left - 1) {
        const int from = __ffs(int(left)) - 1;
        const auto of = [&](auto x) { return __shfl_sync(~0u, x, from); };
        visit(BiasEntries::Entry{of(b1), of(b2), of(head)},
              Place{of(mine.b), of(b1), of(b2), of(mine.q_len), of(mine.k_len), of(mine.q_begin), of(mine.k_begin)});
      }
    }
  } else {
    if (S.banded && !meets_tile<S, kRows, S.step>(a, Place::make<S>(a, 0u, 0u), tile.m0, tile.n0)) {
      return;
    }
    BiasEntries::Entry entry = entries.at(a, shared, tile.begin);
#pragma unroll 1
    for (int n = tile.begin; n < tile.end; ++n) {
      visit(entry, Place::make<S>(a, entry.b1, entry.b2));
      entries.advance(entry);
    }
  }
}

// visit(tile, number) for this block's tiles, by whole warps. One warp (kTakes) takes their numbers and hands them on:
// from a counter, as blocks begin when the main kernel leaves them their multiprocessors, and tiles take different
// times; or, where tiles were flagged, every gridDim.x-th of all, but those that were not.
template <auto S, bool kTakes, class Visit>
__device__ __forceinline__ void for_each_tile(const Args& a, const Sm90BiasGradientArgs& m, u32 base,
                                              const Sm90BiasBarriers& barriers, Visit visit) {
  Ring<kBiasTileNumbers> ring;
  const bool leader = threadIdx.x % 32 == 0;
  int number = int(blockIdx.x);
#pragma unroll 1
  for (bool first = true;; first = false) {
    const u32 at = base + sm90_bias_gradient_sizes(S).numbers_at + ring.buffer() * 4;
    if constexpr (kTakes) {
      if (m.ticket != nullptr && !first) {
        number = int(gridDim.x) + int(__shfl_sync(~0u, leader ? atomicAdd(m.ticket, 1u) : 0u, 0));
      } else if (m.ticket == nullptr) {
        const auto flagged = [&] {
          u32 any = S.bias_outside || m.flags == nullptr ? 1 : 0;
          for (int i = 0; any == 0 && i < S.warps; ++i) {
            any |= m.flags[i64(number) * S.warps + i];
          }
          return any != 0;
        };
        number += first ? 0 : int(gridDim.x);
        while (number < m.tiles && !flagged()) {
          number += int(gridDim.x);
        }
      }
      if (leader) {
        barrier_wait(barriers.number_empty(ring.buffer()), ring.parity() ^ 1);
        store_shared(at, u32(number));
        barrier_arrive(barriers.number_full(ring.buffer()));
      }
    } else {
      barrier_wait(barriers.number_full(ring.buffer()), ring.parity());
      number = int(load_shared_word(at));
      __syncwarp();
      if (leader) {
        barrier_arrive(barriers.number_empty(ring.buffer()));
      }
    }
    ring.next();
    if (number >= m.tiles) {
      return;
    }
    visit(Sm90BiasTile::make<S>(a, m, number), number);
  }
}

// ---- the warpgroup that copies ----

// A warp, of which one lane copies every second unit: Q with K, or (kSecond) dO with V, logsumexp and delta.
template <auto S, bool kSecond>
__device__ __forceinline__ void sm90_bias_copy_rows(const Args& a, const Sm90BiasGradientArgs& m, u32 base,
                                                    const Sm90BiasBarriers& barriers) {
  constexpr Sm90BiasGradientSizes kSizes = sm90_bias_gradient_sizes(S);
  constexpr int kRows = kSizes.rows;
  constexpr int kColumns = kSecond ? S.dv : S.d;
  constexpr int kPanel = panel_columns(kColumns);
  const TensorMap& queries = kSecond ? m.grad_out : m.q;
  const TensorMap& keys = kSecond ? m.v : m.k;
  const Has& has_queries = kSecond ? m.has_grad_out : m.has_q;
  const Has& has_keys = kSecond ? m.has_v : m.has_k;
  const bool copies = threadIdx.x % 32 == 0;
  Ring<S.stages> ring;
  Ring<kSizes.vector_buffers> ring_vectors;
  if (kSecond) {
    ring.next();
  }
  for_each_tile<S, !kSecond>(a, m, base, barriers, [&](const Sm90BiasTile& tile, int) {
    for_each_entry<S>(a, tile, [&](const BiasEntries::Entry& e, const Place& place) {
      if (!copies) {
        return;
      }
      const u32 full = barriers.full(ring.buffer());
      const u32 to = base + ring.buffer() * kSizes.unit;
      const int head_k = int(m.group == 1 ? e.head : e.head / u32(m.group));
      const auto at = [&](const Has& has, int column, i64 row, int head) {
        return Coordinates{column, int(row), head * has.head, int(e.b2) * has.batch2, int(e.b1) * has.batch1};
      };
      int count = 0;  // of a row vector: padded rows of this sequence
      if constexpr (kSecond) {
        count = min(kRows, padded(place.q_len) - tile.m0);
      }
      barrier_wait(barriers.empty(ring.buffer()), ring.parity() ^ 1);
      barrier_expect(full, (kRows + S.step) * kColumns * 2 + count * 8);
#pragma unroll 1
      for (int p = 0; p < kColumns / kPanel; ++p) {
        tensor_load(to + p * kRows * kPanel * 2, queries, full,
                    at(has_queries, p * kPanel, place.q_begin + tile.m0, int(e.head)));
        tensor_load(to + kRows * kColumns * 2 + p * S.step * kPanel * 2, keys, full,
                    at(has_keys, p * kPanel, place.k_begin + tile.n0, head_k));
      }
      if constexpr (kSecond) {
        const i64 row = row_of_head(a, place.b, e.head, place.queries()) + tile.m0;
        const u32 vectors = base + kSizes.vectors_at + ring_vectors.buffer() * kSizes.vectors;
        bulk_load(vectors, a.row_lse + row, count * 4, full);
        bulk_load(vectors + kRows * 4, a.row_delta + row, count * 4, full);
        ring_vectors.next();
      }
      ring.next();
      ring.next();
    });
  });
}

template <auto S>
using BiasTileInputs = ScoreInputs<bias_of_tile(S), false, sm90_bias_gradient_sizes(S).rows,
                                   sm90_bias_gradient_sizes(S).part, kBiasCopyThreads>;
template <auto S>
using BiasEntryInputs = ScoreInputs<scores_of_entry(S), false, sm90_bias_gradient_sizes(S).rows,
                                    sm90_bias_gradient_sizes(S).part, kBiasCopyThreads>;

// kBiasCopyThreads threads: the bias of a tile.
template <auto S>
__device__ __forceinline__ void sm90_bias_copy_tile(const Args& a, const Sm90BiasTile& tile, u32 to, u32 full,
                                                    int thread) {
  constexpr Sm90BiasGradientSizes kSizes = sm90_bias_gradient_sizes(S);
  const BiasEntries::Entry e = BiasEntries::at(a, tile.shared(a), 0);
  // The longest that a sequence may be: entries differ.
  Place place{};
  place.b1 = e.b1;
  place.b2 = e.b2;
  place.q_len = int(a.rows.limit_q);
  place.k_len = int(a.rows.limit_k);
#pragma unroll 1
  for (int part = 0; part < kSizes.parts; ++part) {
    BiasTileInputs<S>::load(to + part * kSizes.tile, a, place, e.head, tile.m0, tile.n0 + part * kSizes.part,
                            opaque(thread));
  }
  copy_arrive(full);
}

template <auto S>
__device__ __forceinline__ void sm90_bias_copy_inputs(const Args& a, const Sm90BiasGradientArgs& m, u32 base,
                                                      const Sm90BiasBarriers& barriers, int thread) {
  constexpr Sm90BiasGradientSizes kSizes = sm90_bias_gradient_sizes(S);
  constexpr int kTileBytes = kSizes.tile;
  constexpr int kEntryBytes = kSizes.entry;
  Ring<S.planes> ring_tile;
  Ring<S.entries> ring_entry;
  for_each_tile<S, false>(a, m, base, barriers, [&](const Sm90BiasTile& tile, int) {
    if constexpr (kTileBytes > 0) {
      const u32 buffer = ring_tile.buffer();
      barrier_wait(barriers.tile_empty(buffer), ring_tile.parity() ^ 1);
      sm90_bias_copy_tile<S>(a, tile, base + kSizes.tile_at + buffer * kSizes.parts * kSizes.tile,
                             barriers.tile_full(buffer), thread);
      ring_tile.next();
    }
    if constexpr (kEntryBytes > 0) {
      for_each_entry<S>(a, tile, [&](const BiasEntries::Entry& e, const Place& place) {
        const u32 buffer = ring_entry.buffer();
        barrier_wait(barriers.entry_empty(buffer), ring_entry.parity() ^ 1);
        const u32 to = base + kSizes.entry_at + buffer * kSizes.parts * kSizes.entry;
#pragma unroll 1
        for (int part = 0; part < kSizes.parts; ++part) {
          BiasEntryInputs<S>::load(to + part * kSizes.entry, a, place, e.head, tile.m0, tile.n0 + part * kSizes.part,
                                   opaque(thread));
        }
        copy_arrive(barriers.entry_full(buffer));
        ring_entry.next();
      });
    }
  });
  copy_wait<0>();
}

}  // namespace fovea::cuda
