// SPDX-License-Identifier: Apache-2.0
//
// Arguments of the backward for Hopper: a tensor map for each of q, do, k, v and the bias.
#include "cuda/config/sm90_backward.h"

#include <algorithm>
#include <string_view>

#include "cuda/device/sm90/backward_args.h"
#include "cuda/device/sm90/backward_sizes.h"
#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/launch/launcher.h"
#include "cuda/launch/tensor_map.h"
#include "math/band.h"
#include "math/softmax.h"

namespace fovea::cuda {

void Launcher::sm90_backward_mask(std::size_t number) {
  MaskTilesArgs args{region<u32>(Region::kMaskBits), region<u32>(Region::kMaskTiles), plan_.operands.mask_box};
  launch_with(number, plan_.launches[number].blocks, &args);
}

void Launcher::sm90_backward(std::size_t number) {
  const Spec& spec = plan_.launches[number].kernel.spec;
  const math::Rows& rows = call_.rows;
  const auto type = spec.type == Type::kBf16 ? jit::cu::TensorMapType::kBfloat16 : jit::cu::TensorMapType::kFloat16;
  const i64 batch1 = rows.packed() ? 1 : rows.batch1;
  const i64 batch2 = rows.packed() ? 1 : rows.batch2;
  Sm90BackwardArgs args;
  const auto map = [&](TensorMap& to, Has& has, const Tensor& tensor, i64 columns, int panel, i64 count, i64 heads,
                       int box) {
    encode(driver_, to, has, {tensor, type, columns, count, heads, batch2, batch1, panel, box});
  };
  const int group_keys = 64 * spec.tiles;
  const bool is_wide = std::string_view(plan_.launches[number].kernel.name) == "sm90_wide_backward";
  const int panel_d = is_wide ? sm90_wide_panel(spec.d) : sm90_backward_panel_d(spec);
  const int panel_v = is_wide ? panel_columns(spec.dv / 2) : sm90_backward_panel_v(spec);
  map(args.q, args.has_q, args_.q, args_.head_dim, panel_d, rows.rows_q, rows.heads_q, spec.step);
  map(args.grad_out, args.has_grad_out, args_.grad_out, args_.head_dim_v, panel_v, rows.rows_q, rows.heads_q,
      spec.step);
  map(args.k, args.has_k, args_.k, args_.head_dim, panel_d, rows.rows_k, rows.heads_k, group_keys);
  map(args.v, args.has_v, args_.v, args_.head_dim_v, panel_v, rows.rows_k, rows.heads_k, group_keys);
  // A packed bias has no more rows and keys than the longest sequences.
  const auto bias = [&](TensorMap& to, Has& has, const Tensor& tensor, BiasTile its_type) {
    if (its_type != BiasTile::kNone) {
      const auto map_type = its_type == BiasTile::kBf16   ? jit::cu::TensorMapType::kBfloat16
                            : its_type == BiasTile::kFp16 ? jit::cu::TensorMapType::kFloat16
                                                          : jit::cu::TensorMapType::kFloat32;
      encode(driver_, to, has,
             {tensor, map_type, rows.limit_k, rows.limit_q, rows.heads_q, rows.batch2, rows.batch1,
              bias_panel_columns(its_type), spec.step});
    }
  };
  bias(args.bias, args.has_bias, args_.bias, spec.bias);
  bias(args.bias2, args.has_bias2, args_.bias2, spec.bias2);
  if (spec.dbias_store) {
    constexpr int kPanel = 64;
    encode(driver_, args.grad_bias, args.has_grad_bias,
           {plan_.operands.grad_bias_pack >= 0 ? args_.bias : tensor(call_.grad_bias), type, call_.problem.seqlen_k,
            call_.problem.seqlen_q, rows.heads_q, rows.batch2, rows.batch1, kPanel, spec.step});
  }
  if (spec.mask) {
    args.mask = {region<u32>(Region::kMaskTiles), sm90_backward_mask_box(plan_.operands.mask_box).strides()};
  }
  const Sm90KeyOrder& order = plan_.key_order;
  args.key_blocks = static_cast<int>(order.key_blocks);
  args.blocks = static_cast<int>(order.items) * plan_.launches[number].pieces;
  args.heads_in_turn = static_cast<int>(order.heads_in_turn);
  args.last_turn = static_cast<int>(order.last_turn);
  args.heads_k = static_cast<int>(rows.heads_k);
  args.group = static_cast<int>(rows.heads_q / std::max<std::int64_t>(rows.heads_k, 1));
  args.batch2 = static_cast<int>(rows.batch2);
  const auto band = math::Band<int>::make(0, 0, args_.causal, args_.window_left, args_.window_right, false);
  args.low = band.low;
  args.high = band.high;
  args.scale_log2 = args_.scale * math::kLog2E;
  args.parts = key_parts(plan_.launches[number]);
  void* parameters[] = {&args_, &args};
  launch(number, plan_.launches[number].blocks, parameters, may_overlap(number));
}

// Of a launch of sm90_backward.
KeyParts Launcher::key_parts(const Launch& step) const {
  const Spec& spec = step.kernel.spec;
  KeyParts parts;
  if (spec.key_parts) {
    parts.count = step.pieces;
    parts.head_rows = static_cast<int>(plan_.key_order.head_rows);
    parts.rows = call_.rows.batch() * call_.rows.heads_k * parts.head_rows;
    parts.dk = region<float>(Region::kKeySums);
    if (parts.dk != nullptr) {
      parts.dv = parts.dk + parts.count * parts.rows * spec.d;
    }
  }
  return parts;
}

void Launcher::sm90_backward_parts(std::size_t number) {
  const auto main = std::find_if(plan_.launches.begin(), plan_.launches.end(),
                                 [](const Launch& step) { return step.step == Step::kSm90Backward; });
  KeyParts parts = key_parts(*main);
  args_.first_block = 0;
  void* parameters[] = {&args_, &parts};
  launch(number, plan_.launches[number].blocks, parameters, may_overlap(number));
}

}  // namespace fovea::cuda
