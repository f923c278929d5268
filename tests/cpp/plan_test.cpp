// SPDX-License-Identifier: Apache-2.0
//
// Which backend is used for a problem: verdicts and their order, a backend by its name and by FOVEA_BACKEND, the
// workspace.
#include "dispatch/plan.h"

#include <gtest/gtest.h>

#include "arguments.h"
#include "core/shapes.h"
#include "core/validate.h"
#include "environment_variable.h"

namespace fovea {
namespace {

using testing::Arguments;
using Variable = testing::EnvironmentVariable;

// Unforced, whatever the environment of the tests says.
class Planning : public ::testing::Test {
 private:
  Variable backend_{"FOVEA_BACKEND", ""};
};

Plan plan_of(const std::string& line) {
  const Problem problem = parse(line);
  const Shapes shapes(problem);
  return plan(validate(shapes.get(), problem.direction, /*shapes_only=*/true));
}

std::string reason_of(const Plan& plan, std::string_view backend) {
  for (const Verdict& verdict : plan.verdicts) {
    if (verdict.backend == backend) {
      return verdict.reason;
    }
  }
  return "no verdict";
}

std::string message_of(const std::string& line) {
  try {
    plan_of(line);
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), FOVEA_INVALID_ARGUMENT);
    return error.what();
  }
}

TEST_F(Planning, ProblemsThatNameNoBackendAreTheCpus) {
  const Plan plan = plan_of("bwd sq=4 d=4");
  EXPECT_EQ(plan.backend, BackendKind::kCpu);
  ASSERT_EQ(plan.verdicts.size(), 3u);
  EXPECT_TRUE(plan.verdicts[0].used);
  EXPECT_EQ(plan.verdicts[0].reason, plan.cpu.summary);
  EXPECT_FALSE(reason_of(plan, "cpu").empty());
  EXPECT_EQ(reason_of(plan, "cuda"), "the tensors lie on the CPU, and a problem is never moved to a CUDA device");
  EXPECT_EQ(reason_of(plan, "reference"), "used only with backend=reference");
}

TEST_F(Planning, BackendsOfThisMachine) {
  const auto of_cpu = [] {
    const std::vector<Verdict> all = backends();
    EXPECT_EQ(all.size(), 3u);
    return all.front();
  };
  EXPECT_EQ(of_cpu().backend, "cpu");
  EXPECT_TRUE(of_cpu().used);
  EXPECT_EQ(of_cpu().reason, "available");
  const Variable isa("FOVEA_CPU_ISA", "abacus");
  EXPECT_FALSE(of_cpu().used);
  EXPECT_EQ(of_cpu().reason, message_of("bwd sq=4 d=4"));
  EXPECT_NE(of_cpu().reason.find("abacus"), std::string::npos);
}

TEST_F(Planning, ByName) {
  EXPECT_EQ(plan_of("sq=4 d=4 backend=cpu").backend, BackendKind::kCpu);
  const Plan plan = plan_of("sq=4 d=4 backend=reference");
  EXPECT_EQ(plan.backend, BackendKind::kReference);
  EXPECT_EQ(plan.workspace, 0u);
  EXPECT_EQ(reason_of(plan, "cpu"), "another backend is named: backend=reference");
  const Plan cuda = plan_of("sq=4 d=4 backend=cuda");
  EXPECT_FALSE(cuda.supported());
  EXPECT_EQ(reason_of(cuda, "cuda"), "the tensors lie on the CPU, and a problem is never moved to a CUDA device");
  EXPECT_EQ(message_of("sq=4 d=4 backend=tpu"), "backend: 'tpu'; accepted: cpu, cuda, reference");
}

TEST_F(Planning, ByEnvironment) {
  {
    const Variable forced("FOVEA_BACKEND", "reference");
    const Plan plan = plan_of("sq=4 d=4");
    EXPECT_EQ(plan.backend, BackendKind::kReference);
    EXPECT_EQ(reason_of(plan, "cpu"), "another backend is named: FOVEA_BACKEND=reference");
    EXPECT_EQ(plan_of("sq=4 d=4 backend=cpu").backend, BackendKind::kCpu);  // what the problem says goes first
  }
  const Variable forced("FOVEA_BACKEND", "tpu");
  EXPECT_EQ(message_of("sq=4 d=4"), "FOVEA_BACKEND: 'tpu'; accepted: cpu, cuda, reference");
}

TEST_F(Planning, AProblemOfADeviceIsNeverMoved) {
  for (const char* line : {"sq=4 d=4 device=cuda backend=reference", "bwd sq=4 d=4 device=cuda backend=cpu"}) {
    const Plan plan = plan_of(line);
    EXPECT_FALSE(plan.supported());
    try {
      require_supported(parse(line), plan);
      ADD_FAILURE() << line;
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), FOVEA_UNSUPPORTED);
      EXPECT_NE(std::string(error.what()).find(print(parse(line))), std::string::npos);
      EXPECT_NE(std::string(error.what()).find("CUDA"), std::string::npos) << error.what();
    }
  }
}

