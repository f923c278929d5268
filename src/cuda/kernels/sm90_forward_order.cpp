// SPDX-License-Identifier: Apache-2.0
//
// In which order blocks of the forward for Hopper take tiles of queries, and into how many parts keys are cut.
#include <algorithm>

#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/kernels/sm90_forward.h"

namespace fovea::cuda {

std::int64_t sm90_forward_room(const Sm90ForwardSpec& spec, const Target& target) {
  const std::int64_t at_once = std::max(target.multiprocessors / sm90_forward_blocks(spec), 1);
  return at_once * sm90_forward_sizes(spec).ctas;
}

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
  return std::max<std::int64_t>(
      std::min(sm90_forward_room(spec, target) / order.tiles, keys / (spec.step * kLeastSteps)), 1);
}

}  // namespace fovea::cuda
