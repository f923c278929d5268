// SPDX-License-Identifier: Apache-2.0
//
// A step of a warpgroup of sm90_forward between its two products: from the dot products of 64 queries and S.step keys
// to P as the operand of the next.
#pragma once

#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/score/sm90_forward_scores.cuh"
#include "cuda/device/score/sm90_softmax.cuh"
#include "cuda/device/sm90/forward_copy.cuh"
#include "cuda/device/sm90/forward_pair.cuh"
#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/device/tile/pipe.cuh"

namespace fovea::cuda {

// S = Q K^T of K in parts, each a group of products of its own. `keys` is left at the first part whose buffer is not
// yet released.
template <auto S, class Queries, class Keys, class KeyPipe>
__device__ __forceinline__ void sm90_multiply_parts(float (&s)[S.step / 2], const Queries& queries, const Keys& rows,
                                                    KeyPipe& keys) {
  constexpr int kBlocks = sm90_key_columns(S) / 16;
  constexpr int kBuffers = sm90_key_buffers(S);
  KeyPipe next = keys;
#pragma unroll
  for (int part = 0; part < sm90_key_parts(S); ++part) {
    if (part >= kBuffers) {  // which the first parts have to leave for the last
      wgmma_wait<kBuffers - 1>();
      keys.release();
      keys.next();
    }
    next.wait();
    const auto now = rows.buffer(next.buffer(), sm90_forward_sizes(S).k);
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      wgmma_shared<S.type, false, false>(s, queries(part * kBlocks + k), now(k), part + k > 0);
    }
    wgmma_commit();
    next.next();
  }
}

// S is awaited, but not the kLater groups of products that were issued after it. Parts of K are released one by one.
template <auto S, int kLater, int kParts = sm90_key_parts_left(S), class KeyPipe>
__device__ __forceinline__ void sm90_await_scores(KeyPipe& keys) {
  wgmma_wait<kParts - 1 + kLater>();
  if constexpr (S.pairs) {
    keys.release();
    keys.next();
  }
  if constexpr (kParts > 1) {
    sm90_await_scores<S, kLater, kParts - 1>(keys);
  }
}

// Everything that a step reads and changes lies in the kernel.
template <auto S>
struct Sm90ForwardStep {
  static constexpr Sm90ForwardSizes kSizes = sm90_forward_sizes(S);
  static constexpr bool kPeels = sm90_peels(S);
  static constexpr bool kHides = sm90_hides(S);

  const Args& a;
  const Sm90ForwardArgs& m;
  const Sm90Tile& tile;
  const math::Band<int>& band;
  Sm90Softmax<S>& softmax;
  Sm90ForwardScores<S>& scores;
  Sm90Decisions<S>& dropout;
  Sm90Pair<S>& pair;
  Pipe<sm90_key_buffers(S), Sm90Barriers::kK>& k_pipe;
  Pipe<S.stages, Sm90Barriers::kV>& v_pipe;
  Pipe<sm90_has_planes(S) ? S.planes : 0, Sm90Barriers::kPlanes>& planes;
  float (&o)[S.dv / 2];
  Pipe<S.q_buffers, Sm90Barriers::kQ>& q_pipe;
  const u32& base;
  const int &c, &top, &row0, &fragment_row, &lane,
      &t;  // rows: the warpgroup's first, this thread's first, and for ldmatrix
  const float& unit;
  int& n;         // of the step
  bool& careful;  // of this warp: it computes exactly until its references are fit for the fast path

  // What is left to settle() of a step.
  enum class Left { kNothing, kMoving, kExact, kAgain };

  __device__ __forceinline__ int key() const { return sm90_first_key<S>(n, pair.rank); }

