// SPDX-License-Identifier: Apache-2.0
//
// The CUDA driver, loaded when it is first needed, through declarations of our own: every build of the library has its
// CUDA backend, whether or not a toolkit was there, and runs without a driver, too, with an error that says so.
//
//   driver()         the functions, as one struct of pointers: each asked for by name and by the CUDA version whose
//                    interface is meant (an unversioned symbol is the oldest one). Helpers below take the struct as an
//                    argument, so that tests can hand them one of their own.
//   device()         what a GPU is and can do
//   ContextScope     a context for this thread, which may have none: nothing here assumes a current one
//   Library, launch, encode_tensor_map, place_of, is_capturing
//
// tests/cpp/jit_abi_test.cpp compares every declaration with cuda.h where that is installed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "core/status.h"

namespace fovea::cuda::jit {

// ---- declarations: names and numbers as in cuda.h, without its prefixes ----

namespace cu {

using Result = int;
using Device = int;
using DevicePointer = unsigned long long;
using Context = struct ContextObject*;
using Stream = struct StreamObject*;
using Library = struct LibraryObject*;
using Kernel = struct KernelObject*;
using Function = struct FunctionObject*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kErrorOutOfMemory = 2;
inline constexpr Result kErrorNotInitialized = 3;
inline constexpr Result kErrorNoDevice = 100;

enum class DeviceAttribute : int {
  kL2CacheSize = 38,
  kMultiprocessorCount = 16,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSharedMemoryPerMultiprocessor = 81,
  kPageableMemoryAccess = 88,
  kCooperativeLaunch = 95,
  kMaxSharedMemoryPerBlockOptin = 97,
  kClusterLaunch = 120,
  kTensorMapAccessSupported = 127,
};

enum class FunctionAttribute : int {
  kMaxThreadsPerBlock = 0,
  kSharedSizeBytes = 1,
  kLocalSizeBytes = 3,
  kNumRegs = 4,
  kMaxDynamicSharedSizeBytes = 8,
  kNonPortableClusterSizeAllowed = 14,
};

enum class PointerAttribute : int { kMemoryType = 2, kIsManaged = 8, kDeviceOrdinal = 9 };
enum class MemoryType : unsigned { kNone = 0, kHost = 1, kDevice = 2 };
enum class CaptureStatus : int { kNone = 0, kActive = 1, kInvalidated = 2 };
enum class CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

enum class LaunchAttributeId : int { kCooperative = 2, kClusterDimension = 4, kProgrammaticStreamSerialization = 6 };

union LaunchAttributeValue {
  char pad[64];
  int cooperative;
  struct {
    unsigned x, y, z;
  } cluster;
  int programmatic;
};

struct LaunchAttribute {
  LaunchAttributeId id;
  char pad[4];
  LaunchAttributeValue value;
};

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct alignas(128) TensorMap {
  std::uint64_t opaque[16];
};

enum class TensorMapType : int { kUint8 = 0, kUint16 = 1, kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9 };
enum class TensorMapInterleave : int { kNone = 0 };
enum class TensorMapSwizzle : int { kNone = 0, k32 = 1, k64 = 2, k128 = 3 };
enum class TensorMapPromotion : int { kNone = 0, k64 = 1, k128 = 2, k256 = 3 };
enum class TensorMapFill : int { kZero = 0 };

using GetProcAddress = Result (*)(const char* name, void** function, int cuda_version, unsigned long long flags,
                                  int* found);

}  // namespace cu

// ---- the driver ----

struct Driver {
  int version = 0;  // 13000 is CUDA 13.0
  int major() const { return version / 1000; }

