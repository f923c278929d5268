// SPDX-License-Identifier: Apache-2.0
//
// plan_for(): candidates are asked in order, the first that serves is taken, and the launches of a call are listed.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <tuple>

#include "core/clear_rows.h"
#include "cuda/config/packed_heads.h"
#include "cuda/config/sm80_backward.h"
#include "cuda/config/sm80_forward.h"
#include "cuda/config/sm90_backward.h"
#include "cuda/config/sm90_bias_gradient.h"
#include "cuda/config/sm90_forward.h"
#include "cuda/config/sm90_small_backward.h"
#include "cuda/config/tensor_map_limits.h"
#include "cuda/cuda.h"
#include "cuda/device/sm80_backward_sizes.h"
#include "cuda/device/sm90_sizes.h"
#include "cuda/device/sm90_small_backward_sizes.h"
#include "math/missing.h"

namespace fovea::cuda {
namespace {

// Of a sequence: rows are counted in int, and what has no end is 2^30 there; a band that is open to a side, 2^29.
constexpr std::int64_t kMostRows = std::int64_t{1} << 30;
constexpr std::int64_t kMostRowsOfBand = math::Band<int>::kUnbounded;
constexpr std::int64_t kMostColumns = 1 << 16;
constexpr std::int64_t kMostBlocks = (std::int64_t{1} << 32) - 1;  // of a launch: counted in 32 bits

void refuse(const std::string& why) { throw Error(FOVEA_UNSUPPORTED, why); }

// What no kernel of this backend does.
void check_limits(const Call& call) {
  const Problem& p = call.problem;
  for (const auto& [name, length] : {std::pair("q", call.rows.limit_q), std::pair("k", call.rows.limit_k)}) {
    const std::int64_t most = p.banded() ? kMostRowsOfBand : kMostRows;
    if (length > most) {
      refuse(fmt::format("{}: sequences of up to {}; served: at most {}{}", name, length, most,
                         p.banded() ? " under a causal mask or a window" : ""));
    }
  }
  // A gradient has the shape of its bias, and that the lengths that were given, whatever the sequences have.
  for (const auto& [name, needed, traits] :
       {std::tuple("bias", p.need.bias, &p.bias), std::tuple("bias2", p.need.bias2, &p.bias2)}) {
    const std::int64_t longest = std::max(traits->extents.query ? p.seqlen_q : 0, traits->extents.key ? p.seqlen_k : 0);
    if (needed && longest > kMostRows) {
      refuse(fmt::format("{}: a gradient with {} rows or columns; served: at most {}", name, longest, kMostRows));
    }
  }
  for (const auto& [name, columns] : {std::pair("q", p.head_dim), std::pair("v", p.head_dim_v)}) {
    if (columns > kMostColumns) {
      refuse(fmt::format("{}: head_dim {}; served: at most {}", name, columns, kMostColumns));
    }
  }
}

// Blocks that keep every multiprocessor busy, for kernels that walk over their work with a stride.
std::int64_t striding_blocks(std::int64_t threads, const Target& target) {
  constexpr std::int64_t kThreads = 256;
  constexpr std::int64_t kBlocksAMultiprocessor = 16;
  return std::clamp<std::int64_t>((threads + kThreads - 1) / kThreads, 1,
                                  kBlocksAMultiprocessor * target.multiprocessors);
}

// FOVEA_KERNEL: kernels of no newer family than this one ("sm80", "sm90"), for tests and for comparing.
constexpr std::size_t kFamily = 4;  // letters of a family's name, which a kernel's begins with
const char* forced_family() {
  static const char* const family = [] {
    const char* value = std::getenv("FOVEA_KERNEL");
    return value != nullptr && *value == '\0' ? nullptr : value;
  }();
  if (family != nullptr && std::string_view(family) != "sm80" && std::string_view(family) != "sm90") {
    throw Error(FOVEA_INVALID_ARGUMENT, fmt::format("FOVEA_KERNEL: '{}'; accepted: sm80, sm90", family));
  }
  return family;
}

// Whether kernels of this one's family may be taken.
bool allowed(const Kernel& kernel) {
  const char* const family = forced_family();
  return family == nullptr || std::string_view(kernel.name).substr(0, kFamily) <= family;
}

class Planner {
 public:
  Planner(const Call& call, const Target& target) : call_(call) { plan_.target = target; }

