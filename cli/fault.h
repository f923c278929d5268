// SPDX-License-Identifier: Apache-2.0
//
// How the command says no, and what it then exits with.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

namespace fovea::cli {

enum ExitCode : int {
  kDone = 0,
  kCheckFailed = 1,  // `check` or `bench` found a wrong result
  kBadInput = 2,     // the command line, a problem line, a file or a tensor
  kUnsupported = 3,  // meaningful, but no backend here does it
  kFailed = 4        // memory, a file that cannot be written, a fault of fovea's own
};

class Fault : public std::runtime_error {
 public:
  Fault(ExitCode code, const std::string& message) : std::runtime_error(printable(message)), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  // A name from a file may have a NUL, where what() would end.
  static std::string printable(std::string message) {
    std::replace(message.begin(), message.end(), '\0', '?');
    return message;
  }

  ExitCode code_;
};

}  // namespace fovea::cli
