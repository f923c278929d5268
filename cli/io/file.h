// SPDX-License-Identifier: Apache-2.0
//
// Files with errors that tell one trouble from another: not there, a folder, not to be opened, shorter than it says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

namespace fovea::cli {

class InputFile {
 public:
  explicit InputFile(const std::filesystem::path& path);

  const std::string& name() const { return name_; }
  std::uint64_t size() const { return size_; }
  // The next `count` bytes; `what` says in the error what they were to be.
  void read(void* data, std::uint64_t count, const char* what);
  // The next byte, which stays the next.
  int peek() { return file_.peek(); }
  void seek(std::uint64_t offset) { file_.seekg(static_cast<std::streamoff>(offset)); }
  // Throws what read() throws, before any memory is taken, if fewer bytes than this lie at `offset`.
  void require(std::uint64_t offset, std::uint64_t count, const char* what) const;
  // A file that is what its name says, but broken; or that is not even that.
  [[noreturn]] void refuse(const std::string& why) const;

 private:
  std::string name_;
  std::uint64_t size_ = 0;
  std::ifstream file_;
};

// Throws if something is there and may not be replaced, or if it could not be written anyway.
void require_writable(const std::filesystem::path& path, bool may_replace);

// Writes beside the path and renames: there is never half a file.
void write_file(const std::filesystem::path& path, const std::function<void(std::ostream&)>& write);

}  // namespace fovea::cli
