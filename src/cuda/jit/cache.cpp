// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

#include "core/status.h"
#include "cuda/jit/folder.h"
#include "cuda/jit/sha256.h"

namespace fovea::cuda::jit {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMagic = "fovea kernel 1\n";  // the format's number
constexpr std::string_view kSuffix = ".kernel";
constexpr std::string_view kTemporary = ".tmp";
constexpr std::uint64_t kLargest = std::uint64_t{1} << 28;  // of an entry, in bytes
constexpr std::time_t kAbandoned = 3600;                    // seconds after which a temporary file counts as left
constexpr std::time_t kTouch = 60;                          // seconds between two touches of an entry

std::string reason(int error) { return std::strerror(error); }  // NOLINT(concurrency-mt-unsafe)

class File {
 public:
  File(const std::string& path, int flags, mode_t mode = 0)
      : descriptor_(open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, mode)) {}
  ~File() { close(); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  bool opened() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }

  // False, with errno, where something was not written: some disks say so only now.
  bool close() {
    const int descriptor = descriptor_;
    descriptor_ = -1;
    return descriptor < 0 || ::close(descriptor) == 0;
  }

  bool write(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
      if (written < 0 && errno != EINTR) {
        return false;
      }
      bytes.remove_prefix(std::max<ssize_t>(written, 0));
    }
    return true;
  }

  // All of it, which is `bytes` long; less if it was cut short meanwhile.
  std::string read(std::size_t bytes) const {
    std::string content(bytes, '\0');
    std::size_t done = 0;
    while (done < bytes) {
      const ssize_t got = ::read(descriptor_, content.data() + done, bytes - done);
      if (got == 0 || (got < 0 && errno != EINTR)) {
        break;
      }
      done += std::max<ssize_t>(got, 0);
    }
    content.resize(done);
    return content;
  }

 private:
  int descriptor_;
};

// ---- an entry's content: magic, fields each after its length, checksum ----

std::string checksum(std::string_view bytes) {
  const auto digest = Sha256().add(bytes).digest();
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

constexpr std::size_t kChecksum = 32;

void put(std::string& content, std::string_view field) {
  std::uint64_t size = field.size();
  for (int n = 0; n < 8; ++n, size >>= 8) {
    content += static_cast<char>(size & 0xFF);
  }
  content += field;
}

std::optional<std::string_view> take(std::string_view& content) {
  if (content.size() < 8) {
    return std::nullopt;
  }
  std::uint64_t size = 0;
  for (int n = 7; n >= 0; --n) {
    size = size << 8 | static_cast<std::uint8_t>(content[n]);
  }
  content.remove_prefix(8);
  if (size > content.size()) {
    return std::nullopt;
  }
  const std::string_view field = content.substr(0, size);
  content.remove_prefix(size);
  return field;
}

std::string to_entry(std::string_view key, const Binary& binary) {
  std::string content(kMagic);
  put(content, key);
  put(content, binary.symbol);
  put(content, binary.log);
  put(content, binary.cubin);
  return content + checksum(content);
}

std::optional<Binary> from_entry(std::string_view content, std::string_view key) {
  if (content.size() < kMagic.size() + kChecksum || !content.starts_with(kMagic)) {
    return std::nullopt;
  }
  const std::string_view sum = content.substr(content.size() - kChecksum);
  content.remove_suffix(kChecksum);
  if (checksum(content) != sum) {
    return std::nullopt;
  }
  content.remove_prefix(kMagic.size());
  const auto own_key = take(content);
  const auto symbol = take(content);
  const auto log = take(content);
  const auto cubin = take(content);
  if (!own_key || *own_key != key || !symbol || !log || !cubin || !content.empty()) {
    return std::nullopt;
  }
  return Binary{std::string(*cubin), std::string(*symbol), std::string(*log), parse_log(*log)};
}

// "<64 digits>-<12.4>.kernel"
std::optional<Version> version_in(std::string_view name, std::string_view hash) {
  if (!name.starts_with(hash) || !name.ends_with(kSuffix)) {
    return std::nullopt;
  }
  name.remove_prefix(hash.size());
  name.remove_suffix(kSuffix.size());
  Version version;
  const char* end = name.data() + name.size();
  if (!name.starts_with('-')) {
    return std::nullopt;
  }
  const auto first = std::from_chars(name.data() + 1, end, version.major);
  if (first.ec != std::errc() || first.ptr == end || *first.ptr != '.') {
    return std::nullopt;
  }
  const auto second = std::from_chars(first.ptr + 1, end, version.minor);
  return second.ec == std::errc() && second.ptr == end ? std::optional(version) : std::nullopt;
}

}  // namespace

