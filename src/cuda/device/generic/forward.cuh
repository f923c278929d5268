// SPDX-License-Identifier: Apache-2.0
//
// generic_forward: o = softmax(scores of q k^T) v for head dimensions up to 256, by mma.sync and cp.async.
//
// A block owns warps * tiles * 16 queries of one head; each of its warps owns `tiles` row tiles of 16 and shares with
// the others nothing but K, V and what the scores need. That of the next step is copied by cp.async while this step
// computes, with one barrier a step:
//
//     wait for step n | barrier | start copies of n + 1 | S = Q K^T | scores, softmax | O += P V
//
// P goes from the accumulators of S to the A operand of O without leaving the registers.
//
// Under a band the loop covers the keys that any row of the block meets, longest tiles first, and a warp skips steps
// that none of its rows meets. With Spec::split a block takes a part of the keys and leaves O and logsumexp in fp32
// for generic_combine.
//
// fp32 travels as pairs of fp16, each product three times (tile/products.cuh). The tensor core truncates as it adds, so
// the small products go first and no chain is longer than a step: O += P V is added outside of it.
#pragma once

#include "cuda/device/score/mask_edge.cuh"
#include "cuda/device/score/softmax.cuh"
#include "cuda/device/tile/products.cuh"
#include "cuda/device/work/forward_block.cuh"

