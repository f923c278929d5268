// SPDX-License-Identifier: Apache-2.0
//
// Attention of sequences whose rows lie on several ranks, for C++17: each rank has some rows of q, k and v, and gets
// those rows of the results. Header-only, over fovea/attention.h. fovea has no transport: the caller's NCCL, MPI or
// sockets are three functions in Collectives; fovea/parallel_nccl.h makes them of a communicator of NCCL.
//
//     using namespace fovea;
//     const parallel::Rows rows = parallel::Rows::zigzag(131072, ranks);       // on every rank, once
//     Forward call;                                                            // of this rank's rows
//     call.q = {q, {1, rows.count(rank), 32, 128}};  // and k, v, out, lse, options, as in one process
//     parallel::run(call, rows, collectives, workspace);
//
// Move::kKeys gathers all keys and values on each rank, which then computes its own rows: results of a rank are those
// of ordinary calls, and nothing is merged. Move::kHeads exchanges heads: each rank computes all rows of some heads.
// docs/several-gpus.md compares them. Everything is ordered by the call's stream; nothing waits for it.
//
// What a call may have beside attention() of one process:
//   - q, k, v, out and their gradients have this rank's rows in the order of rows.pieces(rank), and elements of a head
//     that are adjacent. lse and grad_lse have the same rows.
//   - no cu_seqlens, max_seqlen, seqused or positions: rows has them. With Rows::packed tensors are packed.
//   - sink, alibi_slopes, dropout_streams, and biases and masks without queries, are whole on every rank. Seeds are
//     equal on all ranks; dropout's mask is that of one device.
//   - kKeys: a bias or mask with queries has this rank's rows and all keys, in natural order (not with packed rows).
//     grads.k and grads.v are fp32 sums over the ranks, of this rank's rows, and not supported with fp64. Gradients of
//     a sink and of biases without queries are this rank's part of a sum, which the caller forms over the ranks; these
//     biases' gradients are fp32, and so are those of all biases where a rank has one row. With dropout, pieces begin
//     at multiples of 16 rows.
//   - kHeads: the numbers of heads are multiples of the number of ranks. A bias or mask with queries has this rank's
//     Hq / ranks heads, or one, and all rows. Gradients of a sink and of biases without queries get the elements of
//     this rank's heads, others are not written. The gradient of a bias of one head is this rank's part of a sum.
//
// Ranks that make different calls wait for one another or get wrong results: nothing compares them. What does not fit
// the plan of rows, or is in the options alone, is refused on all ranks alike. Any other Error that is thrown before
// anything has moved is one about this rank's arguments, and other ranks then wait for it. Whether results share memory
// with other tensors is only seen when they are computed, after keys have moved.
#ifndef FOVEA_PARALLEL_H
#define FOVEA_PARALLEL_H

#include <fovea/attention.h>

#include <functional>

