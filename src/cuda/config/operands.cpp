// SPDX-License-Identifier: Apache-2.0
#include "cuda/config/operands.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "cuda/device/generic/backward_sizes.h"

namespace fovea::cuda {
namespace {

constexpr std::int64_t kGrain = 16;  // bytes that are copied at once

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

Extents either(const Extents& a, const Extents& b) {
  return {a.batch1 || b.batch1, a.batch2 || b.batch2, a.head || b.head, a.query || b.query, a.key || b.key};
}

// Whether rows of this view begin at addresses that no tensor map has.
bool has_odd_rows(const View& view) {
  const auto bytes = static_cast<std::int64_t>(size_of(view.type));
  const math::Strides& s = view.strides;
  return reinterpret_cast<std::uintptr_t>(view.data) % kGrain != 0 || s.row * bytes % kGrain != 0 ||
         s.head * bytes % kGrain != 0 || s.batch2 * bytes % kGrain != 0 || s.batch1 * bytes % kGrain != 0;
}

// Whether rows lie as tiles are copied: forwards, and near enough for offsets of 32 bits (args.h).
bool rows_of_tiles(std::int64_t rows, std::int64_t stride, std::int64_t bytes) {
  return rows <= 1 || (stride >= 0 && stride < kRowBytesLimit / bytes);
}

// Whether the first bias, and its gradient if it is wanted, can have the eight tensor maps of OddRows.
bool can_have_odd_rows(const Call& call) {
  constexpr std::int64_t kShort = 128;  // shorter ones are packed: not measured
  constexpr std::int64_t kMostRows = std::int64_t{1} << 30;
  constexpr std::int64_t kMostPitch = std::int64_t{1} << 36;  // eight rows are less than 2^40 bytes
  const Problem& p = call.problem;
  const Extents& e = p.bias.extents;
  const bool both = p.bias2 && p.bias2.extents.query && p.bias2.extents.key;
  if (!p.bias || !e.query || !e.key || both || call.rows.limit_q < kShort || call.rows.limit_k < kShort) {
    return false;
  }
  const auto fits = [&](const View& view, std::int64_t most_pitch) {
    const math::Strides& s = view.strides;
    if (size_of(view.type) != 2 || s.col != 1 || s.row <= 0 || s.row >= most_pitch ||
        reinterpret_cast<std::uintptr_t>(view.data) % 2 != 0) {
      return false;
    }
    std::int64_t rows = call.rows.limit_q;
    bool is_whole = true;
    for (const auto& [has, count, stride] :
         {std::tuple(e.batch1, p.batch1, s.batch1), std::tuple(e.batch2, p.batch2, s.batch2),
          std::tuple(e.head, p.heads_q, s.head)}) {
      if (has && count > 1) {
        is_whole = is_whole && stride >= 0 && stride % s.row == 0 && stride / s.row < kMostRows;
        rows += is_whole ? (count - 1) * (stride / s.row) : 0;
      }
    }
    return is_whole && rows < kMostRows;
  };
  return fits(call.bias, kRowBytesLimit / 2) && (!p.need.bias || fits(call.grad_bias, kMostPitch));
}

// Looks at each tensor of a call once.
class OperandsOfCall {
 public:
  OperandsOfCall(const Call& call, Workspace& workspace, bool mask_by_lanes, bool odd_rows)
      : call_(call), problem_(call.problem), workspace_(workspace), odd_rows_(odd_rows && can_have_odd_rows(call)) {
    operands_.mask_by_lanes = mask_by_lanes;
  }

