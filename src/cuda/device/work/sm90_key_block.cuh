// SPDX-License-Identifier: Apache-2.0
//
// What a block of sm90_backward, sm90_wide_backward or sm90_split_backward is about.
//
//   Sm90KeyBlock       its keys, and the queries that meet any of them, in which order
//   zero_rows          0 * NaN is NaN: what lies behind a sequence's end must not be in a tile,
//   zero_dead_rows     nor dO of a query that meets no key
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/tile/pipe.cuh"
#include "cuda/device/tile/tile.cuh"
#include "math/band.h"
#include "math/rows.h"

namespace fovea::cuda {

template <auto S>
struct Sm90KeyBlock {
  Place place;
  int key0;           // the first key
  int head_k, head0;  // the key head, its first query head
  int group;          // query heads that share it (key_parts: that this part meets)
  int row0;           // where query 0 of head 0 lies in row vectors
  math::Band<int> band;
  int first, count;  // the first query, and steps of each head
  int begin;         // the query that it begins with
  int steps;
  bool may_be_dead;  // a query of these
  int skipped;       // kSkips: the steps of the first head that the part before has
  i64 sums_row;      // key_parts: where its sums lie

  // With `ordered` and a band, blocks begin at the last keys. A block's first query is near its own keys, so that the
  // blocks before it, which have later keys, are always ahead of it.
  static constexpr bool kFromTheEnd = S.ordered && S.banded;
  static constexpr bool kByTurns = sm90_can_take_turns(S) && !S.longest_first;
  // Without a band each block begins at other queries, so that every row of dq_sum is soon stored by some block.
  static constexpr bool kRotates = S.stores_first && !S.banded && !S.ordered;
  // Parts of steps begin within a head. Those of the last blocks have whole heads, or steps of a single one.
  static constexpr bool kSkips = S.key_parts && !S.last_parts;
  static_assert(!S.last_parts || (S.key_parts && !S.banded && !S.ordered && !S.ragged));
  static_assert(!kSkips || !kRotates);

  __device__ __forceinline__ Sm90KeyBlock(const Args& a, const Sm90BackwardArgs& m, u32 index) {
    constexpr int keys = sm90_backward_sizes(S).keys;
    const PartOfKeys mine = part_of_keys<S>(m.parts, index);
    index = mine.block;
    u32 head_of_batch = index / u32(m.key_blocks);
    u32 own = index - head_of_batch * u32(m.key_blocks);
    if constexpr (kByTurns) {
      const u32 all_heads = u32(m.blocks) / (S.key_parts ? u32(m.parts.count) : 1) / u32(m.key_blocks);
      u32 before = head_of_batch / u32(m.heads_in_turn) * u32(m.heads_in_turn);
      u32 heads = min(u32(m.heads_in_turn), all_heads - before);
      if (head_of_batch >= u32(m.last_turn)) {
        before = u32(m.last_turn);
        heads = all_heads - before;
      }
      const u32 number = index - before * u32(m.key_blocks);
      own = number / heads;
      head_of_batch = before + number - own * heads;
    }
    if constexpr (kFromTheEnd) {
      own = u32(m.key_blocks) - 1 - own;
    }
    key0 = int(own) * keys;
    const u32 entry = head_of_batch / u32(m.heads_k);
    // Not uniform(cluster_rank()): of single threads that come here the other lanes of the warp may wait.
    const u32 own_entry = S.summed > 1 ? entry * S.summed + cluster_rank() : entry;
    const u32 b = S.longest_first ? BehindTurns(a).order[entry] : own_entry;
    head_k = int(head_of_batch - entry * u32(m.heads_k));
    group = m.group;
    head0 = head_k * group;
    const u32 b1 = b / u32(m.batch2);
    place = Place::make<S>(a, b1, b - b1 * u32(m.batch2));
    row0 = int(padded_row(a.rows, b, {place.q_begin, place.q_len, 0, 0}));
    band = band_of(a, m, place);
    math::Interval<int> queries{0, place.q_len};
    if constexpr (S.banded) {
      if (!outside() && !S.direct) {
        queries = band.queries_of_keys(key0, min(key0 + keys, place.k_len));
      }
    }
    first = queries.first_step(S.step);
    count = queries.steps_from(first, S.step);
    steps = count * group;
    begin = first;
    may_be_dead = inputs_may_hide(S);
    if constexpr (S.banded && !inputs_may_hide(S)) {
      const int last = min(first + count * S.step, place.q_len) - 1;
      may_be_dead = count > 0 && (band.keys_of(first).empty() || band.keys_of(last).empty());
    }
    if constexpr (kRotates) {
      begin += int(own * u32(count) / u32(m.key_blocks)) * S.step;
    }
    if constexpr (S.key_parts) {
      if constexpr (kSkips) {
        take_part(int(mine.part), mine.parts);
      } else {
        take_last_part(int(mine.part), mine.parts);
      }
      sums_row = i64(mine.part) * m.parts.rows +
                 (S.last_parts ? rows_of_last(m, mine) : i64(head_of_batch) * m.parts.head_rows + key0);
    }
  }