  template <bool kAtEnd, bool kAgain>
  __device__ __forceinline__ void finish() {
    scores.template finish<kAgain, kAgain || (kPeels && kAtEnd)>(softmax.s, a, m, planes.buffer(), key());
    scores.template mask_edge<kAtEnd>(softmax.s, band, top, row0, key(), t);
  }
  // From the dot products of step n to P, or to what is left to settle().
  // Note: wgmma_wait is for a whole warpgroup. Its warps branch each by itself, so all of them must come to the
  // same wait instruction. The vote keeps that behind the weights: with nothing but arithmetic before it ptxas
  // moves the wait to the front, and no warpgroup does its softmax while its own product runs. For narrow heads the
  // front is better.
  template <bool kAtEnd>
  __device__ __forceinline__ Left soften(bool first) {
    const auto await_output = [&] {
      wgmma_wait<0>();
      pin(o);
      if (!first) {
        v_pipe.release();
      }
    };
    const auto make_p = [&] {
      if constexpr (!S.early) {
        dropout.draw(key(), t);
      }
      softmax.convert(dropout);
    };
    const auto weigh = [&] {
      if (careful) {
        return Left::kExact;
      }
      if constexpr (S.early && S.ahead) {
        dropout.draw(key(), t);  // between the powers
      }
      float parts[4] = {};  // of the rows' sums over the step
      softmax.weigh(unit, parts);
      const float part0 = parts[0] + parts[1];
      const float part1 = parts[2] + parts[3];
      Left left = Left::kNothing;
      if (__any_sync(~0u, !(part0 < softmax.kLargestPart) || !(part1 < softmax.kLargestPart))) {
        if (__any_sync(~0u, !(part0 + part1 < softmax.kLargestSum))) {
          return Left::kAgain;
        }
        left = Left::kMoving;
      }
      k_pipe.release();
      softmax.sum[0] += part0;
      softmax.sum[1] += part1;
      if constexpr (!S.ahead) {
        make_p();
      }
      return left;
    };
    planes.wait();
    finish<kAtEnd, false>();
    if (S.guess && first) {
      softmax.guess(a);
      careful = softmax.must_be_exact();
      if (careful) {
        softmax.start();
      }
    }
    if constexpr (S.pairs) {
      const float largest[2] = {softmax.largest(a, 0), softmax.largest(a, 1)};
      pair.tell(largest);
      if constexpr (S.early) {
        dropout.draw(key(), t);
      }
      const float2 told = pair.hear();
      const float factor0 = softmax.raise_row(0, fmaxf(largest[0], told.x));
      const float factor1 = softmax.raise_row(1, fmaxf(largest[1], told.y));
      await_output();  // which reads softmax.p
      make_p();
      pair.tell_weights(softmax.p);
      scale_row(fragment_of(o), 0, factor0);
      scale_row(fragment_of(o), 1, factor1);
      return Left::kNothing;
    }
    if constexpr (!S.ahead) {
      if (S.early && !careful) {
        dropout.draw(key(), t);
      }
      await_output();
    }
    const Left left = weigh();
    if constexpr (S.ahead) {
      await_output();
      if (left == Left::kNothing || left == Left::kMoving) {
        make_p();
      }
    }
    return left;
  }
  // What is rare, and long: here once for all steps.
  __device__ __forceinline__ void settle(Left left) {
    if (!S.pairs && left != Left::kNothing) {
      if (left == Left::kMoving) {
        softmax.move_references(o);
      } else {
        if (left == Left::kAgain) {
          softmax.form(base + kSizes.q_at + q_pipe.buffer() * kSizes.q, c * 64 + fragment_row,
                       base + kSizes.k_at + k_pipe.buffer() * kSizes.k, lane);
          finish<true, true>();
        }
        if constexpr (kHides) {  // a hidden key that holds NaN: the product cannot hide it
          scores.mask.find(a, tile, band, row0, t);
          scores.mask.load(key());
          scores.mask.hide(softmax.s);
        }
        if (!S.early || left == Left::kExact) {
          dropout.draw(key(), t);
        }
        softmax.exactly(a, o);
        careful = softmax.must_be_exact();
        k_pipe.release();
      }
      softmax.convert(dropout);
    }
    if constexpr (!S.pairs) {
      k_pipe.next();
    }
    planes.release();
    planes.next();
  }
};

}  // namespace fovea::cuda