namespace fovea {
inline namespace api_v0 {
namespace parallel {

// ---- what the caller gives ----

// The collectives of a group of ranks. Each function is called by all ranks in the same order. It may return before its
// work is done, if work that is put into the stream later finds it done. It throws what it wants if it fails.
struct Collectives {
  int rank = 0;   // this rank's number
  int ranks = 1;  // how many there are

  // Every rank gives `bytes` bytes. All get those of rank 0, then those of rank 1, and so on.
  std::function<void(const void* send, void* receive, std::size_t bytes, void* stream)> all_gather;
  // Every rank gives ranks * count numbers. Rank r gets the sum over the ranks of their numbers r * count and
  // following.
  std::function<void(const float* send, float* receive, std::size_t count, void* stream)> reduce_scatter;
  // Every rank gives `bytes` bytes for each rank, one after the other, and gets as many from each.
  std::function<void(const void* send, void* receive, std::size_t bytes, void* stream)> all_to_all;
  // Copies `times` runs of `bytes` bytes, which are `to_pitch` and `from_pitch` bytes apart. `from` may be memory of
  // the host, which has been read when the function returns. Not needed on the CPU.
  std::function<void(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t bytes,
                     std::size_t times, void* stream)>
      copy;
};

// Adjacent rows of one sequence.
struct Piece {
  std::int64_t sequence = 0;
  std::int64_t start = 0;  // the position of the first row within the sequence
  std::int64_t rows = 0;
};

// How the ranks' data moves.
enum class Move { kKeys, kHeads };

// Which rows of a sequence, or of packed sequences, each rank has: what fovea_rows_plan() of fovea/c.h says. Make it
// once for each length, or for each batch of packed sequences, on every rank.
class Rows {
 public:
  // Two pieces a rank, one from the front and one from the back: balanced for causal and for full attention. Pieces
  // begin at multiples of `block` rows.
  static Rows zigzag(std::int64_t length, int ranks, std::int64_t block = 128) {
    return {FOVEA_ROWS_ZIGZAG, {length}, ranks, block, false};
  }
  // One piece a rank: balanced for full attention and for windows.
  static Rows contiguous(std::int64_t length, int ranks, std::int64_t block = 128) {
    return {FOVEA_ROWS_CONTIGUOUS, {length}, ranks, block, false};
  }
  // Sequences one after the other: long ones are cut, short ones given whole. contiguous: each rank has adjacent rows
  // of all, about as many as the others; kHeads puts nothing in order then, and kKeys is not balanced.
  static Rows packed(const std::vector<std::int64_t>& lengths, int ranks, std::int64_t block = 128,
                     bool contiguous = false) {
    return {contiguous ? FOVEA_ROWS_CONTIGUOUS : FOVEA_ROWS_PACKED, lengths, ranks, block, true};
  }

  int ranks() const { return static_cast<int>(pieces_.size()); }
  // The rows of all ranks.
  std::int64_t total() const { return first_.back(); }
  bool is_packed() const { return is_packed_; }
  const std::vector<std::int64_t>& lengths() const { return lengths_; }
  // The pieces of a rank, in the order in which they lie in its memory.
  const std::vector<Piece>& pieces(int rank) const { return pieces_.at(static_cast<std::size_t>(rank)); }
  // The number of rows of a rank.
  std::int64_t count(int rank) const { return counts_.at(static_cast<std::size_t>(rank)); }
  // The largest of them.
  std::int64_t most() const { return *std::max_element(counts_.begin(), counts_.end()); }
  // The number of a piece's first row among the rows of all sequences.
  std::int64_t first(const Piece& piece) const {
    return first_[static_cast<std::size_t>(piece.sequence)] + piece.start;
  }
  // Pairs of queries and keys of the rank that has the most, over the mean: 1 is perfect.
  double balance(bool causal = true, Window window = {}) const {
    fovea_rows asked = this->asked();
    asked.flags = FOVEA_WINDOW | (causal ? FOVEA_CAUSAL : 0u);
    asked.window_left = window.left;
    asked.window_right = window.right;
    double balance = 0;
    asked.balance = &balance;
    detail::check(fovea_rows_plan(&asked, nullptr));
    return balance;
  }
  // The first row of each sequence among all, and the end of the last: (B + 1).
  const std::vector<std::int64_t>& cu_seqlens() const { return first_; }

 private:
  Rows(fovea_rows_kind kind, std::vector<std::int64_t> lengths, int ranks, std::int64_t block, bool is_packed)
      : kind_(kind), lengths_(std::move(lengths)), block_(block), asked_ranks_(ranks), is_packed_(is_packed) {
    if (block < 1) {
      detail::fail(FOVEA_INVALID_ARGUMENT, "block: " + std::to_string(block) + "; accepted: 1 or more");
    }
    fovea_rows asked = this->asked();
    std::int64_t needed = 0;
    detail::check(fovea_rows_plan(&asked, &needed));
    const auto size = static_cast<std::size_t>(ranks);
    std::vector<std::int64_t> numbers(static_cast<std::size_t>(3 * needed)), piece_counts(size);
    counts_.resize(size);
    pieces_.resize(size);
    asked.rows = counts_.data();
    asked.piece_counts = piece_counts.data();
    asked.pieces = numbers.data();
    asked.piece_capacity = needed;
    detail::check(fovea_rows_plan(&asked, &needed));
    const std::int64_t* next = numbers.data();
    for (std::size_t rank = 0; rank < size; ++rank) {
      for (std::int64_t piece = 0; piece < piece_counts[rank]; ++piece, next += 3) {
        pieces_[rank].push_back({next[0], next[1], next[2]});
      }
    }
    first_.push_back(0);
    for (const std::int64_t length : lengths_) {
      first_.push_back(first_.back() + length);
    }
  }

  fovea_rows asked() const {
    fovea_rows asked{};
    asked.size = sizeof(asked);
    asked.kind = kind_;
    asked.ranks = asked_ranks_;
    asked.block = block_;
    asked.sequences = static_cast<std::int64_t>(lengths_.size());
    asked.lengths = lengths_.data();
    return asked;
  }

  fovea_rows_kind kind_;
  std::vector<std::int64_t> lengths_;
  std::int64_t block_;
  int asked_ranks_;
  bool is_packed_;
  std::vector<std::int64_t> counts_;
  std::vector<std::vector<Piece>> pieces_;
  std::vector<std::int64_t> first_;
};

}  // namespace parallel
}  // namespace api_v0
}  // namespace fovea

