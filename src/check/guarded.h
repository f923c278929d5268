// SPDX-License-Identifier: Apache-2.0
//
// Memory between two pages that no one may touch: one byte too far ends the process there and then.
#pragma once

#include <cstddef>

namespace fovea::check {

class Guarded {
 public:
  explicit Guarded(std::size_t bytes);  // or more, up to a multiple of the page size
  ~Guarded();
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  unsigned char* begin() const { return begin_; }
  unsigned char* end() const { return begin_ + bytes_; }
  std::size_t size() const { return bytes_; }

 private:
  unsigned char* begin_;
  std::size_t bytes_;
};

}  // namespace fovea::check
