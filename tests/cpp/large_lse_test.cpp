// SPDX-License-Identifier: Apache-2.0
//
// Rows whose scores are so large, one way or the other, that their logsumexp has no room left for the logarithm: the
// forward's softmax is right all the same, and the backward's probabilities are what the logsumexp as given says
// (docs/semantics.md, Gradients). Every backend does the same.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "check/run.h"
#include "cpu/cpu.h"
#include "environment_variable.h"

namespace fovea::check {
namespace {

constexpr std::int64_t kRows = 4;
constexpr std::int64_t kKeys = 5;
constexpr std::int64_t kColumns = 3;

// What is added to all scores of each row. 2^16 is the last whose logsumexp keeps log(5), to 2^-8.
constexpr double kBias[kRows] = {std::numeric_limits<float>::lowest(), 1e30, -65536, 0};

struct Result {
  double out[kRows];  // of column 0
  double lse[kRows];
  double p[kRows];  // of any key
};

// q = 0, so that a row's scores are its bias; grad_out = 1 in column i of row i shows p_ij in grad_v.
Result result_of(const std::string& backend) {
  Case c;
  c.problem = parse("bwd b=1 hq=1 sq=4 sk=5 d=3 dv=4 bias=1,1,q,k need=v");
  const Tensors tensors(c);
  const auto each = [&](const char* name, auto value) {
    const Tensor& t = *tensors.find(name);
    const std::int64_t rows = std::string(name) == "v" ? kKeys : kRows;
    const std::int64_t columns = std::string(name) == "bias" ? kKeys : std::string(name) == "q" ? kColumns : kRows;
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) {
        t.set(t.element(std::string(name) == "bias" ? Index{0, 0, i, j} : Index{0, i, 0, j}), value(i, j));
      }
    }
  };
  each("q", [](auto, auto) { return 0.0; });
  each("v", [](auto j, auto) { return static_cast<double>(j); });
  each("bias", [](auto i, auto) { return kBias[i]; });
  each("grad_out", [](auto i, auto column) { return i == column ? 1.0 : 0.0; });
  call_library(tensors.problem(Direction::kForward), Direction::kForward, backend);
  call_library(tensors.problem(Direction::kBackward), Direction::kBackward, backend);
  Result result{};
  for (std::int64_t i = 0; i < kRows; ++i) {
    result.out[i] = tensors.find("out")->get(tensors.find("out")->element({0, i, 0, 0}));
    result.lse[i] = tensors.find("lse")->get(tensors.find("lse")->element({0, 0, i}));
    result.p[i] = tensors.find("grad_v")->get(tensors.find("grad_v")->element({0, 3, 0, i}));
  }
  return result;
}

void expect_as_documented(const Result& result, const std::string& who) {
  for (std::int64_t i = 0; i < kRows; ++i) {
    EXPECT_NEAR(result.out[i], (kKeys - 1) / 2.0, 1e-6) << who << ", row " << i;  // uniform, whatever the bias
    const auto bias = static_cast<float>(kBias[i]);
    const float lse = bias + std::log(static_cast<float>(kKeys));  // as fp32 has it
    EXPECT_EQ(static_cast<float>(result.lse[i]), lse) << who << ", row " << i;
    EXPECT_NEAR(result.p[i], std::exp(static_cast<double>(bias) - static_cast<double>(lse)), 1e-6)
        << who << ", row " << i;
  }
  EXPECT_EQ(result.p[0], 1);
  EXPECT_EQ(result.p[1], 1);
  EXPECT_NEAR(result.p[2], 1.0 / kKeys, 1.0 / 256);
  EXPECT_NEAR(result.p[3], 1.0 / kKeys, 1e-6);
}

TEST(LargeLogsumexp, TheBackwardGoesByTheLogsumexpThatItIsGiven) {
  expect_as_documented(result_of("reference"), "reference");
  for (const cpu::Isa& isa : cpu::instruction_sets()) {
    if (isa.available) {
      const testing::EnvironmentVariable forced("FOVEA_CPU_ISA", isa.name);
      expect_as_documented(result_of("cpu"), isa.name);
    }
  }
}

// A NaN in the logsumexp of a row reaches the keys that the row meets, and no other.
TEST(LargeLogsumexp, NanStaysWithThePairsThatTakePart) {
  for (const std::string backend : {"reference", "cpu"}) {
    for (const char* line : {"bwd b=1 hq=1 sq=3 sk=20 d=3 dv=4 mask=1,1,q,k need=v",
                             "bwd b=1 hq=1 sq=3 sk=20 d=3 dv=4 mask=1,1,q,k softcap=3 dropout=1 need=v"}) {
      Case c;
      c.problem = parse(line);
      const Tensors tensors(c);
      const Tensor& mask = *tensors.find("mask");
      const Tensor& grad_v = *tensors.find("grad_v");
      for (const std::int64_t e : mask.existing) {
        mask.set(e, 1);
      }
      mask.set(mask.element({0, 0, 1, 7}), 0);
      call_library(tensors.problem(Direction::kForward), Direction::kForward, backend);
      tensors.find("lse")->set(tensors.find("lse")->element({0, 0, 1}), std::numeric_limits<double>::quiet_NaN());
      call_library(tensors.problem(Direction::kBackward), Direction::kBackward, backend);
      for (std::int64_t j = 0; j < 20; ++j) {
        const bool is_nan = std::isnan(grad_v.get(grad_v.element({0, j, 0, 0})));
        EXPECT_EQ(is_nan, j != 7 && c.problem.dropout == 0) << backend << ", key " << j << ": " << line;
      }
    }
  }
}

}  // namespace
}  // namespace fovea::check