  cu::Result (*init)(unsigned flags);
  cu::Result (*driver_get_version)(int* version);
  cu::Result (*get_error_name)(cu::Result error, const char** name);
  cu::Result (*get_error_string)(cu::Result error, const char** text);
  cu::Result (*device_get_count)(int* count);
  cu::Result (*device_get)(cu::Device* device, int ordinal);
  cu::Result (*device_get_name)(char* name, int bytes, cu::Device device);
  cu::Result (*device_get_attribute)(int* value, cu::DeviceAttribute attribute, cu::Device device);
  cu::Result (*primary_context_retain)(cu::Context* context, cu::Device device);
  cu::Result (*context_get_current)(cu::Context* context);
  cu::Result (*context_get_device)(cu::Device* device);
  cu::Result (*context_push)(cu::Context context);
  cu::Result (*context_pop)(cu::Context* context);
  cu::Result (*library_load_data)(cu::Library* library, const void* code, int* jit_options, void** jit_values,
                                  unsigned jit_count, int* options, void** values, unsigned count);
  cu::Result (*library_unload)(cu::Library library);
  cu::Result (*library_get_kernel)(cu::Kernel* kernel, cu::Library library, const char* name);
  cu::Result (*kernel_get_function)(cu::Function* function, cu::Kernel kernel);
  cu::Result (*kernel_get_attribute)(int* value, cu::FunctionAttribute attribute, cu::Kernel kernel, cu::Device device);
  cu::Result (*kernel_set_attribute)(cu::FunctionAttribute attribute, int value, cu::Kernel kernel, cu::Device device);
  cu::Result (*launch_kernel)(const cu::LaunchConfig* config, cu::Function function, void** parameters, void** extra);
  cu::Result (*max_active_blocks)(int* blocks, cu::Function function, int block_size, std::size_t dynamic_shared);
  cu::Result (*max_active_clusters)(int* clusters, cu::Function function, const cu::LaunchConfig* config);
  cu::Result (*tensor_map_encode_tiled)(cu::TensorMap* map, cu::TensorMapType type, unsigned rank, void* address,
                                        const std::uint64_t* dims, const std::uint64_t* strides, const unsigned* box,
                                        const unsigned* element_strides, cu::TensorMapInterleave interleave,
                                        cu::TensorMapSwizzle swizzle, cu::TensorMapPromotion promotion,
                                        cu::TensorMapFill fill);
  cu::Result (*pointer_get_attributes)(unsigned count, cu::PointerAttribute* attributes, void** values,
                                       cu::DevicePointer pointer);
  cu::Result (*stream_is_capturing)(cu::Stream stream, cu::CaptureStatus* status);
  cu::Result (*thread_exchange_capture_mode)(cu::CaptureMode* mode);
  cu::Result (*stream_get_context)(cu::Stream stream, cu::Context* context);
  cu::Result (*stream_synchronize)(cu::Stream stream);
  cu::Result (*copy_to_host)(void* to, cu::DevicePointer from, std::size_t bytes, cu::Stream stream);
  // For src/check alone: the library allocates and fills no memory of a device.
  cu::Result (*copy_to_device)(cu::DevicePointer to, const void* from, std::size_t bytes, cu::Stream stream);
  cu::Result (*allocate)(cu::DevicePointer* memory, std::size_t bytes);
  cu::Result (*free)(cu::DevicePointer memory);
};

// visit(pointer, name, version) for every function: the version is that of the interface declared above.
template <class Visit>
void for_each_function(Driver& driver, Visit visit) {
  visit(driver.init, "cuInit", 2000);
  visit(driver.driver_get_version, "cuDriverGetVersion", 2020);
  visit(driver.get_error_name, "cuGetErrorName", 6000);
  visit(driver.get_error_string, "cuGetErrorString", 6000);
  visit(driver.device_get_count, "cuDeviceGetCount", 2000);
  visit(driver.device_get, "cuDeviceGet", 2000);
  visit(driver.device_get_name, "cuDeviceGetName", 2000);
  visit(driver.device_get_attribute, "cuDeviceGetAttribute", 2000);
  visit(driver.primary_context_retain, "cuDevicePrimaryCtxRetain", 7000);
  visit(driver.context_get_current, "cuCtxGetCurrent", 4000);
  visit(driver.context_get_device, "cuCtxGetDevice", 2000);
  visit(driver.context_push, "cuCtxPushCurrent", 4000);
  visit(driver.context_pop, "cuCtxPopCurrent", 4000);
  visit(driver.library_load_data, "cuLibraryLoadData", 12000);
  visit(driver.library_unload, "cuLibraryUnload", 12000);
  visit(driver.library_get_kernel, "cuLibraryGetKernel", 12000);
  visit(driver.kernel_get_function, "cuKernelGetFunction", 12000);
  visit(driver.kernel_get_attribute, "cuKernelGetAttribute", 12000);
  visit(driver.kernel_set_attribute, "cuKernelSetAttribute", 12000);
  visit(driver.launch_kernel, "cuLaunchKernelEx", 11060);
  visit(driver.max_active_blocks, "cuOccupancyMaxActiveBlocksPerMultiprocessor", 6050);
  visit(driver.max_active_clusters, "cuOccupancyMaxActiveClusters", 11070);
  visit(driver.tensor_map_encode_tiled, "cuTensorMapEncodeTiled", 12000);
  visit(driver.pointer_get_attributes, "cuPointerGetAttributes", 7000);
  visit(driver.stream_is_capturing, "cuStreamIsCapturing", 10000);
  visit(driver.thread_exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", 10010);
  visit(driver.stream_get_context, "cuStreamGetCtx", 9020);
  visit(driver.stream_synchronize, "cuStreamSynchronize", 2000);
  visit(driver.copy_to_host, "cuMemcpyDtoHAsync", 3020);
  visit(driver.copy_to_device, "cuMemcpyHtoDAsync", 3020);
  visit(driver.allocate, "cuMemAlloc", 3020);
  visit(driver.free, "cuMemFree", 3020);
}

// The driver of this machine, initialised. Throws Error(FOVEA_UNSUPPORTED) where there is none, it is too old or sees
// no GPU, and in a process forked after CUDA was initialised. The answer, yes or no, is kept.
const Driver& driver();

// The same without throwing: null, and why.
const Driver* find_driver(std::string& why_not);

// Opens `library` and fills the struct; throws like driver(). `driver()` opens "libcuda.so.1".
Driver open_driver(const char* library);
Driver make_driver(cu::GetProcAddress get);

// Throws unless `result` is success: "cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE (invalid argument)". Out of memory is
// FOVEA_OUT_OF_MEMORY, everything else FOVEA_DEVICE_ERROR.
void check(const Driver& driver, cu::Result result, std::string_view function);

// ---- devices and contexts ----

struct DeviceInfo {
  int ordinal = 0;
  cu::Device handle = 0;
  std::string name;
  int major = 0;
  int minor = 0;
  int multiprocessors = 0;
  int shared_per_block = 0;  // bytes, at most, where a kernel asks for it
  int shared_per_multiprocessor = 0;
  int l2_bytes = 0;
  bool cooperative = false;
  bool clusters = false;
  bool tensor_maps = false;
  bool reads_host_memory = false;  // any of it, as it does its own

  int capability() const { return major * 10 + minor; }
};

int device_count(const Driver& driver);
DeviceInfo describe_device(const Driver& driver, int ordinal);
const DeviceInfo& device(int ordinal);  // of driver(); kept

// The context in which `stream` runs on `device` is current while this lives. A context that is current already and
// belongs to the device stays; otherwise it is the stream's, or, for the default stream, the device's primary context
// (that of the CUDA runtime and so of PyTorch), which is then kept until the process ends. A stream of another device
// is Error(FOVEA_INVALID_ARGUMENT).
class ContextScope {
 public:
  ContextScope(const Driver& driver, int device, cu::Stream stream = nullptr);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  cu::Context context() const { return context_; }

 private:
  const Driver& driver_;
  cu::Context context_ = nullptr;
  bool pushed_ = false;

  void pop();
};

// Where memory is. What CUDA does not know is the host's; what it has pinned there kernels may read.
struct Place {
  enum class Kind { kHost, kPinned, kDevice, kManaged };
  Kind kind = Kind::kHost;
  int device = -1;
};

Place place_of(const Driver& driver, const void* pointer);

// Whether work on the stream goes into a graph: then nothing may be loaded, allocated or waited for.
bool is_capturing(const Driver& driver, cu::Stream stream);

// While this lives, this thread may load code although another stream captures. In the usual mode loading would end
// that capture; nothing of it goes into the graph.
class BesideCaptures {
 public:
  explicit BesideCaptures(const Driver& driver);
  ~BesideCaptures();
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  const Driver& driver_;
  cu::CaptureMode mode_ = cu::CaptureMode::kRelaxed;  // after the exchange: the thread's own
};

// ---- kernels ----

// Compiled code, in every context that needs it. Unloaded with the object; never while a kernel of it may run.
class Library {
 public:
  Library(const Driver& driver, std::string_view cubin);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  cu::Kernel kernel(const std::string& symbol) const;

 private:
  const Driver& driver_;
  cu::Library handle_ = nullptr;
};

struct KernelResources {
  int registers = 0;
  int local_bytes = 0;
  int shared_bytes = 0;  // static
  int max_threads = 0;
};

KernelResources resources_of(const Driver& driver, cu::Kernel kernel, const DeviceInfo& device);

// Once for a kernel and device, before the first launch: dynamic shared memory beyond 48 KiB needs it, and so do
// clusters of more than eight. Refuses what the device does not have.
void prepare_kernel(const Driver& driver, cu::Kernel kernel, const DeviceInfo& device, int dynamic_shared,
                    bool large_clusters = false);

// Loads a kernel's code into the current context, which a stream capture would not allow later.
void load_kernel(const Driver& driver, cu::Kernel kernel);

struct Dim {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

struct Launch {
  Dim grid;
  Dim block;
  Dim cluster;
  unsigned dynamic_shared = 0;
  cu::Stream stream = nullptr;
  bool cooperative = false;   // all blocks at once: needed where one waits for a later one
  bool programmatic = false;  // may begin before the previous kernel of the stream has ended; waits for it itself
};

// In the current context (see ContextScope). `parameters` points to one pointer for each argument of the kernel.
void launch(const Driver& driver, cu::Kernel kernel, const Launch& launch, void** parameters);

// How many clusters (or, without clusters, blocks a multiprocessor) run at once. In the current context.
int max_active_clusters(const Driver& driver, cu::Kernel kernel, const Launch& launch);
int max_active_blocks(const Driver& driver, cu::Kernel kernel, const Launch& launch);

// ---- tensor maps ----

// A tensor as TMA sees it, from the innermost dimension outwards.
struct TensorMapShape {
  cu::TensorMapType type = cu::TensorMapType::kBfloat16;
  int rank = 0;
  std::array<std::uint64_t, 5> dims{};
  std::array<std::uint64_t, 4> strides{};  // bytes, of the dimensions after the innermost
  std::array<unsigned, 5> box{};
  cu::TensorMapSwizzle swizzle = cu::TensorMapSwizzle::kNone;
  cu::TensorMapPromotion promotion = cu::TensorMapPromotion::k256;
};

// Why TMA cannot address this, or an empty text. The driver itself says no more than "invalid value".
std::string why_no_tensor_map(const void* address, const TensorMapShape& shape);

cu::TensorMap encode_tensor_map(const Driver& driver, const void* address, const TensorMapShape& shape);

}  // namespace fovea::cuda::jit
