// SPDX-License-Identifier: Apache-2.0
//
// What a block of sm90_backward is about, and the warpgroup that copies for it.
//
//   Sm90KeyBlock   its keys, and the queries that meet any of them
//   copies         one thread for K, V, Q, dO and row vectors, one for the bias, by TMA into rings of buffers; one
//                  for dQ on its way out
//   zero_rows      0 * NaN is NaN: what lies behind a sequence's end must not be in a tile
#ifndef FOVEA_CUDA_DEVICE_SM90_BACKWARD_COPY_CUH
#define FOVEA_CUDA_DEVICE_SM90_BACKWARD_COPY_CUH

#include "math/band.h"
#include "math/rows.h"
#include "sm90_backward_args.h"
#include "sm90_backward_sizes.h"
#include "sm90_copy.cuh"
#include "sm90_ptx.cuh"
#include "sm90_sizes.h"
#include "tile.cuh"
#include "wgmma.cuh"

namespace fovea::cuda {

template <Spec S>
struct Sm90KeyBlock {
  Place place;
  int key0;           // the first key
  int head_k, head0;  // the key head, its first query head
  int group;          // query heads that share it
  int row0;           // where query 0 of head 0 lies in row vectors
  math::Band<int> band;
  int first, count;  // the first query, and steps of each head
  int steps;

  // In order the blocks of a band begin at the last keys: the queries of a block begin where it stands, so that those
  // before it are always ahead.
  static constexpr bool kFromTheEnd = S.ordered && S.banded;
  // Under a causal mask the first keys have the most queries. A few heads at a time begin with these and leave the
  // short blocks for the end, where they fill the chip evenly; all heads at once would not stay in L2.
  static constexpr bool kByTurns = S.banded && !S.ordered && !S.ragged;

  __device__ __forceinline__ Sm90KeyBlock(const Args& a, const Sm90BackwardArgs& m, u32 index) {
    constexpr int keys = sm90_backward_sizes(S).keys;
    u32 head_of_batch = index / u32(m.key_blocks);
    u32 own = index - head_of_batch * u32(m.key_blocks);
    if constexpr (kFromTheEnd) {
      own = u32(m.key_blocks) - 1 - own;
    }
    if constexpr (kByTurns) {
      const u32 before = head_of_batch / u32(m.heads_in_turn) * u32(m.heads_in_turn);
      const u32 heads = min(u32(m.heads_in_turn), u32(m.blocks) / u32(m.key_blocks) - before);
      const u32 number = index - before * u32(m.key_blocks);
      own = number / heads;
      head_of_batch = before + number - own * heads;
    }
    key0 = int(own) * keys;
    const u32 b = head_of_batch / u32(m.heads_k);
    head_k = int(head_of_batch - b * u32(m.heads_k));
    group = m.group;
    head0 = head_k * group;
    const u32 b1 = b / u32(m.batch2);
    place = Place::make<S>(a, b1, b - b1 * u32(m.batch2));
    row0 = int(padded_row(a.rows, b, {place.q_begin, place.q_len, 0, 0}));
    const int shift = S.banded ? place.shift(a) : 0;
    band = {place.q_len, place.k_len, shift + m.low, shift + m.high};
    math::Interval<int> queries{0, place.q_len};
    if constexpr (S.banded) {
      if (!outside() && !S.direct) {
        queries = band.queries_of_keys(key0, min(key0 + keys, place.k_len));
      }
    }
    first = queries.begin / S.step * S.step;
    count = queries.empty() ? 0 : (queries.end - first + S.step - 1) / S.step;
    steps = count * group;
  }

