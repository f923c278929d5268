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
#pragma once

#include "cuda/device/args.h"
#include "cuda/device/around/prepare_args.h"
#include "cuda/device/spec.h"
#include "cuda/device/tile/tile.cuh"

namespace fovea::cuda {

inline constexpr int kPrepareThreads = 256;

__device__ __forceinline__ i64 prepare_thread() { return i64(blockIdx.x) * kPrepareThreads + threadIdx.x; }
__device__ __forceinline__ i64 prepare_stride() { return i64(gridDim.x) * kPrepareThreads; }

// Coordinates of a row of a box; what is broadcast has index 0.
struct BoxRow {
  i64 batch1, batch2, head, row;
};
// kIndex: 32 bits where numbers have no more, since divisions of 64 may take longer than a copy.
template <class kIndex>
__device__ __forceinline__ BoxRow box_row(const Box& box, kIndex number) {
  BoxRow at;
  at.row = i64(number % kIndex(box.rows));
  number /= kIndex(box.rows);
  at.head = i64(number % kIndex(box.heads));
  number /= kIndex(box.heads);
  at.batch2 = i64(number % kIndex(box.batch2));
  at.batch1 = i64(number / kIndex(box.batch2));
  return at;
}
__device__ __forceinline__ i64 offset_of(const math::Strides& strides, const BoxRow& at) {
  return at.batch1 * strides.batch1 + at.batch2 * strides.batch2 + at.head * strides.head + at.row * strides.row;
}

__device__ __forceinline__ float float_of(const void* data, i64 index, BiasTile type) {
  if (type == BiasTile::kFp32) {
    return static_cast<const float*>(data)[index];
  }
  const u32 bits = static_cast<const u16*>(data)[index];
  return type == BiasTile::kBf16 ? low<Type::kBf16>(bits) : low<Type::kFp16>(bits);
}

// ---- rows that cannot be copied by 16 bytes ----

__device__ __forceinline__ u32 load_half(const char* from) { return *reinterpret_cast<const u16*>(from); }
__device__ __forceinline__ u32 load_word(const char* from) { return *reinterpret_cast<const u32*>(from); }

// 16 bytes of a row, of which `bytes` exist; the rest is zero. kUnit: what addresses and bytes are multiples of, 2 to
// 8; 0: elements of kBytes that are `stride` bytes apart. All loads of a thread are on their way before words() waits.
template <int kUnit, int kBytes>
struct RowPiece {
  u32 parts[kUnit == 0 ? 16 / kBytes : kUnit == 2 ? 5 : 4];
  bool odd = false;  // the address is no multiple of 4

  __device__ __forceinline__ void load(const char* from, int bytes, i64 stride) {
    if constexpr (kUnit == 8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 x = i * 8 < bytes ? *reinterpret_cast<const uint2*>(from + i * 8) : uint2{};
        parts[2 * i] = x.x;
        parts[2 * i + 1] = x.y;
      }
    } else if constexpr (kUnit == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        parts[i] = i * 4 < bytes ? load_word(from + i * 4) : 0;
      }
    } else if constexpr (kUnit == 2) {
      // The first half; three whole words; the half behind them or, where there is none, the second.
      odd = (reinterpret_cast<u64>(from) & 2) != 0;
      const int words = odd ? 2 : 4;
      const int other = odd ? 14 : 2;
      parts[0] = load_half(from);
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const int at = words + i * 4;
        parts[1 + i] = at + 4 <= bytes ? load_word(from + at) : at < bytes ? load_half(from + at) : 0;
      }
      parts[4] = other < bytes ? load_half(from + other) : 0;
    } else {
#pragma unroll
      for (int i = 0; i < 16 / kBytes; ++i) {
        const char* const at = from + i * stride;
        parts[i] = i * kBytes >= bytes ? 0 : kBytes == 4 ? load_word(at) : load_half(at);
      }
    }
  }

  __device__ __forceinline__ uint4 words() const {
    if constexpr (kUnit == 2) {
      const u32 first = odd ? parts[0] << 16 : parts[0] | parts[4] << 16;
      const u32 shift = odd ? 16 : 0;
      return {__funnelshift_r(first, parts[1], shift), __funnelshift_r(parts[1], parts[2], shift),
              __funnelshift_r(parts[2], parts[3], shift), __funnelshift_r(parts[3], parts[4], shift)};
    } else if constexpr (kUnit == 0 && kBytes == 2) {
      return {parts[0] | parts[1] << 16, parts[2] | parts[3] << 16, parts[4] | parts[5] << 16,
              parts[6] | parts[7] << 16};
    } else {
      return {parts[0], parts[1], parts[2], parts[3]};
    }
  }
};

