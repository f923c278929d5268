// SPDX-License-Identifier: Apache-2.0
//
// Calls of the CUDA backend through the C ABI with a driver and a compiler that are played (fake/): which kernels are
// launched with what, what is loaded when, captures, devices, threads, errors. Addresses are made up, so whoever
// dereferences one crashes. The test starts itself anew with the played libraries in the loader's path.
#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "check/cases.h"
#include "core/shapes.h"
#include "core/validate.h"
#include "cuda/executable.h"

namespace fovea {
namespace {

TEST(CudaCall, WithAPlayedDriver) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  const auto run = [&](const char* set, const char* filter) {
    const std::string command = fmt::format(
        "env -u FOVEA_BACKEND -u FOVEA_KERNEL LD_LIBRARY_PATH={0} FOVEA_NVRTC={0}/libnvrtc.so.13 FOVEA_CACHE_DIR=none "
        "FOVEA_JIT=jit {1} '{2}' --gtest_also_run_disabled_tests --gtest_brief=1 --gtest_filter='{3}'",
        FOVEA_FAKE_CUDA, set, self, filter);
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
  };
  run("FOVEA_CHECK=0", "DISABLED_PlayedCuda.*-*WhereThatIsAskedFor:*.AnOldGpu*:*.WithAn*:*.WithNothing*");
  run("FOVEA_CHECK=yes", "DISABLED_PlayedCuda.WithAnUnknownValue*");
  run("FOVEA_JIT=off", "DISABLED_PlayedCuda.WithNothingToCompile*");
  run("FOVEA_CHECK=1", "DISABLED_PlayedCuda.*WhereThatIsAskedFor");
  run("FAKE_CAPABILITY=7", "DISABLED_PlayedCuda.AnOldGpu*");
}

// As fake/cuda.c has it.
struct Launched {
  const char* name;
  unsigned grid_x, block_x, shared_bytes;
  void* stream;
};

class DISABLED_PlayedCuda : public ::testing::Test {
 protected:
  static void* library() {
    static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    return library;
  }
  template <class T>
  static T& variable(const char* name) {
    return *static_cast<T*>(dlsym(library(), name));
  }
  static int& loads() { return variable<int>("fake_loads"); }
  static int& launches() { return variable<int>("fake_launches"); }
  static Launched* launched() { return &variable<Launched>("fake_launched"); }
};

// A problem whose tensors lie nowhere.
class Given {
 public:
  explicit Given(const Problem& problem, int device = 0) : problem_(problem) {
    problem_.device = FOVEA_CUDA;
    shapes_.emplace(problem_);
    raw = shapes_->get();
    raw.device_index = device;
    std::uintptr_t address = std::uintptr_t{1} << 44;
    tensors_.reserve(32);
    for (const fovea_tensor** tensor : {&raw.q,
                                        &raw.k,
                                        &raw.v,
                                        &raw.bias,
                                        &raw.bias2,
                                        &raw.mask,
                                        &raw.alibi_slopes,
                                        &raw.sink,
                                        &raw.cu_seqlens_q,
                                        &raw.cu_seqlens_k,
                                        &raw.seqused_q,
                                        &raw.seqused_k,
                                        &raw.out,
                                        &raw.lse,
                                        &raw.grad_out,
                                        &raw.grad_lse,
                                        &raw.grad_q,
                                        &raw.grad_k,
                                        &raw.grad_v,
                                        &raw.grad_bias,
                                        &raw.grad_bias2,
                                        &raw.grad_sink}) {
      if (*tensor != nullptr) {
        tensors_.push_back(**tensor);
        tensors_.back().data = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
        address += std::uintptr_t{1} << 36;
        *tensor = &tensors_.back();
      }
    }
    raw.seed_ptr = reinterpret_cast<const std::uint64_t*>(address);  // NOLINT(performance-no-int-to-ptr)
  }
  explicit Given(const std::string& line, int device = 0) : Given(parse(line), device) {}

