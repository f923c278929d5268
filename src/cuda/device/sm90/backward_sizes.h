// SPDX-License-Identifier: Apache-2.0
//
// What sm90_backward and sm90_summed_backward take for a Spec: warpgroups, threads, where what lies in shared memory.
// Asked by the planner on the host and by the kernels themselves, so that the two cannot disagree.
#pragma once

#include "cuda/device/args.h"
#include "cuda/device/generic/backward_sizes.h"
#include "cuda/device/generic/sizes.h"
#include "cuda/device/sm90/odd_rows.h"
#include "cuda/device/sm90/spec.h"
#include "cuda/device/tile/panels.h"
#include "cuda/device/tile/plan.h"

namespace fovea::cuda {

// A bias of 16 bits lies in the place of dS; others have buffers of their own.
constexpr bool sm90_bias_in_place(const Features& s) { return s.bias == BiasTile::kBf16 || s.bias == BiasTile::kFp16; }
constexpr int sm90_outer_bytes(const Features& s) {
  return (sm90_bias_in_place(s) ? 0 : bias_bytes(s.bias)) + bias_bytes(s.bias2);
}

// Where dK and dV take most registers the scores of a step are made in two parts, or P is packed to 16 bits
// before dP is made, and dS of P as packed: where scores are dot products, and where that was faster.
constexpr bool sm90_packs(const Features& s) {
  constexpr int kMostOfABand = 160;
  return s.d + s.dv > 256 && s.d + s.dv <= 320 && (!s.banded || s.d <= kMostOfABand) &&
         s.dropout == DropoutRule::kNone && !s.softcap && !s.mask && !s.key_term && !s.query_term &&
         !bool(s.positions) && s.bias == BiasTile::kNone && s.bias2 == BiasTile::kNone;
}
constexpr int sm90_step_parts(const Features& s) { return s.d + s.dv > 256 && !sm90_packs(s) ? 2 : 1; }
// Columns of a panel of Q and K. Where each warpgroup sums half of dQ's columns, panels divide these.
constexpr int sm90_backward_panel_d(const Sm90BackwardSpec& s) {
  return s.halves ? panel_columns(s.d / 2) : wide_panel_columns(s.d);
}
constexpr int sm90_backward_panel_v(const Features& s) { return wide_panel_columns(s.dv); }

constexpr Sm90BackwardSpec sm90_part_of_step(Sm90BackwardSpec spec, int parts) {
  spec.step /= parts;
  return spec;
}
// Where queries behind the end of their sequence may have scores of NaN, which a logsumexp of infinity does not hide:
// of a tile of bias that has rows there, or of a key's term, which may be NaN where no query that exists meets the key.
// Generic kernels: kHidesQueries (score/mask_edge.cuh).
template <auto S>
constexpr bool kMaskQueries = (S.ragged && (S.bias != BiasTile::kNone || S.bias2 != BiasTile::kNone)) ||
                              (S.key_term && !S.key_mask && (S.banded || (S.ragged && S.mask)));

// Steps of 80 queries, as many as registers and shared memory have room for at head_dim 128. A product has 64 rows, so
// dQ is computed transposed, 64 columns of it by each of two warpgroups (`halves`). In dq_sum the first 64 columns of
// all rows of the call come before the others, in groups of 8 queries: accumulators of 64 columns by 8 queries. So one
// bulk addition takes what a step has of them, in the last step of a sequence the groups that it has.
constexpr bool sm90_turns_dq(const Sm90BackwardSpec& s) { return s.step == kTurnedQueries; }
// Queries that leave at a time.
constexpr int sm90_leaving_rows(const Sm90BackwardSpec& s) { return sm90_turns_dq(s) ? s.step : 64; }
// That a warp converts at a time.
constexpr int sm90_converted_rows(const Sm90BackwardSpec& s) { return sm90_turns_dq(s) ? s.step : kConvertRows; }

// dq_sum is converted within the kernel, and the warps that compute add to it: a thread counts for them.
constexpr bool sm90_counts_sums(const Sm90BackwardSpec& s) { return s.converts && !s.bulk; }
// Which keys are next is told before they arrive, and they are fetched to L2.
constexpr bool sm90_tells_ahead(const Sm90BackwardSpec& s) { return s.tile_stores || sm90_counts_sums(s); }

// K, V, Q and dO of a block's first keys are loaded while the kernel before, which makes the row vectors, still runs:
// the kernels before that one have ended when it lets this one start. Not where keys need lengths or an order, nor
// where the thread that copies would spill more than it gains.
constexpr bool sm90_loads_ahead(const Sm90BackwardSpec& s) {
  return !s.ordered && !s.ragged && !s.same_step && !s.makes_rows && s.d + s.dv <= 256;
}

// Under a causal mask the first keys have the most queries. A few heads at a time begin with these and leave the short
// blocks for the end, where they fill the chip evenly; all heads at once would not stay in L2. Of ragged sequences the
// last heads do, where the host takes all for one length (kernels/sm90_backward_order.cpp) and so does not ask for the
// longest first; wider ones would spill more.
constexpr bool sm90_can_take_turns(const Sm90BackwardSpec& s) {
  constexpr int kWidest = 128;
  return s.banded && !s.ordered && s.summed == 1 && (!s.ragged || (s.d <= kWidest && s.dv <= kWidest));
}

// sm90_split_backward: two blocks of a cluster have the same keys, and half of the columns each.
inline constexpr int kSm90SplitKeys = 64;
constexpr bool sm90_splits_columns(const Sm90BackwardSpec& s) { return s.d > 256; }

// With odd rows: a warpgroup of its own stores dS where registers allow, else half of the one that copies, whose other
// warps align the bias.
constexpr bool sm90_stores_apart(const Sm90BackwardSpec& s) {
  return s.odd_rows && s.dbias_store && s.d <= 80 && s.dv <= 80;
}
constexpr int sm90_storing_warps(const Sm90BackwardSpec& s) {
  return !s.dbias_store ? 0 : sm90_stores_apart(s) ? 4 : s.odd_rows ? 2 : 1;
}
constexpr int sm90_aligning_warps(const Sm90BackwardSpec& s) {
  return !s.odd_rows ? 0 : s.dbias_store && !sm90_stores_apart(s) ? 1 : 3;
}

// Threads of a warp each that add dQ to its sums, where these leave in bulk. In an order, and where the first block
// stores, a sum has to arrive before it is counted, and one thread would hold the next sums up: it has the first of the
// places that sums leave from, another one the others. A place has one thread, which so meets each phase of its
// barrier. The second one is lost for the conversion of dq, which pays with long blocks alone (tile_stores;
// docs/design/tried.md). Where a warp stores dS, none is left.
constexpr int sm90_adding_warps(const Sm90BackwardSpec& s) {
  return !s.bulk ? 0 : (s.ordered || s.tile_stores) && !s.dbias_store ? 2 : 1;
}

struct Sm90BackwardSizes {
  int groups;   // warpgroups that compute
  int threads;  // with the one that copies, and the one that stores dS (sm90_stores_apart)
  int keys;     // of a block

