// SPDX-License-Identifier: Apache-2.0
//
// The figures were found by measuring on an H200 (bench/results); what a device has not the shared memory for goes to
// the next candidate.
#include "cuda/kernels/generic_forward.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "cuda/device/generic/sizes.h"
#include "cuda/launch/launcher.h"

namespace fovea::cuda {
namespace {

std::vector<ForwardTiles> candidates(const Features& spec) {
  const int widest = std::max(spec.d, spec.dv);
  const bool bias = spec.bias != BiasTile::kNone || spec.bias2 != BiasTile::kNone;
  const bool dropout = spec.dropout != DropoutRule::kNone;
  if (spec.type == Type::kFp32) {
    if (widest <= 64) {
      return {{.warps = 4, .tiles = 1, .step = 64, .ctas = 2},
              {.warps = 4, .tiles = 1, .step = 32, .ctas = 2},
              {.warps = 4, .tiles = 1, .step = 32, .ctas = 1}};
    }
    // A bias takes the registers of half of the keys.
    const ForwardTiles narrow{.warps = 4, .tiles = 1, .step = 16, .ctas = 1};
    return bias ? std::vector<ForwardTiles>{narrow}
                : std::vector<ForwardTiles>{{.warps = 4, .tiles = 1, .step = 32, .ctas = 1}, narrow};
  }
  if (widest <= 32) {
    // Three blocks a multiprocessor leave 168 registers a thread: Q stays in them where nothing else is done.
    if (dropout) {
      return {{.warps = 4, .tiles = 2, .step = 64, .ctas = 2, .resident = true},
              {.warps = 4, .tiles = 2, .step = 32, .ctas = 2, .resident = true},
              {.warps = 4, .tiles = 1, .step = 32, .ctas = 1}};
    }
    const bool plain = !bias && !natural_scores(spec) && !spec.mask && !spec.key_term && !spec.ragged;
    return {{.warps = 4, .tiles = 2, .step = 64, .ctas = 3, .resident = plain},
            {.warps = 4, .tiles = 2, .step = 64, .ctas = 2, .resident = true},
            {.warps = 4, .tiles = 2, .step = 32, .ctas = 2, .resident = true},
            {.warps = 4, .tiles = 1, .step = 32, .ctas = 1}};
  }
  if (widest <= 64) {
    // A lazy maximum overlaps better with the products where there is dropout; masks take the time that a maximum at
    // every step would.
    const bool lazy = dropout || spec.mask || spec.key_mask;
    return {{.warps = 4, .tiles = 2, .step = 64, .ctas = 2, .resident = true, .lazy = lazy},
            {.warps = 4, .tiles = 2, .step = 32, .ctas = 2, .resident = true, .lazy = lazy},
            {.warps = 4, .tiles = 2, .step = 32, .ctas = 1},
            {.warps = 4, .tiles = 1, .step = 32, .ctas = 1}};
  }
  if (widest <= 128) {
    const bool lazy = !(bias && spec.dropout == DropoutRule::kTorchMemEfficient);  // both leave no registers for it
    const ForwardTiles narrow{.warps = 4, .tiles = 2, .step = 32, .ctas = 2, .lazy = lazy};
    if (bias || spec.dropout == DropoutRule::kTorchMemEfficient) {
      return {narrow,
              {.warps = 4, .tiles = 2, .step = 32, .ctas = 1, .lazy = true},
              {.warps = 4, .tiles = 1, .step = 32, .ctas = 1, .lazy = true},
              {.warps = 4, .tiles = 1, .step = 16, .ctas = 1, .lazy = true}};
    }
    return {{.warps = 4, .tiles = 2, .step = 64, .ctas = 2, .lazy = true},
            narrow,
            {.warps = 4, .tiles = 2, .step = 32, .ctas = 1, .lazy = true},
            {.warps = 4, .tiles = 1, .step = 32, .ctas = 1, .lazy = true}};
  }
  if (dropout) {  // which with 64 keys would spill hundreds of bytes
    return {{.warps = 8, .tiles = 1, .step = 32, .ctas = 1},
            {.warps = 4, .tiles = 1, .step = 32, .ctas = 1},
            {.warps = 4, .tiles = 1, .step = 16, .ctas = 1}};
  }
  return {{.warps = 8, .tiles = 1, .step = 64, .ctas = 1},
          {.warps = 8, .tiles = 1, .step = 32, .ctas = 1},
          {.warps = 4, .tiles = 1, .step = 32, .ctas = 1},
          {.warps = 4, .tiles = 1, .step = 16, .ctas = 1}};
}

std::vector<WideForwardTiles> wide_candidates(const Features& spec) {
  if (spec.type == Type::kFp32) {
    if (spec.d <= 256 && spec.dv <= 256) {
      return {{.warps = 8, .step = 32, .grid_s = 4, .grid_o = 2, .part = 256, .columns = 256},
              {.warps = 8, .step = 32, .grid_s = 4, .grid_o = 2, .part = 64, .columns = 256}};
    }
    return {{.warps = 8, .step = 32, .grid_s = 4, .grid_o = 2, .part = 128, .columns = 256},
            {.warps = 8, .step = 32, .grid_s = 4, .grid_o = 2, .part = 64, .columns = 256}};
  }
  if (spec.d <= 512) {
    return {{.warps = 8, .step = 64, .grid_s = 4, .grid_o = 2, .part = 512},
            {.warps = 8, .step = 32, .grid_s = 4, .grid_o = 2, .part = 512},
            {.warps = 8, .step = 32, .grid_s = 4, .grid_o = 2, .part = 256},
            {.warps = 8, .step = 32, .grid_s = 4, .grid_o = 2, .part = 256, .columns = 256}};
  }
  return {{.warps = 8, .step = 64, .grid_s = 4, .grid_o = 2, .part = 256},
          {.warps = 8, .step = 32, .grid_s = 4, .grid_o = 2, .part = 256},
          {.warps = 8, .step = 32, .grid_s = 4, .grid_o = 2, .part = 256, .columns = 256}};
}

// What both kernels are compiled for but their tiles.
Features features_of(const Operands& operands, const Target& target) {
  Features spec = operands.features;
  spec.arch = target.capability;
  for (const Term& term : operands.terms) {
    spec.key_mask = spec.key_mask || (term.to == Region::kKeyTerm && term.biases.empty());
  }
  return spec;
}

// Blocks of either's grid: tiles of queries of every head, and pieces of O's columns.
std::int64_t forward_blocks(const Call& call, const Kernel& kernel) {
  const auto* const wide = std::get_if<WideForwardSpec>(&kernel.spec);
  const std::int64_t rows = wide != nullptr ? wide_forward_rows(*wide) : forward_rows(kernel.as<ForwardSpec>());
  return (call.rows.limit_q + rows - 1) / rows * call.rows.batch() * call.rows.heads_q *
         (wide != nullptr ? wide_forward_chunks(*wide) : 1);
}

// Of the forwards, and of what puts the parts of split keys together.
void start(const Launcher& launcher, const Launch& launch) {
  Args args = launcher.args();
  set_parts(args, launcher, launch);
  launcher.launch_in_pieces(launch, args);
}

// Where the queries alone keep too few multiprocessors busy, keys are split among blocks. `ctas`: of a multiprocessor.
// An out of fp32 where q has 16 bits, or one that is merged, is stored by generic_combine, of one part where keys are
// not split: blocks of generic_wide_forward share rows, so that none of them could replace a logsumexp.
template <class S>
void add(Planner& planner, const Kernel& kernel, const S& spec, int ctas) {
  constexpr std::int64_t kLeastSteps = 4;  // of a part
  const math::Rows& rows = planner.call().rows;
  const std::int64_t blocks = forward_blocks(planner.call(), kernel);
  const std::int64_t room = std::int64_t{planner.target().multiprocessors} * ctas;
  const std::int64_t steps = rows.limit_k / spec.step;
  const bool combines = fp32_results(planner.call().problem).out;
  std::int64_t splits = blocks > 0 ? std::min(room / blocks, steps / kLeastSteps) : 1;
  if (splits < 2 && !combines) {
    planner.add(kernel, blocks, start);
    return;
  }
  splits = std::max<std::int64_t>(splits, 1);
  S split = spec;
  split.split = true;
  Kernel splitting = kernel;
  splitting.spec = split;
  add_memory_of_parts(planner, spec.dv, splits);
  planner.add(splitting, blocks * splits, start, 1, static_cast<int>(splits));
  add_combine(planner, spec, splits);
}

}  // namespace

Choice generic_forward(const Call& call, const Operands& operands, const Target& target) {
  Choice choice;
  Kernel& kernel = choice.kernel;
  kernel.file = "generic/forward.cuh";
  kernel.name = "generic_forward";
  auto& spec = kernel.spec.emplace<ForwardSpec>(ForwardSpec{features_of(operands, target), {}});
  const int most = spec.type == Type::kFp32 ? 128 : 256;
  if (spec.d > most || spec.dv > most) {
    choice.why_not = "head_dim beyond what registers hold";
    return choice;
  }
  for (const ForwardTiles& tiles : candidates(spec)) {
    static_cast<ForwardTiles&>(spec) = tiles;
    // Few queries: half of the rows would stand idle.
    spec.tiles = call.rows.limit_q <= tiles.warps * 16 ? 1 : tiles.tiles;
    kernel.threads = spec.warps * 32;
    kernel.shared_bytes = forward_shared_bytes(spec);
    if (target.holds(kernel.shared_bytes, spec.ctas)) {
      return choice;
    }
  }
  choice.why_not = "tiles beyond the shared memory of a block";
  return choice;
}

Choice generic_wide_forward(const Call&, const Operands& operands, const Target& target) {
  Choice choice;
  Kernel& kernel = choice.kernel;
  kernel.file = "generic/wide_forward.cuh";
  kernel.name = "generic_wide_forward";
  auto& spec = kernel.spec.emplace<WideForwardSpec>(WideForwardSpec{features_of(operands, target), {}});
  for (const WideForwardTiles& tiles : wide_candidates(spec)) {
    static_cast<WideForwardTiles&>(spec) = tiles;
    kernel.threads = spec.warps * 32;
    kernel.shared_bytes = wide_forward_shared_bytes(spec);
    if (target.holds(kernel.shared_bytes, 1)) {
      return choice;
    }
  }
  choice.why_not = "tiles beyond the shared memory of a block";
  return choice;
}

void add_memory_of_parts(Planner& planner, int columns, std::int64_t parts) {
  const math::Rows& rows = planner.call().rows;
  const std::int64_t all = parts * padded_rows(rows) * rows.heads_q;
  planner.workspace().add(Region::kPartialOut, all * columns * std::int64_t{sizeof(float)});
  planner.workspace().add(Region::kPartialSum, all * 2 * std::int64_t{sizeof(float)});
}

void set_parts(Args& args, const Launcher& launcher, const Launch& launch) {
  args.splits = launch.pieces;
  args.partial_out = launcher.region<float>(Region::kPartialOut);
  args.partial_sum = launcher.region<float>(Region::kPartialSum);
}

void add_combine(Planner& planner, const Features& spec, std::int64_t parts) {
  const math::Rows& rows = planner.call().rows;
  AroundSpec after = planner.around(spec.type);
  after.dv = spec.dv;
  after.ragged = spec.ragged;
  after.fp32_results = fp32_results(planner.call().problem).out;
  Kernel combine;
  combine.file = "generic/combine.cuh";
  combine.name = "generic_combine";
  combine.spec = after;
  combine.threads = kCombineRows * 32;
  planner.add(combine, Planner::tiles_of(rows.limit_q, kCombineRows) * rows.batch() * rows.heads_q, start, 1,
              static_cast<int>(parts));
  if (parts > 1) {
    planner.say(fmt::format("; keys in {} parts", parts));
  }
  if (after.fp32_results) {
    planner.say("; out by generic_combine");
  }
}

void add_generic_forward(Planner& planner, const Kernel& kernel) {
  if (const auto* const wide = std::get_if<WideForwardSpec>(&kernel.spec)) {
    add(planner, kernel, *wide, 1);
  } else {
    add(planner, kernel, kernel.as<ForwardSpec>(), kernel.as<ForwardSpec>().ctas);
  }
}

}  // namespace fovea::cuda
