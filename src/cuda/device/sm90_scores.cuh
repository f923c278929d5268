// SPDX-License-Identifier: Apache-2.0
//
// What sm90_forward adds to scores and takes from weights, for the accumulator of a warpgroup: 64 queries by S.step
// keys, of which a thread has two rows.
//
//   Sm90Inputs         biases and key terms from shared memory, ALiBi, query terms, mask words from global memory
//   Sm90Dropout        decisions of rule fovea, Sm90TorchDropout those of torch_mem_efficient; both are drawn while the
//                      products run, and P is masked by them
#ifndef FOVEA_CUDA_DEVICE_SM90_SCORES_CUH
#define FOVEA_CUDA_DEVICE_SM90_SCORES_CUH

#include "math/dropout.h"
#include "math/score.h"
#include "scores.cuh"
#include "sm90_ptx.cuh"
#include "sm90_sizes.h"
#include "wgmma.cuh"

namespace fovea::cuda {

// A number that is known when the kernel is compiled, as an argument.
template <int kValue>
struct Constant {
  constexpr operator int() const { return kValue; }
};

// ---- scores ----

// A float for math/'s softcap: approximate powers and reciprocals, two units in the last place.
struct Capped {
  float x;
  __device__ __forceinline__ explicit Capped(float value) : x(value) {}
  friend __device__ __forceinline__ Capped operator+(Capped a, Capped b) { return Capped(a.x + b.x); }
  friend __device__ __forceinline__ Capped operator-(Capped a, Capped b) { return Capped(a.x - b.x); }
  friend __device__ __forceinline__ Capped operator*(Capped a, Capped b) { return Capped(a.x * b.x); }
  friend __device__ __forceinline__ Capped exp2(Capped a) { return Capped(ex2(a.x)); }
  friend __device__ __forceinline__ Capped reciprocal(Capped a) { return Capped(rcp(a.x)); }
};

// What is added to this thread's scores, beside biases: constants of a tile of queries, words of a tile of keys.
template <Spec S>
struct Sm90Inputs {
  static constexpr Sm90ForwardSizes kSizes = sm90_forward_sizes(S);
  static constexpr int kMaskRows = S.key_mask ? 1 : 2;  // of this thread
  static_assert(!S.mask || S.step == 32 || S.step == 64 || S.step == 128);
  static_assert((S.bias == BiasTile::kNone && S.bias2 == BiasTile::kNone) || S.step == 32 || S.step % 64 == 0);
  static constexpr int kPanel = sm90_bias_panel(S, BiasTile::kBf16);  // of a bias of 16 bits

  u32 base;                    // of shared memory
  u32 bias_row, bias_swizzle;  // this lane's place for ldmatrix in a panel
  int wide_row, wide_chunk;    // and in one of fp32
  u32 wide_half;
  u32 key_term;  // of this lane's first column
  float slope = 0;
  int diagonal = 0;  // ALiBi: the key that stands where this thread's first row does
  float query_terms[2] = {};
  const u32* mask_rows[kMaskRows] = {};  // this thread's words of 128 keys each, as sm90_mask writes them
  u32 words[kMaskRows];                  // of a tile of keys, a bit for each of this thread's columns

  // row: this thread's first row of the tile; fragment_row, half: row and 8 columns, by lane as ldmatrix takes them.
  __device__ __forceinline__ Sm90Inputs(u32 memory, int row, int fragment_row, int half, int t)
      : base(memory),
        bias_row(fragment_row * kPanel * 2),
        bias_swizzle(swizzled<kPanel * 2>(fragment_row, half) - fragment_row * kPanel * 2),
        wide_row(row),
        wide_chunk(t / 2),
        wide_half(t % 2 * 8),
        key_term(memory + kSizes.key_term_at + t * 8) {}

  // Mask words of the tile that begins at key n0.
  __device__ __forceinline__ void load_words(int n0) {
    if constexpr (S.mask) {
#pragma unroll
      for (int x = 0; x < kMaskRows; ++x) {
        words[x] = __ldg(mask_rows[x] + n0 / 128 * 4);
        if constexpr (S.step < 128) {
          words[x] = words[x] >> n0 % 128 / 4 | ~0u << S.step / 4;
        }
      }
    }
  }

  // Bits of the mask; in a warp whose bits are all set there is nothing to do.
  template <int kCount>
  __device__ __forceinline__ void hide(float (&s)[kCount]) const {
    if constexpr (S.mask) {
      if (__all_sync(~0u, (words[0] & words[kMaskRows - 1]) == ~0u)) {
        return;
      }
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        // Row by row: seven bits of a word become predicates at once. Not if the compiler sees that both rows have the
        // same: then it asks for each bit.
        const u32 word = !S.key_mask ? words[x % kMaskRows]
                         : x == 0    ? words[0]
                                     : __shfl_sync(~0u, words[0], threadIdx.x % 32);
#pragma unroll
        for (int c = 0; c < kCount / 2; ++c) {
          float& score = s[c / 2 * 4 + 2 * x + c % 2];
          score = (word & 1u << c) != 0 ? score : -kInfinity;
        }
      }
    }
  }

