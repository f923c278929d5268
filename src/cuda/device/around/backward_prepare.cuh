// SPDX-License-Identifier: Apache-2.0
//
// What goes before and after the backward's products.
//
//   backward_prepare   per query: delta = <do, o> - dlse, the logsumexp as the products subtract it, both padded so
//                      that tiles of rows never cross a sequence; partial sums of the sink's gradient; dq_sum set to
//                      zero (with stores_first not: rows that no block has stored are zero to backward_convert)
//   backward_convert   dq_sum (fp32, in the order of the accumulators) to dq (sm90_backward_parts does it, too)
//
// Launches of 256 threads (backward_prepare: kBackwardPrepareThreads), no shared memory to be given. Spec: `type`, `d`
// (convert: fp32's dq_sum has scale in it already), `dv` (prepare: up to 32, or more), `stores_first`, `same_step`
// (convert: how dq_sum lies). Blocks and what of Args beyond the call's own tensors:
//   backward_prepare   batch * heads_q * ceil(limit_q / 128): head_dim_v (of `out`, real), out, grad_out (fp32: both as
//                      the caller gave them), lse, grad_lse, row_lse, row_delta, padded_rows, lse_factor; where wanted:
//                      dq_sum with Spec::d, turns, row_sum (set to zero, too), row_term, sink and sink_sum; fp32:
//                      sizes, whose last part it writes
//   backward_convert   batch * heads_q * ceil(limit_q / kConvertRows): dq_sum, padded_rows, grad_q, out_dim,
//                      vector_stores, scale; stores_first: turns
#ifndef FOVEA_CUDA_DEVICE_AROUND_BACKWARD_PREPARE_CUH
#define FOVEA_CUDA_DEVICE_AROUND_BACKWARD_PREPARE_CUH

#include "cuda/device/args.h"
#include "cuda/device/around/backward_reduce.cuh"
#include "cuda/device/generic/backward_sizes.h"
#include "cuda/device/ptx/sm80.cuh"
#include "cuda/device/spec.h"
#include "cuda/device/tile/tile.cuh"
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

// Element `index` of four, which is known at run time only.
__device__ __forceinline__ u32 pick(const u32 (&x)[4], int index) {
  const u32 low = (index & 1) != 0 ? x[1] : x[0];
  const u32 high = (index & 1) != 0 ? x[3] : x[2];
  return (index & 2) != 0 ? high : low;
}

// ---- before ----

template <Type kType>
__device__ __forceinline__ float dot8(const uint4& x, const uint4& y) {
  const u32 xs[4] = {x.x, x.y, x.z, x.w};
  const u32 ys[4] = {y.x, y.y, y.z, y.w};
  float sum = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    sum += low<kType>(xs[e]) * low<kType>(ys[e]) + high<kType>(xs[e]) * high<kType>(ys[e]);
  }
  return sum;
}

