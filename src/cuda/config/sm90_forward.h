// SPDX-License-Identifier: Apache-2.0
//
// Which problems the forward for Hopper serves, with which tiles, and in which order its blocks take them: pure
// functions of a problem and a target.
#pragma once

#include "cuda/config/kernel.h"
#include "cuda/config/operands.h"
#include "cuda/config/target.h"

namespace fovea::cuda {

// The forward for Hopper: 16-bit types, head_dim up to 256.
Choice sm90_forward(const Call& call, const Operands& operands, const Target& target);

// The order of its tiles of queries; of ragged sequences, at most so many.
struct Sm90Order {
  std::int64_t tiles = 0;  // of all heads
  int row_tiles = 0;       // of a head
  int heads_together = 1;
  bool batch_inside = false;
  std::int64_t listed = 0;  // row tiles in the list of ragged sequences
};
Sm90Order sm90_order(const Call& call, const Operands& operands, const Spec& spec);

// Blocks of its grid, and whether they take tiles from a counter.
std::int64_t sm90_forward_blocks(const Sm90Order& order, const Spec& spec, const Target& target);
bool sm90_is_scheduled(const Sm90Order& order, const Spec& spec, const Target& target);

// The counter, then the list.
inline constexpr std::int64_t kSm90ListOffset = 16;
std::int64_t sm90_schedule_bytes(const Sm90Order& order);

}  // namespace fovea::cuda
