// SPDX-License-Identifier: Apache-2.0
//
// The figures were found by measuring on an H200 (docs/design/spikes.md); what leaves no room in shared memory goes to
// the next candidate.
#include "cuda/kernels/sm90_forward.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "cuda/device/generic/sizes.h"
#include "cuda/device/sm90/args.h"
#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/kernels/generic_forward.h"
#include "cuda/launch/launcher.h"
#include "cuda/launch/tensor_map.h"
#include "math/band.h"
#include "math/softmax.h"

namespace fovea::cuda {
namespace {

constexpr std::int64_t kMostTiles = std::int64_t{1} << 30;
// Of heads that a block computes: O of more would not fit in registers, Q and K of more not in shared memory.
constexpr int kMostColumns = 256;

// What features take of the registers, roughly: from kManyFeatures on, steps of 64 keys spill nothing where steps of
// 128 do, and beyond a head_dim of 192 steps of 32.
constexpr int kManyFeatures = 3;
int features_of(const Features& s) {
  return int{s.mask} + int{s.dropout != DropoutRule::kNone} + 2 * int{s.softcap} + s.positions.count() +
         int{s.key_term} + int{s.query_term} + int{s.bias != BiasTile::kNone} + int{s.bias2 != BiasTile::kNone};
}

const char* why_not(const Call& call, const Operands& operands, const Target& target) {
  const Problem& p = call.problem;
  const math::Rows& rows = call.rows;
  const Features& spec = operands.features;
  constexpr int kBytes = 2;
  if (target.capability != 90) {
    return "compute capability other than 9.0";
  }
  if (spec.type == Type::kFp32) {
    return "fp32";
  }
  if (spec.d > 512 || spec.dv > 512) {
    return "head_dim over 512";
  }
  if (p.head_dim == 0 || p.head_dim_v == 0 || rows.rows_k == 0 || rows.limit_k == 0) {
    return "nothing to attend to";
  }
  if (rows.rows_q >= kMostMapRows || rows.rows_k >= kMostMapRows) {
    return "2^29 rows or more";
  }
  if (rows.batch() >= kMostMapRows || rows.batch() * rows.heads_q * ((rows.limit_q + 127) / 128) >= kMostTiles) {
    return "2^30 tiles of queries or more";
  }
  const auto moves = [](const Operand& operand, std::int64_t count) { return count <= 1 || operand.strides.row > 0; };
  if (!has_tensor_map(operands.q.strides, kBytes) || !has_tensor_map(operands.k.strides, kBytes) ||
      !has_tensor_map(operands.v.strides, kBytes) || !moves(operands.q, rows.rows_q) ||
      !moves(operands.k, rows.rows_k) || !moves(operands.v, rows.rows_k) ||
      !has_tensor_map(operands.bias.strides, bias_bytes(spec.bias)) ||
      !has_tensor_map(operands.bias2.strides, bias_bytes(spec.bias2))) {
    return "strides that no tensor map has";
  }
  return nullptr;
}

struct Tiles {
  int groups;  // warpgroups, 64 queries each
  int step;
  int stages;
  int q_buffers;
  int planes;
};

// From wide to narrow: the first that fits is taken.
std::vector<Tiles> candidates(const Sm90ForwardSpec& spec) {
  const int widest = std::max(spec.d, spec.dv);
  const int features = features_of(spec);
  if (spec.pairs) {
    constexpr Tiles kWithFeatures{.groups = 2, .step = 32, .stages = 1, .q_buffers = 1, .planes = 1};
    constexpr Tiles kDense{.groups = 2, .step = 48, .stages = 1, .q_buffers = 1, .planes = 1};
    constexpr Tiles kNarrow{.groups = 2, .step = 64, .stages = 1, .q_buffers = 1, .planes = 1};
    return features > 0        ? std::vector{kWithFeatures}
           : spec.dv <= 3 * 64 ? std::vector{kNarrow, kDense}
                               : std::vector{kDense};
  }
  // The rule torch_mem_efficient has a word of decisions for 64 keys.
  const bool half = features >= kManyFeatures || spec.dropout == DropoutRule::kTorchMemEfficient;
  const bool biases = spec.bias != BiasTile::kNone || spec.bias2 != BiasTile::kNone;
  // Steps of 128 keys spill nothing at narrow heads where no words of masks, no vectors and no second bias lie in
  // registers as well: fewer waits and turns for as many keys.
  const bool narrow_terms = spec.dropout != DropoutRule::kTorchMemEfficient && !spec.mask && !spec.key_term &&
                            !spec.query_term && spec.bias2 == BiasTile::kNone && spec.bias != BiasTile::kFp32;
  if (widest <= 64) {
    if (half && narrow_terms) {
      return {{.groups = 2, .step = 128, .stages = 2, .q_buffers = 2, .planes = 2},
              {.groups = 2, .step = 128, .stages = 2, .q_buffers = 1, .planes = 2},
              {.groups = 2, .step = 64, .stages = 2, .q_buffers = 1, .planes = 2}};
    }
    if (half) {
      return {{.groups = 2, .step = 64, .stages = 2, .q_buffers = 2, .planes = 2},
              {.groups = 2, .step = 64, .stages = 2, .q_buffers = 1, .planes = 2}};
    }
    if (spec.mask && features == 1) {
      return {{.groups = 3, .step = 128, .stages = 3, .q_buffers = 2, .planes = 2}};
    }
    if (features > int{biases} || spec.bias2 != BiasTile::kNone || (spec.ragged && spec.left_edge)) {
      return {{.groups = 2, .step = 128, .stages = 3, .q_buffers = 2, .planes = 2},
              {.groups = 2, .step = 128, .stages = 2, .q_buffers = 2, .planes = 2},
              {.groups = 2, .step = 128, .stages = 2, .q_buffers = 1, .planes = 2},
              {.groups = 2, .step = 64, .stages = 2, .q_buffers = 1, .planes = 2}};
    }
    if (spec.bias == BiasTile::kFp32) {
      return {{.groups = 3, .step = 64, .stages = 3, .q_buffers = 1, .planes = 3},
              {.groups = 2, .step = 64, .stages = 2, .q_buffers = 1, .planes = 2}};
    }
    if (biases && widest <= 32) {
      return {{.groups = 3, .step = 128, .stages = 3, .q_buffers = 2, .planes = 3},
              {.groups = 3, .step = 128, .stages = 2, .q_buffers = 2, .planes = 2},
              {.groups = 2, .step = 128, .stages = 2, .q_buffers = 1, .planes = 2}};
    }
    if (biases) {
      return {{.groups = 3, .step = 128, .stages = 2, .q_buffers = 1, .planes = 2},
              {.groups = 2, .step = 128, .stages = 2, .q_buffers = 1, .planes = 2}};
    }
    return {{.groups = 3, .step = 128, .stages = 3, .q_buffers = 2, .planes = 2}};
  }
  if (widest <= 128) {
    if (widest == 96 && features == 0 && !spec.ragged && !spec.left_edge) {
      return {{.groups = 3, .step = 112, .stages = 2, .q_buffers = 2, .planes = 2}};
    }
    if (half || spec.bias2 != BiasTile::kNone) {
      return {{.groups = 2, .step = 64, .stages = 2, .q_buffers = 2, .planes = 2},
              {.groups = 2, .step = 64, .stages = 2, .q_buffers = 1, .planes = 2},
              {.groups = 2, .step = 64, .stages = 2, .q_buffers = 1, .planes = 1}};
    }
    return {{.groups = 2, .step = 128, .stages = 2, .q_buffers = 2, .planes = 2},
            {.groups = 2, .step = 128, .stages = 2, .q_buffers = 1, .planes = 2},
            {.groups = 2, .step = 64, .stages = 2, .q_buffers = 1, .planes = 2}};
  }
  if (widest > 192 && half) {
    return {{.groups = 2, .step = 32, .stages = 2, .q_buffers = 1, .planes = 2},
            {.groups = 2, .step = 32, .stages = 1, .q_buffers = 1, .planes = 1}};
  }
  if (features > 0) {
    return {{.groups = 2, .step = 64, .stages = 2, .q_buffers = 1, .planes = 2},
            {.groups = 2, .step = 64, .stages = 2, .q_buffers = 1, .planes = 1},
            {.groups = 2, .step = 64, .stages = 1, .q_buffers = 1, .planes = 1}};
  }
  if (spec.dv <= 128) {
    return {{.groups = 2, .step = 128, .stages = 2, .q_buffers = 1, .planes = 2},
            {.groups = 2, .step = 64, .stages = 2, .q_buffers = 1, .planes = 2}};
  }
  if (widest <= 160) {  // up to 144 panels of 64 leave no room for 128 keys
    return {{.groups = 2, .step = 128, .stages = 2, .q_buffers = 1, .planes = 2},
            {.groups = 2, .step = 96, .stages = 2, .q_buffers = 1, .planes = 2}};
  }
  if (widest <= 192) {
    return {{.groups = 2, .step = 96, .stages = 2, .q_buffers = 1, .planes = 2}};
  }
  return {{.groups = 2, .step = 80, .stages = 2, .q_buffers = 1, .planes = 2}};
}

// Short sequences: blocks of one warpgroup that computes, several a multiprocessor, so that one's waits are another's
// work. On an H200 window attention of 49 queries takes half of the time, 16 heads of 512 queries 0.78.
bool is_short(const Call& call, const Features& spec) {
  constexpr int kWidest = 64;
  constexpr std::int64_t kQueries = 128;
  constexpr std::int64_t kKeys = 512;
  constexpr std::int64_t kFewTiles = 264;  // of 64 queries
  const math::Rows& rows = call.rows;
  const std::int64_t tiles = rows.batch() * rows.heads_q * ((rows.limit_q + 63) / 64);
  if (spec.ragged || spec.softcap || std::max(spec.d, spec.dv) > kWidest || rows.limit_k > kKeys) {
    return false;
  }
  // Two warpgroups draw dropout's decisions in turn, and the other's products hide it.
  return spec.dropout != DropoutRule::kNone ? rows.limit_q <= kQueries / 2
                                            : rows.limit_q <= kQueries || tiles <= kFewTiles;
}

}  // namespace

Choice sm90_forward(const Call& call, const Operands& operands, const Target& target) {
  Choice choice;
  Kernel& kernel = choice.kernel;
  kernel.file = "sm90/forward.cuh";
  kernel.name = "sm90_forward";
  kernel.one_architecture = true;
  auto& spec = kernel.spec.emplace<Sm90ForwardSpec>(Sm90ForwardSpec{operands.features, {}});
  spec.arch = target.capability;
  spec.fp32_results = fp32_results(call.problem).out;
  choice.why_not = why_not(call, operands, target);
  if (choice.why_not != nullptr) {
    return choice;
  }
  spec.pairs = std::max(spec.d, spec.dv) > kMostColumns;
  if (spec.pairs) {
    constexpr int kColumns = 16;  // of an instruction
    kernel.name = "sm90_wide_forward";
    spec.d = static_cast<int>(Planner::tiles_of(spec.d, 128)) * 128;  // the parts that K comes in
    spec.dv = static_cast<int>(Planner::tiles_of(spec.dv, 2 * kColumns)) * kColumns;
  }
  const Problem& p = call.problem;
  spec.left_edge = spec.banded && p.window_left >= 0;
  constexpr std::uint32_t kMostOfHalves = 0x7c00;
  spec.often = spec.dropout == DropoutRule::kFovea && call.dropout.threshold > kMostOfHalves;
  std::vector<Tiles> all = candidates(spec);
  if (is_short(call, spec)) {
    all.insert(all.begin(), {.groups = 1, .step = 64, .stages = 2, .q_buffers = 2, .planes = 2});
  }
  for (const Tiles& tiles : all) {
    const bool small = tiles.groups == 1;
    spec.ctas = !small ? 1 : features_of(spec) <= 1 && spec.dropout == DropoutRule::kNone ? 3 : 2;
    // Lengths like 197, whose second tile of 192 queries would be nearly empty.
    const std::int64_t queries = call.rows.limit_q;
    const auto computed = [&](int rows) { return (queries + rows - 1) / rows * rows; };
    const bool narrow = !small && !spec.ragged && queries > 192 && computed(128) * 4 <= computed(192) * 3;
    spec.warps = 4 * (narrow ? 2 : tiles.groups);
    // A text encoder's 77 keys and the like: one step has them all.
    constexpr int kFewKeys = 80;
    const bool few_keys =
        !small && !spec.pairs && features_of(spec) == 0 && call.rows.limit_k <= std::max(kFewKeys, tiles.step);
    const int keys =
        std::max(kFewKeys, static_cast<int>(std::min<std::int64_t>(call.rows.limit_k, 256) + 15) / 16 * 16);
    spec.step = few_keys ? std::min(tiles.step, keys) : tiles.step;
    spec.stages = tiles.stages;
    spec.planes = sm90_has_planes(spec) ? tiles.planes : 0;
    // Reading and writing Q and O is all that takes time then: some tiles of them are under way.
    constexpr int kMostBuffers = 4;
    for (spec.q_buffers = few_keys ? kMostBuffers : tiles.q_buffers;
         spec.q_buffers > tiles.q_buffers && sm90_forward_sizes(spec).bytes > target.shared_per_block;) {
      --spec.q_buffers;
    }
    // Beyond a head_dim of 128, and where features take long, a warpgroup's softmax runs beside its own product; three
    // warpgroups, and two at 128, hide each other's. At 64 columns dropout's draws find room between the powers; at 128
    // they are better made last, while the other warpgroup's products run.
    const int widest = std::max(spec.d, spec.dv);
    const int features = features_of(spec);
    const bool drops = spec.dropout != DropoutRule::kNone;
    const bool draws_last = drops && features == 1 && widest > 64;
    const bool waits = spec.warps != 8 || features == 0 || draws_last;
    // Q in registers spares shared memory a seventh of its traffic at head_dim 128, and a softmax beside the own
    // product then pays. Dropout's decisions would not fit beside it.
    constexpr std::int64_t kShort = 1024;  // without a band and a bias it loses there
    spec.resident = !spec.pairs && spec.d == 128 && spec.dv == 128 && spec.step == 128 && !drops &&
                    features == int{spec.bias != BiasTile::kNone} && !few_keys &&
                    (spec.banded || features > 0 || call.rows.limit_k > kShort);
    spec.ahead = !spec.pairs && (widest > 128 || !waits || spec.resident) ? spec.step / 16 : 0;
    const bool bias_alone = features == 2 && spec.bias != BiasTile::kNone;
    // Beside a bias alone, too: 96 columns gained by early draws, 128 lost.
    spec.early = drops && !draws_last && !(bias_alone && widest > 96);
    // Without a mask the power limit leaves the tensor cores little to win at head_dim 128.
    spec.turns = !small && !spec.pairs && (spec.banded || features > 0 || widest != 128);
    // Where steps do not divide the diagonal the first tile's guess would fail; what is added makes it costly.
    spec.guess = !natural_scores(spec) && !spec.pairs && (spec.step % 64 == 0 || (few_keys && !spec.banded));
    // Worth its start where there are many steps.
    constexpr std::int64_t kKeysToPrepare = 1024;
    spec.prepared = spec.key_mask && spec.mask && !spec.pairs && spec.dropout == DropoutRule::kNone &&
                    !natural_scores(spec) && call.rows.limit_k >= kKeysToPrepare;
    const Sm90ForwardSizes sizes = sm90_forward_sizes(spec);
    kernel.threads = sizes.threads;
    kernel.shared_bytes = sizes.bytes;
    if (!target.holds(sizes.bytes, sizes.ctas)) {
      continue;
    }
    const Sm90PartsOfKeys parts = sm90_parts_of_keys(call, sm90_tile_order(call, operands, spec), spec, target);
    if (parts.count > 1) {
      // A tile of generic_forward does as well where few of its rows exist.
      constexpr std::int64_t kFewQueries = 16;
      const bool may = queries > kFewQueries;
      if (!may && parts.few) {
        choice.why_not = "few queries and many keys, which a generic kernel splits";
      }
      // Blocks of a pair join their columns each by itself, and merge rows together.
      spec.joins = may && parts.joins && !(spec.pairs && p.accumulate.out);
      spec.split = may && parts.few && !spec.joins;
      spec.fp32_results = spec.fp32_results && !spec.split;  // generic_combine has them
    }
    return choice;
  }
  choice.why_not = "tiles beyond the shared memory of a block";
  return choice;
}

namespace {

// The counter of tiles, then the list of ragged sequences, then counters of parts.
constexpr std::int64_t kListOffset = 16;
std::int64_t counters_offset(const Sm90TileOrder& order) {
  return kListOffset + order.listed * static_cast<std::int64_t>(sizeof(ListedTile));
}

void start_schedule(const Launcher& launcher, const Launch& launch, const Sm90TileOrder& order, std::int64_t counters) {
  char* const memory = launcher.region<char>(Region::kSchedule);
  Sm90ScheduleArgs args;
  args.schedule = reinterpret_cast<Schedule*>(memory);
  args.list = reinterpret_cast<ListedTile*>(memory + kListOffset);
  args.room = static_cast<int>(order.listed);
  args.joined = reinterpret_cast<u32*>(memory + counters_offset(order));
  args.count = static_cast<int>(counters);
  launcher.launch(launch, launcher.args(), args);
}

// Tensor maps of q, k, v, out and the biases, and the order of the tiles.
void start_forward(const Launcher& launcher, const Launch& launch, const Sm90TileOrder& order,
                   const Sm90PartsOfKeys& parts) {
  const auto& spec = launch.kernel.as<Sm90ForwardSpec>();
  Args common = launcher.args();
  set_parts(common, launcher, launch);
  const math::Rows& rows = launcher.call().rows;
  const int tile = sm90_forward_sizes(spec).rows;
  Sm90ForwardArgs args;
  const auto mapped = [&](const Tensor& tensor, i64 columns, int padded, i64 count, i64 heads, int box) {
    return map_of_rows(rows, tensor, spec.type, columns, count, heads, wide_panel_columns(padded), box);
  };
  const auto map = [&](TensorMap& to, Has& has, const Mapped& what) { encode(launcher.driver(), to, has, what); };
  map(args.q, args.has_q, mapped(common.q, common.head_dim, spec.d, rows.rows_q, rows.heads_q, tile));
  map(args.k, args.has_k, mapped(common.k, common.head_dim, spec.d, rows.rows_k, rows.heads_k, spec.step));
  map(args.v, args.has_v,
      mapped(common.v, common.head_dim_v, spec.dv, rows.rows_k, rows.heads_k, sm90_step_keys(spec)));
  const auto bias = [&](TensorMap& to, Has& has, const Tensor& tensor, BiasTile type) {
    if (type != BiasTile::kNone) {
      map(to, has, map_of_bias(rows, tensor, type, sm90_bias_panel(spec, type), tile));
    }
  };
  bias(args.bias, args.has_bias, common.bias, spec.bias);
  bias(args.bias2, args.has_bias2, common.bias2, spec.bias2);

  // A warpgroup stores its 64 rows.
  constexpr int kGroupRows = 64;
  const Mapped out = mapped(common.out, common.out_dim_v, spec.dv, rows.rows_q, rows.heads_q, kGroupRows);
  args.store_tensor = common.vector_stores && !sm90_stores_directly(spec) &&
                      jit::why_no_tensor_map(out.tensor.data, shape_of(out, args.has_out)).empty();
  if (args.store_tensor) {
    map(args.out, args.has_out, out);
  }

  if (char* const memory = launcher.region<char>(Region::kSchedule); memory != nullptr) {
    args.schedule = reinterpret_cast<Schedule*>(memory);
    args.list = reinterpret_cast<const ListedTile*>(memory + kListOffset);
    args.joined = reinterpret_cast<u32*>(memory + counters_offset(order));
  }
  args.tiles = static_cast<int>(parts.numbers(order));
  args.whole = static_cast<int>(parts.whole);
  args.row_tiles = order.row_tiles;
  args.batch = static_cast<int>(rows.batch());
  args.batch2 = static_cast<int>(rows.batch2);
  args.heads = static_cast<int>(rows.heads_q);
  args.group = static_cast<int>(rows.heads_q / std::max<std::int64_t>(rows.heads_k, 1));
  args.heads_together = order.heads_together;
  args.batch_inside = order.batch_inside;
  args.inside = order.batch_inside ? args.batch : args.heads;
  const auto band = math::Band<int>::make(0, 0, common.causal, common.window_left, common.window_right, false);
  args.low = band.low;
  args.high = band.high;
  args.scale_of_cap = common.softcap > 0 ? common.scale / common.softcap : 0;
  if (spec.softcap) {
    const Problem& p = launcher.call().problem;
    args.small_cap = math::SmallCap<float>::make(p.scale_or_default(), p.softcap);
  }
  args.scale_log2 = common.scale * math::kLog2E;
  launcher.launch(launch, common, args);
}

}  // namespace

void add_sm90_forward(Planner& planner, const Kernel& kernel) {
  const auto& spec = kernel.as<Sm90ForwardSpec>();
  const Sm90TileOrder order = sm90_tile_order(planner.call(), planner.operands(), spec);
  const int blocks = sm90_forward_blocks(spec);  // of a tile
  const std::int64_t room = sm90_forward_room(spec, planner.target());
  const Sm90PartsOfKeys parts = sm90_has_parts(spec) ? sm90_parts_of_keys(planner.call(), order, spec, planner.target())
                                                     : Sm90PartsOfKeys{order.tiles};
  const std::int64_t counters = spec.joins ? (order.tiles - parts.whole) * spec.warps * blocks : 0;
  if (spec.split) {
    add_memory_of_parts(planner, sm90_all_columns(spec), parts.count);
  } else if (spec.joins) {
    constexpr std::int64_t kRows = 16;
    constexpr std::int64_t kEnds = 128;  // numbers of a warp
    const std::int64_t floats = counters * parts.count * std::int64_t{sizeof(float)};
    planner.workspace().add(Region::kPartialOut, floats * kRows * spec.dv);
    planner.workspace().add(Region::kPartialSum, floats * kEnds);
  }
  // Blocks take tiles from a counter; clusters, and blocks with equal tiles, count by themselves.
  const bool counts = spec.ragged || spec.joins || (order.tiles > room && blocks == 1 && !sm90_shares_tiles(spec));
  if (counts) {
    planner.workspace().add(Region::kSchedule, counters_offset(order) + counters * std::int64_t{sizeof(u32)});
    Kernel schedule;
    schedule.file = "sm90/schedule.cuh";
    schedule.name = "sm90_schedule";
    AroundSpec before = planner.around();
    before.ragged = spec.ragged;
    before.warps = spec.warps;
    schedule.spec = before;
    schedule.threads = kSm90ScheduleThreads;
    const auto start = [order, counters](const Launcher& launcher, const Launch& launch) {
      start_schedule(launcher, launch, order, counters);
    };
    planner.add(schedule, std::min<std::int64_t>(order.tiles, 1), start);
  }
  const auto start = [order, parts](const Launcher& launcher, const Launch& launch) {
    start_forward(launcher, launch, order, parts);
  };
  planner.add(kernel, std::min(parts.numbers(order), room) * blocks, start, 1, parts.count);
  if (spec.split) {
    Features all = spec;
    all.dv = sm90_all_columns(spec);
    add_combine(planner, all, parts.count);
  } else if (spec.joins) {
    planner.say(parts.whole == 0 ? fmt::format("; keys in {} parts", parts.count)
                                 : fmt::format("; the keys of the last {} tiles in {} parts", order.tiles - parts.whole,
                                               parts.count));
  }
}

}  // namespace fovea::cuda
