// SPDX-License-Identifier: Apache-2.0
#include "parallel.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace train_lm {
namespace {

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; ++i) {  // the caller is the first
      workers_.emplace_back([this] { work(); });
    }
  }

  ~Pool() {
    {
      const std::scoped_lock lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& worker : workers_) {
      worker.join();
    }
  }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  void run(std::int64_t count, const std::function<void(std::int64_t)>& body) {
    {
      const std::scoped_lock lock(mutex_);
      body_ = &body;
      count_ = count;
      next_ = 0;
      busy_ = static_cast<int>(workers_.size());
      ++round_;
    }
    work_.notify_all();
    take_turns();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void take_turns() {
    for (std::int64_t i = next_++; i < count_; i = next_++) {
      (*body_)(i);
    }
  }

  void work() {
    std::int64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [&] { return stopping_ || round_ != seen; });
      if (stopping_) {
        return;
      }
      seen = round_;
      lock.unlock();
      take_turns();
      lock.lock();
      if (--busy_ == 0) {
        done_.notify_one();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  const std::function<void(std::int64_t)>* body_ = nullptr;
  std::int64_t count_ = 0;
  std::atomic<std::int64_t> next_ = 0;
  std::int64_t round_ = 0;
  int busy_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

std::unique_ptr<Pool>& pool() {
  static auto instance = std::make_unique<Pool>(1);
  return instance;
}

}  // namespace

void set_threads(int threads) { pool() = std::make_unique<Pool>(threads); }

int threads() { return pool()->threads(); }

void parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& body) { pool()->run(count, body); }

}  // namespace train_lm
