// SPDX-License-Identifier: Apache-2.0
//
// Dropout's decisions for the accumulators of Hopper's forward and backward.
//
//   Sm90Decisions         sm90_forward: by fovea's rule (Sm90Dropout) or by PyTorch's (score/torch_dropout.cuh)
//   Sm90BackwardDropout   sm90_backward, by fovea's rule
//
// The warps of sm90_forward that compute draw between the powers of the softmax, where the pipes for integers are idle,
// and mask P.
#pragma once

#include "cuda/device/ptx/sm90.cuh"
#include "cuda/device/score/dropout.cuh"

namespace fovea::cuda {

// A u32 whose wide product is one instruction and two register names, for math/dropout.h.
struct Word {
  u32 bits;
  Word() = default;
  __device__ __forceinline__ explicit constexpr Word(u32 x) : bits(x) {}
  friend __device__ __forceinline__ Word operator^(Word a, Word b) { return Word(a.bits ^ b.bits); }
  friend __device__ __forceinline__ Word operator^(Word a, u32 b) { return Word(a.bits ^ b); }
};
// mul.wide (Integer: mul).
__device__ __forceinline__ void mul_wide(Word a, u32 b, Word& high, Word& low) {
  asm("{\n.reg .b64 t;\nmul.wide.u32 t, %2, %3;\nmov.b64 {%1, %0}, t;\n}"
      : "=r"(high.bits), "=r"(low.bits)
      : "r"(a.bits), "r"(b));
}

// Decisions of a tile by fovea's rule, all ones or zeros for each half of P's words. They do not wait for S.
//
// Note: drawn ahead by the three warps that copy nothing, as a bit an element, dropout at D=64 fell from 263 to 173
// TFLOP/s: they do not keep up with two warpgroups.
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
    // 65536 becomes 0, which keeps all: the weights are multiplied by 0 then.
    threshold = (a.drop_threshold & 0xffff) * 0x10001u;
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

// sm90_backward: the sign of a weight says that it is dropped.
template <auto S>
struct Sm90BackwardDropout {
  static constexpr bool kDropout = S.dropout != DropoutRule::kNone;
  static_assert(S.dropout == DropoutRule::kNone || S.dropout == DropoutRule::kFovea);

  math::DropoutHead random;
  u32 folded_query, folded_key;  // of the positions of the first ones
  u32 threshold;

  __device__ __forceinline__ void begin_head(const Args& a, u32 b, int head) {
    if constexpr (kDropout) {
      random = dropout_head<S>(a, b, head);
      if constexpr (S.shifted) {
        folded_query = a.shard.folded_query(b);
        folded_key = a.shard.folded_key(b);
      }
      threshold = a.drop_threshold;
    }
  }

  // Of queries 16 k ... 16 k + 15 of a step that begins at `query`; key: this thread's first.
  template <int kCount>
  __device__ __forceinline__ void draw(float (&s)[kCount], int query, int key, int t, int k) const {
    if constexpr (kDropout) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const math::Words2<Word> w = call(query, key, t, k, e);
        // Words are queries without and with bit 3, their halves keys. What is below the threshold gets a sign.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int n = 2 * k + i / 2;
          const int r = i % 2;
          const u32 word = i / 2 == 0 ? w.x.bits : w.y.bits;
          const u32 below = (r == 0 ? word & 0xffffu : word >> 16) - threshold;
          float& x = s[4 * n + 2 * r + e];
          x = __uint_as_float(__float_as_uint(x) | (below & 0x80000000u));
        }
      }
    }
  }

 private:
  // The random words of queries 16 k + 2 t + e and those 8 further.
  __device__ __forceinline__ math::Words2<Word> call(int query, int key, int t, int k, int e) const {
    if constexpr (S.shifted) {
      return math::dropout_call<Word>(random, Word(folded_query + u32(query) / 2 + 8 * k + 2 * t + e),
                                      Word(folded_key + math::dropout_fold(u32(key))));
    }
    return math::dropout_call<Word>(random, Word(u32(query) / 2 + 8 * k + 2 * t + e),
                                    Word(math::dropout_fold(u32(key))));
  }
};

}  // namespace fovea::cuda