  // Of block k of 16 columns: elements as an accumulator has them.
  template <BiasTile kBias>
  __device__ __forceinline__ void add_bias(float (&x)[8], u32 place, int k) const {
    if constexpr (kBias == BiasTile::kFp32) {
      // Two numbers at a time: row, then chunk of four columns, as the panel's swizzle has them.
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        const int row = wide_row + (e & 2) * 4;
        const int chunk = (16 * k + (e & 4) * 2) % 32 / 4 + wide_chunk;
        const float2 b = load_shared2(place + k / 2 * (kSizes.rows * 128) + swizzled<128>(row, chunk) + wide_half);
        x[e] += b.x;
        x[e + 1] += b.y;
      }
    } else {
      constexpr Type kType = kBias == BiasTile::kBf16 ? Type::kBf16 : Type::kFp16;
      u32 b[4];
      constexpr int kBlocks = kPanel / 16;
      ldmatrix(b, place + bias_row + k / kBlocks * (kSizes.rows * kPanel * 2) + (bias_swizzle ^ (k % kBlocks << 5)));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[2 * e] += low<kType>(b[e]);
        x[2 * e + 1] += high<kType>(b[e]);
      }
    }
  }

  __device__ __forceinline__ void add(float (&x)[8], int stage, int n0, int k) const {
    if constexpr (S.bias != BiasTile::kNone) {
      add_bias<S.bias>(x, base + kSizes.bias_at + stage * kSizes.bias, k);
    }
    if constexpr (S.bias2 != BiasTile::kNone) {
      add_bias<S.bias2>(x, base + kSizes.bias2_at + stage * kSizes.bias2, k);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int column = 16 * k + 8 * h;
      float2 term{};
      if constexpr (S.key_term) {
        term = load_shared2(key_term + stage * kSizes.key_term + column * 4);
      }
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        float& first = x[4 * h + 2 * y];
        float& second = x[4 * h + 2 * y + 1];
        if constexpr (S.key_term) {
          first += term.x;
          second += term.y;
        }
        if constexpr (S.alibi) {
          const float distance = float(n0 - diagonal) + float(column - 8 * y);
          first += math::alibi(distance, slope);
          second += math::alibi(distance + 1, slope);
        }
        if constexpr (S.query_term) {
          // -inf is a mask: it hides what else was added, NaN included.
          first = query_terms[y] == -kInfinity ? -kInfinity : first + query_terms[y];
          second = query_terms[y] == -kInfinity ? -kInfinity : second + query_terms[y];
        }
      }
    }
  }
};

// ---- dropout ----

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

// Decisions of rule fovea for a tile: all ones or zeros for each half of P's words. They do not wait for S.
template <Spec S>
struct Sm90Dropout {
  math::DropoutHead head{};
  math::DropoutRow<Word> row{};
  u32 threshold = 0;  // in both halves
  u32 keep[S.step / 4];

  __device__ __forceinline__ void start(const Args& a, int b, int query_head, int, int first_row) {
    const i64 n = i64(b) * a.rows.heads_q + query_head;
    const u64 seed = a.seed.value + (a.seed.pointer != nullptr ? *a.seed.pointer : 0);
    const u64 offset = a.offset.value + (a.offset.pointer != nullptr ? *a.offset.pointer : 0);
    const math::DropoutHead made = math::DropoutHead::make(seed, offset, u64(n));
    head = {uniform(made.k0), uniform(made.k1), uniform(made.w0), uniform(made.w1)};
    row = math::dropout_row<Word>(head, Word(math::dropout_fold(u32(first_row))));
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
      const u32 column = u32(n0) / 2 + 8 * k + 2 * t;  // dropout_fold of this lane's first column
      const math::Words2<Word> a = math::dropout_call<Word>(head, row, Word(column));
      const math::Words2<Word> b = math::dropout_call<Word>(head, row, Word(column + 1));
      keep[4 * k] = kept(__byte_perm(a.x.bits, b.x.bits, 0x5410));
      keep[4 * k + 1] = kept(__byte_perm(a.y.bits, b.y.bits, 0x5410));
      keep[4 * k + 2] = kept(__byte_perm(a.x.bits, b.x.bits, 0x7632));
      keep[4 * k + 3] = kept(__byte_perm(a.y.bits, b.y.bits, 0x7632));
    }
  }

  // What decisions are made from, and nothing else is.
  __device__ __forceinline__ u32& first() { return row.high.bits; }
  // They are made here, at the latest.
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int i = 0; i < S.step / 4; ++i) {
      asm volatile("" : "+r"(keep[i]));
    }
  }

  // Word i of P.
  __device__ __forceinline__ u32 apply(int i, u32 word) const { return word & keep[i]; }
};

// Decisions of rule torch_mem_efficient, a bit each: the generic kernels' (Keep), whose fragments are these
// accumulators.
template <Spec S>
struct Sm90TorchDropout {
  Keep<S, false, 1, S.step / 8> keep;
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
    // As Keep does it where four keys share a call, but some calls at a time: few warps are here to wait for one
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
  __device__ __forceinline__ int& first() { return row; }
  __device__ __forceinline__ void pin() { asm volatile("" : "+r"(keep.bits[0])); }

  // Word i of P.
  __device__ __forceinline__ u32 apply(int i, u32 word) const {
    const u32 bit = 1u << (i % 2 * 16 + i / 2 * 2);
    return word & ((keep.bits[0] & bit) != 0 ? 0x0000ffffu : 0) |
           word & ((keep.bits[0] & bit << 1) != 0 ? 0xffff0000u : 0);
  }
};

// No decisions.
struct Sm90NoDropout {
  __device__ __forceinline__ u32 apply(int, u32 word) const { return word; }
};
template <Spec S>
using Sm90Decisions =
    typename Select<S.dropout == DropoutRule::kFovea, Sm90Dropout<S>,
                    typename Select<S.dropout == DropoutRule::kNone, Sm90NoDropout, Sm90TorchDropout<S>>::Type>::Type;

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_SM90_SCORES_CUH
