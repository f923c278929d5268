// SPDX-License-Identifier: Apache-2.0
//
// What is made of the caller's tensors before (and after) the main kernels: each of these reads or writes every number
// once and is bound by memory.
//
//     prepare_pack    rows that cannot be copied by 16 bytes, into rows that can
//     prepare_unpack  and back
//     prepare_mask    bools with queries and keys, into bits
//     prepare_term    the sum of biases and masks that are broadcast over queries (or keys), in fp32
//     prepare_clear, prepare_measure, prepare_split
//                     fp32 into pairs of fp16: the largest number of each head, by which it is then scaled
//
// Grids are of any size: every kernel walks over its work with a stride.
#ifndef FOVEA_CUDA_DEVICE_PREPARE_CUH
#define FOVEA_CUDA_DEVICE_PREPARE_CUH

#include "args.h"
#include "prepare_args.h"
#include "spec.h"
#include "tile.cuh"

namespace fovea::cuda {

inline constexpr int kPrepareThreads = 256;

__device__ __forceinline__ i64 prepare_thread() { return i64(blockIdx.x) * kPrepareThreads + threadIdx.x; }
__device__ __forceinline__ i64 prepare_stride() { return i64(gridDim.x) * kPrepareThreads; }

// Coordinates of a row of a box; what is broadcast has index 0.
struct BoxRow {
  i64 batch1, batch2, head, row;
};
__device__ __forceinline__ BoxRow box_row(const Box& box, i64 number) {
  BoxRow at;
  at.row = number % box.rows;
  number /= box.rows;
  at.head = number % box.heads;
  number /= box.heads;
  at.batch2 = number % box.batch2;
  at.batch1 = number / box.batch2;
  return at;
}
__device__ __forceinline__ i64 offset_of(const math::Strides& strides, const BoxRow& at) {
  return at.batch1 * strides.batch1 + at.batch2 * strides.batch2 + at.head * strides.head + at.row * strides.row;
}

__device__ __forceinline__ float float_of(const void* data, i64 index, BiasTile type) {
  if (type == BiasTile::kFp32) {
    return static_cast<const float*>(data)[index];
  }
  const unsigned short bits = static_cast<const unsigned short*>(data)[index];
  if (type == BiasTile::kBf16) {
    return __uint_as_float(u32(bits) << 16);
  }
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Eight elements a thread; S.type says how large they are: kFp32 is 4 bytes, anything else 2.
template <Spec S>
__global__ void __launch_bounds__(kPrepareThreads) prepare_pack(const __grid_constant__ PackArgs args) {
  begin_kernel<S.arch>();
  constexpr int kVectors = S.type == Type::kFp32 ? 2 : 1;
  constexpr int kElements = 8;
  const PackJob& job = args.jobs[blockIdx.y];
  const Box& box = job.box;
  const i64 pieces = (box.width + kElements - 1) / kElements;
  const i64 total = box.all_rows() * pieces;
  const i64 column_stride = job.from.strides.col;
  for (i64 n = prepare_thread(); n < total; n += prepare_stride()) {
    const i64 row = n / pieces;
    const i64 first = n % pieces * kElements;
    const i64 from = offset_of(job.from.strides, box_row(box, row)) + first * column_stride;
    u32 words[kVectors * 4];
    if constexpr (S.type == Type::kFp32) {
      const u32* data = static_cast<const u32*>(job.from.data) + from;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        words[i] = first + i < job.columns ? data[i * column_stride] : 0;
      }
    } else {
      const unsigned short* data = static_cast<const unsigned short*>(job.from.data) + from;
#pragma unroll
      for (int i = 0; i < kElements / 2; ++i) {
        const u32 low = first + 2 * i < job.columns ? data[2 * i * column_stride] : 0;
        const u32 high = first + 2 * i + 1 < job.columns ? data[(2 * i + 1) * column_stride] : 0;
        words[i] = low | high << 16;
      }
    }
    uint4* to = reinterpret_cast<uint4*>(static_cast<u32*>(job.to) + (row * box.width + first) / 2 * kVectors);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i == 0 || first + 4 * i < box.width) {
        to[i] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
      }
    }
  }
}

