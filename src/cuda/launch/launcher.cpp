// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/launcher.h"

#include <algorithm>

#include "cuda/config/packed_heads.h"

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
  a.alibi_slopes = tensor(call.alibi_slopes);
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
  if (p.direction == Direction::kBackward) {
    backward_arguments();
  }
}

Tensor Launcher::tensor(const Operand& operand, const View& view) const {
  return {operand.region == Region::kNone ? view.data : region<char>(operand.region), operand.strides};
}

void Launcher::run() {
  // What clears rows is the first of a plan that has it: so prepared for everybody, and run for those who ask for it.
  const bool may_clear = !plan_.launches.empty() && plan_.launches.front().step == Step::kClearRows;
  first_ = may_clear && !call_.problem.clear_rows ? 1 : 0;
  for (std::size_t number = first_; number < plan_.launches.size(); ++number) {
    switch (plan_.launches[number].step) {
      case Step::kPack:
        pack(number);
        break;
      case Step::kUnpack:
        unpack(number);
        break;
      case Step::kMask:
        mask(number);
        break;
      case Step::kTerm:
        term(number);
        break;
      case Step::kClear:
      case Step::kMeasure:
      case Step::kSplit:
        pairs(number);
        break;
      case Step::kClearRows:
        clear_rows(number);
        break;
      case Step::kSm90Schedule:
        sm90_schedule(number);
        break;
      case Step::kSm90Forward:
        sm90_forward(number);
        break;
      case Step::kForward:
      case Step::kCombine:
        forward(number);
        break;
      case Step::kBackwardPrepare:
        backward_prepare(number);
        break;
      case Step::kSm90BackwardMask:
        sm90_backward_mask(number);
        break;
      case Step::kSm90Backward:
        sm90_backward(number);
        break;
      case Step::kSm90BackwardParts:
        sm90_backward_parts(number);
        break;
      case Step::kBackward:
      case Step::kBackwardConvert:
      case Step::kBackwardDq:
      case Step::kReduceSink:
        main(number, args_);
        break;
      case Step::kSm90SmallBackward:
        sm90_small_backward(number);
        break;
      case Step::kSm90BiasGradient:
        sm90_bias_gradient(number);
        break;
      case Step::kBiasGradient:
      case Step::kBiasGradientSum:
      case Step::kSmallBiasSum:
      case Step::kReduceColumns:
      case Step::kReduceRows:
        bias_gradient(number);
        break;
    }
  }
}

void Launcher::launch_with(std::size_t number, std::int64_t blocks, void* arguments) {
  void* parameters[] = {arguments};
  launch(number, blocks, parameters, may_overlap(number));
}

bool Launcher::may_overlap(std::size_t number) const {
  constexpr int kFirstInGraphs = 12030;  // programmatic launches go into graphs since CUDA 12.3
  constexpr int kFirstCapability = 90;
  return number > first_ && plan_.target.capability >= kFirstCapability && driver_.version >= kFirstInGraphs;
}

void Launcher::launch(std::size_t number, std::int64_t blocks, void** parameters, bool programmatic) {
  const Launch& step = plan_.launches[number];
  jit::Launch launch;
  launch.grid = {static_cast<unsigned>(blocks), step.blocks_y, 1};
  launch.block = {static_cast<unsigned>(step.kernel.threads), 1, 1};
  launch.dynamic_shared = static_cast<unsigned>(step.kernel.shared_bytes);
  launch.stream = static_cast<jit::cu::Stream>(call_.stream);
  launch.programmatic = programmatic;
  jit::launch(driver_, kernels_[number], launch, parameters);
}

void Launcher::main(std::size_t number, Args& args) {
  constexpr std::int64_t kMostBlocks = (std::int64_t{1} << 31) - 1;
  const std::int64_t blocks = plan_.launches[number].blocks;
  for (args.first_block = 0; args.first_block < blocks; args.first_block += kMostBlocks) {
    launch_with(number, std::min(blocks - args.first_block, kMostBlocks), &args);
  }
}

void run(const Call& call, Executable& executable, void* workspace) {
  const jit::Driver& driver = jit::driver();
  const auto stream = static_cast<jit::cu::Stream>(call.stream);
  // First of all: a thread may come without a context, as PyTorch's for the backward, and the default stream is then
  // nobody's.
  const jit::ContextScope scope(driver, executable.device().ordinal, stream);
  if (!executable.loaded(scope.context())) {
    if (jit::is_capturing(driver, stream)) {
      throw Error(FOVEA_UNSUPPORTED,
                  "stream: a graph captures it and a kernel of this problem is not loaded yet; call fovea_prepare "
                  "(Python: fovea.prepare), or run the problem once, before the capture");
    }
    executable.load(scope);
  }
  check_arguments(call, driver);
  if (executable.plan().packs_heads) {
    const Call packed = with_packed_heads(call);
    Launcher(packed, executable, workspace).run();
  } else {
    Launcher(call, executable, workspace).run();
  }
}

}  // namespace fovea::cuda
