// SPDX-License-Identifier: Apache-2.0
//
// The softmax of sm90_forward: from the accumulators of S, 64 queries by S.step keys a warpgroup, to P as the A operand
// of the next product. A thread has two rows; the four lanes of a quad share them.
//
// `quick`: the reference of a row need not be its maximum, it must only be near: p = 2^(s - reference) is as precise in
// 16 bits at 2^6 as at 1. So an ordinary tile looks for no maximum and rescales nothing. A warp in which a part of a
// row's sum over a tile is larger than kLargestPart moves its references in place; where a weight even left the range
// of fp32 it forms its S again, by mma.sync and without its warpgroup, and takes the exact way (maximum, rescale). Rows
// that have met no key yet, and references of 2^24 and more, take the exact way at once.
//
// The bound on the sums is small on purpose: P's relative error does not depend on the reference, but where its largest
// element is exactly 1, a one-hot row has no error at all.
//
// Note: references are natural logarithms (times log2 e a bias of -3.4e38 would overflow). The quick way rounds
// reference * log2(e), the same for all of a row; what the rounding leaves out is carried (rest) wherever weights of
// both ways, or the logsumexp, meet.
#ifndef FOVEA_CUDA_DEVICE_SM90_SOFTMAX_CUH
#define FOVEA_CUDA_DEVICE_SM90_SOFTMAX_CUH

