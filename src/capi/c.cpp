// SPDX-License-Identifier: Apache-2.0
//
// The C ABI over core: every function is a body inside guarded(), which turns exceptions into a status and keeps
// what went wrong for fovea_last_error(). Nothing else is decided here.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>

#include "capi/machine.h"
#include "capi/masked_exceptions.h"
#include "core/problem.h"
#include "core/shapes.h"
#include "core/share_rows.h"
#include "core/validate.h"
#include "cpu/cpu.h"
#include "cuda/jit/nvrtc.h"
#include "dispatch/plan.h"
#include "fovea/c.h"

namespace fovea {
namespace {

thread_local std::string last_error;

fovea_status failed(fovea_status status, const char* what) noexcept {
  try {
    last_error = what;
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";  // short enough to need none
  }
  return status;
}

template <class Body>
fovea_status guarded(Body body) noexcept {
  last_error.clear();
  const MaskedExceptions masked;
  try {
    body();
    return FOVEA_OK;
  } catch (const Error& error) {
    return failed(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return failed(FOVEA_OUT_OF_MEMORY, "out of memory");
  } catch (const std::length_error&) {
    return failed(FOVEA_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return failed(FOVEA_INTERNAL_ERROR, error.what());
  } catch (...) {
    return failed(FOVEA_INTERNAL_ERROR, "an exception of unknown type");
  }
}

template <class T>
T& given(T* pointer, const char* name) {
  if (pointer == nullptr) {
    throw Error(FOVEA_INVALID_ARGUMENT, fmt::format("{}: NULL; accepted: a pointer", name));
  }
  return *pointer;
}

// An enum as the number that a C caller may have put there: to read it as an enum is undefined where it names none.
template <class Enum>
int number_of(const Enum& value) {
  static_assert(sizeof(Enum) == sizeof(int));
  int number = 0;
  std::memcpy(&number, &value, sizeof(number));
  return number;
}

Direction direction_of(const fovea_direction& direction) {
  const int number = number_of(direction);
  if (number != FOVEA_FORWARD && number != FOVEA_BACKWARD) {
    throw Error(FOVEA_INVALID_ARGUMENT,
                fmt::format("direction: {}; accepted: FOVEA_FORWARD (0) or FOVEA_BACKWARD (1)", number));
  }
  return static_cast<Direction>(number);
}

void write_text(std::string_view source, char* text, std::size_t capacity, std::size_t* needed) {
  if (needed != nullptr) {
    *needed = source.size() + 1;
  }
  if (capacity == 0) {
    return;
  }
  const std::size_t length = std::min(source.size(), capacity - 1);
  std::memcpy(text, source.data(), length);
  text[length] = '\0';
}

void check_text(const char* text, std::size_t capacity) {
  if (text == nullptr && capacity > 0) {
    throw Error(FOVEA_INVALID_ARGUMENT,
                fmt::format("text: NULL with capacity {}; accepted: memory, or capacity 0", capacity));
  }
}

void run(const fovea_problem* problem, Direction direction, void* workspace, std::size_t bytes) {
  execute(validate(given(problem, "problem"), direction, workspace, bytes), workspace, bytes);
}

void explain(const Call& call, const Plan& plan, const std::string& notes, char* text, std::size_t capacity,
             std::size_t* needed) {
  write_text(to_text(call.problem, plan, notes), text, capacity, needed);
  require_supported(call.problem, plan);
}

// Of a problem that is a line.
void explain(const Problem& problem, const char* architecture, char* text, std::size_t capacity, std::size_t* needed) {
  const Shapes shapes(problem);
  Call call = validate(shapes.get(), problem.direction, /*shapes_only=*/true);
  call.problem = problem;
  explain(call, architecture == nullptr ? explained(call) : explained_for(call, architecture), "", text, capacity,
          needed);
}

void dropout_mask(std::int64_t batch, std::int64_t heads, std::int64_t seqlen_q, std::int64_t seqlen_k, double p,
                  std::uint64_t seed, std::uint64_t offset, int rng, std::uint8_t* mask) {
  constexpr std::int64_t kMostRows = std::int64_t{1} << 32;
  constexpr std::int64_t kMostElements = std::int64_t{1} << 60;
  std::int64_t elements = 1;
  for (const auto& [name, value, most] :
       {std::tuple("batch", batch, kMostElements), std::tuple("heads", heads, kMostElements),
        std::tuple("seqlen_q", seqlen_q, kMostRows), std::tuple("seqlen_k", seqlen_k, kMostRows)}) {
    if (value < 0 || value > most) {
      throw Error(FOVEA_INVALID_ARGUMENT, fmt::format("{}: {}; accepted: 0 to {}", name, value, most));
    }
  }
  for (const std::int64_t value : {batch, heads, seqlen_q, seqlen_k}) {
    if (value > 0 && (__builtin_mul_overflow(elements, value, &elements) || elements > kMostElements)) {
      throw Error(FOVEA_INVALID_ARGUMENT,
                  fmt::format("mask: {}x{}x{}x{}; accepted: at most 2^60 elements", batch, heads, seqlen_q, seqlen_k));
    }
  }
  if (!(p >= 0 && p <= 1)) {
    throw Error(FOVEA_INVALID_ARGUMENT, fmt::format("p: {}; accepted: 0 <= p <= 1", p));
  }
  if (rng != FOVEA_RNG_FOVEA && rng != FOVEA_RNG_TORCH_MEM_EFFICIENT) {
    throw Error(FOVEA_INVALID_ARGUMENT,
                fmt::format("rng: {}; accepted: FOVEA_RNG_FOVEA (0) or FOVEA_RNG_TORCH_MEM_EFFICIENT (1)", rng));
  }
  if (batch == 0 || heads == 0 || seqlen_q == 0 || seqlen_k == 0) {
    return;
  }
  given(mask, "mask");
  const math::Dropout dropout = math::Dropout::make(static_cast<math::Rng>(rng), p, seed, offset);
  const auto plane = static_cast<std::uint64_t>(seqlen_q) * static_cast<std::uint64_t>(seqlen_k);
  for (std::int64_t n = 0; n < batch * heads; ++n) {
    const auto head =
        math::DropoutOfHead::make(dropout, static_cast<std::uint64_t>(n), plane, static_cast<std::uint64_t>(seqlen_k));
    for (std::int64_t i = 0; i < seqlen_q; ++i) {
      for (std::int64_t j = 0; j < seqlen_k; ++j) {
        *mask++ = head.keep(i, j) ? 1 : 0;
      }
    }
  }
}

}  // namespace
}  // namespace fovea

using fovea::check_text;
using fovea::given;
using fovea::guarded;

int fovea_version(void) { return FOVEA_VERSION_MAJOR * 10000 + FOVEA_VERSION_MINOR * 100 + FOVEA_VERSION_PATCH; }

const char* fovea_last_error(void) { return fovea::last_error.c_str(); }

const char* fovea_status_name(fovea_status status) {
  switch (fovea::number_of(status)) {
    case FOVEA_OK:
      return "ok";
    case FOVEA_INVALID_ARGUMENT:
      return "invalid argument";
    case FOVEA_INVALID_TYPE:
      return "invalid type";
    case FOVEA_UNSUPPORTED:
      return "unsupported";
    case FOVEA_OUT_OF_MEMORY:
      return "out of memory";
    case FOVEA_DEVICE_ERROR:
      return "device error";
    case FOVEA_INTERNAL_ERROR:
      return "internal error";
  }
  return "unknown status";
}

fovea_status fovea_workspace(const fovea_problem* problem, fovea_direction direction, size_t* bytes) {
  return guarded([&] {
    given(bytes, "bytes");
    const fovea::Call call =
        fovea::validate(given(problem, "problem"), fovea::direction_of(direction), /*shapes_only=*/true);
    *bytes = fovea::planned(call).workspace;
  });
}

fovea_status fovea_forward(const fovea_problem* problem, void* workspace, size_t workspace_bytes) {
  return guarded([&] { fovea::run(problem, fovea::Direction::kForward, workspace, workspace_bytes); });
}

fovea_status fovea_backward(const fovea_problem* problem, void* workspace, size_t workspace_bytes) {
  return guarded([&] { fovea::run(problem, fovea::Direction::kBackward, workspace, workspace_bytes); });
}

fovea_status fovea_explain(const fovea_problem* problem, fovea_direction direction, char* text, size_t capacity,
                           size_t* needed) {
  return guarded([&] {
    check_text(text, capacity);
    const fovea::Call call =
        fovea::validate(given(problem, "problem"), fovea::direction_of(direction), /*shapes_only=*/true);
    fovea::explain(call, fovea::explained(call), fovea::strides_beside_the_line(call), text, capacity, needed);
  });
}

fovea_status fovea_explain_line(const char* line, char* text, size_t capacity, size_t* needed) {
  return guarded([&] {
    check_text(text, capacity);
    fovea::explain(fovea::parse(&given(line, "line")), nullptr, text, capacity, needed);
  });
}

fovea_status fovea_explain_for(const char* line, const char* architecture, char* text, size_t capacity,
                               size_t* needed) {
  return guarded([&] {
    check_text(text, capacity);
    fovea::Problem problem = fovea::parse(&given(line, "line"));
    if (!problem.backend.empty() && problem.backend != "cuda") {
      throw fovea::Error(
          FOVEA_INVALID_ARGUMENT,
          fmt::format("backend={}: for a GPU's architecture; accepted: backend=cuda, or none", problem.backend));
    }
    problem.device = FOVEA_CUDA;
    fovea::explain(problem, &given(architecture, "architecture"), text, capacity, needed);
  });
}

fovea_status fovea_describe(const fovea_problem* problem, fovea_direction direction, char* text, size_t capacity,
                            size_t* needed) {
  return guarded([&] {
    check_text(text, capacity);
    const fovea::Call call =
        fovea::validate(given(problem, "problem"), fovea::direction_of(direction), /*shapes_only=*/true);
    fovea::write_text(fovea::print(call.problem), text, capacity, needed);
  });
}

fovea_status fovea_backends(char* text, size_t capacity, size_t* needed) {
  return guarded([&] {
    check_text(text, capacity);
    std::string lines;
    for (const fovea::Verdict& verdict : fovea::backends()) {
      lines += fmt::format("{}\t{}\n", verdict.backend, verdict.reason);
    }
    fovea::write_text(lines, text, capacity, needed);
  });
}

fovea_status fovea_machine(char* text, size_t capacity, size_t* needed) {
  return guarded([&] {
    check_text(text, capacity);
    fovea::write_text(fovea::machine_text(), text, capacity, needed);
  });
}

fovea_status fovea_set_nvrtc_folders(const char* folders) {
  return guarded([&] { fovea::cuda::jit::set_nvrtc_folders(&given(folders, "folders")); });
}

fovea_status fovea_dropout_mask(int64_t batch, int64_t heads, int64_t seqlen_q, int64_t seqlen_k, double p,
                                uint64_t seed, uint64_t offset, fovea_rng rng, uint8_t* mask) {
  return guarded(
      [&] { fovea::dropout_mask(batch, heads, seqlen_q, seqlen_k, p, seed, offset, fovea::number_of(rng), mask); });
}

fovea_status fovea_prepare(const fovea_problem* problem, fovea_direction direction) {
  return guarded([&] {
    fovea::prepare(fovea::validate(given(problem, "problem"), fovea::direction_of(direction), /*shapes_only=*/true));
  });
}

fovea_status fovea_rows_plan(const fovea_rows* rows, int64_t* needed) {
  return guarded([&] { fovea::share_rows(given(rows, "rows"), needed); });
}

fovea_status fovea_set_num_threads(int n) {
  return guarded([&] {
    constexpr int kMost = 4096;
    if (n < 0 || n > kMost) {
      throw fovea::Error(FOVEA_INVALID_ARGUMENT,
                         fmt::format("n: {}; accepted: 0 (all that may be used) to {}", n, kMost));
    }
    fovea::cpu::set_num_threads(n);
  });
}

int fovea_num_threads(void) {
  int threads = 1;
  guarded([&] { threads = fovea::cpu::num_threads(); });
  return threads;
}
