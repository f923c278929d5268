// SPDX-License-Identifier: Apache-2.0
//
// validate(): every argument of a fovea_problem is checked here, once, and what comes out is a Call that backends
// trust. The steps stand in the order in which later ones need earlier ones:
//
//     header    sizes, flags, enums, what must be zero
//     options   scale, window, softcap, dropout
//     shapes    q fixes batch, heads and lengths; k and v follow; cu_seqlens make it packed
//     lengths   what cu_seqlens and seqused hold, where it can be read
//     planes    bias, bias2 and mask, by NumPy's broadcasting
//     vectors   alibi_slopes, sink
//     results   out, lse, and the backward's gradients
//     memory    no output overlaps itself or anything else that is used
//
// A message is "<argument>: <what it was>; accepted: <what would be>". Nothing is written here.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

#include "core/overlap.h"
#include "core/problem.h"
#include "core/validate.h"

namespace fovea {
namespace {

using Ints = std::vector<std::int64_t>;

// No product of a tensor's dimensions and no distance between two of its elements in bytes goes beyond this, nor do
// the lengths and heads of a packed problem, so that no offset and no size of a workspace overflows: that may take some
// hundred bytes for each element, and some thousand for each column or head in each of 2^12 threads.
constexpr std::int64_t kMost = std::int64_t{1} << 50;
constexpr std::int64_t kMostHeads = std::int64_t{1} << 32;  // and columns

template <class... T>
[[noreturn]] void refuse(fovea_status status, fmt::format_string<T...> format, T&&... arguments) {
  throw Error(status, fmt::format(format, std::forward<T>(arguments)...));
}

template <class... T>
[[noreturn]] void refuse(fmt::format_string<T...> format, T&&... arguments) {
  throw Error(FOVEA_INVALID_ARGUMENT, fmt::format(format, std::forward<T>(arguments)...));
}

// "2x4x128x127"; "()" for a scalar.
std::string text_of(const std::int64_t* shape, std::int64_t rank) {
  return rank == 0 ? "()" : fmt::format("{}", fmt::join(shape, shape + rank, "x"));
}
std::string shape_of(const fovea_tensor& tensor) { return text_of(tensor.shape, tensor.rank); }
std::string text_of(const Ints& shape) { return text_of(shape.data(), static_cast<std::int64_t>(shape.size())); }

std::string type_name(std::int32_t type) {
  if (type < FOVEA_FP32 || type > FOVEA_INT64) {
    return fmt::format("element type {}", type);
  }
  return std::string(name_of(static_cast<DType>(type)));
}

std::int64_t elements_of(const fovea_tensor& tensor) {
  std::int64_t count = 1;
  for (int i = 0; i < tensor.rank; ++i) {
    count *= tensor.shape[i];
  }
  return count;
}

// Whether the product of dimensions is at most kMost, those of 0 taken as 1.
template <class Dims>
bool product_fits(const Dims& dims) {
  std::int64_t product = 1;
  return std::all_of(std::begin(dims), std::end(dims), [&](std::int64_t dim) {
    return !__builtin_mul_overflow(product, std::max<std::int64_t>(dim, 1), &product) && product <= kMost;
  });
}

// In elements: as given, or row-major. A dimension that has no second index has no use for what was given, which may
// be any number.
std::array<std::int64_t, FOVEA_MAX_RANK> strides_of(const fovea_tensor& tensor) {
  std::array<std::int64_t, FOVEA_MAX_RANK> strides{};
  std::int64_t next = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    const bool is_given = (tensor.flags & FOVEA_TENSOR_STRIDED) != 0 && tensor.shape[i] > 1;
    strides[i] = is_given ? tensor.stride[i] : next;
    next *= std::max<std::int64_t>(tensor.shape[i], 1);
  }
  return strides;
}

Footprint footprint_of(const fovea_tensor& tensor) {
  const auto strides = strides_of(tensor);
  Footprint footprint;
  footprint.base = reinterpret_cast<std::intptr_t>(tensor.data);
  footprint.width = static_cast<std::int64_t>(size_of(static_cast<DType>(tensor.dtype)));
  footprint.rank = tensor.rank;
  for (int i = 0; i < tensor.rank; ++i) {
    footprint.extent[i] = tensor.shape[i];
    footprint.stride[i] = strides[i] * footprint.width;
  }
  return footprint;
}

// A tensor that a direction uses: its name in fovea_problem and whether it is written.
struct Argument {
  const char* name;
  const fovea_tensor* fovea_problem::*tensor;
  bool written;
};

constexpr Argument kInputs[] = {
    {"q", &fovea_problem::q, false},
    {"k", &fovea_problem::k, false},
    {"v", &fovea_problem::v, false},
    {"bias", &fovea_problem::bias, false},
    {"bias2", &fovea_problem::bias2, false},
    {"mask", &fovea_problem::mask, false},
    {"alibi_slopes", &fovea_problem::alibi_slopes, false},
    {"sink", &fovea_problem::sink, false},
    {"cu_seqlens_q", &fovea_problem::cu_seqlens_q, false},
    {"cu_seqlens_k", &fovea_problem::cu_seqlens_k, false},
    {"seqused_q", &fovea_problem::seqused_q, false},
    {"seqused_k", &fovea_problem::seqused_k, false},
};
constexpr Argument kForwardResults[] = {
    {"out", &fovea_problem::out, true},
    {"lse", &fovea_problem::lse, true},
};
constexpr Argument kBackwardTensors[] = {
    {"out", &fovea_problem::out, false},
    {"lse", &fovea_problem::lse, false},
    {"grad_out", &fovea_problem::grad_out, false},
    {"grad_lse", &fovea_problem::grad_lse, false},
    {"grad_q", &fovea_problem::grad_q, true},
    {"grad_k", &fovea_problem::grad_k, true},
    {"grad_v", &fovea_problem::grad_v, true},
    {"grad_bias", &fovea_problem::grad_bias, true},
    {"grad_bias2", &fovea_problem::grad_bias2, true},
    {"grad_sink", &fovea_problem::grad_sink, true},
};

// Those that a direction uses and that are given.
std::vector<Argument> arguments_of(const fovea_problem& given, Direction direction) {
  std::vector<Argument> arguments;
  const auto add = [&](const Argument& argument) {
    if (given.*argument.tensor != nullptr) {
      arguments.push_back(argument);
    }
  };
  std::for_each(std::begin(kInputs), std::end(kInputs), add);
  if (direction == Direction::kForward) {
    std::for_each(std::begin(kForwardResults), std::end(kForwardResults), add);
  } else {
    std::for_each(std::begin(kBackwardTensors), std::end(kBackwardTensors), add);
  }
  return arguments;
}

class Validator {
 public:
  Validator(const fovea_problem& given, Direction direction, bool shapes_only)
      : given_(given), shapes_only_(shapes_only), backward_(direction == Direction::kBackward) {
    problem_.direction = direction;
  }

