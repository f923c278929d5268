// SPDX-License-Identifier: Apache-2.0
//
// Dropout's decisions by the rule of PyTorch's memory-efficient kernels.
//
//   TorchKeep          the generic kernels and sm90_bias_gradient, as FoveaKeep (score/dropout.cuh)
//   Sm90TorchDropout   sm90_forward, as Sm90Dropout
#pragma once

#include "cuda/device/tile/tile.cuh"
#include "math/dropout.h"

namespace fovea::cuda {

// Decisions for a fragment of kTiles row tiles and kColumns tiles of 8 columns.
template <auto S, bool kTransposed, int kTiles, int kColumns>
struct TorchKeep {
  static_assert(kColumns <= 8);  // a thread's decisions of a row tile are a word

  u64 seed = 0, base = 0, row_stride = 0;
  float p = 0;
  u32 bits[kTiles];

  // Wherever the head changes.
  __device__ __forceinline__ void start(const Args& a, const Place& place, u32 query_head) {
    const u64 n = dropout_stream<S>(a, place.b, query_head);
    const u64 offset = a.offset.now();
    seed = a.seed.now();
    const math::Dropout dropout{math::Rng::kTorchMemEfficient, 0, a.drop_p, seed, offset};
    const u64 stride = a.rows.packed() ? place.k_len : a.rows.rows_k;
    base = math::DropoutOfHead{dropout, {}, offset + n * u64(a.dropout_plane), stride}.base;
    row_stride = stride;
    p = a.drop_p;
  }
  __device__ __forceinline__ void start_rows(int, int) {}

  // Once for the fragment that begins at (row0, column0).
  __device__ __forceinline__ void prepare(const Thread& thread, int row0, int column0) {
    const bool shares = ((base | row_stride) & 3) == 0;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      bits[i] = torch_bits(thread, row0 + i * 16, column0, shares);
    }
  }

  // The order of `keep` is that of FoveaKeep::decide().
  __device__ __forceinline__ void decide(bool (&keep)[2][4], const Thread&, int i, int jj, int, int) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      keep[n >> 2][n & 3] = (bits[i] >> bit_of(jj * 8 + n) & 1) != 0;
    }
  }

 private:
  // The decision of element [n >> 2][n & 3] of a row tile has this bit, in the order in which they are shared.
  static constexpr int bit_of(int n) {
    return kTransposed ? (n & 3) * 8 + (n >> 2) : (n >> 1 & 1) * 16 + (n >> 2) * 2 + (n & 1);
  }

  // Where four keys that begin at a multiple of four are one call's numbers (`shares`), they belong to kSharers
  // neighbours along the keys: each makes its share of the calls, packs the decisions by the lane that needs them, and
  // all exchange them. Elsewhere each makes a call for every element of its own.
  __device__ __forceinline__ u32 torch_bits(const Thread& thread, int row0, int column0, bool shares) const {
    constexpr int kSharers = kTransposed ? 4 : 2;
    constexpr int kStride = kTransposed ? 4 : 1;  // of lanes
    constexpr int kEach = 4 / kSharers;           // numbers of a call for each
    constexpr int kBits = 32 / kSharers;
    const int rank = (kTransposed ? thread.g : thread.t) % kSharers;
    u32 made = 0;
#pragma unroll 1
    for (int n = 0; n < (shares ? kColumns : kColumns * 4); ++n) {
      // Element [j][x] of the accumulator. Sharing, in S transposed x is the rank, in S it is 0 or 2 by the rank.
      const int j = shares ? n : n >> 2;
      const int x = !shares ? n & 3 : kTransposed ? rank : rank * 2;
      int row = row0 + thread.g + (x >> 1) * 8;
      int column = column0 + j * 8 + thread.t * 2 + (x & 1);
      (kTransposed ? row : column) &= shares ? ~3 : ~0;
      const u64 index =
          base + (kTransposed ? u64(column) * row_stride + u64(row) : u64(row) * row_stride + u64(column));
      const math::Words4<u32> words = math::torch_words(seed, index >> 2);
      const u32 four[4] = {words.w0, words.w1, words.w2, words.w3};
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const bool mine = shares || m == int(index & 3);
        const int bit = shares ? m / kEach * kBits + j * kEach + m % kEach : bit_of(n);
        made |= u32(mine && math::torch_uniform_of_word(four[m]) > p) << bit;
      }
    }
    if (!shares) {
      return made;
    }
    u32 mine = 0;
#pragma unroll
    for (int from = 0; from < kSharers; ++from) {
      const int lane = (thread.lane & ~((kSharers - 1) * kStride)) | from * kStride;
      const u32 of_from = __shfl_sync(~0u, made, lane) >> rank * kBits;
      mine |= (of_from & ((1u << kBits) - 1)) << from * kBits;
    }
    return mine;
  }
};

// The bits of TorchKeep: the accumulator of a warpgroup is a fragment of the generic kernels.
template <auto S>
struct Sm90TorchDropout {
  TorchKeep<S, false, 1, S.step / 8> keep;
  Thread thread;
  int row = 0;  // of the warp

  __device__ __forceinline__ void start(const Args& a, int b, int head, int k_len, int first_row) {
    Place place;
    place.b = u32(b);
    place.k_len = k_len;
    keep.start(a, place, u32(head));
    row = first_row - thread.g;
  }
  __device__ __forceinline__ void draw(int n0, int) {
    if (((keep.base | keep.row_stride) & 3) != 0) {
      keep.prepare(thread, row, n0);
      return;
    }
    // As TorchKeep does it where four keys share a call, but some calls at a time: few warps are here to wait for one
    // another.
    const int rank = thread.t % 2;
    const u64 first = keep.base + u64(row + thread.g + rank * 8) * keep.row_stride + u64(n0 + (thread.t & 2) * 2);
    u32 made = 0;
#pragma unroll 4
    for (int j = 0; j < S.step / 8; ++j) {
      const math::Words4<u32> words = math::torch_words(keep.seed, (first + u64(8 * j)) >> 2);
      made |= u32(math::torch_uniform_of_word(words.w0) > keep.p) << 2 * j |
              u32(math::torch_uniform_of_word(words.w1) > keep.p) << (2 * j + 1) |
              u32(math::torch_uniform_of_word(words.w2) > keep.p) << (2 * j + 16) |
              u32(math::torch_uniform_of_word(words.w3) > keep.p) << (2 * j + 17);
    }
    // Of its row a thread has made its own keys' decisions and its neighbour's: low half those of even t.
    const u32 other = __shfl_xor_sync(~0u, made, 1);
    const u32 own = rank == 0 ? made & 0xffff : made >> 16;
    const u32 given = rank == 0 ? other & 0xffff : other >> 16;
    keep.bits[0] = rank == 0 ? own | given << 16 : given | own << 16;
  }
  // Word i of P.
  __device__ __forceinline__ u32 apply(int i, u32 word) const {
    const u32 bit = 1u << (i % 2 * 16 + i / 2 * 2);
    return word & ((keep.bits[0] & bit) != 0 ? 0x0000ffffu : 0) |
           word & ((keep.bits[0] & bit << 1) != 0 ? 0xffff0000u : 0);
  }
};

}  // namespace fovea::cuda
