// SPDX-License-Identifier: Apache-2.0
//
// NVRTC: which one is taken, what its log says, and that the embedded text compiles with it. No GPU is needed.
// Where NVRTC is missing these tests fail, with the sentence that says what to install.
#include "cuda/jit/nvrtc.h"
#include "cuda/jit/sha256.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <sstream>

#include "jit_testing.h"

namespace {

using namespace fovea::cuda::jit;  // NOLINT(google-build-using-namespace)
using jit_testing::contains;
using jit_testing::Folder;
using jit_testing::refusal;
using jit_testing::Variable;
namespace fs = std::filesystem;

// ---- architectures ----

TEST(JitNvrtc, ArchitecturesAndWhatKnowsThem) {
  EXPECT_EQ(architecture(8, 0, false), "sm_80");
  EXPECT_EQ(architecture(9, 0, true), "sm_90a");
  EXPECT_EQ(architecture(12, 0, false), "sm_120");
  EXPECT_EQ(least_nvrtc_for("sm_80"), (Version{12, 4}));
  EXPECT_EQ(least_nvrtc_for("sm_90a"), (Version{12, 4}));
  EXPECT_EQ(least_nvrtc_for("sm_100a"), (Version{12, 8}));
  EXPECT_EQ(least_nvrtc_for("sm_120"), (Version{12, 8}));
  EXPECT_EQ(least_nvrtc_for("sm_121"), (Version{12, 9}));
  EXPECT_EQ(least_nvrtc_for("sm_130"), (Version{13, 0}));
  EXPECT_LT((Version{12, 9}), (Version{13, 0}));
}

// ---- finding it: folders of files that only look like libraries; their neighbours tell the version ----

void pretend(const fs::path& folder, const std::string& version) {
  fs::create_directories(folder);
  const std::string major = version.substr(0, version.find('.'));
  std::ofstream(folder / ("libnvrtc.so." + major)) << "not a library";
  std::ofstream(folder / ("libnvrtc.alt.so." + major)) << "not a library";
  std::ofstream(folder / ("libnvrtc-builtins.so." + version)) << "not a library";
}

NvrtcSearch only(const std::vector<std::string>& folders) {
  NvrtcSearch search;
  for (const std::string& folder : folders) {
    search.folders.push_back({folder, "the test"});
  }
  search.loader = false;
  return search;
}

TEST(JitNvrtc, WheelsAreFoundTheNewestFirst) {
  const Folder folder;
  pretend(folder.path() / "nvidia/cuda_nvrtc/lib", "12.6");
  pretend(folder.path() / "nvidia/cu13/lib", "13.1");
  pretend(folder.path() / "nvidia/cudnn/lib", "14.0");
  const NvrtcFile found = find_nvrtc(only({folder.path().string()}));
  EXPECT_EQ(found.version, (Version{13, 1}));
  EXPECT_EQ(found.path, fs::canonical(folder.path() / "nvidia/cu13/lib/libnvrtc.so.13").string());
}

TEST(JitNvrtc, NeverNewerThanTheDriverNorTooOld) {
  const Folder folder;
  pretend(folder.path() / "nvidia/cuda_nvrtc/lib", "12.6");
  pretend(folder.path() / "nvidia/cu13/lib", "13.1");
  NvrtcSearch search = only({folder.path().string()});
  search.driver_major = 12;
  EXPECT_EQ(find_nvrtc(search).version, (Version{12, 6}));
  search.least = {12, 8};
  const std::string message = refusal([&] { find_nvrtc(search); }, FOVEA_UNSUPPORTED);
  EXPECT_TRUE(contains(message, "NVRTC 12.8 or newer, for a driver of CUDA 12 not newer than 12.x is needed"))
      << message;
  EXPECT_TRUE(contains(message, "libnvrtc.so.12 is 12.6: too old")) << message;
  EXPECT_TRUE(contains(message, "libnvrtc.so.13 is 13.1: newer than the driver's CUDA 12")) << message;
  EXPECT_TRUE(contains(message, "pip install nvidia-cuda-nvrtc")) << message;
}

TEST(JitNvrtc, FoldersComeInOrder) {
  const Folder first;
  const Folder second;
  pretend(first.path(), "12.4");
  pretend(second.path() / "lib64", "13.0");
  EXPECT_EQ(find_nvrtc(only({first.path().string(), second.path().string()})).version, (Version{12, 4}));
  const NvrtcFile found = find_nvrtc(only({second.path().string(), first.path().string()}));
  EXPECT_EQ(found.version, (Version{13, 0}));
  EXPECT_EQ(found.found, "found by the test");
  NvrtcSearch search = only({first.path().string(), second.path().string()});
  search.least = {12, 8};
  EXPECT_EQ(find_nvrtc(search).found, "found by the test; passed over: " +
                                          fs::canonical(first / "libnvrtc.so.12").string() + " is 12.4: too old");
}

TEST(JitNvrtc, WheelsToolkitsAndCondaHaveTheirFolders) {
  for (const char* below : {"nvidia/cuda_nvrtc/lib", "nvidia/cu14/lib", "torch/lib", "lib", "lib64",
                            "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"}) {
    const Folder folder;
    pretend(folder.path() / below, "13.0");
    EXPECT_EQ(find_nvrtc(only({folder.path().string()})).version, (Version{13, 0})) << below;
  }
}

TEST(JitNvrtc, ForcedMeansNothingElse) {
  const Folder good;
  const Folder old;
  pretend(good.path(), "13.0");
  pretend(old.path(), "11.8");
  NvrtcSearch search = only({good.path().string()});
  search.forced = old.path().string();
  const std::string message = refusal([&] { find_nvrtc(search); }, FOVEA_INVALID_ARGUMENT);
  EXPECT_TRUE(message.starts_with("FOVEA_NVRTC: '" + search.forced + "': ")) << message;
  EXPECT_TRUE(contains(message, "is 11.8: too old; accepted: ")) << message;
  search.forced = good / "libnvrtc.so.13";
  EXPECT_EQ(find_nvrtc(search).path, search.forced);
  for (const char* missing : {"nothing.so", "libnvrtc.so.12"}) {
    search.forced = good / missing;
    EXPECT_TRUE(contains(refusal([&] { find_nvrtc(search); }, FOVEA_INVALID_ARGUMENT),
                         std::string(missing) + "': no such file or folder; accepted: "));
  }
  const Folder empty;
  search.forced = empty.path().string();
  EXPECT_TRUE(
      contains(refusal([&] { find_nvrtc(search); }, FOVEA_INVALID_ARGUMENT), "no libnvrtc.so is in this folder"));
  search.forced = "libnvrtc-of-nobody.so";  // a name for the dynamic loader
  EXPECT_TRUE(contains(refusal([&] { find_nvrtc(search); }, FOVEA_INVALID_ARGUMENT), "cannot open shared object file"));
}

TEST(JitNvrtc, NoneAtAllSaysWhatToInstall) {
  const std::string message = refusal([] { find_nvrtc(only({})); }, FOVEA_UNSUPPORTED);
  EXPECT_TRUE(contains(message, "none was found")) << message;
  EXPECT_TRUE(contains(message, "pip install nvidia-cuda-nvrtc")) << message;
}

TEST(JitNvrtc, WhatCannotBeLoadedIsPassedOver) {
  const Folder folder;
  std::ofstream(folder / "libnvrtc.so.13") << "not a library";  // no neighbour: it has to be opened
  const std::string message = refusal([&] { find_nvrtc(only({folder.path().string()})); }, FOVEA_UNSUPPORTED);
  EXPECT_TRUE(contains(message, "libnvrtc.so.13")) << message;
  EXPECT_TRUE(contains(message, "passed over")) << message;
  EXPECT_TRUE(contains(refusal([] { Nvrtc("libm.so.6"); }, FOVEA_UNSUPPORTED), "not NVRTC"));
}

TEST(JitNvrtc, TheOrderOfFolders) {
  const Variable forced("FOVEA_NVRTC", "/somewhere");
  const Variable folders("FOVEA_NVRTC_FOLDERS", "/c:/d");
  const Variable home("CUDA_HOME", "/toolkit");
  const Variable path("CUDA_PATH", nullptr);
  const Variable conda("CONDA_PREFIX", "/conda");
  const Variable loader("LD_LIBRARY_PATH", "/loader");
  set_nvrtc_folders("/a::relative:/b");
  const NvrtcSearch search = NvrtcSearch::from_environment();
  set_nvrtc_folders("");
  EXPECT_EQ(search.forced, "/somewhere");
  std::vector<std::string> order;
  for (const NvrtcFolder& folder : search.folders) {
    if (folder.name != "where fovea is installed" && folder.name != "the system's libraries") {
      order.push_back(folder.path + ", " + folder.name);
    }
  }
  EXPECT_EQ(order,
            (std::vector<std::string>{"/a, Python's path", "/b, Python's path", "/c, FOVEA_NVRTC_FOLDERS",
                                      "/d, FOVEA_NVRTC_FOLDERS", "/toolkit, CUDA_HOME", "/conda, CONDA_PREFIX",
                                      "/usr/local/cuda, the CUDA toolkit's usual folder", "/loader, LD_LIBRARY_PATH"}));
  EXPECT_EQ(search.folders[4].name, "where fovea is installed");
  EXPECT_EQ(search.folders.back().name, "the system's libraries");
}

// ---- the log: as recorded ----

TEST(JitLog, AKernelThatIsFine) {  // NVRTC 13.0
  const Report report = parse_log(R"(ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5plainILi64EEvPf' for 'sm_80'
ptxas info    : Function properties for _Z5plainILi64EEvPf
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 9 registers, used 1 barriers, 256 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 4.383 ms
)");
  EXPECT_EQ(report.registers, 9);
  EXPECT_EQ(report.barriers, 1);
  EXPECT_EQ(report.shared_bytes, 256);
  EXPECT_EQ(report.stack_bytes, 0);
  EXPECT_TRUE(report.messages.empty());
  EXPECT_TRUE(report.faults().empty());
}

TEST(JitLog, SpillsAndLocalMemory) {  // NVRTC 12.4
  const Report report = parse_log(
      R"(ptxas info    : Overriding maximum register limit 256 for '_Z5spillILi1EEvPf' with  32 of maxrregcount option
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5spillILi1EEvPf' for 'sm_80'
ptxas info    : Function properties for _Z5spillILi1EEvPf
ptxas         .     160 bytes stack frame, 164 bytes spill stores, 168 bytes spill loads
ptxas info    : Used 32 registers, 160 bytes cumulative stack size, 360 bytes cmem[0]
)");
  EXPECT_EQ(report.registers, 32);
  EXPECT_EQ(report.stack_bytes, 160);
  EXPECT_EQ(report.spill_bytes, 332);
  EXPECT_EQ(report.faults(), (std::vector<std::string>{"332 bytes of registers spilt", "160 bytes of local memory"}));
}

TEST(JitLog, AFunctionThatWasNotInlinedCounts) {  // NVRTC 13.0
  const Report report = parse_log(R"(ptxas info    : Function properties for _Z2wgILi1EEvPfy
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers
ptxas info    : Function properties for _Z1fPf
ptxas         .     48 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
)");
  EXPECT_EQ(report.registers, 30);
  EXPECT_EQ(report.faults(), (std::vector<std::string>{"48 bytes of local memory"}));
}

TEST(JitLog, SerialisedProductsAndIgnoredRegisters) {  // NVRTC 12.4 and 13.0
  const Report report = parse_log(
      R"(ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma instructions reading accumulator registers of  a wgmma between start and end of the pipeline stage in the function '_Z2wgILi1EEvPfy'
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources for the wgmma pipeline in the function '_Z2wgILi1EEvPfy'
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
ptxas info    : Used 168 registers, used 1 barriers
)");
  ASSERT_EQ(report.messages.size(), 3u);
  EXPECT_EQ(report.messages[0].code, "C7514");
  EXPECT_EQ(report.messages[1].code, "C7511");
  EXPECT_EQ(report.messages[2].code, "C7508");
  EXPECT_EQ(report.faults().size(), 3u);
  EXPECT_TRUE(report.faults()[2].starts_with("C7508: Potential Performance Loss: 'setmaxnreg' ignored"));
  EXPECT_EQ(report.registers, 168);
}

TEST(JitLog, EveryCodeOfASerialisationIsAFaultWhateverItsNumber) {
  for (const char* code : {"C7510", "C7511", "C7512", "C7514", "C7515", "C7599"}) {
    const std::string line = std::string("ptxas info    : (") + code + ") Potential Performance Loss: something new\n";
    ASSERT_EQ(parse_log(line).faults().size(), 1u) << code;
    EXPECT_EQ(parse_log(line).messages[0].code, code);
  }
  EXPECT_EQ(parse_log("wgmma.mma_async instructions are serialized due to a reason\n").faults().size(), 1u);
}

TEST(JitLog, AddedWaitsAreRemarks) {  // NVRTC 13.0
  const Report report = parse_log(
      R"(ptxas info    : (C7519) warpgroup.arrive is injected in around line 46 by compiler to allow use of registers in GMMA in function '_Z2wgILi1EEvPfy'
ptxas info    : (C7517) warpgroup.wait is injected in around line 43 by compiler to allow use of registers defined by GMMA in function '_Z2wgILi1EEvPfy'
)");
  ASSERT_EQ(report.messages.size(), 2u);
  EXPECT_EQ(report.messages[1].code, "C7517");
  EXPECT_FALSE(report.messages[1].loss);
  EXPECT_TRUE(report.faults().empty());
}

// ---- the embedded text ----

std::string content_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  return content.str();
}

