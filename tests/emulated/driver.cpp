// SPDX-License-Identifier: Apache-2.0
//
// A libcuda.so.1 whose GPU is the machine of machine.cpp: one of compute capability 9.0 with few multiprocessors. The
// library finds it as it finds NVIDIA's, and plans, encodes tensor maps and launches as always; a launch has ended when
// the call returns. "Machine code" is what compiler.cpp makes: a shared library. Its functions are those that
// src/cuda/jit/driver.h declares, no more.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <string>

#include "cuda/jit/driver.h"
#include "internals.h"
#include "tensor_map.h"

namespace {

namespace cu = fovea::cuda::jit::cu;
using emulated::u32;
using emulated::u64;

constexpr cu::Result kInvalid = 1;

// $EMULATED_MULTIPROCESSORS, or few: plans then have rounds and parts in small problems.
u32 multiprocessors() {
  const char* const set = std::getenv("EMULATED_MULTIPROCESSORS");
  constexpr u32 kFew = 4;
  return set != nullptr ? u32(std::atoi(set)) : kFew;
}

cu::Result succeed() { return cu::kSuccess; }

cu::Result version(int* value) {
  *value = 13000;
  return cu::kSuccess;
}
cu::Result error_text(cu::Result, const char** text) {
  *text = "an error of the emulated driver";
  return cu::kSuccess;
}
cu::Result device_count(int* count) {
  *count = 1;
  return cu::kSuccess;
}
cu::Result device_get(cu::Device* device, int ordinal) {
  *device = ordinal;
  return cu::kSuccess;
}
cu::Result device_name(char* name, int bytes, cu::Device) {
  std::snprintf(name, std::size_t(bytes), "emulated");
  return cu::kSuccess;
}
cu::Result device_attribute(int* value, cu::DeviceAttribute attribute, cu::Device) {
  switch (attribute) {
    case cu::DeviceAttribute::kL2CacheSize:
      *value = 50 << 20;
      break;
    case cu::DeviceAttribute::kMultiprocessorCount:
      *value = int(multiprocessors());
      break;
    case cu::DeviceAttribute::kComputeCapabilityMajor:
      *value = 9;
      break;
    case cu::DeviceAttribute::kComputeCapabilityMinor:
    case cu::DeviceAttribute::kPageableMemoryAccess:
      *value = 0;
      break;
    case cu::DeviceAttribute::kMaxSharedMemoryPerMultiprocessor:
      *value = 228 * 1024;
      break;
    case cu::DeviceAttribute::kMaxSharedMemoryPerBlockOptin:
      *value = 227 * 1024;
      break;
    default:
      *value = 1;
  }
  return cu::kSuccess;
}

int the_context = 0;

cu::Result context(void** value) {
  *value = &the_context;
  return cu::kSuccess;
}
cu::Result context_of(void** value, cu::Device) { return context(value); }
cu::Result context_of_stream(cu::Stream, void** value) { return context(value); }
cu::Result current_device(cu::Device* device) {
  *device = 0;
  return cu::kSuccess;
}
cu::Result capturing(cu::Stream, cu::CaptureStatus* status) {
  *status = cu::CaptureStatus::kNone;
  return cu::kSuccess;
}
cu::Result place_of(unsigned count, const cu::PointerAttribute* attributes, void** values, cu::DevicePointer) {
  for (unsigned n = 0; n < count; ++n) {
    *static_cast<int*>(values[n]) =
        attributes[n] == cu::PointerAttribute::kMemoryType ? int(cu::MemoryType::kDevice) : 0;
  }
  return cu::kSuccess;
}

// ---- memory ----

cu::Result allocate(cu::DevicePointer* memory, std::size_t bytes) {
  void* begin = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  *memory = reinterpret_cast<cu::DevicePointer>(begin);
  return begin != nullptr ? cu::kSuccess : cu::kErrorOutOfMemory;
}
cu::Result release(cu::DevicePointer memory) {
  std::free(reinterpret_cast<void*>(memory));  // NOLINT(performance-no-int-to-ptr)
  return cu::kSuccess;
}
cu::Result copy_to_host(void* to, cu::DevicePointer from, std::size_t bytes, cu::Stream) {
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);  // NOLINT(performance-no-int-to-ptr)
  return cu::kSuccess;
}
cu::Result copy_to_device(cu::DevicePointer to, const void* from, std::size_t bytes, cu::Stream) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);  // NOLINT(performance-no-int-to-ptr)
  return cu::kSuccess;
}

