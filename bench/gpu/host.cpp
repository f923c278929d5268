// SPDX-License-Identifier: Apache-2.0
//
// What a call costs the host, for bench/gpu/host.py. Problem lines come in, lines of JSON go out:
//
//   bench_host calls            microseconds of one call through the C ABI; each call has other addresses than the last
//   bench_host loads            milliseconds from kernels in the cache on disk to kernels that can be launched
//   bench_host compiles JOBS [KERNEL ...]
//                               seconds that each kernel (or those named) takes to compile, wherever there is NVRTC
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/shapes.h"
#include "core/validate.h"
#include "cuda/executable.h"

namespace fovea {
namespace {

using Clock = std::chrono::steady_clock;
double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::vector<Problem> problems_on_device() {
  std::vector<Problem> problems;
  for (std::string line; std::getline(std::cin, line);) {
    if (!line.empty()) {
      problems.push_back(parse(line));
      problems.back().device = FOVEA_CUDA;
    }
  }
  return problems;
}

void require(fovea_status status, const Problem& problem) {
  if (status != FOVEA_OK) {
    throw std::runtime_error(fmt::format("{}: {}", print(problem), fovea_last_error()));
  }
}

// ---- memory ----

class Device {
 public:
  Device() : driver_(cuda::jit::driver()) {
    cuda::jit::cu::Context context = nullptr;
    cuda::jit::check(driver_, driver_.primary_context_retain(&context, cuda::jit::device(0).handle),
                     "cuDevicePrimaryCtxRetain");
    cuda::jit::check(driver_, driver_.context_push(context), "cuCtxPushCurrent");
  }

  // Zeros, until the process ends.
  std::uintptr_t allocate(std::size_t bytes) const {
    std::uint64_t address = std::uint64_t{1} << 44;  // a driver that is played writes none
    cuda::jit::check(driver_, function<int(std::uint64_t*, std::size_t)>("cuMemAlloc")(&address, bytes), "cuMemAlloc");
    const auto set = function<int(std::uint64_t, unsigned char, std::size_t)>("cuMemsetD8");
    cuda::jit::check(driver_, set(address, 0, bytes), "cuMemsetD8");
    return address;
  }

  void wait() const { cuda::jit::check(driver_, driver_.stream_synchronize(nullptr), "cuStreamSynchronize"); }

 private:
  template <class Signature>
  Signature* function(const char* name) const {
    using Get = int (*)(const char*, void**, int, std::uint64_t, int*);
    const auto get = reinterpret_cast<Get>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuGetProcAddress_v2"));
    void* found = nullptr;
    constexpr int kVersion = 3020;  // of both that are asked for
    cuda::jit::check(driver_, get(name, &found, kVersion, 0, nullptr), "cuGetProcAddress");
    return reinterpret_cast<Signature*>(found);
  }

  const cuda::jit::Driver& driver_;
};

std::size_t bytes_of(const fovea_tensor& tensor) {
  std::int64_t last = 0;
  std::int64_t step = 1;
  for (int d = tensor.rank - 1; d >= 0; --d) {
    if (tensor.shape[d] == 0) {
      return 0;
    }
    last += (tensor.shape[d] - 1) * ((tensor.flags & FOVEA_TENSOR_STRIDED) != 0 ? tensor.stride[d] : step);
    step *= tensor.shape[d];
  }
  return static_cast<std::size_t>(last + 1) * size_of(static_cast<DType>(tensor.dtype));
}

// A problem whose tensors lie one after another from an address on.
class Placed {
 public:
  Placed(const fovea_problem& shapes, std::size_t workspace) : raw_(shapes), workspace_(workspace) {}

  std::size_t place(std::uintptr_t at) {
    const std::uintptr_t begin = at;
    tensors_.reserve(std::size(kTensors));  // raw_ points into it
    const auto take = [&](std::size_t bytes) {
      void* const here = reinterpret_cast<void*>(at);  // NOLINT(performance-no-int-to-ptr)
      at += (bytes + 255) / 256 * 256;
      return here;
    };
    for (const auto tensor : kTensors) {
      if (raw_.*tensor != nullptr) {
        tensors_.push_back(*(raw_.*tensor));
        tensors_.back().data = take(bytes_of(tensors_.back()));
        raw_.*tensor = &tensors_.back();
      }
    }
    scratch_ = take(workspace_);
    return at - begin;
  }

  fovea_status call(Direction direction) const {
    return direction == Direction::kForward ? fovea_forward(&raw_, scratch_, workspace_)
                                            : fovea_backward(&raw_, scratch_, workspace_);
  }

 private:
  static constexpr const fovea_tensor* fovea_problem::*kTensors[] = {&fovea_problem::q,
                                                                     &fovea_problem::k,
                                                                     &fovea_problem::v,
                                                                     &fovea_problem::bias,
                                                                     &fovea_problem::bias2,
                                                                     &fovea_problem::mask,
                                                                     &fovea_problem::alibi_slopes,
                                                                     &fovea_problem::sink,
                                                                     &fovea_problem::cu_seqlens_q,
                                                                     &fovea_problem::cu_seqlens_k,
                                                                     &fovea_problem::seqused_q,
                                                                     &fovea_problem::seqused_k,
                                                                     &fovea_problem::out,
                                                                     &fovea_problem::lse,
                                                                     &fovea_problem::grad_out,
                                                                     &fovea_problem::grad_lse,
                                                                     &fovea_problem::grad_q,
                                                                     &fovea_problem::grad_k,
                                                                     &fovea_problem::grad_v,
                                                                     &fovea_problem::grad_bias,
                                                                     &fovea_problem::grad_bias2,
                                                                     &fovea_problem::grad_sink};

