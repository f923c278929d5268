// SPDX-License-Identifier: Apache-2.0
#include "cpu/pytorch_threads.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <atomic>
#include <cfenv>
#include <cstddef>
#include <string>
#include <string_view>

namespace fovea::cpu {
namespace {

// The functions of an OpenMP runtime that a compiler would call: GCC's (libgomp), and Intel's and LLVM's, which have
// the same ones under the same names.
struct OpenMp {
  void (*parallel)(void (*work)(void*), void* context, unsigned threads, unsigned flags) = nullptr;
  int (*max_threads)() = nullptr;
  int (*thread_number)() = nullptr;
  int (*in_parallel)() = nullptr;
  int (*pytorchs_threads)() = nullptr;  // at::get_num_threads(); NULL in a PyTorch that has none

  // The runtime's number belongs to a thread: PyTorch gives a new thread its own when it is first asked.
  int threads() const { return pytorchs_threads != nullptr ? pytorchs_threads() : max_threads(); }
};

struct Search {
  unsigned long long seen;    // libraries that had been loaded at the last search
  unsigned long long loaded;  // and have been now
  std::string pytorch;        // its path
};

int look_at(dl_phdr_info* library, std::size_t size, void* context) {
  Search& search = *static_cast<Search*>(context);
  if (size >= offsetof(dl_phdr_info, dlpi_adds) + sizeof(library->dlpi_adds)) {
    search.loaded = library->dlpi_adds;
    if (search.loaded == search.seen) {
      return 1;  // nothing new
    }
  }
  constexpr std::string_view kName = "/libtorch_cpu.so";
  const std::string_view name(library->dlpi_name == nullptr ? "" : library->dlpi_name);
  if (name.size() < kName.size() || name.substr(name.size() - kName.size()) != kName) {
    return 0;
  }
  search.pytorch = name;
  return 1;
}

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

std::atomic<bool> forked{false};
// From the moment that this library is loaded: a process may be forked between PyTorch's first operator and our first
// call.
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });

// PyTorch's runtime: the one that libtorch_cpu.so is linked with. A process may have others, of other libraries.
const OpenMp* openmp() {
  static std::atomic<const OpenMp*> found{nullptr};
  static std::atomic<unsigned long long> seen{0};
  if (const OpenMp* known = found.load(std::memory_order_acquire); known != nullptr) {
    return known;
  }
  Search search{seen.load(), 0, {}};
  dl_iterate_phdr(look_at, &search);
  if (search.pytorch.empty()) {
    seen.store(search.loaded);
    return nullptr;
  }
  static const OpenMp runtime = [&] {
    OpenMp r;
    void* pytorch = dlopen(search.pytorch.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    const bool all = pytorch != nullptr && find(pytorch, "GOMP_parallel", r.parallel) &&
                     find(pytorch, "omp_get_max_threads", r.max_threads) &&
                     find(pytorch, "omp_get_thread_num", r.thread_number) &&
                     find(pytorch, "omp_in_parallel", r.in_parallel);
    if (all) {
      find(pytorch, "_ZN2at15get_num_threadsEv", r.pytorchs_threads);
    }
    return all ? r : OpenMp{};
  }();
  if (runtime.parallel == nullptr) {
    seen.store(search.loaded);
    return nullptr;
  }
  found.store(&runtime, std::memory_order_release);
  return &runtime;
}

}  // namespace

int pytorch_threads() {
  const OpenMp* runtime = openmp();
  if (runtime == nullptr) {
    return 0;
  }
  return runtime->in_parallel() != 0 ? 1 : runtime->threads();
}

bool run_on_pytorch_threads(int threads, void (*work)(void* context, int thread), void* context) {
  const OpenMp* runtime = openmp();
  const bool is_usable = runtime != nullptr && !forked.load(std::memory_order_relaxed);
  if (!is_usable || threads > runtime->threads() || runtime->in_parallel() != 0) {
    return false;
  }
  struct Team {
    const OpenMp* runtime;
    int threads;
    void (*work)(void*, int);
    void* context;
    std::fenv_t environment;
  } team{runtime, threads, work, context, {}};
  std::fegetenv(&team.environment);
  // 0: as many threads as PyTorch's own operators have. With fewer the runtime would end the others, and PyTorch's next
  // operator would start new ones.
  runtime->parallel(
      [](void* given) {
        const Team& t = *static_cast<const Team*>(given);
        const int number = t.runtime->thread_number();
        if (number >= t.threads) {
          return;
        }
        // Rounding and denormals are the caller's choice (threads.cpp), but these threads are PyTorch's.
        std::fenv_t own;
        std::fegetenv(&own);
        std::fesetenv(&t.environment);
        t.work(t.context, number);
        std::fesetenv(&own);
      },
      &team, 0, 0);
  return true;
}

}  // namespace fovea::cpu