Cache::Cache(std::string folder, Access access, std::uint64_t max_bytes, std::string variable)
    : folder_(std::move(folder)), access_(access), max_bytes_(max_bytes), variable_(std::move(variable)) {
  struct stat info {};
  if (lstat(folder_.c_str(), &info) != 0) {
    if (errno != ENOENT || access_ != Access::kReadWrite) {
      refuse(reason(errno));
    }
    const fs::path parent = fs::path(folder_).parent_path();
    std::error_code error;
    if (!parent.empty()) {  // a bare name has none: it lies in the working folder
      fs::create_directories(parent, error);
    }
    if (error) {
      refuse(fmt::format("its parent cannot be made: {}", error.message()));
    }
    if (mkdir(folder_.c_str(), 0700) != 0 && errno != EEXIST) {
      refuse(fmt::format("it cannot be made: {}", reason(errno)));
    }
  }
  if (stat(folder_.c_str(), &info) != 0) {
    refuse(reason(errno));
  }
  if (!S_ISDIR(info.st_mode)) {
    refuse("it is no folder");
  }
  if (access_ == Access::kInstalled) {
    return;
  }
  if (!owned(info)) {
    refuse(
        fmt::format("it belongs to user {}, and this is user {}; it holds code that is run, so it must be this user's",
                    info.st_uid, geteuid()));
  }
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    refuse(fmt::format("its mode is {:04o}, so others can write there; it holds code that is run: chmod 700 it",
                       info.st_mode & 07777u));
  }
}

bool Cache::owned(const struct stat& info) const {
  return info.st_uid == geteuid() || (access_ == Access::kReadOnly && info.st_uid == 0);
}

void Cache::refuse(const std::string& why) const {
  throw Error(FOVEA_INVALID_ARGUMENT,
              fmt::format("{}: the folder of compiled kernels, {}: {}. Set {} to a folder of your own", variable_,
                          folder_, why, variable_));
}

std::string Cache::path_of(std::string_view key, Version nvrtc) const {
  return fmt::format("{}/{}-{}{}", folder_, Sha256().add(key).hex(), to_text(nvrtc), kSuffix);
}

std::optional<Binary> Cache::read(const std::string& path, std::string_view key) const {
  const File file(path, O_RDONLY | O_NONBLOCK);  // a FIFO would wait for a writer for ever
  struct stat info {};
  if (!file.opened() || fstat(file.descriptor(), &info) != 0) {
    return std::nullopt;
  }
  const bool safe = access_ == Access::kInstalled || (owned(info) && (info.st_mode & (S_IWGRP | S_IWOTH)) == 0);
  std::optional<Binary> binary;
  if (S_ISREG(info.st_mode) && safe && static_cast<std::uint64_t>(info.st_size) <= kLargest) {
    binary = from_entry(file.read(info.st_size), key);
  }
  if (access_ != Access::kReadWrite) {
    return binary;
  }
  if (!binary) {
    std::remove(path.c_str());  // a file or an empty folder; may fail on a read-only disk: it is passed over next time
  } else if (const std::time_t now = std::time(nullptr); now - info.st_mtime > kTouch) {
    futimens(file.descriptor(), nullptr);  // may fail, too: then it looks older than it is
  }
  return binary;
}

std::optional<Binary> Cache::load(std::string_view key, Version nvrtc) const { return read(path_of(key, nvrtc), key); }

std::optional<Binary> Cache::load_any(std::string_view key, int most_major) const {
  const std::string hash = Sha256().add(key).hex();
  std::vector<Version> versions;
  for_each_entry(folder_, [&](const fs::path& entry) {
    const std::optional<Version> version = version_in(entry.filename().native(), hash);
    if (version && (most_major == 0 || version->major <= most_major)) {
      versions.push_back(*version);
    }
  });
  std::sort(versions.begin(), versions.end(), std::greater<>());
  for (const Version version : versions) {
    if (std::optional<Binary> binary = load(key, version)) {
      return binary;
    }
  }
  return std::nullopt;
}

void Cache::require_writable() const {
  if (access(folder_.c_str(), W_OK | X_OK) != 0) {
    refuse(fmt::format("it cannot be written: {}", reason(errno)));
  }
}