TEST(JitSource, EveryFileIsEmbeddedAsItIsByBothNames) {
  const fs::path source = fs::path(FOVEA_SOURCE_DIR) / "src";
  std::map<std::string, std::string> expected;
  for (const char* below : {"math", "cuda/device"}) {
    std::error_code error;
    for (fs::recursive_directory_iterator entry(source / below, error), end; !error && entry != end; ++entry) {
      const fs::path& path = entry->path();
      if (path.extension() == ".h" || path.extension() == ".cuh") {
        expected[path.lexically_relative(source).string()] = content_of(path);
        expected[path.lexically_relative(source / below).string()] = content_of(path);
      }
    }
  }
  ASSERT_GE(expected.size(), 12u);
  std::map<std::string, std::string> embedded;
  for (const TextFile& file : embedded_files()) {
    embedded.emplace(file.name, file.text);
    EXPECT_EQ(file.hash, Sha256().add(file.text).hex()) << file.name;  // a part of cache keys
  }
  EXPECT_EQ(embedded.size(), embedded_files().size()) << "a name stands twice";
  EXPECT_TRUE(embedded == expected) << "build again";
}

// ---- compiling ----

class JitCompile : public testing::Test {
 protected:
  static const Nvrtc& nvrtc() {
    static const Nvrtc loaded(find_nvrtc(jit_testing::nvrtc_search()).path);
    return loaded;
  }
};

