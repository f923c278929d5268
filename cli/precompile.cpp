// SPDX-License-Identifier: Apache-2.0
//
// fovea precompile: fills the kernel cache for some problems and architectures, so that later no process compiles.
// No GPU is needed.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <iostream>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "check/cases.h"
#include "commands.h"
#include "core/shapes.h"
#include "core/validate.h"
#include "cuda/executable.h"
#include "fault.h"
#include "progress.h"

namespace fovea::cli {
namespace {

struct Settings {
  std::vector<std::string> lines;
  std::string file;
  bool table = false;
  std::vector<std::string> architectures;
  std::vector<int> multiprocessors;  // of a GPU of these; none: of known products
  int jobs = 0;
  bool list = false;
};

struct Given {
  Problem problem;
  std::string where;  // it was read, for messages: "problems.txt:3: "
};

// What `work` says is wrong begins with where the problem was read.
template <class Work>
void naming(const std::string& where, const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    throw Error(error.status(), where + error.what());
  }
}

// A line without fwd or bwd stands for both.
void add_line(std::vector<Given>& problems, const std::string& line, const std::string& where) {
  const std::vector<std::string> words = words_of(line);
  if (words.empty() || words.front().starts_with('#')) {
    return;
  }
  for (const std::string& word : words) {
    if (word == "device=cpu" || (word.starts_with("backend=") && word != "backend=cuda")) {
      throw Fault(kBadInput,
                  fmt::format("{}{}: in '{}'; precompile is for a GPU's kernels: accepted is device=cuda, or no "
                              "word of it",
                              where, word, line));
    }
  }
  const bool directed = std::any_of(words.begin(), words.end(), [](auto& w) { return w == "fwd" || w == "bwd"; });
  for (const std::string direction : {"fwd ", "bwd "}) {
    naming(where, [&] { problems.push_back({parse(directed ? line : direction + line), where}); });
    if (directed) {
      break;
    }
  }
}

std::vector<Given> problems_of(const Settings& settings) {
  std::vector<Given> problems;
  for (std::size_t n = 0; n < settings.lines.size(); ++n) {
    add_line(problems, settings.lines[n], settings.lines.size() > 1 ? fmt::format("problem {}: ", n + 1) : "");
  }
  if (!settings.file.empty()) {
    std::ifstream opened;
    if (settings.file != "-") {
      opened.open(settings.file);
      if (!opened) {
        throw Fault(kBadInput, fmt::format("{}: cannot be read", settings.file));
      }
    }
    std::istream& input = settings.file == "-" ? std::cin : opened;
    const std::string name = settings.file == "-" ? "standard input" : settings.file;
    int number = 0;
    for (std::string line; std::getline(input, line);) {
      add_line(problems, line, fmt::format("{}:{}: ", name, ++number));
    }
  }
  if (settings.table) {
    for (const check::Case& c : check::cases(check::Table::kFull)) {
      if (c.problem.type == DType::kFp64) {
        continue;  // the CPU's
      }
      problems.push_back({c.problem, ""});
      problems.push_back({check::forward_of(c.problem), ""});
    }
  }
  if (problems.empty()) {
    throw Fault(kBadInput, "no problem is given: lines, --file or --table are accepted");
  }
  return problems;
}

// This machine's GPUs as they are: a plan may depend on how many multiprocessors there are.
std::vector<cuda::Target> targets_of(const Settings& settings) {
  std::vector<cuda::Target> targets;
  const auto add = [&](const cuda::Target& target) {
    if (std::find(targets.begin(), targets.end(), target) == targets.end()) {
      targets.push_back(target);
    }
  };
  if (!settings.architectures.empty()) {
    for (const std::string& architecture : settings.architectures) {
      for (cuda::Target target : cuda::targets_of(architecture)) {
        if (settings.multiprocessors.empty()) {
          add(target);
        }
        for (const int multiprocessors : settings.multiprocessors) {
          target.multiprocessors = multiprocessors;
          add(target);
        }
      }
    }
    return targets;
  }
  std::string why_not;
  if (cuda::jit::find_driver(why_not) == nullptr) {
    throw Fault(kBadInput, fmt::format("no --arch is given, and this machine has no GPU to compile for ({})", why_not));
  }
  constexpr int kLeast = 80;
  for (int i = 0; i < cuda::jit::device_count(cuda::jit::driver()); ++i) {
    if (const cuda::Target target = cuda::target_of(cuda::jit::device(i)); target.capability >= kLeast) {
      add(target);
    }
  }
  if (targets.empty()) {
    throw Fault(kBadInput, "no --arch is given, and this machine has no GPU of compute capability 8.0 or newer");
  }
  return targets;
}

struct Work {
  std::vector<cuda::jit::Request> requests;
  std::vector<std::string> refused;  // problems that no kernel can compute, with the reason
};

Work work_of(const std::vector<Given>& problems, const std::vector<cuda::Target>& targets) {
  Work work;
  std::set<std::string> known;
  for (const Given& given : problems) {
    Problem problem = given.problem;
    if (problem.type == DType::kFp64) {
      work.refused.push_back(
          fmt::format("{}{}: fp64; accepted on a GPU: fp32, fp16, bf16", given.where, print(problem)));
      continue;
    }
    problem.device = FOVEA_CUDA;
    problem.backend.clear();
    const Shapes shapes(problem);
    Call call;
    naming(given.where, [&] { call = validate(shapes.get(), problem.direction, /*shapes_only=*/true); });
    for (const cuda::Target& target : targets) {
      try {
        for (const cuda::Kernel& kernel : cuda::kernels_for(call, target)) {
          cuda::jit::Request request = cuda::request_of(kernel, target);
          if (known.insert(request.expression() + request.architecture).second) {
            work.requests.push_back(std::move(request));
          }
        }
      } catch (const Error& error) {
        if (error.status() != FOVEA_UNSUPPORTED) {
          throw;
        }
        work.refused.push_back(
            fmt::format("{}{} for {}: {}", given.where, print(problem), target.architecture(), error.what()));
      }
    }
  }
  return work;
}

void compile(const std::vector<cuda::jit::Request>& requests, int jobs) {
  cuda::jit::Settings from = cuda::jit::Settings::from_environment();
  from.installed.clear();  // the folder shall have all of them: where it is taken to, nothing may be installed
  cuda::jit::Jit jit(std::move(from));
  if (jit.settings().mode != cuda::jit::Mode::kJit) {
    throw Fault(kBadInput, "FOVEA_JIT: compiling is not allowed; accepted here: jit, or not set");
  }
  if (jit.settings().cache_folder.empty()) {
    throw Fault(kBadInput, "FOVEA_CACHE_DIR: none; accepted here: a folder, or not set");
  }
  Progress progress("precompile");
  std::mutex mutex;
  std::atomic<std::size_t> next = 0;
  std::size_t done = 0;
  std::exception_ptr failed;
  const auto work = [&] {
    for (std::size_t n = next++; n < requests.size(); n = next++) {
      try {
        jit.binary(requests[n]);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        failed = failed ? failed : std::current_exception();
        next = requests.size();
      }
      const std::lock_guard<std::mutex> lock(mutex);
      progress.show(static_cast<double>(++done) / static_cast<double>(requests.size()), requests[n].kernel);
    }
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < jobs; ++i) {
    threads.emplace_back(work);
  }
  work();
  for (std::thread& thread : threads) {
    thread.join();
  }
  progress.finish();
  if (failed) {
    std::rethrow_exception(failed);
  }
  const cuda::jit::Jit::Counts counts = jit.counts();
  const std::string elsewhere =
      counts.precompiled > 0 ? fmt::format("; {} of them in FOVEA_PRECOMPILED_DIR", counts.precompiled) : "";
  fmt::print("{} kernels: {} compiled, {} were there; {}{}\n", requests.size(), counts.compiled,
             counts.disk + counts.precompiled, jit.settings().cache_folder, elsewhere);
}

void run(const Settings& settings) {
  const Work work = work_of(problems_of(settings), targets_of(settings));
  if (settings.list) {
    for (const cuda::jit::Request& request : work.requests) {
      fmt::print("{} {}\n", request.architecture, request.expression());
    }
  } else {
    const int cores = static_cast<int>(std::max(std::thread::hardware_concurrency(), 1u));
    compile(work.requests, settings.jobs > 0 ? settings.jobs : cores);
  }
  if (!work.refused.empty()) {
    constexpr std::size_t kShown = 10;
    const std::size_t shown = std::min(work.refused.size(), kShown);
    throw Fault(kUnsupported, fmt::format("{} problems cannot be computed{}:\n{}", work.refused.size(),
                                          shown < work.refused.size() ? fmt::format(", {} of them", shown) : "",
                                          fmt::join(work.refused.begin(),
                                                    work.refused.begin() + static_cast<std::ptrdiff_t>(shown), "\n")));
  }
}

}  // namespace

