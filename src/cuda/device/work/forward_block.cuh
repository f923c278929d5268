// SPDX-License-Identifier: Apache-2.0
//
// What the generic forwards have in common: what scores are multiplied by, and how a row ends.
#pragma once

#include "cuda/device/score/dropout.cuh"
#include "cuda/device/score/scores.cuh"
#include "cuda/device/tile/products.cuh"
#include "cuda/device/work/query_block.cuh"

namespace fovea::cuda {

// P is multiplied by 2^kLift where it becomes a pair of fp16, so that small numbers keep their bits.
template <auto S>
inline constexpr float kLift = S.type == Type::kFp32 ? 12 : 0;

// O = O * factor + P V for fp32, kAtOnce blocks of 16 columns of O at a time. high_p, low_p: operands (i, kk) of P;
// high_v, low_v: this lane's place in V of (kk, block).
template <int kSteps, int kAtOnce, int kTiles, int kColumns, class HighP, class LowP, class HighV, class LowV>
__device__ __forceinline__ void add_values_fp32(float (&o)[kTiles][kColumns][4], const float (&factor)[kTiles][2],
                                                const HighP& high_p, const LowP& low_p, const HighV& high_v,
                                                const LowV& low_v) {
  constexpr Type kType = Type::kFp16;
  constexpr int kBlocks = kColumns / 2;
#pragma unroll
  for (int first = 0; first < kBlocks; first += kAtOnce) {
    float sum[kTiles][2 * kAtOnce][4] = {};
    const auto add = [&](int i, int j, const Operand<kType>& p, const u32(&v)[4]) {
      mma<kType>(sum[i][2 * j], p.hi, v[0], v[1]);
      mma<kType>(sum[i][2 * j + 1], p.hi, v[2], v[3]);
    };
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
#pragma unroll
      for (int j = 0; j < kAtOnce && first + j < kBlocks; ++j) {
        u32 high[4], low[4];
        ldmatrix_trans(high, high_v(kk, first + j));
        ldmatrix_trans(low, low_v(kk, first + j));
        for (int i = 0; i < kTiles; ++i) {
          add(i, j, low_p(i, kk), high);
        }
        for (int i = 0; i < kTiles; ++i) {
          add(i, j, high_p(i, kk), low);
        }
      }
    }
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
#pragma unroll
      for (int j = 0; j < kAtOnce && first + j < kBlocks; ++j) {
        u32 high[4];
        ldmatrix_trans(high, high_v(kk, first + j));
        for (int i = 0; i < kTiles; ++i) {
          add(i, j, high_p(i, kk), high);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      for (int j = 0; j < 2 * kAtOnce && 2 * first + j < kColumns; ++j) {
        for (int e = 0; e < 4; ++e) {
          o[i][2 * first + j][e] = o[i][2 * first + j][e] * factor[i][e >> 1] + sum[i][j][e];
        }
      }
    }
  }
}

// A block of the generic forwards: what scores are multiplied by, and how a row ends.
template <auto S, int kRows, int kChunks = 1>
struct ForwardBlock : QueryBlock<S, kRows, kChunks> {
  using Base = QueryBlock<S, kRows, kChunks>;
  using Base::Base, Base::head, Base::head_k, Base::part, Base::place;

  // What scores are multiplied by: for fp32 the powers of two of q and k, too. Where the exponent does that, 0 would
  // make NaN of what is masked.
  __device__ __forceinline__ float scale(const Args& a) const {
    if constexpr (S.type != Type::kFp32) {
      return a.scale;
    } else {
      const float scale = a.scale *
                          power_of_two(-scale_exponent(a.sizes[size_place(a.rows, Size::kQ, place.b, head)])) *
                          power_of_two(-scale_exponent(a.sizes[size_place(a.rows, Size::kK, place.b, head_k(a))]));
      return natural_scores(S) ? scale : fmaxf(scale, power_of_two(-126));
    }
  }

