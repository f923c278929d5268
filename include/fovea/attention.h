// SPDX-License-Identifier: Apache-2.0
//
// fovea for C++17: the C ABI of fovea/c.h with types, defaults and exceptions. Header-only; link libfovea.
//
//     std::vector<float> q(2 * 128 * 4 * 64), k(q), v(q), out(q.size()), lse(2 * 4 * 128);
//     fovea::Options options;
//     options.causal = true;
//     fovea::forward(fovea::tensor(q, {2, 128, 4, 64}), fovea::tensor(k, {2, 128, 4, 64}),
//                    fovea::tensor(v, {2, 128, 4, 64}), fovea::tensor(out, {2, 128, 4, 64}),
//                    fovea::tensor(lse, {2, 4, 128}), options);
//
// Tensors are views: nothing is copied or kept after a call. fovea/c.h gives shapes and types, at the fields of
// fovea_problem, which have the same names. Every failure throws fovea::Error.
#ifndef FOVEA_ATTENTION_H
#define FOVEA_ATTENTION_H

#include <fovea/c.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace fovea {
// The version of this API, a part of every name that the linker sees.
inline namespace api_v0 {

// A call's failure. what() names the argument, its value and what is accepted.
class Error : public std::runtime_error {
 public:
  Error(fovea_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  // The status that the C ABI returned.
  fovea_status status() const noexcept { return status_; }

 private:
  fovea_status status_;
};

namespace detail {

[[noreturn]] inline void fail(fovea_status status, const std::string& message) {
  throw Error(status, std::string(fovea_status_name(status)) + ": " + message);
}

inline void check(fovea_status status) {
  if (status != FOVEA_OK) {
    fail(status, fovea_last_error());
  }
}

}  // namespace detail

// ---- element types ----

// The bits of 16-bit floating-point numbers, without arithmetic.
struct fp16 {
  std::uint16_t bits;
};
struct bf16 {
  std::uint16_t bits;
};

// fovea_dtype of an element type of C++. One byte that is 0 or not is a bool, so that masks may be
// std::vector<std::uint8_t> (std::vector<bool> has no elements in memory).
template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> : std::integral_constant<fovea_dtype, FOVEA_FP32> {};
template <>
struct DTypeOf<double> : std::integral_constant<fovea_dtype, FOVEA_FP64> {};
template <>
struct DTypeOf<fp16> : std::integral_constant<fovea_dtype, FOVEA_FP16> {};
template <>
struct DTypeOf<bf16> : std::integral_constant<fovea_dtype, FOVEA_BF16> {};
template <>
struct DTypeOf<bool> : std::integral_constant<fovea_dtype, FOVEA_BOOL> {};
template <>
struct DTypeOf<std::uint8_t> : std::integral_constant<fovea_dtype, FOVEA_BOOL> {};
template <>
struct DTypeOf<std::int32_t> : std::integral_constant<fovea_dtype, FOVEA_INT32> {};
template <>
struct DTypeOf<std::int64_t> : std::integral_constant<fovea_dtype, FOVEA_INT64> {};

// ---- tensors ----

// A view of memory that is read. Strides count elements; without them the tensor is row-major contiguous. A
// default-constructed Tensor is absent.
class Tensor {
 public:
  using Dims = std::vector<std::int64_t>;

  Tensor() = default;

  // The element type is that of the pointer.
  template <class T>
  Tensor(const T* data, const Dims& shape) : Tensor(data, DTypeOf<T>::value, shape) {}
  template <class T>
  Tensor(const T* data, const Dims& shape, const Dims& strides) : Tensor(data, DTypeOf<T>::value, shape, &strides) {}

  // For types that are known at run time only.
  Tensor(const void* data, fovea_dtype dtype, const Dims& shape, const Dims* strides = nullptr) : given_(true) {
    if (shape.size() > FOVEA_MAX_RANK || (strides != nullptr && strides->size() != shape.size())) {
      detail::fail(FOVEA_INVALID_ARGUMENT, "tensor: rank " + std::to_string(shape.size()) + " with " +
                                               (strides != nullptr ? std::to_string(strides->size()) : "no") +
                                               " strides; accepted: rank 0 to 5, a stride for each dimension or none");
    }
    tensor_.size = sizeof(tensor_);
    tensor_.data = const_cast<void*>(data);
    tensor_.dtype = dtype;
    tensor_.rank = static_cast<std::int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), tensor_.shape);
    if (strides != nullptr) {
      tensor_.flags = FOVEA_TENSOR_STRIDED;
      std::copy(strides->begin(), strides->end(), tensor_.stride);
    }
  }

  explicit operator bool() const { return given_; }
  const fovea_tensor* get() const { return given_ ? &tensor_ : nullptr; }

 private:
  bool given_ = false;
  fovea_tensor tensor_{};
};

