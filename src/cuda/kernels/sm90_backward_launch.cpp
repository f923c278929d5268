// SPDX-License-Identifier: Apache-2.0
//
// What the backward for Hopper needs of memory, its arguments and its launches.
#include "cuda/kernels/sm90_backward.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "cuda/device/args.h"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/cluster_backward_sizes.h"
#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/kernels/backward_around.h"
#include "cuda/launch/launcher.h"
#include "cuda/launch/tensor_map.h"
#include "math/band.h"
#include "math/softmax.h"

namespace fovea::cuda {
namespace {

// What sm90_backward_mask writes: 64 queries a row.
Box mask_tiles(const Box& words) {
  constexpr std::int64_t kQueries = 64;
  Box box = words;
  box.rows = (words.rows + 2 * kQueries - 1) / (2 * kQueries) * 2;
  box.width = words.width * kQueries;
  return box;
}

void start_mask(const Launcher& launcher, const Launch& launch) {
  launcher.launch(launch, MaskTilesArgs{launcher.region<u32>(Region::kMaskBits),
                                        launcher.region<u32>(Region::kMaskTiles), launcher.operands().mask_box});
}

// Keys that have sums in every part.
std::int64_t rows_of_a_part(const math::Rows& rows, const Sm90BackwardSpec& spec, const Sm90KeyOrder& order) {
  return spec.last_parts ? (order.items - order.whole * spec.summed) * sm90_backward_sizes(spec).keys
                         : rows.batch() * rows.heads_k * order.head_rows;
}

KeyParts key_parts(const Launcher& launcher, const Sm90BackwardSpec& spec, const Sm90KeyOrder& order) {
  const math::Rows& rows = launcher.call().rows;
  KeyParts parts;
  if (order.parts > 1) {
    parts.count = order.parts;
    parts.whole = static_cast<int>(order.whole);
    parts.head_rows = static_cast<int>(order.head_rows);
    parts.rows = static_cast<int>(rows_of_a_part(rows, spec, order));
    parts.dk = launcher.region<float>(Region::kKeySums);
    if (parts.dk != nullptr) {
      parts.dv = parts.dk + std::int64_t{parts.count} * parts.rows * spec.d;
    }
  }
  return parts;
}

void start_backward(const Launcher& launcher, const Launch& launch, const Sm90KeyOrder& order,
                    const Sm90BiasOrder& bias) {
  const auto& spec = launch.kernel.as<Sm90BackwardSpec>();
  std::optional<Args> with_bias;  // every other call takes the arguments as they are, without a copy
  if (spec.summed > 1 || spec.adds_bias) {
    with_bias = bias_gradient_args(launcher, bias_list_of(launcher.call().problem, 0), launch.pieces);
  }
  const Args& common = with_bias ? *with_bias : launcher.args();
  const Call& call = launcher.call();
  const math::Rows& rows = call.rows;
  Sm90BackwardArgs args;
  const auto map = [&](TensorMap& to, Has& has, const Mapped& what) { encode(launcher.driver(), to, has, what); };
  const auto of_rows = [&](TensorMap& to, Has& has, const Tensor& tensor, i64 columns, int panel, i64 count, i64 heads,
                           int box) {
    map(to, has, map_of_rows(rows, tensor, spec.type, columns, count, heads, panel, box));
  };
  const int group_keys = 64 * spec.tiles;
  const bool wide = sm90_in_clusters(spec);
  const int panel_d = wide ? sm90_wide_panel(spec.d) : sm90_backward_panel_d(spec);
  const int panel_v = wide ? panel_columns(spec.dv / 2) : sm90_backward_panel_v(spec);
  of_rows(args.q, args.has_q, common.q, common.head_dim, panel_d, rows.rows_q, rows.heads_q, spec.step);
  of_rows(args.grad_out, args.has_grad_out, common.grad_out, common.head_dim_v, panel_v, rows.rows_q, rows.heads_q,
          spec.step);
  if (spec.makes_rows) {
    of_rows(args.out, args.has_out, common.out, common.head_dim_v, panel_v, rows.rows_q, rows.heads_q, spec.step);
  }
  of_rows(args.k, args.has_k, common.k, common.head_dim, panel_d, rows.rows_k, rows.heads_k, group_keys);
  of_rows(args.v, args.has_v, common.v, common.head_dim_v, panel_v, rows.rows_k, rows.heads_k, group_keys);
  if (spec.tile_stores) {
    constexpr int kWarpRows = 16;
    const auto of_result = [&](TensorMap& to, Has& has, const Tensor& tensor, i64 columns, int panel) {
      if (tensor.data != nullptr) {
        of_rows(to, has, tensor, columns, panel, rows.rows_k, rows.heads_k, kWarpRows);
      }
    };
    of_result(args.grad_k, args.has_grad_k, common.grad_k, common.out_dim, panel_d);
    of_result(args.grad_v, args.has_grad_v, common.grad_v, common.out_dim_v, panel_v);
  }
  const auto of_bias = [&](const Tensor& tensor, BiasTile type) {
    return map_of_bias(rows, tensor, type, bias_panel_columns(type), spec.step);
  };
  if (spec.bias != BiasTile::kNone && !spec.odd_rows) {
    map(args.bias, args.has_bias, of_bias(common.bias, spec.bias));
  }
  if (spec.bias2 != BiasTile::kNone) {
    map(args.bias2, args.has_bias2, of_bias(common.bias2, spec.bias2));
  }
  const auto of_grad_bias = [&] {
    constexpr int kPanel = 64;
    const bool in_place = launcher.operands().grad_bias_pack >= 0;
    return Mapped{in_place ? common.bias : Launcher::tensor(call.grad_bias),
                  map_type(spec.type),
                  call.problem.seqlen_k,
                  call.problem.seqlen_q,
                  rows.heads_q,
                  rows.batch2,
                  rows.batch1,
                  kPanel,
                  spec.step};
  };
  if (spec.dbias_store && !spec.odd_rows) {
    map(args.grad_bias, args.has_grad_bias, of_grad_bias());
  }
  if (spec.mask) {
    args.mask = {launcher.region<u32>(Region::kMaskTiles), mask_tiles(launcher.operands().mask_box).strides()};
  }
  args.key_blocks = static_cast<int>(order.key_blocks);
  args.blocks = static_cast<int>(order.numbers);
  args.heads_in_turn = static_cast<int>(order.heads_in_turn);
  args.last_turn = static_cast<int>(order.last_turn);
  args.heads_k = static_cast<int>(rows.heads_k);
  args.group = static_cast<int>(rows.heads_q / std::max<std::int64_t>(rows.heads_k, 1));
  args.batch2 = static_cast<int>(rows.batch2);
  const auto band = math::Band<int>::make(0, 0, common.causal, common.window_left, common.window_right, false);
  args.low = band.low;
  args.high = band.high;
  args.scale_log2 = common.scale * math::kLog2E;
  args.parts = key_parts(launcher, spec, order);
  if (spec.summed > 1) {
    args.summed = {bias.rounds, bias.stride, bias.heads, bias.planes};
  }
  if (spec.odd_rows) {
    static_assert(sizeof(Args) + alignof(TensorMap) + sizeof(WithOddRows<Sm90BackwardArgs, true>) <= 4096,
                  "a kernel takes 4 KB of arguments: put a new one where it is needed, or into memory");
    WithOddRows<Sm90BackwardArgs, true> more{args, {}};
    Mapped bias = of_bias(common.bias, spec.bias);
    bias.box_columns = sm90_backward_sizes(spec).keys;
    encode(launcher.driver(), more.odd_rows.maps, bias);
    more.odd_rows.bias = numbered(bias);
    if (spec.dbias_store) {
      more.odd_rows.gradient = numbered(of_grad_bias());
    }
    launcher.launch(launch, common, more);
    return;
  }
  launcher.launch(launch, common, args);
}

}  // namespace

void reserve_sm90_backward(Planner& planner, const Sm90BackwardSpec& spec, const Sm90KeyOrder& order) {
  const math::Rows& rows = planner.call().rows;
  Workspace& workspace = planner.workspace();
  if (order.parts > 1 && spec.dkv) {
    workspace.add(Region::kKeySums,
                  order.parts * rows_of_a_part(rows, spec, order) * (spec.d + spec.dv) * std::int64_t{sizeof(float)});
  }
  // Blocks that take their keys from a counter, or add to dq in order.
  const bool counts = !sm90_in_clusters(spec) && !spec.makes_rows && spec.summed == 1 &&
                      order.numbers > planner.target().multiprocessors;
  if (spec.stores_first || spec.last_parts || spec.ordered || spec.converts || spec.longest_first || counts) {
    const std::int64_t turns = BehindTurns::turns(padded_rows(rows), rows.heads_q);
    workspace.add(Region::kTurns, BehindTurns::size(turns, rows.batch()) * std::int64_t{sizeof(u32)});
  }
}

void add_sm90_backward_mask(Planner& planner) {
  const Box& words = planner.operands().mask_box;
  planner.workspace().add(Region::kMaskTiles, mask_tiles(words).count() * std::int64_t{sizeof(u32)});
  Kernel kernel;
  kernel.file = "sm90/backward_mask.cuh";
  kernel.name = "sm90_backward_mask";
  kernel.spec = planner.around();
  constexpr std::int64_t kQueries = 64;
  const std::int64_t threads = words.planes() * Planner::tiles_of(words.rows, kQueries) * words.width * 32;
  planner.add(kernel, Planner::striding_blocks(threads, planner.target()), start_mask);
}

void add_sm90_backward(Planner& planner, const Kernel& kernel, const Sm90KeyOrder& order) {
  const auto& spec = kernel.as<Sm90BackwardSpec>();
  const Sm90BiasOrder bias =
      spec.summed > 1 ? sm90_bias_order(planner.call(), spec.summed, planner.target()) : Sm90BiasOrder();
  const std::int64_t blocks = sm90_in_clusters(spec) ? 2 * order.numbers
                              : spec.summed > 1
                                  ? order.numbers * spec.summed / bias.rounds
                                  : std::min<std::int64_t>(order.numbers, planner.target().multiprocessors);
  planner.add(
      kernel, blocks,
      [order, bias](const Launcher& launcher, const Launch& launch) { start_backward(launcher, launch, order, bias); },
      1, spec.summed > 1 ? bias.chunks : order.parts);
  if (order.parts > 1) {
    const std::string which =
        spec.last_parts ? fmt::format("the last {} blocks", (order.items - order.whole * spec.summed)) : "a block";
    planner.say_kernel(fmt::format(", {} of keys in {} parts", which, order.parts));
  }
}

void add_sm90_backward_parts(Planner& planner, const Sm90BackwardSpec& main, const Sm90KeyOrder& order,
                             std::int64_t convert_blocks) {
  const math::Rows& rows = planner.call().rows;
  Kernel kernel;
  kernel.file = "sm90/backward_parts.cuh";
  kernel.name = "sm90_backward_parts";
  AroundSpec spec = planner.around(main.type);
  spec.d = main.d;
  spec.dv = main.dv;
  spec.dq = main.dq && !main.direct;
  spec.stores_first = main.stores_first;
  const Results fp32 = fp32_results(planner.call().problem);
  spec.fp32_results = fp32.k || fp32.v || (spec.dq && fp32.q);
  kernel.spec = spec;
  const std::int64_t key_rows = rows.batch() * rows.heads_k * order.head_rows;
  const std::int64_t blocks = sm90_parts_blocks(key_rows, main.d) + sm90_parts_blocks(key_rows, main.dv);
  const auto start = [main, order](const Launcher& launcher, const Launch& launch) {
    launcher.launch(launch, launcher.args(), key_parts(launcher, main, order));
  };
  planner.add(kernel, blocks + convert_blocks, start, 1, order.parts);
}

}  // namespace fovea::cuda
