// SPDX-License-Identifier: Apache-2.0
//
// Positions and the streams of dropout through the C ABI: what is refused, by name and before anything is written, and
// what the text form makes of them. tests/python/test_shards.py has what they compute.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "arguments.h"

namespace fovea {
namespace {

using testing::Arguments;
using testing::run;
using Rows = Arguments::Rows;

std::string describe(const fovea_problem& problem) {
  char text[1024];
  return fovea_describe(&problem, FOVEA_FORWARD, text, sizeof(text), nullptr) == FOVEA_OK ? text : fovea_last_error();
}

// Tensors of integers that a problem points to.
struct Shard {
  explicit Shard(Rows rows, Direction direction) : arguments(rows, direction) {
    arguments.problem.flags |= FOVEA_POSITIONS;
    set(positions_q, q, {2});
    set(positions_k, k, {2});
    set(streams, numbers,
        rows == Rows::kTwoLevel ? std::vector<std::int64_t>{1, 2, 4} : std::vector<std::int64_t>{2, 4});
    arguments.problem.positions_q = &positions_q;
    arguments.problem.positions_k = &positions_k;
    arguments.problem.dropout_streams = &streams;
  }
  static void set(fovea_tensor& tensor, std::vector<std::int64_t>& values, const std::vector<std::int64_t>& shape) {
    tensor = {};
    tensor.size = sizeof(tensor);
    tensor.data = values.data();
    tensor.dtype = FOVEA_INT64;
    tensor.rank = static_cast<std::int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), tensor.shape);
  }

  Arguments arguments;
  std::vector<std::int64_t> q{64, 32}, k{0, 48}, numbers = std::vector<std::int64_t>(8, 5);
  fovea_tensor positions_q, positions_k, streams;
};

struct Refusal {
  std::string begin;
  std::function<void(Shard&)> breakage;
  fovea_status status = FOVEA_INVALID_ARGUMENT;
};

TEST(Positions, RefusedByName) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  const auto dropout = [](Shard& s) { s.arguments.problem.dropout_p = 0.5; };
  const auto alone = [](Shard& s) { s.arguments.problem.positions_q = s.arguments.problem.positions_k = nullptr; };
  const std::vector<Refusal> refusals = {
      {"align: top left beside positions", [](auto& s) { s.arguments.problem.align = FOVEA_TOP_LEFT; }},
      {"position_q: 1099511627776; accepted: under 2^40", [](auto& s) { s.arguments.problem.position_q = kMost; }},
      {"position_k: -1099511627776; accepted", [](auto& s) { s.arguments.problem.position_k = -kMost; }},
      {"positions_q: 9223372036854775807 at index 1, added to 0", [](auto& s) { s.q[1] = kLargest; }},
      {"positions_k: 1 at index 0, added to 1099511627775; accepted: under 2^40 in size, also the sum",
       [](auto& s) {
         s.k[0] = 1;
         s.arguments.problem.position_k = kMost - 1;
       }},
      {"positions_q: int32; accepted: int64", [](auto& s) { s.positions_q.dtype = FOVEA_INT32; }, FOVEA_INVALID_TYPE},
      {"positions_k: shape 1; accepted: (B), 2", [](auto& s) { s.positions_k.shape[0] = 1; }},
      {"positions_k: data is NULL", [](auto& s) { s.positions_k.data = nullptr; }},
      {"rng: FOVEA_RNG_TORCH_MEM_EFFICIENT with FOVEA_POSITIONS and dropout",
       [&](auto& s) {
         dropout(s);
         s.arguments.problem.rng = FOVEA_RNG_TORCH_MEM_EFFICIENT;
       }},
      {"position_q: 8; accepted with dropout: a multiple of 16",
       [&](auto& s) {
         dropout(s);
         alone(s);
         s.arguments.problem.position_q = 8;
       }},
      {"position_k + positions_k[1]: 49; accepted with dropout: a multiple of 16",
       [&](auto& s) {
         dropout(s);
         s.k[1] = 49;
       }},
      {"position_q + positions_q[0]: -16 with up to 3 rows; accepted with dropout: positions of 0 to 2^32 - 1",
       [&](auto& s) {
         dropout(s);
         s.q[0] = -16;
       }},
      {"position_k: 4294967296 with up to 5 rows",
       [&](auto& s) {
         dropout(s);
         alone(s);
         s.arguments.problem.position_k = std::int64_t{1} << 32;
       }},
      {"position_q: 3 without FOVEA_POSITIONS; accepted: 0, or the flag",
       [](auto& s) {
         s.arguments.problem.flags &= ~FOVEA_POSITIONS;
         s.arguments.problem.position_q = 3;
       }},
      {"positions_q: given without FOVEA_POSITIONS", [](auto& s) { s.arguments.problem.flags &= ~FOVEA_POSITIONS; }},
      {"dropout_streams: fp32; accepted: int64", [](auto& s) { s.streams.dtype = FOVEA_FP32; }, FOVEA_INVALID_TYPE},
      {"dropout_streams: shape ", [](auto& s) { s.streams.shape[s.streams.rank - 1] = 3; }},
      {"dropout_streams: data is NULL", [](auto& s) { s.streams.data = nullptr; }},
      {"dropout_streams: rank 6", [](auto& s) { s.streams.rank = 6; }},
  };
  for (const Rows rows : {Rows::kDense, Rows::kTwoLevel, Rows::kPacked}) {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      Shard right(rows, direction);
      EXPECT_EQ(run(right.arguments), FOVEA_OK) << fovea_last_error();
      dropout(right);
      EXPECT_EQ(run(right.arguments), FOVEA_OK) << fovea_last_error();
      for (const Refusal& refusal : refusals) {
        Shard shard(rows, direction);
        refusal.breakage(shard);
        EXPECT_EQ(run(shard.arguments), refusal.status) << refusal.begin;
        EXPECT_EQ(std::string(fovea_last_error()).rfind(refusal.begin, 0), 0u) << fovea_last_error();
        EXPECT_TRUE(shard.arguments.untouched()) << refusal.begin;
      }
    }
  }
}

