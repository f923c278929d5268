// SPDX-License-Identifier: Apache-2.0
//
// A forward and a backward through fovea/attention.h. The gradients are held against a difference quotient, so that
// this ends with 1 if anything is wrong.
#include <fovea/attention.h>

#include <cmath>
#include <cstdio>
#include <random>

namespace {

constexpr std::int64_t kBatch = 2, kLength = 40, kHeads = 4, kDim = 16;

std::vector<double> random_numbers(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal;
  std::vector<double> numbers(count);
  for (double& number : numbers) {
    number = normal(engine);
  }
  return numbers;
}

}  // namespace

int main() try {
  const fovea::Tensor::Dims rows{kBatch, kLength, kHeads, kDim};
  const std::size_t size = kBatch * kLength * kHeads * kDim;
  const std::vector<double> q = random_numbers(size, 1), k = random_numbers(size, 2), v = random_numbers(size, 3);
  const std::vector<double> grad_out = random_numbers(size, 4);
  std::vector<double> bias = random_numbers(kHeads * kLength * kLength, 5);
  std::vector<double> out(size), lse(kBatch * kHeads * kLength), grad_q(size), grad_bias(bias.size());

  fovea::Options options;
  options.causal = true;
  options.dropout_p = 0.1;
  options.seed = 7;
  options.bias = fovea::tensor(bias, {kHeads, kLength, kLength});

  // <out, grad_out>
  const auto objective = [&] {
    fovea::forward(fovea::tensor(q, rows), fovea::tensor(k, rows), fovea::tensor(v, rows), fovea::tensor(out, rows),
                   fovea::tensor(lse, {kBatch, kHeads, kLength}), options);
    double sum = 0;
    for (std::size_t i = 0; i < size; ++i) {
      sum += out[i] * grad_out[i];
    }
    return sum;
  };

  objective();
  fovea::Gradients grads;
  grads.q = fovea::tensor(grad_q, rows);
  grads.bias = fovea::tensor(grad_bias, {kHeads, kLength, kLength});
  fovea::backward(fovea::tensor(grad_out, rows), fovea::tensor(q, rows), fovea::tensor(k, rows), fovea::tensor(v, rows),
                  fovea::tensor(out, rows), fovea::tensor(lse, {kBatch, kHeads, kLength}), grads, options);

  const std::size_t element = 2 * kLength * kLength + 30 * kLength + 17;  // head 2, query 30, key 17
  constexpr double kStep = 1e-5;
  bias[element] += kStep;
  const double above = objective();
  bias[element] -= 2 * kStep;
  const double below = objective();
  const double expected = (above - below) / (2 * kStep);
  std::printf("fovea %d, %d threads\nd objective / d bias: %.9f, by differences %.9f\n", fovea_version(),
              fovea::num_threads(), grad_bias[element], expected);
  return std::abs(grad_bias[element] - expected) < 1e-6 * std::max(1.0, std::abs(expected)) ? 0 : 1;
} catch (const fovea::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