  Operands run() {
    features();
    const bool backward = problem_.direction == Direction::kBackward;
    if (problem_.type == DType::kFp32) {
      pairs(Region::kQ, problem_.heads_q, call_.rows.rows_q, operands_.features.d, operands_.q);
      pairs(Region::kK, problem_.heads_k, call_.rows.rows_k, operands_.features.d, operands_.k);
      pairs(Region::kV, problem_.heads_k, call_.rows.rows_k, operands_.features.dv, operands_.v);
      if (backward) {
        pairs(Region::kGradOut, problem_.heads_q, call_.rows.rows_q, operands_.features.dv, operands_.grad_out);
      }
      operands_.pairs = true;
      operands_.head_dim = operands_.features.d;
      operands_.head_dim_v = operands_.features.dv;
      workspace_.add(Region::kSizes, static_cast<std::int64_t>(Size::kCount) * problem_.batch() * problem_.heads_q *
                                         std::int64_t{sizeof(math::u32)});
    } else {
      rows(&Call::q, Region::kQ, problem_.heads_q, call_.rows.rows_q, problem_.head_dim, operands_.q);
      rows(&Call::k, Region::kK, problem_.heads_k, call_.rows.rows_k, problem_.head_dim, operands_.k);
      rows(&Call::v, Region::kV, problem_.heads_k, call_.rows.rows_k, problem_.head_dim_v, operands_.v);
      if (backward) {
        rows(&Call::grad_out, Region::kGradOut, problem_.heads_q, call_.rows.rows_q, problem_.head_dim_v,
             operands_.grad_out);
      }
    }
    planes();
    operands_.vector_stores =
        backward ? (!call_.grad_q ||
                    is_aligned(call_, call_.grad_q, problem_.heads_q, call_.rows.rows_q, problem_.head_dim)) &&
                       (!call_.grad_k ||
                        is_aligned(call_, call_.grad_k, problem_.heads_k, call_.rows.rows_k, problem_.head_dim)) &&
                       (!call_.grad_v ||
                        is_aligned(call_, call_.grad_v, problem_.heads_k, call_.rows.rows_k, problem_.head_dim_v))
                 : is_aligned(call_, call_.out, problem_.heads_q, call_.rows.rows_q, problem_.head_dim_v);
    return operands_;
  }

 private:
  const Call& call_;
  const Problem& problem_;
  Workspace& workspace_;
  bool odd_rows_;
  Operands operands_;

  void features() {
    Features& spec = operands_.features;
    spec.type = type_of(problem_.type);
    spec.d = static_cast<int>(std::max<std::int64_t>(round_up(problem_.head_dim, 16), 16));
    spec.dv = static_cast<int>(std::max<std::int64_t>(round_up(problem_.head_dim_v, 16), 16));
    if (problem_.direction == Direction::kBackward) {
      const int d = spec.d;
      spec.d = backward_columns(spec.type, d, spec.dv);
      spec.dv = backward_columns(spec.type, spec.dv, d);
    }
    operands_.head_dim = static_cast<int>(round_up(problem_.head_dim, 8));
    operands_.head_dim_v = static_cast<int>(round_up(problem_.head_dim_v, 8));
    spec.ragged = problem_.packed || problem_.has_used_q || problem_.has_used_k;
    spec.banded = problem_.banded();
    // One query at the bottom right meets every key.
    const bool last_row = !spec.ragged && problem_.seqlen_q == 1 && !problem_.top_left && !problem_.positions;
    if (spec.banded && last_row && problem_.window_left < 0) {
      spec.banded = false;
    }
    spec.softcap = problem_.softcap > 0;
    spec.natural = !exponent_scales(problem_);
    spec.positions.alibi = problem_.alibi != Alibi::kNone;
    spec.dropout = !call_.dropout.active()                  ? DropoutRule::kNone
                   : call_.dropout.rng == math::Rng::kFovea ? DropoutRule::kFovea
                                                            : DropoutRule::kTorchMemEfficient;
    const bool drops = spec.dropout != DropoutRule::kNone;
    spec.shifted =
        (problem_.positions && (spec.banded || bool(spec.positions) || drops)) || (problem_.streams && drops);
  }

  // q, k, v or do of 16 bits.
  void rows(Member member, Region region, std::int64_t heads, std::int64_t rows, std::int64_t columns,
            Operand& operand) {
    const View& view = call_.*member;
    if (is_aligned(call_, view, heads, rows, columns) &&
        rows_of_tiles(rows, view.strides.row, static_cast<std::int64_t>(size_of(view.type)))) {
      operand = {Region::kNone, view.strides};
      return;
    }
    const bool packed = problem_.packed;
    const auto extent = [](std::int64_t size, std::int64_t stride) { return stride == 0 && size > 0 ? 1 : size; };
    const Box box{packed ? 1 : extent(problem_.batch1, view.strides.batch1),
                  packed ? 1 : extent(problem_.batch2, view.strides.batch2), extent(heads, view.strides.head), rows,
                  round_up(columns, 8)};
    pack(member, region, 2, box, columns, operand);
  }

