// SPDX-License-Identifier: Apache-2.0
//
// The forward's plan: candidates are considered in order, and the first that can compute the call is taken.
#include <fmt/format.h>

#include "cuda/kernels/generic_forward.h"
#include "cuda/kernels/prepare.h"
#include "cuda/kernels/sm90_forward.h"
#include "cuda/planner.h"

namespace fovea::cuda {

void Planner::forward() {
  const auto say = [&](const Kernel& kernel) {
    const KernelSizes sizes = sizes_of(kernel.spec);
    plan_.summary = fmt::format("{} for {}, {} warps of {} queries, {} keys a step{}{}", kernel.name,
                                plan_.target.architecture(kernel.one_architecture), sizes.warps, sizes.tiles * 16,
                                sizes.step, plan_.summary, reasons_);
  };
  // The forward for Hopper takes masks in an order of its own.
  plan_.operands = operands_of(call_, plan_.workspace, true);
  if (const Choice choice = sm90_forward(call_, plan_.operands, plan_.target); can_compute(choice)) {
    add_preparation(*this);
    add_sm90_forward(*this, choice.kernel);
    say(choice.kernel);
    return;
  }
  plan_.workspace = Workspace();
  plan_.operands = operands_of(call_, plan_.workspace);
  check_bias_rows();
  add_preparation(*this);
  for (const Choice& choice : {generic_forward(call_, plan_.operands, plan_.target),
                               generic_wide_forward(call_, plan_.operands, plan_.target)}) {
    if (can_compute(choice)) {
      add_generic_forward(*this, choice.kernel);
      say(choice.kernel);
      return;
    }
  }
  refuse("no forward kernel" + reasons_);
}

}  // namespace fovea::cuda
