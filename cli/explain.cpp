// SPDX-License-Identifier: Apache-2.0
//
// fovea explain: which backend serves a problem and why the others do not, here or on a GPU of some architecture;
// without a problem, what this machine has.
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <thread>

#include "commands.h"
#include "core/nearest.h"
#include "cpu/cpu.h"
#include "fault.h"
#include "machine.h"
#include "work.h"

namespace fovea::cli {
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
std::string cuda_cpu_or_compile(const std::string& value) {
  return value == "cuda" || value == "cpu" || value == "compile" ? "" : "accepted: cuda, cpu, compile";
}

struct Variable {
  const char* name;
  const char* meaning;
  std::string (*why_not)(const std::string& value) = nullptr;  // null: fovea_machine() says it, or all is accepted
};
constexpr Variable kVariables[] = {
    {"FOVEA_BACKEND", "the backend that serves what names none itself"},
    {"FOVEA_CPU_ISA", "the instruction set of the CPU backend"},
    {"FOVEA_CHECK", "1: addresses, and lengths on a GPU, are checked by every call"},
    {"FOVEA_KERNEL", "generic (or sm80), sm90: the newest family of GPU kernels that is taken"},
    {"FOVEA_JIT", "jit, cache or off: whether kernels are compiled at run time"},
    {"FOVEA_CACHE_DIR", "where compiled kernels are kept; none: nowhere"},
    {"FOVEA_CACHE_MAX_MB", "how much is kept there"},
    {"FOVEA_PRECOMPILED_DIR", "kernels compiled ahead of time"},
    {"FOVEA_NVRTC", "NVRTC's file or folder"},
    {"FOVEA_KERNEL_TEXT", "development: a folder src whose kernels are compiled instead of the library's"},
    {"FOVEA_LOG", "jit: a line for each kernel compiled or read"},
    {"FOVEA_DUMP", "a folder for the text of compiled kernels"},
    {"FOVEA_LIBRARY", "the libfovea.so that Python loads", file_that_is_there},
    {"FOVEA_BUILD", "tests: the build folder that they use", folder_that_is_there},
    {"FOVEA_CASES", "reduced: the smaller case table, in the C++ tests", reduced},
    {"FOVEA_KERNELS", "how many GPU kernels the C++ tests compile; all: every one", number_or_all},
    {"FOVEA_CODE_CACHE", "tools: where compilations, NVRTC and nvdisasm are kept"},
    {"FOVEA_LONG", "tests in Python: those of some minutes, too"},
    {"FOVEA_RANDOM", "tests/gpu: how many random problems"},
    {"FOVEA_SITE_PACKAGES", "tests in C++: where NVRTC's wheel lies", folder_that_is_there},
    {"FOVEA_TEST_DEVICE", "tests/gpu: cuda, cpu or compile", cuda_cpu_or_compile},
};

// Whether a backend serves it. Without an architecture (null): on this machine.
bool explain_problem(const std::string& line, const char* architecture) {
  const auto explain = [&](char* text, std::size_t capacity, std::size_t* needed) {
    return architecture == nullptr ? fovea_explain_line(line.c_str(), text, capacity, needed)
                                   : fovea_explain_for(line.c_str(), architecture, text, capacity, needed);
  };
  std::size_t needed = 0;
  fovea_status status = explain(nullptr, 0, &needed);
  if (status != FOVEA_OK && status != FOVEA_UNSUPPORTED) {
    require(status);
  }
  std::string text(needed, '\0');
  status = explain(text.data(), text.size(), &needed);
  text.resize(needed > 0 ? needed - 1 : 0);
  fmt::print("{}", text);
  return status == FOVEA_OK;
}

int allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
}

// What such a function of the library writes: lines of a name, a tab and a value.
template <class Show>
void for_each_line(fovea_status (*function)(char*, std::size_t, std::size_t*), const Show& show) {
  std::size_t needed = 0;
  require(function(nullptr, 0, &needed));
  std::string text(needed, '\0');
  require(function(text.data(), text.size(), &needed));
  text.resize(std::min(text.size(), needed) - 1);
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string entry = text.substr(begin, end - begin);
    const std::size_t tab = std::min(entry.find('\t'), entry.size() - 1);
    show(entry.substr(0, tab), entry.substr(tab + 1));
    begin = end + 1;
  }
}

