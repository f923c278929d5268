// SPDX-License-Identifier: Apache-2.0
//
// Shared memory and copies to and from it. A copy arrives when the machine delivers it. Until then the words that it
// writes must not be read or written, and the words that it reads must not be written: whoever does is a fault,
// whether or not the result would be right this time.
#include <array>
#include <memory>

#include "internals.h"
#include "tensor_map.h"

namespace emulated {
namespace {

Block& own() { return *machine.now->block; }

void mark(std::vector<u16>& words, u32 address, u32 bytes, int by) {
  for (u32 word = (address & 0xffffff) / 4; word < ((address & 0xffffff) + bytes + 3) / 4; ++word) {
    words[word] = u16(words[word] + by);
  }
}

bool is_marked(const std::vector<u16>& words, u32 address, u32 bytes) {
  for (u32 word = address / 4; word < (address + bytes + 3) / 4; ++word) {
    if (words[word] != 0) {
      return true;
    }
  }
  return false;
}

void check_may_write(const Block& block, u32 address, u32 bytes, const char* what) {
  const u32 offset = address & 0xffffff;
  if (is_marked(block.filling, offset, bytes)) {
    fail("%s writes shared memory at %u, which a copy is filling", what, offset - kFirst);
  }
  if (is_marked(block.leaving, offset, bytes)) {
    fail("%s writes shared memory at %u, which a copy is reading", what, offset - kFirst);
  }
}

}  // namespace

Block& block_of(u32 address) {
  const u32 rank = address >> 24;
  if (rank == 0) {
    return own();
  }
  Cluster& cluster = *own().cluster;
  if (rank > cluster.blocks.size()) {
    fail("an address of block %u of a cluster of %zu", rank - 1, cluster.blocks.size());
  }
  Block& block = cluster.blocks[rank - 1];
  if (block.alive == 0) {
    fail("an access to shared memory of a block that has ended, rank %u", rank - 1);
  }
  return block;
}

unsigned char* place_in(Block& block, u32 address, u32 bytes, u32 alignment) {
  const u32 offset = address & 0xffffff;
  if (offset < kFirst || offset + bytes > block.memory.size()) {
    fail("%u bytes at %d lie outside of the %zu bytes of shared memory", bytes, int(offset) - int(kFirst),
         block.memory.size() - kFirst);
  }
  if (offset % alignment != 0) {
    fail("shared memory at %u is not aligned to %u bytes", offset - kFirst, alignment);
  }
  return block.memory.data() + offset;
}

void check_not_filled(const Block& block, u32 address, u32 bytes, const char* what) {
  if (is_marked(block.filling, address & 0xffffff, bytes)) {
    fail("%s reads shared memory at %u, which a copy is filling", what, (address & 0xffffff) - kFirst);
  }
}

unsigned char* shared_memory() { return own().memory.data() + kFirst; }

u32 shared_address(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) - own().memory.data();
  if (offset < 0 || offset > std::ptrdiff_t(own().memory.size())) {
    fail("%p is no shared memory", pointer);
  }
  return u32(offset);
}

void read_shared(u32 address, void* to, u32 bytes) {
  Block& block = block_of(address);
  const unsigned char* from = place_in(block, address, bytes, bytes);
  check_not_filled(block, address, bytes, "a thread");
  std::memcpy(to, from, bytes);
}

void write_shared(u32 address, const void* from, u32 bytes) {
  Block& block = block_of(address);
  unsigned char* to = place_in(block, address, bytes, bytes);
  check_may_write(block, address, bytes, "a thread");
  std::memcpy(to, from, bytes);
}

// ---- into shared memory, counted at a barrier ----

