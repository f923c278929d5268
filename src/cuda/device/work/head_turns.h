// SPDX-License-Identifier: Apache-2.0
//
// In which order blocks of a grid under a causal mask have the rows of heads.
//
// A block of many keys takes up to as many times as long as one of few. Where heads follow one another, the long blocks
// of the last heads begin when little else is left, and run alone. So 32 heads at a time begin with their longest
// blocks. More would leave few blocks that read the same K and V (or Q and dO) at a time.
#pragma once

#include "math/scalar.h"

namespace fovea::cuda {

inline constexpr math::u32 kHeadsByTurns = 32;

// Block `number` of a head's, of head `head` of all heads of all batch entries.
struct HeadTurn {
  math::u32 head, number;
};

// Number `index` of `heads` * `blocks`, less than 2^32.
constexpr HeadTurn head_turn(math::u32 index, math::u32 heads, math::u32 blocks) {
  const math::u32 most = heads < kHeadsByTurns ? heads : kHeadsByTurns;
  const math::u32 before = index / (blocks * most) * most;
  const math::u32 left = heads - before;
  const math::u32 together = left < most ? left : most;
  const math::u32 in_turn = index - before * blocks;
  const math::u32 number = in_turn / together;
  return {before + in_turn - number * together, number};
}

}  // namespace fovea::cuda
