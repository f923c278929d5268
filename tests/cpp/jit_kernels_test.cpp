// SPDX-License-Identifier: Apache-2.0
//
// From a request to machine code: memory, precompiled folder, cache, compiler; the modes; threads and processes.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>
#include <vector>

#include "cuda/jit/jit.h"
#include "jit_testing.h"

namespace {

using namespace fovea::cuda::jit;  // NOLINT(google-build-using-namespace)
using jit_testing::contains;
using jit_testing::Folder;
using jit_testing::refusal;
using jit_testing::tiny;
using jit_testing::tiny_settings;
using jit_testing::Variable;

TEST(JitKernels, CompilesOnceThenFromMemoryThenFromDisk) {
  const Folder folder;
  Jit first(tiny_settings(folder / "cache"));
  const std::shared_ptr<const Binary> made = first.binary(tiny(3));
  EXPECT_EQ(first.binary(tiny(3)), made);
  EXPECT_EQ(first.counts().compiled, 1);
  EXPECT_EQ(first.counts().memory, 1);

  Jit second(tiny_settings(folder / "cache"));
  EXPECT_EQ(second.binary(tiny(3))->cubin, made->cubin);
  EXPECT_EQ(second.counts().disk, 1);
  EXPECT_EQ(second.counts().compiled, 0);
  EXPECT_EQ(second.binary(tiny(3))->report.registers, made->report.registers);
}

TEST(JitKernels, EverythingThatMattersMakesAnotherEntry) {
  const Folder folder;
  const Settings settings = tiny_settings(folder / "cache");
  Settings other_text = settings;
  // Of another kernel's file nothing is in the key, of an included one everything.
  std::vector<TextFile> files(settings.text.begin(), settings.text.end());
  files.push_back({"other.cuh", "another kernel"});
  Settings more_text = settings;
  more_text.text = files;
  std::vector<TextFile> changed = files;
  const auto included = std::find_if(changed.begin(), changed.end(), [](auto& f) { return f.name == "tiny_spec.h"; });
  ASSERT_NE(included, changed.end());
  const std::string longer = std::string(included->text) + "// changed";
  included->text = longer;
  other_text.text = changed;
  Request other_options = tiny(3);
  other_options.options = {"-DX=1"};
  Request other_split = tiny(3);
  other_split.options = {"-DX=1", "-DY"};
  Jit jit(settings);
  const std::set<std::string> keys = {jit.key_of(tiny(3)),           jit.key_of(tiny(4)),
                                      jit.key_of(tiny(3, "sm_90a")), jit.key_of(other_options),
                                      jit.key_of(other_split),       Jit(other_text).key_of(tiny(3))};
  EXPECT_EQ(keys.size(), 6u);
  EXPECT_EQ(Jit(more_text).key_of(tiny(3)), jit.key_of(tiny(3)));
}

TEST(JitKernels, ADamagedEntryIsCompiledAgain) {
  const Folder folder;
  Jit(tiny_settings(folder / "cache")).binary(tiny(3));
  for (const auto& entry : std::filesystem::directory_iterator(folder / "cache")) {
    std::ofstream(entry.path(), std::ios::binary | std::ios::trunc) << "nonsense";
  }
  Jit jit(tiny_settings(folder / "cache"));
  EXPECT_FALSE(jit.binary(tiny(3))->cubin.empty());
  EXPECT_EQ(jit.counts().compiled, 1);
  Jit after(tiny_settings(folder / "cache"));
  after.binary(tiny(3));
  EXPECT_EQ(after.counts().disk, 1) << "and kept again";
}

TEST(JitKernels, WithoutACacheOnDisk) {
  Jit jit(tiny_settings(""));
  jit.binary(tiny(3));
  jit.binary(tiny(3));
  EXPECT_EQ(jit.counts().compiled, 1);
}

// ---- modes ----

TEST(JitKernels, CacheNeverCompilesNorNeedsNvrtc) {
  const Folder folder;
  Settings settings = tiny_settings(folder / "cache");
  Jit(settings).binary(tiny(3));
  settings.mode = Mode::kCache;
  settings.nvrtc.forced = "/nowhere";
  Jit jit(settings);
  EXPECT_FALSE(jit.binary(tiny(3))->cubin.empty());
  const std::string message = refusal([&] { jit.binary(tiny(4)); }, FOVEA_UNSUPPORTED);
  EXPECT_TRUE(message.starts_with("FOVEA_JIT=cache: ")) << message;
  EXPECT_TRUE(contains(message, "tiny::scale<TinySpec{.factor = 4, .twice = true}> for sm_80")) << message;
  EXPECT_TRUE(contains(message, folder / "cache")) << message;
  EXPECT_EQ(jit.counts().compiled, 0);
}

TEST(JitKernels, WithoutNvrtcWhatIsThereIsTaken) {
  const Folder folder;
  Settings settings = tiny_settings(folder / "cache");
  Jit(settings).binary(tiny(3));
  settings.nvrtc.forced = "/nowhere";
  Jit jit(settings);
  EXPECT_FALSE(jit.binary(tiny(3))->cubin.empty());
  EXPECT_NO_THROW(jit.require(tiny(3)));
  for (const bool only_asked : {true, false}) {
    const auto call = [&] { only_asked ? jit.require(tiny(4)) : static_cast<void>(jit.binary(tiny(4))); };
    EXPECT_TRUE(refusal(call, FOVEA_INVALID_ARGUMENT).starts_with("FOVEA_NVRTC: '/nowhere': no such file"));
  }
  EXPECT_EQ(jit.counts().compiled, 0);
}

TEST(JitKernels, OffTakesOnlyWhatIsPrecompiled) {
  const Folder folder;
  Settings settings = tiny_settings(folder / "ahead");
  Jit(settings).binary(tiny(3));
  settings.cache_folder = folder / "cache";
  settings.mode = Mode::kOff;
  EXPECT_TRUE(contains(refusal([&] { Jit(settings).binary(tiny(3)); }, FOVEA_UNSUPPORTED), "which is not set"));
  settings.precompiled = folder / "ahead";
  Jit jit(settings);
  EXPECT_FALSE(jit.binary(tiny(3))->cubin.empty());
  EXPECT_EQ(jit.counts().precompiled, 1);
  EXPECT_TRUE(refusal([&] { jit.binary(tiny(4)); }, FOVEA_UNSUPPORTED).starts_with("FOVEA_JIT=off: "));
  EXPECT_FALSE(std::filesystem::exists(settings.cache_folder));
}

// Wheels have them, and the same commit gives the same wheel.
TEST(JitKernels, TheSameTextGivesTheSameEntry) {
  const Folder folder;
  const auto compiled = [&](const char* name) {
    Jit(tiny_settings(folder / name)).binary(tiny(3));
    std::ifstream file(std::filesystem::directory_iterator(folder / name)->path(), std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string first = compiled("first");
  EXPECT_GT(first.size(), 1000);
  EXPECT_TRUE(first == compiled("second"));
}

// It is as trusted as the library that lies beside it, whoever may write there.
TEST(JitKernels, WhatIsInstalledIsTakenInEveryMode) {
  const Folder folder;
  Settings settings = tiny_settings(folder / "installed");
  Jit(settings).binary(tiny(3));
  std::filesystem::permissions(folder / "installed", std::filesystem::perms::all);
  settings.installed = folder / "installed";
  settings.cache_folder = folder / "cache";
  for (const Mode mode : {Mode::kJit, Mode::kCache, Mode::kOff}) {
    settings.mode = mode;
    Jit jit(settings);
    EXPECT_FALSE(jit.binary(tiny(3))->cubin.empty());
    EXPECT_EQ(jit.counts().installed, 1);
    EXPECT_EQ(jit.counts().compiled, 0);
  }
  EXPECT_FALSE(std::filesystem::exists(settings.cache_folder));
  settings.mode = Mode::kJit;
  Jit jit(settings);
  EXPECT_FALSE(jit.binary(tiny(4))->cubin.empty());
  EXPECT_EQ(jit.counts().compiled, 1);
}

// A folder of the user's is searched first.
TEST(JitKernels, WhatIsPrecompiledGoesBeforeWhatIsInstalled) {
  const Folder folder;
  Settings settings = tiny_settings(folder / "kernels");
  Jit(settings).binary(tiny(3));
  settings.installed = folder / "kernels";
  settings.precompiled = folder / "kernels";
  Jit jit(settings);
  EXPECT_FALSE(jit.binary(tiny(3))->cubin.empty());
  EXPECT_EQ(jit.counts().precompiled, 1);
  EXPECT_EQ(jit.counts().installed, 0);
}

TEST(JitKernels, AFailureIsNoAnswer) {
  const Folder folder;
  Jit jit(tiny_settings(folder / "cache"));
  Request wrong = tiny(3);
  wrong.kernel = "tiny::nothing";
  for (int n = 0; n < 2; ++n) {
    EXPECT_TRUE(contains(refusal([&] { jit.binary(wrong); }, FOVEA_INTERNAL_ERROR), "tiny::nothing"));
  }
  EXPECT_EQ(folder.count("cache"), 1);
  EXPECT_TRUE(std::filesystem::is_empty(folder / "cache"));
}

TEST(JitKernels, SeveralAreGatheredAtOnce) {
  const Folder folder;
  Jit jit(tiny_settings(folder / "cache"));
  Request wrong = tiny(3);
  wrong.argument = "TinySpec{.no = 3}";
  EXPECT_TRUE(contains(refusal(
                           [&] {
                             jit.gather({tiny(3), tiny(4), wrong, tiny(3), tiny(5)});
                           },
                           FOVEA_INTERNAL_ERROR),
                       "TinySpec{.no = 3}"));
  EXPECT_EQ(jit.counts().compiled, 3);
  EXPECT_FALSE(jit.binary(tiny(5))->cubin.empty());
  EXPECT_EQ(jit.counts().compiled, 3);
}

TEST(JitKernels, TheEnvironmentSetsEverything) {
  const Variable mode("FOVEA_JIT", "cache");
  const Variable ahead("FOVEA_PRECOMPILED_DIR", "/ahead");
  const Variable folder("FOVEA_CACHE_DIR", "none");
  const Variable log("FOVEA_LOG", "jit");
  const Variable dump("FOVEA_DUMP", "/dump");
  const Settings settings = Settings::from_environment();
  EXPECT_EQ(settings.mode, Mode::kCache);
  EXPECT_EQ(settings.precompiled, "/ahead");
  EXPECT_EQ(settings.cache_folder, "");
  EXPECT_TRUE(settings.log);
  EXPECT_EQ(settings.dump, "/dump");
  EXPECT_EQ(settings.text.data(), embedded_files().data());
  const Variable off("FOVEA_JIT", "off");
  EXPECT_EQ(Settings::from_environment().mode, Mode::kOff);
  const Variable bad("FOVEA_JIT", "never");
  EXPECT_EQ(refusal([] { Settings::from_environment(); }, FOVEA_INVALID_ARGUMENT),
            "FOVEA_JIT: 'never'; accepted: jit, cache, off");
  const Variable usual("FOVEA_JIT", "jit");
  const Variable verbose("FOVEA_LOG", "verbose");
  EXPECT_EQ(refusal([] { Settings::from_environment(); }, FOVEA_INVALID_ARGUMENT),
            "FOVEA_LOG: 'verbose'; accepted: jit, or not set");
}

TEST(JitKernels, TextOfAFolderIsThatOfTheLibrary) {
  // Every file under both of its names, as the build embeds them.
  const std::vector<TextFile> read = read_text(FOVEA_SOURCE_DIR "/src");
  EXPECT_EQ(read.size(), embedded_files().size());
  for (const TextFile& embedded : embedded_files()) {
    const auto same =
        std::find_if(read.begin(), read.end(), [&](const TextFile& f) { return f.name == embedded.name; });
    ASSERT_NE(same, read.end()) << embedded.name;
    EXPECT_TRUE(same->text == embedded.text) << embedded.name;
  }
}

TEST(JitKernels, TextOfAFolderIsCompiledAndAPartOfTheKey) {
  const Folder folder;
  namespace fs = std::filesystem;
  fs::create_directories(folder / "src/math");
  fs::create_directories(folder / "src/cuda/device/below");
  const auto write = [&](const std::string& name, const std::string& text) { std::ofstream(folder / name) << text; };
  write("src/math/numbers.h", "constexpr int kFactor = 3;\n");
  write("src/cuda/device/below/toy.cuh",
        "#include \"numbers.h\"\nstruct Toy { int n = 0; };\n"
        "template <Toy T> __global__ void toy(float* x) { x[threadIdx.x] *= kFactor + T.n; }\n");
  Settings settings = tiny_settings(folder / "cache");
  const Request request{"below/toy.cuh", "toy", "Toy{.n = 1}", "sm_80", {}};
  const std::vector<TextFile> text = read_text(folder / "src");
  settings.text = text;
  Jit first(settings);
  const std::string key = first.key_of(request);
  const std::string code = first.binary(request)->cubin;
  EXPECT_EQ(first.counts().compiled, 1);
  write("src/math/numbers.h", "constexpr int kFactor = 5;\n");
  const std::vector<TextFile> edited = read_text(folder / "src");
  settings.text = edited;
  Jit second(settings);
  EXPECT_NE(second.key_of(request), key);
  EXPECT_NE(second.binary(request)->cubin, code);
  EXPECT_EQ(second.counts().compiled, 1);
}

TEST(JitKernels, TheFolderOfTextIsThatOfTheEnvironment) {
  const Variable folder("FOVEA_KERNEL_TEXT", FOVEA_SOURCE_DIR "/src");
  EXPECT_NE(Settings::from_environment().text.data(), embedded_files().data());
  const Variable none("FOVEA_KERNEL_TEXT", nullptr);
  EXPECT_EQ(Settings::from_environment().text.data(), embedded_files().data());
  EXPECT_EQ(
      refusal([] { read_text("/nowhere"); }, FOVEA_INVALID_ARGUMENT),
      "FOVEA_KERNEL_TEXT: '/nowhere' has no math/ with the text of kernels; accepted: the folder src of a checkout of "
      "fovea, or a copy");
}

TEST(JitKernels, LogAndDumpShowWhatHappens) {
  const Folder folder;
  Settings settings = tiny_settings(folder / "cache");
  settings.log = true;
  settings.dump = folder / "dump";
  testing::internal::CaptureStderr();
  Jit(settings).binary(tiny(3));
  Jit(settings).binary(tiny(3));
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(log, "fovea: jit: compiled tiny::scale<TinySpec{.factor = 3, .twice = true}> for sm_80")) << log;
  EXPECT_TRUE(contains(log, "fovea: jit: read tiny::scale")) << log;
  std::set<std::string> suffixes;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "dump")) {
    EXPECT_TRUE(entry.path().filename().native().starts_with("scale-sm_80-")) << entry.path();
    EXPECT_GT(entry.file_size(), 0u) << entry.path();
    suffixes.insert(entry.path().extension().string());
  }
  EXPECT_EQ(suffixes, (std::set<std::string>{".txt", ".ptx", ".cubin", ".log"}));
}

