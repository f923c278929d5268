// SPDX-License-Identifier: Apache-2.0
//
// fovea check: the case table on this machine, every row forward and backward against the fp64 reference; on a GPU, see
// check_gpu.cpp.
// fovea cases: its rows.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>

#include "check/cases.h"
#include "check/run.h"
#include "check_gpu.h"
#include "commands.h"
#include "core/environment.h"
#include "core/nearest.h"
#include "cpu/cpu.h"
#include "dispatch/plan.h"
#include "fault.h"
#include "progress.h"

namespace fovea::cli {
namespace {

struct Settings {
  std::vector<std::string> filter;
  std::string table = "full";
  std::uint64_t random = 0;  // so many problems drawn at random, in place of the table
  std::uint64_t seed = 1;    // of the first
  std::string isa;
  std::string backend;
  bool gradients = false;
  std::string device = "cpu";
  GpuSettings gpu;
};

std::vector<std::string> words_of_all(const std::vector<std::string>& arguments) {
  std::vector<std::string> words;
  for (const std::string& argument : arguments) {
    const std::vector<std::string> more = words_of(argument);
    words.insert(words.end(), more.begin(), more.end());
  }
  return words;
}

std::vector<std::string> names_of_values() {
  std::vector<std::string> names;
  for (int n = 0; n <= static_cast<int>(check::Values::kNanWhereMasked); ++n) {
    names.emplace_back(check::name_of(static_cast<check::Values>(n)));
  }
  return names;
}

// A problem line, which may have the word that a row of the table ends in: what its numbers are like.
check::Case own_problem(const std::vector<std::string>& words) {
  constexpr std::string_view kValues = "values=";
  check::Case c;
  std::string problem;
  bool has_direction = false;
  for (const std::string& word : words) {
    if (word.starts_with(kValues)) {
      const std::string name = word.substr(kValues.size());
      const std::vector<std::string> names = names_of_values();
      const auto found = std::find(names.begin(), names.end(), name);
      if (found == names.end()) {
        throw Error(FOVEA_INVALID_ARGUMENT,
                    fmt::format("{}: accepted: {}{}", word, fmt::join(names, ", "), hint(name, names)));
      }
      c.values = static_cast<check::Values>(found - names.begin());
      continue;
    }
    has_direction = has_direction || word == "fwd" || word == "bwd";
    problem += (problem.empty() ? "" : " ") + word;
  }
  c.problem = parse(has_direction ? problem : "bwd " + problem);
  if (const std::string missing = check::lacks(c.problem, c.values); !missing.empty()) {
    throw Error(FOVEA_INVALID_ARGUMENT, fmt::format("{}{} needs {}", kValues, check::name_of(c.values), missing));
  }
  return c;
}

// The rows that match the filter. If none does and the filter is a problem line, that problem.
std::vector<check::Case> chosen(const Settings& settings) {
  const std::vector<std::string> filter = words_of_all(settings.filter);
  std::vector<check::Case> rows;
  const auto add = [&](const check::Case& c) {
    if (matches(check::to_text(c), filter)) {
      rows.push_back(c);
    }
  };
  if (settings.random > 0) {
    for (std::uint64_t n = 0; n < settings.random; ++n) {
      add(check::random_case(settings.seed + n));
    }
  } else {
    for (const check::Case& c :
         check::cases(settings.table == "reduced" ? check::Table::kReduced : check::Table::kFull)) {
      add(c);
    }
  }
  if (!rows.empty()) {
    return rows;
  }
  if (settings.random > 0) {
    throw Fault(kBadInput,
                fmt::format("'{}': none of the {} problems has these words", fmt::join(filter, " "), settings.random));
  }
  const std::string line = fmt::format("{}", fmt::join(filter, " "));
  check::Case c;
  try {
    c = own_problem(filter);
  } catch (const Error& error) {
    throw Fault(kBadInput, fmt::format("'{}': no row of the table has these words, and it is no problem line of its "
                                       "own: {}",
                                       line, error.what()));
  }
  c.problem = backward_of(c.problem);  // a check runs both directions
  c.seed = 1;
  return {c};
}

// How a problem that was drawn is drawn again.
std::string again(const Settings& settings, const check::Case& c) {
  return settings.random == 0 ? "" : fmt::format(" (--random 1 --seed {})", c.seed);
}

std::vector<std::string> instruction_sets(const std::string& name) {
  std::vector<std::string> available;
  for (const cpu::Isa& isa : cpu::instruction_sets()) {
    if (isa.available) {
      available.push_back(isa.name);
    }
  }
  if (name == "all") {
    return available;
  }
  if (!name.empty() && std::find(available.begin(), available.end(), name) == available.end()) {
    available.emplace_back("all");
    throw Fault(kBadInput, fmt::format("--isa {}: not one that this machine runs{}", name, hint(name, available)));
  }
  return {name};
}

// An error once, not with every row. A GPU's backend was refused before.
void known_backend(const std::string& name) {
  std::vector<std::string> names;
  for (const Verdict& verdict : backends()) {
    if (verdict.backend != "cuda") {
      names.push_back(verdict.backend);
    }
  }
  if (!name.empty() && std::find(names.begin(), names.end(), name) == names.end()) {
    throw Fault(kBadInput,
                fmt::format("--backend {}: accepted: {}{}", name, fmt::join(names, ", "), hint(name, names)));
  }
}

// "cuda" or "cuda:1"; false: "cpu".
bool is_gpu(const std::string& device, int& ordinal) {
  if (device == "cpu") {
    return false;
  }
  constexpr std::string_view kCuda = "cuda";
  std::string_view number = device;
  bool good = number.starts_with(kCuda);
  if (good && number.size() > kCuda.size()) {
    number.remove_prefix(kCuda.size() + 1);
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), ordinal);
    good = device[kCuda.size()] == ':' && error == std::errc() && end == number.data() + number.size() && ordinal >= 0;
  }
  if (!good) {
    throw Fault(kBadInput, fmt::format("--device {}: accepted: cpu, cuda, cuda:N with the number of a GPU", device));
  }
  return true;
}

