// SPDX-License-Identifier: Apache-2.0
//
// The figures were found by measuring on an H200 (docs/design/spikes.md); what leaves no room in shared memory goes to
// the next candidate.
#include "cuda/kernels/sm90_backward.h"
#include "cuda/config/tensor_map_limits.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cuda/device/args.h"
#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/launch/launcher.h"
#include "cuda/launch/tensor_map.h"
#include "math/band.h"
#include "math/softmax.h"

namespace fovea::cuda {
namespace {

constexpr std::int64_t kMostBlocks = std::int64_t{1} << 30;
constexpr std::int64_t kMostEntries = std::int64_t{1} << 16;  // that are ordered: each is compared with all
constexpr int kWide = 128;
constexpr int kWidest = 256;

bool is_wide(const Features& spec) { return std::max(spec.d, spec.dv) > kWide; }

constexpr int rounded(int columns, int grain) { return (columns + grain - 1) / grain * grain; }

// Whether two blocks share the work (sm90_wide_backward): where dk and dv, or they and what a feature needs, are more
// than the registers of one hold.
bool in_clusters(const Features& spec) {
  if (!is_wide(spec)) {
    return false;
  }
  constexpr int kGrain = 32;
  constexpr int kWidestOfOne = 192;
  constexpr int kMostOfOne = 320;
  const int d = rounded(spec.d, kGrain);
  const bool dropout = spec.dropout != DropoutRule::kNone;
  // Roughly what features take of registers.
  const int features = (dropout ? 3 : 0) + (spec.softcap ? 2 : 0) + (spec.mask ? 2 : 0) + (spec.alibi ? 1 : 0) +
                       (spec.key_term ? 1 : 0) + (dropout && spec.ragged ? 1 : 0);
  constexpr int kMostFeatures = 3;
  return std::max(d, spec.dv) > kWidestOfOne || d + spec.dv > kMostOfOne || spec.bias != BiasTile::kNone ||
         features > kMostFeatures;
}

const char* why_not(const Call& call, const Operands& operands, const Target& target, const BackwardWants& wants) {
  const Problem& p = call.problem;
  const math::Rows& rows = call.rows;
  const Features& spec = operands.features;
  if (target.capability != 90) {
    return "compute capability other than 9.0";
  }
  if (spec.type == Type::kFp32) {
    return "fp32";
  }
  if (spec.d > kWidest || spec.dv > kWidest) {
    return "head_dim over 256";
  }
  if (is_wide(spec)) {
    if (wants.column_sum) {
      return "head_dim over 128 with the gradient of a bias without queries";
    }
    if (sm90_outer_bytes(spec) > 0) {
      return "head_dim over 128 with a bias of fp32 or two of full size";
    }
    if (spec.query_term) {
      return "head_dim over 128 with a bias or mask without keys";
    }
  }
  if (spec.dropout == DropoutRule::kTorchMemEfficient) {
    return "dropout by the rule torch_mem_efficient";
  }
  constexpr int kNarrow = 64;
  if (std::max(spec.d, spec.dv) > kNarrow && spec.softcap && wants.column_sum) {
    return "softcap with the gradient of a bias without queries, which take too many registers over head_dim 64";
  }
  if (std::max(spec.d, spec.dv) > kNarrow && (spec.query_term || wants.row_sum) &&
      (spec.dropout != DropoutRule::kNone || spec.softcap || spec.mask || spec.bias != BiasTile::kNone ||
       spec.bias2 != BiasTile::kNone || wants.column_sum)) {
    return "head_dim over 64 with a bias without keys and dropout, a softcap, a mask or a second bias";
  }
  if (!wants.dkv && (!wants.dq || is_wide(spec))) {
    return "neither dk nor dv";
  }
  if (p.head_dim == 0 || p.head_dim_v == 0 || rows.limit_q == 0 || rows.limit_k == 0) {
    return "nothing to attend to";
  }
  if (rows.rows_q >= kMostMapRows || rows.rows_k >= kMostMapRows || padded_rows(rows) * rows.heads_q >= kMostBlocks) {
    return "2^29 rows or more";
  }
  if (rows.batch() * rows.heads_k * ((rows.limit_k + kRowPad - 1) / kRowPad) >= kMostBlocks) {
    return "2^30 blocks of keys or more";
  }
  if (!has_row_map(operands.q.strides, rows.rows_q) || !has_row_map(operands.grad_out.strides, rows.rows_q) ||
      !has_row_map(operands.k.strides, rows.rows_k) || !has_row_map(operands.v.strides, rows.rows_k) ||
      !has_tensor_map(operands.bias.strides, bias_bytes(spec.bias)) ||
      !has_tensor_map(operands.bias2.strides, bias_bytes(spec.bias2))) {
    return "strides that no tensor map has";
  }
  return nullptr;
}

struct Tiles {
  int groups;  // warpgroups, tiles * 64 keys each
  int tiles;
  int step;
  int stages;
  int planes;
  bool bulk = false;
  bool delay = false;
  bool halves = false;
  int outer = 1;  // buffers of biases that do not lie in the place of dS
  bool same_step = false;
};

// Whether dQ is computed in its own step, if blocks fill the chip: at head_dim 128, where registers allow, without a
// band or with groups of heads under a causal mask. Elsewhere that is no faster, or slower (docs/design/tried.md).
bool in_same_step(const Call& call, const Sm90BackwardSpec& spec, bool ordered) {
  const bool grouped = call.rows.heads_q > call.rows.heads_k;
  const bool much = spec.dropout != DropoutRule::kNone || spec.softcap || spec.mask || spec.key_term ||
                    spec.query_term || spec.alibi || spec.column_sum || spec.row_sum || sm90_outer_bytes(spec) > 0;
  return spec.dq && spec.dkv && spec.d == kWide && spec.dv == kWide && !ordered && !much && !spec.ragged &&
         !spec.dbias_store && (!spec.banded || (grouped && !spec.left_edge && spec.bias == BiasTile::kNone));
}

// From the best on: the first that fits is taken.
std::vector<Tiles> candidates(const Sm90BackwardSpec& spec, std::int64_t seqlen_k, bool ordered) {
  const int widest = std::max(spec.d, spec.dv);
  if (in_clusters(spec)) {
    return {{.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2}};
  }
  if (is_wide(spec)) {
    return {{.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2, .halves = true}};
  }
  const bool bias = spec.bias != BiasTile::kNone;
  const bool rows = spec.query_term || spec.row_sum;
  const bool much = spec.dropout != DropoutRule::kNone || spec.softcap || spec.mask;  // what takes registers
  // Of three warpgroups; with a term of keys ptxas would wait for every product there (C7512).
  const bool three = widest <= 64 && !much && !spec.key_term;
  if (sm90_outer_bytes(spec) > 0) {
    if (ordered) {
      return {{.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2, .bulk = true, .outer = 2},
              {.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2, .bulk = true},
              {.groups = 2, .tiles = 1, .step = 64, .stages = 1, .planes = 2, .bulk = true}};
    }
    return {{.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 3, .outer = 2},
            {.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2, .outer = 2},
            {.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2}};
  }
  // One block has all keys.
  if (spec.dq && !spec.ragged) {
    constexpr int kLittle = 32;
    const auto keys = [&](int groups, int tiles) { return seqlen_k <= 64 * groups * tiles; };
    if (widest > 64 && keys(2, 1)) {
      return {{.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 3},
              {.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2}};
    }
    if (widest <= 64 && keys(2, 1) && !much && !bias && !rows) {
      return {{.groups = 2, .tiles = 1, .step = 128, .stages = 2, .planes = 2}};
    }
    if (widest <= 64 && keys(2, 1)) {
      return {{.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3}};
    }
    if (three && keys(3, 1)) {  // ptxas would serialise delayed products of a bias or a term of queries (C7512)
      return {{.groups = 3, .tiles = 1, .step = 64, .stages = 4, .planes = 3, .delay = !bias && !rows}};
    }
    if (widest <= 64 && !much && !rows && keys(2, 2)) {
      return {{.groups = 2, .tiles = 2, .step = 64, .stages = 2, .planes = 2}};
    }
    if (widest <= kLittle && !much && keys(3, 2)) {
      return {{.groups = 3, .tiles = 2, .step = 64, .stages = 2, .planes = 3}};
    }
  }
  // Sums in order leave in bulk.
  if (ordered) {
    if (widest <= 64 && !much) {
      return {{.groups = 3, .tiles = 1, .step = 64, .stages = 3, .planes = 2, .bulk = true},
              {.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2, .bulk = true}};
    }
    return {{.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2, .bulk = true}};
  }
  if (!spec.dkv && widest > 64 && !bias && !much) {  // no sums of dk and dv: registers for a third warpgroup
    return {{.groups = 3, .tiles = 1, .step = 64, .stages = 2, .planes = 2},
            {.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2}};
  }
  if (widest <= 64) {
    if (spec.mask && spec.dropout == DropoutRule::kNone && !spec.softcap && !bias && !rows) {
      return {{.groups = 2, .tiles = 1, .step = 128, .stages = 2, .planes = 2, .bulk = true},
              {.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3}};
    }
    if (much) {
      return {{.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3, .bulk = true},
              {.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3}};
    }
    if (spec.dbias_store) {
      return {{.groups = 3, .tiles = 1, .step = 64, .stages = 4, .planes = 3},
              {.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3}};
    }
    if (bias && three && !rows && !spec.banded && !spec.ragged && !spec.alibi && !spec.column_sum) {
      return {{.groups = 3, .tiles = 1, .step = 64, .stages = 3, .planes = 3, .bulk = true},
              {.groups = 3, .tiles = 1, .step = 64, .stages = 3, .planes = 2, .bulk = true},
              {.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3, .bulk = true},
              {.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3}};
    }
    if (bias) {
      return {{.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3, .bulk = true},
              {.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3}};
    }
    if (rows && (spec.banded || spec.alibi || spec.key_term)) {  // three warpgroups have too few registers
      return {{.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3, .bulk = true},
              {.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3}};
    }
    if (spec.banded && three) {
      return {{.groups = 3, .tiles = 1, .step = 64, .stages = 3, .planes = 2, .bulk = true},
              {.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3}};
    }
    if (spec.banded && spec.ragged && spec.column_sum) {  // 128 queries a step would spill
      return {{.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3, .bulk = true},
              {.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3}};
    }
    return {{.groups = 2, .tiles = 1, .step = 128, .stages = 2, .planes = 2, .bulk = true},
            {.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3}};
  }
  constexpr int kMiddle = 80;
  if (spec.dbias_store || widest <= kMiddle) {
    return {{.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 3},
            {.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2}};
  }
  return {{.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2, .bulk = true},
          {.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 3},
          {.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2}};
}

// Whether the block that comes first to rows of dq_sum stores there. Then nothing clears them before, but a block that
// comes while another stores waits. That pays where steps take long, or with few keys. It does not where grouped heads
// make blocks so long that heads should begin by turns, the longest block first.
bool stores_first(const Call& call, const Sm90BackwardSpec& spec) {
  constexpr int kNarrow = 64;
  constexpr std::int64_t kFewKeys = 2048;
  if (spec.ordered || spec.left_edge || (spec.banded && spec.ragged)) {
    return true;
  }
  const bool grouped = call.rows.heads_q > call.rows.heads_k;
  if (spec.banded) {
    return !grouped && (std::max(spec.d, spec.dv) > kNarrow || call.rows.limit_k <= kFewKeys);
  }
  return std::max(spec.d, spec.dv) > kNarrow && !spec.ragged && !spec.key_parts;  // parts do not begin each elsewhere
}

// Whether the term of keys is a mask and nothing else is added to scores, which then stay dot products. All of the
// kernels of the call have to agree on that.
bool is_mask_alone(const Call& call, const Operands& operands, Sm90BackwardSpec spec) {
  spec.key_mask = true;
  return spec.key_term && !natural_scores(spec) && (spec.dq || !call.problem.need.q) &&
         std::any_of(operands.terms.begin(), operands.terms.end(),
                     [](const Term& term) { return term.to == Region::kKeyTerm && term.biases.empty(); });
}

// Blocks of keys (sm90_wide_backward: of two blocks), of a head and of all heads.
std::int64_t key_blocks_of(const Call& call, const Sm90BackwardSpec& spec) {
  const std::int64_t keys = sm90_backward_sizes(spec).keys;
  return (call.rows.limit_k + keys - 1) / keys;
}

std::int64_t items_of(const Call& call, const Sm90BackwardSpec& spec) {
  return key_blocks_of(call, spec) * call.rows.batch() * call.rows.heads_k;
}

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

// The parts of a block of keys that give the least time, by estimate, where there are fewer blocks of keys than
// multiprocessors; 1 where nothing is gained. Counted in steps, of 2 to 3 us each: a part costs half of one to begin,
// sums of parts cost one, two where there is no other launch to add them, and some 1 us a megabyte (measured).
int best_parts(const Call& call, const Sm90BackwardSpec& spec, const Target& target) {
  constexpr double kBegin = 0.5;
  constexpr double kBytesOfAStep = 3e6;
  constexpr std::int64_t kMostParts = 64;
  constexpr std::int64_t kMostRounds = 3;  // which bounds the memory of sums, too
  const std::int64_t blocks = in_clusters(spec) ? target.multiprocessors / 2 : target.multiprocessors;
  const std::int64_t items = items_of(call, spec);
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

// Whether the kernel converts dq itself. A block takes blocks of keys from a counter then, so that no warp waits for a
// block that has not begun. Elsewhere a launch of its own is as fast, or faster (docs/design/tried.md).
bool converts_dq(const Call& call, const Operands& operands, const Sm90BackwardSpec& spec, const Target& target) {
  constexpr int kNarrow = 64;
  constexpr std::int64_t kShort = 2048;
  const bool grouped = call.rows.heads_q > call.rows.heads_k;
  const bool gains = (spec.banded && !grouped) || std::max(spec.d, spec.dv) <= kNarrow || call.rows.limit_q <= kShort;
  return gains && spec.bulk && !spec.key_parts && operands.vector_stores &&
         items_of(call, spec) > target.multiprocessors && spec.bias == BiasTile::kNone && sm90_outer_bytes(spec) == 0 &&
         spec.dropout == DropoutRule::kNone;
}

// The first candidate that fits, dq in order or not; false where none does.
bool take_tiles(Kernel& kernel, const Call& call, const Operands& operands, const Target& target,
                const BackwardWants& wants, bool is_ordered) {
  auto& spec = std::get<Sm90BackwardSpec>(kernel.spec);
  const bool clusters = in_clusters(spec);
  const bool has_dq = wants.dq && is_ordered == wants.ordered;
  spec.dq = has_dq;
  spec.dkv = wants.dkv;
  spec.column_sum = wants.column_sum;
  spec.row_sum = wants.row_sum && !is_ordered && !is_wide(spec);
  spec.dbias_store = wants.dbias_store && spec.dq && !is_wide(spec);
  std::vector<Tiles> all = candidates(spec, call.rows.limit_k, is_ordered);
  if (in_same_step(call, spec, is_ordered)) {
    constexpr Tiles kSameStep{
        .groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2, .bulk = true, .halves = true, .same_step = true};
    all.insert(all.begin(), kSameStep);
  }
  for (const Tiles& tiles : all) {
    spec.warps = 4 * tiles.groups;
    spec.tiles = tiles.tiles;
    spec.step = tiles.step;
    spec.stages = tiles.stages;
    spec.planes = tiles.planes;
    spec.outer = tiles.outer;
    // Nothing need be added where one block has all keys.
    spec.direct = has_dq && !spec.ragged && !is_wide(spec) && call.rows.limit_k <= 64 * tiles.groups * tiles.tiles;
    spec.ordered = is_ordered && !spec.direct;
    spec.bulk = has_dq && tiles.bulk && !spec.direct;
    spec.key_parts = !spec.column_sum && best_parts(call, spec, target) > 1;
    spec.stores_first = spec.bulk && stores_first(call, spec);
    spec.converts = converts_dq(call, operands, spec, target);
    // Of sequences of different lengths a long one that is begun last would run alone.
    spec.longest_first = spec.ragged && call.rows.batch() > 1 && call.rows.batch() < kMostEntries &&
                         items_of(call, spec) > target.multiprocessors;
    spec.key_mask = is_mask_alone(call, operands, spec);
    spec.delay = has_dq && tiles.delay;
    spec.halves = has_dq && tiles.halves;
    spec.same_step = tiles.same_step;
    if (spec.ordered && !spec.bulk && !clusters) {
      continue;
    }
    if (spec.same_step && (spec.direct || items_of(call, spec) < target.multiprocessors)) {
      continue;
    }
    kernel.threads = sm90_backward_sizes(spec).threads;
    kernel.shared_bytes = clusters ? sm90_wide_backward_sizes(spec).bytes : sm90_backward_sizes(spec).bytes;
    if (kernel.shared_bytes <= target.shared_per_block) {
      return true;
    }
  }
  return false;
}

// What sm90_backward_mask writes: 64 queries a row.
Box mask_tiles(const Box& words) {
  constexpr std::int64_t kQueries = 64;
  Box box = words;
  box.rows = (words.rows + 2 * kQueries - 1) / (2 * kQueries) * 2;
  box.width = words.width * kQueries;
  return box;
}

// ---- the order of the blocks ----

// Key heads whose blocks are begun by turns, the longest first: 1 where all are as long.
std::int64_t heads_in_turn(const Call& call, const Sm90BackwardSpec& spec, const Target& target) {
  if (call.problem.window_left >= 0 || spec.ordered || spec.ragged || spec.stores_first) {
    return 1;
  }
  constexpr std::int64_t kRounds = 2;  // 4: level; all heads by turns: up to 15% slower, they leave L2
  const std::int64_t blocks = in_clusters(spec) ? target.multiprocessors / 2 : target.multiprocessors;
  const std::int64_t heads = call.rows.batch() * call.rows.heads_k;
  const std::int64_t wanted =
      (kRounds * blocks + key_blocks_of(call, spec) - 1) / std::max<std::int64_t>(key_blocks_of(call, spec), 1);
  const std::int64_t turns = std::max<std::int64_t>(heads / std::max<std::int64_t>(wanted, 1), 1);
  return std::max<std::int64_t>((heads + turns - 1) / turns, 1);
}

// Under a causal mask the blocks of a head have unequal lengths. Where heads follow one another (stores_first), blocks
// of the last heads, which run at the end, begin with the longest: a long block that begins last would run alone. All
// heads in such an order would wait for one another's first sums.
std::int64_t last_turn(const Call& call, const Sm90BackwardSpec& spec, const Target& target) {
  const std::int64_t heads = call.rows.batch() * call.rows.heads_k;
  if (!spec.banded || spec.left_edge || spec.ordered || spec.ragged || !spec.stores_first) {
    return heads;
  }
  // Found by measuring on an H200: 8 are too few for short sequences; a head of more blocks fills the chip by itself.
  constexpr std::int64_t kLastHeads = 16;
  const bool fills = 2 * key_blocks_of(call, spec) > target.multiprocessors;
  return fills ? heads : std::max<std::int64_t>(heads - kLastHeads, 0);
}

// ---- arguments ----

void start_mask(const Launcher& launcher, const Launch& launch) {
  launcher.launch(launch, MaskTilesArgs{launcher.region<u32>(Region::kMaskBits),
                                        launcher.region<u32>(Region::kMaskTiles), launcher.operands().mask_box});
}

KeyParts key_parts(const Launcher& launcher, const Sm90BackwardSpec& spec, const Sm90KeyOrder& order) {
  const math::Rows& rows = launcher.call().rows;
  KeyParts parts;
  if (order.parts > 1) {
    parts.count = order.parts;
    parts.head_rows = static_cast<int>(order.head_rows);
    parts.rows = rows.batch() * rows.heads_k * parts.head_rows;
    parts.dk = launcher.region<float>(Region::kKeySums);
    if (parts.dk != nullptr) {
      parts.dv = parts.dk + parts.count * parts.rows * spec.d;
    }
  }
  return parts;
}

void start_backward(const Launcher& launcher, const Launch& launch, const Sm90KeyOrder& order) {
  const auto& spec = launch.kernel.as<Sm90BackwardSpec>();
  const Args& common = launcher.args();
  const Call& call = launcher.call();
  const math::Rows& rows = call.rows;
  Sm90BackwardArgs args;
  const auto map = [&](TensorMap& to, Has& has, const Mapped& what) { encode(launcher.driver(), to, has, what); };
  const auto of_rows = [&](TensorMap& to, Has& has, const Tensor& tensor, i64 columns, int panel, i64 count, i64 heads,
                           int box) {
    map(to, has, map_of_rows(rows, tensor, spec.type, columns, count, heads, panel, box));
  };
  const int group_keys = 64 * spec.tiles;
  const bool wide = in_clusters(spec);
  const int panel_d = wide ? sm90_wide_panel(spec.d) : sm90_backward_panel_d(spec);
  const int panel_v = wide ? panel_columns(spec.dv / 2) : sm90_backward_panel_v(spec);
  of_rows(args.q, args.has_q, common.q, common.head_dim, panel_d, rows.rows_q, rows.heads_q, spec.step);
  of_rows(args.grad_out, args.has_grad_out, common.grad_out, common.head_dim_v, panel_v, rows.rows_q, rows.heads_q,
          spec.step);
  of_rows(args.k, args.has_k, common.k, common.head_dim, panel_d, rows.rows_k, rows.heads_k, group_keys);
  of_rows(args.v, args.has_v, common.v, common.head_dim_v, panel_v, rows.rows_k, rows.heads_k, group_keys);
  const auto of_bias = [&](TensorMap& to, Has& has, const Tensor& tensor, BiasTile type) {
    if (type != BiasTile::kNone) {
      map(to, has, map_of_bias(rows, tensor, type, bias_panel_columns(type), spec.step));
    }
  };
  of_bias(args.bias, args.has_bias, common.bias, spec.bias);
  of_bias(args.bias2, args.has_bias2, common.bias2, spec.bias2);
  if (spec.dbias_store) {
    constexpr int kPanel = 64;
    const bool in_place = launcher.operands().grad_bias_pack >= 0;
    map(args.grad_bias, args.has_grad_bias,
        {in_place ? common.bias : Launcher::tensor(call.grad_bias), map_type(spec.type), call.problem.seqlen_k,
         call.problem.seqlen_q, rows.heads_q, rows.batch2, rows.batch1, kPanel, spec.step});
  }
  if (spec.mask) {
    args.mask = {launcher.region<u32>(Region::kMaskTiles), mask_tiles(launcher.operands().mask_box).strides()};
  }
  args.key_blocks = static_cast<int>(order.key_blocks);
  args.blocks = static_cast<int>(order.items) * order.parts;
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
  launcher.launch(launch, common, args);
}

}  // namespace

Choice sm90_backward(const Call& call, const Operands& operands, const Target& target, const BackwardWants& wants) {
  Choice choice;
  Kernel& kernel = choice.kernel;
  kernel.file = "sm90/backward.cuh";
  kernel.name = "sm90_backward";
  kernel.one_architecture = true;
  auto& spec = kernel.spec.emplace<Sm90BackwardSpec>(Sm90BackwardSpec{operands.features, {}, {}});
  spec.arch = target.capability;
  choice.why_not = why_not(call, operands, target, wants);
  if (choice.why_not != nullptr) {
    return choice;
  }
  const bool clusters = in_clusters(spec);
  if (clusters) {
    kernel.file = "sm90/wide_backward.cuh";
    kernel.name = "sm90_wide_backward";
    constexpr int kGrain = 64;
    spec.d = rounded(spec.d, kGrain);
    spec.dv = rounded(spec.dv, kGrain);
  } else if (is_wide(spec)) {
    constexpr int kGrain = 32;  // each warpgroup sums half of dQ's columns
    spec.d = rounded(spec.d, kGrain);
  }
  spec.left_edge = spec.banded && call.problem.window_left >= 0;
  // In order the sums of one block leave in bulk. Where there is no room for that dq is another kernel's.
  const bool may_order = clusters || !is_wide(spec);
  if ((wants.ordered && may_order && take_tiles(kernel, call, operands, target, wants, true)) ||
      take_tiles(kernel, call, operands, target, wants, false)) {
    return choice;
  }
  choice.why_not = "tiles beyond the shared memory of a block";
  return choice;
}

Sm90KeyOrder sm90_key_order(const Call& call, const Sm90BackwardSpec& spec, const Target& target) {
  const std::int64_t key_blocks = key_blocks_of(call, spec);
  return {.key_blocks = key_blocks,
          .head_rows = key_blocks * sm90_backward_sizes(spec).keys,
          .items = items_of(call, spec),
          .parts = spec.key_parts ? best_parts(call, spec, target) : 1,
          .heads_in_turn = heads_in_turn(call, spec, target),
          .last_turn = last_turn(call, spec, target)};
}

void reserve_sm90_backward(Planner& planner, const Sm90BackwardSpec& spec, const Sm90KeyOrder& order) {
  const math::Rows& rows = planner.call().rows;
  Workspace& workspace = planner.workspace();
  if (order.parts > 1 && spec.dkv) {
    workspace.add(Region::kKeySums, order.parts * rows.batch() * rows.heads_k * order.head_rows * (spec.d + spec.dv) *
                                        std::int64_t{sizeof(float)});
  }
  // Blocks that take their keys from a counter, or add to dq in order.
  const bool counts = !in_clusters(spec) && order.items * order.parts > planner.target().multiprocessors;
  if (spec.stores_first || spec.ordered || spec.converts || spec.longest_first || counts) {
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
  const std::int64_t items = order.items * order.parts;
  planner.add(
      kernel,
      in_clusters(kernel.as<Sm90BackwardSpec>()) ? 2 * items
                                                 : std::min<std::int64_t>(items, planner.target().multiprocessors),
      [order](const Launcher& launcher, const Launch& launch) { start_backward(launcher, launch, order); }, 1,
      order.parts);
  if (order.parts > 1) {
    planner.say_kernel(fmt::format(", a block of keys in {} parts", order.parts));
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
  spec.same_step = main.same_step;  // how dq_sum lies
  kernel.spec = spec;
  const std::int64_t key_rows = rows.batch() * rows.heads_k * order.head_rows;
  const std::int64_t blocks = sm90_parts_blocks(key_rows, main.d) + sm90_parts_blocks(key_rows, main.dv);
  const auto start = [main, order](const Launcher& launcher, const Launch& launch) {
    launcher.launch(launch, launcher.args(), key_parts(launcher, main, order));
  };
  planner.add(kernel, blocks + convert_blocks, start, 1, order.parts);
}

}  // namespace fovea::cuda
