// SPDX-License-Identifier: Apache-2.0
//
// Candidates in order of preference; the first that fits the shared memory is taken. The figures were found by
// measuring on an H200 (bench/results).
#include "cuda/kernels/generic_backward.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "cuda/device/generic/backward_sizes.h"
#include "cuda/kernels/backward_around.h"

namespace fovea::cuda {
namespace {

bool has_bias(const Features& spec) { return spec.bias != BiasTile::kNone || spec.bias2 != BiasTile::kNone; }

Choice choose(const char* name, const char* file, const BackwardSpec& base, const Target& target,
              const std::vector<BackwardTiles>& candidates, int (*shared_bytes)(const BackwardSpec&)) {
  Choice choice;
  Kernel& kernel = choice.kernel;
  kernel.name = name;
  kernel.file = file;
  auto& spec = kernel.spec.emplace<BackwardSpec>(base);
  spec.arch = target.capability;
  for (const BackwardTiles& tiles : candidates) {
    static_cast<BackwardTiles&>(spec) = tiles;
    spec.grad_bias = base.grad_bias;
    kernel.threads = tiles.warps * 32;
    kernel.shared_bytes = shared_bytes(spec);
    if (target.holds(kernel.shared_bytes, tiles.ctas)) {
      return choice;
    }
  }
  choice.why_not = "tiles beyond the shared memory of a block";
  return choice;
}

// Features of the backward's kernels: columns padded to what their grids divide; pairs in natural units.
BackwardSpec padded(const Features& features) {
  BackwardSpec spec{features, {}, {}};
  spec.d = backward_columns(features.type, features.d, features.dv);
  spec.dv = backward_columns(features.type, features.dv, features.d);
  if (spec.type == Type::kFp32) {
    spec.natural = true;
  }
  return spec;
}

// How much is done to a score beyond the formula of plain attention: it takes registers.
enum class Work { kPlain, kSome, kMuch };
int features_of(const BackwardSpec& s) {
  return int{s.softcap} + s.positions.count() + int{s.mask} + int{s.key_term} + int{s.query_term} +
         int{s.column_sum && std::max(s.d, s.dv) > 32} + int{s.bias != BiasTile::kNone} +
         int{s.bias2 != BiasTile::kNone} + int{s.dropout != DropoutRule::kNone};
}
Work work_of(const BackwardSpec& s) {
  const int features = features_of(s);
  const bool wide_bias = s.bias == BiasTile::kFp32 || s.bias2 == BiasTile::kFp32;
  constexpr int kMany = 3;
  return features >= kMany || wide_bias ? Work::kMuch : features > 0 ? Work::kSome : Work::kPlain;
}

// ---- tiles of each kernel, the preferred first ----

std::vector<BackwardTiles> narrow_candidates(const BackwardSpec& s) {
  const Work work = work_of(s);
  if (s.type == Type::kFp32) {
    const int part = work == Work::kMuch || s.softcap ? 16 : 32;
    if (work == Work::kMuch && s.d % 64 == 0) {
      return {{.warps = 4, .tiles = 1, .step = 16, .part = 16, .ctas = 2},
              {.warps = 4, .tiles = 1, .step = 16, .part = 16, .ctas = 1},
              {.warps = 2, .tiles = 1, .step = 16, .part = 16, .ctas = 1}};
    }
    return {{.warps = 4, .tiles = 1, .step = 32, .part = part, .ctas = 2, .grid_q = 2},
            {.warps = 4, .tiles = 1, .step = 32, .part = 16, .ctas = 1, .grid_q = 2},
            {.warps = 2, .tiles = 1, .step = 16, .part = 16, .ctas = 1}};
  }
  const int grid_q = s.d % 32 == 0 ? 2 : 4;
  std::vector<BackwardTiles> candidates;
  if (work == Work::kMuch) {
    candidates = {{.warps = 4, .tiles = 1, .step = 64, .part = 32, .ctas = 2, .grid_q = grid_q, .delay = true},
                  {.warps = 4, .tiles = 1, .step = 64, .part = 32, .ctas = 2, .grid_q = grid_q},
                  {.warps = 4, .tiles = 1, .step = 64, .part = 32, .ctas = 1, .grid_q = grid_q}};
  } else {
    // From 9.0 on sums leave by fewer instructions, and a bias or dropout alone finds registers for the larger part.
    const bool one = s.arch >= 90 && features_of(s) == 1 && (has_bias(s) || s.dropout != DropoutRule::kNone);
    const int part = work == Work::kPlain || one ? 32 : 16;
    const int step = s.dq ? 64 : 32;
    candidates = {{.warps = 4,
                   .tiles = 2,
                   .step = step,
                   .part = part,
                   .ctas = 2,
                   .grid_q = step == 64 ? grid_q : 1,
                   .delay = true},
                  {.warps = 4, .tiles = 2, .step = step, .part = part, .ctas = 2, .grid_q = step == 64 ? grid_q : 1},
                  {.warps = 4, .tiles = 2, .step = step, .part = part, .ctas = 1, .grid_q = step == 64 ? grid_q : 1}};
  }
  candidates.push_back({.warps = 2, .tiles = 1, .step = 32, .part = 16, .ctas = 1, .grid_q = 2});
  return candidates;
}

std::vector<BackwardTiles> wide_candidates(const BackwardSpec& s) {
  const int widest = std::max(s.d, s.dv);
  const auto both = [&](int step) { return s.d % step == 0 && s.dv % step == 0; };
  if (s.type == Type::kFp32) {
    if (widest <= 128) {
      std::vector<BackwardTiles> candidates = {
          {.warps = 8, .tiles = 1, .step = 64, .part = 32, .ctas = 1, .grid_s = 4, .grid_o = 4, .grid_q = 4},
          {.warps = 4, .tiles = 1, .step = 32, .part = 16, .ctas = 1, .grid_s = 2, .grid_o = 2, .grid_q = 2}};
      if (both(64)) {
        candidates[0].step = 32;
        candidates[0].part = 16;
        candidates[0].grid_q = 2;
        candidates.push_back({.warps = 4, .tiles = 1, .step = 16, .part = 16, .ctas = 1, .grid_s = 2, .grid_o = 2});
      }
      candidates.push_back({.warps = 2, .tiles = 1, .step = 16, .part = 16, .ctas = 1});
      return candidates;
    }
    if (widest <= 256) {
      if (both(64)) {
        return {{.warps = 8, .tiles = 1, .step = 32, .part = 16, .ctas = 1, .grid_s = 2, .grid_o = 2, .grid_q = 2},
                {.warps = 4, .tiles = 1, .step = 16, .part = 16, .ctas = 1}};
      }
      return {{.warps = 4, .tiles = 1, .step = 32, .part = 16, .ctas = 1, .grid_s = 2, .grid_o = 2, .grid_q = 2},
              {.warps = 2, .tiles = 1, .step = 16, .part = 16, .ctas = 1}};
    }
    return {{.warps = 8, .tiles = 1, .step = 16, .part = 16, .ctas = 1}};
  }
  if (widest <= 128) {
    if (!both(32)) {
      return {{.warps = 4, .tiles = 2, .step = 64, .part = 32, .ctas = 2, .grid_s = 2, .grid_o = 4, .grid_q = 4},
              {.warps = 4, .tiles = 2, .step = 64, .part = 32, .ctas = 1, .grid_s = 2, .grid_o = 4, .grid_q = 4},
              {.warps = 2, .tiles = 2, .step = 32, .part = 16, .ctas = 1, .grid_o = 2, .grid_q = 2}};
    }
    const int grid_q = widest <= 96 ? 4 : 2;
    if (work_of(s) == Work::kMuch) {
      return {{.warps = 8, .tiles = 1, .step = 64, .part = 32, .ctas = 1, .grid_s = 4, .grid_o = 4, .grid_q = 4},
              {.warps = 4, .tiles = 2, .step = 32, .part = 16, .ctas = 1, .grid_s = 2, .grid_o = 2, .grid_q = 2},
              {.warps = 2, .tiles = 1, .step = 16, .part = 16, .ctas = 1}};
    }
    return {{.warps = 4, .tiles = 2, .step = 64, .part = 32, .ctas = 2, .grid_s = 2, .grid_o = 2, .grid_q = grid_q},
            {.warps = 8, .tiles = 2, .step = 64, .part = 32, .ctas = 1, .grid_s = 4, .grid_o = 4, .grid_q = 4},
            {.warps = 4, .tiles = 2, .step = 32, .part = 16, .ctas = 1, .grid_s = 2, .grid_o = 2, .grid_q = 2}};
  }
  if (widest <= 256) {
    BackwardTiles best = {
        .warps = 8, .tiles = 2, .step = 64, .part = 16, .ctas = 1, .grid_s = 2, .grid_o = 4, .grid_q = 4};
    if (work_of(s) == Work::kMuch) {
      best = {.warps = 8, .tiles = 1, .step = 64, .part = 32, .ctas = 1, .grid_s = 4, .grid_o = 4, .grid_q = 4};
    } else if (s.d == s.dv && both(64)) {
      best.grid_o = 2;
      best.grid_q = 2;
    }
    if (both(64)) {
      return {best,
              {.warps = 4, .tiles = 1, .step = 32, .part = 16, .ctas = 1, .grid_s = 2, .grid_o = 2, .grid_q = 2},
              {.warps = 4, .tiles = 1, .step = 16, .part = 16, .ctas = 1, .grid_s = 2, .grid_o = 2}};
    }
    return {best, {.warps = 4, .tiles = 1, .step = 32, .part = 16, .ctas = 1, .grid_s = 2, .grid_o = 2, .grid_q = 2}};
  }
  return {{.warps = 8, .tiles = 1, .step = 32, .part = 8, .ctas = 1, .grid_s = 2, .grid_o = 2},
          {.warps = 8, .tiles = 1, .step = 16, .part = 8, .ctas = 1, .grid_s = 2, .grid_o = 2}};
}

std::vector<BackwardTiles> dq_candidates(const BackwardSpec& s) {
  const int widest = std::max(s.d, s.dv);
  if (s.type == Type::kFp32) {
    // Blocks that share the columns.
    const int share = s.d > 256 ? 4 : s.d > 128 && work_of(s) != Work::kPlain ? 2 : 1;
    return {{.warps = 4, .tiles = 1, .step = 32, .ctas = 2, .grid_o = share},
            {.warps = 4, .tiles = 1, .step = 32, .ctas = 1, .grid_o = share},
            {.warps = 4, .tiles = 1, .step = 16, .ctas = 1, .grid_o = share},
            {.warps = 2, .tiles = 1, .step = 16, .ctas = 1, .grid_o = share},
            {.warps = 2, .tiles = 1, .step = 16, .ctas = 1, .grid_o = share, .stages = 1},
            {.warps = 1, .tiles = 1, .step = 16, .ctas = 1, .grid_o = share, .stages = 1}};
  }
  const Work work = work_of(s);
  if (widest <= 64 && work == Work::kPlain) {
    return {{.warps = 4, .tiles = 2, .step = 64, .ctas = 2},
            {.warps = 4, .tiles = 2, .step = 32, .ctas = 2},
            {.warps = 4, .tiles = 2, .step = 32, .ctas = 1},
            {.warps = 4, .tiles = 1, .step = 32, .ctas = 1}};
  }
  if (widest <= 64) {
    return {{.warps = 4, .tiles = 2, .step = 32, .ctas = 2},
            {.warps = 4, .tiles = 2, .step = 32, .ctas = 1},
            {.warps = 4, .tiles = 1, .step = 32, .ctas = 1}};
  }
  if (widest <= 128 && work == Work::kMuch) {
    return {{.warps = 4, .tiles = 1, .step = 32, .ctas = 2},
            {.warps = 4, .tiles = 1, .step = 32, .ctas = 1},
            {.warps = 4, .tiles = 1, .step = 16, .ctas = 1}};
  }
  if (widest <= 128) {
    return {{.warps = 4, .tiles = 2, .step = 32, .ctas = 2},
            {.warps = 4, .tiles = 2, .step = 32, .ctas = 1},
            {.warps = 4, .tiles = 1, .step = 32, .ctas = 1},
            {.warps = 4, .tiles = 1, .step = 16, .ctas = 1}};
  }
  const int share = s.d > 256 ? 2 : 1;
  return {{.warps = 4, .tiles = 1, .step = 32, .ctas = 1, .grid_o = share},
          {.warps = 4, .tiles = 1, .step = 16, .ctas = 1, .grid_o = share},
          {.warps = 2, .tiles = 1, .step = 16, .ctas = 1, .grid_o = share},
          {.warps = 2, .tiles = 1, .step = 16, .ctas = 1, .grid_o = share, .stages = 1}};
}

std::vector<BackwardTiles> bias_gradient_candidates(const BackwardSpec& s) {
  const int widest = std::max(s.d, s.dv);
  const std::vector<BackwardTiles> last = {
      {.warps = 4, .tiles = 1, .step = 32, .part = 16, .ctas = 1, .grid_s = 2, .stages = 1},
      {.warps = 2, .tiles = 1, .step = 32, .part = 16, .ctas = 1, .grid_s = 2},
      {.warps = 2, .tiles = 1, .step = 16, .part = 16, .ctas = 1, .grid_s = 2, .stages = 1},
      {.warps = 1, .tiles = 1, .step = 16, .part = 16, .ctas = 1, .stages = 1}};
  std::vector<BackwardTiles> candidates;
  if (s.type == Type::kFp32) {
    candidates = {{.warps = 4, .tiles = 1, .step = 32, .part = 32, .ctas = 1, .grid_s = 4},
                  {.warps = 4, .tiles = 1, .step = 32, .part = 32, .ctas = 1, .grid_s = 4, .stages = 1}};
  } else if (widest <= 32) {
    candidates = {{.warps = 4, .tiles = 2, .step = 64, .part = 32, .ctas = 3, .grid_s = 4},
                  {.warps = 4, .tiles = 2, .step = 64, .part = 32, .ctas = 2, .grid_s = 4},
                  {.warps = 4, .tiles = 2, .step = 64, .part = 32, .ctas = 1, .grid_s = 4},
                  {.warps = 4, .tiles = 1, .step = 32, .part = 32, .ctas = 1, .grid_s = 4}};
  } else if (widest <= 64) {
    candidates = {{.warps = 4, .tiles = 2, .step = 128, .part = 64, .ctas = 1, .grid_s = 2},
                  {.warps = 4, .tiles = 2, .step = 64, .part = 32, .ctas = 1, .grid_s = 4},
                  {.warps = 4, .tiles = 1, .step = 32, .part = 32, .ctas = 1, .grid_s = 4}};
  } else if (widest <= 128) {
    candidates = {{.warps = 4, .tiles = 2, .step = 128, .part = 64, .ctas = 1, .grid_s = 2, .stages = 1},
                  {.warps = 4, .tiles = 1, .step = 64, .part = 32, .ctas = 1, .grid_s = 2, .stages = 1}};
  }
  // The large tiles leave registers for a bias of 16 bits alone.
  const bool bias_alone = work_of(s) == Work::kSome && features_of(s) == 1 && has_bias(s);
  if (!bias_alone) {
    std::erase_if(candidates, [](const BackwardTiles& tiles) { return tiles.step > 64 || tiles.ctas > 2; });
  }
  candidates.insert(candidates.end(), last.begin(), last.end());
  return candidates;
}

// Any head dimension: columns of a phase and of a result take the place of those of a row.
Choice chunked(const char* name, const BackwardSpec& features, const Target& target,
               int (*shared_bytes)(const BackwardSpec&)) {
  BackwardSpec spec = features;
  spec.d = 64;
  spec.dv = spec.type == Type::kFp32 ? 128 : 256;
  std::vector<BackwardTiles> candidates = {{.warps = 4, .tiles = 1, .step = 32, .ctas = 1},
                                           {.warps = 2, .tiles = 1, .step = 16, .ctas = 1}};
  constexpr int kMany = 5;
  if (spec.type == Type::kFp32 && target.capability >= 100 && features_of(spec) >= kMany) {
    candidates.erase(candidates.begin());  // ptxas spills there, and does not for GPUs before
  }
  return choose(name, "generic/chunked_backward.cuh", spec, target, candidates, shared_bytes);
}

std::int64_t tiles_of(std::int64_t length, std::int64_t size) { return (length + size - 1) / size; }

// Args::head_dim of that many columns.
std::int64_t chunked_columns(std::int64_t columns) { return tiles_of(columns, 8) * 8; }

Choice resident_backward(const BackwardSpec& spec, const Target& target) {
  const char* const name = "generic_backward";
  if (std::max(spec.d, spec.dv) > kMostBackwardColumns) {
    Choice choice;
    choice.kernel.name = name;
    choice.why_not = "head_dim beyond what registers hold";
    return choice;
  }
  const bool in_registers = backward_in_registers(spec);
  std::vector<BackwardTiles> candidates = in_registers ? narrow_candidates(spec) : wide_candidates(spec);
  if (!spec.dq) {
    std::erase_if(candidates, [](const BackwardTiles& tiles) { return tiles.delay; });
  }
  return choose(name, "generic/backward.cuh", spec, target, candidates, backward_shared_bytes);
}

// ---- blocks of the grids ----

std::int64_t backward_blocks(const Call& call, const Kernel& kernel) {
  const auto& spec = kernel.as<BackwardSpec>();
  const bool is_chunked = std::string_view(kernel.name) == "generic_chunked_backward";
  const int keys = is_chunked ? chunked_backward_rows(spec) : backward_keys(spec);
  // Blocks that share the columns of dK and dV.
  const std::int64_t results = is_chunked ? tiles_of(chunked_columns(call.problem.head_dim), spec.dv) +
                                                tiles_of(chunked_columns(call.problem.head_dim_v), spec.dv)
                                          : 1;
  return tiles_of(call.rows.limit_k, keys) * call.rows.batch() * call.rows.heads_k * results;
}

std::int64_t backward_dq_blocks(const Call& call, const Kernel& kernel) {
  const auto& spec = kernel.as<BackwardSpec>();
  const bool is_chunked = std::string_view(kernel.name) == "generic_chunked_backward_dq";
  const std::int64_t results =
      is_chunked ? tiles_of(chunked_columns(call.problem.head_dim), spec.dv) : std::int64_t{spec.grid_o};
  return tiles_of(call.rows.limit_q, backward_dq_rows(spec)) * call.rows.batch() * call.rows.heads_q * results;
}

// Of one plane and one chunk.
std::int64_t bias_gradient_blocks(std::int64_t bias_rows, std::int64_t bias_keys, const Kernel& kernel) {
  const auto& spec = kernel.as<BackwardSpec>();
  const bool is_chunked = std::string_view(kernel.name) == "generic_chunked_bias_gradient";
  const int rows = is_chunked ? chunked_backward_rows(spec) : bias_gradient_rows(spec);
  return tiles_of(bias_rows, rows) * tiles_of(bias_keys, spec.step);
}

// Pieces that the list of a plane is cut into, so that every multiprocessor has work.
int bias_gradient_chunks(std::int64_t blocks, std::int64_t list, const BackwardSpec& spec, const Target& target) {
  // Three waves: a chunk's sums are written and read again once, which costs more than a ragged last wave.
  constexpr std::int64_t kWaves = 3;
  const std::int64_t wanted = kWaves * spec.ctas * target.multiprocessors;
  if (blocks <= 0 || blocks >= wanted) {
    return 1;
  }
  return static_cast<int>(std::clamp<std::int64_t>(wanted / blocks, 1, std::max<std::int64_t>(list, 1)));
}

void start(const Launcher& launcher, const Launch& launch) { launcher.launch_in_pieces(launch, launcher.args()); }

}  // namespace

bool backward_adds_dq(const Features& features, const Target& target, bool column_sum) {
  BackwardSpec spec = padded(features);
  spec.arch = target.capability;
  spec.dq = true;
  spec.dkv = true;
  spec.column_sum = column_sum;
  return resident_backward(spec, target).why_not == nullptr;
}

Choice generic_backward(const Features& features, const Target& target, const BackwardWants& wants) {
  BackwardSpec spec = padded(features);
  spec.arch = target.capability;
  spec.dq = wants.dq;
  spec.dkv = wants.dkv;
  spec.column_sum = wants.column_sum;
  const Choice choice = resident_backward(spec, target);
  if (choice.why_not == nullptr || wants.dq) {
    return choice;
  }
  return chunked("generic_chunked_backward", spec, target,
                 [](const BackwardSpec& s) { return chunked_backward_shared_bytes(s, true); });
}

Choice generic_backward_dq(const Features& features, const Target& target, bool dq, bool row_sum) {
  BackwardSpec spec = padded(features);
  spec.arch = target.capability;
  spec.dq = dq;
  spec.row_sum = row_sum;
  if (std::max(spec.d, spec.dv) <= kMostBackwardColumns) {
    const Choice choice = choose("generic_backward_dq", "generic/backward_dq.cuh", spec, target, dq_candidates(spec),
                                 backward_dq_shared_bytes);
    if (choice.why_not == nullptr) {
      return choice;
    }
  }
  return chunked("generic_chunked_backward_dq", spec, target,
                 [](const BackwardSpec& s) { return chunked_backward_shared_bytes(s, false); });
}

Choice generic_bias_gradient(const Features& features, const Target& target, BiasTile type) {
  BackwardSpec spec = padded(features);
  spec.arch = target.capability;
  spec.grad_bias = type;
  if (std::max(spec.d, spec.dv) <= kMostBackwardColumns) {
    const Choice choice = choose("generic_bias_gradient", "generic/bias_gradient.cuh", spec, target,
                                 bias_gradient_candidates(spec), bias_gradient_shared_bytes);
    if (choice.why_not == nullptr) {
      return choice;
    }
  }
  return chunked("generic_chunked_bias_gradient", spec, target, chunked_bias_gradient_shared_bytes);
}

void add_generic_backward(Planner& planner, const Kernel& kernel) {
  planner.add(kernel, backward_blocks(planner.call(), kernel), start);
}

void add_generic_backward_dq(Planner& planner, const Kernel& kernel) {
  planner.add(kernel, backward_dq_blocks(planner.call(), kernel), start);
}

void add_generic_bias_gradient(Planner& planner, const Kernel& chosen, const BiasList& list) {
  Kernel kernel = chosen;
  const std::int64_t blocks = list.planes * bias_gradient_blocks(list.queries, list.keys, kernel);
  const int chunks = bias_gradient_chunks(blocks, list.entries, kernel.as<BackwardSpec>(), planner.target());
  auto& spec = std::get<BackwardSpec>(kernel.spec);
  spec.fp32_results = spec.fp32_results && chunks == 1;  // of more, bias_gradient_sum stores the result
  reserve_bias_sum(planner, list, chunks);
  planner.add(
      kernel, blocks * chunks,
      [list](const Launcher& launcher, const Launch& launch) {
        launcher.launch_in_pieces(launch, bias_gradient_args(launcher, list, launch.pieces));
      },
      1, chunks);
  if (chunks > 1) {
    add_bias_sum(planner, kernel.as<BackwardSpec>().grad_bias, list, chunks);
  }
}

}  // namespace fovea::cuda
