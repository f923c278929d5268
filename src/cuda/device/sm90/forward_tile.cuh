// SPDX-License-Identifier: Apache-2.0
//
// What all warps of sm90_forward share: its barriers, turns, and a tile of queries with the steps of keys that it
// meets.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/device/tile/pipe.cuh"
#include "math/band.h"
#include "math/rows.h"

namespace fovea::cuda {

struct Sm90Barriers {
  static constexpr int kQ = 0, kK = 64, kV = 128, kPlanes = 192, kPrepared = 256;  // of a ring: full, then empty
  static constexpr int kPair = 320;                                                // Sm90Pair
  u32 first;
  __device__ __forceinline__ u32 full(int ring, int i) const { return first + ring + 8 * i; }
  __device__ __forceinline__ u32 empty(int ring, int i) const { return first + ring + kPipeEmpty + 8 * i; }

  // Full: the threads that write, and the bytes that the copying thread announces. Empty: every warp that reads, and
  // for Q every warpgroup that stores O, or every warp that needs the buffer no longer.
  template <auto S>
  __device__ __forceinline__ void init() const {
    constexpr int kGroups = sm90_forward_sizes(S).groups;
    constexpr int kPreparing = sm90_hides(S) ? kSm90PreparingWarps : 0;
    const auto init_ring = [&](int ring, int buffers, int writers, int readers) {
      for (int i = 0; i < buffers; ++i) {
        barrier_init(full(ring, i), writers);
        barrier_init(empty(ring, i), readers);
      }
    };
    init_ring(kQ, S.q_buffers, 1, (sm90_stores_directly(S) ? 8 : 5) * kGroups + 32 * kPreparing);
    init_ring(kK, sm90_key_buffers(S), 1, 4 * kGroups);
    init_ring(kV, S.stages, 1, 4 * kGroups);
    init_ring(kPlanes, S.planes, 1, 4 * kGroups);
    if constexpr (kPreparing > 0) {
      init_ring(kPrepared, kSm90PreparedBuffers, kPreparing, 4 * kGroups);
    }
    if constexpr (S.pairs) {
      for (int i = 0; i < kSm90PairBarriers * S.warps; ++i) {
        barrier_init(first + kPair + 8 * i, 1);
      }
    }
  }
};

// Named barriers of sm90_forward.
inline constexpr NamedBarriers kForwardTurn{1, 3};   // of each warpgroup that computes: its turn to issue products
inline constexpr NamedBarriers kForwardGroup{4, 3};  // of each of them: its own threads
inline constexpr NamedBarriers kForwardGroups{7};    // of all that compute
static_assert(are_apart({kForwardTurn, kForwardGroup, kForwardGroups}));

// Warpgroups that compute issue products in turn: each passes the turn on to the next.
template <auto S>
struct Sm90Turns {
  static constexpr int kGroups = sm90_forward_sizes(S).groups;
  static constexpr int kTwo = 256;  // threads: of the warpgroup that passes and of the next one
  int c;                            // of this warpgroup

  __device__ __forceinline__ void begin() const {
    if (S.turns && c == kGroups - 1) {
      arrive(kForwardTurn[0], kTwo);
    }
  }
  __device__ __forceinline__ void wait() const {
    if constexpr (S.turns) {
      sync(kForwardTurn[c], kTwo);
    }
  }
  __device__ __forceinline__ void pass() const {
    if constexpr (S.turns) {
      arrive(kForwardTurn[c + 1 == kGroups ? 0 : c + 1], kTwo);
    }
  }
  // The last turn that was passed.
  __device__ __forceinline__ void end() const {
    if (S.turns && c == 0) {
      sync(kForwardTurn[0], kTwo);
    }
  }
};

// A tile of queries of one head; b < 0: there are no more.
struct Sm90Tile {
  int row, head, b;
  int q_begin, q_len, k_begin, k_len;
  int head_k, b1, b2;
  int first_step, end_step;  // sm90_keeps_steps: its steps of its part, without those that are hidden at either end
  int part;                  // sm90_has_parts: its number among all parts of the keys; -1: it has all keys

  __device__ __forceinline__ i64 offset(const math::Strides& strides, int at) const {
    return b1 * strides.batch1 + b2 * strides.batch2 + head * strides.head + at * strides.row;
  }
  __device__ __forceinline__ i64 plane(const math::Strides& strides, int of_head) const {
    return b1 * strides.batch1 + b2 * strides.batch2 + of_head * strides.head;
  }
};

// What lies beside Q. One lane reads, the one that arrives for its warp.
template <bool kHasPart>
__device__ __forceinline__ Sm90Tile sm90_read_tile(u32 tile) {
  constexpr int kAll = int(sizeof(Sm90Tile)) / 4;
  constexpr int kWords = kHasPart ? kAll : kAll - 1;
  int words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    u32 x = 0;
    if (threadIdx.x % 32 == 0) {
      x = load_shared_word(tile + 4 * i);
    }
    words[i] = int(__shfl_sync(~0u, x, 0));
  }
  return {words[0],
          words[1],
          words[2],
          words[3],
          words[4],
          words[5],
          words[6],
          words[7],
          words[8],
          words[9],
          words[10],
          words[11],
          kHasPart ? words[kWords - 1] : 0};
}

