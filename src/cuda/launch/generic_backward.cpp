// SPDX-License-Identifier: Apache-2.0
//
// Arguments of the backward's kernels, what goes before and after them, and the gradients of biases.
#include <algorithm>

#include "cuda/device/generic/sizes.h"
#include "cuda/launch/launcher.h"
#include "math/softmax.h"

namespace fovea::cuda {

void Launcher::backward_arguments() {
  Args& a = args_;
  Spec spec = plan_.operands.features;
  spec.natural = spec.natural || spec.type == Type::kFp32;
  a.grad_out = tensor(plan_.operands.grad_out, call_.grad_out);
  a.grad_lse = tensor(call_.grad_lse);
  a.row_lse = region<float>(Region::kRowLse);
  a.row_delta = region<float>(Region::kRowDelta);
  a.row_term = region<float>(Region::kRowTerm);
  a.dq_sum = region<float>(Region::kDqSum);
  a.turns = region<u32>(Region::kTurns);
  a.bias_tickets = region<u32>(Region::kSchedule);
  a.grad_q = tensor(call_.grad_q);
  a.grad_k = tensor(call_.grad_k);
  a.grad_v = tensor(call_.grad_v);
  a.lse_factor = natural_scores(spec) ? 1 : math::kLog2E;
  a.row_sum = region<float>(Region::kRowSum);
  a.sink_sum = region<float>(Region::kSinkSum);
  a.grad_sink = static_cast<float*>(call_.grad_sink.data);
  a.grad_sink_stride = call_.grad_sink.strides.head;
  a.column_sum = region<float>(Region::kColumnSum);
  a.column_pitch = call_.rows.limit_k;
}

// It reads out and do as the caller gave them.
void Launcher::backward_prepare(std::size_t number) {
  Args args = args_;
  args.grad_out = tensor(call_.grad_out);
  args.head_dim_v = static_cast<int>(call_.problem.head_dim_v);
  main(number, args);
}

void Launcher::bias_gradient(std::size_t number) {
  bias_gradient_arguments(plan_.launches[number]);
  main(number, args_);
}

void Launcher::bias_gradient_arguments(const Launch& step) {
  const Problem& p = call_.problem;
  const bool first = step.which == 0;
  const Extents& e = (first ? p.bias : p.bias2).extents;
  const i64 planes = planes_of(p, e);
  args_.grad_bias = tensor(first ? call_.grad_bias : call_.grad_bias2);
  args_.bias_rows = static_cast<int>(e.query ? p.seqlen_q : 1);
  args_.bias_keys = static_cast<int>(e.key ? p.seqlen_k : 1);
  args_.bias_list = static_cast<int>(p.batch() * p.heads_q / std::max<i64>(planes, 1));
  args_.bias_chunks = step.pieces;
  args_.bias_sum = region<float>(first ? Region::kBiasSum : Region::kBiasSum2);
}

}  // namespace fovea::cuda
