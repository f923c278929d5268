// SPDX-License-Identifier: Apache-2.0
#include "capi/machine.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string_view>
#include <thread>
#include <vector>

#include "core/environment.h"
#include "core/nearest.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "dispatch/plan.h"
#include "fovea/c.h"

namespace fovea {
namespace {

// What an environment variable that the library does not read itself may be; "" where it may.
std::string file_that_is_there(const std::string& value) {
  return std::filesystem::is_regular_file(value) ? "" : "no such file";
}
std::string folder_that_is_there(const std::string& value) {
  return std::filesystem::is_directory(value) ? "" : "no such folder";
}
std::string number_or_all(const std::string& value) {
  const bool number = value.find_first_not_of("0123456789") == value.npos;
  return value == "all" || number ? "" : "accepted: a number, all";
}
std::string reduced(const std::string& value) { return value == "reduced" ? "" : "accepted: reduced, or not set"; }
std::string way_of_torch(const std::string& value) {
  return value == "1" || value == "methods" || value == "0" ? "" : "accepted: 1, methods, 0";
}
std::string cuda_cpu_or_compile(const std::string& value) {
  return value == "cuda" || value == "cpu" || value == "compile" ? "" : "accepted: cuda, cpu, compile";
}

struct Variable {
  const char* name;
  const char* meaning;
  // Null: the code that reads the variable refuses wrong values, or every value is accepted.
  std::string (*why_not)(const std::string& value) = nullptr;
};
constexpr Variable kVariables[] = {
    {"FOVEA_BACKEND", "the backend of problems that name none"},
    {"FOVEA_CPU_ISA", "the instruction set of the CPU backend"},
    {"FOVEA_CHECK", "1: addresses, and lengths on a GPU, are checked by every call"},
    {"FOVEA_KERNEL", "generic (or sm80), sm90: the newest family of GPU kernels that plans may use"},
    {"FOVEA_JIT", "jit, cache or off: whether kernels are compiled at run time"},
    {"FOVEA_CACHE_DIR", "the folder of compiled kernels; none: they are not kept"},
    {"FOVEA_CACHE_MAX_MB", "the largest size of that folder, in MB"},
    {"FOVEA_PRECOMPILED_DIR", "kernels compiled ahead of time"},
    {"FOVEA_NVRTC", "NVRTC's file or folder"},
    {"FOVEA_KERNEL_TEXT", "development: a folder src whose kernels are compiled instead of the library's"},
    {"FOVEA_NVRTC_FOLDERS", "folders that are searched for NVRTC; Python sets it for the command"},
    {"FOVEA_LOG", "jit: a line for each kernel compiled or read"},
    {"FOVEA_DUMP", "a folder for text, PTX, machine code and log of compiled kernels"},
    {"FOVEA_LIBRARY", "the libfovea.so that Python loads", file_that_is_there},
    {"FOVEA_TORCH", "1: PyTorch programs run on fovea; TORCH_DEVICE_BACKEND_AUTOLOAD=0 would prevent it"},
    {"FOVEA_CHECK_RANKS", "1: the ranks of context_parallel compare their arguments before they move anything"},
    {"FOVEA_TORCH_FAST", "1, methods or 0: how fovea.torch calls the library", way_of_torch},
};
// Of tests and tools: printed only where they are set.
constexpr Variable kVariablesOfTests[] = {
    {"FOVEA_BUILD", "tests: the build folder that they use", folder_that_is_there},
    {"FOVEA_CASES", "reduced: the smaller case table, in the C++ tests", reduced},
    {"FOVEA_KERNELS", "how many GPU kernels the C++ tests compile; all: every one", number_or_all},
    {"FOVEA_CODE_CACHE", "tools: the folder of compilations, NVRTC and nvdisasm"},
    {"FOVEA_LONG", "tests in Python: also run those that take some minutes"},
    {"FOVEA_RANDOM", "tests of the GPU: how many random problems"},
    {"FOVEA_SITE_PACKAGES", "tests in C++: the folder that contains NVRTC's wheel", folder_that_is_there},
    {"FOVEA_WHEELS", "tests/wheel: the folder with the wheels", folder_that_is_there},
    {"FOVEA_TEST_DEVICE", "tests/gpu: cuda, cpu or compile", cuda_cpu_or_compile},
    {"FOVEA_TEST_DTYPE", "tests/models: the type of transformers' models"},
    {"FOVEA_ALL_MODELS", "tests/models: a model whose library is missing fails"},
    {"FOVEA_BENCH_DEVICE", "the benchmark of a GPU: cpu checks small problems without one"},
    {"FOVEA_SANITIZE", "tests/gpu: only the rows for compute-sanitizer"},
    {"FOVEA_WRITE_GOLDEN", "tests in C++: write the golden plans"},
};

// Of the variables that the library reads: those that have a value which it does not accept, and why.
std::map<std::string, std::string> refused_variables() {
  std::vector<cuda::Fact> facts = cuda::refused_variables();
  try {
    check_backend_of_environment();
  } catch (const Error& error) {
    facts.push_back(cuda::refusal("FOVEA_BACKEND", error.what()));
  }
  if (const std::string why = cpu::unavailable(); !why.empty()) {
    facts.push_back(cuda::refusal("FOVEA_CPU_ISA", why));
  }
  std::map<std::string, std::string> refused;
  for (cuda::Fact& fact : facts) {
    refused.emplace(std::move(fact.name), std::move(fact.value));
  }
  return refused;
}

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) {
      const std::size_t begin = line.find_first_not_of(" \t", line.find(':') + 1);
      if (begin != std::string::npos) {
        return line.substr(begin);
      }
    }
  }
  return "an unnamed processor";
}

int allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
}

}  // namespace

Machine this_machine() {
  Machine machine;
  const int version = fovea_version();
  machine.version = fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
  machine.processor = processor();
  const std::string why = cpu::unavailable();
  machine.isa = why.empty() ? cpu::instruction_set() : environment().cpu_isa;
  machine.threads = fovea_num_threads();
  return machine;
}

std::string machine_text() {
  const Machine machine = this_machine();
  std::string text;
  const auto line = [&](std::string_view what, std::string_view value) {
    text += fmt::format("{}\t{}\n", what, value);
  };
  line("fovea", machine.version);
  line("processor", machine.processor);
  std::string others;            // in use for all types but bf16
  std::set<std::string> better;  // those that stand before
  for (const cpu::Isa& isa : cpu::instruction_sets()) {
    const bool used = isa.name == machine.isa;
    others = used && isa.available ? isa.others : others;
    line("instruction set",
         fmt::format("{:<11} {}", isa.name,
                     !isa.available                ? "not here: needs " + isa.needs
                     : used                        ? "in use"
                     : isa.name == others          ? "in use for all types but bf16"
                     : better.contains(isa.others) ? fmt::format("available, no faster than {} here", isa.others)
                                                   : "available"));
    better.insert(isa.name);
  }
  line("threads", fmt::format("{} (the machine has {} cores, this process may use {}; a cgroup's quota counts too)",
                              machine.threads, std::thread::hardware_concurrency(), allowed_cores()));
  for (const Verdict& verdict : backends()) {
    line("backend", fmt::format("{:<10} {}", verdict.backend, verdict.reason));
  }
  for (const cuda::Fact& fact : cuda::machine()) {
    line(fact.name, fact.value);
  }

  const std::map<std::string, std::string> refused = refused_variables();
  std::vector<std::string> known;
  const auto describe = [&](const Variable& variable, const char* set) {
    const std::string value = set != nullptr ? set : "";
    const std::string why = variable.why_not != nullptr && !value.empty() ? variable.why_not(value) : "";
    if (const auto fault = refused.find(variable.name); fault != refused.end()) {
      line(variable.name, "REFUSED    " + fault->second);
    } else if (!why.empty()) {
      line(variable.name, fmt::format("REFUSED    '{}': {}", value, why));
    } else {
      line(variable.name, fmt::format("{:<10} {}", set != nullptr ? value : "not set", variable.meaning));
    }
  };
  for (const Variable& variable : kVariables) {
    known.emplace_back(variable.name);
    describe(variable, std::getenv(variable.name));
  }
  for (const Variable& variable : kVariablesOfTests) {
    known.emplace_back(variable.name);
    if (const char* const set = std::getenv(variable.name); set != nullptr) {
      describe(variable, set);
    }
  }
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string variable(*entry, std::strcspn(*entry, "="));
    if (variable.starts_with("FOVEA_") && std::find(known.begin(), known.end(), variable) == known.end()) {
      line(variable, "is set, but nothing reads it" + hint(variable, known));
    }
  }
  return text;
}

}  // namespace fovea
