// SPDX-License-Identifier: Apache-2.0
//
// fovea check --device cuda: the case table on a GPU, and a report. Threads make the cases, compute the references and
// compile; the calls on the GPU are made one after another, so that a fault or a kernel that does not end has a row.
#include "check_gpu.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <limits>
#include <map>
#include <numeric>
#include <ostream>
#include <random>
#include <thread>

#include "capi/machine.h"
#include "check/gpu.h"
#include "check/run.h"
#include "commands.h"
#include "cuda/cuda.h"
#include "fault.h"
#include "io/file.h"
#include "progress.h"

namespace fovea::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// The file goes to others: the name of the user's folder does not.
std::string without_home(std::string text) {
  const char* const home = std::getenv("HOME");
  const std::string folder = home != nullptr ? home : "";
  for (std::size_t at = text.find(folder); folder.size() > 1 && at != std::string::npos; at = text.find(folder, at)) {
    text.replace(at, folder.size(), "~");
  }
  return text;
}

// The driver's release, such as 580.95.05, which the driver itself does not give.
std::string release_of_driver() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  std::getline(file, line);
  return line;
}

// Of explain()'s machine: what a result may depend on, and the variables that are set.
std::string machine_lines() {
  std::string lines;
  std::istringstream machine(machine_text());
  for (std::string line; std::getline(machine, line);) {
    const std::string name = line.substr(0, line.find('\t'));
    const std::string value = line.substr(std::min(line.find('\t') + 1, line.size()));
    if (const char* const set = std::getenv(name.c_str()); name.starts_with("FOVEA_") && set != nullptr) {
      lines += fmt::format("{}: {}\n", name, value.starts_with("REFUSED") ? value : std::string(set));
    } else if (name == "fovea" || name == "processor" || name == "driver" || name == "GPU" || name == "NVRTC" ||
               name == "CUDA_VISIBLE_DEVICES") {
      lines += fmt::format("{}: {}\n", name, value);
    }
  }
  if (const std::string release = release_of_driver(); !release.empty()) {
    lines += fmt::format("kernel module: {}\n", release);
  }
  return without_home(lines);
}

// Why the GPU cannot compute a row: of "no backend can compute '...'; cpu: ...; cuda: REASON; reference: ...".
std::string reason_of(const std::string& error) {
  constexpr std::string_view kBegin = "; cuda: ";
  const std::size_t begin = error.find(kBegin);
  if (begin == std::string::npos) {
    return error;
  }
  const std::size_t from = begin + kBegin.size();
  return error.substr(from, error.rfind("; reference: ") - from);
}

std::string date_and_time() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  std::array<char, 32> text{};
  return {text.data(), std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M UTC", &parts)};
}

std::string indented(std::string text) {
  for (std::size_t at = text.find('\n'); at != std::string::npos; at = text.find('\n', at + 1)) {
    text.insert(at + 1, "  ");
  }
  return text;
}

struct Worst {
  double share = 0;
  std::string line;
};

class GpuCheck {
 public:
  GpuCheck(const GpuSettings& settings, std::vector<check::Case> rows)
      : settings_(settings), rows_(std::move(rows)), gpu_(settings.ordinal), begin_(Clock::now()) {
    // Any part of the table is a sample of all of it.
    order_.resize(rows_.size());
    std::iota(order_.begin(), order_.end(), 0);
    for (std::size_t n = order_.size(); n > 1; --n) {
      std::swap(order_[n - 1], order_[random_() % n]);
    }
  }

