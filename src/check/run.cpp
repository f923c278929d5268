// SPDX-License-Identifier: Apache-2.0
//
// How a trial goes: the reference and the naive evaluation write into doubles that lie exactly as the outputs do
// (same strides, same base), so an element has one number in all three. All three backwards read the same out
// and lse: the reference's, rounded to their types.
#include "check/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "check/naive.h"
#include "core/element.h"
#include "core/validate.h"
#include "cpu/cpu.h"
#include "reference/reference.h"

namespace fovea::check {
namespace {

struct Slot {
  std::string_view name;
  View Call::*view;
};
constexpr Slot kOutputs[] = {{"out", &Call::out},
                             {"lse", &Call::lse},
                             {"grad_q", &Call::grad_q},
                             {"grad_k", &Call::grad_k},
                             {"grad_v", &Call::grad_v},
                             {"grad_bias", &Call::grad_bias},
                             {"grad_bias2", &Call::grad_bias2},
                             {"grad_sink", &Call::grad_sink}};

std::string run(const Tensors& tensors, Direction direction, const std::string& backend) {
  call_library(tensors.problem(direction), direction, backend);
  return tensors.trespass(direction);
}

double sum_of_products(const Tensor& a, const Tensor& b) {
  double sum = 0;
  for (std::size_t n = 0; n < a.existing.size(); ++n) {
    const double x = a.get(a.existing[n]);
    if (std::isfinite(x)) {  // not the logsumexp of a dead row
      sum += x * b.get(b.existing[n]);
    }
  }
  return sum;
}

// The case with everything in fp64, and with numbers that a step of 1e-5 changes by little.
Case in_fp64(Case c) {
  if (c.values != Values::kDeadRows && c.values != Values::kMinusInfinity) {
    c.values = Values::kNormal;
  }
  c.problem.type = DType::kFp64;
  c.problem.wide = c.problem.accumulate = Results{};
  for (PlaneTraits* plane : {&c.problem.bias, &c.problem.bias2}) {
    plane->type = *plane ? DType::kFp64 : DType::kNone;
  }
  return c;
}

// The loss moves as a gradient says, along a direction that moves every element of the input at once, by signs that
// follow no pattern and are others for each probe.
template <class Loss>
Deviation derivative_along(const Tensor& input, const Tensor& grad, int probe, Loss loss) {
  const double step = 1e-5;
  const auto sign = [probe](std::size_t n) {
    return (n * 0x9E3779B97F4A7C15 >> (40 + 7 * probe) & 1) != 0 ? 1.0 : -1.0;
  };
  std::vector<double> before;
  double along = 0;
  double size = 0;
  for (std::size_t n = 0; n < input.existing.size(); ++n) {
    before.push_back(input.get(input.existing[n]));
    // The gradient lies as its input does, but has the padding of a bias as well: go by element.
    const double value = grad.get(input.existing[n] - input.base + grad.base);
    along += value * sign(n);
    size += std::abs(value);
  }
  const auto loss_at = [&](double by) {
    for (std::size_t n = 0; n < input.existing.size(); ++n) {
      input.set(input.existing[n], before[n] + by * sign(n));
    }
    return loss();
  };
  const double above = loss_at(step);
  const double below = loss_at(-step);
  for (std::size_t n = 0; n < input.existing.size(); ++n) {
    input.set(input.existing[n], before[n]);
  }
  Deviation d;
  d.tensor = grad.name;
  d.max_error = std::abs((above - below) / (2 * step) - along);
  d.max_allowed = 1e-6 * size + 1e-7;
  if (!std::isfinite(d.max_error)) {
    d.mismatch = fmt::format("finite difference {}, gradient along it {}", (above - below) / (2 * step), along);
  }
  return d;
}

}  // namespace

bool Outcome::passed() const {
  return error.empty() && std::all_of(deviations.begin(), deviations.end(), [](auto& d) { return d.within(); });
}

std::string to_text(const Outcome& outcome) {
  std::string text = outcome.error;
  for (const Deviation& deviation : outcome.deviations) {
    if (!deviation.within()) {
      text += (text.empty() ? "" : "\n") + to_text(deviation);
    }
  }
  return text;
}

void require(fovea_status status) {
  if (status != FOVEA_OK) {
    throw Error(status, fovea_last_error());
  }
}

Caller::Caller(const fovea_problem& problem, Direction direction)
    : problem_(problem), direction_(direction), workspace_(0) {
  std::size_t bytes = 0;
  require(fovea_workspace(&problem_, static_cast<fovea_direction>(direction), &bytes));
  workspace_ = Buffer(bytes);
}

void Caller::operator()() {
  const auto function = direction_ == Direction::kForward ? fovea_forward : fovea_backward;
  require(function(&problem_, workspace_.data(), workspace_.size()));
}

namespace {

// `backend` must stay.
fovea_problem with_backend(fovea_problem problem, const std::string& backend) {
  problem.backend = backend.empty() ? nullptr : backend.c_str();
  return problem;
}

}  // namespace

void call_library(const fovea_problem& problem, Direction direction, const std::string& backend) {
  Caller call(with_backend(problem, backend), direction);
  Buffer& workspace = call.workspace();
  workspace.fill_with_pattern();
  workspace.allow(0, workspace.size());
  call();
  std::ptrdiff_t where = 0;
  if (workspace.changed(&where)) {
    throw std::runtime_error(fmt::format("workspace: byte {} of {} was written", where, workspace.size()));
  }
}

Trial::Trial(const Case& c, Arithmetic arithmetic)
    : case_(c), arithmetic_(arithmetic), tensors_(case_), naive_(kDraws) {
  compute_reference(Direction::kForward);
  give_saved();
  compute_reference(Direction::kBackward);
}

Call Trial::wide_call(Direction direction, Wide& wide) const {
  Call call = validate(tensors_.problem(direction), direction, false);
  for (const auto& [name, view] : kOutputs) {
    const Tensor* tensor = tensors_.find(name);
    if (tensor != nullptr && name.starts_with("grad_") == (direction == Direction::kBackward)) {
      std::vector<double>& values = wide[tensor];
      values.assign(tensor->buffer->size() / size_of(tensor->type()) + 1, std::numeric_limits<double>::quiet_NaN());
      if (tensors_.is_added(*tensor, direction)) {
        const std::vector<double> before = tensors_.before(*tensor);
        for (std::size_t n = 0; n < before.size(); ++n) {
          values[static_cast<std::size_t>(tensor->existing[n])] = before[n];
        }
      }
      (call.*view).data = values.data() + tensor->base;
      (call.*view).type = DType::kFp64;
    }
  }
  return call;
}

void Trial::compute_reference(Direction direction) {
  const bool forward = direction == Direction::kForward;
  (forward ? reference::forward : reference::backward)(wide_call(direction, reference_));
  for (std::size_t draw = 0; draw < naive_.size(); ++draw) {
    evaluate(direction, static_cast<int>(draw), naive_[draw]);
  }
}

void Trial::evaluate(Direction direction, int draw, Wide& wide) const {
  (direction == Direction::kForward ? naive_forward : naive_backward)(wide_call(direction, wide), arithmetic_, draw);
}

Deviation Trial::compare_with(const std::vector<Wide>& naive, const Tensor& tensor) const {
  const bool unit = arithmetic_ == Arithmetic::kCpu && cpu::has_matrix_unit(case_.problem.type);
  std::vector<const Values64*> values;
  values.reserve(naive.size());
  for (const Wide& draw : naive) {
    values.push_back(&draw.at(&tensor));
  }
  return compare(tensor, reference_.at(&tensor), values, unit ? Arithmetic::kCpuWithMatrixUnit : arithmetic_);
}

void Trial::give_saved() const {
  for (const Tensor* tensor : tensors_.outputs(Direction::kForward)) {
    Tensors::poison(*tensor);
    for (const std::int64_t element : tensor->existing) {
      tensor->set(element, reference_.at(tensor)[element]);
    }
  }
}

Outcome Trial::test(const std::string& backend) const {
  return test([&](const Tensors& tensors, Direction direction) { return run(tensors, direction, backend); });
}

Outcome Trial::test(const Run& run) const {
  Outcome outcome;
  try {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      if (direction == Direction::kBackward) {
        give_saved();
      }
      tensors_.prepare(direction);
      outcome.error = run(tensors_, direction);
      if (!outcome.error.empty()) {
        return outcome;
      }
      std::vector<Wide> more;
      for (const Tensor* tensor : tensors_.outputs(direction)) {
        Deviation deviation = compare_with(naive_, *tensor);
        if (!deviation.within() && deviation.mismatch.empty()) {
          for (int draw = static_cast<int>(more.size()); draw < kMoreDraws; ++draw) {
            evaluate(direction, kDraws + draw, more.emplace_back());
          }
          deviation = compare_with(more, *tensor);
        }
        outcome.deviations.push_back(std::move(deviation));
      }
    }
  } catch (const Error& error) {
    outcome.error = error.what();
    outcome.status = error.status();
  } catch (const std::exception& exception) {
    outcome.error = exception.what();
    outcome.status = FOVEA_INTERNAL_ERROR;
  }
  return outcome;
}