namespace {

// copy() writes `bytes` at `to`, whose barrier is in the same block.
void fill_later(Block& block, u32 to, u32 bytes, u32 barrier, std::function<void(unsigned char*)> copy) {
  unsigned char* place = place_in(block, to, bytes, 16);
  barrier_at(block, barrier);
  check_may_write(block, to, bytes, "a copy");
  mark(block.filling, to, bytes, 1);
  machine.later([&block, to, bytes, barrier, place, copy = std::move(copy)] {
    if (block.alive == 0) {
      fail("a copy arrives in a block that has ended");
    }
    copy(place);
    mark(block.filling, to, bytes, -1);
    complete_at(block, barrier, int(bytes));
  });
}

// visit(byte in the box, byte in memory or null) for each element of a box.
template <class Visit>
void for_each_element(const TensorMap& map, const Place& place, Visit visit) {
  u32 at[5] = {};
  for (u32 offset = 0; offset < map.box_bytes(); offset += map.element) {
    unsigned char* memory = map.base;
    for (int n = 0; n < map.rank; ++n) {
      const std::int64_t index = std::int64_t{place.of[n]} + at[n];
      if (index < 0 || u64(index) >= map.dims[n]) {
        memory = nullptr;
        break;
      }
      memory += index * std::int64_t(n == 0 ? map.element : map.strides[n - 1]);
    }
    visit(offset, memory);
    for (int n = 0; n < map.rank && ++at[n] == map.box[n]; ++n) {
      at[n] = 0;
    }
  }
}

// Chunks of 16 bytes are exchanged by the bits of the address above them.
u32 swizzled(const TensorMap& map, u32 address) { return address ^ ((address >> 7 & ((1u << map.swizzle) - 1)) << 4); }

}  // namespace

namespace {

void load_tensor(Block& block, u32 to, const void* map, u32 barrier, const Place& place) {
  const TensorMap& tensor = tensor_map(map);
  if (to % 128 != 0) {
    fail("a tensor is copied to %u, no multiple of 128", to - kFirst);
  }
  fill_later(block, to, tensor.box_bytes(), barrier, [&tensor, to, place](unsigned char* begin) {
    for_each_element(tensor, place, [&](u32 offset, const unsigned char* from) {
      unsigned char* element = begin + (swizzled(tensor, to + offset) - to);
      if (from == nullptr) {
        std::memset(element, 0, tensor.element);
      } else {
        std::memcpy(element, from, tensor.element);
      }
    });
  });
}

}  // namespace

void tensor_load(u32 to, const void* map, u32 barrier, const Place& place) {
  load_tensor(own(), to, map, barrier, place);
}

void store_there_counted(u32 to, const float (&x)[4], u32 barrier) {
  fill_later(block_of(to), to, sizeof(x), barrier, [content = std::to_array(x)](unsigned char* place) {
    std::memcpy(place, content.data(), sizeof(content));
  });
}

namespace {

void check_bulk(const void* memory, u32 address, int bytes) {
  if (bytes <= 0 || bytes % 16 != 0 || address % 16 != 0 || reinterpret_cast<std::uintptr_t>(memory) % 16 != 0) {
    fail("a bulk copy of %d bytes, shared memory at %u, global at %p", bytes, (address & 0xffffff) - kFirst, memory);
  }
}

}  // namespace

void bulk_load(u32 to, const void* from, int bytes, u32 barrier) {
  check_bulk(from, to, bytes);
  fill_later(own(), to, u32(bytes), barrier,
             [from, bytes](unsigned char* place) { std::memcpy(place, from, std::size_t(bytes)); });
}

void bulk_copy_there(u32 to, u32 from, int bytes, u32 barrier) {
  check_bulk(nullptr, to | from, bytes);
  Block& source = own();
  const unsigned char* begin = place_in(source, from, u32(bytes), 16);
  check_not_filled(source, from, u32(bytes), "a copy");
  mark(source.leaving, from, u32(bytes), 1);
  fill_later(block_of(to), to, u32(bytes), barrier, [&source, from, begin, bytes](unsigned char* place) {
    std::memcpy(place, begin, std::size_t(bytes));
    mark(source.leaving, from, u32(bytes), -1);
  });
}

// ---- out of shared memory, in groups: what is read, and what is written ----

void Groups::end(std::size_t group) {
  --under_way[group];
  advance();
}

void Groups::commit() {
  under_way.push_back(0);
  advance();
}

void Groups::advance() {
  while (first + 1 < under_way.size() && under_way[first] == 0) {
    ++first;
  }
}