  // Of the steps of all heads, one head's after the other's: as many as the other parts have, or one more.
  __device__ __forceinline__ void take_part(int part, int parts) {
    const int least = steps / parts;
    const int more = steps - least * parts;  // parts that have one more
    const int from = part * least + min(part, more);
    const int heads_before = from / max(count, 1);
    steps = least + int(part < more);
    head0 += heads_before;
    skipped = from - heads_before * count;
    group = steps > 0 ? (skipped + steps + count - 1) / count : 0;
  }

  // Of the heads of a group, or of the steps of a single head, counted from where the block begins.
  __device__ __forceinline__ void take_last_part(int part, int parts) {
    const int all = group > 1 ? group : steps;
    const int least = all / parts;
    const int more = all - least * parts;  // parts that have one more
    const int from = part * least + min(part, more);
    const int own = least + int(part < more);
    if (group > 1) {
      head0 += from;
      group = own;
      steps = own * count;
    } else {
      begin = within(begin + from * S.step, count);
      steps = own;
    }
  }

  // Where the sums of its keys lie among those of a part, counted from the first block of keys that has parts on.
  static __device__ __forceinline__ i64 rows_of_last(const Sm90BackwardArgs& m, const PartOfKeys& mine) {
    const i64 block = i64(mine.block) - m.parts.whole;
    return (S.summed > 1 ? block * S.summed + cluster_rank() : block) * sm90_backward_sizes(S).keys;
  }

  // Where the steps of its head number i begin, and how many there are.
  struct Steps {
    int query, count;
  };
  static __device__ __forceinline__ Steps steps_of_head(int i, int begin, int count, int skipped, int steps) {
    if constexpr (kSkips) {
      const int from = i == 0 ? skipped : 0;
      return {begin + from * S.step, min(count, skipped + steps - i * count) - from};
    } else {
      return {begin, S.last_parts ? min(count, steps) : count};
    }
  }
  __device__ __forceinline__ Steps steps_of_head(int i) const { return steps_of_head(i, begin, count, skipped, steps); }

  // Of a head with `count` steps: the queries after these, `rows` a time.
  static __device__ __forceinline__ int after(int query, int rows, int count) {
    query += rows;
    return kRotates && query == count * S.step ? 0 : query;
  }
  // The same of a query that may lie one round behind the end.
  static __device__ __forceinline__ int within(int query, int count) {
    return kRotates && query >= count * S.step ? query - count * S.step : query;
  }

  // The steps of all heads, one head's after the other's, as all warps walk over them:
  //   for (Walk at = walk(); n < steps; ++n, next(at)) { if (begins_head(at)) { begin_head(at); } ... }
  // left: this step and those after it of this head.
  struct Walk {
    int head, query, left;
  };
  __device__ __forceinline__ Walk walk() const { return {head0 - 1, 0, kSkips ? -skipped : 0}; }
  static __device__ __forceinline__ bool begins_head(const Walk& at) { return kSkips ? at.left <= 0 : at.left == 0; }
  static __device__ __forceinline__ void begin_head(Walk& at, int begin, int count) {
    ++at.head;
    if constexpr (kSkips) {
      at.left += count;
      at.query = begin + (count - at.left) * S.step;
    } else {
      at.query = begin;
      at.left = count;
    }
  }
  static __device__ __forceinline__ void next(Walk& at, int count) {
    at.query = after(at.query, S.step, count);
    --at.left;
  }
  __device__ __forceinline__ void begin_head(Walk& at) const { begin_head(at, begin, count); }
  __device__ __forceinline__ void next(Walk& at) const { next(at, count); }

  __device__ __forceinline__ bool outside() const { return key0 >= place.k_len; }

  // Of ragged sequences: the number after this one, whose block is outside. So are the others up to the head's end
  // (from the end: its last keys), each part of them. But in the last turn the next numbers are those of other heads.
  __device__ __forceinline__ u32 number_after(const Sm90BackwardArgs& m, u32 number) const {
    const u32 parts = S.key_parts ? u32(m.parts.count) : 1;
    const u32 whole = number / parts;
    if (kByTurns && whole >= u32(m.last_turn) * u32(m.key_blocks)) {
      return number + 1;
    }
    constexpr u32 kKeys = sm90_backward_sizes(S).keys;
    const u32 live = kFromTheEnd ? (u32(place.k_len) + kKeys - 1) / kKeys : 0;
    return (whole - whole % u32(m.key_blocks) + u32(m.key_blocks) - live) * parts;
  }

