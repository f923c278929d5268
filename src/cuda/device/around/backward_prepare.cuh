// SPDX-License-Identifier: Apache-2.0
//
// What goes before and after the backward's products.
//
//   backward_prepare   per query: delta = <do, o> - dlse, the logsumexp as the products subtract it, both padded so
//                      that no tile of rows needs another sequence's; partial sums of the sink's gradient; dq_sum set
//                      to zero (not with stores_first: backward_convert takes rows that no block has stored for zero);
//                      numbers that sm90_backward's blocks share (Args::turns, BehindTurns)
//   backward_convert   dq_sum (fp32, in the order of the accumulators) to dq (sm90_backward_parts and sm90_backward
//                      do it, too)
//
// Launches of 256 threads (backward_prepare: kBackwardPrepareThreads), no shared memory to be given. Spec: `type`, `d`
// (convert: fp32's dq_sum has scale in it already), `dv` (prepare: up to 32, or more), `stores_first`, `halves`,
// `turned_dq` (convert: how dq_sum lies), `converted`, `longest_first`. Blocks and what of Args beyond the call's own
// tensors:
//   backward_prepare   batch * heads_q * ceil(limit_q / 128): head_dim_v (of `out`, real), out, grad_out (fp32: both as
//                      the caller gave them), lse, grad_lse, row_lse, row_delta, padded_rows, lse_factor; where wanted:
//                      dq_sum with Spec::d, turns, row_sum (set to zero, too), row_term, sink and sink_sum; fp32:
//                      sizes, whose last part it writes
//   backward_convert   batch * heads_q * ceil(limit_q / kConvertRows): dq_sum, padded_rows, grad_q, out_dim,
//                      vector_stores, scale; stores_first: turns
#pragma once

#include "cuda/device/args.h"
#include "cuda/device/around/backward_reduce.cuh"
#include "cuda/device/around/convert.cuh"
#include "cuda/device/generic/backward_sizes.h"
#include "cuda/device/ptx/sm80.cuh"
#include "cuda/device/spec.h"
#include "cuda/device/tile/tile.cuh"
#include "math/band.h"
#include "math/softmax.h"

namespace fovea::cuda {

// ---- small things ----

// Lengths are looked up, whether they differ or not: it costs nothing here.
constexpr AroundSpec with_lengths() {
  AroundSpec spec;
  spec.ragged = true;
  return spec;
}

// A block's rows: kRows of one head. In 32 bits: divisions of 64 take longer than the rest.
template <int kRows>
struct RowBlock {
  Place place;
  u32 head;
  u32 tiles;  // of a head
  int first;