  __device__ __forceinline__ bool outside() const { return key0 >= place.k_len; }

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

struct Sm90BackwardBarriers {
  u32 at;
  __device__ __forceinline__ u32 kv_full() const { return at; }
  __device__ __forceinline__ u32 q_full(int i) const { return at + 8 + 8 * i; }
  __device__ __forceinline__ u32 q_empty(int i) const { return at + 40 + 8 * i; }
  __device__ __forceinline__ u32 bias_full(int i) const { return at + 72 + 8 * i; }
  __device__ __forceinline__ u32 grads_full(int i) const { return at + 104 + 8 * i; }
  __device__ __forceinline__ u32 grads_empty(int i) const { return at + 136 + 8 * i; }
  __device__ __forceinline__ u32 leaving_full(int i) const { return at + 168 + 8 * i; }
  __device__ __forceinline__ u32 leaving_empty(int i) const { return at + 192 + 8 * i; }
  __device__ __forceinline__ u32 kv_empty() const { return at + 216; }
  __device__ __forceinline__ u32 outer_full(int i) const { return at + 232 + 8 * i; }  // biases outside of dS
  __device__ __forceinline__ u32 outer_empty(int i) const { return at + 248 + 8 * i; }
};

// Whoever is not the thread that copies K and V learns from it which keys are next; `phase` changes each time.
constexpr u32 kNoBlock = ~u32(0);
template <Spec S>
__device__ __forceinline__ u32 sm90_await_block(u32 base, const Sm90BackwardBarriers& barriers, u32 phase) {
  barrier_wait(barriers.kv_full(), phase);
  u32 number = 0;
  if (threadIdx.x % 32 == 0) {  // who says, too, that this warp needs it no more
    number = load_shared_word(base + sm90_backward_sizes(S).number_at);
  }
  return uniform(number);
}
// The same for a single thread, which then need not be waited for.
template <Spec S>
__device__ __forceinline__ u32 sm90_take_block(u32 base, const Sm90BackwardBarriers& barriers, u32& phase) {
  barrier_wait(barriers.kv_full(), phase);
  const u32 number = load_shared_word(base + sm90_backward_sizes(S).number_at);
  phase ^= 1;
  barrier_arrive(barriers.kv_empty());
  return number;
}

// What the thread that copies keeps of a block of keys.
struct Sm90Loads {
  u32 number;
  int b1, b2, q_begin, k_row, head_k, row0, first, count;
};

template <Spec S>
__device__ __forceinline__ void sm90_backward_copy(const Args& a, const Sm90BackwardArgs& m, u32 base,
                                                   volatile Sm90Loads* loads, const Sm90BackwardBarriers& barriers) {
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  constexpr int kPanelD = sm90_backward_panel_d(S);
  constexpr int kPanelV = sm90_backward_panel_v(S);
  constexpr int kPanelsD = sm90_panels(S.d, kPanelD);
  constexpr int kPanelsV = sm90_panels(S.dv, kPanelV);
  constexpr int kRowBytes = (kPanelsD * kPanelD + kPanelsV * kPanelV) * 2;
  constexpr int kGroupKeys = S.tiles * 64;
  const u32 blocks = u32(m.blocks);
  // Who waits for another must have begun later: in order every number is a ticket.
  const auto take = [&] {
    if constexpr (S.ordered) {
      return atomicAdd(a.turns, 1u);
    } else {
      return gridDim.x < blocks ? gridDim.x + atomicAdd(a.turns, 1u) : kNoBlock;
    }
  };
  Ring<S.stages> ring;
  u32 number = S.ordered ? take() : blockIdx.x;
  u32 phase = 1;
#pragma unroll 1
  while (number < blocks) {
    const Sm90KeyBlock<S> block(a, m, number);
    if (block.outside()) {
      // So are the other numbers up to the head's end (from the end: up to its last keys), which nobody need take.
      constexpr bool kFromTheEnd = Sm90KeyBlock<S>::kFromTheEnd;
      const u32 own = number % u32(m.key_blocks);
      const u32 live = u32(block.place.k_len + kSizes.keys - 1) / kSizes.keys;
      const u32 next = number - own + u32(m.key_blocks) - (kFromTheEnd ? live : 0);
      const u32 begun = S.ordered ? 0 : gridDim.x;
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
    here.first = block.first;
    here.count = block.count;
    const int steps = block.steps;
    const int group = block.group;
    int head = block.head0;
    const auto at = [&](const Has& has, int column, int row, int head) {
      return Coordinates{column, row, head * has.head, here.b2 * has.batch2, here.b1 * has.batch1};
    };
    const auto load_keys = [&] {
      barrier_wait(barriers.kv_empty(), phase);
      store_shared(base + kSizes.number_at, u32(here.number));
      if (steps == 0) {
        barrier_arrive(barriers.kv_full());
        return;
      }
      barrier_expect(barriers.kv_full(), kSizes.keys * kRowBytes);
#pragma unroll 1
      for (int c = 0; c < kSizes.groups; ++c) {
        const int row = here.k_row + c * kGroupKeys;
#pragma unroll 1
        for (int p = 0; p < kPanelsD; ++p) {
          tensor_load(base + kSizes.k_at + (p * kSizes.keys + c * kGroupKeys) * kPanelD * 2, m.k, barriers.kv_full(),
                      at(m.has_k, p * kPanelD, row, here.head_k));
        }
#pragma unroll 1
        for (int p = 0; p < kPanelsV; ++p) {
          tensor_load(base + kSizes.v_at + (p * kSizes.keys + c * kGroupKeys) * kPanelV * 2, m.v, barriers.kv_full(),
                      at(m.has_v, p * kPanelV, row, here.head_k));
        }
      }
    };
    if (steps == 0) {
      load_keys();
    }
    int until_keys = min(S.stages, steps);  // buffers of Q that are free sooner than those of K and V
#pragma unroll 1
    for (int i = 0; steps > 0 && i < group; ++i, ++head) {
      int query = here.first;
#pragma unroll 1
      for (int n = here.count; n > 0; --n, query += S.step) {
        const u32 full = barriers.q_full(ring.buffer());
        barrier_wait(barriers.q_empty(ring.buffer()), ring.parity() ^ 1);
        barrier_expect(full, S.step * kRowBytes + (S.query_term ? 3 : 2) * kSizes.rows);
#pragma unroll 1
        for (int p = 0; p < kPanelsD; ++p) {
          tensor_load(base + kSizes.q_at + ring.buffer() * kSizes.q + p * S.step * kPanelD * 2, m.q, full,
                      at(m.has_q, p * kPanelD, here.q_begin + query, head));
        }
#pragma unroll 1
        for (int p = 0; p < kPanelsV; ++p) {
          tensor_load(base + kSizes.grad_out_at + ring.buffer() * kSizes.grad_out + p * S.step * kPanelV * 2,
                      m.grad_out, full, at(m.has_grad_out, p * kPanelV, here.q_begin + query, head));
        }
        const int row = here.row0 + head * int(a.padded_rows) + query;
        bulk_load(base + kSizes.lse_at + ring.buffer() * kSizes.rows, a.row_lse + row, kSizes.rows, full);
        bulk_load(base + kSizes.delta_at + ring.buffer() * kSizes.rows, a.row_delta + row, kSizes.rows, full);
        if constexpr (S.query_term) {
          bulk_load(base + kSizes.terms_at + ring.buffer() * kSizes.rows, a.row_term + row, kSizes.rows, full);
        }
        ring.next();
        if (--until_keys == 0) {
          load_keys();
        }
      }
    }
    phase ^= 1;
    number = take();  // not sooner: whoever is free first shall have it
  }
  barrier_wait(barriers.kv_empty(), phase);
  store_shared(base + kSizes.number_at, kNoBlock);
  barrier_arrive(barriers.kv_full());
}

template <Spec S>
__device__ __forceinline__ void sm90_backward_copy_bias(const Args& a, const Sm90BackwardArgs& m, u32 base,
                                                        const Sm90BackwardBarriers& barriers) {
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  constexpr int kOuter = kSizes.outer + kSizes.outer2;
  Ring<S.planes> ring;
  Ring<S.q_buffers> ring_outer;
  u32 phase = 0;
#pragma unroll 1
  for (u32 number = sm90_take_block<S>(base, barriers, phase); number != kNoBlock;
       number = sm90_take_block<S>(base, barriers, phase)) {
    const Sm90KeyBlock<S> block(a, m, number);
#pragma unroll 1
    for (int i = 0; i < block.group; ++i) {
      int query = block.first;
#pragma unroll 1
      for (int n = 0; n < block.count; ++n, query += S.step) {
        const auto load = [&](const TensorMap& map, const Has& has, u32 to, int columns, u32 full) {
#pragma unroll 1
          for (int p = 0; p < kSizes.keys / columns; ++p) {
            tensor_load(to + p * S.step * 128, map, full,
                        {block.key0 + p * columns, query, (block.head0 + i) * has.head,
                         int(block.place.b2) * has.batch2, int(block.place.b1) * has.batch1});
          }
        };
        if constexpr (sm90_bias_in_place(S)) {
          const u32 full = barriers.bias_full(ring.buffer());
          barrier_wait(barriers.grads_empty(ring.buffer()), ring.parity() ^ 1);
          barrier_expect(full, kSizes.grads);
          load(m.bias, m.has_bias, base + kSizes.grads_at + ring.buffer() * kSizes.grads, 64, full);
          ring.next();
        }
        if constexpr (kOuter > 0) {
          const u32 full = barriers.outer_full(ring_outer.buffer());
          barrier_wait(barriers.outer_empty(ring_outer.buffer()), ring_outer.parity() ^ 1);
          barrier_expect(full, kOuter);
          if constexpr (kSizes.outer > 0) {
            load(m.bias, m.has_bias, base + kSizes.outer_at + ring_outer.buffer() * kSizes.outer,
                 bias_panel_columns(S.bias), full);
          }
          if constexpr (kSizes.outer2 > 0) {
            load(m.bias2, m.has_bias2, base + kSizes.outer2_at + ring_outer.buffer() * kSizes.outer2,
                 bias_panel_columns(S.bias2), full);
          }
          ring_outer.next();
        }
      }
    }
  }
}

// Tiles of dS leave as they are: the gradient of a bias that nothing shares.
template <Spec S>
__device__ __forceinline__ void sm90_backward_store_bias(const Args& a, const Sm90BackwardArgs& m, u32 base,
                                                         const Sm90BackwardBarriers& barriers) {
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  Ring<S.planes> ring;
  u32 phase = 0;
#pragma unroll 1
  for (u32 number = sm90_take_block<S>(base, barriers, phase); number != kNoBlock;
       number = sm90_take_block<S>(base, barriers, phase)) {
    const Sm90KeyBlock<S> block(a, m, number);
#pragma unroll 1
    for (int i = 0; i < block.group; ++i) {
      int query = block.first;
#pragma unroll 1
      for (int n = 0; n < block.count; ++n, query += S.step) {
        barrier_wait(barriers.grads_full(ring.buffer()), ring.parity());
#pragma unroll 1
        for (int p = 0; p < kSizes.keys / 64; ++p) {
          tensor_store(m.grad_bias, base + kSizes.grads_at + ring.buffer() * kSizes.grads + p * S.step * 128,
                       {block.key0 + p * 64, query, (block.head0 + i) * m.has_grad_bias.head,
                        int(block.place.b2) * m.has_grad_bias.batch2, int(block.place.b1) * m.has_grad_bias.batch1});
        }
        bulk_commit();
        bulk_wait_read();
        barrier_arrive(barriers.grads_empty(ring.buffer()));
        ring.next();
      }
    }
  }
}

// Adds dQ to dq_sum, 64 queries a time, as the warpgroups hand them over. In order: a block waits until all blocks that
// come before it and meet the queries have added theirs, and says so when its own sums have arrived. stores_first:
// nobody has cleared dq_sum; who comes first stores, and whoever comes meanwhile waits for it. Nobody waits for a block
// that waits itself: what it waits for it has not begun to store.
template <Spec S>
__device__ __forceinline__ void sm90_backward_add(const Args& a, const Sm90BackwardArgs& m, u32 base,
                                                  const Sm90BackwardBarriers& barriers) {
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  constexpr int kParts = S.step / 64;
  u32 parity = 0;  // a bit for each place that sums leave from
  u32 phase = 0;
#pragma unroll 1
  for (u32 number = sm90_take_block<S>(base, barriers, phase); number != kNoBlock;
       number = sm90_take_block<S>(base, barriers, phase)) {
    const Sm90KeyBlock<S> block(a, m, number);
    int place = 0;
    int place_before = -1;
#pragma unroll 1
    for (int i = 0; i < block.group; ++i) {
      int query = block.first;
#pragma unroll 1
      for (int n = 0; n < block.count * kParts; ++n, query += 64) {
        const int row = block.row0 + (block.head0 + i) * int(a.padded_rows) + query;
        u32* const turn = a.turns + 1 + row / 64;
        u32 before = 2;
        if constexpr (S.stores_first && !S.ordered) {
          before = load_acquire(turn);  // while sums are on their way
        }
        barrier_wait(barriers.leaving_full(place), parity >> place & 1);
        parity ^= 1u << place;
        if constexpr (S.stores_first && !S.ordered) {
          if (before != 2) {
            before = atomicCAS(turn, 0u, 1u);
            while (before != 0 && load_acquire(turn) != 2) {
            }
          }
          fence_async_all();
        }
        if constexpr (S.ordered) {
          before = block.blocks_before(query);
          while (load_acquire(turn) < before) {  // more only where sequences overlap by mistake
          }
          fence_async_all();
        }
        const u32 from = base + kSizes.leaving_at + place * kSizes.leaving;
        if (S.stores_first && before == 0) {
          bulk_store(a.dq_sum + i64(row) * S.d, from, kSizes.leaving);
        } else {
          bulk_add(a.dq_sum + i64(row) * S.d, from, kSizes.leaving);
        }
        bulk_commit();
        if constexpr (S.ordered) {
          bulk_wait();
          barrier_arrive(barriers.leaving_empty(place));
          add_release(turn, 1);
        } else {
          if (S.stores_first && before == 0) {
            bulk_wait();
            add_release(turn, 1);
          }
          bulk_wait_read<1>();
          if (place_before >= 0) {
            barrier_arrive(barriers.leaving_empty(place_before));
          }
          place_before = place;
        }
        place = place + 1 == kSizes.groups ? 0 : place + 1;
      }
    }
    bulk_wait_read();
    if (place_before >= 0) {
      barrier_arrive(barriers.leaving_empty(place_before));
    }
  }
  bulk_wait();
}

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

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_SM90_BACKWARD_COPY_CUH
