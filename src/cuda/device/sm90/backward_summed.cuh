// SPDX-License-Identifier: Apache-2.0
//
// The gradient of a bias that batch entries share, within sm90_summed_backward: the blocks of a cluster have the same
// keys of one entry each, walk over the same queries, and sum their dS in shared memory, so that no S and no dP is
// formed again and nothing is added in memory.
//
//     dS of a step, 64 queries by 128 keys in fp32 | each block sends every other one its share of the queries
//     (st.async) | and sums its own share of all blocks, in their order, a step later
//
// A thread sends what it has of a fragment to the same thread of the other blocks, and that is what it reads: no lane
// waits for another. There are two buffers. Sums of a step go where those of two steps before were: each block has read
// them before it sent those of the step between, which all blocks await first.
//
// More entries than blocks of a cluster: a cluster has some after one another, `rounds` times, and keeps the sums so
// far in an fp32 plane, each number by one thread. The last round stores the gradient. Where that leaves too few
// clusters, each chunk of the entries has a cluster and a plane of its own, and bias_gradient_sum adds the planes.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_barriers.cuh"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/tile/tile.cuh"
#include "cuda/device/work/sm90_key_block.cuh"

namespace fovea::cuda {

// Of a thread that computes. Its fragment of dS^T: keys g and g + 8 of its warp's 16, queries 8 j + 2 t + e.
template <Sm90BackwardSpec S>
struct Sm90SummedBias {
  static constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  static constexpr int kBlocks = S.step / 8;               // of 8 queries
  static constexpr int kOwn = kBlocks / S.summed;          // that a block of the cluster sums
  static constexpr int kBytes = 128 * kSizes.groups * 16;  // of a block of queries
  static constexpr int kShare = kOwn * kBytes;             // that a block sends another

  const Sm90BackwardBarriers& barriers;
  u32 mine;       // where this thread's part of the first share lies
  int key, g, t;  // key: this thread's first, in the block of keys
  u32 rank;
  bool announces;           // this thread says how many bytes will come
  u32 steps = 0;            // that were sent
  int head = 0, query = 0;  // of the last one
  bool waiting = false;     // the last one is not taken yet
  // Of a block of keys: the plane of head 0, whether there are sums of rounds before, and whether this is the last.
  int plane = 0;
  bool adds = false;
  bool ends = false;

  __device__ __forceinline__ Sm90SummedBias(u32 base, const Sm90BackwardBarriers& all, int c, int warp, int lane)
      : barriers(all),
        mine(base + kSizes.sums_at + u32(c * 128 + warp * 32 + lane) * 16),
        key(c * 64 + warp * 16 + lane / 4),
        g(lane / 4),
        t(lane % 4),
        rank(S.summed > 1 ? uniform(cluster_rank()) : 0),
        announces(c == 0 && warp == 0 && lane == 0) {}

  __device__ __forceinline__ void begin_block(const Args& a, const SummedBias& bias, u32 number) {
    const u32 unit = number / u32(bias.stride);
    const u32 group = unit / u32(bias.rounds);
    const int round = int(unit - group * u32(bias.rounds));
    const u32 batch = group / u32(a.bias_chunks);
    plane = int(group - batch * u32(a.bias_chunks)) * bias.planes + int(batch) * bias.heads;
    adds = round > 0;
    ends = round == bias.rounds - 1 && a.bias_chunks == 1;
  }

  // dS of a step of this block: to all blocks, this one among them.
  __device__ __forceinline__ void put(const float (&ds)[S.step / 2], int of_head, int first_query) {
    const u32 buffer = steps % 2;
    const u32 place = mine + buffer * kSizes.sums + rank * kShare;
    if (announces) {
      barrier_expect(barriers.sums_full(buffer), (S.summed - 1) * kShare);
    }
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float four[4] = {ds[4 * j], ds[4 * j + 1], ds[4 * j + 2], ds[4 * j + 3]};
      const u32 to = u32(j / kOwn);
      const u32 at = place + j % kOwn * kBytes;
      if (to == rank) {
        store_shared(at, uint4{__float_as_uint(four[0]), __float_as_uint(four[1]), __float_as_uint(four[2]),
                               __float_as_uint(four[3])});
      } else {
        store_there_counted(address_of(at, to), four, address_of(barriers.sums_full(buffer), to));
      }
    }
    ++steps;
    head = of_head;
    query = first_query + int(rank) * kOwn * 8;
    waiting = true;
  }

