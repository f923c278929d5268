// SPDX-License-Identifier: Apache-2.0
#include "gradient_check.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "model.h"

namespace train_lm {

std::vector<GradientError> check_gradients(AttentionKind kind) {
  ModelConfig config;
  config.layers = 2;
  config.heads = 2;
  config.width = 8;
  config.context = 19;
  config.dropout = 0.25;
  config.attention = kind;
  Model<double> model(config);

  std::mt19937_64 random(2);
  const auto uniform = [&] { return static_cast<double>(random() >> 11) * 0x1p-52 - 1; };  // -1 to 1
  for (double& parameter : model.parameters()) {
    parameter = uniform();
  }
  Batch batch{3, config.context, {}, {}, {}};
  for (std::int64_t n = 0; n < batch.rows * batch.length; ++n) {
    batch.inputs.push_back(static_cast<std::uint8_t>(random()));
    batch.targets.push_back(static_cast<std::uint8_t>(random()));
  }
  constexpr std::uint64_t kStep = 5;
  model.forward_backward(batch, kStep);
  const std::vector<double> gradients = model.gradients();

  constexpr std::int64_t kElementsEach = 24;  // of a parameter, spread evenly
  constexpr double kDistance = 1e-5;
  std::vector<GradientError> errors;
  for (const Parameter& parameter : model.layout()) {
    GradientError error{parameter.name, 0, 0};
    for (std::int64_t n = 0; n < std::min(kElementsEach, parameter.size()); ++n) {
      const std::int64_t element = parameter.offset + n * parameter.size() / std::min(kElementsEach, parameter.size());
      double& value = model.parameters()[element];
      const double kept = value;
      value = kept + kDistance;
      const double above = model.forward_backward(batch, kStep);
      value = kept - kDistance;
      const double below = model.forward_backward(batch, kStep);
      value = kept;
      error.largest_gradient = std::max(error.largest_gradient, std::abs(gradients[element]));
      error.largest_error =
          std::max(error.largest_error, std::abs((above - below) / (2 * kDistance) - gradients[element]));
    }
    errors.push_back(error);
  }
  return errors;
}

}  // namespace train_lm