#include "math/band.h"
#include "math/dropout.h"
#include "math/score.h"
#include "math/softmax.h"
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
  static constexpr int kWords = (S.step + 31) / 32;
  static constexpr Sm90ForwardSizes kSizes = sm90_forward_sizes(S);
  static_assert(!S.mask || S.step % 32 == 0);
  static_assert((S.bias == BiasTile::kNone && S.bias2 == BiasTile::kNone) || S.step % 64 == 0);

  u32 base;                    // of shared memory
  u32 bias_row, bias_swizzle;  // this lane's place for ldmatrix in a panel
  int wide_row, wide_chunk;    // and in one of fp32
  u32 wide_half;
  u32 key_term;  // of this lane's first column
  float slope = 0;
  int diagonal = 0;  // ALiBi: the key that stands where this thread's first row does
  const u32* mask_rows[2] = {};
  u32 words[2][S.mask ? kWords : 1];

  // row: this thread's first row of the tile; fragment_row, half: row and 8 columns, by lane as ldmatrix takes them.
  __device__ __forceinline__ Sm90Inputs(u32 memory, int row, int fragment_row, int half, int t)
      : base(memory),
        bias_row(fragment_row * 128),
        bias_swizzle(u32(half ^ (fragment_row & 7)) << 4),
        wide_row(row),
        wide_chunk(t / 2),
        wide_half(t % 2 * 8),
        key_term(memory + kSizes.key_term_at + t * 8) {}

  // Mask words of the tile that begins at key n0, shifted so that bit 0 is this lane's first column.
  __device__ __forceinline__ void load_words(int n0, int keys, int t) {
    if constexpr (S.mask) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          words[x][w] = __ldg(mask_rows[x] + min(n0 / 32 + w, (keys - 1) / 32)) >> (2 * t);
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
      ldmatrix(b, place + bias_row + k / 4 * (kSizes.rows * 128) + (bias_swizzle ^ (k % 4 << 5)));
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
        if constexpr (S.mask) {
          const u32 bit = 1u << column % 32;
          first = (words[y][k / 2] & bit) != 0 ? first : -kInfinity;
          second = (words[y][k / 2] & bit << 1) != 0 ? second : -kInfinity;
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

  __device__ __forceinline__ void start(const Args& a, i64 n, int first_row) {
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
};

// ---- softmax ----

template <Spec S>
struct Sm90Softmax {
  static constexpr int kBlocks = S.step / 16;
  static constexpr bool kNatural = natural_scores(S);  // otherwise scores stay dot products
  static constexpr float kLargestPart = 0x1p7f;
  static constexpr float kLargestQuick = 0x1p24f;  // of references
  static constexpr float kLargestSum = 0x1p100f;   // beyond it a weight may have left the range

  float s[S.step / 2];  // dot products, then scores, then weights
  u32 p[S.step / 4];    // weights of 16 bits
  float reference[2], sum[2];

  __device__ __forceinline__ void start() {
    reference[0] = reference[1] = -kInfinity;
    sum[0] = sum[1] = 0;
  }

  // Some row of this warp has met no key, or its reference is not fit for the quick way.
  __device__ __forceinline__ bool must_be_exact() const {
    return __any_sync(~0u, !(fabsf(reference[0]) < kLargestQuick) || !(fabsf(reference[1]) < kLargestQuick));
  }

  static __device__ __forceinline__ float rest(float x) {
    return fabsf(x) < kLargestQuick ? fmaf(x, math::kLog2E, -(x * math::kLog2E)) : 0.f;
  }

  // ---- from dot products to scores ----

  template <bool kSmall>
  __device__ __forceinline__ void cap(const Args& a, const Sm90ForwardArgs& m) {
#pragma unroll
    for (int i = 0; i < S.step / 2; ++i) {
      const float x = s[i] * m.scale_of_cap;
      const float small = math::tanh_of_small(x);
      s[i] = a.softcap * (kSmall || fabsf(x) <= math::kSmallTanh ? small : math::tanh_by_exp2(Capped(x)).x);
    }
  }

  // The band and the end of the sequence are another matter (mask).
  __device__ __forceinline__ void finish(const Args& a, const Sm90ForwardArgs& m, const Sm90Inputs<S>& inputs,
                                         int stage, int n0) {
    if constexpr (S.softcap) {
      float largest = 0;
#pragma unroll
      for (int i = 0; i < S.step / 2; ++i) {
        largest = fmaxf(largest, fabsf(s[i]));
      }
      if (__all_sync(~0u, largest * fabsf(m.scale_of_cap) <= math::kSmallTanh)) {
        cap<true>(a, m);
      } else {
        cap<false>(a, m);
      }
    } else if constexpr (kNatural) {
#pragma unroll
      for (int i = 0; i < S.step / 2; ++i) {
        s[i] *= a.scale;
      }
    }
    if constexpr (sm90_has_planes(S) || S.alibi || S.mask) {
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
        float(&block)[8] = *reinterpret_cast<float(*)[8]>(s + 8 * k);
        inputs.add(block, stage, n0, k);
      }
    }
  }

  // Forbidden elements become -inf. Each edge is asked for only where the rows of this warpgroup, 64 from `top` on,
  // meet it; `row` is this thread's first.
  __device__ __forceinline__ void mask(const math::Band<int>& band, int top, int row, int n0, int t) {
    const int free_end = S.banded ? min(band.seqlen_k, top + band.high + 1) : band.seqlen_k;
    if (n0 + S.step > free_end) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int end = (S.banded ? band.keys_of(row + 8 * x).end : band.seqlen_k) - n0 - 2 * t;
#pragma unroll
        for (int j = 0; j < S.step / 8; ++j) {
          s[4 * j + 2 * x] = 8 * j >= end ? -kInfinity : s[4 * j + 2 * x];
          s[4 * j + 2 * x + 1] = 8 * j + 1 >= end ? -kInfinity : s[4 * j + 2 * x + 1];
        }
      }
    }
    if constexpr (S.left_edge) {
      if (n0 < top + 63 + band.low) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const int begin = band.keys_of(row + 8 * x).begin - n0 - 2 * t;
#pragma unroll
          for (int j = 0; j < S.step / 8; ++j) {
            s[4 * j + 2 * x] = 8 * j < begin ? -kInfinity : s[4 * j + 2 * x];
            s[4 * j + 2 * x + 1] = 8 * j + 1 < begin ? -kInfinity : s[4 * j + 2 * x + 1];
          }
        }
      }
    }
  }

  // ---- the quick way ----

  // A first reference: the largest of a few elements. Any element of the row would be right.
  __device__ __forceinline__ void guess(const Args& a) {
    float m[2] = {-kInfinity, -kInfinity};
#pragma unroll
    for (int k = 0; k < kBlocks; k += 4) {
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        m[e >> 1 & 1] = fmaxf(m[e >> 1 & 1], s[8 * k + e]);
      }
    }
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      reference[x] = quad_max(m[x]) * (kNatural ? 1.f : a.scale);
    }
  }

  // Weights of blocks [from, to) relative to the references as they are; parts of their sums.
  template <class From, class To>
  __device__ __forceinline__ void weigh(From from, To to, float unit, const float (&base)[2], float (&parts)[4]) {
#pragma unroll
    for (int k = from; k < to; ++k) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int x = e >> 1 & 1;
        s[8 * k + e] = weight_fused(s[8 * k + e], unit, base[x]);
        parts[2 * x + (e & 1)] += s[8 * k + e];
      }
    }
  }

  // The largest weight of each row becomes 1: the answer to a row that has outgrown its reference.
  template <int kCount>
  __device__ __forceinline__ void move_references(float (&o)[kCount]) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      float m = 1;
