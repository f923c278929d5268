// SPDX-License-Identifier: Apache-2.0
//
// The C ABI as an ABI: versions, errors by thread, text that is cut, hostile pointers, the dropout mask, a caller in
// C99, what the shared library exports and what it needs.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <thread>

#include "arguments.h"
#include "cuda/cuda.h"
#include "math/dropout.h"

extern "C" {
int fovea_c99_forward(float* output);
size_t fovea_c99_sizeof_problem(void);
size_t fovea_c99_sizeof_tensor(void);
}

namespace fovea {
namespace {

using testing::Arguments;

TEST(CApi, Version) {
  EXPECT_EQ(fovea_version(), FOVEA_VERSION_MAJOR * 10000 + FOVEA_VERSION_MINOR * 100 + FOVEA_VERSION_PATCH);
}

TEST(CApi, FromC99) {
  EXPECT_EQ(fovea_c99_sizeof_problem(), sizeof(fovea_problem));
  EXPECT_EQ(fovea_c99_sizeof_tensor(), sizeof(fovea_tensor));
  float output = 0;
  EXPECT_EQ(fovea_c99_forward(&output), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(output, 2);
}

TEST(CApi, StatusNames) {
  std::set<std::string> names;
  for (int status = FOVEA_OK; status <= FOVEA_INTERNAL_ERROR; ++status) {
    names.insert(fovea_status_name(static_cast<fovea_status>(status)));
  }
  EXPECT_EQ(names.size(), 7u);
  EXPECT_EQ(names.count("unknown status"), 0u);
  const int number = 99;
  fovea_status unknown{};
  std::memcpy(&unknown, &number, sizeof(number));
  EXPECT_STREQ(fovea_status_name(unknown), "unknown status");
}

TEST(CApi, TheLastErrorIsTheThreadsOwn) {
  EXPECT_EQ(fovea_set_num_threads(-1), FOVEA_INVALID_ARGUMENT);
  const std::string here = fovea_last_error();
  EXPECT_EQ(here.rfind("n: -1", 0), 0u);
  std::thread([] {
    EXPECT_STREQ(fovea_last_error(), "");
    EXPECT_EQ(fovea_workspace(nullptr, FOVEA_FORWARD, nullptr), FOVEA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(fovea_last_error()).rfind("bytes: NULL", 0), 0u);
  }).join();
  EXPECT_EQ(fovea_last_error(), here);
  EXPECT_EQ(fovea_backends(nullptr, 0, nullptr), FOVEA_OK);
  EXPECT_STREQ(fovea_last_error(), "");
}

TEST(CApi, NullPointers) {
  std::size_t bytes = 0;
  char text[8];
  const auto expect = [](fovea_status status, const char* message) {
    EXPECT_EQ(status, FOVEA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(fovea_last_error()).rfind(message, 0), 0u) << fovea_last_error();
  };
  expect(fovea_workspace(nullptr, FOVEA_FORWARD, &bytes), "problem: NULL");
  expect(fovea_forward(nullptr, nullptr, 0), "problem: NULL");
  expect(fovea_backward(nullptr, nullptr, 0), "problem: NULL");
  expect(fovea_prepare(nullptr, FOVEA_FORWARD), "problem: NULL");
  expect(fovea_explain(nullptr, FOVEA_FORWARD, text, sizeof(text), &bytes), "problem: NULL");
  expect(fovea_explain_line(nullptr, text, sizeof(text), &bytes), "line: NULL");
  expect(fovea_explain_line("sq=1 d=1", nullptr, 8, &bytes), "text: NULL with capacity 8");
  expect(fovea_explain_for(nullptr, "sm_90", text, sizeof(text), &bytes), "line: NULL");
  expect(fovea_explain_for("sq=1 d=1", nullptr, text, sizeof(text), &bytes), "architecture: NULL");
  expect(fovea_explain_for("sq=1 d=1", "sm_90", nullptr, 8, &bytes), "text: NULL with capacity 8");
  expect(fovea_describe(nullptr, FOVEA_FORWARD, text, sizeof(text), &bytes), "problem: NULL");
  expect(fovea_backends(nullptr, 3, &bytes), "text: NULL with capacity 3");
  expect(fovea_dropout_mask(1, 1, 1, 1, 0.5, 0, 0, FOVEA_RNG_FOVEA, nullptr), "mask: NULL");
}

TEST(CApi, DirectionsThatAreNone) {
  Arguments a(Arguments::Rows::kDense, Direction::kForward);
  const int number = 77;
  fovea_direction direction{};
  std::memcpy(&direction, &number, sizeof(number));
  std::size_t bytes = 0;
  EXPECT_EQ(fovea_workspace(&a.problem, direction, &bytes), FOVEA_INVALID_ARGUMENT);
  EXPECT_STREQ(fovea_last_error(), "direction: 77; accepted: FOVEA_FORWARD (0) or FOVEA_BACKWARD (1)");
  EXPECT_EQ(fovea_explain(&a.problem, direction, nullptr, 0, &bytes), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(fovea_describe(&a.problem, direction, nullptr, 0, &bytes), FOVEA_INVALID_ARGUMENT);
}

TEST(CApi, TextIsCutAndItsLengthSaid) {
  std::size_t needed = 0;
  ASSERT_EQ(fovea_explain_line("sq=1 d=1 backend=reference", nullptr, 0, &needed), FOVEA_OK) << fovea_last_error();
  std::string whole(needed, '?');
  ASSERT_EQ(fovea_explain_line("sq=1 d=1 backend=reference", whole.data(), whole.size(), nullptr), FOVEA_OK);
  EXPECT_EQ(whole.back(), '\0');
  EXPECT_EQ(std::strlen(whole.c_str()), needed - 1);
  char cut[10];
  std::memset(cut, '?', sizeof(cut));
  ASSERT_EQ(fovea_explain_line("sq=1 d=1 backend=reference", cut, 9, &needed), FOVEA_OK);
  EXPECT_EQ(needed, whole.size());
  EXPECT_STREQ(cut, "problem:");
  EXPECT_EQ(cut[9], '?');
}

TEST(CApi, ExplainForAGpuThatNeedNotBeThere) {
  char text[1024] = "";
  ASSERT_EQ(fovea_explain_for("fwd sq=64 d=64 bf16", "sm_90", text, sizeof(text), nullptr), FOVEA_OK);
  EXPECT_EQ(
      std::string(text).rfind("problem: fwd b=1 hq=1 sq=64 sk=64 d=64 bf16 device=cuda\ncuda: used: sm90_forward", 0),
      0u)
      << text;
  EXPECT_EQ(fovea_explain_for("fwd sq=64 d=64 fp64 device=cpu", "sm_80", text, sizeof(text), nullptr),
            FOVEA_UNSUPPORTED);
  EXPECT_NE(std::string(text).find("cuda: not used: q: fp64 on a CUDA device"), std::string::npos) << text;
  EXPECT_EQ(fovea_explain_for("fwd sq=64 d=64", "sm_12", text, sizeof(text), nullptr), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(fovea_last_error()).rfind("architecture: 'sm_12'; accepted: sm_80, ", 0), 0u)
      << fovea_last_error();
  EXPECT_EQ(fovea_explain_for("fwd sq=64 d=64 backend=cpu", "sm_90", text, sizeof(text), nullptr),
            FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(fovea_last_error()).rfind("backend=cpu: ", 0), 0u) << fovea_last_error();
}

TEST(CApi, ExplainSaysWhyNoBackendCanCompute) {
  char text[1024] = "";
  EXPECT_EQ(fovea_explain_line("sq=1 d=1 device=cuda backend=cpu", text, sizeof(text), nullptr), FOVEA_UNSUPPORTED);
  EXPECT_NE(std::string(text).find("cuda: not used: "), std::string::npos) << text;
  EXPECT_NE(std::string(fovea_last_error()).find("; cuda: "), std::string::npos);
  std::size_t needed = 0;
  for (const char* const line :
       {"fwd b=1 hq=1 sq=2 sk=2 d=4 fp64 device=cuda", "bwd sq=2 d=4 fp64 device=cuda need=q"}) {
    EXPECT_EQ(fovea_explain_line(line, text, sizeof(text), &needed), FOVEA_UNSUPPORTED);
    EXPECT_NE(std::string(text).find("\ncuda: not used: q: fp64 on a CUDA device; accepted: fp32, fp16, bf16"),
              std::string::npos)
        << text;
    EXPECT_EQ(needed, std::strlen(text) + 1);
  }
  EXPECT_EQ(fovea_explain_line("sq=1 d=1 frobnicate", text, sizeof(text), nullptr), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(fovea_explain_line("b=100000000000 hq=100000000000 sq=10 d=1", text, sizeof(text), nullptr),
            FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(fovea_last_error()).rfind("q: shape", 0), 0u) << fovea_last_error();
}

TEST(CApi, Backends) {
  char text[1024] = "";
  ASSERT_EQ(fovea_backends(text, sizeof(text), nullptr), FOVEA_OK);
  const std::string why_not = fovea::cuda::unavailable();
  EXPECT_EQ(std::string(text),
            "cpu\tavailable\ncuda\t" + (why_not.empty() ? "available" : why_not) + "\nreference\tavailable\n");
}

TEST(CApi, WorkspacesThatAreWrong) {
  Arguments a(Arguments::Rows::kDense, Direction::kForward);
  const auto expect = [&](void* workspace, std::size_t bytes, const char* message) {
    EXPECT_EQ(fovea_forward(&a.problem, workspace, bytes), FOVEA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(fovea_last_error()).rfind(message, 0), 0u) << fovea_last_error();
    EXPECT_TRUE(a.untouched());
  };
  expect(nullptr, 16, "workspace: NULL with 16 bytes");
  expect(a.data<char>("bias") + 200, 64, "workspace: shares memory with bias");
  expect(a.data<char>("out") + 575, 1, "workspace: shares memory with out");
  expect(a.data<char>("q") - 16, 17, "workspace: shares memory with q");
  EXPECT_EQ(fovea_forward(&a.problem, a.data<char>("out") + 576, 1), FOVEA_OK) << fovea_last_error();
}

TEST(CApi, TheDropoutMaskIsTheRule) {
  constexpr std::int64_t kB = 2, kH = 3, kSq = 19, kSk = 37;
  for (const math::Rng rng : {math::Rng::kFovea, math::Rng::kTorchMemEfficient}) {
    std::vector<std::uint8_t> mask(kB * kH * kSq * kSk + 1, 7);
    ASSERT_EQ(fovea_dropout_mask(kB, kH, kSq, kSk, 0.3, 42, 5, static_cast<fovea_rng>(rng), mask.data()), FOVEA_OK);
    EXPECT_EQ(mask.back(), 7);
    const math::Dropout dropout = math::Dropout::make(rng, 0.3, 42, 5);
    std::size_t at = 0;
    for (std::uint64_t n = 0; n < kB * kH; ++n) {
      const auto head = math::DropoutOfHead::make(dropout, n, kSq * kSk, kSk);
      for (std::int64_t i = 0; i < kSq; ++i) {
        for (std::int64_t j = 0; j < kSk; ++j) {
          ASSERT_EQ(mask[at++], head.keep(i, j) ? 1 : 0);
        }
      }
    }
  }
}

TEST(CApi, DropoutMasksThatAreWrong) {
  std::uint8_t byte = 7;
  const auto expect = [&](std::int64_t b, std::int64_t h, std::int64_t sq, std::int64_t sk, double p, int rng,
                          const char* message) {
    fovea_rng rule{};
    std::memcpy(&rule, &rng, sizeof(rng));
    EXPECT_EQ(fovea_dropout_mask(b, h, sq, sk, p, 0, 0, rule, &byte), FOVEA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(fovea_last_error()).rfind(message, 0), 0u) << fovea_last_error();
    EXPECT_EQ(byte, 7);
  };
  constexpr std::int64_t kLong = std::int64_t{1} << 32;
  expect(-1, 1, 1, 1, 0.5, 0, "batch: -1");
  expect(1, -1, 1, 1, 0.5, 0, "heads: -1");
  expect(1, 1, kLong + 1, 1, 0.5, 0, "seqlen_q: 4294967297");
  expect(1, 1, 1, kLong + 1, 0.5, 0, "seqlen_k: 4294967297");
  expect(kLong, kLong, 1, 1, 0.5, 0, "mask: 4294967296x4294967296x1x1");
  expect(1, 1, 1, 1, 1.01, 0, "p: 1.01");
  expect(1, 1, 1, 1, std::numeric_limits<double>::quiet_NaN(), 0, "p: nan");
  expect(1, 1, 1, 1, 0.5, 2, "rng: 2");
  EXPECT_EQ(fovea_dropout_mask(0, 1, kLong, kLong >> 4, 0.5, 0, 0, FOVEA_RNG_FOVEA, nullptr), FOVEA_OK);
}

TEST(CApi, MemoryThatThereIsNot) {
  // A line that asks for more sequences than fit anywhere is refused; it does not end the process.
  std::size_t needed = 0;
  EXPECT_EQ(fovea_explain_line("seqs_q=1x9999999999 d=1", nullptr, 0, &needed), FOVEA_INVALID_ARGUMENT);
}

// ---- the shared library ----

std::string output_of(const std::string& command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  std::string output;
  std::array<char, 4096> part{};
  while (pipe && std::fgets(part.data(), part.size(), pipe.get()) != nullptr) {
    output += part.data();
  }
  return output;
}

constexpr const char* kLibrary = FOVEA_BUILD_DIR "/libfovea.so";

TEST(SharedLibrary, ExportsTheCommittedNamesAndNoOther) {
  std::set<std::string> exported;
  std::istringstream lines(output_of(std::string("nm -D --defined-only ") + kLibrary));
  for (std::string address, kind, name; lines >> address >> kind >> name;) {
    exported.insert(name);
  }
  std::set<std::string> committed;
  std::ifstream list(FOVEA_SOURCE_DIR "/src/capi/symbols.txt");
  for (std::string name; list >> name;) {
    committed.insert(name);
  }
  EXPECT_FALSE(committed.empty());
  EXPECT_EQ(exported, committed);
}

TEST(SharedLibrary, NeedsTheStandardLibrariesAndNoOther) {
  std::set<std::string> needed;
  std::string soname;
  std::istringstream lines(output_of(std::string("readelf -d ") + kLibrary));
  for (std::string line; std::getline(lines, line);) {
    const std::size_t open = line.find('[');
    if (open != line.npos) {
      const std::string name = line.substr(open + 1, line.find(']') - open - 1);
      if (line.find("(NEEDED)") != line.npos) {
        needed.insert(name);
      } else if (line.find("(SONAME)") != line.npos) {
        soname = name;
      }
    }
  }
  // Before 1.0 a minor version may break, and has a name of its own.
  std::ostringstream expected;
  expected << "libfovea.so." << FOVEA_VERSION_MAJOR;
  if (FOVEA_VERSION_MAJOR == 0) {
    expected << '.' << FOVEA_VERSION_MINOR;
  }
  EXPECT_EQ(soname, expected.str());
  EXPECT_EQ(needed.count("libc.so.6"), 1u);
  for (const std::string& name : needed) {
    const std::set<std::string> accepted{"libc.so.6", "libm.so.6", "libstdc++.so.6"};
    EXPECT_EQ(accepted.count(name), 1u) << name;
  }
}

}  // namespace
}  // namespace fovea