// ---- kernels ----

struct Kernel {
  void (*run)(void** parameters);
  std::string name;
  u32 cluster;  // blocks
};

// The code is a shared library's bytes behind the number of them, see compiler.cpp.
cu::Result load(void** library, const void* code, int*, void**, unsigned, int*, void**, unsigned) {
  u64 bytes = 0;
  std::memcpy(&bytes, code, sizeof bytes);
  const int file = memfd_create("kernel", MFD_CLOEXEC);
  if (file < 0 || write(file, static_cast<const char*>(code) + sizeof bytes, bytes) != ssize_t(bytes)) {
    return cu::kErrorOutOfMemory;
  }
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (*library == nullptr) {
    std::fprintf(stderr, "emulated: %s\n", dlerror());
    return kInvalid;
  }
  return cu::kSuccess;  // the file stays open: the loader knows libraries by it
}
cu::Result get_kernel(void** kernel, void* library, const char*) {
  static std::deque<Kernel> kept;
  static std::mutex mutex;
  void* const run = dlsym(library, "emulated_kernel");
  const void* const name = dlsym(library, "emulated_name");
  const void* const cluster = dlsym(library, "emulated_cluster");
  if (run == nullptr || name == nullptr || cluster == nullptr) {
    return kInvalid;  // of another version of compiler.cpp
  }
  const std::lock_guard<std::mutex> lock(mutex);
  kept.push_back(
      {reinterpret_cast<void (*)(void**)>(run), static_cast<const char*>(name), *static_cast<const u32*>(cluster)});
  *kernel = &kept.back();
  return cu::kSuccess;
}
cu::Result get_function(void** function, void* kernel) {
  *function = kernel;
  return cu::kSuccess;
}
cu::Result kernel_attribute(int* value, cu::FunctionAttribute, void*, cu::Device) {
  *value = 0;
  return cu::kSuccess;
}

// How many clusters of a kernel are on the GPU at once.
u32 resident_clusters(const Kernel& kernel, const cu::LaunchConfig& config) {
  const u32 together = emulated::blocks_together(config.block_x, config.shared_bytes);
  return std::max(1u, multiprocessors() * together / kernel.cluster);
}
cu::Result max_active_blocks(int* blocks, void*, int threads, std::size_t shared) {
  *blocks = int(emulated::blocks_together(u32(threads), u32(shared)));
  return cu::kSuccess;
}
cu::Result max_active_clusters(int* clusters, void* function, const cu::LaunchConfig* config) {
  *clusters = int(resident_clusters(*static_cast<const Kernel*>(function), *config));
  return cu::kSuccess;
}

cu::Result launch(const cu::LaunchConfig* config, void* function, void** parameters, void**) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const Kernel& kernel = *static_cast<const Kernel*>(function);
  if (config->grid_x % kernel.cluster != 0 || config->block_x % 32 != 0 || config->block_y * config->block_z != 1 ||
      config->shared_bytes > 227 * 1024) {
    return kInvalid;
  }
  if (std::getenv("EMULATED_LOG") != nullptr) {
    std::fprintf(stderr, "emulated: %u blocks of %u threads, %u bytes: %s\n",
                 config->grid_x * config->grid_y * config->grid_z, config->block_x, config->shared_bytes,
                 kernel.name.c_str());
  }
  const emulated::Launch what{
      kernel.run,      parameters,           kernel.name.c_str(), {config->grid_x, config->grid_y, config->grid_z},
      config->block_x, config->shared_bytes, kernel.cluster};
  // Arrays that a kernel declares itself lie in one place here, and kernels that have them have no other shared memory.
  const bool alone = config->shared_bytes == 0;
  emulated::machine.run(what, alone ? 1 : resident_clusters(kernel, *config));
  return cu::kSuccess;
}

