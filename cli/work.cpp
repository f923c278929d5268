// SPDX-License-Identifier: Apache-2.0
#include "work.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "buffers.h"
#include "fault.h"

namespace fovea::cli {
namespace {

ExitCode code_of(fovea_status status) {
  switch (status) {
    case FOVEA_INVALID_ARGUMENT:
    case FOVEA_INVALID_TYPE:
      return kBadInput;
    case FOVEA_UNSUPPORTED:
      return kUnsupported;
    default:
      return kFailed;
  }
}

}  // namespace

void require(fovea_status status) {
  if (status != FOVEA_OK) {
    throw Fault(code_of(status), fovea_last_error());
  }
}

Caller::Caller(const fovea_problem& problem, Direction direction) : problem_(problem), direction_(direction) {
  std::size_t bytes = 0;
  require(fovea_workspace(&problem_, static_cast<fovea_direction>(direction), &bytes));
  workspace_.resize(bytes);
}

void Caller::operator()() {
  const auto function = direction_ == Direction::kForward ? fovea_forward : fovea_backward;
  require(function(&problem_, workspace_.data(), workspace_.size()));
}

double expected_seconds(const Problem& problem, Direction direction) {
  Problem small;
  small.direction = direction;
  small.type = problem.type;
  small.head_dim = problem.head_dim;
  small.head_dim_v = problem.head_dim_v;
  small.seqlen_q = small.seqlen_k = 256;
  small.heads_q = small.heads_k = 2;
  small.backend = problem.backend;
  small.need = {true, true, true, false, false, false};
  Buffers buffers(small, 1);
  buffers.forward();
  Caller call(buffers.problem(), direction);
  double seconds = std::numeric_limits<double>::infinity();
  for (int repetition = 0; repetition < 3; ++repetition) {
    const auto start = std::chrono::steady_clock::now();
    call();
    seconds = std::min(seconds, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return seconds * flops(problem, direction) / std::max(flops(small, direction), 1.0);
}

}  // namespace fovea::cli