  static __device__ __forceinline__ math::Band<int> band_of(const Args& a, const Sm90BackwardArgs& m,
                                                            const Place& place) {
    if constexpr (S.banded && S.shifted) {
      return shifted_band<S>(a, place.b, place.q_len, place.k_len);
    }
    const int shift = S.banded ? place.template shift<S>(a) : 0;
    return {place.q_len, place.k_len, shift + m.low, shift + m.high};
  }

  // How many blocks add to the dQ of this query's step.
  static __device__ __forceinline__ u32 adders(const Place& place, const math::Band<int>& band, int query) {
    constexpr int keys = sm90_backward_sizes(S).keys;
    math::Interval<int> met{0, place.k_len};
    if constexpr (S.banded) {
      const int begin = query / S.step * S.step;
      met = band.keys_of_rows(begin, min(begin + S.step, place.q_len));
    }
    return met.empty() ? 0 : u32((met.end - 1) / keys - met.begin / keys + 1);
  }

  // In order: how many blocks add to the dQ of a step's queries before this one.
  __device__ __forceinline__ u32 blocks_before(int query) const {
    constexpr int keys = sm90_backward_sizes(S).keys;
    if constexpr (kFromTheEnd) {
      const int last = min(query / S.step * S.step + S.step, place.q_len) - 1 + band.high;
      return u32(min(last, place.k_len - 1)) / keys - u32(key0) / keys;
    } else {
      return u32(key0) / keys;
    }
  }
};

// Named barriers of the threads that compute, in sm90_backward and sm90_wide_backward.
inline constexpr NamedBarriers kCleared{4};     // rows that must be 0 in a tile are
inline constexpr NamedBarriers kGradsThere{5};  // dS of a step is in shared memory
inline constexpr NamedBarriers kStepsDone{6};   // products no longer read K
inline constexpr NamedBarriers kOwnDone{7, 3};  // of each warpgroup: nor V
static_assert(are_apart({kCleared, kGradsThere, kStepsDone, kOwnDone}));

// Rows from `live` on of a tile of kRows, in panels of kRowBytes a row. Chunks are exchanged within rows alone.
template <int kRows, int kRowBytes, int kPanels, int kThreads>
__device__ __forceinline__ void zero_rows(u32 tile, int live, int thread) {
  constexpr int kChunks = kRowBytes / 16;
  const int dead = (kRows - max(live, 0)) * kChunks;
  for (int i = thread; i < dead * kPanels; i += kThreads) {
    const int panel = i / dead;
    store_shared(tile + panel * kRows * kRowBytes + max(live, 0) * kRowBytes + (i - panel * dead) * 16,
                 uint4{0, 0, 0, 0});
  }
}

// Of two tiles, by all threads that compute: K with V, or Q with dO.
template <int kRows, int kRowD, int kPanelsD, int kRowV, int kPanelsV, int kThreads>
__device__ __forceinline__ void zero_rows_behind(u32 tile_d, u32 tile_v, int live) {
  if (live < kRows) {
    const int consumer = threadIdx.x - 128;
    zero_rows<kRows, kRowD, kPanelsD, kThreads>(tile_d, live, consumer);
    zero_rows<kRows, kRowV, kPanelsV, kThreads>(tile_v, live, consumer);
    fence_async();
    sync(kCleared, kThreads);
  }
}

// Such rows of dO, whose logsumexp in `lse` is infinite, become 0: P is 0 there, but 0 * inf is NaN. By all threads
// that compute; all read the same `lse`.
template <auto S, int kRowBytes, int kPanels, int kThreads>
__device__ __forceinline__ void zero_dead_rows(u32 tile, u32 lse) {
  if constexpr (may_hide(S) && S.dkv) {
    constexpr int kRows = S.step;
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    bool dead = false;
#pragma unroll
    for (int i = 0; i < kRows / 64; ++i) {
      const float2 pair = load_shared2(lse + (i * 32 + thread % 32) * 8);
      dead = dead || pair.x == kInfinity || pair.y == kInfinity;
    }
    if (__any_sync(~0u, dead)) {
      constexpr int kChunks = kRowBytes / 16;
#pragma unroll 1
      for (int i = int(thread) - 128; i < kRows * kChunks * kPanels; i += kThreads) {
        if (load_shared(lse + i / kChunks % kRows * 4) == kInfinity) {
          store_shared(tile + i * 16, uint4{0, 0, 0, 0});
        }
      }
      fence_async();
      sync(kCleared, kThreads);
    }
  }
}

}  // namespace fovea::cuda
