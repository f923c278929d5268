// SPDX-License-Identifier: Apache-2.0
//
// The reference by standards of its own: every gradient against finite differences in fp64, over a table in which
// every pair of features occurs. (tests/oracle.py, in Python, checks its values.)
#include <gtest/gtest.h>

#include "check/run.h"

namespace fovea::check {
namespace {

class ReferenceTest : public testing::TestWithParam<std::size_t> {};

TEST_P(ReferenceTest, GradientsAreFiniteDifferences) {
  const Case& c = cases(Table::kReduced)[GetParam()];
  const Outcome outcome = gradient(c, "reference");
  EXPECT_TRUE(outcome.passed()) << to_text(c) << '\n' << to_text(outcome);
}

INSTANTIATE_TEST_SUITE_P(Reduced, ReferenceTest, testing::Range(std::size_t{0}, cases(Table::kReduced).size()));

}  // namespace
}  // namespace fovea::check