namespace fovea::cuda {

// Of one row tile.
template <auto S>
using Softmax = RunningSoftmax<S.type == Type::kFp32 ? Weights::kByDifference : Weights::kFused, S.lazy, int(kLift<S>)>;

template <ForwardSpec S>
__global__ void __launch_bounds__(S.warps * 32, S.ctas) generic_forward(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  // ---- sizes ----
  constexpr bool kPairs = S.type == Type::kFp32;
  constexpr int kWide = kPairs ? 2 : 1;  // numbers of 16 bits for a number
  constexpr int kTiles = S.tiles;
  constexpr int kThreads = S.warps * 32;
  constexpr int kRows = forward_rows(S);
  constexpr int kStep = S.step;
  constexpr int kColumns = kStep / 8;
  constexpr int kColumnsOut = S.dv / 8;
  constexpr int kElement = element_bytes(S.type);
  constexpr int kWidest = S.d > S.dv ? S.d : S.dv;
  using TileK = Tile<S.d * kWide>;  // of Q, too
  using TileV = Tile<S.dv * kWide>;
  using Inputs = ScoreInputs<S, false, kRows, kStep, kThreads>;
  constexpr u32 kQBytes = kRows * kWidest * kElement;
  constexpr u32 kKBytes = kStep * S.d * kElement;
  constexpr u32 kVBytes = kStep * S.dv * kElement;
  constexpr u32 kStageBytes = kKBytes + kVBytes + Inputs::kBytes;
  static_assert(kQBytes + 2 * kStageBytes == forward_shared_bytes(S));
  static_assert(S.d % 16 == 0 && S.dv % 16 == 0 && S.d <= 256 && S.dv <= 256 && kStep % 16 == 0);
  static_assert(!kPairs || (!S.resident && !S.lazy));

  extern __shared__ __align__(128) unsigned char memory[];
  const u32 shared_q = shared_address(memory);
  const u32 stage0 = shared_q + kQBytes;
  const Thread thread;
  const int g = thread.g;
  const int t = thread.t;

  // ---- which queries ----
  const ForwardBlock<S, kRows> where(a);
  const Place& place = where.place;
  const u32 head = where.head;
  const u32 head_k = where.head_k(a);
  const int m0 = where.m0;
  const int row0 = m0 + thread.warp * kTiles * 16;
  if (m0 >= place.q_len) {
    return;
  }

  // ---- which keys: those that any row of the block meets ----
  const math::Band<int> band = place.band<S>(a);
  const math::Interval<int> steps = where.template steps<kStep>(a, band);
  const int first = steps.begin;
  const int last = steps.end;

  // ---- copies ----
  const char* const k = static_cast<const char*>(a.k.data) + place.key_rows(a.k.strides, head_k) * 2;
  const char* const v = static_cast<const char*>(a.v.data) + place.key_rows(a.v.strides, head_k) * 2;
  const i64 k_row = a.k.strides.row * 2;
  const i64 v_row = a.v.strides.row * 2;
  const int bytes_k = kPairs ? S.d * 4 : a.head_dim * 2;
  const int bytes_v = kPairs ? S.dv * 4 : a.head_dim_v * 2;
  auto load = [&](int n) {
    const u32 to = stage0 + n % 2 * kStageBytes;
    const int n0 = n * kStep;
    load_tile<TileK, kStep, kThreads>(to, k + i64(n0) * int(k_row), k_row, place.k_len - n0, bytes_k, thread.index);
    load_tile<TileV, kStep, kThreads>(to + kKBytes, v + i64(n0) * int(v_row), v_row, place.k_len - n0, bytes_v,
                                      thread.index);
    Inputs::load(to + kKBytes + kVBytes, a, place, head, m0, n0, thread.index);
  };
  {
    const i64 q_row = a.q.strides.row * 2;
    const char* const q = static_cast<const char*>(a.q.data) + place.query_rows(a.q.strides, head) * 2;
    load_tile<TileK, kRows, kThreads>(shared_q, q + m0 * q_row, q_row, place.q_len - m0, bytes_k, thread.index);
  }
  if (first < last) {
    load(first);
  }
  copy_commit();

  // ---- what stays in registers ----
  const float scale = where.scale(a);
  const float unit = natural_scores(S) ? math::kLog2E : scale * math::kLog2E;
  Scores<S, false, kTiles> scores(a, place, head, scale, row0, g);
  Keep<S, false, kTiles, kColumns> keep;
  keep.start(a, place, head);
  keep.start_rows(row0, g);
  float o[kTiles][kColumnsOut][4] = {};
  Softmax<S> softmax[kTiles];
  const typename TileK::Lane lanes(0, thread.lane);
  const typename TileK::Lane lanes_k(0, thread.lane, true);
  const typename TileV::Lane lanes_v(0, thread.lane);
  const u32 my_q = shared_q + thread.warp * kTiles * 16 * TileK::kRowBytes;
  u32 resident[S.resident ? S.d / 16 : 1][kTiles][4];

  // ---- the loop ----
  for (int n = first; n < last; ++n) {
    copy_wait<0>();
    sync();
    if (n + 1 < last) {
      load(n + 1);
    }
    copy_commit();
    if constexpr (S.resident) {
      if (n == first) {
        for (int i = 0; i < kTiles; ++i) {
          for (int kk = 0; kk < S.d / 16; ++kk) {
            ldmatrix(resident[kk][i], my_q + lanes.at(i * 16, kk));
          }
        }
      }
    }
    const int n0 = n * kStep;
    // What this warp's rows meet of the step; asked again below, since it costs less than a register.
    const auto tile_class = [&] {
      const int row = opaque(row0);
      return band.tile(row, row + kTiles * 16, n0, n0 + kStep);
    };
    if (S.banded && tile_class() == math::TileClass::kEmpty) {
      continue;
    }
    const u32 shared_k = stage0 + n % 2 * kStageBytes;
    const u32 shared_v = shared_k + kKBytes;
    const math::TileClass masked =
        scores.template classify<Inputs, kStep>(thread, shared_v + kVBytes, thread.warp * kTiles * 16);
    if ((S.mask || S.key_mask) && masked == math::TileClass::kEmpty) {
      continue;
    }
    if constexpr (S.dropout != DropoutRule::kNone) {
      keep.prepare(thread, row0, n0);
    }

    float s[kTiles][kColumns][4] = {};
    if constexpr (S.resident) {
#pragma unroll
      for (int kk = 0; kk < S.d / 16; ++kk) {
        add_block<S.type>(s, resident[kk], shared_k, lanes_k, kk);
      }
    } else {
      add_rows_by_rows<S.type, S.d>(s, my_q, lanes, shared_k, lanes_k);
    }
    scores.of_dots(s);
    scores.template add<Inputs, kStep>(s, thread, shared_v + kVBytes, thread.warp * kTiles * 16, 0, row0, n0,
                                       masked != math::TileClass::kFull);
    if (n0 + kStep > place.k_len || (S.banded && tile_class() == math::TileClass::kEdge)) {
      mask_edge<S, false>(s, thread, band, row0, n0);
    }

    float factor[kTiles][2];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (softmax[i].step(s[i], unit, factor[i]) && !kPairs) {
        each(o[i], [&](float& x, int, int e) { x *= factor[i][e >> 1]; });
      }
      if constexpr (S.dropout != DropoutRule::kNone) {
        drop(keep, s[i], thread, i, row0, n0);
      }
    }
    if constexpr (kPairs) {
      constexpr int kAtOnce = kColumnsOut < 8 ? kColumnsOut / 2 : 4;
      Operand<Type::kFp16> high_p[kTiles][kColumns / 2], low_p[kTiles][kColumns / 2];
#pragma unroll
      for (int kk = 0; kk < kColumns / 2; ++kk) {
        for (int i = 0; i < kTiles; ++i) {
          operand_pair(high_p[i][kk].hi, low_p[i][kk].hi, s[i], kk);
        }
      }
      add_values_fp32<kColumns / 2, kAtOnce>(
          o, factor, [&](int i, int kk) { return high_p[i][kk]; }, [&](int i, int kk) { return low_p[i][kk]; },
          [&](int kk, int j) { return shared_v + lanes_v.at(kk * 16, j); },
          [&](int kk, int j) { return shared_v + lanes_v.at(kk * 16, kColumnsOut / 2 + j); });
    } else {
      const auto weights = [&](int i, int kk) {
        Operand<S.type> p;
        operand<S.type>(p.hi, s[i], kk);
        return p;
      };
      add_columns<S.type, kTiles, kColumnsOut, kColumns / 2>(
          o, weights, [&](int kk, int j) { return shared_v + lanes_v.at(kk * 16, j); });
    }
  }
  copy_wait<0>();
  if (first >= last || TileK::kRowBytes != S.dv * kElement) {
    sync();  // the place of Q is written now: all copies are here, and other warps' rows are read
  }

