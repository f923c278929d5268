// SPDX-License-Identifier: Apache-2.0
//
// Plans are kept by everything that they depend on: shapes, strides, types, options, the alignment of addresses and the
// device, packed into a row of numbers. A lookup is a hash of about a kilobyte.
#include "cuda/executable.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <shared_mutex>
#include <unordered_map>

#include "cuda/config/print.h"
#include "cuda/jit/nvrtc.h"

namespace fovea::cuda {
namespace {

class Key {
 public:
  explicit Key(const Call& call, int device) {
    const Problem& p = call.problem;
    const math::Rows& rows = call.rows;
    add(device);
    add(exponent_scales(p) ? 1 : 0);
    add(static_cast<std::int64_t>(p.direction) | static_cast<std::int64_t>(p.type) << 8 | std::int64_t{p.packed} << 16 |
        std::int64_t{p.has_used_q} << 17 | std::int64_t{p.has_used_k} << 18 | std::int64_t{p.causal} << 19 |
        std::int64_t{p.top_left} << 20 | std::int64_t{p.softcap > 0} << 21 | std::int64_t{p.sink} << 22 |
        std::int64_t{call.dropout.active()} << 23 | static_cast<std::int64_t>(p.rng) << 24 |
        std::int64_t{p.deterministic} << 28 | std::int64_t{p.lse} << 29 | std::int64_t{p.grad_lse} << 30 |
        std::int64_t{p.need.q} << 31 | std::int64_t{p.need.k} << 32 | std::int64_t{p.need.v} << 33 |
        std::int64_t{p.need.bias} << 34 | std::int64_t{p.need.bias2} << 35 | std::int64_t{p.need.sink} << 36 |
        static_cast<std::int64_t>(p.alibi) << 37 | std::int64_t{call.dropout.threshold > 0x7c00} << 40);
    for (const std::int64_t number : {p.batch1, p.batch2, p.heads_q, p.heads_k, p.seqlen_q, p.seqlen_k, p.head_dim,
                                      p.head_dim_v, p.window_left, p.window_right, rows.rows_q, rows.rows_k}) {
      add(number);
    }
    for (const PlaneTraits* traits : {&p.bias, &p.bias2, &p.mask}) {
      const Extents& e = traits->extents;
      add(static_cast<std::int64_t>(traits->type) | std::int64_t{e.batch1} << 8 | std::int64_t{e.batch2} << 9 |
          std::int64_t{e.head} << 10 | std::int64_t{e.query} << 11 | std::int64_t{e.key} << 12);
    }
    std::int64_t alignments = 0;
    for (const View* view : {&call.q, &call.k, &call.v, &call.bias, &call.bias2, &call.mask, &call.out, &call.grad_out,
                             &call.grad_q, &call.grad_k, &call.grad_v, &call.grad_bias, &call.grad_bias2}) {
      alignments = alignments << 4 | static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(view->data) % 16);
      const math::Strides& s = view->strides;
      if (*view) {
        for (const std::int64_t stride : {s.batch1, s.batch2, s.head, s.row, s.col}) {
          add(stride);
        }
      }
    }
    add(alignments);
  }

  std::size_t hash() const {
    std::uint64_t hash = 0xCBF29CE484222325u;
    for (std::size_t i = 0; i < count_; ++i) {
      hash = (hash ^ static_cast<std::uint64_t>(numbers_[i])) * 0xFF51AFD7ED558CCDu;
      hash ^= hash >> 32;
    }
    return hash;
  }

  friend bool operator==(const Key& a, const Key& b) {
    return a.count_ == b.count_ && std::memcmp(a.numbers_.data(), b.numbers_.data(), a.count_ * 8) == 0;
  }

 private:
  void add(std::int64_t number) { numbers_[count_++] = number; }

  std::array<std::int64_t, 96> numbers_;
  std::size_t count_ = 0;
};

struct HashOfKey {
  std::size_t operator()(const Key& key) const { return key.hash(); }
};

// Those of this process. Where a program has ever new shapes, the table starts anew now and then; what is in use lives
// on with its user.
class Table {
 public:
  std::shared_ptr<Executable> find(const Key& key) {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    const auto found = plans_.find(key);
    return found == plans_.end() ? nullptr : found->second;
  }

