// SPDX-License-Identifier: Apache-2.0
//
// What sm90_forward and sm90_schedule take for a Spec: warpgroups, threads, where what lies in shared memory. Asked by
// the planner on the host and by the kernels themselves, so that the two cannot disagree.
#pragma once

#include "cuda/device/generic/sizes.h"
#include "cuda/device/sm90/spec.h"
#include "cuda/device/tile/panels.h"
#include "cuda/device/tile/plan.h"

namespace fovea::cuda {

inline constexpr int kSm90ScheduleThreads = 256;

// ---- sm90_forward ----

// A mask of keys that warps prepare which do not copy, as 16 more columns of K, and its buffers.
inline constexpr int kSm90PreparingWarps = 3;
inline constexpr int kSm90PreparedBuffers = 4;
constexpr bool sm90_hides(const Sm90ForwardSpec& s) { return s.prepared && s.mask && s.key_mask && !natural_scores(s); }
// Steps that a mask of keys hides at either end are passed over.
constexpr bool sm90_skips(const Sm90ForwardSpec& s) { return s.mask && s.key_mask; }
// Tiles have parts of their keys.
constexpr bool sm90_has_parts(const Sm90ForwardSpec& s) { return s.split || s.joins; }
// The steps of a tile are found once, and lie beside its Q.
constexpr bool sm90_keeps_steps(const Sm90ForwardSpec& s) { return sm90_skips(s) || sm90_has_parts(s); }
// Whether the first step of a tile has code of its own. Otherwise it multiplies P by a tile of zeros: where many
// features make the code of a step long, one copy of it compiles faster, and the tensor cores wait anyway.
constexpr bool sm90_peels(const Sm90ForwardSpec& s) {
  constexpr int kMany = 5;
  return s.pairs ||  // the tile of zeros has no room
         2 * int{s.softcap} + s.positions.count() + int{s.key_term} + int{s.query_term} + int{s.mask} +
                 int{s.bias != BiasTile::kNone} + int{s.bias2 != BiasTile::kNone} <
             kMany;
}

// Whether O leaves from registers, not through the place of Q: with one buffer of Q the next tile's is loaded while
// this one ends. It takes many instructions. O of fp32 has no room there.
constexpr bool sm90_stores_directly(const Sm90ForwardSpec& s) {
  return s.fp32_results || sm90_has_parts(s) || (s.q_buffers == 1 && sm90_peels(s));
}

// Queries of a tile.
constexpr int sm90_forward_rows(int warps) { return 16 * warps; }

// Blocks that have a tile together, and the keys of a step of all of them: S.step is what one of them makes scores of.
constexpr int sm90_forward_blocks(const Sm90ForwardSpec& s) { return s.pairs ? 2 : 1; }
constexpr int sm90_step_keys(const Sm90ForwardSpec& s) { return s.step * sm90_forward_blocks(s); }
// Columns of out that all of them make.
constexpr int sm90_all_columns(const Sm90ForwardSpec& s) { return s.dv * sm90_forward_blocks(s); }

// Where all tiles take the same time a block may have every gridDim.x-th: no launch clears a counter before. By
// measuring (docs/design/tried.md) it pays from 65 to 128 columns without dropout, not for narrower and wider heads,
// three warpgroups, or another head_dim_v.
constexpr bool sm90_shares_tiles(const Sm90ForwardSpec& s) {
  constexpr int kNarrow = 64;
  constexpr int kWidest = 128;
  const bool equal = !s.banded && !s.ragged && !s.joins && !sm90_skips(s);
  return equal && s.dropout == DropoutRule::kNone && s.d == s.dv && s.d > kNarrow && s.d <= kWidest && s.warps == 8;
}

// K of pairs comes in parts of 128 columns. Each leaves as soon as it is multiplied, so that no scores can be formed
// again, and all steps take the exact way of the softmax.
constexpr int sm90_key_columns(const Sm90ForwardSpec& s) { return s.pairs ? 128 : s.d; }  // of a buffer
constexpr int sm90_key_parts(const Sm90ForwardSpec& s) { return s.d / sm90_key_columns(s); }
constexpr int sm90_key_buffers(const Sm90ForwardSpec& s);
// Those whose buffers are not yet released when all are multiplied.
constexpr int sm90_key_parts_left(const Sm90ForwardSpec& s) {
  const int parts = sm90_key_parts(s);
  return parts < sm90_key_buffers(s) ? parts : sm90_key_buffers(s);
}

// Of a pair, what a warp is told by the other block: numbers of its rows, in turn in two places, and weights.
inline constexpr int kSm90PairRows = 128;
inline constexpr int kSm90PairBarriers = 3;  // for each warp
constexpr int sm90_pair_weights(const Sm90ForwardSpec& s) { return s.step * 16 * 2; }
constexpr int sm90_pair_bytes(const Sm90ForwardSpec& s) { return 2 * kSm90PairRows + sm90_pair_weights(s); }

// Of the tiles whose Q is in shared memory, and of the next one.
inline constexpr int kSm90TilesBytes = 272;

struct Sm90ForwardSizes {
  int groups;   // warpgroups that compute
  int threads;  // with the one that copies
  int rows;     // queries of a tile
  int ctas;     // blocks a multiprocessor

