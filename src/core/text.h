// SPDX-License-Identifier: Apache-2.0
//
// The words that a problem's one-line text form is made of. print() and parse() stand in core/problem.h.
#pragma once

#include <span>
#include <string_view>

namespace fovea {

// A key, and what its value looks like: {"sq", "=N"}, {"causal", "[=br|tl]"}, {"det", ""}.
struct LineKey {
  std::string_view name;
  std::string_view form;
};
std::span<const LineKey> line_keys();

}  // namespace fovea
