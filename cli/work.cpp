// SPDX-License-Identifier: Apache-2.0
#include "work.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "buffers.h"

namespace fovea::cli {

double expected_seconds(const Problem& problem, Direction direction) {
  Problem small;
  small.direction = direction;
  small.type = problem.type;
  small.head_dim = problem.head_dim;
  small.head_dim_v = problem.head_dim_v;
  small.seqlen_q = small.seqlen_k = 256;
  small.heads_q = small.heads_k = 2;
  small.backend = problem.backend;
  small.need = every_gradient(small);
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