TEST(JitKernels, LoadingNeedsADriver) {
  std::string why_not;
  if (find_driver(why_not) != nullptr) {
    GTEST_SKIP() << "this machine has a driver: tests/gpu loads and launches";
  }
  const Folder folder;
  Jit jit(tiny_settings(folder / "cache"));
  EXPECT_EQ(refusal([&] { jit.kernel(tiny(3)); }, FOVEA_UNSUPPORTED), why_not);
}

// ---- threads and processes ----

TEST(JitThreads, WaitForOneCompilation) {
  const Folder folder;
  Jit jit(tiny_settings(folder / "cache"));
  std::vector<std::thread> threads;
  std::vector<std::shared_ptr<const Binary>> found(8);
  for (int n = 0; n < 8; ++n) {
    threads.emplace_back([&, n] { found[n] = jit.binary(tiny(3 + n % 2)); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (int n = 2; n < 8; ++n) {
    EXPECT_EQ(found[n], found[n % 2]);
  }
  EXPECT_EQ(jit.counts().compiled, 2);
  EXPECT_EQ(jit.counts().memory, 6);
}

TEST(JitKernels, EightProcessesCompileTheSameKernel) {
  const Folder folder;
  Settings settings = tiny_settings(folder / "cache");
  const std::string expected = Jit(tiny_settings("")).binary(tiny(3))->symbol;
  std::vector<pid_t> children;
  for (int process = 0; process < 8; ++process) {
    const pid_t child = fork();
    if (child == 0) {
      bool ok = false;
      try {
        Jit jit(settings);
        ok = jit.binary(tiny(3))->symbol == expected && jit.counts().compiled + jit.counts().disk == 1;
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
      }
      _exit(ok ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 0);
  }
  int entries = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "cache")) {
    EXPECT_EQ(entry.path().extension(), ".kernel");
    ++entries;
  }
  EXPECT_EQ(entries, 1);
}

}  // namespace
