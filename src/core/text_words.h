// SPDX-License-Identifier: Apache-2.0
//
// What print() and parse() of a problem's line share: the words for choices, and the parts that a line omits
// because they follow from the others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "core/problem.h"

namespace fovea::line {

inline constexpr std::pair<Layout, std::string_view> kLayouts[] = {
    {Layout::kBshd, "bshd"}, {Layout::kBhsd, "bhsd"}, {Layout::kQkv3, "qkv3"}, {Layout::kStrided, "strided"}};
inline constexpr std::pair<math::Rng, std::string_view> kRngs[] = {
    {math::Rng::kFovea, "fovea"}, {math::Rng::kTorchMemEfficient, "torch_mem_efficient"}};
inline constexpr std::pair<fovea_device, std::string_view> kDevices[] = {{FOVEA_CPU, "cpu"}, {FOVEA_CUDA, "cuda"}};
inline constexpr std::pair<bool, std::string_view> kAlignments[] = {{false, "br"}, {true, "tl"}};
inline constexpr std::pair<Alibi, std::string_view> kAlibis[] = {{Alibi::kPerHead, "h"},
                                                                 {Alibi::kPerBatchAndHead, "b,h"}};
inline constexpr std::pair<bool Need::*, std::string_view> kNeeds[] = {{&Need::q, "q"},         {&Need::k, "k"},
                                                                       {&Need::v, "v"},         {&Need::bias, "bias"},
                                                                       {&Need::bias2, "bias2"}, {&Need::sink, "sink"}};

// Every gradient that this problem has: what a backward computes unless its line names some.
inline Need every_need(const Problem& problem) {
  return {true, true, true, bool(problem.bias), bool(problem.bias2), problem.sink};
}

// The sum, or none where it does not fit.
inline std::optional<std::int64_t> sum_of(const std::vector<std::int64_t>& lengths) {
  std::int64_t sum = 0;
  for (const std::int64_t length : lengths) {
    if (__builtin_add_overflow(sum, length, &sum)) {
      return std::nullopt;
    }
  }
  return sum;
}

inline std::int64_t longest_of(const std::vector<std::int64_t>& lengths) {
  return lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
}

}  // namespace fovea::line
