// SPDX-License-Identifier: Apache-2.0
//
// What print() and parse() of a problem's line share: the words for choices, and the parts that a line omits
// because they follow from the others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
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
inline constexpr std::pair<bool Results::*, std::string_view> kResults[] = {
    {&Results::out, "out"},   {&Results::q, "q"},         {&Results::k, "k"},      {&Results::v, "v"},
    {&Results::bias, "bias"}, {&Results::bias2, "bias2"}, {&Results::sink, "sink"}};
inline constexpr auto kNeeds = std::span(kResults).subspan<1>();  // the gradients

// The results that a problem has; `out` also of a backward, which reads it.
inline Results results_of(const Problem& p) {
  Results results = p.need;
  results.out = true;
  return results;
}

// Those that can be fp32 beside inputs of 16 bits.
inline Results can_be_wide(const Problem& p) {
  Results results = results_of(p);
  const bool short_rows = size_of(p.type) == 2;
  results.out = short_rows;
  results.q = results.q && short_rows;
  results.k = results.k && short_rows;
  results.v = results.v && short_rows;
  results.bias = results.bias && size_of(p.bias.type) == 2;
  results.bias2 = results.bias2 && size_of(p.bias2.type) == 2;
  results.sink = false;
  return results;
}

// Those that can be combined with what their memory holds: results of this direction that have no 16 bits.
inline Results can_accumulate(const Problem& p) {
  Results results = results_of(p);
  const Results short_ones = can_be_wide(p);
  for (const auto& [member, name] : kResults) {
    results.*member = results.*member && (!(short_ones.*member) || p.wide.*member);
  }
  results.out = results.out && p.direction == Direction::kForward && p.lse;
  return results;
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