  // How a row ends: what its O is multiplied by; its logsumexp, or with Spec::split what that is made of.
  struct RowEnd {
    float factor;
    float lse;
    float top, sum;
  };
  // `sum` of its weights relative to `top`, which is in units of the scores.
  __device__ __forceinline__ RowEnd finish(const Args& a, float sum, float top) const {
    float factor = power_of_two(-int(kLift<S>));
    sum *= factor;
    if constexpr (!natural_scores(S)) {
      top *= scale(a);
    }
    if (!S.split && a.sink != nullptr) {
      // The sink may be far above every score: weights become relative to the larger of the two.
      const float sink = a.sink[head * a.sink_stride];
      const float above = math::max(top, sink);
      const float less = math::correction(top, above);
      factor *= less;
      sum = math::sum_with_sink(sum * less, math::reference_of(above), sink);
      top = above;
    }
    const float lse = S.split ? 0 : math::logsumexp(math::reference_of(top), sum);
    factor *= math::inverse_of_sum(sum);
    if constexpr (S.dropout != DropoutRule::kNone) {
      factor *= a.keep_scale;
    }
    return {factor, lse, top, sum};
  }

  // What O is multiplied by besides: for fp32 the power of two of v. In one product with the rest it could be denormal.
  __device__ __forceinline__ float value_scale(const Args& a) const {
    if constexpr (S.type == Type::kFp32) {
      return power_of_two(-scale_exponent(a.sizes[size_place(a.rows, Size::kV, place.b, head_k(a))]));
    } else {
      return 1;
    }
  }

  // With Spec::split: where O of a row goes.
  __device__ __forceinline__ i64 row_of_parts(const Args& a, int row) const {
    return padded_row(a.rows, place.b, place.queries()) + row;
  }
  __device__ __forceinline__ float* part_of_out(const Args& a, int row) const {
    return a.partial_out + ((i64(part) * a.padded_rows + row_of_parts(a, row)) * a.rows.heads_q + head) * S.dv;
  }
  // Row x (0 or 1) of a fragment of O, times both factors: to row r of a tile in shared memory, from `column` on. With
  // Spec::split to `part`, if the row exists; there it is column `first` of all.
  template <class Layout, int kColumns>
  static __device__ __forceinline__ void put_row(const float (&o)[kColumns][4], int x, float factor, float value_scale,
                                                 u32 tile, int r, int column, float* part, bool exists, int first,
                                                 int t) {
    for (int j = 0; j < kColumns; ++j) {
      const float2 pair = {o[j][2 * x] * factor * value_scale, o[j][2 * x + 1] * factor * value_scale};
      if constexpr (S.split) {
        if (exists && first + j * 8 < S.dv) {
          *reinterpret_cast<float2*>(part + j * 8) = pair;
        }
      } else if constexpr (S.type == Type::kFp32) {
        store_shared(tile + Layout::offset(r, column / 4 + j * 2 + (t >> 1)) + (t & 1) * 8, pair);
      } else {
        store_shared(tile + Layout::offset(r, column / 8 + j) + t * 4, pack<S.type>(pair.x, pair.y));
      }
    }
  }
  // Its logsumexp or, with Spec::split, its sum: of a reference of 1e30 a logsumexp would not say how many keys reached
  // it, so the two travel apart.
  __device__ __forceinline__ void store_row_end(const Args& a, int row, const RowEnd& end) const {
    if constexpr (S.split) {
      const i64 at = (i64(part) * a.rows.heads_q + head) * a.padded_rows + row_of_parts(a, row);
      reinterpret_cast<float2*>(a.partial_sum)[at] = {end.top, end.sum};
    } else if (a.lse.data != nullptr) {
      static_cast<float*>(a.lse.data)[place.query_rows(a.lse.strides, head) + row * a.lse.strides.row] = end.lse;
    }
  }
};

}  // namespace fovea::cuda
