// SPDX-License-Identifier: Apache-2.0
#include "cuda/config/sm90_small_backward.h"
#include "cuda/config/tensor_map_limits.h"

#include <algorithm>

#include "cuda/device/sm90/small_backward_sizes.h"

namespace fovea::cuda {
namespace {

const char* why_not(const Call& call, const Operands& operands, const Target& target) {
  const Problem& p = call.problem;
  const math::Rows& rows = call.rows;
  const Spec& s = operands.features;
  if (target.capability != 90) {
    return "compute capability other than 9.0";
  }
  if (s.type == Type::kFp32) {
    return "fp32";
  }
  if (rows.limit_q > kSmallRows || rows.limit_k > kSmallRows || s.d > kSmallRows || s.dv > kSmallRows) {
    return "more than 64 rows or columns";
  }
  if (s.ragged || rows.heads_q != rows.heads_k) {
    return "lengths that differ, or heads in groups";
  }
  if (s.softcap || s.alibi || s.mask || s.key_term || s.query_term || s.bias2 != BiasTile::kNone ||
      s.dropout != DropoutRule::kNone) {
    return "more than one bias";
  }
  if (p.need.sink || p.need.bias2 || (p.need.bias && s.bias == BiasTile::kNone)) {
    return "gradients of a sink, or of a bias without queries or keys";
  }
  if (rows.limit_q == 0 || rows.limit_k == 0 || p.head_dim == 0 || p.head_dim_v == 0 || rows.batch() == 0 ||
      rows.heads_q == 0 || rows.batch() * rows.heads_q >= kMostMapRows) {
    return "nothing to attend to, or 2^29 heads";
  }
  if (!has_row_map(operands.q.strides, rows.rows_q) || !has_row_map(operands.k.strides, rows.rows_k) ||
      !has_row_map(operands.v.strides, rows.rows_k) || !has_row_map(operands.grad_out.strides, rows.rows_q) ||
      !has_row_map(call.out.strides, rows.rows_q) ||
      !is_aligned(call, call.out, rows.heads_q, rows.rows_q, p.head_dim_v)) {
    return "strides that no tensor map has";
  }
  return nullptr;
}

// Columns of a tile: one panel.
int one_panel(int columns) { return columns <= 16 ? 16 : columns <= 32 ? 32 : 64; }

}  // namespace

Choice sm90_small_backward(const Call& call, const Operands& operands, const Target& target) {
  Choice choice;
  Kernel& kernel = choice.kernel;
  kernel.file = "sm90/small_backward.cuh";
  kernel.name = "sm90_small_backward";
  kernel.one_architecture = true;
  Spec& spec = kernel.spec;
  spec = operands.features;
  spec.arch = target.capability;
  choice.why_not = why_not(call, operands, target);
  if (choice.why_not != nullptr) {
    return choice;
  }
  spec.d = one_panel(spec.d);
  spec.dv = one_panel(spec.dv);
  spec.natural = false;
  spec.tiles = 1;
  spec.step = kSmallRows;
  spec.grad_bias = call.problem.need.bias ? spec.bias : BiasTile::kNone;
  const bool narrow = std::max(spec.d, spec.dv) <= 32 && spec.bias != BiasTile::kFp32;
  if (narrow && spec.bias == BiasTile::kNone) {
    spec.warps = 16;
    spec.stages = 2;
  } else {
    spec.warps = narrow ? 12 : 8;
    spec.stages = narrow ? 3 : 2;
  }
  const Sm90SmallBackwardSizes sizes = sm90_small_backward_sizes(spec);
  kernel.threads = sizes.threads;
  kernel.shared_bytes = sizes.bytes;
  if (sizes.bytes > target.shared_per_block) {
    choice.why_not = "tiles beyond the shared memory of a block";
    return choice;
  }
  // A block has one plane.
  const SmallOrder order = sm90_small_order(call, spec, target);
  if (order.list < 2 * sizes.groups && order.planes > target.multiprocessors) {
    choice.why_not = "a bias that few heads share";
  }
  // Every warpgroup leaves a sum of its own.
  constexpr std::int64_t kMostBytes = std::int64_t{48} << 20;
  constexpr std::int64_t kBytes = std::int64_t{kSmallRows} * kSmallRows * std::int64_t{sizeof(float)};
  if (spec.grad_bias != BiasTile::kNone && order.planes * order.workers * kBytes > kMostBytes) {
    choice.why_not = "a bias with so many planes that sums take much memory";
  }
  return choice;
}

SmallOrder sm90_small_order(const Call& call, const Spec& spec, const Target& target) {
  const Problem& p = call.problem;
  const std::int64_t groups = sm90_small_backward_sizes(spec).groups;
  SmallOrder order;
  if (spec.bias != BiasTile::kNone) {
    const Extents& e = p.bias.extents;
    order.is_of_plane = {e.batch1 ? 1 : 0, e.batch2 ? 1 : 0, e.head ? 1 : 0, 0, 0};
    order.planes = planes_of(p, e);
  }
  order.list = p.batch() * p.heads_q / std::max<std::int64_t>(order.planes, 1);
  order.blocks = std::clamp<std::int64_t>(target.multiprocessors / std::max<std::int64_t>(order.planes, 1), 1,
                                          std::max<std::int64_t>((order.list + groups - 1) / groups, 1));
  order.workers = order.blocks * groups;
  return order;
}

}  // namespace fovea::cuda
