// SPDX-License-Identifier: Apache-2.0
//
// The greedy covering: rows of values of features, one index a feature, that meet every goal of a table.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "check/cases.h"

namespace fovea::check {

// The first of the features that are covered by pairs alone.
inline int first_of_pairs() { return static_cast<int>(features().size()) - kCoveredByPairs; }

// A set of (value, value, value), each a value of another feature, numbered through all features.
class Triples {
 public:
  Triples() {
    int count = 0;
    for (const Feature& feature : features()) {
      first_.push_back(count);
      count += static_cast<int>(feature.values.size());
    }
    count_ = count;
    bits_.resize(static_cast<std::size_t>(count) * count * count);
  }
  std::vector<bool>::reference at(int feature1, int value1, int feature2, int value2, int feature3, int value3) {
    const int a = first_[feature1] + value1;
    const int b = first_[feature2] + value2;
    const int c = first_[feature3] + value3;
    return bits_[(static_cast<std::size_t>(a) * count_ + b) * count_ + c];
  }

 private:
  std::vector<int> first_;
  int count_ = 0;
  std::vector<bool> bits_;
};

// Calls f(s, a, b) for every structural feature s and pair a < b of others; all three differ. Pairs alone, where
// the table is reduced and of the last features, are the triples whose structural feature is not looked at: s == a.
template <class F>
void for_each_goal(Table table, int count, F&& f) {
  for (int a = 0; a < count; ++a) {
    for (int b = a + 1; b < count; ++b) {
      if (table == Table::kReduced || b >= first_of_pairs()) {
        f(a, a, b);
        continue;
      }
      for (int s = 0; s < kStructural; ++s) {
        if (s != a && s != b) {
          f(s, a, b);
        }
      }
    }
  }
}

class Covering {
 public:
  explicit Covering(Table table) : table_(table) {
    if (table == Table::kFull) {
      std::vector<int> choice = nothing_chosen();
      cross_structural(choice, 0);
    }
    cover();
  }

  // Rows for the features that cover pairs, behind the others.
  void cover_pairs() {
    table_ = Table::kReduced;
    count_ = static_cast<int>(features().size());
    cover();
  }

  std::vector<std::vector<int>> rows;

 private:
  // The features that are not covered yet have their first value.
  std::vector<int> nothing_chosen() const {
    std::vector<int> choice(features().size(), 0);
    std::fill_n(choice.begin(), count_, -1);
    return choice;
  }

  void cover() {
    for_each_goal(table_, count_, [&](int s, int a, int b) {
      if (count_ > first_of_pairs() && b < first_of_pairs()) {
        return;  // covered before
      }
      for_each_value(s, a, b, [&](int vs, int va, int vb) {
        std::vector<int> choice = nothing_chosen();
        choice[s] = vs;
        choice[a] = va;
        choice[b] = vb;
        if (legal(choice) && !covered_.at(s, vs, a, va, b, vb)) {
          complete(choice);
        }
      });
    });
  }

  template <class F>
  void for_each_value(int s, int a, int b, F&& f) const {
    const auto count = [](int feature) { return static_cast<int>(features()[feature].values.size()); };
    for (int va = 0; va < count(a); ++va) {
      for (int vb = 0; vb < count(b); ++vb) {
        for (int vs = s == a ? va : 0; vs < (s == a ? va + 1 : count(s)); ++vs) {
          f(vs, va, vb);
        }
      }
    }
  }

  void cross_structural(std::vector<int>& choice, int feature) {
    if (feature == kStructural) {
      complete(choice);
      return;
    }
    for (int value = 0; value < static_cast<int>(features()[feature].values.size()); ++value) {
      choice[feature] = value;
      if (legal(choice)) {
        cross_structural(choice, feature + 1);
      }
    }
    choice[feature] = -1;
  }

  // Takes, feature by feature, the legal value that adds most goals; ties go round, so that none is favoured.
  void complete(std::vector<int> choice) {
    const int count = count_;
    // Features that others depend on are chosen late in the list, so start at a place that moves from row to row.
    for (int step = 0; step < count; ++step) {
      const int feature = (step + static_cast<int>(rows.size())) % count;
      if (choice[feature] >= 0) {
        continue;
      }
      const int values = static_cast<int>(features()[feature].values.size());
      int best = -1;
      int best_gain = -1;
      for (int n = 0; n < values; ++n) {
        std::vector<int> with = choice;
        with[feature] = (n + static_cast<int>(rows.size())) % values;
        if (legal(with)) {
          const int gained = gain(with, feature);
          if (gained > best_gain) {
            best = with[feature];
            best_gain = gained;
          }
        }
      }
      choice[feature] = best;
    }
    for_each_goal(table_, static_cast<int>(features().size()),
                  [&](int s, int a, int b) { covered_.at(s, choice[s], a, choice[a], b, choice[b]) = true; });
    rows.push_back(std::move(choice));
  }

  int gain(const std::vector<int>& choice, int feature) {
    int gained = 0;
    const int count = count_;
    const auto look = [&](int s, int a, int b) {
      gained +=
          !covered_.at(s, choice[s], std::min(a, b), choice[std::min(a, b)], std::max(a, b), choice[std::max(a, b)]);
    };
    for (int other = 0; other < count; ++other) {
      if (other == feature || choice[other] < 0) {
        continue;
      }
      if (table_ == Table::kReduced) {
        look(std::min(feature, other), feature, other);
        continue;
      }
      for (int s = 0; s < kStructural; ++s) {
        if (s != feature && s != other && choice[s] >= 0) {
          look(s, feature, other);
        }
      }
      if (feature < kStructural) {
        for (int third = other + 1; third < count; ++third) {
          if (third != feature && choice[third] >= 0) {
            look(feature, other, third);
          }
        }
      }
    }
    return gained;
  }

  Table table_;
  int count_ = first_of_pairs();  // of the features that are looked at
  Triples covered_;
};

}  // namespace fovea::check
