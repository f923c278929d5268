// SPDX-License-Identifier: Apache-2.0
//
// A problem's line as words by key, and the messages about wrong words.
#pragma once

#include <fmt/format.h>

#include <charconv>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/status.h"

namespace fovea::line {

[[noreturn]] void refuse(std::string_view key, std::string_view was, std::string_view accepted);
[[noreturn]] void missing(std::string_view key, std::string_view accepted);

template <class T>
T parse_number(std::string_view key, std::string_view text, T least, T most, std::string_view accepted) {
  T value{};
  std::from_chars_result result{};
  if constexpr (std::is_floating_point_v<T>) {
    result = std::from_chars(text.data(), text.data() + text.size(), value);
  } else {
    const bool hexadecimal = text.starts_with("0x");
    const char* begin = text.data() + (hexadecimal ? 2 : 0);
    result = std::from_chars(begin, text.data() + text.size(), value, hexadecimal ? 16 : 10);
  }
  // Written so that NaN is refused.
  if (result.ec != std::errc{} || result.ptr != text.data() + text.size() || !(value >= least && value <= most)) {
    refuse(key, text, accepted);
  }
  return value;
}

std::int64_t parse_count(std::string_view key, std::string_view text);

// The words of a line, by key.
class Fields {
 public:
  explicit Fields(std::string_view line);

  bool has(std::string_view key) const { return find(key) != nullptr; }

  // key=value; none if the key is absent.
  std::optional<std::string_view> value(std::string_view key) const;
  // key, or key=value with an optional value.
  std::optional<std::string_view> optional_value(std::string_view key) const;
  bool flag(std::string_view key) const;
  std::int64_t count(std::string_view key, std::int64_t otherwise) const;

 private:
  struct Field {
    std::string_view key;
    std::optional<std::string_view> value;
  };

  void add(std::string_view word);
  const Field* find(std::string_view key) const;

  std::vector<Field> fields_;
};

// The one of several words that excludes the others.
std::string_view one_of(const Fields& fields, std::initializer_list<std::string_view> keys, std::string_view otherwise);

}  // namespace fovea::line
