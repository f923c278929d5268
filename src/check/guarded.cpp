// SPDX-License-Identifier: Apache-2.0
#include "check/guarded.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace fovea::check {
namespace {

std::size_t page_size() {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

}  // namespace

Guarded::Guarded(std::size_t bytes) : begin_(nullptr), bytes_((bytes + page_size() - 1) / page_size() * page_size()) {
  void* all = mmap(nullptr, bytes_ + 2 * page_size(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) {
    throw std::bad_alloc();
  }
  begin_ = static_cast<unsigned char*>(all) + page_size();
  if (mprotect(begin_, bytes_, PROT_READ | PROT_WRITE) != 0) {
    throw std::bad_alloc();
  }
}

Guarded::~Guarded() { munmap(begin_ - page_size(), bytes_ + 2 * page_size()); }

}  // namespace fovea::check
