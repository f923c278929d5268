// SPDX-License-Identifier: Apache-2.0
//
// One call's plan as it is made. plan/plan.cpp: limits, what every file of kernels needs, and which candidates are
// considered for a forward; plan/backward.cpp: those for a backward. The files of src/cuda/kernels add the launches of
// their kernels, with the memory and the arguments of each.
#pragma once

#include <string>
#include <string_view>

#include "cuda/cuda.h"

namespace fovea::cuda {

// For the summary: warps, tiles of 16 rows a warp, and rows that the loop advances by (sm90_small_backward: it has
// none, but rows of a tile).
struct KernelSizes {
  int warps = 0;
  int tiles = 1;
  int step = 64;
};
KernelSizes sizes_of(const Spec& spec);

class Planner {
 public:
  Planner(const Call& call, const Target& target) : call_(call) { plan_.target = target; }

  Plan run();

  const Call& call() const { return call_; }
  const Target& target() const { return plan_.target; }
  Operands& operands() { return plan_.operands; }
  Workspace& workspace() { return plan_.workspace; }
  const std::vector<Launch>& launches() const { return plan_.launches; }

  [[noreturn]] static void refuse(const std::string& why) { throw Error(FOVEA_UNSUPPORTED, why); }

  // Whether kernels of this one's family may be taken (FOVEA_KERNEL).
  static bool allowed(const Kernel& kernel);
  // Whether a candidate is taken; if not, the summary says why.
  bool can_compute(const Choice& choice);
  // The kernel of a candidate of the backward, for the summary as well; refuses the call if it cannot compute it.
  Kernel taken(const Choice& choice);

  // For kernels before and after the main ones.
  AroundSpec around(Type type = Type::kBf16) const;
  // Whether the last launch so far is of this kernel.
  bool follows(std::string_view kernel) const {
    return !plan_.launches.empty() && plan_.launches.back().kernel.name == kernel;
  }
  // Adds a launch, unless it has no blocks.
  void add(const Kernel& kernel, std::int64_t blocks, Start start, unsigned blocks_y = 1, int pieces = 1);
  // Says so in the summary.
  void say(const std::string& what) { plan_.summary += what; }
  void say_kernel(const std::string& what) { kernels_ += what; }
  void clears_rows(bool first) { plan_.clears_rows = first; }

  static std::int64_t tiles_of(std::int64_t length, std::int64_t tile) { return (length + tile - 1) / tile; }
  // Blocks that keep every multiprocessor busy, for kernels that walk over their work with a stride.
  static std::int64_t striding_blocks(std::int64_t threads, const Target& target);

 private:
  const Call& call_;
  Plan plan_;
  // For the summary: the kernels of a backward, and the candidates that were passed over.
  std::string kernels_;
  std::string reasons_;

  void check_limits() const;
  void check_bias_rows() const;
  void forward();
  bool takes_odd_rows();
  void backward();
};

}  // namespace fovea::cuda
