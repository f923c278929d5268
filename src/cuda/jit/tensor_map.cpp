// SPDX-License-Identifier: Apache-2.0
//
// Tensor maps. What is wrong with one is said here: the driver has one number for everything.
#include <fmt/format.h>

#include <array>

#include "cuda/jit/driver.h"

namespace fovea::cuda::jit {
namespace {

int element_bytes(cu::TensorMapType type) {
  switch (type) {
    case cu::TensorMapType::kUint8:
      return 1;
    case cu::TensorMapType::kFloat32:
      return 4;
    default:
      return 2;
  }
}

}  // namespace

std::string why_no_tensor_map(const void* address, const TensorMapShape& shape) {
  constexpr std::uint64_t kGrain = 16;  // bytes: what TMA moves
  if (shape.rank < 1 || shape.rank > 5) {
    return fmt::format("{} dimensions; 1 to 5 are possible", shape.rank);
  }
  if (reinterpret_cast<std::uintptr_t>(address) % kGrain != 0) {
    return fmt::format("the address {} is not a multiple of {} bytes", address, kGrain);
  }
  for (int n = 0; n < shape.rank; ++n) {
    if (shape.dims[n] < 1 || shape.dims[n] > std::uint64_t{1} << 32) {
      return fmt::format("dimension {} is {}; 1 to 2^32 are possible", n, shape.dims[n]);
    }
    if (shape.box[n] < 1 || shape.box[n] > 256) {
      return fmt::format("the box is {} in dimension {}; 1 to 256 are possible", shape.box[n], n);
    }
  }
  for (int n = 0; n + 1 < shape.rank; ++n) {
    const std::uint64_t stride = shape.strides[n];
    if (stride == 0 || stride % kGrain != 0 || stride >= std::uint64_t{1} << 40) {
      return fmt::format("the stride of dimension {} is {} bytes; multiples of {} from {} to 2^40 are possible", n + 1,
                         stride, kGrain, kGrain);
    }
  }
  const std::uint64_t row = std::uint64_t{shape.box[0]} * element_bytes(shape.type);
  if (row % kGrain != 0) {
    return fmt::format("a row of the box is {} bytes; multiples of {} are possible", row, kGrain);
  }
  const std::uint64_t width =
      shape.swizzle == cu::TensorMapSwizzle::kNone ? row : 16u << static_cast<int>(shape.swizzle);
  if (row > width) {
    return fmt::format("a row of the box is {} bytes, more than the swizzle's {}", row, width);
  }
  return {};
}

cu::TensorMap encode_tensor_map(const Driver& driver, const void* address, const TensorMapShape& shape) {
  const std::string why_not = why_no_tensor_map(address, shape);
  if (!why_not.empty()) {
    throw Error(FOVEA_INTERNAL_ERROR, fmt::format("tensor map: {}", why_not));
  }
  cu::TensorMap map;
  constexpr std::array<unsigned, 5> kEveryElement = {1, 1, 1, 1, 1};
  check(driver,
        driver.tensor_map_encode_tiled(&map, shape.type, shape.rank, const_cast<void*>(address), shape.dims.data(),
                                       shape.strides.data(), shape.box.data(), kEveryElement.data(),
                                       cu::TensorMapInterleave::kNone, shape.swizzle, shape.promotion,
                                       cu::TensorMapFill::kZero),
        "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace fovea::cuda::jit
