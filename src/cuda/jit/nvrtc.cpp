// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/nvrtc.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <link.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <mutex>

#include "core/status.h"
#include "cuda/jit/folder.h"

namespace fovea::cuda::jit {
namespace {

namespace fs = std::filesystem;

constexpr Version kLeast = {12, 4};
constexpr std::string_view kInstall =
    "install NVIDIA's compiler library: `pip install nvidia-cuda-nvrtc` (`nvidia-cuda-nvrtc-cu12` for a driver of "
    "CUDA 12), or the CUDA toolkit, or set FOVEA_NVRTC to its file or folder";

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

// The number at the front of `text`, which is then taken off.
std::optional<int> take_number(std::string_view& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) {
    return std::nullopt;
  }
  text.remove_prefix(end - text.data());
  return value;
}

// ---- finding it ----

// "libnvrtc.so.13", not "libnvrtc-builtins.so.13.0" nor "libnvrtc.alt.so.13".
bool is_nvrtc(const std::string& name) { return name == "libnvrtc.so" || name.rfind("libnvrtc.so.", 0) == 0; }

// NVRTC's own name says the major version alone; its builtins lie beside it and say "13.0".
std::optional<Version> version_by_neighbour(const fs::path& library) {
  constexpr std::string_view kName = "libnvrtc-builtins.so.";
  std::error_code error;
  const std::string name = library.filename().string();
  if (!is_nvrtc(name) || !fs::exists(library, error)) {
    return std::nullopt;
  }
  std::string_view own = std::string_view(name).substr(std::string_view("libnvrtc.so").size());
  const bool numbered = own.starts_with('.');
  own.remove_prefix(numbered ? 1 : 0);
  const std::optional<int> major = numbered ? take_number(own) : std::nullopt;
  std::optional<Version> only;
  bool several = false;
  for_each_entry(library.parent_path(), [&](const fs::path& entry) {
    const std::string other = entry.filename().string();
    if (!other.starts_with(kName)) {
      return;
    }
    std::string_view rest = std::string_view(other).substr(kName.size());
    const std::optional<int> first = take_number(rest);
    const bool dotted = rest.starts_with('.');
    rest.remove_prefix(dotted ? 1 : 0);
    const std::optional<int> second = dotted ? take_number(rest) : std::nullopt;
    if (first && second && (!major || *first == *major)) {
      const Version version{*first, *second};
      several = several || (only && *only != version);
      only = version;
    }
  });
  return several ? std::nullopt : only;
}

void add_libraries(std::vector<std::string>& found, const fs::path& folder) {
  for_each_entry(folder, [&](const fs::path& entry) {
    if (is_nvrtc(entry.filename().string())) {
      std::error_code error;
      const fs::path real = fs::canonical(entry, error);
      if (!error && is_nvrtc(real.filename().string())) {
        found.push_back(real.string());
      }
    }
  });
}

// In a folder, and below it where a wheel (nvidia/cuda_nvrtc/lib, nvidia/cu13/lib; PyTorch has had a copy of its own),
// a toolkit or conda puts it: each once, the newest first.
std::vector<std::string> libraries_below(const fs::path& folder) {
  std::vector<std::string> found;
  for (const char* below : {"", "torch/lib", "lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"}) {
    add_libraries(found, folder / below);
  }
  for_each_entry(folder / "nvidia", [&](const fs::path& entry) {
    const std::string name = entry.filename().string();
    if (name == "cuda_nvrtc" ||
        (name.starts_with("cu") && name.find_first_not_of("0123456789", 2) == std::string::npos)) {
      add_libraries(found, entry / "lib");
    }
  });
  std::vector<std::pair<Version, std::string>> dated;
  for (std::string& path : found) {
    const Version version = version_by_neighbour(path).value_or(Version{});
    dated.emplace_back(version, std::move(path));
  }
  std::sort(dated.begin(), dated.end(), std::greater<>());
  dated.erase(std::unique(dated.begin(), dated.end()), dated.end());
  found.clear();
  for (auto& [version, path] : dated) {
    found.push_back(std::move(path));
  }
  return found;
}

// Of set_nvrtc_folders(). Never destroyed: a process may compile until its end.
struct GivenFolders {
  std::mutex mutex;
  std::string folders;
};

GivenFolders& given_folders() {
  static GivenFolders* const given = new GivenFolders;
  return *given;
}

// Without ptxas' lines about its time: what is kept of a compilation is the same each time.
std::string without_times(std::string_view log) {
  std::string kept;
  while (!log.empty()) {
    const std::size_t end = std::min(log.find('\n'), log.size() - 1) + 1;
    if (log.substr(0, end).find("Compile time = ") == std::string_view::npos) {
      kept += log.substr(0, end);
    }
    log.remove_prefix(end);
  }
  return kept;
}

// Goes through candidates, remembers why each was passed over.
class Choice {
 public:
  explicit Choice(const NvrtcSearch& search) : search_(search) {}

