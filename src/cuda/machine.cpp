// SPDX-License-Identifier: Apache-2.0
//
// What a bug report begins with: GPUs, driver, NVRTC and the folder of compiled kernels. Nothing is made or loaded that
// a call would not load.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "cuda/cuda.h"
#include "cuda/jit/jit.h"

namespace fovea::cuda {
namespace {

namespace fs = std::filesystem;

// An error's text as one line.
std::string line_of(const Error& error) {
  std::string text = error.what();
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
    return line_of(error);
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

std::string nvrtc_of(const jit::Settings& settings) {
  jit::NvrtcSearch search = settings.nvrtc;
  std::string why_not;
  if (const jit::Driver* const driver = jit::find_driver(why_not)) {
    search.driver_major = driver->major();
  }
  const jit::NvrtcFile file = jit::find_nvrtc(search);
  return fmt::format("{}, {}", to_text(file.version), file.path);
}

std::string cache_of(const jit::Settings& settings) {
  if (settings.cache_folder.empty()) {
    return "none";
  }
  std::error_code error;
  if (!fs::exists(settings.cache_folder, error)) {
    return fmt::format("{}, which is not there yet", settings.cache_folder);
  }
  const jit::Cache checked(settings.cache_folder, jit::Cache::Access::kReadWrite, 0, "FOVEA_CACHE_DIR");
  std::uintmax_t bytes = 0;
  int kernels = 0;
  for (fs::directory_iterator entry(settings.cache_folder, error), end; !error && entry != end;
       entry.increment(error)) {
    std::error_code gone;  // another process may have removed it
    const std::uintmax_t size = entry->file_size(gone);
    if (!gone && entry->path().extension() == ".kernel") {
      bytes += size;
      ++kernels;
    }
  }
  constexpr double kMiB = 1 << 20;
  return fmt::format("{}, {} kernels of {:.1f} MiB, at most {:.0f} MiB", checked.folder(), kernels,
                     static_cast<double>(bytes) / kMiB, static_cast<double>(settings.cache_bytes) / kMiB);
}

}  // namespace

std::vector<Fact> machine() {
  std::vector<Fact> facts;
  add_gpus(facts);
  try {
    const jit::Settings settings = jit::Settings::from_environment();
    facts.push_back({"NVRTC", said([&] { return nvrtc_of(settings); })});
    facts.push_back({"kernel cache", said([&] { return cache_of(settings); })});
  } catch (const Error& error) {
    facts.push_back({"kernel cache", line_of(error)});
  }
  return facts;
}

}  // namespace fovea::cuda