  fovea_direction direction() const { return static_cast<fovea_direction>(problem_.direction); }
  fovea_status prepare() const { return fovea_prepare(&raw, direction()); }
  fovea_status call() const {
    std::size_t bytes = 0;
    if (const fovea_status status = fovea_workspace(&raw, direction(), &bytes); status != FOVEA_OK) {
      return status;
    }
    void* workspace = reinterpret_cast<void*>((std::uintptr_t{1} << 43) + 1);  // NOLINT(performance-no-int-to-ptr)
    return problem_.direction == Direction::kForward ? fovea_forward(&raw, workspace, bytes)
                                                     : fovea_backward(&raw, workspace, bytes);
  }
  cuda::Plan plan() const {
    return cuda::plan_for(validate(raw, problem_.direction, /*shapes_only=*/false), cuda::target_of("sm_90"));
  }

  fovea_problem raw;

 private:
  Problem problem_;
  std::optional<Shapes> shapes_;
  std::vector<fovea_tensor> tensors_;
};

TEST_F(DISABLED_PlayedCuda, EveryRowOfTheTableIsLaunchedAsPlanned) {
  int called = 0;
  for (const check::Case& c : check::cases(check::table_of_environment())) {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      Problem problem = c.problem;
      if (problem.type == DType::kFp64) {
        continue;
      }
      if (direction == Direction::kForward) {
        problem.direction = direction;
        problem.need = {};
        problem.grad_lse = false;
        problem.lse = true;
      }
      const Given given(problem);
      launches() = 0;
      ASSERT_EQ(given.call(), FOVEA_OK) << print(problem) << ": " << fovea_last_error();
      cuda::Plan plan = given.plan();
      if (!plan.launches.empty() && plan.launches.front().step == cuda::Step::kClearRows && !problem.clear_rows) {
        plan.launches.erase(plan.launches.begin());
      }
      ASSERT_EQ(static_cast<std::size_t>(launches()), plan.launches.size()) << print(problem);
      for (int i = 0; i < launches(); ++i) {
        const cuda::Launch& expected = plan.launches[static_cast<std::size_t>(i)];
        EXPECT_EQ(launched()[i].name, cuda::request_of(expected.kernel, plan.target).expression());
        EXPECT_EQ(launched()[i].grid_x, expected.blocks);
        EXPECT_EQ(launched()[i].block_x, static_cast<unsigned>(expected.kernel.threads));
        EXPECT_EQ(launched()[i].shared_bytes, static_cast<unsigned>(expected.kernel.shared_bytes));
      }
      ++called;
    }
  }
  EXPECT_GT(called, 50);
}

TEST_F(DISABLED_PlayedCuda, LoadedOnceWhateverThePointers) {
  Given given("bwd b=2 hq=4 sq=128 sk=128 d=96 bf16 causal");
  ASSERT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  const int before = loads();
  Given elsewhere("bwd b=2 hq=4 sq=128 sk=128 d=96 bf16 causal");
  elsewhere.raw.stream = &elsewhere;
  launches() = 0;
  ASSERT_EQ(elsewhere.call(), FOVEA_OK);
  EXPECT_EQ(loads(), before);
  EXPECT_GT(launches(), 0);
  EXPECT_EQ(launched()[0].stream, &elsewhere);
}

TEST_F(DISABLED_PlayedCuda, NothingIsLoadedInACapture) {
  const Given given("fwd b=2 hq=4 sq=128 sk=128 d=72 bf16 softcap=3");
  int& capturing = variable<int>("fake_capturing");
  capturing = 1;
  const int before = loads();
  EXPECT_EQ(given.call(), FOVEA_UNSUPPORTED);
  EXPECT_NE(std::string(fovea_last_error()).find("fovea_prepare"), std::string::npos) << fovea_last_error();
  EXPECT_EQ(loads(), before);
  EXPECT_EQ(given.prepare(), FOVEA_OK);
  EXPECT_GT(loads(), before);
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  capturing = 0;
}