  Call run() {
    header();
    options();
    shapes();
    lengths();
    planes();
    vectors();
    results();
    memory();
    layout();
    seeds();
    return call_;
  }

 private:
  const fovea_problem& given_;
  const bool shapes_only_;
  const bool backward_;
  Call call_;
  Problem& problem_ = call_.problem;

  // ---- one tensor ----

  bool readable() const { return given_.device == FOVEA_CPU; }

  void struct_of(const char* name, const fovea_tensor& tensor) const {
    if (tensor.size != sizeof(fovea_tensor)) {
      refuse("{}: size {}; accepted: sizeof(fovea_tensor), {}", name, tensor.size, sizeof(fovea_tensor));
    }
    if ((tensor.flags & ~FOVEA_TENSOR_STRIDED) != 0) {
      refuse("{}: flags {:#x}; accepted: 0 or FOVEA_TENSOR_STRIDED", name, tensor.flags);
    }
    if (tensor.reserved != 0) {
      refuse("{}: reserved is {}; accepted: 0", name, tensor.reserved);
    }
    if (tensor.rank < 0 || tensor.rank > FOVEA_MAX_RANK) {
      refuse("{}: rank {}; accepted: 0 to {}", name, tensor.rank, FOVEA_MAX_RANK);
    }
    const std::span shape(tensor.shape, static_cast<std::size_t>(tensor.rank));
    if (std::any_of(shape.begin(), shape.end(), [](std::int64_t dim) { return dim < 0; })) {
      refuse("{}: shape {}; accepted: dimensions of 0 or more", name, shape_of(tensor));
    }
    if (!product_fits(shape)) {
      refuse("{}: shape {}; accepted: at most 2^50 elements", name, shape_of(tensor));
    }
  }

  void type_of(const char* name, const fovea_tensor& tensor, std::initializer_list<DType> accepted,
               const char* hint = "") const {
    if (std::none_of(accepted.begin(), accepted.end(),
                     [&](DType type) { return static_cast<std::int32_t>(type) == tensor.dtype; })) {
      std::vector<std::string_view> names;
      std::transform(accepted.begin(), accepted.end(), std::back_inserter(names), [](DType t) { return name_of(t); });
      refuse(FOVEA_INVALID_TYPE, "{}: {}; accepted: {}{}", name, type_name(tensor.dtype), fmt::join(names, ", "), hint);
    }
  }

  // Where the elements lie, once the type is known.
  void storage_of(const char* name, const fovea_tensor& tensor) const {
    if (elements_of(tensor) == 0) {
      return;
    }
    const auto width = static_cast<std::int64_t>(size_of(static_cast<DType>(tensor.dtype)));
    const auto strides = strides_of(tensor);
    std::int64_t span = 0;
    for (int i = 0; i < tensor.rank; ++i) {
      std::int64_t reach = 0;
      if (strides[i] == std::numeric_limits<std::int64_t>::min() ||
          __builtin_mul_overflow(tensor.shape[i] - 1, std::abs(strides[i]), &reach) ||
          __builtin_add_overflow(span, reach, &span) || span > kMost / width) {
        refuse("{}: strides {} with shape {}; accepted: elements at most 2^50 bytes apart", name,
               text_of(strides.data(), tensor.rank), shape_of(tensor));
      }
    }
    if (shapes_only_) {
      return;
    }
    if (tensor.data == nullptr) {
      refuse("{}: data is NULL; accepted: NULL only without elements, and shape {} has {}", name, shape_of(tensor),
             elements_of(tensor));
    }
    if (reinterpret_cast<std::uintptr_t>(tensor.data) % static_cast<std::uintptr_t>(width) != 0) {
      refuse("{}: data at {}; accepted: a multiple of {}, the size of {}", name, fmt::ptr(tensor.data), width,
             type_name(tensor.dtype));
    }
  }

