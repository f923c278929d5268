// SPDX-License-Identifier: Apache-2.0
//
// From a kernel's name and template argument to machine code, and to a kernel that can be launched:
//
//     Request ──> memory ──> FOVEA_PRECOMPILED_DIR ──> installed with the library ──> cache on disk ──> NVRTC ──> cache
//                              (any mode)                (any mode)                     (jit, cache)     (jit)
//
// FOVEA_JIT is `jit` (compile what is missing; where there is no NVRTC, take what is there), `cache` (never compile) or
// `off` (only what came precompiled). What a mode does not find is Error(FOVEA_UNSUPPORTED) with what to do. Nothing
// here knows what a kernel computes.
//
// Threads that ask for the same kernel at the same time wait for one compilation. A process that was forked keeps the
// code it had but not the driver.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/jit/cache.h"
#include "cuda/jit/driver.h"
#include "cuda/jit/nvrtc.h"
#include "cuda/jit/source.h"

namespace fovea::cuda::jit {

enum class Mode { kJit, kCache, kOff };

struct Request {
  std::string file;                  // of the embedded text: "generic/forward.cuh"
  std::string kernel;                // "fovea::cuda::generic_forward<...>"
  std::string argument;              // the printed template argument: "fovea::cuda::ForwardSpec{...}"
  std::string architecture;          // "sm_80"
  std::vector<std::string> options;  // for NVRTC, beyond default_options()

  std::string expression() const { return kernel + "<" + argument + ">"; }
};

struct Settings {
  Mode mode = Mode::kJit;
  std::string precompiled;   // a folder; empty: none
  std::string installed;     // the one that came with the library; empty: none
  std::string cache_folder;  // empty: none on disk (FOVEA_CACHE_DIR=none)
  std::uint64_t cache_bytes = 0;
  NvrtcSearch nvrtc;
  std::span<const TextFile> text = embedded_files();
  bool log = false;  // one line on standard error for what was compiled or read (FOVEA_LOG=jit)
  std::string dump;  // a folder for text, PTX, machine code and log of everything that is compiled (FOVEA_DUMP)

  // Throws Error(FOVEA_INVALID_ARGUMENT) where a variable has a value that is not accepted.
  static Settings from_environment();
};

// FOVEA_JIT and FOVEA_LOG; both throw Error(FOVEA_INVALID_ARGUMENT) where they have a value that is not accepted.
Mode mode_from_environment();
bool log_from_environment();

class Jit {
 public:
  explicit Jit(Settings settings) : settings_(std::move(settings)) {}

  // The one of this process, by the environment as it was when it was first asked for.
  static Jit& global();

  const Settings& settings() const { return settings_; }

  // Everything that the machine code depends on but NVRTC's version, in one text: the cache's key.
  std::string key_of(const Request& request) const;

  // The machine code. Needs no driver and no GPU.
  std::shared_ptr<const Binary> binary(const Request& request);

  // Throws what binary() would throw before it compiles: no NVRTC, a mode that does not find it, a folder that is not
  // safe.
  void require(const Request& request);

  // Several, at once as far as there are cores: a call's first kernels take as long as the slowest of them. All are
  // tried; then the first that went wrong is thrown.
  void gather(const std::vector<Request>& requests);

  // The kernel, loaded into the driver of this machine and never unloaded.
  cu::Kernel kernel(const Request& request);

  struct Counts {
    int memory = 0;
    int precompiled = 0;
    int installed = 0;
    int disk = 0;
    int compiled = 0;
  };
  Counts counts() const;

 private:
  struct Slot {
    std::mutex mutex;  // held while its one kernel is sought or compiled
    std::shared_ptr<const Binary> binary;
    std::unique_ptr<Library> library;
    cu::Kernel kernel = nullptr;
  };

  Slot& slot(const std::string& key);
  const std::shared_ptr<const Binary>& fill(Slot& slot, const Request& request, const std::string& key);
  // Machine code that is there, or the thread that compiles it.
  struct Sought {
    std::optional<Binary> binary;
    int Counts::*count;
    std::string_view what;  // for the log
    NvrtcFile compiler;
  };
  Sought seek(const Request& request, const std::string& key);
  Binary obtain(const Request& request, const std::string& key);
  Binary compile(const Request& request, const std::string& key, const NvrtcFile& file);
  NvrtcFile nvrtc_file(const Request& request);
  std::shared_ptr<const Nvrtc> nvrtc(const NvrtcFile& file);
  const Cache& disk();
  void dump(const Request& request, const std::string& key, const Binary& binary, const std::string& ptx) const;

  const Settings settings_;
  mutable std::mutex mutex_;  // of what follows; never held while something is compiled
  std::map<std::string, std::unique_ptr<Slot>> slots_;
  mutable std::map<std::string, std::string> hashes_;  // of the text, by a kernel's file
  std::map<Version, NvrtcFile> files_;                 // by the least version asked for
  std::map<std::string, std::shared_ptr<const Nvrtc>> loaded_;
  std::optional<Cache> disk_;
  Counts counts_;
};

}  // namespace fovea::cuda::jit