  void consider(const std::string& path, std::string_view place) {
    if (found_ || std::find(seen_.begin(), seen_.end(), path) != seen_.end()) {
      return;
    }
    seen_.push_back(path);
    std::optional<Version> version = fs::path(path).is_absolute() ? version_by_neighbour(path) : std::nullopt;
    std::string real = path;
    if (!version) {
      try {
        const Nvrtc loaded(path);
        version = loaded.version();
        real = loaded.path();
      } catch (const Error& error) {
        passed_over_.push_back(fmt::format("{}: {}", path, error.what()));
        return;
      }
    }
    if (*version < search_.least) {
      passed_over_.push_back(fmt::format("{} is {}: too old", path, to_text(*version)));
    } else if (search_.driver_major != 0 && version->major > search_.driver_major) {
      passed_over_.push_back(
          fmt::format("{} is {}: newer than the driver's CUDA {}", path, to_text(*version), search_.driver_major));
    } else {
      found_ = NvrtcFile{real, *version, fmt::format("found by {}", place)};
      if (!passed_over_.empty()) {
        found_->found += fmt::format("; passed over: {}", fmt::join(passed_over_, "; "));
      }
    }
  }

  void consider(const std::vector<std::string>& paths, std::string_view place) {
    for (const std::string& path : paths) {
      consider(path, place);
    }
  }

  bool done() const { return found_.has_value(); }

  NvrtcFile result() const {
    if (found_) {
      return *found_;
    }
    std::string wanted = fmt::format("NVRTC {} or newer", to_text(search_.least));
    if (search_.driver_major != 0) {
      wanted +=
          fmt::format(", for a driver of CUDA {} not newer than {}.x", search_.driver_major, search_.driver_major);
    }
    if (!search_.forced.empty()) {
      throw Error(
          FOVEA_INVALID_ARGUMENT,
          fmt::format("FOVEA_NVRTC: '{}': {}; accepted: the file libnvrtc.so or a folder that has it, of {}; or "
                      "not set, and one is looked for",
                      search_.forced, why_not_forced(), wanted));
    }
    const std::string seen =
        passed_over_.empty() ? "none was found" : fmt::format("passed over: {}", fmt::join(passed_over_, "; "));
    throw Error(FOVEA_UNSUPPORTED,
                fmt::format("{} is needed to compile GPU kernels; {}. Please {}.", wanted, seen, kInstall));
  }

 private:
  const NvrtcSearch& search_;
  std::vector<std::string> seen_;
  std::vector<std::string> passed_over_;
  std::optional<NvrtcFile> found_;

