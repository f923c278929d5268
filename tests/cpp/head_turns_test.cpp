// SPDX-License-Identifier: Apache-2.0
//
// head_turn(): every block of every head once, and how much of the time blocks of a causal call have work.
#include "cuda/device/work/head_turns.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace fovea::cuda {
namespace {

TEST(HeadTurns, EveryBlockComesOnce) {
  for (const math::u32 heads : {1u, 2u, 31u, 32u, 33u, 64u, 100u}) {
    for (const math::u32 blocks : {1u, 2u, 7u, 64u}) {
      std::vector<int> seen(heads * blocks);
      for (math::u32 index = 0; index < heads * blocks; ++index) {
        const HeadTurn turn = head_turn(index, heads, blocks);
        ASSERT_LT(turn.head, heads);
        ASSERT_LT(turn.number, blocks);
        ++seen[turn.head * blocks + turn.number];
      }
      EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), heads * blocks) << heads << " heads of " << blocks;
    }
  }
}

TEST(HeadTurns, TheLargestGridDoesNotOverflow) {
  constexpr math::u32 kBlocks = math::u32{1} << 27;
  constexpr math::u32 kHeads = 31;
  const HeadTurn last = head_turn(kBlocks * kHeads - 1, kHeads, kBlocks);
  EXPECT_EQ(last.head, kHeads - 1);
  EXPECT_EQ(last.number, kBlocks - 1);
}

// The part of the time that `room` blocks at a time have work, if each takes as long as it has keys, plus one step.
double busy(std::int64_t heads, std::int64_t blocks, std::size_t room, bool by_turns) {
  std::priority_queue<std::int64_t, std::vector<std::int64_t>, std::greater<>> ends;
  std::int64_t all = 0;
  std::int64_t last = 0;
  for (std::int64_t index = 0; index < heads * blocks; ++index) {
    const auto number = by_turns ? head_turn(static_cast<math::u32>(index), static_cast<math::u32>(heads),
                                             static_cast<math::u32>(blocks))
                                       .number
                                 : static_cast<math::u32>(index % blocks);
    const std::int64_t time = 2 * (blocks - number) + 1;
    std::int64_t start = 0;
    if (ends.size() == room) {
      start = ends.top();
      ends.pop();
    }
    ends.push(start + time);
    all += time;
    last = std::max(last, start + time);
  }
  return static_cast<double>(all) / static_cast<double>(room) / static_cast<double>(last);
}

TEST(HeadTurns, LongBlocksDoNotComeLast) {
  constexpr std::size_t kRoom = 216;  // of 108 multiprocessors, two blocks each
  for (const auto& [heads, blocks] : {std::pair{64, 16}, std::pair{128, 16}, std::pair{32, 32}, std::pair{16, 128}}) {
    EXPECT_GT(busy(heads, blocks, kRoom, true), 0.97) << heads << " heads of " << blocks;
    EXPECT_LT(busy(heads, blocks, kRoom, false), 0.93) << heads << " heads of " << blocks;
  }
}

}  // namespace
}  // namespace fovea::cuda