// An older program's problem ends before positions: what lies behind it is not read.
TEST(Positions, AnOlderHeaderHasNone) {
  Arguments expected(Rows::kDense, Direction::kForward);
  ASSERT_EQ(run(expected), FOVEA_OK) << fovea_last_error();
  Arguments older(Rows::kDense, Direction::kForward);
  older.problem.size = offsetof(fovea_problem, position_q);
  older.problem.position_q = 7;
  older.problem.positions_q = older.problem.dropout_streams = reinterpret_cast<const fovea_tensor*>(0x10);
  ASSERT_EQ(run(older), FOVEA_OK) << fovea_last_error();
  EXPECT_TRUE(older.same_outputs_as(expected));
}

TEST(Positions, InTheTextForm) {
  Shard dense(Rows::kDense, Direction::kForward);
  dense.arguments.problem.position_q = -5;
  EXPECT_NE(describe(dense.arguments.problem).find(" pos=-5,0 pos_q=64,32 pos_k=0,48 "), std::string::npos)
      << describe(dense.arguments.problem);
  EXPECT_NE(describe(dense.arguments.problem).find(" streams=b,h "), std::string::npos);
  Shard two_level(Rows::kTwoLevel, Direction::kForward);
  two_level.streams.shape[1] = 1;
  EXPECT_NE(describe(two_level.arguments.problem).find(" streams=1,1,h "), std::string::npos)
      << describe(two_level.arguments.problem);
  for (const char* line :
       {"fwd b=2 hq=2 sq=3 sk=5 d=8 fp32 pos=64,-16", "fwd b=2 hq=2 sq=3 sk=5 d=8 fp32 pos=0,0 pos_q",
        "bwd b=2x2 hq=2 sq=3 sk=5 d=8 fp32 pos=1,2 pos_q=3x3,-4 pos_k=16x4 dropout=0.5 seed=3 streams=b1,1,h"}) {
    EXPECT_EQ(print(parse(line)), line);
  }
  EXPECT_EQ(print(parse("b=1 sq=3 d=8 pos_k=32")), "fwd b=1 hq=1 sq=3 sk=3 d=8 fp32 pos=0,0 pos_k=32");
  for (const auto& [line, message] :
       {std::pair("sq=3 d=8 pos=4", "pos: '4'; accepted: Q,K"), std::pair("sq=3 d=8 pos=4,x", "pos: 'x'; accepted"),
        std::pair("sq=3 d=8 pos=1099511627776,0", "integers under 2^40"),
        std::pair("b=2 sq=3 d=8 pos_q=4", "pos_q: '4'; accepted: a position for each batch entry, 2"),
        std::pair("sq=3 d=8 streams=b", "streams: 'b'; accepted: (b|1),(h|1)")}) {
    try {
      parse(line);
      ADD_FAILURE() << line;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace fovea
