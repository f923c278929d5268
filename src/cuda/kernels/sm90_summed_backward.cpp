// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernels/sm90_summed_backward.h"

#include <algorithm>

#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/kernels/backward_around.h"
#include "cuda/kernels/sm90_backward_order.h"

namespace fovea::cuda {
namespace {

constexpr std::int64_t kKeys = 128;  // of a block

// Numbers of the fp32 planes that clusters keep sums in.
std::int64_t numbers_kept(const Problem& p, const Sm90BiasOrder& order) {
  return order.chunks > 1 || order.rounds > 1 ? order.chunks * order.planes * p.seqlen_q * p.seqlen_k : 0;
}

// Pairs of numbers are stored.
bool stores_pairs(const Call& call) {
  const View& to = call.grad_bias;
  constexpr std::uintptr_t kPair = 4;
  return to.strides.col == 1 && to.strides.row % 2 == 0 && to.strides.head % 2 == 0 && to.strides.batch1 % 2 == 0 &&
         to.strides.batch2 % 2 == 0 && call.problem.seqlen_k % 2 == 0 &&
         reinterpret_cast<std::uintptr_t>(to.data) % kPair == 0;
}

}  // namespace

Sm90BiasOrder sm90_bias_order(const Call& call, int summed, const Target& target) {
  const math::Rows& rows = call.rows;
  const Extents& e = call.problem.bias.extents;
  const std::int64_t batches = e.batch1 ? rows.batch1 : 1;  // that have planes of their own
  const std::int64_t stride = Planner::tiles_of(rows.limit_k, kKeys) * (e.head ? rows.heads_k : 1);
  const std::int64_t clusters = batches * stride;
  const std::int64_t entries = rows.batch() / batches / summed * (e.head ? 1 : rows.heads_k);  // of a cluster
  const std::int64_t at_once = std::max<std::int64_t>(target.multiprocessors / summed, 1);
  // The fewest chunks that leave little of the last wave empty.
  constexpr std::int64_t kMostChunks = 8;
  constexpr double kFull = 0.9;
  std::int64_t chunks = 1;
  double best = 0;
  for (std::int64_t n = 1; n <= std::min(kMostChunks, entries) && best < kFull; ++n) {
    const std::int64_t waves = std::max<std::int64_t>(Planner::tiles_of(clusters * n, at_once), 1);
    const double fill = static_cast<double>(clusters * n) / static_cast<double>(waves * at_once);
    if (entries % n == 0 && fill > best) {
      chunks = n;
      best = fill;
    }
  }
  return {.chunks = static_cast<int>(chunks),
          .rounds = static_cast<int>(entries / chunks),
          .stride = static_cast<int>(stride),
          .heads = static_cast<int>(e.head ? rows.heads_q : 1),
          .planes = static_cast<int>(batches * (e.head ? rows.heads_q : 1))};
}

int sm90_summed_blocks(const Call& call, const Sm90BackwardSpec& spec, const BackwardWants& wants,
                       const Target& target) {
  const Problem& p = call.problem;
  const math::Rows& rows = call.rows;
  const Extents& e = p.bias.extents;
  const bool same_type = (spec.bias == BiasTile::kBf16 && spec.type == Type::kBf16) ||
                         (spec.bias == BiasTile::kFp16 && spec.type == Type::kFp16);
  // Blocks of a cluster walk over the same queries.
  const bool apart = spec.banded && (p.has_positions_q || p.has_positions_k);
  const bool more = apart || spec.ragged || spec.softcap || sm90_outer_bytes(spec) > 0 || spec.query_term ||
                    wants.row_sum || wants.column_sum || wants.ordered || p.wide.bias || p.accumulate.bias;
  // A group of heads that share a plane would add to it in one round.
  const bool groups = !e.head && rows.heads_q != rows.heads_k;
  if (!wants.bias || (e.batch2 && rows.batch2 > 1) || !same_type || more || groups || sm90_is_wide(spec) || !wants.dq ||
      !wants.dkv || Planner::tiles_of(rows.limit_k, kKeys) * rows.batch() * rows.heads_k < target.multiprocessors) {
    return 1;
  }
  const std::int64_t shared = e.batch1 ? rows.batch2 : rows.batch();
  int blocks = 8;  // the most that every device has clusters of
  while (blocks > 1 && (shared % blocks != 0 || 2 * blocks > target.multiprocessors)) {
    blocks /= 2;
  }
  if (blocks == 1) {
    return 1;
  }
  const Sm90BiasOrder order = sm90_bias_order(call, blocks, target);
  if (order.chunks == 1 && !stores_pairs(call)) {
    return 1;
  }
  // As much again as half of the sums of dq.
  return 2 * numbers_kept(p, order) <= 3 * padded_rows(rows) * rows.heads_q * spec.d ? blocks : 1;
}

void add_sm90_bias_sums(Planner& planner, const Sm90BackwardSpec& spec) {
  const Call& call = planner.call();
  const Sm90BiasOrder order = sm90_bias_order(call, spec.summed, planner.target());
  if (const std::int64_t numbers = numbers_kept(call.problem, order); numbers > 0) {
    planner.workspace().add(Region::kBiasSum, numbers * std::int64_t{sizeof(float)});
  }
  add_bias_sum(planner, tile_of(call.grad_bias.type), bias_list_of(call.problem, 0), order.chunks);
}

}  // namespace fovea::cuda
