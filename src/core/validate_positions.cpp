// SPDX-License-Identifier: Apache-2.0
//
// Where rows and keys are in a larger problem, for the band, ALiBi and dropout; and the numbers of dropout's streams.
#include <algorithm>
#include <utility>

#include "core/validator.h"

namespace fovea {
namespace {

// Every sum and difference of two positions, of a length and of a window's side fits 64 bits.
constexpr std::int64_t kMostPosition = std::int64_t{1} << 40;

// Rule fovea decides about {i, i + 8} x {j, j + 8} by one random number: blocks of 16 rows and columns stay whole.
constexpr std::int64_t kBlockOfDropout = 16;

bool in_range(std::int64_t position) { return -kMostPosition < position && position < kMostPosition; }

}  // namespace

void Validator::positions() {
  problem_.positions = (given_.flags & FOVEA_POSITIONS) != 0;
  if (!problem_.positions) {
    without_positions();
    return;
  }
  if (given_.align != FOVEA_BOTTOM_RIGHT) {
    refuse("align: top left beside positions; accepted: the default, as positions align queries and keys");
  }
  for (const auto& [name, value] :
       {std::pair("position_q", given_.position_q), std::pair("position_k", given_.position_k)}) {
    if (!in_range(value)) {
      refuse("{}: {}; accepted: under 2^40 in size", name, value);
    }
  }
  problem_.position_q = given_.position_q;
  problem_.position_k = given_.position_k;
  problem_.has_positions_q = given_.positions_q != nullptr;
  problem_.has_positions_k = given_.positions_k != nullptr;
  call_.positions_q = position_tensor("positions_q", given_.positions_q, problem_.positions_q);
  call_.positions_k = position_tensor("positions_k", given_.positions_k, problem_.positions_k);
  const bool dropout = problem_.dropout > 0;
  if (dropout && problem_.rng != math::Rng::kFovea) {
    refuse("rng: FOVEA_RNG_TORCH_MEM_EFFICIENT with FOVEA_POSITIONS and dropout; accepted: FOVEA_RNG_FOVEA");
  }
  check_positions('q', problem_.position_q, problem_.positions_q, dropout, call_.rows.limit_q);
  check_positions('k', problem_.position_k, problem_.positions_k, dropout, call_.rows.limit_k);
}

void Validator::without_positions() const {
  for (const auto& [name, value] :
       {std::pair("position_q", given_.position_q), std::pair("position_k", given_.position_k)}) {
    if (value != 0) {
      refuse("{}: {} without FOVEA_POSITIONS; accepted: 0, or the flag, which says that positions are meant", name,
             value);
    }
  }
  for (const auto& [name, tensor] :
       {std::pair("positions_q", given_.positions_q), std::pair("positions_k", given_.positions_k)}) {
    if (tensor != nullptr) {
      refuse("{}: given without FOVEA_POSITIONS; accepted: NULL, or the flag, which says that positions are meant",
             name);
    }
  }
}

math::Lengths Validator::position_tensor(const char* name, const fovea_tensor* tensor, Ints& values) {
  if (tensor == nullptr) {
    return {};
  }
  type_of(name, *tensor, {DType::kInt64});
  shape_is(name, *tensor, {problem_.batch()}, "(B)");
  storage(name, *tensor);
  const math::Lengths view = lengths_view(*tensor);
  if (view && readable()) {
    values.reserve(static_cast<std::size_t>(problem_.batch()));
    for (std::int64_t b = 0; b < problem_.batch(); ++b) {
      values.push_back(view[b]);
    }
  }
  return view;
}

void check_positions(char side, std::int64_t first, const Ints& values, bool dropout, std::int64_t rows) {
  constexpr std::int64_t kMostWithDropout = std::int64_t{1} << 32;
  const auto check = [&](std::int64_t position, const std::string& name) {
    if (dropout && position % kBlockOfDropout != 0) {
      refuse("{}: {}; accepted with dropout: a multiple of 16", name, position);
    }
    if (dropout && (position < 0 || position + rows > kMostWithDropout)) {
      refuse("{}: {} with up to {} rows; accepted with dropout: positions of 0 to 2^32 - 1", name, position, rows);
    }
  };
  if (values.empty()) {
    check(first, fmt::format("position_{}", side));
  }
  for (std::size_t b = 0; b < values.size(); ++b) {
    if (!in_range(values[b]) || !in_range(first + values[b])) {
      refuse("positions_{}: {} at index {}, added to {}; accepted: under 2^40 in size, also the sum", side, values[b],
             b, first);
    }
    check(first + values[b], fmt::format("position_{} + positions_{}[{}]", side, side, b));
  }
}

void Validator::streams() {
  if (given_.dropout_streams == nullptr) {
    return;
  }
  const fovea_tensor& streams = *given_.dropout_streams;
  type_of("dropout_streams", streams, {DType::kInt64});
  const std::int64_t batch1 = problem_.batch1;
  const std::int64_t batch2 = problem_.batch2;
  const std::int64_t heads = problem_.heads_q;
  const Dims whole = problem_.two_level ? Dims{batch1, batch2, heads} : Dims{batch1, heads};
  const auto given = strides_of(streams);
  Few<bool, 3> present;
  std::array<std::int64_t, 3> strides{};
  const auto rank = static_cast<int>(whole.size());
  bool broadcasts = streams.rank <= rank;
  for (int d = 0; broadcasts && d < rank; ++d) {
    const int from = d - (rank - streams.rank);
    const bool is_present = from >= 0 && streams.shape[from] != 1;
    broadcasts = !is_present || streams.shape[from] == whole.begin()[d];
    present.push_back(is_present);
    strides[static_cast<std::size_t>(d)] = is_present ? given[static_cast<std::size_t>(from)] : 0;
  }
  if (!broadcasts) {
    refuse("dropout_streams: shape {} does not broadcast to {}, {}", shape_of(streams),
           problem_.two_level ? "(B1, B2, Hq)" : "(B, Hq)", text_of(whole.begin(), rank));
  }
  storage("dropout_streams", streams);
  problem_.streams.type = DType::kInt64;
  Extents& has = problem_.streams.extents;
  call_.streams = {streams.data, DType::kInt64, {}};
  if (problem_.two_level) {
    has = {present.begin()[0], present.begin()[1], present.begin()[2], false, false};
    call_.streams.strides = {strides[0], strides[1], strides[2], 0, 0};
  } else {
    has = {present.begin()[0], false, present.begin()[1], false, false};
    call_.streams.strides = {strides[0], 0, strides[1], 0, 0};
  }
}

}  // namespace fovea
