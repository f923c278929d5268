// SPDX-License-Identifier: Apache-2.0
//
// The parts of the GPU that is played: blocks, warps, fibers, barriers, and copies that are under way.
#pragma once

#include <csetjmp>
#include <deque>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "machine.h"

namespace emulated {

// A barrier in shared memory: a phase ends when no arrival and no byte is pending.
struct Barrier {
  int count = 0;
  int pending = 0;
  long bytes = 0;
  u64 phase = 0;
};

// bar.sync and bar.arrive.
struct NamedBarrier {
  u32 threads = 0;
  u32 arrived = 0;
  u64 generation = 0;
  int bits = 0;  // of sync_or(): of those that have come, and of the last generation
  int result = 0;
};

// Copies in groups, of one thread.
struct Groups {
  std::vector<int> under_way{0};  // in each group; the last is open
  std::size_t first = 0;          // all before it have ended
  std::size_t add() {
    ++under_way.back();
    return under_way.size() - 1;
  }
  void end(std::size_t group);
  void commit();
  void advance();
};

// cp.async of one thread, by number, and arrivals that wait for those before them.
struct ThreadCopies {
  Groups groups;
  u64 next = 0;
  std::set<u64> under_way;
  std::vector<std::pair<u64, u32>> arrivals;  // the first number that does not count, the barrier
};

// What a lane brings to a meeting of its warp.
struct Slot {
  const void* in;
  void* out;
};

enum class Meeting : int {
  kNone,
  kSync,
  kShuffle,
  kBallot,
  kBits,
  kLoadMatrices,
  kStoreMatrices,
  kMma,
  kWgmma,
  kWgmmaFence,
  kWgmmaCommit,
  kWgmmaWait
};

struct Product {  // a warp's part of a wgmma
  Wgmma of;
  float* d[32];
  u32 registers[32][4];
  u64 group;
};

struct Warp {
  Meeting meeting = Meeting::kNone;
  int arrived = 0;
  u64 generation = 0;
  Slot slots[32] = {};
  u64 frozen_until = 0;
  std::deque<Product> products;
  u64 groups = 0;  // of products, committed
};

struct Cluster;

struct Block {
  Cluster* cluster = nullptr;
  Index index{};
  u32 rank = 0;
  int alive = 0;  // threads
  std::vector<unsigned char> memory;
  std::vector<u16> filling, leaving;  // of each word: how many copies write it, and read it
  std::unordered_map<u32, Barrier> barriers;
  NamedBarrier named[16];
  std::vector<Warp> warps;
};

struct Cluster {
  std::vector<Block> blocks;
  int arrived = 0;
  u64 generation = 0;
  int alive() const;
};

// What a fiber waits for.
struct Wait {
  enum class Kind : int { kNothing, kGeneration, kParity, kGroups, kCluster, kChange, kPause };
  Kind kind = Kind::kNothing;
  const void* what = nullptr;
  u64 value = 0;
  u32 place = 0;  // the barrier's address or number
  const char* name = "";
};

struct Fiber {
  unsigned char* stack = nullptr;  // its end is where the stack begins
  std::jmp_buf context;
  bool started = false, done = false;
  Block* block = nullptr;
  u32 thread = 0;
  Wait wait;
  u64 phase = 0;  // of the barrier, when the wait began
  bool idle = false;
  const u32* looked_at = nullptr;
  u32 looked = 0;
  ThreadCopies copies;
  Groups bulk_reads, bulk_writes;
  Groups arrivals;  // at barriers of other blocks
  Warp& warp() const { return block->warps[thread / 32]; }
};

struct Launch {
  void (*kernel)(void** parameters);
  void** parameters;
  const char* name;
  Index grid;
  u32 threads;
  u32 shared_bytes;
  u32 cluster;
};

class Machine {
 public:
  Machine();
  void run(const Launch& launch, u32 resident_clusters);

  Fiber* now = nullptr;
  const Launch* launch = nullptr;
  // A copy, which arrives some time.
  void later(std::function<void()> copy);
  bool deferred = false;  // products are done when they are waited for
  u32 draw(u32 below) { return u32(random_() % below); }
  // Returns at once, or later, once the wait is over.
  void wait(const Wait& wait);
  [[noreturn]] void end_fiber();

 private:
  std::mt19937 random_;
  bool freezes_ = false;
  bool apart_ = false;
  std::jmp_buf scheduler_;
  std::vector<unsigned char*> stacks_;
  std::deque<Fiber> fibers_;
  std::deque<Cluster> clusters_;
  struct Copy {
    std::function<void()> arrive;
    u64 due;  // the pass before which it does not, but where nobody can go on without it
  };
  std::vector<Copy> copies_;
  u64 pass_ = 0;
  u64 idle_passes_ = 0;

  void start_cluster(u32 number);
  void resume(Fiber& fiber);
  bool stands_still(const Wait& wait);
  void freeze();
  bool step();
  void deliver(bool all_wait);
  void stuck();
  [[noreturn]] void report_deadlock();
};

extern Machine machine;

// How many blocks fit on a multiprocessor.
u32 blocks_together(u32 threads, u32 shared_bytes);

// ---- for the parts of the machine ----

bool is_over(const Wait& wait, const Fiber& fiber);
std::string to_text(const Wait& wait);

Block& block_of(u32 address);
// Checked: inside of the block's memory, a multiple of `alignment`.
unsigned char* place_in(Block& block, u32 address, u32 bytes, u32 alignment);
void check_not_filled(const Block& block, u32 address, u32 bytes, const char* what);
Barrier& barrier_at(Block& block, u32 address);
void arrive_at(Block& block, u32 address);
void complete_at(Block& block, u32 address, int bytes);

// All 32 lanes: the last one to come calls act().
void meet(Meeting meeting, Slot mine, const std::function<void(Warp&)>& act);

}  // namespace emulated