TEST_F(DISABLED_PlayedCuda, EveryContextLoadsBeforeACapture) {
  // A stream of another context of the same device: what is loaded in one is not in the other.
  Given given("fwd b=2 hq=4 sq=128 sk=128 d=80 bf16 softcap=3");
  ASSERT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  int other = 0;
  void*& context_of_streams = variable<void*>("fake_context_of_streams");
  context_of_streams = &other;
  given.raw.stream = &given;
  int& capturing = variable<int>("fake_capturing");
  capturing = 1;
  EXPECT_EQ(given.call(), FOVEA_UNSUPPORTED);
  EXPECT_NE(std::string(fovea_last_error()).find("fovea_prepare"), std::string::npos) << fovea_last_error();
  const int before = variable<int>("fake_loaded_count");
  const int compiled = loads();
  EXPECT_EQ(given.prepare(), FOVEA_OK) << fovea_last_error();
  const int after = variable<int>("fake_loaded_count");
  EXPECT_GT(after, before);
  for (int n = before; n < after; ++n) {
    EXPECT_EQ((&variable<void*>("fake_loaded_into"))[n % (1 << 16)], &other);
  }
  EXPECT_EQ(loads(), compiled);
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  context_of_streams = nullptr;
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();  // still loaded in the first
  capturing = 0;
}

TEST_F(DISABLED_PlayedCuda, AForkedChildIsRefusedWhateverItsParentDoes) {
  // Another thread makes plans all the time, and holds their table's lock at some of the forks.
  std::atomic<bool> ends = false;
  std::thread plans([&] {
    for (int n = 1; !ends; ++n) {
      std::size_t bytes = 0;
      const Given given(fmt::format("fwd b=1 hq=1 sq={} sk=16 d=64 bf16", n % 100000 + 1));
      fovea_workspace(&given.raw, FOVEA_FORWARD, &bytes);
    }
  });
  const Given given("fwd b=1 hq=1 sq=16 sk=17 d=64 bf16");
  for (int n = 0; n < 300 && !HasFailure(); ++n) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(10);  // ends a child that hangs
      const bool refused =
          given.call() == FOVEA_UNSUPPORTED &&
          std::string(fovea_last_error()).find("forked from one that had used CUDA") != std::string::npos;
      _exit(refused ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << "fork " << n << (WIFSIGNALED(status) ? ": the child hung" : ": another answer");
  }
  ends = true;
  plans.join();
}

TEST_F(DISABLED_PlayedCuda, AThreadWithoutAContext) {
  // As PyTorch's, which computes gradients: its first call loads kernels and launches on the default stream.
  int& none = variable<int>("fake_no_context");
  none = 1;
  const Given given("bwd b=2 hq=4 sq=128 sk=128 d=56 bf16");
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  none = 0;
}

TEST_F(DISABLED_PlayedCuda, AnOldGpuIsNamed) {
  const Given given("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16");
  launches() = 0;
  EXPECT_EQ(given.call(), FOVEA_UNSUPPORTED);
  EXPECT_NE(std::string(fovea_last_error()).find("played has compute capability 7.0; served: 8.0 or newer"),
            std::string::npos)
      << fovea_last_error();
  EXPECT_EQ(launches(), 0);
}

