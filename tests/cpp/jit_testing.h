// SPDX-License-Identifier: Apache-2.0
//
// What the tests of run-time compilation share: a folder that goes away, where NVRTC is, a tiny kernel, a refusal.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>  // NOLINT(modernize-deprecated-headers): mkdtemp

#include <cstdlib>
#include <filesystem>
#include <string>

#include "core/status.h"
#include "cuda/jit/jit.h"

namespace jit_testing {

namespace fs = std::filesystem;
namespace jit = fovea::cuda::jit;

class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "fovea-jit-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) {
      throw std::runtime_error("no temporary folder");
    }
    path_ = pattern;
  }
  ~Folder() {
    std::error_code error;
    fs::remove_all(path_, error);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const fs::path& path() const { return path_; }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

  int count(const std::string& suffix) const {
    int found = 0;
    for (const fs::directory_entry& entry : fs::directory_iterator(path_)) {
      found += entry.path().native().ends_with(suffix) ? 1 : 0;
    }
    return found;
  }

 private:
  fs::path path_;
};

// As the library seeks it, and in the test suite's own Python environment, for which `make test` fetches the wheel
// where there is no toolkit. The driver of this machine is no limit: nothing is loaded into it.
inline jit::NvrtcSearch nvrtc_search() {
  jit::NvrtcSearch search = jit::NvrtcSearch::from_environment();
  if (const char* folder = std::getenv("FOVEA_SITE_PACKAGES"); folder != nullptr) {
    search.folders.insert(search.folders.begin(), {folder, "FOVEA_SITE_PACKAGES"});
  }
  std::error_code error;
  for (const fs::directory_entry& entry :
       fs::directory_iterator(fs::path(FOVEA_SOURCE_DIR) / ".venv/lib", error)) {  // "python3.11"
    search.folders.insert(search.folders.begin(), {(entry.path() / "site-packages").string(), ".venv"});
  }
  return search;
}

// A kernel that has a specification as template argument, in two files.
inline constexpr jit::TextFile kTinyText[] = {{"tiny_spec.h", R"(
struct TinySpec {
  int factor = 1;
  bool twice = false;
};
)"},
                                              {"tiny.cuh", R"(
#include "tiny_spec.h"
namespace tiny {
template <TinySpec S>
__global__ void scale(float* x) {
  x[threadIdx.x] *= S.factor;
  if constexpr (S.twice) x[threadIdx.x] += x[threadIdx.x];
}
}  // namespace tiny
)"}};

inline jit::Request tiny(int factor, const std::string& architecture = "sm_80") {
  return {
      "tiny.cuh", "tiny::scale", "TinySpec{.factor = " + std::to_string(factor) + ", .twice = true}", architecture, {}};
}

inline jit::Settings tiny_settings(const std::string& folder) {
  jit::Settings settings;
  settings.cache_folder = folder;
  settings.cache_bytes = 1 << 30;
  settings.nvrtc = nvrtc_search();
  settings.text = kTinyText;
  return settings;
}

template <class Call>
std::string refusal(Call call, fovea_status status) {
  try {
    call();
  } catch (const fovea::Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// A variable of the environment, for a while.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    const char* before = std::getenv(name);
    had_ = before != nullptr;
    before_ = had_ ? before : "";
    value == nullptr ? unsetenv(name) : setenv(name, value, 1);
  }
  ~Variable() { had_ ? setenv(name_, before_.c_str(), 1) : unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  bool had_;
  std::string before_;
};

}  // namespace jit_testing
