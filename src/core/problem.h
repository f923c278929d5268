// SPDX-License-Identifier: Apache-2.0
//
// The canonical problem. Two structs:
//
//   Problem   everything about a call but its numbers: what the one-line text form says, what the planner reads.
//   Call      a Problem with the caller's memory: views by logical coordinates, lengths, seeds. What runs.
//
// validate() (validate.h) turns a fovea_problem into a Call; text.cpp turns a Problem into a line and back.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "math/band.h"
#include "math/dropout.h"
#include "math/rows.h"
#include "math/score.h"

namespace fovea {

enum class Direction : std::int32_t { kForward = FOVEA_FORWARD, kBackward = FOVEA_BACKWARD };

enum class DType : std::int32_t {
  kNone = 0,
  kFp32 = FOVEA_FP32,
  kFp16 = FOVEA_FP16,
  kBf16 = FOVEA_BF16,
  kFp64 = FOVEA_FP64,
  kBool = FOVEA_BOOL,
  kInt32 = FOVEA_INT32,
  kInt64 = FOVEA_INT64,
};

// "fp32", "bool", ...
std::string_view name_of(DType type);
std::size_t size_of(DType type);

// How q, k, v, out and their gradients lie in memory; kStrided is what none of the names says. Only the text form
// and the code that makes tensors from it read this: a backend reads strides.
enum class Layout { kBshd, kBhsd, kQkv3, kStrided };

// Which of its five dimensions a bias or mask really has; false is broadcast.
struct Extents {
  bool batch1 = false;
  bool batch2 = false;
  bool head = false;
  bool query = false;
  bool key = false;
  friend bool operator==(const Extents&, const Extents&) = default;
};

// A bias or mask that a problem has; type kNone is one it has not.
struct PlaneTraits {
  DType type = DType::kNone;
  Extents extents;
  explicit operator bool() const { return type != DType::kNone; }
  friend bool operator==(const PlaneTraits&, const PlaneTraits&) = default;
};

enum class Alibi { kNone, kPerHead, kPerBatchAndHead };

// Some of a call's results.
struct Results {
  bool out = false;
  bool q = false;  // the gradient of q ...
  bool k = false;
  bool v = false;
  bool bias = false;
  bool bias2 = false;
  bool sink = false;
  friend bool operator==(const Results&, const Results&) = default;
};

struct Problem {
  Direction direction = Direction::kForward;
  std::int64_t batch1 = 1;
  std::int64_t batch2 = 1;  // B = batch1 * batch2
  bool two_level = false;   // written "b=1x4" rather than "b=4"
  std::int64_t heads_q = 1;
  std::int64_t heads_k = 1;
  std::int64_t seqlen_q = 0;  // dense; packed: max_seqlen_q
  std::int64_t seqlen_k = 0;
  std::int64_t head_dim = 0;
  std::int64_t head_dim_v = 0;
  DType type = DType::kFp32;
  Layout layout = Layout::kBshd;
  std::int64_t skew = 0;  // elements by which bases and rows are off their natural alignment (text form only)

  bool packed = false;                  // variable length
  std::vector<std::int64_t> lengths_q;  // packed: a sequence each; empty if they lie where they cannot be read
  std::vector<std::int64_t> lengths_k;
  std::int64_t total_q = 0;  // packed: rows of q; at least the sum of the lengths
  std::int64_t total_k = 0;
  bool has_used_q = false;  // seqused_q is given ...
  bool has_used_k = false;
  std::vector<std::int64_t> used_q;  // ... with these values, where they can be read
  std::vector<std::int64_t> used_k;