namespace {

void leave_later(u32 from, u32 bytes, std::function<void(const unsigned char*)> write) {
  Fiber& fiber = *machine.now;
  Block& block = own();
  place_in(block, from, bytes, 16);
  check_not_filled(block, from, bytes, "a copy");
  mark(block.leaving, from, bytes, 1);
  const std::size_t read = fiber.bulk_reads.add();
  const std::size_t written = fiber.bulk_writes.add();
  machine.later([&fiber, &block, from, bytes, read, written, write = std::move(write)] {
    const auto content =
        std::make_shared<std::vector<unsigned char>>(block.memory.begin() + from, block.memory.begin() + from + bytes);
    mark(block.leaving, from, bytes, -1);
    fiber.bulk_reads.end(read);
    machine.later([&fiber, written, write, content] {
      write(content->data());
      fiber.bulk_writes.end(written);
    });
  });
}

}  // namespace

void tensor_store(const void* map, u32 from, const Place& place) {
  const TensorMap& tensor = tensor_map(map);
  if (from % 128 != 0) {
    fail("a tensor is copied from %u, no multiple of 128", from - kFirst);
  }
  leave_later(from, tensor.box_bytes(), [&tensor, from, place](const unsigned char* begin) {
    for_each_element(tensor, place, [&](u32 offset, unsigned char* to) {
      if (to != nullptr) {
        std::memcpy(to, begin + (swizzled(tensor, from + offset) - from), tensor.element);
      }
    });
  });
}

void bulk_store(void* to, u32 from, int bytes, bool adds) {
  check_bulk(to, from, bytes);
  leave_later(from, u32(bytes), [to, bytes, adds](const unsigned char* content) {
    if (!adds) {
      std::memcpy(to, content, std::size_t(bytes));
      return;
    }
    for (int n = 0; n < bytes / 4; ++n) {
      float term;
      std::memcpy(&term, content + 4 * n, 4);
      static_cast<float*>(to)[n] += term;
    }
  });
}

void bulk_commit() {
  machine.now->bulk_reads.commit();
  machine.now->bulk_writes.commit();
}

void bulk_wait(int pending, bool only_read) {
  const Groups& groups = only_read ? machine.now->bulk_reads : machine.now->bulk_writes;
  const std::size_t committed = groups.under_way.size() - 1;
  const std::size_t old = committed > std::size_t(pending) ? committed - std::size_t(pending) : 0;
  machine.wait({Wait::Kind::kGroups, &groups, old, 0, "its copies from shared memory"});
}

// ---- cp.async ----

void thread_copy(u32 to, const void* from, u32 bytes, u32 size) {
  Fiber& fiber = *machine.now;
  Block& block = own();
  unsigned char* place = place_in(block, to, size, size);
  if (bytes != 0 && reinterpret_cast<std::uintptr_t>(from) % size != 0) {
    fail("cp.async of %u bytes from %p", size, from);
  }
  check_may_write(block, to, size, "cp.async");
  mark(block.filling, to, size, 1);
  ThreadCopies& copies = fiber.copies;
  const u64 number = copies.next++;
  const std::size_t group = copies.groups.add();
  copies.under_way.insert(number);
  machine.later([&fiber, &block, place, to, from, bytes, size, number, group] {
    std::memset(place, 0, size);
    std::memcpy(place, from, bytes);
    mark(block.filling, to, size, -1);
    ThreadCopies& copies = fiber.copies;
    copies.under_way.erase(number);
    copies.groups.end(group);
    while (!copies.arrivals.empty() &&
           (copies.under_way.empty() || *copies.under_way.begin() >= copies.arrivals.front().first)) {
      arrive_at(block, copies.arrivals.front().second);
      copies.arrivals.erase(copies.arrivals.begin());
    }
  });
}

void thread_copy_commit() { machine.now->copies.groups.commit(); }

void thread_copy_wait(int pending) {
  const Groups& groups = machine.now->copies.groups;
  const std::size_t committed = groups.under_way.size() - 1;
  const std::size_t old = committed > std::size_t(pending) ? committed - std::size_t(pending) : 0;
  machine.wait({Wait::Kind::kGroups, &groups, old, 0, "its cp.async"});
}

void thread_copy_arrive(u32 barrier) {
  ThreadCopies& copies = machine.now->copies;
  if (copies.under_way.empty()) {
    arrive_at(own(), barrier);
  } else {
    copies.arrivals.emplace_back(copies.next, barrier);
  }
}

}  // namespace emulated
