// SPDX-License-Identifier: Apache-2.0
#include "core/structs.h"

#include <cstring>

namespace fovea {
namespace {

// A size that was not set may be any number: no more of a struct is read than this.
constexpr std::size_t kLongest = 4096;

// `least` is as much of the struct as every version of it has.
template <class Struct>
Struct copied(const char* name, const char* type, std::size_t least, const Struct& given) {
  if (given.size < least || given.size > kLongest || given.size % alignof(Struct) != 0) {
    refuse("{}: size {}; accepted: sizeof({}), {}, or that of another version, a multiple of {} from {} to {}", name,
           given.size, type, sizeof(Struct), alignof(Struct), least, kLongest);
  }
  const auto* const bytes = reinterpret_cast<const unsigned char*>(&given);
  for (std::size_t n = sizeof(Struct); n < given.size; ++n) {
    if (bytes[n] != 0) {
      refuse(FOVEA_UNSUPPORTED,
             "{}: size {} with {} in byte {}, a field of a newer version; accepted: 0 there, or a newer library, as "
             "this one is of version {}.{}.{}",
             name, given.size, bytes[n], n, FOVEA_VERSION_MAJOR, FOVEA_VERSION_MINOR, FOVEA_VERSION_PATCH);
    }
  }
  Struct own{};
  std::memcpy(&own, bytes, std::min(given.size, sizeof(Struct)));
  own.size = sizeof(Struct);
  return own;
}

}  // namespace

Structs::Structs(const fovea_problem& given, Direction direction) : given_(given) {
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

}  // namespace fovea