// ---- tensor maps ----

cu::Result encode_tensor_map(cu::TensorMap* map, cu::TensorMapType type, unsigned rank, void* address, const u64* dims,
                             const u64* strides, const unsigned* box, const unsigned*, cu::TensorMapInterleave,
                             cu::TensorMapSwizzle swizzle, cu::TensorMapPromotion, cu::TensorMapFill) {
  static std::deque<emulated::TensorMap> kept;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  emulated::TensorMap& made = kept.emplace_back();
  made.base = static_cast<unsigned char*>(address);
  made.rank = int(rank);
  made.element = type == cu::TensorMapType::kUint8 ? 1 : type == cu::TensorMapType::kFloat32 ? 4 : 2;
  made.swizzle = u32(swizzle);
  for (unsigned n = 0; n < rank; ++n) {
    made.dims[n] = dims[n];
    made.box[n] = box[n];
    if (n + 1 < rank) {
      made.strides[n] = strides[n];
    }
  }
  const emulated::EncodedMap encoded{emulated::kTensorMapMark, &made, {}};
  static_assert(sizeof encoded == sizeof *map);
  std::memcpy(map, &encoded, sizeof encoded);
  return cu::kSuccess;
}

}  // namespace

extern "C" cu::Result cuGetProcAddress_v2(const char* name, void** function, int, u64, int* found) {
  static const struct {
    const char* name;
    void* function;
  } functions[] = {
#define FOVEA_FUNCTION(name, function) {name, reinterpret_cast<void*>(function)}
      FOVEA_FUNCTION("cuDriverGetVersion", version),
      FOVEA_FUNCTION("cuGetErrorName", error_text),
      FOVEA_FUNCTION("cuGetErrorString", error_text),
      FOVEA_FUNCTION("cuDeviceGetCount", device_count),
      FOVEA_FUNCTION("cuDeviceGet", device_get),
      FOVEA_FUNCTION("cuDeviceGetName", device_name),
      FOVEA_FUNCTION("cuDeviceGetAttribute", device_attribute),
      FOVEA_FUNCTION("cuDevicePrimaryCtxRetain", context_of),
      FOVEA_FUNCTION("cuCtxGetCurrent", context),
      FOVEA_FUNCTION("cuCtxGetDevice", current_device),
      FOVEA_FUNCTION("cuCtxPopCurrent", context),
      FOVEA_FUNCTION("cuLibraryLoadData", load),
      FOVEA_FUNCTION("cuLibraryGetKernel", get_kernel),
      FOVEA_FUNCTION("cuKernelGetFunction", get_function),
      FOVEA_FUNCTION("cuKernelGetAttribute", kernel_attribute),
      FOVEA_FUNCTION("cuLaunchKernelEx", launch),
      FOVEA_FUNCTION("cuOccupancyMaxActiveBlocksPerMultiprocessor", max_active_blocks),
      FOVEA_FUNCTION("cuOccupancyMaxActiveClusters", max_active_clusters),
      FOVEA_FUNCTION("cuTensorMapEncodeTiled", encode_tensor_map),
      FOVEA_FUNCTION("cuPointerGetAttributes", place_of),
      FOVEA_FUNCTION("cuStreamIsCapturing", capturing),
      FOVEA_FUNCTION("cuStreamGetCtx", context_of_stream),
      FOVEA_FUNCTION("cuMemcpyDtoHAsync", copy_to_host),
      FOVEA_FUNCTION("cuMemcpyHtoDAsync", copy_to_device),
      FOVEA_FUNCTION("cuMemAlloc", allocate),
      FOVEA_FUNCTION("cuMemFree", release),
#undef FOVEA_FUNCTION
  };
  *function = reinterpret_cast<void*>(succeed);  // the rest has nothing to do
  for (const auto& one : functions) {
    if (std::strcmp(name, one.name) == 0) {
      *function = one.function;
    }
  }
  if (found != nullptr) {
    *found = 0;
  }
  return cu::kSuccess;
}
