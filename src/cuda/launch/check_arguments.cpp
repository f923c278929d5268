// SPDX-License-Identifier: Apache-2.0
//
// FOVEA_CHECK=1: addresses are asked for where they lie, and lengths that lie on the device are read back and checked
// before a call; this waits for the stream.
#include <fmt/format.h>

#include <cstdlib>
#include <string_view>

#include "cuda/launch/launcher.h"

namespace fovea::cuda {

bool checks_arguments() {
  static const bool checks = [] {
    const char* const value = std::getenv("FOVEA_CHECK");
    const std::string_view text = value == nullptr ? "" : value;
    if (!text.empty() && text != "0" && text != "1") {
      throw Error(FOVEA_INVALID_ARGUMENT, fmt::format("FOVEA_CHECK: '{}'; accepted: 0, 1", text));
    }
    return text == "1";
  }();
  return checks;
}

namespace {

template <class... T>
[[noreturn]] void refuse(fmt::format_string<T...> format, T&&... arguments) {
  throw Error(FOVEA_INVALID_ARGUMENT, fmt::format(format, std::forward<T>(arguments)...));
}

// What `lengths` holds on the device.
std::vector<std::int64_t> read(const jit::Driver& driver, const math::Lengths& lengths, std::int64_t count,
                               jit::cu::Stream stream) {
  const std::size_t width = lengths.is_64_bit ? sizeof(std::int64_t) : sizeof(std::int32_t);
  std::vector<std::int64_t> values;
  math::Lengths here = lengths;
  std::int64_t element = 0;
  here.data = &element;
  here.stride = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const char* from = static_cast<const char*>(lengths.data) + i * lengths.stride * static_cast<std::int64_t>(width);
    jit::check(driver, driver.copy_to_host(&element, reinterpret_cast<std::uintptr_t>(from), width, stream),
               "cuMemcpyDtoHAsync");
    jit::check(driver, driver.stream_synchronize(stream), "cuStreamSynchronize");
    values.push_back(here[0]);
  }
  return values;
}

class Checker {
 public:
  Checker(const Call& call, const jit::Driver& driver)
      : batch_(call.rows.batch()), driver_(driver), stream_(static_cast<jit::cu::Stream>(call.stream)) {}

  // Lengths of the sequences by cu_seqlens, or `rows` for each.
  std::vector<std::int64_t> boundaries(char side, const math::Lengths& cu, std::int64_t rows,
                                       std::int64_t longest) const {
    std::vector<std::int64_t> lengths(static_cast<std::size_t>(batch_), rows);
    if (!cu) {
      return lengths;
    }
    const std::vector<std::int64_t> values = read(driver_, cu, batch_ + 1, stream_);
    if (values[0] != 0) {
      refuse("cu_seqlens_{}: begins with {}; accepted: 0 first", side, values[0]);
    }
    for (std::size_t b = 0; b < lengths.size(); ++b) {
      lengths[b] = values[b + 1] - values[b];
      if (lengths[b] < 0) {
        refuse("cu_seqlens_{}: {} at index {} after {}; accepted: numbers that never decrease", side, values[b + 1],
               b + 1, values[b]);
      }
      if (values[b + 1] > rows) {
        refuse("cu_seqlens_{}: {} at index {}; accepted: at most total_{}, {}", side, values[b + 1], b + 1, side, rows);
      }
      if (lengths[b] > longest) {
        refuse("max_seqlen_{}: {}; accepted: at least the longest sequence of cu_seqlens_{}, {}", side, longest, side,
               lengths[b]);
      }
    }
    return lengths;
  }

  void used(char side, const math::Lengths& used, const std::vector<std::int64_t>& lengths) const {
    if (!used) {
      return;
    }
    const std::vector<std::int64_t> values = read(driver_, used, batch_, stream_);
    for (std::size_t b = 0; b < lengths.size(); ++b) {
      if (values[b] < 0 || values[b] > lengths[b]) {
        refuse("seqused_{}: {} at index {}; accepted: 0 to the length of that sequence, {}", side, values[b], b,
               lengths[b]);
      }
    }
  }

 private:
  std::int64_t batch_;
  const jit::Driver& driver_;
  jit::cu::Stream stream_;
};

// A kernel that reads memory of the host ends in a fault that every later call of the process sees.
void check_places(const Call& call, const jit::Driver& driver) {
  if (jit::device(call.device_index).reads_host_memory) {
    return;
  }
  const auto check = [&](const char* name, const void* address) {
    if (address != nullptr && jit::place_of(driver, address).kind == jit::Place::Kind::kHost) {
      refuse("{}: memory of the host; accepted: memory of CUDA device {}, managed or pinned memory", name,
             call.device_index);
    }
  };
  check("q", call.q.data);
  check("k", call.k.data);
  check("v", call.v.data);
  check("bias", call.bias.data);
  check("bias2", call.bias2.data);
  check("mask", call.mask.data);
  check("alibi_slopes", call.alibi_slopes.data);
  check("sink", call.sink.data);
  check("out", call.out.data);
  check("lse", call.lse.data);
  check("grad_out", call.grad_out.data);
  check("grad_lse", call.grad_lse.data);
  check("grad_q", call.grad_q.data);
  check("grad_k", call.grad_k.data);
  check("grad_v", call.grad_v.data);
  check("grad_bias", call.grad_bias.data);
  check("grad_bias2", call.grad_bias2.data);
  check("grad_sink", call.grad_sink.data);
  check("cu_seqlens_q", call.rows.cu_q.data);
  check("cu_seqlens_k", call.rows.cu_k.data);
  check("seqused_q", call.rows.used_q.data);
  check("seqused_k", call.rows.used_k.data);
  check("seed", call.seed_ptr);
  check("offset", call.offset_ptr);
}

}  // namespace

void check_arguments(const Call& call, const jit::Driver& driver) {
  const math::Rows& rows = call.rows;
  if (!checks_arguments() || jit::is_capturing(driver, static_cast<jit::cu::Stream>(call.stream))) {
    return;
  }
  check_places(call, driver);
  if (!(rows.cu_q || rows.used_q || rows.used_k) || rows.batch() == 0) {
    return;
  }
  const Checker checker(call, driver);
  checker.used('q', rows.used_q, checker.boundaries('q', rows.cu_q, rows.rows_q, call.problem.seqlen_q));
  checker.used('k', rows.used_k, checker.boundaries('k', rows.cu_k, rows.rows_k, call.problem.seqlen_k));
}

}  // namespace fovea::cuda
