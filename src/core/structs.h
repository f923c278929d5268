// SPDX-License-Identifier: Apache-2.0
//
// The structs of a program that was compiled with an older or a newer c.h, as this library's own. Structs grow at their
// end: what a shorter one lacks is 0, and what a longer one has beyond is refused unless it is 0.
#pragma once

#include <memory>

#include "core/given.h"

namespace fovea {

class Structs {
 public:
  // Checks the size of the problem and of every tensor that the direction uses. Copies only where one differs.
  Structs(const fovea_problem& given, Direction direction);
  const fovea_problem& problem() const { return own_ != nullptr ? own_->problem : given_; }

 private:
  struct Own {
    fovea_problem problem;
    std::array<fovea_tensor, kMostArguments> tensors;
  };
  const fovea_problem& given_;
  std::unique_ptr<Own> own_;
};

}  // namespace fovea