  // Bytes of one buffer; `leaving`: a warpgroup's part of dQ on its way out; `sums`: of what blocks send of dS.
  int k, v, q, grad_out, grads, leaving, outer, outer2, rows, sums;
  // Where the first of its buffers lies. rows: logsumexp, then delta, then query terms, of every stage.
  int k_at, v_at, q_at, grad_out_at, out_at, grads_at, leaving_at, outer_at, outer2_at, sums_at, lse_at, delta_at,
      terms_at, barriers_at, number_at, loads_at, keys_at;
  int bytes;  // all of it
};

inline constexpr int kSm90LoadsBytes = 64;  // of what the thread that copies keeps
inline constexpr int kSm90RowWarps = 3;     // makes_rows: those that do
inline constexpr int kSm90KeysBytes = 16;   // tile_stores: where dK and dV of a warpgroup go

// Where its barriers lie, from the first on, and the number of the block of keys among them. A ring has at most four
// buffers.
struct Sm90BackwardBarrierPlan {
  static constexpr int kMostBuffers = 4;
  static constexpr int kMostGroups = 3;
  static constexpr int kMostOuter = 2;
  SharedPlan plan{};
  int kv_full = plan.barriers(1);
  int inputs_full = plan.barriers(kMostBuffers);
  int q_full = plan.barriers(kMostBuffers);
  int q_empty = plan.barriers(kMostBuffers);
  int bias_full = plan.barriers(kMostBuffers);
  int grads_full = plan.barriers(kMostBuffers);
  int grads_empty = plan.barriers(kMostBuffers);
  int leaving_full = plan.barriers(kMostGroups);
  int leaving_empty = plan.barriers(kMostGroups);
  int kv_empty = plan.barriers(1);
  int number = plan.take(2, 4);
  int number_full = plan.barriers(2);
  int sums_left = plan.barriers(1);
  int sums_full = plan.barriers(kMostBuffers);
  int sums_taken = plan.barriers(1);
  int outer_full = plan.barriers(kMostOuter);
  int outer_empty = plan.barriers(kMostOuter);
  int bytes = plan.bytes;

