// SPDX-License-Identifier: Apache-2.0
//
// Dropout: the specification's known answers, every intermediate value included, Random123's own vectors, the torch
// rule against vectors from an independent implementation, thresholds, and whether decisions look like chance.
// tests/python/test_oracle_*.py compares whole masks with the oracle's.
#include "math/dropout.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "fovea/c.h"

namespace fovea::math {
namespace {

TEST(DropoutTest, PhiloxIsRandom123s) {
  const auto words = philox4x32<u32>({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0);
  EXPECT_EQ(words.w0, 0xd16cfe09u);
  EXPECT_EQ(words.w1, 0x94fdccebu);
  EXPECT_EQ(words.w2, 0x5001e420u);
  EXPECT_EQ(words.w3, 0x24126ea1u);
  const auto zeros = philox4x32<u32>({0, 0, 0, 0}, 0, 0);
  EXPECT_EQ(zeros.w0, 0x6627e8d5u);
  EXPECT_EQ(zeros.w3, 0x9b00dbd8u);
  const auto seven = philox2x32<7>(Words2<u32>{0x243f6a88, 0x85a308d3}, 0x13198a2e, 0x13198a2e);
  EXPECT_EQ(seven.x, 0xbedbbe6bu);
  EXPECT_EQ(seven.y, 0xe4c770b3u);
  const auto ten = philox2x32<10>(Words2<u32>{0x243f6a88, 0x85a308d3}, 0x13198a2e, 0x13198a2e);
  EXPECT_EQ(ten.x, 0xdd7ce038u);
  EXPECT_EQ(ten.y, 0xf62a4c12u);
}

struct KnownAnswer {
  u64 seed, offset, n;
  u32 i, j, u;
  u32 k0, k1, w0, w1;
  u32 folded_i, folded_j;
  u32 x, y;
};
constexpr u64 kOnes = 0xffffffffffffffff;
constexpr KnownAnswer kKnownAnswers[] = {
    {0, 0, 0, 0, 0, 9096, 0x8f153672, 0xaa0515e7, 0x1eb61a26, 0x9941fcb2, 0, 0, 0x06a62388, 0x65087b1c},
    {0, 0, 0, 0, 8, 1702, 0x8f153672, 0xaa0515e7, 0x1eb61a26, 0x9941fcb2, 0, 0, 0x06a62388, 0x65087b1c},
    {0, 0, 0, 8, 0, 31516, 0x8f153672, 0xaa0515e7, 0x1eb61a26, 0x9941fcb2, 0, 0, 0x06a62388, 0x65087b1c},
    {0, 0, 0, 8, 8, 25864, 0x8f153672, 0xaa0515e7, 0x1eb61a26, 0x9941fcb2, 0, 0, 0x06a62388, 0x65087b1c},
    {0, 0, 0, 0, 1, 46128, 0x8f153672, 0xaa0515e7, 0x1eb61a26, 0x9941fcb2, 0, 1, 0x7645b430, 0x45ab92a6},
    {0, 0, 0, 1, 0, 16118, 0x8f153672, 0xaa0515e7, 0x1eb61a26, 0x9941fcb2, 1, 0, 0x89f73ef6, 0x064eba66},
    {1, 0, 0, 0, 0, 18188, 0xe8c4af4e, 0x8d2f1c6a, 0x0d8a8b8c, 0xe23442db, 0, 0, 0x2e65470c, 0xe50e7a78},
    {0, 1, 0, 0, 0, 63250, 0x9e3dc1cd, 0xbe8ad2ca, 0xa82652c1, 0x01301369, 0, 0, 0xe7def712, 0xfceef256},
    {0, 0, 1, 0, 0, 47424, 0xa1fe6ac4, 0x9e7daa01, 0x9dffb87e, 0x84f8a057, 0, 0, 0xc553b940, 0x1fcb5ee1},
    {0x2a, 7, 5, 100, 200, 45306, 0xa608880c, 0x6b868009, 0x050cadcf, 0x3cce542c, 52, 96, 0xb0fad92f, 0xd9da196f},
    {0x123456789abcdef, 0xfedcba9876543210, 0x1fff, 16383, 16376, 17031, 0x998c3aec, 0xb75bd4d2, 0x1a0f740b, 0x300d56cd,
     8191, 8184, 0x519ce1e2, 0x4287e3f3},
    {kOnes, kOnes, 0x123456789, 131071, 1000000, 43033, 0x527bae81, 0xcb1f1065, 0x9187b2a6, 0x14cddaac, 65535, 500000,
     0x8c87434f, 0x14f0a819},
};

TEST(DropoutTest, KnownAnswersOfTheSpecification) {
  for (const KnownAnswer& a : kKnownAnswers) {
    SCOPED_TRACE(a.u);
    const auto head = DropoutHead::make(a.seed, a.offset, a.n);
    EXPECT_EQ(head.k0, a.k0);
    EXPECT_EQ(head.k1, a.k1);
    EXPECT_EQ(head.w0, a.w0);
    EXPECT_EQ(head.w1, a.w1);
    EXPECT_EQ(dropout_fold(a.i), a.folded_i);
    EXPECT_EQ(dropout_fold(a.j), a.folded_j);
    const auto bits = dropout_call<u32>(head, a.folded_i, a.folded_j);
    EXPECT_EQ(bits.x, a.x);
    EXPECT_EQ(bits.y, a.y);
    EXPECT_EQ(dropout_value(head, a.i, a.j), a.u);
  }
}

TEST(DropoutTest, TorchUniformsOfAnIndependentImplementation) {
  struct {
    u64 seed, index;
    float uniform;
  } const known[] = {
      {0, 0, 0x1.989fa4p-2F},
      {0, 1, 0x1.c2d38cp-1F},
      {0, 2, 0x1.78af58p-1F},
      {0, 3, 0x1.3601b8p-1F},
      {0x2a, 0, 0x1.39d5e0p-1F},
      {0x2a, 5, 0x1.4ee9b4p-2F},
      {0x123456789abcdef, 0xfffffffe, 0x1.afa482p-1F},
      {0x123456789abcdef, 0x100000001, 0x1.b4ba10p-2F},
      {kOnes, kOnes, 0x1.c8a830p-3F},
      {7, 0x10000000000, 0x1.555152p-1F},
  };
  for (const auto& k : known) {
    EXPECT_EQ(torch_uniform(k.seed, k.index), k.uniform) << k.seed << ' ' << k.index;
  }
}

TEST(DropoutTest, TorchElementsAreNumberedThroughBatchAndHeads) {
  const auto dropout = Dropout::make(Rng::kTorchMemEfficient, 0.5, 42, 10);
  const i64 rows = 3;
  const i64 keys = 5;
  for (u64 n = 0; n < 4; ++n) {
    const auto head = DropoutOfHead::make(dropout, n, rows * keys, keys);
    for (i64 i = 0; i < rows; ++i) {
      for (i64 j = 0; j < keys; ++j) {
        EXPECT_EQ(head.keep(i, j), torch_uniform(42, 10 + n * rows * keys + i * keys + j) > 0.5F);
      }
    }
  }
}

TEST(DropoutTest, Thresholds) {
  const auto make = [](double p) { return Dropout::make(Rng::kFovea, p, 0, 0); };
  EXPECT_EQ(make(0).threshold, 0u);
  EXPECT_FALSE(make(0).active());
  EXPECT_EQ(make(0).factor(), 1.0);
  EXPECT_EQ(make(1e-9).threshold, 0u);  // nearer to 0 than to 2^-16: drops nothing
  EXPECT_FALSE(make(1e-9).active());
  EXPECT_EQ(make(0.5 / 65536).threshold, 1u);
  EXPECT_EQ(make(0.1).threshold, 6554u);
  EXPECT_EQ(make(0.1).factor(), 65536.0 / 58982);
  EXPECT_EQ(make(0.5).factor(), 2.0);
  EXPECT_EQ(make(1).threshold, 65536u);
  EXPECT_TRUE(make(1).keeps_nothing());
  EXPECT_EQ(make(1).factor(), 0.0);
  EXPECT_TRUE(make(1 - 0.4 / 65536).keeps_nothing());
  EXPECT_FALSE(make(1 - 0.6 / 65536).keeps_nothing());
  const auto torch = [](double p) { return Dropout::make(Rng::kTorchMemEfficient, p, 0, 0); };
  EXPECT_FALSE(torch(0).active());
  EXPECT_TRUE(torch(1e-9).active());
  EXPECT_TRUE(torch(1).keeps_nothing());
  EXPECT_NEAR(torch(0.1).factor(), 1 / 0.9, 1e-7);
}

// u(0, 0) is 9096 for seed, offset and head 0: kept by a threshold of as much, dropped by the next.
TEST(DropoutTest, AValueThatIsTheThresholdIsKept) {
  for (const u32 threshold : {9095u, 9096u, 9097u}) {
    const auto dropout = Dropout::make(Rng::kFovea, threshold / 65536.0, 0, 0);
    EXPECT_EQ(dropout.threshold, threshold);
    EXPECT_EQ(DropoutOfHead::make(dropout, 0, 1, 1).keep(0, 0), threshold <= 9096);
  }
  const float uniform = torch_uniform(42, 5);
  for (const float p : {std::nextafter(uniform, 0.0F), uniform, std::nextafter(uniform, 1.0F)}) {
    const auto dropout = Dropout::make(Rng::kTorchMemEfficient, p, 42, 5);
    EXPECT_EQ(DropoutOfHead::make(dropout, 0, 1, 1).keep(0, 0), uniform > p);
  }
}

TEST(DropoutTest, FourElementsOfACallAreItsFourQuarters) {
  const auto head = DropoutHead::make(3, 4, 5);
  for (u32 i = 0; i < 64; ++i) {
    for (u32 j = 0; j < 64; ++j) {
      const auto bits = dropout_call<u32>(head, dropout_fold(i), dropout_fold(j));
      const u64 all = u64(bits.y) << 32 | bits.x;
      EXPECT_EQ(dropout_value(head, i, j), all >> (32 * (i >> 3 & 1) + 16 * (j >> 3 & 1)) & 0xFFFF);
      EXPECT_EQ(dropout_fold(i ^ 8), dropout_fold(i));
    }
  }
}

// Standard deviations by which a count of `kept` in `count` is off, if the probability is `q`.
double deviations(double kept, double count, double q) { return (kept - count * q) / std::sqrt(count * q * (1 - q)); }

TEST(DropoutTest, ACallInTwoPartsIsTheSameCall) {
  std::mt19937_64 engine(5);
  for (int trial = 0; trial < 200; ++trial) {
    const DropoutHead head = DropoutHead::make(engine(), engine(), engine());
    const u32 i = u32(engine());
    const DropoutRow<u32> row = dropout_row<u32>(head, i);
    for (int column = 0; column < 10; ++column) {
      const u32 j = u32(engine());
      const Words2<u32> whole = dropout_call<u32>(head, i, j);
      const Words2<u32> parts = dropout_call<u32>(head, row, j);
      EXPECT_EQ(whole.x, parts.x);
      EXPECT_EQ(whole.y, parts.y);
    }
  }
}

TEST(DropoutTest, DecisionsLookLikeChance) {
  constexpr int kSize = 512;
  for (const Rng rng : {Rng::kFovea, Rng::kTorchMemEfficient}) {
    for (const double p : {0.1, 0.5, 0.9}) {
      const auto dropout = Dropout::make(rng, p, 1234, 5678);
      const double q = 1 / dropout.factor();
      const auto mask = [&](const Dropout& d, u64 n) {
        const auto head = DropoutOfHead::make(d, n, kSize * kSize, kSize);
        std::vector<int> kept(kSize * kSize);
        for (int i = 0; i < kSize; ++i) {
          for (int j = 0; j < kSize; ++j) {
            kept[i * kSize + j] = head.keep(i, j);
          }
        }
        return kept;
      };
      const auto first = mask(dropout, 0);
      double sum = 0;
      for (const int kept : first) {
        sum += kept;
      }
      EXPECT_LT(std::abs(deviations(sum, kSize * kSize, q)), 4.5);
      // Two of a distance, or of two masks, are both kept as often as two independent ones.
      const auto both = [&](const std::vector<int>& other, int shift) {
        double pairs = 0;
        int count = 0;
        for (int n = 0; n + shift < kSize * kSize; ++n) {
          pairs += first[n] & other[n + shift];
          ++count;
        }
        // Overlapping pairs: the variance is below three times that of independent ones.
        return std::abs(deviations(pairs, count, q * q)) / std::sqrt(3.0);
      };
      for (const int shift : {1, 7, 8, 16, kSize, 8 * kSize, 8 * kSize + 8, 16 * kSize + 16}) {
        EXPECT_LT(both(first, shift), 4.5) << shift;
      }
      EXPECT_LT(both(mask(dropout, 1), 0), 4.5);
      Dropout other = dropout;
      other.seed += 1;
      EXPECT_LT(both(mask(other, 0), 0), 4.5);
      other = dropout;
      other.offset += u64(1) << 32;
      EXPECT_LT(both(mask(other, 0), 0), 4.5);
    }
  }
}

TEST(DropoutTest, TheCAbiGivesTheSameDecisions) {
  for (const fovea_rng rng : {FOVEA_RNG_FOVEA, FOVEA_RNG_TORCH_MEM_EFFICIENT}) {
    for (const double p : {0.0, 0.3, 1.0}) {
      constexpr i64 kBatch = 2, kHeads = 3, kRows = 17, kKeys = 19;
      std::vector<std::uint8_t> mask(kBatch * kHeads * kRows * kKeys, 7);
      ASSERT_EQ(fovea_dropout_mask(kBatch, kHeads, kRows, kKeys, p, 99, 1, rng, mask.data()), FOVEA_OK)
          << fovea_last_error();
      const auto dropout = Dropout::make(static_cast<Rng>(rng), p, 99, 1);
      for (i64 n = 0; n < kBatch * kHeads; ++n) {
        const auto head = DropoutOfHead::make(dropout, n, kRows * kKeys, kKeys);
        for (i64 at = 0; at < kRows * kKeys; ++at) {
          const bool kept = p == 0 || (p < 1 && head.keep(at / kKeys, at % kKeys));
          ASSERT_EQ(mask[n * kRows * kKeys + at], kept);
        }
      }
    }
  }
}

static_assert(dropout_value(DropoutHead::make(0, 0, 0), 0, 0) == 9096);  // computable at compile time

}  // namespace
}  // namespace fovea::math
