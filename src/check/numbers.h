// SPDX-License-Identifier: Apache-2.0
//
// Numbers that a case's memory is filled with, the same wherever and however often they are made.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <string_view>

namespace fovea::check {

inline std::uint64_t mix(std::uint64_t x) {  // the finaliser of SplitMix64
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

inline std::uint8_t pattern(std::size_t place) { return static_cast<std::uint8_t>(mix(place / 8) >> place % 8 * 8); }

class Random {
 public:
  Random(std::uint64_t seed, std::string_view name) : state_(seed) {
    for (const char letter : name) {
      state_ = mix(state_ ^ static_cast<std::uint8_t>(letter));
    }
  }
  std::int64_t word() { return static_cast<std::int64_t>(mix(state_++)); }
  double uniform() { return (static_cast<double>(mix(state_++) >> 11) + 0.5) * 0x1p-53; }  // in (0, 1)
  double normal() {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }

 private:
  std::uint64_t state_;
};

}  // namespace fovea::check
