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
  const char* name;
  const Kernels* fp32;
  const Kernels* fp64;
  const Kernels* bf16;
  bool available;
  const char* needs;

  const Kernels& operator[](DType type) const {
    return *(type == DType::kFp64 ? fp64 : type == DType::kBf16 ? bf16 : fp32);  // fp16 is computed in fp32
  }
};

Built vectors(const char* name, const Kernels (&tables)[2], bool available, const char* needs) {
  return {name, &tables[0], &tables[1], &tables[0], available, needs};
}

#if FOVEA_X86
// A matrix unit for bf16, and AVX-512 for everything else.
Built amx_with(const char* name, const Kernels& bf16, bool available) {
  return {name,  &avx512::kernels[0], &avx512::kernels[1],
          &bf16, available,           "AMX's tiles of bf16, AVX-512 and AVX512-BF16"};
}
#endif

std::vector<Built> find_built() {
  std::vector<Built> all;
#if FOVEA_X86
  const Cpuid processor = Cpuid::of_this_machine();
  all.push_back(vectors("avx512", avx512::kernels, processor.avx512(), "AVX-512 F, BW, CD, DQ and VL"));
  // After it, so only where it is named: on a processor with AMX no whole run of the tests has been made yet.
  all.push_back(amx_with("amx", amx::bf16_kernels, processor.amx()));
  if (&amx_emulated::bf16_kernels != nullptr) {
    all.push_back(amx_with("amx_emulated", amx_emulated::bf16_kernels, processor.avx512()));
  }
  all.push_back(vectors("avx2", avx2::kernels, processor.avx2(), "AVX2, FMA, F16C, BMI, BMI2, AES and PCLMUL"));
#endif
  all.push_back(vectors("portable", portable::kernels, true, ""));
  return all;
}

// The first one that is available is taken.
const std::vector<Built>& built() {
  static const std::vector<Built> all = find_built();
  return all;
}

const Built& chosen() {
  const std::string& forced = environment().cpu_isa;
  std::string names;
  for (const Built& one : built()) {
    if (forced.empty() ? one.available : forced == one.name) {
      if (!one.available) {
        throw Error(FOVEA_UNSUPPORTED,
                    fmt::format("FOVEA_CPU_ISA: '{}', which needs a processor with {}; accepted: what this machine has",
                                one.name, one.needs));
      }
      return one;
    }
    names += fmt::format("{}{}", names.empty() ? "" : ", ", one.name);
  }
  throw Error(FOVEA_INVALID_ARGUMENT, fmt::format("FOVEA_CPU_ISA: '{}'; accepted: {}", forced, names));
}

}  // namespace

const Kernels& kernels_for(DType type) {
  const Built& built = chosen();
#if FOVEA_X86
  // Permission makes the signal frames of the whole process larger, so it is requested by the first problem in bf16.
  if (&built[type] == &amx::bf16_kernels) {
    static const bool permitted = ask_for_amx();
    if (!permitted) {
      throw Error(FOVEA_UNSUPPORTED,
                  "FOVEA_CPU_ISA: 'amx', whose tiles the operating system does not let this process use");
    }
  }
#endif
  return built[type];
}

bool has_matrix_unit(DType type) {
  const Built& built = chosen();
  return &built[type] != built.fp32 && &built[type] != built.fp64;
}

std::string unavailable() {
  try {
    chosen();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

std::vector<Isa> instruction_sets() {
  std::vector<Isa> sets;
  for (const Built& one : built()) {
    sets.push_back({one.name, one.available});
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
