// SPDX-License-Identifier: Apache-2.0
//
// What lies in a folder. Reading on may fail (a network's file system that is gone), and the iterator of a range-based
// `for` throws then; a folder that cannot be read to its end is taken for what was read of it.
#pragma once

#include <filesystem>
#include <system_error>

namespace fovea::cuda::jit {

// visit(path) for each entry, in no order.
template <class Visit>
void for_each_entry(const std::filesystem::path& folder, Visit visit) {
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  while (!error && entry != std::filesystem::directory_iterator()) {
    visit(entry->path());
    entry.increment(error);
  }
}

}  // namespace fovea::cuda::jit
