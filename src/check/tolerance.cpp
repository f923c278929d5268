// SPDX-License-Identifier: Apache-2.0
//
// One pass over a tensor's elements collects errors and sizes; what is allowed follows from them at the end.
#include "check/tolerance.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/element.h"

namespace fovea::check {
namespace {

constexpr double kUnits = 1;

// The distance from 1 to the next number, and what is lost among denormals: half of the least number, but where weights
// are numbers of the same type.
struct Precision {
  double unit;
  double least;
};

// Weights below the least normal number are 0. Dropout and scale multiply what is lost.
constexpr double kFlushed = 16 * 0x1p-126;
constexpr double kFlushedDouble = 16 * 0x1p-1022;

Precision precision_of(DType type) {
  switch (type) {
    case DType::kFp16:
      return {0x1p-10, 0x1p-24};
    case DType::kBf16:
      return {0x1p-7, 0x1p-133};
    case DType::kFp32:
      return {0x1p-23, kFlushed};
    default:
      return {0x1p-52, kFlushedDouble};
  }
}

double rounded(DType type, double value) {
  std::uint64_t memory = 0;
  store(&memory, type, 0, value);
  return load(&memory, type, 0);
}

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

}  // namespace

bool Deviation::within() const { return mismatch.empty() && max_error <= max_allowed && mean_error <= mean_allowed; }

std::string to_text(const Deviation& d) {
  if (!d.mismatch.empty()) {
    return fmt::format("{}: {}", d.tensor, d.mismatch);
  }
  return fmt::format("{}: maximum error {:.3g} of {:.3g} allowed, mean {:.3g} of {:.3g}", d.tensor, d.max_error,
                     d.max_allowed, d.mean_error, d.mean_allowed);
}

double share_of_allowed(const Deviation& d) {
  if (!d.mismatch.empty()) {
    return std::numeric_limits<double>::infinity();
  }
  const auto ratio = [](double error, double allowed) { return error > 0 ? error / allowed : 0; };
  return std::max(ratio(d.max_error, d.max_allowed), ratio(d.mean_error, d.mean_allowed));
}

Deviation compare(const Tensor& actual, const Values64& reference, const std::vector<const Values64*>& naive,
                  Arithmetic arithmetic) {
  const DType type = actual.type();
  Deviation d;
  d.tensor = actual.name;
  double naive_max = 0;
  std::vector<double> naive_sums(naive.size());
  double size_max = 0;
  double size_sum = 0;
  double error_sum = 0;
  std::int64_t count = 0;
  for (std::size_t n = 0; n < actual.existing.size(); ++n) {
    const std::int64_t element = actual.existing[n];
    const double is = actual.get(element);
    const double should = rounded(type, reference[element]);
    if (!std::isfinite(should)) {
      if (!same(is, should) && d.mismatch.empty()) {
        d.mismatch = fmt::format("element {} of {} is {}, not {}", n, actual.existing.size(), is, should);
      }
      continue;
    }
    if (!std::isfinite(is)) {
      if (d.mismatch.empty()) {
        d.mismatch = fmt::format("element {} of {} is {}, not {}", n, actual.existing.size(), is, should);
      }
      continue;
    }
    const double error = std::abs(is - reference[element]);
    for (std::size_t draw = 0; draw < naive.size(); ++draw) {
      const double value = (*naive[draw])[element];
      const double naive_error = std::isfinite(value) ? std::abs(value - reference[element]) : 0;
      naive_max = std::max(naive_max, naive_error);
      naive_sums[draw] += naive_error;
    }
    d.max_error = std::max(d.max_error, error);
    size_max = std::max(size_max, std::abs(reference[element]));
    error_sum += error;
    size_sum += std::abs(reference[element]);
    ++count;
  }
  Precision precision = precision_of(type);
  if (type == DType::kBf16 && arithmetic != Arithmetic::kCpu) {
    precision.least = kFlushed;
  }
  const double naive_sum = *std::max_element(naive_sums.begin(), naive_sums.end());
  const double mean = count > 0 ? 1.0 / static_cast<double>(count) : 0;
  d.mean_error = error_sum * mean;
  d.max_allowed = 2 * naive_max + kUnits * (precision.unit * size_max + precision.least);
  d.mean_allowed = 2 * naive_sum * mean + kUnits * (precision.unit * size_sum * mean + precision.least);
  return d;
}

}  // namespace fovea::check
