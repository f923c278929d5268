// SPDX-License-Identifier: Apache-2.0
//
// Every kernel that the planner takes for the case table and for problems that are larger than those (kLarger),
// compiled without a GPU: none may spill, use local memory beyond a small budget, take more registers than its blocks
// have, or have products that ptxas serialised. Their number is printed. All of them take minutes on many cores;
// FOVEA_KERNELS says how many are taken (a number, or "all"), spread evenly over the sorted list. FOVEA_KERNELS_SECONDS
// ends each architecture's after so long: what was not reached by then is counted, printed, and makes the test one that
// was skipped.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "check/cases.h"
#include "core/shapes.h"
#include "core/validate.h"
#include "cuda/executable.h"
#include "jit_testing.h"

namespace fovea::cuda {
namespace {

constexpr std::size_t kSample = 25;  // of an architecture, where FOVEA_KERNELS does not say
constexpr std::size_t kFewest = 4;   // with FOVEA_CASES=reduced: the library is slow, and the compiler the same

// What is tolerated: a few registers' worth, in kernels that have many features at once.
constexpr int kMostSpilt = 128;
constexpr int kMostStack = 160;
// Of sm90_backward with Spec::same_step and a band or a bias: its warps that copy have 24 registers. Those that compute
// spill nothing.
constexpr int kMostSpiltByCopies = 256;

// What takes blocks that fill the chip, or many steps of few blocks.
constexpr const char* kLarger[] = {
    "bwd b=4 hq=16 sq=4096 sk=4096 d=128 bf16",
    "bwd b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=b,h,q,k",
    "bwd b=2 hq=8 sq=2048 sk=2048 d=128 fp16 bias=1,h,q,k:bf16 need=q,k,v",
    "bwd b=4 hq=32 hk=8 sq=4096 sk=4096 d=128 bf16 causal",
    "bwd b=1 hq=8 hk=1 sq=2048 sk=2048 d=128 bf16",
    "bwd b=1 hq=8 hk=1 sq=2048 sk=2048 d=128 bf16 causal det",
    "bwd b=1 hq=8 sq=4096 sk=77 d=64 bf16",
    "bwd b=1 hq=8 hk=1 sq=1024 sk=1024 d=192 dv=128 bf16 causal",
    "bwd b=1 hq=4 hk=1 sq=1664 sk=1664 d=192 bf16",
    "bwd b=1 hq=4 hk=1 sq=1024 sk=1024 d=256 bf16 causal dropout=0.1 det",
};

constexpr int kRegisters = 65536;  // of a multiprocessor, on every architecture that is served

struct Job {
  jit::Request request;
  int registers = 0;  // that a thread may have, with as many blocks on a multiprocessor as the kernel counts on
  int most_spilt = kMostSpilt;
};

// Hopper's other kernels share a multiprocessor's registers among the warpgroups of one block.
int registers_of(const Kernel& kernel) {
  const std::string_view name = kernel.name;
  const bool alone = name.starts_with("sm90_") && name != "sm90_forward";
  return kRegisters / (kernel.threads * (alone ? 1 : kernel.spec.ctas));
}

std::vector<Job> jobs_for(const std::string& architecture) {
  const Target target = target_of(architecture);
  std::map<std::string, Job> jobs;
  const auto add = [&](const Problem& problem) {
    const Shapes shapes(problem);
    const Call call = validate(shapes.get(), problem.direction, /*shapes_only=*/true);
    for (const Kernel& kernel : kernels_for(call, target)) {
      const jit::Request request = request_of(kernel, target);
      const bool copies_spill = kernel.spec.same_step && (kernel.spec.banded || kernel.spec.bias != BiasTile::kNone);
      const int most_spilt = copies_spill ? kMostSpiltByCopies : kMostSpilt;
      jobs.emplace(request.expression(), Job{request, registers_of(kernel), most_spilt});
    }
  };
  for (const check::Case& c : check::cases(check::Table::kFull)) {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      Problem problem = c.problem;
      if (problem.type == DType::kFp64) {
        continue;
      }
      problem.device = FOVEA_CUDA;
      if (direction == Direction::kForward) {
        problem.direction = direction;
        problem.need = {};
        problem.grad_lse = false;
        problem.lse = true;
      }
      add(problem);
    }
  }
  for (const char* const line : kLarger) {
    add(parse(std::string(line) + " device=cuda"));
  }
  std::vector<Job> sorted;
  for (auto& [expression, job] : jobs) {
    sorted.push_back(job);
  }
  return sorted;
}

std::vector<Job> sampled(const std::vector<Job>& all) {
  const char* const asked = std::getenv("FOVEA_KERNELS");
  const bool reduced = check::table_of_environment() == check::Table::kReduced;
  const std::string text = asked != nullptr ? asked : std::to_string(reduced ? kFewest : kSample);
  const std::size_t count = text == "all" ? all.size() : std::min<std::size_t>(std::stoul(text), all.size());
  std::vector<Job> some;
  for (std::size_t i = 0; i < count; ++i) {
    some.push_back(all[i * all.size() / count]);
  }
  return some;
}

// Neighbours in the sorted list are much alike: in this order whatever comes first is spread over all of it.
std::vector<Job> spread(const std::vector<Job>& jobs) {
  constexpr double kGolden = 0.618;
  std::size_t step = std::max<std::size_t>(std::llround(kGolden * static_cast<double>(jobs.size())), 1);
  while (std::gcd(step, jobs.size()) != 1) {
    ++step;
  }
  std::vector<Job> order;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    order.push_back(jobs[i * step % jobs.size()]);
  }
  return order;
}