  const fovea_tensor& required(const char* name, const fovea_tensor* tensor, const char* accepted) const {
    if (tensor == nullptr) {
      refuse("{}: not given; accepted: {}", name, accepted);
    }
    return *tensor;
  }

  void shape_is(const char* name, const fovea_tensor& tensor, const Ints& accepted, std::string_view names) const {
    if (!std::equal(accepted.begin(), accepted.end(), tensor.shape, tensor.shape + tensor.rank)) {
      refuse("{}: shape {}; accepted: {}, {}", name, shape_of(tensor), names, text_of(accepted));
    }
  }

  // ---- header ----

  void header() {
    if (given_.size != sizeof(fovea_problem)) {
      refuse("problem: size {}; accepted: sizeof(fovea_problem), {}", given_.size, sizeof(fovea_problem));
    }
    constexpr std::uint32_t kKnown = FOVEA_CAUSAL | FOVEA_DETERMINISTIC | FOVEA_SCALE | FOVEA_WINDOW;
    if ((given_.flags & ~kKnown) != 0) {
      refuse("flags: {:#x}; accepted: bits of {:#x}, FOVEA_CAUSAL, _DETERMINISTIC, _SCALE, _WINDOW", given_.flags,
             kKnown);
    }
    if (given_.align != FOVEA_BOTTOM_RIGHT && given_.align != FOVEA_TOP_LEFT) {
      refuse("align: {}; accepted: FOVEA_BOTTOM_RIGHT (0) or FOVEA_TOP_LEFT (1)", given_.align);
    }
    if (given_.rng != FOVEA_RNG_FOVEA && given_.rng != FOVEA_RNG_TORCH_MEM_EFFICIENT) {
      refuse("rng: {}; accepted: FOVEA_RNG_FOVEA (0) or FOVEA_RNG_TORCH_MEM_EFFICIENT (1)", given_.rng);
    }
    if (given_.device != FOVEA_CPU && given_.device != FOVEA_CUDA) {
      refuse("device: {}; accepted: FOVEA_CPU (0) or FOVEA_CUDA (1)", given_.device);
    }
    if (given_.device_index < 0 || (given_.device == FOVEA_CPU && given_.device_index != 0)) {
      refuse("device_index: {}; accepted: 0 on the CPU, 0 or more with CUDA", given_.device_index);
    }
    if (given_.reserved != 0) {
      refuse("reserved: {}; accepted: 0", given_.reserved);
    }
    if (given_.device == FOVEA_CPU && given_.stream != nullptr) {
      refuse("stream: {}; accepted: NULL on the CPU", fmt::ptr(given_.stream));
    }
    problem_.device = static_cast<fovea_device>(given_.device);
    problem_.backend = given_.backend != nullptr ? given_.backend : "";
    problem_.causal = (given_.flags & FOVEA_CAUSAL) != 0;
    problem_.deterministic = (given_.flags & FOVEA_DETERMINISTIC) != 0;
    problem_.top_left = given_.align == FOVEA_TOP_LEFT;
    problem_.rng = static_cast<math::Rng>(given_.rng);
    problem_.seed = given_.seed;
    problem_.offset = given_.offset;
    call_.stream = given_.stream;
    for (const Argument& argument : arguments_of(given_, problem_.direction)) {
      struct_of(argument.name, *(given_.*argument.tensor));
    }
  }

  // ---- options ----

  void options() {
    const fovea_tensor& q = required("q", given_.q, "a tensor, (B, Sq, Hq, D) or (total_q, Hq, D)");
    type_of("q", q, {DType::kFp32, DType::kFp16, DType::kBf16, DType::kFp64});
    problem_.type = static_cast<DType>(q.dtype);
    if (problem_.type == DType::kFp64 && given_.device != FOVEA_CPU) {
      refuse(FOVEA_UNSUPPORTED, "q: fp64 on a CUDA device; accepted: fp32, fp16, bf16, or fp64 on the CPU");
    }
    const double most = problem_.type == DType::kFp64 ? std::numeric_limits<double>::max()
                                                      : static_cast<double>(std::numeric_limits<float>::max());
    if ((given_.flags & FOVEA_SCALE) != 0) {
      if (!(std::abs(given_.scale) <= most)) {
        refuse("scale: {}; accepted: a finite number, at most {} in size where sums are {}", given_.scale, most,
               name_of(accumulator()));
      }
      problem_.scale = given_.scale;
    } else if (given_.scale != 0) {
      refuse("scale: {} without FOVEA_SCALE; accepted: 0, or the flag, which says that scale is meant", given_.scale);
    }

    if ((given_.flags & FOVEA_WINDOW) != 0) {
      if (given_.window_left < -1) {
        refuse("window_left: {}; accepted: -1 (unbounded) or more", given_.window_left);
      }
      if (given_.window_right < -1) {
        refuse("window_right: {}; accepted: -1 (unbounded) or more", given_.window_right);
      }
      problem_.window_left = given_.window_left;
      problem_.window_right = given_.window_right;
    } else if (given_.window_left != 0 || given_.window_right != 0) {
      refuse("window_{}: {} without FOVEA_WINDOW; accepted: 0, or the flag, which says that the window is meant",
             given_.window_left != 0 ? "left" : "right",
             given_.window_left != 0 ? given_.window_left : given_.window_right);
    }

    // The cap and 1 / cap are both used, as numbers of the accumulator's type.
    const double least = 1 / most * 4;
    if (!(given_.softcap == 0 || (given_.softcap >= least && given_.softcap <= most / 4))) {
      refuse("softcap: {}; accepted: 0 (none), or {:.4g} to {:.4g} where sums are {}", given_.softcap, least, most / 4,
             name_of(accumulator()));
    }
    problem_.softcap = given_.softcap;

    if (!(given_.dropout_p >= 0 && given_.dropout_p <= 1)) {
      refuse("dropout_p: {}; accepted: 0 <= dropout_p <= 1", given_.dropout_p);
    }
    problem_.dropout = given_.dropout_p;
  }

