// SPDX-License-Identifier: Apache-2.0
//
// Plans are kept by everything that they depend on: shapes, strides, types, options, the alignment of addresses and the
// device, packed into a row of numbers. Which fields that are core/fields.h says. A lookup is a hash of half a
// kilobyte.
#include "cuda/executable.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <shared_mutex>
#include <unordered_map>

#include "core/fields.h"
#include "cuda/config/print.h"
#include "cuda/jit/nvrtc.h"

namespace fovea::cuda {
namespace {

class Key {
 public:
  explicit Key(const Call& call, int device) {
    add(device);
    for_each_field(call.problem, [&](const char*, const auto& field, auto role) {
      if constexpr (role() == Role::kPlan) {
        value(field);
      }
    });
    // Of numbers what a plan knows of them.
    value(exponent_scales(call.problem));
    value(call.problem.softcap > 0);
    value(call.dropout.active());
    value(call.dropout.threshold > 0x7c00);
    for_each_view(call, [&](const char*, const View& view, Role role) {
      if (role != Role::kPlan) {
        return;
      }
      bits(reinterpret_cast<std::uintptr_t>(view.data) % 16, 4);
      if (view) {
        const math::Strides& s = view.strides;
        for (const std::int64_t stride : {s.batch1, s.batch2, s.head, s.row, s.col}) {
          add(stride);
        }
      }
    });
    // Before a call (fovea_workspace, fovea_prepare) lengths may lack an address. Then they count as absent where it is
    // planned which rows are cleared, and that plan is not the call's.
    for (const math::Lengths* lengths : {&call.rows.cu_q, &call.rows.cu_k, &call.rows.used_q, &call.rows.used_k}) {
      value(static_cast<bool>(*lengths));
    }
    add(static_cast<std::int64_t>(small_));
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
  void add(std::int64_t number) { numbers_.at(count_++) = number; }

  // Numbers of a few bits share a word.
  void bits(std::uint64_t value, int count) {
    constexpr int kWord = 64;
    if (used_ + count > kWord) {
      add(static_cast<std::int64_t>(small_));
      small_ = 0;
      used_ = 0;
    }
    small_ = small_ << count | value;
    used_ += count;
  }
  void value(std::int64_t number) { add(number); }
  void value(bool is) { bits(is ? 1 : 0, 1); }
  template <class E>
  requires std::is_enum_v<E>
  void value(E which) { bits(static_cast<std::uint8_t>(which), 8); }
  void value(const PlaneTraits& traits) {
    const auto& [type, extents] = traits;
    const auto& [batch1, batch2, head, query, key] = extents;
    value(type);
    for (const bool has : {batch1, batch2, head, query, key}) {
      value(has);
    }
  }
  void value(const Results& results) {
    const auto& [out, q, k, v, bias, bias2, sink] = results;
    for (const bool has : {out, q, k, v, bias, bias2, sink}) {
      value(has);
    }
  }

  std::array<std::int64_t, 96> numbers_;
  std::size_t count_ = 0;
  std::uint64_t small_ = 0;
  int used_ = 0;  // bits of it
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

std::shared_ptr<Executable> executable_of(const Call& call) {
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
    throw Error(FOVEA_UNSUPPORTED, fmt::format("{} has compute capability {}.{}; accepted: 8.0 or newer", device.name,
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