  // `before`: blocks of the launch that do something else.
  __device__ __forceinline__ explicit RowBlock(const Args& a, u32 before = 0)
      : tiles((u32(a.rows.limit_q) + kRows - 1) / kRows) {
    const u32 block = u32(a.first_block) + block_index() - before;
    const u32 head_of_batch = block / tiles;
    const u32 b = head_of_batch / u32(a.rows.heads_q);
    head = head_of_batch - b * u32(a.rows.heads_q);
    first = int(block - head_of_batch * tiles) * kRows;
    place = Place::make<with_lengths()>(a, b);
  }
};

// ---- before ----

template <Type kType>
__device__ __forceinline__ float element(const char* data, i64 at) {
  if constexpr (kType == Type::kFp32) {
    return reinterpret_cast<const float*>(data)[at];
  } else {
    return low<kType>(reinterpret_cast<const u16*>(data)[at]);
  }
}

// dq of kRowPad queries from `first` on, where no block ever adds: steps that meet no key. With a band they have 64
// or 128 queries.
template <AroundSpec S>
__device__ __forceinline__ void clear_unmet(const Args& a, const Place& place, u32 head, int first) {
  const auto band = place.template band<S>(a);
#pragma unroll 1
  for (int at = first; at < min(first + kRowPad, place.q_len); at += S.converted) {
    const int end = min(at + S.converted, place.q_len);
    if (!band.keys_of_rows(at, end).empty()) {
      continue;
    }
    u16* const to = static_cast<u16*>(a.grad_q.data) + place.query_rows(a.grad_q.strides, head);
#pragma unroll 1
    for (int i = threadIdx.x; i < (end - at) * a.out_dim; i += kBackwardPrepareThreads) {
      to[(at + i / a.out_dim) * a.grad_q.strides.row + i % a.out_dim * a.grad_q.strides.col] = 0;
    }
  }
}

// Where this batch entry stands among all, ordered by their numbers of queries, the largest first.
__device__ __forceinline__ void write_order(const Args& a, const Place& place, float* scratch) {
  int before = 0;
#pragma unroll 1
  for (u32 other = threadIdx.x; other < u32(a.rows.batch()); other += kBackwardPrepareThreads) {
    const int queries = int(a.rows.sequence(other).q_len);
    before += int(queries > place.q_len || (queries == place.q_len && other < place.b));
  }
  const float rank = sum_of_block<kBackwardPrepareThreads>(float(before), scratch);
  if (threadIdx.x == 0) {
    BehindTurns(a).order[int(rank)] = place.b;
  }
}

template <AroundSpec S>
__global__ void __launch_bounds__(kBackwardPrepareThreads, 6) backward_prepare(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  constexpr int kLanes = S.dv <= 32 ? 4 : S.dv <= 64 ? 8 : 16;  // of a row
  constexpr int kThreads = kBackwardPrepareThreads;
  constexpr int kPass = kThreads / kLanes;
  constexpr int kPasses = kRowPad / kPass < 4 ? kRowPad / kPass : 4;  // at once
  constexpr int kRows = kPass * kPasses;
  constexpr int kBytes = S.type == Type::kFp32 ? 4 : 2;
  constexpr Type kOut = S.fp32_results ? Type::kFp32 : S.type;
  constexpr int kOutBytes = kOut == Type::kFp32 ? 4 : 2;
  __shared__ float scratch[8];

  const RowBlock<kRowPad> block(a);
  const Place& place = block.place;
  const i64 first = row_of_head(a, place.b, block.head, place.queries()) + block.first;  // of the padded vectors
  const bool inside = block.first < place.q_len;
  if constexpr (S.longest_first) {
    if (block.head == 0 && block.first == 0) {
      write_order(a, place, scratch);
      sync();
    }
  }

  // Rows kPass apart. All that is read of them is on its way before anything waits: dot products' first 16 bytes, and
  // in a row's first lane its logsumexp.
  const int lane = threadIdx.x % kLanes;
  const int mine = threadIdx.x / kLanes;
  int at_once = 0;  // the first of the rows at once, in the block
  const auto row_of_pass = [&](int pass) { return block.first + at_once + pass * kPass + mine; };
  const i64 out_row = a.out.strides.row * kOutBytes;
  const i64 grad_row = a.grad_out.strides.row * kBytes;
  const char* const out =
      static_cast<const char*>(a.out.data) + place.query_rows(a.out.strides, block.head) * kOutBytes;
  const char* const grad =
      static_cast<const char*>(a.grad_out.data) + place.query_rows(a.grad_out.strides, block.head) * kBytes;
  const bool vectors = kBytes == 2 && kOutBytes == 2 && a.head_dim_v % 8 == 0 && a.out.strides.col == 1 &&
                       a.grad_out.strides.col == 1 &&
                       ((reinterpret_cast<u64>(out) | reinterpret_cast<u64>(grad) | out_row | grad_row) & 15) == 0;
  uint4 outs[kPasses];
  uint4 grads[kPasses];
  // Of this thread's first row at once: products of 64 bits are made once.
  const char* out_at = out + (block.first + mine) * out_row;
  const char* grad_at = grad + (block.first + mine) * grad_row;
  const auto load = [&](int d) {
    const char* from_out = out_at + d * 2;
    const char* from_grad = grad_at + d * 2;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool exists = row_of_pass(pass) < place.q_len && d < a.head_dim_v;
      outs[pass] = exists ? *reinterpret_cast<const uint4*>(from_out) : uint4{};
      grads[pass] = exists ? *reinterpret_cast<const uint4*>(from_grad) : uint4{};
      from_out += kPass * out_row;
      from_grad += kPass * grad_row;
    }
  };
  const i64 lse_row = kPass * a.lse.strides.row;
  const float* lse = static_cast<const float*>(a.lse.data) + place.query_rows(a.lse.strides, block.head) +
                     (block.first + mine) * a.lse.strides.row;
  const float* const grad_lse = static_cast<const float*>(a.grad_lse.data);
  const i64 of_grad_lse = place.query_rows(a.grad_lse.strides, block.head);
  const float sink = a.sink_sum != nullptr ? a.sink[block.head * a.sink_stride] : -kInfinity;
  float of_sink = 0;
  float largest = 0;
#pragma unroll 1
  for (at_once = 0; at_once < kRowPad; at_once += kRows) {
    if (vectors) {
      load(lane * 8);
    }
    float references[kPasses];
    float grads_of_lse[kPasses] = {};
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      references[pass] = kInfinity;
      if (const int row = row_of_pass(pass); lane == 0 && row < place.q_len) {
        references[pass] = math::backward_reference(*lse);
        if (grad_lse != nullptr) {
          grads_of_lse[pass] = grad_lse[of_grad_lse + row * a.grad_lse.strides.row];
        }
      }
      lse += lse_row;
    }