// A warp takes 256 numbers of a row, a lane every 32nd: neighbours are written at once, wherever rows begin.
template <Spec S>
__global__ void __launch_bounds__(kPrepareThreads) prepare_unpack(const __grid_constant__ UnpackArgs args) {
  begin_kernel<S.arch>();
  constexpr int kEach = 8;
  const Box& box = args.box;
  const int lane = threadIdx.x % 32;
  const i64 pieces = (args.columns + 32 * kEach - 1) / (32 * kEach);
  const i64 total = box.all_rows() * pieces;
  for (i64 n = prepare_thread() / 32; n < total; n += prepare_stride() / 32) {
    const i64 row = n / pieces;
    const i64 first = n % pieces * (32 * kEach) + lane;
    const unsigned short* const from = args.from + row * box.width + first;
    unsigned short* const to =
        static_cast<unsigned short*>(args.to) + offset_of(args.strides, box_row(box, row)) + first * args.strides.col;
    unsigned short x[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      x[i] = first + 32 * i < args.columns ? from[32 * i] : 0;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (first + 32 * i < args.columns) {
        to[32 * i * args.strides.col] = x[i];
      }
    }
  }
}

// A warp makes 32 words of a row: 1024 keys.
template <Spec S>
__global__ void __launch_bounds__(kPrepareThreads) prepare_mask(const __grid_constant__ MaskArgs args) {
  begin_kernel<S.arch>();
  const Box& box = args.box;
  const int lane = threadIdx.x & 31;
  const i64 pieces = (box.width + 31) / 32;
  const i64 total = box.all_rows() * pieces;
  const unsigned char* data = static_cast<const unsigned char*>(args.from.data);
  for (i64 n = prepare_thread() / 32; n < total; n += prepare_stride() / 32) {
    const i64 row = n / pieces;
    const i64 first = n % pieces * 32;
    const i64 from = offset_of(args.from.strides, box_row(box, row));
    u32 mine = 0;
    for (int word = 0; word < 32; ++word) {
      const i64 key = (first + word) * 32 + lane;
      const u32 bits = __ballot_sync(~0u, key < args.columns && data[from + key * args.from.strides.col] != 0);
      if (lane == word) {
        mine = bits;
      }
    }
    if (first + lane < box.width) {
      args.to[row * box.width + first + lane] = mine;
    }
  }
}

template <Spec S>
__global__ void __launch_bounds__(kPrepareThreads) prepare_term(const __grid_constant__ TermArgs args) {
  begin_kernel<S.arch>();
  const Box& box = args.box;
  const i64 total = box.count();
  for (i64 n = prepare_thread(); n < total; n += prepare_stride()) {
    const BoxRow at = box_row(box, n / box.width);
    const i64 col = n % box.width;
    float sum = -kInfinity;
    if (col < args.columns) {
      const unsigned char* mask = static_cast<const unsigned char*>(args.mask.data);
      if (mask == nullptr || mask[offset_of(args.mask.strides, at) + col * args.mask.strides.col] != 0) {
        sum = 0;
        for (int i = 0; i < args.count; ++i) {
          const TermSource& source = args.biases[i];
          sum += float_of(source.from.data, offset_of(source.from.strides, at) + col * source.from.strides.col,
                          BiasTile(source.type));
        }
      }
    }
    args.to[n] = sum;
  }
}

// ---- fp32 as pairs of fp16 ----

template <Spec S>
__global__ void __launch_bounds__(kPrepareThreads) prepare_clear(const __grid_constant__ PairArgs args) {
  begin_kernel<S.arch>();
  const i64 total = size_place(args.rows, Size::kCount, 0, 0);
  for (i64 n = prepare_thread(); n < total; n += prepare_stride()) {
    args.sizes[n] = 0;
  }
}

// The rows of one of q, k, v, do, head by head: `number` counts pieces of kRows rows.
template <int kRows>
struct PairRows {
  i64 b, head, first, end, begin;

  static __device__ i64 pieces(const math::Rows& rows, bool of_keys) {
    const i64 limit = of_keys ? rows.limit_k : rows.limit_q;
    return rows.batch() * (of_keys ? rows.heads_k : rows.heads_q) * ((limit + kRows - 1) / kRows);
  }
  static __device__ PairRows make(const math::Rows& rows, bool of_keys, i64 number) {
    const i64 pieces = ((of_keys ? rows.limit_k : rows.limit_q) + kRows - 1) / kRows;
    const i64 heads = of_keys ? rows.heads_k : rows.heads_q;
    PairRows at;
    at.first = number % pieces * kRows;
    at.head = number / pieces % heads;
    at.b = number / pieces / heads;
    const math::Sequence sequence = rows.sequence(at.b);
    at.begin = of_keys ? sequence.k_begin : sequence.q_begin;
    at.end = math::min(at.first + kRows, of_keys ? sequence.k_len : sequence.q_len);
    return at;
  }
};

