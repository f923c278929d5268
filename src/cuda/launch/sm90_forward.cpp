// SPDX-License-Identifier: Apache-2.0
//
// Arguments of the forward for Hopper: a tensor map for each of q, k, v, out and the biases, and the order of its
// tiles.
#include <algorithm>

#include "cuda/config/sm90_forward.h"

#include "cuda/device/sm90/args.h"
#include "cuda/device/sm90/forward_sizes.h"
#include "cuda/launch/launcher.h"
#include "cuda/launch/tensor_map.h"
#include "math/band.h"
#include "math/softmax.h"

namespace fovea::cuda {
void Launcher::sm90_schedule(std::size_t number) {
  char* const memory = region<char>(Region::kSchedule);
  Sm90ScheduleArgs args;
  args.schedule = reinterpret_cast<Schedule*>(memory);
  args.list = reinterpret_cast<ListedTile*>(memory + kSm90ListOffset);
  void* parameters[] = {&args_, &args};
  launch(number, plan_.launches[number].blocks, parameters, may_overlap(number));
}

void Launcher::sm90_forward(std::size_t number) {
  const Spec& spec = plan_.launches[number].kernel.spec;
  const math::Rows& rows = call_.rows;
  const Sm90Order& order = plan_.forward_order;
  const int tile = sm90_forward_sizes(spec).rows;
  const auto type = spec.type == Type::kBf16 ? jit::cu::TensorMapType::kBfloat16 : jit::cu::TensorMapType::kFloat16;
  const i64 batch1 = rows.packed() ? 1 : rows.batch1;
  const i64 batch2 = rows.packed() ? 1 : rows.batch2;
  Sm90ForwardArgs args;
  const auto numbers = [&](const Tensor& tensor, i64 columns, int padded, i64 count, i64 heads, int box) {
    return Mapped{tensor, type, columns, count, heads, batch2, batch1, wide_panel_columns(padded), box};
  };
  encode(driver_, args.q, args.has_q, numbers(args_.q, args_.head_dim, spec.d, rows.rows_q, rows.heads_q, tile));
  encode(driver_, args.k, args.has_k, numbers(args_.k, args_.head_dim, spec.d, rows.rows_k, rows.heads_k, spec.step));
  encode(driver_, args.v, args.has_v,
         numbers(args_.v, args_.head_dim_v, spec.dv, rows.rows_k, rows.heads_k, spec.step));
  // A packed bias has no more rows and keys than the longest sequences.
  const auto bias = [&](TensorMap& to, Has& has, const Tensor& tensor, BiasTile type) {
    if (type != BiasTile::kNone) {
      const auto its_type = type == BiasTile::kBf16   ? jit::cu::TensorMapType::kBfloat16
                            : type == BiasTile::kFp16 ? jit::cu::TensorMapType::kFloat16
                                                      : jit::cu::TensorMapType::kFloat32;
      encode(driver_, to, has,
             {tensor, its_type, rows.limit_k, rows.limit_q, rows.heads_q, rows.batch2, rows.batch1,
              sm90_bias_panel(spec, type), tile});
    }
  };
  bias(args.bias, args.has_bias, args_.bias, spec.bias);
  bias(args.bias2, args.has_bias2, args_.bias2, spec.bias2);

  // A warpgroup stores its 64 rows.
  constexpr int kGroupRows = 64;
  const Mapped out = numbers(args_.out, args_.out_dim_v, spec.dv, rows.rows_q, rows.heads_q, kGroupRows);
  args.store_tensor =
      args_.vector_stores && jit::why_no_tensor_map(out.tensor.data, shape_of(out, args.has_out)).empty();
  if (args.store_tensor) {
    encode(driver_, args.out, args.has_out, out);
  }

  if (plan_.workspace.has(Region::kSchedule)) {
    char* const memory = region<char>(Region::kSchedule);
    args.schedule = reinterpret_cast<Schedule*>(memory);
    args.list = reinterpret_cast<const ListedTile*>(memory + kSm90ListOffset);
  }
  args.tiles = static_cast<int>(order.tiles);
  args.row_tiles = order.row_tiles;
  args.batch = static_cast<int>(rows.batch());
  args.batch2 = static_cast<int>(rows.batch2);
  args.heads = static_cast<int>(rows.heads_q);
  args.group = static_cast<int>(rows.heads_q / std::max<std::int64_t>(rows.heads_k, 1));
  args.heads_together = order.heads_together;
  args.batch_inside = order.batch_inside;
  args.inside = order.batch_inside ? args.batch : args.heads;
  const auto band = math::Band<int>::make(0, 0, args_.causal, args_.window_left, args_.window_right, false);
  args.low = band.low;
  args.high = band.high;
  args.scale_of_cap = args_.softcap > 0 ? args_.scale / args_.softcap : 0;
  if (spec.softcap) {
    args.small_cap = math::SmallCap<float>::make(call_.problem.scale_or_default(), call_.problem.softcap);
  }
  args.scale_log2 = args_.scale * math::kLog2E;
  void* parameters[] = {&args_, &args};
  launch(number, plan_.launches[number].blocks, parameters, may_overlap(number));
}

}  // namespace fovea::cuda
