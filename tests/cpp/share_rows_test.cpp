// SPDX-License-Identifier: Apache-2.0
//
// fovea_rows_plan(): every row has one rank, pairs against counting, balance up to 64 ranks, and what is refused.
// tests/torch/test_rows.py compares the plans with a second implementation.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "fovea/c.h"

namespace {

struct Piece {
  std::int64_t sequence, start, rows;
};

struct Plan {
  fovea_rows asked{};
  std::vector<std::int64_t> lengths, rows, pairs, sends, receives, piece_counts, numbers;
  std::vector<std::vector<Piece>> pieces;
  double balance = -1;

  Plan(std::int32_t kind, std::vector<std::int64_t> given, std::int64_t ranks, std::int64_t block = 0,
       std::int64_t head_ranks = 0, std::uint32_t flags = FOVEA_CAUSAL, std::int64_t left = -1, std::int64_t right = -1)
      : lengths(std::move(given)) {
    asked.size = sizeof(asked);
    asked.kind = kind;
    asked.flags = flags;
    asked.ranks = ranks;
    asked.head_ranks = head_ranks;
    asked.block = block;
    asked.sequences = static_cast<std::int64_t>(lengths.size());
    asked.lengths = lengths.data();
    asked.window_left = left;
    asked.window_right = right;
    std::int64_t needed = -1;
    EXPECT_EQ(fovea_rows_plan(&asked, &needed), FOVEA_OK) << fovea_last_error();
    const auto size = static_cast<std::size_t>(ranks * std::max<std::int64_t>(1, head_ranks));
    for (auto [array, member] : {std::pair(&rows, &fovea_rows::rows),
                                 {&pairs, &fovea_rows::pairs},
                                 {&sends, &fovea_rows::sends},
                                 {&receives, &fovea_rows::receives},
                                 {&piece_counts, &fovea_rows::piece_counts}}) {
      array->assign(size, -7);
      asked.*member = array->data();
    }
    numbers.assign(static_cast<std::size_t>(3 * needed), -7);
    asked.pieces = numbers.data();
    asked.piece_capacity = needed;
    asked.balance = &balance;
    EXPECT_EQ(fovea_rows_plan(&asked, nullptr), FOVEA_OK) << fovea_last_error();
    std::size_t at = 0;
    for (const std::int64_t count : piece_counts) {
      std::vector<Piece>& mine = pieces.emplace_back();
      for (std::int64_t n = 0; n < count; ++n, at += 3) {
        mine.push_back({numbers.at(at), numbers.at(at + 1), numbers.at(at + 2)});
      }
    }
    EXPECT_EQ(at, numbers.size());
  }
};

// Lengths that repeat for every number of ranks: none, short ones, uneven ones, a long one beside many short ones.
const std::vector<std::vector<std::int64_t>> kPacked = {
    {}, {0}, {1}, {0, 5, 0}, {1000}, {300, 300, 300}, {7, 4096, 129, 128, 127, 1, 0, 2500}, {9000, 20, 20, 20, 20, 20}};

std::vector<Plan> plans(std::int64_t ranks) {
  std::vector<Plan> all;
  for (const std::int64_t length : {0, 1, 127, 128, 129, 1000, 4096, 10007}) {
    for (const std::int32_t kind : {FOVEA_ROWS_ZIGZAG, FOVEA_ROWS_CONTIGUOUS}) {
      for (const std::int64_t block : {0, 1, 16, 300}) {
        all.emplace_back(kind, std::vector<std::int64_t>{length}, ranks, block);
      }
      all.emplace_back(kind, std::vector<std::int64_t>{length}, ranks, 64, 3);
    }
  }
  for (const std::vector<std::int64_t>& lengths : kPacked) {
    for (const std::int32_t kind : {FOVEA_ROWS_PACKED, FOVEA_ROWS_CONTIGUOUS}) {
      all.emplace_back(kind, lengths, ranks);
      all.emplace_back(kind, lengths, ranks, 16, 2);
    }
  }
  return all;
}

TEST(ShareRows, EveryRowHasOneRank) {
  for (const std::int64_t ranks : {1, 2, 3, 8, 64}) {
    for (const Plan& plan : plans(ranks)) {
      std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>> ranges(plan.lengths.size());
      for (std::size_t rank = 0; rank < plan.pieces.size(); ++rank) {
        std::vector<int> pieces_of(plan.lengths.size(), 0);
        std::int64_t rows = 0;
        bool second = false;
        for (const Piece& piece : plan.pieces[rank]) {
          ASSERT_GT(piece.rows, 0);
          const auto sequence = static_cast<std::size_t>(piece.sequence);
          ranges.at(sequence).emplace_back(piece.start, piece.start + piece.rows);
          rows += piece.rows;
          // First the first pieces, then the second ones.
          const int number = pieces_of[sequence]++;
          ASSERT_LE(number, 1);
          second = second || number == 1;
          ASSERT_EQ(second, number == 1 || (second && plan.asked.head_ranks > 1));
        }
        EXPECT_EQ(plan.rows[rank], rows);
      }
      const std::int64_t block = plan.asked.block == 0 ? 128 : plan.asked.block;
      for (std::size_t sequence = 0; sequence < ranges.size(); ++sequence) {
        std::sort(ranges[sequence].begin(), ranges[sequence].end());
        std::int64_t at = 0;
        for (const auto& [start, stop] : ranges[sequence]) {
          EXPECT_EQ(start, at);
          EXPECT_TRUE(start % block == 0 || plan.asked.head_ranks > 1);
          at = stop;
        }
        EXPECT_EQ(at, plan.lengths[sequence]);
      }
    }
  }
}

TEST(ShareRows, PairsAndBalanceByCounting) {
  const std::pair<std::uint32_t, std::pair<std::int64_t, std::int64_t>> bands[] = {
      {0, {9, 9}},  // not looked at
      {FOVEA_CAUSAL, {9, 9}},
      {FOVEA_WINDOW, {-1, -1}},
      {FOVEA_WINDOW, {100, 0}},
      {FOVEA_WINDOW, {300, 7}},
      {FOVEA_WINDOW, {-1, 20}},
      {FOVEA_WINDOW, {0, -1}},
      {FOVEA_WINDOW, {std::int64_t{1} << 62, std::int64_t{1} << 62}},
      {FOVEA_WINDOW | FOVEA_CAUSAL, {40, 50}},
  };
  for (const auto& [flags, window] : bands) {
    const std::int64_t left = (flags & FOVEA_WINDOW) != 0 ? window.first : -1;
    const std::int64_t right = (flags & FOVEA_CAUSAL) != 0 ? 0 : (flags & FOVEA_WINDOW) != 0 ? window.second : -1;
    for (const Plan& plan :
         {Plan(FOVEA_ROWS_ZIGZAG, {1000}, 3, 16, 0, flags, window.first, window.second),
          Plan(FOVEA_ROWS_CONTIGUOUS, {777}, 4, 16, 0, flags, window.first, window.second),
          Plan(FOVEA_ROWS_CONTIGUOUS, {700, 10, 0, 790}, 3, 16, 0, flags, window.first, window.second),
          Plan(FOVEA_ROWS_PACKED, {700, 10, 0, 790}, 3, 16, 0, flags, window.first, window.second)}) {
      std::int64_t most = 0, all = 0;
      for (std::size_t rank = 0; rank < plan.pieces.size(); ++rank) {
        std::int64_t pairs = 0;
        for (const Piece& piece : plan.pieces[rank]) {
          const std::int64_t last = plan.lengths[static_cast<std::size_t>(piece.sequence)] - 1;
          for (std::int64_t i = piece.start; i < piece.start + piece.rows; ++i) {
            const std::int64_t first_key = left < 0 ? 0 : std::max<std::int64_t>(0, i - left);
            const std::int64_t last_key = right < 0 ? last : std::min(last, i + right);
            pairs += last_key - first_key + 1;
          }
        }
        EXPECT_EQ(plan.pairs[rank], pairs) << flags << " " << left << " " << right;
        most = std::max(most, pairs);
        all += pairs;
      }
      EXPECT_EQ(plan.balance,
                static_cast<double>(most) * static_cast<double>(plan.pieces.size()) / static_cast<double>(all));
    }
  }
}

// Each rank has adjacent rows of all sequences, about as many as the others, and pieces begin at multiples of a block.
TEST(ShareRows, SeveralSequencesContiguous) {
  const Plan plan(FOVEA_ROWS_CONTIGUOUS, {50, 700, 0, 250}, 3, 16);
  std::vector<std::vector<std::array<std::int64_t, 3>>> found;
  for (const std::vector<Piece>& mine : plan.pieces) {
    auto& pieces = found.emplace_back();
    for (const Piece& piece : mine) {
      pieces.push_back({piece.sequence, piece.start, piece.rows});
    }
  }
  // Of 1,000 rows the parts would begin at 336 and 672, which are rows 286 and 622 of the second sequence.
  EXPECT_EQ(found, (std::vector<std::vector<std::array<std::int64_t, 3>>>{
                       {{0, 0, 50}, {1, 0, 272}}, {{1, 272, 336}}, {{1, 608, 92}, {3, 0, 250}}}));
}

TEST(ShareRows, SendsAndReceives) {
  const Plan plan(FOVEA_ROWS_CONTIGUOUS, {300}, 3);
  EXPECT_EQ(plan.rows, (std::vector<std::int64_t>{128, 128, 44}));
  EXPECT_EQ(plan.sends, plan.rows);
  EXPECT_EQ(plan.receives, (std::vector<std::int64_t>{172, 172, 256}));
  const Plan alone(FOVEA_ROWS_ZIGZAG, {300}, 1);
  EXPECT_EQ(alone.sends[0], 0);
  EXPECT_EQ(alone.receives[0], 0);
  // Four neighbours have the rows of their place after heads were exchanged.
  const Plan mesh(FOVEA_ROWS_ZIGZAG, {4096}, 2, 0, 4);
  EXPECT_EQ(mesh.rows, std::vector<std::int64_t>(8, 512));
  EXPECT_EQ(mesh.sends, std::vector<std::int64_t>(8, 2048));
  EXPECT_EQ(mesh.receives, std::vector<std::int64_t>(8, 2048));
  EXPECT_EQ(mesh.balance, 1.0);
}

TEST(ShareRows, BalanceUpTo64Ranks) {
  for (const std::int64_t ranks : {2, 4, 8, 16, 32, 64}) {
    for (const std::int64_t length : {std::int64_t{131072}, std::int64_t{1} << 20, std::int64_t{1} << 31}) {
      const Plan zigzag(FOVEA_ROWS_ZIGZAG, {length}, ranks);
      EXPECT_EQ(zigzag.balance, 1.0);
      EXPECT_EQ(*std::max_element(zigzag.rows.begin(), zigzag.rows.end()), length / ranks);
      EXPECT_EQ(Plan(FOVEA_ROWS_CONTIGUOUS, {length}, ranks, 0, 0, 0).balance, 1.0);
      EXPECT_LT(Plan(FOVEA_ROWS_CONTIGUOUS, {length}, ranks, 0, 0, FOVEA_WINDOW, 4095, 0).balance, 1.05);
      EXPECT_GT(Plan(FOVEA_ROWS_CONTIGUOUS, {length}, ranks).balance, 1.4);
    }
    EXPECT_LT(Plan(FOVEA_ROWS_ZIGZAG, {131072 - 5000}, ranks).balance, 1.13);
    std::vector<std::int64_t> documents{50000, 9000, 9000, 4000};
    documents.resize(40, 1500);
    const Plan packed(FOVEA_ROWS_PACKED, documents, ranks);
    const std::int64_t total = std::accumulate(documents.begin(), documents.end(), std::int64_t{0});
    const std::int64_t fullest = *std::max_element(packed.rows.begin(), packed.rows.end());
    const double bound = ranks <= 8 ? 1.1 : 1.25;
    EXPECT_LT(packed.balance, bound) << ranks;
    EXPECT_LT(static_cast<double>(fullest * ranks) / static_cast<double>(total), bound) << ranks;
  }
  EXPECT_EQ(Plan(FOVEA_ROWS_ZIGZAG, {0}, 5).balance, 1.0);
  EXPECT_EQ(Plan(FOVEA_ROWS_PACKED, {}, 5).balance, 1.0);
}

TEST(ShareRows, TheMostRanks) {
  const Plan plan(FOVEA_ROWS_ZIGZAG, {std::int64_t{1} << 31}, 65536);
  EXPECT_EQ(plan.balance, 1.0);
  EXPECT_EQ(std::accumulate(plan.rows.begin(), plan.rows.end(), std::int64_t{0}), std::int64_t{1} << 31);
}

// All pairs of 2^31 rows are 2^62, once for each of the ranks that exchange heads.
TEST(ShareRows, BalanceOfTheMostPairs) {
  const std::int64_t length = std::int64_t{1} << 31;
  for (const std::int64_t ranks : {1, 2, 3}) {
    for (const std::int64_t head_ranks : {1, 2, 3, 4, 1000}) {
      for (const std::int32_t kind : {FOVEA_ROWS_ZIGZAG, FOVEA_ROWS_CONTIGUOUS, FOVEA_ROWS_PACKED}) {
        const Plan plan(kind, {length}, ranks, 0, head_ranks, 0);
        EXPECT_NEAR(plan.balance, 1, 1e-6) << ranks << " " << head_ranks << " " << kind;
      }
    }
  }
}

// ---- bad input ----

struct Asked {
  std::vector<std::int64_t> lengths{1000};
  std::array<std::int64_t, 4> rows{-7, -7, -7, -7};
  std::array<std::int64_t, 30> pieces{};
  double balance = -7;
  fovea_rows asked{};

