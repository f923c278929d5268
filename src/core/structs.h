// SPDX-License-Identifier: Apache-2.0
//
// The structs of a program that was compiled with an older or a newer c.h, as this library's own. Structs grow at their
// end: what a shorter one lacks is 0, and what a longer one has beyond is refused unless it is 0.
#pragma once

#include <cstring>

#include "core/given.h"

namespace fovea {

// A size that was not set may be any number: no more of a struct is read than this.
inline constexpr std::size_t kLongestStruct = 4096;

// A struct as this version has it. `least` is as much of it as every version has.
template <class Struct>
Struct copied(const char* name, const char* type, std::size_t least, const Struct& given) {
  if (given.size < least || given.size > kLongestStruct || given.size % alignof(Struct) != 0) {
    refuse("{}: size {}; accepted: sizeof({}), {}, or that of another version, a multiple of {} from {} to {}", name,
           given.size, type, sizeof(Struct), alignof(Struct), least, kLongestStruct);
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

}  // namespace fovea
