// SPDX-License-Identifier: Apache-2.0
//
// One element of a tensor of any floating type, read as a double and written with a single rounding, to nearest,
// ties to even. For code where plainness matters more than speed: the reference and the checks.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "core/problem.h"

namespace fovea {

// A binary format of 16 bits by the width of its mantissa; the exponent gets the rest.
template <int kMantissaBits>
struct Format16 {
  static constexpr int kExponentBits = 15 - kMantissaBits;
  static constexpr int kLowestExponent = 2 - (1 << (kExponentBits - 1));  // of a normal number
  static constexpr std::uint32_t kInfinity = ((1u << kExponentBits) - 1) << kMantissaBits;

  static constexpr double to_double(std::uint16_t bits) {
    const double sign = (bits & 0x8000u) != 0 ? -1 : 1;
    const std::uint32_t magnitude = bits & 0x7FFFu;
    if (magnitude >= kInfinity) {
      return magnitude == kInfinity ? sign * std::numeric_limits<double>::infinity()
                                    : std::numeric_limits<double>::quiet_NaN();
    }
    const int exponent = static_cast<int>(magnitude >> kMantissaBits);
    const std::uint32_t fraction = magnitude & ((1u << kMantissaBits) - 1);
    const std::uint32_t significand = exponent == 0 ? fraction : fraction | (1u << kMantissaBits);
    const int power = (exponent == 0 ? 1 : exponent) - 1 + kLowestExponent - kMantissaBits;
    return sign * significand * std::bit_cast<double>(static_cast<std::uint64_t>(power + 1023) << 52);
  }

  static constexpr std::uint16_t from_double(double value) {
    const std::uint64_t bits = std::bit_cast<std::uint64_t>(value);
    const std::uint32_t sign = static_cast<std::uint32_t>(bits >> 48) & 0x8000u;
    const std::uint64_t fraction = bits & ((std::uint64_t{1} << 52) - 1);
    const int exponent = static_cast<int>((bits >> 52) & 0x7FF) - 1023;
    if (exponent == 1024) {
      const std::uint32_t quiet = fraction != 0 ? 1u << (kMantissaBits - 1) : 0;
      return static_cast<std::uint16_t>(sign | kInfinity | quiet);
    }
    const std::uint64_t significand = fraction | (std::uint64_t{1} << 52);
    const int below = exponent < kLowestExponent ? kLowestExponent - exponent : 0;  // how far into the denormals
    const int shift = 52 - kMantissaBits + below;
    if (shift >= 54) {
      return static_cast<std::uint16_t>(sign);
    }
    const std::uint64_t half = std::uint64_t{1} << (shift - 1);
    const std::uint64_t rest = significand & (2 * half - 1);
    std::uint64_t rounded = significand >> shift;
    if (rest > half || (rest == half && (rounded & 1) != 0)) {
      ++rounded;
    }
    // A carry out of the mantissa raises the exponent, and past the largest number gives infinity, by itself.
    const std::uint64_t base = below > 0 ? 0 : static_cast<std::uint64_t>(exponent - kLowestExponent) << kMantissaBits;
    const std::uint64_t magnitude = base + rounded;
    return static_cast<std::uint16_t>(sign |
                                      (magnitude < kInfinity ? static_cast<std::uint32_t>(magnitude) : kInfinity));
  }
};

using Half = Format16<10>;
using Bfloat16 = Format16<7>;

// Element number `index` of `data`; `type` is a floating type or bool.
inline double load(const void* data, DType type, std::int64_t index) {
  switch (type) {
    case DType::kFp64:
      return static_cast<const double*>(data)[index];
    case DType::kFp32:
      return static_cast<const float*>(data)[index];
    case DType::kFp16:
      return Half::to_double(static_cast<const std::uint16_t*>(data)[index]);
    case DType::kBf16:
      return Bfloat16::to_double(static_cast<const std::uint16_t*>(data)[index]);
    case DType::kBool:
      return static_cast<const std::uint8_t*>(data)[index] != 0 ? 1 : 0;
    default:
      return std::numeric_limits<double>::quiet_NaN();
  }
}

inline void store(void* data, DType type, std::int64_t index, double value) {
  switch (type) {
    case DType::kFp64:
      static_cast<double*>(data)[index] = value;
      break;
    case DType::kFp32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      break;
    case DType::kFp16:
      static_cast<std::uint16_t*>(data)[index] = Half::from_double(value);
      break;
    case DType::kBf16:
      static_cast<std::uint16_t*>(data)[index] = Bfloat16::from_double(value);
      break;
    default:
      break;
  }
}

}  // namespace fovea
