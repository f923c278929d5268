// SPDX-License-Identifier: Apache-2.0
#include "core/given.h"

#include <cmath>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <span>

namespace fovea {
namespace {

constexpr Argument kInputs[] = {
    {"q", &fovea_problem::q, false},
    {"k", &fovea_problem::k, false},
    {"v", &fovea_problem::v, false},
    {"bias", &fovea_problem::bias, false},
    {"bias2", &fovea_problem::bias2, false},
    {"mask", &fovea_problem::mask, false},
    {"alibi_slopes", &fovea_problem::alibi_slopes, false},
    {"sink", &fovea_problem::sink, false},
    {"cu_seqlens_q", &fovea_problem::cu_seqlens_q, false},
    {"cu_seqlens_k", &fovea_problem::cu_seqlens_k, false},
    {"seqused_q", &fovea_problem::seqused_q, false},
    {"seqused_k", &fovea_problem::seqused_k, false},
    {"positions_q", &fovea_problem::positions_q, false},
    {"positions_k", &fovea_problem::positions_k, false},
    {"dropout_streams", &fovea_problem::dropout_streams, false},
};
constexpr Argument kForwardResults[] = {
    {"out", &fovea_problem::out, true},
    {"lse", &fovea_problem::lse, true},
};
constexpr Argument kBackwardTensors[] = {
    {"out", &fovea_problem::out, false},
    {"lse", &fovea_problem::lse, false},
    {"grad_out", &fovea_problem::grad_out, false},
    {"grad_lse", &fovea_problem::grad_lse, false},
    {"grad_q", &fovea_problem::grad_q, true},
    {"grad_k", &fovea_problem::grad_k, true},
    {"grad_v", &fovea_problem::grad_v, true},
    {"grad_bias", &fovea_problem::grad_bias, true},
    {"grad_bias2", &fovea_problem::grad_bias2, true},
    {"grad_sink", &fovea_problem::grad_sink, true},
};

}  // namespace

std::string text_of(const std::int64_t* shape, std::int64_t rank) {
  return rank == 0 ? "()" : fmt::format("{}", fmt::join(shape, shape + rank, "x"));
}
std::string shape_of(const fovea_tensor& tensor) { return text_of(tensor.shape, tensor.rank); }

std::string type_name(std::int32_t type) {
  if (type < FOVEA_FP32 || type > FOVEA_INT64) {
    return fmt::format("element type {}", type);
  }
  return std::string(name_of(static_cast<DType>(type)));
}

std::int64_t elements_of(const fovea_tensor& tensor) {
  std::int64_t count = 1;
  for (int i = 0; i < tensor.rank; ++i) {
    count *= tensor.shape[i];
  }
  return count;
}

std::array<std::int64_t, FOVEA_MAX_RANK> strides_of(const fovea_tensor& tensor) {
  std::array<std::int64_t, FOVEA_MAX_RANK> strides{};
  std::int64_t next = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    const bool is_given = (tensor.flags & FOVEA_TENSOR_STRIDED) != 0 && tensor.shape[i] > 1;
    strides[i] = is_given ? tensor.stride[i] : next;
    next *= std::max<std::int64_t>(tensor.shape[i], 1);
  }
  return strides;
}

Footprint footprint_of(const fovea_tensor& tensor) {
  const auto strides = strides_of(tensor);
  Footprint footprint;
  footprint.base = reinterpret_cast<std::intptr_t>(tensor.data);
  footprint.width = static_cast<std::int64_t>(size_of(static_cast<DType>(tensor.dtype)));
  footprint.rank = tensor.rank;
  for (int i = 0; i < tensor.rank; ++i) {
    footprint.extent[i] = tensor.shape[i];
    footprint.stride[i] = strides[i] * footprint.width;
  }
  return footprint;
}

Arguments arguments_of(const fovea_problem& given, Direction direction) {
  static_assert(std::size(kInputs) + std::size(kBackwardTensors) <= kMostArguments);
  Arguments arguments;
  const auto add = [&](const Argument& argument) {
    if (given.*argument.tensor != nullptr) {
      arguments.push_back(argument);
    }
  };
  std::for_each(std::begin(kInputs), std::end(kInputs), add);
  if (direction == Direction::kForward) {
    std::for_each(std::begin(kForwardResults), std::end(kForwardResults), add);
  } else {
    std::for_each(std::begin(kBackwardTensors), std::end(kBackwardTensors), add);
  }
  return arguments;
}

