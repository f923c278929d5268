// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/driver.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

namespace fovea::cuda::jit {
namespace {

// cuGetProcAddress_v2, cuLibrary* and cuKernel* came with CUDA 12.0.
constexpr int kLeastDriver = 12000;

// CU_GET_PROC_ADDRESS_LEGACY_STREAM: stream 0 is the default stream of the whole context, as in PyTorch.
constexpr unsigned long long kLegacyStream = 1;

[[noreturn]] void unsupported(const std::string& message) { throw Error(FOVEA_UNSUPPORTED, message); }

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

struct Opened {
  std::optional<Driver> driver;
  std::string why_not;
};

// In a child of a process that used CUDA no call of the driver works, and some hang.
std::atomic<bool> used{false};
std::atomic<bool> forked{false};

const Opened& opened() {
  static const Opened result = [] {
    Opened attempt;
    try {
      attempt.driver = open_driver("libcuda.so.1");
      used.store(true);
      pthread_atfork(nullptr, nullptr, [] { forked.store(used.load()); });
    } catch (const Error& error) {
      attempt.why_not = error.what();
    }
    return attempt;
  }();
  return result;
}

// A static table that grows: one entry a device, each filled once.
template <class Value>
class PerDevice {
 public:
  template <class Make>
  const Value& get(int ordinal, Make make) {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (static_cast<int>(values_.size()) <= ordinal) {
      values_.emplace_back();
    }
    std::optional<Value>& value = values_[ordinal];
    if (!value) {
      value = make();
    }
    return *value;
  }

 private:
  std::mutex mutex_;
  std::deque<std::optional<Value>> values_;  // whose elements stay where they are
};

cu::Context primary_context(const Driver& driver, int ordinal) {
  const auto retain = [&] {
    cu::Device handle = 0;
    check(driver, driver.device_get(&handle, ordinal), "cuDeviceGet");
    cu::Context context = nullptr;
    check(driver, driver.primary_context_retain(&context, handle), "cuDevicePrimaryCtxRetain");
    return context;
  };
  std::string why_not;
  if (&driver != find_driver(why_not)) {
    return retain();  // a test's
  }
  static PerDevice<cu::Context> retained;
  return retained.get(ordinal, retain);
}

// cuda.h's CU_STREAM_LEGACY and CU_STREAM_PER_THREAD are 1 and 2: no streams of a particular context.
bool has_context_of_its_own(cu::Stream stream) { return reinterpret_cast<std::uintptr_t>(stream) > 2; }

// A launch in the driver's words; holds the attributes that the configuration points to.
struct Configured {
  explicit Configured(const Launch& launch) {
    config = {launch.grid.x,  launch.grid.y,         launch.grid.z, launch.block.x,    launch.block.y,
              launch.block.z, launch.dynamic_shared, launch.stream, attributes.data(), 0};
    if (launch.cluster.x * launch.cluster.y * launch.cluster.z > 1) {
      add(cu::LaunchAttributeId::kClusterDimension).cluster = {launch.cluster.x, launch.cluster.y, launch.cluster.z};
    }
    if (launch.cooperative) {
      add(cu::LaunchAttributeId::kCooperative).cooperative = 1;
    }
    if (launch.programmatic) {
      add(cu::LaunchAttributeId::kProgrammaticStreamSerialization).programmatic = 1;
    }
  }
  Configured(const Configured&) = delete;
  Configured& operator=(const Configured&) = delete;

  cu::LaunchAttributeValue& add(cu::LaunchAttributeId id) {
    cu::LaunchAttribute& attribute = attributes[config.attribute_count++];
    attribute.id = id;
    return attribute.value;
  }