  DType accumulator() const { return problem_.type == DType::kFp64 ? DType::kFp64 : DType::kFp32; }

  // ---- shapes ----

  void shapes() {
    const fovea_tensor& q = *given_.q;
    const fovea_tensor& k = required("k", given_.k, "a tensor, (B, Sk, Hk, D) or (total_k, Hk, D)");
    const fovea_tensor& v = required("v", given_.v, "a tensor, (B, Sk, Hk, Dv) or (total_k, Hk, Dv)");
    type_of("k", k, {problem_.type}, ", the type of q");
    type_of("v", v, {problem_.type}, ", the type of q");

    if ((given_.cu_seqlens_q == nullptr) != (given_.cu_seqlens_k == nullptr)) {
      const bool q_only = given_.cu_seqlens_q != nullptr;
      refuse("cu_seqlens_{}: not given beside cu_seqlens_{}; accepted: both, or neither", q_only ? 'k' : 'q',
             q_only ? 'q' : 'k');
    }
    problem_.packed = given_.cu_seqlens_q != nullptr;
    const int rank = problem_.packed ? 3 : q.rank;
    if (problem_.packed && q.rank != 3) {
      refuse("q: shape {}; accepted with cu_seqlens_q: (total_q, Hq, D)", shape_of(q));
    }
    if (rank < 4 && !problem_.packed) {
      refuse(
          "q: shape {}; accepted: (B, Sq, Hq, D), (B1, B2, Sq, Hq, D), or with cu_seqlens_q and cu_seqlens_k "
          "(total_q, Hq, D)",
          shape_of(q));
    }
    if (k.rank != rank) {
      refuse("k: shape {}; accepted: the rank of q, {}", shape_of(k), rank);
    }
    if (v.rank != rank) {
      refuse("v: shape {}; accepted: the rank of q, {}", shape_of(v), rank);
    }

    problem_.heads_q = q.shape[rank - 2];
    problem_.heads_k = k.shape[rank - 2];
    problem_.head_dim = q.shape[rank - 1];
    problem_.head_dim_v = v.shape[rank - 1];
    for (const auto& [name, tensor] : {std::pair("q", &q), std::pair("v", &v)}) {
      if (tensor->shape[rank - 2] > kMostHeads || tensor->shape[rank - 1] > kMostHeads) {
        refuse("{}: shape {}; accepted: at most 2^32 heads, head_dim at most 2^32", name, shape_of(*tensor));
      }
    }
    if (k.shape[rank - 1] != problem_.head_dim) {
      refuse("k: shape {}, head_dim {}; accepted: that of q, {}", shape_of(k), k.shape[rank - 1], problem_.head_dim);
    }
    if (problem_.heads_q > 0 && (problem_.heads_k == 0 || problem_.heads_q % problem_.heads_k != 0)) {
      refuse("k: shape {}, {} heads; accepted: a divisor of q's {} heads", shape_of(k), problem_.heads_k,
             problem_.heads_q);
    }
    if (problem_.packed) {
      packed_batch();
    } else {
      dense_batch();
    }
    Ints values(k.shape, k.shape + rank - 1);
    values.push_back(problem_.head_dim_v);
    shape_is("v", v, values, problem_.packed ? "(total_k, Hk, Dv)" : "(B, Sk, Hk, Dv)");
    for (const auto& [name, tensor] : {std::pair("q", &q), std::pair("k", &k), std::pair("v", &v)}) {
      storage_of(name, *tensor);
    }

    math::Rows& rows = call_.rows;
    rows.batch1 = problem_.batch1;
    rows.batch2 = problem_.batch2;
    rows.heads_q = problem_.heads_q;
    rows.heads_k = problem_.heads_k;
    rows.rows_q = q.shape[rank - 3];
    rows.rows_k = k.shape[rank - 3];
    call_.q = rows_view(q);
    call_.k = rows_view(k);
    call_.v = rows_view(v);
  }

  void dense_batch() {
    const fovea_tensor& q = *given_.q;
    const fovea_tensor& k = *given_.k;
    problem_.two_level = q.rank == 5;
    problem_.batch1 = q.shape[0];
    problem_.batch2 = problem_.two_level ? q.shape[1] : 1;
    problem_.seqlen_q = q.shape[q.rank - 3];
    problem_.seqlen_k = k.shape[k.rank - 3];
    if (!std::equal(q.shape, q.shape + q.rank - 3, k.shape)) {
      refuse("k: shape {}; accepted: the batch of q, {} (broadcast with strides of 0)", shape_of(k),
             text_of(q.shape, q.rank - 3));
    }
    for (const auto& [name, value] :
         {std::pair("max_seqlen_q", given_.max_seqlen_q), std::pair("max_seqlen_k", given_.max_seqlen_k),
          std::pair("batch_outer", given_.batch_outer)}) {
      if (value != 0) {
        refuse("{}: {} without cu_seqlens; accepted: 0, the shape of q says it", name, value);
      }
    }
  }