  // Bytes of one buffer.
  int q, k, v, bias, bias2, key_term, hide;
  // Where the first of its buffers lies.
  int q_at, k_at, v_at, hide_at, ones_at, zeros_at, bias_at, bias2_at, key_term_at, pair_at, tiles_at, barriers_at;
  int bytes;  // all of it
};

// Panels of q, k, v and out.
constexpr int sm90_forward_panels(int columns) { return panels_of(columns, wide_panel_columns(columns)); }

// With so many buffers of parts of K.
constexpr Sm90ForwardSizes sm90_forward_sizes(const Sm90ForwardSpec& s, int key_buffers) {
  constexpr int kNumber = 2;  // bytes
  Sm90ForwardSizes x{};
  x.groups = s.warps / 4;
  x.threads = 128 * (x.groups + 1);
  x.rows = sm90_forward_rows(s.warps);
  x.ctas = x.groups == 1 ? s.ctas : 1;
  const int d = sm90_forward_panels(s.d) * wide_panel_columns(s.d);
  const int dv = sm90_forward_panels(s.dv) * wide_panel_columns(s.dv);
  x.q = whole_patterns(x.rows * (d > dv || s.pairs ? d : dv) * kNumber);  // of O, too, but for pairs
  const int columns_k = sm90_key_columns(s);
  x.k = whole_patterns(s.step * sm90_forward_panels(columns_k) * wide_panel_columns(columns_k) * kNumber);
  x.v = whole_patterns(sm90_step_keys(s) * dv * kNumber);
  x.bias = x.rows * s.step * bias_bytes(s.bias);
  x.bias2 = x.rows * s.step * bias_bytes(s.bias2);
  x.key_term = s.key_term ? s.step * 4 : 0;
  constexpr int kHideColumns = 16;
  x.hide = sm90_hides(s) ? whole_patterns(s.step * kHideColumns * kNumber) : 0;
  constexpr int kRings = 5;
  constexpr int kMostBuffers = 4;  // of a ring: Sm90Barriers has room for as many
  SharedPlan plan;
  x.q_at = plan.take(s.q_buffers, x.q);
  x.k_at = plan.take(key_buffers, x.k);
  x.v_at = plan.take(s.stages, x.v);
  x.hide_at = plan.take(kSm90PreparedBuffers, x.hide);
  x.ones_at = plan.take(x.hide > 0 ? 64 : 0, kHideColumns * kNumber);
  x.zeros_at = plan.take(sm90_peels(s) ? 0 : 1, whole_patterns(16 * dv * kNumber));
  x.bias_at = plan.take(s.planes, x.bias);
  x.bias2_at = plan.take(s.planes, x.bias2);
  x.key_term_at = plan.take(s.planes, x.key_term);
  x.pair_at = plan.take(s.pairs ? s.warps : 0, sm90_pair_bytes(s), 16);
  x.tiles_at = plan.take(1, kSm90TilesBytes);
  x.barriers_at = plan.barriers(2 * kRings * kMostBuffers + (s.pairs ? kSm90PairBarriers * s.warps : 0));
  x.bytes = plan.bytes;
  return x;
}

// Parts of K take what is left of shared memory.
constexpr int sm90_key_buffers(const Sm90ForwardSpec& s) {
  if (!s.pairs) {
    return s.stages;
  }
  constexpr int kMost = 4;
  constexpr int kLeast = 2;
  constexpr int kOfBlock = 227 * 1024;
  int count = kMost;
  while (count > kLeast && sm90_forward_sizes(s, count).bytes > kOfBlock) {
    --count;
  }
  return count;
}
constexpr Sm90ForwardSizes sm90_forward_sizes(const Sm90ForwardSpec& s) {
  return sm90_forward_sizes(s, sm90_key_buffers(s));
}

// Registers of a thread that computes, where those that copy have `others`: the rest of what a launch has.
constexpr int sm90_forward_registers(const Sm90ForwardSpec& s, int others) {
  const Sm90ForwardSizes sizes = sm90_forward_sizes(s);
  constexpr int kOfMultiprocessor = 64 * 1024;
  const int launched = kOfMultiprocessor / (sizes.threads * sizes.ctas) / 8 * 8;
  return (launched * (sizes.groups + 1) - others) / sizes.groups / 8 * 8;
}

// Biases come in panels of 128 bytes a row; in sm90_forward's shortest steps, those of 16 bits, of 64.
constexpr int bias_panel_columns(BiasTile bias) { return bias == BiasTile::kFp32 ? 32 : 64; }
constexpr int sm90_bias_panel(const Sm90ForwardSpec& s, BiasTile bias) {
  return s.step < 64 ? 32 : bias_panel_columns(bias);
}

// Something travels with K: biases, key terms.
constexpr bool sm90_has_planes(const Sm90ForwardSpec& s) {
  return s.bias != BiasTile::kNone || s.bias2 != BiasTile::kNone || s.key_term;
}

}  // namespace fovea::cuda