void struct_of(const char* name, const fovea_tensor& tensor) {
  if ((tensor.flags & ~FOVEA_TENSOR_STRIDED) != 0) {
    refuse("{}: flags {:#x}; accepted: 0 or FOVEA_TENSOR_STRIDED", name, tensor.flags);
  }
  if (tensor.reserved != 0) {
    refuse("{}: reserved is {}; accepted: 0", name, tensor.reserved);
  }
  if (tensor.rank < 0 || tensor.rank > FOVEA_MAX_RANK) {
    refuse("{}: rank {}; accepted: 0 to {}", name, tensor.rank, FOVEA_MAX_RANK);
  }
  const std::span shape(tensor.shape, static_cast<std::size_t>(tensor.rank));
  if (std::any_of(shape.begin(), shape.end(), [](std::int64_t dim) { return dim < 0; })) {
    refuse("{}: shape {}; accepted: dimensions of 0 or more", name, shape_of(tensor));
  }
  if (!product_fits(shape)) {
    refuse("{}: shape {}; accepted: at most 2^50 elements", name, shape_of(tensor));
  }
}

void type_of(const char* name, const fovea_tensor& tensor, std::initializer_list<DType> accepted, const char* hint) {
  if (std::none_of(accepted.begin(), accepted.end(),
                   [&](DType type) { return static_cast<std::int32_t>(type) == tensor.dtype; })) {
    std::vector<std::string_view> names;
    std::transform(accepted.begin(), accepted.end(), std::back_inserter(names), [](DType t) { return name_of(t); });
    // Where numbers are expected, bytes of std::uint8_t in C++ have become a bool without the caller's notice.
    const bool numbers = std::count(accepted.begin(), accepted.end(), DType::kInt32) > 0;
    refuse(FOVEA_INVALID_TYPE, "{}: {}{}; accepted: {}{}", name, type_name(tensor.dtype),
           numbers && tensor.dtype == FOVEA_BOOL ? " (uint8_t)" : "", fmt::join(names, ", "), hint);
  }
}

void storage_of(const char* name, const fovea_tensor& tensor, bool shapes_only) {
  if (elements_of(tensor) == 0) {
    return;
  }
  const auto width = static_cast<std::int64_t>(size_of(static_cast<DType>(tensor.dtype)));
  const auto strides = strides_of(tensor);
  std::int64_t span = 0;
  for (int i = 0; i < tensor.rank; ++i) {
    std::int64_t reach = 0;
    if (strides[i] == std::numeric_limits<std::int64_t>::min() ||
        __builtin_mul_overflow(tensor.shape[i] - 1, std::abs(strides[i]), &reach) ||
        __builtin_add_overflow(span, reach, &span) || span > kMost / width) {
      refuse("{}: strides {} with shape {}; accepted: elements at most 2^50 bytes apart", name,
             text_of(strides.data(), tensor.rank), shape_of(tensor));
    }
  }
  if (tensor.data == nullptr && !shapes_only) {
    refuse("{}: data is NULL; accepted: NULL only without elements, and shape {} has {}", name, shape_of(tensor),
           elements_of(tensor));
  }
  // Of shapes alone, too: lengths are read wherever they are given.
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % static_cast<std::uintptr_t>(width) != 0) {
    refuse("{}: data at {}; accepted: a multiple of {}, the size of {}", name, fmt::ptr(tensor.data), width,
           type_name(tensor.dtype));
  }
}

const fovea_tensor& required(const char* name, const fovea_tensor* tensor, const char* accepted) {
  if (tensor == nullptr) {
    refuse("{}: not given; accepted: {}", name, accepted);
  }
  return *tensor;
}

void shape_is(const char* name, const fovea_tensor& tensor, const Dims& accepted, std::string_view names) {
  if (!std::equal(accepted.begin(), accepted.end(), tensor.shape, tensor.shape + tensor.rank)) {
    refuse("{}: shape {}; accepted: {}, {}", name, shape_of(tensor), names,
           text_of(accepted.begin(), static_cast<std::int64_t>(accepted.size())));
  }
}

}  // namespace fovea
