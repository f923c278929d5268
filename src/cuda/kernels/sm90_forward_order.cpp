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
  const std::int64_t tile = sm90_forward_sizes(spec).rows;
  Sm90TileOrder order;
  order.row_tiles = static_cast<int>((rows.limit_q + tile - 1) / tile);
  order.tiles = order.row_tiles * rows.batch() * rows.heads_q;
  // K and V of heads whose tiles alternate should stay in half of the L2 of an H200.
  constexpr std::int64_t kCached = std::int64_t{32} << 20;
  const std::int64_t group = rows.heads_q / std::max<std::int64_t>(rows.heads_k, 1);  // 0 is legal
  const std::int64_t fit =
      kCached / std::max<std::int64_t>(rows.limit_k * (spec.d + sm90_all_columns(spec)) * 2, 1) * group;
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
  if (spec.banded && spec.pairs) {
    order.heads_together = static_cast<int>(std::max<std::int64_t>(heads, 1));
  }
  return order;
}

// Counted in steps. A tile takes some beyond its own: Q comes, its first products have nothing beside them, O leaves.
// Results of a part take two to leave; those of two parts one to be put together; counters that are cleared before, a
// launch. Many parts are put together by a kernel of its own, since one block would read them all.
Sm90PartsOfKeys sm90_parts_of_keys(const Call& call, const Sm90TileOrder& order, const Sm90ForwardSpec& spec,
                                   const Target& target) {
  constexpr double kBegin = 2;
  constexpr double kLeave = 2;
  constexpr double kJoin = 0.5;  // a part
  constexpr double kLaunch = 2;
  constexpr double kWorth = 0.93;
  constexpr std::int64_t kManyKeys = 2048;
  constexpr std::int64_t kLeastSteps = 4;   // of a part that generic_combine takes
  constexpr std::int64_t kMostJoined = 3;   // of few tiles
  constexpr std::int64_t kMostParts = 6;    // of the last tiles
  constexpr std::int64_t kFewestSteps = 3;  // of a part of these
  constexpr std::int64_t kMostRounds = 3;   // of parts, which bounds the memory of their results
  constexpr std::int64_t kFewRounds = 8;    // of tiles: after more of them these no longer end together
  const std::int64_t keys = call.rows.limit_k;
  const std::int64_t room = sm90_forward_room(spec, target);
  if (order.tiles == 0) {
    return {};
  }
  if (order.tiles * sm90_forward_blocks(spec) * 2 <= target.multiprocessors && keys >= kManyKeys) {
    const std::int64_t count = std::min(room / order.tiles, keys / (sm90_step_keys(spec) * kLeastSteps));
    return {0, static_cast<int>(std::max<std::int64_t>(count, 1)), true, count <= kMostJoined};
  }
  const std::int64_t rounds = order.tiles / room;
  const std::int64_t rest = order.tiles % room;
  // Under a band, and of sequences of different lengths, tiles take different times: short ones come last.
  if (spec.banded || spec.ragged || rest == 0 || rounds >= kFewRounds || sm90_forward_sizes(spec).ctas > 1) {
    return {order.tiles};
  }
  const std::int64_t steps = (keys + sm90_step_keys(spec) - 1) / sm90_step_keys(spec);
  const auto time = [&](std::int64_t parts) {
    const bool cut = parts > 1;
    const std::int64_t own = (steps + parts - 1) / parts;
    const std::int64_t part_rounds = (rest * parts + room - 1) / room;
    const double each = static_cast<double>(own) + kBegin + (cut ? kLeave + kJoin * static_cast<double>(parts) : 0);
    return static_cast<double>(rounds) * (static_cast<double>(steps) + kBegin) +
           static_cast<double>(part_rounds) * each + (cut && rounds == 0 ? kLaunch : 0);
  };
  const std::int64_t most = std::min({kMostParts, steps / kFewestSteps, kMostRounds * room / rest});
  std::int64_t best = 1;
  for (std::int64_t parts = 2; parts <= most; ++parts) {
    best = time(parts) < time(best) ? parts : best;
  }
  return time(best) < kWorth * time(1) ? Sm90PartsOfKeys{order.tiles - rest, static_cast<int>(best), false, true}
                                       : Sm90PartsOfKeys{order.tiles};
}

}  // namespace fovea::cuda
