// SPDX-License-Identifier: Apache-2.0
//
// Arguments of the backward of short sequences for Hopper: tensor maps, and which heads share a bias.
#include "cuda/config/sm90_small_backward.h"

#include "cuda/device/sm90_small_backward_sizes.h"
#include "cuda/launch/launcher.h"
#include "cuda/launch/tensor_map.h"

namespace fovea::cuda {

void Launcher::sm90_small_backward(std::size_t number) {
  const Launch& step = plan_.launches[number];
  const Spec& spec = step.kernel.spec;
  const math::Rows& rows = call_.rows;
  const SmallOrder order = sm90_small_order(call_, spec, plan_.target);
  const auto type = spec.type == Type::kBf16 ? jit::cu::TensorMapType::kBfloat16 : jit::cu::TensorMapType::kFloat16;
  Sm90SmallBackwardArgs args;
  const auto map = [&](TensorMap& to, Has& has, const Tensor& tensor, i64 columns, int padded, i64 count) {
    encode(driver_, to, has,
           {tensor, type, columns, count, rows.heads_q, rows.batch2, rows.batch1, padded, kSmallRows});
  };
  map(args.q, args.has_q, args_.q, args_.head_dim, spec.d, rows.rows_q);
  map(args.k, args.has_k, args_.k, args_.head_dim, spec.d, rows.rows_k);
  map(args.v, args.has_v, args_.v, args_.head_dim_v, spec.dv, rows.rows_k);
  map(args.grad_out, args.has_grad_out, args_.grad_out, args_.head_dim_v, spec.dv, rows.rows_q);
  map(args.out, args.has_out, args_.out, call_.problem.head_dim_v, spec.dv, rows.rows_q);
  args.planes = order.is_of_plane;
  args.count = static_cast<int>(order.planes);
  args.list = static_cast<int>(order.list);
  args.heads = static_cast<int>(order.is_of_plane.head != 0 ? 1 : rows.heads_q);
  args.batch2 = static_cast<int>(order.is_of_plane.batch2 != 0 ? 1 : rows.batch2);
  args.bias_sum = region<float>(Region::kBiasSum);
  void* parameters[] = {&args_, &args};
  launch(number, step.blocks, parameters, may_overlap(number));
}

}  // namespace fovea::cuda