template <int kUnit, int kBytes, class kIndex>
__device__ __forceinline__ void pack_rows(const PackJob& job) {
  constexpr int kElements = 16 / kBytes;
  constexpr int kAtOnce = kUnit == 0 ? 1 : 4;  // pieces of a thread
  constexpr int kOfABlock = kAtOnce * kPrepareThreads;
  const Box& box = job.box;
  const kIndex pieces = kIndex(box.width / kElements);
  const i64 total = box.count() / kElements;
  const i64 stride = job.from.strides.col * kBytes;
#pragma unroll 1
  for (i64 begin = i64(blockIdx.x) * kOfABlock + threadIdx.x; begin < total; begin += i64(gridDim.x) * kOfABlock) {
    RowPiece<kUnit, kBytes> x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const i64 n = begin + i * kPrepareThreads;
      if (n < total) {
        const kIndex row = kIndex(n) / pieces;
        const i64 first = i64(kIndex(n) - row * pieces) * kElements;
        const char* const from =
            static_cast<const char*>(job.from.data) + offset_of(job.from.strides, box_row(box, row)) * kBytes;
        x[i].load(from + first * stride, int(math::min(job.columns - first, i64{kElements})) * kBytes, stride);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const i64 n = begin + i * kPrepareThreads;
      if (n < total) {
        static_cast<uint4*>(job.to)[n] = x[i].words();
      }
    }
  }
}

// S.type says how large elements are: kFp32 is 4 bytes, anything else 2.
template <AroundSpec S>
__global__ void __launch_bounds__(kPrepareThreads) prepare_pack(const __grid_constant__ PackArgs args) {
  begin_kernel<S.arch>();
  constexpr int kBytes = S.type == Type::kFp32 ? 4 : 2;
  const PackJob& job = args.jobs[blockIdx.y];
  const math::Strides& s = job.from.strides;
  // What every address and every row's end is a multiple of.
  const u32 bits =
      u32((s.batch1 | s.batch2 | s.head | s.row | job.columns) * kBytes) | u32(reinterpret_cast<u64>(job.from.data));
  if (job.box.count() / (16 / kBytes) >= i64(1) << 32) {
    pack_rows<0, kBytes, i64>(job);
  } else if (s.col != 1) {
    pack_rows<0, kBytes, u32>(job);
  } else if (bits % 8 == 0) {
    pack_rows<8, kBytes, u32>(job);
  } else if (bits % 4 == 0) {
    pack_rows<4, kBytes, u32>(job);
  } else if constexpr (kBytes == 2) {
    pack_rows<2, kBytes, u32>(job);
  }
}

// Piece `number` of a box whose rows have so many pieces each.
struct BoxPiece {
  i64 row;  // of all
  int piece;
  BoxRow at;

  template <class kIndex>
  static __device__ __forceinline__ BoxPiece make(const Box& box, kIndex number, kIndex pieces) {
    const kIndex row = number / pieces;
    return {i64(row), int(number - row * pieces), box_row(box, row)};
  }
};
// visit(piece) for all of them, by warps. With 32 bits where they are enough.
template <class Visit>
__device__ __forceinline__ void for_each_piece(const Box& box, u32 pieces, Visit visit) {
  const i64 total = box.all_rows() * pieces;
  const bool few = total >> 32 == 0;
#pragma unroll 1
  for (i64 n = prepare_thread() / 32; n < total; n += prepare_stride() / 32) {
    visit(few ? BoxPiece::make(box, u32(n), pieces) : BoxPiece::make(box, u64(n), u64(pieces)));
  }
}

