// SPDX-License-Identifier: Apache-2.0
//
// The gradient of a bias that many entries share, within sm90_backward: dS is added to sums in memory, in the order in
// which blocks come to them (Spec::adds_bias). Before it added_bias_clear sets them to zero; after it added_bias_sum
// makes the gradient of them.
#pragma once

#include "cuda/device/args.h"
#include "cuda/device/sm90/added_bias.h"
#include "cuda/device/tile/place.cuh"

namespace fovea::cuda {

// Of a thread that computes.
template <auto S>
struct Sm90AddedBias {
  float* sums = nullptr;  // this thread's first, of the head's first query and the warpgroup's first key

  // key: the first of this warpgroup.
  __device__ __forceinline__ void begin_head(const Args& a, const Place& place, int head, int key, int thread) {
    if constexpr (S.adds_bias) {
      const math::Strides& s = a.grad_bias.strides;
      i64 plane = s.batch1 != 0 ? place.b1 : 0;
      plane = s.batch2 != 0 ? plane * a.rows.batch2 + place.b2 : plane;
      plane = s.head != 0 ? plane * a.rows.heads_q + head : plane;
      sums = a.bias_sum + AddedBias::make(a.bias_rows, a.bias_keys).tile(plane, 0, key) + thread * 4;
    }
  }
  // This thread's first four numbers of the queries from `query` on, a multiple of 8, and of the keys from `key` on,
  // the warpgroup's tile number f; null where no key exists.
  __device__ __forceinline__ float* at(const Args& a, int query, int key, int f) const {
    if constexpr (S.adds_bias) {
      const AddedBias plan = AddedBias::make(a.bias_rows, a.bias_keys);
      float* const tile = sums + plan.tile(0, query, f * AddedBias::kSide);
      return key < a.bias_keys ? tile + query % AddedBias::kSide / 8 * AddedBias::kOfEight : nullptr;
    } else {
      return nullptr;
    }
  }
};

}  // namespace fovea::cuda
