// SPDX-License-Identifier: Apache-2.0
//
// AdamW: a step for each number by the running mean of its gradient over the root of the running mean square.
#pragma once

#include <cstdint>
#include <vector>

#include "model.h"

namespace train_lm {

struct OptimizerConfig {
  double learning_rate = 3e-3;
  double beta1 = 0.9;
  double beta2 = 0.98;
  double epsilon = 1e-8;
  double weight_decay = 0.5;  // of the linear maps' matrices
  double largest_norm = 1.0;  // of all gradients together: larger ones are scaled down
};

class AdamW {
 public:
  AdamW(const OptimizerConfig& config, const std::vector<Parameter>& layout);

  // `rate` is the share of the learning rate that the schedule gives this step.
  void step(double rate, const std::vector<float>& gradients, std::vector<float>& parameters);

 private:
  OptimizerConfig config_;
  std::vector<Parameter> layout_;
  std::vector<float> mean_;
  std::vector<float> mean_square_;
  std::int64_t steps_ = 0;
};

// Up in a straight line over the first part of the run, then down to nothing along one to its end. 0 <= done <= 1.
double schedule(double done);

}  // namespace train_lm
