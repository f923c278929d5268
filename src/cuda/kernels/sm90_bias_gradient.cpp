// SPDX-License-Identifier: Apache-2.0
//
// Candidates in order of preference; the first that fits the shared memory is taken. The figures were found by
// measuring on an H200 (docs/design/spikes.md).
#include "cuda/kernels/sm90_bias_gradient.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cuda/device/args.h"
#include "cuda/device/sm90/bias_gradient_sizes.h"
#include "cuda/kernels/backward_around.h"
#include "cuda/launch/tensor_map.h"
#include "math/softmax.h"

namespace fovea::cuda {
namespace {

struct Tiles {
  int groups;   // warpgroups, 64 queries each
  int step;     // keys
  int stages;   // buffers of Q with K and dO with V
  int planes;   // of the bias
  int buffers;  // of what changes with the entry
};

// What takes registers beyond the bias itself.
int features_of(const Features& s) {
  return 2 * int{s.mask} + 2 * int{s.softcap} + s.positions.count() + int{s.key_term} + int{s.query_term} +
         int{s.bias2 != BiasTile::kNone} + 2 * int{s.dropout != DropoutRule::kNone} + int{s.ragged};
}

std::int64_t tiles_of(std::int64_t length, std::int64_t size) { return (length + size - 1) / size; }

std::vector<Tiles> candidates(const Features& s, const BiasList& list) {
  constexpr Tiles kLast[] = {{.groups = 2, .step = 128, .stages = 4, .planes = 1, .buffers = 2},
                             {.groups = 2, .step = 128, .stages = 3, .planes = 1, .buffers = 1},
                             {.groups = 2, .step = 128, .stages = 2, .planes = 1, .buffers = 1},
                             {.groups = 2, .step = 64, .stages = 2, .planes = 1, .buffers = 1},
                             {.groups = 1, .step = 64, .stages = 2, .planes = 1, .buffers = 1}};
  constexpr Tiles kNarrow[] = {{.groups = 2, .step = 64, .stages = 4, .planes = 2, .buffers = 2},
                               {.groups = 2, .step = 64, .stages = 4, .planes = 1, .buffers = 2},
                               {.groups = 2, .step = 64, .stages = 2, .planes = 1, .buffers = 1},
                               {.groups = 1, .step = 64, .stages = 2, .planes = 1, .buffers = 1}};
  const int widest = std::max(s.d, s.dv);
  std::vector<Tiles> all;
  const bool by_entry = s.mask || s.key_term || s.query_term || s.bias2 != BiasTile::kNone;
  if (s.dropout == DropoutRule::kFovea && s.bias != BiasTile::kFp32 && !by_entry) {
    all = {{.groups = 2, .step = 128, .stages = 4, .planes = 2, .buffers = 2},
           {.groups = 2, .step = 128, .stages = 3, .planes = 1, .buffers = 2}};
  }
  // With 128 keys a tile these would spill; or they would compile for 1.4 instead of 0.9 s, and are rare.
  const bool long_text = s.banded && s.ragged && s.bias2 != BiasTile::kNone;
  const int many = s.dropout != DropoutRule::kNone || long_text ? 4 : 5;
  if (features_of(s) + int{s.bias == BiasTile::kFp32} >= many) {
    for (const Tiles& tiles : kNarrow) {
      all.push_back(tiles);
    }
    return all;
  }
  // 192 queries, unless 128 leave much less of the last tile empty.
  const bool three = tiles_of(list.queries, 192) * 192 * 8 <= tiles_of(list.queries, 128) * 128 * 9;
  if (features_of(s) == int{s.key_term} && three) {
    if (widest <= 32) {
      all.push_back({.groups = 3, .step = 128, .stages = 6, .planes = 2, .buffers = 2});
    }
    if (widest <= 64) {
      all.push_back({.groups = 3, .step = 128, .stages = 4, .planes = 1, .buffers = 2});
    }
    if (widest <= 80) {
      all.push_back({.groups = 3, .step = 128, .stages = 3, .planes = 1, .buffers = 2});
    }
    if (widest > 96 && widest <= 128) {
      all.push_back({.groups = 3, .step = 128, .stages = 2, .planes = 1, .buffers = 2});
    }
  }
  for (const Tiles& tiles : kLast) {
    all.push_back(tiles);
  }
  return all;
}

const char* why_not(const Call& call, const Operands& operands, const Target& target) {
  const math::Rows& rows = call.rows;
  const Features& spec = operands.features;
  if (target.capability != 90) {
    return "compute capability other than 9.0";
  }
  if (spec.type == Type::kFp32) {
    return "fp32";
  }
  if (spec.d > 256 || spec.dv > 256) {
    return "head_dim over 256";
  }
  if (call.problem.head_dim == 0 || call.problem.head_dim_v == 0 || rows.rows_q == 0 || rows.rows_k == 0 ||
      rows.batch() == 0 || rows.heads_q == 0) {
    return "nothing to attend to";
  }
  if (rows.rows_q >= kMostMapRows || rows.rows_k >= kMostMapRows || rows.batch() >= kMostMapRows) {
    return "2^29 rows or more";
  }
  if (!has_row_map(operands.q.strides, rows.rows_q) || !has_row_map(operands.k.strides, rows.rows_k) ||
      !has_row_map(operands.v.strides, rows.rows_k) || !has_row_map(operands.grad_out.strides, rows.rows_q)) {
    return "strides that no tensor map has";
  }
  return nullptr;
}

// Tiles of all planes.
std::int64_t tiles_of_list(const BiasList& list, const Sm90BiasSpec& spec) {
  return list.planes * tiles_of(list.queries, sm90_bias_gradient_sizes(spec).rows) * tiles_of(list.keys, spec.step);
}

// Pieces that a plane's list is cut into.
int chunks_of(const BiasList& list, const Sm90BiasSpec& spec, const Target& target) {
  // The fewest that leave little of the last wave empty; their sums are written and read again once.
  constexpr std::int64_t kMostChunks = 64;
  constexpr std::int64_t kMostBytes = std::int64_t{48} << 20;
  constexpr double kFull = 0.95;
  const std::int64_t tiles = tiles_of_list(list, spec);
  const std::int64_t bytes = list.planes * list.queries * list.keys * std::int64_t{sizeof(float)};
  std::int64_t most = std::min(kMostChunks, list.entries);
  most = std::max<std::int64_t>(std::min(most, bytes > 0 ? kMostBytes / bytes : 1), 1);
  int best = 1;
  double best_fill = 0;
  for (std::int64_t chunks = 1; chunks <= most; ++chunks) {
    const std::int64_t waves = tiles_of(tiles * chunks, target.multiprocessors);
    const double fill = static_cast<double>(tiles * chunks) /
                        static_cast<double>(std::max<std::int64_t>(waves, 1) * target.multiprocessors);
    if (fill > best_fill) {
      best = static_cast<int>(chunks);
      best_fill = fill;
    }
    if (fill >= kFull) {
      break;
    }
  }
  return best;
}

// Tensor maps of q, k, v and grad_out, and the tiles. again: those alone that the launch before has flagged.
void start(const Launcher& launcher, const Launch& launch, const BiasList& list, bool again, bool waits_first) {
  const auto& spec = launch.kernel.as<Sm90BiasSpec>();
  const Args& given = launcher.args();
  const math::Rows& rows = launcher.call().rows;
  const Sm90BiasGradientSizes sizes = sm90_bias_gradient_sizes(spec);
  Args common = bias_gradient_args(launcher, list, launch.pieces);
  if (list.which == 1) {  // as in Spec
    std::swap(common.bias, common.bias2);
  }
  Sm90BiasGradientArgs args;
  const auto map = [&](TensorMap& to, Has& has, const Tensor& tensor, i64 columns, int padded, i64 count, i64 heads,
                       int box) {
    encode(launcher.driver(), to, has,
           map_of_rows(rows, tensor, spec.type, columns, count, heads, panel_columns(padded), box));
  };
  map(args.q, args.has_q, given.q, given.head_dim, spec.d, rows.rows_q, rows.heads_q, sizes.rows);
  map(args.k, args.has_k, given.k, given.head_dim, spec.d, rows.rows_k, rows.heads_k, spec.step);
  map(args.v, args.has_v, given.v, given.head_dim_v, spec.dv, rows.rows_k, rows.heads_k, spec.step);
  map(args.grad_out, args.has_grad_out, given.grad_out, given.head_dim_v, spec.dv, rows.rows_q, rows.heads_q,
      sizes.rows);
  if (spec.softcap) {
    const Problem& p = launcher.call().problem;
    args.small_cap = math::SmallCap<float>::make(p.scale_or_default(), p.softcap);
  }
  args.planes = static_cast<int>(list.planes);
  args.tiles = static_cast<int>(tiles_of_list(list, spec) * launch.pieces);
  args.group = static_cast<int>(rows.heads_q / std::max<std::int64_t>(rows.heads_k, 1));
  args.flags = launcher.region<u32>(list.which == 0 ? Region::kBiasFlags : Region::kBiasFlags2);
  args.ticket = again ? nullptr : given.bias_tickets + list.which;
  args.waits_first = again || waits_first;
  launcher.launch(launch, common, args);
}

}  // namespace

Choice sm90_bias_gradient(const Call& call, const Operands& operands, const Target& target, BiasTile type,
                          const BiasList& list) {
  Choice choice;
  Kernel& kernel = choice.kernel;
  kernel.file = "sm90/bias_gradient.cuh";
  kernel.name = "sm90_bias_gradient";
  kernel.one_architecture = true;
  auto& spec = kernel.spec.emplace<Sm90BiasSpec>(Sm90BiasSpec{operands.features, {}});
  spec.arch = target.capability;
  spec.grad_bias = type;
  if (list.which == 1) {
    std::swap(spec.bias, spec.bias2);
  }
  choice.why_not = why_not(call, operands, target);
  if (choice.why_not != nullptr) {
    return choice;
  }
  constexpr std::int64_t kSmall = 64;
  if (list.queries <= kSmall && list.keys <= kSmall) {
    choice.why_not = "planes smaller than a tile";
    return choice;
  }
  constexpr std::int64_t kMostTiles = std::int64_t{1} << 24;
  if (list.planes * tiles_of(list.queries, 64) * tiles_of(list.keys, 64) >= kMostTiles || list.entries >= kMostTiles) {
    choice.why_not = "2^24 tiles or more";
    return choice;
  }
  const bool plain = !spec.softcap && !spec.positions && !spec.mask && spec.bias2 == BiasTile::kNone &&
                     spec.dropout == DropoutRule::kNone && !spec.ragged;
  const Results fp32 = fp32_results(call.problem);
  spec.fp32_results = list.which == 0 ? fp32.bias : fp32.bias2;
  // Tiles that are computed again would be added twice.
  spec.bias_outside = spec.bias != BiasTile::kNone && list.entries > 1 && plain && !spec.fp32_results;
  for (const Tiles& tiles : candidates(spec, list)) {
    spec.warps = 4 * tiles.groups;
    spec.step = tiles.step;
    spec.stages = tiles.stages;
    spec.planes = spec.bias != BiasTile::kNone ? tiles.planes : 0;
    spec.entries = 0;
    spec.entries = sm90_bias_gradient_sizes(spec).entry > 0 ? std::max(tiles.buffers, 1) : 0;
    const Sm90BiasGradientSizes sizes = sm90_bias_gradient_sizes(spec);
    kernel.threads = sizes.threads;
    kernel.shared_bytes = sizes.bytes;
    if (sizes.bytes <= target.shared_per_block) {
      return choice;
    }
  }
  choice.why_not = "tiles beyond the shared memory of a block";
  return choice;
}

void add_sm90_bias_gradient(Planner& planner, const Kernel& chosen, const BiasList& list) {
  Kernel kernel = chosen;
  auto& spec = std::get<Sm90BiasSpec>(kernel.spec);
  const int chunks = chunks_of(list, spec, planner.target());
  spec.fp32_results = spec.fp32_results && chunks == 1;  // of more, bias_gradient_sum stores the result
  const std::int64_t tiles = tiles_of_list(list, spec) * chunks;
  const std::int64_t blocks = std::min<std::int64_t>(tiles, planner.target().multiprocessors);
  reserve_bias_sum(planner, list, chunks);
  constexpr std::int64_t kBiases = 2;
  if (!planner.workspace().has(Region::kSchedule)) {
    planner.workspace().add(Region::kSchedule, kBiases * std::int64_t{sizeof(u32)});
  }
  const auto add = [&](const Kernel& one, bool again) {
    const bool waits_first = planner.follows("backward_prepare");
    planner.add(
        one, blocks,
        [list, again, waits_first](const Launcher& launcher, const Launch& launch) {
          start(launcher, launch, list, again, waits_first);
        },
        1, chunks);
  };
  add(kernel, false);
  if (spec.bias_outside) {
    planner.workspace().add(list.which == 0 ? Region::kBiasFlags : Region::kBiasFlags2,
                            tiles * spec.warps * std::int64_t{sizeof(u32)});
    Sm90BiasSpec with_bias = spec;
    with_bias.bias_outside = false;
    Kernel inside = kernel;
    inside.spec = with_bias;
    add(inside, true);
  }
  if (chunks > 1) {
    add_bias_sum(planner, spec.grad_bias, list, chunks);
  }
}

}  // namespace fovea::cuda
