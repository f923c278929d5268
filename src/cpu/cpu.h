// SPDX-License-Identifier: Apache-2.0
//
// The CPU backend as core/plan.cpp sees it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/problem.h"

namespace fovea::cpu {

// What one call will use: the instruction set, the number of threads, the workspace. A pure function of the
// problem, the machine, FOVEA_CPU_ISA and set_num_threads().
struct Plan {
  std::string isa;  // "avx512", "avx2", "portable", ...
  int threads = 1;
  std::size_t workspace = 0;
  std::string summary;  // a line for explain(): instruction set, threads, tiles
};

// Throws Error(FOVEA_UNSUPPORTED) if FOVEA_CPU_ISA forces what the machine has not.
Plan plan(const Call& call);

void forward(const Call& call, const Plan& plan, void* workspace);
void backward(const Call& call, const Plan& plan, void* workspace);

// The instruction sets that were built, best first, and whether this machine runs them.
struct Isa {
  std::string name;
  bool available = false;
};
std::vector<Isa> instruction_sets();

// Why no call can be served: FOVEA_CPU_ISA forces what is not built or not on this machine; "" if nothing is amiss.
std::string unavailable();

// 0 (or less): the least of affinity and cgroup quota.
void set_num_threads(int n);
int num_threads();

}  // namespace fovea::cpu
