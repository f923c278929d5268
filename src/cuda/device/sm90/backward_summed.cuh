// SPDX-License-Identifier: Apache-2.0
//
// The gradient of a bias that batch entries share, within sm90_summed_backward: the blocks of a cluster have the same
// keys of one entry each and walk over the same queries, so that dS of a step can be summed over them without forming
// S and dP again:
//
//     dS of a step, 64 queries by 128 keys of 16 bits, where dQ reads it | each block copies to every block that
//     block's share of the queries | which a step later sums what has come, in fp32 and in the order of the blocks
//
// A place for dS and the place of what comes belong together: once the sums are made a block tells all others, and
// only then the next bias and the next copy may come there.
//
// More entries than blocks of a cluster: a cluster has some after one another, `rounds` times, and its sums go to an
// fp32 plane: the first stores there, the others add, each number by one thread. Where that leaves too few clusters
// each chunk of the entries has a cluster and a plane of its own. bias_gradient_sum makes the gradient of planes.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_barriers.cuh"
#include "cuda/device/sm90/backward_blocks.cuh"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/tile/pipe.cuh"
#include "cuda/device/tile/tile.cuh"
#include "cuda/device/work/sm90_key_block.cuh"

namespace fovea::cuda {

template <Sm90BackwardSpec S>
struct Sm90Shares {
  static constexpr int kRows = S.step / S.summed;  // queries of a share
  static constexpr int kPanels = S.warps / 4;      // of 64 keys
  static constexpr int kBytes = kRows * 128;       // of a panel
  static constexpr int kBlock = kPanels * kBytes;  // from one block
  static_assert(S.summed == 1 || (S.summed * kPanels <= 32 && kRows % 8 == 0));
};

// The last warp of the copying warpgroup: dS on its way to the other blocks, and word to them that theirs is summed.
template <Sm90BackwardSpec S>
__device__ __forceinline__ void sm90_backward_send_shares(const Args& a, const Sm90BackwardArgs& m, u32 base,
                                                          const Sm90BackwardBarriers& barriers, int lane) {
  using Shares = Sm90Shares<S>;
  constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);
  const u32 rank = cluster_rank();
  Ring<S.planes> ring;
  Ring<S.planes> last;  // the step that was sent last
  u32 parity = 0;       // of sums_taken
  bool sent = false;
  const auto expect = [&](u32 buffer) {
    if (lane == 0) {
      barrier_expect(barriers.sums_full(buffer), kSizes.sums);
    }
  };
  for (int i = 0; i < S.planes; ++i) {
    expect(u32(i));
  }
  const auto release_last = [&] {
    if (!sent) {
      return;
    }
    barrier_wait(barriers.sums_taken(), parity);
    parity ^= 1;
    expect(last.buffer());
    __syncwarp();
    if (lane < S.summed) {
      barrier_arrive_there(address_of(barriers.grads_empty(last.buffer()), u32(lane)));
    }
    last.next();
  };
#pragma unroll 1
  for (u32 phase = 0;; phase ^= 1) {
    const u32 number = sm90_take_block<S>(base, barriers, phase, lane);
    if (number == kNoBlock) {
      break;
    }
    const int steps = Sm90KeyBlock<S>(a, m, number).steps;
#pragma unroll 1
    for (int n = 0; n < steps; ++n) {
      release_last();
      barrier_wait(barriers.grads_full(ring.buffer()), ring.parity());
      if (lane < S.summed * Shares::kPanels) {
        const u32 to = u32(lane) % S.summed;
        const u32 panel = u32(lane) / S.summed;
        const u32 here = base + kSizes.grads_at + ring.buffer() * kSizes.grads + panel * (S.step * 128);
        const u32 there = base + kSizes.sums_at + ring.buffer() * kSizes.sums + panel * Shares::kBytes;
        bulk_copy_there(address_of(there + rank * Shares::kBlock, to), here + to * Shares::kBytes, Shares::kBytes,
                        address_of(barriers.sums_full(ring.buffer()), to));
      }
      __syncwarp();
      sent = true;
      ring.next();
    }
  }
  release_last();
}

// Of a thread that computes: it sums four neighbouring keys of every eighth query of the share.
template <Sm90BackwardSpec S>
struct Sm90SummedBias {
  using Shares = Sm90Shares<S>;
  static constexpr Sm90BackwardSizes kSizes = sm90_backward_sizes(S);

  const Sm90BackwardBarriers& barriers;
  u32 sums;      // where its first numbers lie, of the first block
  int row, key;  // these: in the share, in the block of keys
  int rank;
  Ring<S.planes> ring;
  // Of the block of keys: the plane of head 0, and whether there are sums of rounds before, or none after.
  int plane = 0;
  bool adds = false;
  bool ends = false;
  // The step that is not summed yet.
  bool waits = false;
  bool adds_then = false;
  int head = 0;
  int query = 0;

