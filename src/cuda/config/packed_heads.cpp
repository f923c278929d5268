// SPDX-License-Identifier: Apache-2.0
#include "cuda/config/packed_heads.h"

#include <utility>

namespace fovea::cuda {

bool packs_heads(const Call& call) {
  const Problem& p = call.problem;
  if (p.direction != Direction::kForward || p.packed || p.has_used_q || p.seqlen_q != 1 || p.heads_k == 0 ||
      p.heads_q == p.heads_k) {
    return false;
  }
  // One query at the bottom right meets every key.
  const bool meets_every_key = !p.banded() || (!p.top_left && !p.positions && p.window_left < 0);
  const auto by_head = [](const PlaneTraits& traits, const View& view) {
    return traits && traits.extents.head && view.strides.head != 0;
  };
  return meets_every_key && p.alibi == Alibi::kNone && !p.sink && !call.dropout.active() &&
         !by_head(p.bias, call.bias) && !by_head(p.bias2, call.bias2) && !by_head(p.mask, call.mask);
}

Call with_packed_heads(const Call& call) {
  Call packed = call;
  Problem& p = packed.problem;
  const std::int64_t group = p.heads_q / p.heads_k;
  p.heads_q = p.heads_k;
  p.seqlen_q = group;
  p.causal = false;
  p.window_left = -1;
  p.window_right = -1;
  packed.rows.heads_q = p.heads_k;
  packed.rows.rows_q = group;
  packed.rows.limit_q = group;
  for (View* view : {&packed.q, &packed.out, &packed.lse}) {
    view->strides.row = view->strides.head;
    view->strides.head *= group;
  }
  for (const auto& [traits, view] :
       {std::pair(&p.bias, &packed.bias), std::pair(&p.bias2, &packed.bias2), std::pair(&p.mask, &packed.mask)}) {
    traits->extents.query = false;
    traits->extents.head = false;
    view->strides.row = 0;
    view->strides.head = 0;
  }
  return packed;
}

}  // namespace fovea::cuda
