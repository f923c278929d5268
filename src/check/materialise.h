// SPDX-License-Identifier: Apache-2.0
//
// From a case to memory: a buffer for every tensor by the case's layout and skew, filled so that forbidden reads and
// writes are seen.
//
//   inputs    NaN everywhere but in elements that exist: in gaps between rows, behind every sequence's end, past
//             the last cu_seqlens, in the padding of a bias. A read of it is seen in the result.
//   outputs   a pattern everywhere; after a run, whatever is not an element to be written must still hold it.
//
// The tensors of one qkv3 layout share one buffer, and so do their gradients.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "check/cases.h"
#include "check/guarded.h"
#include "core/shapes.h"

namespace fovea::check {

using Index = std::array<std::int64_t, FOVEA_MAX_RANK>;

// Memory with a margin on either side; `data` begins at a multiple of 64.
class Buffer {
 public:
  explicit Buffer(std::size_t size);
  // Memory that ends where a page begins that nobody may touch: to read one byte past its end ends the process.
  static Buffer before_a_guard(std::size_t size);
  Buffer(Buffer&&) = default;  // vectors keep their memory when moved
  Buffer& operator=(Buffer&&) = default;

  std::uint8_t* data() { return data_; }
  std::size_t size() const { return size_; }
  // With the margins.
  std::span<std::uint8_t> all();

  // Fills every byte, margins included, with a pattern, and forbids all writes ...
  void fill_with_pattern();
  // ... except to these bytes.
  void allow(std::size_t offset, std::size_t count);
  // Whether any other byte has changed; `where` gets its offset from data().
  bool changed(std::ptrdiff_t* where) const;

 private:
  Buffer() = default;

  std::unique_ptr<Guarded> guarded_;
  std::vector<std::uint8_t> memory_;
  std::vector<bool> allowed_;
  std::size_t size_ = 0;
  std::uint8_t* data_ = nullptr;
};

struct Tensor {
  // By what its dimensions are.
  enum class Kind {
    kQueries,     // (batch ..., row, head, column), or packed (row, head, column)
    kKeys,        // the same over keys
    kStatistics,  // lse: (batch ..., head, row), or packed (head, row)
    kPlane,       // bias, mask: (batch ..., head, query, key), each 1 where it is broadcast
    kVector       // slopes, sink, lengths
  };

  std::string_view name;
  Kind kind;
  bool output;
  const fovea_tensor* fovea_problem::*member;
  fovea_tensor view;
  std::shared_ptr<Buffer> buffer;
  std::int64_t base;                   // the element of the buffer that index 0, 0, ... is
  std::vector<std::int64_t> existing;  // the buffer's elements that exist, in logical order

  DType type() const { return static_cast<DType>(view.dtype); }
  std::int64_t element(const Index& index) const;
  double get(std::int64_t element) const;
  void set(std::int64_t element, double value) const;
};

class Tensors {
 public:
  explicit Tensors(const Case& c);
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  // It points into this object. A forward has the gradients, too. Where gradients are added to what is there, the
  // forward's out and lse are merged with what is there if they have no 16 bits.
  fovea_problem problem(Direction direction) const;

  const std::deque<Tensor>& all() const { return tensors_; }
  const Tensor* find(std::string_view name) const;
  // The tensors that a direction writes.
  std::vector<const Tensor*> outputs(Direction direction) const;

  // Whether a direction combines an output with what is there, and that: a number for each element that exists.
  bool is_added(const Tensor& tensor, Direction direction) const;
  std::vector<double> before(const Tensor& tensor) const;

  // Fills the direction's outputs with the pattern, those that are added with what is there before ...
  void prepare(Direction direction) const;
  // ... and describes a forbidden write; "" if there was none.
  std::string trespass(Direction direction) const;

  // NaN (or what the type has for it) in all of the tensor's memory.
  static void poison(const Tensor& tensor);

 private:
  // Elements of rows that do not exist, where the problem wants them cleared.
  std::vector<std::int64_t> cleared(const Tensor& tensor, Direction direction) const;
  void add(std::string_view name, Tensor::Kind kind, bool output, const fovea_tensor* fovea_problem::*member);
  void place(Tensor& tensor, int part);
  void list_existing(Tensor& tensor) const;
  void fill(const Tensor& tensor) const;
  void fill_family() const;
  void fill_unused(const Tensor& bias) const;

  const Case& case_;
  Shapes shapes_;
  fovea_problem problem_;
  std::deque<Tensor> tensors_;  // addresses stay
  std::shared_ptr<Buffer> inputs_of_one_tensor_;
  std::shared_ptr<Buffer> gradients_of_one_tensor_;
};

// (first row of q, its rows, first row of k, its rows) of a batch entry, by the problem's own lengths.
math::Sequence sequence_of(const Problem& problem, std::int64_t b);

// The element of a bias or mask for batch entry b; broadcast dimensions go to their only place.
std::int64_t plane_element(const Problem& problem, const Tensor& plane, std::int64_t b, std::int64_t h, std::int64_t i,
                           std::int64_t j);

// Whether (i, j) takes part, by the mask and the band.
bool takes_part(const Problem& problem, const Tensor* mask, std::int64_t b, std::int64_t h, std::int64_t i,
                std::int64_t j);

}  // namespace fovea::check
