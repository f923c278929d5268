// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer's input as a file, for the command's readers.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "fault.h"

namespace fovea::fuzz {

// Calls read(path). The file is refused as bad input, or read: into no more bytes than it has.
template <class Read>
int read_as_file(const std::uint8_t* data, std::size_t size, Read read) {
  static const int descriptor = memfd_create("input", 0);
  static const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  if (ftruncate(descriptor, 0) != 0 || pwrite(descriptor, data, size, 0) != static_cast<ssize_t>(size)) {
    std::abort();
  }
  try {
    if (read(path) > size) {
      std::fprintf(stderr, "more bytes than the file has\n");
      std::abort();
    }
  } catch (const cli::Fault& fault) {
    if (fault.code() != cli::kBadInput) {
      std::fprintf(stderr, "exit %d: %s\n", fault.code(), fault.what());
      std::abort();
    }
  }
  return 0;
}

}  // namespace fovea::fuzz