template <auto S>
__device__ __forceinline__ float element(const char* data, i64 at) {
  if constexpr (S.type == Type::kFp32) {
    return reinterpret_cast<const float*>(data)[at];
  } else {
    return low<S.type>(reinterpret_cast<const u16*>(data)[at]);
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
  __shared__ float scratch[8];

  const RowBlock<kRowPad> block(a);
  const Place& place = block.place;
  const i64 first = row_of_head(a, place.b, block.head, place.queries()) + block.first;  // of the padded vectors
  const bool inside = block.first < place.q_len;

  // Rows kPass apart. All that is read of them is on its way before anything waits: dot products' first 16 bytes, and
  // in a row's first lane its logsumexp.
  const int lane = threadIdx.x % kLanes;
  const int mine = threadIdx.x / kLanes;
  int at_once = 0;  // the first of the rows at once, in the block
  const auto row_of_pass = [&](int pass) { return block.first + at_once + pass * kPass + mine; };
  const i64 out_row = a.out.strides.row * kBytes;
  const i64 grad_row = a.grad_out.strides.row * kBytes;
  const char* const out = static_cast<const char*>(a.out.data) + place.query_rows(a.out.strides, block.head) * kBytes;
  const char* const grad =
      static_cast<const char*>(a.grad_out.data) + place.query_rows(a.grad_out.strides, block.head) * kBytes;
  const bool vectors = kBytes == 2 && a.head_dim_v % 8 == 0 && a.out.strides.col == 1 && a.grad_out.strides.col == 1 &&
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
        a.turns[1 + first / 64 + threadIdx.x] = 0;
      }
      if (a.first_block + blockIdx.x == 0 && threadIdx.x == 0) {
        a.turns[0] = 0;
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
          sums[pass] += element<S>(out + row * out_row, d * a.out.strides.col) *
                        element<S>(grad + row * grad_row, d * a.grad_out.strides.col);
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
                  : 0.f;
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

// Sums in fp32 lie as accumulators: of each 16 x 8 block, lane by lane the four values of rows g, g + 8 of lane 4 g +
// t, columns 2t, 2t + 1. A warp's 16 x 16 of them, two such blocks, go to rows `row` and row + 8 of a result, from
// `column` on; `at` is where its row 0 lies.
template <Type kType>
__device__ __forceinline__ void store_sums(const Thread& thread, const float4 (&x)[2], const Tensor& result, i64 at,
                                           int row, int column, int rows, int columns, bool vectors) {
  if (kType != Type::kFp32 && vectors) {
    // Four pieces of 16 bytes, block j of row g + 8 half: lane t gets the one with 2 j + half = t.
    const u32 pieces[4] = {pack<kType>(x[0].x, x[0].y), pack<kType>(x[0].z, x[0].w), pack<kType>(x[1].x, x[1].y),
                           pack<kType>(x[1].z, x[1].w)};
    u32 words[4] = {};
#pragma unroll
    for (int other = 0; other < 4; ++other) {
      const u32 received = __shfl_xor_sync(~0u, pick(pieces, thread.t ^ other), other);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        words[t] = (thread.t ^ other) == t ? received : words[t];
      }
    }
    const int at_row = row + (thread.t & 1) * 8;
    const int at_column = column + (thread.t >> 1) * 8;
    if (at_row < rows && at_column < columns) {
      store_global(static_cast<u16*>(result.data) + at + at_row * result.strides.row + at_column,
                   {words[0], words[1], words[2], words[3]});
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at_row = row + half * 8;
      const int at_column = column + j * 8 + thread.t * 2;
      const i64 to = at + at_row * result.strides.row;
      const float2 pair = half == 0 ? float2{x[j].x, x[j].y} : float2{x[j].z, x[j].w};
      if (at_row >= rows) {
        continue;
      }
      if (kType == Type::kFp32 && vectors && at_column < columns) {
        *reinterpret_cast<float2*>(static_cast<float*>(result.data) + to + at_column) = pair;
        continue;
      }
      constexpr BiasTile kAs = kType == Type::kBf16   ? BiasTile::kBf16
                               : kType == Type::kFp16 ? BiasTile::kFp16
                                                      : BiasTile::kFp32;
      if (at_column < columns) {
        store_element(result.data, to + at_column * result.strides.col, kAs, pair.x);
      }
      if (at_column + 1 < columns) {
        store_element(result.data, to + (at_column + 1) * result.strides.col, kAs, pair.y);
      }
    }
  }
}

// dq_sum to dq: kConvertRows rows of one head. `before`: blocks of the launch that do something else.
template <auto S>
__device__ __forceinline__ void convert_queries(const Args& a, u32 before) {
  constexpr int kPairs = S.d / 16;  // of blocks, in 16 rows
  const Thread thread;
  const RowBlock<kConvertRows> block(a, before);
  const Place& place = block.place;
  const i64 first = row_of_head(a, place.b, block.head, place.queries()) + block.first;
  const float* const sums = a.dq_sum + first * S.d + thread.lane * 4;
  const bool stored = !S.stores_first || (block.first < place.q_len && a.turns[1 + first / kConvertRows] != 0);
  const i64 to = place.query_rows(a.grad_q.strides, block.head);
  const float scale = S.type == Type::kFp32 ? 1.f : a.scale;
#pragma unroll 2
  for (int n = thread.warp; n < kConvertRows / 16 * kPairs; n += 8) {
    const int row = block.first + n / kPairs * 16 + thread.g;
    const int column = n % kPairs * 16;
    if (row - thread.g >= place.q_len || column >= a.out_dim) {
      continue;
    }
    float4 x[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      // same_step: the left half of the columns of all rows, then the right one
      constexpr int kHalf = kPairs / 2;
      const int place_of =
          S.same_step ? (n % kPairs / kHalf * (kConvertRows / 16) + n / kPairs) * kHalf + n % kHalf : n;
      x[j] = stored ? *reinterpret_cast<const float4*>(sums + (place_of * 2 + j) * 128) : float4{};
      x[j] = {x[j].x * scale, x[j].y * scale, x[j].z * scale, x[j].w * scale};
    }
    store_sums<S.type>(thread, x, a.grad_q, to, row, column, place.q_len, a.out_dim, a.vector_stores);
  }
}

template <AroundSpec S>
__global__ void __launch_bounds__(256) backward_convert(const __grid_constant__ Args a) {
  begin_kernel<S.arch>();
  convert_queries<S>(a, 0);
}

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_AROUND_BACKWARD_PREPARE_CUH
