// SPDX-License-Identifier: Apache-2.0
//
// The text: documents of bytes, of each of which the last part is held out, never trained on.
//
//     document  |------------- trained on -------------|-- held out --|
//
// Windows for training are cut at random from the first parts. The held-out bytes are predicted with what stands
// before them as context, by the network and by the byte-count models alike.
#pragma once

#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

namespace train_lm {

struct Document {
  std::string name;
  std::vector<std::uint8_t> bytes;
  std::int64_t train_bytes = 0;  // the first so many; the rest is held out
};

class Corpus {
 public:
  // The regular files of a folder in the order of their names (links, and copies of an earlier file, are left out),
  // or one file. Throws std::runtime_error that says what was found instead.
  static Corpus load(const std::filesystem::path& path, double held_out_fraction);

  const std::vector<Document>& documents() const { return documents_; }
  std::int64_t train_bytes() const;
  std::int64_t held_out_bytes() const;

 private:
  std::vector<Document> documents_;
};

// Rows of `length` inputs and, for each, the byte that follows; row-major.
struct Batch {
  std::int64_t rows = 0;
  std::int64_t length = 0;
  std::vector<std::uint8_t> inputs;
  std::vector<std::uint8_t> targets;
  std::vector<std::uint8_t> scored;  // 1 where the target counts towards a held-out loss
};

// Windows at random places, each equally likely.
Batch random_batch(const Corpus& corpus, std::int64_t rows, std::int64_t length, std::mt19937_64& random);

// Windows that together score each held-out byte once, with at least length - stride bytes of context where the
// document has them. `every` > 1 takes only every so many-th window, for a quick estimate.
std::vector<Batch> held_out_batches(const Corpus& corpus, std::int64_t rows, std::int64_t length, std::int64_t stride,
                                    std::int64_t every);

// Nats a held-out byte of the model that predicts a byte from the `order` bytes before it by their counts in the
// training text, each order interpolated with the next lower one by Witten and Bell's rule, down to uniform.
double count_model_loss(const Corpus& corpus, int order);

}  // namespace train_lm
