// SPDX-License-Identifier: Apache-2.0
//
// Memory for a problem line: every tensor it has, inputs filled with N(0, 1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "core/problem.h"
#include "core/shapes.h"

namespace fovea::cli {

class Buffers {
 public:
  Buffers(const Problem& problem, std::uint64_t seed);
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  // For either direction; it points into this object.
  const fovea_problem& problem() const { return given_; }
  // Writes out and lse, which a backward reads.
  void forward() const;
  std::size_t bytes() const;

 private:
  Problem problem_;
  Shapes shapes_;
  std::deque<fovea_tensor> tensors_;
  std::vector<std::vector<std::byte>> memory_;
  fovea_problem given_;
};

}  // namespace fovea::cli