  std::optional<double> scale;  // none: 1 / sqrt(head_dim)
  double softcap = 0;           // 0: none
  bool causal = false;
  bool top_left = false;
  std::int64_t window_left = -1;  // -1: unbounded
  std::int64_t window_right = -1;
  bool positions = false;       // rows and keys have positions of a larger problem: shift is the difference of ...
  std::int64_t position_q = 0;  // ... those of query 0 and of key 0
  std::int64_t position_k = 0;
  bool has_positions_q = false;  // positions_q is given, to be added ...
  bool has_positions_k = false;
  std::vector<std::int64_t> positions_q;  // ... with these values, where they can be read
  std::vector<std::int64_t> positions_k;
  PlaneTraits bias;
  PlaneTraits bias2;
  PlaneTraits mask;
  Alibi alibi = Alibi::kNone;
  bool sink = false;
  double dropout = 0;
  math::Rng rng = math::Rng::kFovea;
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  PlaneTraits streams;  // the numbers of dropout's streams are given, over batch1, batch2 and head

  bool deterministic = false;
  bool clear_rows = false;  // rows that belong to no sequence get 0, in lse -inf
  bool lse = false;         // forward: the logsumexp is a result
  bool grad_lse = false;    // backward: its gradient is given
  Results need;             // backward: the gradients that it computes
  Results wide;  // those that are fp32 where their inputs have 16 bits; `out` in a backward as well, which reads it
  Results accumulate;  // those that are combined with what their memory holds

  fovea_device device = FOVEA_CPU;
  std::string backend;  // "": the best

  std::int64_t batch() const { return batch1 * batch2; }
  // 1 / sqrt(head_dim) by default (1 where head_dim is 0).
  double scale_or_default() const;
  math::Score<double> score() const;
  // The positions of query 0 and key 0 of batch entry b, where they can be read; 0 without positions.
  std::int64_t first_query(std::int64_t b) const;
  std::int64_t first_key(std::int64_t b) const;
  // What aligns the queries of batch entry b, which has these (used) lengths, with its keys; and the band.
  std::int64_t shift(std::int64_t b, const math::Sequence& sequence) const;
  math::Band<math::i64> band(std::int64_t b, const math::Sequence& sequence) const;
  bool banded() const { return causal || window_left >= 0 || window_right >= 0; }

  friend bool operator==(const Problem&, const Problem&) = default;
};

// Every gradient that a problem has: what a backward computes unless its line names some.
Results every_gradient(const Problem& problem);

// The backward of a problem that computes every gradient; a backward is its own.
Problem backward_of(Problem problem);

// The one-line text form. parse() throws Error naming the key; parse(print(p)) == p.
std::string print(const Problem& problem);
Problem parse(std::string_view line);

// The caller's memory by logical coordinates (math::Strides says which). Not given where `type` is kNone.
struct View {
  void* data = nullptr;
  DType type = DType::kNone;
  math::Strides strides;
  bool accumulate = false;  // a result that is combined with what is there
  explicit operator bool() const { return type != DType::kNone; }
};

struct Call {
  Problem problem;
  math::Rows rows;
  math::Lengths positions_q, positions_k;  // on a device, where the Problem has not their values
  math::Dropout dropout;                   // with seed_ptr and offset_ptr read and added, where that can be done here

  View q, k, v;       // row, col = sequence row, head_dim; head = query head (q, out) or key head (k, v)
  View bias, bias2;   // row, col = query, key within the sequence
  View mask;          // the same
  View alibi_slopes;  // batch1, batch2, head
  View sink;          // head
  View streams;       // int64: batch1, batch2, head
  View out;
  View lse;  // batch1, batch2, head, row
  View grad_out, grad_lse;
  View grad_q, grad_k, grad_v;
  View grad_bias, grad_bias2;  // strides 0 where the bias was given broadcast
  View grad_sink;
  // On the CPU `rows` reads lengths from here, as they were when they were checked: another thread of the caller's may
  // change its own meanwhile.
  std::vector<std::shared_ptr<const std::vector<std::int64_t>>> lengths;
  void* stream = nullptr;
  int device_index = 0;
  const std::uint64_t* seed_ptr = nullptr;  // on a device, where they cannot be read here: added by the kernels
  const std::uint64_t* offset_ptr = nullptr;

  // The number that the dropout of (b, query head h) is keyed on.
  std::uint64_t dropout_stream(std::int64_t b, std::int64_t head) const;
  math::DropoutOfHead dropout_of_head(std::int64_t b, std::int64_t head) const;
};

}  // namespace fovea
