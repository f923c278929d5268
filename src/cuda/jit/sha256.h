// SPDX-License-Identifier: Apache-2.0
//
// SHA-256 (FIPS 180-4): the names of cache entries and their checksums. A cache entry is found by what it was made
// from, so two different inputs must never share a name; speed matters little (a cubin is a hundred kilobytes).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fovea::cuda::jit {

class Sha256 {
 public:
  Sha256();
  Sha256& add(std::string_view bytes);
  // A length before the bytes, so that ("ab", "c") and ("a", "bc") differ.
  Sha256& add_field(std::string_view bytes);
  std::array<std::uint8_t, 32> digest();  // ends it: nothing may be added afterwards
  std::string hex();                      // the digest in 64 lower-case digits

 private:
  void block(const std::uint8_t* bytes);

  std::array<std::uint32_t, 8> state_;
  std::array<std::uint8_t, 64> pending_{};
  std::size_t pending_bytes_ = 0;
  std::uint64_t total_bytes_ = 0;
};

}  // namespace fovea::cuda::jit
