// SPDX-License-Identifier: Apache-2.0
//
// How the library reports errors: one exception type, caught at the C ABI and turned into a status and a message.
#pragma once

#include <stdexcept>
#include <string>

#include "fovea/c.h"

namespace fovea {

class Error : public std::runtime_error {
 public:
  Error(fovea_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  fovea_status status() const { return status_; }

 private:
  fovea_status status_;
};

}  // namespace fovea
