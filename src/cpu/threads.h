// SPDX-License-Identifier: Apache-2.0
//
// The threads of the CPU backend: one pool, made when a call first has work for more than one thread, kept until the
// process ends. Only one call at a time uses the pool. A call that finds it in use (calls from several threads)
// computes on its own thread instead of waiting. After fork() the child makes a pool of its own. In a process with
// PyTorch its threads do the work (pytorch_threads.h), and the pool makes none.
#pragma once

#include <cstdint>
#include <mutex>
#include <type_traits>

namespace fovea::cpu {

// The least of the cores this process may use and its cgroup's quota, rounded up.
int available_threads();

// Runs work(context, n) for n in [0, threads), in parallel as far as threads can be had; n = 0 is the caller. Not
// every n need run at the same time, or in a thread of its own.
void run_on_threads(int threads, void (*work)(void* context, int thread), void* context);

// Waits for a counter that another thread of the same call is about to raise to `value`.
void wait_for(const std::uint32_t* counter, std::uint32_t value);

// Calls task(thread, number) for every number in [begin, end). Numbers are handed out in order, so a task may wait for
// tasks with smaller numbers: they have been begun by threads that are running. `take(thread, number)` is called as a
// number is handed out, for one number at a time and in order.
template <class Take, class Task>
void for_each_task(int threads, std::int64_t begin, std::int64_t end, Take&& take, Task&& task) {
  struct Shared {
    std::remove_reference_t<Take>& take;
    std::remove_reference_t<Task>& task;
    std::int64_t end;
    std::int64_t next;
    std::mutex mutex;
  } shared{take, task, end, begin, {}};
  run_on_threads(
      end - begin < threads ? static_cast<int>(end - begin) : threads,
      [](void* context, int thread) {
        Shared& s = *static_cast<Shared*>(context);
        for (;;) {
          std::unique_lock<std::mutex> lock(s.mutex);
          if (s.next >= s.end) {
            return;
          }
          const std::int64_t number = s.next++;
          s.take(thread, number);
          lock.unlock();
          s.task(thread, number);
        }
      },
      &shared);
}

template <class Task>
void for_each_task(int threads, std::int64_t count, Task&& task) {
  for_each_task(
      threads, 0, count, [](int, std::int64_t) {}, task);
}

}  // namespace fovea::cpu