// A view of memory that is written.
class MutableTensor : public Tensor {
 public:
  MutableTensor() = default;

  template <class T, class = std::enable_if_t<!std::is_const_v<T>>>
  MutableTensor(T* data, const Dims& shape) : Tensor(data, shape) {}
  template <class T, class = std::enable_if_t<!std::is_const_v<T>>>
  MutableTensor(T* data, const Dims& shape, const Dims& strides) : Tensor(data, shape, strides) {}

  MutableTensor(void* data, fovea_dtype dtype, const Dims& shape, const Dims* strides = nullptr)
      : Tensor(data, dtype, shape, strides) {}
};

namespace detail {

template <class Container>
void check_size(const Container& container, const Tensor::Dims& shape) {
  std::uint64_t elements = 1;  // wraps where there are too many, which the library refuses
  for (const std::int64_t dim : shape) {
    elements *= static_cast<std::uint64_t>(dim);
  }
  if (elements != container.size()) {
    fail(FOVEA_INVALID_ARGUMENT, "tensor: a container of " + std::to_string(container.size()) +
                                     " elements; accepted: " + std::to_string(elements) + ", as the shape has");
  }
}

}  // namespace detail

// A container's elements (std::vector, std::array, std::span, ...), row-major; the shape must use them all.
template <class Container>
Tensor tensor(const Container& container, const Tensor::Dims& shape) {
  detail::check_size(container, shape);
  return {container.data(), shape};
}
template <class Container>
MutableTensor tensor(Container& container, const Tensor::Dims& shape) {
  detail::check_size(container, shape);
  return {container.data(), shape};
}

// ---- options ----

// The position of query i among the keys is i + shift: kBottomRight shift is Sk - Sq, kTopLeft 0.
enum class Align : std::int32_t { kBottomRight = FOVEA_BOTTOM_RIGHT, kTopLeft = FOVEA_TOP_LEFT };
// The rule that turns (seed, offset, b, h, i, j) into a dropout decision.
enum class Rng : std::int32_t { kFovea = FOVEA_RNG_FOVEA, kTorchMemEfficient = FOVEA_RNG_TORCH_MEM_EFFICIENT };
// The memory that holds the tensors.
enum class Device : std::int32_t { kCpu = FOVEA_CPU, kCuda = FOVEA_CUDA };

// Keys i + shift - left <= j <= i + shift + right; -1 is unbounded.
struct Window {
  std::int64_t left = -1;
  std::int64_t right = -1;
};

// All options, and the optional tensors. Give the backward the options of its forward.
struct Options {
  bool causal = false;
  Window window;
  // Matters if Sq and Sk differ. Bottom-right, as in FlashAttention: the last query is aligned with the last key.
  // PyTorch's is_causal is kTopLeft: the first query is aligned with the first key.
  Align align = Align::kBottomRight;
  std::optional<double> scale;  // none: 1 / sqrt(D)
  double softcap = 0;           // 0: none

  Tensor bias;
  Tensor bias2;
  Tensor mask;
  Tensor alibi_slopes;
  Tensor sink;

  // Dropout is a function of seed and offset alone: a call that leaves them at 0 draws the mask of every other such
  // call. Give every layer and every step another one, and the backward those of its forward.
  double dropout_p = 0;
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  const std::uint64_t* seed_ptr = nullptr;
  const std::uint64_t* offset_ptr = nullptr;
  Rng rng = Rng::kFovea;

  Tensor cu_seqlens_q;
  Tensor cu_seqlens_k;
  Tensor seqused_q;
  Tensor seqused_k;
  std::int64_t max_seqlen_q = 0;
  std::int64_t max_seqlen_k = 0;
  std::int64_t batch_outer = 0;

  // If one of the four is given, rows have positions of a larger problem, of which the call computes a part (fovea/c.h,
  // position_q), and align is left at its default.
  std::optional<std::int64_t> position_q;
  std::optional<std::int64_t> position_k;
  Tensor positions_q;
  Tensor positions_k;
  Tensor dropout_streams;