  std::array<cu::LaunchAttribute, 3> attributes{};
  cu::LaunchConfig config;
};

// The driver takes a CUkernel where a CUfunction is asked for, and finds the current context's function itself.
cu::Function as_function(cu::Kernel kernel) { return reinterpret_cast<cu::Function>(kernel); }

std::string why_none_is_seen() {
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return visible == nullptr
             ? "sees none"
             : fmt::format(
                   "CUDA_VISIBLE_DEVICES, '{}', leaves none; accepted there: numbers or UUIDs of GPUs as "
                   "nvidia-smi -L lists them, or not set",
                   visible);
}

}  // namespace

// ---- the driver ----

Driver make_driver(cu::GetProcAddress get) {
  Driver driver{};
  const auto find = [&](auto& function, const char* name, int version) {
    void* address = nullptr;
    int found = 0;
    if (get(name, &address, version, kLegacyStream, &found) != cu::kSuccess || address == nullptr) {
      unsupported(fmt::format("CUDA: the NVIDIA driver has no {} of CUDA {}; driver of CUDA {} or newer is needed",
                              name, version_text(version), version_text(kLeastDriver)));
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  // The version before everything else: an older driver lacks functions, and its age is the reason.
  find(driver.driver_get_version, "cuDriverGetVersion", 2020);
  if (driver.driver_get_version(&driver.version) != cu::kSuccess || driver.version < kLeastDriver) {
    unsupported(fmt::format("CUDA: the NVIDIA driver is one of CUDA {}; CUDA {} (driver 525) or newer is needed",
                            version_text(driver.version), version_text(kLeastDriver)));
  }
  for_each_function(driver, find);
  const cu::Result result = driver.init(0);
  if (result == cu::kErrorNoDevice) {
    unsupported(fmt::format("CUDA: no GPU: the NVIDIA driver is there but {}", why_none_is_seen()));
  }
  if (result == cu::kErrorNotInitialized) {
    unsupported(
        "CUDA: cuInit: CUDA_ERROR_NOT_INITIALIZED: this process was forked from one that had used CUDA; start it "
        "afresh (Python's multiprocessing: method \"spawn\" or \"forkserver\")");
  }
  try {
    check(driver, result, "cuInit");
  } catch (const Error& error) {
    unsupported(fmt::format("CUDA: {}", error.what()));
  }
  return driver;
}

Driver open_driver(const char* library) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    unsupported(fmt::format("CUDA: no NVIDIA driver: {}", dlerror()));
  }
  const auto get = reinterpret_cast<cu::GetProcAddress>(dlsym(handle, "cuGetProcAddress_v2"));
  if (get == nullptr) {
    unsupported(fmt::format(
        "CUDA: {} has no cuGetProcAddress_v2: the NVIDIA driver is older than CUDA {}; that or newer is needed",
        library, version_text(kLeastDriver)));
  }
  return make_driver(get);  // the library stays open: its functions are kept
}

const Driver* find_driver(std::string& why_not) {
  if (forked.load(std::memory_order_relaxed)) {
    why_not =
        "CUDA: this process was forked from one that had used CUDA; start it afresh (Python's multiprocessing: method "
        "\"spawn\" or \"forkserver\")";
    return nullptr;
  }
  const Opened& result = opened();
  why_not = result.why_not;
  return result.driver ? &*result.driver : nullptr;
}

const Driver& driver() {
  std::string why_not;
  const Driver* found = find_driver(why_not);
  if (found == nullptr) {
    unsupported(why_not);
  }
  return *found;
}

void check(const Driver& driver, cu::Result result, std::string_view function) {
  if (result == cu::kSuccess) {
    return;
  }
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.get_error_name(result, &name) != cu::kSuccess || name == nullptr) {
    name = "unknown error";
  }
  if (driver.get_error_string(result, &text) != cu::kSuccess || text == nullptr) {
    text = "the driver has no text for it";
  }
  throw Error(result == cu::kErrorOutOfMemory ? FOVEA_OUT_OF_MEMORY : FOVEA_DEVICE_ERROR,
              fmt::format("{}: {} {} ({})", function, name, result, text));
}

// ---- devices and contexts ----

int device_count(const Driver& driver) {
  int count = 0;
  check(driver, driver.device_get_count(&count), "cuDeviceGetCount");
  return count;
}

