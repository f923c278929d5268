// SPDX-License-Identifier: Apache-2.0
//
// How `fovea check --device cuda` makes a trial's calls: memory, copies, launches, errors. The driver is the fake one
// (fake/), whose device memory is the host's: the CPU backend computes there, in a GPU's stead. The test starts itself
// anew with the fake libraries in the loader's path.
#include "check/gpu.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "check/run.h"

namespace fovea::check {
namespace {

TEST(CheckGpu, WithAFakeDriver) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  const std::string command = fmt::format(
      "env -u FOVEA_BACKEND -u FOVEA_KERNEL LD_LIBRARY_PATH={0} FOVEA_NVRTC={0}/libnvrtc.so.13 FOVEA_CACHE_DIR=none "
      "FOVEA_JIT=jit '{1}' --gtest_also_run_disabled_tests --gtest_brief=1 --gtest_filter='DISABLED_FakeGpu.*'",
      FOVEA_FAKE_CUDA, self);
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
}

class DISABLED_FakeGpu : public ::testing::Test {
 protected:
  template <class T>
  static T& variable(const char* name) {
    static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    return *static_cast<T*>(dlsym(library, name));
  }
  static int& allocations() { return variable<int>("fake_allocations"); }
  static int& launches() { return variable<int>("fake_launches"); }

  const Gpu gpu{0};
};

// As a right GPU would.
void by_the_cpu(const GpuCall& call) {
  fovea_problem problem = call.problem;
  EXPECT_EQ(problem.device, FOVEA_CUDA);
  problem.device = FOVEA_CPU;
  Caller compute(problem, call.direction);
  compute();
}

Case case_of(const std::string& line) {
  Case c;
  c.problem = parse(line);
  c.seed = 1;
  return for_gpu(c);
}

TEST_F(DISABLED_FakeGpu, RightResultsPass) {
  int rows = 0;
  const std::vector<Case>& table = cases(Table::kReduced);
  for (std::size_t n = 0; n < table.size(); n += 4) {
    const Case c = for_gpu(table[n]);
    const Trial trial(c, Arithmetic::kGpu);
    const Outcome outcome = trial.test(
        [&](const Tensors& tensors, Direction direction) { return gpu.run(tensors, direction, {}, by_the_cpu); });
    EXPECT_TRUE(outcome.passed()) << to_text(c) << "\n" << to_text(outcome);
    ++rows;
  }
  EXPECT_GT(rows, 20);
  EXPECT_EQ(allocations(), 0);
  EXPECT_GT(variable<std::uint64_t>("fake_bytes_up"), variable<std::uint64_t>("fake_bytes_down"));
}

TEST_F(DISABLED_FakeGpu, ResultsThatAreNotComputedFail) {
  const Case c = case_of("bwd b=2 hq=4 hk=2 sq=50 sk=33 d=24 bf16 causal bias=1,h,q,k");
  const Trial trial(c, Arithmetic::kGpu);
  const int before = launches();
  bool computed = false;
  const Outcome outcome = trial.test([&](const Tensors& tensors, Direction direction) {
    return gpu.run(tensors, direction,
                   {[&] {
                      computed = false;
                      EXPECT_GT(variable<int>("fake_loads"), 0);  // compiled before
                    },
                    [&](bool threw) { computed = !threw && launches() > before; }});
  });
  EXPECT_FALSE(outcome.passed());  // the fake driver computes nothing
  EXPECT_EQ(outcome.error, "");
  EXPECT_NE(to_text(outcome).find("out: "), std::string::npos) << to_text(outcome);
  EXPECT_EQ(outcome.status, FOVEA_OK);
  EXPECT_TRUE(computed);
  EXPECT_GT(launches(), before);
  EXPECT_EQ(allocations(), 0);
}

TEST_F(DISABLED_FakeGpu, ForbiddenWritesAreSeen) {
  const Case c = case_of("bwd b=2 hq=4 hk=2 sq=50 sk=33 d=24 bf16 bias=1,h,q,k used_k=30,20");
  const Trial trial(c, Arithmetic::kGpu);
  const auto outcome_of = [&](const std::function<void(const GpuCall&)>& fault) {
    return trial
        .test([&](const Tensors& tensors, Direction direction) {
          return gpu.run(tensors, direction, {}, [&](const GpuCall& call) {
            by_the_cpu(call);
            fault(call);
          });
        })
        .error;
  };
  const auto byte = [](const void* memory, std::ptrdiff_t offset) -> unsigned char& {
    return const_cast<unsigned char*>(static_cast<const unsigned char*>(memory))[offset];
  };
  EXPECT_EQ(outcome_of([](const GpuCall&) {}), "");
  EXPECT_NE(outcome_of([&](const GpuCall& call) { byte(call.problem.k->data, 5) ^= 1; }).find("k: byte"),
            std::string::npos);
  EXPECT_NE(outcome_of([&](const GpuCall& call) {
              byte(call.workspace, static_cast<std::ptrdiff_t>(call.workspace_bytes)) = 0;
            }).find("byte 0 behind the workspace"),
            std::string::npos);
  EXPECT_NE(outcome_of([&](const GpuCall& call) { byte(call.problem.out->data, -1) = 0; }).find("out: byte -1"),
            std::string::npos);
  EXPECT_NE(outcome_of([&](const GpuCall& call) { byte(call.workspace, -1) = 0; }), "");
}

TEST_F(DISABLED_FakeGpu, ErrorsAreReportedAndNothingStays) {
  const Case c = case_of("bwd b=1 hq=1 sq=16 sk=16 d=16 bf16");
  const Trial trial(c, Arithmetic::kGpu);
  const auto test = [&] {
    return trial.test(
        [&](const Tensors& tensors, Direction direction) { return gpu.run(tensors, direction, {}, call_on_gpu); });
  };
  variable<int>("fake_result_of_launch") = 719;
  Outcome outcome = test();
  EXPECT_EQ(outcome.status, FOVEA_DEVICE_ERROR);
  EXPECT_NE(outcome.error.find("cuLaunchKernelEx"), std::string::npos) << outcome.error;
  variable<int>("fake_result_of_launch") = 0;
  variable<int>("fake_result_of_copy") = 700;
  outcome = test();
  EXPECT_EQ(outcome.status, FOVEA_DEVICE_ERROR);
  EXPECT_NE(outcome.error.find("cuMemcpyDtoHAsync"), std::string::npos) << outcome.error;
  variable<int>("fake_result_of_copy") = 0;
  EXPECT_EQ(allocations(), 0);
  EXPECT_EQ(test().status, FOVEA_OK);
  EXPECT_THROW(Gpu(2), Error);  // the fake driver has two
}

TEST_F(DISABLED_FakeGpu, TypesThatNoGpuHasBecomeFp32) {
  const Case c = case_of("bwd b=1 hq=1 sq=16 sk=16 d=16 fp64 bias=1,1,q,k:fp64 backend=cpu");
  EXPECT_EQ(to_text(c).find("fp64"), std::string::npos) << to_text(c);
  EXPECT_EQ(to_text(c).find("backend"), std::string::npos) << to_text(c);
}

}  // namespace
}  // namespace fovea::check
