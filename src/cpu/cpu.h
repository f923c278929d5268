// SPDX-License-Identifier: Apache-2.0
//
// The CPU backend as dispatch/plan.cpp sees it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "core/problem.h"

namespace fovea::cpu {

// What one call will use: the instruction set, the number of threads, the workspace. A pure function of the
// problem, the machine, FOVEA_CPU_ISA, set_num_threads() and, in a process with PyTorch, its number of threads.
struct Plan {
  std::string isa;  // "avx512", "neon"
  int threads = 1;
  std::size_t workspace = 0;
  std::string summary;  // a line for explain(): instruction set, threads, tiles
};

// The fields of a problem that this backend knows (core/fields.h): what it computes, or refuses itself.
inline constexpr std::string_view kKnownFields[] = {"direction",
                                                    "batch1",
                                                    "batch2",
                                                    "heads_q",
                                                    "heads_k",
                                                    "seqlen_q",
                                                    "seqlen_k",
                                                    "head_dim",
                                                    "head_dim_v",
                                                    "type",
                                                    "packed",
                                                    "total_q",
                                                    "total_k",
                                                    "has_used_q",
                                                    "has_used_k",
                                                    "scale",
                                                    "softcap",
                                                    "causal",
                                                    "top_left",
                                                    "window_left",
                                                    "window_right",
                                                    "positions",
                                                    "position_q",
                                                    "position_k",
                                                    "has_positions_q",
                                                    "has_positions_k",
                                                    "bias",
                                                    "bias2",
                                                    "mask",
                                                    "alibi",
                                                    "sink",
                                                    "dropout",
                                                    "rng",
                                                    "seed",
                                                    "offset",
                                                    "dropout_streams",
                                                    "deterministic",
                                                    "lse",
                                                    "grad_lse",
                                                    "need",
                                                    "wide",
                                                    "accumulate"};

// Throws Error(FOVEA_UNSUPPORTED) if FOVEA_CPU_ISA forces what the machine has not.
Plan plan(const Call& call);

void forward(const Call& call, const Plan& plan, void* workspace);
void backward(const Call& call, const Plan& plan, void* workspace);

// The instruction sets that were built, best first, and whether this machine runs them.
struct Isa {
  std::string name;
  bool available = false;
  std::string needs;   // what it takes
  std::string others;  // where it is for bf16 alone: the one for all other types
};
std::vector<Isa> instruction_sets();

// The one in use, for bf16 if another one is for the other types. Throws Error if FOVEA_CPU_ISA names none that this
// machine has.
std::string instruction_set();

// Whether this type is multiplied by a matrix unit, which takes denormal numbers for 0.
bool has_matrix_unit(DType type);

// Why no call can be computed: FOVEA_CPU_ISA names an instruction set that was not built, that this machine lacks or
// that its system refuses to this process; "" if calls can be computed.
std::string unavailable();

// 0 (or less): the least of affinity and cgroup quota, and of PyTorch's threads where PyTorch is in the process.
void set_num_threads(int n);
int num_threads();

}  // namespace fovea::cpu