void explain_machine() {
  const Machine machine = this_machine();
  const auto line = [](std::string_view what, const std::string& value) { fmt::print("{:<21} {}\n", what, value); };
  line("fovea", machine.version);
  line("processor", machine.processor);
  for (const cpu::Isa& isa : cpu::instruction_sets()) {
    line("instruction set", fmt::format("{:<10} {}", isa.name,
                                        !isa.available            ? "this machine has not got it"
                                        : isa.name == machine.isa ? "in use"
                                                                  : "available"));
  }
  line("threads", fmt::format("{} (the machine has {} cores, this process may use {}; a cgroup's quota counts too)",
                              machine.threads, std::thread::hardware_concurrency(), allowed_cores()));
  for_each_line(fovea_backends, [&](const std::string& name, const std::string& state) {
    line("backend", fmt::format("{:<10} {}", name, state));
  });
  std::map<std::string, std::string> refused;  // variables with values that the library does not accept, and why
  for_each_line(fovea_machine, [&](const std::string& name, const std::string& value) {
    name.starts_with("FOVEA_") ? static_cast<void>(refused.emplace(name, value)) : line(name, value);
  });
  std::vector<std::string> known;
  for (const Variable& variable : kVariables) {
    known.emplace_back(variable.name);
    const char* const set = std::getenv(variable.name);
    const std::string value = set != nullptr ? set : "";
    if (const std::string why = variable.why_not != nullptr && !value.empty() ? variable.why_not(value) : "";
        !why.empty()) {
      refused.emplace(variable.name, fmt::format("'{}': {}", value, why));
    }
    if (const auto fault = refused.find(variable.name); fault != refused.end()) {
      line(variable.name, "REFUSED    " + fault->second);
    } else {
      line(variable.name, fmt::format("{:<10} {}", set != nullptr ? value : "not set", variable.meaning));
    }
  }
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string variable(*entry, std::strcspn(*entry, "="));
    if (variable.starts_with("FOVEA_") && std::find(known.begin(), known.end(), variable) == known.end()) {
      line(variable, "is set, but nothing reads it" + hint(variable, known));
    }
  }
  fmt::print(
      "\nfovea check        is it right on this machine?\n"
      "fovea bench        is it fast?\n");
}

}  // namespace

void add_explain(CLI::App& app) {
  auto words = std::make_shared<std::vector<std::string>>();
  auto architectures = std::make_shared<std::vector<std::string>>();
  CLI::App* explain_app =
      app.add_subcommand("explain", "Which backend serves a problem, and why not the others; or this machine");
  explain_app->add_option("problem", *words, "A problem line; without one, what this machine has")->type_name("LINE");
  explain_app
      ->add_option("-a,--arch", *architectures,
                   "Instead of this machine a GPU of these architectures, which need not be there: sm_80, sm_90, ...")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("ARCH");
  explain_app->footer(
      "Examples:\n"
      "  fovea explain\n"
      "  fovea explain --arch sm_90 'bwd b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,h,q,k need=q,k,v,bias'\n"
      "  fovea explain 'fwd b=2 hq=32 hk=8 sq=4096 sk=4096 d=128 bf16 causal softcap=30'\n"
      "  FOVEA_CPU_ISA=avx2 fovea explain bwd b=1 hq=8 sq=512 sk=512 d=64 fp32 bias=1,h,q,k need=bias\n\n" +
      std::string(problem_line_help()) + "Exit code 3 if no backend serves the problem.");
  explain_app->callback([words, architectures] {
    if (words->empty()) {
      if (!architectures->empty()) {
        throw Fault(kBadInput, "--arch: without a problem; accepted: with a problem line");
      }
      explain_machine();
      return;
    }
    const std::string line = fmt::format("{}", fmt::join(*words, " "));
    bool serves = !architectures->empty() || explain_problem(line, nullptr);
    for (const std::string& architecture : *architectures) {
      serves = explain_problem(line, architecture.c_str()) && serves;
    }
    if (!serves) {
      throw Fault(kUnsupported, "");
    }
  });
}

}  // namespace fovea::cli
