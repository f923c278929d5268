// SPDX-License-Identifier: Apache-2.0
//
// Training: batches, steps, the learning rate's course, and what is measured on the way.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data.h"
#include "model.h"
#include "optimizer.h"

namespace train_lm {

// A run ends after `steps` steps or `seconds` seconds, whichever is first; the learning rate falls to nothing towards
// that end. Where the steps end it, the run is the same every time, to the last bit.
struct TrainConfig {
  OptimizerConfig optimizer;
  std::int64_t rows = 8;  // windows in a batch
  std::int64_t steps = 1600;
  double seconds = 170;
  std::uint64_t seed = 1;
};

struct Progress {
  std::int64_t step = 0;
  double done = 0;  // 0 to 1
  double seconds = 0;
  double train_loss = 0;        // the mean since the last report
  double held_out_loss = 0;     // estimated on a part of the held-out bytes
  double bytes_per_second = 0;  // of training alone
  double attention_share = 0;   // of the time of training
};

// Called now and then during a run; it may do nothing.
using Report = std::function<void(const Progress&)>;

struct Run {
  std::vector<Progress> reports;
  std::int64_t steps = 0;
  double seconds = 0;
};

Run train(Model<float>& model, const Corpus& corpus, const TrainConfig& config, const Report& report);

// Nats a held-out byte, over all of them.
double held_out_loss(Model<float>& model, const Corpus& corpus);

// Seconds that one training step takes, of several networks: the medians of rounds in which the networks alternate.
// Naive attention is not charged for its dropout masks: the library makes them for it, element by element, as none
// would in earnest.
struct StepTime {
  double seconds = 0;
  double last_loss = 0;
};
std::vector<StepTime> time_steps(const std::vector<ModelConfig>& models, const Corpus& corpus,
                                 const TrainConfig& config, std::int64_t rounds, std::int64_t steps_in_round);

// `bytes` more bytes after `prompt`, each drawn from the network's probabilities raised to 1 / temperature.
std::string sample(Model<float>& model, std::string prompt, std::int64_t bytes, double temperature, std::uint64_t seed);

}  // namespace train_lm
