// SPDX-License-Identifier: Apache-2.0
//
// plan_for(): limits, what is prepared, and which kernels compute a forward. backward.cpp has those of a backward.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <tuple>
#include <utility>

#include "core/fields.h"
#include "cuda/config/packed_heads.h"
#include "cuda/device/generic/sizes.h"
#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/kernels/generic_forward.h"
#include "cuda/kernels/prepare.h"
#include "cuda/kernels/sm90_forward.h"
#include "cuda/plan/known_features.h"
#include "cuda/planner.h"

namespace fovea::cuda {
namespace {

// Of a sequence: rows are counted in int, and what has no end is 2^30 there; a band that is open to a side, 2^29.
constexpr std::int64_t kMostRows = std::int64_t{1} << 30;
constexpr std::int64_t kMostRowsOfBand = math::Band<int>::kUnbounded;
constexpr std::int64_t kMostColumns = 1 << 16;
constexpr std::int64_t kMostBlocks = (std::int64_t{1} << 32) - 1;  // of a launch: counted in 32 bits

}  // namespace

const char* kernel_family() {
  static const std::string family = [] {
    const char* const value = std::getenv("FOVEA_KERNEL");
    std::string text = value != nullptr ? value : "";
    if (!text.empty() && text != "generic" && text != "sm80" && text != "sm90") {
      throw Error(FOVEA_INVALID_ARGUMENT, fmt::format("FOVEA_KERNEL: '{}'; accepted: generic, sm80, sm90", text));
    }
    return text;
  }();
  return family.empty() ? nullptr : family.c_str();
}

bool Planner::allowed(const Kernel& kernel) {
  const char* const newest = kernel_family();
  return newest == nullptr || family_of(kernel.name) <= family_of(newest);
}

bool Planner::can_compute(const Choice& choice) {
  if (!allowed(choice.kernel)) {
    reasons_ += fmt::format("; {}: FOVEA_KERNEL={}", choice.kernel.name, kernel_family());
    return false;
  }
  if (choice.why_not != nullptr) {
    reasons_ += fmt::format("; {}: {}", choice.kernel.name, choice.why_not);
    return false;
  }
  return true;
}

KernelSizes sizes_of(const Spec& spec) {
  return std::visit(
      [](const auto& kind) {
        KernelSizes sizes;
        if constexpr (requires { kind.warps; }) {
          sizes.warps = kind.warps;
        }
        if constexpr (requires { kind.tiles; }) {
          sizes.tiles = kind.tiles;
        }
        if constexpr (requires { kind.step; }) {
          sizes.step = kind.step;
        }
        if constexpr (requires { kind.pairs; }) {
          sizes.step = sm90_step_keys(kind);  // of both blocks
        }
        return sizes;
      },
      spec);
}

Kernel Planner::taken(const Choice& choice) {
  if (choice.why_not != nullptr) {
    refuse(fmt::format("no backward kernel; {}: {}", choice.kernel.name, choice.why_not));
  }
  const KernelSizes sizes = sizes_of(choice.kernel.spec);
  kernels_ += fmt::format("{}{}, {} warps, {} rows a step", kernels_.empty() ? "" : "; ", choice.kernel.name,
                          sizes.warps, sizes.step);
  return choice.kernel;
}

std::int64_t Planner::striding_blocks(std::int64_t threads, const Target& target) {
  constexpr std::int64_t kThreads = 256;
  constexpr std::int64_t kBlocksAMultiprocessor = 16;
  return std::clamp<std::int64_t>((threads + kThreads - 1) / kThreads, 1,
                                  kBlocksAMultiprocessor * target.multiprocessors);
}

Plan Planner::run() {
  check_limits();
  add_clear_rows(*this);
  if (call_.problem.direction == Direction::kForward) {
    forward();
  } else {
    if (!takes_odd_rows()) {
      plan_.workspace = Workspace();
      plan_.operands = operands_of(call_, plan_.workspace);
    }
    check_bias_rows();
    add_preparation(*this);
    backward();
  }
  return std::move(plan_);
}

// Candidates are considered in order, and the first that can compute the call is taken.
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

// What no kernel of this backend does.
void Planner::check_limits() const {
  const Problem& p = call_.problem;
  for (const auto& [name, length] : {std::pair("q", call_.rows.limit_q), std::pair("k", call_.rows.limit_k)}) {
    const std::int64_t most = p.banded() ? kMostRowsOfBand : kMostRows;
    if (length > most) {
      refuse(fmt::format("{}: sequences of up to {}; accepted: at most {}{}", name, length, most,
                         p.banded() ? " under a causal mask or a window" : ""));
    }
  }
  // A gradient has the shape of its bias, and that the lengths that were given, whatever the sequences have.
  for (const auto& [name, needed, traits] :
       {std::tuple("bias", p.need.bias, &p.bias), std::tuple("bias2", p.need.bias2, &p.bias2)}) {
    const std::int64_t longest = std::max(traits->extents.query ? p.seqlen_q : 0, traits->extents.key ? p.seqlen_k : 0);
    if (needed && longest > kMostRows) {
      refuse(fmt::format("{}: a gradient with {} rows or columns; accepted: at most {}", name, longest, kMostRows));
    }
  }
  // Those heads are counted in int.
  for (const auto& [name, needed, traits] :
       {std::tuple("bias", p.need.bias, &p.bias), std::tuple("bias2", p.need.bias2, &p.bias2)}) {
    const std::int64_t sharing = p.batch() * p.heads_q / std::max<std::int64_t>(planes_of(p, traits->extents), 1);
    if (needed && sharing > std::numeric_limits<int>::max()) {
      refuse(fmt::format("{}: a gradient that {} heads share; accepted: at most {}", name, sharing,
                         std::numeric_limits<int>::max()));
    }
  }
  for (const auto& [name, columns] : {std::pair("q", p.head_dim), std::pair("v", p.head_dim_v)}) {
    if (columns > kMostColumns) {
      refuse(fmt::format("{}: head_dim {}; accepted: at most {}", name, columns, kMostColumns));
    }
  }
}

// Offsets in a tile have 32 bits (args.h), and so long a row stays as long where it is packed.
void Planner::check_bias_rows() const {
  const Operands& operands = plan_.operands;
  for (const auto& [name, tile, operand] : {std::tuple("bias", operands.features.bias, &operands.bias),
                                            std::tuple("bias2", operands.features.bias2, &operands.bias2)}) {
    const std::int64_t bytes = operand->strides.row * bias_bytes(tile);
    if (call_.rows.limit_q > 1 && bytes >= kRowBytesLimit) {
      refuse(fmt::format("{}: rows of {} bytes; accepted: less than {}", name, bytes, kRowBytesLimit));
    }
  }
}

AroundSpec Planner::around(Type type) const {
  AroundSpec spec;
  spec.arch = plan_.target.capability;
  spec.type = type;
  return spec;
}

void Planner::add(const Kernel& kernel, std::int64_t blocks, Start start, unsigned blocks_y, int pieces) {
  if (blocks > kMostBlocks) {
    refuse(fmt::format("{}: {} blocks; accepted: at most {}", kernel.name, blocks, kMostBlocks));
  }
  if (const char* const feature = unknown_feature(kernel); feature != nullptr) {
    refuse(fmt::format("{}: {}, which this kernel does not know", kernel.name, feature));
  }
  if (blocks > 0) {
    plan_.launches.push_back({kernel, blocks, blocks_y, pieces, std::move(start)});
  }
}

void require_type(const Problem& problem) {
  if (problem.type == DType::kFp64) {
    throw Error(FOVEA_UNSUPPORTED, "q: fp64 on a CUDA device; accepted: fp32, fp16, bf16, or fp64 on the CPU");
  }
}

Plan plan_for(const Call& call, const Target& target) {
  static const FieldNames unknown = unknown_fields<Problem>(kKnownFields);
  refuse_fields(call.problem, unknown);
  require_type(call.problem);
  if (packs_heads(call)) {  // one query a head, and several heads that read the same keys
    const Call packed = with_packed_heads(call);
    Plan plan = Planner(packed, target).run();
    plan.packs_heads = true;
    return plan;
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
  for_each_view(moved, [](const char*, View& view, Role role) {
    if (role == Role::kPlan) {
      view.data = place + size_of(view.type);
    }
  });
  add(moved);
  return kernels;
}

}  // namespace fovea::cuda
