// SPDX-License-Identifier: Apache-2.0
//
// plan(): each backend, in the order of kBackends, gives a Verdict, and the first that can compute the problem is
// taken. If a backend is named (fovea_problem::backend, else FOVEA_BACKEND), only that one is considered. The reference
// is taken only if it is named. A problem of one device is never moved to another.
#include "dispatch/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "core/clear_rows.h"
#include "core/environment.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "reference/reference.h"

namespace fovea {
namespace {

constexpr std::string_view kBackends[] = {"cpu", "cuda", "reference"};

// Backends may count on this; the caller's workspace may lie anywhere.
constexpr std::size_t kWorkspaceAlignment = 64;

// The backend that is named, and where the name comes from.
struct Named {
  std::string name;
  std::string_view source;
};

Named named_backend(const Problem& problem) {
  Named named{problem.backend, "backend"};
  if (named.name.empty()) {
    named = {environment().backend, "FOVEA_BACKEND"};
  }
  if (!named.name.empty() && std::find(std::begin(kBackends), std::end(kBackends), named.name) == std::end(kBackends)) {
    throw Error(FOVEA_INVALID_ARGUMENT,
                fmt::format("{}: '{}'; accepted: {}", named.source, named.name, fmt::join(kBackends, ", ")));
  }
  return named;
}

// `plan` gets the backend's own plan if it can compute the problem.
Verdict verdict_of(std::string_view backend, const Call& call, const Named& named, Plan& plan) {
  Verdict verdict{std::string(backend), false, ""};
  if (!named.name.empty() && named.name != backend) {
    verdict.reason = fmt::format("another backend is named: {}={}", named.source, named.name);
  } else if (backend == "cuda" && call.problem.device == FOVEA_CPU) {
    verdict.reason = "the tensors lie on the CPU, and a problem is never moved to a CUDA device";
  } else if (backend != "cuda" && call.problem.device != FOVEA_CPU) {
    verdict.reason = "the tensors lie on a CUDA device, and a problem is never moved";
  } else if (backend == "reference") {
    verdict.used = named.name == backend;
    verdict.reason = verdict.used ? "fp64 in plain loops" : "used only with backend=reference";
  } else {
    try {
      if (backend == "cuda") {
        plan.cuda = cuda::executable_of(call);
        verdict.reason = cuda::plan_of(*plan.cuda).summary;
      } else {
        plan.cpu = cpu::plan(call);
        verdict.reason = plan.cpu.summary;
      }
      verdict.used = true;
    } catch (const Error& error) {
      if (error.status() != FOVEA_UNSUPPORTED) {
        throw;
      }
      verdict.reason = error.what();
    }
  }
  return verdict;
}

BackendKind kind_of(std::string_view backend) {
  return backend == "cpu" ? BackendKind::kCpu : backend == "cuda" ? BackendKind::kCuda : BackendKind::kReference;
}

// With room for the alignment that the backend needs.
std::size_t workspace_of(const cuda::Plan& plan) {
  const auto bytes = static_cast<std::size_t>(plan.workspace.bytes());
  return bytes > 0 ? bytes + cuda::Workspace::kAlignment - 1 : 0;
}

std::size_t workspace_of(const Plan& plan) {
  if (plan.cuda != nullptr) {
    return workspace_of(cuda::plan_of(*plan.cuda));
  }
  return plan.cpu.workspace > 0 ? plan.cpu.workspace + kWorkspaceAlignment - 1 : 0;
}

void* aligned(void* workspace, std::uintptr_t alignment) {
  return static_cast<char*>(workspace) + (-reinterpret_cast<std::uintptr_t>(workspace)) % alignment;
}

// A GPU's problem that names no backend has only one. It is found without the others' verdicts: a call takes
// microseconds.
std::shared_ptr<cuda::Executable> quickly_planned(const Call& call) {
  if (call.problem.device != FOVEA_CUDA || !call.problem.backend.empty() || !environment().backend.empty()) {
    return nullptr;
  }
  try {
    return cuda::executable_of(call);
  } catch (const Error& error) {
    if (error.status() != FOVEA_UNSUPPORTED) {
      throw;
    }
    return nullptr;  // plan() gives every backend's reason
  }
}

}  // namespace

Plan plan(const Call& call) {
  const Named named = named_backend(call.problem);
  Plan plan;
  for (const std::string_view backend : kBackends) {
    plan.verdicts.push_back(verdict_of(backend, call, named, plan));
    if (plan.verdicts.back().used && !plan.supported()) {
      plan.backend = kind_of(backend);
    }
  }
  plan.workspace = workspace_of(plan);
  return plan;
}

Plan explained(const Call& call) {
  Plan plan = fovea::plan(call);
  if (plan.backend == BackendKind::kCuda) {
    try {
      cuda::require_kernels(*plan.cuda);
    } catch (const Error& error) {
      if (error.status() != FOVEA_UNSUPPORTED) {
        throw;
      }
      plan.backend = BackendKind::kNone;
      for (Verdict& verdict : plan.verdicts) {
        if (verdict.used) {
          verdict = {verdict.backend, false, fmt::format("{}; {}", error.what(), verdict.reason)};
        }
      }
    }
  }
  return plan;
}

Plan explained_for(const Call& call, std::string_view architecture) {
  Plan plan;
  Verdict verdict{"cuda", false, ""};
  const cuda::Target target = cuda::target_of(architecture);
  try {
    const cuda::Plan found = cuda::plan_for(call, target);
    verdict = {"cuda", true, found.summary};
    plan.backend = BackendKind::kCuda;
    plan.workspace = workspace_of(found);
  } catch (const Error& error) {
    if (error.status() != FOVEA_UNSUPPORTED) {
      throw;
    }
    verdict.reason = error.what();
  }
  plan.verdicts.push_back(verdict);
  return plan;
}

void check_backend_of_environment() { named_backend(Problem{}); }

std::string strides_beside_the_line(const Call& call) {
  const Problem& p = call.problem;
  std::string text;
  for (const auto& [name, traits, view] :
       {std::tuple("bias", &p.bias, &call.bias), std::tuple("bias2", &p.bias2, &call.bias2),
        std::tuple("mask", &p.mask, &call.mask)}) {
    if (!*traits) {
      continue;
    }
    const Extents& e = traits->extents;
    const math::Strides& s = view->strides;
    std::int64_t contiguous = 1;
    bool differs = false;
    for (const auto& [has, size, stride] :
         {std::tuple(e.key, p.seqlen_k, s.col), std::tuple(e.query, p.seqlen_q, s.row),
          std::tuple(e.head, p.heads_q, s.head), std::tuple(e.batch2, p.batch2, s.batch2),
          std::tuple(e.batch1, p.batch1, s.batch1)}) {
      if (has && size > 1) {
        differs = differs || stride != contiguous;
        contiguous *= size;
      }
    }
    if (differs) {
      text += fmt::format(
          "{}: strides of {}, {}, {}, {}, {} elements along b1, b2, h, q, k, where the line means it contiguous\n",
          name, s.batch1, s.batch2, s.head, s.row, s.col);
    }
  }
  return text;
}

std::string to_text(const Problem& problem, const Plan& plan, const std::string& notes) {
  std::string text = fmt::format("problem: {}\n{}", print(problem), notes);
  bool taken = false;
  for (const Verdict& verdict : plan.verdicts) {
    const bool takes = verdict.used && !taken;
    taken = taken || takes;
    text += fmt::format("{}: {}: {}\n", verdict.backend, takes ? "used" : "not used", verdict.reason);
  }
  if (plan.supported()) {
    text += fmt::format("workspace: {} bytes\n", plan.workspace);
  }
  return text;
}

void require_supported(const Problem& problem, const Plan& plan) {
  if (plan.supported()) {
    return;
  }
  std::string reasons;
  for (const Verdict& verdict : plan.verdicts) {
    reasons += fmt::format("; {}: {}", verdict.backend, verdict.reason);
  }
  throw Error(FOVEA_UNSUPPORTED, fmt::format("no backend can compute '{}'{}", print(problem), reasons));
}

Plan planned(const Call& call) {
  Plan plan;
  plan.cuda = quickly_planned(call);
  if (plan.cuda != nullptr) {
    plan.backend = BackendKind::kCuda;
    plan.workspace = workspace_of(plan);
    return plan;
  }
  plan = fovea::plan(call);
  require_supported(call.problem, plan);
  return plan;
}

void execute(const Call& call, void* workspace, std::size_t workspace_bytes) {
  const Plan plan = planned(call);
  if (workspace_bytes < plan.workspace) {
    throw Error(FOVEA_OUT_OF_MEMORY, fmt::format("workspace: {} bytes; accepted: at least {}, as fovea_workspace says",
                                                 workspace_bytes, plan.workspace));
  }
  if (plan.backend == BackendKind::kCuda) {
    cuda::run(call, *plan.cuda, aligned(workspace, cuda::Workspace::kAlignment));
    return;
  }
  clear_rows(call);
  const bool forward = call.problem.direction == Direction::kForward;
  if (plan.backend == BackendKind::kReference) {
    forward ? reference::forward(call) : reference::backward(call);
    return;
  }
  void* memory = aligned(workspace, kWorkspaceAlignment);
  forward ? cpu::forward(call, plan.cpu, memory) : cpu::backward(call, plan.cpu, memory);
}

void prepare(const Call& call) {
  const Plan plan = planned(call);
  if (plan.backend == BackendKind::kCuda) {
    cuda::prepare_kernels(call, *plan.cuda);
  }
}

std::vector<Verdict> backends() {
  std::vector<Verdict> verdicts;
  for (const std::string_view backend : kBackends) {
    const std::string reason = backend == "cuda"  ? cuda::unavailable()
                               : backend == "cpu" ? cpu::unavailable()
                                                  : std::string();
    verdicts.push_back({std::string(backend), reason.empty(), reason.empty() ? "available" : reason});
  }
  return verdicts;
}

}  // namespace fovea
