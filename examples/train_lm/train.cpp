// SPDX-License-Identifier: Apache-2.0
#include "train.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <random>

namespace train_lm {
namespace {

constexpr double kSecondsBetweenReports = 5;
constexpr std::int64_t kWindowsLeftOut = 8;  // an estimate takes one window of so many
constexpr std::int64_t kEvaluationRows = 8;

class Clock {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

double mean_loss(Model<float>& model, const std::vector<Batch>& batches) {
  HeldOutLoss sum;
  for (const Batch& batch : batches) {
    const HeldOutLoss loss = model.evaluate(batch);
    sum.nats += loss.nats;
    sum.bytes += loss.bytes;
  }
  return sum.bytes > 0 ? sum.nats / static_cast<double>(sum.bytes) : 0.0;
}

}  // namespace

Run train(Model<float>& model, const Corpus& corpus, const TrainConfig& config, const Report& report) {
  const std::int64_t context = model.config().context;
  const std::vector<Batch> estimate = held_out_batches(corpus, kEvaluationRows, context, context / 2, kWindowsLeftOut);
  Optimizer optimizer(config.optimizer, model.layout());
  std::mt19937_64 random(config.seed);

  // The clock counts from a little later, so that on a machine that is fast enough steps alone shape the run.
  const double grace = 0.03 * config.seconds;
  const auto done_at = [&](double step, double seconds) {
    return std::max(step / static_cast<double>(config.steps), (seconds - grace) / (config.seconds - grace));
  };

  Run run;
  const Clock clock;
  double training_seconds = 0;
  double loss_sum = 0;
  std::int64_t losses = 0;
  double next_report = 0;
  while (done_at(static_cast<double>(run.steps), clock.seconds()) < 1) {
    const double began = clock.seconds();
    const double done = done_at(static_cast<double>(run.steps) + 0.5, began);
    loss_sum += model.forward_backward(random_batch(corpus, config.rows, context, random),
                                       static_cast<std::uint64_t>(run.steps));
    ++losses;
    optimizer.step(schedule(done), model.gradients(), model.parameters());
    ++run.steps;
    training_seconds += clock.seconds() - began;

    const double done_now = done_at(static_cast<double>(run.steps), clock.seconds());
    if (clock.seconds() >= next_report || done_now >= 1) {
      Progress progress;
      progress.step = run.steps;
      progress.done = std::clamp(done_now, 0.0, 1.0);
      progress.train_loss = loss_sum / static_cast<double>(losses);
      progress.bytes_per_second = static_cast<double>(run.steps * config.rows * context) / training_seconds;
      progress.attention_share = model.seconds_of_attention() / training_seconds;
      progress.held_out_loss = mean_loss(model, estimate);
      progress.seconds = clock.seconds();
      run.reports.push_back(progress);
      report(progress);
      loss_sum = 0;
      losses = 0;
      next_report = clock.seconds() + kSecondsBetweenReports;
    }
  }
  run.seconds = clock.seconds();
  return run;
}

double held_out_loss(Model<float>& model, const Corpus& corpus) {
  const std::int64_t context = model.config().context;
  return mean_loss(model, held_out_batches(corpus, kEvaluationRows, context, context / 4, 1));
}

std::vector<StepTime> time_steps(const std::vector<ModelConfig>& models, const Corpus& corpus,
                                 const TrainConfig& config, std::int64_t rounds, std::int64_t steps_in_round) {
  struct Contender {
    std::unique_ptr<Model<float>> model;
    Optimizer optimizer;
    std::mt19937_64 random;
    std::uint64_t steps = 0;
    std::vector<double> seconds;
    double loss = 0;
  };
  std::vector<Contender> contenders;
  for (const ModelConfig& model_config : models) {
    auto model = std::make_unique<Model<float>>(model_config);
    Optimizer optimizer(config.optimizer, model->layout());
    contenders.push_back({std::move(model), std::move(optimizer), std::mt19937_64(config.seed), 0, {}, 0});
  }
  for (std::int64_t round = -1; round < rounds; ++round) {  // round -1 warms up
    for (Contender& contender : contenders) {
      const Clock clock;
      const double masks = contender.model->seconds_of_masks();
      const std::int64_t steps = round < 0 ? 1 : steps_in_round;
      for (std::int64_t n = 0; n < steps; ++n) {
        contender.loss = contender.model->forward_backward(
            random_batch(corpus, config.rows, contender.model->config().context, contender.random), contender.steps++);
        contender.optimizer.step(0.5, contender.model->gradients(), contender.model->parameters());
      }
      if (round >= 0) {
        const double seconds = clock.seconds() - (contender.model->seconds_of_masks() - masks);
        contender.seconds.push_back(seconds / static_cast<double>(steps));
      }
    }
  }
  std::vector<StepTime> times;
  for (Contender& contender : contenders) {
    const auto middle = contender.seconds.begin() + static_cast<std::ptrdiff_t>(contender.seconds.size() / 2);
    std::nth_element(contender.seconds.begin(), middle, contender.seconds.end());
    times.push_back({*middle, contender.loss});
  }
  return times;
}

std::string sample(Model<float>& model, std::string prompt, std::int64_t bytes, double temperature,
                   std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint8_t> text(prompt.begin(), prompt.end());
  for (std::int64_t n = 0; n < bytes; ++n) {
    const std::vector<float> logits = model.next_byte_logits(text);
    const float highest = *std::max_element(logits.begin(), logits.end());
    std::vector<double> weights;
    double sum = 0;
    for (const float logit : logits) {
      weights.push_back(std::exp(static_cast<double>(logit - highest) / temperature));
      sum += weights.back();
    }
    double left = static_cast<double>(random() >> 11) * 0x1p-53 * sum;
    std::size_t byte = 0;
    while (byte + 1 < weights.size() && left >= weights[byte]) {
      left -= weights[byte++];
    }
    text.push_back(static_cast<std::uint8_t>(byte));
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.end()};
}

}  // namespace train_lm
