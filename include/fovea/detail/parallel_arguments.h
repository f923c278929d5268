// SPDX-License-Identifier: Apache-2.0
//
// For fovea/parallel.h: what a call over several ranks accepts. Everything is checked here, before anything moves.
#ifndef FOVEA_DETAIL_PARALLEL_ARGUMENTS_H
#define FOVEA_DETAIL_PARALLEL_ARGUMENTS_H

#include <fovea/detail/parallel_work.h>

namespace fovea {
inline namespace api_v0 {
namespace parallel {
namespace detail {

inline void check_group(const Collectives& group, const Rows& rows, const Options& options, Move move, bool backward) {
  if (group.ranks != rows.ranks() || group.rank < 0 || group.rank >= group.ranks) {
    refuse("collectives: rank " + std::to_string(group.rank) + " of " + std::to_string(group.ranks) +
           "; accepted: ranks 0 to " + std::to_string(rows.ranks() - 1) + " of " + std::to_string(rows.ranks()) +
           ", which rows has");
  }
  const auto need = [](bool given, const char* name) {
    if (!given) {
      refuse(std::string("collectives.") + name + ": empty; accepted: a function");
    }
  };
  need(options.device == Device::kCpu || group.copy != nullptr, "copy");
  if (move == Move::kHeads) {
    need(group.all_to_all != nullptr, "all_to_all");
  } else {
    need(group.all_gather != nullptr, "all_gather");
    need(!backward || group.reduce_scatter != nullptr, "reduce_scatter");
  }
}

// Of all ranks: a call for a piece would be refused on its own rank alone, and the others would wait.
inline void check_pieces(const Rows& rows) {
  constexpr std::int64_t kBlockOfDropout = 16;
  for (int rank = 0; rank < rows.ranks(); ++rank) {
    for (const Piece& piece : rows.pieces(rank)) {
      if (piece.start % kBlockOfDropout != 0) {
        refuse("rows: a piece of rank " + std::to_string(rank) + " begins at row " + std::to_string(piece.start) +
               "; accepted with dropout and Move::kKeys: multiples of 16, such as a block of rows that is one");
      }
    }
  }
}

inline void check_options(const Options& options, const Rows& rows, Move move) {
  const auto absent = [](bool given, const char* name) {
    if (given) {
      refuse(std::string(name) + ": given; accepted: none, rows has the lengths and positions");
    }
  };
  absent(bool(options.cu_seqlens_q), "cu_seqlens_q");
  absent(bool(options.cu_seqlens_k), "cu_seqlens_k");
  absent(options.max_seqlen_q != 0, "max_seqlen_q");
  absent(options.max_seqlen_k != 0, "max_seqlen_k");
  absent(options.position_q.has_value(), "position_q");
  absent(options.position_k.has_value(), "position_k");
  absent(bool(options.positions_q), "positions_q");
  absent(bool(options.positions_k), "positions_k");
  for (const auto& [tensor, name] : {std::pair(&options.seqused_q, "seqused_q"), {&options.seqused_k, "seqused_k"}}) {
    if (*tensor) {
      fail(FOVEA_UNSUPPORTED, std::string(name) + ": given; accepted: none, over several ranks");
    }
  }
  for (const auto& [plane, name] :
       {std::pair(&options.bias, "bias"), {&options.bias2, "bias2"}, {&options.mask, "mask"}}) {
    if (move == Move::kKeys && rows.is_packed() && has_queries(*plane)) {
      fail(FOVEA_UNSUPPORTED,
           std::string(name) + ": with queries and packed rows; accepted: without queries, or heads");
    }
  }
  if (move == Move::kKeys && options.dropout_p != 0) {
    check_pieces(rows);
  }
}

// What refuses a tensor's shape: it names what was given, on which rank, and what is accepted.
[[noreturn]] inline void refuse_shape(const Tensor& tensor, const char* name, int rank, const std::string& accepted) {
  refuse(std::string(name) + ": shape " + text_of(View::of(tensor).shape) + " on rank " + std::to_string(rank) +
         "; accepted" + accepted);
}

// A tensor of this rank's rows.
inline void check_rows(const Tensor& tensor, const char* name, const Rows& rows, int rank) {
  if (!tensor) {
    refuse(std::string(name) + ": absent; accepted: a tensor with this rank's rows");
  }
  const View view = View::of(tensor);
  const std::size_t dims = view.shape.size();
  if (rows.is_packed() ? dims != 3 : dims != 4 && dims != 5) {
    refuse(std::string(name) + ": rank " + std::to_string(dims) +
           "; accepted: " + (rows.is_packed() ? "3, with packed rows" : "4 or 5"));
  }
  if (*std::min_element(view.shape.begin(), view.shape.end()) < 0) {
    refuse_shape(tensor, name, rank, ": dimensions of 0 or more");
  }
  if (view.from_end(3) != rows.count(rank)) {
    refuse(std::string(name) + ": " + std::to_string(view.from_end(3)) +
           " rows; accepted: " + std::to_string(rows.count(rank)) + ", those of rank " + std::to_string(rank));
  }
  if (view.stride_from_end(1) != 1 && view.from_end(1) > 1) {
    refuse(std::string(name) + ": stride " + std::to_string(view.stride_from_end(1)) +
           " of the last dimension; accepted: 1");
  }
}

// lse or its gradient.
inline void check_statistics(const Tensor& tensor, const char* name, const Tensor& q, int rank) {
  const Dims of_q = View::of(q).shape;
  Dims accepted(of_q.begin(), of_q.end() - 3);
  accepted.push_back(of_q[of_q.size() - 2]);
  accepted.push_back(of_q[of_q.size() - 3]);
  const std::string says = text_of(accepted) + ", the heads and rows of q";
  if (!tensor) {
    refuse(std::string(name) + ": absent; accepted: " + says);
  }
  if (View::of(tensor).shape != accepted) {
    refuse_shape(tensor, name, rank, ": " + says);
  }
}

inline void check_heads(const Tensor& tensor, const char* name, int ranks) {
  const std::int64_t heads = View::of(tensor).from_end(2);
  if (heads % ranks != 0) {
    fail(FOVEA_UNSUPPORTED, std::string(name) + ": " + std::to_string(heads) +
                                " heads; accepted with Move::kHeads: a multiple of " + std::to_string(ranks) +
                                ", the number of ranks");
  }
}

// A gradient, beside what it is one of.
inline void check_gradient(const Tensor& gradient, const char* name, const Tensor& of, const char* of_name, int rank) {
  if (gradient && !of) {
    refuse(std::string(name) + ": given without " + of_name + "; accepted: a gradient of what is given");
  }
  if (gradient && View::of(gradient).shape != View::of(of).shape) {
    refuse_shape(gradient, name, rank, ": " + text_of(View::of(of).shape) + ", the shape of " + of_name);
  }
}

// A result that is copied from a buffer: the library sees the buffer alone.
inline void check_result(const Tensor& result, const char* name) {
  const View view = View::of(result);
  for (std::size_t dim = 0; dim < view.shape.size(); ++dim) {
    if (!view.is_empty() && view.shape[dim] > 1 && view.strides[dim] == 0) {
      refuse(std::string(name) + ": strides " + text_of(view.strides) + " with shape " + text_of(view.shape) +
             " lead two elements to one address; accepted: an address for each");
    }
  }
}

// A bias or mask, which calls get in parts.
inline void check_plane(const Tensor& plane, const char* name, std::int64_t heads, const Rows& rows,
                        const Collectives& group, Move move) {
  if (!plane) {
    return;
  }
  const std::int64_t keys = rows.is_packed() ? longest_of(rows) : rows.total();
  const bool of_rank = move == Move::kHeads && has_queries(plane);
  const std::int64_t queries = !has_queries(plane) ? 1 : of_rank ? keys : rows.count(group.rank);
  if (of_rank) {
    heads /= group.ranks;
  }
  const View view = View::of(plane);
  const auto fits = [&](std::size_t dim_from_end, std::int64_t size) {
    return view.shape.size() < dim_from_end || view.from_end(dim_from_end) == 1 || view.from_end(dim_from_end) == size;
  };
  if (!fits(1, keys) || !fits(2, queries) || !fits(3, heads)) {
    refuse_shape(plane, name, group.rank,
                 std::string(" with Move::") + (move == Move::kHeads ? "kHeads" : "kKeys") + ": broadcastable to (B, " +
                     std::to_string(heads) + ", " + std::to_string(queries) + ", " + std::to_string(keys) + "): " +
                     (of_rank              ? "this rank's heads, all rows and keys"
                      : has_queries(plane) ? "all heads, this rank's rows, all keys"
                                           : "all heads, all keys"));
  }
}

// What has an element for each head, and is whole on every rank.
inline void check_vector(const Tensor& tensor, const char* name, std::int64_t heads, bool has_batch, int rank) {
  const View view = View::of(tensor);
  if (tensor && (view.shape.empty() || view.from_end(1) != heads || (view.shape.size() > 1 && !has_batch))) {
    refuse_shape(tensor, name, rank,
                 ": (" + std::string(has_batch ? "..., " : "") + std::to_string(heads) + "), all heads of q");
  }
}

// Of the tensors among the options: what q has to be known for.
inline void check_tensors(const Options& options, const Tensor& q, const Rows& rows, const Collectives& group,
                          Move move) {
  const std::int64_t heads = View::of(q).from_end(2);
  check_plane(options.bias, "bias", heads, rows, group, move);
  check_plane(options.bias2, "bias2", heads, rows, group, move);
  check_plane(options.mask, "mask", heads, rows, group, move);
  check_vector(options.sink, "sink", heads, false, group.rank);
  check_vector(options.alibi_slopes, "alibi_slopes", heads, true, group.rank);
  const View streams = View::of(options.dropout_streams);
  if (!streams.shape.empty() && streams.from_end(1) != 1) {
    check_vector(options.dropout_streams, "dropout_streams", heads, true, group.rank);
  }
}

// With kKeys the gradient of a bias without queries is a part of a sum. Whether a bias has queries is seen by its rows,
// but not on a rank that has one: all ranks have to refuse the same, so they do where there is such a rank.
inline void check_bias_gradient(const Tensor& gradient, const char* name, const Rows& rows, Move move) {
  if (!gradient || move != Move::kKeys || size_of(gradient.get()->dtype) >= 4) {
    return;
  }
  for (int rank = 0; rank < rows.ranks(); ++rank) {
    if (rows.count(rank) == 1) {
      fail(FOVEA_INVALID_TYPE, std::string(name) + ": 16 bits, and rank " + std::to_string(rank) +
                                   " has one row; accepted with Move::kKeys: fp32, or another number of rows");
    }
  }
  if (!has_queries(gradient)) {
    fail(FOVEA_INVALID_TYPE,
         std::string(name) + ": 16 bits, without queries; accepted with Move::kKeys: fp32, a part of a sum");
  }
}

inline void check(const Forward& call, const Rows& rows, const Collectives& group, Move move) {
  check_group(group, rows, call.options, move, false);
  check_options(call.options, rows, move);
  for (const auto& [tensor, name] :
       {std::pair<const Tensor*, const char*>(&call.q, "q"), {&call.k, "k"}, {&call.v, "v"}, {&call.out, "out"}}) {
    check_rows(*tensor, name, rows, group.rank);
    if (move == Move::kHeads) {
      check_heads(*tensor, name, group.ranks);
    }
  }
  check_result(call.out, "out");
  if (call.lse) {
    check_statistics(call.lse, "lse", call.q, group.rank);
    check_result(call.lse, "lse");
  }
  check_tensors(call.options, call.q, rows, group, move);
  if (call.accumulate) {
    fail(FOVEA_UNSUPPORTED, "accumulate: true; accepted: false, over several ranks");
  }
}

inline void check(const Backward& call, const Rows& rows, const Collectives& group, Move move) {
  const Gradients& grads = call.grads;
  check_group(group, rows, call.options, move, grads.k || grads.v);
  check_options(call.options, rows, move);
  const std::pair<const Tensor*, const char*> given[] = {
      {&call.q, "q"}, {&call.k, "k"}, {&call.v, "v"}, {&call.out, "out"}, {&call.grad_out, "grad_out"}};
  for (const auto& [tensor, name] : given) {
    check_rows(*tensor, name, rows, group.rank);
    if (move == Move::kHeads) {
      check_heads(*tensor, name, group.ranks);
    }
  }
  check_tensors(call.options, call.q, rows, group, move);
  const struct {
    const Tensor& gradient;
    const char* name;
    const Tensor& of;
    const char* of_name;
  } wanted[] = {{grads.q, "grads.q", call.q, "q"},
                {grads.k, "grads.k", call.k, "k"},
                {grads.v, "grads.v", call.v, "v"},
                {grads.bias, "grads.bias", call.options.bias, "bias"},
                {grads.bias2, "grads.bias2", call.options.bias2, "bias2"},
                {grads.sink, "grads.sink", call.options.sink, "sink"}};
  for (const auto& [gradient, name, of, of_name] : wanted) {
    check_gradient(gradient, name, of, of_name, group.rank);
    check_result(gradient, name);
  }
  for (const auto& [gradient, name] :
       {std::pair<const Tensor*, const char*>(&grads.q, "grads.q"), {&grads.k, "grads.k"}, {&grads.v, "grads.v"}}) {
    if (*gradient) {
      check_rows(*gradient, name, rows, group.rank);
    }
    const bool is_sum = *gradient && gradient != &grads.q && move == Move::kKeys;
    if (is_sum && call.q.get()->dtype == FOVEA_FP64) {
      fail(
          FOVEA_UNSUPPORTED,
          std::string(name) + ": with fp64 q; accepted with Move::kKeys: other types, as sums over the ranks are fp32");
    }
    if (is_sum && gradient->get()->dtype != FOVEA_FP32) {
      fail(FOVEA_INVALID_TYPE,
           std::string(name) + ": not fp32; accepted with Move::kKeys: fp32, the sum over the ranks");
    }
  }
  check_bias_gradient(grads.bias, "grads.bias", rows, move);
  check_bias_gradient(grads.bias2, "grads.bias2", rows, move);
  check_statistics(call.lse, "lse", call.q, group.rank);
  if (call.grad_lse) {
    check_statistics(call.grad_lse, "grad_lse", call.q, group.rank);
  }
  if (grads.accumulate != 0) {
    fail(FOVEA_UNSUPPORTED, "grads.accumulate: given; accepted: 0, over several ranks");
  }
}

// ---- addresses ----

// Calls that are measured have none; one that is run needs them before anything moves.
inline void check_addresses(std::initializer_list<std::pair<const Tensor*, const char*>> tensors, int rank) {
  for (const auto& [tensor, name] : tensors) {
    const View view = View::of(*tensor);
    if (*tensor && view.data == nullptr && !view.is_empty()) {
      refuse(std::string(name) + ": data is null on rank " + std::to_string(rank) +
             "; accepted: null only without elements");
    }
  }
}

inline void check_addresses(const Options& options, int rank) {
  check_addresses({{&options.bias, "bias"},
                   {&options.bias2, "bias2"},
                   {&options.mask, "mask"},
                   {&options.alibi_slopes, "alibi_slopes"},
                   {&options.sink, "sink"},
                   {&options.dropout_streams, "dropout_streams"}},
                  rank);
}

inline void check_addresses(const Forward& call, int rank) {
  check_addresses({{&call.q, "q"}, {&call.k, "k"}, {&call.v, "v"}, {&call.out, "out"}, {&call.lse, "lse"}}, rank);
  check_addresses(call.options, rank);
}

inline void check_addresses(const Backward& call, int rank) {
  const Gradients& grads = call.grads;
  check_addresses({{&call.grad_out, "grad_out"},
                   {&call.q, "q"},
                   {&call.k, "k"},
                   {&call.v, "v"},
                   {&call.out, "out"},
                   {&call.lse, "lse"},
                   {&call.grad_lse, "grad_lse"},
                   {&grads.q, "grads.q"},
                   {&grads.k, "grads.k"},
                   {&grads.v, "grads.v"},
                   {&grads.bias, "grads.bias"},
                   {&grads.bias2, "grads.bias2"},
                   {&grads.sink, "grads.sink"}},
                  rank);
  check_addresses(call.options, rank);
}

}  // namespace detail
}  // namespace parallel
}  // namespace api_v0
}  // namespace fovea

#endif
