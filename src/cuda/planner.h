// SPDX-License-Identifier: Apache-2.0
//
// One call's plan as it is made. plan.cpp: limits, what is prepared, launches; plan_forward.cpp, plan_backward.cpp:
// which candidates are asked in which order, and what each of their kernels needs around it.
#pragma once

#include <string>
#include <string_view>

#include "cuda/config/generic_backward.h"
#include "cuda/config/sm90_bias_gradient.h"
#include "cuda/cuda.h"

namespace fovea::cuda {

class Planner {
 public:
  Planner(const Call& call, const Target& target) : call_(call) { plan_.target = target; }

  Plan run();

 private:
  const Call& call_;
  Plan plan_;
  // For the summary: the kernels of a backward, and the candidates that were passed over.
  std::string kernels_;
  std::string reasons_;

  [[noreturn]] static void refuse(const std::string& why) { throw Error(FOVEA_UNSUPPORTED, why); }
  static std::int64_t tiles_of(std::int64_t length, std::int64_t tile) { return (length + tile - 1) / tile; }

  // Whether kernels of this one's family may be taken (FOVEA_KERNEL).
  static bool allowed(const Kernel& kernel);
  // Whether a candidate is taken; if not, the summary says why.
  bool serves(const Choice& choice);
  // Blocks that keep every multiprocessor busy, for kernels that walk over their work with a stride.
  static std::int64_t striding_blocks(std::int64_t threads, const Target& target);

  // ---- plan.cpp: what both directions share ----

  void check_limits() const;
  void check_bias_rows() const;
  static Kernel prepare(const char* name, const Spec& spec);
  Spec small(Type type = Type::kBf16) const;
  void add(Step step, const Kernel& kernel, std::int64_t blocks, unsigned blocks_y = 1, int which = 0, int pieces = 1);
  void clear_rows();
  void operands();

  // ---- plan_forward.cpp ----

  void forward();
  void forward_for_hopper(Kernel kernel);
  void forward(Kernel kernel);

  // ---- plan_backward.cpp ----

  // Which sums a bias's gradient is made of.
  enum class Gradient { kNone, kPlane, kColumns, kRows };

  Kernel part(const char* name, const Spec& spec) const;
  Kernel taken(const Choice& choice);
  void backward();
  bool is_ds() const;
  int pack_for_ds() const;
  bool stores_bias() const;
  Choice backward_for_hopper(BackwardWants wants);
  void small_backward(const Choice& choice);
  void bias(Gradient gradient, const PlaneTraits& traits, int which);
  void bias_for_hopper(const Choice& choice, const BiasList& list, int which);
  void bias_sum(BiasTile type, std::int64_t blocks, int which, int chunks);
};

}  // namespace fovea::cuda