constexpr std::string_view kMathKernel = R"(
#include "math/band.h"
#include "dropout.h"
#include "rows.h"
#include "math/score.h"
#include "softmax.h"
using namespace fovea::math;
struct Spec {
  int tile = 64;
  bool softcap = false;
  Rng rng = Rng::kFovea;
};
template <Spec S>
__global__ void kernel(float* out, Band<i32> band, Score<float> score, DropoutOfHead head) {
  const i32 i = threadIdx.x;
  const Interval<i32> keys = band.keys_of_rows(i, i + S.tile);
  float sum = 0;
  for (i32 j = keys.begin; j < keys.end; ++j) {
    const Dual<float> s = score.template of_dot_with_derivative<S.softcap>(out[j], 1.0f);
    sum += head.keep(i, j) ? weight(s.value, 0.0f) * s.derivative : 0.0f;
  }
  out[i] = sum + (S.rng == Rng::kFovea ? 1 : 0);
}
)";

TEST_F(JitCompile, EverythingInMathWithASpecificationForEveryArchitecture) {
  std::set<std::string> binaries;
  std::size_t known = 0;
  for (const char* architecture : {"sm_80", "sm_90a", "sm_120"}) {
    if (nvrtc().version() < least_nvrtc_for(architecture)) {
      std::cout << "NVRTC " << to_text(nvrtc().version()) << " is older than " << architecture << "\n";
      continue;
    }
    ++known;
    Source source;
    source.text = kMathKernel;
    source.headers = embedded_files();
    source.expression = "kernel<Spec{.tile = 16, .softcap = true, .rng = Rng::kFovea}>";
    source.architecture = architecture;
    std::string ptx;
    const Binary binary = nvrtc().compile(source, &ptx);
    EXPECT_TRUE(
        binary.cubin.starts_with("\x7f"
                                 "ELF"))
        << architecture;
    EXPECT_TRUE(contains(binary.cubin, binary.symbol));
    EXPECT_TRUE(contains(ptx, ".target " + source.architecture)) << ptx.substr(0, 400);
    EXPECT_GT(binary.report.registers, 8) << binary.log;
    EXPECT_TRUE(binary.report.faults().empty()) << binary.log;
    binaries.insert(binary.cubin);
  }
  EXPECT_EQ(binaries.size(), known);
}

