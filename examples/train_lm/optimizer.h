// SPDX-License-Identifier: Apache-2.0
//
// Two rules, chosen by what a parameter is:
//
//   matrices   Muon (Jordan et al., 2024): the running mean of the gradient, made orthogonal, is the step. All its
//              singular values become about 1, so that directions that the data shows seldom are learnt as fast as
//              those that it shows always. On a few hundred steps that is worth several times as many of Adam's.
//   the rest   AdamW: each number steps by its gradient's running mean over the root of its running mean square.
#pragma once

#include <cstdint>
#include <vector>

#include "model.h"

namespace train_lm {

struct OptimizerConfig {
  double matrix_rate = 0.02;    // Muon's learning rate
  double momentum = 0.95;       // and how long its mean remembers
  double weight_decay = 0.5;    // of the matrices: a step shrinks them by rate * decay
  double learning_rate = 2e-3;  // AdamW's
  double beta1 = 0.9;
  double beta2 = 0.98;
  double epsilon = 1e-8;
  double largest_norm = 1.0;  // of all gradients together: larger ones are scaled down for AdamW
};

class Optimizer {
 public:
  Optimizer(const OptimizerConfig& config, const std::vector<Parameter>& layout);

  // `rate` is the share of the learning rates that the schedule gives this step.
  void step(double rate, const std::vector<float>& gradients, std::vector<float>& parameters);

 private:
  void step_matrix(const Parameter& p, double rate, const float* gradient, float* parameter);
  void step_others(const Parameter& p, double rate, float clip, const float* gradient, float* parameter);

  OptimizerConfig config_;
  std::vector<Parameter> layout_;
  std::vector<float> mean_;
  std::vector<float> mean_square_;
  std::int64_t steps_ = 0;
};

// Up in a straight line over the first part of the run, then down to nothing along one to its end. 0 <= done <= 1.
double schedule(double done);

}  // namespace train_lm
