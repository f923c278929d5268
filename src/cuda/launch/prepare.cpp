// SPDX-License-Identifier: Apache-2.0
//
// Arguments of the kernels in prepare.cuh (packing, mask bits, terms along keys and queries, fp32 as pairs of fp16) and
// clear_rows.cuh.
#include "core/clear_rows.h"
#include "cuda/launch/launcher.h"

namespace fovea::cuda {
namespace {

Source source(const View& view) { return {view.data, view.strides}; }

}  // namespace

void Launcher::pack(std::size_t number) {
  const Launch& step = plan_.launches[number];
  PackArgs args;
  for (unsigned i = 0; i < step.blocks_y; ++i) {
    const Pack& pack = plan_.operands.packs[static_cast<std::size_t>(step.which) + i];
    args.jobs[i] = {source(call_.*pack.from), region<void>(pack.to), pack.box, pack.columns};
  }
  launch_with(number, step.blocks, &args);
}

// The gradient of the bias, which lies where the bias was packed.
void Launcher::unpack(std::size_t number) {
  const Operands& operands = plan_.operands;
  const Pack& pack = operands.packs[static_cast<std::size_t>(operands.grad_bias_pack)];
  UnpackArgs args{region<unsigned short>(pack.to), call_.grad_bias.data, call_.grad_bias.strides, pack.box,
                  pack.columns};
  launch_with(number, plan_.launches[number].blocks, &args);
}

void Launcher::mask(std::size_t number) {
  MaskArgs args{source(call_.mask), region<u32>(Region::kMaskBits), plan_.operands.mask_box, call_.rows.limit_k};
  launch_with(number, plan_.launches[number].blocks, &args);
}

void Launcher::term(std::size_t number) {
  const Launch& step = plan_.launches[number];
  const Term& term = plan_.operands.terms[static_cast<std::size_t>(step.which)];
  TermArgs args;
  // Along the vector: keys, or queries.
  const auto along = [&](const View& view) {
    Source from = source(view);
    if (term.to == Region::kQueryTerm) {
      from.strides.col = from.strides.row;
    }
    from.strides.row = 0;
    return from;
  };
  for (const Member member : term.biases) {
    const View& view = call_.*member;
    args.biases[args.count++] = {along(view), static_cast<int>(tile_of(view.type))};
  }
  if (term.mask) {
    args.mask = along(call_.mask);
  }
  args.to = region<float>(term.to);
  args.box = term.box;
  args.columns = term.columns;
  launch_with(number, step.blocks, &args);
}

void Launcher::pairs(std::size_t number) {
  const Operands& operands = plan_.operands;
  const Problem& p = call_.problem;
  PairArgs args;
  args.rows = call_.rows;
  args.sizes = args_.sizes;
  const auto job = [&](int i, const View& view, const Operand& operand, i64 columns, int width) {
    args.jobs[i] = {source(view), region<unsigned short>(operand.region), operand.strides, columns, width};
  };
  job(0, call_.q, operands.q, p.head_dim, operands.head_dim);
  job(1, call_.k, operands.k, p.head_dim, operands.head_dim);
  job(2, call_.v, operands.v, p.head_dim_v, operands.head_dim_v);
  if (p.direction == Direction::kBackward) {
    job(3, call_.grad_out, operands.grad_out, p.head_dim_v, operands.head_dim_v);
  }
  launch_with(number, plan_.launches[number].blocks, &args);
}

void Launcher::clear_rows(std::size_t number) {
  constexpr u32 kMinusInfinity = 0xff800000;  // in fp32
  const Launch& step = plan_.launches[number];
  ClearRowsArgs args;
  args.rows = rows_to_clear(call_);
  args.parts = step.pieces;
  int count = 0;
  for (const RowOutput& output : outputs_to_clear(call_)) {
    args.jobs[count++] = {output.view->data,
                          output.view->strides,
                          output.heads,
                          output.columns,
                          static_cast<int>(size_of(output.view->type)),
                          output.is_lse ? kMinusInfinity : 0,
                          output.of_keys};
  }
  launch_with(number, step.blocks, &args);
}

}  // namespace fovea::cuda
