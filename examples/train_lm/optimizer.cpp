// SPDX-License-Identifier: Apache-2.0
#include "optimizer.h"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>

namespace train_lm {

AdamW::AdamW(const OptimizerConfig& config, const std::vector<Parameter>& layout) : config_(config), layout_(layout) {
  const Parameter& last = layout.back();
  mean_.resize(last.offset + last.size());
  mean_square_.resize(mean_.size());
}

void AdamW::step(double rate, const std::vector<float>& gradients, std::vector<float>& parameters) {
  using Array = Eigen::Map<Eigen::ArrayXf>;
  using ConstArray = Eigen::Map<const Eigen::ArrayXf>;
  ++steps_;
  const double norm = ConstArray(gradients.data(), static_cast<Eigen::Index>(gradients.size())).matrix().norm();
  const auto clip = static_cast<float>(std::min(1.0, config_.largest_norm / norm));
  const auto beta1 = static_cast<float>(config_.beta1);
  const auto beta2 = static_cast<float>(config_.beta2);
  const double learning_rate = config_.learning_rate * rate;
  // Both running means start at 0; this takes the start's pull out of them.
  const auto first = static_cast<float>(learning_rate / (1 - std::pow(config_.beta1, steps_)));
  const auto second = static_cast<float>(1 / (1 - std::pow(config_.beta2, steps_)));
  for (const Parameter& p : layout_) {
    const ConstArray g(gradients.data() + p.offset, p.size());
    Array w(parameters.data() + p.offset, p.size());
    Array m(mean_.data() + p.offset, p.size());
    Array v(mean_square_.data() + p.offset, p.size());
    if (p.is_matrix) {
      w *= static_cast<float>(1 - learning_rate * config_.weight_decay);
    }
    m = beta1 * m + (1 - beta1) * clip * g;
    v = beta2 * v + (1 - beta2) * (clip * g).square();
    w -= first * m / ((v * second).sqrt() + static_cast<float>(config_.epsilon));
  }
}

double schedule(double done) {
  constexpr double kWarmUp = 0.03;
  return std::clamp(done < kWarmUp ? done / kWarmUp : (1 - done) / (1 - kWarmUp), 0.0, 1.0);
}

}  // namespace train_lm
