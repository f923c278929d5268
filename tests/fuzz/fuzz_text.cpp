// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer's: a line is refused with a reason, or it is a problem whose own line is read as the same problem, and
// which validation then accepts or refuses.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "core/problem.h"
#include "core/shapes.h"
#include "core/validate.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using fovea::Error;
  const std::string line(reinterpret_cast<const char*>(data), size);
  try {
    const fovea::Problem problem = fovea::parse(line);
    const std::string printed = fovea::print(problem);
    if (fovea::parse(printed) != problem) {
      std::fprintf(stderr, "read as another problem: '%s'\n", printed.c_str());
      std::abort();
    }
    const fovea::Shapes shapes(problem);
    fovea::validate(shapes.get(), problem.direction, /*shapes_only=*/true);
  } catch (const Error& error) {
    if (error.status() != FOVEA_INVALID_ARGUMENT && error.status() != FOVEA_INVALID_TYPE) {
      std::fprintf(stderr, "status %d: %s\n", error.status(), error.what());
      std::abort();
    }
  }
  return 0;
}