  std::shared_ptr<Executable> add(const Key& key, std::shared_ptr<Executable> made) {
    constexpr std::size_t kMost = 1 << 14;
    const std::unique_lock<std::shared_mutex> lock(mutex_);
    if (plans_.size() >= kMost) {
      plans_.clear();
    }
    return plans_.emplace(key, std::move(made)).first->second;
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<Key, std::shared_ptr<Executable>, HashOfKey> plans_;
};

Table& table() {
  // Never destroyed: when a process ends, the driver may have gone first.
  static Table* const table = new Table;
  return *table;
}

}  // namespace

jit::Request request_of(const Kernel& kernel, const Target& target) {
  jit::Request request;
  request.file = kernel.file;
  request.kernel = std::string("fovea::cuda::") + kernel.name;
  request.argument = print(kernel.spec);
  request.architecture = target.architecture(kernel.one_architecture);
  return request;
}

bool Executable::loaded(jit::cu::Context context) {
  if (last_.load(std::memory_order_acquire) == context) {
    return true;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(contexts_.begin(), contexts_.end(), context) == contexts_.end()) {
    return false;
  }
  last_.store(context, std::memory_order_release);
  return true;
}

void Executable::load(const jit::ContextScope& scope) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(contexts_.begin(), contexts_.end(), scope.context()) != contexts_.end()) {
    return;
  }
  const jit::Driver& driver = jit::driver();
  const jit::BesideCaptures beside(driver);
  if (!compiled()) {
    std::vector<jit::Request> requests;
    for (const Launch& launch : plan_.launches) {
      requests.push_back(request_of(launch.kernel, plan_.target));
    }
    jit::Jit& jit = jit::Jit::global();
    jit.gather(requests);
    std::vector<jit::cu::Kernel> kernels;
    for (std::size_t n = 0; n < requests.size(); ++n) {
      kernels.push_back(jit.kernel(requests[n]));
      jit::prepare_kernel(driver, kernels.back(), device_, plan_.launches[n].kernel.shared_bytes);
    }
    kernels_ = std::move(kernels);
  }
  for (const jit::cu::Kernel kernel : kernels_) {
    jit::load_kernel(driver, kernel);
  }
  contexts_.push_back(scope.context());
  last_.store(scope.context(), std::memory_order_release);
}

std::shared_ptr<Executable> plan(const Call& call) {
  require_type(call.problem);  // before what this machine has: true of every one
  // Before any lock: where this process was forked, a thread that is not here may have held it.
  std::string why_not;
  if (jit::find_driver(why_not) == nullptr) {
    throw Error(FOVEA_UNSUPPORTED, why_not);
  }
  const int ordinal = call.device_index;
  const Key key(call, ordinal);
  if (std::shared_ptr<Executable> found = table().find(key)) {
    return found;
  }
  const jit::DeviceInfo& device = jit::device(ordinal);
  constexpr int kLeast = 80;
  if (device.capability() < kLeast) {
    throw Error(FOVEA_UNSUPPORTED, fmt::format("{} has compute capability {}.{}; served: 8.0 or newer", device.name,
                                               device.major, device.minor));
  }
  return table().add(key, std::make_shared<Executable>(plan_for(call, target_of(device)), device));
}

const Plan& plan_of(const Executable& executable) { return executable.plan(); }

void prepare_kernels(const Call& call, Executable& executable) {
  executable.load(
      jit::ContextScope(jit::driver(), executable.device().ordinal, static_cast<jit::cu::Stream>(call.stream)));
}

void require_kernels(const Executable& executable) {
  if (executable.compiled()) {
    return;
  }
  for (const Launch& launch : executable.plan().launches) {
    jit::Jit::global().require(request_of(launch.kernel, executable.plan().target));
  }
}

std::string unavailable() {
  std::string why_not;
  if (jit::find_driver(why_not) == nullptr) {
    return why_not;
  }
  try {
    const jit::Settings& settings = jit::Jit::global().settings();
    if (settings.mode == jit::Mode::kJit) {
      jit::NvrtcSearch search = settings.nvrtc;
      search.driver_major = jit::driver().major();
      jit::find_nvrtc(search);
    }
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace fovea::cuda