  void run() {
    if (const std::string why = cuda::unavailable(); !why.empty()) {
      throw Error(FOVEA_UNSUPPORTED, why);
    }
    machine_ = machine_lines();
    fmt::print(
        "{}checked: GPU {}: {}\nrows: {}, forward and backward; kernels that are not in the cache are compiled\n",
        machine_, gpu_.info().ordinal, gpu_.info().name, rows_.size());
    std::fflush(stdout);
    const int cores = static_cast<int>(std::max(std::thread::hardware_concurrency(), 1u));
    const int jobs = settings_.jobs > 0 ? settings_.jobs : cores;
    std::vector<std::thread> threads;
    threads.reserve(static_cast<std::size_t>(jobs));
    running_ = jobs;
    for (int n = 0; n < jobs; ++n) {
      threads.emplace_back([this] { work(); });
    }
    watch();
    for (std::thread& thread : threads) {
      thread.join();
    }
    finish();
  }

 private:
  bool out_of_time() const { return settings_.seconds > 0 && seconds_since(begin_) > settings_.seconds; }

  void work() {
    for (;;) {
      std::size_t row = 0;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (next_ == order_.size() || stopped_ || out_of_time()) {
          break;
        }
        row = order_[next_++];
      }
      test(row);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    --running_;
    changed_.notify_all();
  }