#pragma unroll
      for (int j = 0; j < S.step / 8; ++j) {
        m = fmaxf(m, fmaxf(s[4 * j + 2 * x], s[4 * j + 2 * x + 1]));
      }
      m = quad_max(m);
      const float before = reference[x] * math::kLog2E;
      reference[x] += lg2(m) * (1 / math::kLog2E);
      const float factor = ex2(before - reference[x] * math::kLog2E);
      sum[x] *= factor;
#pragma unroll
      for (int j = 0; j < S.step / 8; ++j) {
        s[4 * j + 2 * x] *= factor;
        s[4 * j + 2 * x + 1] *= factor;
      }
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        o[4 * i + 2 * x] *= factor;
        o[4 * i + 2 * x + 1] *= factor;
      }
    }
  }

  // ---- the exact way: running maxima ----

  template <int kCount>
  __device__ __forceinline__ void exactly(const Args& a, float (&o)[kCount]) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      float m = reference[x];
#pragma unroll
      for (int j = 0; j < S.step / 8; ++j) {
        if constexpr (!kNatural) {
          s[4 * j + 2 * x] *= a.scale;
          s[4 * j + 2 * x + 1] *= a.scale;
        }
        m = fmaxf(m, fmaxf(s[4 * j + 2 * x], s[4 * j + 2 * x + 1]));
      }
      m = quad_max(m);
      const float base = math::reference_of(m);
      const float lift = rest(base);
      const float factor = reference[x] == -kInfinity
                               ? 0.f
                               : weight_of_difference(reference[x], base, math::kLog2E, lift - rest(reference[x]));
      reference[x] = m;
      float parts[2] = {};
#pragma unroll
      for (int j = 0; j < S.step / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& weight = s[4 * j + 2 * x + e];
          weight = weight_of_difference(weight, base, math::kLog2E, lift);
          parts[e] += weight;
        }
      }
      sum[x] = sum[x] * factor + (parts[0] + parts[1]);
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        o[4 * i + 2 * x] *= factor;
        o[4 * i + 2 * x + 1] *= factor;
      }
    }
  }

  // ---- P ----

  template <class From, class To>
  __device__ __forceinline__ void convert(From from, To to, const Sm90Dropout<S>& dropout) {
#pragma unroll
    for (int i = 4 * from; i < 4 * to; ++i) {
      p[i] = pack<S.type>(s[2 * i], s[2 * i + 1]);
      if constexpr (S.dropout != DropoutRule::kNone) {
        p[i] &= dropout.keep[i];
      }
    }
  }

  // ---- the end of a row ----

  // The sink, and what was left out so far because it is the same for all keys: the query's term. Gives what O is
  // multiplied by, and the logsumexp. A term of -inf, or a row without a key: O is 0.
  __device__ __forceinline__ void end(int x, float query_term, float sink, float keep_scale, float& factor,
                                      float& logsumexp) {
    float base = reference[x];
    float total = sum[x];
    float left_out = rest(base);
    if constexpr (S.query_term) {
      if (query_term == -kInfinity) {
        base = -kInfinity;
        total = 0;
      } else {
        base += query_term;
        total = query_term == kInfinity ? query_term - query_term : total;
      }
    }
    const float top = fmaxf(base, sink);
    float own = 1;
    float all = total;
    if (sink != -kInfinity) {
      own = total == 0 ? 0.f : ex2((base - top) * math::kLog2E - left_out);
      all = total * own + (sink == top ? 1.f : ex2((sink - top) * math::kLog2E));
      left_out = 0;
    }
    factor = all == 0 ? 0.f : own * keep_scale / all;
    logsumexp = all == 0 ? -kInfinity : fmaf(lg2(all) - left_out, 1 / math::kLog2E, top);
  }
};

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_SM90_SOFTMAX_CUH
