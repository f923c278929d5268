// SPDX-License-Identifier: Apache-2.0
//
// Tensor maps of the kernels for Hopper: rows of a tensor by logical coordinates, in boxes that are panels of a tile.
// First which tensors can have one, which the choice of a kernel asks; then how it is made, for a launch.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/device/args.h"
#include "cuda/device/sm90/args.h"
#include "cuda/device/sm90/odd_rows.h"
#include "cuda/device/spec.h"
#include "cuda/device/tile/panels.h"
#include "cuda/jit/driver.h"
#include "math/rows.h"

namespace fovea::cuda {

// ---- what they can describe: coordinates of 32 bits, strides under 2^40 bytes that are not negative ----

inline constexpr std::int64_t kMostMapRows = std::int64_t{1} << 29;  // a tile's last row is counted in int, too

constexpr bool map_takes_stride(std::int64_t stride, std::int64_t element_bytes) {
  constexpr std::int64_t kMostBytes = std::int64_t{1} << 40;
  return stride >= 0 && stride * element_bytes < kMostBytes;
}

constexpr bool has_tensor_map(const math::Strides& s, std::int64_t element_bytes) {
  return map_takes_stride(s.batch1, element_bytes) && map_takes_stride(s.batch2, element_bytes) &&
         map_takes_stride(s.head, element_bytes) && map_takes_stride(s.row, element_bytes);
}

// Where a broadcast row is no row to copy: of tensors that have a row for each query or key.
constexpr bool has_row_map(const math::Strides& s, std::int64_t rows) {
  constexpr std::int64_t kBytes = 2;
  return has_tensor_map(s, kBytes) && (rows <= 1 || s.row > 0);
}

// ---- how they are made ----

static_assert(sizeof(TensorMap) == sizeof(jit::cu::TensorMap));

// A tensor by rows of `columns`, its box a panel.
struct Mapped {
  Tensor tensor;
  jit::cu::TensorMapType type = jit::cu::TensorMapType::kBfloat16;
  i64 columns = 0;
  i64 rows = 0;
  i64 heads = 1;
  i64 batch2 = 1;
  i64 batch1 = 1;
  int box_columns = 0;
  int box_rows = 0;
};

inline jit::TensorMapShape shape_of(const Mapped& mapped, Has& has) {
  const i64 bytes = mapped.type == jit::cu::TensorMapType::kFloat32 ? 4 : 2;
  constexpr i64 kAnyStride = 16;  // of a dimension with one index
  const math::Strides& s = mapped.tensor.strides;
  jit::TensorMapShape shape;
  shape.type = mapped.type;
  shape.rank = 5;
  const auto dimension = [&](std::size_t n, i64 extent, i64 stride) {
    const bool moves = extent > 1 && stride != 0;
    shape.dims[n] = static_cast<std::uint64_t>(moves ? extent : 1);
    shape.strides[n - 1] = static_cast<std::uint64_t>(moves ? stride * bytes : kAnyStride);
    return moves ? 1 : 0;
  };
  shape.dims[0] = static_cast<std::uint64_t>(mapped.columns);
  dimension(1, mapped.rows, s.row);
  has.head = dimension(2, mapped.heads, s.head);
  has.batch2 = dimension(3, mapped.batch2, s.batch2);
  has.batch1 = dimension(4, mapped.batch1, s.batch1);
  shape.box = {static_cast<unsigned>(mapped.box_columns), static_cast<unsigned>(mapped.box_rows), 1, 1, 1};
  const i64 row_bytes = mapped.box_columns * bytes;
  shape.swizzle = row_bytes == 128  ? jit::cu::TensorMapSwizzle::k128
                  : row_bytes == 64 ? jit::cu::TensorMapSwizzle::k64
                                    : jit::cu::TensorMapSwizzle::k32;
  return shape;
}

// Of what `mapped` has rows of: heads and batch entries a number of rows apart.
inline NumberedRows numbered(const Mapped& mapped) {
  const math::Strides& s = mapped.tensor.strides;
  const auto rows_between = [&](i64 count, i64 stride) { return count > 1 ? static_cast<int>(stride / s.row) : 0; };
  return {static_cast<unsigned short*>(mapped.tensor.data), s.row, rows_between(mapped.heads, s.head),
          rows_between(mapped.batch2, s.batch2), rows_between(mapped.batch1, s.batch1)};
}
// A map for each class of rows, its box those rows of a tile with 8 columns more.
inline void encode(const jit::Driver& driver, TensorMap (&to)[kRowClasses], const Mapped& mapped) {
  constexpr i64 kBytes = 2;
  constexpr i64 kGrain = 16;
  const NumberedRows n = numbered(mapped);
  const i64 rows =
      mapped.rows + (mapped.heads - 1) * n.head + (mapped.batch2 - 1) * n.batch2 + (mapped.batch1 - 1) * n.batch1;
  for (int r = 0; r < kRowClasses; ++r) {
    const int before = columns_before(reinterpret_cast<std::uintptr_t>(n.data), n.pitch, r);
    jit::TensorMapShape shape;
    shape.type = mapped.type;
    shape.rank = 5;
    shape.dims = {static_cast<std::uint64_t>(before + mapped.columns),
                  static_cast<std::uint64_t>((rows - r + kRowClasses - 1) / kRowClasses), 1, 1, 1};
    shape.strides = {static_cast<std::uint64_t>(n.pitch * kRowClasses * kBytes), kGrain, kGrain, kGrain};
    shape.box = {static_cast<unsigned>(mapped.box_columns + 8), static_cast<unsigned>(mapped.box_rows / kRowClasses), 1,
                 1, 1};
    shape.swizzle = jit::cu::TensorMapSwizzle::kNone;
    const jit::cu::TensorMap map = jit::encode_tensor_map(driver, n.data + r * n.pitch - before, shape);
    std::memcpy(&to[r], &map, sizeof(map));
  }
}

inline jit::cu::TensorMapType map_type(Type type) {
  return type == Type::kBf16 ? jit::cu::TensorMapType::kBfloat16 : jit::cu::TensorMapType::kFloat16;
}
inline jit::cu::TensorMapType map_type(BiasTile type) {
  return type == BiasTile::kBf16   ? jit::cu::TensorMapType::kBfloat16
         : type == BiasTile::kFp16 ? jit::cu::TensorMapType::kFloat16
                                   : jit::cu::TensorMapType::kFloat32;
}

// Rows of q, k, v, or what has such rows: in packed tensors sequences follow one another.
inline Mapped map_of_rows(const math::Rows& rows, const Tensor& tensor, Type type, i64 columns, i64 count, i64 heads,
                          int box_columns, int box_rows) {
  const i64 batch2 = rows.packed() ? 1 : rows.batch2;
  const i64 batch1 = rows.packed() ? 1 : rows.batch1;
  return {tensor, map_type(type), columns, count, heads, batch2, batch1, box_columns, box_rows};
}

// Rows of a bias with queries and keys. A packed bias has no more of either than the longest sequences.
inline Mapped map_of_bias(const math::Rows& rows, const Tensor& tensor, BiasTile type, int box_columns, int box_rows) {
  return {tensor,      map_type(type), rows.limit_k, rows.limit_q, rows.heads_q,
          rows.batch2, rows.batch1,    box_columns,  box_rows};
}

inline void encode(const jit::Driver& driver, TensorMap& to, Has& has, const Mapped& mapped) {
  const jit::cu::TensorMap map = jit::encode_tensor_map(driver, mapped.tensor.data, shape_of(mapped, has));
  std::memcpy(&to, &map, sizeof(map));
}

}  // namespace fovea::cuda
