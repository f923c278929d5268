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

Start start_of_bias(const BiasList& list) {
  return [list](const Launcher& launcher, const Launch& launch) {
    launcher.launch_in_pieces(launch, bias_gradient_args(launcher, list, launch.pieces));
  };
}

// Whether the gradient is added to what is there.
bool merges_bias(const Planner& planner, const BiasList& list) {
  const Results results = fp32_results(planner.call().problem);
  return list.which == 0 ? results.bias : results.bias2;
}

// `numbers`: of a plane.
void add_reduction(Planner& planner, const char* name, BiasTile type, const BiasList& list, std::int64_t numbers) {
  constexpr std::int64_t kNumbers = 32;  // of a block
  AroundSpec spec = planner.around();
  spec.grad_bias = type;
  spec.fp32_results = merges_bias(planner, list);
  planner.add(kernel_of("around/backward_reduce.cuh", name, spec), list.planes * Planner::tiles_of(numbers, kNumbers),
              start_of_bias(list));
}

}  // namespace

BiasList bias_list_of(const Problem& problem, int which) {
  const Extents& e = (which == 0 ? problem.bias : problem.bias2).extents;
  const std::int64_t planes = planes_of(problem, e);
  return {.which = which,
          .planes = planes,
          .entries = planes > 0 ? problem.batch() * problem.heads_q / planes : 0,
          .queries = e.query ? problem.seqlen_q : 1,
          .keys = e.key ? problem.seqlen_k : 1};
}

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

void add_reduce_columns(Planner& planner, BiasTile type, const BiasList& list) {
  add_reduction(planner, "reduce_columns", type, list, list.keys);
}

void add_reduce_rows(Planner& planner, BiasTile type, const BiasList& list) {
  add_reduction(planner, "reduce_rows", type, list, list.queries);
}

Args bias_gradient_args(const Launcher& launcher, const BiasList& list, int chunks) {
  const bool first = list.which == 0;
  Args args = launcher.args();
  args.grad_bias = Launcher::tensor(first ? launcher.call().grad_bias : launcher.call().grad_bias2);
  args.bias_rows = static_cast<int>(list.queries);
  args.bias_keys = static_cast<int>(list.keys);
  args.bias_list = static_cast<int>(list.entries);
  args.bias_chunks = chunks;
  args.bias_sum = launcher.region<float>(first ? Region::kBiasSum : Region::kBiasSum2);
  return args;
}

std::int64_t most_bias_sums(const Call& call, int d) { return 3 * padded_rows(call.rows) * call.rows.heads_q * d / 2; }

void reserve_bias_sum(Planner& planner, const BiasList& list, int chunks) {
  if (chunks > 1) {
    planner.workspace().add(list.which == 0 ? Region::kBiasSum : Region::kBiasSum2,
                            chunks * list.planes * list.queries * list.keys * std::int64_t{sizeof(float)});
  }
}

void add_bias_sum(Planner& planner, BiasTile type, const BiasList& list, int chunks) {
  constexpr std::int64_t kNumbers = 256;  // of a block
  AroundSpec spec = planner.around();
  spec.grad_bias = type;
  spec.fp32_results = merges_bias(planner, list);
  planner.add(kernel_of("generic/bias_gradient.cuh", "bias_gradient_sum", spec),
              list.planes * Planner::tiles_of(list.queries * list.keys, kNumbers), start_of_bias(list), 1, chunks);
}

}  // namespace fovea::cuda