  std::string why_not_forced() const {
    std::error_code error;
    const bool is_path = search_.forced.find('/') != std::string::npos;  // or a name for the dynamic loader
    if (is_path && !fs::exists(search_.forced, error)) {
      return "no such file or folder";
    }
    return passed_over_.empty() ? "no libnvrtc.so is in this folder" : fmt::format("{}", fmt::join(passed_over_, "; "));
  }
};

void check(const NvrtcApi& api, int result, std::string_view function) {
  if (result != 0) {
    throw Error(FOVEA_INTERNAL_ERROR, fmt::format("{}: {} ({})", function, api.get_error_string(result), result));
  }
}

std::vector<const char*> c_strings(const std::vector<std::string>& texts) {
  std::vector<const char*> pointers;
  pointers.reserve(texts.size());
  for (const std::string& text : texts) {
    pointers.push_back(text.c_str());
  }
  return pointers;
}

}  // namespace

std::string loaded_from(const void* address) {
  Dl_info info{};
  link_map* object = nullptr;
  if (dladdr1(address, &info, reinterpret_cast<void**>(&object), RTLD_DL_LINKMAP) == 0 || object == nullptr) {
    return "";
  }
  if (object->l_name == nullptr || *object->l_name == '\0') {  // the program: the loader knows how it was called alone
    std::error_code error;
    return fs::read_symlink("/proc/self/exe", error).string();
  }
  return object->l_name;
}

std::string to_text(Version version) { return fmt::format("{}.{}", version.major, version.minor); }

std::string architecture(int major, int minor, bool specific) {
  return fmt::format("sm_{}{}{}", major, minor, specific ? "a" : "");
}

Version least_nvrtc_for(std::string_view architecture) {
  architecture.remove_prefix(std::min<std::size_t>(architecture.find('_') + 1, architecture.size()));
  const int number = take_number(architecture).value_or(0);
  if (number < 100) {
    return kLeast;
  }
  switch (number) {
    case 100:
    case 101:
    case 120:
      return {12, 8};
    case 103:
    case 121:
      return {12, 9};
    default:
      return {13, 0};
  }
}

void set_nvrtc_folders(std::string_view folders) {
  GivenFolders& given = given_folders();
  const std::lock_guard<std::mutex> lock(given.mutex);
  given.folders = folders;
}

NvrtcSearch NvrtcSearch::from_environment() {
  NvrtcSearch search;
  search.forced = environment("FOVEA_NVRTC");
  const auto add = [&](std::string_view folders, std::string_view name) {
    while (!folders.empty()) {
      const std::size_t end = std::min(folders.find(':'), folders.size());
      const std::string_view folder = folders.substr(0, end);
      if (folder.starts_with('/')) {  // others would depend on the current folder
        search.folders.push_back({std::string(folder), std::string(name)});
      }
      folders.remove_prefix(std::min(end + 1, folders.size()));
    }
  };
  {
    GivenFolders& given = given_folders();
    const std::lock_guard<std::mutex> lock(given.mutex);
    add(given.folders, "Python's path");
  }
  add(environment("FOVEA_NVRTC_FOLDERS"), "FOVEA_NVRTC_FOLDERS");
  std::error_code error;  // the name of a program may be relative
  const fs::path own = fs::absolute(loaded_from(reinterpret_cast<const void*>(&least_nvrtc_for)), error);
  if (!error && own.has_parent_path()) {
    add((own.parent_path() / "..").lexically_normal().string(), "where fovea is installed");
  }
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"}) {
    add(environment(variable), variable);
  }
  add("/usr/local/cuda", "the CUDA toolkit's usual folder");
  add(environment("LD_LIBRARY_PATH"), "LD_LIBRARY_PATH");
  add("/usr/lib64:/usr/lib/x86_64-linux-gnu:/usr/lib/aarch64-linux-gnu:/usr/lib", "the system's libraries");
  return search;
}

NvrtcFile find_nvrtc(const NvrtcSearch& search) {
  Choice choice(search);
  if (!search.forced.empty()) {
    std::error_code error;
    if (fs::is_directory(search.forced, error)) {
      choice.consider(libraries_below(search.forced), "FOVEA_NVRTC");
    } else {
      choice.consider(search.forced, "FOVEA_NVRTC");
    }
    return choice.result();
  }
  for (const NvrtcFolder& folder : search.folders) {
    if (choice.done()) {
      break;
    }
    choice.consider(libraries_below(folder.path), folder.name);
  }
  if (search.loader && !choice.done()) {
    const int newest = search.driver_major != 0 ? search.driver_major : 13;
    for (int major = newest; major >= search.least.major; --major) {
      choice.consider(fmt::format("libnvrtc.so.{}", major), "the dynamic loader");
    }
  }
  return choice.result();
}

