// SPDX-License-Identifier: Apache-2.0
//
// In which order the forward for Hopper computes its tiles, its arguments and its launches.
#include <algorithm>

#include "cuda/device/generic/sizes.h"
#include "cuda/device/sm90/args.h"
#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/kernels/generic_forward.h"
#include "cuda/kernels/sm90_forward.h"
#include "cuda/launch/launcher.h"
#include "cuda/launch/tensor_map.h"
#include "math/band.h"
#include "math/softmax.h"

namespace fovea::cuda {
namespace {

// Blocks that fit on the device, or clusters of them.
std::int64_t room_of(const Sm90ForwardSpec& spec, const Target& target) {
  return std::int64_t{target.multiprocessors} / sm90_forward_blocks(spec) * sm90_forward_sizes(spec).ctas;
}

// The counter of tiles, then the list of ragged sequences.
constexpr std::int64_t kListOffset = 16;

void start_schedule(const Launcher& launcher, const Launch& launch) {
  char* const memory = launcher.region<char>(Region::kSchedule);
  Sm90ScheduleArgs args;
  args.schedule = reinterpret_cast<Schedule*>(memory);
  args.list = reinterpret_cast<ListedTile*>(memory + kListOffset);
  launcher.launch(launch, launcher.args(), args);
}

// V and out without their columns before `first`.
void skip_columns(Args& a, int first) {
  const auto skip = [first](Tensor& tensor, std::int64_t element_bytes) {
    tensor.data = static_cast<char*>(tensor.data) + first * tensor.strides.col * element_bytes;
  };
  skip(a.v, 2);
  skip(a.out, a.results.out.fp32 ? 4 : 2);
  a.head_dim_v -= first;
  a.out_dim_v -= first;
}

// Tensor maps of q, k, v, out and the biases, and the order of the tiles. V and out: from `first_column` on.
void start_forward(const Launcher& launcher, const Launch& launch, const Sm90TileOrder& order, int first_column) {
  const auto& spec = launch.kernel.as<Sm90ForwardSpec>();
  Args common = launcher.args();
  skip_columns(common, first_column);
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
  map(args.v, args.has_v, mapped(common.v, common.head_dim_v, spec.dv, rows.rows_k, rows.heads_k, spec.step));
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
  args.store_tensor = common.vector_stores && !spec.fp32_results && !spec.split &&
                      jit::why_no_tensor_map(out.tensor.data, shape_of(out, args.has_out)).empty();
  if (args.store_tensor) {
    map(args.out, args.has_out, out);
  }

  if (char* const memory = launcher.region<char>(Region::kSchedule); memory != nullptr) {
    args.schedule = reinterpret_cast<Schedule*>(memory);
    args.list = reinterpret_cast<const ListedTile*>(memory + kListOffset);
  }
  args.tiles = static_cast<int>(order.tiles);
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

Sm90TileOrder sm90_tile_order(const Call& call, const Operands& operands, const Sm90ForwardSpec& spec) {
  const math::Rows& rows = call.rows;
  const std::int64_t tile = sm90_forward_sizes(spec).all_rows;
  Sm90TileOrder order;
  order.row_tiles = static_cast<int>((rows.limit_q + tile - 1) / tile);
  order.tiles = order.row_tiles * rows.batch() * rows.heads_q;
  // K and V of heads whose tiles alternate should stay in half of the L2 of an H200.
  constexpr std::int64_t kCached = std::int64_t{32} << 20;
  const std::int64_t group = rows.heads_q / std::max<std::int64_t>(rows.heads_k, 1);  // 0 is legal
  const std::int64_t fit = kCached / std::max<std::int64_t>(rows.limit_k * (spec.d + spec.dv) * 2, 1) * group;
  const std::int64_t heads = spec.ragged ? rows.heads_q : rows.batch() * rows.heads_q;
  if (spec.banded || spec.ragged) {
    order.heads_together = static_cast<int>(std::clamp<std::int64_t>(fit, 1, std::max<std::int64_t>(heads, 1)));
  }
  if (spec.ragged) {
    order.listed = rows.packed()
                       ? std::min<std::int64_t>(rows.rows_q / tile + rows.batch(), order.row_tiles * rows.batch())
                       : order.row_tiles * rows.batch();
    order.tiles = order.listed * rows.heads_q;
    return order;
  }
  // A bias that all of the batch shares is read once for it.
  const bool shared = spec.bias != BiasTile::kNone && rows.batch() > 1 && operands.bias.strides.batch2 == 0 &&
                      operands.bias.strides.batch1 == 0;
  if (shared) {
    order.batch_inside = true;
    order.heads_together = static_cast<int>(rows.batch());
  }
  // Clusters do not take tiles from a counter: their shares are even if the longest of all heads come first.
  if (spec.banded && sm90_forward_blocks(spec) > 1) {
    order.heads_together = static_cast<int>(std::max<std::int64_t>(heads, 1));
  }
  return order;
}

std::int64_t sm90_parts_of_keys(const Call& call, const Sm90TileOrder& order, const Sm90ForwardSpec& spec,
                                const Target& target) {
  constexpr std::int64_t kManyKeys = 2048;
  constexpr std::int64_t kLeastSteps = 4;  // of a part
  const std::int64_t keys = call.rows.limit_k;
  if (order.tiles == 0 || order.tiles * sm90_forward_blocks(spec) * 2 > target.multiprocessors || keys < kManyKeys) {
    return 1;
  }
  return std::max<std::int64_t>(std::min(room_of(spec, target) / order.tiles, keys / (spec.step * kLeastSteps)), 1);
}

void add_sm90_forward(Planner& planner, const Kernel& kernel) {
  const auto& spec = kernel.as<Sm90ForwardSpec>();
  const Sm90TileOrder order = sm90_tile_order(planner.call(), planner.operands(), spec);
  const int blocks = sm90_forward_blocks(spec);  // of a tile
  const std::int64_t room = room_of(spec, planner.target());
  const std::int64_t parts = spec.split ? sm90_parts_of_keys(planner.call(), order, spec, planner.target()) : 1;
  if (spec.split) {
    add_memory_of_parts(planner, spec.dv, parts);
  }
  // Blocks take tiles from a counter; clusters count by themselves.
  const bool counts = spec.ragged || (order.tiles > room && blocks == 1);
  if (counts) {
    planner.workspace().add(Region::kSchedule,
                            kListOffset + order.listed * static_cast<std::int64_t>(sizeof(ListedTile)));
  }
  const int columns = planner.operands().features.dv;
  for (int first = 0; first < columns; first += spec.dv) {
    if (counts) {
      Kernel schedule;
      schedule.file = "sm90/schedule.cuh";
      schedule.name = "sm90_schedule";
      AroundSpec before = planner.around();
      before.ragged = spec.ragged;
      before.warps = spec.warps * blocks;
      schedule.spec = before;
      schedule.threads = kSm90ScheduleThreads;
      planner.add(schedule, std::min<std::int64_t>(order.tiles, 1), start_schedule);
    }
    const auto start = [order, first](const Launcher& launcher, const Launch& launch) {
      start_forward(launcher, launch, order, first);
    };
    planner.add(kernel, std::min(order.tiles * parts, room) * blocks, start, 1, static_cast<int>(parts));
  }
  if (spec.split) {
    add_combine(planner, spec, parts);
  }
}

}  // namespace fovea::cuda