  void test(std::size_t row) {
    const check::Case c = check::for_gpu(rows_[row]);
    const std::string line = check::to_text(c);
    check::Outcome outcome;
    try {
      const check::Trial trial(c, check::Arithmetic::kGpu);
      outcome = trial.test([&](const check::Tensors& tensors, Direction direction) {
        return gpu_.run(tensors, direction, {[&] { begin_call(line); }, [&](bool threw) { end_call(threw); }});
      });
    } catch (const std::exception& error) {  // of the reference: the line is no problem that can be made
      outcome.error = error.what();
      outcome.status = FOVEA_INTERNAL_ERROR;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    if (outcome.status == FOVEA_DEVICE_ERROR) {  // another row's fault is seen by every function of the driver
      changed_.wait(lock, [&] { return on_gpu_.empty(); });
    }
    if (stopped_ || (outcome.status == FOVEA_DEVICE_ERROR && !suspect_.empty() && suspect_ != line)) {
      return;  // after a fault of the device every call fails
    }
    ++done_;
    for (const check::Deviation& deviation : outcome.deviations) {
      Worst& worst = worst_[deviation.tensor];
      if (const double share = check::share_of_allowed(deviation); share > worst.share) {
        worst = {share, line};
      }
    }
    if (outcome.status == FOVEA_UNSUPPORTED) {
      skipped_[reason_of(outcome.error)].push_back(line);
    } else if (!outcome.passed()) {
      failed_.push_back(fmt::format("{}\n  {}", line, indented(check::to_text(outcome))));
    }
    stopped_ = outcome.status == FOVEA_DEVICE_ERROR;
    why_stopped_ = stopped_ ? "after a fault of the device no call of this process works" : "";
    changed_.notify_all();
  }

  void begin_call(const std::string& line) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) {
      throw Error(FOVEA_DEVICE_ERROR, "not called after a fault");
    }
    on_gpu_ = line;
    call_begin_ = Clock::now();
  }
  void end_call(bool threw) {
    const std::lock_guard<std::mutex> lock(mutex_);
    suspect_ = threw ? on_gpu_ : "";
    on_gpu_.clear();
    changed_.notify_all();
  }

  // Until all threads have ended: progress, failures as they come, and the time limit of a call.
  void watch() {
    Progress progress("check");
    std::unique_lock<std::mutex> lock(mutex_);
    std::size_t printed = 0;
    while (running_ > 0) {
      changed_.wait_for(lock, std::chrono::milliseconds(100));
      for (; printed < failed_.size(); ++printed) {
        progress.finish();
        fmt::print("FAILED {}\n", failed_[printed]);
        std::fflush(stdout);
      }
      if (!on_gpu_.empty() && seconds_since(call_begin_) > settings_.row_seconds) {
        failed_.push_back(fmt::format("{}\n  did not end within {} s", on_gpu_, settings_.row_seconds));
        why_stopped_ = "a kernel did not end";
        progress.finish();
        fmt::print("FAILED {}\n", failed_.back());
        ++done_;
        write_report();
        std::fflush(nullptr);
        std::_Exit(kCheckFailed);  // threads and driver wait for the kernel
      }
      const double all = static_cast<double>(rows_.size());
      const double by_time = settings_.seconds > 0 ? seconds_since(begin_) / settings_.seconds : 0;
      progress.show(std::min(1.0, std::max(static_cast<double>(done_) / all, by_time)),
                    fmt::format("{} of {} rows, {} failed", done_, rows_.size(), failed_.size()));
    }
    progress.finish();
    for (; printed < failed_.size(); ++printed) {
      fmt::print("FAILED {}\n", failed_[printed]);
    }
  }

  std::size_t skipped() const {
    std::size_t count = 0;
    for (const auto& [reason, lines] : skipped_) {
      count += lines.size();
    }
    return count;
  }

  std::string summary() const {
    const std::size_t left = rows_.size() - done_;
    const std::string why = !why_stopped_.empty() ? why_stopped_ : fmt::format("--seconds {}", settings_.seconds);
    return fmt::format("{} of {} rows: {} passed, {} failed, {} skipped{}; {:.1f} s\n", done_, rows_.size(),
                       done_ - failed_.size() - skipped(), failed_.size(), skipped(),
                       left > 0 ? fmt::format("; {} not reached ({})", left, why) : "", seconds_since(begin_));
  }

  std::string details() const {
    std::string text;
    if (!worst_.empty()) {
      text += "Largest error of each output, divided by the allowed error:\n";
    }
    for (const auto& [tensor, worst] : worst_) {
      text += fmt::format("  {:<10} {:>8.3g}  {}\n", tensor, worst.share, worst.line);
    }
    for (const auto& [reason, lines] : skipped_) {
      text += fmt::format("Skipped, {} rows such as '{}':\n  {}\n", lines.size(), lines.front(), reason);
    }
    return text;
  }

  void write_report() const {
    if (settings_.report.empty()) {
      return;
    }
    write_file(settings_.report, [&](std::ostream& out) {
      out << fmt::format("fovea check --device cuda: a report\ndate: {}\narguments: {}\n{}", date_and_time(),
                         settings_.arguments, machine_);
      out << fmt::format("checked: GPU {}: {}, compute capability {}.{}, {} multiprocessors\nresult: {}{}",
                         gpu_.info().ordinal, gpu_.info().name, gpu_.info().major, gpu_.info().minor,
                         gpu_.info().multiprocessors, summary(), details());
      for (const std::string& failure : failed_) {
        out << "FAILED " << failure << "\n";
      }
    });
    fmt::print("report: {}\n", settings_.report);
  }

  void finish() const {
    fmt::print("{}{}", details(), summary());
    write_report();
    if (!failed_.empty()) {
      throw Fault(kCheckFailed, "");
    }
    if (done_ == skipped()) {
      throw Fault(kUnsupported, "no row was computed");
    }
  }

  const GpuSettings& settings_;
  const std::vector<check::Case> rows_;
  const check::Gpu gpu_;
  const Clock::time_point begin_;
  std::minstd_rand random_;  // always the same order
  std::vector<std::size_t> order_;
  std::string machine_;

  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  int running_ = 0;
  std::size_t next_ = 0;
  std::size_t done_ = 0;
  bool stopped_ = false;
  std::string why_stopped_;
  std::string on_gpu_;   // the line of the call that runs
  std::string suspect_;  // of the latest call, if it threw
  Clock::time_point call_begin_;
  std::vector<std::string> failed_;  // line and faults
  std::map<std::string, std::vector<std::string>> skipped_;
  std::map<std::string, Worst> worst_;
};

}  // namespace

void check_on_gpu(const GpuSettings& settings, const std::vector<check::Case>& rows) {
  if (!settings.report.empty()) {
    require_writable(settings.report, /*may_replace=*/false);
  }
  GpuCheck(settings, rows).run();
}

}  // namespace fovea::cli