DeviceInfo describe_device(const Driver& driver, int ordinal) {
  const int count = device_count(driver);
  if (ordinal < 0 || ordinal >= count) {
    const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
    throw Error(FOVEA_INVALID_ARGUMENT,
                fmt::format("device: {} was given; 0 to {} are there{}", ordinal, count - 1,
                            visible == nullptr ? "" : fmt::format(", as CUDA_VISIBLE_DEVICES is '{}'", visible)));
  }
  DeviceInfo info;
  info.ordinal = ordinal;
  check(driver, driver.device_get(&info.handle, ordinal), "cuDeviceGet");
  std::array<char, 256> name{};
  check(driver, driver.device_get_name(name.data(), name.size(), info.handle), "cuDeviceGetName");
  info.name = name.data();
  const auto attribute = [&](cu::DeviceAttribute which) {
    int value = 0;
    check(driver, driver.device_get_attribute(&value, which, info.handle), "cuDeviceGetAttribute");
    return value;
  };
  info.major = attribute(cu::DeviceAttribute::kComputeCapabilityMajor);
  info.minor = attribute(cu::DeviceAttribute::kComputeCapabilityMinor);
  info.multiprocessors = attribute(cu::DeviceAttribute::kMultiprocessorCount);
  info.shared_per_block = attribute(cu::DeviceAttribute::kMaxSharedMemoryPerBlockOptin);
  info.shared_per_multiprocessor = attribute(cu::DeviceAttribute::kMaxSharedMemoryPerMultiprocessor);
  info.l2_bytes = attribute(cu::DeviceAttribute::kL2CacheSize);
  info.cooperative = attribute(cu::DeviceAttribute::kCooperativeLaunch) != 0;
  info.clusters = attribute(cu::DeviceAttribute::kClusterLaunch) != 0;
  info.tensor_maps = attribute(cu::DeviceAttribute::kTensorMapAccessSupported) != 0;
  info.reads_host_memory = attribute(cu::DeviceAttribute::kPageableMemoryAccess) != 0;
  return info;
}

const DeviceInfo& device(int ordinal) {
  static PerDevice<DeviceInfo> known;
  const Driver& cuda = driver();
  if (ordinal < 0 || ordinal >= device_count(cuda)) {
    describe_device(cuda, ordinal);  // throws
  }
  return known.get(ordinal, [&] { return describe_device(cuda, ordinal); });
}

ContextScope::ContextScope(const Driver& driver, int device, cu::Stream stream) : driver_(driver) {
  cu::Context current = nullptr;
  check(driver, driver.context_get_current(&current), "cuCtxGetCurrent");
  cu::Context wanted = nullptr;
  if (has_context_of_its_own(stream)) {
    check(driver, driver.stream_get_context(stream, &wanted), "cuStreamGetCtx");
  } else if (current != nullptr) {
    cu::Device of_current = 0;
    cu::Device of_device = 0;
    check(driver, driver.context_get_device(&of_current), "cuCtxGetDevice");
    check(driver, driver.device_get(&of_device, device), "cuDeviceGet");
    wanted = of_current == of_device ? current : nullptr;
  }
  if (wanted == nullptr) {
    wanted = primary_context(driver, device);
  }
  context_ = wanted;
  if (wanted != current) {
    check(driver, driver.context_push(wanted), "cuCtxPushCurrent");
    pushed_ = true;
  }
  if (has_context_of_its_own(stream)) {
    // Memory of one device and a stream of another end in a fault that every later call sees.
    cu::Device of_stream = 0;
    cu::Device of_device = 0;
    const cu::Result result = driver.context_get_device(&of_stream);
    const cu::Result other = driver.device_get(&of_device, device);
    if (result != cu::kSuccess || other != cu::kSuccess || of_stream != of_device) {
      pop();
      check(driver, result, "cuCtxGetDevice");
      check(driver, other, "cuDeviceGet");
      throw Error(FOVEA_INVALID_ARGUMENT,
                  fmt::format("stream: of CUDA device {}; accepted: one of device {}, where the tensors lie", of_stream,
                              device));
    }
  }
}

ContextScope::~ContextScope() { pop(); }

void ContextScope::pop() {
  if (pushed_) {
    cu::Context popped = nullptr;
    driver_.context_pop(&popped);  // fails only where the driver is shutting down
  }
}

Place place_of(const Driver& driver, const void* pointer) {
  cu::MemoryType type = cu::MemoryType::kNone;
  int ordinal = -1;
  unsigned managed = 0;
  std::array attributes = {cu::PointerAttribute::kMemoryType, cu::PointerAttribute::kDeviceOrdinal,
                           cu::PointerAttribute::kIsManaged};
  std::array<void*, 3> values = {&type, &ordinal, &managed};
  check(driver,
        driver.pointer_get_attributes(attributes.size(), attributes.data(), values.data(),
                                      reinterpret_cast<std::uintptr_t>(pointer)),
        "cuPointerGetAttributes");
  if (managed != 0) {
    return {Place::Kind::kManaged, ordinal};
  }
  switch (type) {
    case cu::MemoryType::kDevice:
      return {Place::Kind::kDevice, ordinal};
    case cu::MemoryType::kHost:
      return {Place::Kind::kPinned, ordinal};
    default:
      return {};
  }
}

