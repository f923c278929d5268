// SPDX-License-Identifier: Apache-2.0
//
// fovea explain: which backend computes a problem and why the others do not, here or on a GPU of some architecture.
// Without a problem it describes this machine.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "commands.h"
#include "fault.h"
#include "work.h"

namespace fovea::cli {
namespace {

// Whether a backend can compute it: on this machine if `architecture` is null.
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

void explain_machine() {
  std::size_t needed = 0;
  require(fovea_machine(nullptr, 0, &needed));
  std::string text(needed, '\0');
  require(fovea_machine(text.data(), text.size(), &needed));
  text.resize(std::min(text.size(), needed) - 1);
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::size_t tab = std::min(text.find('\t', begin), end);
    fmt::print("{:<21} {}\n", text.substr(begin, tab - begin), text.substr(std::min(tab + 1, end), end - tab - 1));
    begin = end + 1;
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
      app.add_subcommand("explain", "Print which backend computes a problem, and why the others do not");
  explain_app->add_option("problem", *words, "A problem line; without one, describe this machine")->type_name("LINE");
  explain_app
      ->add_option(
          "-a,--arch", *architectures,
          "Explain for GPUs of these architectures instead of this machine: sm_80, sm_90, ...; no GPU is needed")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("ARCH");
  explain_app->footer(
      "Examples:\n"
      "  fovea explain\n"
      "  fovea explain --arch sm_90 'bwd b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,h,q,k need=q,k,v,bias'\n"
      "  fovea explain 'fwd b=2 hq=32 hk=8 sq=4096 sk=4096 d=128 bf16 causal softcap=30'\n"
      "  FOVEA_CPU_ISA=avx2 fovea explain bwd b=1 hq=8 sq=512 sk=512 d=64 fp32 bias=1,h,q,k need=bias\n\n" +
      std::string(problem_line_help()) +
      "In the output the backend that is \"used\" computes the problem. Exit code 3 if no backend can.");
  explain_app->callback([words, architectures] {
    if (words->empty()) {
      if (!architectures->empty()) {
        throw Fault(kBadInput, "--arch: without a problem; accepted: with a problem line");
      }
      explain_machine();
      return;
    }
    const std::string line = fmt::format("{}", fmt::join(*words, " "));
    bool supported = !architectures->empty() || explain_problem(line, nullptr);
    for (const std::string& architecture : *architectures) {
      supported = explain_problem(line, architecture.c_str()) && supported;
    }
    if (!supported) {
      throw Fault(kUnsupported, "");
    }
  });
}

}  // namespace fovea::cli
