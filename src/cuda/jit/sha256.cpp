// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace fovea::cuda::jit {
namespace {

using u32 = std::uint32_t;
__extension__ using u128 = unsigned __int128;

// The constants are the first 32 bits of the fractions of square and cube roots of primes. They are computed: a table
// could hold a wrong digit.
template <int kPower>
constexpr u32 fraction_of_root(u32 prime) {
  const u128 scaled = static_cast<u128>(prime) << (32 * kPower);
  u128 root = 0;
  for (int bit = 35; bit >= 0; --bit) {
    const u128 next = root | (static_cast<u128>(1) << bit);
    u128 raised = next;
    for (int n = 1; n < kPower; ++n) {
      raised *= next;
    }
    if (raised <= scaled) {
      root = next;
    }
  }
  return static_cast<u32>(root);
}

template <int kPower, std::size_t kCount>
constexpr std::array<u32, kCount> fractions_of_roots() {
  std::array<u32, kCount> fractions{};
  u32 prime = 2;
  for (u32& fraction : fractions) {
    fraction = fraction_of_root<kPower>(prime);
    for (bool found = false; !found;) {
      found = true;
      ++prime;
      for (u32 divisor = 2; divisor * divisor <= prime; ++divisor) {
        found = found && prime % divisor != 0;
      }
    }
  }
  return fractions;
}

constexpr std::array<u32, 8> kStart = fractions_of_roots<2, 8>();
constexpr std::array<u32, 64> kRound = fractions_of_roots<3, 64>();

}  // namespace

Sha256::Sha256() : state_(kStart) {}

void Sha256::block(const std::uint8_t* bytes) {
  std::array<u32, 64> w;
  for (std::size_t t = 0; t < 16; ++t) {
    w[t] = static_cast<u32>(bytes[4 * t]) << 24 | static_cast<u32>(bytes[4 * t + 1]) << 16 |
           static_cast<u32>(bytes[4 * t + 2]) << 8 | static_cast<u32>(bytes[4 * t + 3]);
  }
  for (std::size_t t = 16; t < 64; ++t) {
    const u32 s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const u32 s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (std::size_t t = 0; t < 64; ++t) {
    const u32 s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const u32 t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
    const u32 s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const u32 t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::array<u32, 8> sums = {a, b, c, d, e, f, g, h};
  for (std::size_t n = 0; n < sums.size(); ++n) {
    state_[n] += sums[n];
  }
}

Sha256& Sha256::add(std::string_view bytes) {
  total_bytes_ += bytes.size();
  while (!bytes.empty()) {
    const std::size_t take = std::min(bytes.size(), pending_.size() - pending_bytes_);
    std::memcpy(pending_.data() + pending_bytes_, bytes.data(), take);
    bytes.remove_prefix(take);
    pending_bytes_ += take;
    if (pending_bytes_ == pending_.size()) {
      block(pending_.data());
      pending_bytes_ = 0;
    }
  }
  return *this;
}

Sha256& Sha256::add_field(std::string_view bytes) { return add(std::to_string(bytes.size()) + ":").add(bytes); }

std::array<std::uint8_t, 32> Sha256::digest() {
  const std::uint64_t bits = total_bytes_ * 8;
  add(std::string_view("\x80", 1));
  constexpr std::string_view kZero("\0", 1);
  while (pending_bytes_ != 56) {
    add(kZero);
  }
  std::array<char, 8> length;
  for (std::size_t n = 0; n < length.size(); ++n) {
    length[n] = static_cast<char>(bits >> (56 - 8 * n));
  }
  add({length.data(), length.size()});
  std::array<std::uint8_t, 32> result;
  for (std::size_t n = 0; n < result.size(); ++n) {
    result[n] = static_cast<std::uint8_t>(state_[n / 4] >> (24 - 8 * (n % 4)));
  }
  return result;
}

std::string Sha256::hex() {
  std::string text;
  for (const std::uint8_t byte : digest()) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace fovea::cuda::jit
