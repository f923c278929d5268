// SPDX-License-Identifier: Apache-2.0
//
// What the compiler's log says of the machine code.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "cuda/jit/nvrtc.h"

namespace fovea::cuda::jit {
namespace {

// The number that stands before `what` in `line`, as in "24 bytes spill stores".
int number_before(std::string_view line, std::string_view what) {
  const std::size_t at = line.find(what);
  if (at == std::string_view::npos) {
    return 0;
  }
  std::size_t begin = at;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') {
    --begin;
  }
  int value = 0;
  std::from_chars(line.data() + begin, line.data() + at, value);
  return value;
}

// "(C7510) Potential Performance Loss: ..." -> its code; messages without one have an empty code.
std::optional<Report::Message> message_in(std::string_view line) {
  constexpr std::size_t kCode = 5;  // "C7510"
  const std::size_t open = line.find("(C7");
  const bool coded = open != std::string_view::npos && line.size() > open + kCode + 1 && line[open + kCode + 1] == ')';
  const bool loss = line.find("Performance Loss") != std::string_view::npos ||
                    line.find("serialized") != std::string_view::npos ||
                    line.find("setmaxnreg' ignored") != std::string_view::npos;
  if (!coded && !loss) {
    return std::nullopt;
  }
  Report::Message message;
  message.loss = loss;
  if (coded) {
    message.code = line.substr(open + 1, kCode);
    line.remove_prefix(open + kCode + 2);
  }
  line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
  message.text = line;
  return message;
}

}  // namespace

Report parse_log(std::string_view log) {
  Report report;
  while (!log.empty()) {
    const std::size_t end = std::min(log.find('\n'), log.size());
    const std::string_view line = log.substr(0, end);
    log.remove_prefix(std::min(end + 1, log.size()));
    // A kernel's own line; functions that were not inlined have a stack alone.
    report.registers = std::max(report.registers, number_before(line, " registers"));
    report.barriers = std::max(report.barriers, number_before(line, " barriers"));
    report.shared_bytes = std::max(report.shared_bytes, number_before(line, " bytes smem"));
    report.stack_bytes += number_before(line, " bytes stack frame");
    report.spill_bytes += number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
    report.local_bytes += number_before(line, " bytes lmem");
    if (std::optional<Report::Message> message = message_in(line)) {
      report.messages.push_back(std::move(*message));
    }
  }
  return report;
}

std::vector<std::string> Report::faults() const {
  std::vector<std::string> faults;
  if (spill_bytes > 0) {
    faults.push_back(fmt::format("{} bytes of registers spilt", spill_bytes));
  }
  if (stack_bytes > 0 || local_bytes > 0) {
    faults.push_back(fmt::format("{} bytes of local memory", std::max(stack_bytes, local_bytes)));
  }
  for (const Message& message : messages) {
    if (message.loss) {
      faults.push_back(message.code.empty() ? message.text : fmt::format("{}: {}", message.code, message.text));
    }
  }
  return faults;
}

}  // namespace fovea::cuda::jit
