// SPDX-License-Identifier: Apache-2.0
//
// The layout of a call's workspace: named regions, each at a multiple of 256 bytes from its beginning.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "math/scalar.h"

namespace fovea::cuda {

enum class Region : int {
  kNone = -1,  // the caller's own memory
  kQ,          // packed, or fp32 as pairs of fp16
  kK,
  kV,
  kGradOut,
  kBias,  // packed
  kBias2,
  kMaskBits,
  kMaskTiles,  // of sm90_backward
  kKeyTerm,
  kQueryTerm,
  kSizes,       // fp32: the largest numbers of q, k, v, do
  kPartialOut,  // keys in parts
  kPartialSum,
  kRowLse,  // backward
  kRowDelta,
  kRowTerm,
  kDqSum,
  kKeySums,  // of parts of a block of keys: dk's, then dv's
  kTurns,
  kColumnSum,
  kRowSum,
  kBiasSum,
  kBiasSum2,
  kSinkSum,
  kBiasFlags,  // tiles of a bias gradient that are computed again
  kBiasFlags2,
  kSchedule,  // of kernels whose blocks take tiles from a counter; counters of parts
  kCount
};

inline constexpr int kRegions = static_cast<int>(Region::kCount);
inline constexpr std::array<std::string_view, kRegions> kRegionNames = {
    "q",          "k",          "v",          "grad_out",   "bias",        "bias2",       "mask bits",
    "mask tiles", "key term",   "query term", "sizes",      "partial out", "partial sum", "row lse",
    "row delta",  "row terms",  "dq sum",     "key sums",   "turns",       "column sums", "row sums",
    "bias sums",  "bias2 sums", "sink sums",  "bias flags", "bias2 flags", "schedule"};

class Workspace {
 public:
  static constexpr math::i64 kAlignment = 256;

  Workspace() { offsets_.fill(-1); }

  void add(Region region, math::i64 bytes) {
    offsets_[static_cast<std::size_t>(region)] = bytes_;
    sizes_[static_cast<std::size_t>(region)] = bytes;
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  bool has(Region region) const { return offsets_[static_cast<std::size_t>(region)] >= 0; }
  math::i64 offset(Region region) const { return offsets_[static_cast<std::size_t>(region)]; }
  math::i64 size(Region region) const { return sizes_[static_cast<std::size_t>(region)]; }
  math::i64 bytes() const { return bytes_; }

 private:
  std::array<math::i64, kRegions> offsets_{};
  std::array<math::i64, kRegions> sizes_{};
  math::i64 bytes_ = 0;
};

}  // namespace fovea::cuda
