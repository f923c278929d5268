// SPDX-License-Identifier: Apache-2.0
//
// The one decision about which backend computes a problem, and how. supports, workspace, explain and execution all
// follow from it; it gives reasons, not booleans.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/problem.h"
#include "cpu/cpu.h"

namespace fovea {

namespace cuda {
class Executable;
}

enum class BackendKind { kNone, kCpu, kCuda, kReference };

// One backend's answer to a problem.
struct Verdict {
  std::string backend;  // "cpu", "cuda", "reference"
  bool used = false;
  std::string reason;  // why not, or with what (instruction set, threads, tiles)
};

struct Plan {
  BackendKind backend = BackendKind::kNone;
  std::size_t workspace = 0;               // bytes, at any alignment
  cpu::Plan cpu;                           // how the CPU computes it, if used
  std::shared_ptr<cuda::Executable> cuda;  // how a GPU computes it, if used
  std::vector<Verdict> verdicts;           // in the order of the backends; the first with `used` computes

  bool supported() const { return backend != BackendKind::kNone; }
};

// FOVEA_BACKEND, where the problem names no backend itself, forces one as if it did.
Plan plan(const Call& call);

// As plan(), and whether a GPU's kernels are there or can be compiled here.
Plan explained(const Call& call);

// For a GPU of an architecture that need not be there; its kernels are not looked for.
Plan explained_for(const Call& call, std::string_view architecture);

// The text of explain(). `notes`: lines of text with facts that the one-line text form cannot express.
std::string to_text(const Problem& problem, const Plan& plan, const std::string& notes = "");

// One line of text for each bias or mask whose strides are not those that the one-line text form implies.
std::string strides_beside_the_line(const Call& call);

// Throws Error(FOVEA_INVALID_ARGUMENT) where FOVEA_BACKEND is no backend's name.
void check_backend_of_environment();

// Throws Error(FOVEA_UNSUPPORTED) with the reasons if no backend can compute the problem.
void require_supported(const Problem& problem, const Plan& plan);

// As plan(), but it makes no verdicts that are not needed, and throws Error(FOVEA_UNSUPPORTED) if there is no backend.
Plan planned(const Call& call);

// Compiles (or reads) and loads what the call will need: before a CUDA graph captures it.
void prepare(const Call& call);

// Plans, requires a backend, checks the workspace's size and runs.
void execute(const Call& call, void* workspace, std::size_t workspace_bytes);

// Every backend's name, whether this build and machine have it, and why not.
std::vector<Verdict> backends();

}  // namespace fovea