  fovea_problem raw_;
  std::vector<fovea_tensor> tensors_;
  std::size_t workspace_;
  void* scratch_ = nullptr;
};

// ---- what is measured ----

// Batches of as many calls as there are copies of the tensors, so few that the stream takes them all without waiting.
void calls() {
  constexpr int kCopies = 32;
  constexpr int kBatches = 200;
  const Device device;
  for (const Problem& problem : problems_on_device()) {
    const Shapes shapes(problem);
    const auto direction = static_cast<fovea_direction>(problem.direction);
    std::size_t workspace = 0;
    require(fovea_workspace(&shapes.get(), direction, &workspace), problem);
    require(fovea_prepare(&shapes.get(), direction), problem);
    const std::size_t bytes = Placed(shapes.get(), workspace).place(0);
    std::uintptr_t at = device.allocate(bytes * kCopies);
    std::vector<Placed> copies(kCopies, Placed(shapes.get(), workspace));
    for (Placed& copy : copies) {
      at += copy.place(at);
    }
    std::vector<double> batches;
    for (int batch = -2; batch < kBatches; ++batch) {
      device.wait();
      fovea_status status = FOVEA_OK;
      const auto start = Clock::now();
      for (const Placed& copy : copies) {
        status = std::max(status, copy.call(problem.direction));
      }
      const double seconds = since(start);
      require(status, problem);
      if (batch >= 0) {
        batches.push_back(seconds / kCopies);
      }
    }
    device.wait();
    std::sort(batches.begin(), batches.end());
    const Call call = validate(shapes.get(), problem.direction, /*shapes_only=*/true);
    fmt::print("{{\"line\": \"{}\", \"launches\": {}, \"microseconds\": {:.2f}, \"least\": {:.2f}}}\n", print(problem),
               cuda::plan_of(*cuda::executable_of(call)).launches.size(), 1e6 * batches[kBatches / 2],
               1e6 * batches.front());
  }
}

// Of the first problem's time a part is the library's own start.
void loads() {
  const Device device;
  for (const Problem& problem : problems_on_device()) {
    const Shapes shapes(problem);
    const cuda::jit::Jit::Counts before = cuda::jit::Jit::global().counts();
    const auto start = Clock::now();
    require(fovea_prepare(&shapes.get(), static_cast<fovea_direction>(problem.direction)), problem);
    const double seconds = since(start);
    const cuda::jit::Jit::Counts after = cuda::jit::Jit::global().counts();
    fmt::print("{{\"line\": \"{}\", \"milliseconds\": {:.3f}, \"kernels\": {}, \"compiled\": {}}}\n", print(problem),
               1e3 * seconds, after.disk - before.disk, after.compiled - before.compiled);
  }
}

// Wall time, and this thread's own: other work on the machine adds to the first alone.
void compiles(int jobs, const std::set<std::string>& only) {
  struct Work {
    std::string line;
    cuda::jit::Request request;
  };
  std::vector<Work> work;
  std::set<std::string> known;
  const cuda::Target target = cuda::target_of("sm_90");
  for (const Problem& problem : problems_on_device()) {
    const Shapes shapes(problem);
    for (const cuda::Kernel& kernel : cuda::kernels_for(validate(shapes.get(), problem.direction, true), target)) {
      cuda::jit::Request request = cuda::request_of(kernel, target);
      if ((only.empty() || only.count(request.expression()) > 0) && known.insert(request.expression()).second) {
        work.push_back({print(problem), std::move(request)});
      }
    }
  }
  cuda::jit::Settings settings = cuda::jit::Settings::from_environment();
  settings.mode = cuda::jit::Mode::kJit;
  settings.cache_folder.clear();
  settings.precompiled.clear();
  std::mutex mutex;
  std::atomic<std::size_t> next = 0;
  const auto compile = [&] {
    for (std::size_t n = next++; n < work.size(); n = next++) {
      cuda::jit::Jit jit(settings);
      timespec cpu_before{};
      timespec cpu_after{};
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu_before);
      const auto start = Clock::now();
      jit.binary(work[n].request);
      const double seconds = since(start);
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu_after);
      const double cpu = static_cast<double>(cpu_after.tv_sec - cpu_before.tv_sec) +
                         1e-9 * static_cast<double>(cpu_after.tv_nsec - cpu_before.tv_nsec);
      const std::lock_guard<std::mutex> lock(mutex);
      fmt::print("{{\"line\": \"{}\", \"kernel\": \"{}\", \"seconds\": {:.3f}, \"cpu_seconds\": {:.3f}}}\n",
                 work[n].line, work[n].request.expression(), seconds, cpu);
      std::fflush(stdout);
    }
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < jobs; ++i) {
    threads.emplace_back(compile);
  }
  compile();
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace
}  // namespace fovea

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "";
  try {
    if (what == "calls") {
      fovea::calls();
    } else if (what == "loads") {
      fovea::loads();
    } else if (what == "compiles" && count > 2) {
      fovea::compiles(std::atoi(arguments[2]), {arguments + 3, arguments + count});
    } else {
      std::fputs("bench_host calls | loads | compiles JOBS [KERNEL ...] < problem lines\n", stderr);
      return 2;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_host: %s\n", error.what());
    return 1;
  }
  return 0;
}
