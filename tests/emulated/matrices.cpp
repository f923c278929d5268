// SPDX-License-Identifier: Apache-2.0
//
// What a warp does with matrices: ldmatrix, stmatrix, mma, wgmma. Sums are of fp32 in the order of the inner dimension.
#include "core/element.h"
#include "internals.h"

namespace emulated {
namespace {

Block& own() { return *machine.now->block; }

float number(u16 bits, bool bf16) { return bf16 ? of_bf16(bits) : of_fp16(bits); }

}  // namespace

// ---- numbers ----

u16 to_bf16(float x) { return x != x ? 0x7fff : fovea::Bfloat16::from_double(x); }
u16 to_fp16(float x) { return x != x ? 0x7fff : fovea::Half::from_double(x); }
float of_fp16(u16 x) {
  static const std::vector<float> all = [] {
    std::vector<float> numbers(1 << 16);
    for (u32 bits = 0; bits < numbers.size(); ++bits) {
      numbers[bits] = static_cast<float>(fovea::Half::to_double(u16(bits)));
    }
    return numbers;
  }();
  return all[x];
}

// ---- 8 x 8 matrices ----

namespace {

struct Row {
  u32 address;
  u32 values[4];
};

}  // namespace

void load_matrices(u32 (&to)[4], u32 address, bool transposed) {
  Row mine{address, {}};
  meet(Meeting::kLoadMatrices, {&mine, &to}, [transposed](Warp& warp) {
    u16 x[4][8][8];
    for (int lane = 0; lane < 32; ++lane) {
      read_shared(static_cast<const Row*>(warp.slots[lane].in)->address, x[lane / 8][lane % 8], 16);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4;
      const int column = lane % 4 * 2;
      auto& to = *static_cast<u32(*)[4]>(warp.slots[lane].out);
      for (int n = 0; n < 4; ++n) {
        to[n] = transposed ? x[n][column][row] | u32{x[n][column + 1][row]} << 16
                           : x[n][row][column] | u32{x[n][row][column + 1]} << 16;
      }
    }
  });
}

void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d, bool transposed) {
  const Row mine{address, {a, b, c, d}};
  meet(Meeting::kStoreMatrices, {&mine, nullptr}, [transposed](Warp& warp) {
    u16 x[4][8][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4;
      const int column = lane % 4 * 2;
      const auto& given = *static_cast<const Row*>(warp.slots[lane].in);
      for (int n = 0; n < 4; ++n) {
        (transposed ? x[n][column][row] : x[n][row][column]) = u16(given.values[n]);
        (transposed ? x[n][column + 1][row] : x[n][row][column + 1]) = u16(given.values[n] >> 16);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      write_shared(static_cast<const Row*>(warp.slots[lane].in)->address, x[lane / 8][lane % 8], 16);
    }
  });
}

// ---- mma ----

namespace {

struct Factors {
  const u32* a;
  u32 b[2];
};

// Element (row, k) of a fragment of a.
float element_of_a(const u32* registers_of_lane, int row, int k, bool bf16) {
  const u32 pair = registers_of_lane[row / 8 + k / 8 * 2];
  return number(u16(pair >> 16 * (k % 2)), bf16);
}

}  // namespace

void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, bool bf16) {
  const Factors mine{a, {b0, b1}};
  meet(Meeting::kMma, {&mine, d}, [bf16](Warp& warp) {
    const auto given = [&](int lane) -> const Factors& { return *static_cast<const Factors*>(warp.slots[lane].in); };
    float b[16][8];
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 8; ++n) {
        b[k][n] = number(u16(given(n * 4 + k % 8 / 2).b[k / 8] >> 16 * (k % 2)), bf16);
      }
    }
    for (int row = 0; row < 16; ++row) {
      float sums[8] = {};
      for (int k = 0; k < 16; ++k) {
        const float factor = element_of_a(given(row % 8 * 4 + k % 8 / 2).a, row, k, bf16);
        for (int n = 0; n < 8; ++n) {
          sums[n] += factor * b[k][n];
        }
      }
      for (int n = 0; n < 8; ++n) {
        static_cast<float*>(warp.slots[row % 8 * 4 + n / 2].out)[row / 8 * 2 + n % 2] += sums[n];
      }
    }
  });
}

// ---- wgmma ----

