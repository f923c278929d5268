// SPDX-License-Identifier: Apache-2.0
#include "core/nearest.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <numeric>
#include <utility>

namespace fovea {
namespace {

// The letters to insert, delete, replace or swap with their neighbour that make one word of the other.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

std::string lower(std::string_view word) {
  std::string small(word);
  std::transform(small.begin(), small.end(), small.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  return small;
}

}  // namespace

std::vector<std::string> nearest(std::string_view word, const std::vector<std::string>& accepted) {
  constexpr std::size_t kMost = 3;
  std::vector<std::pair<std::size_t, std::string>> candidates;
  const std::string small = lower(word);
  for (const std::string& candidate : accepted) {
    // One letter in three may be wrong, but one must be right; a beginning of the word is as good as all of it.
    const bool begins = !word.empty() && candidate.starts_with(word);
    const std::size_t slips = begins ? 0 : distance(small, lower(candidate));
    if (begins || (slips <= std::max<std::size_t>(1, std::max(word.size(), candidate.size()) / 3) &&
                   slips < std::min(word.size(), candidate.size()))) {
      candidates.emplace_back(slips, candidate);
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string> words;
  for (const auto& [slips, candidate] : candidates) {
    if (words.size() < kMost) {
      words.push_back(candidate);
    }
  }
  return words;
}

std::string hint(std::string_view word, const std::vector<std::string>& accepted) {
  const std::vector<std::string> words = nearest(word, accepted);
  if (!words.empty()) {
    return fmt::format("; did you mean {}?", fmt::join(words, " or "));
  }
  return fmt::format("; accepted: {}", fmt::join(accepted, ", "));
}

}  // namespace fovea