    if (!S.stores_first && at_once == 0 && inside && a.dq_sum != nullptr) {
      float* sum = a.dq_sum + first * S.d;
#pragma unroll 8
      for (int i = threadIdx.x * 4; i < kRowPad * S.d; i += kThreads * 4) {
        store_global(sum + i, {});
      }
    }
    if (at_once == 0 && a.turns != nullptr) {
      if (inside && threadIdx.x < kRowPad / 64) {
        a.turns[1 + turn_of_row(first) + threadIdx.x] = 0;
      }
      if (constexpr int kCount = BehindTurns::kCounters; inside && threadIdx.x < kRowPad / 64 * kCount) {
        BehindTurns(a).parts[turn_of_row(first) * kCount + threadIdx.x] = 0;
      }
      if (a.first_block + blockIdx.x == 0 && threadIdx.x == 0) {
        a.turns[0] = 0;
        if constexpr (S.converted > 0) {
          *BehindTurns(a).taken = 0;
        }
      }
    }
    if constexpr (S.converted > 0) {
      if (at_once == 0 && inside) {
        if (threadIdx.x < kRowPad / 64) {
          BehindTurns(a).added[turn_of_row(first) + threadIdx.x] = 0;
        }
        clear_unmet<S>(a, place, block.head, block.first);
      }
    }
    if (at_once == 0 && a.bias_tickets != nullptr && a.first_block + blockIdx.x == 0 && threadIdx.x < 2) {
      a.bias_tickets[threadIdx.x] = 0;
    }

    // <do, o>
    float sums[kPasses] = {};
    if (vectors) {
      for (int d = lane * 8; d < a.head_dim_v;) {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          sums[pass] += dot8<S.type>(outs[pass], grads[pass]);
        }
        d += kLanes * 8;
        if (d < a.head_dim_v) {
          load(d);
        }
      }
    } else {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const i64 row = opaque(row_of_pass(pass));
#pragma unroll 4
        for (int d = lane; row < place.q_len && d < a.head_dim_v; d += kLanes) {
          sums[pass] += element<kOut>(out + row * out_row, d * a.out.strides.col) *
                        element<S.type>(grad + row * grad_row, d * a.grad_out.strides.col);
        }
      }
    }

#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const i64 at = first + at_once + pass * kPass + mine;
      const float sum = sum_of_lanes<kLanes>(sums[pass]);
      if (lane == 0 && inside) {
        // A dead row's P of 0 would make NaN of what is not finite.
        const float delta = references[pass] == kInfinity ? 0.f : math::delta(sum, grads_of_lse[pass]);
        a.row_lse[at] = references[pass] * a.lse_factor;
        a.row_delta[at] = delta;
        if (a.row_sum != nullptr) {
          a.row_sum[at] = 0;
        }
        if (a.row_term != nullptr) {
          const int row = row_of_pass(pass);
          a.row_term[at] =
              row < place.q_len
                  ? static_cast<const float*>(a.query_term.data)[place.plane(a.query_term.strides, block.head) + row]
                  : -kInfinity;  // no NaN of another term gets into P there
        }
        largest = fmaxf(largest, fabsf(delta));
        if (a.sink_sum != nullptr && row_of_pass(pass) < place.q_len) {
          of_sink += math::grad_sink(sink, references[pass], delta);
        }
      }
    }
    out_at += kRows * out_row;
    grad_at += kRows * grad_row;
  }
  if constexpr (S.type == Type::kFp32) {
    largest = max_of_lanes<32>(largest);
    if (threadIdx.x % 32 == 0) {
      atomicMax(a.sizes + size_place(a.rows, Size::kDelta, place.b, block.head), __float_as_uint(largest));
    }
  }
  if (a.sink_sum != nullptr) {
    const float sum = sum_of_block<kThreads>(of_sink, scratch);
    if (threadIdx.x == 0) {
      a.sink_sum[(block.head * a.rows.batch() + place.b) * block.tiles + block.first / kRowPad] = sum;
    }
  }
}

// ---- after ----

// dq_sum to dq: kConvertRows rows of one head. `before`: blocks of the launch that do something else.
template <auto S>
__device__ __forceinline__ void convert_queries(const Args& a, u32 before) {
  const Thread thread;
  const RowBlock<kConvertRows> block(a, before);
  const Place& place = block.place;
  const i64 first = row_of_head(a, place.b, block.head, place.queries()) + block.first;
  const bool stored = !S.stores_first || (block.first < place.q_len && a.turns[1 + turn_of_row(first)] != 0);
  const i64 to = place.query_rows(a.grad_q.strides, block.head);
#pragma unroll 2
  for (int n = thread.warp; n < kConvertPieces<S>; n += 8) {
    if constexpr (S.turned_dq) {
      const int query = block.first + n / (S.d / 16) * 16;
      const i64 step = first - block.first + query / kTurnedQueries * kTurnedQueries;
      const bool is_stored = !S.stores_first || (query < place.q_len && a.turns[1 + turn_of_row(step)] != 0);
      convert_turned_sums<S, 1>(thread, a, first, is_stored, to, block.first, place.q_len, n);
      continue;
    }
    convert_sums<S, 1>(thread, a, a.dq_sum + first * S.d, stored, to, block.first, place.q_len, a.vector_stores, n);
  }
}

template <AroundSpec S>
__global__ void __launch_bounds__(256) backward_convert(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  convert_queries<S>(a, 0);
}

}  // namespace fovea::cuda
