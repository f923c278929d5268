// SPDX-License-Identifier: Apache-2.0
//
// For fovea/parallel.h: Move::kKeys. Keys and values are gathered, and each piece of this rank's rows is an ordinary
// call with positions; gradients of keys are summed over the pieces, then over the ranks.
#ifndef FOVEA_DETAIL_PARALLEL_KEYS_H
#define FOVEA_DETAIL_PARALLEL_KEYS_H

#include <fovea/detail/parallel_work.h>

namespace fovea {
inline namespace api_v0 {
namespace parallel {
namespace detail {

// What one call computes: some adjacent rows of this rank. Dense rows: a piece. Packed rows: the first pieces of all
// sequences, or the second ones.
struct Part {
  std::int64_t first = 0;  // of this rank's rows
  std::int64_t rows = 0;
  std::int64_t start = 0;                // dense: the position of the first row
  std::vector<std::int64_t> cu_seqlens;  // packed: of the rows of this part
  std::vector<std::int64_t> starts;      // packed: of each sequence
  std::int64_t longest = 0;              // packed: the most rows of a sequence
};

inline std::vector<Part> parts_of(const Rows& rows, int rank) {
  std::vector<Part> parts;
  const std::vector<Piece>& pieces = rows.pieces(rank);
  std::int64_t at = 0;
  if (!rows.is_packed()) {
    for (const Piece& piece : pieces) {
      Part part;
      part.first = at;
      part.rows = piece.rows;
      part.start = piece.start;
      parts.push_back(part);
      at += piece.rows;
    }
  }
  for (std::size_t next = 0; rows.is_packed() && next < pieces.size();) {
    Part part;
    part.first = at;
    part.cu_seqlens.push_back(0);
    for (std::size_t sequence = 0; sequence < rows.lengths().size(); ++sequence) {
      std::int64_t count = 0, start = 0;
      if (next < pieces.size() && pieces[next].sequence == static_cast<std::int64_t>(sequence)) {
        count = pieces[next].rows;
        start = pieces[next].start;
        ++next;
      }
      part.cu_seqlens.push_back(part.cu_seqlens.back() + count);
      part.starts.push_back(start);
      part.longest = std::max(part.longest, count);
    }
    part.rows = part.cu_seqlens.back();
    at += part.rows;
    parts.push_back(std::move(part));
  }
  // A rank without rows: a call without queries makes gradients of 0, and refuses what those of other ranks refuse.
  if (parts.empty()) {
    Part part;
    part.cu_seqlens.assign(rows.lengths().size() + 1, 0);
    part.starts.assign(rows.lengths().size(), 0);
    parts.push_back(part);
  }
  return parts;
}

// The options of the call of a part, whose keys are all keys.
inline Options options_of(Work& work, const Part& part) {
  Options options = work.options();
  const Rows& rows = work.rows();
  const bool has_positions = options.causal || options.window.left >= 0 || options.window.right >= 0 ||
                             options.alibi_slopes || options.dropout_p != 0;
  options.align = Align::kBottomRight;
  if (has_positions) {
    options.position_q = part.start;
    options.position_k = 0;
  }
  if (rows.is_packed()) {
    const auto sequences = static_cast<std::int64_t>(rows.lengths().size());
    options.cu_seqlens_q = work.table(part.cu_seqlens, {sequences + 1});
    options.cu_seqlens_k = work.table(rows.cu_seqlens(), {sequences + 1});
    options.max_seqlen_q = part.longest;
    options.max_seqlen_k = longest_of(rows);
    if (has_positions) {
      options.positions_q = work.table(part.starts, {sequences});
    }
  }
  for (Tensor* plane : {&options.bias, &options.bias2, &options.mask}) {
    if (has_queries(*plane)) {
      *plane = narrowed(*plane, 2, part.first, part.rows);
    }
  }
  return options;
}

// k and v of all ranks, in natural order.
inline std::pair<View, View> gathered(Work& work, const Tensor& k, const Tensor& v) {
  const Layout layout({View::of(k), View::of(v)});
  const std::int64_t most = work.rows().most();
  char* const send = work.take_rows(layout, most);
  char* const by_rank = work.take_rows(layout, most * work.ranks());
  char* const natural = work.take_rows(layout, work.rows().total());
  work.copy(layout.at(0, send, work.count()), View::of(k));
  work.copy(layout.at(1, send, work.count()), View::of(v));
  work.all_gather(send, by_rank, layout.bytes * static_cast<std::size_t>(most));
  work.to_natural(natural, by_rank, layout.bytes);
  return {layout.at(0, natural, work.rows().total()), layout.at(1, natural, work.rows().total())};
}

inline void by_keys(Work& work, const Forward& whole) {
  const auto [k, v] = gathered(work, whole.k, whole.v);
  for (const Part& part : parts_of(work.rows(), work.rank())) {
    Forward call;
    call.q = narrowed(whole.q, 3, part.first, part.rows);
    call.k = k.tensor();
    call.v = v.tensor();
    call.out = View::of(whole.out).narrow(3, part.first, part.rows).tensor();
    if (whole.lse) {
      call.lse = View::of(whole.lse).narrow(1, part.first, part.rows).tensor();
    }
    call.options = options_of(work, part);
    work.call(call);
  }
}

inline void by_keys(Work& work, const Backward& whole) {
  const auto [k, v] = gathered(work, whole.k, whole.v);
  std::vector<View> wanted;  // of keys: those of all rows are summed over the ranks
  for (const MutableTensor* gradient : {&whole.grads.k, &whole.grads.v}) {
    if (*gradient) {
      wanted.push_back(View::of(*gradient));
    }
  }
  const Layout layout(wanted);
  const std::int64_t most = work.rows().most();
  char* const natural = work.take_rows(layout, work.rows().total());
  std::uint64_t accumulate = 0;
  for (const Part& part : parts_of(work.rows(), work.rank())) {
    Backward call;
    call.q = narrowed(whole.q, 3, part.first, part.rows);
    call.k = k.tensor();
    call.v = v.tensor();
    call.out = narrowed(whole.out, 3, part.first, part.rows);
    call.grad_out = narrowed(whole.grad_out, 3, part.first, part.rows);
    call.lse = narrowed(whole.lse, 1, part.first, part.rows);
    if (whole.grad_lse) {
      call.grad_lse = narrowed(whole.grad_lse, 1, part.first, part.rows);
    }
    Gradients& grads = call.grads;
    grads = whole.grads;
    if (grads.q) {
      grads.q = View::of(grads.q).narrow(3, part.first, part.rows).tensor();
    }
    if (grads.k) {
      grads.k = layout.at(0, natural, work.rows().total()).tensor();
    }
    if (grads.v) {
      grads.v = layout.at(grads.k ? 1 : 0, natural, work.rows().total()).tensor();
    }
    grads.accumulate = accumulate;
    for (const auto& [plane, bit] :
         {std::pair(&grads.bias, FOVEA_ACCUMULATE_GRAD_BIAS), {&grads.bias2, FOVEA_ACCUMULATE_GRAD_BIAS2}}) {
      if (has_queries(*plane)) {
        *plane = View::of(*plane).narrow(2, part.first, part.rows).tensor();
        grads.accumulate &= ~std::uint64_t{bit};
      }
    }
    call.options = options_of(work, part);
    work.call(call);
    accumulate = (grads.k ? FOVEA_ACCUMULATE_GRAD_K : 0u) | (grads.v ? FOVEA_ACCUMULATE_GRAD_V : 0u) |
                 (grads.bias ? FOVEA_ACCUMULATE_GRAD_BIAS : 0u) | (grads.bias2 ? FOVEA_ACCUMULATE_GRAD_BIAS2 : 0u) |
                 (grads.sink ? FOVEA_ACCUMULATE_GRAD_SINK : 0u);
  }
  if (wanted.empty()) {
    return;
  }
  char* const by_rank = work.take_rows(layout, most * work.ranks());
  char* const mine = work.take_rows(layout, most);
  work.to_ranks(by_rank, natural, layout.bytes);
  work.reduce_scatter(by_rank, mine, layout.bytes * static_cast<std::size_t>(most));
  for (std::size_t n = 0; n < wanted.size(); ++n) {
    work.copy(wanted[n], layout.at(n, mine, work.count()));
  }
}

}  // namespace detail
}  // namespace parallel
}  // namespace api_v0
}  // namespace fovea

#endif