  Plan run() {
    check_limits(call_);
    clear_rows();
    if (call_.problem.direction == Direction::kForward) {
      forward();
    } else {
      plan_.operands = operands_of(call_, plan_.workspace);
      check_bias_rows();
      operands();
      backward();
    }
    return std::move(plan_);
  }

 private:
  const Call& call_;
  Plan plan_;
  std::string kernels_;  // for the summary

  static Kernel prepare(const char* name, const Spec& spec) {
    Kernel kernel;
    kernel.file = "prepare.cuh";
    kernel.name = name;
    kernel.spec = spec;
    return kernel;
  }

  // Offsets in a tile have 32 bits (args.h), and so long a row stays as long where it is packed.
  void check_bias_rows() const {
    const Operands& operands = plan_.operands;
    for (const auto& [name, tile, operand] : {std::tuple("bias", operands.features.bias, &operands.bias),
                                              std::tuple("bias2", operands.features.bias2, &operands.bias2)}) {
      const std::int64_t bytes = operand->strides.row * bias_bytes(tile);
      if (call_.rows.limit_q > 1 && bytes >= kRowBytesLimit) {
        refuse(fmt::format("{}: rows of {} bytes; served: less than {}", name, bytes, kRowBytesLimit));
      }
    }
  }

  Spec small(Type type = Type::kBf16) const {
    Spec spec;
    spec.arch = plan_.target.capability;
    spec.type = type;
    return spec;
  }

  void add(Step step, const Kernel& kernel, std::int64_t blocks, unsigned blocks_y = 1, int which = 0, int pieces = 1) {
    if (blocks > kMostBlocks) {
      refuse(fmt::format("{}: {} blocks; served: at most {}", kernel.name, blocks, kMostBlocks));
    }
    if (blocks > 0) {
      plan_.launches.push_back({step, kernel, blocks, blocks_y, which, pieces});
    }
  }

  // Where sequences end is not known here: blocks for gaps that may turn out to be empty.
  void clear_rows() {
    const std::size_t outputs = outputs_to_clear(call_).size();
    if (outputs == 0) {
      return;
    }
    Kernel kernel = prepare("clear_rows", small());
    kernel.file = "clear_rows.cuh";
    constexpr std::int64_t kMostParts = 64;
    const std::int64_t gaps = math::gaps(call_.rows);
    const std::int64_t enough = 4 * plan_.target.multiprocessors;
    const std::int64_t parts = std::clamp<std::int64_t>(enough / std::max<std::int64_t>(gaps, 1), 1, kMostParts);
    add(Step::kClearRows, kernel, std::min(gaps * parts, 4 * enough), static_cast<unsigned>(outputs), 0,
        static_cast<int>(parts));
  }

  void operands() {
    const Operands& operands = plan_.operands;
    const Target& target = plan_.target;
    std::string prepared;
    const auto say = [&](std::string_view what) {
      prepared += fmt::format("{}{}", prepared.empty() ? "" : ", ", what);
    };
    // Elements of one size go in one launch.
    constexpr int kBytesOfAThread = 64;
    for (std::size_t first = 0; first < operands.packs.size();) {
      std::size_t last = first;
      std::int64_t most = 0;
      while (last < operands.packs.size() && last - first < 4 &&
             operands.packs[last].element_bytes == operands.packs[first].element_bytes) {
        most = std::max(
            most, operands.packs[last].box.count() * operands.packs[last].element_bytes / kBytesOfAThread + 1);
        say(fmt::format("{} packed", kRegionNames[static_cast<std::size_t>(operands.packs[last].to)]));
        ++last;
      }
      add(Step::kPack,
          prepare("prepare_pack", small(operands.packs[first].element_bytes == 4 ? Type::kFp32 : Type::kBf16)),
          striding_blocks(most, target), static_cast<unsigned>(last - first), static_cast<int>(first));
      first = last;
    }
    if (operands.mask_bits) {
      say("mask as bits");
      const Box& box = operands.mask_box;
      if (operands.mask_by_lanes) {
        Kernel mask = prepare("sm90_mask", small());
        mask.file = "sm90_mask.cuh";
        constexpr std::int64_t kWordsOfAWarp = 64;
        add(Step::kMask, mask,
            striding_blocks(box.all_rows() * ((box.width + kWordsOfAWarp - 1) / kWordsOfAWarp) * 32, target));
      } else {
        add(Step::kMask, prepare("prepare_mask", small()), striding_blocks(box.all_rows() * (box.width + 31), target));
      }
    }
    for (std::size_t i = 0; i < operands.terms.size(); ++i) {
      say(kRegionNames[static_cast<std::size_t>(operands.terms[i].to)]);
      add(Step::kTerm, prepare("prepare_term", small()), striding_blocks(operands.terms[i].box.count(), target), 1,
          static_cast<int>(i));
    }
    if (operands.pairs) {
      say("fp32 as pairs of fp16");
      const unsigned tensors = call_.problem.direction == Direction::kBackward ? 4 : 3;
      const math::Rows& rows = call_.rows;
      const std::int64_t all = rows.batch() * std::max(rows.heads_q * rows.limit_q, rows.heads_k * rows.limit_k);
      constexpr std::int64_t kThreadsARow = 16;
      add(Step::kClear, prepare("prepare_clear", small()), 1);
      add(Step::kMeasure, prepare("prepare_measure", small()), striding_blocks(all * 4, target), tensors);
      add(Step::kSplit, prepare("prepare_split", small()), striding_blocks(all * kThreadsARow, target), tensors);
    }
    if (!prepared.empty()) {
      plan_.summary = "; prepared: " + prepared;
    }
  }

