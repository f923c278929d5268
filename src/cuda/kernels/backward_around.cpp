// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernels/backward_around.h"

#include <algorithm>

#include "cuda/device/generic/backward_sizes.h"

namespace fovea::cuda {
namespace {

Kernel kernel_of(const char* file, const char* name, const AroundSpec& spec) {
  Kernel kernel;
  kernel.file = file;
  kernel.name = name;
  kernel.spec = spec;
  return kernel;
}

void start(const Launcher& launcher, const Launch& launch) { launcher.launch_in_pieces(launch, launcher.args()); }

Start start_of_bias(int which) {
  return [which](const Launcher& launcher, const Launch& launch) {
    launcher.launch_in_pieces(launch, bias_gradient_args(launcher, which, launch.pieces));
  };
}

// Whether the gradient of bias (which = 0) or bias2 is added to what is there.
bool adds_bias(const Planner& planner, int which) {
  const Results results = fp32_results(planner.call().problem);
  return which == 0 ? results.bias : results.bias2;
}

void add_reduction(Planner& planner, const char* name, BiasTile type, int which, std::int64_t planes,
                   std::int64_t numbers) {
  constexpr std::int64_t kNumbers = 32;  // of a block
  AroundSpec spec = planner.around();
  spec.grad_bias = type;
  spec.fp32_results = adds_bias(planner, which);
  planner.add(kernel_of("around/backward_reduce.cuh", name, spec), planes * Planner::tiles_of(numbers, kNumbers),
              start_of_bias(which));
}

}  // namespace

void add_backward_prepare(Planner& planner, const AroundSpec& spec) {
  const math::Rows& rows = planner.call().rows;
  Kernel kernel = kernel_of("around/backward_prepare.cuh", "backward_prepare", spec);
  kernel.threads = kBackwardPrepareThreads;
  planner.add(kernel, rows.batch() * rows.heads_q * Planner::tiles_of(rows.limit_q, kRowPad),
              [](const Launcher& launcher, const Launch& launch) {
                // It reads out and do as the caller gave them.
                Args args = launcher.args();
                args.grad_out = Launcher::tensor(launcher.call().grad_out);
                args.head_dim_v = static_cast<int>(launcher.call().problem.head_dim_v);
                launcher.launch_in_pieces(launch, args);
              });
}

void add_backward_convert(Planner& planner, const AroundSpec& spec, std::int64_t blocks) {
  planner.add(kernel_of("around/backward_prepare.cuh", "backward_convert", spec), blocks, start);
}

void add_reduce_sink(Planner& planner) {
  AroundSpec spec = planner.around();
  spec.fp32_results = fp32_results(planner.call().problem).sink;
  planner.add(kernel_of("around/backward_reduce.cuh", "reduce_sink", spec), planner.call().rows.heads_q, start);
}

void add_reduce_columns(Planner& planner, BiasTile type, int which, std::int64_t planes, std::int64_t keys) {
  add_reduction(planner, "reduce_columns", type, which, planes, keys);
}

void add_reduce_rows(Planner& planner, BiasTile type, int which, std::int64_t planes, std::int64_t queries) {
  add_reduction(planner, "reduce_rows", type, which, planes, queries);
}

Args bias_gradient_args(const Launcher& launcher, int which, int chunks) {
  const Call& call = launcher.call();
  const Problem& p = call.problem;
  const bool first = which == 0;
  const Extents& e = (first ? p.bias : p.bias2).extents;
  const i64 planes = planes_of(p, e);
  Args args = launcher.args();
  args.grad_bias = Launcher::tensor(first ? call.grad_bias : call.grad_bias2);
  args.bias_rows = static_cast<int>(e.query ? p.seqlen_q : 1);
  args.bias_keys = static_cast<int>(e.key ? p.seqlen_k : 1);
  args.bias_list = static_cast<int>(p.batch() * p.heads_q / std::max<i64>(planes, 1));
  args.bias_chunks = chunks;
  args.bias_sum = launcher.region<float>(first ? Region::kBiasSum : Region::kBiasSum2);
  return args;
}

void reserve_bias_sum(Planner& planner, int which, int chunks, std::int64_t size) {
  if (chunks > 1) {
    planner.workspace().add(which == 0 ? Region::kBiasSum : Region::kBiasSum2,
                            chunks * size * std::int64_t{sizeof(float)});
  }
}

void add_bias_sum(Planner& planner, BiasTile type, int which, int chunks, std::int64_t planes, std::int64_t numbers) {
  constexpr std::int64_t kNumbers = 256;  // of a block
  if (chunks > 1) {
    AroundSpec spec = planner.around();
    spec.grad_bias = type;
    spec.fp32_results = adds_bias(planner, which);
    planner.add(kernel_of("generic/bias_gradient.cuh", "bias_gradient_sum", spec),
                planes * Planner::tiles_of(numbers, kNumbers), start_of_bias(which), 1, chunks);
  }
}

}  // namespace fovea::cuda