// What it is made of, which needs what stands above.
#include <fovea/detail/parallel_arguments.h>
#include <fovea/detail/parallel_heads.h>
#include <fovea/detail/parallel_keys.h>
#include <fovea/detail/parallel_work.h>

namespace fovea {
inline namespace api_v0 {
namespace parallel {

// ---- calls ----

namespace detail {

template <class Call>
std::size_t compute(const Call& call, const Rows& rows, const Collectives& group, Move move, Workspace* memory) {
  Work work(call.options, rows, group, memory);
  if (move == Move::kHeads) {
    by_heads(work, call);
  } else {
    by_keys(work, call);
  }
  return work.bytes();
}

}  // namespace detail

// Bytes of memory that the call needs, on the device of its tensors: buffers of what moves, and what its calls need.
// It differs from rank to rank. The tensors' data may be null; on a device it is then that of calls whose addresses,
// also those of their pieces' first rows, are multiples of 16 bytes, and others may need more.
template <class Call>
std::size_t workspace(const Call& call, const Rows& rows, const Collectives& group, Move move = Move::kKeys) {
  detail::check(call, rows, group, move);
  return detail::compute(call, rows, group, move, nullptr);
}

// Computes a Forward or a Backward of this rank's rows. All ranks call it, with equal options. On the CPU the workspace
// grows if it may. All arguments of this rank are checked before anything moves.
template <class Call>
void run(const Call& call, const Rows& rows, const Collectives& group, Workspace& memory, Move move = Move::kKeys) {
  const std::size_t bytes = parallel::workspace(call, rows, group, move);
  detail::check_addresses(call, group.rank);
  if (call.options.device != Device::kCpu && !memory.is_fixed()) {
    detail::refuse("workspace: none; accepted on a device: Workspace(data, bytes) of " + std::to_string(bytes) +
                   " bytes in its memory");
  }
  memory.require(bytes);
  if (memory.bytes() < bytes) {
    detail::fail(FOVEA_OUT_OF_MEMORY, "workspace: " + std::to_string(memory.bytes()) + " bytes; accepted: at least " +
                                          std::to_string(bytes) + ", as fovea::parallel::workspace() says");
  }
  detail::compute(call, rows, group, move, &memory);
}

}  // namespace parallel
}  // namespace api_v0
}  // namespace fovea

#endif  // FOVEA_PARALLEL_H
