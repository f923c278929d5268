// SPDX-License-Identifier: Apache-2.0
#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <future>
#include <utility>

namespace fovea::cli {
namespace {

constexpr double kShortWork = 1;  // seconds
constexpr double kRedraw = 0.1;
constexpr double kLogLine = 10;

}  // namespace

Progress::Progress(std::string what)
    : what_(std::move(what)), terminal_(isatty(STDERR_FILENO) != 0), next_(terminal_ ? kShortWork : kLogLine) {}

double Progress::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

void Progress::show(double done, const std::string& detail) {
  const double now = seconds();
  if (now < next_) {
    return;
  }
  next_ = now + (terminal_ ? kRedraw : kLogLine);
  if (!terminal_) {
    fmt::print(stderr, "{}: {:.0f}% after {:.0f} s; {}\n", what_, 100 * done, now, detail);
    return;
  }
  constexpr int kWidth = 30;
  const int filled = std::clamp(static_cast<int>(done * kWidth), 0, kWidth);
  fmt::print(stderr, "\r\x1b[K{} [{:=<{}}{:<{}}] {:3.0f}%  {}", what_, "", filled, "", kWidth - filled, 100 * done,
             detail);
  std::fflush(stderr);
  drawn_ = true;
}

void Progress::finish() {
  if (drawn_) {
    fmt::print(stderr, "\r\x1b[K");
    std::fflush(stderr);
    drawn_ = false;
  }
}

void run_with_progress(const std::string& what, double expected_seconds, const std::function<void()>& work) {
  auto result = std::async(std::launch::async, work);
  Progress progress(what);
  while (result.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready) {
    // Never quite full: the estimate may be too low.
    const double done = std::min(0.99, progress.seconds() / std::max(expected_seconds, 1e-3));
    progress.show(done, fmt::format("{:.0f} s of about {:.0f}", progress.seconds(),
                                    std::max(expected_seconds, progress.seconds())));
  }
  progress.finish();
  result.get();
}

}  // namespace fovea::cli
