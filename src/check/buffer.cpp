// SPDX-License-Identifier: Apache-2.0
//
// Memory in which writes that are forbidden, and reads past an input's end, are seen.
#include <algorithm>
#include <cstdint>

#include "check/materialise.h"
#include "check/numbers.h"

namespace fovea::check {
namespace {

constexpr std::size_t kMargin = 256;
constexpr std::size_t kAlignment = 64;

}  // namespace

Buffer::Buffer(std::size_t size) : memory_(size + 2 * kMargin + kAlignment), allowed_(memory_.size()), size_(size) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory_.data()) + kMargin;
  data_ = memory_.data() + kMargin + (-address) % kAlignment;
}

Buffer Buffer::before_a_guard(std::size_t size) {
  Buffer buffer;
  buffer.guarded_ = std::make_unique<Guarded>(size);
  buffer.size_ = size;
  buffer.data_ = buffer.guarded_->end() - size;
  return buffer;
}

std::span<std::uint8_t> Buffer::all() { return guarded_ != nullptr ? std::span(data_, size_) : std::span(memory_); }

void Buffer::fill_with_pattern() {
  for (std::size_t n = 0; n < memory_.size(); ++n) {
    memory_[n] = pattern(n);
  }
  allowed_.assign(memory_.size(), false);
}

void Buffer::allow(std::size_t offset, std::size_t count) {
  const auto begin = allowed_.begin() + (data_ - memory_.data()) + static_cast<std::ptrdiff_t>(offset);
  std::fill(begin, begin + static_cast<std::ptrdiff_t>(count), true);
}

bool Buffer::changed(std::ptrdiff_t* where) const {
  for (std::size_t n = 0; n < memory_.size(); ++n) {
    if (!allowed_[n] && memory_[n] != pattern(n)) {
      *where = memory_.data() + n - data_;
      return true;
    }
  }
  return false;
}

}  // namespace fovea::check
