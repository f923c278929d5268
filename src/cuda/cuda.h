// SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend as dispatch/plan.cpp sees it.
//
//     Call ──> plan: which kernels, in which order, on how many blocks; where what lies in the workspace
//          ──> kernels, compiled or read and loaded, once
//          ──> launches on the caller's stream: nothing is allocated, nothing is waited for
//
// A plan is a pure function of the problem, strides, alignment of the addresses and the target, and is kept: the
// second call of a problem finds it by a hash.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/problem.h"
#include "cuda/config/kernel.h"
#include "cuda/config/operands.h"
#include "cuda/config/target.h"
#include "cuda/config/workspace.h"

namespace fovea::cuda {

class Launcher;
struct Launch;

// Fills a kernel's arguments for one call and launches it: the file of src/cuda/kernels that planned the launch has it.
using Start = std::function<void(const Launcher&, const Launch&)>;

struct Launch {
  Kernel kernel;
  std::int64_t blocks = 0;
  unsigned blocks_y = 1;
  int pieces = 1;  // split keys; chunks of a bias gradient's list; parts of a block of keys
  Start start;
};

struct Plan {
  Target target;
  Operands operands;
  Workspace workspace;
  std::vector<Launch> launches;
  bool clears_rows = false;  // the first launch does, and calls that do not ask for it leave it out
  bool packs_heads = false;  // the plan is of with_packed_heads(call)
  std::string summary;       // a line for explain(): kernels, tiles, what is prepared
};

// The fields of a problem that this backend's plans know (core/fields.h): what it computes, or refuses itself.
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

// Throws Error(FOVEA_UNSUPPORTED) if no CUDA device can compute the problem's type.
void require_type(const Problem& problem);

// For a target, without a GPU. Throws Error(FOVEA_UNSUPPORTED) with the reason if no kernel can compute the problem.
Plan plan_for(const Call& call, const Target& target);

// FOVEA_KERNEL: the newest family of kernels that plans may take ("generic" or "sm80", "sm90"), for tests and for
// comparing; null: any. Throws Error(FOVEA_INVALID_ARGUMENT) where it has another value.
const char* kernel_family();

// FOVEA_CHECK=1. Throws the same where it is neither 0 nor 1.
bool checks_arguments();

// Every kernel that a problem of these shapes and options may need on the target, whatever the alignment of its
// addresses: what is compiled ahead of time.
std::vector<Kernel> kernels_for(const Call& call, const Target& target);

// A plan and its kernels on a device; kept for the process.
class Executable;

// The one that is kept for calls like this one; made by plan_for(), where this is the first of them. Throws
// Error(FOVEA_UNSUPPORTED) where there is no driver or no such device, too.
std::shared_ptr<Executable> executable_of(const Call& call);
const Plan& plan_of(const Executable& executable);

// Compiles (or reads) the kernels and loads them into the context of the call's stream; needed once for a context, and
// before a stream capture begins.
void prepare_kernels(const Call& call, Executable& executable);

// Throws what prepare_kernels() would throw before anything is compiled: no NVRTC, a mode that does not find a kernel.
void require_kernels(const Executable& executable);

// In the direction of the call, on its stream. `workspace` is aligned to Workspace::kAlignment.
void run(const Call& call, Executable& executable, void* workspace);

// Why no call can be computed: no driver, no GPU, no NVRTC; "" if none of these is missing.
std::string unavailable();

// What there is, a name and a value each: GPUs, driver, NVRTC, kernel cache; or why it cannot be used.
struct Fact {
  std::string name;
  std::string value;
};
std::vector<Fact> machine();

// The environment variables that this backend reads and that are set to what it does not accept: name, and why.
std::vector<Fact> refused_variables();

// One of them, from an error's text: as one line, without the name that it begins with.
Fact refusal(const std::string& variable, const std::string& why);

}  // namespace fovea::cuda
