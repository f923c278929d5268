// SPDX-License-Identifier: Apache-2.0
//
// How the blocks of the backward for Hopper share the work: how many there are, of which keys, and in which order they
// begin. The choice of tiles asks it before there is a launch.
#pragma once

#include <cstdint>

#include "cuda/cuda.h"
#include "cuda/device/sm90/spec.h"
#include "cuda/kernels/backward_around.h"

namespace fovea::cuda {

// head_dims that one warpgroup's registers do not hold.
inline constexpr int kSm90Wide = 128;
constexpr int rounded(int columns, int grain) { return (columns + grain - 1) / grain * grain; }
bool sm90_is_wide(const Features& spec);
// Whether two blocks share the work (sm90_wide_backward): where dk and dv, or they and what a feature needs, are more
// than the registers of one hold.
bool sm90_in_clusters(const Features& spec);

// Blocks of keys of all heads (sm90_wide_backward: of two blocks each).
std::int64_t sm90_items(const Call& call, const Sm90BackwardSpec& spec);

// The parts of a block of keys that give the least time, by estimate, where there are fewer blocks of keys than
// multiprocessors; 1 where nothing is gained.
int sm90_best_parts(const Call& call, const Sm90BackwardSpec& spec, const Target& target);

// The last blocks of keys (sm90_summed_backward: clusters of them), in parts, where the last round of blocks would
// leave multiprocessors idle for a part of it that is worth the sums; 1 part elsewhere.
struct Sm90LastParts {
  std::int64_t blocks = 0;
  int parts = 1;
};
Sm90LastParts sm90_last_parts(const Call& call, const Sm90BackwardSpec& spec, const Target& target);

// Whether the last key heads begin with their longest blocks, by turns.
bool sm90_has_last_turn(const Call& call, const Sm90BackwardSpec& spec, const Target& target);

struct Sm90KeyOrder {
  std::int64_t key_blocks = 0;  // of a head (sm90_wide_backward: of two blocks each)
  std::int64_t head_rows = 0;   // keys of a head, up to whole blocks
  std::int64_t items = 0;       // blocks of keys of all heads
  int parts = 1;  // of a block of keys, each a block's own: more than 1 with Sm90BackwardTiles::key_parts alone
  std::int64_t whole = 0;          // blocks of keys, or clusters of them, before the first that has parts
  std::int64_t numbers = 0;        // of blocks of keys, or clusters, each part by itself
  std::int64_t heads_in_turn = 1;  // key heads whose blocks are begun by turns, the longest first
  std::int64_t last_turn = 0;      // the key head from which on all are
};
Sm90KeyOrder sm90_key_order(const Call& call, const Sm90BackwardSpec& spec, const Target& target);

}  // namespace fovea::cuda