void run_check(const Settings& settings) {
  const std::vector<check::Case> rows = chosen(settings);
  const Problem& first = rows.front().problem;
  GpuSettings gpu = settings.gpu;
  if (is_gpu(settings.device, gpu.ordinal)) {
    const bool other = !settings.backend.empty() && settings.backend != "cuda";
    if (!settings.isa.empty() || settings.gradients || other) {
      throw Fault(kBadInput, fmt::format("{}: only for the CPU; --device {} compares each row with the fp64 reference",
                                         other                ? "--backend " + settings.backend
                                         : settings.gradients ? "--gradients"
                                                              : "--isa",
                                         settings.device));
    }
    const std::string rows_of = settings.random > 0
                                    ? fmt::format("--random {} --seed {}", settings.random, settings.seed)
                                    : fmt::format("--table {}", settings.table);
    gpu.arguments = fmt::format("--device {} {} {}", settings.device, rows_of, fmt::join(settings.filter, " "));
    return check_on_gpu(gpu, rows);
  }
  if (gpu.seconds > 0 || !gpu.report.empty() || gpu.jobs > 0) {
    throw Fault(kBadInput, fmt::format("{}: only with --device cuda", gpu.seconds > 0 ? "--seconds"
                                                                      : gpu.jobs > 0  ? "--jobs"
                                                                                      : "--report"));
  }
  refuse_gpu("check", first.device, settings.backend.empty() ? first.backend : settings.backend);
  known_backend(settings.backend);
  const std::vector<std::string> sets = instruction_sets(settings.isa);
  const bool forced = !sets.front().empty();
  fmt::print("{} row{}, {}\n", rows.size(), rows.size() == 1 ? "" : "s",
             forced                            ? fmt::format("{}", fmt::join(sets, ", "))
             : settings.backend == "reference" ? settings.backend
                                               : cpu::instruction_set());
  Progress progress("check");
  std::size_t failed = 0;
  std::size_t done = 0;
  for (const check::Case& c : rows) {
    const auto report = [&](const std::string& what, const check::Outcome& outcome) {
      if (!outcome.passed()) {
        progress.finish();
        ++failed;
        fmt::print("FAILED{} {}{}\n{}\n", what, check::to_text(c), again(settings, c), check::to_text(outcome));
        std::fflush(stdout);  // a file shows it at once, too
      }
    };
    std::optional<check::Trial> trial;
    try {
      trial.emplace(c);
    } catch (const std::exception& error) {
      throw Fault(kBadInput, fmt::format("{}: {}", check::to_text(c), error.what()));
    }
    for (const std::string& isa : sets) {
      if (!isa.empty()) {
        setenv("FOVEA_CPU_ISA", isa.c_str(), 1);
        read_environment_again();
      }
      report(isa.empty() ? "" : " on " + isa, trial->test(settings.backend));
      if (settings.gradients) {
        report(" finite differences", check::gradient(c, settings.backend));
      }
    }
    ++done;
    progress.show(static_cast<double>(done) / static_cast<double>(rows.size()),
                  fmt::format("{} of {}, {} failed", done, rows.size(), failed));
  }
  progress.finish();
  const std::size_t trials = rows.size() * sets.size() * (settings.gradients ? 2 : 1);
  fmt::print("{} passed, {} failed, {:.1f} s\n", trials - failed, failed, progress.seconds());
  if (failed > 0) {
    throw Fault(kCheckFailed, "");
  }
}

