// SPDX-License-Identifier: Apache-2.0
//
// Which elements take part, but for the band. Masks of keys: the three warps of sm90_forward's copying warpgroup that
// copy nothing prepare them ahead. Dropout: the warps that compute draw the decisions between the powers of the
// softmax, where the pipes for integers are idle, and mask P by them.
//
// Note: drawn by those three warps, ahead, as a bit an element, dropout at D=64 fell from 263 to 173 TFLOP/s: they do
// not keep up with two warpgroups.
#pragma once

#include "cuda/device/score/dropout.cuh"
#include "cuda/device/score/sm90_scores.cuh"
#include "cuda/device/sm90/forward_copy.cuh"
#include "math/band.h"

namespace fovea::cuda {

// ---- masks of keys ----

// A mask of keys as 16 more columns of K, whose first is -inf for keys that are hidden. Beside 64 queries whose 16 more
// columns are 1, 0, 0 ... the product hides them.
template <auto S>
struct Sm90Hide {
  static __device__ __forceinline__ u32 number(u32 bf16, u32 fp16) { return S.type == Type::kBf16 ? bf16 : fp16; }

  // words: as sm90_mask writes them.
  static __device__ __forceinline__ void columns(u32 to, const u32* words, int key, int n0) {
    const u32 at = u32(n0 + key);
    const u32 word = __ldg(words + at / 128 * 4 + at % 8 / 2);
    const bool visible = (word >> (at % 128 / 8 * 2 + at % 2) & 1) != 0;
    store_shared(to + swizzled<32>(key, 0), uint4{visible ? 0 : number(0xff80, 0xfc00), 0, 0, 0});
    store_shared(to + swizzled<32>(key, 1), uint4{0, 0, 0, 0});
  }
  static __device__ __forceinline__ void ones(u32 to, int thread) {
    store_shared(to + swizzled<32>(thread / 2, thread % 2),
                 uint4{thread % 2 == 0 ? number(0x3f80, 0x3c00) : 0, 0, 0, 0});
  }
};

// One of kSm90PreparingWarps warps.
template <auto S>
__device__ __forceinline__ void sm90_forward_prepare(const Args& a, u32 base, const volatile Sm90Tile* tiles,
                                                     const Sm90Barriers& barriers, int warp, int lane) {
  constexpr Sm90ForwardSizes kSizes = sm90_forward_sizes(S);
  Ring<S.q_buffers> ring_q;
  Ring<kSm90PreparedBuffers> ring;
  while (true) {
    barrier_wait(barriers.full(barriers.kQ, ring_q.buffer()), ring_q.parity());
    const volatile Sm90Tile& given = tiles[ring_q.buffer()];
    if (given.b < 0) {
      return;
    }
    Sm90Tile tile{};
    tile.head = given.head;
    tile.b1 = given.b1;
    tile.b2 = given.b2;
    const u32* const words = static_cast<const u32*>(a.mask.data) + tile.offset(a.mask.strides, 0);
    const math::Interval<int> steps{given.first_step, given.end_step};
    barrier_arrive(barriers.empty(barriers.kQ, ring_q.buffer()));  // every lane has read
    ring_q.next();
    for (int n = steps.end - 1; n >= steps.begin; --n) {
      barrier_wait(barriers.empty(barriers.kPrepared, ring.buffer()), ring.parity() ^ 1);
#pragma unroll 1
      for (int key = warp * 32 + lane; key < S.step; key += kSm90PreparingWarps * 32) {
        Sm90Hide<S>::columns(base + kSizes.hide_at + ring.buffer() * kSizes.hide, words, key, n * S.step);
      }
      fence_async();
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(barriers.full(barriers.kPrepared, ring.buffer()));
      }
      ring.next();
    }
  }
}

// ---- dropout ----

// Decisions of rule fovea for a tile: all ones or zeros for each half of P's words. They do not wait for S.
template <auto S>
struct Sm90Dropout {
  math::DropoutHead head{};
  math::DropoutRow<Word> row{};
  u32 threshold = 0;   // in both halves
  u32 folded_key = 0;  // shifted: of the position of key 0
  u32 keep[S.step / 4];

  __device__ __forceinline__ void start(const Args& a, int b, int query_head, int, int first_row) {
    head = dropout_head<S>(a, u32(b), u32(query_head));
    u32 folded_row = math::dropout_fold(u32(first_row));
    if constexpr (S.shifted) {
      folded_row += a.shard.folded_query(u32(b));
      folded_key = a.shard.folded_key(u32(b));
    }
    row = math::dropout_row<Word>(head, Word(folded_row));
    threshold = (a.drop_threshold & 0xffff) * 0x10001u;  // 65536 keeps what it likes: the factor is 0 then
  }

  __device__ __forceinline__ u32 kept(u32 halves) const {
    if constexpr (S.often) {
      // 15 bits are compared; the top bit of both decides before them.
      const u32 limit = threshold & 0x7fff7fffu;
      u32 below, top;
      asm("{\n.reg .b32 least, zero;\nmov.b32 zero, 0;\nmin.u16x2 least, %1, %2;\nsub.u32 least, %2, least;\n"
          "set.eq.u32.f16x2 %0, least, zero;\n}"
          : "=r"(below)
          : "r"(halves & 0x7fff7fffu), "r"(limit));
      asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(top) : "r"(halves));
      return (threshold & 0x8000u) != 0 ? top & below : top | below;
    } else {
      return halves_at_least(halves, threshold);
    }
  }

  // The tile that begins at key n0.
  __device__ __forceinline__ void draw(int n0, int t) {
#pragma unroll
    for (int k = 0; k < S.step / 16; ++k) {
      u32 column = u32(n0) / 2 + 8 * k + 2 * t;  // dropout_fold of this lane's first column
      if constexpr (S.shifted) {
        column += folded_key;
      }
      const math::Words2<Word> a = math::dropout_call<Word>(head, row, Word(column));
      const math::Words2<Word> b = math::dropout_call<Word>(head, row, Word(column + 1));
      keep[4 * k] = kept(__byte_perm(a.x.bits, b.x.bits, 0x5410));
      keep[4 * k + 1] = kept(__byte_perm(a.y.bits, b.y.bits, 0x5410));
      keep[4 * k + 2] = kept(__byte_perm(a.x.bits, b.x.bits, 0x7632));
      keep[4 * k + 3] = kept(__byte_perm(a.y.bits, b.y.bits, 0x7632));
    }
  }

  // Word i of P.
  __device__ __forceinline__ u32 apply(int i, u32 word) const { return word & keep[i]; }
};

// No decisions.
struct Sm90NoDropout {
  __device__ __forceinline__ void draw(int, int) {}
  __device__ __forceinline__ u32 apply(int, u32 word) const { return word; }
};
template <auto S>
using Sm90Decisions =
    typename Select<S.dropout == DropoutRule::kFovea, Sm90Dropout<S>,
                    typename Select<S.dropout == DropoutRule::kNone, Sm90NoDropout, Sm90TorchDropout<S>>::Type>::Type;

}  // namespace fovea::cuda