  bool deterministic = false;
  bool clear_rows = false;  // rows that belong to no sequence get 0, in lse -inf; else they are not written
  std::string backend;      // "": fovea chooses
  Device device = Device::kCpu;
  std::int32_t device_index = 0;
  void* stream = nullptr;
};

// The gradients that a backward computes: those whose tensors are given, at least one.
struct Gradients {
  MutableTensor q = {};
  MutableTensor k = {};
  MutableTensor v = {};
  MutableTensor bias = {};
  MutableTensor bias2 = {};
  MutableTensor sink = {};
  std::uint64_t accumulate = 0;  // bits FOVEA_ACCUMULATE_GRAD_*: gradients that are added to what their tensors hold
};

// ---- calls ----

// A forward call: to be run, prepared or explained.
struct Forward {
  Tensor q = {};
  Tensor k = {};
  Tensor v = {};
  MutableTensor out = {};
  MutableTensor lse = {};  // optional: the logsumexp, which a backward needs
  Options options = {};
  // out and lse hold the result over other keys, and get the result over those and these (FOVEA_ACCUMULATE_OUT).
  bool accumulate = false;
};

// A backward call: to be run, prepared or explained. q, k, v, out, lse and the options are those of the forward.
struct Backward {
  Tensor grad_out = {};
  Tensor q = {};
  Tensor k = {};
  Tensor v = {};
  Tensor out = {};
  Tensor lse = {};
  Gradients grads = {};
  Options options = {};
  Tensor grad_lse = {};  // optional
};

// Scratch memory: grown when a call needs more, kept until the object is destroyed. One thread at a time.
class Workspace {
 public:
  Workspace() = default;
  // The caller's memory, on the device of the tensors, which does not grow.
  Workspace(void* data, std::size_t bytes) : data_(data), bytes_(bytes), is_fixed_(true) {}

  void require(std::size_t bytes) {
    if (bytes > bytes_ && !is_fixed_) {
      bytes_ = 0;
      owned_.reset();
      owned_.reset(new (std::nothrow) unsigned char[bytes]);
      if (owned_ == nullptr) {
        data_ = nullptr;
        detail::fail(FOVEA_OUT_OF_MEMORY, "workspace: " + std::to_string(bytes) + " bytes cannot be allocated");
      }
      data_ = owned_.get();
      bytes_ = bytes;
    }
  }
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  bool is_fixed() const { return is_fixed_; }

 private:
  std::unique_ptr<unsigned char[]> owned_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  bool is_fixed_ = false;
};