void Cache::store(std::string_view key, Version nvrtc, const Binary& binary) const {
  const std::string path = path_of(key, nvrtc);
  // Unique for this process and thread, also among processes of several machines that share the folder.
  static std::atomic<unsigned> counter{0};
  const auto ticks = std::chrono::steady_clock::now().time_since_epoch().count();
  const std::string temporary =
      fmt::format("{}/{}-{}-{:x}{}", folder_, getpid(), counter.fetch_add(1), ticks, kTemporary);
  File file(temporary, O_WRONLY | O_CREAT | O_EXCL, 0600);
  if (!file.opened() || !file.write(to_entry(key, binary)) || !file.close() ||
      std::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    unlink(temporary.c_str());
    refuse(fmt::format("an entry cannot be written: {}: {}{}", path, reason(error),
                       error == EISDIR ? ", which holds something: remove it" : ""));
  }
  evict(path);
}

void Cache::evict(const std::string& but_not) const {
  struct Entry {
    std::int64_t used;  // in nanoseconds
    std::uint64_t bytes;
    std::string path;
  };
  std::vector<Entry> entries;
  std::uint64_t total = 0;
  const std::time_t now = std::time(nullptr);
  for_each_entry(folder_, [&](const fs::path& entry) {
    const std::string& path = entry.native();
    struct stat info {};
    if (lstat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) {
      return;  // gone meanwhile, or none of ours
    }
    if (path.ends_with(kTemporary) && now - info.st_mtime > kAbandoned) {
      unlink(path.c_str());  // of a process that was killed
    } else if (path.ends_with(kSuffix)) {
      total += info.st_size;
      entries.push_back({info.st_mtim.tv_sec * std::int64_t{1'000'000'000} + info.st_mtim.tv_nsec,
                         static_cast<std::uint64_t>(info.st_size), path});
    }
  });
  if (total <= max_bytes_) {
    return;
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.used < b.used; });
  const std::uint64_t goal = max_bytes_ - max_bytes_ / 10;  // so that the next write need not remove one again
  for (const Entry& entry : entries) {
    if (total <= goal) {
      break;
    }
    if (entry.path != but_not && unlink(entry.path.c_str()) == 0) {
      total -= entry.bytes;
    }
  }
}

std::string installed_folder() {
  std::error_code error;
  const fs::path file = fs::absolute(loaded_from(reinterpret_cast<const void*>(&installed_folder)), error);
  const fs::path here = file.parent_path();
  for (const fs::path& parent : {here, here.parent_path()}) {  // the command contains the library and lies in bin
    if (fs::is_directory(parent / "libfovea.kernels", error)) {
      return (parent / "libfovea.kernels").string();
    }
  }
  return "";
}

std::string cache_folder_from_environment() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  if (std::string folder = variable("FOVEA_CACHE_DIR"); !folder.empty()) {
    return folder;
  }
  if (const std::string folder = variable("XDG_CACHE_HOME");
      folder.starts_with('/')) {  // its rule: absolute or ignored
    return folder + "/fovea";
  }
  std::string home = variable("HOME");
  if (home.empty()) {
    std::array<char, 16384> buffer;
    passwd entry{};
    passwd* found = nullptr;
    if (getpwuid_r(geteuid(), &entry, buffer.data(), buffer.size(), &found) != 0 || found == nullptr) {
      throw Error(FOVEA_INVALID_ARGUMENT, "FOVEA_CACHE_DIR: not set, and this user has no home folder; set it");
    }
    home = entry.pw_dir;
  }
  return home + "/.cache/fovea";
}

std::uint64_t cache_size_from_environment() {
  const char* value = std::getenv("FOVEA_CACHE_MAX_MB");
  if (value == nullptr || *value == '\0') {
    return std::uint64_t{1} << 30;
  }
  std::uint64_t megabytes = 0;
  const char* end = value + std::strlen(value);
  const auto [stop, error] = std::from_chars(value, end, megabytes);
  if (error != std::errc() || stop != end || megabytes > std::uint64_t{1} << 40) {
    throw Error(FOVEA_INVALID_ARGUMENT,
                fmt::format("FOVEA_CACHE_MAX_MB: '{}'; accepted: a number of megabytes", value));
  }
  return megabytes << 20;
}

}  // namespace fovea::cuda::jit