  void forward() {
    std::string reasons;
    const auto serves = [&](const Choice& choice) {
      if (const char* const family = forced_family();
          family != nullptr && std::string_view(choice.kernel.name).substr(0, kFamily) > family) {
        reasons += fmt::format("; {}: FOVEA_KERNEL={}", choice.kernel.name, family);
        return false;
      }
      if (choice.why_not != nullptr) {
        reasons += fmt::format("; {}: {}", choice.kernel.name, choice.why_not);
        return false;
      }
      return true;
    };
    const auto say = [&](const Kernel& kernel) {
      const Spec& spec = kernel.spec;
      plan_.summary = fmt::format("{} for {}, {} warps of {} queries, {} keys a step{}{}", kernel.name,
                                  plan_.target.architecture(kernel.one_architecture), spec.warps, spec.tiles * 16,
                                  spec.step, plan_.summary, reasons);
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
    for (const Choice& choice :
         {sm80_forward(call_, plan_.operands, plan_.target), sm80_wide_forward(call_, plan_.operands, plan_.target)}) {
      if (serves(choice)) {
        forward(choice.kernel);
        say(choice.kernel);
        return;
      }
    }
    refuse("no forward kernel" + reasons);
  }

  void forward_for_hopper(Kernel kernel) {
    const Sm90Order order = sm90_order(call_, plan_.operands, kernel.spec);
    if (sm90_is_scheduled(order, kernel.spec, plan_.target)) {
      plan_.workspace.add(Region::kSchedule, sm90_schedule_bytes(order));
      Kernel schedule;
      schedule.file = "sm90_schedule.cuh";
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
  void forward(Kernel kernel) {
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
    combine.file = "sm80_combine.cuh";
    combine.name = "sm80_combine";
    combine.spec = small(kernel.spec.type);
    combine.spec.dv = kernel.spec.dv;
    combine.spec.ragged = kernel.spec.ragged;
    combine.threads = kCombineRows * 32;
    add(Step::kForward, kernel, blocks * splits, 1, 0, static_cast<int>(splits));
    add(Step::kCombine, combine, tiles_of(rows.limit_q, kCombineRows) * rows.batch() * rows.heads_q, 1, 0,
        static_cast<int>(splits));
    plan_.summary += fmt::format("; keys in {} parts", splits);
  }

  // ---- backward ----

  static std::int64_t tiles_of(std::int64_t length, std::int64_t tile) { return (length + tile - 1) / tile; }

  Kernel part(const char* name, const Spec& spec) const {
    Kernel kernel;
    kernel.file = "sm80_backward_prepare.cuh";
    kernel.name = name;
    kernel.spec = spec;
    return kernel;
  }

  Kernel taken(const Choice& choice) {
    if (choice.why_not != nullptr) {
      refuse(fmt::format("no backward kernel; {}: {}", choice.kernel.name, choice.why_not));
    }
    const Spec& spec = choice.kernel.spec;
    kernels_ += fmt::format("{}{}, {} warps, {} rows a step", kernels_.empty() ? "" : "; ", choice.kernel.name,
                            spec.warps, spec.step);
    return choice.kernel;
  }

  void backward() {
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
    const bool in_place = gradients[0] == Gradient::kPlane && !stores_bias() && stores_bias_in_place() &&
                          (gradients[1] == Gradient::kNone || gradients[1] == Gradient::kColumns);
    work.dbias_store = gradients[0] == Gradient::kPlane && (stores_bias() || in_place);
    const Choice hopper = backward_for_hopper(work);
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
    Kernel preparing = part("backward_prepare", before);
    preparing.threads = kBackwardPrepareThreads;
    add(Step::kBackwardPrepare, preparing, heads * pads);
    if (hopper.why_not == nullptr) {
      const Kernel kernel = taken(hopper);
      add(Step::kSm90Backward, kernel, sm90_backward_blocks(call_, kernel.spec, plan_.target));
    } else if (work.dkv || work.column_sum) {
      const Kernel kernel = taken(sm80_backward(features, plan_.target, work));
      add(Step::kBackward, kernel, backward_blocks(call_, kernel));
    }
    if (sums_dq) {
      add(Step::kBackwardConvert, part("backward_convert", spec), heads * tiles_of(rows.limit_q, kConvertRows));
    }
    const bool row_sum = any(Gradient::kRows) && !hopper.kernel.spec.row_sum;
    const bool dq_alone = p.need.q && !work.dq;
    if (dq_alone || row_sum) {
      const Kernel kernel = taken(sm80_backward_dq(features, plan_.target, dq_alone, row_sum));
      add(Step::kBackwardDq, kernel, backward_dq_blocks(call_, kernel));
    }
    if (!hopper.kernel.spec.dbias_store || hopper.why_not != nullptr) {
      bias(gradients[0], p.bias, 0);
    } else if (in_place) {
      plan_.operands.grad_bias_in_place = true;
      constexpr std::int64_t kNumbersOfAThread = 16;
      add(Step::kUnpack, prepare("prepare_unpack", small()),
          striding_blocks(p.batch() * p.heads_q * p.seqlen_q * p.seqlen_k / kNumbersOfAThread + 1, plan_.target));
    }
    bias(gradients[1], p.bias2, 1);
    if (p.need.sink) {
      add(Step::kReduceSink, part("reduce_sink", small()), rows.heads_q);
    }
    plan_.summary = fmt::format("for {}: {}{}", plan_.target.architecture(false), kernels_, plan_.summary);
  }

  // Whether the gradient of the first bias is dS itself: nothing is shared.
  bool is_ds() const {
    const Problem& p = call_.problem;
    const Spec& features = plan_.operands.features;
    const Extents& e = p.bias.extents;
    const bool whole = (e.batch1 || p.batch1 == 1) && (e.batch2 || p.batch2 == 1) && (e.head || p.heads_q == 1);
    const bool same = (features.bias == BiasTile::kBf16 && features.type == Type::kBf16) ||
                      (features.bias == BiasTile::kFp16 && features.type == Type::kFp16);
    return whole && same && !features.softcap && !features.banded && !features.ragged;
  }

  // And it may go where the bias was packed, every tile after it was read: no later kernel may need the bias.
  bool stores_bias_in_place() const {
    if (!is_ds() || plan_.operands.bias.region != Region::kBias) {
      return false;
    }
    const Problem& p = call_.problem;
    const std::vector<Pack>& packs = plan_.operands.packs;
    return std::any_of(packs.begin(), packs.end(), [&](const Pack& pack) {
      return pack.to == Region::kBias && pack.box.planes() == p.batch() * p.heads_q;
    });
  }

  // And tiles of dS lie where its rows may be written by a tensor map.
  bool stores_bias() const {
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
  Choice backward_for_hopper(BackwardWants wants) {
    wants.ordered = call_.problem.deterministic && call_.problem.need.q && wants.dkv;
    // By itself dq is summed in memory, too; the generic kernel's own pass gives the same bits every time.
    const bool alone = call_.problem.need.q && !wants.dkv && !call_.problem.deterministic;
    wants.dq = wants.dq || wants.ordered || alone;
    Choice choice = sm90_backward(call_, plan_.operands, plan_.target, wants);
    if (!allowed(choice.kernel)) {
      choice.why_not = "not asked for by FOVEA_KERNEL=sm90";
    }
    if (choice.why_not != nullptr) {
      choice.kernel.spec = {};
    }
    return choice;
  }

  // Which sums a bias's gradient is made of.
  enum class Gradient { kNone, kPlane, kColumns, kRows };

  void bias(Gradient gradient, const PlaneTraits& traits, int which) {
    if (gradient == Gradient::kNone) {
      return;
    }
    const Problem& p = call_.problem;
    const Extents& e = traits.extents;
    const BiasTile type = tile_of(traits.type);
    const std::int64_t planes = (e.batch1 ? p.batch1 : 1) * (e.batch2 ? p.batch2 : 1) * (e.head ? p.heads_q : 1);
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
      if (choice.why_not == nullptr && allowed(choice.kernel)) {
        bias_for_hopper(choice, shared, which);
        return;
      }
      const Kernel kernel = taken(sm80_bias_gradient(plan_.operands.features, plan_.target, type));
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

  static constexpr std::int64_t kBiasSumNumbers = 256;  // of a block

  void bias_sum(BiasTile type, std::int64_t blocks, int which, int chunks) {
    Spec spec = small();
    spec.grad_bias = type;
    Kernel sum = part("bias_gradient_sum", spec);
    sum.file = "sm80_bias_gradient.cuh";
    add(Step::kBiasGradientSum, sum, blocks, 1, which, chunks);
  }

  // Everything in one launch, but for the sum of a bias's gradient.
  void small_backward(const Choice& choice) {
    const Kernel kernel = taken(choice);
    const SmallOrder order = sm90_small_order(call_, kernel.spec, plan_.target);
    add(Step::kSm90SmallBackward, kernel, order.planes * order.blocks);
    if (kernel.spec.grad_bias != BiasTile::kNone) {
      constexpr std::int64_t kNumbers = std::int64_t{kSmallRows} * kSmallRows;
      plan_.workspace.add(Region::kBiasSum, order.planes * order.workers * kNumbers * std::int64_t{sizeof(float)});
      Kernel sum;
      sum.file = "sm90_small_bias_sum.cuh";
      sum.name = "small_bias_sum";
      sum.spec = small();
      sum.spec.grad_bias = kernel.spec.grad_bias;
      sum.threads = kSmallSumThreads;
      sum.one_architecture = true;
      add(Step::kSmallBiasSum, sum, order.planes * kSmallSumBlocks, 1, 0, static_cast<int>(order.workers));
    }
    plan_.summary = fmt::format("for {}: {}{}", plan_.target.architecture(true), kernels_, plan_.summary);
  }

  void bias_for_hopper(const Choice& choice, const BiasList& list, int which) {
    const Kernel kernel = taken(choice);
    const std::int64_t size = list.planes * list.queries * list.keys;
    const int chunks = sm90_bias_gradient_chunks(list, kernel.spec, plan_.target);
    const std::int64_t tiles = sm90_bias_gradient_tiles(list, kernel.spec) * chunks;
    const std::int64_t blocks = std::min<std::int64_t>(tiles, plan_.target.multiprocessors);
    if (chunks > 1) {
      plan_.workspace.add(which == 0 ? Region::kBiasSum : Region::kBiasSum2,
                          chunks * size * std::int64_t{sizeof(float)});
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
};

}  // namespace

Plan plan_for(const Call& call, const Target& target) {
  if (packs_heads(call)) {
    const Call packed = with_packed_heads(call);
    return Planner(packed, target).run();
  }
  return Planner(call, target).run();
}

std::vector<Kernel> kernels_for(const Call& call, const Target& target) {
  std::vector<Kernel> kernels;
  const auto add = [&](const Call& one) {
    for (const Launch& launch : plan_for(one, target).launches) {
      if (std::find(kernels.begin(), kernels.end(), launch.kernel) == kernels.end()) {
        kernels.push_back(launch.kernel);
      }
    }
  };
  add(call);
  // The same with every address off by an element; nothing is read there.
  alignas(16) static char place[16];
  Call moved = call;
  for (View* view : {&moved.q, &moved.k, &moved.v, &moved.bias, &moved.bias2, &moved.out, &moved.grad_out,
                     &moved.grad_q, &moved.grad_k, &moved.grad_v, &moved.grad_bias, &moved.grad_bias2}) {
    view->data = place + size_of(view->type);
  }
  add(moved);
  return kernels;
}

}  // namespace fovea::cuda