std::vector<std::uint8_t> Trial::bytes(const std::string& backend) const {
  std::vector<std::uint8_t> all;
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    if (direction == Direction::kBackward) {
      give_saved();
    }
    tensors_.prepare(direction);
    call_library(tensors_.problem(direction), direction, backend);
    for (const Tensor* tensor : tensors_.outputs(direction)) {
      all.insert(all.end(), tensor->buffer->data(), tensor->buffer->data() + tensor->buffer->size());
    }
  }
  return all;
}

Outcome gradient(const Case& given, const std::string& backend) {
  const Case c = in_fp64(given);
  const Tensors tensors(c);
  Outcome outcome;
  try {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      tensors.prepare(direction);
      outcome.error = run(tensors, direction, backend);
      if (!outcome.error.empty()) {
        return outcome;
      }
    }
    const Tensor& out = *tensors.find("out");
    const Tensor& lse = *tensors.find("lse");
    const Tensor* grad_lse = tensors.find("grad_lse");
    const auto loss = [&] {
      call_library(tensors.problem(Direction::kForward), Direction::kForward, backend);
      return sum_of_products(out, *tensors.find("grad_out")) +
             (grad_lse != nullptr ? sum_of_products(lse, *grad_lse) : 0);
    };
    for (const Tensor* grad : tensors.outputs(Direction::kBackward)) {
      for (const int probe : {0, 1}) {
        outcome.deviations.push_back(derivative_along(*tensors.find(grad->name.substr(5)), *grad, probe, loss));
      }
    }
  } catch (const std::exception& exception) {
    outcome.error = exception.what();
  }
  return outcome;
}