std::chrono::steady_clock::time_point deadline() {
  const char* const seconds = std::getenv("FOVEA_KERNELS_SECONDS");
  return seconds == nullptr ? std::chrono::steady_clock::time_point::max()
                            : std::chrono::steady_clock::now() + std::chrono::seconds(std::stoul(seconds));
}

std::vector<std::string> faults_of(const jit::Report& report, const Job& job) {
  std::vector<std::string> faults;
  if (report.registers > job.registers) {
    faults.push_back(fmt::format("{} registers a thread; its blocks have {}", report.registers, job.registers));
  }
  if (report.spill_bytes > job.most_spilt) {
    faults.push_back(fmt::format("{} bytes spilt; accepted: {}", report.spill_bytes, job.most_spilt));
  }
  if (const int local = std::max(report.stack_bytes, report.local_bytes); local > kMostStack) {
    faults.push_back(fmt::format("{} bytes of local memory; accepted: {}", local, kMostStack));
  }
  for (const jit::Report::Message& message : report.messages) {
    if (message.loss) {
      faults.push_back(fmt::format("{}: {}", message.code, message.text));
    }
  }
  return faults;
}

// A compilation takes one thread; others may share its core.
double seconds_of_this_thread() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

class CudaKernels : public ::testing::TestWithParam<const char*> {};

TEST_P(CudaKernels, CompileWithoutLosses) {
  const std::vector<Job> all = jobs_for(GetParam());
  const std::vector<Job> some = spread(sampled(all));
  ASSERT_GT(all.size(), 500u);
  jit::Settings settings;
  settings.nvrtc = jit_testing::nvrtc_search();
  const jit::Version version = jit::find_nvrtc(settings.nvrtc).version;
  jit::Jit jit(settings);
  std::mutex mutex;
  std::atomic<std::size_t> next = 0;
  const auto end = deadline();
  std::size_t compiled = 0;
  int spilling = 0;
  double total = 0;
  double slowest = 0;
  std::string slowest_name;
  const auto work = [&] {
    while (std::chrono::steady_clock::now() < end) {
      const std::size_t n = next++;
      if (n >= some.size()) {
        break;
      }
      std::vector<std::string> faults;
      bool spills = false;
      const double start = seconds_of_this_thread();
      try {
        const auto binary = jit.binary(some[n].request);
        faults = faults_of(binary->report, some[n]);
        spills = binary->report.spill_bytes > 0;
      } catch (const Error& error) {
        faults.emplace_back(error.what());
      }
      const std::lock_guard<std::mutex> lock(mutex);
      ++compiled;
      spilling += spills ? 1 : 0;
      const double seconds = seconds_of_this_thread() - start;
      total += seconds;
      if (seconds > slowest) {
        slowest = seconds;
        slowest_name = some[n].request.expression();
      }
      for (const std::string& fault : faults) {
        ADD_FAILURE() << some[n].request.architecture << " " << some[n].request.expression() << ": " << fault;
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < std::max(std::thread::hardware_concurrency(), 1u); ++i) {
    threads.emplace_back(work);
  }
  work();
  for (std::thread& thread : threads) {
    thread.join();
  }
  const std::size_t missing = some.size() - compiled;
  std::printf(
      "%s: %zu kernels, %zu compiled by NVRTC %s, %zu not reached, %d with a spill; %.2f s each, at most %.2f: %s\n",
      GetParam(), all.size(), compiled, to_text(version).c_str(), missing, spilling,
      total / static_cast<double>(std::max<std::size_t>(compiled, 1)), slowest, slowest_name.c_str());
  if (missing > 0 && !HasFailure()) {
    GTEST_SKIP() << missing << " of " << some.size() << " kernels not reached in FOVEA_KERNELS_SECONDS";
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, CudaKernels, ::testing::Values("sm_80", "sm_90", "sm_120"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace fovea::cuda
