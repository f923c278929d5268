// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernels/prepare.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "core/clear_rows.h"
#include "cuda/device/around/clear_rows_args.h"
#include "cuda/device/around/prepare_args.h"
#include "cuda/launch/launcher.h"

namespace fovea::cuda {
namespace {

Source source(const View& view) { return {view.data, view.strides}; }

Kernel prepare(const char* name, const AroundSpec& spec) {
  Kernel kernel;
  kernel.file = "around/prepare.cuh";
  kernel.name = name;
  kernel.spec = spec;
  return kernel;
}

// `count` packs from `first` on, of elements of one size.
void add_packs(Planner& planner, std::size_t first, std::size_t count) {
  constexpr int kBytesOfAThread = 64;
  const std::vector<Pack>& packs = planner.operands().packs;
  std::int64_t most = 0;
  for (std::size_t i = first; i < first + count; ++i) {
    most = std::max(most, packs[i].box.count() * packs[i].element_bytes / kBytesOfAThread + 1);
  }
  const auto start = [first](const Launcher& launcher, const Launch& launch) {
    PackArgs args;
    for (unsigned i = 0; i < launch.blocks_y; ++i) {
      const Pack& pack = launcher.operands().packs[first + i];
      args.jobs[i] = {source(launcher.call().*pack.from), launcher.region<void>(pack.to), pack.box, pack.columns};
    }
    launcher.launch(launch, args);
  };
  planner.add(prepare("prepare_pack", planner.around(packs[first].element_bytes == 4 ? Type::kFp32 : Type::kBf16)),
              Planner::striding_blocks(most, planner.target()), start, static_cast<unsigned>(count));
}

void add_mask(Planner& planner) {
  const Box& box = planner.operands().mask_box;
  Kernel kernel = prepare("prepare_mask", planner.around());
  std::int64_t threads = box.all_rows() * (box.width + 31);
  if (planner.operands().mask_by_lanes) {
    constexpr std::int64_t kWordsOfAWarp = 64;
    kernel.file = "sm90/forward_mask.cuh";
    kernel.name = "sm90_mask";
    threads = box.all_rows() * Planner::tiles_of(box.width, kWordsOfAWarp) * 32;
  }
  planner.add(kernel, Planner::striding_blocks(threads, planner.target()),
              [](const Launcher& launcher, const Launch& launch) {
                const Call& call = launcher.call();
                launcher.launch(launch, MaskArgs{source(call.mask), launcher.region<u32>(Region::kMaskBits),
                                                 launcher.operands().mask_box, call.rows.limit_k});
              });
}

void add_term(Planner& planner, std::size_t number) {
  const auto start = [number](const Launcher& launcher, const Launch& launch) {
    const Call& call = launcher.call();
    const Term& term = launcher.operands().terms[number];
    TermArgs args;
    // Along the vector: keys, or queries.
    const auto along = [&](const View& view) {
      Source from = source(view);
      if (term.to == Region::kQueryTerm) {
        from.strides.col = from.strides.row;
      }
      from.strides.row = 0;
      return from;
    };
    for (const Member member : term.biases) {
      const View& view = call.*member;
      args.biases[args.count++] = {along(view), static_cast<int>(tile_of(view.type))};
    }
    if (term.mask) {
      args.mask = along(call.mask);
    }
    args.to = launcher.region<float>(term.to);
    args.box = term.box;
    args.columns = term.columns;
    launcher.launch(launch, args);
  };
  planner.add(prepare("prepare_term", planner.around()),
              Planner::striding_blocks(planner.operands().terms[number].box.count(), planner.target()), start);
}

void start_pairs(const Launcher& launcher, const Launch& launch) {
  const Operands& operands = launcher.operands();
  const Call& call = launcher.call();
  const Problem& p = call.problem;
  PairArgs args;
  args.rows = call.rows;
  args.sizes = launcher.args().sizes;
  const auto job = [&](int i, const View& view, const Operand& operand, i64 columns, int width) {
    args.jobs[i] = {source(view), launcher.region<unsigned short>(operand.region), operand.strides, columns, width};
  };
  job(0, call.q, operands.q, p.head_dim, operands.head_dim);
  job(1, call.k, operands.k, p.head_dim, operands.head_dim);
  job(2, call.v, operands.v, p.head_dim_v, operands.head_dim_v);
  if (p.direction == Direction::kBackward) {
    job(3, call.grad_out, operands.grad_out, p.head_dim_v, operands.head_dim_v);
  }
  launcher.launch(launch, args);
}

void add_pairs(Planner& planner) {
  const unsigned tensors = planner.call().problem.direction == Direction::kBackward ? 4 : 3;
  const math::Rows& rows = planner.call().rows;
  const std::int64_t all = rows.batch() * std::max(rows.heads_q * rows.limit_q, rows.heads_k * rows.limit_k);
  constexpr std::int64_t kThreadsARow = 16;
  const auto blocks = [&](std::int64_t threads) { return Planner::striding_blocks(threads, planner.target()); };
  planner.add(prepare("prepare_clear", planner.around()), 1, start_pairs);
  planner.add(prepare("prepare_measure", planner.around()), blocks(all * 4), start_pairs, tensors);
  planner.add(prepare("prepare_split", planner.around()), blocks(all * kThreadsARow), start_pairs, tensors);
}

void start_clear_rows(const Launcher& launcher, const Launch& launch) {
  constexpr u32 kMinusInfinity = 0xff800000;  // in fp32
  ClearRowsArgs args;
  args.rows = rows_to_clear(launcher.call());
  args.parts = launch.pieces;
  int count = 0;
  for (const RowOutput& output : outputs_to_clear(launcher.call())) {
    args.jobs[count++] = {output.view->data,
                          output.view->strides,
                          output.heads,
                          output.columns,
                          static_cast<int>(size_of(output.view->type)),
                          output.is_lse ? kMinusInfinity : 0,
                          output.of_keys};
  }
  launcher.launch(launch, args);
}

}  // namespace

// Where sequences end is not known here: blocks for gaps that may turn out to be empty.
void add_clear_rows(Planner& planner) {
  const std::size_t outputs = outputs_to_clear(planner.call()).size();
  if (outputs == 0) {
    return;
  }
  Kernel kernel = prepare("clear_rows", planner.around());
  kernel.file = "around/clear_rows.cuh";
  constexpr std::int64_t kMostParts = 64;
  const std::int64_t gaps = math::gaps(planner.call().rows);
  const std::int64_t enough = 4 * planner.target().multiprocessors;
  const std::int64_t parts = std::clamp<std::int64_t>(enough / std::max<std::int64_t>(gaps, 1), 1, kMostParts);
  planner.add(kernel, std::min(gaps * parts, 4 * enough), start_clear_rows, static_cast<unsigned>(outputs),
              static_cast<int>(parts));
  planner.clears_rows(!planner.launches().empty());
}

void add_preparation(Planner& planner) {
  const Operands& operands = planner.operands();
  std::string prepared;
  const auto say = [&](std::string_view what) { prepared += fmt::format("{}{}", prepared.empty() ? "" : ", ", what); };
  // Elements of one size go in one launch.
  constexpr std::size_t kMostPacks = 4;
  for (std::size_t first = 0; first < operands.packs.size();) {
    std::size_t last = first;
    while (last < operands.packs.size() && last - first < kMostPacks &&
           operands.packs[last].element_bytes == operands.packs[first].element_bytes) {
      say(fmt::format("{} packed", kRegionNames[static_cast<std::size_t>(operands.packs[last].to)]));
      ++last;
    }
    add_packs(planner, first, last - first);
    first = last;
  }
  if (operands.mask_bits) {
    say("mask as bits");
    add_mask(planner);
  }
  for (std::size_t i = 0; i < operands.terms.size(); ++i) {
    say(kRegionNames[static_cast<std::size_t>(operands.terms[i].to)]);
    add_term(planner, i);
  }
  if (operands.pairs) {
    say("fp32 as pairs of fp16");
    add_pairs(planner);
  }
  if (!prepared.empty()) {
    planner.say("; prepared: " + prepared);
  }
}

void add_unpack(Planner& planner) {
  const Problem& p = planner.call().problem;
  constexpr std::int64_t kNumbersOfAThread = 16;
  planner.add(prepare("prepare_unpack", planner.around()),
              Planner::striding_blocks(p.batch() * p.heads_q * p.seqlen_q * p.seqlen_k / kNumbersOfAThread + 1,
                                       planner.target()),
              [](const Launcher& launcher, const Launch& launch) {
                const Operands& operands = launcher.operands();
                const Pack& pack = operands.packs[static_cast<std::size_t>(operands.grad_bias_pack)];
                const View& to = launcher.call().grad_bias;
                launcher.launch(launch, UnpackArgs{launcher.region<unsigned short>(pack.to), to.data, to.strides,
                                                   pack.box, pack.columns});
              });
}

}  // namespace fovea::cuda
