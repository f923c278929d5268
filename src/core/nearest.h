// SPDX-License-Identifier: Apache-2.0
//
// Known words that are near an unknown one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fovea {

// Up to three of the accepted words that are closest in spelling, closest first; none if all are far off.
std::vector<std::string> nearest(std::string_view word, const std::vector<std::string>& accepted);

// "; did you mean a or b?", else "; accepted: a, b, c".
std::string hint(std::string_view word, const std::vector<std::string>& accepted);

}  // namespace fovea
