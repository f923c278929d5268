// SPDX-License-Identifier: Apache-2.0
#include "io/file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "fault.h"

namespace fovea::cli {

namespace fs = std::filesystem;

InputFile::InputFile(const fs::path& path) : name_(path.string()) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) {
    refuse("no such file");
  }
  if (status.type() == fs::file_type::directory) {
    refuse("a folder, where a file is expected");
  }
  if (status.type() != fs::file_type::regular) {
    refuse(error ? error.message() : "not a regular file");
  }
  errno = 0;
  file_.open(path, std::ios::binary);
  if (!file_) {
    refuse(fmt::format("cannot be opened: {}", std::strerror(errno)));
  }
  size_ = fs::file_size(path);
}

void InputFile::refuse(const std::string& why) const {
  // `why` may quote the file, which may hold anything.
  std::string text = why;
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  throw Fault(kBadInput, fmt::format("{}: {}", name_, text));
}

void InputFile::require(std::uint64_t offset, std::uint64_t count, const char* what) const {
  if (offset > size_ || count > size_ - offset) {
    refuse(
        fmt::format("truncated: {} is {} bytes at offset {}, but the file ends after {}", what, count, offset, size_));
  }
}

void InputFile::read(void* data, std::uint64_t count, const char* what) {
  require(static_cast<std::uint64_t>(file_.tellg()), count, what);
  file_.read(static_cast<char*>(data), static_cast<std::streamsize>(count));
  if (!file_) {
    refuse(fmt::format("{} could not be read", what));
  }
}

void require_writable(const fs::path& path, bool may_replace) {
  const fs::file_type type = fs::status(path).type();
  if (type == fs::file_type::directory) {
    throw Fault(kBadInput, fmt::format("{}: a folder, where a file is to be written", path.string()));
  }
  if (type != fs::file_type::not_found && !may_replace) {
    throw Fault(kBadInput, fmt::format("{}: exists already; --force overwrites it", path.string()));
  }
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  if (!fs::is_directory(folder)) {
    throw Fault(kBadInput, fmt::format("{}: there is no folder {}", path.string(), folder.string()));
  }
  if (access(folder.c_str(), W_OK) != 0) {
    throw Fault(kFailed, fmt::format("{}: {}: {}", path.string(), folder.string(), std::strerror(errno)));
  }
}

void write_file(const fs::path& path, const std::function<void(std::ostream&)>& write) {
  fs::path beside = path;
  beside += fmt::format(".{}.part", getpid());
  std::ofstream file(beside, std::ios::binary);
  write(file);
  file.close();
  std::error_code error;
  if (file) {
    fs::rename(beside, path, error);
  }
  if (!file || error) {
    std::error_code ignored;
    fs::remove(beside, ignored);
    throw Fault(kFailed, fmt::format("{}: cannot be written{}", path.string(), error ? ": " + error.message() : ""));
  }
}

}  // namespace fovea::cli
