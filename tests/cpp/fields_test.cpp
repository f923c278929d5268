// SPDX-License-Identifier: Apache-2.0
//
// core/fields.h names every field of a Problem and every view of a Call; a backend refuses fields that it does not
// name.
#include "core/fields.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>

#include "cpu/cpu.h"
#include "cuda/cuda.h"

namespace fovea {

// A problem with a feature that was added after the backends were written.
struct LaterProblem {
  Problem problem;
  bool later = false;
  int later_text = 0;
  friend bool operator==(const LaterProblem&, const LaterProblem&) = default;
};

template <class P, class Visit>
requires std::same_as<std::remove_const_t<P>, LaterProblem>
void for_each_field(P& problem, Visit visit) {
  for_each_field(problem.problem, visit);
  visit("later", problem.later, Of<Role::kPlan>{});
  visit("later_text", problem.later_text, Of<Role::kText>{});
}

namespace {

// Whether fields follow one another in memory with no room for one between them.
class Adjacent {
 public:
  template <class Field>
  void operator()(const char* name, const Field& field) {
    const auto begin = reinterpret_cast<std::uintptr_t>(&field);
    EXPECT_TRUE(names_.insert(name).second) << name << " twice";
    if (end_ != 0) {
      EXPECT_GE(begin, end_) << name;
      EXPECT_LT(begin, end_ + alignof(Field)) << "something lies before " << name << " that is not visited";
    }
    end_ = begin + sizeof(Field);
  }
  std::uintptr_t end() const { return end_; }

 private:
  std::set<std::string> names_;
  std::uintptr_t end_ = 0;
};

TEST(Fields, EveryFieldOfAProblemIsVisited) {
  const Problem problem;
  Adjacent adjacent;
  for_each_field(problem, [&](const char* name, const auto& field, Role) { adjacent(name, field); });
  const auto begin = reinterpret_cast<std::uintptr_t>(&problem);
  EXPECT_LE(begin + sizeof(Problem) - adjacent.end(), alignof(Problem) - 1);
}

TEST(Fields, EveryViewOfACallIsVisited) {
  const Call call{};
  Adjacent adjacent;
  for_each_view(call, [&](const char* name, const View& view, Role) { adjacent(name, view); });
  EXPECT_EQ(adjacent.end(), reinterpret_cast<std::uintptr_t>(&call.lengths));
}

TEST(Fields, BackendsKnowEveryField) {
  EXPECT_EQ(unknown_fields<Problem>(cuda::kKnownFields), FieldNames{});
  EXPECT_EQ(unknown_fields<Problem>(cpu::kKnownFields), FieldNames{});
}

TEST(Fields, AFieldThatABackendDoesNotKnowIsRefused) {
  using Known = std::span<const std::string_view>;
  for (const Known known : {Known(cuda::kKnownFields), Known(cpu::kKnownFields)}) {
    const FieldNames unknown = unknown_fields<LaterProblem>(known);
    ASSERT_EQ(unknown, FieldNames{"later"}) << "the backend lacks another field, or Problem has one of this name";
    LaterProblem problem;
    problem.problem.causal = true;
    problem.later_text = 1;
    EXPECT_NO_THROW(refuse_fields(problem, unknown)) << "it is not given";
    problem.later = true;
    try {
      refuse_fields(problem, unknown);
      ADD_FAILURE() << "ignored";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), FOVEA_UNSUPPORTED);
      EXPECT_EQ(std::string(error.what()), "later: this backend does not know it");
    }
  }
}

TEST(Fields, AFieldThatIsTakenOutOfTheListIsRefused) {
  // As if softcap and a bias had been added and forgotten.
  const FieldNames unknown = {"softcap", "bias"};
  EXPECT_NO_THROW(refuse_fields(parse("fwd b=1 hq=1 sq=8 sk=8 d=8 fp32 causal"), unknown));
  EXPECT_THROW(refuse_fields(parse("fwd b=1 hq=1 sq=8 sk=8 d=8 fp32 softcap=3"), unknown), Error);
  EXPECT_THROW(refuse_fields(parse("fwd b=1 hq=1 sq=8 sk=8 d=8 fp32 bias=1,h,q,k"), unknown), Error);
}

}  // namespace
}  // namespace fovea
