// SPDX-License-Identifier: Apache-2.0
//
// The backward for Hopper: which problems it can compute, with which tiles, in which order its blocks take their keys,
// and its launches.
#pragma once

#include "cuda/kernels/generic_backward.h"

namespace fovea::cuda {

// dk, dv (and dq by additions in memory): 16-bit types, head_dim up to 256; sm90_wide_backward where one block has too
// few registers.
Choice sm90_backward(const Call& call, const Operands& operands, const Target& target, const BackwardWants& wants);

// How its blocks share the work.
struct Sm90KeyOrder {
  std::int64_t key_blocks = 0;  // of a head (sm90_wide_backward: of two blocks each)
  std::int64_t head_rows = 0;   // keys of a head, up to whole blocks
  std::int64_t items = 0;       // blocks of keys of all heads
  int parts = 1;  // of a block of keys, each a block's own: more than 1 with Sm90BackwardTiles::key_parts alone
  std::int64_t heads_in_turn = 1;  // key heads whose blocks are begun by turns, the longest first
  std::int64_t last_turn = 0;      // the key head from which on all are
};
Sm90KeyOrder sm90_key_order(const Call& call, const Sm90BackwardSpec& spec, const Target& target);

// Memory for partial sums and for the order of sums.
void reserve_sm90_backward(Planner& planner, const Sm90BackwardSpec& spec, const Sm90KeyOrder& order);
// Its launch; with a mask, one that writes the mask's bits for it comes before backward_prepare; the sums of parts are
// added after it, and dq is converted in the same launch, with so many blocks.
void add_sm90_backward_mask(Planner& planner);
void add_sm90_backward(Planner& planner, const Kernel& kernel, const Sm90KeyOrder& order);
void add_sm90_backward_parts(Planner& planner, const Sm90BackwardSpec& main, const Sm90KeyOrder& order,
                             std::int64_t convert_blocks);

}  // namespace fovea::cuda
