// SPDX-License-Identifier: Apache-2.0
//
// The cache on disk: what it keeps, what it refuses to run, what many processes do to it.
#include "cuda/jit/cache.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>  // NOLINT(modernize-deprecated-headers)
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <sstream>

#include "cuda/jit/sha256.h"
#include "jit_testing.h"

namespace {

using namespace fovea::cuda::jit;  // NOLINT(google-build-using-namespace)
using jit_testing::contains;
using jit_testing::Folder;
using jit_testing::refusal;
using jit_testing::Variable;
namespace fs = std::filesystem;

constexpr std::uint64_t kPlenty = 1 << 30;
constexpr Version k130 = {13, 0};

TEST(JitSha256, KnownAnswers) {  // FIPS 180-4's examples, and its longest one
  EXPECT_EQ(Sha256().add("").hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256().add("abc").hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256().add("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq").hex(),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Sha256().add(std::string(1000000, 'a')).hex(),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(JitSha256, PiecesMakeNoDifferenceAndFieldsDo) {
  const std::string text(300, 'x');
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    EXPECT_EQ(Sha256().add(text.substr(0, cut)).add(text.substr(cut)).hex(), Sha256().add(text).hex());
  }
  EXPECT_NE(Sha256().add_field("ab").add_field("c").hex(), Sha256().add_field("a").add_field("bc").hex());
}

Binary example(char fill = 'c', std::size_t bytes = 5000) {
  const std::string log = "ptxas info    : Used 42 registers, used 1 barriers\n";
  return {std::string(bytes, fill) + std::string("\0end", 4), "_Z6symbolv", log, parse_log(log)};
}

Cache open_cache(const Folder& folder, std::uint64_t max_bytes = kPlenty) {
  return Cache(folder / "cache", Cache::Access::kReadWrite, max_bytes, "FOVEA_CACHE_DIR");
}

std::string only_entry(const Cache& cache) {
  std::string path;
  for (const fs::directory_entry& entry : fs::directory_iterator(cache.folder())) {
    EXPECT_TRUE(path.empty()) << "more than one file";
    path = entry.path().string();
  }
  return path;
}

std::string read_all(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  return content.str();
}

void write_all(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << content;
}

// ---- keeping ----

TEST(JitCache, KeepsEverythingOfAnEntry) {
  const Folder folder;
  const Cache cache = open_cache(folder);
  EXPECT_FALSE(cache.load("key", k130));
  cache.store("key", k130, example());
  const std::optional<Binary> found = cache.load("key", k130);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->cubin, example().cubin);
  EXPECT_EQ(found->symbol, "_Z6symbolv");
  EXPECT_EQ(found->log, example().log);
  EXPECT_EQ(found->report.registers, 42);
  EXPECT_FALSE(cache.load("another key", k130));
  EXPECT_FALSE(cache.load("key", {13, 1})) << "another compiler, another entry";
}

TEST(JitCache, ABareNameIsAFolderOfTheWorkingFolder) {
  const Folder folder;
  const fs::path before = fs::current_path();
  fs::current_path(folder.path());
  EXPECT_NO_THROW(
      Cache("kernels", Cache::Access::kReadWrite, kPlenty, "FOVEA_CACHE_DIR").store("key", k130, example()));
  fs::current_path(before);
  EXPECT_TRUE(fs::is_directory(folder / "kernels"));
}

TEST(JitCache, TheFolderAndItsFilesArePrivate) {
  const Folder folder;
  umask(0);
  const Cache cache(folder / "parents/are/made/cache", Cache::Access::kReadWrite, kPlenty, "FOVEA_CACHE_DIR");
  cache.store("key", k130, example());
  umask(022);
  struct stat info {};
  ASSERT_EQ(stat(cache.folder().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777u, 0700u);
  ASSERT_EQ(stat(only_entry(cache).c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777u, 0600u);
}

TEST(JitCache, AnyVersionMeansTheNewestThatTheDriverTakes) {
  const Folder folder;
  const Cache cache = open_cache(folder);
  cache.store("key", {12, 10}, example('b'));
  cache.store("key", {12, 9}, example('a'));
  cache.store("key", k130, example('c'));
  EXPECT_EQ(cache.load_any("key", 0)->cubin[0], 'c');
  EXPECT_EQ(cache.load_any("key", 12)->cubin[0], 'b');
  EXPECT_FALSE(cache.load_any("key", 11));
  EXPECT_FALSE(cache.load_any("another key", 0));
}

// ---- damage ----

TEST(JitCache, EveryDamagedByteIsNoticedAndTheEntryRemoved) {
  const Folder folder;
  const Cache cache = open_cache(folder);
  cache.store("key", k130, example('c', 40));
  const std::string path = only_entry(cache);
  const std::string good = read_all(path);
  for (std::size_t n = 0; n < good.size(); ++n) {
    std::string bad = good;
    bad[n] = static_cast<char>(bad[n] ^ 0x10);
    write_all(path, bad);
    EXPECT_FALSE(cache.load("key", k130)) << "byte " << n;
    EXPECT_FALSE(fs::exists(path)) << "byte " << n;
  }
  for (std::size_t size = 0; size < good.size(); ++size) {
    write_all(path, good.substr(0, size));
    EXPECT_FALSE(cache.load("key", k130)) << size << " bytes of it";
  }
  write_all(path, good + "x");
  EXPECT_FALSE(cache.load("key", k130));
  write_all(path, good);
  chmod(path.c_str(), 0600);
  EXPECT_TRUE(cache.load("key", k130));
}

TEST(JitCache, AnEntryUnderAnotherEntrysNameIsNotIt) {
  const Folder folder;
  const Cache cache = open_cache(folder);
  cache.store("key", k130, example('c'));
  const std::string first = only_entry(cache);
  fs::rename(first, folder / "aside");
  cache.store("another key", k130, example('d'));
  fs::rename(folder / "aside", only_entry(cache));
  EXPECT_FALSE(cache.load("another key", k130));
}

// ---- whose code it is ----

TEST(JitCache, AFolderThatOthersCanWriteIsRefused) {
  const Folder folder;
  for (const mode_t mode : {0777u, 0770u, 0702u}) {
    fs::create_directory(folder / "cache");
    chmod((folder / "cache").c_str(), mode);
    const std::string message = refusal([&] { open_cache(folder); }, FOVEA_INVALID_ARGUMENT);
    EXPECT_TRUE(message.starts_with("FOVEA_CACHE_DIR: ")) << message;
    EXPECT_TRUE(contains(message, "chmod 700")) << message;
    fs::remove(folder / "cache");
  }
}

TEST(JitCache, AnotherUsersFolderAndEntriesAreRefused) {
  if (geteuid() != 0) {
    GTEST_SKIP() << "only root can give a file to another user";
  }
  const Folder folder;
  const Cache cache = open_cache(folder);
  cache.store("key", k130, example());
  ASSERT_EQ(chown(only_entry(cache).c_str(), 12345, 12345), 0);
  EXPECT_FALSE(cache.load("key", k130));
  EXPECT_EQ(fs::is_empty(cache.folder()), true);
  ASSERT_EQ(chown(cache.folder().c_str(), 12345, 12345), 0);
  const std::string message = refusal([&] { open_cache(folder); }, FOVEA_INVALID_ARGUMENT);
  EXPECT_TRUE(contains(message, "belongs to user 12345, and this is user 0")) << message;
}

TEST(JitCache, AnEntryThatOthersCanWriteOrALinkIsNotRead) {
  const Folder folder;
  const Cache cache = open_cache(folder);
  cache.store("key", k130, example());
  const std::string path = only_entry(cache);
  chmod(path.c_str(), 0666);
  EXPECT_FALSE(cache.load("key", k130));
  cache.store("key", k130, example());
  fs::rename(path, folder / "elsewhere");
  fs::create_symlink(folder / "elsewhere", path);
  EXPECT_FALSE(cache.load("key", k130));
}

// To open a FIFO waits until someone writes into it, unless one asks not to.
TEST(JitCache, WhatIsNoFileUnderAnEntrysNameIsReplaced) {
  const Folder folder;
  const Cache cache = open_cache(folder);
  cache.store("key", k130, example());
  const std::string path = only_entry(cache);
  for (const bool fifo : {true, false}) {
    fs::remove(path);
    ASSERT_EQ(fifo ? mkfifo(path.c_str(), 0600) : mkdir(path.c_str(), 0700), 0);
    EXPECT_FALSE(cache.load("key", k130));
    cache.store("key", k130, example());
    EXPECT_TRUE(cache.load("key", k130));
  }
  fs::remove(path);
  fs::create_directories(path + "/something");
  EXPECT_FALSE(cache.load("key", k130));
  const std::string message = refusal([&] { cache.store("key", k130, example()); }, FOVEA_INVALID_ARGUMENT);
  EXPECT_TRUE(contains(message, path + ": Is a directory, which holds something: remove it")) << message;
}

// ---- where it cannot be ----

TEST(JitCache, WhatIsNoFolderIsNamed) {
  const Folder folder;
  write_all(folder / "file", "x");
  const auto open = [](const std::string& path) { Cache(path, Cache::Access::kReadWrite, kPlenty, "FOVEA_CACHE_DIR"); };
  EXPECT_TRUE(contains(refusal([&] { open(folder / "file"); }, FOVEA_INVALID_ARGUMENT), "it is no folder"));
  const std::string message = refusal([&] { open(folder / "file/cache"); }, FOVEA_INVALID_ARGUMENT);
  EXPECT_TRUE(contains(message, "Not a directory")) << message;
  const std::string missing = folder / "missing";
  EXPECT_TRUE(contains(
      refusal([&] { Cache(missing, Cache::Access::kReadOnly, 0, "FOVEA_PRECOMPILED_DIR"); }, FOVEA_INVALID_ARGUMENT),
      "FOVEA_PRECOMPILED_DIR"));
  EXPECT_FALSE(fs::exists(missing));
}

// In a process of its own; true if it ended well.
bool in_child(const std::function<bool()>& call) {
  const pid_t child = fork();
  if (child == 0) {
    bool ok = false;
    try {
      ok = call();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    _exit(ok ? 0 : 1);
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool refuses(const std::function<void()>& call, const std::string& part) {
  try {
    call();
  } catch (const fovea::Error& error) {
    return contains(error.what(), part) && contains(error.what(), "FOVEA_CACHE_DIR");
  }
  return false;
}

TEST(JitCache, AFullDiskIsNamedAndLeavesNothing) {
  const Folder folder;
  const Cache cache = open_cache(folder);
  EXPECT_TRUE(in_child([&] {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {1000, 1000};  // bytes of a file: what comes after them is not written
    setrlimit(RLIMIT_FSIZE, &limit);
    return refuses([&] { cache.store("key", k130, example()); }, "File too large");
  }));
  EXPECT_TRUE(fs::is_empty(cache.folder()));
}

TEST(JitCache, AFolderThatCannotBeWrittenIsReadAndNamed) {
  const Folder folder;
  const Cache cache = open_cache(folder);
  cache.store("key", k130, example());
  const auto check = [&] {
    return cache.load("key", k130).has_value() && refuses([&] { cache.require_writable(); }, "Permission denied") &&
           refuses([&] { cache.store("new", k130, example()); }, "Permission denied");
  };
  const bool root = geteuid() == 0;
  if (root) {  // root may do everything, so the folder and the process get another user
    const uid_t nobody = 65534;
    chmod(folder.path().c_str(), 0755);
    ASSERT_EQ(chown(only_entry(cache).c_str(), nobody, nobody), 0);
    ASSERT_EQ(chown(cache.folder().c_str(), nobody, nobody), 0);
    chmod(cache.folder().c_str(), 0500);
    EXPECT_TRUE(in_child([&] { return setuid(nobody) == 0 && check(); }));
  } else {
    chmod(cache.folder().c_str(), 0500);
    EXPECT_TRUE(in_child(check));
    chmod(cache.folder().c_str(), 0700);
  }
}

// ---- its size ----

void used(const std::string& path, std::time_t seconds_ago) {
  const timespec then = {std::time(nullptr) - seconds_ago, 0};
  const timespec times[2] = {then, then};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

TEST(JitCache, WhatWasNotUsedForLongestGoesFirst) {
  const Folder folder;
  const Cache cache = open_cache(folder, 50000);
  std::vector<std::string> paths;
  for (int n = 0; n < 4; ++n) {
    const std::string key = "key" + std::to_string(n);
    cache.store(key, k130, example('a', 10000));
    for (const fs::directory_entry& entry : fs::directory_iterator(cache.folder())) {
      if (std::find(paths.begin(), paths.end(), entry.path().string()) == paths.end()) {
        paths.push_back(entry.path().string());
        used(paths.back(), 1000 - n);
      }
    }
  }
  ASSERT_EQ(paths.size(), 4u);
  ASSERT_TRUE(cache.load("key0", k130));  // which makes it the last used
  cache.store("key4", k130, example('a', 14000));
  EXPECT_TRUE(cache.load("key0", k130));
  EXPECT_FALSE(cache.load("key1", k130)) << "not used for longest";
  EXPECT_TRUE(cache.load("key3", k130));
  EXPECT_TRUE(cache.load("key4", k130)) << "what was just written stays";
}

TEST(JitCache, AnEntryLargerThanTheLimitStaysUntilTheNext) {
  const Folder folder;
  const Cache cache = open_cache(folder, 100);
  cache.store("key", k130, example());
  EXPECT_TRUE(cache.load("key", k130));
  cache.store("another", k130, example());
  EXPECT_FALSE(cache.load("key", k130));
}

TEST(JitCache, LeftoversOfKilledProcessesGo) {
  const Folder folder;
  const Cache cache = open_cache(folder);
  write_all(cache.folder() + "/1-0-0.tmp", "x");
  write_all(cache.folder() + "/2-0-0.tmp", "x");
  write_all(cache.folder() + "/somebody's", "x");
  used(cache.folder() + "/1-0-0.tmp", 7200);
  used(cache.folder() + "/somebody's", 7200);
  cache.store("key", k130, example());
  EXPECT_FALSE(fs::exists(cache.folder() + "/1-0-0.tmp"));
  EXPECT_TRUE(fs::exists(cache.folder() + "/2-0-0.tmp")) << "somebody may be writing it now";
  EXPECT_TRUE(fs::exists(cache.folder() + "/somebody's"));
}

// ---- many processes ----

TEST(JitCache, EightProcessesWriteReadEvictAndDamageAtOnce) {
  const Folder folder;
  const Cache cache = open_cache(folder, 60000);  // six entries of the twelve
  std::vector<pid_t> children;
  for (int process = 0; process < 8; ++process) {
    const pid_t child = fork();
    if (child == 0) {
      int hits = 0;
      try {
        const Cache mine = open_cache(folder, 60000);
        for (int round = 0; round < 60; ++round) {
          const int n = (round * 7 + process) % 12;
          const std::string key = "key" + std::to_string(n);
          const Binary expected = example(static_cast<char>('a' + n), 9000);
          if (const std::optional<Binary> found = mine.load(key, k130)) {
            ++hits;
            if (found->cubin != expected.cubin) {
              _exit(2);
            }
          } else {
            mine.store(key, k130, expected);
          }
          if (process == 0 && round % 10 == 9) {  // somebody's disk
            std::error_code error;
            for (const fs::directory_entry& entry : fs::directory_iterator(mine.folder(), error)) {
              if (truncate(entry.path().c_str(), 100) == 0) {
                break;
              }
            }
          }
        }
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        _exit(3);
      }
      _exit(hits > 0 ? 0 : 4);
    }
    children.push_back(child);
  }
  int with_hits = 0;
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_TRUE(WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 4) << WEXITSTATUS(status);
    with_hits += WEXITSTATUS(status) == 0 ? 1 : 0;
  }
  EXPECT_GT(with_hits, 0);
  int temporaries = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(cache.folder())) {
    temporaries += entry.path().extension() == ".tmp" ? 1 : 0;
  }
  EXPECT_EQ(temporaries, 0);
}

// ---- the environment ----

TEST(JitCache, TheEnvironmentSaysWhereAndHowLarge) {
  const Variable folder("FOVEA_CACHE_DIR", nullptr);
  const Variable size("FOVEA_CACHE_MAX_MB", nullptr);
  const Variable home("HOME", "/home/somebody");
  {
    const Variable xdg("XDG_CACHE_HOME", nullptr);
    EXPECT_EQ(cache_folder_from_environment(), "/home/somebody/.cache/fovea");
  }
  {
    const Variable xdg("XDG_CACHE_HOME", "/caches");
    EXPECT_EQ(cache_folder_from_environment(), "/caches/fovea");
    const Variable own("FOVEA_CACHE_DIR", "/own");
    EXPECT_EQ(cache_folder_from_environment(), "/own");
  }
  {
    const Variable xdg("XDG_CACHE_HOME", "relative");
    EXPECT_EQ(cache_folder_from_environment(), "/home/somebody/.cache/fovea");
  }
  EXPECT_EQ(cache_size_from_environment(), std::uint64_t{1} << 30);
  {
    const Variable own("FOVEA_CACHE_MAX_MB", "7");
    EXPECT_EQ(cache_size_from_environment(), 7u << 20);
  }
  const Variable bad("FOVEA_CACHE_MAX_MB", "7 GB");
  EXPECT_TRUE(contains(refusal([] { cache_size_from_environment(); }, FOVEA_INVALID_ARGUMENT), "'7 GB'; accepted"));
}

}  // namespace
