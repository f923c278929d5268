// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernels/sm90_summed_backward.h"

#include <algorithm>

#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/kernels/backward_around.h"
#include "cuda/kernels/sm90_added_bias.h"
#include "cuda/kernels/sm90_backward_order.h"

namespace fovea::cuda {
namespace {

constexpr std::int64_t kKeys = 128;  // of a block

// Numbers of the fp32 planes that clusters keep sums in.
std::int64_t numbers_kept(const Problem& p, const Sm90BiasOrder& order) {
  return order.chunks > 1 || order.rounds > 1 ? order.chunks * order.planes * p.seqlen_q * p.seqlen_k : 0;
}

constexpr std::int64_t kFour = 4;  // neighbouring numbers, which a lane sums

// Whether these may be stored at once.
bool stores_fours(const Call& call) {
  const View& to = call.grad_bias;
  constexpr std::uintptr_t kBytes = 8;
  const math::Strides& s = to.strides;
  return s.row % kFour == 0 && s.head % kFour == 0 && s.batch1 % kFour == 0 && s.batch2 % kFour == 0 &&
         call.problem.seqlen_k % kFour == 0 && reinterpret_cast<std::uintptr_t>(to.data) % kBytes == 0;
}

// Asked only without dropout: with it the other kernel draws again, and is slower. Measured on an H200: with a head_dim
// of 32 this way takes 1.5 to twice the time. With 64 it gains only where there are no planes and the gradient's rows
// are aligned. With more it gains a tenth to a third, and the memory traffic of planes must leave some of that.
bool pays(const Call& call, const Sm90BackwardSpec& spec, std::int64_t numbers) {
  constexpr int kNarrow = 64;
  const int widest = std::max(spec.d, spec.dv);
  if (widest <= kNarrow) {
    return widest == kNarrow && numbers == 0 && stores_fours(call);
  }
  constexpr std::int64_t kWorth = 2000;  // of products, a number kept
  const std::int64_t pairs = call.rows.batch() * call.rows.heads_q * call.problem.seqlen_q * call.problem.seqlen_k;
  return numbers * kWorth <= pairs / (spec.banded ? 2 : 1) * widest;
}

}  // namespace

// Clusters that run at once. An H100 and an H200 of 132 multiprocessors have 66 clusters of two, 30 of four and 15 of
// eight (cudaOccupancyMaxActiveClusters): what is left over of the groups of multiprocessors stays idle.
std::int64_t sm90_clusters_at_once(int summed, const Target& target) {
  const std::int64_t usable = summed > 2 ? target.multiprocessors * 10 / 11 : target.multiprocessors;
  return std::max<std::int64_t>(usable / summed, 1);
}

Sm90BiasOrder sm90_bias_order(const Call& call, int summed, const Target& target) {
  const math::Rows& rows = call.rows;
  const Extents& e = call.problem.bias.extents;
  const std::int64_t batches = e.batch1 ? rows.batch1 : 1;  // that have planes of their own
  const std::int64_t stride = Planner::tiles_of(rows.limit_k, kKeys) * (e.head ? rows.heads_k : 1);
  const std::int64_t clusters = batches * stride;
  const std::int64_t entries = rows.batch() / batches / summed * (e.head ? 1 : rows.heads_k);  // of a cluster
  const std::int64_t at_once = sm90_clusters_at_once(summed, target);
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
          .planes = static_cast<int>(bias_list_of(call.problem, 0).planes)};
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
  const bool more = apart || spec.ragged || spec.softcap || spec.odd_rows || sm90_outer_bytes(spec) > 0 ||
                    spec.query_term || wants.row_sum || wants.column_sum || wants.ordered || p.wide.bias ||
                    p.accumulate.bias;
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
  const std::int64_t numbers = numbers_kept(p, order);
  // Rows of planes follow one another; those of the gradient may lie anywhere.
  if (numbers > 0 ? p.seqlen_k % kFour != 0 : call.grad_bias.strides.col != 1) {
    return 1;
  }
  if (spec.dropout == DropoutRule::kNone && !pays(call, spec, numbers)) {
    return 1;
  }
  // Where sums go to memory all the same, additions of each step take less time, but for the narrowest heads.
  constexpr int kNarrowest = 32;
  const bool adds = numbers > 0 && std::max(spec.d, spec.dv) > kNarrowest && sm90_adds_bias(call, spec, wants);
  return !adds && numbers <= most_bias_sums(call, spec.d) ? blocks : 1;
}

bool sm90_sums_to_odd_rows(const Call& call, const Sm90BackwardSpec& spec, const Target& target) {
  return spec.summed > 1 && !stores_fours(call) &&
         numbers_kept(call.problem, sm90_bias_order(call, spec.summed, target)) == 0;
}

void add_sm90_bias_sums(Planner& planner, const Sm90BackwardSpec& spec) {
  const Call& call = planner.call();
  const Sm90BiasOrder order = sm90_bias_order(call, spec.summed, planner.target());
  if (const std::int64_t numbers = numbers_kept(call.problem, order); numbers > 0) {
    planner.workspace().add(Region::kBiasSum, numbers * std::int64_t{sizeof(float)});
    add_bias_sum(planner, tile_of(call.grad_bias.type), bias_list_of(call.problem, 0), order.chunks);
  }
}

}  // namespace fovea::cuda
