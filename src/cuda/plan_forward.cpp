// SPDX-License-Identifier: Apache-2.0
//
// The forward's plan: candidates are asked in order, and the first that serves is taken.
#include <fmt/format.h>

#include <algorithm>

#include "cuda/config/generic_forward.h"
#include "cuda/config/sm90_forward.h"
#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/planner.h"

namespace fovea::cuda {

void Planner::forward() {
  const auto say = [&](const Kernel& kernel) {
    const Spec& spec = kernel.spec;
    plan_.summary = fmt::format("{} for {}, {} warps of {} queries, {} keys a step{}{}", kernel.name,
                                plan_.target.architecture(kernel.one_architecture), spec.warps, spec.tiles * 16,
                                spec.step, plan_.summary, reasons_);
  };
  // The forward for Hopper takes masks in an order of its own.
  plan_.operands = operands_of(call_, plan_.workspace, true);
  if (const Choice choice = sm90_forward(call_, plan_.operands, plan_.target); serves(choice)) {
    operands();
    forward_for_hopper(choice.kernel);
    say(choice.kernel);
    return;
  }
  plan_.workspace = Workspace();
  plan_.operands = operands_of(call_, plan_.workspace);
  check_bias_rows();
  operands();
  for (const Choice& choice : {generic_forward(call_, plan_.operands, plan_.target),
                               generic_wide_forward(call_, plan_.operands, plan_.target)}) {
    if (serves(choice)) {
      forward(choice.kernel);
      say(choice.kernel);
      return;
    }
  }
  refuse("no forward kernel" + reasons_);
}

void Planner::forward_for_hopper(Kernel kernel) {
  const Sm90Order& order = plan_.forward_order = sm90_order(call_, plan_.operands, kernel.spec);
  if (sm90_is_scheduled(order, kernel.spec, plan_.target)) {
    plan_.workspace.add(Region::kSchedule, sm90_schedule_bytes(order));
    Kernel schedule;
    schedule.file = "sm90/schedule.cuh";
    schedule.name = "sm90_schedule";
    schedule.spec = small();
    schedule.spec.ragged = kernel.spec.ragged;
    schedule.spec.warps = kernel.spec.warps;
    schedule.threads = kSm90ScheduleThreads;
    add(Step::kSm90Schedule, schedule, std::min<std::int64_t>(order.tiles, 1));
  }
  add(Step::kSm90Forward, kernel, sm90_forward_blocks(order, kernel.spec, plan_.target));
}

// Where the queries alone keep too few multiprocessors busy, keys are split among blocks.
void Planner::forward(Kernel kernel) {
  constexpr std::int64_t kLeastSteps = 4;  // of a part
  const std::int64_t blocks = forward_blocks(call_, kernel);
  const std::int64_t room = std::int64_t{plan_.target.multiprocessors} * kernel.spec.ctas;
  const std::int64_t steps = call_.rows.limit_k / kernel.spec.step;
  const std::int64_t splits = blocks > 0 ? std::min(room / blocks, steps / kLeastSteps) : 1;
  if (splits < 2) {
    add(Step::kForward, kernel, blocks);
    return;
  }
  const math::Rows& rows = call_.rows;
  kernel.spec.split = true;
  const std::int64_t all = splits * padded_rows(rows) * rows.heads_q;
  plan_.workspace.add(Region::kPartialOut, all * kernel.spec.dv * std::int64_t{sizeof(float)});
  plan_.workspace.add(Region::kPartialSum, all * 2 * std::int64_t{sizeof(float)});
  Kernel combine;
  combine.file = "generic/combine.cuh";
  combine.name = "generic_combine";
  combine.spec = small(kernel.spec.type);
  combine.spec.dv = kernel.spec.dv;
  combine.spec.ragged = kernel.spec.ragged;
  combine.threads = kCombineRows * 32;
  add(Step::kForward, kernel, blocks * splits, 1, 0, static_cast<int>(splits));
  add(Step::kCombine, combine, tiles_of(rows.limit_q, kCombineRows) * rows.batch() * rows.heads_q, 1, 0,
      static_cast<int>(splits));
  plan_.summary += fmt::format("; keys in {} parts", splits);
}

}  // namespace fovea::cuda