namespace {

// Element (row, k) of an operand in shared memory, by its descriptor; `inside`: the operand's rows are the inner
// dimension. "Shared Memory Matrix Layout" in the PTX manual.
float element_at(const Block& block, u64 descriptor, bool inside, int row, int k, bool bf16) {
  const u32 start = (descriptor & 0x3fff) << 4;
  const u32 panel = (descriptor >> 16 & 0x3fff) << 4;
  const u32 stride = (descriptor >> 32 & 0x3fff) << 4;
  const u32 mode = u32(descriptor >> 62);  // 1, 2, 3: rows of 128, 64, 32 bytes
  const u32 width = 256u >> mode;
  const u32 columns = width / 2;
  u32 address =
      inside ? start + u32(row) / columns * panel + u32(k) / 8 * stride + u32(k) % 8 * width + u32(row) % columns * 2
             : start + u32(row) / 8 * stride + u32(row) % 8 * width + u32(k) * 2;
  address ^= (address >> 7 & (width / 16 - 1)) << 4;
  if (address < kFirst || address + 2 > block.memory.size()) {
    fail("an operand of wgmma lies outside of shared memory, at %d", int(address) - int(kFirst));
  }
  if (block.filling[address / 4] != 0) {
    fail("wgmma reads shared memory at %u, which a copy is filling", address - kFirst);
  }
  u16 bits;
  std::memcpy(&bits, block.memory.data() + address, 2);
  return number(bits, bf16);
}

void multiply(const Block& block, u32 first_row, const Product& product) {
  static float b[16][256];
  const Wgmma& of = product.of;
  for (int n = 0; n < of.columns; ++n) {
    for (int k = 0; k < 16; ++k) {
      b[k][n] = element_at(block, of.b, of.rows_inside, n, k, of.bf16);
    }
  }
  for (int row = 0; row < 16; ++row) {
    float sums[256] = {};
    for (int k = 0; k < 16; ++k) {
      const float factor = of.registers != nullptr
                               ? element_of_a(product.registers[row % 8 * 4 + k % 8 / 2], row, k, of.bf16)
                               : element_at(block, of.a, of.a_columns, int(first_row) + row, k, of.bf16);
      for (int n = 0; n < of.columns; ++n) {
        sums[n] += factor * b[k][n];
      }
    }
    for (int n = 0; n < of.columns; ++n) {
      float& d = product.d[row % 8 * 4 + n % 8 / 2][n / 8 * 4 + row / 8 * 2 + n % 2];
      d = (of.accumulate ? d : 0.F) + sums[n];
    }
  }
}

u32 first_row_of_warp() { return machine.now->thread / 32 % 4 * 16; }

}  // namespace

void wgmma(const Wgmma& mine) {
  meet(Meeting::kWgmma, {&mine, nullptr}, [](Warp& warp) {
    Product product{};
    product.of = *static_cast<const Wgmma*>(warp.slots[0].in);
    product.group = warp.groups;
    for (int lane = 0; lane < 32; ++lane) {
      const auto& of = *static_cast<const Wgmma*>(warp.slots[lane].in);
      if (of.a != product.of.a || of.b != product.of.b || of.accumulate != product.of.accumulate ||
          of.columns != product.of.columns) {
        fail("a warp's lanes give wgmma different operands");
      }
      product.d[lane] = of.d;
      if (of.registers != nullptr) {
        std::memcpy(product.registers[lane], of.registers, sizeof product.registers[lane]);
      }
    }
    if (machine.deferred) {
      warp.products.push_back(product);
    } else {
      multiply(own(), first_row_of_warp(), product);
    }
  });
}

void wgmma_fence() {
  meet(Meeting::kWgmmaFence, {}, [](Warp&) {});
}

void wgmma_commit() {
  meet(Meeting::kWgmmaCommit, {}, [](Warp& warp) { ++warp.groups; });
}

void wgmma_wait(int pending) {
  machine.wait({});  // products take their time: others may run meanwhile
  meet(Meeting::kWgmmaWait, {}, [pending](Warp& warp) {
    while (!warp.products.empty() && warp.products.front().group + u64(pending) < warp.groups) {
      multiply(own(), first_row_of_warp(), warp.products.front());
      warp.products.pop_front();
    }
  });
}

}  // namespace emulated
