// SPDX-License-Identifier: Apache-2.0
//
// Hands out aligned pieces of a workspace; without memory it only counts, so that a layout is written once, for the
// query of its size and for its use.
#pragma once

#include <cstddef>

#include "math/scalar.h"

namespace fovea::cpu::FOVEA_ISA {

class Arena {
 public:
  static constexpr math::i64 kAlignment = 64;

  // `memory` is aligned, or NULL.
  explicit Arena(void* memory) : base_(static_cast<unsigned char*>(memory)) {}

  template <class T>
  T* take(math::i64 count) {
    unsigned char* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (count * math::i64(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(piece);
  }

  std::size_t used() const { return static_cast<std::size_t>(used_); }

 private:
  unsigned char* base_;
  math::i64 used_ = 0;
};

}  // namespace fovea::cpu::FOVEA_ISA
