// SPDX-License-Identifier: Apache-2.0
//
// Our declarations of the CUDA driver and of NVRTC against NVIDIA's own headers, where a toolkit is installed: every
// function's parameters (pointer for pointer, size for size), every structure's layout, every number.
#include <gtest/gtest.h>

#if __has_include(<cudaTypedefs.h>) && __has_include(<nvrtc.h>)

#include <cuda.h>
#include <cudaTypedefs.h>
#include <nvrtc.h>

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <type_traits>

#include "cuda/jit/driver.h"
#include "cuda/jit/nvrtc.h"

namespace {

using namespace fovea::cuda::jit;  // NOLINT(google-build-using-namespace)

template <class T>
concept Complete = requires {
  sizeof(T);
};

// The same bytes in the same registers: pointers to what is the same in turn, integers and enumerations of one size,
// structures of one size. An incomplete type matches another one.
template <class A, class B>
consteval bool same() {
  using X = std::remove_cv_t<A>;
  using Y = std::remove_cv_t<B>;
  if constexpr (std::is_pointer_v<X> && std::is_pointer_v<Y>) {
    return same<std::remove_pointer_t<X>, std::remove_pointer_t<Y>>();
  } else if constexpr (std::is_void_v<X> || std::is_void_v<Y>) {
    return std::is_void_v<X> && std::is_void_v<Y>;
  } else if constexpr (std::is_integral_v<X> && std::is_integral_v<Y>) {
    return sizeof(X) == sizeof(Y) && std::is_signed_v<X> == std::is_signed_v<Y>;
  } else if constexpr ((std::is_integral_v<X> || std::is_enum_v<X>)&&(std::is_integral_v<Y> || std::is_enum_v<Y>)) {
    return sizeof(X) == sizeof(Y);
  } else if constexpr (std::is_class_v<X> && std::is_class_v<Y>) {
    if constexpr (Complete<X> && Complete<Y>) {
      return sizeof(X) == sizeof(Y) && alignof(X) >= alignof(Y);
    }
    return !Complete<X> && !Complete<Y>;
  } else {
    return false;
  }
}

template <class F, class G>
struct SameFunction;
template <class R, class... A, class S, class... B>
struct SameFunction<R (*)(A...), S (*)(B...)> {
  static consteval bool value() {
    if constexpr (sizeof...(A) == sizeof...(B)) {
      return same<R, S>() && (same<A, B>() && ...);
    }
    return false;
  }
};

static_assert(!same<int*, std::size_t*>() && !same<int, void*>() && !same<CUlaunchConfig, CUlaunchAttribute>() &&
                  !SameFunction<int (*)(int), int (*)(int, int)>::value(),
              "the comparison notices a difference");

// ---- the driver's functions: ours, the name, the version of the interface ----

std::map<std::string, int>& compared() {
  static std::map<std::string, int> names;
  return names;
}

#define COMPARE(member, name, version)                                                            \
  static_assert(SameFunction<decltype(Driver::member), PFN_##name##_v##version>::value(), #name); \
  [[maybe_unused]] const bool member##_compared = compared().emplace(#name, version).second

COMPARE(init, cuInit, 2000);
COMPARE(driver_get_version, cuDriverGetVersion, 2020);
COMPARE(get_error_name, cuGetErrorName, 6000);
COMPARE(get_error_string, cuGetErrorString, 6000);
COMPARE(device_get_count, cuDeviceGetCount, 2000);
COMPARE(device_get, cuDeviceGet, 2000);
COMPARE(device_get_name, cuDeviceGetName, 2000);
COMPARE(device_get_attribute, cuDeviceGetAttribute, 2000);
COMPARE(primary_context_retain, cuDevicePrimaryCtxRetain, 7000);
COMPARE(context_get_current, cuCtxGetCurrent, 4000);
COMPARE(context_get_device, cuCtxGetDevice, 2000);
COMPARE(context_push, cuCtxPushCurrent, 4000);
COMPARE(context_pop, cuCtxPopCurrent, 4000);
COMPARE(library_load_data, cuLibraryLoadData, 12000);
COMPARE(library_unload, cuLibraryUnload, 12000);
COMPARE(library_get_kernel, cuLibraryGetKernel, 12000);
COMPARE(kernel_get_function, cuKernelGetFunction, 12000);
COMPARE(kernel_get_attribute, cuKernelGetAttribute, 12000);
COMPARE(kernel_set_attribute, cuKernelSetAttribute, 12000);
COMPARE(launch_kernel, cuLaunchKernelEx, 11060);
COMPARE(max_active_blocks, cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050);
COMPARE(max_active_clusters, cuOccupancyMaxActiveClusters, 11070);
COMPARE(tensor_map_encode_tiled, cuTensorMapEncodeTiled, 12000);
COMPARE(pointer_get_attributes, cuPointerGetAttributes, 7000);
COMPARE(stream_is_capturing, cuStreamIsCapturing, 10000);
COMPARE(thread_exchange_capture_mode, cuThreadExchangeStreamCaptureMode, 10010);
COMPARE(stream_get_context, cuStreamGetCtx, 9020);
COMPARE(stream_synchronize, cuStreamSynchronize, 2000);
COMPARE(copy_to_host, cuMemcpyDtoHAsync, 3020);
COMPARE(copy_to_device, cuMemcpyHtoDAsync, 3020);
COMPARE(allocate, cuMemAlloc, 3020);
COMPARE(free, cuMemFree, 3020);

static_assert(SameFunction<cu::GetProcAddress, PFN_cuGetProcAddress_v12000>::value());

TEST(JitAbi, EveryFunctionOfTheDriverIsComparedAndAskedForByThatVersion) {
  Driver driver{};
  std::map<std::string, int> asked;
  for_each_function(driver, [&](auto&, const char* name, int version) { asked.emplace(name, version); });
  EXPECT_EQ(asked, compared());
}

// ---- structures ----

static_assert(sizeof(cu::LaunchConfig) == sizeof(CUlaunchConfig));
static_assert(offsetof(cu::LaunchConfig, grid_x) == offsetof(CUlaunchConfig, gridDimX));
static_assert(offsetof(cu::LaunchConfig, grid_z) == offsetof(CUlaunchConfig, gridDimZ));
static_assert(offsetof(cu::LaunchConfig, block_x) == offsetof(CUlaunchConfig, blockDimX));
static_assert(offsetof(cu::LaunchConfig, block_z) == offsetof(CUlaunchConfig, blockDimZ));
static_assert(offsetof(cu::LaunchConfig, shared_bytes) == offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(cu::LaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(cu::LaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(cu::LaunchConfig, attribute_count) == offsetof(CUlaunchConfig, numAttrs));

static_assert(sizeof(cu::LaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(cu::LaunchAttribute, id) == offsetof(CUlaunchAttribute, id));
static_assert(offsetof(cu::LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(sizeof(cu::LaunchAttributeValue) == sizeof(CUlaunchAttributeValue));
static_assert(sizeof(cu::LaunchAttributeValue::cluster) == sizeof(CUlaunchAttributeValue::clusterDim));
static_assert(same<decltype(cu::LaunchAttributeValue::cooperative), decltype(CUlaunchAttributeValue::cooperative)>());
static_assert(same<decltype(cu::LaunchAttributeValue::programmatic),
                   decltype(CUlaunchAttributeValue::programmaticStreamSerializationAllowed)>());

static_assert(sizeof(cu::TensorMap) == sizeof(CUtensorMap) && alignof(cu::TensorMap) >= alignof(CUtensorMap));

// ---- numbers ----

template <class Ours, class Theirs>
consteval bool equal(Ours ours, Theirs theirs) {
  return sizeof(Ours) == sizeof(Theirs) && static_cast<long long>(ours) == static_cast<long long>(theirs);
}

static_assert(equal(cu::kSuccess, CUDA_SUCCESS));
static_assert(equal(cu::kErrorOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY));
static_assert(equal(cu::kErrorNotInitialized, CUDA_ERROR_NOT_INITIALIZED));
static_assert(equal(cu::kErrorNoDevice, CUDA_ERROR_NO_DEVICE));

static_assert(equal(cu::DeviceAttribute::kL2CacheSize, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE));
static_assert(equal(cu::DeviceAttribute::kMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
static_assert(equal(cu::DeviceAttribute::kComputeCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR));
static_assert(equal(cu::DeviceAttribute::kComputeCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
static_assert(equal(cu::DeviceAttribute::kMaxSharedMemoryPerMultiprocessor,
                    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR));
static_assert(equal(cu::DeviceAttribute::kCooperativeLaunch, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH));
static_assert(equal(cu::DeviceAttribute::kMaxSharedMemoryPerBlockOptin,
                    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN));
static_assert(equal(cu::DeviceAttribute::kClusterLaunch, CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH));
static_assert(equal(cu::DeviceAttribute::kTensorMapAccessSupported, CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED));
static_assert(equal(cu::DeviceAttribute::kPageableMemoryAccess, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS));

static_assert(equal(cu::FunctionAttribute::kMaxThreadsPerBlock, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK));
static_assert(equal(cu::FunctionAttribute::kSharedSizeBytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES));
static_assert(equal(cu::FunctionAttribute::kLocalSizeBytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES));
static_assert(equal(cu::FunctionAttribute::kNumRegs, CU_FUNC_ATTRIBUTE_NUM_REGS));
static_assert(equal(cu::FunctionAttribute::kMaxDynamicSharedSizeBytes,
                    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES));
static_assert(equal(cu::FunctionAttribute::kNonPortableClusterSizeAllowed,
                    CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED));

static_assert(equal(cu::PointerAttribute::kMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE));
static_assert(equal(cu::PointerAttribute::kIsManaged, CU_POINTER_ATTRIBUTE_IS_MANAGED));
static_assert(equal(cu::PointerAttribute::kDeviceOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL));
static_assert(equal(cu::MemoryType::kHost, CU_MEMORYTYPE_HOST));
static_assert(equal(cu::MemoryType::kDevice, CU_MEMORYTYPE_DEVICE));

static_assert(equal(cu::CaptureStatus::kNone, CU_STREAM_CAPTURE_STATUS_NONE));
static_assert(equal(cu::CaptureStatus::kActive, CU_STREAM_CAPTURE_STATUS_ACTIVE));
static_assert(equal(cu::CaptureStatus::kInvalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED));
static_assert(equal(cu::CaptureMode::kGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL));
static_assert(equal(cu::CaptureMode::kThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
static_assert(equal(cu::CaptureMode::kRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED));

static_assert(equal(cu::LaunchAttributeId::kCooperative, CU_LAUNCH_ATTRIBUTE_COOPERATIVE));
static_assert(equal(cu::LaunchAttributeId::kClusterDimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION));
static_assert(equal(cu::LaunchAttributeId::kProgrammaticStreamSerialization,
                    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION));

static_assert(equal(cu::TensorMapType::kUint8, CU_TENSOR_MAP_DATA_TYPE_UINT8));
static_assert(equal(cu::TensorMapType::kUint16, CU_TENSOR_MAP_DATA_TYPE_UINT16));
static_assert(equal(cu::TensorMapType::kFloat16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16));
static_assert(equal(cu::TensorMapType::kFloat32, CU_TENSOR_MAP_DATA_TYPE_FLOAT32));
static_assert(equal(cu::TensorMapType::kBfloat16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16));
static_assert(equal(cu::TensorMapInterleave::kNone, CU_TENSOR_MAP_INTERLEAVE_NONE));
static_assert(equal(cu::TensorMapSwizzle::kNone, CU_TENSOR_MAP_SWIZZLE_NONE));
static_assert(equal(cu::TensorMapSwizzle::k32, CU_TENSOR_MAP_SWIZZLE_32B));
static_assert(equal(cu::TensorMapSwizzle::k64, CU_TENSOR_MAP_SWIZZLE_64B));
static_assert(equal(cu::TensorMapSwizzle::k128, CU_TENSOR_MAP_SWIZZLE_128B));
static_assert(equal(cu::TensorMapPromotion::kNone, CU_TENSOR_MAP_L2_PROMOTION_NONE));
static_assert(equal(cu::TensorMapPromotion::k64, CU_TENSOR_MAP_L2_PROMOTION_L2_64B));
static_assert(equal(cu::TensorMapPromotion::k128, CU_TENSOR_MAP_L2_PROMOTION_L2_128B));
static_assert(equal(cu::TensorMapPromotion::k256, CU_TENSOR_MAP_L2_PROMOTION_L2_256B));
static_assert(equal(cu::TensorMapFill::kZero, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));

// ---- NVRTC ----

std::set<std::string>& compared_nvrtc() {
  static std::set<std::string> names;
  return names;
}

#define COMPARE_NVRTC(member, name)                                                  \
  static_assert(SameFunction<decltype(NvrtcApi::member), decltype(&name)>::value()); \
  [[maybe_unused]] const bool nvrtc_##member##_compared = compared_nvrtc().insert(#name).second

COMPARE_NVRTC(get_error_string, nvrtcGetErrorString);
COMPARE_NVRTC(version, nvrtcVersion);
COMPARE_NVRTC(create_program, nvrtcCreateProgram);
COMPARE_NVRTC(destroy_program, nvrtcDestroyProgram);
COMPARE_NVRTC(compile_program, nvrtcCompileProgram);
COMPARE_NVRTC(add_name_expression, nvrtcAddNameExpression);
COMPARE_NVRTC(get_lowered_name, nvrtcGetLoweredName);
COMPARE_NVRTC(get_log_size, nvrtcGetProgramLogSize);
COMPARE_NVRTC(get_log, nvrtcGetProgramLog);
COMPARE_NVRTC(get_cubin_size, nvrtcGetCUBINSize);
COMPARE_NVRTC(get_cubin, nvrtcGetCUBIN);
COMPARE_NVRTC(get_ptx_size, nvrtcGetPTXSize);
COMPARE_NVRTC(get_ptx, nvrtcGetPTX);

static_assert(NVRTC_SUCCESS == 0);

TEST(JitAbi, EveryFunctionOfNvrtcIsCompared) {
  NvrtcApi api{};
  std::set<std::string> asked;
  for_each_function(api, [&](auto&, const char* name) { asked.insert(name); });
  EXPECT_EQ(asked, compared_nvrtc());
}

}  // namespace

#else

TEST(JitAbi, EveryDeclarationIsCompared) {
  GTEST_SKIP()
      << "no cuda.h, cudaTypedefs.h and nvrtc.h here: our declarations are compared where a toolkit is installed";
}

#endif
