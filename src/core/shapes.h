// SPDX-License-Identifier: Apache-2.0
//
// From the text form back to a fovea_problem. Its tensors have the shapes, types and strides of a Problem, and no
// memory. The Call that validate(..., shapes_only) makes of it can be planned and explained like any other.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "core/problem.h"

namespace fovea {

class Shapes {
 public:
  explicit Shapes(const Problem& problem);
  Shapes(const Shapes&) = delete;
  Shapes& operator=(const Shapes&) = delete;

  const fovea_problem& get() const { return given_; }

 private:
  using Ints = std::vector<std::int64_t>;

  const fovea_tensor* add(DType type, const Ints& shape, const void* data = nullptr);
  const fovea_tensor* rows(std::int64_t rows, std::int64_t heads, std::int64_t columns, bool one_of_three,
                           bool wide = false);
  const fovea_tensor* plane(const PlaneTraits& traits, bool wide = false);
  const fovea_tensor* cu_seqlens(const Ints& lengths);
  const fovea_tensor* seqused(const Ints& used);
  const fovea_tensor* positions(const Ints& values);
  Ints batch() const;

  const Problem& problem_;
  std::deque<fovea_tensor> tensors_;  // addresses stay
  std::deque<Ints> boundaries_;
  std::deque<std::vector<std::int32_t>> used_;
  fovea_problem given_{};
};

}  // namespace fovea