void add_table(CLI::App& app, Settings& settings) {
  app.add_option("filter", settings.filter,
                 "Only rows whose line has all of these words; '!WORD' excludes rows that have WORD")
      ->type_name("WORD");
  CLI::Option* table = app.add_option("--table", settings.table, "full, or reduced (each pair of values once)")
                           ->check(CLI::IsMember({"full", "reduced"}))
                           ->capture_default_str();
  CLI::Option* random =
      app.add_option("--random", settings.random,
                     "In place of the table, so many problems with features and sizes drawn at random")
          ->check(CLI::Range(1, 1'000'000))
          ->excludes(table)
          ->type_name("N");
  app.add_option("--seed", settings.seed, "Of the first of them; the next have the next numbers")
      ->needs(random)
      ->check(CLI::NonNegativeNumber)
      ->type_name("N")
      ->capture_default_str();
}

}  // namespace

void add_check(CLI::App& app) {
  auto settings = std::make_shared<Settings>();
  CLI::App* check_app =
      app.add_subcommand("check", "Compare the results of this machine's CPU or GPU with the fp64 reference");
  add_table(*check_app, *settings);
  check_app->add_option("--isa", settings->isa, "An instruction set, or all of this machine's; default: the best")
      ->type_name("NAME");
  check_app->add_option("--backend", settings->backend, "A backend; default: cpu")->type_name("NAME");
  check_app->add_flag("--gradients", settings->gradients,
                      "Also compare every gradient with finite differences, in fp64");
  check_app->add_option("--device", settings->device, "cpu, cuda, or cuda:N for the GPU with this number")
      ->type_name("DEVICE")
      ->capture_default_str();
  check_app
      ->add_option("--report", settings->gpu.report,
                   "With --device cuda: write the result to a file that you can send (docs/platforms.md)")
      ->type_name("FILE");
  check_app
      ->add_option("--seconds", settings->gpu.seconds,
                   "With --device cuda: begin no row after so many seconds; the rows come in a random order")
      ->check(CLI::PositiveNumber)
      ->type_name("N");
  check_app
      ->add_option("--limit", settings->gpu.row_seconds,
                   "With --device cuda: the check ends if a call on the GPU takes longer than so many seconds")
      ->check(CLI::PositiveNumber)
      ->type_name("N")
      ->capture_default_str();
  check_app
      ->add_option("-j,--jobs", settings->gpu.jobs,
                   "With --device cuda: how many kernels are compiled at once; default: as many as there are cores")
      ->check(CLI::Range(1, 1024))
      ->type_name("N");
  check_app->footer(
      "Every row is computed forward and backward. A row passes if the error of each output is at most twice that of a "
      "naive\n"
      "evaluation with the same roundings. Exit code 1 if a row fails.\n"
      "On a GPU the kernels are compiled first (NVRTC, docs/install.md); without a cache the whole table takes some "
      "minutes on\n"
      "16 cores. The report has the GPU, the driver, NVRTC, the counts, the largest errors, and the line of each row "
      "that "
      "failed.\n"
      "Examples:\n"
      "  fovea check                              the whole table\n"
      "  fovea check bf16 causal '!dropout'       some of it\n"
      "  fovea check --isa all --table reduced    every instruction set\n"
      "  fovea check --random 500 --seed 7        500 problems that are not in the table\n"
      "  fovea check --device cuda --report report.txt\n"
      "  fovea check 'bwd b=2 hq=4 hk=2 sq=100 sk=77 d=80 fp16 causal'   a problem of your own\n"
      "  fovea check 'b=2 hq=4 sq=100 sk=77 d=80 fp16 values=one_hot'    with other numbers than N(0, 1)");
  check_app->callback([settings] { run_check(*settings); });
}

void add_cases(CLI::App& app) {
  auto settings = std::make_shared<Settings>();
  CLI::App* cases_app = app.add_subcommand("cases", "Print the rows of the case table");
  add_table(*cases_app, *settings);
  cases_app->footer(
      "Examples:\n"
      "  fovea cases | wc -l\n"
      "  fovea cases bf16 bias dropout\n"
      "  fovea cases values=one_hot '!causal'\n\n" +
      std::string(problem_line_help()) +
      fmt::format("A row ends in values=, which names the kind of numbers in its tensors and is not a word of the "
                  "problem line; 'fovea\ncheck' takes it with a problem of your own, too:\n  {}\n",
                  fmt::join(names_of_values(), " ")));
  cases_app->callback([settings] {
    for (const check::Case& c : chosen(*settings)) {
      fmt::print("{}\n", check::to_text(c));
    }
  });
}

}  // namespace fovea::cli
