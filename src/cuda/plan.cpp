// SPDX-License-Identifier: Apache-2.0
//
// plan_for(): candidates are asked in order, the first that serves is taken, and the launches of a call are listed.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "cuda/config/sm80_forward.h"
#include "cuda/cuda.h"

namespace fovea::cuda {
namespace {

constexpr std::int64_t kMostRows = (std::int64_t{1} << 31) - (1 << 16);  // of a sequence: rows are counted in int
constexpr std::int64_t kMostColumns = 1 << 16;

void refuse(const std::string& why) { throw Error(FOVEA_UNSUPPORTED, why); }

// What no kernel of this backend does.
void check_limits(const Call& call) {
  const Problem& p = call.problem;
  for (const auto& [name, length] : {std::pair("q", call.rows.limit_q), std::pair("k", call.rows.limit_k)}) {
    if (length > kMostRows) {
      refuse(fmt::format("{}: sequences of up to {}; served: at most {}", name, length, kMostRows));
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

class Planner {
 public:
  Planner(const Call& call, const Target& target) : call_(call) { plan_.target = target; }

  Plan run() {
    check_limits(call_);
    plan_.operands = operands_of(call_, plan_.workspace);
    operands();
    if (call_.problem.direction == Direction::kForward) {
      forward();
    } else {
      refuse("no backward kernel yet");
    }
    return std::move(plan_);
  }

 private:
  const Call& call_;
  Plan plan_;

  static Kernel prepare(const char* name, const Spec& spec) {
    Kernel kernel;
    kernel.file = "prepare.cuh";
    kernel.name = name;
    kernel.spec = spec;
    return kernel;
  }

  Spec small(Type type = Type::kBf16) const {
    Spec spec;
    spec.arch = plan_.target.capability;
    spec.type = type;
    return spec;
  }

  void add(Step step, Kernel kernel, std::int64_t blocks, unsigned blocks_y = 1, int which = 0) {
    if (blocks > 0) {
      plan_.launches.push_back({step, std::move(kernel), blocks, blocks_y, which});
    }
  }

  void operands() {
    const Operands& operands = plan_.operands;
    const Target& target = plan_.target;
    std::string prepared;
    const auto say = [&](std::string_view what) {
      prepared += fmt::format("{}{}", prepared.empty() ? "" : ", ", what);
    };
    // Elements of one size go in one launch.
    constexpr int kEight = 8;
    for (std::size_t first = 0; first < operands.packs.size();) {
      std::size_t last = first;
      std::int64_t most = 0;
      while (last < operands.packs.size() && last - first < 4 &&
             operands.packs[last].element_bytes == operands.packs[first].element_bytes) {
        most = std::max(most, operands.packs[last].box.count() / kEight + 1);
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
      add(Step::kMask, prepare("prepare_mask", small()), striding_blocks(box.all_rows() * (box.width + 31), target));
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
    const Choice candidates[] = {
        sm80_forward(call_, plan_.operands, plan_.target),
    };
    std::string reasons;
    for (const Choice& choice : candidates) {
      const Spec& spec = choice.kernel.spec;
      if (choice.why_not != nullptr) {
        reasons += fmt::format("; {}: {}", choice.kernel.name, choice.why_not);
        continue;
      }
      add(Step::kForward, choice.kernel, forward_blocks(call_, spec));
      plan_.summary = fmt::format("{} for {}, {} warps of {} queries, {} keys a step{}", choice.kernel.name,
                                  plan_.target.architecture(choice.kernel.one_architecture), spec.warps,
                                  spec.tiles * 16, spec.step, plan_.summary);
      return;
    }
    refuse("no forward kernel" + reasons);
  }
};

}  // namespace

Plan plan_for(const Call& call, const Target& target) { return Planner(call, target).run(); }

}  // namespace fovea::cuda
