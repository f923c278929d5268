// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/jit.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <thread>

#include "core/status.h"
#include "cuda/jit/sha256.h"
#include "cuda/jit/source.h"

namespace fovea::cuda::jit {
namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

// 0 where there is no driver: such a machine compiles, too.
int driver_major() {
  std::string why_not;
  const Driver* found = find_driver(why_not);
  return found == nullptr ? 0 : found->major();
}

}  // namespace

std::string Jit::key_of(const Request& request) const {
  std::string text;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::string& known = hashes_[request.file];
    if (known.empty()) {
      known = hash_of(settings_.text, request.file);
    }
    text = known;
  }
  return fmt::format("text {}\nfile {}\nkernel {}\narchitecture {}\noptions {} | {}\n", text, request.file,
                     request.expression(), request.architecture, fmt::join(default_options(), " "),
                     fmt::join(request.options, " "));
}

Mode mode_from_environment() {
  const std::string mode = environment("FOVEA_JIT");
  if (mode == "cache") {
    return Mode::kCache;
  }
  if (mode == "off") {
    return Mode::kOff;
  }
  if (!mode.empty() && mode != "jit") {
    throw Error(FOVEA_INVALID_ARGUMENT, fmt::format("FOVEA_JIT: '{}'; accepted: jit, cache, off", mode));
  }
  return Mode::kJit;
}

bool log_from_environment() {
  const std::string log = environment("FOVEA_LOG");
  if (!log.empty() && log != "jit") {
    throw Error(FOVEA_INVALID_ARGUMENT, fmt::format("FOVEA_LOG: '{}'; accepted: jit, or not set", log));
  }
  return log == "jit";
}

Settings Settings::from_environment() {
  Settings settings;
  settings.mode = mode_from_environment();
  settings.precompiled = environment("FOVEA_PRECOMPILED_DIR");
  settings.installed = installed_folder();
  if (environment("FOVEA_CACHE_DIR") != "none") {
    settings.cache_folder = cache_folder_from_environment();
  }
  settings.cache_bytes = cache_size_from_environment();
  settings.nvrtc = NvrtcSearch::from_environment();
  settings.text = text_from_environment();
  settings.log = log_from_environment();
  settings.dump = environment("FOVEA_DUMP");
  return settings;
}

Jit& Jit::global() {
  // Never destroyed: when a process ends, the driver may have gone first.
  static Jit* const jit = new Jit(Settings::from_environment());
  return *jit;
}

Jit::Counts Jit::counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

Jit::Slot& Jit::slot(const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<Slot>& found = slots_[key];
  if (!found) {
    found = std::make_unique<Slot>();
  }
  return *found;
}

const Cache& Jit::disk() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!disk_) {
    disk_.emplace(settings_.cache_folder, Cache::Access::kReadWrite, settings_.cache_bytes, "FOVEA_CACHE_DIR");
  }
  return *disk_;
}

NvrtcFile Jit::nvrtc_file(const Request& request) {
  const Version least = least_nvrtc_for(request.architecture);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = files_.find(least); found != files_.end()) {
    return found->second;
  }
  NvrtcSearch search = settings_.nvrtc;
  search.least = std::max(search.least, least);
  search.driver_major = search.driver_major != 0 ? search.driver_major : driver_major();
  return files_.emplace(least, find_nvrtc(search)).first->second;
}

std::shared_ptr<const Nvrtc> Jit::nvrtc(const NvrtcFile& file) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<const Nvrtc>& found = loaded_[file.path];
  if (!found) {
    found = std::make_shared<const Nvrtc>(file.path);
  }
  return found;
}

std::shared_ptr<const Binary> Jit::binary(const Request& request) {
  const std::string key = key_of(request);
  Slot& mine = slot(key);
  const std::lock_guard<std::mutex> lock(mine.mutex);
  return fill(mine, request, key);
}

void Jit::gather(const std::vector<Request>& requests) {
  std::vector<const Request*> missing;  // mostly none: every new shape comes here
  for (const Request& request : requests) {
    Slot& its = slot(key_of(request));
    const std::unique_lock<std::mutex> lock(its.mutex, std::try_to_lock);
    if (!lock || !its.binary) {
      missing.push_back(&request);
    }
  }
  std::atomic<std::size_t> next = 0;
  std::vector<std::exception_ptr> failed(missing.size());
  const auto work = [&] {
    for (std::size_t n = next++; n < missing.size(); n = next++) {
      try {
        binary(*missing[n]);
      } catch (...) {
        failed[n] = std::current_exception();
      }
    }
  };
  const std::size_t cores = std::max(std::thread::hardware_concurrency(), 1u);
  std::vector<std::thread> threads;
  try {
    while (threads.size() + 1 < std::min(missing.size(), cores)) {
      threads.emplace_back(work);
    }
  } catch (const std::exception&) {  // no thread or no memory: those that there are will do
  }
  work();
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::exception_ptr& error : failed) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
}

cu::Kernel Jit::kernel(const Request& request) {
  const Driver& cuda = driver();
  const std::string key = key_of(request);
  Slot& mine = slot(key);
  const std::lock_guard<std::mutex> lock(mine.mutex);
  if (mine.kernel == nullptr) {
    const std::shared_ptr<const Binary>& code = fill(mine, request, key);
    auto library = std::make_unique<Library>(cuda, code->cubin);
    mine.kernel = library->kernel(code->symbol);
    mine.library = std::move(library);
  }
  return mine.kernel;
}

