// SPDX-License-Identifier: Apache-2.0
#include "optimizer.h"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>

#include "parallel.h"

namespace train_lm {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// A matrix with the singular vectors of x and singular values of about 1 (0.7 to 1.2), for x with no more rows than
// columns: x becomes p(x x^T) x five times, where s p(s^2) pulls every s of (0, 1] towards 1. Its slope at 0 is what
// the coefficients, Jordan's, are made for: even very small values get there.
Matrix orthogonal(Matrix x) {
  constexpr int kIterations = 5;
  x /= x.norm() + 1e-7F;
  for (int n = 0; n < kIterations; ++n) {
    const Matrix square = x * x.transpose();
    Matrix polynomial = -4.7750F * square;
    polynomial.noalias() += 2.0315F * square * square;
    const Matrix product = polynomial * x;
    x = 3.4445F * x + product;
  }
  return x;
}

}  // namespace

Optimizer::Optimizer(const OptimizerConfig& config, const std::vector<Parameter>& layout)
    : config_(config), layout_(layout) {
  const Parameter& last = layout.back();
  mean_.resize(last.offset + last.size());
  mean_square_.resize(mean_.size());
}

void Optimizer::step(double rate, const std::vector<float>& gradients, std::vector<float>& parameters) {
  ++steps_;
  const Eigen::Map<const Eigen::VectorXf> all(gradients.data(), static_cast<Eigen::Index>(gradients.size()));
  const auto clip = static_cast<float>(std::min(1.0, config_.largest_norm / static_cast<double>(all.norm())));
  parallel_for(static_cast<std::int64_t>(layout_.size()), [&](std::int64_t n) {
    const Parameter& p = layout_[n];
    if (p.is_matrix) {
      step_matrix(p, rate, gradients.data() + p.offset, parameters.data() + p.offset);
    } else {
      step_others(p, rate, clip, gradients.data() + p.offset, parameters.data() + p.offset);
    }
  });
}

// A map from n numbers to several times n (q, k and v are one) is as many maps, each of which gets its own orthogonal
// step; into fewer, it is transposed first.
void Optimizer::step_matrix(const Parameter& p, double rate, const float* gradient, float* parameter) {
  const Eigen::Map<const Matrix> g(gradient, p.rows, p.columns);
  Eigen::Map<Matrix> w(parameter, p.rows, p.columns);
  Eigen::Map<Matrix> mean(mean_.data() + p.offset, p.rows, p.columns);
  const auto momentum = static_cast<float>(config_.momentum);
  mean = momentum * mean + (1 - momentum) * g;
  const Matrix ahead = momentum * mean + (1 - momentum) * g;  // Nesterov's
  const double learning_rate = config_.matrix_rate * rate;
  w *= static_cast<float>(1 - learning_rate * config_.weight_decay);
  const auto step = static_cast<float>(learning_rate);
  if (p.rows > p.columns) {
    w -= step * orthogonal(ahead.transpose()).transpose();
    return;
  }
  for (Eigen::Index part = 0; part < p.parts; ++part) {
    const Eigen::Index columns = p.columns / p.parts;
    // Outputs outnumber inputs: the step is longer, so that each output changes as much.
    const float widening = std::sqrt(static_cast<float>(columns) / static_cast<float>(p.rows));
    w.middleCols(part * columns, columns) -= step * widening * orthogonal(ahead.middleCols(part * columns, columns));
  }
}

void Optimizer::step_others(const Parameter& p, double rate, float clip, const float* gradient, float* parameter) {
  const Eigen::Map<const Eigen::ArrayXf> g(gradient, p.size());
  Eigen::Map<Eigen::ArrayXf> w(parameter, p.size());
  Eigen::Map<Eigen::ArrayXf> mean(mean_.data() + p.offset, p.size());
  Eigen::Map<Eigen::ArrayXf> mean_square(mean_square_.data() + p.offset, p.size());
  const auto beta1 = static_cast<float>(config_.beta1);
  const auto beta2 = static_cast<float>(config_.beta2);
  // Both running means start at 0; this takes the start's pull out of them.
  const auto step = static_cast<float>(config_.learning_rate * rate / (1 - std::pow(config_.beta1, steps_)));
  const auto second = static_cast<float>(1 / (1 - std::pow(config_.beta2, steps_)));
  mean = beta1 * mean + (1 - beta1) * clip * g;
  mean_square = beta2 * mean_square + (1 - beta2) * (clip * g).square();
  w -= step * mean / ((mean_square * second).sqrt() + static_cast<float>(config_.epsilon));
}

double schedule(double done) {
  constexpr double kWarmUp = 0.03;
  return std::clamp(done < kWarmUp ? done / kWarmUp : (1 - done) / (1 - kWarmUp), 0.0, 1.0);
}

}  // namespace train_lm
