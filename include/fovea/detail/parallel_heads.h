// SPDX-License-Identifier: Apache-2.0
//
// For fovea/parallel.h: Move::kHeads. Ranks exchange heads for rows, compute all rows of some heads, and exchange back.
#ifndef FOVEA_DETAIL_PARALLEL_HEADS_H
#define FOVEA_DETAIL_PARALLEL_HEADS_H

#include <fovea/detail/parallel_work.h>

#include <numeric>

namespace fovea {
inline namespace api_v0 {
namespace parallel {
namespace detail {

// Rows of all heads on the ranks that have them, and all rows of some heads: an exchange that goes both ways. A block
// of a rank has rows of tensors, then statistics: (heads of all batch entries, rows), fp32 or fp64.
class Exchange {
 public:
  Exchange(Work& work, std::vector<View> tensors, std::vector<View> statistics)
      : work_(work), tensors_(std::move(tensors)), statistics_(std::move(statistics)), layout_(tensors_, work.ranks()) {
    const auto most = static_cast<std::size_t>(work.rows().most());
    block_ = layout_.bytes * most;
    for (const View& view : statistics_) {
      std::uint64_t lines = 1;  // wraps where there are too many, which the library refuses
      for (std::size_t dim = 0; dim + 1 < view.shape.size(); ++dim) {
        lines *= static_cast<std::uint64_t>(view.shape[dim]);
      }
      lines_.push_back(lines / static_cast<std::uint64_t>(work.ranks()));
      sections_.push_back(block_);
      block_ += (lines_.back() * most * view.item() + 15) / 16 * 16;
    }
    by_rank_ = work.take(block_ * static_cast<std::size_t>(work.ranks()));
    by_head_ = work.take(block_ * static_cast<std::size_t>(work.ranks()));
    natural_ = work.take_rows(layout_, work.rows().total());
    for (std::size_t n = 0; n < statistics_.size(); ++n) {
      const View& view = statistics_[n];
      natural_statistics_.push_back(work.take(lines_[n] * static_cast<std::size_t>(work.rows().total()) * view.item()));
    }
  }

  // All rows of this rank's heads of a tensor.
  View whole(std::size_t n) const { return layout_.at(n, natural_, work_.rows().total()); }
  View whole_statistics(std::size_t n) const {
    View view = statistics_[n];
    view.data = natural_statistics_[n];
    view.shape.back() = work_.rows().total();
    view.shape[view.shape.size() - 2] /= work_.ranks();
    view.nest(view.shape.size(), 1);
    return view;
  }

  void to_heads() {
    each_block([&](const View& part, const View& mine) { work_.copy(part, mine); });
    work_.all_to_all(by_rank_, by_head_, block_);
    each_run([&](char* natural, std::size_t natural_pitch, char* block, std::size_t block_pitch, std::size_t bytes,
                 std::size_t times) { work_.copy(natural, natural_pitch, block, block_pitch, bytes, times); });
  }
  void to_rows() {
    each_run([&](char* natural, std::size_t natural_pitch, char* block, std::size_t block_pitch, std::size_t bytes,
                 std::size_t times) { work_.copy(block, block_pitch, natural, natural_pitch, bytes, times); });
    work_.all_to_all(by_head_, by_rank_, block_);
    each_block([&](const View& part, const View& mine) { work_.copy(mine, part); });
  }

 private:
  // Calls f(view of the memory that goes to or comes from a rank, view of the caller's tensor).
  template <class Function>
  void each_block(Function f) const {
    const std::int64_t most = work_.rows().most();
    for (int rank = 0; rank < work_.ranks() && by_rank_ != nullptr; ++rank) {
      char* const block = by_rank_ + block_ * static_cast<std::size_t>(rank);
      for (std::size_t n = 0; n < tensors_.size(); ++n) {
        const std::int64_t heads = layout_.like[n].from_end(2);
        f(layout_.at(n, block, work_.count()), tensors_[n].narrow(2, rank * heads, heads));
      }
      for (std::size_t n = 0; n < statistics_.size(); ++n) {
        const std::int64_t heads = statistics_[n].from_end(2) / work_.ranks();
        const View mine = statistics_[n].narrow(2, rank * heads, heads);
        View part = mine;
        part.data = block + sections_[n];
        part.strides.back() = 1;
        part.nest(part.shape.size() - 1, most);
        const bool is_adjacent = mine.stride_from_end(1) == 1;
        f(for_copy(part, is_adjacent), for_copy(mine, is_adjacent));
      }
    }
  }
  // A statistic, (..., heads, rows), as Work::copy() takes it: adjacent rows as the elements of a head, (..., heads, 1,
  // rows), others as rows of one element, (..., heads, rows, 1, 1).
  static View for_copy(View view, bool is_adjacent) {
    const std::int64_t elements = is_adjacent ? view.from_end(1) : 1;
    const std::ptrdiff_t from_end = is_adjacent ? 1 : 0;
    for (int added = 0; added < (is_adjacent ? 1 : 2); ++added) {
      view.shape.insert(view.shape.end() - from_end, 1);
      view.strides.insert(view.strides.end() - from_end, elements);
    }
    return view;
  }
  // Calls f(place in natural order, its pitch, place in the blocks of ranks, its pitch, bytes, how many) for each
  // piece.
  template <class Function>
  void each_run(Function f) const {
    const std::int64_t most = work_.rows().most();
    work_.each_piece([&](std::int64_t first, std::int64_t by_rank, std::int64_t rows) {
      if (by_head_ == nullptr) {
        return;
      }
      char* const block = by_head_ + block_ * static_cast<std::size_t>(by_rank / most);
      const std::int64_t at = by_rank % most;
      const std::size_t bytes = static_cast<std::size_t>(rows) * layout_.bytes;
      f(natural_ + static_cast<std::size_t>(first) * layout_.bytes, bytes,
        block + static_cast<std::size_t>(at) * layout_.bytes, bytes, bytes, 1);
      for (std::size_t n = 0; n < statistics_.size(); ++n) {
        const auto item = static_cast<std::int64_t>(statistics_[n].item());
        f(natural_statistics_[n] + first * item, static_cast<std::size_t>(work_.rows().total() * item),
          block + sections_[n] + at * item, static_cast<std::size_t>(most * item),
          static_cast<std::size_t>(rows * item), lines_[n]);
      }
    });
  }

  Work& work_;
  std::vector<View> tensors_;
  std::vector<View> statistics_;
  Layout layout_;
  std::size_t block_ = 0;  // bytes that go to one rank
  std::vector<std::size_t> lines_;
  std::vector<std::size_t> sections_;  // where statistics begin in a block
  char* by_rank_ = nullptr;
  char* by_head_ = nullptr;
  char* natural_ = nullptr;
  std::vector<char*> natural_statistics_;
};

// The options of the call of this rank's heads. `streams` is memory of the host for it.
inline Options options_of_heads(Work& work, const View& q, std::vector<std::int64_t>& streams) {
  Options options = work.options();
  const Rows& rows = work.rows();
  const std::int64_t heads = q.from_end(2) / work.ranks(), first = heads * work.rank();
  const auto sequences = static_cast<std::int64_t>(rows.lengths().size());
  options.align = Align::kBottomRight;
  if (options.alibi_slopes) {
    options.alibi_slopes = narrowed(options.alibi_slopes, 1, first, heads);
  }
  if (options.sink) {
    options.sink = narrowed(options.sink, 1, first, heads);
  }
  for (Tensor* plane : {&options.bias, &options.bias2, &options.mask}) {
    if (has_heads_alone(*plane)) {
      *plane = narrowed(*plane, 3, first, heads);
    }
  }
  Dims batch(q.shape.begin(), q.shape.end() - 3);
  if (rows.is_packed()) {
    options.cu_seqlens_q = work.table(rows.cu_seqlens(), {sequences + 1});
    options.cu_seqlens_k = options.cu_seqlens_q;
    options.max_seqlen_q = longest_of(rows);
    options.max_seqlen_k = options.max_seqlen_q;
    batch = {sequences};
    if (options.batch_outer != 0) {
      batch = {options.batch_outer, sequences / options.batch_outer};
    }
  }
  if (options.dropout_streams) {
    const View given = View::of(options.dropout_streams);
    if (!given.shape.empty() && given.from_end(1) != 1) {
      options.dropout_streams = given.narrow(1, first, heads).tensor();
    }
  } else if (options.dropout_p != 0) {  // those of all heads: the mask of one device
    const std::int64_t entries = std::accumulate(batch.begin(), batch.end(), std::int64_t{1}, std::multiplies<>());
    for (std::int64_t entry = 0; entry < entries; ++entry) {
      for (std::int64_t head = 0; head < heads; ++head) {
        streams.push_back(entry * q.from_end(2) + first + head);
      }
    }
    batch.push_back(heads);
    options.dropout_streams = work.table(streams, batch);
  }
  return options;
}

inline void by_heads(Work& work, const Forward& whole) {
  Exchange inputs(work, {View::of(whole.q), View::of(whole.k), View::of(whole.v)}, {});
  Exchange results(work, {View::of(whole.out)}, whole.lse ? std::vector{View::of(whole.lse)} : std::vector<View>{});
  std::vector<std::int64_t> streams;
  Forward call;
  call.q = inputs.whole(0).tensor();
  call.k = inputs.whole(1).tensor();
  call.v = inputs.whole(2).tensor();
  call.out = results.whole(0).tensor();
  if (whole.lse) {
    call.lse = results.whole_statistics(0).tensor();
  }
  call.options = options_of_heads(work, View::of(whole.q), streams);
  inputs.to_heads();
  work.call(call);
  results.to_rows();
}

inline void by_heads(Work& work, const Backward& whole) {
  std::vector<View> statistics{View::of(whole.lse)};
  if (whole.grad_lse) {
    statistics.push_back(View::of(whole.grad_lse));
  }
  Exchange inputs(
      work, {View::of(whole.q), View::of(whole.k), View::of(whole.v), View::of(whole.out), View::of(whole.grad_out)},
      statistics);
  std::vector<View> wanted;
  for (const MutableTensor* gradient : {&whole.grads.q, &whole.grads.k, &whole.grads.v}) {
    if (*gradient) {
      wanted.push_back(View::of(*gradient));
    }
  }
  Exchange results(work, wanted, {});
  std::vector<std::int64_t> streams;
  Backward call;
  call.q = inputs.whole(0).tensor();
  call.k = inputs.whole(1).tensor();
  call.v = inputs.whole(2).tensor();
  call.out = inputs.whole(3).tensor();
  call.grad_out = inputs.whole(4).tensor();
  call.lse = inputs.whole_statistics(0).tensor();
  if (whole.grad_lse) {
    call.grad_lse = inputs.whole_statistics(1).tensor();
  }
  call.grads = whole.grads;
  std::size_t next = 0;
  for (MutableTensor* gradient : {&call.grads.q, &call.grads.k, &call.grads.v}) {
    if (*gradient) {
      *gradient = results.whole(next++).tensor();
    }
  }
  const std::int64_t heads = View::of(whole.q).from_end(2) / work.ranks(), first = heads * work.rank();
  if (call.grads.sink) {
    call.grads.sink = View::of(call.grads.sink).narrow(1, first, heads).tensor();
  }
  for (MutableTensor* plane : {&call.grads.bias, &call.grads.bias2}) {
    if (has_heads_alone(*plane)) {
      *plane = View::of(*plane).narrow(3, first, heads).tensor();
    }
  }
  call.options = options_of_heads(work, View::of(whole.q), streams);
  inputs.to_heads();
  work.call(call);
  results.to_rows();
}

}  // namespace detail
}  // namespace parallel
}  // namespace api_v0
}  // namespace fovea

#endif
