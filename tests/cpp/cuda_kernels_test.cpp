// SPDX-License-Identifier: Apache-2.0
//
// A sample of the kernels that the planner takes for the case table and for problems that are larger than those
// (tests/kernels/problems.txt), compiled by the library without a GPU: none may take more than tests/kernels/limits.h
// says, or have products that ptxas serialised. tools/kernels.py looks at all of them. FOVEA_KERNELS says how many are
// taken of an architecture (a number, or "all"), spread evenly over the sorted list.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>

#include "../kernels/limits.h"
#include "check/cases.h"
#include "core/shapes.h"
#include "core/validate.h"
#include "cuda/executable.h"
#include "jit_testing.h"

namespace fovea::cuda {
namespace {

constexpr std::size_t kSample = 8;  // of an architecture, where FOVEA_KERNELS does not say
constexpr std::size_t kFewest = 4;  // with FOVEA_CASES=reduced: the library is slow, and the compiler the same

struct Job {
  jit::Request request;
  int registers = 0;
  int spilt = 0;
  int local = 0;
};

std::vector<Job> jobs_for(const std::string& architecture) {
  const Target target = target_of(architecture);
  std::map<std::string, Job> jobs;
  const auto add = [&](const Problem& problem) {
    const Shapes shapes(problem);
    const Call call = validate(shapes.get(), problem.direction, /*shapes_only=*/true);
    for (const Kernel& kernel : kernels_for(call, target)) {
      const jit::Request request = request_of(kernel, target);
      jobs.emplace(request.expression(),
                   Job{request, limits::registers(kernel), limits::spilt(kernel), limits::local(kernel)});
    }
  };
  for (const check::Case& c : check::cases(check::Table::kFull)) {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      Problem problem = direction == Direction::kForward ? check::forward_of(c.problem) : c.problem;
      if (problem.type == DType::kFp64) {
        continue;
      }
      problem.device = FOVEA_CUDA;
      add(problem);
    }
  }
  std::ifstream larger(FOVEA_SOURCE_DIR "/tests/kernels/problems.txt");
  for (std::string line; std::getline(larger, line);) {
    if (!line.starts_with('#')) {
      add(parse(line + " device=cuda"));
    }
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

// The limits are those of NVRTC 13. Compilers before it spill more in the same kernels: of them twice as much is
// accepted.
std::vector<std::string> faults_of(const jit::Report& report, const Job& job, const jit::Version& version) {
  constexpr int kFirstOfLimits = 13;
  const int spilt = version.major < kFirstOfLimits ? 2 * job.spilt : job.spilt;
  std::vector<std::string> faults;
  if (report.registers > job.registers) {
    faults.push_back(fmt::format("{} registers a thread; its blocks have {}", report.registers, job.registers));
  }
  if (report.spill_bytes > spilt) {
    faults.push_back(fmt::format("{} bytes spilt; accepted: {}", report.spill_bytes, spilt));
  }
  if (const int local = std::max(report.stack_bytes, report.local_bytes); local > job.local) {
    faults.push_back(fmt::format("{} bytes of local memory; accepted: {}", local, job.local));
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
  const std::vector<Job> some = sampled(all);
  ASSERT_GT(all.size(), 500u);
  jit::Settings settings;
  settings.nvrtc = jit_testing::nvrtc_search();
  const jit::Version version = jit::find_nvrtc(settings.nvrtc).version;
  jit::Jit jit(settings);
  std::mutex mutex;
  std::atomic<std::size_t> next = 0;
  int spilling = 0;
  double total = 0;
  double slowest = 0;
  std::string slowest_name;
  const auto work = [&] {
    for (std::size_t n = next++; n < some.size(); n = next++) {
      std::vector<std::string> faults;
      bool spills = false;
      const double start = seconds_of_this_thread();
      try {
        const auto binary = jit.binary(some[n].request);
        faults = faults_of(binary->report, some[n], version);
        spills = binary->report.spill_bytes > 0;
      } catch (const Error& error) {
        faults.emplace_back(error.what());
      }
      const std::lock_guard<std::mutex> lock(mutex);
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
  std::printf("%s: %zu kernels, %zu compiled by NVRTC %s, %d with a spill; %.2f s each, at most %.2f: %s\n", GetParam(),
              all.size(), some.size(), to_text(version).c_str(), spilling,
              total / static_cast<double>(std::max<std::size_t>(some.size(), 1)), slowest, slowest_name.c_str());
}

INSTANTIATE_TEST_SUITE_P(Architectures, CudaKernels, ::testing::Values("sm_80", "sm_90", "sm_120"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace fovea::cuda
