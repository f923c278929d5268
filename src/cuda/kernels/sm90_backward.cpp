// SPDX-License-Identifier: Apache-2.0
//
// The figures were found by measuring on an H200 (docs/design/spikes.md); what leaves no room in shared memory goes to
// the next candidate.
#include "cuda/kernels/sm90_backward.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "cuda/device/sm90/cluster_backward_sizes.h"
#include "cuda/kernels/sm90_added_bias.h"
#include "cuda/launch/tensor_map.h"

namespace fovea::cuda {
namespace {

constexpr std::int64_t kMostBlocks = std::int64_t{1} << 30;
constexpr std::int64_t kMostEntries = std::int64_t{1} << 16;  // that are ordered: each is compared with all
constexpr int kWidest = 512;
constexpr int kWidestOfOne = 256;  // block of a cluster
constexpr int kWidestOfOddRows = 128;

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
  if (std::max(spec.d, spec.dv) > kWidest) {
    return "head_dim over 512";
  }
  if (std::max(spec.d, spec.dv) > kWidestOfOne && std::min(spec.d, spec.dv) <= kWidestOfOne) {
    return "one head_dim over 256 and the other not";
  }
  if (sm90_is_wide(spec)) {
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
  if (operands.odd_rows && (std::max(spec.d, spec.dv) > kWidestOfOddRows || spec.ragged)) {
    return "odd rows of a bias, with ragged sequences or a head_dim over 128";
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
  if (!wants.dkv && (!wants.dq || sm90_is_wide(spec))) {
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
  int summed = 1;
};

// Whether all gradients are wanted at head_dim 128, and nothing but a bias takes registers beside dK, dV and scores.
bool has_registers_left(const Sm90BackwardSpec& spec) {
  const bool much = spec.dropout != DropoutRule::kNone || spec.softcap || spec.mask || spec.key_term ||
                    spec.query_term || bool(spec.positions) || spec.column_sum || spec.row_sum ||
                    sm90_outer_bytes(spec) > 0;
  return spec.dq && spec.dkv && spec.d == kSm90Wide && spec.dv == kSm90Wide && !much;
}

// Where each of two warpgroups computes half of dQ's columns, of every step, if blocks fill the chip. Elsewhere, and
// with sums in order, they take turns at whole steps. Measured (docs/design/tried.md).
std::optional<Tiles> by_halves(const Call& call, const Operands& operands, const Sm90BackwardSpec& spec, bool ordered) {
  const bool bias = spec.bias != BiasTile::kNone;
  const bool grouped = call.rows.heads_q > call.rows.heads_k;
  if (!has_registers_left(spec) || ordered || spec.odd_rows ||
      (spec.banded && (bias || spec.left_edge || !(grouped || spec.ragged)))) {
    return std::nullopt;
  }
  Tiles tiles{.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2, .bulk = true, .halves = true};
  constexpr std::int64_t kLong = 2048;  // below that the last step's rows without queries count
  const Results fp32 = fp32_results(call.problem);
  const bool is_usual = !bias && !fp32.q && !fp32.k && !fp32.v;
  if (spec.banded && is_usual) {
    tiles.delay = true;
  } else if (spec.ragged || spec.dbias_store) {
    return std::nullopt;
  } else if (!spec.banded && is_usual && call.rows.limit_q >= kLong && operands.vector_stores) {
    tiles.delay = true;
    tiles.step = kTurnedQueries;
  } else {
    tiles.same_step = true;
  }
  return tiles;
}

// From the best on: the first that fits is taken.
std::vector<Tiles> candidates(const Sm90BackwardSpec& spec, std::int64_t seqlen_k, bool ordered) {
  const int widest = std::max(spec.d, spec.dv);
  if (sm90_in_clusters(spec)) {
    return {{.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2}};
  }
  if (sm90_is_wide(spec)) {
    return {{.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2, .halves = true}};
  }
  const bool bias = spec.bias != BiasTile::kNone;
  const bool rows = spec.query_term || spec.row_sum;
  const bool much = spec.dropout != DropoutRule::kNone || spec.softcap || spec.mask;  // what takes registers
  // Of three warpgroups; with a term of keys ptxas would wait for every product there (C7512).
  const bool three = widest <= 64 && !much && !spec.key_term;
  if (spec.odd_rows) {
    if (ordered) {
      return {};
    }
    return {{.groups = 2, .tiles = 1, .step = 64, .stages = widest <= 64 ? 3 : 2, .planes = 3, .outer = 2},
            {.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 2, .outer = 2}};
  }
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
    // Beside a band three warpgroups have too few registers for a bias or for terms of keys or queries (C7512).
    const bool added = bias || rows || spec.key_term;
    if (widest <= 64 && !much && !(spec.banded && added)) {
      return {{.groups = 3, .tiles = 1, .step = 64, .stages = 3, .planes = bias ? 3 : 2, .bulk = true}};
    }
    if (widest <= 64 && (added || spec.mask || spec.softcap)) {  // dropout alone is as fast with two buffers of each
      return {{.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3, .bulk = true}};
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
    if (bias && three && !rows && !spec.banded && !spec.ragged && !spec.positions && !spec.column_sum) {
      return {{.groups = 3, .tiles = 1, .step = 64, .stages = 3, .planes = 3, .bulk = true},
              {.groups = 3, .tiles = 1, .step = 64, .stages = 3, .planes = 2, .bulk = true},
              {.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3, .bulk = true},
              {.groups = 2, .tiles = 1, .step = 64, .stages = 3, .planes = 3}};
    }
    // What is left of biases; and terms of queries beside which three warpgroups have too few registers.
    if (bias || (rows && (spec.banded || bool(spec.positions) || spec.key_term))) {
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
  return std::max(spec.d, spec.dv) > kNarrow && !spec.ragged && spec.key_parts == spec.last_parts;
}

// Whether the term of keys is a mask and nothing else is added to scores, which then stay dot products. All of the
// kernels of the call have to agree on that.
bool is_mask_alone(const Call& call, const Operands& operands, Sm90BackwardSpec spec) {
  spec.key_mask = true;
  return spec.key_term && !natural_scores(spec) && (spec.dq || !call.problem.need.q) &&
         std::any_of(operands.terms.begin(), operands.terms.end(),
                     [](const Term& term) { return term.to == Region::kKeyTerm && term.biases.empty(); });
}

// Whether the kernel converts dq itself. A block takes blocks of keys from a counter then, so that no warp waits for a
// block that has not begun. Elsewhere a launch of its own is as fast, or faster (docs/design/tried.md).
bool converts_dq(const Call& call, const Operands& operands, const Sm90BackwardSpec& spec, const Target& target) {
  constexpr int kNarrow = 64;
  constexpr int kMiddle = 80;  // whose sums leave by red instructions
  constexpr std::int64_t kShort = 2048;
  const int widest = std::max(spec.d, spec.dv);
  const bool grouped = call.rows.heads_q > call.rows.heads_k;
  const bool is_short = call.rows.limit_q <= kShort;
  const bool of_bulk =
      spec.bulk && ((spec.banded && !grouped) || widest <= kNarrow || is_short) && !(spec.ordered && widest <= kNarrow);
  const bool of_others = spec.dq && spec.dkv && !spec.direct && widest > kNarrow && widest <= kMiddle && is_short;
  return (of_bulk || of_others) && operands.vector_stores && sm90_items(call, spec) > target.multiprocessors &&
         spec.bias == BiasTile::kNone && sm90_outer_bytes(spec) == 0 && !spec.row_sum &&
         spec.dropout == DropoutRule::kNone && !fp32_results(call.problem).q;
}

// Whether dK and dV leave by tensor stores: where that was faster, with long blocks of keys.
bool stores_tiles(const Call& call, const Operands& operands, const Sm90BackwardSpec& spec) {
  constexpr std::int64_t kLong = 8192;
  const bool grouped = call.rows.heads_q > call.rows.heads_k;
  const bool gains = call.rows.limit_k >= kLong && call.rows.limit_q >= kLong && !grouped && spec.banded &&
                     std::max(spec.d, spec.dv) == kSm90Wide;
  const bool more = spec.ragged || spec.left_edge || spec.ordered || spec.dropout != DropoutRule::kNone ||
                    spec.softcap || spec.mask || spec.key_term || spec.query_term || bool(spec.positions) ||
                    spec.shifted || spec.fp32_results || spec.column_sum || spec.row_sum ||
                    spec.bias != BiasTile::kNone || sm90_outer_bytes(spec) > 0;
  const auto has_map = [&](const View& to) { return !to || has_row_map(to.strides, call.rows.rows_k); };
  return gains && !more && spec.dq && spec.dkv && !spec.key_parts && spec.warps == 8 && operands.vector_stores &&
         has_map(call.grad_k) && has_map(call.grad_v);
}

// Whether delta is formed within the kernel, so that it is the call's only one: where one block has all keys, and
// nothing else of the call reads row vectors.
bool makes_rows(const Call& call, const Sm90BackwardSpec& spec, const BackwardWants& wants) {
  const Problem& p = call.problem;
  const bool more = spec.query_term || spec.bias != BiasTile::kNone || sm90_outer_bytes(spec) > 0 || spec.column_sum ||
                    wants.row_sum || p.need.sink || p.wide.out;
  return spec.direct && spec.dkv && !more && has_row_map(call.out.strides, call.rows.rows_q) &&
         is_aligned(call, call.out, call.rows.heads_q, call.rows.rows_q, p.head_dim_v);
}

// The first candidate that fits, dq in order or not; false where none does.
bool take_tiles(Kernel& kernel, const Call& call, const Operands& operands, const Target& target,
                const BackwardWants& wants, bool is_ordered) {
  auto& spec = std::get<Sm90BackwardSpec>(kernel.spec);
  const bool clusters = sm90_in_clusters(spec);
  const bool has_dq = wants.dq && is_ordered == wants.ordered;
  spec.dq = has_dq;
  spec.dkv = wants.dkv;
  spec.column_sum = wants.column_sum;
  spec.row_sum = wants.row_sum && !is_ordered && !sm90_is_wide(spec);
  spec.dbias_store = wants.dbias_store && spec.dq && !sm90_is_wide(spec);
  std::vector<Tiles> all = candidates(spec, call.rows.limit_k, is_ordered);
  const std::optional<Tiles> halves = by_halves(call, operands, spec, is_ordered);
  if (halves) {
    all.insert(all.begin(), *halves);
  }
  if (const int blocks = sm90_summed_blocks(call, spec, wants, target); blocks > 1) {
    constexpr int kNarrow = 64;
    const bool narrow = std::max(spec.d, spec.dv) <= kNarrow;
    Tiles summed{.groups = 2, .tiles = 1, .step = 64, .stages = 2, .planes = 3, .bulk = narrow, .summed = blocks};
    all.insert(all.begin(), summed);
    summed.stages = 3;
    all.insert(all.begin(), summed);
    if (halves && halves->same_step) {
      Tiles same_step = *halves;
      same_step.summed = blocks;
      all.insert(all.begin(), same_step);
    }
  }
  const bool adds_bias = sm90_adds_bias(call, spec, wants);
  for (const Tiles& tiles : all) {
    spec.summed = tiles.summed;
    spec.odd_sums = sm90_sums_to_odd_rows(call, spec, target);
    spec.warps = 4 * tiles.groups;
    spec.tiles = tiles.tiles;
    spec.step = tiles.step;
    spec.adds_bias = adds_bias && tiles.summed == 1 && tiles.step == 64;
    spec.stages = tiles.stages;
    spec.planes = tiles.planes;
    spec.outer = tiles.outer;
    // Nothing need be added where one block has all keys.
    spec.direct = has_dq && !spec.ragged && !sm90_is_wide(spec) && call.rows.limit_k <= 64 * tiles.groups * tiles.tiles;
    spec.ordered = is_ordered && !spec.direct;
    spec.bulk = has_dq && tiles.bulk && !spec.direct;
    const bool few = !spec.column_sum && !sm90_splits_columns(spec) && sm90_best_parts(call, spec, target) > 1;
    spec.last_parts = !few && sm90_last_parts(call, spec, target).parts > 1;
    spec.key_parts = few || spec.last_parts;
    spec.stores_first = spec.bulk && spec.summed == 1 && stores_first(call, spec);
    spec.converts = converts_dq(call, operands, spec, target);
    // Of sequences of different lengths a long one that is begun last would run alone; of one length, a long block.
    spec.longest_first = spec.ragged && call.rows.batch() > 1 && call.rows.batch() < kMostEntries &&
                         sm90_items(call, spec) > target.multiprocessors && !sm90_has_last_turn(call, spec, target);
    // Other results leave by the kernels that put sums together.
    const Results fp32 = fp32_results(call.problem);
    spec.fp32_results =
        (spec.dkv && spec.key_parts == spec.last_parts && (fp32.k || fp32.v)) || (spec.direct && fp32.q);
    spec.key_mask = is_mask_alone(call, operands, spec);
    spec.roles = clusters && !sm90_splits_columns(spec) && sm90_can_have_roles(spec);
    spec.tile_stores = !clusters && stores_tiles(call, operands, spec);
    spec.delay = has_dq && tiles.delay;
    spec.halves = has_dq && tiles.halves;
    spec.same_step = tiles.same_step;
    if (spec.ordered && !spec.bulk && !clusters) {
      continue;
    }
    if (spec.summed > 1 && (spec.direct || spec.key_parts != spec.last_parts)) {
      continue;
    }
    if (tiles.halves && tiles.bulk && (spec.direct || sm90_items(call, spec) < target.multiprocessors)) {
      continue;
    }
    spec.makes_rows = makes_rows(call, spec, wants);
    if (spec.makes_rows && sm90_backward_sizes(spec).bytes > target.shared_per_block) {
      spec.makes_rows = false;
    }
    kernel.threads = sm90_backward_sizes(spec).threads;
    kernel.shared_bytes = sm90_splits_columns(spec) ? sm90_split_backward_sizes(spec).bytes
                          : clusters                ? sm90_wide_backward_sizes(spec).bytes
                                                    : sm90_backward_sizes(spec).bytes;
    if (kernel.shared_bytes <= target.shared_per_block) {
      if (spec.summed > 1) {
        kernel.name = "sm90_summed_backward";
      }
      return true;
    }
  }
  return false;
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
  const bool clusters = sm90_in_clusters(spec);
  if (sm90_splits_columns(spec)) {
    kernel.file = "sm90/split_backward.cuh";
    kernel.name = "sm90_split_backward";
    spec.d = spec.dv = kWidest;
  } else if (clusters) {
    kernel.file = "sm90/wide_backward.cuh";
    kernel.name = "sm90_wide_backward";
    constexpr int kGrain = 64;
    spec.d = rounded(spec.d, kGrain);
    spec.dv = rounded(spec.dv, kGrain);
  } else if (sm90_is_wide(spec)) {
    constexpr int kGrain = 32;  // each warpgroup sums half of dQ's columns
    spec.d = rounded(spec.d, kGrain);
  } else if (spec.d == 112 && (spec.dv == kSm90Wide || (spec.dv == 112 && operands.odd_rows))) {
    spec.d = kSm90Wide;  // ptxas serialises products of 112 columns beside those of 128, or with odd rows (C7512)
  }
  spec.left_edge = spec.banded && call.problem.window_left >= 0;
  spec.odd_rows = operands.odd_rows;
  // In order the sums of one block leave in bulk. Where there is no room for that dq is another kernel's.
  const bool may_order = (clusters && !sm90_splits_columns(spec)) || !sm90_is_wide(spec);
  if ((wants.ordered && may_order && take_tiles(kernel, call, operands, target, wants, true)) ||
      take_tiles(kernel, call, operands, target, wants, false)) {
    return choice;
  }
  choice.why_not = "tiles beyond the shared memory of a block";
  return choice;
}

}  // namespace fovea::cuda
