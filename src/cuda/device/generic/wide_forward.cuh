// SPDX-License-Identifier: Apache-2.0
//
// generic_wide_forward: the forward for head dimensions whose O does not fit into the registers of the warps that own
// its rows: over 256, and any.
//
// The warps of a block form one grid for S and another for O (generic/sizes.h); P goes from one to the other through
// shared memory, with each row's maximum and factor. K, V and what the scores need have one buffer each: V(n) travels
// during S(n), K(n + 1) during O(n).
//
//     K(n) here | S, maxima of rows | barrier | P, factors; start K(n + 1) | V(n) here, barrier | O = O * factor + P V
//     | barrier | start V(n + 1)
//
// Where q and k are wider than Spec::part, S is summed up over parts of their columns, Q and K read again for each
// step: slower, but of any width. Where v is wider than 512, each piece of O's columns is a block of its own.
//
// fp32 as pairs of fp16: high and low parts are tiles of their own, high first; small products have their own sums.
#pragma once

#include "cuda/device/score/mask_edge.cuh"
#include "cuda/device/score/softmax.cuh"
#include "cuda/device/tile/products.cuh"
#include "cuda/device/work/forward_block.cuh"

namespace fovea::cuda {

// O = O * factor + P V, both operands in shared memory. kVHalf, kPHalf: from the high parts of pairs to the low ones.
template <WideForwardSpec S, int kOut, u32 kVHalf, u32 kPHalf, int kTilesOut, int kBlocks, class Lane>
__device__ __forceinline__ void add_values(float (&o)[kTilesOut][kBlocks][4], const float (&factor)[kTilesOut][2],
                                           const Lane& lanes_p, const u32& shared_v, const int& column_o,
                                           const Thread& thread) {
  constexpr Type kType = S.type == Type::kBf16 ? Type::kBf16 : Type::kFp16;
  constexpr int kStep = S.step;
  using TileV = Tile<kOut>;
  const auto weights = [&](int i, int kk, u32 half) {
    Operand<kType> p;
    ldmatrix(p.hi, lanes_p.at(i * 16, kk) + half);
    return p;
  };
  if constexpr (S.type == Type::kFp32) {
    const auto at = [&](int kk, int j) {
      return shared_v + TileV::offset(thread.lane & 15, column_o / 8 + j * 2 + (thread.lane >> 4)) +
             kk * 16 * TileV::kRowBytes;
    };
    add_values_fp32<kStep / 16, 1>(
        o, factor, [&](int i, int kk) { return weights(i, kk, 0); },
        [&](int i, int kk) { return weights(i, kk, kPHalf); }, at, [&](int kk, int j) { return at(kk, j) + kVHalf; });
  } else {
    each(o, [&](float& x, int i, int, int e) { x *= factor[i][e >> 1]; });
    add_columns<kType, kTilesOut, kBlocks, kStep / 16>(
        o, [&](int i, int kk) { return weights(i, kk, 0); },
        [&](int kk, int j) {
          return shared_v + TileV::offset(kk * 16 + (thread.lane & 15), column_o / 8 + j * 2 + (thread.lane >> 4));
        });
  }
}

template <WideForwardSpec S>
__global__ void __launch_bounds__(S.warps * 32, 1) generic_wide_forward(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  // ---- sizes ----
  constexpr bool kPairs = S.type == Type::kFp32;
  constexpr int kElement = element_bytes(S.type);
  constexpr int kThreads = S.warps * 32;
  constexpr int kRows = wide_forward_rows(S);
  constexpr int kStep = S.step;
  constexpr int kPart = wide_forward_part(S);  // columns of q and k at a time
  constexpr int kParts = (S.d + kPart - 1) / kPart;
  constexpr int kChunks = wide_forward_chunks(S);
  constexpr int kOut = wide_forward_columns(S);  // columns of v and O of this block
  // S: this warp has kTiles row tiles and kKeys keys. O: kTilesOut row tiles and kColumnsOut columns.
  constexpr int kTiles = 1;
  constexpr int kWarpsS = S.warps / S.grid_s;
  constexpr int kKeys = kStep / kWarpsS;
  constexpr int kTilesOut = kRows / S.grid_o / 16;
  constexpr int kColumnsOut = kOut / (S.warps / S.grid_o);
  static_assert(kStep % (kWarpsS * 16) == 0 && kRows % (S.grid_o * 16) == 0 && kColumnsOut % 16 == 0);
  static_assert(kPart % 16 == 0);
  using TileK = Tile<kPart>;  // of Q, too
  using TileV = Tile<kOut>;
  using TileP = Tile<kStep>;
  using Inputs = ScoreInputs<S, false, kRows, kStep, kThreads>;
  // Tiles of pairs: the low part lies behind the high one.
  constexpr u32 kQHalf = kRows * kPart * 2;
  constexpr u32 kKHalf = kStep * kPart * 2;
  constexpr u32 kVHalf = kStep * kOut * 2;
  constexpr u32 kPHalf = kRows * kStep * 2;
  constexpr int kHalves = kPairs ? 2 : 1;

  extern __shared__ __align__(128) unsigned char memory[];
  const u32 shared_q = shared_address(memory);
  const u32 shared_k = shared_q + kQHalf * kHalves;
  const u32 shared_v = shared_k + kKHalf * kHalves;
  const u32 shared_p = shared_v + kVHalf * kHalves;
  const u32 shared_inputs = shared_p + kPHalf * kHalves;
  // Behind everything, O's place included.
  const u32 shared_max = shared_q + wide_forward_shared_bytes(S) - kRows * (kWarpsS + 1) * 4;
  const u32 shared_factor = shared_max + kRows * kWarpsS * 4;
  const Thread thread;
  const int g = thread.g;
  const int t = thread.t;
  const int row_s = thread.warp % S.grid_s * kTiles * 16;  // this warp's places in the tile
  const int warp_s = thread.warp / S.grid_s;
  const int row_o = thread.warp % S.grid_o * kTilesOut * 16;
  const int column_o = thread.warp / S.grid_o * kColumnsOut;

  // ---- which queries and keys ----
  const ForwardBlock<S, kRows, kChunks> where(a);
  const Place& place = where.place;
  const u32 head = where.head;
  const int m0 = where.m0;
  if (m0 >= place.q_len) {
    return;
  }
  const math::Band<int> band = place.band<S>(a);
  const math::Interval<int> steps = where.template steps<kStep>(a, band);

  // ---- copies ----
  const char* const q = static_cast<const char*>(a.q.data) + place.query_rows(a.q.strides, head) * 2;
  const char* const k = static_cast<const char*>(a.k.data) + place.key_rows(a.k.strides, where.head_k(a)) * 2;
  const char* const v = static_cast<const char*>(a.v.data) + place.key_rows(a.v.strides, where.head_k(a)) * 2;
  const i64 q_row = a.q.strides.row * 2;
  const i64 k_row = a.k.strides.row * 2;
  const i64 v_row = a.v.strides.row * 2;
  auto load_q = [&](int part) {
    const int bytes = ((kPairs ? S.d : a.head_dim) - part * kPart) * 2;
    const char* const from = q + m0 * q_row + part * kPart * 2;
    load_tile<TileK, kRows, kThreads>(shared_q, from, q_row, place.q_len - m0, bytes, thread.index);
    if constexpr (kPairs) {
      load_tile<TileK, kRows, kThreads>(shared_q + kQHalf, from + S.d * 2, q_row, place.q_len - m0, bytes,
                                        thread.index);
    }
  };
  auto load_k = [&](int n, int part) {
    const int bytes = ((kPairs ? S.d : a.head_dim) - part * kPart) * 2;
    const char* const from = k + i64(n * kStep) * int(k_row) + part * kPart * 2;
    load_tile<TileK, kStep, kThreads>(shared_k, from, k_row, place.k_len - n * kStep, bytes, thread.index);
    if constexpr (kPairs) {
      load_tile<TileK, kStep, kThreads>(shared_k + kKHalf, from + S.d * 2, k_row, place.k_len - n * kStep, bytes,
                                        thread.index);
    }
  };
  auto load_v = [&](int n) {
    const int bytes = ((kPairs ? S.dv : a.head_dim_v) - where.chunk * kOut) * 2;
    const char* const from = v + i64(n * kStep) * int(v_row) + where.chunk * kOut * 2;
    load_tile<TileV, kStep, kThreads>(shared_v, from, v_row, place.k_len - n * kStep, bytes, thread.index);
    if constexpr (kPairs) {
      load_tile<TileV, kStep, kThreads>(shared_v + kVHalf, from + S.dv * 2, v_row, place.k_len - n * kStep, bytes,
                                        thread.index);
    }
  };
  // What comes with K. Groups of copies alternate: Q, K and inputs | V.
  auto load_step = [&](int n) {
    load_k(n, 0);
    Inputs::load(shared_inputs, a, place, head, m0, n * kStep, thread.index);
  };
  load_q(0);
  if (!steps.empty()) {
    load_step(steps.begin);
    copy_commit();
    load_v(steps.begin);
  }
  copy_commit();

  // ---- what stays in registers ----
  const float scale = where.scale(a);
  const float unit = natural_scores(S) ? math::kLog2E : scale * math::kLog2E;
  Scores<S, false, kTiles> scores(a, place, head, scale, m0 + row_s, g);
  Keep<S, false, kTiles, kKeys / 8> keep;
  keep.start(a, place, head);
  keep.start_rows(m0 + row_s, g);
  float o[kTilesOut][kColumnsOut / 8][4] = {};
  RunningSoftmax<Weights::kByDifference, false, int(kLift<S>)> softmax[kTiles];
  const HalfLane<kPart, kRows> lanes(thread.lane);
  const HalfLane<kPart, kStep> lanes_k(thread.lane, true);
  const typename TileP::Lane lanes_p(shared_p + row_o * TileP::kRowBytes, thread.lane);
  const u32 my_q = shared_q + row_s * TileK::kRowBytes;
  const u32 my_k = shared_k + warp_s * kKeys * TileK::kRowBytes;

  // ---- the loop ----
  for (int n = steps.begin; n < steps.end; ++n) {
    const int n0 = n * kStep;
    const int key0 = n0 + warp_s * kKeys;

    // S = Q K^T
    float s[kTiles][kKeys / 8][4] = {};
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      if (part > 0 || (kParts > 1 && n > steps.begin)) {
        if (part > 0) {
          sync();  // all warps have read the part before
          load_k(n, part);
        }
        load_q(part);
        copy_commit();
        copy_wait<0>();
      } else {
        copy_wait<1>();
      }
      sync();
      add_rows_by_rows<S.type, kPart>(s, my_q, lanes, my_k, lanes_k);
    }

    // Scores, and the maxima of this warp's keys
    scores.of_dots(s);
    scores.template add<Inputs, kStep>(s, thread, shared_inputs, row_s, warp_s * kKeys, m0 + row_s, key0);
    if (n0 + kStep > place.k_len || (S.banded && band.tile(m0, m0 + kRows, n0, n0 + kStep) == math::TileClass::kEdge)) {
      mask_edge<S, false>(s, thread, band, m0 + row_s, key0);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      for (int x = 0; x < 2; ++x) {
        const float largest = largest_of_row(s[i], x, s[i][0][2 * x]);
        if (t == 0) {
          store_shared(shared_max + ((row_s + i * 16 + g + x * 8) * kWarpsS + warp_s) * 4, largest);
        }
      }
    }
    sync();
    if (n + 1 < steps.end) {
      load_step(n + 1);
    }
    copy_commit();

    // P and each row's factor, to shared memory
    if constexpr (S.dropout != DropoutRule::kNone) {
      keep.prepare(thread, m0 + row_s, key0);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      float base[2];
      for (int x = 0; x < 2; ++x) {
        const int row = row_s + i * 16 + g + x * 8;
        float next = softmax[i].top[x];
        for (int w = 0; w < kWarpsS; ++w) {
          next = fmaxf(next, load_shared(shared_max + (row * kWarpsS + w) * 4));
        }
        base[x] = math::reference_of(next);
        const float factor = raise(softmax[i].top[x], softmax[i].sum[x], next, base[x], unit);
        if (t == 0 && warp_s == 0) {
          store_shared(shared_factor + row * 4, factor);
        }
      }
      softmax[i].weigh(s[i], base, unit);
      if constexpr (S.dropout != DropoutRule::kNone) {
        drop(keep, s[i], thread, i, m0 + row_s, key0);
      }
    }
    store_fragment<S.type, kStep>(shared_p, s, thread, row_s, warp_s * (kKeys / 8), 1.f, kPHalf);
    copy_wait<1>();
    sync();

    // O = O * factor + P V
    float factor[kTilesOut][2];
#pragma unroll
    for (int i = 0; i < kTilesOut; ++i) {
      for (int x = 0; x < 2; ++x) {
        factor[i][x] = load_shared(shared_factor + (row_o + i * 16 + g + x * 8) * 4);
      }
    }
    add_values<S, kOut, kVHalf, kPHalf>(o, factor, lanes_p, shared_v, column_o, thread);
    sync();
    if (n + 1 < steps.end) {
      load_v(n + 1);
    }
    copy_commit();
  }
  copy_wait<0>();
  sync();

