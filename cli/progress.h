// SPDX-License-Identifier: Apache-2.0
//
// How far a long piece of work has come, on standard error: a bar that is redrawn on a terminal, a line now and then
// in a log. Short work shows nothing.
#pragma once

#include <chrono>
#include <functional>
#include <string>

namespace fovea::cli {

class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // 0 <= done <= 1; `detail` stands behind the bar.
  void show(double done, const std::string& detail);
  // Takes the bar away, so that something else can be printed.
  void finish();
  double seconds() const;

 private:
  std::string what_;
  bool terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double next_ = 0;
};

// Runs `work`, which cannot say how far it is, and meanwhile shows the share of `expected_seconds` that has gone by.
void run_with_progress(const std::string& what, double expected_seconds, const std::function<void()>& work);

}  // namespace fovea::cli
