// SPDX-License-Identifier: Apache-2.0
//
// fovea run: tensors from files, one forward, with --backward one backward, results to files.
//
//   1. Read    every tensor by its name, from one .safetensors or from a file each.
//   2. Settle  what the tensors say about the problem is turned into its line; the user's line adds options to it, and
//              where it speaks of shapes it must agree (run_call.cpp).
//   3. Refuse  whatever could not be computed, or not be written afterwards, before anything is.
//   4. Run, and write.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "commands.h"
#include "core/nearest.h"
#include "core/problem.h"
#include "fault.h"
#include "io/file.h"
#include "io/npy.h"
#include "io/safetensors.h"
#include "progress.h"
#include "run_call.h"
#include "work.h"

namespace fovea::cli {
namespace {

namespace fs = std::filesystem;

// ---- 1. read ----

Array read_one(const std::string& name, const fs::path& path) {
  if (path.extension() == ".npy") {
    return read_npy(path);
  }
  if (fs::is_directory(path)) {
    throw Fault(kBadInput, fmt::format("--{} {}: a folder, where a file is expected", name, path.string()));
  }
  if (path.extension() != ".safetensors") {
    throw Fault(kBadInput, fmt::format("--{} {}: a name that does not say what the file is; accepted: .npy or "
                                       ".safetensors at its end",
                                       name, path.string()));
  }
  Arrays arrays = read_safetensors(path);
  const auto found = arrays.find(name);
  if (found == arrays.end()) {
    std::vector<std::string> there;
    there.reserve(arrays.size());
    for (const auto& [other, unused] : arrays) {
      there.push_back(other);
    }
    throw Fault(kBadInput, fmt::format("--{0} {1}: the file has no tensor '{0}'; it has: {2}", name, path.string(),
                                       fmt::join(there, ", ")));
  }
  return std::move(found->second);
}

Arrays read_inputs(const RunSettings& settings) {
  std::vector<std::string> known;
  known.reserve(kInputs.size());
  for (const Input& input : kInputs) {
    known.emplace_back(input.name);
  }
  Arrays arrays;
  if (!settings.file.empty()) {
    if (fs::path(settings.file).extension() == ".npy") {
      throw Fault(kBadInput, fmt::format("{}: an .npy file holds one array; say which tensor it is, as in --q {}",
                                         settings.file, settings.file));
    }
    arrays = read_safetensors(settings.file);
    for (const auto& [name, unused] : arrays) {
      if (std::find(known.begin(), known.end(), name) == known.end()) {
        throw Fault(kBadInput,
                    fmt::format("{}: tensor '{}' is not an input{}", settings.file, name, hint(name, known)));
      }
    }
  }
  for (const auto& [name, path] : settings.files) {
    if (arrays.contains(name)) {
      throw Fault(kBadInput,
                  fmt::format("--{0} {1}: {2} has a tensor '{0}' too; give it once", name, path, settings.file));
    }
    arrays.emplace(name, read_one(name, path));
  }
  for (const char* name : {"q", "k", "v"}) {
    if (!arrays.contains(name)) {
      throw Fault(kBadInput, fmt::format("{0} is missing: give --{0} FILE, or a .safetensors that holds it", name));
    }
  }
  return arrays;
}

// ---- 3. where it goes ----

bool is_one_file(const std::string& output) { return fs::path(output).extension() == ".safetensors"; }

// --force replaces results, not what they are made of.
void refuse_an_input(const fs::path& path, const RunSettings& settings) {
  const auto refuse_same = [&](const std::string& input) {
    std::error_code none;  // a file that is not there is no input
    if (!input.empty() && fs::equivalent(path, input, none)) {
      throw Fault(kBadInput, fmt::format("--output {}: {} is an input of this call; give another name", settings.output,
                                         path.string()));
    }
  };
  refuse_same(settings.file);
  for (const auto& [name, input] : settings.files) {
    refuse_same(input);
  }
}

std::map<std::string, fs::path> targets(const FileCall& call, const RunSettings& settings) {
  std::map<std::string, fs::path> paths;
  if (is_one_file(settings.output)) {
    paths[""] = settings.output;
  } else {
    const bool folder = settings.output.ends_with('/') || fs::is_directory(settings.output);
    if (!folder) {
      const bool bare = !fs::path(settings.output).has_extension() && !fs::exists(settings.output);
      throw Fault(
          kBadInput,
          fmt::format("--output {}: accepted: a name that ends in .safetensors, or a folder (for an .npy file a "
                      "tensor), which is there or ends in /{}",
                      settings.output, bare ? fmt::format("; did you mean {}/?", settings.output) : ""));
    }
    for (const auto& [name, dtype] : call.outputs()) {
      if (!npy_carries(dtype)) {
        throw Fault(kBadInput,
                    fmt::format("--output {}: {} is {}, which .npy cannot carry; give --output FILE.safetensors",
                                settings.output, name, name_of(static_cast<DType>(dtype))));
      }
      paths[name] = fs::path(settings.output) / (name + ".npy");
    }
    fs::create_directories(settings.output);
  }
  for (const auto& [name, path] : paths) {
    refuse_an_input(path, settings);
    require_writable(path, settings.force);
  }
  return paths;
}

// ---- 4. run, and write ----

std::string text_of_time(double seconds) {
  return seconds < 1e-3 ? fmt::format("{:.0f} us", 1e6 * seconds) : fmt::format("{:.3f} ms", 1e3 * seconds);
}

// Nothing where the time is that of a call, not of its arithmetic.
std::string text_of_speed(double flops, double seconds) {
  constexpr double kFewestFlops = 1e7;
  return flops < kFewestFlops ? "" : fmt::format(", {:.1f} GFLOP/s of allowed pairs", 1e-9 * flops / seconds);
}

// Defaults of the line that may be unexpected.
void print_notes(const Problem& p, const std::string& line) {
  const std::vector<std::string> words = words_of(line);
  const bool aligned = std::any_of(words.begin(), words.end(), [](const std::string& word) {
    return word.starts_with("align=") || word.starts_with("causal=");
  });
  const bool lengths_differ = p.seqlen_q != p.seqlen_k || p.lengths_q != p.lengths_k || p.has_used_q || p.has_used_k;
  if (lengths_differ && !aligned && (p.banded() || p.alibi != Alibi::kNone)) {
    fmt::print(
        "note: bottom-right: the last query meets the last key; with align=tl (PyTorch's is_causal) the first "
        "meets the first\n");
  }
  if (p.dropout > 0) {
    fmt::print("dropout: seed={} offset={}; another seed draws another mask\n", p.seed, p.offset);
  }
}

void run(const RunSettings& settings) {
  FileCall call(read_inputs(settings), settings);
  Caller forward(call.get(), Direction::kForward);  // refuses what cannot be computed
  std::optional<Caller> backward;
  if (settings.backward) {
    backward.emplace(call.get(), Direction::kBackward);
  }
  const std::map<std::string, fs::path> paths = targets(call, settings);
  Problem problem = call.problem();
  const auto timed = [&](const char* what, Direction direction, Caller& caller) {
    const double expected = expected_seconds(problem, direction);
    const auto start = std::chrono::steady_clock::now();
    run_with_progress(what, expected, [&] { caller(); });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    fmt::print("{}: {}{}\n", what, text_of_time(seconds), text_of_speed(flops(problem, direction), seconds));
  };
  fmt::print("{}\n", print(problem));
  print_notes(problem, settings.line);
  timed("forward", Direction::kForward, forward);
  if (backward) {
    timed("backward", Direction::kBackward, *backward);
  }
  Arrays outputs = call.take_outputs();
  if (is_one_file(settings.output)) {
    write_safetensors(paths.at(""), outputs);
  }
  for (const auto& [name, array] : outputs) {
    if (!is_one_file(settings.output)) {
      write_npy(paths.at(name), array);
    }
    fmt::print("{:<10} {:<5} {:<20} {}\n", name, name_of(static_cast<DType>(array.dtype)),
               fmt::format("({})", fmt::join(array.shape, ", ")),
               (is_one_file(settings.output) ? paths.at("") : paths.at(name)).string());
  }
}

}  // namespace

void add_run(CLI::App& app) {
  auto settings = std::make_shared<RunSettings>();
  CLI::App* run_app = app.add_subcommand("run", "Compute attention of tensors in files, forward and backward");
  run_app->add_option("file", settings->file, "A .safetensors file with q, k, v and any of the tensors below, by name")
      ->type_name("FILE");
  for (const Input& input : kInputs) {
    run_app
        ->add_option_function<std::string>(
            fmt::format("--{}", input.name),
            [settings, name = std::string(input.name)](const std::string& path) { settings->files[name] = path; },
            input.help)
        ->type_name("FILE")
        ->group("Tensors, each from its own .npy or .safetensors file");
  }
  run_app
      ->add_option("-o,--output", settings->output,
                   "FILE.safetensors for all results, or a folder for one .npy file each: out, lse, grad_q, ...")
      ->required()
      ->type_name("PATH");
  run_app
      ->add_option("-p,--problem", settings->line,
                   "Options, as words of the problem line (below); shapes in it must agree with the tensors")
      ->type_name("LINE");
  run_app->add_flag("--backward", settings->backward, "Also compute the gradients, from grad_out (and grad_lse)");
  run_app->add_flag("--force", settings->force, "Overwrite existing files");
  run_app->footer(
      "Examples:\n"
      "  fovea run inputs.safetensors -o outputs.safetensors -p causal\n"
      "  fovea run --q q.npy --k k.npy --v v.npy --bias b.npy -o results/\n"
      "  fovea run in.safetensors --grad_out do.npy --backward -o out.safetensors -p 'window=512,0 softcap=30 "
      "need=q,k,v'\n"
      "  fovea run in.safetensors -o out.safetensors -p 'layout=bhsd dropout=0.1 seed=42'\n\n" +
      std::string(problem_line_help()) +
      "In run, layout=bhsd means that the tensors in the files are (B, H, S, D) instead of (B, S, H, D).");
  run_app->callback([settings] { run(*settings); });
}

}  // namespace fovea::cli
