// SPDX-License-Identifier: Apache-2.0
//
// plan(): the backends are asked in the order of kBackends, each answers with a Verdict, and the first that serves
// is taken. A name (fovea_problem::backend, else FOVEA_BACKEND) leaves one to be asked. The reference has no other
// way in than by its name, and a problem of one device is never moved to another.
#include "core/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "cpu/cpu.h"
#include "reference/reference.h"

namespace fovea {
namespace {

constexpr std::string_view kBackends[] = {"cpu", "cuda", "reference"};
constexpr std::string_view kNoCuda = "no CUDA backend in this build";

// Backends may count on this; the caller's workspace may lie anywhere.
constexpr std::size_t kWorkspaceAlignment = 64;

// The backend that is asked for by name, and where the name stands.
struct Named {
  std::string name;
  std::string_view source;
};

Named named_backend(const Problem& problem) {
  Named named{problem.backend, "backend"};
  if (named.name.empty()) {
    const char* forced = std::getenv("FOVEA_BACKEND");
    named = {forced != nullptr ? forced : "", "FOVEA_BACKEND"};
  }
  if (!named.name.empty() && std::find(std::begin(kBackends), std::end(kBackends), named.name) == std::end(kBackends)) {
    throw Error(FOVEA_INVALID_ARGUMENT,
                fmt::format("{}: '{}'; accepted: {}", named.source, named.name, fmt::join(kBackends, ", ")));
  }
  return named;
}

// `cpu` gets the CPU's own plan where it serves.
Verdict verdict_of(std::string_view backend, const Call& call, const Named& named, cpu::Plan& cpu) {
  Verdict verdict{std::string(backend), false, ""};
  if (!named.name.empty() && named.name != backend) {
    verdict.reason = fmt::format("not asked: {}={}", named.source, named.name);
  } else if (backend == "cuda") {
    verdict.reason = kNoCuda;
  } else if (call.problem.device != FOVEA_CPU) {
    verdict.reason = "the tensors lie on a CUDA device, and a problem is never moved";
  } else if (backend == "reference") {
    verdict.serves = named.name == backend;
    verdict.reason = verdict.serves ? "fp64 in plain loops" : "serves only who asks for it by name: backend=reference";
  } else {
    try {
      cpu = cpu::plan(call);
      verdict.serves = true;
      verdict.reason = cpu.summary;
    } catch (const Error& error) {
      if (error.status() != FOVEA_UNSUPPORTED) {
        throw;
      }
      verdict.reason = error.what();
    }
  }
  return verdict;
}

BackendKind kind_of(std::string_view backend) { return backend == "cpu" ? BackendKind::kCpu : BackendKind::kReference; }

}  // namespace

Plan plan(const Call& call) {
  const Named named = named_backend(call.problem);
  Plan plan;
  for (const std::string_view backend : kBackends) {
    plan.verdicts.push_back(verdict_of(backend, call, named, plan.cpu));
    if (plan.verdicts.back().serves && !plan.supported()) {
      plan.backend = kind_of(backend);
    }
  }
  plan.workspace = plan.cpu.workspace > 0 ? plan.cpu.workspace + kWorkspaceAlignment - 1 : 0;
  return plan;
}

std::string to_text(const Problem& problem, const Plan& plan) {
  std::string text = fmt::format("problem: {}\n", print(problem));
  bool taken = false;
  for (const Verdict& verdict : plan.verdicts) {
    const bool takes = verdict.serves && !taken;
    taken = taken || takes;
    text += fmt::format("{}: {}: {}\n", verdict.backend, takes ? "serves" : "does not serve", verdict.reason);
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
  throw Error(FOVEA_UNSUPPORTED, fmt::format("no backend serves '{}'{}", print(problem), reasons));
}

void execute(const Call& call, void* workspace, std::size_t workspace_bytes) {
  const Plan plan = fovea::plan(call);
  require_supported(call.problem, plan);
  if (workspace_bytes < plan.workspace) {
    throw Error(FOVEA_OUT_OF_MEMORY, fmt::format("workspace: {} bytes; accepted: at least {}, as fovea_workspace says",
                                                 workspace_bytes, plan.workspace));
  }
  const bool forward = call.problem.direction == Direction::kForward;
  if (plan.backend == BackendKind::kReference) {
    forward ? reference::forward(call) : reference::backward(call);
    return;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(workspace);
  void* aligned = static_cast<char*>(workspace) + (-address) % kWorkspaceAlignment;
  forward ? cpu::forward(call, plan.cpu, aligned) : cpu::backward(call, plan.cpu, aligned);
}

std::vector<Verdict> backends() {
  std::vector<Verdict> verdicts;
  for (const std::string_view backend : kBackends) {
    const std::string reason = backend == "cuda"  ? std::string(kNoCuda)
                               : backend == "cpu" ? cpu::unavailable()
                                                  : std::string();
    verdicts.push_back({std::string(backend), reason.empty(), reason.empty() ? "available" : reason});
  }
  return verdicts;
}

}  // namespace fovea