  void pack(Member member, Region region, int bytes, const Box& box, std::int64_t columns, Operand& operand) {
    workspace_.add(region, box.count() * bytes);
    operands_.packs.push_back({member, region, bytes, box, columns});
    operand = {region, box.strides()};
  }

  void pairs(Region region, std::int64_t heads, std::int64_t rows, std::int64_t columns, Operand& operand) {
    const bool packed = problem_.packed;
    const Box box{packed ? 1 : problem_.batch1, packed ? 1 : problem_.batch2, heads, rows, 2 * columns};
    workspace_.add(region, box.count() * 2);
    operand = {region, box.strides()};
  }

  // ---- bias, bias2, mask ----

  void planes() {
    std::vector<Member> keys;
    std::vector<Member> queries;
    Extents of_keys;
    Extents of_queries;
    const auto sort = [&](Member member, const PlaneTraits& traits, Operand& operand, Region region, BiasTile& tile) {
      if (!traits) {
        return;
      }
      const View& view = call_.*member;
      const Extents extents = extents_of(view, traits);
      if (extents.query && extents.key) {
        tile = tile_of(traits.type);
        bias(member, extents, region, operand);
      } else if (extents.key) {
        keys.push_back(member);
        of_keys = either(of_keys, extents);
      } else {
        queries.push_back(member);
        of_queries = either(of_queries, extents);
      }
    };
    Features& spec = operands_.features;
    sort(&Call::bias, problem_.bias, operands_.bias, Region::kBias, spec.bias);
    sort(&Call::bias2, problem_.bias2, operands_.bias2, Region::kBias2, spec.bias2);
    bool mask_of_keys = false;
    bool mask_of_queries = false;
    if (problem_.mask) {
      const Extents extents = extents_of(call_.mask, problem_.mask);
      if (extents.key && (extents.query || operands_.mask_by_lanes)) {
        bits(extents);
      } else if (extents.key) {
        mask_of_keys = true;
        of_keys = either(of_keys, extents);
      } else {
        mask_of_queries = true;
        of_queries = either(of_queries, extents);
      }
    }
    if (!keys.empty() || mask_of_keys) {
      spec.key_term = true;
      term(keys, mask_of_keys, of_keys, Region::kKeyTerm, operands_.key_term);
    }
    if (!queries.empty() || mask_of_queries) {
      spec.query_term = true;
      term(queries, mask_of_queries, of_queries, Region::kQueryTerm, operands_.query_term);
    }
  }

  Box plane_box(const Extents& extents, std::int64_t rows, std::int64_t width) const {
    return {extents.batch1 ? problem_.batch1 : 1, extents.batch2 ? problem_.batch2 : 1,
            extents.head ? problem_.heads_q : 1, rows, width};
  }

  void bias(Member member, const Extents& extents, Region region, Operand& operand) {
    const View& view = call_.*member;
    const auto bytes = static_cast<std::int64_t>(size_of(view.type));
    const math::Strides& s = view.strides;
    if (odd_rows_ && member == &Call::bias &&
        (has_odd_rows(view) || (problem_.need.bias && has_odd_rows(call_.grad_bias)))) {
      operand = {Region::kNone, s};
      operands_.odd_rows = true;
      return;
    }
    if (s.col == 1 && !has_odd_rows(view) && rows_of_tiles(call_.rows.limit_q, s.row, bytes)) {
      operand = {Region::kNone, s};
      return;
    }
    const Box box = plane_box(extents, call_.rows.limit_q, round_up(call_.rows.limit_k, kGrain / bytes));
    pack(member, region, static_cast<int>(bytes), box, call_.rows.limit_k, operand);
  }

