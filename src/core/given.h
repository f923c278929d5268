// SPDX-License-Identifier: Apache-2.0
//
// What the caller gave, one tensor at a time: how it is named in messages, where its elements lie, and the checks that
// do not depend on what it is for. A message is "<argument>: <what it was>; accepted: <what would be>".
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/overlap.h"
#include "core/problem.h"

namespace fovea {

using Ints = std::vector<std::int64_t>;

// A short list without an allocation: a whole call takes only microseconds.
template <class T, std::size_t kMostElements>
class Few {
 public:
  Few() = default;
  Few(std::initializer_list<T> elements) : Few(elements.begin(), elements.end()) {}
  Few(const T* first, const T* last) : count_(static_cast<std::size_t>(last - first)) {
    std::copy(first, last, elements_.begin());
  }
  void push_back(const T& element) { elements_[count_++] = element; }
  T& back() { return elements_[count_ - 1]; }
  const T* begin() const { return elements_.data(); }
  const T* end() const { return elements_.data() + count_; }
  std::size_t size() const { return count_; }

 private:
  std::array<T, kMostElements> elements_{};
  std::size_t count_ = 0;
};
using Dims = Few<std::int64_t, FOVEA_MAX_RANK>;

// No product of a tensor's dimensions and no distance between two of its elements in bytes goes beyond this, nor do
// the lengths and heads of a packed problem, so that no offset and no size of a workspace overflows: that may take some
// hundred bytes for each element, and some thousand for each column or head in each of 2^12 threads.
inline constexpr std::int64_t kMost = std::int64_t{1} << 50;
inline constexpr std::int64_t kMostHeads = std::int64_t{1} << 32;  // and columns

template <class... T>
[[noreturn]] void refuse(fovea_status status, fmt::format_string<T...> format, T&&... arguments) {
  throw Error(status, fmt::format(format, std::forward<T>(arguments)...));
}

template <class... T>
[[noreturn]] void refuse(fmt::format_string<T...> format, T&&... arguments) {
  throw Error(FOVEA_INVALID_ARGUMENT, fmt::format(format, std::forward<T>(arguments)...));
}

// "2x4x128x127"; "()" for a scalar.
std::string text_of(const std::int64_t* shape, std::int64_t rank);
std::string shape_of(const fovea_tensor& tensor);
std::string type_name(std::int32_t type);

std::int64_t elements_of(const fovea_tensor& tensor);

// Whether the product of dimensions is at most kMost, those of 0 taken as 1.
template <class Dims>
bool product_fits(const Dims& dims) {
  std::int64_t product = 1;
  return std::all_of(std::begin(dims), std::end(dims), [&](std::int64_t dim) {
    return !__builtin_mul_overflow(product, std::max<std::int64_t>(dim, 1), &product) && product <= kMost;
  });
}

// Strides in elements: as given, or row-major. The stride of a dimension of size 1 is never used, so it may be any
// number.
std::array<std::int64_t, FOVEA_MAX_RANK> strides_of(const fovea_tensor& tensor);

Footprint footprint_of(const fovea_tensor& tensor);

// A tensor that a direction uses: its name in fovea_problem and whether it is written.
struct Argument {
  const char* name = nullptr;
  const fovea_tensor* fovea_problem::*tensor = nullptr;
  bool written = false;
};

// Those that a direction uses and that are given.
inline constexpr std::size_t kMostArguments = 28;
using Arguments = Few<Argument, kMostArguments>;
Arguments arguments_of(const fovea_problem& given, Direction direction);

// ---- checks: each throws Error where it does not hold ----

// The struct itself: flags, rank, dimensions.
void struct_of(const char* name, const fovea_tensor& tensor);

void type_of(const char* name, const fovea_tensor& tensor, std::initializer_list<DType> accepted,
             const char* hint = "");

// Where the elements lie, once the type is known. With shapes_only the data may be NULL.
void storage_of(const char* name, const fovea_tensor& tensor, bool shapes_only);

const fovea_tensor& required(const char* name, const fovea_tensor* tensor, const char* accepted);

void shape_is(const char* name, const fovea_tensor& tensor, const Dims& accepted, std::string_view names);

}  // namespace fovea