  void packed_batch() {
    std::int64_t batch = 0;
    for (const auto& [name, tensor] :
         {std::pair("cu_seqlens_q", given_.cu_seqlens_q), std::pair("cu_seqlens_k", given_.cu_seqlens_k)}) {
      type_of(name, *tensor, {DType::kInt32, DType::kInt64});
      if (tensor->rank != 1 || tensor->shape[0] < 1) {
        refuse("{}: shape {}; accepted: (B + 1)", name, shape_of(*tensor));
      }
      storage_of(name, *tensor);
      if (tensor == given_.cu_seqlens_q) {
        batch = tensor->shape[0] - 1;
      } else if (tensor->shape[0] - 1 != batch) {
        refuse("{}: shape {}; accepted: that of cu_seqlens_q, {}", name, shape_of(*tensor),
               shape_of(*given_.cu_seqlens_q));
      }
    }
    problem_.total_q = given_.q->shape[0];
    problem_.total_k = given_.k->shape[0];
    problem_.batch1 = batch;
    if (given_.batch_outer < 0 || (given_.batch_outer > 0 && batch % given_.batch_outer != 0)) {
      refuse("batch_outer: {}; accepted: a divisor of the batch, {}, or 0 (one level)", given_.batch_outer, batch);
    }
    if (given_.batch_outer > 0) {
      problem_.two_level = true;
      problem_.batch1 = given_.batch_outer;
      problem_.batch2 = batch / given_.batch_outer;
    }
  }

  // q, k, v, out and their gradients.
  View rows_view(const fovea_tensor& tensor) const {
    const auto s = strides_of(tensor);
    View view{tensor.data, static_cast<DType>(tensor.dtype), {}};
    if (problem_.packed) {
      view.strides = {0, 0, s[1], s[0], s[2]};
    } else if (problem_.two_level) {
      view.strides = {s[0], s[1], s[3], s[2], s[4]};
    } else {
      view.strides = {s[0], 0, s[2], s[1], s[3]};
    }
    return view;
  }

  // ---- lengths ----

  static math::Lengths lengths_view(const fovea_tensor& tensor) {
    return {tensor.data, tensor.dtype == FOVEA_INT64, strides_of(tensor)[0]};
  }

  void lengths() {
    math::Rows& rows = call_.rows;
    if (problem_.packed) {
      rows.cu_q = lengths_view(*given_.cu_seqlens_q);
      rows.cu_k = lengths_view(*given_.cu_seqlens_k);
      problem_.lengths_q = cu_seqlens("cu_seqlens_q", rows.cu_q, "total_q", problem_.total_q);
      problem_.lengths_k = cu_seqlens("cu_seqlens_k", rows.cu_k, "total_k", problem_.total_k);
      problem_.seqlen_q = longest("max_seqlen_q", given_.max_seqlen_q, "cu_seqlens_q", rows.cu_q, problem_.lengths_q);
      problem_.seqlen_k = longest("max_seqlen_k", given_.max_seqlen_k, "cu_seqlens_k", rows.cu_k, problem_.lengths_k);
      rows.is_packed = true;
    }
    // max_seqlen may be any number from the longest sequence up: no sequence is longer than what holds them all.
    rows.limit_q = std::min(problem_.seqlen_q, rows.rows_q);
    rows.limit_k = std::min(problem_.seqlen_k, rows.rows_k);
    problem_.has_used_q = given_.seqused_q != nullptr;
    problem_.has_used_k = given_.seqused_k != nullptr;
    if (problem_.has_used_q) {
      rows.used_q = seqused("seqused_q", *given_.seqused_q, problem_.lengths_q, problem_.seqlen_q, problem_.used_q);
    }
    if (problem_.has_used_k) {
      rows.used_k = seqused("seqused_k", *given_.seqused_k, problem_.lengths_k, problem_.seqlen_k, problem_.used_k);
    }
    if (problem_.dropout > 0) {
      constexpr std::int64_t kMostWithDropout = std::int64_t{1} << 32;
      for (const auto& [name, length] : {std::pair('q', rows.limit_q), std::pair('k', rows.limit_k)}) {
        if (length > kMostWithDropout) {
          refuse("{}: sequences of up to {}; accepted with dropout: at most 2^32", name, length);
        }
      }
    }
  }

  Ints cu_seqlens(const char* name, const math::Lengths& cu, const char* total_name, std::int64_t total) const {
    Ints lengths;
    if (!cu || !readable()) {
      return lengths;
    }
    lengths.reserve(static_cast<std::size_t>(problem_.batch()));  // a batch beyond all memory is refused at once
    if (cu[0] != 0) {
      refuse("{}: begins with {}; accepted: 0 first", name, cu[0]);
    }
    for (std::int64_t b = 0; b < problem_.batch(); ++b) {
      if (cu[b + 1] < cu[b]) {
        refuse("{}: {} at index {} after {}; accepted: numbers that never decrease", name, cu[b + 1], b + 1, cu[b]);
      }
      if (cu[b + 1] > total) {
        refuse("{}: {} at index {}; accepted: at most {}, {}", name, cu[b + 1], b + 1, total_name, total);
      }
      lengths.push_back(cu[b + 1] - cu[b]);
    }
    return lengths;
  }

