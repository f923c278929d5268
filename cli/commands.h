// SPDX-License-Identifier: Apache-2.0
//
// The subcommands. Each adds itself to the app, with its options and help; when it is the one that was called, its
// callback does the work and throws Fault where it ends with anything but 0.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fovea::cli {

void add_run(CLI::App& app);
void add_check(CLI::App& app);
void add_cases(CLI::App& app);
void add_bench(CLI::App& app);
void add_explain(CLI::App& app);
void add_precompile(CLI::App& app);
void add_rows(CLI::App& app);

// A line's words.
std::vector<std::string> words_of(std::string_view line);
// Whether a problem's line has every word of a filter, and none of those that begin with '!'. "bias" stands for
// "bias=1,h,q,k" too.
bool matches(std::string_view line, const std::vector<std::string>& filter);

// For a command whose tensors lie in this process's memory: refuses a problem of a GPU.
void refuse_gpu(std::string_view command, std::int32_t device, std::string_view backend);

// The keys of the problem line, for the help texts.
std::string_view problem_line_help();

}  // namespace fovea::cli
