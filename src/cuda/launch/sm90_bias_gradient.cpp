// SPDX-License-Identifier: Apache-2.0
//
// Arguments of the gradient of a bias for Hopper: tensor maps of q, k, v and grad_out.
#include <algorithm>
#include <utility>

#include "cuda/device/sm90/bias_gradient_sizes.h"
#include "cuda/launch/launcher.h"
#include "cuda/launch/tensor_map.h"

namespace fovea::cuda {

void Launcher::sm90_bias_gradient(std::size_t number) {
  const Launch& step = plan_.launches[number];
  const Spec& spec = step.kernel.spec;
  const math::Rows& rows = call_.rows;
  const Sm90BiasGradientSizes sizes = sm90_bias_gradient_sizes(spec);
  const auto type = spec.type == Type::kBf16 ? jit::cu::TensorMapType::kBfloat16 : jit::cu::TensorMapType::kFloat16;
  const i64 batch1 = rows.packed() ? 1 : rows.batch1;
  const i64 batch2 = rows.packed() ? 1 : rows.batch2;
  bias_gradient_arguments(step);
  Args common = args_;
  if (step.which == 1) {
    std::swap(common.bias, common.bias2);
  }
  Sm90BiasGradientArgs args;
  const auto numbers = [&](const Tensor& tensor, i64 columns, int padded, i64 count, i64 heads, int box) {
    return Mapped{tensor, type, columns, count, heads, batch2, batch1, panel_columns(padded), box};
  };
  encode(driver_, args.q, args.has_q, numbers(args_.q, args_.head_dim, spec.d, rows.rows_q, rows.heads_q, sizes.rows));
  encode(driver_, args.k, args.has_k, numbers(args_.k, args_.head_dim, spec.d, rows.rows_k, rows.heads_k, spec.step));
  encode(driver_, args.v, args.has_v,
         numbers(args_.v, args_.head_dim_v, spec.dv, rows.rows_k, rows.heads_k, spec.step));
  encode(driver_, args.grad_out, args.has_grad_out,
         numbers(args_.grad_out, args_.head_dim_v, spec.dv, rows.rows_q, rows.heads_q, sizes.rows));
  if (spec.softcap) {
    args.small_cap = math::SmallCap<float>::make(call_.problem.scale_or_default(), call_.problem.softcap);
  }
  const i64 heads = rows.batch() * rows.heads_q;
  args.planes = static_cast<int>(common.bias_list > 0 ? heads / common.bias_list : 0);
  const auto tiles_of = [](i64 length, i64 size) { return (length + size - 1) / size; };
  args.tiles = static_cast<int>(tiles_of(common.bias_rows, sizes.rows) * tiles_of(common.bias_keys, spec.step) *
                                args.planes * common.bias_chunks);
  args.group = static_cast<int>(rows.heads_q / std::max<std::int64_t>(rows.heads_k, 1));
  args.flags = region<u32>(step.which == 0 ? Region::kBiasFlags : Region::kBiasFlags2);
  const bool again = !spec.bias_outside && args.flags != nullptr;
  args.ticket = again ? nullptr : args_.bias_tickets + step.which;
  args.waits_first = again || (number > 0 && plan_.launches[number - 1].step == Step::kBackwardPrepare);
  void* parameters[] = {&common, &args};
  launch(number, step.blocks, parameters, may_overlap(number));
}

}  // namespace fovea::cuda