  std::int64_t longest(const char* name, std::int64_t given, const char* cu_name, const math::Lengths& cu,
                       const Ints& lengths) const {
    if (given < 0) {
      refuse("{}: {}; accepted: at least the longest sequence", name, given);
    }
    const std::int64_t found = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
    const std::int64_t length = given != 0 ? given : found;
    if (length == 0 && (!cu || !readable()) && problem_.batch() > 0) {
      refuse("{}: 0; accepted: at least the longest sequence, as {} cannot be read here", name, cu_name);
    }
    if (length < found) {
      refuse("{}: {}; accepted: at least the longest sequence of {}, {}", name, given, cu_name, found);
    }
    const std::int64_t heads = std::max(problem_.heads_q, problem_.heads_k);
    const std::int64_t columns = std::max(problem_.head_dim, problem_.head_dim_v);
    if (!product_fits(Ints{problem_.batch(), heads, length}) || !product_fits(Ints{heads, length, columns})) {
      refuse("{}: {}; accepted: at most 2^50 rows in {} sequences of {} heads, 2^50 elements in one", name, length,
             problem_.batch(), heads);
    }
    return length;
  }

  math::Lengths seqused(const char* name, const fovea_tensor& tensor, const Ints& lengths, std::int64_t longest,
                        Ints& values) const {
    type_of(name, tensor, {DType::kInt32});
    shape_is(name, tensor, {problem_.batch()}, "(B)");
    storage_of(name, tensor);
    const math::Lengths used = lengths_view(tensor);
    if (used && readable()) {
      values.reserve(static_cast<std::size_t>(problem_.batch()));
      for (std::int64_t b = 0; b < problem_.batch(); ++b) {
        const std::int64_t most = lengths.empty() ? longest : lengths[static_cast<std::size_t>(b)];
        if (used[b] < 0 || used[b] > most) {
          refuse("{}: {} at index {}; accepted: 0 to the length of that sequence, {}", name, used[b], b, most);
        }
        values.push_back(used[b]);
      }
    }
    return used;
  }

  // ---- bias, bias2, mask ----

  void planes() {
    for (const auto& [name, tensor, traits, view] :
         {std::tuple("bias", given_.bias, &problem_.bias, &call_.bias),
          std::tuple("bias2", given_.bias2, &problem_.bias2, &call_.bias2)}) {
      if (tensor != nullptr) {
        if (problem_.type == DType::kFp64) {
          type_of(name, *tensor, {DType::kFp32, DType::kFp16, DType::kBf16, DType::kFp64});
        } else {
          type_of(name, *tensor, {DType::kFp32, DType::kFp16, DType::kBf16},
                  tensor->dtype == FOVEA_BOOL ? "; a bool goes into mask" : " (fp64 with fp64 q)");
        }
        *view = plane(name, *tensor, *traits);
      }
    }
    if (given_.mask != nullptr) {
      type_of("mask", *given_.mask, {DType::kBool}, "; numbers that are added to scores go into bias");
      call_.mask = plane("mask", *given_.mask, problem_.mask);
    }
  }

  View plane(const char* name, const fovea_tensor& tensor, PlaneTraits& traits) const {
    const bool two_level = problem_.two_level;
    const std::int64_t scores[] = {problem_.batch1, problem_.batch2, problem_.heads_q, problem_.seqlen_q,
                                   problem_.seqlen_k};
    // One level: dimension 1 of the five does not exist.
    constexpr int kOneLevel[] = {0, 2, 3, 4};
    constexpr int kTwoLevels[] = {0, 1, 2, 3, 4};
    const int* dimension = two_level ? kTwoLevels : kOneLevel;
    const int rank = two_level ? 5 : 4;
    const auto given = strides_of(tensor);
    std::int64_t strides[5] = {};
    bool present[5] = {};
    bool broadcasts = tensor.rank <= rank;
    for (int i = 0; broadcasts && i < tensor.rank; ++i) {
      const int target = dimension[rank - tensor.rank + i];
      if (tensor.shape[i] != 1) {
        broadcasts = tensor.shape[i] == scores[target];
        present[target] = true;
        strides[target] = given[i];
      }
    }
    if (!broadcasts) {
      const char* longest = problem_.packed ? "max_seqlen_" : "S";
      refuse("{}: shape {} does not broadcast to {}, Hq={}, {}q={}, {}k={}", name, shape_of(tensor),
             two_level ? fmt::format("B1={}, B2={}", problem_.batch1, problem_.batch2)
                       : fmt::format("B={}", problem_.batch1),
             problem_.heads_q, longest, problem_.seqlen_q, longest, problem_.seqlen_k);
    }
    storage_of(name, tensor);
    traits.type = static_cast<DType>(tensor.dtype);
    traits.extents = {present[0], present[1], present[2], present[3], present[4]};
    return {tensor.data, traits.type, {strides[0], strides[1], strides[2], strides[3], strides[4]}};
  }

  // ---- alibi_slopes, sink ----