Source tiny_source(const std::string& text, const std::string& expression, const std::string& architecture = "sm_80") {
  Source source;
  source.text = text;
  source.headers = jit_testing::kTinyText;
  source.expression = expression;
  source.architecture = architecture;
  return source;
}

TEST_F(JitCompile, ReportsWhatPtxasDid) {
  const std::string text = R"(
template <int N> __global__ void __launch_bounds__(1024) local(int* x) {
  int a[N];
  for (int i = 0; i < N; ++i) a[i] = x[i];
#pragma unroll 1
  for (int i = 0; i < N; ++i) a[x[i] % N] += a[x[i + 1] % N];
  for (int i = 0; i < N; ++i) x[i] = a[i];
})";
  const Binary binary = nvrtc().compile(tiny_source(text, "local<200>"));
  EXPECT_GE(binary.report.stack_bytes, 800) << binary.log;
  EXPECT_FALSE(binary.report.faults().empty());
}

TEST_F(JitCompile, SeesASerialisedProduct) {
  const std::string text = R"(
template <int N> __global__ void __launch_bounds__(128) product(float* x, unsigned long long d) {
  float c[4] = {x[0], x[1], x[2], x[3]};
  for (int i = 0; i < 2; ++i) {
    if (i) c[0] += 1;
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %4, p, 1, 1, 0, 0;}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "l"(d));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  x[threadIdx.x] = c[0] + c[1] + c[2] + c[3];
})";
  const Binary binary = nvrtc().compile(tiny_source(text, "product<1>", "sm_90a"));
  ASSERT_FALSE(binary.report.faults().empty()) << binary.log;
  EXPECT_TRUE(contains(binary.report.faults()[0], "serialized")) << binary.log;
}

