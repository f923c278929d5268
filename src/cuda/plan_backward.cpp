// SPDX-License-Identifier: Apache-2.0
//
// The backward's plan: which kernels compute which gradients, and the sums in memory between them.
#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "cuda/config/sm90_backward.h"
#include "cuda/config/sm90_small_backward.h"
#include "cuda/config/tensor_map_limits.h"
#include "cuda/device/generic/backward_sizes.h"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/device/sm90/small_backward_sizes.h"
#include "cuda/planner.h"

namespace fovea::cuda {
namespace {

constexpr std::int64_t kBiasSumNumbers = 256;  // of a block

}  // namespace

Kernel Planner::part(const char* name, const Spec& spec) const {
  Kernel kernel;
  kernel.file =
      std::string_view(name).starts_with("reduce_") ? "around/backward_reduce.cuh" : "around/backward_prepare.cuh";
  kernel.name = name;
  kernel.spec = spec;
  return kernel;
}

Kernel Planner::taken(const Choice& choice) {
  if (choice.why_not != nullptr) {
    refuse(fmt::format("no backward kernel; {}: {}", choice.kernel.name, choice.why_not));
  }
  const Spec& spec = choice.kernel.spec;
  kernels_ += fmt::format("{}{}, {} warps, {} rows a step", kernels_.empty() ? "" : "; ", choice.kernel.name,
                          spec.warps, spec.step);
  return choice.kernel;
}

void Planner::backward() {
  const Choice at_once = sm90_small_backward(call_, plan_.operands, plan_.target);
  if (at_once.why_not == nullptr && allowed(at_once.kernel)) {
    small_backward(at_once);
    return;
  }
  const Problem& p = call_.problem;
  const math::Rows& rows = call_.rows;
  const Spec& features = plan_.operands.features;
  const auto gradient_of = [&](bool needed, const PlaneTraits& traits) {
    return !needed                ? Gradient::kNone
           : !traits.extents.key  ? Gradient::kRows
           : traits.extents.query ? Gradient::kPlane
                                  : Gradient::kColumns;
  };
  const Gradient gradients[] = {gradient_of(p.need.bias, p.bias), gradient_of(p.need.bias2, p.bias2)};
  const auto any = [&](Gradient which) { return gradients[0] == which || gradients[1] == which; };

  BackwardWants work;
  work.dkv = p.need.k || p.need.v;
  work.column_sum = any(Gradient::kColumns);
  work.row_sum = any(Gradient::kRows) && work.dkv && !p.deterministic;
  // With a sink fp32 has steps of small P lifted, which sums in memory do not know of.
  const bool lifts = features.type == Type::kFp32 && p.sink;
  work.dq =
      p.need.q && work.dkv && !p.deterministic && !lifts && backward_adds_dq(features, plan_.target, work.column_sum);
  const int pack = gradients[0] == Gradient::kPlane && !stores_bias() &&
                           (gradients[1] == Gradient::kNone || gradients[1] == Gradient::kColumns)
                       ? pack_for_ds()
                       : -1;
  const bool in_place = pack >= 0;
  work.dbias_store = gradients[0] == Gradient::kPlane && (stores_bias() || in_place);
  const Choice hopper = backward_for_hopper(work);
  plan_.operands.features.key_mask = hopper.kernel.spec.key_mask;
  work.ordered = hopper.kernel.spec.ordered;
  work.dq = work.dq || hopper.kernel.spec.dq;
  const bool sums_dq = work.dq && !hopper.kernel.spec.direct;
  const int dq_columns = hopper.why_not == nullptr ? hopper.kernel.spec.d : features.d;

  constexpr std::int64_t kFloat = sizeof(float);
  const std::int64_t padded = padded_rows(rows) * rows.heads_q;
  Workspace& workspace = plan_.workspace;
  workspace.add(Region::kRowLse, padded * kFloat);
  workspace.add(Region::kRowDelta, padded * kFloat);
  if (hopper.why_not == nullptr && features.query_term) {
    workspace.add(Region::kRowTerm, padded * kFloat);
  }
  if (sums_dq) {
    workspace.add(Region::kDqSum, padded * dq_columns * kFloat);
  }
  const int parts = sm90_backward_parts(call_, hopper.kernel.spec, plan_.target);
  const std::int64_t key_rows = rows.batch() * rows.heads_k * sm90_backward_head_rows(call_, hopper.kernel.spec);
  const bool sums_keys = parts > 1 && hopper.kernel.spec.dkv;
  if (sums_keys) {
    workspace.add(Region::kKeySums, parts * key_rows * (hopper.kernel.spec.d + hopper.kernel.spec.dv) * kFloat);
  }
  if (hopper.why_not == nullptr &&
      (hopper.kernel.spec.stores_first || sm90_backward_counts(call_, hopper.kernel.spec, plan_.target))) {
    constexpr std::int64_t kRowsOfATurn = 64;
    workspace.add(Region::kTurns, (1 + padded / kRowsOfATurn) * std::int64_t{sizeof(u32)});
  }
  if (any(Gradient::kRows)) {
    workspace.add(Region::kRowSum, padded * kFloat);
  }
  const std::int64_t pads = tiles_of(rows.limit_q, kRowPad);
  if (p.need.sink) {
    workspace.add(Region::kSinkSum, rows.heads_q * rows.batch() * pads * kFloat);
  }
  if (work.column_sum) {
    workspace.add(Region::kColumnSum, rows.batch() * rows.heads_q * rows.limit_k * kFloat);
  }

  Spec spec = small(features.type);
  spec.d = dq_columns;
  spec.stores_first = hopper.kernel.spec.stores_first;
  Spec before = spec;
  before.dv = std::min(features.dv, before.dv);
  const std::int64_t heads = rows.batch() * rows.heads_q;
  if (hopper.why_not == nullptr && features.mask) {
    const Box& words = plan_.operands.mask_box;
    workspace.add(Region::kMaskTiles, sm90_backward_mask_box(words).count() * std::int64_t{sizeof(u32)});
    Kernel mask = prepare("sm90_backward_mask", small());
    mask.file = "sm90/backward_mask.cuh";
    constexpr std::int64_t kQueries = 64;
    add(Step::kSm90BackwardMask, mask,
        striding_blocks(words.planes() * tiles_of(words.rows, kQueries) * words.width * 32, plan_.target));
  }
  Kernel preparing = part("backward_prepare", before);
  preparing.threads = kBackwardPrepareThreads;
  add(Step::kBackwardPrepare, preparing, heads * pads);
  if (hopper.why_not == nullptr) {
    const Kernel kernel = taken(hopper);
    plan_.key_order = sm90_key_order(call_, kernel.spec, plan_.target);
    add(Step::kSm90Backward, kernel, sm90_backward_blocks(call_, kernel.spec, plan_.target), 1, 0, parts);
    if (parts > 1) {
      kernels_ += fmt::format(", a block of keys in {} parts", parts);
    }
  } else if (work.dkv || work.column_sum) {
    const Kernel kernel = taken(generic_backward(features, plan_.target, work));
    add(Step::kBackward, kernel, backward_blocks(call_, kernel));
  }
  const bool row_sum = any(Gradient::kRows) && !hopper.kernel.spec.row_sum;
  const bool dq_alone = p.need.q && !work.dq;
  if (work.dkv || work.column_sum || dq_alone || row_sum) {
    serves(hopper);  // says why where a generic kernel is asked
  }
  if (dq_alone || row_sum) {
    const Kernel kernel = taken(generic_backward_dq(features, plan_.target, dq_alone, row_sum));
    add(Step::kBackwardDq, kernel, backward_dq_blocks(call_, kernel));
  }
  if (!hopper.kernel.spec.dbias_store || hopper.why_not != nullptr) {
    bias(gradients[0], p.bias, 0);
  } else if (in_place) {
    plan_.operands.grad_bias_pack = pack;
    constexpr std::int64_t kNumbersOfAThread = 16;
    add(Step::kUnpack, prepare("prepare_unpack", small()),
        striding_blocks(p.batch() * p.heads_q * p.seqlen_q * p.seqlen_k / kNumbersOfAThread + 1, plan_.target));
  }
  bias(gradients[1], p.bias2, 1);
  spec.same_step = hopper.kernel.spec.same_step;  // how dq_sum lies
  const std::int64_t convert_blocks = sums_dq ? heads * tiles_of(rows.limit_q, kConvertRows) : 0;
  if (sums_keys) {
    Spec after = spec;
    after.dv = hopper.kernel.spec.dv;
    after.dq = sums_dq;
    after.key_parts = true;
    Kernel adding = part("sm90_backward_parts", after);
    adding.file = "sm90/backward_parts.cuh";
    const std::int64_t adding_blocks =
        sm90_parts_blocks(key_rows, adding.spec.d) + sm90_parts_blocks(key_rows, adding.spec.dv);
    add(Step::kSm90BackwardParts, adding, adding_blocks + convert_blocks, 1, 0, parts);
  } else {
    add(Step::kBackwardConvert, part("backward_convert", spec), convert_blocks);
  }
  if (p.need.sink) {
    add(Step::kReduceSink, part("reduce_sink", small()), rows.heads_q);
  }
  plan_.summary = fmt::format("for {}: {}{}{}", plan_.target.architecture(false), kernels_, plan_.summary, reasons_);
}

// Whether the gradient of the first bias is dS itself: nothing is shared.
bool Planner::is_ds() const {
  const Problem& p = call_.problem;
  const Spec& features = plan_.operands.features;
  const Extents& e = p.bias.extents;
  const bool whole = (e.batch1 || p.batch1 == 1) && (e.batch2 || p.batch2 == 1) && (e.head || p.heads_q == 1);
  const bool same = (features.bias == BiasTile::kBf16 && features.type == Type::kBf16) ||
                    (features.bias == BiasTile::kFp16 && features.type == Type::kFp16);
  return whole && same && !features.softcap && !features.banded && !features.ragged;
}

// The number of the bias's pack, where dS may go in its place, every tile after it was read: no later kernel may need
// the bias; -1 if not.
int Planner::pack_for_ds() const {
  if (!is_ds()) {
    return -1;
  }
  const Problem& p = call_.problem;
  const std::vector<Pack>& packs = plan_.operands.packs;
  const auto found = std::find_if(packs.begin(), packs.end(), [&](const Pack& pack) {
    return pack.to == Region::kBias && pack.box.planes() == p.batch() * p.heads_q;
  });
  return found == packs.end() ? -1 : static_cast<int>(found - packs.begin());
}

// And tiles of dS lie where its rows may be written by a tensor map.
bool Planner::stores_bias() const {
  const Problem& p = call_.problem;
  const View& to = call_.grad_bias;
  constexpr std::int64_t kNumbersOfAGrain = 8;
  constexpr std::int64_t kBytes = 2;
  constexpr std::uintptr_t kGrain = 16;
  const auto fits = [&](std::int64_t size, std::int64_t stride) {
    return size <= 1 || (stride > 0 && stride % kNumbersOfAGrain == 0 && map_takes_stride(stride, kBytes));
  };
  return is_ds() && to.strides.col == 1 && reinterpret_cast<std::uintptr_t>(to.data) % kGrain == 0 &&
         fits(p.batch1, to.strides.batch1) && fits(p.batch2, to.strides.batch2) && fits(p.heads_q, to.strides.head) &&
         fits(p.seqlen_q, to.strides.row);
}

// dk, dv and dq in one kernel; deterministic calls add to dq in order.
Choice Planner::backward_for_hopper(BackwardWants wants) {
  wants.ordered = call_.problem.deterministic && call_.problem.need.q && wants.dkv;
  // By itself dq is summed in memory, too; the generic kernel's own pass gives the same bits every time.
  const bool alone = call_.problem.need.q && !wants.dkv && !call_.problem.deterministic;
  wants.dq = wants.dq || wants.ordered || alone;
  Choice choice = sm90_backward(call_, plan_.operands, plan_.target, wants);
  if (!allowed(choice.kernel)) {
    choice.why_not = "FOVEA_KERNEL";
  }
  if (choice.why_not != nullptr) {
    choice.kernel.spec = {};
  }
  return choice;
}

void Planner::bias(Gradient gradient, const PlaneTraits& traits, int which) {
  if (gradient == Gradient::kNone) {
    return;
  }
  const Problem& p = call_.problem;
  const Extents& e = traits.extents;
  const BiasTile type = tile_of(traits.type);
  const std::int64_t planes = planes_of(p, e);
  const std::int64_t queries = e.query ? p.seqlen_q : 1;
  const std::int64_t keys = e.key ? p.seqlen_k : 1;
  constexpr std::int64_t kColumns = 32;  // of a block of the reductions
  Spec spec = small();
  spec.grad_bias = type;
  if (gradient == Gradient::kColumns) {
    add(Step::kReduceColumns, part("reduce_columns", spec), planes * tiles_of(keys, kColumns), 1, which);
  } else if (gradient == Gradient::kRows) {
    add(Step::kReduceRows, part("reduce_rows", spec), planes * tiles_of(queries, kColumns), 1, which);
  } else {
    const std::int64_t list = planes > 0 ? p.batch() * p.heads_q / planes : 0;
    const BiasList shared{planes, list, queries, keys};
    const Choice choice = sm90_bias_gradient(call_, plan_.operands, plan_.target, type, which, shared);
    if (serves(choice)) {
      bias_for_hopper(choice, shared, which);
      return;
    }
    const Kernel kernel = taken(generic_bias_gradient(plan_.operands.features, plan_.target, type));
    const std::int64_t blocks = planes * bias_gradient_blocks(queries, keys, kernel);
    const int chunks = bias_gradient_chunks(blocks, std::max<std::int64_t>(list, 1), kernel.spec, plan_.target);
    if (chunks > 1) {
      plan_.workspace.add(which == 0 ? Region::kBiasSum : Region::kBiasSum2,
                          chunks * planes * queries * keys * std::int64_t{sizeof(float)});
    }
    add(Step::kBiasGradient, kernel, blocks * chunks, 1, which, chunks);
    if (chunks > 1) {
      bias_sum(type, planes * tiles_of(queries * keys, kBiasSumNumbers), which, chunks);
    }
  }
}

void Planner::bias_sum(BiasTile type, std::int64_t blocks, int which, int chunks) {
  Spec spec = small();
  spec.grad_bias = type;
  Kernel sum = part("bias_gradient_sum", spec);
  sum.file = "generic/bias_gradient.cuh";
  add(Step::kBiasGradientSum, sum, blocks, 1, which, chunks);
}

// Everything in one launch, but for the sum of a bias's gradient.
void Planner::small_backward(const Choice& choice) {
  const Kernel kernel = taken(choice);
  const SmallOrder& order = plan_.small_order = sm90_small_order(call_, kernel.spec, plan_.target);
  add(Step::kSm90SmallBackward, kernel, order.planes * order.blocks);
  if (kernel.spec.grad_bias != BiasTile::kNone) {
    constexpr std::int64_t kNumbers = std::int64_t{kSmallRows} * kSmallRows;
    plan_.workspace.add(Region::kBiasSum, order.planes * order.workers * kNumbers * std::int64_t{sizeof(float)});
    Kernel sum;
    sum.file = "sm90/small_bias_sum.cuh";
    sum.name = "small_bias_sum";
    sum.spec = small();
    sum.spec.grad_bias = kernel.spec.grad_bias;
    sum.threads = kSmallSumThreads;
    sum.one_architecture = true;
    add(Step::kSmallBiasSum, sum, order.planes * kSmallSumBlocks, 1, 0, static_cast<int>(order.workers));
  }
  plan_.summary = fmt::format("for {}: {}{}", plan_.target.architecture(true), kernels_, plan_.summary);
}

void Planner::bias_for_hopper(const Choice& choice, const BiasList& list, int which) {
  const Kernel kernel = taken(choice);
  const std::int64_t size = list.planes * list.queries * list.keys;
  const int chunks = sm90_bias_gradient_chunks(list, kernel.spec, plan_.target);
  const std::int64_t tiles = sm90_bias_gradient_tiles(list, kernel.spec) * chunks;
  const std::int64_t blocks = std::min<std::int64_t>(tiles, plan_.target.multiprocessors);
  if (chunks > 1) {
    plan_.workspace.add(which == 0 ? Region::kBiasSum : Region::kBiasSum2, chunks * size * std::int64_t{sizeof(float)});
  }
  constexpr std::int64_t kBiases = 2;
  if (!plan_.workspace.has(Region::kSchedule)) {
    plan_.workspace.add(Region::kSchedule, kBiases * std::int64_t{sizeof(u32)});
  }
  add(Step::kSm90BiasGradient, kernel, blocks, 1, which, chunks);
  if (kernel.spec.bias_outside) {
    plan_.workspace.add(which == 0 ? Region::kBiasFlags : Region::kBiasFlags2,
                        tiles * kernel.spec.warps * std::int64_t{sizeof(math::u32)});
    add(Step::kSm90BiasGradient, sm90_bias_gradient_inside(kernel), blocks, 1, which, chunks);
  }
  if (chunks > 1) {
    bias_sum(kernel.spec.grad_bias, list.planes * tiles_of(list.queries * list.keys, kBiasSumNumbers), which, chunks);
  }
}

}  // namespace fovea::cuda
