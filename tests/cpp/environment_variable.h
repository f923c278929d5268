// SPDX-License-Identifier: Apache-2.0
//
// Sets an environment variable for as long as it lives, and has the library read those that it has read already.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>

#include "core/environment.h"

namespace fovea::testing {

class EnvironmentVariable {
 public:
  EnvironmentVariable(const char* name, const std::string& value) : name_(name) {
    if (const char* const before = std::getenv(name); before != nullptr) {
      before_ = before;
    }
    setenv(name, value.c_str(), 1);
    read_environment_again();
  }
  ~EnvironmentVariable() {
    before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_);
    read_environment_again();
  }
  EnvironmentVariable(const EnvironmentVariable&) = delete;
  EnvironmentVariable& operator=(const EnvironmentVariable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

}  // namespace fovea::testing
