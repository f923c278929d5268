// SPDX-License-Identifier: Apache-2.0
//
// Which GPU kernels plans take, as JSON on standard output. No GPU and no NVRTC is needed.
//
//     list_kernels --arch sm_80,sm_90 < problems.txt     one problem line each; '#' begins a comment
//     list_kernels --table --arch sm_80                  and every problem of the case table, forward and backward
//
//     {"texts":   [text, ...],                           the embedded files
//      "files":   {name: number of its text, ...},       each under every name that an #include may have
//      "options": [option, ...],                         of every compilation, without the architecture
//      "kernels": [{"file", "kernel", "argument", "architecture", "options", "registers", "spill",
//                   "local"}, ...],
//      "uses":    [[architecture of the plan, problem line, [number of a kernel, ...]], ...]}
//
// "registers", "spill" and "local" are how much a thread may have of them (limits.h). A plan is made for
// each product of an architecture that `fovea precompile` knows, and for aligned and unaligned addresses.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "check/cases.h"
#include "core/shapes.h"
#include "core/validate.h"
#include "cuda/executable.h"
#include "limits.h"

namespace {

using namespace fovea;
using nlohmann::json;

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

class List {
 public:
  void add(const Problem& given, const std::string& architecture) {
    Problem problem = given;
    problem.device = FOVEA_CUDA;
    const Shapes shapes(problem);
    const Call call = validate(shapes.get(), problem.direction, /*shapes_only=*/true);
    std::vector<std::size_t> numbers;
    for (const cuda::Target& target : cuda::targets_of(architecture)) {
      for (const cuda::Kernel& kernel : cuda::kernels_for(call, target)) {
        const std::size_t number = number_of(kernel, target);
        if (std::find(numbers.begin(), numbers.end(), number) == numbers.end()) {
          numbers.push_back(number);
        }
      }
    }
    uses_.push_back(json::array({architecture, print(given), numbers}));
  }

  json result() const {
    json texts = json::array();
    json files = json::object();
    std::map<const char*, std::size_t> known;  // a file has several names and one text
    for (const cuda::jit::TextFile& file : cuda::jit::embedded_files()) {
      const auto [found, fresh] = known.emplace(file.text.data(), texts.size());
      if (fresh) {
        texts.push_back(file.text);
      }
      files[std::string(file.name)] = found->second;
    }
    json options = json::array();
    for (const std::string_view option : cuda::jit::default_options()) {
      options.push_back(option);
    }
    return {{"texts", texts}, {"files", files}, {"options", options}, {"kernels", kernels_}, {"uses", uses_}};
  }

 private:
  json kernels_ = json::array();
  json uses_ = json::array();
  std::map<std::string, std::size_t> numbers_;

  std::size_t number_of(const cuda::Kernel& kernel, const cuda::Target& target) {
    const cuda::jit::Request request = cuda::request_of(kernel, target);
    const std::string name = request.architecture + " " + request.expression();
    const auto [found, fresh] = numbers_.emplace(name, kernels_.size());
    if (fresh) {
      kernels_.push_back({{"file", request.file},
                          {"kernel", request.kernel},
                          {"argument", request.argument},
                          {"architecture", request.architecture},
                          {"options", request.options},
                          {"registers", cuda::limits::registers(kernel)},
                          {"spill", cuda::limits::spilt(kernel)},
                          {"local", cuda::limits::local(kernel)}});
    }
    return found->second;
  }
};

void run(const std::vector<std::string>& architectures, bool table) {
  std::vector<Problem> problems;
  for (std::string line; std::getline(std::cin, line);) {
    if (!line.empty() && !line.starts_with('#')) {
      problems.push_back(parse(line));
    }
  }
  for (const check::Case& c : table ? check::cases(check::Table::kFull) : std::vector<check::Case>()) {
    if (c.problem.type == DType::kFp64) {
      continue;  // the CPU's
    }
    problems.push_back(c.problem);
    problems.push_back(check::forward_of(c.problem));
  }
  List list;
  for (const std::string& architecture : architectures) {
    for (const Problem& problem : problems) {
      list.add(problem, architecture);
    }
  }
  std::cout << list.result() << "\n";
}

}  // namespace

int main(int count, char** arguments) {
  std::vector<std::string> architectures;
  bool table = false;
  for (int i = 1; i < count; ++i) {
    const std::string_view argument = arguments[i];
    if (argument == "--table") {
      table = true;
    } else if (argument == "--arch" && i + 1 < count) {
      architectures = split(arguments[++i], ',');
    } else {
      std::fputs("usage: list_kernels --arch ARCH[,ARCH...] [--table] < problem lines\n", stderr);
      return 2;
    }
  }
  try {
    run(architectures, table);
  } catch (const std::exception& error) {
    std::fputs(fmt::format("list_kernels: {}\n", error.what()).c_str(), stderr);
    return 1;
  }
  return 0;
}
