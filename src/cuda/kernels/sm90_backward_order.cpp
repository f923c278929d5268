// SPDX-License-Identifier: Apache-2.0
//
// Figures found by measuring on an H200 (docs/design/spikes.md).
#include "cuda/kernels/sm90_backward_order.h"

#include <algorithm>
#include <cmath>

#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/kernels/sm90_summed_backward.h"
#include "math/band.h"

namespace fovea::cuda {

bool sm90_is_wide(const Features& spec) { return std::max(spec.d, spec.dv) > kSm90Wide; }

bool sm90_in_clusters(const Features& spec) {
  if (!sm90_is_wide(spec)) {
    return false;
  }
  constexpr int kGrain = 32;
  constexpr int kWidestOfOne = 192;
  constexpr int kMostOfOne = 320;
  const int d = rounded(spec.d, kGrain);
  const bool dropout = spec.dropout != DropoutRule::kNone;
  // Roughly what features take of registers.
  const int features = (dropout ? 3 : 0) + (spec.softcap ? 2 : 0) + (spec.mask ? 2 : 0) + spec.positions.count() +
                       (spec.key_term ? 1 : 0) + (dropout && spec.ragged ? 1 : 0);
  constexpr int kMostFeatures = 3;
  return std::max(d, spec.dv) > kWidestOfOne || d + spec.dv > kMostOfOne || spec.bias != BiasTile::kNone ||
         features > kMostFeatures;
}

namespace {

std::int64_t key_blocks_of(const Call& call, const Sm90BackwardSpec& spec) {
  const std::int64_t keys = sm90_backward_sizes(spec).keys;
  return (call.rows.limit_k + keys - 1) / keys;
}

// Blocks, or clusters, that run at a time.
std::int64_t room_for(const Sm90BackwardSpec& spec, const Target& target) {
  return sm90_in_clusters(spec) ? target.multiprocessors / 2 : target.multiprocessors;
}

}  // namespace

std::int64_t sm90_items(const Call& call, const Sm90BackwardSpec& spec) {
  return key_blocks_of(call, spec) * call.rows.batch() * call.rows.heads_k;
}

namespace {

// Steps of a head's blocks of keys with sequences as long as they may be.
struct StepsOfKeys {
  std::int64_t longest = 0;
  std::int64_t all = 0;
};
StepsOfKeys steps_of_keys(const Call& call, const Sm90BackwardSpec& spec) {
  const math::Rows& rows = call.rows;
  const Problem& p = call.problem;
  const std::int64_t keys = sm90_backward_sizes(spec).keys;
  const auto band =
      math::Band<std::int64_t>::make(rows.limit_q, rows.limit_k, p.causal, p.window_left, p.window_right, p.top_left);
  StepsOfKeys steps;
  for (std::int64_t key = 0; key < rows.limit_k; key += keys) {
    math::Interval<std::int64_t> queries{0, rows.limit_q};
    if (spec.banded && !spec.direct) {
      queries = band.queries_of_keys(key, std::min(key + keys, rows.limit_k));
    }
    const std::int64_t count = queries.steps_from(queries.first_step(spec.step), spec.step);
    steps.longest = std::max(steps.longest, count);
    steps.all += count;
  }
  const std::int64_t group = rows.heads_q / std::max<std::int64_t>(rows.heads_k, 1);
  return {steps.longest * group, steps.all * group};
}

}  // namespace

// Counted in steps, of 2 to 3 us each: a part costs half of one to begin,
// sums of parts cost one, two where there is no other launch to add them, and some 1 us a megabyte (measured).
int sm90_best_parts(const Call& call, const Sm90BackwardSpec& spec, const Target& target) {
  constexpr double kBegin = 0.5;
  constexpr double kBytesOfAStep = 3e6;
  constexpr std::int64_t kMostParts = 64;
  constexpr std::int64_t kMostRounds = 3;  // which bounds the memory of sums, too
  const std::int64_t blocks = room_for(spec, target);
  const std::int64_t items = sm90_items(call, spec);
  if (items == 0 || items >= blocks) {
    return 1;
  }
  const StepsOfKeys steps = steps_of_keys(call, spec);
  // Blocks of different length fill the chip from the longest on; others in rounds.
  const bool by_turns = spec.banded && !spec.ordered && !spec.ragged;
  const double heads = static_cast<double>(call.rows.batch() * call.rows.heads_k);
  const double bytes = spec.dkv ? 4.0 * sm90_backward_sizes(spec).keys * (spec.d + spec.dv) : 0;
  const double launches = !spec.dkv ? 0 : spec.direct ? 2 : 1;
  const auto time = [&](int parts) {
    const std::int64_t all = items * parts;
    const std::int64_t rounds = (all + blocks - 1) / blocks;
    const double longest = std::ceil(static_cast<double>(steps.longest) / parts) + kBegin;
    const double mean =
        (heads * static_cast<double>(steps.all) + static_cast<double>(all) * kBegin) / static_cast<double>(blocks);
    const double summing = parts > 1 ? launches + static_cast<double>(all) * bytes / kBytesOfAStep : 0;
    return summing + (by_turns ? std::max(longest, mean + (rounds > 1 ? longest / 4 : 0))
                               : static_cast<double>(rounds) * longest);
  };
  const std::int64_t most = std::min({kMostParts, kMostRounds * blocks / items, steps.longest});
  int best = 1;
  for (int parts = 2; parts <= most; ++parts) {
    best = time(parts) < time(best) ? parts : best;
  }
  return best;
}

// Counted in steps. A block takes some beyond its own: its K and V come, its first products have nothing beside them,
// its dK and dV leave. Sums of a part take one to leave, and one to be added.
Sm90LastParts sm90_last_parts(const Call& call, const Sm90BackwardSpec& spec, const Target& target) {
  constexpr double kBegin = 3;
  constexpr double kSum = 1;
  constexpr double kWorth = 0.97;
  constexpr int kMostParts = 6;
  constexpr int kFewestSteps = 4;          // of a part
  constexpr std::int64_t kMostRounds = 3;  // of parts, which bounds the memory of sums
  constexpr std::int64_t kManyRounds = 8;
  constexpr std::int64_t kFewest = 16;  // a part of what runs at once: less gains nothing after many rounds
  const bool summed = spec.summed > 1;
  if (spec.banded || spec.ordered || spec.ragged || spec.direct || !spec.dkv || spec.column_sum ||
      sm90_splits_columns(spec) || (summed && sm90_bias_order(call, spec.summed, target).rounds > 1)) {
    return {};
  }
  const std::int64_t all = sm90_items(call, spec) / spec.summed;
  const std::int64_t room = summed ? sm90_clusters_at_once(spec.summed, target) : room_for(spec, target);
  const std::int64_t rounds = room > 0 ? all / room : 0;
  const std::int64_t rest = all - rounds * room;
  if (rounds == 0 || rest == 0 || (rounds >= kManyRounds && kFewest * rest < room)) {
    return {};
  }
  const std::int64_t group = call.rows.heads_q / call.rows.heads_k;  // whose heads stay whole
  const std::int64_t steps = (call.rows.limit_q + spec.step - 1) / spec.step * group;
  // After many rounds blocks no longer end together. Then a multiprocessor idles for half of what is begun last, if
  // that is not little. Until then the last round is as long as any.
  const bool spread = rounds >= kManyRounds && 4 * rest >= room;
  const double whole = static_cast<double>(steps) + kBegin;
  const auto time = [&](int parts) {
    const std::int64_t most = group > 1 ? (group + parts - 1) / parts * (steps / group) : (steps + parts - 1) / parts;
    const double each = static_cast<double>(most) + kBegin + (parts > 1 ? 2 * kSum : 0);
    const double more = static_cast<double>(rest) * (parts * each - whole);
    if (spread) {
      return (static_cast<double>(all) * whole + more) / static_cast<double>(room) + each / 2;
    }
    const std::int64_t part_rounds = (rest * parts + room - 1) / room;
    return static_cast<double>(rounds) * whole + static_cast<double>(part_rounds) * each;
  };
  int best = 1;
  const std::int64_t most_parts = std::min<std::int64_t>(kMostParts, group > 1 ? group : steps / kFewestSteps);
  for (int parts = 2; parts <= most_parts && rest * parts <= kMostRounds * room; ++parts) {
    best = time(parts) < time(best) ? parts : best;
  }
  // As many numbers as BehindTurns::parts has.
  const std::int64_t counters = rest * spec.summed * sm90_backward_sizes(spec).keys / 8;
  const std::int64_t room_of_counters =
      BehindTurns::turns(padded_rows(call.rows), call.rows.heads_q) * BehindTurns::kCounters;
  return time(best) < kWorth * time(1) && counters <= room_of_counters ? Sm90LastParts{rest, best} : Sm90LastParts{};
}

namespace {

// Under a causal mask blocks of keys have unequal lengths, those of the first keys the longest. A long block that
// begins last would run alone. So a few heads at a time begin their blocks by turns, the longest first: few, because K,
// V, Q and dO of these should stay in L2. With stores_first heads follow one another, since heads by turns would wait
// for one another's first sums. The heads that run at the end are one turn in any case. Figures found by measuring on
// an H200.
constexpr std::int64_t kHeadsInTurn = 4;

std::int64_t heads_in_turn(const Call& call, const Sm90BackwardSpec& spec, const Target& target) {
  if (call.problem.window_left >= 0 || spec.ordered || spec.ragged || spec.stores_first) {
    return 1;
  }
  constexpr std::int64_t kRounds = 3;  // that the blocks of a turn fill
  const std::int64_t key_blocks = std::max<std::int64_t>(key_blocks_of(call, spec), 1);
  const std::int64_t wanted = (kRounds * room_for(spec, target) + key_blocks - 1) / key_blocks;
  return std::max<std::int64_t>(std::min({wanted, kHeadsInTurn, call.rows.batch() * call.rows.heads_k}), 1);
}

// Packed sequences that are as long as they may be where they fill the tensors. Only the GPU knows: an order that
// follows from this has to be right for any lengths. Those of keys may be shortened by seqused, since such blocks are
// passed over.
bool has_one_length(const Call& call) {
  const math::Rows& rows = call.rows;
  return rows.packed() && !call.problem.has_used_q && rows.batch() * rows.limit_q == rows.rows_q &&
         rows.batch() * rows.limit_k == rows.rows_k;
}

std::int64_t last_turn(const Call& call, const Sm90BackwardSpec& spec, const Target& target) {
  const std::int64_t heads = call.rows.batch() * call.rows.heads_k;
  if (!sm90_can_take_turns(spec) || spec.left_edge || (spec.ragged && !has_one_length(call))) {
    return heads;
  }
  const std::int64_t last_heads = spec.ragged && spec.stores_first ? 32 : spec.stores_first ? 16 : 8;
  const bool fills = 2 * key_blocks_of(call, spec) > target.multiprocessors;  // a head of so many does by itself
  const std::int64_t in_turn = heads_in_turn(call, spec, target);
  return fills ? heads : std::max<std::int64_t>(heads - last_heads, 0) / in_turn * in_turn;  // where a turn ends
}

}  // namespace

bool sm90_has_last_turn(const Call& call, const Sm90BackwardSpec& spec, const Target& target) {
  return last_turn(call, spec, target) < call.rows.batch() * call.rows.heads_k;
}

Sm90KeyOrder sm90_key_order(const Call& call, const Sm90BackwardSpec& spec, const Target& target) {
  const std::int64_t key_blocks = key_blocks_of(call, spec);
  const std::int64_t items = sm90_items(call, spec);
  const Sm90LastParts last = spec.last_parts ? sm90_last_parts(call, spec, target) : Sm90LastParts();
  const int parts = spec.last_parts ? last.parts : spec.key_parts ? sm90_best_parts(call, spec, target) : 1;
  const std::int64_t all = items / spec.summed;
  const std::int64_t whole = spec.last_parts ? all - last.blocks : 0;
  return {.key_blocks = key_blocks,
          .head_rows = key_blocks * sm90_backward_sizes(spec).keys,
          .items = items,
          .parts = parts,
          .whole = whole,
          .numbers = whole + (all - whole) * parts,
          .heads_in_turn = heads_in_turn(call, spec, target),
          .last_turn = last_turn(call, spec, target)};
}

}  // namespace fovea::cuda
