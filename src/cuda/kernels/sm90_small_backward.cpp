// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernels/sm90_small_backward.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "cuda/device/sm90/small_backward_sizes.h"
#include "cuda/kernels/backward_around.h"
#include "cuda/launch/tensor_map.h"

namespace fovea::cuda {
namespace {

const char* why_not(const Call& call, const Operands& operands, const Target& target) {
  const Problem& p = call.problem;
  const math::Rows& rows = call.rows;
  const Features& s = operands.features;
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
  if (s.softcap || bool(s.positions) || s.shifted || s.mask || s.key_term || s.query_term ||
      s.bias2 != BiasTile::kNone || s.dropout != DropoutRule::kNone) {
    return "anything but a bias with queries and keys";
  }
  if (p.wide != Results{} || p.accumulate != Results{}) {
    return "results of fp32, or added to what is there";
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

// A plane: heads that share a bias (all of them where there is none). Warpgroups of a plane take its entries in turn.
struct Order {
  std::int64_t planes = 1;
  std::int64_t list = 0;      // entries of a plane
  std::int64_t blocks = 1;    // of a plane
  std::int64_t workers = 1;   // warpgroups of a plane
  math::Strides is_of_plane;  // not 0 in the dimensions that planes differ in
};
Order order_of(const Call& call, const Sm90SmallSpec& spec, const Target& target) {
  const Problem& p = call.problem;
  const std::int64_t groups = sm90_small_backward_sizes(spec).groups;
  Order order;
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

// Tensor maps, and which heads share a bias.
void start(const Launcher& launcher, const Launch& launch, const Order& order) {
  const auto& spec = launch.kernel.as<Sm90SmallSpec>();
  const Args& common = launcher.args();
  const math::Rows& rows = launcher.call().rows;
  Sm90SmallBackwardArgs args;
  const auto mapped = [&](const Tensor& tensor, i64 columns, int padded, i64 count) {
    return map_of_rows(rows, tensor, spec.type, columns, count, rows.heads_q, padded, kSmallRows);
  };
  const auto map = [&](TensorMap& to, Has& has, const Tensor& tensor, i64 columns, int padded, i64 count) {
    encode(launcher.driver(), to, has, mapped(tensor, columns, padded, count));
  };
  map(args.q, args.has_q, common.q, common.head_dim, spec.d, rows.rows_q);
  map(args.k, args.has_k, common.k, common.head_dim, spec.d, rows.rows_k);
  map(args.v, args.has_v, common.v, common.head_dim_v, spec.dv, rows.rows_k);
  map(args.grad_out, args.has_grad_out, common.grad_out, common.head_dim_v, spec.dv, rows.rows_q);
  map(args.out, args.has_out, common.out, common.out_dim_v, spec.dv, rows.rows_q);
  const std::array<std::tuple<TensorMap*, Has*, Mapped>, 3> results = {
      {{&args.grad_q, &args.has_grad_q, mapped(common.grad_q, common.out_dim, spec.d, rows.rows_q)},
       {&args.grad_k, &args.has_grad_k, mapped(common.grad_k, common.out_dim, spec.d, rows.rows_k)},
       {&args.grad_v, &args.has_grad_v, mapped(common.grad_v, common.out_dim_v, spec.dv, rows.rows_k)}}};
  args.store_tensors =
      common.vector_stores && std::all_of(results.begin(), results.end(), [](const auto& result) {
        const Mapped& to = std::get<2>(result);
        Has has;
        return to.tensor.data == nullptr || jit::why_no_tensor_map(to.tensor.data, shape_of(to, has)).empty();
      });
  for (const auto& [to, has, result] : results) {
    if (args.store_tensors && result.tensor.data != nullptr) {
      encode(launcher.driver(), *to, *has, result);
    }
  }
  args.planes = order.is_of_plane;
  args.count = static_cast<int>(order.planes);
  args.list = static_cast<int>(order.list);
  args.heads = static_cast<int>(order.is_of_plane.head != 0 ? 1 : rows.heads_q);
  args.batch2 = static_cast<int>(order.is_of_plane.batch2 != 0 ? 1 : rows.batch2);
  args.bias_sum = launcher.region<float>(Region::kBiasSum);
  launcher.launch(launch, common, args);
}

}  // namespace

Choice sm90_small_backward(const Call& call, const Operands& operands, const Target& target) {
  Choice choice;
  Kernel& kernel = choice.kernel;
  kernel.file = "sm90/small_backward.cuh";
  kernel.name = "sm90_small_backward";
  kernel.one_architecture = true;
  auto& spec = kernel.spec.emplace<Sm90SmallSpec>(Sm90SmallSpec{operands.features, {}});
  spec.arch = target.capability;
  choice.why_not = why_not(call, operands, target);
  if (choice.why_not != nullptr) {
    return choice;
  }
  spec.d = one_panel(spec.d);
  spec.dv = one_panel(spec.dv);
  spec.natural = false;
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
  const Order order = order_of(call, spec, target);
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

void add_sm90_small_backward(Planner& planner, const Kernel& kernel) {
  const auto& spec = kernel.as<Sm90SmallSpec>();
  const Order order = order_of(planner.call(), spec, planner.target());
  planner.add(kernel, order.planes * order.blocks,
              [order](const Launcher& launcher, const Launch& launch) { start(launcher, launch, order); });
  if (spec.grad_bias == BiasTile::kNone) {
    return;
  }
  constexpr std::int64_t kNumbers = std::int64_t{kSmallRows} * kSmallRows;
  planner.workspace().add(Region::kBiasSum, order.planes * order.workers * kNumbers * std::int64_t{sizeof(float)});
  Kernel sum;
  sum.file = "sm90/small_bias_sum.cuh";
  sum.name = "small_bias_sum";
  AroundSpec after = planner.around();
  after.grad_bias = spec.grad_bias;
  sum.spec = after;
  sum.threads = kSmallSumThreads;
  sum.one_architecture = true;
  planner.add(
      sum, order.planes * kSmallSumBlocks,
      [list = bias_list_of(planner.call().problem, 0)](const Launcher& launcher, const Launch& launch) {
        launcher.launch_in_pieces(launch, bias_gradient_args(launcher, list, launch.pieces));
      },
      1, static_cast<int>(order.workers));
}

}  // namespace fovea::cuda
