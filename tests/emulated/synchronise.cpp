// SPDX-License-Identifier: Apache-2.0
//
// Threads that wait for threads: barriers of all kinds, and what lanes of a warp do together.
#include <string>

#include "internals.h"

namespace emulated {

bool is_over(const Wait& wait, const Fiber& fiber) {
  switch (wait.kind) {
    case Wait::Kind::kNothing:
    case Wait::Kind::kPause:
      return true;
    case Wait::Kind::kGeneration:
      return *static_cast<const u64*>(wait.what) != wait.value;
    case Wait::Kind::kParity: {
      const u64 phase = static_cast<const Barrier*>(wait.what)->phase;
      if (fiber.wait.kind == Wait::Kind::kParity && phase > fiber.phase + 1) {
        fail("barrier %u ended two phases while thread %u of block %u waited for one of them", wait.place - kFirst,
             fiber.thread, fiber.block->index.x);
      }
      return (phase & 1) != wait.value;
    }
    case Wait::Kind::kGroups:
      return static_cast<const Groups*>(wait.what)->first >= wait.value;
    case Wait::Kind::kCluster: {
      auto* const cluster = const_cast<Cluster*>(static_cast<const Cluster*>(wait.what));
      if (cluster->generation == wait.value && cluster->arrived == cluster->alive()) {  // the others have ended
        cluster->arrived = 0;
        ++cluster->generation;
      }
      return cluster->generation != wait.value;
    }
    case Wait::Kind::kChange:
      return *static_cast<const u32*>(wait.what) != wait.value;
  }
  return true;
}

std::string to_text(const Wait& wait) {
  std::string text = wait.name;
  if (wait.kind == Wait::Kind::kParity) {
    const auto& barrier = *static_cast<const Barrier*>(wait.what);
    text += " " + std::to_string(wait.place - kFirst) + " parity " + std::to_string(wait.value) + " (phase " +
            std::to_string(barrier.phase) + ", " + std::to_string(barrier.pending) + " of " +
            std::to_string(barrier.count) + " arrivals and " + std::to_string(barrier.bytes) + " bytes are missing)";
  } else if (wait.kind == Wait::Kind::kGeneration) {
    text += " " + std::to_string(wait.place);
  }
  return text;
}

// ---- bar.sync, bar.arrive, barrier.cluster ----

namespace {

// Whether the caller was the last.
bool come(NamedBarrier& barrier, u32 id, u32 threads, int bits) {
  if (barrier.arrived == 0) {
    barrier.threads = threads;
    barrier.bits = 0;
  } else if (barrier.threads != threads) {
    fail("bar %u of %u threads while %u are waited for", id, threads, barrier.threads);
  }
  if (threads == 0 || threads % 32 != 0) {
    fail("bar %u of %u threads", id, threads);
  }
  barrier.bits |= bits;
  if (++barrier.arrived < threads) {
    return false;
  }
  barrier.arrived = 0;
  barrier.result = barrier.bits;
  ++barrier.generation;
  return true;
}

NamedBarrier& named_barrier(u32 id) {
  if (id >= 16) {
    fail("bar %u: there are 16", id);
  }
  return machine.now->block->named[id];
}

}  // namespace

void sync(u32 id, u32 threads) {
  NamedBarrier& barrier = named_barrier(id);
  const u64 generation = barrier.generation;
  if (!come(barrier, id, threads, 0)) {
    machine.wait({Wait::Kind::kGeneration, &barrier.generation, generation, id, "bar"});
  }
}

void arrive(u32 id, u32 threads) { come(named_barrier(id), id, threads, 0); }

int sync_or(int mine) {
  NamedBarrier& barrier = named_barrier(0);
  const u64 generation = barrier.generation;
  if (!come(barrier, 0, machine.launch->threads, mine)) {
    machine.wait({Wait::Kind::kGeneration, &barrier.generation, generation, 0, "bar"});
  }
  return barrier.result;  // no later one can have ended without this thread
}

void cluster_sync() {
  // What this thread did before is done when the others go on.
  Groups& arrivals = machine.now->arrivals;
  arrivals.commit();
  machine.wait({Wait::Kind::kGroups, &arrivals, arrivals.under_way.size() - 1, 0, "its arrivals in other blocks"});
  Cluster& cluster = *machine.now->block->cluster;
  const u64 generation = cluster.generation;
  ++cluster.arrived;
  machine.wait({Wait::Kind::kCluster, &cluster, generation, 0, "the cluster's barrier"});
}

// ---- mbarrier ----

namespace {

void settle(Barrier& barrier) {
  if (barrier.pending == 0 && barrier.bytes == 0) {
    ++barrier.phase;
    barrier.pending = barrier.count;
  }
}

Block& own() { return *machine.now->block; }

}  // namespace

Barrier& barrier_at(Block& block, u32 address) {
  const auto found = block.barriers.find(address & 0xffffff);
  if (found == block.barriers.end()) {
    fail("no barrier was made at %u", (address & 0xffffff) - kFirst);
  }
  return found->second;
}

void arrive_at(Block& block, u32 address) {
  Barrier& barrier = barrier_at(block, address);
  if (barrier.pending == 0) {
    fail("barrier %u: more than its %d arrivals in phase %lu", (address & 0xffffff) - kFirst, barrier.count,
         static_cast<unsigned long>(barrier.phase));
  }
  --barrier.pending;
  settle(barrier);
}

void complete_at(Block& block, u32 address, int bytes) {
  Barrier& barrier = barrier_at(block, address);
  barrier.bytes -= bytes;
  settle(barrier);
}

void barrier_init(u32 address, int count) {
  place_in(own(), address, 8, 8);
  if (count < 1) {
    fail("a barrier of %d arrivals", count);
  }
  if (!own().barriers.emplace(address, Barrier{count, count}).second) {
    fail("barrier %u is made a second time", address - kFirst);
  }
}

void barrier_arrive(u32 address) {
  if (address >> 24 != 0) {
    fail("an arrival in the own block at another one's barrier");
  }
  arrive_at(own(), address);
}

// It gets there later.
void barrier_arrive_there(u32 address) {
  Block& there = block_of(address);
  Groups& arrivals = machine.now->arrivals;
  machine.later([&there, &arrivals, address, group = arrivals.add()] {
    if (there.alive == 0) {
      fail("an arrival at a barrier of a block that has ended");
    }
    arrive_at(there, address);
    arrivals.end(group);
  });
}

void barrier_expect(u32 address, int bytes) {
  barrier_at(own(), address).bytes += bytes;
  barrier_arrive(address);
}

void barrier_wait(u32 address, u32 parity) {
  if (address >> 24 != 0) {
    fail("a wait at another block's barrier");
  }
  const Barrier& barrier = barrier_at(own(), address);
  machine.now->phase = barrier.phase;
  machine.wait({Wait::Kind::kParity, &barrier, parity, address, "barrier"});
}

// ---- lanes of a warp ----

void meet(Meeting meeting, Slot mine, const std::function<void(Warp&)>& act) {
  Warp& warp = machine.now->warp();
  if (warp.arrived == 0) {
    warp.meeting = meeting;
  } else if (warp.meeting != meeting) {
    fail("lanes of a warp are apart: one is at meeting %d, others at %d", int(meeting), int(warp.meeting));
  }
  warp.slots[machine.now->thread % 32] = mine;
  if (++warp.arrived == 32) {
    act(warp);
    warp.arrived = 0;
    ++warp.generation;
    return;
  }
  machine.wait({Wait::Kind::kGeneration, &warp.generation, warp.generation, u32(meeting), "other lanes at meeting"});
}

void warp_sync() {
  meet(Meeting::kSync, {}, [](Warp&) {});
}

namespace {

struct Exchange {
  u32 value;
  int from;
};

const Exchange& given(const Slot& slot) { return *static_cast<const Exchange*>(slot.in); }
u32& taken(const Slot& slot) { return *static_cast<u32*>(slot.out); }

}  // namespace

u32 shuffle(u32 value, int from_lane) {
  const Exchange mine{value, from_lane & 31};
  u32 result = 0;
  meet(Meeting::kShuffle, {&mine, &result}, [](Warp& warp) {
    for (const Slot& slot : warp.slots) {
      taken(slot) = given(warp.slots[given(slot).from]).value;
    }
  });
  return result;
}

u32 ballot(bool mine_is) {
  const Exchange mine{mine_is ? 1u : 0u, 0};
  u32 result = 0;
  meet(Meeting::kBallot, {&mine, &result}, [](Warp& warp) {
    u32 bits = 0;
    for (u32 lane = 0; lane < 32; ++lane) {
      bits |= given(warp.slots[lane]).value << lane;
    }
    for (const Slot& slot : warp.slots) {
      taken(slot) = bits;
    }
  });
  return result;
}

u32 any_bits(u32 value) {
  const Exchange mine{value, 0};
  u32 result = 0;
  meet(Meeting::kBits, {&mine, &result}, [](Warp& warp) {
    u32 bits = 0;
    for (const Slot& slot : warp.slots) {
      bits |= given(slot).value;
    }
    for (const Slot& slot : warp.slots) {
      taken(slot) = bits;
    }
  });
  return result;
}

}  // namespace emulated