TEST_F(DISABLED_PlayedCuda, ThreadsWaitForOneAnother) {
  const int before = loads();
  std::vector<std::thread> threads;
  std::atomic<int> failed = 0;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      const Given given("bwd b=2 hq=4 sq=128 sk=128 d=40 fp16 alibi=h");
      for (int n = 0; n < 50; ++n) {
        failed += given.call() == FOVEA_OK ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(failed, 0);
  EXPECT_LE(loads() - before, 4);  // its kernels, once
}

TEST_F(DISABLED_PlayedCuda, EveryDeviceHasItsOwn) {
  const std::string line = "fwd b=2 hq=4 sq=128 sk=128 d=64 bf16 causal sink";
  EXPECT_EQ(Given(line, 0).call(), FOVEA_OK);
  EXPECT_EQ(Given(line, 1).call(), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(Given(line, 2).call(), FOVEA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fovea_last_error()).find("2 was given; 0 to 1 are there"), std::string::npos);
}

TEST_F(DISABLED_PlayedCuda, WhatTheDriverSaysIsSaid) {
  const Given given("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16");
  ASSERT_EQ(given.call(), FOVEA_OK);
  int& result = variable<int>("fake_result_of_launch");
  result = 700;
  EXPECT_EQ(given.call(), FOVEA_DEVICE_ERROR);
  EXPECT_NE(std::string(fovea_last_error()).find("PLAYED_ERROR 700"), std::string::npos) << fovea_last_error();
  result = 2;
  EXPECT_EQ(given.call(), FOVEA_OUT_OF_MEMORY);
  result = 0;
  EXPECT_EQ(given.call(), FOVEA_OK);
}

TEST_F(DISABLED_PlayedCuda, LengthsAreReadWhereThatIsAskedFor) {
  // FOVEA_CHECK is read once: the parent has set it. Problems without lengths are not concerned.
  Given given("fwd b=2 hq=1 seqs_q=3,4 seqs_k=5,6 total_q=7 total_k=11 max_q=4 max_k=6 d=64 bf16 used_k=5,6");
  std::int64_t cu_q[] = {0, 3, 7};
  std::int64_t cu_k[] = {0, 5, 11};
  std::int32_t used_k[] = {5, 6};
  const auto at = [](const fovea_tensor* tensor, void* data) { const_cast<fovea_tensor*>(tensor)->data = data; };
  at(given.raw.cu_seqlens_q, cu_q);
  at(given.raw.cu_seqlens_k, cu_k);
  at(given.raw.seqused_k, used_k);
  const auto refused = [&](const std::string& message) {
    EXPECT_EQ(given.call(), FOVEA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(fovea_last_error()).rfind(message, 0), 0u) << fovea_last_error();
  };
  int& synchronised = variable<int>("fake_synchronised");
  synchronised = 0;
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(synchronised, 1);
  cu_q[0] = 1;
  refused("cu_seqlens_q: begins with 1");
  cu_q[0] = 0;
  cu_q[1] = 8;
  refused("cu_seqlens_q: 8 at index 1; accepted: at most total_q, 7");
  cu_q[1] = 2;
  refused("max_seqlen_q: 4; accepted: at least the longest");
  cu_q[1] = 3;
  used_k[1] = 7;
  refused("seqused_k: 7 at index 1; accepted: 0 to the length of that sequence, 6");
  // Elements that do not lie side by side.
  std::int32_t apart[] = {5, -1, 7, -1};
  at(given.raw.seqused_k, apart);
  auto* const strided = const_cast<fovea_tensor*>(given.raw.seqused_k);
  strided->flags |= FOVEA_TENSOR_STRIDED;
  strided->stride[0] = 2;
  refused("seqused_k: 7 at index 1; accepted: 0 to the length of that sequence, 6");
  apart[2] = 6;
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
}

TEST_F(DISABLED_PlayedCuda, MemoryOfTheHostIsNamedWhereThatIsAskedFor) {
  Given given("bwd b=2 hq=4 sq=128 sk=128 d=64 bf16 bias=1,h,q,k:fp32 need=q,bias");
  EXPECT_EQ(given.call(), FOVEA_OK) << fovea_last_error();
  launches() = 0;
  for (const auto& [name, tensor] : {std::pair("k", given.raw.k), std::pair("grad_bias", given.raw.grad_bias)}) {
    variable<void*>("fake_host") = tensor->data;
    EXPECT_EQ(given.call(), FOVEA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(fovea_last_error()),
              fmt::format("{}: memory of the host; accepted: memory of CUDA device 0, managed or pinned memory", name));
  }
  EXPECT_EQ(launches(), 0);
  variable<void*>("fake_host") = nullptr;
}

TEST_F(DISABLED_PlayedCuda, WhatIsPreparedMayAskForClearedRows) {
  const std::string line = "fwd b=2 hq=1 seqs_q=13,4 seqs_k=15,6 total_q=17 total_k=21 max_q=13 max_k=15 d=24 fp16";
  int& capturing = variable<int>("fake_capturing");
  for (const bool clears : {false, true}) {
    const std::string one = line + (clears ? " softcap=3" : "");
    EXPECT_EQ(Given(one + (clears ? " clear" : "")).prepare(), FOVEA_OK) << fovea_last_error();
    capturing = 1;
    EXPECT_EQ(Given(one + (clears ? "" : " clear")).call(), FOVEA_OK) << fovea_last_error();
    capturing = 0;
  }
}

TEST_F(DISABLED_PlayedCuda, WithoutHeads) {
  for (const char* const features : {"", " causal", " bias=1,1,q,k"}) {
    for (const char* const heads : {"hq=0 hk=0", "hq=0 hk=2"}) {
      for (const char* const rows : {"sq=40 sk=90", "seqs_q=13,4 seqs_k=15,6"}) {
        for (const char* const direction : {"fwd", "bwd"}) {
          const std::string line = fmt::format("{} b=2 {} {} d=64 bf16{}", direction, heads, rows, features);
          EXPECT_EQ(Given(line).call(), FOVEA_OK) << line << ": " << fovea_last_error();
        }
      }
    }
  }
}

TEST_F(DISABLED_PlayedCuda, WithAnUnknownValueOfFoveaCheck) {
  EXPECT_EQ(Given("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16").call(), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(fovea_last_error()), "FOVEA_CHECK: 'yes'; accepted: 0, 1");
  EXPECT_EQ(launches(), 0);
}

std::string explained(const Given& given, fovea_status expected) {
  char text[4096] = "";
  EXPECT_EQ(fovea_explain(&given.raw, given.direction(), text, sizeof text, nullptr), expected) << fovea_last_error();
  return text;
}

TEST_F(DISABLED_PlayedCuda, ExplainSaysWhoServes) {
  launches() = 0;
  const std::string text = explained(Given("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16"), FOVEA_OK);
  EXPECT_NE(text.find("\ncuda: serves: sm90_forward"), std::string::npos) << text;
  EXPECT_EQ(launches(), 0);
}

TEST_F(DISABLED_PlayedCuda, WithNothingToCompileExplainSaysThatACallWouldFail) {
  const Given given("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16");
  EXPECT_EQ(given.call(), FOVEA_UNSUPPORTED);
  const std::string why = fovea_last_error();
  EXPECT_EQ(why.rfind("FOVEA_JIT=off: no machine code of fovea::cuda::sm90_forward", 0), 0u) << why;
  const std::string text = explained(given, FOVEA_UNSUPPORTED);
  EXPECT_NE(text.find("\ncuda: does not serve: " + why), std::string::npos) << text;
  EXPECT_EQ(text.find(": serves"), std::string::npos) << text;
}

TEST_F(DISABLED_PlayedCuda, AWorkspaceThatIsTooSmall) {
  const Given given("bwd b=2 hq=4 sq=128 sk=128 d=64 bf16");
  launches() = 0;
  EXPECT_EQ(fovea_backward(&given.raw, nullptr, 0), FOVEA_OUT_OF_MEMORY);
  EXPECT_EQ(std::string(fovea_last_error()).rfind("workspace: 0 bytes", 0), 0u) << fovea_last_error();
  EXPECT_EQ(launches(), 0);
}

TEST_F(DISABLED_PlayedCuda, BackendsAndExplain) {
  char text[4096] = "";
  ASSERT_EQ(fovea_backends(text, sizeof(text), nullptr), FOVEA_OK);
  EXPECT_NE(std::string(text).find("cuda\tavailable\n"), std::string::npos) << text;
  ASSERT_EQ(fovea_machine(text, sizeof(text), nullptr), FOVEA_OK);
  const std::string machine = text;
  for (const char* const line : {"driver\tCUDA 13.0\n", "GPU\t0: ", "GPU\t1: ", "compute capability 9.0, 132 multi",
                                 "NVRTC\t13.", "libnvrtc.so.13\n", "kernel cache\tnone\n"}) {
    EXPECT_NE(machine.find(line), std::string::npos) << line << " is not in\n" << machine;
  }
  ASSERT_EQ(fovea_explain_line("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16 device=cuda", text, sizeof(text), nullptr),
            FOVEA_OK);
  EXPECT_NE(std::string(text).find("cuda: serves: "), std::string::npos) << text;
  EXPECT_EQ(
      fovea_explain_line("fwd b=2 hq=4 sq=128 sk=128 d=64 bf16 device=cuda backend=cpu", text, sizeof(text), nullptr),
      FOVEA_UNSUPPORTED);
}

}  // namespace
}  // namespace fovea
