// SPDX-License-Identifier: Apache-2.0
//
// Elements of 16 bits: every value there is comes back, and every double goes to the nearest of them, ties to even,
// found by search in the sorted list of all.
#include "core/element.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <vector>

namespace fovea {
namespace {

template <class Format>
class ElementTest : public testing::Test {
 protected:
  // Positive finite values in ascending order: index is the bits.
  ElementTest() {
    for (std::uint32_t bits = 0; bits < Format::kInfinity; ++bits) {
      values.push_back(Format::to_double(static_cast<std::uint16_t>(bits)));
    }
  }

  std::uint16_t nearest(double x) const {
    const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const double magnitude = std::abs(x);
    const double last = values.back();
    const double step = last - values[values.size() - 2];
    if (magnitude >= last + step / 2) {  // half way to the number that would come next: that one is even
      return static_cast<std::uint16_t>(sign | Format::kInfinity);
    }
    const auto above = std::lower_bound(values.begin(), values.end(), magnitude);
    const auto high = static_cast<std::uint32_t>(std::min<std::ptrdiff_t>(above - values.begin(), values.size() - 1));
    const std::uint32_t low = high > 0 ? high - 1 : 0;
    const double to_high = std::abs(values[high] - magnitude);
    const double to_low = std::abs(magnitude - values[low]);
    const std::uint32_t chosen = to_high < to_low ? high : to_low < to_high ? low : high % 2 == 0 ? high : low;
    return static_cast<std::uint16_t>(sign | chosen);
  }

  std::vector<double> values;
};
using Formats = testing::Types<Half, Bfloat16>;
TYPED_TEST_SUITE(ElementTest, Formats);

TYPED_TEST(ElementTest, EveryValueComesBack) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const double value = TypeParam::to_double(static_cast<std::uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(TypeParam::to_double(TypeParam::from_double(value))));
    } else {
      EXPECT_EQ(TypeParam::from_double(value), bits);
    }
  }
  EXPECT_TRUE(std::is_sorted(this->values.begin(), this->values.end()));
}

TYPED_TEST(ElementTest, EveryDoubleGoesToTheNearest) {
  std::mt19937_64 engine(1);
  for (int n = 0; n < 200000; ++n) {
    // Near a value, near the middle of two, or anything at all.
    const auto at = engine() % (this->values.size() - 1);
    const double middle = (this->values[at] + this->values[at + 1]) / 2;
    const double choices[] = {middle, std::nextafter(middle, 1e300), std::nextafter(middle, -1e300),
                              std::nextafter(this->values[at], 1e300), std::bit_cast<double>(engine())};
    for (double x : choices) {
      if (std::isnan(x)) {
        continue;
      }
      ASSERT_EQ(TypeParam::from_double(x), this->nearest(x)) << x;
      ASSERT_EQ(TypeParam::from_double(-x), this->nearest(-x)) << x;
    }
  }
}

TEST(ElementTest, KnownValues) {
  EXPECT_EQ(Half::to_double(0x3C00), 1.0);
  EXPECT_EQ(Half::to_double(0x7BFF), 65504.0);
  EXPECT_EQ(Half::to_double(0x0001), 0x1p-24);
  EXPECT_EQ(Half::from_double(65519.99), 0x7BFF);
  EXPECT_EQ(Half::from_double(65520), 0x7C00);
  EXPECT_EQ(Half::from_double(-1e300), 0xFC00);
  EXPECT_EQ(Bfloat16::to_double(0x3F80), 1.0);
  EXPECT_EQ(Bfloat16::to_double(0x4049), 3.140625);
  EXPECT_EQ(Bfloat16::from_double(3.14159265358979), 0x4049);
  EXPECT_EQ(Bfloat16::to_double(0x0001), 0x1p-133);
  // Rounded once: to fp32 first this would be a tie, and go down.
  EXPECT_EQ(Bfloat16::from_double(1.00390625 + 0x1p-40), 0x3F81);
}

TEST(ElementTest, LoadsAndStoresEveryType) {
  for (const DType type : {DType::kFp64, DType::kFp32, DType::kFp16, DType::kBf16}) {
    std::uint64_t memory[2] = {};
    store(memory, type, 1, -1.5);
    EXPECT_EQ(load(memory, type, 1), -1.5);
    EXPECT_EQ(load(memory, type, 0), 0.0);
  }
  const std::uint8_t bools[] = {0, 1, 0x80};
  EXPECT_EQ(load(bools, DType::kBool, 0), 0);
  EXPECT_EQ(load(bools, DType::kBool, 2), 1);
}

}  // namespace
}  // namespace fovea
