// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/launcher.h"

#include <algorithm>

#include "cuda/config/packed_heads.h"
#include "cuda/device/generic/sizes.h"
#include "math/softmax.h"

namespace fovea::cuda {

Launcher::Launcher(const Call& call, const Executable& executable, void* workspace)
    : call_(call),
      plan_(executable.plan()),
      kernels_(executable.kernels()),
      driver_(jit::driver()),
      workspace_(static_cast<char*>(workspace)) {
  const Problem& p = call.problem;
  const Operands& operands = plan_.operands;
  Args& a = args_;
  a.rows = call.rows;
  a.head_dim = operands.head_dim;
  a.head_dim_v = operands.head_dim_v;
  a.out_dim = static_cast<int>(p.head_dim);
  a.out_dim_v = static_cast<int>(p.head_dim_v);
  a.vector_stores = operands.vector_stores;
  a.scale = static_cast<float>(p.scale_or_default());
  a.softcap = static_cast<float>(p.softcap);
  a.causal = p.causal;
  a.top_left = p.top_left;
  a.window_left = p.window_left;
  a.window_right = p.window_right;
  a.q = tensor(operands.q, call.q);
  a.k = tensor(operands.k, call.k);
  a.v = tensor(operands.v, call.v);
  a.out = tensor(call.out);
  a.lse = tensor(call.lse);
  a.bias = tensor(operands.bias, call.bias);
  a.bias2 = tensor(operands.bias2, call.bias2);
  a.mask = tensor(operands.mask, call.mask);
  a.key_term = tensor(operands.key_term, {});
  a.query_term = tensor(operands.query_term, {});
  a.positions.alibi_slopes = tensor(call.alibi_slopes);
  a.sink = static_cast<const float*>(call.sink.data);
  a.sink_stride = call.sink.strides.head;
  a.rng = call.dropout.rng;
  a.drop_threshold = call.dropout.threshold;
  a.drop_p = call.dropout.p;
  a.keep_scale = static_cast<float>(call.dropout.factor());
  a.seed = {call.dropout.seed, call.seed_ptr};
  a.offset = {call.dropout.offset, call.offset_ptr};
  a.dropout_plane = static_cast<i64>(static_cast<u64>(p.seqlen_q) * static_cast<u64>(p.seqlen_k));
  a.padded_rows = padded_rows(call.rows);
  a.sizes = region<u32>(Region::kSizes);
  a.shard.has_positions = p.positions;
  a.shard.position_q = p.position_q;
  a.shard.position_k = p.position_k;
  a.shard.positions_q = call.positions_q;
  a.shard.positions_k = call.positions_k;
  a.shard.streams = tensor(call.streams);
  const auto result = [](const View& view) { return Result{view.type == DType::kFp32, view.accumulate}; };
  a.results = {result(call.out), result(call.grad_q), result(call.grad_k), result(call.grad_v)};
  if (p.direction == Direction::kBackward) {
    backward_arguments();
  }
  first_ = plan_.clears_rows && !p.clear_rows ? 1 : 0;
}

void Launcher::backward_arguments() {
  Args& a = args_;
  Features spec = plan_.operands.features;
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

Tensor Launcher::tensor(const Operand& operand, const View& view) const {
  return {operand.region == Region::kNone ? view.data : region<char>(operand.region), operand.strides};
}

void Launcher::run() const {
  for (std::size_t number = first_; number < plan_.launches.size(); ++number) {
    plan_.launches[number].start(*this, plan_.launches[number]);
  }
}

void Launcher::enqueue(const Launch& launch, std::int64_t blocks, void** parameters) const {
  constexpr int kFirstInGraphs = 12030;  // programmatic launches go into graphs since CUDA 12.3
  constexpr int kFirstCapability = 90;
  const auto number = static_cast<std::size_t>(&launch - plan_.launches.data());
  jit::Launch to;
  to.grid = {static_cast<unsigned>(blocks), launch.blocks_y, 1};
  to.block = {static_cast<unsigned>(launch.kernel.threads), 1, 1};
  to.dynamic_shared = static_cast<unsigned>(launch.kernel.shared_bytes);
  to.stream = static_cast<jit::cu::Stream>(call_.stream);
  // The first of a call comes after work of others, which may not end when it begins.
  to.programmatic = number > first_ && plan_.target.capability >= kFirstCapability && driver_.version >= kFirstInGraphs;
  jit::launch(driver_, kernels_[number], to, parameters);
}

void Launcher::launch_in_pieces(const Launch& launch, Args args) const {
  constexpr std::int64_t kMostBlocks = (std::int64_t{1} << 31) - 1;
  void* parameters[] = {&args};
  for (args.first_block = 0; args.first_block < launch.blocks; args.first_block += kMostBlocks) {
    enqueue(launch, std::min(launch.blocks - args.first_block, kMostBlocks), parameters);
  }
}

void run(const Call& call, Executable& executable, void* workspace) {
  const jit::Driver& driver = jit::driver();
  const auto stream = static_cast<jit::cu::Stream>(call.stream);
  // First of all: a thread may come without a context, as PyTorch's for the backward does, and the default stream then
  // belongs to no context.
  const jit::ContextScope scope(driver, executable.device().ordinal, stream);
  if (!executable.loaded(scope.context())) {
    if (jit::is_capturing(driver, stream)) {
      throw Error(FOVEA_UNSUPPORTED,
                  "stream: a graph captures it and a kernel of this problem is not loaded yet; call fovea_prepare "
                  "(Python: fovea.prepare), or run the problem once, before the capture");
    }
    executable.load(scope);
  }
  if (checks_arguments()) {
    check_arguments(call, driver);
  }
  if (executable.plan().packs_heads) {
    const Call packed = with_packed_heads(call);
    Launcher(packed, executable, workspace).run();
  } else {
    Launcher(call, executable, workspace).run();
  }
}

}  // namespace fovea::cuda
