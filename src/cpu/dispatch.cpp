// SPDX-License-Identifier: Apache-2.0
//
// Which kernels run: the best instruction set that was built and that this machine has, or the one that
// FOVEA_CPU_ISA names.
#include <fmt/format.h>

#include "core/environment.h"
#include "core/fields.h"
#include "cpu/processor.h"
#include "cpu/schedule.h"

namespace fovea::cpu {
namespace {

struct Built {
  const Kernels* tables;  // by type of accumulation
  bool available;
  const char* needs;
};

#if FOVEA_X86
const Built* built(std::size_t& count) {
  static const Cpuid processor = Cpuid::of_this_machine();
  static const Built all[] = {{avx512::kernels, processor.avx512(), "AVX-512 F, BW, CD, DQ and VL"},
                              {avx2::kernels, processor.avx2(), "AVX2, FMA, F16C, BMI, BMI2, AES and PCLMUL"},
                              {portable::kernels, true, ""}};
  count = std::size(all);
  return all;
}
#else
const Built* built(std::size_t& count) {
  static const Built all[] = {{portable::kernels, true, ""}};
  count = std::size(all);
  return all;
}
#endif

const Kernels* tables() {
  std::size_t count = 0;
  const Built* all = built(count);
  const std::string& forced = environment().cpu_isa;
  std::string names;
  for (std::size_t n = 0; n < count; ++n) {
    const char* name = all[n].tables[0].name;
    if (forced.empty() ? all[n].available : forced == name) {
      if (!all[n].available) {
        throw Error(FOVEA_UNSUPPORTED,
                    fmt::format("FOVEA_CPU_ISA: '{}', which needs a processor with {}; accepted: what this machine has",
                                name, all[n].needs));
      }
      return all[n].tables;
    }
    names += fmt::format("{}{}", n > 0 ? ", " : "", name);
  }
  throw Error(FOVEA_INVALID_ARGUMENT, fmt::format("FOVEA_CPU_ISA: '{}'; accepted: {}", forced, names));
}

}  // namespace

const Kernels& kernels_for(DType type) { return tables()[type == DType::kFp64 ? 1 : 0]; }

std::string unavailable() {
  try {
    tables();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

std::vector<Isa> instruction_sets() {
  std::size_t count = 0;
  const Built* all = built(count);
  std::vector<Isa> sets;
  for (std::size_t n = 0; n < count; ++n) {
    sets.push_back({all[n].tables[0].name, all[n].available});
  }
  return sets;
}

Plan plan(const Call& call) {
  static const FieldNames unknown = unknown_fields<Problem>(kKnownFields);
  refuse_fields(call.problem, unknown);
  const bool forward = call.problem.direction == Direction::kForward;
  const Kernels& kernels = kernels_for(call.problem.type);
  const int most_threads = num_threads();
  const i64 parallelism = forward ? forward_parallelism(call, most_threads) : backward_parallelism(call);
  Plan plan;
  plan.isa = kernels.name;
  plan.threads = static_cast<int>(std::clamp<i64>(parallelism, 1, most_threads));
  plan.workspace = forward ? forward_workspace(call, plan.threads) : backward_workspace(call, plan.threads);
  const Tiles tiles = forward ? forward_tiles(call, plan.threads) : backward_tiles(call);
  plan.summary = fmt::format("{}, {} thread{}, tiles of {} queries x {} keys", plan.isa, plan.threads,
                             plan.threads == 1 ? "" : "s", tiles.rows, tiles.keys);
  return plan;
}

}  // namespace fovea::cpu