bool is_capturing(const Driver& driver, cu::Stream stream) {
  cu::CaptureStatus status = cu::CaptureStatus::kNone;
  check(driver, driver.stream_is_capturing(stream, &status), "cuStreamIsCapturing");
  return status != cu::CaptureStatus::kNone;
}

BesideCaptures::BesideCaptures(const Driver& driver) : driver_(driver) {
  check(driver, driver.thread_exchange_capture_mode(&mode_), "cuThreadExchangeStreamCaptureMode");
}

BesideCaptures::~BesideCaptures() { driver_.thread_exchange_capture_mode(&mode_); }  // as it was: that cannot fail

// ---- kernels ----

Library::Library(const Driver& driver, std::string_view cubin) : driver_(driver) {
  check(driver, driver.library_load_data(&handle_, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
        "cuLibraryLoadData");
}

Library::~Library() { driver_.library_unload(handle_); }  // fails only where the driver is shutting down

cu::Kernel Library::kernel(const std::string& symbol) const {
  cu::Kernel kernel = nullptr;
  check(driver_, driver_.library_get_kernel(&kernel, handle_, symbol.c_str()), "cuLibraryGetKernel");
  return kernel;
}

KernelResources resources_of(const Driver& driver, cu::Kernel kernel, const DeviceInfo& device) {
  const auto attribute = [&](cu::FunctionAttribute which) {
    int value = 0;
    check(driver, driver.kernel_get_attribute(&value, which, kernel, device.handle), "cuKernelGetAttribute");
    return value;
  };
  return {attribute(cu::FunctionAttribute::kNumRegs), attribute(cu::FunctionAttribute::kLocalSizeBytes),
          attribute(cu::FunctionAttribute::kSharedSizeBytes), attribute(cu::FunctionAttribute::kMaxThreadsPerBlock)};
}

void prepare_kernel(const Driver& driver, cu::Kernel kernel, const DeviceInfo& device, int dynamic_shared,
                    bool large_clusters) {
  const int fixed = resources_of(driver, kernel, device).shared_bytes;
  if (fixed + dynamic_shared > device.shared_per_block) {
    throw Error(FOVEA_INTERNAL_ERROR, fmt::format("a kernel wants {} bytes of shared memory a block; {} has {}",
                                                  fixed + dynamic_shared, device.name, device.shared_per_block));
  }
  const auto set = [&](cu::FunctionAttribute which, int value) {
    check(driver, driver.kernel_set_attribute(which, value, kernel, device.handle), "cuKernelSetAttribute");
  };
  set(cu::FunctionAttribute::kMaxDynamicSharedSizeBytes, dynamic_shared);
  if (large_clusters) {
    set(cu::FunctionAttribute::kNonPortableClusterSizeAllowed, 1);
  }
}

void load_kernel(const Driver& driver, cu::Kernel kernel) {
  cu::Function loaded = nullptr;
  check(driver, driver.kernel_get_function(&loaded, kernel), "cuKernelGetFunction");
}

void launch(const Driver& driver, cu::Kernel kernel, const Launch& launch, void** parameters) {
  const Configured configured(launch);
  check(driver, driver.launch_kernel(&configured.config, as_function(kernel), parameters, nullptr), "cuLaunchKernelEx");
}

int max_active_clusters(const Driver& driver, cu::Kernel kernel, const Launch& launch) {
  const Configured configured(launch);
  int clusters = 0;
  check(driver, driver.max_active_clusters(&clusters, as_function(kernel), &configured.config),
        "cuOccupancyMaxActiveClusters");
  return clusters;
}

int max_active_blocks(const Driver& driver, cu::Kernel kernel, const Launch& launch) {
  int blocks = 0;
  check(driver,
        driver.max_active_blocks(&blocks, as_function(kernel),
                                 static_cast<int>(launch.block.x * launch.block.y * launch.block.z),
                                 launch.dynamic_shared),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  return blocks;
}

}  // namespace fovea::cuda::jit
