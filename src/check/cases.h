// SPDX-License-Identifier: Apache-2.0
//
// The case table: problems in which every legal pair of feature values meets every head-dim class, every type,
// every alignment class and every way that rows can lie, once at least. It is generated, always the same, from
// make_features() in cases.cpp, where a feature's values stand as pieces of the one-line text form.
//
// A row chooses one value of each feature. The first kStructural features (type, head dims, memory, rows) are
// crossed with one another in full; the others fill in greedily whatever (pair of values, structural value) is
// still missing. The last kCoveredByPairs (positions, streams of dropout, types of results and what is added) change
// the band, ALiBi and dropout alone, or how results are stored: the rows that have them come behind the others and
// cover pairs of values. tests/cpp/cases_test.cpp computes the coverage from the rows, and does not take it on trust.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/problem.h"

namespace fovea::check {

// What the numbers are like; every kind but kNormal is adversarial.
enum class Values {
  kNormal,         // N(0, 1) everywhere
  kLargeScores,    // q and k thirty times that
  kOneHot,         // one key of each row has nearly all the weight
  kDeadRows,       // every third row has its mask false (or its bias -inf) throughout
  kMinusInfinity,  // a third of the bias is -inf
  kHuge,           // a third of the bias is 1e30 or -1e30, as far as its type goes
  kLowest,         // every third row of the bias is its type's lowest finite number throughout
  kDenormal,       // v and grad_out are denormal
  kNanWhereMasked  // biases are NaN wherever mask or band leave out all pairs of an element
};
std::string_view name_of(Values values);

struct Case {
  Problem problem;  // a backward; its forward goes with it
  Values values = Values::kNormal;
  std::uint64_t seed = 0;
  std::vector<int> choice;  // the value of each feature; empty if the case is not of the covering
};

// The forward of a row, with the logsumexp. Where gradients are added, it is merged into an out that has no 16 bits.
Problem forward_of(const Problem& row);

// The problem's line and what the values are like, "bwd b=2 ... values=one_hot": what filters are matched against.
std::string to_text(const Case& c);

// What the problem of these numbers lacks, "a bias", or "". legal() has the same for the rows of the table.
std::string lacks(const Problem& p, Values values);

struct Feature {
  std::string_view name;
  std::vector<std::string_view> values;
};
const std::vector<Feature>& features();
inline constexpr int kStructural = 4;      // so many of the first features are crossed in full
inline constexpr int kCoveredByPairs = 3;  // so many of the last meet each value of another feature once

// Whether a row may choose so; -1 is a feature that is not chosen yet. What is legal in part can be completed.
bool legal(const std::vector<int>& choice);

enum class Table {
  kFull,
  kReduced  // pairs of values alone, for sanitizers and emulators
};

// Features, sizes and numbers drawn by the seed: what no row of the table has.
Case random_case(std::uint64_t seed);

// kReduced where the environment variable FOVEA_CASES is "reduced".
Table table_of_environment();
const std::vector<Case>& cases(Table table);

}  // namespace fovea::check
