// SPDX-License-Identifier: Apache-2.0
//
// The running softmax: blocks in any division give the whole row's; dead rows, sinks, -inf, huge scores, NaN.
#include "math/softmax.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace fovea::math {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct State {
  double maximum = -kInf;
  double sum = 0;
  double output = 0;
};

// What a kernel does with a block of keys.
void add_block(State& state, const std::vector<double>& scores, const std::vector<double>& values) {
  double maximum = state.maximum;
  for (const double s : scores) {
    maximum = max(maximum, s);
  }
  const double factor = correction(state.maximum, maximum);
  state.sum *= factor;
  state.output *= factor;
  for (std::size_t n = 0; n < scores.size(); ++n) {
    const double w = weight(scores[n], reference_of(maximum));
    state.sum += w;
    state.output += w * values[n];
  }
  state.maximum = maximum;
}

TEST(SoftmaxTest, WeightsInBaseTwoAreTheWeights) {
  std::mt19937_64 engine(2);
  std::normal_distribution<double> normal;
  const double unit_of[] = {1, 0.125, 3};  // what scores are multiples of
  for (int trial = 0; trial < 300; ++trial) {
    const double multiple = unit_of[trial % 3];
    const double unit = multiple * std::log2(std::exp(1.0));
    const double reference = normal(engine) * (trial % 2 == 0 ? 10 : 1000);
    const double score = reference + normal(engine);
    const double want = weight(score * multiple, reference * multiple);
    EXPECT_NEAR(weight_base_2(score, unit, reference * unit) / want, 1, 1e-11);
    EXPECT_NEAR(weight_base_2_of_difference(score, reference, unit, 12.0) / want, 4096, 4096e-11);
    // In fp32 the fused form is off by a factor that all weights of the row share; the other is not.
    const auto fused = [&](float s) { return weight_base_2(s, float(unit), float(reference) * float(unit)); };
    EXPECT_NEAR(fused(float(score)) / fused(float(reference)) / want, 1, 2e-3 * multiple);
  }
  EXPECT_EQ(weight_base_2(-kInf, 0.5, 3.0), 0);
  EXPECT_EQ(weight_base_2_of_difference(-kInf, 0.0, 0.5, 12.0), 0);
  // A maximum of 1e30: fused, its own weight is nonsense; subtracted first, it is 1.
  EXPECT_EQ(weight_base_2_of_difference(1e30F, 1e30F, kLog2E, 0.0F), 1);
  EXPECT_EQ(weight_base_2_of_difference(-1e30F, 1e30F, kLog2E, 0.0F), 0);
  EXPECT_NEAR(kLog2E, std::log2(std::exp(1.0)), 1e-7);
}

TEST(SoftmaxTest, BlocksGiveTheWholeRow) {
  std::mt19937_64 engine(1);
  std::normal_distribution<double> normal;
  for (int trial = 0; trial < 300; ++trial) {
    State state;
    std::vector<double> all_scores;
    std::vector<double> all_values;
    const double spread = trial % 3 == 0 ? 1e30 : 10;
    for (int block = 0; block < 5; ++block) {
      std::vector<double> scores(engine() % 4);
      std::vector<double> values(scores.size());
      for (std::size_t n = 0; n < scores.size(); ++n) {
        scores[n] = engine() % 4 == 0 ? -kInf : spread * normal(engine);
        values[n] = normal(engine);
      }
      add_block(state, scores, values);
      all_scores.insert(all_scores.end(), scores.begin(), scores.end());
      all_values.insert(all_values.end(), values.begin(), values.end());
    }
    double top = -kInf;
    for (const double s : all_scores) {
      top = std::max(top, s);
    }
    double sum = 0;
    double output = 0;
    for (std::size_t n = 0; n < all_scores.size() && top > -kInf; ++n) {
      sum += std::exp(all_scores[n] - top);
      output += std::exp(all_scores[n] - top) * all_values[n];
    }
    const double lse = logsumexp(reference_of(state.maximum), state.sum);
    if (top == -kInf) {
      EXPECT_EQ(lse, -kInf);
      EXPECT_EQ(state.output * inverse_of_sum(state.sum), 0.0);
    } else {
      EXPECT_NEAR(lse, top + std::log(sum), 1e-12 * std::abs(lse) + 1e-12);
      EXPECT_NEAR(state.output * inverse_of_sum(state.sum), output / sum, 1e-12);
    }
  }
}

