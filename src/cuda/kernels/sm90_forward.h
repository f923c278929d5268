// SPDX-License-Identifier: Apache-2.0
//
// The forward for Hopper: which problems it can compute, with which tiles, and its launch (sm90_forward.cpp); in which
// order its blocks take tiles (sm90_forward_order.cpp).
#pragma once

#include <cstdint>

#include "cuda/planner.h"

namespace fovea::cuda {

// The forward for Hopper: 16-bit types, head_dim up to 512.
Choice sm90_forward(const Call& call, const Operands& operands, const Target& target);

// The order of the tiles of queries; of ragged sequences, at most so many.
struct Sm90TileOrder {
  std::int64_t tiles = 0;  // of all heads
  int row_tiles = 0;       // of a head
  int heads_together = 1;
  bool batch_inside = false;
  std::int64_t listed = 0;  // row tiles in the list of ragged sequences
};
Sm90TileOrder sm90_tile_order(const Call& call, const Operands& operands, const Sm90ForwardSpec& spec);

// Blocks that fit on the device, or clusters of them.
std::int64_t sm90_forward_room(const Sm90ForwardSpec& spec, const Target& target);

// Into how many parts the keys of the last tiles are cut, so that the last round of tiles, or the only one, leaves
// fewer multiprocessors idle; 1 where that is not worth the sums.
struct Sm90PartsOfKeys {
  std::int64_t whole = 0;  // tiles before the first that has parts
  int count = 1;
  bool few = false;    // tiles, and many keys: a generic kernel makes parts of them, too
  bool joins = false;  // the part that ends last puts results together, not generic_combine
  std::int64_t numbers(const Sm90TileOrder& order) const { return whole + (order.tiles - whole) * count; }
};
Sm90PartsOfKeys sm90_parts_of_keys(const Call& call, const Sm90TileOrder& order, const Sm90ForwardSpec& spec,
                                   const Target& target);

// Its launch, and that of what its blocks take their tiles from.
void add_sm90_forward(Planner& planner, const Kernel& kernel);

}  // namespace fovea::cuda