// Tiles are numbered head by head, but for heads_together of them whose row tiles alternate; under a band the longest
// first. Sequences of different lengths are numbered one after the other, each with all of its heads.
template <auto S>
__device__ __forceinline__ Sm90Tile sm90_tile(const Args& a, const Sm90ForwardArgs& m, int number) {
  constexpr int kRows = sm90_forward_sizes(S).rows;
  Sm90Tile tile{};
  u32 in_group = u32(number);
  // Opaque, or the reciprocals that divisions take would be made once and kept.
  u32 row_tiles = u32(opaque(m.row_tiles));
  u32 all = u32(m.heads) * u32(m.batch);
  tile.q_len = int(a.rows.rows_q);
  tile.k_len = int(a.rows.rows_k);
  if constexpr (S.ragged) {
    const ListedTile listed = m.list[in_group / u32(opaque(m.heads))];
    tile.b = listed.b;
    tile.q_begin = listed.q_begin;
    tile.q_len = listed.q_len;
    tile.k_begin = listed.k_begin;
    tile.k_len = listed.k_len;
    in_group -= u32(listed.first) * u32(m.heads);
    row_tiles = u32(tile.q_len + kRows - 1) / u32(kRows);
    all = u32(m.heads);
  }
  u32 alternating = u32(opaque(m.heads_together));
  const u32 group = in_group / (row_tiles * alternating);
  in_group -= group * (row_tiles * alternating);
  const u32 first_bh = group * alternating;
  alternating = min(alternating, all - first_bh);
  const u32 row = in_group / alternating;
  const u32 bh = first_bh + in_group - row * alternating;
  tile.row = int(S.banded ? row_tiles - 1 - row : row) * kRows;
  if constexpr (S.ragged) {
    tile.head = int(bh);
  } else {
    const u32 inside = u32(opaque(m.inside));
    const u32 outer = bh / inside;
    const u32 inner = bh - outer * inside;
    tile.head = int(m.batch_inside ? outer : inner);
    tile.b = int(m.batch_inside ? inner : outer);
  }
  return tile;
}

// This block's number in its cluster.
template <auto S>
__device__ __forceinline__ int sm90_forward_rank() {
  return S.pairs ? int(uniform(cluster_rank())) : 0;
}

// Steps whose keys any of these rows of the tile meets.
template <auto S>
__device__ __forceinline__ math::Interval<int> sm90_steps(const Sm90Tile& tile, const math::Band<int>& band, int row,
                                                          int rows) {
  constexpr int kKeys = sm90_step_keys(S);
  const math::Interval<int> keys = band.keys_of_rows(row, min(row + rows, band.seqlen_q));
  math::Interval<int> steps{S.left_edge ? keys.begin / kKeys : 0,
                            ((S.banded ? keys.end : band.seqlen_k) + kKeys - 1) / kKeys};
  if constexpr (sm90_keeps_steps(S)) {
    steps = {max(steps.begin, tile.first_step), min(steps.end, tile.end_step)};
  }
  return steps;
}
template <auto S>
__device__ __forceinline__ math::Interval<int> sm90_steps(const Sm90Tile& tile, const math::Band<int>& band) {
  return sm90_steps<S>(tile, band, tile.row, sm90_forward_sizes(S).rows);
}

// The first key that the block of this rank makes scores of, in step n.
template <auto S>
__device__ __forceinline__ int sm90_first_key(int n, int rank) {
  return n * sm90_step_keys(S) + rank * S.step;
}

// Part `part` of `parts` about equal ones.
__device__ __forceinline__ math::Interval<int> sm90_steps_of_part(const math::Interval<int>& steps, int part,
                                                                  int parts) {
  const int count = max(steps.end - steps.begin, 0);
  return {steps.begin + count * part / parts, steps.begin + count * (part + 1) / parts};
}

// All steps of the tile; with a mask of keys those between which it shows any.
template <auto S>
__device__ __forceinline__ math::Interval<int> sm90_shown_steps(const Args& a, const Sm90Tile& tile) {
  constexpr int kKeys = sm90_step_keys(S);
  constexpr u32 kBits = kKeys < 128 ? (1u << kKeys / 4) - 1 : ~0u;
  math::Interval<int> steps{0, (tile.k_len + kKeys - 1) / kKeys};
  if constexpr (!sm90_skips(S)) {
    return steps;
  }
  const u32* const words = static_cast<const u32*>(a.mask.data) + tile.offset(a.mask.strides, 0);
  const auto hidden = [&](int step) {
    const int key = step * kKeys;
    const uint4 x = __ldg(reinterpret_cast<const uint4*>(words + key / 128 * 4));
    return ((x.x | x.y | x.z | x.w) >> key % 128 / 4 & kBits) == 0;
  };
  while (steps.end > steps.begin && hidden(steps.end - 1)) {
    --steps.end;
  }
  while (steps.begin < steps.end && hidden(steps.begin)) {
    ++steps.begin;
  }
  return steps;
}

template <auto S>
__device__ __forceinline__ math::Band<int> sm90_band(const Args& a, const Sm90ForwardArgs& m, const Sm90Tile& tile) {
  if constexpr (S.banded && S.shifted) {
    return shifted_band<S>(a, u32(tile.b), tile.q_len, tile.k_len);
  }
  const int shift = S.banded && !a.top_left ? tile.k_len - tile.q_len : 0;
  return {tile.q_len, tile.k_len, shift + m.low, shift + m.high};
}

}  // namespace fovea::cuda