  void vectors() {
    if (given_.alibi_slopes != nullptr) {
      const fovea_tensor& slopes = *given_.alibi_slopes;
      type_of("alibi_slopes", slopes, {accumulator()}, accumulator_hint());
      const bool per_batch = slopes.rank != 1;
      const bool two_level = per_batch && slopes.rank == 3 && problem_.two_level;
      Ints accepted{problem_.heads_q};
      if (two_level) {
        accepted = {problem_.batch1, problem_.batch2, problem_.heads_q};
      } else if (per_batch) {
        accepted = {problem_.batch(), problem_.heads_q};
      }
      shape_is("alibi_slopes", slopes, accepted, "(Hq) or (B, Hq)");
      storage_of("alibi_slopes", slopes);
      problem_.alibi = per_batch ? Alibi::kPerBatchAndHead : Alibi::kPerHead;
      const auto s = strides_of(slopes);
      call_.alibi_slopes = {slopes.data, static_cast<DType>(slopes.dtype), {}};
      if (two_level) {
        call_.alibi_slopes.strides = {s[0], s[1], s[2], 0, 0};
      } else if (per_batch) {
        call_.alibi_slopes.strides = {s[0] * problem_.batch2, s[0], s[1], 0, 0};
      } else {
        call_.alibi_slopes.strides = {0, 0, s[0], 0, 0};
      }
    }
    if (given_.sink != nullptr) {
      call_.sink = sink_view("sink", *given_.sink);
      problem_.sink = true;
    }
  }

  const char* accumulator_hint() const {
    return problem_.type == DType::kFp64 ? ", as q is fp64" : " (fp64 with fp64 q)";
  }

  View sink_view(const char* name, const fovea_tensor& tensor) const {
    type_of(name, tensor, {accumulator()}, accumulator_hint());
    shape_is(name, tensor, {problem_.heads_q}, "(Hq)");
    storage_of(name, tensor);
    return {tensor.data, static_cast<DType>(tensor.dtype), {0, 0, strides_of(tensor)[0], 0, 0}};
  }

  // ---- out, lse, gradients ----

  View like(const char* name, const fovea_tensor& tensor, const fovea_tensor& model, std::int64_t last,
            const char* names) const {
    type_of(name, tensor, {problem_.type}, ", the type of q");
    Ints accepted(model.shape, model.shape + model.rank);
    accepted.back() = last;
    shape_is(name, tensor, accepted, names);
    storage_of(name, tensor);
    return rows_view(tensor);
  }

  View lse_view(const char* name, const fovea_tensor& tensor) const {
    type_of(name, tensor, {accumulator()}, accumulator_hint());
    const auto s = strides_of(tensor);
    View view{tensor.data, static_cast<DType>(tensor.dtype), {}};
    if (problem_.packed) {
      shape_is(name, tensor, {problem_.heads_q, problem_.total_q}, "(Hq, total_q)");
      view.strides = {0, 0, s[0], s[1], 0};
    } else if (problem_.two_level) {
      shape_is(name, tensor, {problem_.batch1, problem_.batch2, problem_.heads_q, problem_.seqlen_q},
               "(B1, B2, Hq, Sq)");
      view.strides = {s[0], s[1], s[2], s[3], 0};
    } else {
      shape_is(name, tensor, {problem_.batch1, problem_.heads_q, problem_.seqlen_q}, "(B, Hq, Sq)");
      view.strides = {s[0], 0, s[1], s[2], 0};
    }
    storage_of(name, tensor);
    return view;
  }

  void results() {
    const char* of_q = problem_.packed ? "(total_q, Hq, D)" : "(B, Sq, Hq, D)";
    const char* of_out = problem_.packed ? "(total_q, Hq, Dv)" : "(B, Sq, Hq, Dv)";
    const std::int64_t dv = problem_.head_dim_v;
    call_.out = like("out", required("out", given_.out, of_out), *given_.q, dv, of_out);
    if (!backward_) {
      problem_.lse = given_.lse != nullptr;
      if (problem_.lse) {
        call_.lse = lse_view("lse", *given_.lse);
      }
      return;
    }
    call_.lse = lse_view("lse", required("lse", given_.lse, "the forward's logsumexp, which the backward reads"));
    call_.grad_out =
        like("grad_out", required("grad_out", given_.grad_out, "the gradient of out"), *given_.q, dv, of_out);
    problem_.grad_lse = given_.grad_lse != nullptr;
    if (problem_.grad_lse) {
      call_.grad_lse = lse_view("grad_lse", *given_.grad_lse);
    }
    if (given_.grad_q != nullptr) {
      call_.grad_q = like("grad_q", *given_.grad_q, *given_.q, problem_.head_dim, of_q);
      problem_.need.q = true;
    }
    if (given_.grad_k != nullptr) {
      call_.grad_k = like("grad_k", *given_.grad_k, *given_.k, problem_.head_dim, "the shape of k");
      problem_.need.k = true;
    }
    if (given_.grad_v != nullptr) {
      call_.grad_v = like("grad_v", *given_.grad_v, *given_.v, dv, "the shape of v");
      problem_.need.v = true;
    }
    for (const auto& [name, gradient, of, tensor, view, need] :
         {std::tuple("grad_bias", given_.grad_bias, "bias", given_.bias, &call_.grad_bias, &problem_.need.bias),
          std::tuple("grad_bias2", given_.grad_bias2, "bias2", given_.bias2, &call_.grad_bias2,
                     &problem_.need.bias2)}) {
      if (gradient != nullptr) {
        *view = grad_plane(name, *gradient, of, tensor);
        *need = true;
      }
    }
    if (given_.grad_sink != nullptr) {
      if (given_.sink == nullptr) {
        refuse("grad_sink: given without sink; accepted: a gradient of what is given");
      }
      call_.grad_sink = sink_view("grad_sink", *given_.grad_sink);
      problem_.need.sink = true;
    }
  }