namespace detail {

inline fovea_problem problem_of(const Options& options) {
  fovea_problem problem{};
  problem.size = sizeof(problem);
  problem.flags = (options.causal ? FOVEA_CAUSAL : 0u) | (options.deterministic ? FOVEA_DETERMINISTIC : 0u) |
                  (options.scale ? FOVEA_SCALE : 0u) | (options.clear_rows ? FOVEA_CLEAR_ROWS : 0u) | FOVEA_WINDOW;
  problem.align = static_cast<std::int32_t>(options.align);
  problem.rng = static_cast<std::int32_t>(options.rng);
  problem.device = static_cast<std::int32_t>(options.device);
  problem.device_index = options.device_index;
  problem.backend = options.backend.empty() ? nullptr : options.backend.c_str();
  problem.stream = options.stream;
  problem.scale = options.scale.value_or(0);
  problem.window_left = options.window.left;
  problem.window_right = options.window.right;
  problem.softcap = options.softcap;
  problem.dropout_p = options.dropout_p;
  problem.seed = options.seed;
  problem.offset = options.offset;
  problem.seed_ptr = options.seed_ptr;
  problem.offset_ptr = options.offset_ptr;
  problem.bias = options.bias.get();
  problem.bias2 = options.bias2.get();
  problem.mask = options.mask.get();
  problem.alibi_slopes = options.alibi_slopes.get();
  problem.sink = options.sink.get();
  problem.cu_seqlens_q = options.cu_seqlens_q.get();
  problem.cu_seqlens_k = options.cu_seqlens_k.get();
  problem.seqused_q = options.seqused_q.get();
  problem.seqused_k = options.seqused_k.get();
  problem.max_seqlen_q = options.max_seqlen_q;
  problem.max_seqlen_k = options.max_seqlen_k;
  problem.batch_outer = options.batch_outer;
  if (options.position_q || options.position_k || options.positions_q || options.positions_k) {
    problem.flags |= FOVEA_POSITIONS;
  }
  problem.position_q = options.position_q.value_or(0);
  problem.position_k = options.position_k.value_or(0);
  problem.positions_q = options.positions_q.get();
  problem.positions_k = options.positions_k.get();
  problem.dropout_streams = options.dropout_streams.get();
  return problem;
}

inline constexpr fovea_direction direction_of(const Forward&) { return FOVEA_FORWARD; }
inline constexpr fovea_direction direction_of(const Backward&) { return FOVEA_BACKWARD; }

// The fovea_problem of a call; it points into the call.
inline fovea_problem problem_of(const Forward& call) {
  fovea_problem problem = problem_of(call.options);
  problem.q = call.q.get();
  problem.k = call.k.get();
  problem.v = call.v.get();
  problem.out = call.out.get();
  problem.lse = call.lse.get();
  problem.accumulate = call.accumulate ? FOVEA_ACCUMULATE_OUT : 0;
  return problem;
}

inline fovea_problem problem_of(const Backward& call) {
  fovea_problem problem = problem_of(call.options);
  problem.q = call.q.get();
  problem.k = call.k.get();
  problem.v = call.v.get();
  problem.out = call.out.get();
  problem.lse = call.lse.get();
  problem.grad_out = call.grad_out.get();
  problem.grad_lse = call.grad_lse.get();
  problem.grad_q = call.grads.q.get();
  problem.grad_k = call.grads.k.get();
  problem.grad_v = call.grads.v.get();
  problem.grad_bias = call.grads.bias.get();
  problem.grad_bias2 = call.grads.bias2.get();
  problem.grad_sink = call.grads.sink.get();
  problem.accumulate = call.grads.accumulate;
  return problem;
}

// Text from one of the C functions that end in (char* text, size_t capacity, size_t* needed). What it returns
// besides FOVEA_OK is accepted if it is `also`.
template <class Function>
std::string text_of(Function function, fovea_status also = FOVEA_OK) {
  const auto checked = [&](fovea_status status) {
    if (status != also) {
      check(status);
    }
  };
  std::size_t needed = 0;
  checked(function(nullptr, 0, &needed));
  std::string text(needed, '\0');
  checked(function(&text[0], text.size(), &needed));
  text.resize(needed > 0 ? needed - 1 : 0);
  return text;
}

}  // namespace detail

// Bytes of scratch memory that the call needs; fovea/c.h says what it depends on.
template <class Call>
std::size_t workspace(const Call& call) {
  const fovea_problem problem = detail::problem_of(call);
  std::size_t bytes = 0;
  detail::check(fovea_workspace(&problem, detail::direction_of(call), &bytes));
  return bytes;
}

// Compiles and loads the kernels that the call needs. Call it before a CUDA graph captures the call, or to compile
// before the first call. The tensors' data may be null.
template <class Call, class = decltype(detail::direction_of(std::declval<const Call&>()))>
void prepare(const Call& call) {
  const fovea_problem problem = detail::problem_of(call);
  detail::check(fovea_prepare(&problem, detail::direction_of(call)));
}

// Which backend is used for the call, and why each other one is not. The tensors' data may be null.
template <class Call, class = decltype(detail::direction_of(std::declval<const Call&>()))>
std::string explain(const Call& call) {
  const fovea_problem problem = detail::problem_of(call);
  return detail::text_of(
      [&](char* text, std::size_t capacity, std::size_t* needed) {
        return fovea_explain(&problem, detail::direction_of(call), text, capacity, needed);
      },
      FOVEA_UNSUPPORTED);
}

// Which backend is used for a problem, given in its one-line text form.
inline std::string explain(const std::string& line) {
  return detail::text_of([&](char* text, std::size_t capacity,
                             std::size_t* needed) { return fovea_explain_line(line.c_str(), text, capacity, needed); },
                         FOVEA_UNSUPPORTED);
}

// What a GPU of this architecture, such as "sm_90", would do with the problem. No GPU is needed.
inline std::string explain(const std::string& line, const std::string& architecture) {
  return detail::text_of(
      [&](char* text, std::size_t capacity, std::size_t* needed) {
        return fovea_explain_for(line.c_str(), architecture.c_str(), text, capacity, needed);
      },
      FOVEA_UNSUPPORTED);
}