  Asked() {
    asked.size = sizeof(asked);
    asked.ranks = 4;
    asked.sequences = 1;
    asked.lengths = lengths.data();
    asked.rows = rows.data();
    asked.pieces = pieces.data();
    asked.piece_capacity = 10;
    asked.balance = &balance;
  }
  void refused(fovea_status status, const std::string& says) {
    EXPECT_EQ(fovea_rows_plan(&asked, nullptr), status);
    EXPECT_NE(std::string(fovea_last_error()).find(says), std::string::npos) << fovea_last_error();
    EXPECT_EQ(rows[0], -7);
    EXPECT_EQ(balance, -7);
    EXPECT_EQ(pieces, (std::array<std::int64_t, 30>{}));
  }
};

TEST(ShareRows, RefusesByName) {
  EXPECT_EQ(fovea_rows_plan(nullptr, nullptr), FOVEA_INVALID_ARGUMENT);
  EXPECT_STREQ(fovea_last_error(), "rows: NULL; accepted: a pointer");
  const auto refused = [](auto change, const std::string& says, fovea_status status = FOVEA_INVALID_ARGUMENT) {
    Asked asked;
    change(asked);
    asked.refused(status, says);
  };
  refused([](Asked& a) { a.asked.size = 8; }, "rows: size 8; accepted: sizeof(fovea_rows)");
  refused([](Asked& a) { a.asked.kind = 3; }, "kind: 3; accepted: FOVEA_ROWS_ZIGZAG (0)");
  refused([](Asked& a) { a.asked.flags = FOVEA_SCALE; }, "flags: 0x4; accepted: FOVEA_CAUSAL");
  refused([](Asked& a) { a.asked.ranks = 0; }, "ranks: 0; accepted: 1 to 65536");
  refused([](Asked& a) { a.asked.ranks = 65537; }, "ranks: 65537; accepted: 1 to 65536");
  refused([](Asked& a) { a.asked.head_ranks = -1; }, "head_ranks: -1; accepted: 1 to 65536");
  refused([](Asked& a) { a.asked.head_ranks = 16385; },
          "ranks: 4 with head_ranks 16385; accepted: a product of at most");
  refused([](Asked& a) { a.asked.block = -128; }, "block: -128; accepted: 1 to 2147483648");
  refused([](Asked& a) { a.asked.sequences = 2; }, "sequences: 2; accepted: 1, or kind FOVEA_ROWS_PACKED or");
  refused([](Asked& a) { a.asked.kind = FOVEA_ROWS_PACKED, a.asked.sequences = -1; }, "sequences: -1; accepted: 0 to");
  refused([](Asked& a) { a.asked.lengths = nullptr; }, "lengths: NULL; accepted: 1 numbers");
  refused([](Asked& a) { a.lengths[0] = -5; }, "lengths: -5 at place 0; accepted: 0 or more");
  refused([](Asked& a) { a.lengths[0] = (std::int64_t{1} << 31) + 1; }, "lengths: 2147483649 at place 0; accepted: ");
  refused([](Asked& a) { a.asked.flags = FOVEA_WINDOW, a.asked.window_left = -2; }, "window_left: -2; accepted: -1");
  refused([](Asked& a) { a.asked.flags = FOVEA_WINDOW, a.asked.window_right = -2; }, "window_right: -2; accepted: -1");
  refused([](Asked& a) { a.asked.piece_capacity = 3; }, "piece_capacity: 3; accepted: at least 7");
}

TEST(ShareRows, NeededIsSaidWhereTheCapacityIsTooSmall) {
  Asked asked;
  asked.asked.piece_capacity = 0;
  std::int64_t needed = -1;
  EXPECT_EQ(fovea_rows_plan(&asked.asked, &needed), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(needed, 7);
}

// A newer program's struct: longer, with fields that this library does not know.
TEST(ShareRows, StructsOfOtherVersions) {
  struct Newer {
    fovea_rows rows;
    std::int64_t field = 0;
  } newer{};
  Asked asked;
  newer.rows = asked.asked;
  newer.rows.size = sizeof(newer);
  EXPECT_EQ(fovea_rows_plan(&newer.rows, nullptr), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(asked.rows[0], 128 + 104);  // the first piece, and the last, which is short
  newer.field = 1;
  EXPECT_EQ(fovea_rows_plan(&newer.rows, nullptr), FOVEA_UNSUPPORTED);
}

}  // namespace