TEST(SoftmaxTest, DeadRowsInTheBackward) {
  EXPECT_EQ(backward_reference(-kInf), kInf);
  EXPECT_EQ(backward_reference(1.5), 1.5);
  for (const double s : {-kInf, -1e300, 0.0, 1e300}) {
    EXPECT_EQ(probability(s, backward_reference(-kInf)), 0.0);
  }
  EXPECT_EQ(grad_score(0.0, 3.0, -2.0), 0.0);
  for (const double dp : {3.0, kInf, -kInf, std::nan("")}) {
    EXPECT_EQ(grad_score<true>(0.0, dp, -2.0), 0.0) << dp;
  }
  EXPECT_EQ(grad_score<true>(0.5, 3.0, -2.0), grad_score(0.5, 3.0, -2.0));
  EXPECT_EQ(grad_sink(-kInf, backward_reference(-kInf), 3.0), 0.0);
}

// By hand, as the reference and the CPU share these formulas: a lowered loss of the row's logsumexp raises delta, and a
// larger sink takes weight from the keys.
TEST(SoftmaxTest, SignsOfDeltaAndOfASinksGradient) {
  EXPECT_EQ(delta(3.0, 0.0), 3.0);
  EXPECT_EQ(delta(3.0, 2.0), 1.0);
  EXPECT_EQ(delta(0.0, 2.0), -2.0);
  EXPECT_NEAR(grad_sink(std::log(2.0), std::log(8.0), 3.0), -0.75, 1e-15);  // -p delta, p = 2 / 8
  EXPECT_NEAR(grad_sink(std::log(2.0), std::log(8.0), -3.0), 0.75, 1e-15);
}

TEST(SoftmaxTest, Sink) {
  const double reference = reference_of(2.0);
  EXPECT_NEAR(logsumexp(reference, sum_with_sink(1.0, reference, 3.0)), 2 + std::log(1 + std::exp(1.0)), 1e-14);
  // A row without keys, and no sink worth the name.
  EXPECT_NEAR(logsumexp(0.0, sum_with_sink(0.0, 0.0, -5.0)), -5, 1e-14);
  EXPECT_EQ(logsumexp(0.0, sum_with_sink(0.0, 0.0, -kInf)), -kInf);
  EXPECT_EQ(sum_with_sink(1.25, 7.0, -kInf), 1.25);
}

TEST(SoftmaxTest, NanStaysNan) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const std::vector<double>& scores : {std::vector<double>{nan, 1}, {1, nan}, {nan}}) {
    State state;
    add_block(state, scores, std::vector<double>(scores.size(), 1.0));
    EXPECT_TRUE(std::isnan(logsumexp(reference_of(state.maximum), state.sum)));
    EXPECT_TRUE(std::isnan(state.output * inverse_of_sum(state.sum)));
  }
}

TEST(SoftmaxTest, UniformWhereAllAreTheLowest) {
  const float lowest = std::numeric_limits<float>::lowest();
  const float reference = reference_of(lowest);
  EXPECT_EQ(weight(lowest, reference), 1.0F);
  EXPECT_EQ(correction(lowest, lowest), 1.0F);
  EXPECT_EQ(probability(lowest, backward_reference(logsumexp(reference, 4.0F))),
            1.0F);  // lse = lowest + log 4 = lowest
}

}  // namespace
}  // namespace fovea::math
