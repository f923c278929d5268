// SPDX-License-Identifier: Apache-2.0
//
// The command `fovea`.
//
//     run.cpp       tensors from files, results to files     io/         .safetensors and .npy
//     check.cpp     the case table against the reference     buffers     memory for a problem line
//     bench.cpp     speed                                    work        calls and what they cost
//     explain.cpp   which backend is used; the machine       words       the words of the problem line
//     precompile.cpp  a GPU's kernels, ahead of time
//     rows.cpp      which rows each of several GPUs has
//
// Results go to standard output, progress and errors to standard error. fault.h has the exit codes.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "capi/machine.h"
#include "commands.h"
#include "core/nearest.h"
#include "core/status.h"
#include "core/text.h"
#include "fault.h"

namespace fovea::cli {
namespace {

constexpr const char* kFooter =
    "Examples:\n"
    "  fovea explain                                        describes this machine\n"
    "  fovea explain 'fwd b=2 hq=8 sq=512 sk=512 d=64 bf16 causal'\n"
    "  fovea run inputs.safetensors -o outputs.safetensors -p causal\n"
    "  fovea check bf16 causal\n"
    "  fovea bench --json results.json\n"
    "  fovea rows s=131072 causal ranks=8\n"
    "  fovea COMMAND --help                                 the options of a command, with examples\n"
    "Exit codes:\n"
    "  0  done\n"
    "  1  check or bench found a wrong result\n"
    "  2  the command line, a problem line, a file or a tensor is wrong; nothing was written\n"
    "  3  no backend here can compute the problem\n"
    "  4  anything else: memory, a file that cannot be written, a fault of fovea's own";

std::vector<std::string> accepted_options(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      names.push_back("--" + name);
    }
  }
  return names;
}

// "; did you mean -p window=LEFT,RIGHT?" for --window: what a problem is stands in its line, not in options.
std::string hint_of_option(const CLI::App& command, const std::string& option) {
  const std::vector<std::string> accepted = accepted_options(command);
  if (nearest(option, accepted).empty()) {
    std::vector<std::string> words;
    for (const LineKey& key : line_keys()) {
      words.emplace_back(key.name);
    }
    const std::vector<std::string> meant = nearest(option.substr(option.find_first_not_of('-')), words);
    const auto is_meant = [&](const LineKey& key) { return !meant.empty() && key.name == meant.front(); };
    const auto key = std::find_if(line_keys().begin(), line_keys().end(), is_meant);
    if (key != line_keys().end()) {
      return fmt::format("; did you mean {}{}{}? Words of the problem line have no dashes{}",
                         command.get_name() == "run" ? "-p " : "", key->name, key->form,
                         command.get_name() == "run" ? " and go into -p" : "");
    }
  }
  return hint(option, accepted);
}

// What CLI11 found wrong, with the nearest accepted words where a word was not known.
std::string explain_error(const CLI::App& app, const CLI::ParseError& error) {
  const auto called = app.get_subcommands();
  const CLI::App& innermost = called.empty() ? app : *called.front();
  std::string where = called.empty() ? "" : innermost.get_name() + ": ";
  const std::vector<std::string> unknown = app.remaining(true);
  if (!unknown.empty()) {
    const std::string& word = unknown.front();
    if (word.starts_with("-")) {
      return fmt::format("{}unknown option {}{}", where, word,
                         hint_of_option(innermost, word.substr(0, word.find('='))));
    }
    if (called.empty()) {
      std::vector<std::string> names;
      for (const CLI::App* command : app.get_subcommands({})) {
        names.push_back(command->get_name());
      }
      return fmt::format("unknown command '{}'{}", word, hint(word, names));
    }
    return fmt::format("{}'{}' is one argument too many", where, word);
  }
  return where + error.what();
}

int run(int argc, char** argv) {
  CLI::App app("fovea: exact fused attention, forward and backward", "fovea");
  app.require_subcommand(1);
  app.footer(kFooter);
  app.set_version_flag("--version", [] { return "fovea " + this_machine().version; });
  add_run(app);
  add_check(app);
  add_cases(app);
  add_bench(app);
  add_explain(app);
  add_precompile(app);
  add_rows(app);
  if (argc <= 1) {
    fmt::print("{}", app.help());
    return kBadInput;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help, --version
      return app.exit(error);
    }
    const auto called = app.get_subcommands();
    throw Fault(kBadInput, fmt::format("{}\nfovea{}{} --help shows what is accepted", explain_error(app, error),
                                       called.empty() ? "" : " ", called.empty() ? "" : called.front()->get_name()));
  }
  return kDone;
}

}  // namespace
}  // namespace fovea::cli

int main(int argc, char** argv) {
  using namespace fovea::cli;
  const auto say = [](std::string what) {
    if (!what.empty()) {
      // Names from files may hold what a terminal would obey.
      std::replace_if(
          what.begin(), what.end(), [](unsigned char c) { return (c < ' ' && c != '\n') || c == 0x7F; }, '?');
      fmt::print(stderr, "fovea: {}\n", what);
    }
  };
  try {
    return run(argc, argv);
  } catch (const Fault& fault) {
    say(fault.what());
    return fault.code();
  } catch (const fovea::Error& error) {
    say(error.what());
    return error.status() == FOVEA_UNSUPPORTED                                                ? kUnsupported
           : error.status() == FOVEA_INVALID_ARGUMENT || error.status() == FOVEA_INVALID_TYPE ? kBadInput
                                                                                              : kFailed;
  } catch (const std::bad_alloc&) {
    say("not enough memory");
    return kFailed;
  } catch (const std::exception& error) {
    say(error.what());
    return kFailed;
  }
}
