// SPDX-License-Identifier: Apache-2.0
//
// fovea explain: who serves a problem and why the others do not; without a problem, what this machine has.
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
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

struct Variable {
  const char* name;
  const char* meaning;
};
constexpr Variable kVariables[] = {
    {"FOVEA_BACKEND", "the backend that serves what names none itself"},
    {"FOVEA_CPU_ISA", "the instruction set of the CPU backend"},
    {"FOVEA_LIBRARY", "the libfovea.so that Python loads"},
    {"FOVEA_BUILD", "the build folder that the tests use"},
    {"FOVEA_CASES", "reduced: the smaller case table, in the C++ tests"},
    {"FOVEA_CHECK", "1: addresses, and lengths on a GPU, are checked by every call"},
    {"FOVEA_KERNEL", "sm80, sm90: the newest family of GPU kernels that is taken"},
    {"FOVEA_KERNELS", "how many GPU kernels the C++ tests compile; all: every one"},
    {"FOVEA_JIT", "jit, cache or off: whether kernels are compiled at run time"},
    {"FOVEA_CACHE_DIR", "where compiled kernels are kept; none: nowhere"},
    {"FOVEA_CACHE_MAX_MB", "how much is kept there"},
    {"FOVEA_PRECOMPILED_DIR", "kernels compiled ahead of time"},
    {"FOVEA_NVRTC", "NVRTC's file or folder"},
    {"FOVEA_LOG", "jit: a line for each kernel compiled or read"},
    {"FOVEA_DUMP", "a folder for the text of compiled kernels"},
};

void explain_problem(const std::string& line) {
  std::size_t needed = 0;
  fovea_status status = fovea_explain_line(line.c_str(), nullptr, 0, &needed);
  if (status != FOVEA_OK && status != FOVEA_UNSUPPORTED) {
    require(status);
  }
  std::string text(needed, '\0');
  status = fovea_explain_line(line.c_str(), text.data(), text.size(), &needed);
  text.resize(needed > 0 ? needed - 1 : 0);
  fmt::print("{}", text);
  if (status == FOVEA_UNSUPPORTED) {
    throw Fault(kUnsupported, "");
  }
  require(status);
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
  const auto line = [](std::string_view what, const std::string& value) { fmt::print("{:<18} {}\n", what, value); };
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
  for_each_line(fovea_machine, line);
  std::vector<std::string> known;
  for (const Variable& variable : kVariables) {
    known.emplace_back(variable.name);
    const char* value = std::getenv(variable.name);
    line(variable.name, fmt::format("{:<10} {}", value != nullptr ? value : "not set", variable.meaning));
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
  CLI::App* explain_app =
      app.add_subcommand("explain", "Who serves a problem, and why not the others; or this machine");
  explain_app->add_option("problem", *words, "A problem line; without one, what this machine has")->type_name("LINE");
  explain_app->footer(
      "Examples:\n"
      "  fovea explain\n"
      "  fovea explain 'fwd b=2 hq=32 hk=8 sq=4096 sk=4096 d=128 bf16 causal softcap=30'\n"
      "  FOVEA_CPU_ISA=avx2 fovea explain bwd b=1 hq=8 sq=512 sk=512 d=64 fp32 bias=1,h,q,k need=bias\n\n" +
      std::string(problem_line_help()) + "Exit code 3 if no backend serves the problem.");
  explain_app->callback([words] {
    if (words->empty()) {
      explain_machine();
    } else {
      explain_problem(fmt::format("{}", fmt::join(*words, " ")));
    }
  });
}

}  // namespace fovea::cli