// The call's problem in its one-line text form.
template <class Call>
std::string describe(const Call& call) {
  const fovea_problem problem = detail::problem_of(call);
  return detail::text_of([&](char* text, std::size_t capacity, std::size_t* needed) {
    return fovea_describe(&problem, detail::direction_of(call), text, capacity, needed);
  });
}

namespace detail {

// A Workspace that grows has memory of the host.
template <class Call>
void provide(Workspace& workspace, const Call& call) {
  const std::size_t bytes = fovea::workspace(call);
  if (call.options.device != Device::kCpu && !workspace.is_fixed() && bytes > 0) {
    fail(FOVEA_INVALID_ARGUMENT, "workspace: none; accepted on a device: Workspace(data, bytes) of " +
                                     std::to_string(bytes) + " bytes in its memory");
  }
  workspace.require(bytes);
  if (workspace.bytes() < bytes) {
    fail(FOVEA_OUT_OF_MEMORY, "workspace: " + std::to_string(workspace.bytes()) + " bytes; accepted: at least " +
                                  std::to_string(bytes) + ", as fovea::workspace(call) says");
  }
}

}  // namespace detail

// Computes the call; the workspace grows if it may. forward() is the same in one expression.
inline void run(const Forward& call, Workspace& workspace) {
  detail::provide(workspace, call);
  const fovea_problem problem = detail::problem_of(call);
  detail::check(fovea_forward(&problem, workspace.data(), workspace.bytes()));
}

// Computes the gradients that the call has; backward() is the same in one expression.
inline void run(const Backward& call, Workspace& workspace) {
  detail::provide(workspace, call);
  const fovea_problem problem = detail::problem_of(call);
  detail::check(fovea_backward(&problem, workspace.data(), workspace.bytes()));
}

// out, and lse if it is given, from q, k and v. Without a Workspace the call allocates one.
inline void forward(const Tensor& q, const Tensor& k, const Tensor& v, const MutableTensor& out,
                    const MutableTensor& lse = {}, const Options& options = {}, Workspace* workspace = nullptr) {
  Workspace own;
  run(Forward{q, k, v, out, lse, options}, workspace != nullptr ? *workspace : own);
}

// The gradients whose tensors are given, from grad_out (and grad_lse) and the forward's inputs and results.
inline void backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                     const Tensor& lse, const Gradients& grads, const Options& options = {},
                     const Tensor& grad_lse = {}, Workspace* workspace = nullptr) {
  Workspace own;
  run(Backward{grad_out, q, k, v, out, lse, grads, options, grad_lse}, workspace != nullptr ? *workspace : own);
}

// ---- dropout mask, backends, machine, threads ----

// The dropout decisions as bytes, 1 = kept; (batch, heads, seqlen_q, seqlen_k), row-major.
inline std::vector<std::uint8_t> dropout_mask(std::int64_t batch, std::int64_t heads, std::int64_t seqlen_q,
                                              std::int64_t seqlen_k, double p, std::uint64_t seed,
                                              std::uint64_t offset = 0, Rng rng = Rng::kFovea) {
  const auto rule = static_cast<fovea_rng>(rng);
  std::uint64_t elements = 1;
  for (const std::int64_t size : {batch, heads, seqlen_q, seqlen_k}) {
    elements *= static_cast<std::uint64_t>(std::max<std::int64_t>(size, 0));
  }
  std::vector<std::uint8_t> mask(elements);
  detail::check(fovea_dropout_mask(batch, heads, seqlen_q, seqlen_k, p, seed, offset, rule, mask.data()));
  return mask;
}

// One line for each backend: its name, a tab, "available" or why it is not.
inline std::string backends() {
  return detail::text_of(
      [](char* text, std::size_t capacity, std::size_t* needed) { return fovea_backends(text, capacity, needed); });
}

// A description of this machine, as fovea_machine() writes it: processor, driver, GPUs, NVRTC, kernel cache, variables.
inline std::string machine() {
  return detail::text_of(
      [](char* text, std::size_t capacity, std::size_t* needed) { return fovea_machine(text, capacity, needed); });
}

// Threads that a CPU call uses, at most 4096; 0: as many cores as this process may use.
inline void set_num_threads(int n) { detail::check(fovea_set_num_threads(n)); }
// The number of threads that a CPU call uses now.
inline int num_threads() { return fovea_num_threads(); }

}  // namespace api_v0
}  // namespace fovea

#endif  // FOVEA_ATTENTION_H
