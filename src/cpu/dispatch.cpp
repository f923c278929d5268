// SPDX-License-Identifier: Apache-2.0
//
// Which kernels run: the best instruction set that was built and that this machine has, or the one that
// FOVEA_CPU_ISA names.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/environment.h"
#include "core/fields.h"
#include "core/nearest.h"
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

// Products of bf16 by one object, everything else by another.
Built with_bf16(Built others, const char* name, const Kernels& bf16, bool available, const char* needs) {
  return {name, others.fp32, others.fp64, &bf16, available, needs};
}

std::vector<Built> find_built() {
  std::vector<Built> all;
#if FOVEA_X86
  const Cpuid processor = Cpuid::of_this_machine();
  constexpr const char* kAvx512 = "a processor with AVX-512 F, BW, CD, DQ and VL";
  const Built avx512 = vectors("avx512", avx512::kernels, processor.avx512(), kAvx512);
  all.push_back(with_bf16(avx512, "amx", amx::bf16_kernels, processor.amx() && system_knows_amx(),
                          "a processor with AMX's tiles of bf16, AVX-512 and AVX512-BF16, and a system that lets them "
                          "be used (Linux 5.16)"));
  const Built avx512_bf16 = with_bf16(avx512, "avx512_bf16", avx512_bf16::bf16_kernels, processor.avx512_bf16(),
                                      "a processor with AVX512-BF16 and AVX-512");
  const bool is_fast = processor.has_fast_bf16();
  all.push_back(is_fast ? avx512_bf16 : avx512);
  all.push_back(is_fast ? avx512 : avx512_bf16);
  if (&amx_emulated::bf16_kernels != nullptr) {
    all.push_back(with_bf16(avx512, "amx_emulated", amx_emulated::bf16_kernels, processor.avx512(), kAvx512));
  }
  all.push_back(vectors("avx2", avx2::kernels, processor.avx2(),
                        "a processor with AVX2, FMA, F16C, POPCNT, BMI, BMI2, AES and PCLMUL"));
  all.push_back(vectors("sse4", sse4::kernels, processor.sse4(), "a processor with SSE4.2 and POPCNT"));
#endif
#if FOVEA_ARM
  const Built neon = vectors("neon", neon::kernels, true, "");
  all.push_back(with_bf16(neon, "neon_bf16", neon_bf16::bf16_kernels, Hwcap::of_this_machine().neon_bf16(),
                          "a processor with Armv8.2 and its products of bf16 (FEAT_BF16)"));
  all.push_back(neon);
#else
  all.push_back(vectors("portable", portable::kernels, true, ""));
#endif
  return all;
}

// The first one that is available is taken.
const std::vector<Built>& built() {
  static const std::vector<Built> all = find_built();
  return all;
}

std::vector<std::string> available_names() {
  std::vector<std::string> names;
  for (const Built& one : built()) {
    if (one.available) {
      names.emplace_back(one.name);
    }
  }
  return names;
}

// Permission makes the signal frames of the whole process larger, so it is requested for bf16 alone, and once. A thread
// with a small stack for signals is a reason to refuse it.
bool tiles_are_refused([[maybe_unused]] const Built& one) {
#if FOVEA_X86
  if (one.bf16 == &amx::bf16_kernels && one.available) {
    static const bool refused = !ask_for_amx();
    return refused;
  }
#endif
  return false;
}

const Built& chosen(DType type) {
  const std::string& forced = environment().cpu_isa;
  for (const Built& one : built()) {
    if (forced.empty() ? !one.available : forced != one.name) {
      continue;
    }
    if (!one.available) {
      throw Error(FOVEA_UNSUPPORTED, fmt::format("FOVEA_CPU_ISA: '{}', which needs {}; accepted on this machine: {}",
                                                 one.name, one.needs, fmt::join(available_names(), ", ")));
    }
    if (type != DType::kBf16 || !tiles_are_refused(one)) {
      return one;
    }
    if (!forced.empty()) {
      throw Error(FOVEA_UNSUPPORTED,
                  fmt::format("FOVEA_CPU_ISA: '{}', whose tiles the operating system does not let this process use; "
                              "accepted: avx512_bf16, avx512 and what needs less",
                              one.name));
    }
  }
  const std::vector<std::string> there = available_names();
  const std::vector<std::string> near = nearest(forced, there);
  throw Error(FOVEA_INVALID_ARGUMENT,
              fmt::format("FOVEA_CPU_ISA: '{}'; accepted: {} (what this machine has){}", forced, fmt::join(there, ", "),
                          near.empty() ? "" : fmt::format("; did you mean {}?", near.front())));
}

}  // namespace

const Kernels& kernels_for(DType type) { return chosen(type)[type]; }

bool has_matrix_unit(DType type) {
  const Built& built = chosen(type);
  const Kernels& kernels = built[type];
  return &kernels != built.fp32 && &kernels != built.fp64;
}

std::string instruction_set() { return chosen(DType::kBf16).name; }

std::string unavailable() {
  if (environment().cpu_isa.empty()) {
    return "";
  }
  try {
    chosen(DType::kBf16);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

std::vector<Isa> instruction_sets() {
  std::vector<Isa> sets;
  for (const Built& one : built()) {
    const bool refused = tiles_are_refused(one);
    sets.push_back({one.name, one.available && !refused,
                    refused ? "tiles, which the operating system does not let this process use" : one.needs,
                    one.bf16 == one.fp32 ? "" : one.fp32->name});
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
  const DType type = call.problem.type;
  const bool is_short = type == DType::kBf16 || type == DType::kFp16;
  const i64 rows = call.rows.heads_q / std::max<i64>(call.rows.heads_k, 1) * call.rows.limit_q;
  const bool in_rows = forward && call.k.strides.col == 1 && call.v.strides.col == 1 &&
                       has_few_rows(rows, call.problem.head_dim, call.problem.head_dim_v, kernels.vector);
  plan.summary = fmt::format("{}, {} thread{}, tiles of {} queries x {} keys{}", plan.isa, plan.threads,
                             plan.threads == 1 ? "" : "s", tiles.rows, tiles.keys,
                             type == DType::kBf16 && has_matrix_unit(type) && !in_rows ? ", products of bf16"
                             : is_short                                                ? ", products in fp32"
                                                                                       : "");
  return plan;
}

}  // namespace fovea::cpu
