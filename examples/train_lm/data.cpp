// SPDX-License-Identifier: Apache-2.0
#include "data.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string_view>
#include <unordered_map>

namespace train_lm {
namespace {

namespace fs = std::filesystem;

std::vector<std::uint8_t> read_bytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error(fmt::format("{}: cannot be opened for reading", path.string()));
  }
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<fs::path> files_of(const fs::path& path) {
  if (fs::is_regular_file(path)) {
    return {path};
  }
  if (!fs::is_directory(path)) {
    throw std::runtime_error(
        fmt::format("{}: is neither a file nor a folder; give a text of your own with --text FILE", path.string()));
  }
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(path)) {
    if (entry.is_regular_file() && !entry.is_symlink()) {
      files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

// Counts of the bytes that followed one context.
struct Followers {
  std::int64_t total = 0;
  std::vector<std::pair<std::uint8_t, std::int64_t>> counts;

  void add(std::uint8_t byte) {
    ++total;
    for (auto& [value, count] : counts) {
      if (value == byte) {
        ++count;
        return;
      }
    }
    counts.emplace_back(byte, 1);
  }

  std::int64_t count(std::uint8_t byte) const {
    for (const auto& [value, count] : counts) {
      if (value == byte) {
        return count;
      }
    }
    return 0;
  }
};

std::string_view context(const std::vector<std::uint8_t>& bytes, std::int64_t at, std::int64_t order) {
  return {reinterpret_cast<const char*>(bytes.data()) + at - order, static_cast<std::size_t>(order)};
}

}  // namespace

Corpus Corpus::load(const fs::path& path, double held_out_fraction) {
  Corpus corpus;
  for (const fs::path& file : files_of(path)) {
    Document document;
    document.name = file.filename().string();
    document.bytes = read_bytes(file);
    const auto size = static_cast<std::int64_t>(document.bytes.size());
    document.train_bytes = size - static_cast<std::int64_t>(std::ceil(static_cast<double>(size) * held_out_fraction));
    const bool is_copy = std::any_of(corpus.documents_.begin(), corpus.documents_.end(),
                                     [&](const Document& other) { return other.bytes == document.bytes; });
    if (size > 0 && !is_copy) {
      corpus.documents_.push_back(std::move(document));
    }
  }
  if (corpus.documents_.empty()) {
    throw std::runtime_error(fmt::format("{}: holds no text", path.string()));
  }
  return corpus;
}

std::int64_t Corpus::train_bytes() const {
  std::int64_t sum = 0;
  for (const Document& document : documents_) {
    sum += document.train_bytes;
  }
  return sum;
}

std::int64_t Corpus::held_out_bytes() const {
  std::int64_t sum = 0;
  for (const Document& document : documents_) {
    sum += static_cast<std::int64_t>(document.bytes.size()) - document.train_bytes;
  }
  return sum;
}

Batch random_batch(const Corpus& corpus, std::int64_t rows, std::int64_t length, std::mt19937_64& random) {
  std::int64_t places = 0;
  const auto places_of = [&](const Document& document) {
    return std::max<std::int64_t>(document.train_bytes - length, 0);
  };
  for (const Document& document : corpus.documents()) {
    places += places_of(document);
  }
  if (places == 0) {
    throw std::runtime_error(fmt::format(
        "no document has more than {} bytes to train on: take a longer text or a shorter --context", length));
  }
  Batch batch{rows, length, {}, {}, {}};
  for (std::int64_t row = 0; row < rows; ++row) {
    // Not std::uniform_int_distribution: its numbers differ between standard libraries.
    auto place = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(places));
    for (const Document& document : corpus.documents()) {
      if (place < places_of(document)) {
        const auto begin = document.bytes.begin() + place;
        batch.inputs.insert(batch.inputs.end(), begin, begin + length);
        batch.targets.insert(batch.targets.end(), begin + 1, begin + length + 1);
        break;
      }
      place -= places_of(document);
    }
  }
  return batch;
}

std::vector<Batch> held_out_batches(const Corpus& corpus, std::int64_t rows, std::int64_t length, std::int64_t stride,
                                    std::int64_t every) {
  std::vector<Batch> batches;
  std::int64_t number = 0;
  for (const Document& document : corpus.documents()) {
    const auto size = static_cast<std::int64_t>(document.bytes.size());
    // A document's first byte has nothing before it to be predicted from.
    for (std::int64_t first = std::max<std::int64_t>(document.train_bytes, 1); first < size; first += stride) {
      const std::int64_t last = std::min(first + stride, size);  // this window scores the bytes [first, last)
      if (number++ % every != 0) {
        continue;
      }
      if (batches.empty() || batches.back().rows == rows) {
        batches.push_back({0, length, {}, {}, {}});
      }
      Batch& batch = batches.back();
      ++batch.rows;
      const std::int64_t begin = std::max<std::int64_t>(last - 1 - length, 0);
      for (std::int64_t at = begin; at < begin + length; ++at) {  // a short document's window runs past its end
        const bool exists = at + 1 < last;
        batch.inputs.push_back(exists ? document.bytes[at] : 0);
        batch.targets.push_back(exists ? document.bytes[at + 1] : 0);
        batch.scored.push_back(exists && at + 1 >= first ? 1 : 0);
      }
    }
  }
  return batches;
}

double count_model_loss(const Corpus& corpus, int order) {
  std::vector<std::unordered_map<std::string_view, Followers>> counts(order + 1);
  for (const Document& document : corpus.documents()) {
    for (std::int64_t at = 0; at < document.train_bytes; ++at) {
      for (std::int64_t k = 0; k <= std::min<std::int64_t>(order, at); ++k) {
        counts[k][context(document.bytes, at, k)].add(document.bytes[at]);
      }
    }
  }
  double loss = 0;
  std::int64_t scored = 0;
  for (const Document& document : corpus.documents()) {
    for (auto at = std::max<std::int64_t>(document.train_bytes, 1);
         at < static_cast<std::int64_t>(document.bytes.size()); ++at) {
      double probability = 1.0 / 256;
      for (std::int64_t k = 0; k <= std::min<std::int64_t>(order, at); ++k) {
        const auto found = counts[k].find(context(document.bytes, at, k));
        if (found == counts[k].end()) {
          break;  // a longer context was not seen either
        }
        const Followers& followers = found->second;
        const auto kinds = static_cast<double>(followers.counts.size());
        probability = (static_cast<double>(followers.count(document.bytes[at])) + kinds * probability) /
                      (static_cast<double>(followers.total) + kinds);
      }
      loss -= std::log(probability);
      ++scored;
    }
  }
  return scored > 0 ? loss / static_cast<double>(scored) : 0.0;
}

}  // namespace train_lm