  __device__ __forceinline__ Sm90SummedBias(u32 base, const Sm90BackwardBarriers& all, int thread)
      : barriers(all),
        row(thread / (kSizes.keys / 4)),
        key(thread % (kSizes.keys / 4) * 4),
        rank(S.summed > 1 ? int(uniform(cluster_rank())) : 0) {
    sums = base + kSizes.sums_at + u32(key / 64 * Shares::kBytes) + swizzled<128>(row, key % 64 / 8) + u32(key % 8 * 2);
  }

  __device__ __forceinline__ void begin_block(const Args& a, const SummedBias& bias, u32 number) {
    const u32 unit = number / u32(bias.stride);
    const u32 group = unit / u32(bias.rounds);
    const u32 round = unit - group * u32(bias.rounds);
    const u32 batch = group / u32(a.bias_chunks);
    plane = int(group - batch * u32(a.bias_chunks)) * bias.planes + int(batch) * bias.heads;
    adds = round > 0;
    ends = round + 1 == u32(bias.rounds);
  }

  __device__ __forceinline__ void sent(int of_head, int first_query) {
    waits = true;
    adds_then = adds;
    head = of_head;
    query = first_query + rank * Shares::kRows + row;
  }

  // The sums of the step that was sent last.
  __device__ __forceinline__ void take(const Args& a, const SummedBias& bias, const Sm90KeyBlock<S>& block) {
    if (!waits) {
      return;
    }
    waits = false;
    barrier_wait(barriers.sums_full(ring.buffer()), ring.parity());
#pragma unroll
    for (int i = 0; i < Shares::kRows; i += 8) {
      const u32 at = sums + ring.buffer() * kSizes.sums + i * 128;
      float x[4] = {};
#pragma unroll
      for (int from = 0; from < S.summed; ++from) {
        const float2 v = load_shared2(at + from * Shares::kBlock);
        const u32 words[2] = {__float_as_uint(v.x), __float_as_uint(v.y)};
        x[0] += low<S.type>(words[0]);
        x[1] += high<S.type>(words[0]);
        x[2] += low<S.type>(words[1]);
        x[3] += high<S.type>(words[1]);
      }
      store(a, bias, block, head, query + i, adds_then, x);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(barriers.sums_taken());
    }
    ring.next();
  }

  // Under a band: this block's share of the queries that meet no key of the cluster.
  __device__ __forceinline__ void clear_unmet(const Args& a, const SummedBias& bias,
                                              const Sm90KeyBlock<S>& block) const {
    if constexpr (S.banded) {
      if (adds) {  // the first round did
        return;
      }
      constexpr float kZeros[4] = {};
      const int end = block.first + block.count * S.step;
#pragma unroll 1
      for (int i = 0; i < block.group; ++i) {
#pragma unroll 1
        for (int at = rank * 8 + row; at < a.bias_rows; at += S.summed * 8) {
          if (at < block.first || at >= end) {
            store(a, bias, block, block.head0 + i, at, false, kZeros);
          }
        }
      }
    }
  }

 private:
  // To a row that begins anywhere: what lies in aligned words at once.
  static __device__ __forceinline__ void store_odd(u16* to, int columns, const u32 (&words)[2]) {
    if (columns < 4) {
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        if (i < columns) {
          to[i] = u16(words[i / 2] >> i % 2 * 16);
        }
      }
    } else if ((u64(to) & 2) == 0) {
      reinterpret_cast<u32*>(to)[0] = words[0];
      reinterpret_cast<u32*>(to)[1] = words[1];
    } else {
      to[0] = u16(words[0]);
      *reinterpret_cast<u32*>(to + 1) = __funnelshift_r(words[0], words[1], 16);
      to[3] = u16(words[1] >> 16);
    }
  }

  // This lane's four keys of a query: to the gradient, or to a plane where there is more to be added.
  __device__ __forceinline__ void store(const Args& a, const SummedBias& bias, const Sm90KeyBlock<S>& block,
                                        int of_head, int at_row, bool adding, const float (&x)[4]) const {
    const int at_key = block.key0 + key;
    if (at_row >= a.bias_rows || at_key >= a.bias_keys) {
      return;
    }
    if (bias.rounds == 1 && a.bias_chunks == 1) {
      const math::Strides& s = a.grad_bias.strides;
      u16* const to =
          static_cast<u16*>(a.grad_bias.data) + block.place.plane(s, u32(of_head)) + at_row * s.row + at_key;
      const u32 words[2] = {pack<S.type>(x[0], x[1]), pack<S.type>(x[2], x[3])};
      if constexpr (S.odd_sums) {
        store_odd(to, a.bias_keys - at_key, words);
      } else {
        *reinterpret_cast<uint2*>(to) = uint2{words[0], words[1]};
      }
      return;
    }
    const i64 place = i64(plane + (bias.heads > 1 ? of_head : 0)) * a.bias_rows + at_row;
    float* const to = a.bias_sum + place * a.bias_keys + at_key;
    if (adding) {
      reduce4<S.arch>(to, x);
    } else {
      store_global(to,
                   uint4{__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])});
    }
  }
};

}  // namespace fovea::cuda
