// SPDX-License-Identifier: Apache-2.0
//
// FOVEA_CHECK=1: before a call the driver is asked where each address lies, and lengths that lie on the device are read
// back and checked; this waits for the stream, once.
#include <fmt/format.h>

#include <cstdlib>
#include <string_view>
#include <tuple>

#include "core/fields.h"
#include "core/validator.h"
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

// Lengths that lie on the device: all copies are started first, then awaited together.
class Lengths {
 public:
  Lengths(const jit::Driver& driver, jit::cu::Stream stream) : driver_(driver), stream_(stream) {}

  // As a number of wait(): -1 where there are none.
  int ask(const math::Lengths& lengths, std::int64_t count) {
    if (!lengths) {
      return -1;
    }
    const std::size_t width = lengths.is_64_bit ? sizeof(std::int64_t) : sizeof(std::int32_t);
    const bool dense = lengths.stride == 1;
    asked_.push_back({lengths, std::vector<char>(static_cast<std::size_t>(count) * width), {}});
    char* const to = asked_.back().bytes.data();
    for (std::int64_t i = 0; i < (dense ? 1 : count); ++i) {
      const char* from = static_cast<const char*>(lengths.data) + i * lengths.stride * static_cast<std::int64_t>(width);
      jit::check(driver_,
                 driver_.copy_to_host(to + static_cast<std::size_t>(i) * width, reinterpret_cast<std::uintptr_t>(from),
                                      dense ? static_cast<std::size_t>(count) * width : width, stream_),
                 "cuMemcpyDtoHAsync");
    }
    return static_cast<int>(asked_.size()) - 1;
  }

  void wait() {
    jit::check(driver_, driver_.stream_synchronize(stream_), "cuStreamSynchronize");
    for (Asked& asked : asked_) {
      math::Lengths here = asked.lengths;
      here.data = asked.bytes.data();
      here.stride = 1;
      const std::size_t width = here.is_64_bit ? sizeof(std::int64_t) : sizeof(std::int32_t);
      for (std::size_t i = 0; i < asked.bytes.size() / width; ++i) {
        asked.values.push_back(here[static_cast<std::int64_t>(i)]);
      }
    }
  }

  const std::vector<std::int64_t>& operator[](int number) const {
    return asked_[static_cast<std::size_t>(number)].values;
  }

 private:
  struct Asked {
    math::Lengths lengths;
    std::vector<char> bytes;
    std::vector<std::int64_t> values;
  };
  const jit::Driver& driver_;
  jit::cu::Stream stream_;
  std::vector<Asked> asked_;
};

class Checker {
 public:
  explicit Checker(std::int64_t batch) : batch_(batch) {}

  // Lengths of the sequences by cu_seqlens, or `rows` for each.
  std::vector<std::int64_t> boundaries(char side, const std::vector<std::int64_t>* cu, std::int64_t rows) const {
    std::vector<std::int64_t> lengths(static_cast<std::size_t>(batch_), rows);
    if (cu == nullptr) {
      return lengths;
    }
    const std::vector<std::int64_t>& values = *cu;
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
    }
    return lengths;
  }

  void used(char side, const std::vector<std::int64_t>* used, const std::vector<std::int64_t>& lengths,
            std::int64_t longest) const {
    const std::vector<std::int64_t>& values = used == nullptr ? lengths : *used;
    for (std::size_t b = 0; b < lengths.size(); ++b) {
      if (values[b] < 0 || values[b] > lengths[b]) {
        refuse("seqused_{}: {} at index {}; accepted: 0 to the length of that sequence, {}", side, values[b], b,
               lengths[b]);
      }
      if (values[b] > longest) {
        refuse("max_seqlen_{}: {}; accepted: at least the longest sequence of {}_{}, {}", side, longest,
               used == nullptr ? "cu_seqlens" : "seqused", side, values[b]);
      }
    }
  }

 private:
  std::int64_t batch_;
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
  for_each_view(call, [&](const char* name, const View& view, Role) { check(name, view.data); });
  check("cu_seqlens_q", call.rows.cu_q.data);
  check("cu_seqlens_k", call.rows.cu_k.data);
  check("seqused_q", call.rows.used_q.data);
  check("seqused_k", call.rows.used_k.data);
  check("positions_q", call.positions_q.data);
  check("positions_k", call.positions_k.data);
  check("seed", call.seed_ptr);
  check("offset", call.offset_ptr);
}

}  // namespace

void check_arguments(const Call& call, const jit::Driver& driver) {
  const math::Rows& rows = call.rows;
  if (jit::is_capturing(driver, static_cast<jit::cu::Stream>(call.stream))) {
    return;
  }
  check_places(call, driver);
  if (!(rows.cu_q || rows.used_q || rows.used_k || call.positions_q || call.positions_k) || rows.batch() == 0) {
    return;
  }
  Lengths lengths(driver, static_cast<jit::cu::Stream>(call.stream));
  const int cu_q = lengths.ask(rows.cu_q, rows.batch() + 1);
  const int cu_k = lengths.ask(rows.cu_k, rows.batch() + 1);
  const int used_q = lengths.ask(rows.used_q, rows.batch());
  const int used_k = lengths.ask(rows.used_k, rows.batch());
  const int positions_q = lengths.ask(call.positions_q, rows.batch());
  const int positions_k = lengths.ask(call.positions_k, rows.batch());
  lengths.wait();
  const auto found = [&](int number) { return number < 0 ? nullptr : &lengths[number]; };
  const Checker checker(rows.batch());
  const Problem& p = call.problem;
  checker.used('q', found(used_q), checker.boundaries('q', found(cu_q), rows.rows_q), p.seqlen_q);
  checker.used('k', found(used_k), checker.boundaries('k', found(cu_k), rows.rows_k), p.seqlen_k);
  for (const auto& [side, number, first, most] : {std::tuple('q', positions_q, p.position_q, rows.limit_q),
                                                  std::tuple('k', positions_k, p.position_k, rows.limit_k)}) {
    if (number >= 0) {
      check_positions(side, first, lengths[number], p.dropout > 0, most);
    }
  }
}

}  // namespace fovea::cuda
