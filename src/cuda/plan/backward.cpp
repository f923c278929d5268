// SPDX-License-Identifier: Apache-2.0
//
// The backward's plan: which kernels compute which gradients, and the sums in memory between them.
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "cuda/device/generic/backward_sizes.h"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/kernels/backward_around.h"
#include "cuda/kernels/generic_backward.h"
#include "cuda/kernels/prepare.h"
#include "cuda/kernels/sm90_added_bias.h"
#include "cuda/kernels/sm90_backward.h"
#include "cuda/kernels/sm90_bias_gradient.h"
#include "cuda/kernels/sm90_small_backward.h"
#include "cuda/launch/tensor_map.h"
#include "cuda/planner.h"

namespace fovea::cuda {
namespace {

// Which sums a bias's gradient is made of.
enum class Gradient { kNone, kPlane, kColumns, kRows };

Gradient gradient_of(bool needed, const PlaneTraits& traits) {
  return !needed                ? Gradient::kNone
         : !traits.extents.key  ? Gradient::kRows
         : traits.extents.query ? Gradient::kPlane
                                : Gradient::kColumns;
}

// Whether the gradient of the first bias is dS itself: nothing is shared.
bool is_ds(const Call& call, const Features& features) {
  const Problem& p = call.problem;
  const Extents& e = p.bias.extents;
  const bool whole = (e.batch1 || p.batch1 == 1) && (e.batch2 || p.batch2 == 1) && (e.head || p.heads_q == 1);
  const bool same = (features.bias == BiasTile::kBf16 && features.type == Type::kBf16) ||
                    (features.bias == BiasTile::kFp16 && features.type == Type::kFp16);
  return whole && same && !features.softcap && !features.banded && !features.ragged && !p.wide.bias &&
         !p.accumulate.bias;
}

// And tiles of dS lie where its rows may be written by a tensor map.
bool stores_bias(const Call& call, const Features& features) {
  const Problem& p = call.problem;
  const View& to = call.grad_bias;
  constexpr std::int64_t kNumbersOfAGrain = 8;
  constexpr std::int64_t kBytes = 2;
  constexpr std::uintptr_t kGrain = 16;
  const auto fits = [&](std::int64_t size, std::int64_t stride) {
    return size <= 1 || (stride > 0 && stride % kNumbersOfAGrain == 0 && map_takes_stride(stride, kBytes));
  };
  return is_ds(call, features) && to.strides.col == 1 && reinterpret_cast<std::uintptr_t>(to.data) % kGrain == 0 &&
         fits(p.batch1, to.strides.batch1) && fits(p.batch2, to.strides.batch2) && fits(p.heads_q, to.strides.head) &&
         fits(p.seqlen_q, to.strides.row);
}

// The number of the bias's pack, where dS may go in its place, every tile after it was read: no later kernel may need
// the bias; -1 if not.
int pack_for_ds(const Call& call, const Operands& operands) {
  const Problem& p = call.problem;
  const Gradient second = gradient_of(p.need.bias2, p.bias2);
  if (gradient_of(p.need.bias, p.bias) != Gradient::kPlane || !is_ds(call, operands.features) ||
      stores_bias(call, operands.features) || (second != Gradient::kNone && second != Gradient::kColumns)) {
    return -1;
  }
  const std::vector<Pack>& packs = operands.packs;
  const auto found = std::find_if(packs.begin(), packs.end(), [&](const Pack& pack) {
    return pack.to == Region::kBias && pack.box.planes() == p.batch() * p.heads_q;
  });
  return found == packs.end() ? -1 : static_cast<int>(found - packs.begin());
}

// dk, dv and dq in one kernel; deterministic calls add to dq in order.
Choice backward_for_hopper(Planner& planner, BackwardWants wants) {
  const Problem& p = planner.call().problem;
  wants.ordered = p.deterministic && p.need.q && wants.dkv;
  // By itself dq is summed in memory, too; the generic kernel's own pass gives the same bits every time.
  const bool alone = p.need.q && !wants.dkv && !p.deterministic;
  wants.dq = wants.dq || wants.ordered || alone;
  Choice choice = sm90_backward(planner.call(), planner.operands(), planner.target(), wants);
  if (!Planner::allowed(choice.kernel)) {
    choice.why_not = "FOVEA_KERNEL";
  }
  if (choice.why_not != nullptr) {
    choice.kernel.spec = Sm90BackwardSpec();
  }
  return choice;
}

// Of a kernel that stores results, those of fp32_results() or not.
Features storing(Features features, bool fp32_results) {
  features.fp32_results = fp32_results;
  return features;
}

// What the main kernel computes.
BackwardWants wants_of(Planner& planner) {
  const Call& call = planner.call();
  const Problem& p = call.problem;
  const Operands& operands = planner.operands();
  const Features& features = operands.features;
  const Gradient gradients[] = {gradient_of(p.need.bias, p.bias), gradient_of(p.need.bias2, p.bias2)};
  const auto any = [&](Gradient which) { return gradients[0] == which || gradients[1] == which; };
  BackwardWants work;
  work.dkv = p.need.k || p.need.v;
  work.column_sum = any(Gradient::kColumns);
  work.row_sum = any(Gradient::kRows) && work.dkv && !p.deterministic;
  // With a sink fp32 has steps of small P lifted, which sums in memory do not know of.
  const bool lifts = features.type == Type::kFp32 && p.sink;
  work.dq = p.need.q && work.dkv && !p.deterministic && !lifts &&
            backward_adds_dq(features, planner.target(), work.column_sum);
  work.dbias_store = gradients[0] == Gradient::kPlane &&
                     (operands.odd_rows || stores_bias(call, features) || pack_for_ds(call, operands) >= 0);
  work.bias = gradients[0] == Gradient::kPlane && gradients[1] != Gradient::kPlane && !work.dbias_store;
  return work;
}

// The gradient of bias (which = 0) or bias2 (1).
void add_bias_gradient(Planner& planner, Gradient gradient, int which) {
  if (gradient == Gradient::kNone) {
    return;
  }
  const Call& call = planner.call();
  const BiasTile type = tile_of((which == 0 ? call.grad_bias : call.grad_bias2).type);
  const BiasList list = bias_list_of(call.problem, which);
  if (gradient == Gradient::kColumns) {
    add_reduce_columns(planner, type, list);
  } else if (gradient == Gradient::kRows) {
    add_reduce_rows(planner, type, list);
  } else {
    const Choice choice = sm90_bias_gradient(call, planner.operands(), planner.target(), type, list);
    if (planner.can_compute(choice)) {
      add_sm90_bias_gradient(planner, planner.taken(choice), list);
    } else {
      const Results fp32 = fp32_results(call.problem);
      const Choice generic = generic_bias_gradient(
          storing(planner.operands().features, which == 0 ? fp32.bias : fp32.bias2), planner.target(), type);
      add_generic_bias_gradient(planner, planner.taken(generic), list);
    }
  }
}

}  // namespace

// Where nothing shares a bias, packing it and unpacking its gradient take as long as the backward itself. A bias that
// is shared is small, and other kernels need it, too. If so, the operands and the workspace are those of the plan.
bool Planner::takes_odd_rows() {
  const Problem& p = call_.problem;
  // Without its gradient one that is expanded is shared, too.
  const Extents extents = p.need.bias ? p.bias.extents : extents_of(call_.bias, p.bias);
  if (planes_of(p, extents) != p.batch() * p.heads_q || p.deterministic || !p.need.q || !(p.need.k || p.need.v)) {
    return false;
  }
  plan_.operands = operands_of(call_, plan_.workspace, false, true);
  if (!plan_.operands.odd_rows || (p.need.bias && !is_ds(call_, plan_.operands.features))) {
    return false;
  }
  const Choice hopper = backward_for_hopper(*this, wants_of(*this));
  const auto& spec = hopper.kernel.as<Sm90BackwardSpec>();
  return hopper.why_not == nullptr && spec.dq && spec.dkv && spec.dbias_store == p.need.bias;
}

void Planner::backward() {
  const Choice at_once = sm90_small_backward(call_, plan_.operands, plan_.target);
  if (at_once.why_not == nullptr && allowed(at_once.kernel)) {
    add_sm90_small_backward(*this, taken(at_once));
    plan_.summary = fmt::format("for {}: {}{}", plan_.target.architecture(true), kernels_, plan_.summary);
    return;
  }
  const Problem& p = call_.problem;
  const math::Rows& rows = call_.rows;
  const Features& features = plan_.operands.features;
  const Gradient gradients[] = {gradient_of(p.need.bias, p.bias), gradient_of(p.need.bias2, p.bias2)};
  const auto any = [&](Gradient which) { return gradients[0] == which || gradients[1] == which; };

  const Results fp32 = fp32_results(p);

  const int pack = pack_for_ds(call_, plan_.operands);
  const bool in_place = pack >= 0;
  BackwardWants work = wants_of(*this);
  const Choice hopper = backward_for_hopper(*this, work);
  const bool is_hopper = hopper.why_not == nullptr;
  const auto& main = hopper.kernel.as<Sm90BackwardSpec>();  // empty if it cannot compute the call
  // Known only now. All kernels that follow, and the arguments of a backward, have to agree on it (natural_scores).
  plan_.operands.features.key_mask = main.key_mask;
  work.ordered = main.ordered;
  work.dq = work.dq || main.dq;
  const bool sums_dq = work.dq && !main.direct;
  const int dq_columns = is_hopper ? main.d : features.d;

  constexpr std::int64_t kFloat = sizeof(float);
  const std::int64_t padded = padded_rows(rows) * rows.heads_q;
  Workspace& memory = plan_.workspace;
  if (!main.makes_rows) {
    memory.add(Region::kRowLse, padded * kFloat);
    memory.add(Region::kRowDelta, padded * kFloat);
  }
  if (is_hopper && features.query_term) {
    memory.add(Region::kRowTerm, padded * kFloat);
  }
  if (sums_dq) {
    memory.add(Region::kDqSum, padded * dq_columns * kFloat);
  }
  const Sm90KeyOrder order = is_hopper ? sm90_key_order(call_, main, plan_.target) : Sm90KeyOrder();
  if (is_hopper) {
    reserve_sm90_backward(*this, main, order);
  }
  if (any(Gradient::kRows)) {
    memory.add(Region::kRowSum, padded * kFloat);
  }
  if (p.need.sink) {
    memory.add(Region::kSinkSum, rows.heads_q * rows.batch() * tiles_of(rows.limit_q, kRowPad) * kFloat);
  }
  if (work.column_sum) {
    memory.add(Region::kColumnSum, rows.batch() * rows.heads_q * rows.limit_k * kFloat);
  }

  AroundSpec spec = around(features.type);
  spec.d = dq_columns;
  spec.stores_first = main.stores_first;
  AroundSpec before = spec;
  before.dv = std::min(features.dv, before.dv);
  before.converted = main.converts ? main.step : 0;
  before.longest_first = main.longest_first;
  before.shifted = main.converts && features.shifted;
  before.fp32_results = p.wide.out;
  if (is_hopper && features.mask) {
    add_sm90_backward_mask(*this);
  }
  if (main.adds_bias) {
    add_sm90_added_bias_clear(*this);
  }
  if (!main.makes_rows) {
    add_backward_prepare(*this, before);
  }
  if (is_hopper) {
    add_sm90_backward(*this, taken(hopper), order);
  } else if (work.dkv || work.column_sum) {
    add_generic_backward(*this, taken(generic_backward(storing(features, fp32.k || fp32.v), plan_.target, work)));
  }
  const bool row_sum = any(Gradient::kRows) && !main.row_sum;
  const bool dq_alone = p.need.q && !work.dq;
  if (work.dkv || work.column_sum || dq_alone || row_sum) {
    can_compute(hopper);  // the summary says why a generic kernel is used
  }
  if (dq_alone || row_sum) {
    add_generic_backward_dq(
        *this, taken(generic_backward_dq(storing(features, dq_alone && fp32.q), plan_.target, dq_alone, row_sum)));
  }
  if (main.summed > 1) {
    add_sm90_bias_sums(*this, main);
  } else if (main.adds_bias) {
    add_sm90_added_bias_sum(*this);
  } else if (!main.dbias_store) {
    add_bias_gradient(*this, gradients[0], 0);
  } else if (in_place) {
    plan_.operands.grad_bias_pack = pack;
    add_unpack(*this);
  }
  add_bias_gradient(*this, gradients[1], 1);
  const bool converts = sums_dq && !main.converts;
  const std::int64_t convert_blocks = converts ? rows.batch() * rows.heads_q * tiles_of(rows.limit_q, kConvertRows) : 0;
  if (order.parts > 1 && main.dkv && !main.last_parts) {
    add_sm90_backward_parts(*this, main, order, convert_blocks);
  } else {
    // How dq_sum lies.
    spec.turned_dq = sm90_turns_dq(main);
    spec.halves = main.halves && main.bulk && !spec.turned_dq;
    spec.fp32_results = fp32.q;
    add_backward_convert(*this, spec, convert_blocks);
  }
  if (p.need.sink) {
    add_reduce_sink(*this);
  }
  plan_.summary = fmt::format("for {}: {}{}{}", plan_.target.architecture(false), kernels_, plan_.summary, reasons_);
}

}  // namespace fovea::cuda