double flops(const Problem& problem, Direction direction) {
  double pairs = 0;
  for (std::int64_t b = 0; b < problem.batch(); ++b) {
    const auto length = [b](bool has_used, const auto& used, const auto& lengths, std::int64_t dense) {
      return has_used && !used.empty() ? used[b] : lengths.empty() ? dense : lengths[b];
    };
    const math::Sequence sequence{0, length(problem.has_used_q, problem.used_q, problem.lengths_q, problem.seqlen_q), 0,
                                  length(problem.has_used_k, problem.used_k, problem.lengths_k, problem.seqlen_k)};
    const auto band = problem.band(b, sequence);
    for (std::int64_t i = 0; i < band.seqlen_q; ++i) {
      pairs += static_cast<double>(band.keys_of(i).size());
    }
  }
  const auto d = static_cast<double>(problem.head_dim);
  const auto dv = static_cast<double>(problem.head_dim_v);
  const double of_pair = direction == Direction::kForward ? 2 * (d + dv) : 2 * (3 * d + 2 * dv);
  return of_pair * pairs * static_cast<double>(problem.heads_q);
}

Timing bench(const Case& c, Direction direction, const std::string& backend, double seconds) {
  using Clock = std::chrono::steady_clock;
  const Tensors tensors(c);
  tensors.prepare(Direction::kForward);
  call_library(tensors.problem(Direction::kForward), Direction::kForward, backend);  // the backward's out and lse
  Timing timing{std::numeric_limits<double>::infinity(), flops(c.problem, direction)};
  Caller call(with_backend(tensors.problem(direction), backend), direction);
  const auto begin = Clock::now();
  for (int repetition = 0; repetition < 2 || Clock::now() - begin < std::chrono::duration<double>(seconds);
       ++repetition) {
    const auto start = Clock::now();
    call();
    timing.seconds = std::min(timing.seconds, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return timing;
}

std::vector<Verdict> support(const Case& c, Direction direction) {
  const Shapes shapes(c.problem);
  return plan(validate(shapes.get(), direction, true)).verdicts;
}

}  // namespace fovea::check
