// SPDX-License-Identifier: Apache-2.0
//
// Fibers and their schedule. $EMULATED_SEED draws it: seeds that are multiples of 4 run threads in turn; others freeze
// warps and warpgroups for a while, so that the rest gets as far ahead of them as barriers let it. With $EMULATED_APART
// the lanes of a warp run as if they were in no warp, but where they meet: CUDA's rules allow that, GPUs do not do it.
#include "machine.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "internals.h"

namespace emulated {
namespace {

constexpr std::size_t kStack = 256 * 1024;
constexpr std::size_t kGuard = 4096;
constexpr u64 kMostIdlePasses = 300;

u32 seed() {
  const char* text = std::getenv("EMULATED_SEED");
  return text != nullptr ? u32(std::atoi(text)) : 1;
}

void begin_fiber() {
  machine.launch->kernel(machine.launch->parameters);
  machine.end_fiber();
}

// Not unwound: the stack of a fiber has no caller.
[[noreturn]] void end_process() {
  std::fflush(stderr);
  _exit(70);
}

}  // namespace

Machine machine;

Machine::Machine() : random_(seed()) {
  deferred = seed() % 2 != 0;
  freezes_ = seed() % 4 != 0;
  apart_ = std::getenv("EMULATED_APART") != nullptr;
}

void fail(const char* format, ...) {
  std::fprintf(stderr, "emulated: fault: ");
  va_list values;
  va_start(values, format);
  std::vfprintf(stderr, format, values);
  va_end(values);
  if (const Fiber* fiber = machine.now; fiber != nullptr) {
    std::fprintf(stderr, "\n  in thread %u of block %u, rank %u of its cluster", fiber->thread, fiber->block->index.x,
                 fiber->block->rank);
  }
  std::fprintf(stderr, "\n  kernel %s\n", machine.launch != nullptr ? machine.launch->name : "none");
  end_process();
}

int Cluster::alive() const {
  int threads = 0;
  for (const Block& block : blocks) {
    threads += block.alive;
  }
  return threads;
}

Index thread_index() { return {machine.now->thread, 0, 0}; }
Index block_index() { return machine.now->block->index; }
Index grid_size() { return machine.launch->grid; }
Index block_size() { return {machine.launch->threads, 1, 1}; }
u32 cluster_rank() { return machine.now->block->rank; }

u32 blocks_together(u32 threads, u32 shared_bytes) {
  constexpr u32 kShared = 228 * 1024;
  constexpr u32 kThreads = 2048;
  constexpr u32 kMost = 2;  // more would be slow here
  return std::max(1u, std::min({kMost, kShared / (shared_bytes + 1024), kThreads / threads}));
}

// ---- fibers ----

void Machine::start_cluster(u32 number) {
  Cluster& cluster = clusters_.emplace_back();
  cluster.blocks.resize(launch->cluster);
  for (u32 rank = 0; rank < launch->cluster; ++rank) {
    Block& block = cluster.blocks[rank];
    const u32 index = number * launch->cluster + rank;
    block.cluster = &cluster;
    block.index = {index % launch->grid.x, index / launch->grid.x % launch->grid.y,
                   index / launch->grid.x / launch->grid.y};
    block.rank = rank;
    block.alive = int(launch->threads);
    // NaN: what nobody has written shows.
    block.memory.assign(kFirst + launch->shared_bytes + 15, 0xFF);
    block.filling.assign(block.memory.size() / 4, 0);
    block.leaving.assign(block.memory.size() / 4, 0);
    block.warps.resize((launch->threads + 31) / 32);
    for (u32 thread = 0; thread < launch->threads; ++thread) {
      if (stacks_.empty()) {
        void* memory =
            mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE) != 0) {
          fail("no memory for stacks");
        }
        stacks_.push_back(static_cast<unsigned char*>(memory));
      }
      Fiber& fiber = fibers_.emplace_back();
      fiber.stack = stacks_.back();
      stacks_.pop_back();
      fiber.block = &block;
      fiber.thread = thread;
    }
  }
}

void Machine::resume(Fiber& fiber) {
  fiber.wait = {};
  fiber.idle = false;
  now = &fiber;
  if (_setjmp(scheduler_) == 0) {
    if (fiber.started) {
      _longjmp(fiber.context, 1);
    }
    fiber.started = true;
    ucontext_t own;
    ucontext_t here;
    getcontext(&own);
    own.uc_stack.ss_sp = fiber.stack + kGuard;
    own.uc_stack.ss_size = kStack - kGuard;
    own.uc_link = nullptr;
    makecontext(&own, begin_fiber, 0);
    swapcontext(&here, &own);  // the way back is the setjmp above
  }
  now = nullptr;
}

void Machine::wait(const Wait& wait) {
  const bool over = is_over(wait, *now);
  if (over && wait.kind != Wait::Kind::kPause && !stands_still(wait)) {
    return;
  }
  now->wait = over ? Wait{} : wait;  // what is over stays so, whatever happens until this thread's next turn
  if (_setjmp(now->context) == 0) {
    _longjmp(scheduler_, 1);
  }
}

// Whether a thread lets others run although its wait is over, once in four times: the same for all lanes of a warp.
bool Machine::stands_still(const Wait& wait) {
  if (apart_) {
    return draw(4) == 0;
  }
  const Block& block = *now->block;
  const u64 where = (u64{block.index.z} * 4096 + block.index.y) * 4096 + block.index.x;
  const u64 what = u64{wait.place} * 8 + u64(wait.kind);
  const u64 seed = ((pass_ * 0x9e3779b97f4a7c15 + where) * 0x9e3779b97f4a7c15 + now->thread / 32) * 0x9e3779b97f4a7c15;
  return ((seed + what) ^ seed >> 29) * 0xbf58476d1ce4e5b9 >> 62 == 0;
}