  // ---- normalise; O through shared memory, so that it is written in pieces of 16 bytes ----
  using TileOut = Tile<S.dv * kWide>;
  const u32 my_out = shared_q + thread.warp * kTiles * 16 * TileOut::kRowBytes;
  const ForwardBlock<S, kRows> here(a);  // again: none of it stayed in registers
  const int out_row0 = here.m0 + thread.warp * kTiles * 16;
  const int rows = here.place.q_len - out_row0;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int r = i * 16 + g + x * 8;
      const int row = out_row0 + r;
      const auto end = here.finish(a, quad_sum(softmax[i].sum[x]), softmax[i].top[x]);
      const float value_scale = here.value_scale(a);
      if (S.split && r >= rows) {
        continue;
      }
      if (t == 0 && r < rows) {
        here.store_row_end(a, row, end);
      }
      float* part = nullptr;
      if constexpr (S.split) {
        part = here.part_of_out(a, row) + t * 2;
      }
      here.template put_row<TileOut>(o[i], x, end.factor, value_scale, my_out, r, 0, part, true, 0, t);
    }
  }
  if constexpr (!S.split) {
    __syncwarp();
    char* const out = static_cast<char*>(a.out.data) +
                      (here.place.query_rows(a.out.strides, here.head) + out_row0 * a.out.strides.row) * kElement;
    store_rows<TileOut, kElement, kTiles * 16>(out, a.out.strides, my_out, rows, a.out_dim_v, a.vector_stores,
                                               thread.lane);
  }
}

}  // namespace fovea::cuda