// ---- compiling ----

std::span<const std::string_view> default_options() {
  // -default-device: src/math has no annotations. -no-source-include: nothing is read from the current folder.
  static constexpr std::string_view kOptions[] = {"--std=c++20", "-default-device", "-no-source-include",
                                                  "--ptxas-options=-v"};
  return kOptions;
}

Nvrtc::Nvrtc(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw Error(FOVEA_UNSUPPORTED, dlerror());
  }
  for_each_function(api_, [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr) {
      throw Error(FOVEA_UNSUPPORTED,
                  fmt::format("no {} in it: not NVRTC, or one older than {}", name, to_text(kLeast)));
    }
  });
  check(api_, api_.version(&version_.major, &version_.minor), "nvrtcVersion");
  path_ = loaded_from(reinterpret_cast<const void*>(api_.version));
}

Binary Nvrtc::compile(const Source& source, std::string* ptx) const {
  std::vector<std::string> names;
  std::vector<std::string> texts;  // with the zero at the end that NVRTC wants
  for (const TextFile& header : source.headers) {
    names.emplace_back(header.name);
    texts.emplace_back(header.text);
  }
  NvrtcApi::Program created = nullptr;
  check(api_,
        api_.create_program(&created, source.text.c_str(), "kernel.cu", static_cast<int>(names.size()),
                            c_strings(texts).data(), c_strings(names).data()),
        "nvrtcCreateProgram");
  const auto destroy = [this](NvrtcApi::Program program) { api_.destroy_program(&program); };
  const std::unique_ptr<std::remove_pointer_t<NvrtcApi::Program>, decltype(destroy)> owner(created, destroy);
  NvrtcApi::Program program = owner.get();

  check(api_, api_.add_name_expression(program, source.expression.c_str()), "nvrtcAddNameExpression");
  std::vector<std::string> options(default_options().begin(), default_options().end());
  options.push_back("--gpu-architecture=" + source.architecture);
  options.insert(options.end(), source.options.begin(), source.options.end());
  const int result = api_.compile_program(program, static_cast<int>(options.size()), c_strings(options).data());

  const auto fetch = [&](auto get_size, auto get, std::string_view function) {
    std::size_t bytes = 0;
    check(api_, get_size(program, &bytes), function);
    std::string content(bytes, '\0');
    check(api_, get(program, content.data()), function);
    return content;
  };
  const auto without_zero = [](std::string text) {
    while (text.ends_with('\0')) {
      text.pop_back();
    }
    return text;
  };
  Binary binary;
  binary.log = without_times(without_zero(fetch(api_.get_log_size, api_.get_log, "nvrtcGetProgramLog")));
  if (result != 0) {
    const bool architecture = binary.log.find("gpu-architecture") != std::string::npos;
    throw Error(architecture ? FOVEA_UNSUPPORTED : FOVEA_INTERNAL_ERROR,
                fmt::format("NVRTC {} ({}) does not compile {} for {}: {}\n{}", to_text(version_), path_,
                            source.expression, source.architecture, api_.get_error_string(result), binary.log));
  }
  const char* symbol = nullptr;
  check(api_, api_.get_lowered_name(program, source.expression.c_str(), &symbol), "nvrtcGetLoweredName");
  binary.symbol = symbol;
  binary.cubin = fetch(api_.get_cubin_size, api_.get_cubin, "nvrtcGetCUBIN");
  binary.report = parse_log(binary.log);
  if (ptx != nullptr) {
    *ptx = without_zero(fetch(api_.get_ptx_size, api_.get_ptx, "nvrtcGetPTX"));
  }
  return binary;
}

}  // namespace fovea::cuda::jit
