// SPDX-License-Identifier: Apache-2.0
//
// What `run` and `bench` have in common: calls of the C ABI that throw, and how much arithmetic a problem is.
#pragma once

#include <cstddef>
#include <vector>

#include "check/run.h"
#include "core/problem.h"

namespace fovea::cli {

// Throws Fault with fovea_last_error() and the exit code that goes with it.
void require(fovea_status status);

// A direction of a problem with the workspace it asks for; the problem's tensors must stay.
class Caller {
 public:
  Caller(const fovea_problem& problem, Direction direction);
  void operator()();

 private:
  fovea_problem problem_;
  Direction direction_;
  std::vector<std::byte> workspace_;
};

using check::flops;

// Seconds that a problem of so many FLOPs may take here, from a short measurement of a small problem of its kind.
double expected_seconds(const Problem& problem, Direction direction);

}  // namespace fovea::cli
