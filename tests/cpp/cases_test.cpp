// SPDX-License-Identifier: Apache-2.0
//
// The case table: its coverage, computed from its rows; every row on every instruction set that this machine runs
// against the reference; the same bits whatever the number of threads; and what does not fit a table: dropout
// decisions read out of the kernels, empty problems, the caller's floating-point environment.
//
// FOVEA_CASES=reduced takes the small table. All calls go through the public C functions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <set>
#include <string>
#include <tuple>

#include "check/naive.h"
#include "check/run.h"
#include "core/validate.h"
#include "cpu/cpu.h"
#include "cpu/schedule.h"
#include "environment_variable.h"
#include "instruction_sets.h"
#include "reference/reference.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fovea::check {
namespace {

using testing::available_isas;
using testing::ForcedIsa;
using Environment = testing::EnvironmentVariable;

class Threads {
 public:
  explicit Threads(int n) { fovea_set_num_threads(n); }
  ~Threads() { fovea_set_num_threads(0); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
};

// ---- the table ----

TEST(CasesTest, EveryLegalPairMeetsEveryStructuralValue) {
  const int count = static_cast<int>(features().size());
  const auto values = [](int feature) { return static_cast<int>(features()[feature].values.size()); };
  std::set<std::tuple<int, int, int, int, int, int>> covered;
  for (const Case& c : cases(Table::kFull)) {
    if (c.choice.empty()) {
      continue;
    }
    ASSERT_EQ(static_cast<int>(c.choice.size()), count);
    ASSERT_TRUE(legal(c.choice));
    for (int s = 0; s < kStructural; ++s) {
      for (int a = 0; a < count; ++a) {
        for (int b = a + 1; b < count; ++b) {
          covered.emplace(s, c.choice[s], a, c.choice[a], b, c.choice[b]);
        }
      }
    }
  }
  int goals = 0;
  int missing = 0;
  for (int s = 0; s < kStructural; ++s) {
    for (int a = 0; a < count; ++a) {
      for (int b = a + 1; b < count; ++b) {
        if (s == a || s == b || b >= count - kCoveredByPairs) {
          continue;
        }
        for (int vs = 0; vs < values(s); ++vs) {
          for (int va = 0; va < values(a); ++va) {
            for (int vb = 0; vb < values(b); ++vb) {
              std::vector<int> choice(count, -1);
              choice[s] = vs;
              choice[a] = va;
              choice[b] = vb;
              if (legal(choice)) {
                ++goals;
                missing += covered.count({s, vs, a, va, b, vb}) == 0;
              }
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(missing, 0);
  EXPECT_GT(goals, 40000);
  EXPECT_GE(cases(Table::kFull).size(), 400u);
  std::printf("%zu cases cover %d combinations\n", cases(Table::kFull).size(), goals);
}

void expect_every_pair(Table table) {
  const int count = static_cast<int>(features().size());
  std::set<std::tuple<int, int, int, int>> covered;
  for (const Case& c : cases(table)) {
    if (c.choice.empty()) {
      continue;
    }
    for (int a = 0; a < count; ++a) {
      for (int b = a + 1; b < count; ++b) {
        covered.emplace(a, c.choice[a], b, c.choice[b]);
      }
    }
  }
  for (int a = 0; a < count; ++a) {
    for (int b = a + 1; b < count; ++b) {
      for (int va = 0; va < static_cast<int>(features()[a].values.size()); ++va) {
        for (int vb = 0; vb < static_cast<int>(features()[b].values.size()); ++vb) {
          std::vector<int> choice(count, -1);
          choice[a] = va;
          choice[b] = vb;
          EXPECT_TRUE(!legal(choice) || covered.count({a, va, b, vb}) == 1);
        }
      }
    }
  }
}

TEST(CasesTest, EveryTableHasEveryPair) {
  expect_every_pair(Table::kFull);
  expect_every_pair(Table::kReduced);
  EXPECT_LT(cases(Table::kReduced).size(), 130u);
}

TEST(CasesTest, WhatARowChoosesIsInItsLine) {
  // A feature that a row chooses and that its line does not have would be covered by name alone.
  for (const Case& c : cases(Table::kReduced)) {
    for (std::size_t f = 0; f < features().size() && !c.choice.empty(); ++f) {
      const auto& [name, values] = features()[f];
      const std::string value(values[static_cast<std::size_t>(c.choice[f])]);
      if (values[0].empty() && !value.empty()) {
        const std::string word = name == "used"      ? "used_"
                                 : name == "bias"    ? "bias="
                                 : value == "fp32"   ? "wide="
                                 : name == "results" ? "add="
                                                     : value.substr(0, value.find('='));
        EXPECT_NE(print(c.problem).find(" " + word), std::string::npos) << name << ": " << print(c.problem);
      }
    }
  }
}

TEST(CasesTest, LinesAreUniqueAndSayTheProblem) {
  std::set<std::string> lines;
  for (const Case& c : cases(Table::kFull)) {
    EXPECT_TRUE(lines.insert(to_text(c)).second) << to_text(c);
    EXPECT_EQ(parse(print(c.problem)), c.problem) << to_text(c);
    EXPECT_EQ(lacks(c.problem, c.values), "") << to_text(c);
  }
}

// The modes that compute nothing to compare. What a row's arithmetic is, by hand.
TEST(CasesTest, EveryRowIsComputedByTheCpuAndCanBeTimed) {
  const Environment unforced("FOVEA_BACKEND", "");
  for (const Case& c : cases(Table::kFull)) {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      Case one = c;
      one.problem = direction == Direction::kForward ? forward_of(c.problem) : c.problem;
      for (const Verdict& verdict : support(one, direction)) {
        EXPECT_EQ(verdict.used, verdict.backend == "cpu") << to_text(c) << ": " << verdict.reason;
      }
    }
  }
  Case c;
  c.problem = parse("bwd b=2 hq=3 sq=4 sk=6 d=5 dv=7 causal used_q=4,2");
  // Rows 0 to 3 of the first entry meet 3 to 6 keys, rows 0 and 1 of the second 5 and 6: 29 pairs in each head.
  EXPECT_EQ(flops(c.problem, Direction::kForward), 2.0 * 3 * 29 * (5 + 7));
  EXPECT_EQ(flops(c.problem, Direction::kBackward), 2.0 * 3 * 29 * (3 * 5 + 2 * 7));
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const Timing timing = bench(c, direction, "cpu", 0);
    EXPECT_GT(timing.seconds, 0);
    EXPECT_LT(timing.seconds, 60);
    EXPECT_EQ(timing.flops, flops(c.problem, direction));
  }
}

// ---- every row ----

class CasesOfTheTable : public ::testing::TestWithParam<std::size_t> {};

std::vector<std::uint8_t> bytes_of_threads(const Trial& trial, int n) {
  const Threads threads(n);
  return trial.bytes("cpu");
}

void test_everywhere(const Case& c) {
  const Trial trial(c);
  for (const std::string& isa : available_isas()) {
    const ForcedIsa forced(isa);
    if (isa != cpu::kernels_for(c.problem.type).name) {
      continue;  // a matrix unit computes one type; the others are another instruction set's
    }
    const Outcome outcome = trial.test("cpu");
    EXPECT_TRUE(outcome.passed()) << isa << ": " << to_text(c) << '\n' << to_text(outcome);
    EXPECT_TRUE(bytes_of_threads(trial, 1) == bytes_of_threads(trial, 3)) << isa << ": other bits: " << to_text(c);
  }
  // The library's own choice, so that each of these runs is also one without forcing.
  std::vector<std::uint8_t> first;
  for (const int n : {1, 2, 3, 7}) {
    const std::vector<std::uint8_t> bytes = bytes_of_threads(trial, n);
    if (first.empty()) {
      first = bytes;
    }
    EXPECT_EQ(bytes == first, true) << n << " threads: other bits: " << to_text(c);
  }
}

TEST_P(CasesOfTheTable, AgreesWithTheReference) { test_everywhere(cases(table_of_environment())[GetParam()]); }

INSTANTIATE_TEST_SUITE_P(Table, CasesOfTheTable,
                         ::testing::Range(std::size_t{0}, cases(table_of_environment()).size()));

// ---- problems beside the table ----

class CasesBesideTheTable : public ::testing::TestWithParam<const char*> {};

TEST_P(CasesBesideTheTable, AgreesWithTheReference) {
  Case c;
  c.problem = parse(GetParam());
  c.seed = 1000;
  test_everywhere(c);
}

INSTANTIATE_TEST_SUITE_P(Empty, CasesBesideTheTable,
                         ::testing::Values("bwd b=0 hq=2 sq=5 sk=7 d=8 bias=b,h,q,k sink", "bwd b=2 hq=0 sq=5 sk=7 d=8",
                                           "bwd b=2 hq=2 sq=0 sk=7 d=8 bias=1,h,q,k sink dlse",
                                           "bwd b=2 hq=2 sq=5 sk=0 d=8 bias=1,h,q,k sink dlse",
                                           "bwd b=2 hq=2 sq=5 sk=0 d=8 bias=1,h,q,1 mask=b,1,1,k",
                                           "bwd b=2x0 hq=2 sq=5 sk=7 d=8 bias=b1,h,q,k",
                                           "bwd b=3 hq=2 seqs_q=0x3 seqs_k=0x3 d=8 bias=1,h,q,k",
                                           "bwd b=2 hq=2 seqs_q=3,0 seqs_k=0,4 d=8 total_q=5 max_q=4 bias=1,h,q,k",
                                           "bwd b=2 hq=2 sq=5 sk=7 used_q=0x2 used_k=0x2 d=8 bias=1,1,q,k"));

// Queries and keys of one tensor that has more rows than one of them uses.
INSTANTIATE_TEST_SUITE_P(OneTensor, CasesBesideTheTable,
                         ::testing::Values("bwd b=3 hq=3 hk=1 sq=17 sk=40 d=16 bf16 layout=qkv3 used_q=15,5,16",
                                           "bwd b=2 hq=2 sq=40 sk=17 d=16 dv=24 layout=qkv3 skew=3 bias=b,1,q,k",
                                           "bwd b=2 hq=2 d=16 seqs_q=3,5 seqs_k=9,12 layout=qkv3 causal"));

// Sizes at and around tiles, many heads, one long row, everything dropped.
INSTANTIATE_TEST_SUITE_P(
    Sizes, CasesBesideTheTable,
    ::testing::Values(
        "bwd b=1 hq=1 sq=1 sk=1 d=1", "bwd b=1 hq=1 sq=1 sk=1 d=1 dv=3 bf16 causal sink",
        "bwd b=1 hq=1 sq=1 sk=3000 d=64", "bwd b=1 hq=1 sq=3000 sk=1 d=64",
        "bwd b=1 hq=2 hk=1 sq=2 sk=2500 d=64 fp16 used_k=2400 bias=b,1,1,k:fp32",
        "bwd b=1 hq=1 sq=600 sk=600 d=64 causal", "bwd b=1 hq=2 hk=1 sq=390 sk=555 d=64 dv=40 bf16 causal",
        "bwd b=1 hq=1 sq=300 sk=700 d=40 dv=70 bf16 window=200,50 align=tl bias=1,h,q,k dropout=0.2",
        "bwd b=1 hq=1 sq=513 sk=700 d=32 window=100,30 align=tl", "bwd b=1 hq=1 sq=700 sk=513 d=16 causal bias=1,1,q,k",
        "bwd b=3 hq=40 hk=8 sq=17 sk=19 d=12", "bwd b=1 hq=1 sq=257 sk=255 d=300 dv=20 bf16",
        "bwd b=1 hq=1 sq=64 sk=64 d=64 dropout=1 dlse sink",
        "bwd b=1 hq=1 sq=64 sk=64 d=64 dropout=1 rng=torch_mem_efficient dlse",
        // max_seqlen beyond all rows: nothing but the dimensions of a bias and torch's numbering follows it.
        "bwd b=2 hq=2 seqs_q=9,20 seqs_k=13,8 d=8 max_q=1099511627776 max_k=999999999999 bias=b,h,1,1 sink dlse",
        "bwd b=2 hq=2 seqs_q=9,20 seqs_k=13,8 d=8 max_q=40 max_k=50 bias=1,h,q,k bias2=b,1,q,1:bf16 "
        "mask=b,h,q,k dropout=0.2 rng=torch_mem_efficient",
        "bwd b=2 hq=1 sq=300 sk=300 d=64 dropout=0.5 seed=3 alibi=b,h softcap=5 bias=1,1,q,k det"));

// Up to 8 rows of a key head read K and V in place, where rows are at least a vector long: at, below and above these
// limits, lengths that are whole vectors of one instruction set only, keys around blocks and halves of them.
INSTANTIATE_TEST_SUITE_P(
    FewRows, CasesBesideTheTable,
    ::testing::Values("bwd b=2 hq=2 sq=1 sk=700 d=64 dlse", "bwd b=1 hq=8 hk=1 sq=1 sk=515 d=64 dv=128",
                      "bwd b=1 hq=9 hk=1 sq=1 sk=515 d=64", "bwd b=1 hq=2 hk=1 sq=3 sk=333 d=40 dv=72 causal",
                      "bwd b=1 hq=1 sq=2 sk=37 d=17 dv=16", "bwd b=1 hq=1 sq=1 sk=37 d=15 dv=31",
                      "bwd b=3 hq=1 sq=1 sk=1030 d=33 dv=9 fp64 bias=1,h,q,k", "bwd b=1 hq=4 hk=2 sq=2 sk=99 d=24 fp16",
                      "bwd b=2 hq=4 hk=1 sq=1 sk=1500 d=80 bf16 used_k=1,1400 causal",
                      "bwd b=1 hq=4 hk=1 sq=2 sk=300 d=96 dv=200 bf16 window=70,20 sink",
                      "bwd b=2 hq=2 seqs_q=1,3 seqs_k=40,17 d=64 bf16 mask=b,1,1,k dropout=0.2",
                      "bwd b=1 hq=1 sq=4 sk=260 d=260 softcap=5 alibi=h"));

// The gradient of a bias is written in place where its rows are whole tiles, which are of 8, 16 or 32 keys.
INSTANTIATE_TEST_SUITE_P(GradientsInPlace, CasesBesideTheTable,
                         ::testing::Values("bwd b=2 hq=2 sq=40 sk=48 d=64 bf16 bias=b,h,q,k:fp32 need=bias",
                                           "bwd b=1 hq=2 sq=20 sk=304 d=64 bf16 bias=b,h,q,k:fp32 need=q,bias",
                                           "bwd b=1 hq=1 sq=33 sk=64 d=32 bf16 bias=b,h,q,k:fp32",
                                           "bwd b=1 hq=1 sq=33 sk=56 d=32 fp16 bias=b,h,q,k:fp32"));

// ---- which kernels ran ----

TEST(CasesTest, TheInstructionSetThatIsForcedRuns) {
  Case c;
  c.problem = parse("bwd b=1 hq=1 sq=20 sk=20 d=16 bf16");
  const Tensors tensors(c);
  for (const cpu::Isa& isa : cpu::instruction_sets()) {
    const ForcedIsa forced(isa.name);
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      if (!isa.available) {
        std::printf("skipped, because this machine does not have it: %s\n", isa.name.c_str());
        EXPECT_THROW(call_library(tensors.problem(direction), direction, "cpu"), std::runtime_error);
        continue;
      }
      call_library(tensors.problem(direction), direction, "cpu");
      EXPECT_EQ(std::string(cpu::last_isa()), isa.name);  // as the kernel itself said it
      EXPECT_EQ(plan(validate(tensors.problem(direction), direction, false)).cpu.isa, isa.name);
    }
  }
#ifdef __aarch64__
  EXPECT_EQ(cpu::instruction_sets().back().name, "neon");
#else
  EXPECT_EQ(cpu::instruction_sets().back().name, "portable");
#endif
  EXPECT_TRUE(cpu::instruction_sets().back().available);
}

// ---- dropout, read out of the kernels ----

// q = 0 makes every weight the same; v = 1 at (j, column j) shows in out[i, j] whether (i, j) was kept, and do = 1 at
// (i, column i) shows it in dv[j, i]. What should be there comes from dropout_value() and torch_uniform() alone.
TEST(CasesTest, DropoutDecisionsReadOutOfTheKernels) {
  const char* lines[] = {
      "bwd b=2 hq=4 hk=2 sq=150 sk=150 d=4 dv=150 dropout=0.3 seed=0x123456789abcdef offset=0xfedcba9876543210 need=v",
      "bwd b=2 hq=4 hk=2 sq=150 sk=150 d=4 dv=150 bf16 dropout=0.3 seed=1 need=v",
      "bwd b=2 hq=2 sq=100 sk=100 d=4 dv=100 fp64 dropout=0.7 seed=2 offset=5 need=v",
      "bwd b=2 hq=2 sq=100 sk=100 d=4 dv=100 dropout=0.00002 seed=3 need=v",
      // u(0, 0) = 9096: the threshold itself, and one more. Of torch's uniforms number 0 is 0.39904648.
      "bwd b=1 hq=1 sq=20 sk=20 d=4 dv=20 dropout=0.1387939453125 need=v",
      "bwd b=1 hq=1 sq=20 sk=20 d=4 dv=20 dropout=0.1388092041015625 need=v",
      "bwd b=1 hq=1 sq=20 sk=20 d=4 dv=20 dropout=0.39904648065567017 rng=torch_mem_efficient need=v",
      "bwd b=2 hq=4 hk=2 sq=150 sk=150 d=4 dv=150 dropout=0.3 rng=torch_mem_efficient seed=9 offset=0xfffffffd need=v",
      "bwd b=3 hq=2 seqs_q=70,0,70 seqs_k=33,0,70 max_q=80 max_k=90 d=4 dv=70 dropout=0.4 seed=4 need=v",
      ("bwd b=3 hq=2 seqs_q=70,0,70 seqs_k=33,0,70 max_q=80 max_k=90 d=4 dv=70 dropout=0.4 rng=torch_mem_efficient "
       "seed=4 need=v")};
  for (const char* line : lines) {
    Case c;
    c.problem = parse(line);
    const Problem& p = c.problem;
    const Tensors tensors(c);
    const auto element = [&](const Tensor& t, std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t col) {
      return t.element(p.packed ? Index{row, head, col} : Index{b, row, head, col});
    };
    const auto fill = [&](const char* name, bool identity) {
      const Tensor& t = *tensors.find(name);
      for (const std::int64_t e : t.existing) {
        t.set(e, 0);
      }
      const bool keys = std::string(name) == "v";
      for (std::int64_t b = 0; identity && b < p.batch(); ++b) {
        const math::Sequence s = sequence_of(p, b);
        for (std::int64_t h = 0; h < (keys ? p.heads_k : p.heads_q); ++h) {
          for (std::int64_t n = 0; n < (keys ? s.k_len : s.q_len); ++n) {
            // Of each group of query heads one do is not 0: dv sums over the group.
            if (keys || h % (p.heads_q / p.heads_k) == 0) {
              t.set(element(t, b, (keys ? s.k_begin : s.q_begin) + n, h, n), 1);
            }
          }
        }
      }
    };
    fill("q", false);
    fill("k", false);
    fill("v", true);
    fill("grad_out", true);
    for (const std::string& isa : available_isas()) {
      const ForcedIsa forced(isa);
      call_library(tensors.problem(Direction::kForward), Direction::kForward, "cpu");
      call_library(tensors.problem(Direction::kBackward), Direction::kBackward, "cpu");
      const Tensor& out = *tensors.find("out");
      const Tensor& grad_v = *tensors.find("grad_v");
      int wrong = 0;
      for (std::int64_t b = 0; b < p.batch(); ++b) {
        const math::Sequence s = sequence_of(p, b);
        for (std::int64_t h = 0; h < p.heads_q; ++h) {
          const std::uint64_t n = b * p.heads_q + h;
          const auto words = math::DropoutHead::make(p.seed, p.offset, n);
          const std::int64_t group = p.heads_q / p.heads_k;
          for (std::int64_t i = 0; i < s.q_len; ++i) {
            for (std::int64_t j = 0; j < s.k_len; ++j) {
              const std::uint64_t number = n * p.seqlen_q * p.seqlen_k + i * s.k_len + j;
              const bool keep = p.rng == math::Rng::kFovea
                                    ? math::dropout_value(words, i, j) >= std::floor(p.dropout * 65536 + 0.5)
                                    : math::torch_uniform(p.seed, p.offset + number) > static_cast<float>(p.dropout);
              wrong += (out.get(element(out, b, s.q_begin + i, h, j)) != 0) != keep;
              if (h % group == 0) {
                wrong += (grad_v.get(element(grad_v, b, s.k_begin + j, h / group, i)) != 0) != keep;
              }
            }
          }
        }
      }
      EXPECT_EQ(wrong, 0) << isa << ": " << line;
    }
  }
}

// ---- inputs broadcast by a stride of 0 ----

TEST(CasesTest, InputsWithStrideZero) {
  Case c;
  c.problem =
      parse("bwd b=3 hq=4 hk=2 sq=40 sk=50 d=24 bias=b,h,q,k bias2=b,h,q,k:bf16 mask=b,h,q,k sink alibi=b,h dlse");
  const Tensors tensors(c);
  const struct {
    const fovea_tensor* fovea_problem::*member;
    std::vector<int> dimensions;
  } broadcast[] = {{&fovea_problem::k, {0}},
                   {&fovea_problem::v, {0, 1}},
                   {&fovea_problem::grad_out, {0, 1, 2, 3}},  // what out.sum() gives
                   {&fovea_problem::grad_lse, {2}},
                   {&fovea_problem::bias, {0, 1}},
                   {&fovea_problem::bias2, {2, 3}},
                   {&fovea_problem::mask, {2}},
                   {&fovea_problem::sink, {0}},
                   {&fovea_problem::alibi_slopes, {0}}};
  fovea_problem problem = tensors.problem(Direction::kBackward);
  std::vector<fovea_tensor> views;
  views.reserve(std::size(broadcast));
  for (const auto& [member, dimensions] : broadcast) {
    views.push_back(*(problem.*member));
    for (const int d : dimensions) {
      views.back().stride[d] = 0;
    }
    problem.*member = &views.back();
  }
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    std::vector<std::vector<double>> expected;
    const auto values = [&] {
      std::vector<std::vector<double>> all;
      for (const Tensor* tensor : tensors.outputs(direction)) {
        all.emplace_back();
        for (const std::int64_t element : tensor->existing) {
          all.back().push_back(tensor->get(element));
        }
      }
      return all;
    };
    tensors.prepare(direction);
    call_library(problem, direction, "reference");
    expected = values();
    for (const std::string& isa : available_isas()) {
      const ForcedIsa forced(isa);
      tensors.prepare(direction);
      call_library(problem, direction, "cpu");
      const auto actual = values();
      for (std::size_t t = 0; t < expected.size(); ++t) {
        const Tensor& tensor = *tensors.outputs(direction)[t];
        const double unit = tensor.type() == DType::kBf16 ? 0x1p-8 : 1e-5;
        for (std::size_t n = 0; n < expected[t].size(); ++n) {
          ASSERT_NEAR(actual[t][n], expected[t][n], unit * (1 + std::abs(expected[t][n]))) << isa << ' ' << tensor.name;
        }
      }
    }
  }
}

// ---- the caller's floating-point environment ----

#if defined(__x86_64__)
TEST(CasesTest, MxcsrIsTheCallers) {
  Case c;
  c.problem = parse("bwd b=1 hq=2 sq=70 sk=70 d=32 bias=b,h,q,k dropout=0.1");
  c.values = Values::kDenormal;
  const Tensors tensors(c);
  const unsigned saved = _mm_getcsr();
  for (const unsigned control : {0x1F80u, 0x9FC0u, 0x3F80u, 0x7F80u}) {  // default; flushing; rounding down; to zero
    for (const std::string& isa : available_isas()) {
      const ForcedIsa forced(isa);
      for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
        _mm_setcsr(control);
        call_library(tensors.problem(direction), direction, "cpu");
        const unsigned after = _mm_getcsr();
        _mm_setcsr(saved);
        EXPECT_EQ(after, control) << isa;  // the flags of what has happened, too
      }
    }
  }
}

// Not even where the caller has every exception trapped: rows without keys, denormals, a NaN for a scale.
TEST(CasesTest, NothingTrapsWithinACall) {
  Case c;
  c.problem = parse("bwd b=4 hq=4 sq=70 sk=70 d=32 mask=b,h,q,k bias=b,h,q,k");
  c.values = Values::kDenormal;
  const Tensors tensors(c);
  const Tensor& mask = *tensors.find("mask");
  for (std::size_t key = 0; key < 70; ++key) {
    mask.buffer->data()[mask.existing[key]] = 0;  // of the first row
  }
  fovea_problem nan = tensors.problem(Direction::kForward);
  nan.flags |= FOVEA_SCALE;
  nan.scale = std::numeric_limits<double>::quiet_NaN();
  constexpr unsigned kTrapping = 0x0000;
  const unsigned saved = _mm_getcsr();
  for (const std::string backend : {"cpu", "reference"}) {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      _mm_setcsr(kTrapping);
      call_library(tensors.problem(direction), direction, backend);
      const fovea_status refused = fovea_forward(&nan, nullptr, 0);
      const unsigned after = _mm_getcsr();
      _mm_setcsr(saved);
      EXPECT_EQ(after, kTrapping);
      EXPECT_EQ(refused, FOVEA_INVALID_ARGUMENT);
    }
  }
}

// Threads of the pool compute as the caller's thread would, which may flush denormals.
TEST(CasesTest, MxcsrOfTheCallerHoldsInEveryThread) {
  Case c;
  c.problem = parse("bwd b=4 hq=4 sq=70 sk=70 d=32");
  c.values = Values::kDenormal;
  const Trial trial(c);
  const unsigned saved = _mm_getcsr();
  const auto bytes = [&](int threads, unsigned control) {
    cpu::set_num_threads(threads);
    _mm_setcsr(control);
    std::vector<std::uint8_t> result = trial.bytes("cpu");
    _mm_setcsr(saved);
    cpu::set_num_threads(0);
    return result;
  };
  constexpr unsigned kKeeping = 0x1F80;
  constexpr unsigned kFlushing = 0x9FC0;
  const std::vector<std::uint8_t> flushed = bytes(1, kFlushing);
  EXPECT_FALSE(flushed == bytes(1, kKeeping));
  for (int round = 0; round < 20; ++round) {
    EXPECT_TRUE(bytes(3, kFlushing) == flushed);
    EXPECT_TRUE(bytes(3, kKeeping) == bytes(1, kKeeping));
  }
}
#endif

// ---- the checks are checked ----

TEST(CasesTest, FaultsAreSeen) {
  Case c;
  c.problem = parse("bwd b=2 hq=2 sq=20 sk=30 d=16 used_q=15,20 bias=b,h,q,k");
  const Trial trial(c);
  EXPECT_TRUE(trial.test("reference").passed());
  EXPECT_NE(to_text(trial.test("nobody")).find("nobody"), std::string::npos);

  const Tensors tensors(c);
  const Tensor& out = *tensors.find("out");
  std::vector<double> reference(out.buffer->size() / sizeof(float), 1.0);
  std::vector<double> naive(reference.size(), 1.0 + 1e-6);
  tensors.prepare(Direction::kForward);
  for (const std::int64_t element : out.existing) {
    out.set(element, 1.0);
  }
  EXPECT_TRUE(compare(out, reference, {&naive}).within());
  EXPECT_EQ(tensors.trespass(Direction::kForward), "");
  out.set(out.existing[3], 1.0 + 3e-6);  // beyond twice the naive error
  EXPECT_FALSE(compare(out, reference, {&naive}).within());
  out.set(out.existing[3], std::numeric_limits<double>::quiet_NaN());
  EXPECT_FALSE(compare(out, reference, {&naive}).within());
  for (const std::int64_t element : out.existing) {
    out.set(element, 1.0 + 2.5e-6);  // within twice the naive error and two units nowhere, so the mean is off too
  }
  EXPECT_FALSE(compare(out, reference, {&naive}).within());
  EXPECT_GT(share_of_allowed(compare(out, reference, {&naive})), 1);
  const std::vector<double> worse(reference.size(), 1.0 + 2e-6);  // the worst of several evaluations counts
  EXPECT_TRUE(compare(out, reference, {&naive, &worse}).within());
  EXPECT_TRUE(compare(out, reference, {&worse, &naive}).within());
  EXPECT_LT(share_of_allowed(compare(out, reference, {&worse, &naive})), 1);
  const Index beyond{0, 15, 0, 0};  // a row that does not exist
  out.set(out.element(beyond), 0);
  EXPECT_NE(tensors.trespass(Direction::kForward), "");
}

TEST(CasesTest, RowsToClearAreSeen) {
  Case c;
  c.problem = parse("bwd b=2 hq=2 sq=20 sk=30 d=16 used_q=15,20 clear");
  const Tensors tensors(c);
  const Tensor& out = *tensors.find("out");
  const Tensor& lse = *tensors.find("lse");
  tensors.prepare(Direction::kForward);
  EXPECT_NE(tensors.trespass(Direction::kForward), "");  // nobody has cleared them
  for (std::int64_t row = 15; row < 20; ++row) {
    for (std::int64_t head = 0; head < 2; ++head) {
      lse.set(lse.element({0, head, row}), -std::numeric_limits<double>::infinity());
      for (std::int64_t column = 0; column < 16; ++column) {
        out.set(out.element({0, row, head, column}), 0);
      }
    }
  }
  EXPECT_EQ(tensors.trespass(Direction::kForward), "");
  out.set(out.element({0, 17, 1, 3}), 1);
  EXPECT_NE(tensors.trespass(Direction::kForward), "");
  EXPECT_TRUE(Trial(c).test("reference").passed());
}

// One wrong element of any result is found, though thirty more evaluations are asked about it.
TEST(CasesTest, OneWrongElementIsFound) {
  for (const auto& [line, relative] : {std::pair("bwd b=1 hq=2 sq=40 sk=33 d=24 bias=1,h,q,k sink", 1e-4),
                                       {"bwd b=1 hq=2 sq=30 sk=33 d=24 causal bf16", 0.1}}) {
    Case c;
    c.problem = parse(line);
    const Trial trial(c);
    EXPECT_TRUE(trial.test("cpu").passed()) << line;
    for (const char* name : {"out", "lse", "grad_q", "grad_k", "grad_v"}) {
      const Outcome outcome = trial.test([&, relative = relative](const Tensors& tensors, Direction direction) {
        call_library(tensors.problem(direction), direction, "cpu");
        const Tensor& wrong = *tensors.find(name);
        const bool is_result = (std::string_view(name).starts_with("grad_")) == (direction == Direction::kBackward);
        if (is_result) {
          const std::int64_t largest =
              *std::max_element(wrong.existing.begin(), wrong.existing.end(),
                                [&](auto a, auto b) { return std::abs(wrong.get(a)) < std::abs(wrong.get(b)); });
          wrong.set(largest, wrong.get(largest) * (1 + relative));
        }
        return std::string();
      });
      ASSERT_EQ(outcome.error, "");
      for (const Deviation& deviation : outcome.deviations) {
        EXPECT_EQ(deviation.within(), deviation.tensor != name) << line << ": " << name << ", " << deviation.tensor;
      }
    }
  }
}

// What a GPU flushes to zero is within the tolerance of a GPU, not of a CPU; the errors of tensor cores and tanh are in
// its naive evaluation.
TEST(CasesTest, ToleranceOfAGpu) {
  Case c;
  c.problem = parse("bwd b=1 hq=1 sq=40 sk=200 d=128 bf16 softcap=20");
  const Tensors tensors(c);
  const Tensor& out = *tensors.find("out");
  const std::vector<double> tiny(out.buffer->size() / 2, 0x1p-128);
  tensors.prepare(Direction::kForward);
  for (const std::int64_t element : out.existing) {
    out.set(element, 0);
  }
  EXPECT_FALSE(compare(out, tiny, {&tiny}).within());
  EXPECT_TRUE(compare(out, tiny, {&tiny}, Arithmetic::kGpu).within());

  const auto lse_errors = [&](Arithmetic arithmetic, int draw) {
    const Tensor& lse = *tensors.find("lse");
    Call call = validate(tensors.problem(Direction::kForward), Direction::kForward, false);
    std::vector<double> out_values(out.buffer->size());
    std::vector<double> right(lse.buffer->size());
    std::vector<double> naive(lse.buffer->size());
    call.out.data = out_values.data() + out.base;
    call.out.type = call.lse.type = DType::kFp64;
    call.lse.data = right.data() + lse.base;
    reference::forward(call);
    call.lse.data = naive.data() + lse.base;
    naive_forward(call, arithmetic, draw);
    std::vector<double> errors;
    for (const std::int64_t element : lse.existing) {
      errors.push_back(naive[element] - right[element]);
    }
    return errors;
  };
  EXPECT_NE(lse_errors(Arithmetic::kGpu, 0), lse_errors(Arithmetic::kGpu, 1));
  EXPECT_NE(lse_errors(Arithmetic::kGpu, 0), lse_errors(Arithmetic::kCpu, 0));
}

}  // namespace
}  // namespace fovea::check
