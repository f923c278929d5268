// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernels/sm90_added_bias.h"

#include <algorithm>

#include "cuda/device/sm90/added_bias.h"
#include "cuda/kernels/sm90_backward_order.h"
#include "cuda/launch/launcher.h"

namespace fovea::cuda {
namespace {

// Of all planes.
std::int64_t tiles_of(const BiasList& list) {
  const AddedBias plan = AddedBias::make(static_cast<int>(list.queries), static_cast<int>(list.keys));
  return list.planes * plan.tiles_q * plan.tiles_k;
}

void add(Planner& planner, const char* name, const AroundSpec& spec, const BiasList& list) {
  Kernel kernel;
  kernel.file = "sm90/added_bias_sum.cuh";
  kernel.name = name;
  kernel.spec = spec;
  planner.add(kernel, tiles_of(list), [list](const Launcher& launcher, const Launch& launch) {
    launcher.launch_in_pieces(launch, bias_gradient_args(launcher, list, launch.pieces));
  });
}

// Measured on an H200 (docs/design/tried.md). Entries that share a plane come one after the other, so that sums of more
// planes than L2 holds would move through memory each time; heads that share one come together.
bool pays(const Call& call, const Sm90BackwardSpec& spec, const BiasList& list) {
  constexpr std::int64_t kFewEntries = 16;  // for which clearing and reading the sums would take long
  constexpr int kNarrow = 64;
  constexpr std::int64_t kFewTiles = 64;  // to which all blocks would add at the same time
  constexpr std::int64_t kTilesInCache = 2048;
  const math::Rows& rows = call.rows;
  const bool wide = std::max(spec.d, spec.dv) > kNarrow;
  if (tiles_of(list) < kFewTiles) {
    return false;
  }
  // Of packed sequences the other kernel would make all of dropout's decisions once more.
  constexpr std::int64_t kFewTimes = 4;  // that a plane's rows and keys are added to
  const Extents& has = call.problem.bias.extents;
  if (spec.ragged && wide && spec.dropout != DropoutRule::kNone && !has.batch1 && !has.batch2 &&
      rows.rows_q >= kFewTimes * rows.limit_q && rows.rows_k >= kFewTimes * rows.limit_k) {
    return true;
  }
  const bool shared_by_heads = !has.head && rows.heads_q > 1;
  const std::int64_t most = shared_by_heads && wide ? 2 * kTilesInCache : kTilesInCache;
  return list.entries >= kFewEntries && tiles_of(list) <= most;
}

}  // namespace

bool sm90_adds_bias(const Call& call, const Sm90BackwardSpec& spec, const BackwardWants& wants) {
  const BiasList list = bias_list_of(call.problem, 0);
  if (!wants.bias || !wants.dq || !wants.dkv || call.problem.deterministic || spec.odd_rows || sm90_is_wide(spec) ||
      !pays(call, spec, list)) {
    return false;
  }
  return tiles_of(list) * AddedBias::kNumbers <= most_bias_sums(call, spec.d);
}

void add_sm90_added_bias_clear(Planner& planner) {
  const BiasList list = bias_list_of(planner.call().problem, 0);
  planner.workspace().add(Region::kBiasSum, tiles_of(list) * AddedBias::kNumbers * std::int64_t{sizeof(float)});
  add(planner, "added_bias_clear", planner.around(), list);
}

void add_sm90_added_bias_sum(Planner& planner) {
  AroundSpec spec = planner.around();
  spec.grad_bias = tile_of(planner.call().grad_bias.type);
  spec.fp32_results = fp32_results(planner.call().problem).bias;
  add(planner, "added_bias_sum", spec, bias_list_of(planner.call().problem, 0));
  planner.say("; the gradient of the bias by additions in memory, whose order and last bits vary");
}

}  // namespace fovea::cuda
