// SPDX-License-Identifier: Apache-2.0
//
// What a bug report begins with: GPUs, driver, NVRTC and the folder of compiled kernels. Nothing is made or loaded that
// a call would not load.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "cuda/cuda.h"
#include "cuda/jit/folder.h"
#include "cuda/jit/jit.h"

namespace fovea::cuda {
namespace {

namespace fs = std::filesystem;

std::string line_of(std::string text) {
  while (!text.empty() && text.back() == '\n') {
    text.pop_back();
  }
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

template <class Say>
std::string said(const Say& say) {
  try {
    return say();
  } catch (const Error& error) {
    return line_of(error.what());
  }
}

void add_gpus(std::vector<Fact>& facts) {
  std::string why_not;
  const jit::Driver* const driver = jit::find_driver(why_not);
  if (driver == nullptr) {
    facts.push_back({"GPU", why_not});
    return;
  }
  facts.push_back({"driver", fmt::format("CUDA {}.{}", driver->version / 1000, driver->version % 1000 / 10)});
  const int count = jit::device_count(*driver);
  for (int i = 0; i < count; ++i) {
    facts.push_back({"GPU", said([&] {
                       const jit::DeviceInfo& device = jit::device(i);
                       return fmt::format("{}: {}, compute capability {}.{}, {} multiprocessors", i, device.name,
                                          device.major, device.minor, device.multiprocessors);
                     })});
  }
}

std::string nvrtc_of(jit::NvrtcSearch search) {
  std::string why_not;
  if (const jit::Driver* const driver = jit::find_driver(why_not)) {
    search.driver_major = driver->major();
  }
  const jit::NvrtcFile file = jit::find_nvrtc(search);
  return fmt::format("{}, {} ({})", to_text(file.version), file.path, file.found);
}

constexpr double kMiB = 1 << 20;

// "FOLDER, 12 kernels of 1.5 MiB"
std::string kernels_in(const std::string& folder) {
  std::uintmax_t bytes = 0;
  int kernels = 0;
  jit::for_each_entry(folder, [&](const fs::path& entry) {
    std::error_code gone;  // another process may have removed it
    const std::uintmax_t size = fs::file_size(entry, gone);
    if (!gone && entry.extension() == ".kernel") {
      bytes += size;
      ++kernels;
    }
  });
  return fmt::format("{}, {} kernels of {:.1f} MiB", folder, kernels, static_cast<double>(bytes) / kMiB);
}

std::string cache_of() {
  const std::string folder = jit::cache_folder_from_environment();
  if (folder == "none") {
    return "none";
  }
  std::error_code error;
  if (!fs::exists(folder, error)) {
    return fmt::format("{}, which does not exist yet", folder);
  }
  const jit::Cache checked(folder, jit::Cache::Access::kReadWrite, 0, "FOVEA_CACHE_DIR");
  return fmt::format("{}, at most {:.0f} MiB", kernels_in(checked.folder()),
                     static_cast<double>(jit::cache_size_from_environment()) / kMiB);
}

// A folder that is made when it is needed.
void require_room_for(const char* variable, const std::string& folder) {
  fs::path there = fs::absolute(folder).lexically_normal();
  std::error_code error;
  while (!fs::exists(there, error) && there.has_relative_path()) {
    there = there.parent_path();
  }
  if (!fs::is_directory(there, error) || access(there.c_str(), W_OK) != 0) {
    throw Error(FOVEA_INVALID_ARGUMENT,
                fmt::format("{}: '{}', and {} is no folder that this user may write to; accepted: a folder of your own",
                            variable, folder, there.string()));
  }
}

void require_cache(const std::string& folder) {
  if (folder == "none") {
    return;
  }
  std::error_code error;
  if (fs::exists(folder, error)) {
    const jit::Cache checked(folder, jit::Cache::Access::kReadWrite, 0, "FOVEA_CACHE_DIR");
  } else {
    require_room_for("FOVEA_CACHE_DIR", folder);
  }
}

struct Checked {
  const char* variable;
  void (*require)(const std::string& value);  // throws what is wrong with the value, as the code that reads it does
};
constexpr Checked kChecked[] = {
    {"FOVEA_KERNEL", [](const std::string&) { kernel_family(); }},
    {"FOVEA_CHECK", [](const std::string&) { checks_arguments(); }},
    {"FOVEA_JIT", [](const std::string&) { jit::mode_from_environment(); }},
    {"FOVEA_LOG", [](const std::string&) { jit::log_from_environment(); }},
    {"FOVEA_CACHE_DIR", require_cache},
    {"FOVEA_CACHE_MAX_MB", [](const std::string&) { jit::cache_size_from_environment(); }},
    {"FOVEA_PRECOMPILED_DIR",
     [](const std::string& value) {
       const jit::Cache checked(value, jit::Cache::Access::kReadOnly, 0, "FOVEA_PRECOMPILED_DIR");
     }},
    {"FOVEA_NVRTC", [](const std::string&) { nvrtc_of(jit::NvrtcSearch::from_environment()); }},
    {"FOVEA_KERNEL_TEXT", [](const std::string& value) { jit::read_text(value); }},
    {"FOVEA_DUMP", [](const std::string& value) { require_room_for("FOVEA_DUMP", value); }},
};

}  // namespace

std::vector<Fact> machine() {
  std::vector<Fact> facts;
  if (const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES"); visible != nullptr) {
    facts.push_back({"CUDA_VISIBLE_DEVICES", fmt::format("'{}': GPUs are those that it names, in its order", visible)});
  }
  add_gpus(facts);
  facts.push_back({"NVRTC", said([] { return nvrtc_of(jit::NvrtcSearch::from_environment()); })});
  if (const std::string folder = jit::installed_folder(); !folder.empty()) {
    facts.push_back({"installed kernels", kernels_in(folder)});
  }
  facts.push_back({"kernel cache", said([] { return cache_of(); })});
  return facts;
}

Fact refusal(const std::string& variable, const std::string& why) {
  const std::string prefix = variable + ": ";
  return {variable, line_of(why.starts_with(prefix) ? why.substr(prefix.size()) : why)};
}

std::vector<Fact> refused_variables() {
  std::vector<Fact> refused;
  for (const Checked& checked : kChecked) {
    const char* const value = std::getenv(checked.variable);
    if (value == nullptr || *value == '\0') {
      continue;
    }
    try {
      checked.require(value);
    } catch (const Error& error) {
      refused.push_back(refusal(checked.variable, error.what()));
    }
  }
  return refused;
}

}  // namespace fovea::cuda
