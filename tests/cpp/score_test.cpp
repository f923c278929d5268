// SPDX-License-Identifier: Apache-2.0
//
// The score: its value by the specification's formula, and Dual's derivative against finite differences.
#include "math/score.h"

#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "math/small_cap.h"

namespace fovea::math {
namespace {

double by_hand(double scale, double softcap, double dot) {
  const double s = scale * dot;
  return softcap > 0 ? softcap * std::tanh(s / softcap) : s;
}

template <class S>
S value(const Score<S>& score, S dot) {
  return score.softcap > 0 ? score.template of_dot<true>(dot) : score.template of_dot<false>(dot);
}

template <class S>
Dual<S> with_derivative(const Score<S>& score, S dot) {
  return score.softcap > 0 ? score.template of_dot_with_derivative<true>(dot, S(1))
                           : score.template of_dot_with_derivative<false>(dot, S(1));
}

TEST(ScoreTest, ValueAndDerivative) {
  for (const double scale : {1.0, 0.125, -0.3, 0.0}) {
    for (const double softcap : {0.0, 0.5, 2.0, 30.0}) {
      const auto score = Score<double>::make(scale, softcap);
      const auto narrow = Score<float>::make(scale, softcap);
      for (int n = -135; n <= 135; ++n) {
        const double dot = n * 0.37;
        const double expected = by_hand(scale, softcap, dot);
        const auto dual = with_derivative(score, dot);
        EXPECT_NEAR(value(score, dot), expected, 1e-14 * (1 + std::abs(expected)));
        EXPECT_EQ(dual.value, value(score, dot));  // one formula
        const double step = 1e-5;
        const double difference =
            (by_hand(scale, softcap, dot + step) - by_hand(scale, softcap, dot - step)) / (2 * step);
        EXPECT_NEAR(dual.derivative, difference, 1e-8);
        EXPECT_NEAR(value(narrow, float(dot)), expected, 1e-5 * (1 + std::abs(expected)));
        EXPECT_NEAR(with_derivative(narrow, float(dot)).derivative, dual.derivative, 1e-5);
      }
    }
  }
}

TEST(ScoreTest, SoftcapFarOut) {
  const auto score = Score<float>::make(1, 30);
  for (const float dot : {1e30F, -1e30F}) {
    const auto dual = with_derivative(score, dot);
    EXPECT_EQ(dual.value, std::copysign(30.0F, dot));
    EXPECT_EQ(dual.derivative, 0.0F);
  }
}

// A float with the one function more that tanh_by_exp2 asks for.
struct WithReciprocal {
  float x;
  explicit WithReciprocal(float value) : x(value) {}
  friend WithReciprocal operator+(WithReciprocal a, WithReciprocal b) { return WithReciprocal(a.x + b.x); }
  friend WithReciprocal operator-(WithReciprocal a, WithReciprocal b) { return WithReciprocal(a.x - b.x); }
  friend WithReciprocal operator*(WithReciprocal a, WithReciprocal b) { return WithReciprocal(a.x * b.x); }
  friend WithReciprocal exp2(WithReciprocal a) { return WithReciprocal(std::exp2(a.x)); }
  friend WithReciprocal reciprocal(WithReciprocal a) { return WithReciprocal(1 / a.x); }
};

TEST(ScoreTest, TanhWithoutTanh) {
  for (int n = -600; n <= 600; ++n) {
    const float x = kSmallTanh * static_cast<float>(n) / 600;
    const double right = std::tanh(double{x});
    EXPECT_NEAR(tanh_of_small(x), right, 1.5e-7 * std::abs(right));
  }
  for (int n = -400; n <= 400; ++n) {
    const float x = static_cast<float>(n) * 0.05F;
    EXPECT_NEAR(tanh_by_exp2(WithReciprocal(x)).x, std::tanh(double{x}), 3e-7);
  }
  EXPECT_EQ(tanh_by_exp2(WithReciprocal(1e30F)).x, 1.0F);
  EXPECT_EQ(tanh_by_exp2(WithReciprocal(-1e30F)).x, -1.0F);
  EXPECT_TRUE(std::isnan(tanh_of_small(std::nanf(""))));
}

// Up to its own limit, in fp32.
void expect_small_cap(double scale, double softcap) {
  const SmallCap<float> cap = SmallCap<float>::make(scale, softcap);
  ASSERT_GT(cap.largest, 0);
  for (int n = -500; n <= 500; ++n) {
    const float dot = cap.largest * static_cast<float>(n) / 500;
    const double right = by_hand(scale, softcap, double{dot});
    EXPECT_NEAR(cap.of(dot), right, 5e-7 * std::abs(right)) << scale << " " << softcap << " " << dot;
    EXPECT_NEAR(cap.of_plus(dot, 3.5F), right + 3.5, 5e-7 * (std::abs(right) + 3.5))
        << scale << " " << softcap << " " << dot;
  }
}

TEST(ScoreTest, SmallCapIsTheSoftcapOfSmallScores) {
  for (const double scale : {0.125, -2.0, 0.08838834764831845}) {
    for (const double softcap : {0.5, 30.0, 50.0, 1000.0}) {
      expect_small_cap(scale, softcap);
    }
  }
  // Where fp32 is not exact enough it is not used, not even for a score of 0.
  for (const auto& [scale, softcap] : {std::pair(1.0, 1e30), std::pair(0.0, 30.0), std::pair(1e-30, 1.0)}) {
    EXPECT_LT(SmallCap<float>::make(scale, softcap).largest, 0);
  }
}

TEST(ScoreTest, DualFollowsTheRulesOfDifferentiation) {
  const auto f = [](auto x, auto one) { return tanh(x * x * 0.5 - one) * (x + one) - x * 3.0; };
  for (int n = -20; n <= 20; ++n) {
    const double x = n * 0.1;
    const auto dual = f(Dual<double>{x, 1}, Dual<double>{1, 0});
    const double step = 1e-6;
    EXPECT_NEAR(dual.value, f(x, 1.0), 1e-14);
    EXPECT_NEAR(dual.derivative, (f(x + step, 1.0) - f(x - step, 1.0)) / (2 * step), 1e-7);
  }
}

TEST(ScoreTest, Alibi) {
  EXPECT_EQ(alibi(3.0, 0.25), -0.75);
  EXPECT_EQ(alibi(-3.0, 0.25), -0.75);
  EXPECT_EQ(alibi(-3.0F, -0.25F), 0.75F);
  EXPECT_EQ(alibi(0.0, 0.25), 0.0);
}

}  // namespace
}  // namespace fovea::math