const std::shared_ptr<const Binary>& Jit::fill(Slot& slot, const Request& request, const std::string& key) {
  if (slot.binary) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++counts_.memory;
  } else {
    slot.binary = std::make_shared<const Binary>(obtain(request, key));
  }
  return slot.binary;
}

Jit::Sought Jit::seek(const Request& request, const std::string& key) {
  const auto found = [](std::optional<Binary> binary, int Counts::*count, std::string_view what) {
    return Sought{std::move(binary), count, what, {}};
  };
  if (!settings_.precompiled.empty()) {
    const Cache ahead(settings_.precompiled, Cache::Access::kReadOnly, 0, "FOVEA_PRECOMPILED_DIR");
    if (std::optional<Binary> binary = ahead.load_any(key, driver_major())) {
      return found(std::move(binary), &Counts::precompiled, "precompiled");
    }
  }
  if (!settings_.installed.empty()) {
    const Cache installed(settings_.installed, Cache::Access::kInstalled, 0, "");
    if (std::optional<Binary> binary = installed.load_any(key, driver_major())) {
      return found(std::move(binary), &Counts::installed, "installed");
    }
  }
  const std::string missing = fmt::format("no machine code of {} for {}", request.expression(), request.architecture);
  if (settings_.mode == Mode::kOff) {
    throw Error(
        FOVEA_UNSUPPORTED,
        fmt::format("FOVEA_JIT=off: {} in FOVEA_PRECOMPILED_DIR, which is {}; precompile it, or set FOVEA_JIT=jit",
                    missing, settings_.precompiled.empty() ? "not set" : settings_.precompiled));
  }
  const bool on_disk = !settings_.cache_folder.empty();
  const auto read_any = [&] { return on_disk ? disk().load_any(key, driver_major()) : std::nullopt; };
  if (settings_.mode == Mode::kCache) {
    if (std::optional<Binary> binary = read_any()) {
      return found(std::move(binary), &Counts::disk, "read");
    }
    throw Error(FOVEA_UNSUPPORTED,
                fmt::format("FOVEA_JIT=cache: {} in {}; precompile it, or set FOVEA_JIT=jit", missing,
                            on_disk ? settings_.cache_folder : "FOVEA_CACHE_DIR, which is none"));
  }

  NvrtcFile file;
  try {
    file = nvrtc_file(request);
  } catch (const Error&) {
    if (std::optional<Binary> binary = read_any()) {
      return found(std::move(binary), &Counts::disk, "read");
    }
    throw;
  }
  if (on_disk) {
    if (std::optional<Binary> binary = disk().load(key, file.version)) {
      return found(std::move(binary), &Counts::disk, "read");
    }
    disk().require_writable();
  }
  return {std::nullopt, &Counts::compiled, "compiled", std::move(file)};
}

void Jit::require(const Request& request) {
  const std::string key = key_of(request);
  Slot& mine = slot(key);
  const std::lock_guard<std::mutex> lock(mine.mutex);
  if (!mine.binary) {
    seek(request, key);
  }
}

Binary Jit::obtain(const Request& request, const std::string& key) {
  const auto start = std::chrono::steady_clock::now();
  Sought sought = seek(request, key);
  Binary made = sought.binary ? std::move(*sought.binary) : compile(request, key, sought.compiler);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++(counts_.*sought.count);
  }
  if (settings_.log) {
    std::fputs(fmt::format("fovea: jit: {} {} for {} in {:.1f} ms\n", sought.what, request.expression(),
                           request.architecture, milliseconds_since(start))
                   .c_str(),
               stderr);
  }
  return made;
}

Binary Jit::compile(const Request& request, const std::string& key, const NvrtcFile& file) {
  const std::shared_ptr<const Nvrtc> compiler = nvrtc(file);
  const Source source{fmt::format("#include \"{}\"\n", request.file), settings_.text, request.expression(),
                      request.architecture, request.options};
  std::string ptx;
  Binary made = compiler->compile(source, settings_.dump.empty() ? nullptr : &ptx);
  if (!settings_.dump.empty()) {
    dump(request, key, made, ptx);
  }
  if (!settings_.cache_folder.empty()) {
    disk().store(key, compiler->version(), made);
  }
  return made;
}

void Jit::dump(const Request& request, const std::string& key, const Binary& binary, const std::string& ptx) const {
  const std::string name = request.kernel.substr(request.kernel.rfind(':') + 1);
  const std::string base =
      fmt::format("{}/{}-{}-{:.12}", settings_.dump, name, request.architecture, Sha256().add(key).hex());
  std::error_code error;
  std::filesystem::create_directories(settings_.dump, error);
  const auto write = [&](std::string_view suffix, std::string_view content) {
    std::ofstream file(base + std::string(suffix), std::ios::binary);
    file << content;
    if (!file.flush()) {
      throw Error(FOVEA_INVALID_ARGUMENT,
                  fmt::format("FOVEA_DUMP: {}{} cannot be written; a folder of your own is accepted", base, suffix));
    }
  };
  write(".txt", key);
  write(".ptx", ptx);
  write(".cubin", binary.cubin);
  write(".log", binary.log);
}

}  // namespace fovea::cuda::jit
