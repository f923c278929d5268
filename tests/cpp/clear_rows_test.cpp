// SPDX-License-Identifier: Apache-2.0
//
// Rows that no sequence owns: left alone, or cleared where that is asked for.
#include <fovea/attention.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace {

using Floats = std::vector<float>;
using Dims = fovea::Tensor::Dims;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int kHeads = 2;
constexpr int kHeadDim = 3;

// Packed: 9 rows, sequences of 4 and 2 rows of which 3 and 2 are used, 3 rows behind them. Dense: the same, in 2 x 4.
struct Rows {
  bool packed;
  std::vector<bool> owned() const {
    return packed ? std::vector<bool>{true, true, true, false, true, true, false, false, false}
                  : std::vector<bool>{true, true, true, false, true, true, false, false};
  }
};

struct Results {
  Floats out, lse, grad_q, grad_k, grad_v;
};

Results run(const Rows& rows, const char* backend, bool clear) {
  const auto count = static_cast<std::int64_t>(rows.owned().size());
  const auto elements = static_cast<std::size_t>(count * kHeads * kHeadDim);
  const Dims shape = rows.packed ? Dims{count, kHeads, kHeadDim} : Dims{2, 4, kHeads, kHeadDim};
  const Dims statistics = rows.packed ? Dims{kHeads, count} : Dims{2, kHeads, 4};
  Floats input(elements);
  for (std::size_t i = 0; i < elements; ++i) {
    input[i] = std::sin(static_cast<float>(i));
  }
  const Floats nan(elements, kNaN);
  Results results{nan, Floats(static_cast<std::size_t>(count * kHeads), kNaN), nan, nan, nan};
  const std::vector<std::int32_t> starts{0, 4, 6};
  const std::vector<std::int32_t> used{3, 2};
  fovea::Options options;
  options.backend = backend;
  options.clear_rows = clear;
  options.seqused_q = options.seqused_k = fovea::tensor(used, {2});
  if (rows.packed) {
    options.cu_seqlens_q = options.cu_seqlens_k = fovea::tensor(starts, {3});
    options.max_seqlen_q = options.max_seqlen_k = 4;
  }
  const fovea::Tensor in = fovea::tensor(input, shape);
  fovea::forward(in, in, in, fovea::tensor(results.out, shape), fovea::tensor(results.lse, statistics), options);
  fovea::Gradients grads;
  grads.q = fovea::tensor(results.grad_q, shape);
  grads.k = fovea::tensor(results.grad_k, shape);
  grads.v = fovea::tensor(results.grad_v, shape);
  fovea::backward(in, in, in, in, fovea::tensor(results.out, shape), fovea::tensor(results.lse, statistics), grads,
                  options);
  return results;
}

class ClearRowsOf : public testing::TestWithParam<std::tuple<bool, const char*>> {};

TEST_P(ClearRowsOf, OnlyRowsThatNoSequenceOwnsAndOnlyWhereItIsAskedFor) {
  const Rows rows{std::get<0>(GetParam())};
  const Results left = run(rows, std::get<1>(GetParam()), false);
  const Results cleared = run(rows, std::get<1>(GetParam()), true);
  const std::vector<bool> owned = rows.owned();
  for (std::size_t row = 0; row < owned.size(); ++row) {
    for (std::size_t i = row * kHeads * kHeadDim; i < (row + 1) * kHeads * kHeadDim; ++i) {
      for (const auto member : {&Results::out, &Results::grad_q, &Results::grad_k, &Results::grad_v}) {
        if (owned[row]) {
          EXPECT_TRUE(std::isfinite((left.*member)[i]));
          EXPECT_EQ((cleared.*member)[i], (left.*member)[i]);
        } else {
          EXPECT_TRUE(std::isnan((left.*member)[i]));
          EXPECT_EQ((cleared.*member)[i], 0);
        }
      }
    }
    for (std::size_t head = 0; head < kHeads; ++head) {
      const std::size_t i = rows.packed ? head * owned.size() + row : (row / 4 * kHeads + head) * 4 + row % 4;
      EXPECT_EQ(std::isnan(left.lse[i]), !owned[row]);
      EXPECT_EQ(cleared.lse[i], owned[row] ? left.lse[i] : -std::numeric_limits<float>::infinity());
    }
  }
}

// Packed rows of no sequence, in a batch of two levels, 3 x 0.
TEST(ClearRows, AllRowsWhereThereIsNoSequence) {
  for (const char* backend : {"cpu", "reference"}) {
    const Dims shape{3, kHeads, kHeadDim};
    const Floats input(3 * kHeads * kHeadDim, 1);
    Floats out(input.size(), kNaN);
    Floats lse(3 * kHeads, kNaN);
    const std::vector<std::int32_t> starts{0};
    fovea::Options options;
    options.backend = backend;
    options.clear_rows = true;
    options.cu_seqlens_q = options.cu_seqlens_k = fovea::tensor(starts, {1});
    options.max_seqlen_q = options.max_seqlen_k = 4;
    options.batch_outer = 3;
    const fovea::Tensor in = fovea::tensor(input, shape);
    fovea::forward(in, in, in, fovea::tensor(out, shape), fovea::tensor(lse, {kHeads, 3}), options);
    EXPECT_EQ(out, Floats(input.size(), 0)) << backend;
    EXPECT_EQ(lse, Floats(lse.size(), -std::numeric_limits<float>::infinity())) << backend;
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, ClearRowsOf, testing::Combine(testing::Bool(), testing::Values("cpu", "reference")),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) ? "Packed" : "Dense") + "_" +
                                  std::get<1>(info.param);
                         });

}  // namespace