void Machine::end_fiber() {
  now->done = true;
  --now->block->alive;
  if (now->bulk_reads.first + 1 < now->bulk_reads.under_way.size() || now->bulk_reads.under_way.back() != 0) {
    fail("a thread ends while its copies from shared memory are under way");
  }
  _longjmp(scheduler_, 1);
}

void pause() {
  machine.now->idle = true;
  machine.wait({Wait::Kind::kPause, nullptr, 0, 0, "pauses"});
}

void looked(const u32* at, u32 value) {
  Fiber& fiber = *machine.now;
  const bool again = fiber.looked_at == at && fiber.looked == value;
  fiber.looked_at = at;
  fiber.looked = value;
  if (again) {
    fiber.idle = true;
    machine.wait({Wait::Kind::kChange, at, value, 0, "a number in global memory"});
  }
}

// ---- the schedule ----

void Machine::freeze() {
  Cluster& cluster = clusters_[draw(u32(clusters_.size()))];
  Block& block = cluster.blocks[draw(u32(cluster.blocks.size()))];
  const u32 warp = draw(u32(block.warps.size()));
  if (draw(2) == 0) {
    block.warps[warp].frozen_until = pass_ + draw(400);
  } else {
    for (u32 w = warp / 4 * 4; w < std::min(warp / 4 * 4 + 4, u32(block.warps.size())); ++w) {
      block.warps[w].frozen_until = pass_ + draw(600);
    }
  }
}

// Every warp once, its lanes one after another: as on a GPU, lanes that come to the same wait leave it together, and
// nobody else runs before they have come to the next. Whether one of them did something.
bool Machine::step() {
  ++pass_;
  if (freezes_ && draw(10) == 0) {
    freeze();
  }
  bool busy = false;
  const std::size_t count = fibers_.size();
  const std::size_t first = apart_ ? draw(u32(count)) : draw(u32(count / 32)) * 32;
  for (std::size_t i = 0; i < count; ++i) {
    Fiber& fiber = fibers_[(first + i) % count];
    if (fiber.done || fiber.warp().frozen_until > pass_ || !is_over(fiber.wait, fiber)) {
      continue;
    }
    resume(fiber);
    busy = busy || !fiber.idle;
  }
  return busy;
}

void Machine::later(std::function<void()> copy) {
  constexpr u32 kLong = 500;  // passes
  copies_.push_back({std::move(copy), freezes_ && draw(8) == 0 ? pass_ + draw(kLong) : pass_});
}

void Machine::deliver(bool all_wait) {
  for (u32 n = 1 + draw(8); n > 0 && !copies_.empty(); --n) {
    std::swap(copies_[draw(u32(copies_.size()))], copies_.back());
    if (copies_.back().due > pass_ && !all_wait) {
      continue;
    }
    const std::function<void()> arrive = std::move(copies_.back().arrive);
    copies_.pop_back();
    arrive();
  }
}

// Nobody can go on, and no copy is under way.
void Machine::stuck() {
  bool frozen = false;
  for (Fiber& fiber : fibers_) {
    Warp& warp = fiber.warp();
    frozen = frozen || warp.frozen_until > pass_;
    warp.frozen_until = 0;
  }
  if (frozen) {
    return;
  }
  if (++idle_passes_ > kMostIdlePasses) {
    report_deadlock();
  }
  bool some = false;
  for (Fiber& fiber : fibers_) {  // perhaps they only looked twice
    if (!fiber.done && (fiber.wait.kind == Wait::Kind::kChange || fiber.wait.kind == Wait::Kind::kPause)) {
      fiber.wait = {};
      some = true;
    }
  }
  if (!some) {
    report_deadlock();
  }
}

void Machine::report_deadlock() {
  std::map<std::string, int> threads;
  for (const Fiber& fiber : fibers_) {
    if (!fiber.done) {
      ++threads["block " + std::to_string(fiber.block->index.x) + " warpgroup " + std::to_string(fiber.thread / 128) +
                " warp " + std::to_string(fiber.thread / 32 % 4) + ": " + to_text(fiber.wait)];
    }
  }
  std::fprintf(stderr, "emulated: fault: deadlock\n");
  for (const auto& [where, count] : threads) {
    std::fprintf(stderr, "  %2d threads of %s\n", count, where.c_str());
  }
  std::fprintf(stderr, "  kernel %s\n", launch->name);
  end_process();
}

void Machine::run(const Launch& what, u32 resident_clusters) {
  launch = &what;
  const u32 clusters = what.grid.x * what.grid.y * what.grid.z / what.cluster;
  u32 next = 0;
  idle_passes_ = 0;
  while (true) {
    while (!clusters_.empty() && clusters_.front().alive() == 0) {
      // A copy may still arrive: it finds that the block has ended.
      if (!copies_.empty()) {
        break;
      }
      while (!fibers_.empty() && fibers_.front().block->cluster == &clusters_.front()) {
        stacks_.push_back(fibers_.front().stack);
        fibers_.pop_front();
      }
      clusters_.pop_front();
    }
    u32 running = 0;
    for (const Cluster& cluster : clusters_) {
      running += cluster.alive() != 0 ? 1 : 0;
    }
    for (; running < resident_clusters && next < clusters; ++running) {
      start_cluster(next++);
    }
    if (clusters_.empty()) {
      break;
    }
    const bool busy = step();
    if (busy) {
      idle_passes_ = 0;
    }
    if (!copies_.empty() && (!busy || draw(freezes_ ? 12 : 3) == 0)) {
      deliver(!busy);
    } else if (!busy && running > 0 && copies_.empty()) {
      stuck();
    }
  }
  launch = nullptr;
}

}  // namespace emulated