  constexpr Sm90BackwardBarrierPlan() {}  // NVRTC takes no aggregate whose members are computed from one another
};
inline constexpr Sm90BackwardBarrierPlan kSm90BackwardBarriers;

constexpr Sm90BackwardSizes sm90_backward_sizes(const Sm90BackwardSpec& s) {
  constexpr int kNumber = 2;  // bytes
  Sm90BackwardSizes x{};
  x.groups = s.warps / 4;
  x.threads = 128 * (x.groups + 1 + int{sm90_stores_apart(s)});
  x.keys = sm90_splits_columns(s) ? kSm90SplitKeys : 16 * s.warps * s.tiles;
  const int d = panels_of(s.d, sm90_backward_panel_d(s)) * sm90_backward_panel_d(s);
  const int dv = panels_of(s.dv, sm90_backward_panel_v(s)) * sm90_backward_panel_v(s);
  x.k = whole_patterns(x.keys * d * kNumber);
  x.v = whole_patterns(x.keys * dv * kNumber);
  x.q = whole_patterns(s.step * d * kNumber);
  x.grad_out = whole_patterns(s.step * dv * kNumber);
  x.grads = s.step * x.keys * kNumber;
  x.leaving = s.dq && s.bulk ? sm90_leaving_rows(s) * (s.halves ? s.d / 2 : s.d) * 4 : 0;
  x.rows = s.step * 4;
  x.outer = s.odd_rows              ? odd_tile(s.step, x.keys).bytes
            : sm90_bias_in_place(s) ? 0
                                    : s.step * x.keys * bias_bytes(s.bias);
  x.outer2 = s.step * x.keys * bias_bytes(s.bias2);
  x.sums = s.summed > 1 ? x.grads : 0;
  SharedPlan plan;
  x.k_at = plan.take(1, x.k);
  x.v_at = plan.take(1, x.v);
  x.q_at = plan.take(s.stages, x.q);
  x.grad_out_at = plan.take(s.stages, x.grad_out);
  x.out_at = plan.take(s.makes_rows ? s.stages : 0, x.grad_out);
  x.grads_at = plan.take(s.planes, x.grads);
  x.leaving_at = plan.take(x.groups, x.leaving);
  x.outer_at = plan.take(s.outer, x.outer);
  x.outer2_at = plan.take(s.outer, x.outer2);
  x.sums_at = plan.take(s.planes, x.sums);
  x.lse_at = plan.take(s.stages, x.rows);
  x.delta_at = plan.take(s.stages, x.rows);
  x.terms_at = plan.take(s.query_term ? s.stages : 0, x.rows);
  x.barriers_at = plan.take(1, kSm90BackwardBarriers.bytes);
  x.number_at = x.barriers_at + kSm90BackwardBarriers.number;
  x.loads_at = plan.take(1, kSm90LoadsBytes, 32);
  x.keys_at = plan.take(s.tile_stores ? x.groups : 0, kSm90KeysBytes, 16);
  x.bytes = plan.bytes;
  return x;
}

// What sm90_backward does by its Spec.
struct Sm90BackwardChoices {
  int threads;                               // that compute
  int parts, part;                           // of a step's scores; queries of one
  int panel_d, panel_v, panels_d, panels_v;  // columns of a panel of K and Q, of V and dO; how many
  int row_d, row_v;                          // bytes of a panel's row
  bool bias_in_place, outer, dropout;
  bool packs;      // P to 16 bits before dS is made
  bool dp_behind;  // with packs: dP's product comes behind P, as registers have no room for both
  // Products for dV and dK of one block of keys stay in flight during S and dP of the next, where registers allow.
  bool overlaps;
  // A block of keys that no query of the step meets is passed over. Elsewhere the branch makes ptxas wait for every
  // product (C7512).
  bool skips;
  // Operands that stay in registers, by 16 columns of V and K: reading shared memory is what limits the products.
  int held_v, held_k;
  int registers, registers_to_copy;
  int batch_to_convert;  // pieces of dq_sum that idle warps of the copying warpgroup read at once; 0: they have no part
  bool dq_later;         // dQ of a step is computed during the next
  bool valid;            // some kernel is compiled for these together
};

constexpr Sm90BackwardChoices sm90_backward_choices(const Sm90BackwardSpec& s) {
  const Sm90BackwardSizes sizes = sm90_backward_sizes(s);
  const bool two = sizes.groups == 2;
  const int wider = s.d > s.dv ? s.d : s.dv;
  Sm90BackwardChoices x{};
  x.threads = sizes.groups * 128;
  x.parts = sm90_step_parts(s);
  x.part = s.step / x.parts;
  x.panel_d = sm90_backward_panel_d(s);
  x.panel_v = sm90_backward_panel_v(s);
  x.row_d = x.panel_d * 2;
  x.row_v = x.panel_v * 2;
  x.panels_d = panels_of(s.d, x.panel_d);
  x.panels_v = panels_of(s.dv, x.panel_v);
  x.bias_in_place = sm90_bias_in_place(s);
  x.outer = sm90_outer_bytes(s) > 0;
  x.dropout = s.dropout != DropoutRule::kNone;
  x.overlaps = two && !sm90_packs(s) && (s.tiles * wider <= 96 || x.parts > 1);
  x.skips = s.banded && !s.same_step && !sm90_packs(s) && ((s.d <= 64 && s.tiles == 1) || (s.halves && x.parts == 1));
  const bool much =
      x.dropout || s.softcap || s.mask || s.key_term || s.query_term || bool(s.positions) || x.bias_in_place || x.outer;
  const bool holds =
      two && s.tiles == 1 && x.parts == 1 && s.d == s.dv && !much && (s.step == 64 ? s.d > 64 && s.d <= 96 : s.d <= 32);
  // At head_dim 128 P as packed leaves registers for some of V, or for 16 queries more a step, if nothing else takes
  // them. As much of V as serialises no product (C7512); in long blocks of keys what the copying warps have helps more
  // than it costs these.
  const bool packs_ahead =
      s.d == 128 && s.dv == 128 && two && s.tiles == 1 && !much && s.dkv && s.bulk && !s.same_step && !s.fp32_results;
  const int some_of_v = sm90_turns_dq(s) ? 0 : s.tile_stores ? 5 : 3;
  x.held_v = packs_ahead ? some_of_v : holds ? s.dv / 16 : 0;
  x.held_k = holds && s.d <= 80 ? s.d / 16 : 0;
  // What a launch of 3 (4) warpgroups has is 3 x 168 (4 x 128) registers: more would wait for ever.
  // With 24 the threads that copy and add dQ spill; `most`, because what computes would be serialised with 232 (C7512).
  x.dp_behind = sm90_packs(s);
  x.packs = x.dp_behind || packs_ahead;
  const bool most = x.parts > 1 || x.dp_behind || (packs_ahead && (sm90_turns_dq(s) || s.tile_stores)) ||
                    (s.same_step && (s.banded || much));
  x.registers = sizes.groups == 3 ? 160 : most ? 240 : 232;
  x.registers_to_copy = sizes.groups == 3 ? 32 : most ? 24 : 40;
  if (s.odd_rows) {
    x.registers = wider > 96 ? 224 : sm90_stores_apart(s) ? (wider > 64 ? 200 : 184) : 216;
    x.registers_to_copy = wider > 96 || (wider > 64 && sm90_stores_apart(s)) ? 56 : 72;
  }
  x.batch_to_convert = !s.converts || most ? 0 : sizes.groups == 3 ? 1 : 2;
  x.dq_later = s.dq && !s.same_step;
  x.valid =
      (two || sizes.groups == 3) && s.type != Type::kFp32 && s.dropout != DropoutRule::kTorchMemEfficient &&
      (s.dkv || s.dq) && s.d % 16 == 0 && s.dv % 16 == 0 && s.d + s.dv <= 320 &&
      (x.parts == 1 ||
       (two && s.tiles == 1 && s.step == 64 && (s.halves || !s.dq) && !s.delay && !x.outer && !s.query_term)) &&
      (s.step == 64 || (s.step == 128 && two) ||
       (sm90_turns_dq(s) && packs_ahead && s.halves && s.delay && !s.banded && !s.ragged &&
        s.key_parts == s.last_parts)) &&
      (!s.halves || (two && (s.step == 64 || sm90_turns_dq(s)) && s.d % 32 == 0)) && (!s.row_sum || !s.ordered) &&
      s.outer <= 2 && (!s.direct || (s.dq && !s.bulk && !s.ragged)) && (!s.key_parts || !s.column_sum) &&
      (!s.last_parts || (s.key_parts && s.dkv)) &&
      (!s.makes_rows || (s.direct && !s.query_term && !x.bias_in_place && !x.outer)) &&
      (!s.tile_stores || (s.dkv && !s.key_parts && !s.column_sum && !s.ragged)) &&
      (!s.same_step || (s.halves && s.bulk && s.dkv && !x.outer && !s.delay && !s.direct && !s.dbias_store &&
                        s.tiles == 1 && x.parts == 1 && s.planes >= 2)) &&
      (s.bulk ? s.dq : !s.ordered) &&
      (!s.converts || (s.dq && !s.direct && !x.bias_in_place && !x.outer && s.key_parts == s.last_parts)) &&
      (s.summed == 1 || (x.bias_in_place && s.dq && s.dkv && two && s.tiles == 1 && s.step == 64 && x.parts == 1 &&
                         !s.ragged && !s.softcap && !s.dbias_store && !s.direct && s.halves == s.same_step &&
                         !s.ordered && s.key_parts == s.last_parts && !s.stores_first && 8 % s.summed == 0)) &&
      (!s.odd_sums || s.summed > 1) &&
      (!s.adds_bias || ((x.bias_in_place || x.outer) && s.dq && s.dkv && s.step == 64 && x.parts == 1 && !x.packs &&
                        s.summed == 1 && !s.dbias_store && !s.ordered && !s.makes_rows)) &&
      (!s.dbias_store || (s.dq && x.bias_in_place && !s.softcap && !s.banded && !s.ragged)) &&
      (!s.odd_rows || (x.bias_in_place && !x.outer && s.dq && s.dkv && s.step == 64 && s.tiles == 1 && x.parts == 1 &&
                       !s.bulk && !s.ragged && !s.same_step && s.summed == 1 && !s.makes_rows)) &&
      s.stages <= 4 && s.planes <= 4;
  return x;
}

}  // namespace fovea::cuda
