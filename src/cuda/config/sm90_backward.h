// SPDX-License-Identifier: Apache-2.0
//
// Which problems the backward for Hopper serves, and with which tiles: pure functions of a problem and a target.
#pragma once

#include "cuda/config/generic_backward.h"
#include "cuda/config/kernel.h"
#include "cuda/config/operands.h"
#include "cuda/config/target.h"

namespace fovea::cuda {

// dk, dv (and dq by additions in memory): 16-bit types, head_dim up to 256; sm90_wide_backward where one block has too
// few registers.
Choice sm90_backward(const Call& call, const Operands& operands, const Target& target, const BackwardWants& wants);

// Blocks of keys (sm90_wide_backward: of two blocks), of a head and of all heads; blocks of its grid; whether these
// take their keys from a counter.
std::int64_t sm90_backward_key_blocks(const Call& call, const Spec& spec);
std::int64_t sm90_backward_head_rows(const Call& call, const Spec& spec);  // their keys
std::int64_t sm90_backward_items(const Call& call, const Spec& spec);
std::int64_t sm90_backward_blocks(const Call& call, const Spec& spec, const Target& target);
// In how many parts a block of keys is, each of them a block's own: more than 1 with Spec::key_parts alone.
int sm90_backward_parts(const Call& call, const Spec& spec, const Target& target);
// What the kernel's arguments say of that. `parts` of them is a launch's.
struct Sm90KeyOrder {
  std::int64_t key_blocks = 0;
  std::int64_t head_rows = 0;
  std::int64_t items = 0;
  std::int64_t heads_in_turn = 1;
  std::int64_t last_turn = 0;
};
Sm90KeyOrder sm90_key_order(const Call& call, const Spec& spec, const Target& target);
bool sm90_backward_counts(const Call& call, const Spec& spec, const Target& target);
// What sm90_backward_mask writes: 64 queries a row.
Box sm90_backward_mask_box(const Box& words);
// Key heads whose blocks are begun by turns, the longest first: 1 where all are as long.
std::int64_t sm90_backward_heads_in_turn(const Call& call, const Spec& spec, const Target& target);
std::int64_t sm90_backward_last_turn(const Call& call, const Spec& spec, const Target& target);

}  // namespace fovea::cuda
