// SPDX-License-Identifier: Apache-2.0
//
// QueryBlock: which queries and keys a block of the generic kernels has, where it owns queries (forwards, dq).
#pragma once

#include "cuda/device/tile/place.cuh"
#include "cuda/device/work/head_turns.h"

namespace fovea::cuda {

// A block has kRows queries of one head, with Spec::split a part of their keys, and one of kChunks pieces of the
// columns of its result. What the epilogue alone needs is not kept in registers: there the block is constructed again.
template <auto S, int kRows, int kChunks = 1>
struct QueryBlock {
  static constexpr bool kSplit = requires { requires S.split; };
  Place place;
  u32 head;
  int m0;         // the first query
  int part = 0;   // of the keys
  int chunk = 0;  // of the columns

  __device__ __forceinline__ explicit QueryBlock(const Args& a) {
    const u32 tiles = (u32(a.rows.limit_q) + kRows - 1) / kRows;
    u32 block = u32(a.first_block) + block_index();
    if constexpr (kSplit) {
      part = int(block % u32(a.splits));
      block /= u32(a.splits);
    }
    if constexpr (kChunks > 1) {
      chunk = int(block % kChunks);
      block /= kChunks;
    }
    HeadTurn turn{block / tiles, block % tiles};
    if constexpr (S.banded) {
      turn = head_turn(block, u32(a.rows.batch()) * u32(a.rows.heads_q), tiles);
      turn.number = tiles - 1 - turn.number;  // the longest first under a causal mask
    }
    const u32 b = turn.head / u32(a.rows.heads_q);
    head = turn.head - b * u32(a.rows.heads_q);
    place = Place::make<S>(a, b);
    m0 = int(turn.number) * kRows;
  }

  __device__ __forceinline__ u32 head_k(const Args& a) const {
    return head / (u32(a.rows.heads_q) / u32(a.rows.heads_k));
  }

  // Steps of kStep keys [begin, end) that any row of the block meets.
  template <int kStep>
  __device__ __forceinline__ math::Interval<int> steps(const Args& a, const math::Band<int>& band) const {
    const math::Interval<int> keys =
        S.banded ? band.keys_of_rows(m0, min(m0 + kRows, place.q_len)) : math::Interval<int>{0, place.k_len};
    int first = keys.begin / kStep;
    int last = keys.empty() ? first : (keys.end + kStep - 1) / kStep;
    if constexpr (kSplit) {
      const int share = (last - first + a.splits - 1) / a.splits;
      first = min(first + part * share, last);
      last = min(first + share, last);
    }
    return {first, last};
  }
};

}  // namespace fovea::cuda