// What is no name at all is an error, of either variable; what this machine lacks is a reason.
TEST_F(Planning, AnInstructionSetThatIsNone) {
  const Variable isa("FOVEA_CPU_ISA", "sse9");
  EXPECT_EQ(message_of("sq=4 d=4").rfind("FOVEA_CPU_ISA: 'sse9'; accepted: ", 0), 0u) << message_of("sq=4 d=4");
  EXPECT_EQ(plan_of("sq=4 d=4 backend=reference").backend, BackendKind::kReference);
}

// Another thread may change the environment during any call, which must not look into it then.
TEST_F(Planning, TheEnvironmentIsReadOnce) {
  environment();
  setenv("FOVEA_BACKEND", "tpu", 1);
  setenv("FOVEA_CPU_ISA", "sse9", 1);
  EXPECT_EQ(plan_of("sq=4 d=4").backend, BackendKind::kCpu);
  unsetenv("FOVEA_CPU_ISA");
  setenv("FOVEA_BACKEND", "", 1);
}

TEST_F(Planning, TheTextOfExplain) {
  const Problem problem = parse("sq=4 d=4 backend=reference");
  EXPECT_EQ(to_text(problem, plan_of(print(problem))),
            "problem: fwd b=1 hq=1 sq=4 sk=4 d=4 fp32 backend=reference\n"
            "cpu: not used: another backend is named: backend=reference\n"
            "cuda: not used: another backend is named: backend=reference\n"
            "reference: used: fp64 in plain loops\n"
            "workspace: 0 bytes\n");
}

// max_seqlen is a bound, no claim: what is reserved goes as far as sequences can.
TEST_F(Planning, WorkspaceForRowsThatExist) {
  for (const std::string line : {"fwd b=2 hq=4 hk=2 seqs_q=3,9 seqs_k=300,700 d=8 fp16 bias=b,h,1,1 ",
                                 "bwd b=2 hq=4 hk=2 seqs_q=3,9 seqs_k=300,700 d=8 fp16 bias=b,h,1,1 "}) {
    const std::size_t expected = plan_of(line + "max_q=12 max_k=1000").workspace;
    EXPECT_GT(expected, 0u);
    EXPECT_EQ(plan_of(line + "max_q=1099511627776 max_k=1099511627776").workspace, expected);
  }
}

// A caller may ask for the workspace once, and then call with other numbers at other places.
TEST_F(Planning, TheWorkspaceDependsOnNoNumbers) {
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    Arguments a(Arguments::Rows::kPacked, direction);
    a.problem.backend = nullptr;
    a.problem.max_seqlen_q = 3;
    a.problem.max_seqlen_k = 5;
    const std::size_t with_numbers = plan(validate(a.problem, direction, false)).workspace;
    a.data<std::int32_t>("cu_seqlens_q")[1] = 3;
    a.data<std::int64_t>("cu_seqlens_k")[1] = 3;
    a.problem.seqused_q = a.problem.seqused_k = nullptr;
    EXPECT_EQ(plan(validate(a.problem, direction, false)).workspace, with_numbers);
    for (const char* name : {"q", "k", "v", "out", "lse", "bias", "bias2", "mask", "alibi_slopes", "sink",
                             "cu_seqlens_q", "cu_seqlens_k"}) {
      a[name].data = nullptr;
    }
    EXPECT_EQ(plan(validate(a.problem, direction, true)).workspace, with_numbers);
  }
}

TEST_F(Planning, AWorkspaceAtAnyAddressThatIsLargeEnough) {
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    Arguments expected(Arguments::Rows::kDense, direction);
    expected.problem.backend = nullptr;
    const std::size_t bytes = plan(validate(expected.problem, direction, false)).workspace;
    std::vector<unsigned char> memory(bytes + 128, 0xEE);
    execute(validate(expected.problem, direction, false), memory.data(), bytes);
    for (std::size_t shift = 0; shift < 64; shift += 7) {
      Arguments a(Arguments::Rows::kDense, direction);
      a.problem.backend = nullptr;
      std::fill(memory.begin(), memory.end(), 0xEE);
      execute(validate(a.problem, direction, false), memory.data() + 64 + shift, bytes);
      EXPECT_TRUE(std::all_of(memory.begin(), memory.begin() + 64, [](unsigned char byte) { return byte == 0xEE; }));
      EXPECT_TRUE(std::all_of(memory.begin() + static_cast<std::ptrdiff_t>(64 + shift + bytes), memory.end(),
                              [](unsigned char byte) { return byte == 0xEE; }));
      EXPECT_TRUE(a.same_outputs_as(expected));
    }
    if (bytes > 0) {
      Arguments a(Arguments::Rows::kDense, direction);
      a.problem.backend = nullptr;
      try {
        execute(validate(a.problem, direction, false), memory.data(), bytes - 1);
        ADD_FAILURE();
      } catch (const Error& error) {
        EXPECT_EQ(error.status(), FOVEA_OUT_OF_MEMORY);
        EXPECT_EQ(std::string(error.what()).rfind("workspace: ", 0), 0u);
        EXPECT_TRUE(a.untouched());
      }
    }
  }
}

}  // namespace
}  // namespace fovea
