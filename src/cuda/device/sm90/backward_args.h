// SPDX-License-Identifier: Apache-2.0
//
// What sm90_backward is called with beside Args: tensor maps, and how its blocks are numbered. Read by the host and,
// without any header, by NVRTC.
#pragma once

#include "cuda/device/args.h"
#include "cuda/device/sm90/args.h"
#include "cuda/device/sm90/odd_rows.h"

namespace fovea::cuda {

// Where several blocks share a block of keys (Spec::key_parts): each leaves its sums of dK and dV here, in fp32 and in
// the order of the accumulators, rows of a part one after the other by batch entry, key head and key; with last_parts
// from block `whole` on.
struct KeyParts {
  int count = 1;        // of a block of keys
  int whole = 0;        // last_parts: the block of keys from which on they have parts (summed: clusters)
  int head_rows = 0;    // keys of a head, up to whole blocks
  int rows = 0;         // of a part
  float* dk = nullptr;  // with Spec::d columns
  float* dv = nullptr;
};

// The block of keys and the part of it that a number stands for.
struct PartOfKeys {
  u32 block, part;
  int parts;
};
template <auto S>
constexpr PartOfKeys part_of_keys(const KeyParts& parts, u32 number) {
  const u32 whole = S.last_parts ? u32(parts.whole) : 0;
  if (!S.key_parts || (S.last_parts && number < whole)) {
    return {number, 0, 1};
  }
  const u32 behind = (number - whole) / u32(parts.count);
  return {whole + behind, number - whole - behind * u32(parts.count), parts.count};
}

// Blocks of sm90_backward_parts for `rows` rows of so many columns: 16 x 16 numbers a warp.
constexpr i64 sm90_parts_blocks(i64 rows, int columns) { return (rows / 16 * (columns / 16) + 7) / 8; }

// With Spec::summed: which blocks of keys a cluster has, one after the other, `rounds` of them. They are the same keys
// of more batch entries, and of more heads where these share the bias, too: numbers apart by `stride`.
struct SummedBias {
  int rounds = 1;
  int stride = 1;
  int heads = 1;   // that have a plane each
  int planes = 1;  // of the bias
};

struct Sm90BackwardArgs {
  TensorMap q, grad_out, k, v, bias, bias2, grad_bias;
  TensorMap grad_k, grad_v;  // tile_stores: a warp's 16 rows of a panel
  TensorMap out;             // makes_rows: as grad_out
  Has has_q, has_grad_out, has_k, has_v, has_bias, has_bias2, has_grad_bias, has_grad_k, has_grad_v, has_out;
  Tensor mask;            // of sm90_backward_mask: `row` strides are of 64 queries
  int key_blocks = 0;     // of a head
  int blocks = 0;         // of all heads, each part by itself
  int heads_in_turn = 1;  // key heads whose blocks of keys are numbered by turns; with ragged sequences 1
  int last_turn = 0;      // the key head from which on all are numbered by turns together
  int heads_k = 1;
  int group = 1;  // query heads of a key head
  int batch2 = 1;
  int low = 0;  // the band where queries and keys are as many (math::Band)
  int high = 0;
  float scale_log2 = 1;  // scale * log2(e)
  KeyParts parts;
  SummedBias summed;
};

template <auto S>
using Sm90BackwardArgsOf = WithOddRows<Sm90BackwardArgs, S.odd_rows>;

}  // namespace fovea::cuda
