// SPDX-License-Identifier: Apache-2.0
//
// fovea bench: how fast this machine computes some problems. Each is checked first, in small; then three rounds go
// through all of them in turn, each call on other memory than the last, and the median of the rounds is reported.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <fstream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "buffers.h"
#include "capi/machine.h"
#include "check/run.h"
#include "commands.h"
#include "cpu/cpu.h"
#include "fault.h"
#include "io/file.h"
#include "progress.h"
#include "work.h"

namespace fovea::cli {
namespace {

constexpr const char* kRows[] = {
    "fwd b=1 hq=8 sq=2048 sk=2048 d=128 fp32",
    "bwd b=1 hq=8 sq=2048 sk=2048 d=128 fp32",
    "fwd b=1 hq=8 sq=2048 sk=2048 d=64 fp32",
    "bwd b=1 hq=8 sq=2048 sk=2048 d=64 fp32",
    "fwd b=1 hq=8 sq=2048 sk=2048 d=128 fp32 causal",
    "bwd b=1 hq=8 sq=2048 sk=2048 d=128 fp32 causal",
    "fwd b=1 hq=8 sq=2048 sk=2048 d=64 fp32 bias=1,h,q,k",
    "bwd b=1 hq=8 sq=2048 sk=2048 d=64 fp32 bias=1,h,q,k",
    "fwd b=1 hq=8 sq=2048 sk=2048 d=64 fp32 window=256,0",
    "fwd b=1 hq=8 sq=2048 sk=2048 d=64 fp32 dropout=0.1",
    "bwd b=1 hq=8 sq=2048 sk=2048 d=64 fp32 dropout=0.1",
    "fwd b=1 hq=8 hk=2 sq=2048 sk=2048 d=128 bf16 causal",
    "bwd b=1 hq=8 hk=2 sq=2048 sk=2048 d=128 bf16 causal",
    "fwd b=1 hq=64 sq=333 sk=333 d=80 fp32",
    "bwd b=1 hq=64 sq=333 sk=333 d=80 fp32",
    "fwd b=1 hq=1 sq=16384 sk=16384 d=64 fp32 causal",
    "fwd b=8 hq=8 sq=1 sk=4096 d=128 fp32",
};
constexpr int kRounds = 3;
constexpr double kSecondsInRound = 0.4;     // of a row, at least one call
constexpr std::size_t kMemory = 256 << 20;  // rotated through: more than a last-level cache holds
constexpr std::size_t kMostCopies = 16;
constexpr std::int64_t kLongestWhenChecked = 160;
constexpr std::int64_t kMostHeadsWhenChecked = 2;

struct Settings {
  std::vector<std::string> filter;
  std::string json;
  bool list = false;
  bool force = false;
};

struct Row {
  std::string line;
  Problem problem;
  double flops = 0;
  std::vector<double> seconds;  // of a round, per call
  double median = 0;
};

// The same problem with fewer heads and rows, forward and backward against the reference.
check::Case in_small(const Problem& problem) {
  check::Case c;
  Problem& p = c.problem;
  p = backward_of(problem);
  p.need = every_gradient(p);
  const std::int64_t group = p.heads_k > 0 ? p.heads_q / p.heads_k : 1;
  p.heads_k = std::min(p.heads_k, kMostHeadsWhenChecked);
  p.heads_q = p.heads_k * group;
  if (!p.packed) {
    p.batch1 = std::min<std::int64_t>(p.batch1, 2);
    p.seqlen_q = std::min(p.seqlen_q, kLongestWhenChecked);
    p.seqlen_k = std::min(p.seqlen_k, kLongestWhenChecked);
  }
  c.seed = 1;
  return c;
}

void check_row(const Row& row) {
  const check::Outcome outcome = check::Trial(in_small(row.problem)).test(row.problem.backend);
  if (!outcome.passed()) {
    throw Fault(kCheckFailed, fmt::format("{}: wrong, so not timed: {}", row.line, check::to_text(outcome)));
  }
}

// One round of a row: as many calls as fit the time, each on the next copy.
double round_of(const Row& row, const std::deque<Buffers>& copies) {
  using Clock = std::chrono::steady_clock;
  std::deque<Caller> callers;
  for (const Buffers& copy : copies) {
    callers.emplace_back(copy.problem(), row.problem.direction);
  }
  callers.front()();  // wakes the threads
  const auto start = Clock::now();
  std::size_t calls = 0;
  double seconds = 0;
  do {
    callers[++calls % callers.size()]();
    seconds = std::chrono::duration<double>(Clock::now() - start).count();
  } while (seconds < kSecondsInRound);
  return seconds / static_cast<double>(calls);
}

void measure(Row& row, int round) {
  std::deque<Buffers> copies;
  std::size_t bytes = 0;
  do {
    Buffers& copy = copies.emplace_back(row.problem, static_cast<std::uint64_t>(round) * kMostCopies + copies.size());
    bytes += copy.bytes();
    if (row.problem.direction == Direction::kBackward) {
      copy.forward();
    }
  } while (bytes < kMemory && copies.size() < kMostCopies);
  row.seconds.push_back(round_of(row, copies));
}

std::vector<Row> chosen(const Settings& settings) {
  std::vector<std::string> filter;
  for (const std::string& argument : settings.filter) {
    const std::vector<std::string> words = words_of(argument);
    filter.insert(filter.end(), words.begin(), words.end());
  }
  std::vector<Row> rows;
  const auto add = [&](const std::string& line) {
    Row row;
    row.problem = parse(line);
    refuse_gpu("bench", row.problem.device, row.problem.backend);
    row.line = print(row.problem);
    row.flops = flops(row.problem, row.problem.direction);
    rows.push_back(std::move(row));
  };
  for (const char* line : kRows) {
    if (matches(print(parse(line)), filter)) {
      add(line);
    }
  }
  if (rows.empty()) {
    const std::string line = fmt::format("{}", fmt::join(filter, " "));
    try {
      add(line);
    } catch (const Error& error) {
      throw Fault(kBadInput,
                  fmt::format("'{}': no row of the benchmark has these words (fovea bench --list), and it is "
                              "no problem line of its own: {}",
                              line, error.what()));
    }
  }
  return rows;
}

nlohmann::json to_json(const Machine& machine, const std::vector<Row>& rows) {
  nlohmann::json json;
  json["fovea"] = machine.version;
  json["processor"] = machine.processor;
  json["isa"] = machine.isa;
  json["threads"] = machine.threads;
  json["rounds"] = kRounds;
  json["rows"] = nlohmann::json::array();
  for (const Row& row : rows) {
    json["rows"].push_back({{"problem", row.line},
                            {"seconds", row.median},
                            {"seconds_of_rounds", row.seconds},
                            {"flops_of_allowed_pairs", row.flops},
                            {"gflops_per_second", 1e-9 * row.flops / row.median}});
  }
  return json;
}

void run(const Settings& settings) {
  std::vector<Row> rows = chosen(settings);
  if (settings.list) {
    for (const Row& row : rows) {
      fmt::print("{}\n", row.line);
    }
    return;
  }
  const bool to_standard_output = settings.json == "-";
  if (!settings.json.empty() && !to_standard_output) {
    require_writable(settings.json, settings.force);
  }
  cpu::instruction_set();  // refuses a wrong FOVEA_CPU_ISA before anything is computed
  const Machine machine = this_machine();
  std::FILE* table = to_standard_output ? stderr : stdout;
  fmt::print(table, "fovea {}, {}, {}, {} thread{}; N(0, 1), medians of {} rounds, GFLOP/s of allowed pairs\n",
             machine.version, machine.processor, machine.isa, machine.threads, machine.threads == 1 ? "" : "s",
             kRounds);
  Progress progress("bench");
  double done = 0;
  const auto step = [&](const Row& row) {
    done += 1.0 / static_cast<double>(rows.size() * (kRounds + 1));
    progress.show(done, row.line);
  };
  for (const Row& row : rows) {
    check_row(row);
    step(row);
  }
  for (int round = 0; round < kRounds; ++round) {
    for (Row& row : rows) {
      measure(row, round);
      step(row);
    }
  }
  progress.finish();
  fmt::print(table, "{:>10} {:>10}  {}\n", "GFLOP/s", "ms", "problem");
  for (Row& row : rows) {
    std::vector<double> sorted = row.seconds;
    std::sort(sorted.begin(), sorted.end());
    row.median = sorted[sorted.size() / 2];
    fmt::print(table, "{:>10.1f} {:>10.3f}  {}\n", 1e-9 * row.flops / row.median, 1e3 * row.median, row.line);
  }
  const std::string json = to_json(machine, rows).dump(2) + "\n";
  if (to_standard_output) {
    fmt::print("{}", json);
  } else if (!settings.json.empty()) {
    write_file(settings.json, [&](std::ostream& out) { out << json; });
  }
}

}  // namespace

void add_bench(CLI::App& app) {
  auto settings = std::make_shared<Settings>();
  CLI::App* bench_app = app.add_subcommand("bench", "Measure the speed of the CPU backend on this machine");
  bench_app
      ->add_option("filter", settings->filter, "Only rows whose line has all of these words; or a whole problem line")
      ->type_name("WORD");
  bench_app->add_option("--json", settings->json, "Write the numbers as JSON to a file; '-' is standard output")
      ->type_name("FILE");
  bench_app->add_flag("--list", settings->list, "Print the rows and measure none");
  bench_app->add_flag("--force", settings->force, "Overwrite an existing JSON file");
  bench_app->footer(
      "Every row is first checked against the reference (with at most 160 rows of queries and keys), then timed.\n"
      "Examples:\n"
      "  fovea bench causal\n"
      "  fovea bench 'bwd b=1 hq=16 sq=4096 sk=4096 d=128 bf16 causal'\n"
      "  fovea bench fwd d=64 --json - | jq '.rows[].gflops_per_second'");
  bench_app->callback([settings] { run(*settings); });
}

}  // namespace fovea::cli
