// SPDX-License-Identifier: Apache-2.0
//
// The fuzzer's numbers: cheap to seed, so that each round has its own generator and can be repeated alone.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace fovea::fuzz {

class Random {
 public:
  // Round `round` of the run `seed`.
  Random(std::uint64_t seed, std::uint64_t round) : state_(mix(seed) ^ mix(~round)) {}

  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15u;
    return mix(state_);
  }
  // low <= result <= high.
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(next() % (static_cast<std::uint64_t>(high - low) + 1));
  }
  // True once in n.
  bool once_in(std::int64_t n) { return between(1, n) == 1; }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  double normal() { return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform()); }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[next() % values.size()];
  }

 private:
  static std::uint64_t mix(std::uint64_t x) {  // the finaliser of SplitMix64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  std::uint64_t state_;
};

}  // namespace fovea::fuzz