  // ---- row sums of the warps along the keys, through the place of the maxima; logsumexp ----
  const ForwardBlock<S, kRows, kChunks> here(a);
  const int rows = here.place.q_len - here.m0;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    for (int x = 0; x < 2; ++x) {
      const float mine = quad_sum(softmax[i].sum[x]);
      if (t == 0) {
        store_shared(shared_max + ((row_s + i * 16 + g + x * 8) * kWarpsS + warp_s) * 4, mine);
      }
    }
  }
  sync();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    for (int x = 0; x < 2; ++x) {
      const int r = row_s + i * 16 + g + x * 8;
      float all = 0;
      for (int w = 0; w < kWarpsS; ++w) {
        all += load_shared(shared_max + (r * kWarpsS + w) * 4);
      }
      const auto end = here.finish(a, all, softmax[i].top[x]);
      if (t == 0 && warp_s == 0) {
        store_shared(shared_factor + r * 4, end.factor);
        if (r < rows && here.chunk == 0) {
          here.store_row_end(a, here.m0 + r, end);
        }
      }
    }
  }
  sync();

  // ---- O through shared memory, so that it is written in pieces of 16 bytes ----
  using TileOut = Tile<kOut * kHalves>;
  const float value_scale = here.value_scale(a);
#pragma unroll
  for (int i = 0; i < kTilesOut; ++i) {
    for (int x = 0; x < 2; ++x) {
      const int r = row_o + i * 16 + g + x * 8;
      const float factor = load_shared(shared_factor + r * 4);
      float* part = nullptr;
      if constexpr (S.split) {
        part = here.part_of_out(a, here.m0 + r) + here.chunk * kOut + column_o + t * 2;
      }
      here.template put_row<TileOut>(o[i], x, factor, value_scale, shared_q, r, column_o, part, r < rows,
                                     here.chunk * kOut + column_o, t);
    }
  }
  if constexpr (!S.split) {
    sync();
    const math::Strides& strides = a.out.strides;
    char* const out = static_cast<char*>(a.out.data) + (here.place.query_rows(strides, here.head) +
                                                        here.m0 * strides.row + i64(here.chunk) * kOut * strides.col) *
                                                           kElement;
    store_rows<TileOut, kElement, kRows, kThreads>(out, strides, shared_q, rows, a.out_dim_v - here.chunk * kOut,
                                                   a.vector_stores, thread.index);
  }
}

}  // namespace fovea::cuda
