// SPDX-License-Identifier: Apache-2.0
//
// Band against the specification's inequality, element by element, over every small (Sq, Sk, left, right, alignment,
// causal): the predicate and everything derived from it, in both integer types.
#include "math/band.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace fovea::math {
namespace {

struct Setting {
  i64 seqlen_q, seqlen_k, left, right;
  bool causal, top_left;
};

// The specification, with nothing of ours in it; wide enough for any window.
bool allowed(const Setting& s, i64 i, i64 j) {
  __extension__ using Wide = __int128;
  const Wide shift = s.top_left ? 0 : Wide(s.seqlen_k - s.seqlen_q);
  return (!s.causal || j <= i + shift) && (s.left < 0 || i + shift - s.left <= j) &&
         (s.right < 0 || j <= i + shift + s.right);
}

template <class F>
void for_each_setting(i64 longest, const std::vector<i64>& reaches, F&& f) {
  for (i64 seqlen_q = 0; seqlen_q <= longest; ++seqlen_q) {
    for (i64 seqlen_k = 0; seqlen_k <= longest; ++seqlen_k) {
      for (const i64 left : reaches) {
        for (const i64 right : reaches) {
          for (const bool causal : {false, true}) {
            for (const bool top_left : {false, true}) {
              f(Setting{seqlen_q, seqlen_k, left, right, causal, top_left});
              if (testing::Test::HasFatalFailure()) {
                return;
              }
            }
          }
        }
      }
    }
  }
}

template <class Int>
Band<Int> make(const Setting& s) {
  return Band<Int>::make(static_cast<Int>(s.seqlen_q), static_cast<Int>(s.seqlen_k), s.causal, s.left, s.right,
                         s.top_left);
}

template <class Int>
class BandTest : public testing::Test {};
using Ints = testing::Types<i32, i64>;
TYPED_TEST_SUITE(BandTest, Ints);

const std::vector<i64> kReaches = {-1, 0, 1, 2, 3, 5, 100, std::int64_t{1} << 40, INT64_MAX};

TYPED_TEST(BandTest, PredicateRowsAndColumns) {
  using Int = TypeParam;
  i64 settings = 0;
  for_each_setting(6, kReaches, [&](const Setting& s) {
    ++settings;
    const auto band = make<Int>(s);
    std::vector<i64> in_row(s.seqlen_q), in_column(s.seqlen_k);
    for (Int i = 0; i < s.seqlen_q; ++i) {
      for (Int j = 0; j < s.seqlen_k; ++j) {
        const bool expected = allowed(s, i, j);
        ASSERT_EQ(band.allowed(i, j), expected) << i << ' ' << j;
        ASSERT_EQ(band.keys_of(i).contains(j), expected);
        ASSERT_EQ(band.queries_of(j).contains(i), expected);
        in_row[i] += expected;
        in_column[j] += expected;
      }
    }
    // Nothing outside the sequences is in an interval either, and none has a negative size.
    for (Int i = 0; i < s.seqlen_q; ++i) {
      ASSERT_EQ(band.keys_of(i).size(), in_row[i]);
    }
    for (Int j = 0; j < s.seqlen_k; ++j) {
      ASSERT_EQ(band.queries_of(j).size(), in_column[j]);
    }
  });
  EXPECT_EQ(settings, 7 * 7 * static_cast<i64>(kReaches.size() * kReaches.size()) * 4);
}

TYPED_TEST(BandTest, RangesOfRowsAndKeysAreUnions) {
  using Int = TypeParam;
  for_each_setting(5, {-1, 0, 1, 3, 100}, [&](const Setting& s) {
    const auto band = make<Int>(s);
    for (Int begin = 0; begin < s.seqlen_q; ++begin) {
      for (Int end = begin + 1; end <= s.seqlen_q; ++end) {
        const auto range = band.keys_of_rows(begin, end);
        for (Int j = 0; j < s.seqlen_k; ++j) {
          bool met = false;
          for (Int i = begin; i < end; ++i) {
            met = met || allowed(s, i, j);
          }
          ASSERT_EQ(range.contains(j), met);
        }
        ASSERT_GE(range.begin, 0);
        ASSERT_LE(range.end, s.seqlen_k);
        ASSERT_GE(range.size(), 0);
      }
    }
    for (Int begin = 0; begin < s.seqlen_k; ++begin) {
      for (Int end = begin + 1; end <= s.seqlen_k; ++end) {
        const auto range = band.queries_of_keys(begin, end);
        for (Int i = 0; i < s.seqlen_q; ++i) {
          bool met = false;
          for (Int j = begin; j < end; ++j) {
            met = met || allowed(s, i, j);
          }
          ASSERT_EQ(range.contains(i), met);
        }
        ASSERT_GE(range.begin, 0);
        ASSERT_LE(range.end, s.seqlen_q);
        ASSERT_GE(range.size(), 0);
      }
    }
  });
}

TYPED_TEST(BandTest, TilesAreClassedExactly) {
  using Int = TypeParam;
  i64 classes[3] = {};
  for_each_setting(5, {-1, 0, 1, 2, 100}, [&](const Setting& s) {
    const auto band = make<Int>(s);
    for (Int i = 0; i < s.seqlen_q; ++i) {
      for (Int i_end = i + 1; i_end <= s.seqlen_q; ++i_end) {
        for (Int j = 0; j < s.seqlen_k; ++j) {
          for (Int j_end = j + 1; j_end <= s.seqlen_k; ++j_end) {
            i64 inside = 0;
            for (Int row = i; row < i_end; ++row) {
              for (Int col = j; col < j_end; ++col) {
                inside += allowed(s, row, col);
              }
            }
            const i64 all = i64(i_end - i) * i64(j_end - j);
            const TileClass expected = inside == 0     ? TileClass::kEmpty
                                       : inside == all ? TileClass::kFull
                                                       : TileClass::kEdge;
            ASSERT_EQ(band.tile(i, i_end, j, j_end), expected);
            ++classes[static_cast<int>(expected)];
          }
        }
      }
    }
  });
  EXPECT_GT(classes[0], 1000);
  EXPECT_GT(classes[1], 1000);
  EXPECT_GT(classes[2], 1000);
}

TYPED_TEST(BandTest, LongSequencesDoNotOverflow) {
  using Int = TypeParam;
  const Int length = Int(1) << (sizeof(Int) * 8 - 5);
  for (const bool top_left : {false, true}) {
    const auto band = Band<Int>::make(length, length / 2, false, -1, -1, top_left);
    EXPECT_EQ(band.keys_of(0).size(), length / 2);
    EXPECT_EQ(band.keys_of(length - 1).size(), length / 2);
    EXPECT_EQ(band.queries_of(length / 2 - 1).size(), length);
    EXPECT_EQ(band.tile(0, length, 0, length / 2), TileClass::kFull);
  }
  const auto causal = Band<Int>::make(length, length, true, -1, -1, false);
  EXPECT_EQ(causal.keys_of(length - 2).end, length - 1);
  EXPECT_EQ(causal.queries_of(length - 2).begin, length - 2);
}

static_assert(Band<i64>::make(4, 6, true, 1, -1, false).keys_of(0) == Interval<i64>{1, 3});
static_assert(Interval<i64>{70, 129}.first_step(64) == 64 && Interval<i64>{70, 129}.steps_from(64, 64) == 2);
static_assert(Interval<i64>{70, 128}.steps_from(64, 64) == 1 && Interval<i64>{70, 70}.steps_from(64, 64) == 0);

}  // namespace
}  // namespace fovea::math