  View grad_plane(const char* name, const fovea_tensor& gradient, const char* of, const fovea_tensor* tensor) const {
    if (tensor == nullptr) {
      refuse("{}: given without {}; accepted: a gradient of what is given", name, of);
    }
    type_of(name, gradient, {static_cast<DType>(tensor->dtype)}, ", the type of the bias");
    shape_is(name, gradient, Ints(tensor->shape, tensor->shape + tensor->rank), "the shape of the bias as given");
    PlaneTraits traits;
    return plane(name, gradient, traits);
  }

  // ---- memory ----

  void memory() const {
    std::vector<std::pair<Argument, Footprint>> used;
    for (const Argument& argument : arguments_of(given_, problem_.direction)) {
      const fovea_tensor& tensor = *(given_.*argument.tensor);
      if (elements_of(tensor) > 0) {
        used.emplace_back(argument, footprint_of(tensor));
      }
    }
    for (const auto& [written, footprint] : used) {
      if (!written.written) {
        continue;
      }
      if (overlaps_itself(footprint)) {
        const fovea_tensor& tensor = *(given_.*written.tensor);
        refuse("{}: strides {} with shape {} lead two elements to one address; accepted: an address for each",
               written.name, text_of(strides_of(tensor).data(), tensor.rank), shape_of(tensor));
      }
      for (const auto& [other, other_footprint] : used) {
        if (!shapes_only_ && other.tensor != written.tensor && overlap(footprint, other_footprint)) {
          refuse("{}: shares memory with {}; accepted: memory of its own, as it is written", written.name, other.name);
        }
      }
    }
  }

  // ---- the layout's name ----

  bool strides_are(const fovea_tensor& tensor, std::initializer_list<std::int64_t> accepted) const {
    const auto strides = strides_of(tensor);
    int i = 0;
    for (const std::int64_t stride : accepted) {
      if (tensor.shape[i] > 1 && strides[i] != stride) {
        return false;
      }
      ++i;
    }
    return true;
  }

  // For strides of (batch levels, rows, heads, columns) that are `row` and `head` apart.
  bool lies(const fovea_tensor& tensor, std::int64_t row, std::int64_t head) const {
    const int rank = tensor.rank;
    const std::int64_t block =
        std::max(row * tensor.shape[rank - 3], head * tensor.shape[rank - 2]);  // of one batch entry
    switch (rank) {
      case 3:
        return strides_are(tensor, {row, head, 1});
      case 4:
        return strides_are(tensor, {block, row, head, 1});
      default:
        return strides_are(tensor, {block * tensor.shape[1], block, row, head, 1});
    }
  }

  // Only a name for what the strides say: nothing is decided by it.
  void layout() {
    const std::int64_t row_of_three =
        problem_.heads_q * problem_.head_dim + problem_.heads_k * (problem_.head_dim + problem_.head_dim_v);
    bool rows_first = true;
    bool heads_first = true;
    bool one_tensor = given_.q->shape[given_.q->rank - 3] == given_.k->shape[given_.k->rank - 3];
    for (const fovea_tensor* tensor : {given_.q, given_.k, given_.v}) {
      const std::int64_t columns = tensor->shape[tensor->rank - 1];
      const std::int64_t heads = tensor->shape[tensor->rank - 2];
      const std::int64_t sequence = tensor->shape[tensor->rank - 3];
      rows_first = rows_first && lies(*tensor, heads * columns, columns);
      heads_first = heads_first && lies(*tensor, columns, sequence * columns);
      one_tensor = one_tensor && lies(*tensor, row_of_three, columns);
    }
    problem_.layout = rows_first    ? Layout::kBshd
                      : heads_first ? Layout::kBhsd
                      : one_tensor  ? Layout::kQkv3
                                    : Layout::kStrided;
  }

  // ---- seeds ----

  void seeds() {
    std::uint64_t seed = given_.seed;
    std::uint64_t offset = given_.offset;
    if (readable() && !shapes_only_) {
      for (const auto& [pointer, value] : {std::pair(given_.seed_ptr, &seed), std::pair(given_.offset_ptr, &offset)}) {
        if (pointer != nullptr) {
          std::uint64_t added = 0;
          std::memcpy(&added, pointer, sizeof(added));
          *value += added;
        }
      }
    }
    call_.dropout = math::Dropout::make(problem_.rng, problem_.dropout, seed, offset);
  }
};

}  // namespace

Call validate(const fovea_problem& problem, Direction direction, bool shapes_only) {
  return Validator(problem, direction, shapes_only).run();
}

void check_workspace(const fovea_problem& problem, Direction direction, const void* workspace, std::size_t bytes) {
  if (workspace == nullptr && bytes > 0) {
    refuse("workspace: NULL with {} bytes; accepted: memory, or 0 bytes", bytes);
  }
  if (workspace == nullptr || bytes == 0) {
    return;
  }
  Footprint scratch;
  scratch.base = reinterpret_cast<std::intptr_t>(workspace);
  scratch.rank = 1;
  scratch.extent[0] = static_cast<std::int64_t>(std::min(bytes, static_cast<std::size_t>(kMost)));
  scratch.stride[0] = 1;
  for (const Argument& argument : arguments_of(problem, direction)) {
    const fovea_tensor& tensor = *(problem.*argument.tensor);
    if (elements_of(tensor) > 0 && overlap(scratch, footprint_of(tensor))) {
      refuse("workspace: shares memory with {}; accepted: memory of its own, as it is written", argument.name);
    }
  }
}

}  // namespace fovea
