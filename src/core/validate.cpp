// SPDX-License-Identifier: Apache-2.0
//
// validate(): every argument of a fovea_problem is checked here, once, and what comes out is a Call that backends
// trust. The steps stand in the order in which later ones need earlier ones:
//
//     structs   sizes; those of other versions become this one's (structs.h)
//     header    flags, enums, what must be zero
//     options   scale, window, softcap, dropout
//     shapes    q fixes batch, heads and lengths; k and v follow; cu_seqlens make it packed
//     lengths   what cu_seqlens and seqused hold, where it can be read
//     positions where rows and keys are in a larger problem
//     planes    bias, bias2 and mask, by NumPy's broadcasting
//     vectors   alibi_slopes, sink
//     streams   dropout_streams
//     results   out, lse, and the backward's gradients
//     memory    no output overlaps itself or anything else that is used; nor does the workspace
//
// validator.h says where each step stands. A message is "<argument>: <what it was>; accepted: <what would be>". Nothing
// is written here.
#include "core/validate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "core/structs.h"
#include "core/validator.h"

namespace fovea {

Call Validator::run(const void* workspace, std::size_t bytes) {
  header();
  options();
  shapes();
  lengths();
  positions();
  planes();
  vectors();
  streams();
  results();
  memory(workspace, bytes);
  problem_.layout = layout();
  seeds();
  return std::move(call_);
}

// ---- header ----

void Validator::header() {
  constexpr std::uint32_t kKnown =
      FOVEA_CAUSAL | FOVEA_DETERMINISTIC | FOVEA_SCALE | FOVEA_WINDOW | FOVEA_CLEAR_ROWS | FOVEA_POSITIONS;
  if ((given_.flags & ~kKnown) != 0) {
    refuse(
        "flags: {:#x}; accepted: bits of {:#x}, FOVEA_CAUSAL, _DETERMINISTIC, _SCALE, _WINDOW, _CLEAR_ROWS, _POSITIONS",
        given_.flags, kKnown);
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
  problem_.clear_rows = (given_.flags & FOVEA_CLEAR_ROWS) != 0;
  problem_.top_left = given_.align == FOVEA_TOP_LEFT;
  problem_.rng = static_cast<math::Rng>(given_.rng);
  problem_.seed = given_.seed;
  problem_.offset = given_.offset;
  call_.stream = given_.stream;
  call_.device_index = given_.device_index;
  for (const Argument& argument : arguments_of(given_, problem_.direction)) {
    struct_of(argument.name, *(given_.*argument.tensor));
  }
}

// ---- options ----

void Validator::options() {
  const fovea_tensor& q = required("q", given_.q, "a tensor, (B, Sq, Hq, D) or (total_q, Hq, D)");
  type_of("q", q, {DType::kFp32, DType::kFp16, DType::kBf16, DType::kFp64});
  problem_.type = static_cast<DType>(q.dtype);
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

DType Validator::accumulator() const { return problem_.type == DType::kFp64 ? DType::kFp64 : DType::kFp32; }

// ---- seeds ----

void Validator::seeds() {
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
  if (!readable()) {
    call_.seed_ptr = given_.seed_ptr;
    call_.offset_ptr = given_.offset_ptr;
  }
  call_.dropout = math::Dropout::make(problem_.rng, problem_.dropout, seed, offset);
}

// ---- memory ----

// No tensor that is written shares memory with itself or another one, nor the workspace with any.
void Validator::memory(const void* workspace, std::size_t bytes) const {
  struct Used {
    Argument argument;
    Range range{};
  };
  Few<Used, kMostArguments> used;
  for (const Argument& argument : arguments_of(given_, problem_.direction)) {
    const fovea_tensor& tensor = *(given_.*argument.tensor);
    if (elements_of(tensor) > 0) {
      used.push_back({argument, range_of(footprint_of(tensor))});
    }
  }
  for (const auto& [written, range] : used) {
    if (!written.written) {
      continue;
    }
    const fovea_tensor& tensor = *(given_.*written.tensor);
    const Footprint footprint = footprint_of(tensor);
    if (overlaps_itself(footprint)) {
      refuse("{}: strides {} with shape {} lead two elements to one address; accepted: an address for each",
             written.name, text_of(strides_of(tensor).data(), tensor.rank), shape_of(tensor));
    }
    for (const auto& [other, other_range] : used) {
      if (!shapes_only_ && other.tensor != written.tensor && range.meets(other_range) &&
          overlap(footprint, footprint_of(*(given_.*other.tensor)))) {
        refuse("{}: shares memory with {}; accepted: memory of its own, as it is written", written.name, other.name);
      }
    }
  }
  if (bytes == 0) {
    return;
  }
  if (workspace == nullptr) {
    refuse("workspace: NULL with {} bytes; accepted: memory, or 0 bytes", bytes);
  }
  Footprint scratch;
  scratch.base = reinterpret_cast<std::intptr_t>(workspace);
  scratch.rank = 1;
  scratch.extent[0] = static_cast<std::int64_t>(std::min(bytes, static_cast<std::size_t>(kMost)));
  scratch.stride[0] = 1;
  for (const auto& [argument, range] : used) {
    if (range.meets(range_of(scratch)) && overlap(scratch, footprint_of(*(given_.*argument.tensor)))) {
      refuse("workspace: shares memory with {}; accepted: memory of its own, as it is written", argument.name);
    }
  }
}

// ---- structs ----

namespace {

// A problem and its tensors as this version has them.
class Structs {
 public:
  // Checks the size of the problem and of every tensor that the direction uses. Copies only where one differs.
  Structs(const fovea_problem& given, Direction direction) : given_(given) {
    const auto is_own = [](const auto& argument_struct) { return argument_struct.size == sizeof(argument_struct); };
    if (is_own(given)) {
      const Arguments arguments = arguments_of(given, direction);
      if (std::all_of(arguments.begin(), arguments.end(),
                      [&](const Argument& argument) { return is_own(*(given.*argument.tensor)); })) {
        return;
      }
    }
    own_ = std::make_unique<Own>();
    fovea_problem& problem = own_->problem;
    problem = copied("problem", "fovea_problem", offsetof(fovea_problem, bias), given);
    fovea_tensor* next = own_->tensors.data();
    for (const Argument& argument : arguments_of(problem, direction)) {
      *next = copied(argument.name, "fovea_tensor", sizeof(fovea_tensor), *(problem.*argument.tensor));
      problem.*argument.tensor = next++;
    }
  }

  const fovea_problem& problem() const { return own_ != nullptr ? own_->problem : given_; }

 private:
  struct Own {
    fovea_problem problem;
    std::array<fovea_tensor, kMostArguments> tensors;
  };
  const fovea_problem& given_;
  std::unique_ptr<Own> own_;
};

}  // namespace

// ---- the whole ----

Call validate(const fovea_problem& problem, Direction direction, bool shapes_only) {
  const Structs structs(problem, direction);
  return Validator(structs.problem(), direction, shapes_only).run(nullptr, 0);
}

Call validate(const fovea_problem& problem, Direction direction, const void* workspace, std::size_t bytes) {
  const Structs structs(problem, direction);
  return Validator(structs.problem(), direction, /*shapes_only=*/false).run(workspace, bytes);
}

}  // namespace fovea