// Words of a row in the tensor, a lane every 32nd, wherever its rows begin: two numbers are one store. Where they are
// no word in the packed row, the first of them is the neighbouring lane's.
template <AroundSpec S>
__global__ void __launch_bounds__(kPrepareThreads, 4) prepare_unpack(const __grid_constant__ UnpackArgs args) {
  begin_kernel<S.arch>();
  constexpr int kEach = 16;
  constexpr int kWords = 32 * kEach;  // of a warp at once
  const Box& box = args.box;
  const int lane = threadIdx.x % 32;
  const int columns = int(args.columns);
  const bool together = args.strides.col == 1;
  const u32 pieces = u32((columns / 2 + kWords) / kWords);
  for_each_piece(box, pieces, [&](const BoxPiece& of) {
    const char* const from = reinterpret_cast<const char*>(args.from + of.row * box.width);
    u16* const to = static_cast<u16*>(args.to) + offset_of(args.strides, of.at);
    const bool odd = together && (reinterpret_cast<u64>(to) & 2) != 0;
    const int first = of.piece * kWords + lane;
    const auto word_of = [&](int n) { return n >= 0 && n * 2 < columns ? load_word(from + n * 4) : 0; };
    u32 words[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      words[i] = word_of(first + i * 32);
    }
    if (odd) {
      u32 before = lane == 0 ? word_of(first - 1) : 0;  // of lane 0
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const u32 next = __shfl_sync(~0u, words[i], (lane + 31) % 32);
        words[i] = __funnelshift_r(lane == 0 ? before : next, words[i], 16);
        before = next;
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int column = (first + i * 32) * 2 - int(odd);
      if (together && column >= 0 && column + 1 < columns) {
        *reinterpret_cast<u32*>(to + column) = words[i];
      } else {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (column + e >= 0 && column + e < columns) {
            to[(column + e) * args.strides.col] = u16(words[i] >> e * 16);
          }
        }
      }
    }
  });
}

// Bools of a mask, by warps: 64 words of 32 keys of a row, a lane 16 keys at a time. visit(bytes, row, word): what a
// lane has of each 16 words from `word` on of a row, counted among all; bytes that are not 0 are true, and those behind
// the row's end are 0. Words from box.width on do not exist.
template <class Visit>
__device__ __forceinline__ void for_each_bools(const MaskArgs& args, Visit visit) {
  constexpr int kKeys = 16;   // of a lane
  constexpr int kAtOnce = 4;  // times
  constexpr int kWords = 16;  // of a warp, each time
  const Box& box = args.box;
  const math::Strides& strides = args.from.strides;
  const int lane = threadIdx.x & 31;
  const u32 pieces = u32((box.width + kAtOnce * kWords - 1) / (kAtOnce * kWords));
  const u64 bits = u64(strides.batch1 | strides.batch2 | strides.head | strides.row) | u64(args.from.data);
  const bool by_vectors = strides.col == 1 && bits % kKeys == 0;
  for_each_piece(box, pieces, [&](const BoxPiece& of) {
    const i64 first = i64(of.piece) * (kAtOnce * kWords);
    const unsigned char* const data = static_cast<const unsigned char*>(args.from.data) + offset_of(strides, of.at);
    uint4 bytes[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const i64 key = (first + i * kWords) * 32 + lane * kKeys;
      bytes[i] = {};
      if (by_vectors && key + kKeys <= args.columns) {
        bytes[i] = *reinterpret_cast<const uint4*>(data + key);
      } else if (key < args.columns) {
        u32 words[4] = {};
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
          if (key + j < args.columns) {
            words[j / 4] |= u32(data[(key + j) * strides.col]) << j % 4 * 8;
          }
        }
        bytes[i] = {words[0], words[1], words[2], words[3]};
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      visit(bytes[i], of.row, first + i * kWords);
    }
  });
}

template <AroundSpec S>
__global__ void __launch_bounds__(kPrepareThreads) prepare_mask(const __grid_constant__ MaskArgs args) {
  begin_kernel<S.arch>();
  const int lane = threadIdx.x & 31;
  for_each_bools(args, [&](const uint4& bytes, i64 row, i64 first) {
    const auto four = [](u32 word) { return __vsetne4(word, 0) * 0x01020408u >> 24; };  // byte n to bit n
    const u32 mine = four(bytes.x) | four(bytes.y) << 4 | four(bytes.z) << 8 | four(bytes.w) << 12;
    const u32 next = __shfl_down_sync(~0u, mine, 1);
    const i64 word = first + lane / 2;
    if (lane % 2 == 0 && word < args.box.width) {
      args.to[row * args.box.width + word] = mine | next << 16;
    }
  });
}

template <AroundSpec S>
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

template <AroundSpec S>
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
template <AroundSpec S>
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
template <AroundSpec S>
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
