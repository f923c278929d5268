// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of around/prepare.cuh are called with, where that is not Args. Read by the host and, without any
// header, by NVRTC.
#pragma once

#include "math/rows.h"

namespace fovea::cuda {

// Extents of what is written, row-major: (batch1, batch2, head, row, width). 1 where it is broadcast.
struct Box {
  math::i64 batch1 = 1;
  math::i64 batch2 = 1;
  math::i64 heads = 1;
  math::i64 rows = 1;
  math::i64 width = 1;

  constexpr math::i64 planes() const { return batch1 * batch2 * heads; }
  constexpr math::i64 all_rows() const { return planes() * rows; }
  constexpr math::i64 count() const { return all_rows() * width; }

  // Strides by logical coordinates, 0 where it is broadcast.
  constexpr math::Strides strides() const {
    return {batch1 > 1 ? batch2 * heads * rows * width : 0, batch2 > 1 ? heads * rows * width : 0,
            heads > 1 ? rows * width : 0, rows > 1 ? width : 0, 1};
  }
};

struct Source {
  const void* data = nullptr;
  math::Strides strides;
};

// prepare_pack: a tensor into aligned rows of `box.width` elements, those from `columns` on are zero.
struct PackJob {
  Source from;
  void* to = nullptr;
  Box box;
  math::i64 columns = 0;
};
struct PackArgs {
  PackJob jobs[4];  // by blockIdx.y
};

// prepare_unpack: the other way, rows of `box.width` numbers of 16 bits into a tensor of any strides.
struct UnpackArgs {
  const unsigned short* from = nullptr;
  void* to = nullptr;
  math::Strides strides;
  Box box;
  math::i64 columns = 0;
};

// prepare_mask: bools into bits, a word for 32 keys; `box.width` is in words.
struct MaskArgs {
  Source from;
  math::u32* to = nullptr;
  Box box;
  math::i64 columns = 0;
};

// sm90_backward_mask: words of prepare_mask, of which `box` says where they lie, in the order of accumulators.
struct MaskTilesArgs {
  const math::u32* from = nullptr;
  math::u32* to = nullptr;
  Box box;
};

// prepare_term: the sum of what is broadcast over queries (or over keys), -inf where a mask says no.
struct TermSource {
  Source from;
  int type = 0;  // of BiasTile
};
struct TermArgs {
  TermSource biases[2];
  int count = 0;
  Source mask;  // no data: none
  float* to = nullptr;
  Box box;                // one row a plane: along the width are keys, or queries
  math::i64 columns = 0;  // of the width that exist; the rest is -inf
};

// prepare_measure, prepare_split: fp32 into pairs of fp16, [high parts | low parts], each of `width` columns.
struct PairJob {
  Source from;
  unsigned short* to = nullptr;
  math::Strides strides;  // of `to`
  math::i64 columns = 0;
  math::i64 width = 0;
};
struct PairArgs {
  math::Rows rows;
  PairJob jobs[4];  // q, k, v, do: by blockIdx.y
  math::u32* sizes = nullptr;
};

}  // namespace fovea::cuda