  // The sums of this block's share of the queries of the last step that was sent, if they are not taken yet.
  __device__ __forceinline__ void take(const Args& a, const SummedBias& m, const Sm90KeyBlock<S>& block) {
    if (!waiting) {
      return;
    }
    waiting = false;
    const u32 last = steps - 1;
    const u32 place = mine + last % 2 * kSizes.sums;
    float sums[kOwn][4] = {};
    if (adds) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        each(a, m, block, query + 8 * j + 2 * t, [&](const float* at, int i) { sums[j][i] = *at; });
      }
    }
    barrier_wait(barriers.sums_full(last % 2), last / 2 % 2);
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
#pragma unroll
      for (int from = 0; from < S.summed; ++from) {
        const uint4 x = load_shared4(place + from * kShare + j * kBytes);
        sums[j][0] += __uint_as_float(x.x);
        sums[j][1] += __uint_as_float(x.y);
        sums[j][2] += __uint_as_float(x.z);
        sums[j][3] += __uint_as_float(x.w);
      }
      store(a, m, block, query + 8 * j + 2 * t, sums[j]);
    }
  }

  // Under a band: this block's share of the queries that meet no key of the cluster.
  __device__ __forceinline__ void clear_unmet(const Args& a, const SummedBias& m, const Sm90KeyBlock<S>& block) {
    if constexpr (S.banded) {
      if (!ends && (adds || a.bias_chunks == 1)) {  // another round does
        return;
      }
      constexpr float kZeros[4] = {};
      const int end = block.first + block.count * S.step;
#pragma unroll 1
      for (int i = 0; i < block.group; ++i) {
        head = block.head0 + i;
#pragma unroll 1
        for (int row = int(rank) * 8; row < a.bias_rows; row += S.summed * 8) {
          if (row < block.first || row >= end) {
            store(a, m, block, row + 2 * t, kZeros);
          }
        }
      }
    }
  }

 private:
  // Where two queries of two keys lie in the plane, number i as in a fragment.
  template <class Use>
  __device__ __forceinline__ void each(const Args& a, const SummedBias& m, const Sm90KeyBlock<S>& block, int row,
                                       const Use& use) const {
    const int first = block.key0 + key;
    float* const at = a.bias_sum + (i64(plane + (m.heads > 1 ? head : 0)) * a.bias_rows + row) * a.bias_keys + first;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + i % 2 < a.bias_rows && first + i / 2 * 8 < a.bias_keys) {
        use(at + i64(i % 2) * a.bias_keys + i / 2 * 8, i);
      }
    }
  }

  // Two queries of two keys: to the plane or, in the end, to the gradient.
  __device__ __forceinline__ void store(const Args& a, const SummedBias& m, const Sm90KeyBlock<S>& block, int row,
                                        const float (&x)[4]) const {
    if (!ends) {
      return each(a, m, block, row, [&](float* at, int i) { *at = x[i]; });
    }
    const int first = block.key0 + key;
    // Lanes of neighbouring keys exchange a number: the one with the even key has the even query of both.
    const bool odd = g & 1;
    const int pair = first - int(odd);
    u16* const to = static_cast<u16*>(a.grad_bias.data) + block.place.plane(a.grad_bias.strides, u32(head)) +
                    (row + int(odd)) * a.grad_bias.strides.row + pair;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float other = __shfl_xor_sync(~0u, odd ? x[2 * r] : x[2 * r + 1], 4);
      const u32 word = odd ? pack<S.type>(other, x[2 * r + 1]) : pack<S.type>(x[2 * r], other);
      if (row + int(odd) < a.bias_rows && pair + 8 * r < a.bias_keys) {
        *reinterpret_cast<u32*>(to + 8 * r) = word;
      }
    }
  }
};

}  // namespace fovea::cuda
