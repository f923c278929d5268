// SPDX-License-Identifier: Apache-2.0
//
// The driver without one: errors by name, and what the helpers hand to a driver that a test plays.
#include "cuda/jit/driver.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "jit_testing.h"

namespace {

using namespace fovea::cuda::jit;  // NOLINT(google-build-using-namespace)
using fovea::Error;
using jit_testing::Variable;

// A driver of two devices that remembers what it was told. One at a time: the functions are plain pointers.
struct Fake {
  int version = 13000;
  cu::Result init = cu::kSuccess;
  std::string missing;  // a function that it has not
  std::vector<cu::Context> contexts{nullptr};
  int retained = 0;
  std::vector<cu::LaunchConfig> launches;
  std::vector<std::vector<cu::LaunchAttribute>> attributes;
  std::map<cu::FunctionAttribute, int> set;
  cu::Result launch = cu::kSuccess;
  int unloaded = 0;
  cu::CaptureMode capture_mode = cu::CaptureMode::kThreadLocal;
};
Fake fake;

// Devices 0 and 1 have the contexts 10 and 11; stream 100 runs in context 21, of device 1.
template <class Handle>
Handle handle(std::uintptr_t number) {
  return reinterpret_cast<Handle>(number);  // NOLINT(performance-no-int-to-ptr): a number that nobody follows
}

Driver fake_functions() {
  Driver d{};
  d.version = fake.version;
  d.driver_get_version = [](int* version) -> cu::Result {
    *version = fake.version;
    return cu::kSuccess;
  };
  d.init = [](unsigned) -> cu::Result { return fake.init; };
  d.get_error_name = [](cu::Result, const char** name) -> cu::Result {
    *name = "CUDA_ERROR_OF_A_KIND";
    return cu::kSuccess;
  };
  d.get_error_string = [](cu::Result, const char** text) -> cu::Result {
    *text = "some text";
    return cu::kSuccess;
  };
  d.device_get_count = [](int* count) -> cu::Result {
    *count = 2;
    return cu::kSuccess;
  };
  d.device_get = [](cu::Device* device, int ordinal) -> cu::Result {
    *device = ordinal;
    return cu::kSuccess;
  };
  d.device_get_name = [](char* name, int bytes, cu::Device) -> cu::Result {
    std::snprintf(name, bytes, "GPU of a test");
    return cu::kSuccess;
  };
  d.device_get_attribute = [](int* value, cu::DeviceAttribute attribute, cu::Device) -> cu::Result {
    *value = attribute == cu::DeviceAttribute::kComputeCapabilityMajor         ? 9
             : attribute == cu::DeviceAttribute::kComputeCapabilityMinor       ? 0
             : attribute == cu::DeviceAttribute::kMaxSharedMemoryPerBlockOptin ? 227 * 1024
                                                                               : 1;
    return cu::kSuccess;
  };
  d.primary_context_retain = [](cu::Context* context, cu::Device device) -> cu::Result {
    ++fake.retained;
    *context = handle<cu::Context>(10 + device);
    return cu::kSuccess;
  };
  d.context_get_current = [](cu::Context* context) -> cu::Result {
    *context = fake.contexts.back();
    return cu::kSuccess;
  };
  d.context_get_device = [](cu::Device* device) -> cu::Result {
    *device = static_cast<int>(reinterpret_cast<std::uintptr_t>(fake.contexts.back()) % 10);
    return cu::kSuccess;
  };
  d.context_push = [](cu::Context context) -> cu::Result {
    fake.contexts.push_back(context);
    return cu::kSuccess;
  };
  d.context_pop = [](cu::Context* context) -> cu::Result {
    *context = fake.contexts.back();
    fake.contexts.pop_back();
    return cu::kSuccess;
  };
  d.library_load_data = [](cu::Library* library, const void*, int*, void**, unsigned, int*, void**,
                           unsigned) -> cu::Result {
    *library = handle<cu::Library>(7);
    return cu::kSuccess;
  };
  d.library_unload = [](cu::Library) -> cu::Result {
    ++fake.unloaded;
    return cu::kSuccess;
  };
  d.library_get_kernel = [](cu::Kernel* kernel, cu::Library, const char* name) -> cu::Result {
    *kernel = handle<cu::Kernel>(8);
    return std::string(name) == "there" ? cu::kSuccess : 500;
  };
  d.kernel_get_function = [](cu::Function*, cu::Kernel) -> cu::Result { return cu::kSuccess; };
  d.kernel_get_attribute = [](int* value, cu::FunctionAttribute attribute, cu::Kernel, cu::Device) -> cu::Result {
    *value = attribute == cu::FunctionAttribute::kSharedSizeBytes ? 1024 : 5;
    return cu::kSuccess;
  };
  d.kernel_set_attribute = [](cu::FunctionAttribute attribute, int value, cu::Kernel, cu::Device) -> cu::Result {
    fake.set[attribute] = value;
    return cu::kSuccess;
  };
  d.launch_kernel = [](const cu::LaunchConfig* config, cu::Function, void**, void**) -> cu::Result {
    fake.launches.push_back(*config);
    fake.attributes.emplace_back(config->attributes, config->attributes + config->attribute_count);
    return fake.launch;
  };
  d.max_active_blocks = [](int* blocks, cu::Function, int block_size, std::size_t) -> cu::Result {
    *blocks = 2048 / block_size;
    return cu::kSuccess;
  };
  d.max_active_clusters = [](int* clusters, cu::Function, const cu::LaunchConfig* config) -> cu::Result {
    *clusters = 132 / static_cast<int>(config->attributes[0].value.cluster.x);
    return cu::kSuccess;
  };
  d.tensor_map_encode_tiled = [](cu::TensorMap* map, cu::TensorMapType, unsigned rank, void*, const std::uint64_t* dims,
                                 const std::uint64_t*, const unsigned*, const unsigned*, cu::TensorMapInterleave,
                                 cu::TensorMapSwizzle, cu::TensorMapPromotion, cu::TensorMapFill) -> cu::Result {
    map->opaque[0] = rank;
    map->opaque[1] = dims[rank - 1];
    return cu::kSuccess;
  };
  d.pointer_get_attributes = [](unsigned count, cu::PointerAttribute* attributes, void** values,
                                cu::DevicePointer pointer) -> cu::Result {
    for (unsigned n = 0; n < count; ++n) {
      switch (attributes[n]) {
        case cu::PointerAttribute::kMemoryType:
          *static_cast<unsigned*>(values[n]) = pointer < 1000 ? 0 : pointer < 2000 ? 1 : 2;
          break;
        case cu::PointerAttribute::kDeviceOrdinal:
          *static_cast<int*>(values[n]) = pointer < 1000 ? -2 : 1;
          break;
        case cu::PointerAttribute::kIsManaged:
          *static_cast<unsigned*>(values[n]) = pointer >= 3000 ? 1 : 0;
          break;
      }
    }
    return cu::kSuccess;
  };
  d.stream_is_capturing = [](cu::Stream stream, cu::CaptureStatus* status) -> cu::Result {
    *status = stream == nullptr ? cu::CaptureStatus::kNone : cu::CaptureStatus::kActive;
    return cu::kSuccess;
  };
  d.thread_exchange_capture_mode = [](cu::CaptureMode* mode) -> cu::Result {
    std::swap(*mode, fake.capture_mode);
    return cu::kSuccess;
  };
  d.stream_get_context = [](cu::Stream, cu::Context* context) -> cu::Result {
    *context = handle<cu::Context>(21);
    return cu::kSuccess;
  };
  d.stream_synchronize = [](cu::Stream) -> cu::Result { return cu::kSuccess; };
  d.copy_to_host = [](void*, cu::DevicePointer, std::size_t, cu::Stream) -> cu::Result { return cu::kSuccess; };
  d.copy_to_device = [](cu::DevicePointer, const void*, std::size_t, cu::Stream) -> cu::Result { return cu::kSuccess; };
  d.allocate = [](cu::DevicePointer*, std::size_t) -> cu::Result { return cu::kSuccess; };
  d.free = [](cu::DevicePointer) -> cu::Result { return cu::kSuccess; };
  return d;
}

cu::Result fake_get(const char* name, void** function, int, unsigned long long flags, int*) {
  EXPECT_EQ(flags, 1u) << "the default stream is the context's, not the thread's";
  Driver functions = fake_functions();
  *function = nullptr;
  for_each_function(functions, [&](auto& pointer, const char* known, int) {
    if (std::string(known) == name && fake.missing != name) {
      *function = reinterpret_cast<void*>(pointer);
    }
  });
  return *function == nullptr ? 500 : cu::kSuccess;
}

std::string refusal(const std::function<void()>& call, fovea_status status) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

class JitDriver : public testing::Test {
 protected:
  JitDriver() { fake = Fake(); }
};

// ---- no driver, or not a usable one ----

TEST_F(JitDriver, LoadsBesideTheCapturesOfOthers) {
  const Driver d = fake_functions();
  {
    const BesideCaptures beside(d);
    EXPECT_EQ(fake.capture_mode, cu::CaptureMode::kRelaxed);
  }
  EXPECT_EQ(fake.capture_mode, cu::CaptureMode::kThreadLocal) << "the thread's own";
}

TEST_F(JitDriver, ThisMachineHasOneOrSaysWhyNot) {
  std::string why_not;
  const Driver* found = find_driver(why_not);
  if (found != nullptr) {
    EXPECT_GE(found->version, 12000);
    EXPECT_EQ(&driver(), found);
    EXPECT_GT(device_count(*found), 0);
    EXPECT_GE(device(0).major, 1);
  } else {
    EXPECT_EQ(refusal([] { driver(); }, FOVEA_UNSUPPORTED), why_not);
    EXPECT_TRUE(why_not.starts_with("CUDA: ")) << why_not;
    EXPECT_NE(why_not.find("driver"), std::string::npos) << why_not;
  }
}

TEST_F(JitDriver, NoLibraryIsNamed) {
  const std::string message = refusal([] { open_driver("libcuda-of-nobody.so.1"); }, FOVEA_UNSUPPORTED);
  EXPECT_NE(message.find("CUDA: no NVIDIA driver: libcuda-of-nobody.so.1"), std::string::npos) << message;
}

TEST_F(JitDriver, AnotherLibraryIsNoDriver) {
  const std::string message = refusal([] { open_driver("libm.so.6"); }, FOVEA_UNSUPPORTED);
  EXPECT_NE(message.find("libm.so.6 has no cuGetProcAddress_v2"), std::string::npos) << message;
}

TEST_F(JitDriver, EveryFunctionIsFound) {
  Driver made = make_driver(&fake_get);
  EXPECT_EQ(made.version, 13000);
  EXPECT_EQ(made.major(), 13);
  for_each_function(made, [](auto pointer, const char* name, int) { EXPECT_NE(pointer, nullptr) << name; });
}

TEST_F(JitDriver, AnOldDriverIsNamed) {
  fake.version = 11080;
  fake.missing = "cuLibraryLoadData";
  const std::string message = refusal([] { make_driver(&fake_get); }, FOVEA_UNSUPPORTED);
  EXPECT_NE(message.find("CUDA 11.8; CUDA 12.0"), std::string::npos) << message;
}

TEST_F(JitDriver, AMissingFunctionIsNamed) {
  fake.missing = "cuLaunchKernelEx";
  const std::string message = refusal([] { make_driver(&fake_get); }, FOVEA_UNSUPPORTED);
  EXPECT_NE(message.find("no cuLaunchKernelEx of CUDA 11.6"), std::string::npos) << message;
}

TEST_F(JitDriver, NoGpuAndForkedAndBrokenAreNamed) {
  fake.init = cu::kErrorNoDevice;
  {
    const Variable visible("CUDA_VISIBLE_DEVICES", "7");
    EXPECT_NE(refusal([] { make_driver(&fake_get); }, FOVEA_UNSUPPORTED)
                  .find("no GPU: the NVIDIA driver is there but "
                        "CUDA_VISIBLE_DEVICES, '7', leaves none"),
              std::string::npos);
  }
  EXPECT_NE(refusal([] { make_driver(&fake_get); }, FOVEA_UNSUPPORTED).find("no GPU"), std::string::npos);
  fake.init = cu::kErrorNotInitialized;
  EXPECT_NE(refusal([] { make_driver(&fake_get); }, FOVEA_UNSUPPORTED).find("forked"), std::string::npos);
  fake.init = 999;
  EXPECT_NE(refusal([] { make_driver(&fake_get); }, FOVEA_UNSUPPORTED).find("CUDA_ERROR_OF_A_KIND"), std::string::npos);
}

TEST_F(JitDriver, ErrorsHaveFunctionNameAndText) {
  const Driver d = fake_functions();
  check(d, cu::kSuccess, "cuInit");
  EXPECT_EQ(refusal([&] { check(d, 700, "cuLaunchKernelEx"); }, FOVEA_DEVICE_ERROR),
            "cuLaunchKernelEx: CUDA_ERROR_OF_A_KIND 700 (some text)");
  refusal([&] { check(d, cu::kErrorOutOfMemory, "cuLibraryLoadData"); }, FOVEA_OUT_OF_MEMORY);
}

// ---- devices, contexts, memory ----

TEST_F(JitDriver, DescribesADevice) {
  const Driver d = fake_functions();
  const DeviceInfo info = describe_device(d, 1);
  EXPECT_EQ(info.name, "GPU of a test");
  EXPECT_EQ(info.capability(), 90);
  EXPECT_EQ(info.shared_per_block, 227 * 1024);
  EXPECT_TRUE(info.clusters);
  const std::string message = "device: 2 was given; 0 to 1 are there";
  EXPECT_TRUE(refusal([&] { describe_device(d, 2); }, FOVEA_INVALID_ARGUMENT).starts_with(message));
  const Variable visible("CUDA_VISIBLE_DEVICES", "1,0");
  EXPECT_EQ(refusal([&] { describe_device(d, 2); }, FOVEA_INVALID_ARGUMENT),
            message + ", as CUDA_VISIBLE_DEVICES is '1,0'");
  refusal([&] { describe_device(d, -1); }, FOVEA_INVALID_ARGUMENT);
}

TEST_F(JitDriver, AThreadWithoutAContextGetsThePrimaryOne) {
  const Driver d = fake_functions();
  {
    const ContextScope scope(d, 1);
    EXPECT_EQ(fake.contexts.back(), handle<cu::Context>(11));
  }
  EXPECT_EQ(fake.contexts.back(), nullptr);
  EXPECT_EQ(fake.contexts.size(), 1u);
}

TEST_F(JitDriver, ACurrentContextOfTheDeviceStays) {
  const Driver d = fake_functions();
  fake.contexts.push_back(handle<cu::Context>(31));  // of device 1, not its primary one
  {
    const ContextScope scope(d, 1);
    EXPECT_EQ(fake.contexts.size(), 2u);
    const ContextScope other(d, 0);
    EXPECT_EQ(fake.contexts.back(), handle<cu::Context>(10));
  }
  EXPECT_EQ(fake.contexts.back(), handle<cu::Context>(31));
  EXPECT_EQ(fake.retained, 1);
}

TEST_F(JitDriver, AStreamBringsItsContext) {
  const Driver d = fake_functions();
  fake.contexts.push_back(handle<cu::Context>(31));
  const ContextScope scope(d, 1, handle<cu::Stream>(100));
  EXPECT_EQ(fake.contexts.back(), handle<cu::Context>(21));
  const ContextScope again(d, 1, handle<cu::Stream>(100));
  EXPECT_EQ(fake.contexts.size(), 3u) << "it was current already";
  const ContextScope per_thread(d, 1, handle<cu::Stream>(2));
  EXPECT_EQ(fake.contexts.size(), 3u) << "the default streams have no context of their own";
}

TEST_F(JitDriver, AStreamOfAnotherDeviceIsRefused) {
  const Driver d = fake_functions();
  EXPECT_EQ(refusal([&] { const ContextScope scope(d, 0, handle<cu::Stream>(100)); }, FOVEA_INVALID_ARGUMENT),
            "stream: of CUDA device 1; accepted: one of device 0, where the tensors lie");
  EXPECT_EQ(fake.contexts.size(), 1u) << "the thread's contexts are as they were";
}

TEST_F(JitDriver, KnowsWhereMemoryIs) {
  const Driver d = fake_functions();
  EXPECT_EQ(place_of(d, handle<void*>(16)).kind, Place::Kind::kHost);
  EXPECT_EQ(place_of(d, handle<void*>(1016)).kind, Place::Kind::kPinned);
  EXPECT_EQ(place_of(d, handle<void*>(2016)).kind, Place::Kind::kDevice);
  EXPECT_EQ(place_of(d, handle<void*>(2016)).device, 1);
  EXPECT_EQ(place_of(d, handle<void*>(3016)).kind, Place::Kind::kManaged);
  EXPECT_FALSE(is_capturing(d, nullptr));
  EXPECT_TRUE(is_capturing(d, handle<cu::Stream>(100)));
}

// ---- kernels ----

TEST_F(JitDriver, LibrariesAreUnloadedAndMissingKernelsNamed) {
  const Driver d = fake_functions();
  {
    const Library library(d, "code");
    EXPECT_EQ(library.kernel("there"), handle<cu::Kernel>(8));
    EXPECT_NE(refusal([&] { library.kernel("elsewhere"); }, FOVEA_DEVICE_ERROR).find("cuLibraryGetKernel"),
              std::string::npos);
    EXPECT_EQ(fake.unloaded, 0);
  }
  EXPECT_EQ(fake.unloaded, 1);
}

TEST_F(JitDriver, PreparesAKernelWithinTheDevicesSharedMemory) {
  const Driver d = fake_functions();
  const DeviceInfo info = describe_device(d, 0);
  prepare_kernel(d, handle<cu::Kernel>(8), info, 226 * 1024);
  EXPECT_EQ(fake.set.at(cu::FunctionAttribute::kMaxDynamicSharedSizeBytes), 226 * 1024);
  EXPECT_EQ(fake.set.count(cu::FunctionAttribute::kNonPortableClusterSizeAllowed), 0u);
  prepare_kernel(d, handle<cu::Kernel>(8), info, 0, true);
  EXPECT_EQ(fake.set.at(cu::FunctionAttribute::kNonPortableClusterSizeAllowed), 1);
  const std::string message =
      refusal([&] { prepare_kernel(d, handle<cu::Kernel>(8), info, 226 * 1024 + 1); }, FOVEA_INTERNAL_ERROR);
  EXPECT_NE(message.find("GPU of a test has 232448"), std::string::npos) << message;
  EXPECT_EQ(fake.contexts.size(), 1u);
}

TEST_F(JitDriver, ALaunchSaysWhatItIs) {
  const Driver d = fake_functions();
  Launch plain;
  plain.grid = {7, 2, 3};
  plain.block = {128, 1, 1};
  plain.dynamic_shared = 1 << 16;
  plain.stream = handle<cu::Stream>(100);
  launch(d, handle<cu::Kernel>(8), plain, nullptr);
  const cu::LaunchConfig& config = fake.launches.at(0);
  EXPECT_EQ(config.grid_x, 7u);
  EXPECT_EQ(config.grid_y, 2u);
  EXPECT_EQ(config.grid_z, 3u);
  EXPECT_EQ(config.block_x, 128u);
  EXPECT_EQ(config.shared_bytes, 1u << 16);
  EXPECT_EQ(config.stream, handle<cu::Stream>(100));
  EXPECT_TRUE(fake.attributes.at(0).empty());

  Launch all = plain;
  all.cluster = {2, 1, 1};
  all.cooperative = true;
  all.programmatic = true;
  launch(d, handle<cu::Kernel>(8), all, nullptr);
  const std::vector<cu::LaunchAttribute>& attributes = fake.attributes.at(1);
  ASSERT_EQ(attributes.size(), 3u);
  EXPECT_EQ(attributes[0].id, cu::LaunchAttributeId::kClusterDimension);
  EXPECT_EQ(attributes[0].value.cluster.x, 2u);
  EXPECT_EQ(attributes[0].value.cluster.z, 1u);
  EXPECT_EQ(attributes[1].id, cu::LaunchAttributeId::kCooperative);
  EXPECT_EQ(attributes[1].value.cooperative, 1);
  EXPECT_EQ(attributes[2].id, cu::LaunchAttributeId::kProgrammaticStreamSerialization);
  EXPECT_EQ(attributes[2].value.programmatic, 1);
  EXPECT_EQ(max_active_clusters(d, handle<cu::Kernel>(8), all), 66);
  EXPECT_EQ(max_active_blocks(d, handle<cu::Kernel>(8), all), 16);

  fake.launch = cu::kErrorOutOfMemory;
  refusal([&] { launch(d, handle<cu::Kernel>(8), plain, nullptr); }, FOVEA_OUT_OF_MEMORY);
}

// ---- tensor maps ----

TensorMapShape good_shape() {
  TensorMapShape shape;
  shape.rank = 3;
  shape.dims = {128, 4096, 32};
  shape.strides = {256, 256 * 4096};
  shape.box = {64, 128, 1};
  shape.swizzle = cu::TensorMapSwizzle::k128;
  return shape;
}

TEST_F(JitDriver, TensorMapsAreRefusedWithAReason) {
  const void* address = handle<void*>(4096);
  EXPECT_EQ(why_no_tensor_map(address, good_shape()), "");
  const auto why = [&](auto change) {
    TensorMapShape shape = good_shape();
    change(shape);
    return why_no_tensor_map(address, shape);
  };
  EXPECT_NE(why_no_tensor_map(handle<void*>(4104), good_shape()).find("multiple of 16"), std::string::npos);
  EXPECT_NE(why([](auto& s) { s.rank = 6; }).find("1 to 5"), std::string::npos);
  EXPECT_NE(why([](auto& s) { s.dims[1] = 0; }).find("dimension 1 is 0"), std::string::npos);
  EXPECT_NE(why([](auto& s) { s.strides[0] = 0; }).find("stride of dimension 1 is 0"), std::string::npos);
  EXPECT_NE(why([](auto& s) { s.strides[1] = 1000; }).find("stride of dimension 2 is 1000"), std::string::npos);
  EXPECT_NE(why([](auto& s) { s.strides[1] = std::uint64_t{1} << 40; }).find("2^40"), std::string::npos);
  EXPECT_NE(why([](auto& s) { s.box[1] = 257; }).find("box is 257"), std::string::npos);
  EXPECT_NE(why([](auto& s) { s.box[0] = 65; }).find("130 bytes"), std::string::npos);
  EXPECT_NE(why([](auto& s) { s.box[0] = 128; }).find("more than the swizzle's 128"), std::string::npos);
  EXPECT_EQ(why([](auto& s) {
              s.swizzle = cu::TensorMapSwizzle::k32;
              s.box[0] = 16;
            }),
            "");
}

TEST_F(JitDriver, TensorMapsAreEncoded) {
  const Driver d = fake_functions();
  const cu::TensorMap map = encode_tensor_map(d, handle<void*>(4096), good_shape());
  EXPECT_EQ(map.opaque[0], 3u);
  EXPECT_EQ(map.opaque[1], 32u);
  refusal([&] { encode_tensor_map(d, handle<void*>(4097), good_shape()); }, FOVEA_INTERNAL_ERROR);
}

}  // namespace
