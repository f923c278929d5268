// SPDX-License-Identifier: Apache-2.0
//
// Arguments of the backward of short sequences for Hopper: tensor maps, and which heads share a bias.
#include "cuda/config/sm90_small_backward.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "cuda/device/sm90/small_backward_sizes.h"
#include "cuda/launch/launcher.h"
#include "cuda/launch/tensor_map.h"

namespace fovea::cuda {

void Launcher::sm90_small_backward(std::size_t number) {
  const Launch& step = plan_.launches[number];
  const Spec& spec = step.kernel.spec;
  const math::Rows& rows = call_.rows;
  const SmallOrder& order = plan_.small_order;
  const auto type = spec.type == Type::kBf16 ? jit::cu::TensorMapType::kBfloat16 : jit::cu::TensorMapType::kFloat16;
  Sm90SmallBackwardArgs args;
  const auto mapped = [&](const Tensor& tensor, i64 columns, int padded, i64 count) {
    return Mapped{tensor, type, columns, count, rows.heads_q, rows.batch2, rows.batch1, padded, kSmallRows};
  };
  const auto map = [&](TensorMap& to, Has& has, const Tensor& tensor, i64 columns, int padded, i64 count) {
    encode(driver_, to, has, mapped(tensor, columns, padded, count));
  };
  map(args.q, args.has_q, args_.q, args_.head_dim, spec.d, rows.rows_q);
  map(args.k, args.has_k, args_.k, args_.head_dim, spec.d, rows.rows_k);
  map(args.v, args.has_v, args_.v, args_.head_dim_v, spec.dv, rows.rows_k);
  map(args.grad_out, args.has_grad_out, args_.grad_out, args_.head_dim_v, spec.dv, rows.rows_q);
  map(args.out, args.has_out, args_.out, call_.problem.head_dim_v, spec.dv, rows.rows_q);
  const std::array<std::tuple<TensorMap*, Has*, Mapped>, 3> results = {
      {{&args.grad_q, &args.has_grad_q, mapped(args_.grad_q, args_.out_dim, spec.d, rows.rows_q)},
       {&args.grad_k, &args.has_grad_k, mapped(args_.grad_k, args_.out_dim, spec.d, rows.rows_k)},
       {&args.grad_v, &args.has_grad_v, mapped(args_.grad_v, args_.out_dim_v, spec.dv, rows.rows_k)}}};
  args.store_tensors =
      args_.vector_stores && std::all_of(results.begin(), results.end(), [](const auto& result) {
        const Mapped& to = std::get<2>(result);
        Has has;
        return to.tensor.data == nullptr || jit::why_no_tensor_map(to.tensor.data, shape_of(to, has)).empty();
      });
  for (const auto& [to, has, result] : results) {
    if (args.store_tensors && result.tensor.data != nullptr) {
      encode(driver_, *to, *has, result);
    }
  }
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