TEST_F(JitCompile, AMistakeIsNamedWithPlaceAndExpression) {
  const std::string message =
      refusal([] { nvrtc().compile(tiny_source("template <int N> __global__ void f() { nothing(); }", "f<3>")); },
              FOVEA_INTERNAL_ERROR);
  EXPECT_TRUE(contains(message, "does not compile f<3> for sm_80")) << message;
  EXPECT_TRUE(contains(message, "kernel.cu(1)")) << message;
}

TEST_F(JitCompile, AnUnknownArchitectureIsUnsupported) {
  const std::string message =
      refusal([] { nvrtc().compile(tiny_source("template <int N> __global__ void f() {}", "f<3>", "sm_999")); },
              FOVEA_UNSUPPORTED);
  EXPECT_TRUE(contains(message, "sm_999")) << message;
}

TEST_F(JitCompile, NoHeaderIsReadFromTheDisk) {
  for (const char* header : {"cuda_fp16.h", "stdio.h", "scalar.h"}) {  // the last one is embedded, not in kTinyText
    const std::string text = std::string("#include <") + header + ">\ntemplate <int N> __global__ void f() {}";
    const std::string message = refusal([&] { nvrtc().compile(tiny_source(text, "f<3>")); }, FOVEA_INTERNAL_ERROR);
    EXPECT_TRUE(contains(message, "could not open source file")) << message;
  }
}

TEST_F(JitCompile, OptionsArePassedOn) {
  Source source = tiny_source("template <int N> __global__ void f(int* x) { *x = VALUE; }", "f<3>");
  source.options = {"-DVALUE=7"};
  EXPECT_FALSE(nvrtc().compile(source).cubin.empty());
}

TEST_F(JitCompile, TheFileTellsTheVersionWithoutBeingLoaded) {
  const NvrtcFile found = find_nvrtc(jit_testing::nvrtc_search());
  EXPECT_EQ(found.version, Nvrtc(found.path).version());
}

TEST_F(JitCompile, WhatIsLoadedIsNotLookedAt) {
  nvrtc();
  EXPECT_TRUE(contains(refusal([] { find_nvrtc(only({})); }, FOVEA_UNSUPPORTED), "none was found"));
}

}  // namespace
