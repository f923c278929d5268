// SPDX-License-Identifier: Apache-2.0
//
// Compiled kernels on disk: a folder of files that any number of processes read and write at once.
//
// An entry's name says what it was made from:
//
//     <SHA-256 of text, kernel, options and architecture>-<NVRTC version>.kernel
//
// and its content says it again, in full, followed by the machine code and a checksum of everything. Reading verifies
// all of it; what is damaged, cut short or somebody else's is removed and counts as absent. Writing goes to a name that
// is unique to process and thread, then renames: a reader sees a whole entry or none. No locks: two processes that
// compile the same kernel at the same time write the same thing.
//
// The entries are code that will run. So the folder must belong to this user (or to root, where it is only read), and
// no other user may be able to write into it; it is made with mode 0700. The folder that was installed with the library
// is trusted as the library is: nobody looks at its owner.
//
// The folder's size is bounded: after a write the entries that were not used for longest go (a read touches an entry).
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cuda/jit/nvrtc.h"

namespace fovea::cuda::jit {

class Cache {
 public:
  enum class Access { kReadWrite, kReadOnly, kInstalled };

  // Makes the folder if it is missing and writable. Throws Error(FOVEA_INVALID_ARGUMENT), naming `variable` as what to
  // change, where it cannot be made or is not safe.
  Cache(std::string folder, Access access, std::uint64_t max_bytes, std::string variable);

  const std::string& folder() const { return folder_; }

  // The entry of exactly this key, or nothing.
  std::optional<Binary> load(std::string_view key, Version nvrtc) const;

  // The entry that the newest NVRTC made, of major version `most` at the latest (0: any).
  std::optional<Binary> load_any(std::string_view key, int most_major) const;

  // Throws Error(FOVEA_INVALID_ARGUMENT) before anything is compiled that could not be kept: no permission, a disk that
  // is read-only.
  void require_writable() const;

  // Throws Error(FOVEA_INVALID_ARGUMENT) where the disk is full or read-only.
  void store(std::string_view key, Version nvrtc, const Binary& binary) const;

 private:
  std::string path_of(std::string_view key, Version nvrtc) const;
  std::optional<Binary> read(const std::string& path, std::string_view key) const;
  bool owned(const struct stat& info) const;
  void evict(const std::string& but_not) const;
  [[noreturn]] void refuse(const std::string& why) const;

  std::string folder_;
  Access access_;
  std::uint64_t max_bytes_;
  std::string variable_;
};

// libfovea.kernels beside the library, which wheels have; empty where there is none.
std::string installed_folder();

// XDG_CACHE_HOME/fovea, or ~/.cache/fovea; FOVEA_CACHE_DIR, where it is set.
std::string cache_folder_from_environment();

// FOVEA_CACHE_MAX_MB in bytes; 1 GiB if it is not set. Throws Error(FOVEA_INVALID_ARGUMENT) if it is no number.
std::uint64_t cache_size_from_environment();

}  // namespace fovea::cuda::jit