  void bits(const Extents& extents) {
    operands_.features.mask = true;
    operands_.features.key_mask = !extents.query;
    operands_.mask_bits = true;
    constexpr std::int64_t kWordsOfAGrain = kGrain / 4;
    operands_.mask_box = plane_box(extents, extents.query ? call_.rows.limit_q : 1,
                                   round_up((call_.rows.limit_k + 31) / 32, kWordsOfAGrain));
    workspace_.add(Region::kMaskBits, operands_.mask_box.count() * 4);
    operands_.mask = {Region::kMaskBits, operands_.mask_box.strides()};
  }

  // A vector of fp32 for each plane, along keys or queries, in pieces of 16 bytes.
  void term(const std::vector<Member>& biases, bool mask, const Extents& extents, Region region, Operand& operand) {
    constexpr std::int64_t kFloatsOfAGrain = kGrain / 4;
    const bool of_keys = region == Region::kKeyTerm;
    const std::int64_t length = of_keys ? call_.rows.limit_k : call_.rows.limit_q;
    const Box box = plane_box(extents, 1, round_up(length, kFloatsOfAGrain));
    workspace_.add(region, box.count() * std::int64_t{sizeof(float)});
    operands_.terms.push_back({biases, mask, region, box, length});
    operand = {region, box.strides()};
    if (!of_keys) {
      std::swap(operand.strides.row, operand.strides.col);
    }
  }
};

}  // namespace

bool exponent_scales(const Problem& problem) {
  const double scale = problem.scale_or_default();
  return scale >= 0x1p-100 && scale <= 0x1p20;
}

Results fp32_results(const Problem& problem) {
  const Results& wide = problem.wide;
  const Results& adds = problem.accumulate;
  const bool forward = problem.direction == Direction::kForward;
  return {forward && (wide.out || adds.out),
          wide.q || adds.q,
          wide.k || adds.k,
          wide.v || adds.v,
          adds.bias,
          adds.bias2,
          adds.sink};
}

Extents extents_of(const View& view, const PlaneTraits& traits) {
  const math::Strides& s = view.strides;
  return {traits.extents.batch1 && s.batch1 != 0, traits.extents.batch2 && s.batch2 != 0,
          traits.extents.head && s.head != 0, traits.extents.query && s.row != 0, traits.extents.key && s.col != 0};
}

std::int64_t planes_of(const Problem& problem, const Extents& extents) {
  return (extents.batch1 ? problem.batch1 : 1) * (extents.batch2 ? problem.batch2 : 1) *
         (extents.head ? problem.heads_q : 1);
}

Type type_of(DType type) {
  switch (type) {
    case DType::kFp32:
      return Type::kFp32;
    case DType::kFp16:
      return Type::kFp16;
    case DType::kBf16:
      return Type::kBf16;
    default:
      throw Error(FOVEA_UNSUPPORTED, fmt::format("q: {} on a CUDA device; accepted: fp32, fp16, bf16", name_of(type)));
  }
}

BiasTile tile_of(DType type) {
  switch (type) {
    case DType::kFp32:
      return BiasTile::kFp32;
    case DType::kFp16:
      return BiasTile::kFp16;
    case DType::kBf16:
      return BiasTile::kBf16;
    default:
      throw Error(FOVEA_UNSUPPORTED,
                  fmt::format("bias: {} on a CUDA device; accepted: fp32, fp16, bf16", name_of(type)));
  }
}

bool is_aligned(const Call& call, const View& view, std::int64_t heads, std::int64_t rows, std::int64_t columns) {
  const auto bytes = static_cast<std::int64_t>(size_of(view.type));
  const math::Strides& s = view.strides;
  const auto fits = [&](std::int64_t size, std::int64_t stride) { return size <= 1 || stride * bytes % kGrain == 0; };
  return columns % 8 == 0 && (columns <= 1 || s.col == 1) &&
         reinterpret_cast<std::uintptr_t>(view.data) % kGrain == 0 && fits(call.rows.batch1, s.batch1) &&
         fits(call.rows.batch2, s.batch2) && fits(heads, s.head) && fits(rows, s.row);
}

Operands operands_of(const Call& call, Workspace& workspace, bool mask_by_lanes, bool odd_rows) {
  return OperandsOfCall(call, workspace, mask_by_lanes, odd_rows).run();
}

}  // namespace fovea::cuda