// A warp a row. What is not finite is left to itself: the scale is that of the rest.
template <Spec S>
__global__ void __launch_bounds__(kPrepareThreads) prepare_measure(const __grid_constant__ PairArgs args) {
  begin_kernel<S.arch>();
  constexpr int kRows = 64;
  const Size which = Size(blockIdx.y);
  const PairJob& job = args.jobs[blockIdx.y];
  const bool of_keys = which == Size::kK || which == Size::kV;
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const i64 pieces = PairRows<kRows>::pieces(args.rows, of_keys);
  for (i64 n = blockIdx.x; n < pieces; n += gridDim.x) {
    const auto at = PairRows<kRows>::make(args.rows, of_keys, n);
    const float* data =
        static_cast<const float*>(job.from.data) + args.rows.offset(job.from.strides, at.b, at.head, at.begin);
    float largest = 0;
    float norm = 0;
    for (i64 row = at.first + warp; row < at.end; row += kPrepareThreads / 32) {
      float square = 0;
      for (i64 column = lane; column < job.columns; column += 32) {
        const float size = fabsf(data[row * job.from.strides.row + column * job.from.strides.col]);
        if (size < kInfinity) {
          largest = fmaxf(largest, size);
          square += size * size;
        }
      }
      norm = fmaxf(norm, sum_of_lanes<32>(square));
    }
    largest = max_of_lanes<32>(largest);
    if (lane == 0) {
      atomicMax(args.sizes + size_place(args.rows, which, at.b, at.head), __float_as_uint(largest));
      if (which == Size::kV || which == Size::kGradOut) {
        const Size of_row = which == Size::kV ? Size::kRowOfV : Size::kRowOfGradOut;
        constexpr float kRoundedUp = 1.0001f;
        atomicMax(args.sizes + size_place(args.rows, of_row, at.b, at.head),
                  __float_as_uint(fminf(sqrtf(norm) * kRoundedUp, 3.0e38f)));
      }
    }
  }
}

// Four elements a thread.
template <Spec S>
__global__ void __launch_bounds__(kPrepareThreads) prepare_split(const __grid_constant__ PairArgs args) {
  begin_kernel<S.arch>();
  constexpr int kRows = 16;
  constexpr int kElements = 4;
  const Size which = Size(blockIdx.y);
  const PairJob& job = args.jobs[blockIdx.y];
  const bool of_keys = which == Size::kK || which == Size::kV;
  const int quads = static_cast<int>(job.width) / kElements;
  const i64 stride = job.from.strides.col;
  const bool vectors = stride == 1 && job.columns % kElements == 0 && job.from.strides.row % kElements == 0;
  const i64 pieces = PairRows<kRows>::pieces(args.rows, of_keys);
  for (i64 n = blockIdx.x; n < pieces; n += gridDim.x) {
    const auto at = PairRows<kRows>::make(args.rows, of_keys, n);
    const float* data =
        static_cast<const float*>(job.from.data) + args.rows.offset(job.from.strides, at.b, at.head, at.begin);
    unsigned short* to = job.to + args.rows.offset(job.strides, at.b, at.head, at.begin);
    const bool aligned = vectors && (reinterpret_cast<u64>(data) & 15) == 0;
    const float factor = power_of_two(scale_exponent(args.sizes[size_place(args.rows, which, at.b, at.head)]));
    for (int i = threadIdx.x; i < kRows * quads; i += kPrepareThreads) {
      const i64 row = at.first + i / quads;
      const int column = i % quads * kElements;
      if (row >= at.end) {
        break;
      }
      const float* from = data + row * job.from.strides.row + column * stride;
      float4 x = {};
      if (aligned && column < job.columns) {
        x = *reinterpret_cast<const float4*>(from);
      } else {
        x.x = column < job.columns ? from[0] : 0;
        x.y = column + 1 < job.columns ? from[stride] : 0;
        x.z = column + 2 < job.columns ? from[2 * stride] : 0;
        x.w = column + 3 < job.columns ? from[3 * stride] : 0;
      }
      uint2 high;
      uint2 low;
      split(x.x * factor, x.y * factor, high.x, low.x);
      split(x.z * factor, x.w * factor, high.y, low.y);
      unsigned short* place = to + row * job.strides.row + column;
      *reinterpret_cast<uint2*>(place) = high;
      *reinterpret_cast<uint2*>(place + job.width) = low;
    }
  }
}

}  // namespace fovea::cuda

#endif  // FOVEA_CUDA_DEVICE_PREPARE_CUH