void add_precompile(CLI::App& app) {
  auto settings = std::make_shared<Settings>();
  CLI::App* command = app.add_subcommand("precompile", "Compile the GPU kernels of some problems ahead of time");
  command
      ->add_option("problems", settings->lines,
                   "Problem lines, one in each argument; a line without fwd or bwd means both")
      ->type_name("LINE");
  command->add_option("-f,--file", settings->file, "A file of problem lines; '-' is standard input")->type_name("FILE");
  command->add_flag("--table", settings->table, "Also the problems of `fovea cases`");
  CLI::Option* const arch = command
                                ->add_option("-a,--arch", settings->architectures,
                                             "Architectures: sm_80, sm_90, ...; without one, this machine's GPUs")
                                ->delimiter(',')
                                ->allow_extra_args(false)
                                ->type_name("ARCH");
  command
      ->add_option("-m,--multiprocessors", settings->multiprocessors,
                   "The GPU's number of multiprocessors; default: those of some products of the architecture")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Range(1, 1 << 16))
      ->needs(arch)
      ->type_name("N");
  command
      ->add_option("-j,--jobs", settings->jobs, "How many kernels are compiled at once; 0: as many as there are cores")
      ->check(CLI::Range(0, 1024))
      ->type_name("N");
  command->add_flag("--list", settings->list, "Print the kernels and compile none");
  command->footer(
      "The kernels are written to the folder FOVEA_CACHE_DIR (docs/jit.md). This needs NVRTC, and with --arch no GPU.\n"
      "Examples:\n"
      "  fovea precompile --arch sm_90 'b=2 hq=32 hk=8 sq=4096 sk=4096 d=128 bf16 causal'\n"
      "  FOVEA_CACHE_DIR=kernels fovea precompile --arch sm_80,sm_90 --file problems.txt\n"
      "Exit code 3 if one of the problems is not supported; the kernels of the other problems are still compiled.");
  command->callback([settings] { run(*settings); });
}

}  // namespace fovea::cli
