// SPDX-License-Identifier: Apache-2.0
//
// For fovea/parallel.h: views of rows, buffers of the workspace, and what is done with them, or only measured.
#ifndef FOVEA_DETAIL_PARALLEL_WORK_H
#define FOVEA_DETAIL_PARALLEL_WORK_H

#include <fovea/parallel.h>

#include <cstring>

namespace fovea {
inline namespace api_v0 {
namespace parallel {
namespace detail {

using fovea::detail::fail;
using Dims = Tensor::Dims;

[[noreturn]] inline void refuse(const std::string& message) { fail(FOVEA_INVALID_ARGUMENT, message); }

inline std::size_t size_of(std::int32_t dtype) {
  switch (dtype) {
    case FOVEA_FP64:
    case FOVEA_INT64:
      return 8;
    case FOVEA_FP32:
    case FOVEA_INT32:
      return 4;
    case FOVEA_FP16:
    case FOVEA_BF16:
      return 2;
    default:
      return 1;
  }
}

// As the library writes a shape: 2x128x4x64.
inline std::string text_of(const Dims& shape) {
  std::string text;
  for (const std::int64_t dim : shape) {
    text += (text.empty() ? "" : "x") + std::to_string(dim);
  }
  return text.empty() ? "()" : text;
}

// ---- views ----

// A tensor with its strides. Rows of tensors are dimension rank - 3, heads rank - 2.
struct View {
  char* data = nullptr;
  fovea_dtype dtype = FOVEA_FP32;
  Dims shape;
  Dims strides;

  static View of(const Tensor& tensor) {
    View view;
    if (const fovea_tensor* given = tensor.get()) {
      view.data = static_cast<char*>(given->data);
      view.dtype = static_cast<fovea_dtype>(given->dtype);
      view.shape.assign(given->shape, given->shape + given->rank);
      view.strides.assign(given->stride, given->stride + given->rank);
      if ((given->flags & FOVEA_TENSOR_STRIDED) == 0) {
        view.nest(view.shape.size(), 1);
      }
    }
    return view;
  }

  // The strides of the first `dims` dimensions, each of which has the next one's elements behind one another; those of
  // the last are `stride` apart. They wrap where there are too many elements, which the library refuses.
  void nest(std::size_t dims, std::int64_t stride) {
    auto apart = static_cast<std::uint64_t>(stride);
    for (std::size_t dim = dims; dim-- > 0; apart *= static_cast<std::uint64_t>(shape[dim])) {
      strides[dim] = static_cast<std::int64_t>(apart);
    }
  }

  std::size_t item() const { return size_of(dtype); }
  bool is_empty() const { return std::count(shape.begin(), shape.end(), 0) > 0; }
  std::int64_t from_end(std::size_t dim) const { return shape[shape.size() - dim]; }
  std::int64_t stride_from_end(std::size_t dim) const { return strides[strides.size() - dim]; }
  // A null address stays one: calls that are only measured have none. What goes beyond the tensor has to be refused by
  // check(), by name; here it is a fault of that, found before anything moves, as measured calls come here, too.
  View narrow(std::size_t dim_from_end, std::int64_t start, std::int64_t count) const {
    const std::size_t dim = shape.size() - dim_from_end;
    if (dim_from_end > shape.size() || start < 0 || count < 0 || count > shape[dim] - start) {
      fail(FOVEA_INTERNAL_ERROR, "parallel.h: " + std::to_string(start) + " and the " + std::to_string(count) +
                                     " from there on of a tensor of shape " + text_of(shape));
    }
    View part = *this;
    part.shape[dim] = count;
    if (data != nullptr && count > 0) {
      part.data += start * strides[dim] * static_cast<std::int64_t>(item());
    }
    return part;
  }
  MutableTensor tensor() const { return {data, dtype, shape, &strides}; }
};

inline Tensor narrowed(const Tensor& tensor, std::size_t dim_from_end, std::int64_t start, std::int64_t count) {
  return View::of(tensor).narrow(dim_from_end, start, count).tensor();
}

// Rows of the longest sequence.
inline std::int64_t longest_of(const Rows& rows) {
  return rows.lengths().empty() ? 0 : *std::max_element(rows.lengths().begin(), rows.lengths().end());
}

// A bias or mask, or its gradient, that has rows instead of being broadcast over them.
inline bool has_queries(const Tensor& plane) {
  return plane && plane.get()->rank >= 2 && plane.get()->shape[plane.get()->rank - 2] != 1;
}

// One that has heads, of those without rows: every rank has all of them.
inline bool has_heads_alone(const Tensor& plane) {
  return plane && plane.get()->rank >= 3 && plane.get()->shape[plane.get()->rank - 3] != 1 && !has_queries(plane);
}

// Where tensors lie within a row of a buffer, the first dimension of which is rows: those of one, then those of the
// next.
struct Layout {
  std::vector<View> like;            // any number of rows
  std::vector<std::size_t> offsets;  // in bytes
  std::size_t bytes = 0;             // of a row

  explicit Layout(std::vector<View> tensors, std::int64_t share = 1) : like(std::move(tensors)) {
    for (View& view : like) {
      view.shape[view.shape.size() - 2] /= share;
      const std::size_t size = row_bytes(view);
      offsets.push_back(bytes);
      bytes += (size + 15) / 16 * 16;
    }
  }
  static std::size_t row_bytes(const View& view) {
    std::size_t bytes = view.item();
    for (std::size_t dim = 0; dim < view.shape.size(); ++dim) {
      bytes *= dim + 3 == view.shape.size() ? 1 : static_cast<std::size_t>(view.shape[dim]);
    }
    return bytes;
  }
  // Tensor number n of a buffer of so many rows.
  View at(std::size_t n, void* buffer, std::int64_t rows) const {
    View view = like[n];
    const std::size_t rank = view.shape.size();
    view.data = buffer == nullptr ? nullptr : static_cast<char*>(buffer) + offsets[n];
    view.shape[rank - 3] = 1;
    view.nest(rank, 1);
    view.shape[rank - 3] = rows;
    view.strides[rank - 3] = static_cast<std::int64_t>(bytes / view.item());
    return view;
  }
};

// ---- what a call does, done or only measured ----

class Work {
 public:
  // Without memory everything is measured and nothing done.
  Work(const Options& options, const Rows& rows, const Collectives& group, Workspace* memory)
      : rows_(rows), group_(group), options_(options), is_dry_(memory == nullptr) {
    if (memory != nullptr) {
      const auto address = reinterpret_cast<std::uintptr_t>(memory->data());
      base_ = static_cast<char*>(memory->data()) + (kAlign - address % kAlign) % kAlign;
      end_ = static_cast<char*>(memory->data()) + memory->bytes();
    }
  }

  const Rows& rows() const { return rows_; }
  const Options& options() const { return options_; }
  int rank() const { return group_.rank; }
  int ranks() const { return group_.ranks; }
  std::int64_t count() const { return rows_.count(group_.rank); }
  std::size_t bytes() const { return used_ + inner_ + kAlign; }

  // Memory of the workspace; null if nothing is done.
  char* take(std::size_t bytes) {
    char* const taken = is_dry_ ? nullptr : base_ + used_;
    used_ += (bytes + kAlign - 1) / kAlign * kAlign;
    return taken;
  }
  char* take_rows(const Layout& layout, std::int64_t rows) {
    return take(layout.bytes * static_cast<std::size_t>(rows));
  }
  // Numbers of the host, where the call can read them.
  template <class T>
  Tensor table(const std::vector<T>& numbers, Dims shape) {
    if (options_.device == Device::kCpu) {
      return {numbers.data(), shape};
    }
    const std::size_t bytes = numbers.size() * sizeof(T);
    char* const memory = take(bytes);
    copy(memory, bytes, numbers.data(), bytes, bytes, 1);
    return {static_cast<const void*>(memory), DTypeOf<T>::value, shape};
  }

  template <class Call>
  void call(const Call& call) {
    if (is_dry_) {
      inner_ = std::max(inner_, fovea::workspace(call));
      return;
    }
    char* const rest = base_ + used_;
    Workspace workspace(rest, static_cast<std::size_t>(end_ - rest));
    fovea::run(call, workspace);
  }

  void all_gather(const char* send, char* receive, std::size_t bytes) const {
    if (!is_dry_ && bytes > 0) {
      group_.all_gather(send, receive, bytes, options_.stream);
    }
  }
  void all_to_all(const char* send, char* receive, std::size_t bytes) const {
    if (!is_dry_ && bytes > 0) {
      group_.all_to_all(send, receive, bytes, options_.stream);
    }
  }
  void reduce_scatter(const char* send, char* receive, std::size_t bytes) const {
    if (!is_dry_ && bytes > 0) {
      group_.reduce_scatter(reinterpret_cast<const float*>(send), reinterpret_cast<float*>(receive),
                            bytes / sizeof(float), options_.stream);
    }
  }

  void copy(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t bytes,
            std::size_t times) const {
    if (is_dry_ || bytes == 0 || times == 0) {
      return;
    }
    if (group_.copy) {
      group_.copy(to, to_pitch, from, from_pitch, bytes, times, options_.stream);
      return;
    }
    for (std::size_t n = 0; n < times; ++n) {
      std::memcpy(static_cast<char*>(to) + n * to_pitch, static_cast<const char*>(from) + n * from_pitch, bytes);
    }
  }
  // Views of one shape, with adjacent elements of a head.
  void copy(const View& to, const View& from) const {
    if (is_dry_ || to.is_empty()) {
      return;
    }
    const std::size_t rank = to.shape.size();
    const std::int64_t rows = to.from_end(3), heads = to.from_end(2), dim = to.from_end(1);
    const bool joined = to.stride_from_end(2) == dim && from.stride_from_end(2) == dim;
    std::int64_t outer = 1;
    for (std::size_t level = 0; level + 3 < rank; ++level) {
      outer *= to.shape[level];
    }
    const auto runs = [&](std::int64_t to_at, std::int64_t from_at, std::int64_t elements) {
      const auto item = static_cast<std::int64_t>(to.item());
      // A negative stride has no pitch: row after row.
      const bool has_pitch = to.stride_from_end(3) >= elements && from.stride_from_end(3) >= elements;
      for (std::int64_t row = 0; row < (has_pitch ? 1 : rows); ++row) {
        const std::int64_t to_row = to_at + row * to.stride_from_end(3);
        const std::int64_t from_row = from_at + row * from.stride_from_end(3);
        copy(to.data + to_row * item, static_cast<std::size_t>(to.stride_from_end(3) * item),
             from.data + from_row * item, static_cast<std::size_t>(from.stride_from_end(3) * item),
             static_cast<std::size_t>(elements * item), has_pitch ? static_cast<std::size_t>(rows) : 1);
      }
    };
    for (std::int64_t entry = 0; entry < outer; ++entry) {
      std::int64_t to_at = 0, from_at = 0, rest = entry;
      for (std::size_t level = rank - 3; level-- > 0; rest /= to.shape[level]) {
        to_at += rest % to.shape[level] * to.strides[level];
        from_at += rest % to.shape[level] * from.strides[level];
      }
      for (std::int64_t head = 0; head < (joined ? 1 : heads); ++head) {
        runs(to_at + head * to.stride_from_end(2), from_at + head * from.stride_from_end(2),
             joined ? heads * dim : dim);
      }
    }
  }
  // Rows of all ranks, padded to the largest number, and the same in natural order: from one to the other.
  void to_natural(char* natural, const char* by_rank, std::size_t row_bytes) const {
    each_piece([&](std::int64_t first, std::int64_t at, std::int64_t rows) {
      move(natural, first, by_rank, at, rows, row_bytes);
    });
  }
  void to_ranks(char* by_rank, const char* natural, std::size_t row_bytes) const {
    each_piece([&](std::int64_t first, std::int64_t at, std::int64_t rows) {
      move(by_rank, at, natural, first, rows, row_bytes);
    });
  }
  // Calls f(first row in natural order, first row by ranks, number of rows).
  template <class Function>
  void each_piece(Function f) const {
    for (int rank = 0; rank < ranks(); ++rank) {
      std::int64_t at = rank * rows_.most();
      for (const Piece& piece : rows_.pieces(rank)) {
        f(rows_.first(piece), at, piece.rows);
        at += piece.rows;
      }
    }
  }

 private:
  static constexpr std::size_t kAlign = 256;

  void move(char* to, std::int64_t to_row, const char* from, std::int64_t from_row, std::int64_t rows,
            std::size_t row_bytes) const {
    if (!is_dry_) {
      const std::size_t bytes = static_cast<std::size_t>(rows) * row_bytes;
      copy(to + static_cast<std::size_t>(to_row) * row_bytes, bytes,
           from + static_cast<std::size_t>(from_row) * row_bytes, bytes, bytes, 1);
    }
  }

  const Rows& rows_;
  const Collectives& group_;
  const Options& options_;
  bool is_dry_;
  char* base_ = nullptr;
  char* end_ = nullptr;
  std::size_t used_ = 0;
  std::size_t inner_ = 0;
};

}  // namespace detail
}  // namespace parallel
}  // namespace api_v0
}  // namespace fovea

#endif
