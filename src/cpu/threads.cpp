// SPDX-License-Identifier: Apache-2.0
#include "cpu/threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/cpu.h"
#include "cpu/pytorch_threads.h"

namespace fovea::cpu {
namespace {

int threads_by_affinity() {
  // The mask may be larger than cpu_set_t on big machines: grow until the kernel is content.
  for (std::size_t cpus = CPU_SETSIZE; cpus <= (std::size_t{1} << 20); cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(cpus);
    if (set == nullptr) {
      break;
    }
    const std::size_t size = CPU_ALLOC_SIZE(cpus);
    const bool known = sched_getaffinity(0, size, set) == 0;
    const int count = known ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    if (known) {
      return std::max(count, 1);
    }
  }
  return std::max(static_cast<int>(std::thread::hardware_concurrency()), 1);
}

// "max 100000" or "150000 100000": quota and period in microseconds.
std::optional<double> quota_v2(const std::string& path) {
  std::ifstream file(path + "/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) {
    return std::nullopt;
  }
  return std::atof(quota.c_str()) / period;
}

std::optional<double> quota_v1(const std::string& path) {
  double quota = 0;
  double period = 0;
  std::ifstream quota_file(path + "/cpu.cfs_quota_us");
  std::ifstream period_file(path + "/cpu.cfs_period_us");
  if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) {
    return std::nullopt;
  }
  return quota / period;
}

// Whether "cpu" is one of these controllers, which are separated by commas.
bool names_cpu(std::string_view controllers) {
  while (!controllers.empty()) {
    const std::size_t comma = std::min(controllers.find(','), controllers.size());
    if (controllers.substr(0, comma) == "cpu") {
      return true;
    }
    controllers.remove_prefix(std::min(comma + 1, controllers.size()));
  }
  return false;
}

// The least quota of this process's cgroup and those above it, in cores.
std::optional<double> cgroup_quota() {
  std::optional<double> least;
  const auto consider = [&](std::optional<double> quota) {
    if (quota && (!least || *quota < *least)) {
      least = quota;
    }
  };
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/path" (v2) or "4:cpu,cpuacct:/path" (v1)
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const bool v2 = second == first + 1;
    if (!v2 && !names_cpu(std::string_view(line).substr(first + 1, second - first - 1))) {
      continue;
    }
    const std::string root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
    for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
      while (!path.empty() && path.back() == '/') {
        path.pop_back();
      }
      consider(v2 ? quota_v2(root + path) : quota_v1(root + path));
      if (path.empty()) {
        break;
      }
    }
  }
  return least;
}

std::atomic<int> chosen_threads{0};  // 0: available_threads(), and no more than PyTorch has

class Pool {
 public:
  // False if another call has the pool.
  bool run(int threads, void (*work)(void*, int), void* context) {
    const std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
    if (!mine) {
      return false;
    }
    if (run_on_pytorch_threads(threads, work, context)) {
      return true;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      grow(threads - 1);
      work_ = work;
      context_ = context;
      std::fegetenv(&environment_);
      wanted_ = std::min(threads - 1, static_cast<int>(workers_.size()));
      running_ = wanted_;
      ++round_;
    }
    begin_.notify_all();
    work(context, 0);
    std::unique_lock<std::mutex> lock(mutex_);
    end_.wait(lock, [&] { return running_ == 0; });
    return true;
  }

 private:
  // Fewer threads than requested is no error: those that exist take the work.
  void grow(int workers) {
    while (static_cast<int>(workers_.size()) < workers) {
      try {
        workers_.emplace_back([this, n = static_cast<int>(workers_.size()) + 1, seen = round_] { work(n, seen); });
      } catch (const std::system_error&) {
        return;
      }
      workers_.back().detach();
    }
  }

  void work(int number, std::uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      begin_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (number > wanted_) {
        continue;
      }
      // Rounding and denormals are the caller's choice: a result must not depend on which thread computed which part of
      // it.
      std::fesetenv(&environment_);
      lock.unlock();
      work_(context_, number);
      lock.lock();
      if (--running_ == 0) {
        end_.notify_one();
      }
    }
  }

  std::mutex busy_;
  std::mutex mutex_;
  std::condition_variable begin_;
  std::condition_variable end_;
  std::vector<std::thread> workers_;
  std::uint64_t round_ = 0;
  int wanted_ = 0;
  int running_ = 0;
  std::fenv_t environment_{};
  void (*work_)(void*, int) = nullptr;
  void* context_ = nullptr;
};

std::atomic<Pool*> the_pool{nullptr};

// Never destroyed: its threads may outlive main(), and a forked child must not touch its parent's.
Pool& pool() {
  static const int at_fork = pthread_atfork(nullptr, nullptr, [] { the_pool.store(nullptr); });
  static_cast<void>(at_fork);
  Pool* current = the_pool.load();
  if (current == nullptr) {
    Pool* made = new Pool;
    if (the_pool.compare_exchange_strong(current, made)) {
      return *made;
    }
    delete made;
  }
  return *current;
}

}  // namespace

int available_threads() {
  const int affinity = threads_by_affinity();
  const std::optional<double> quota = cgroup_quota();
  return quota ? std::clamp(static_cast<int>(std::ceil(*quota)), 1, affinity) : affinity;
}

void set_num_threads(int n) { chosen_threads.store(std::max(n, 0)); }

int num_threads() {
  const int chosen = chosen_threads.load();
  if (chosen > 0) {
    return chosen;
  }
  static const int available = available_threads();
  const int pytorchs = pytorch_threads();
  return pytorchs > 0 ? std::min(pytorchs, available) : available;
}

void run_on_threads(int threads, void (*work)(void* context, int thread), void* context) {
  if (threads <= 1 || !pool().run(threads, work, context)) {
    work(context, 0);
  }
}

void wait_for(const std::uint32_t* counter, std::uint32_t value) {
  // The wait is usually short. With more threads than cores, though, the thread that is waited for needs a core.
  constexpr int kSpins = 200;
  for (int spin = 0; __atomic_load_n(counter, __ATOMIC_ACQUIRE) != value; ++spin) {
    if (spin >= kSpins) {
      sched_yield();
    } else {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }
}

}  // namespace fovea::cpu
