// SPDX-License-Identifier: Apache-2.0
//
// Results of fp32 beside inputs of 16 bits, and results that are combined with what their memory holds, for every case
// of the reduced table: a wide result is the narrow one before its rounding, an accumulated gradient is what was there
// plus the plain one, and an accumulated out is both results merged by their logsumexp.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "check/cases.h"
#include "check/materialise.h"
#include "check/run.h"
#include "core/element.h"
#include "core/text_words.h"
#include "core/validate.h"
#include "cpu/cpu.h"

namespace fovea::check {
namespace {

std::uint64_t bit_of(std::string_view gradient) {
  constexpr std::string_view kNames[] = {"grad_q", "grad_k", "grad_v", "grad_bias", "grad_bias2", "grad_sink"};
  return std::uint64_t{FOVEA_ACCUMULATE_GRAD_Q}
         << (std::find(std::begin(kNames), std::end(kNames), gradient) - std::begin(kNames));
}

using Numbers = std::vector<double>;

Numbers numbers_of(const Tensor& tensor) {
  Numbers numbers;
  for (const std::int64_t element : tensor.existing) {
    numbers.push_back(tensor.get(element));
  }
  return numbers;
}

void give(const Tensor& tensor, const Numbers& numbers) {
  for (std::size_t n = 0; n < numbers.size(); ++n) {
    tensor.set(tensor.existing[n], numbers[n]);
  }
}

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

double rounded(DType type, double value) {
  std::uint64_t memory = 0;
  store(&memory, type, 0, value);
  return load(&memory, type, 0);
}

// Small numbers that every type has.
Numbers before(const Tensor& tensor, std::size_t turn) {
  Numbers numbers;
  for (std::size_t n = 0; n < tensor.existing.size(); ++n) {
    numbers.push_back((static_cast<double>((n + turn) * 7919 % 401) - 200) / 64);
  }
  return numbers;
}

void call(const Tensors& tensors, Direction direction, const std::string& backend, std::uint64_t accumulate = 0) {
  fovea_problem problem = tensors.problem(direction);
  problem.accumulate = accumulate;
  call_library(problem, direction, backend);
  ASSERT_EQ(tensors.trespass(direction), "");
}

Case with_wide(Case c, bool out, bool gradients) {
  Results wide = gradients ? line::can_be_wide(c.problem) : Results{};
  wide.out = out && size_of(c.problem.type) == 2;
  if (c.problem.layout == Layout::kQkv3) {  // one buffer has one type
    wide.q = wide.k = wide.v = false;
  }
  c.problem.wide = wide;
  return c;
}

// What a rounding to 16 bits may lose beside the bits: with a matrix unit, denormal results.
double flushed(const Case& c, const std::string& backend) {
  return backend == "cpu" && cpu::has_matrix_unit(c.problem.type) ? 0x1p-126 : 0;
}

// `plain`: out and lse of the case as it is.
void check_forward(const Case& c, const Tensors& plain, const std::string& backend) {
  const Case wide_case = with_wide(c, true, false);
  const Tensors wide(wide_case);
  const Tensor& out = *wide.find("out");
  const Tensor& lse = *wide.find("lse");
  wide.prepare(Direction::kForward);
  call(wide, Direction::kForward, backend);
  const Numbers outs = numbers_of(out);
  const Numbers sums = numbers_of(lse);
  const Tensor& narrow = *plain.find("out");
  for (std::size_t n = 0; n < outs.size(); ++n) {
    const double is = narrow.get(narrow.existing[n]);
    const double allowed = backend == "reference" ? std::abs(is) / 128 : flushed(c, backend);  // it is rounded twice
    const double wide_rounded = rounded(narrow.type(), outs[n]);
    ASSERT_TRUE(same(wide_rounded, is) || std::abs(wide_rounded - is) <= allowed) << "out, element " << n;
  }

  // What lies there: results over "other keys", none for every third row.
  const Call views = validate(wide.problem(Direction::kForward), Direction::kForward, false);
  struct Row {
    double lse, old_lse;
    Numbers out, old_out;
  };
  std::vector<Row> rows;
  const auto for_each_row = [&](auto use) {
    for (std::int64_t b = 0; b < views.rows.batch(); ++b) {
      const math::Sequence sequence = views.rows.sequence(b);
      for (std::int64_t h = 0; h < views.rows.heads_q; ++h) {
        for (std::int64_t i = sequence.q_begin; i < sequence.q_begin + sequence.q_len; ++i) {
          use(views.rows.offset(views.out.strides, b, h, i), views.rows.offset(views.lse.strides, b, h, i));
        }
      }
    }
  };
  const auto element = [](const View& view, std::int64_t at) { return load(view.data, view.type, at); };
  for_each_row([&](std::int64_t at, std::int64_t at_lse) {
    const std::size_t n = rows.size();
    const bool has_keys = n % 3 != 0;
    Row row{element(views.lse, at_lse), -std::numeric_limits<double>::infinity(), {}, {}};
    if (has_keys) {
      row.old_lse = (std::isfinite(row.lse) ? row.lse : 0) + static_cast<double>(n * 37 % 97) / 8 - 6;
    }
    row.old_lse = rounded(views.lse.type, row.old_lse);
    store(views.lse.data, views.lse.type, at_lse, row.old_lse);
    for (std::int64_t d = 0; d < c.problem.head_dim_v; ++d) {
      const std::int64_t column = at + d * views.out.strides.col;
      row.out.push_back(element(views.out, column));
      row.old_out.push_back(has_keys ? static_cast<double>((n + static_cast<std::size_t>(d)) * 7919 % 401) / 64 - 3
                                     : 0);
      store(views.out.data, views.out.type, column, row.old_out.back());
    }
    rows.push_back(row);
  });
  call(wide, Direction::kForward, backend, FOVEA_ACCUMULATE_OUT);
  const double unit = c.problem.type == DType::kFp64 ? 1e-14 : 1e-6;
  std::size_t n = 0;
  for_each_row([&](std::int64_t at, std::int64_t at_lse) {
    const Row& row = rows[n++];
    const double top = std::max(row.old_lse, row.lse);
    const double sum = std::exp(row.old_lse - top) + std::exp(row.lse - top);
    const bool is_dead = top == -std::numeric_limits<double>::infinity();
    const double merged = is_dead ? top : top + std::log(sum);
    const double of_old = is_dead ? 0 : std::exp(row.old_lse - merged);
    const double of_new = is_dead ? 0 : std::exp(row.lse - merged);
    const double found = element(views.lse, at_lse);
    // The difference of two logsumexps has their error.
    const double size = std::max(
        {1.0, std::isfinite(row.lse) ? std::abs(row.lse) : 0, std::isfinite(row.old_lse) ? std::abs(row.old_lse) : 0});
    EXPECT_TRUE(same(found, merged) || std::abs(found - merged) <= unit * size)
        << "lse, row " << n - 1 << ": " << found << ", expected " << merged;
    for (std::size_t d = 0; d < row.out.size(); ++d) {
      const double expected = row.old_out[d] * of_old + row.out[d] * of_new;
      const double is = element(views.out, at + static_cast<std::int64_t>(d) * views.out.strides.col);
      const double largest = std::max({1.0, std::abs(row.out[d]), std::abs(row.old_out[d])});
      EXPECT_TRUE(same(is, expected) || !(std::abs(is - expected) > 4 * unit * size * largest))
          << "out, row " << n - 1 << ": " << is << ", expected " << expected;
    }
  });
}

void check_backward(const Case& c, const Tensors& plain, const std::string& backend) {
  const Case wide_case = with_wide(c, false, true);
  const Tensors wide(wide_case);
  give(*wide.find("out"), numbers_of(*plain.find("out")));
  give(*wide.find("lse"), numbers_of(*plain.find("lse")));
  wide.prepare(Direction::kBackward);
  call(wide, Direction::kBackward, backend);
  std::vector<Numbers> before_all;
  std::vector<Numbers> alone;
  for (const Tensor* grad : wide.outputs(Direction::kBackward)) {
    const Tensor& narrow = *plain.find(grad->name);
    alone.push_back(numbers_of(*grad));
    for (std::size_t n = 0; n < alone.back().size(); ++n) {
      const double wide_rounded = rounded(narrow.type(), alone.back()[n]);
      const double is = narrow.get(narrow.existing[n]);
      // Of the reference's doubles the wide result is rounded twice.
      const double allowed = backend == "reference" ? std::abs(is) / 128 : flushed(c, backend);
      ASSERT_TRUE(same(wide_rounded, is) || std::abs(wide_rounded - is) <= allowed)
          << grad->name << ", element " << n << ": " << alone.back()[n];
    }
  }
  wide.prepare(Direction::kBackward);
  std::uint64_t bits = 0;
  for (const Tensor* grad : wide.outputs(Direction::kBackward)) {
    before_all.push_back(before(*grad, before_all.size()));
    give(*grad, before_all.back());
    bits |= size_of(grad->type()) > 2 ? bit_of(grad->name) : 0;
  }
  call(wide, Direction::kBackward, backend, bits);
  std::size_t at = 0;
  for (const Tensor* grad : wide.outputs(Direction::kBackward)) {
    const bool is_added = size_of(grad->type()) > 2;
    for (std::size_t n = 0; n < alone[at].size(); ++n) {
      const double expected = rounded(grad->type(), alone[at][n] + (is_added ? before_all[at][n] : 0));
      const double found = grad->get(grad->existing[n]);
      // The reference, and whatever sums in fp64 for fp32, rounds once.
      const double unit = grad->type() == DType::kFp64 ? 2.3e-16 : 1.2e-7;
      const double allowed = is_added ? unit * (std::abs(alone[at][n]) + 4) : 0;
      ASSERT_TRUE(same(found, expected) || std::abs(found - expected) <= allowed)
          << grad->name << ", element " << n << ": " << found << ", expected " << expected;
    }
    ++at;
  }
}

class Accumulate : public ::testing::TestWithParam<const char*> {};

TEST_P(Accumulate, EveryCase) {
  const std::string backend = GetParam();
  const auto& table = cases(Table::kReduced);
  // The reference is slow, and the same loops for all of them.
  const std::size_t step = backend == "reference" ? 9 : 1;
  for (std::size_t n = 0; n < table.size() && !HasFailure(); n += step) {
    SCOPED_TRACE(to_text(table[n]));
    Case c = table[n];
    c.problem.wide = c.problem.accumulate = Results{};  // the checks choose them
    const Tensors plain(c);
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      plain.prepare(direction);
      call(plain, direction, backend);
    }
    check_forward(c, plain, backend);
    check_backward(c, plain, backend);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Accumulate, ::testing::Values("cpu", "reference"));

}  // namespace
}  // namespace fovea::check
