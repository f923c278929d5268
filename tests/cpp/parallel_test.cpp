// SPDX-License-Identifier: Apache-2.0
//
// include/fovea/parallel.h, compiled as C++17: threads as ranks, copies as transport. Results are those of one process.
#include <fovea/parallel.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <limits>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>

static_assert(__cplusplus < 202002L, "this file is to be compiled as C++17");

namespace {

namespace parallel = fovea::parallel;
using Dims = fovea::Tensor::Dims;
using parallel::Move;
using parallel::Rows;

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

// ---- ranks ----

class Group {
 public:
  explicit Group(int ranks) : ranks_(ranks), sends_(static_cast<std::size_t>(ranks)) {}

  parallel::Collectives of(int rank) {
    parallel::Collectives group;
    group.rank = rank;
    group.ranks = ranks_;
    group.all_gather = [this, rank](const void* send, void* receive, std::size_t bytes, void*) {
      meet(rank, send, [&] {
        for (int other = 0; other < ranks_; ++other) {
          std::memcpy(static_cast<char*>(receive) + other * bytes, sends_[other], bytes);
        }
      });
    };
    group.all_to_all = [this, rank](const void* send, void* receive, std::size_t bytes, void*) {
      meet(rank, send, [&] {
        for (int other = 0; other < ranks_; ++other) {
          std::memcpy(static_cast<char*>(receive) + other * bytes,
                      static_cast<const char*>(sends_[other]) + rank * bytes, bytes);
        }
      });
    };
    group.reduce_scatter = [this, rank](const float* send, float* receive, std::size_t count, void*) {
      meet(rank, send, [&] {
        for (std::size_t n = 0; n < count; ++n) {
          receive[n] = 0;
          for (int other = 0; other < ranks_; ++other) {
            receive[n] += static_cast<const float*>(sends_[other])[rank * count + n];
          }
        }
      });
    };
    return group;
  }

  // A function of the rank's number, on a thread each. Errors are thrown by the last line.
  template <class Function>
  void run(Function function) {
    std::vector<std::thread> threads;
    std::vector<std::exception_ptr> errors(sends_.size());
    for (int rank = 0; rank < ranks_; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          function(rank);
        } catch (...) {
          errors[rank] = std::current_exception();
          const std::lock_guard lock(mutex_);
          is_broken_ = true;
          all_here_.notify_all();
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    for (const std::exception_ptr& error : errors) {
      if (error) {
        std::rethrow_exception(error);
      }
    }
  }

 private:
  template <class Function>
  void meet(int rank, const void* send, Function receive) {
    sends_[rank] = send;
    wait();
    receive();
    wait();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    const int round = round_;
    if (++waiting_ == ranks_) {
      waiting_ = 0;
      ++round_;
      all_here_.notify_all();
    } else {
      const bool in_time =
          all_here_.wait_for(lock, std::chrono::seconds(60), [&] { return round_ != round || is_broken_; });
      if (!in_time || round_ == round) {
        throw std::runtime_error("a rank does not come");
      }
    }
  }

  int ranks_;
  std::vector<const void*> sends_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  int waiting_ = 0;
  int round_ = 0;
  bool is_broken_ = false;  // a rank has thrown: the others do not wait for it
};

// ---- problems ----

std::vector<float> random(std::size_t elements, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(elements);
  for (float& number : numbers) {
    number = normal(generator);
  }
  return numbers;
}

std::size_t product(const Dims& shape) {
  std::size_t elements = 1;
  for (const std::int64_t dim : shape) {
    elements *= static_cast<std::size_t>(dim);
  }
  return elements;
}

// Numbers with a shape; rows are a dimension.
struct Array {
  Dims shape;
  std::vector<float> numbers;

  Array() = default;
  Array(Dims dims, unsigned seed) : shape(std::move(dims)), numbers(random(elements(), seed)) {}
  explicit Array(Dims dims) : shape(std::move(dims)), numbers(elements(), kPoison) {}
  explicit operator bool() const { return !shape.empty(); }
  std::size_t elements() const { return shape.empty() ? 0 : product(shape); }
  fovea::MutableTensor tensor() { return *this ? fovea::tensor(numbers, shape) : fovea::MutableTensor(); }

  // The rows of these numbers along a dimension; `back`: writes `part` there instead.
  Array rows(std::size_t dim, const std::vector<std::int64_t>& numbers_of_rows, const Array* back = nullptr) {
    Array part;
    part.shape = shape;
    part.shape[dim] = static_cast<std::int64_t>(numbers_of_rows.size());
    part.numbers.resize(product(part.shape));
    std::size_t inner = 1, outer = 1;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      (d < dim ? outer : inner) *= d == dim ? 1 : static_cast<std::size_t>(shape[d]);
    }
    for (std::size_t o = 0; o < outer; ++o) {
      for (std::size_t n = 0; n < numbers_of_rows.size(); ++n) {
        float* const mine =
            &numbers[(o * static_cast<std::size_t>(shape[dim]) + static_cast<std::size_t>(numbers_of_rows[n])) * inner];
        if (back != nullptr) {
          std::copy_n(&back->numbers[(o * numbers_of_rows.size() + n) * inner], inner, mine);
        } else {
          std::copy_n(mine, inner, &part.numbers[(o * numbers_of_rows.size() + n) * inner]);
        }
      }
    }
    return part;
  }
};

struct Problem {
  Dims batch{2};  // none: packed
  std::int64_t heads_q = 4, heads_k = 2, dim = 12, dim_v = 20;
  bool with_bias = false;  // with queries
  bool of_one_head = false;
  bool with_bias2 = false;  // without
  bool with_sink = false;
  bool with_slopes = false;
  bool with_grad_lse = false;
  fovea::Options options;
};

struct Tensors {
  Array q, k, v, out, lse, grad_out, grad_lse, bias, bias2, sink, slopes;
  Array grad_q, grad_k, grad_v, grad_bias, grad_bias2, grad_sink;
};

Dims joined(Dims a, const Dims& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Tensors whole_of(const Problem& p, const Rows& rows) {
  const std::int64_t s = rows.total();
  const auto shape = [&](std::int64_t heads, std::int64_t dim) { return joined(p.batch, {s, heads, dim}); };
  Tensors t;
  t.q = Array(shape(p.heads_q, p.dim), 1);
  t.k = Array(shape(p.heads_k, p.dim), 2);
  t.v = Array(shape(p.heads_k, p.dim_v), 3);
  t.grad_out = Array(shape(p.heads_q, p.dim_v), 4);
  t.out = Array(t.grad_out.shape);
  t.lse = Array(joined(p.batch, {p.heads_q, s}));
  t.grad_lse = p.with_grad_lse ? Array(t.lse.shape, 5) : Array();
  t.bias = p.with_bias ? Array({1, p.of_one_head ? 1 : p.heads_q, s, s}, 6) : Array();
  t.bias2 = p.with_bias2 ? Array({p.heads_q, 1, s}, 7) : Array();
  t.sink = p.with_sink ? Array({p.heads_q}, 8) : Array();
  t.slopes = p.with_slopes ? Array({p.heads_q}, 9) : Array();
  for (float& slope : t.slopes.numbers) {
    slope = std::abs(slope) / 16;
  }
  return t;
}

void add_gradients(Tensors& t) {
  t.grad_q = Array(t.q.shape);
  t.grad_k = Array(t.k.shape);
  t.grad_v = Array(t.v.shape);
  t.grad_bias = Array(t.bias.shape);
  t.grad_bias2 = Array(t.bias2.shape);
  t.grad_sink = Array(t.sink.shape);
}

fovea::Forward forward_of(const Problem& p, Tensors& t) {
  fovea::Options options = p.options;
  options.bias = t.bias.tensor();
  options.bias2 = t.bias2.tensor();
  options.sink = t.sink.tensor();
  options.alibi_slopes = t.slopes.tensor();
  return {t.q.tensor(), t.k.tensor(), t.v.tensor(), t.out.tensor(), t.lse.tensor(), options};
}

fovea::Backward backward_of(const Problem& p, Tensors& t) {
  const fovea::Gradients grads{t.grad_q.tensor(),    t.grad_k.tensor(),     t.grad_v.tensor(),
                               t.grad_bias.tensor(), t.grad_bias2.tensor(), t.grad_sink.tensor()};
  return {t.grad_out.tensor(), t.q.tensor(),   t.k.tensor(), t.v.tensor(),
          t.out.tensor(),      t.lse.tensor(), grads,        forward_of(p, t).options,
          t.grad_lse.tensor()};
}

// By one process; `rows` has the lengths.
Tensors computed_alone(const Problem& p, const Rows& rows) {
  Tensors t = whole_of(p, rows);
  add_gradients(t);
  fovea::Forward forward = forward_of(p, t);
  fovea::Backward backward = backward_of(p, t);
  if (rows.is_packed()) {
    for (fovea::Options* options : {&forward.options, &backward.options}) {
      options->cu_seqlens_q = {rows.cu_seqlens().data(), {static_cast<std::int64_t>(rows.cu_seqlens().size())}};
      options->cu_seqlens_k = options->cu_seqlens_q;
    }
  }
  fovea::Workspace workspace;
  run(forward, workspace);
  run(backward, workspace);
  return t;
}

std::vector<std::int64_t> index_of(const Rows& rows, int rank) {
  std::vector<std::int64_t> index;
  for (const parallel::Piece& piece : rows.pieces(rank)) {
    for (std::int64_t row = 0; row < piece.rows; ++row) {
      index.push_back(rows.first(piece) + row);
    }
  }
  return index;
}

// By ranks; put together again. What ranks have parts of a sum of is added up.
Tensors computed_by_ranks(const Problem& p, const Rows& rows, Move move) {
  Tensors whole = whole_of(p, rows);
  add_gradients(whole);
  const std::size_t of_rows = p.batch.size(), of_lse = p.batch.size() + 1;
  const bool by_heads = move == Move::kHeads;
  const bool shares_bias = by_heads && p.of_one_head;
  const auto sums = [&](Tensors& t) {
    std::vector<Array*> sums{&t.grad_bias2, &t.grad_sink};
    if (shares_bias) {
      sums.push_back(&t.grad_bias);
    }
    return sums;
  };
  const auto clear = [&](Tensors& t) {
    for (Array* sum : sums(t)) {
      std::fill(sum->numbers.begin(), sum->numbers.end(), 0.0f);
    }
  };
  clear(whole);
  std::mutex mutex;
  Group group(rows.ranks());
  group.run([&](int rank) {
    const std::vector<std::int64_t> index = index_of(rows, rank);
    EXPECT_EQ(static_cast<std::int64_t>(index.size()), rows.count(rank));
    std::vector<std::int64_t> heads;
    for (std::int64_t head = 0; head < p.heads_q / rows.ranks(); ++head) {
      heads.push_back(rank * (p.heads_q / rows.ranks()) + head);
    }
    Tensors mine = whole_of(p, rows);
    for (Array* array : {&mine.q, &mine.k, &mine.v, &mine.out, &mine.grad_out}) {
      *array = array->rows(of_rows, index);
    }
    mine.lse = mine.lse.rows(of_lse, index);
    if (mine.grad_lse) {
      mine.grad_lse = mine.grad_lse.rows(of_lse, index);
    }
    if (mine.bias && !shares_bias) {
      mine.bias = by_heads ? mine.bias.rows(1, heads) : mine.bias.rows(2, index);
    }
    add_gradients(mine);
    if (by_heads) {
      clear(mine);  // elements of other ranks' heads are not written
    }
    const parallel::Collectives collectives = group.of(rank);
    fovea::Workspace workspace;
    parallel::run(forward_of(p, mine), rows, collectives, workspace, move);
    parallel::run(backward_of(p, mine), rows, collectives, workspace, move);

    const std::lock_guard lock(mutex);
    whole.out.rows(of_rows, index, &mine.out);
    whole.lse.rows(of_lse, index, &mine.lse);
    whole.grad_q.rows(of_rows, index, &mine.grad_q);
    whole.grad_k.rows(of_rows, index, &mine.grad_k);
    whole.grad_v.rows(of_rows, index, &mine.grad_v);
    if (mine.bias && !shares_bias) {
      by_heads ? whole.grad_bias.rows(1, heads, &mine.grad_bias) : whole.grad_bias.rows(2, index, &mine.grad_bias);
    }
    for (std::size_t sum = 0; sum < sums(mine).size(); ++sum) {
      std::vector<float>& into = sums(whole)[sum]->numbers;
      for (std::size_t n = 0; n < into.size(); ++n) {
        into[n] += sums(mine)[sum]->numbers[n];
      }
    }
  });
  return whole;
}

void expect_same_bits(const Array& a, const Array& b, const char* name) {
  ASSERT_EQ(a.numbers.size(), b.numbers.size()) << name;
  std::size_t different = 0;
  for (std::size_t n = 0; n < a.numbers.size(); ++n) {
    different += std::memcmp(&a.numbers[n], &b.numbers[n], sizeof(float)) != 0;
  }
  EXPECT_EQ(different, 0u) << name << ": of " << a.numbers.size();
}

void expect_near(const Array& a, const Array& b, const char* name) {
  ASSERT_EQ(a.numbers.size(), b.numbers.size()) << name;
  double difference = 0, size = 1e-30;
  for (std::size_t n = 0; n < a.numbers.size(); ++n) {
    difference += std::pow(double(a.numbers[n]) - double(b.numbers[n]), 2);
    size += std::pow(double(b.numbers[n]), 2);
  }
  EXPECT_LT(std::sqrt(difference / size), 1e-6) << name;  // NaN is not
}

void expect_one_process(const Problem& p, const Rows& rows, Move move) {
  const Tensors alone = computed_alone(p, rows), together = computed_by_ranks(p, rows, move);
  expect_same_bits(together.out, alone.out, "out");
  expect_same_bits(together.lse, alone.lse, "lse");
  expect_same_bits(together.grad_q, alone.grad_q, "grad_q");
  const bool adds_bias = move == Move::kHeads && p.of_one_head;
  (adds_bias ? expect_near : expect_same_bits)(together.grad_bias, alone.grad_bias, "grad_bias");
  // With heads only sums over the heads of a group, or over all rows, may be formed in another order, and those over
  // queries where a call has so few heads that the CPU shares out more.
  const auto expect = move == Move::kHeads && p.heads_q == p.heads_k ? expect_same_bits : expect_near;
  expect(together.grad_k, alone.grad_k, "grad_k");
  expect(together.grad_v, alone.grad_v, "grad_v");
  expect_near(together.grad_bias2, alone.grad_bias2, "grad_bias2");
  expect_near(together.grad_sink, alone.grad_sink, "grad_sink");
}

// ---- tests ----

Problem with_everything() {
  Problem p;
  p.options.causal = true;
  p.options.softcap = 5;
  p.options.dropout_p = 0.2;
  p.options.seed = 7;
  p.with_bias = p.with_bias2 = p.with_sink = p.with_slopes = p.with_grad_lse = true;
  return p;
}

class Parallel : public testing::TestWithParam<int> {};  // ranks

TEST_P(Parallel, KeysOfOneSequence) {
  const int ranks = GetParam();
  for (const Rows& rows :
       {Rows::zigzag(300, ranks, 16), Rows::contiguous(300, ranks, 16), Rows::zigzag(40, ranks, 16)}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks, " << rows.pieces(0).size() << " pieces of " << rows.total());
    expect_one_process({}, rows, Move::kKeys);
    expect_one_process(with_everything(), rows, Move::kKeys);
    Problem window = with_everything();
    window.options.causal = false;
    window.options.window = {30, 9};
    window.batch = {1, 2};
    expect_one_process(window, rows, Move::kKeys);
  }
}

TEST_P(Parallel, HeadsOfOneSequence) {
  const int ranks = GetParam();
  for (const Rows& rows : {Rows::zigzag(300, ranks, 16), Rows::contiguous(40, ranks, 16)}) {
    Problem p = with_everything();
    p.heads_q = 4 * ranks;
    p.heads_k = 2 * ranks;
    expect_one_process(p, rows, Move::kHeads);
    p.heads_q = p.heads_k = 8 * ranks;
    p.batch = {2, 1};
    expect_one_process(p, rows, Move::kHeads);
    p.of_one_head = true;
    expect_one_process(p, rows, Move::kHeads);
  }
}

TEST_P(Parallel, PackedSequences) {
  const int ranks = GetParam();
  for (const bool contiguous : {false, true}) {
    const Rows rows = Rows::packed({130, 0, 17, 200, 33, 1}, ranks, 16, contiguous);
    Problem p = with_everything();
    p.batch = {};
    p.with_bias = p.with_bias2 = false;
    expect_one_process(p, rows, Move::kKeys);
    p.heads_q = 2 * ranks;
    p.heads_k = ranks;
    expect_one_process(p, rows, Move::kHeads);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Parallel, testing::Values(1, 2, 3, 4));

TEST(ParallelHeader, StridesOfEveryKind) {
  // Rows of (B, H, S, D) in memory, the last head first.
  const Rows rows = Rows::zigzag(96, 2, 16);
  Problem p;
  p.options.causal = true;
  const Tensors alone = computed_alone(p, rows);
  Group group(2);
  group.run([&](int rank) {
    Tensors t = whole_of(p, rows);
    const std::vector<std::int64_t> index = index_of(rows, rank);
    const auto count = static_cast<std::int64_t>(index.size());
    for (Array* array : {&t.q, &t.k, &t.v, &t.out}) {
      *array = array->rows(1, index);
    }
    t.lse = t.lse.rows(2, index);
    const auto turned = [&](const Array& array, std::vector<float>& memory) {
      const std::int64_t b = array.shape[0], h = array.shape[2], d = array.shape[3];
      memory.resize(array.numbers.size());
      const Dims strides{h * count * d, d, -count * d, 1};
      float* const first = memory.data() + (h - 1) * count * d;
      for (std::int64_t n = 0; n < static_cast<std::int64_t>(memory.size()); ++n) {
        const std::int64_t entry = n / (count * h * d), row = n / (h * d) % count, head = n / d % h, column = n % d;
        first[entry * strides[0] + row * strides[1] + head * strides[2] + column] = array.numbers[n];
      }
      return fovea::Tensor(first, {b, count, h, d}, strides);
    };
    std::vector<float> q, k, v;
    fovea::Forward call = forward_of(p, t);
    call.q = turned(t.q, q);
    call.k = turned(t.k, k);
    call.v = turned(t.v, v);
    fovea::Workspace workspace;
    for (const Move move : {Move::kKeys, Move::kHeads}) {
      std::fill(t.out.numbers.begin(), t.out.numbers.end(), kPoison);
      parallel::run(call, rows, group.of(rank), workspace, move);
      Array expected = alone.out;
      expect_same_bits(t.out, expected.rows(1, index), "out");
    }
  });
}

TEST(ParallelHeader, StatisticsOfEveryStride) {
  const Rows rows = Rows::zigzag(96, 2, 16);
  Problem p;
  p.options.causal = true;
  p.with_grad_lse = true;
  const Tensors alone = computed_alone(p, rows);
  for (const Move move : {Move::kKeys, Move::kHeads}) {
    SCOPED_TRACE(move == Move::kKeys ? "keys" : "heads");
    Group group(2);
    group.run([&](int rank) {
      Tensors t = whole_of(p, rows);
      const std::vector<std::int64_t> index = index_of(rows, rank);
      for (Array* array : {&t.q, &t.k, &t.v, &t.out, &t.grad_out}) {
        *array = array->rows(1, index);
      }
      t.lse = t.lse.rows(2, index);
      t.grad_lse = t.grad_lse.rows(2, index);
      add_gradients(t);
      fovea::Forward forward = forward_of(p, t);
      fovea::Backward backward = backward_of(p, t);
      // lse with the heads of a row adjacent, grad_lse with the last row first.
      const auto count = static_cast<std::int64_t>(index.size()), heads = p.heads_q;
      const auto at = [&](std::int64_t n) {
        return (n / (heads * count) * count + n % count) * heads + n / count % heads;
      };
      std::vector<float> lse(t.lse.numbers.size()), grad_lse(lse.size());
      for (std::int64_t n = 0; n < static_cast<std::int64_t>(lse.size()); ++n) {
        grad_lse[n / count * count + count - 1 - n % count] = t.grad_lse.numbers[n];
      }
      forward.lse = {lse.data(), t.lse.shape, {heads * count, 1, heads}};
      backward.lse = forward.lse;
      backward.grad_lse = {grad_lse.data() + count - 1, t.lse.shape, {heads * count, count, -1}};
      fovea::Workspace workspace;
      parallel::run(forward, rows, group.of(rank), workspace, move);
      parallel::run(backward, rows, group.of(rank), workspace, move);
      for (std::size_t n = 0; n < lse.size(); ++n) {
        t.lse.numbers[n] = lse[at(n)];
      }
      Array expected = alone.lse, expected_grad = alone.grad_q;
      expect_same_bits(t.lse, expected.rows(2, index), "lse");
      expect_same_bits(t.grad_q, expected_grad.rows(1, index), "grad_q");
    });
  }
}

// What the first rank of two says of its arguments.
template <class Change>
std::string refusal(Change change, Move move = Move::kKeys) {
  const Rows rows = Rows::zigzag(64, 2, 16);
  Problem p;
  Tensors t = whole_of(p, rows);
  const std::vector<std::int64_t> index = index_of(rows, 0);
  for (Array* array : {&t.q, &t.k, &t.v, &t.out, &t.grad_out}) {
    *array = array->rows(1, index);
  }
  t.lse = t.lse.rows(2, index);
  add_gradients(t);
  fovea::Forward forward = forward_of(p, t);
  fovea::Backward backward = backward_of(p, t);
  parallel::Collectives group;
  group.ranks = 2;
  bool moved = false;
  group.all_gather = group.all_to_all = [&](const void*, void*, std::size_t, void*) { moved = true; };
  group.reduce_scatter = [&](const float*, float*, std::size_t, void*) { moved = true; };
  const bool runs_backward = change(forward, backward, group);
  fovea::Workspace workspace;
  std::string said;
  try {
    if (runs_backward) {
      parallel::run(backward, rows, group, workspace, move);
    } else {
      parallel::run(forward, rows, group, workspace, move);
    }
  } catch (const fovea::Error& error) {
    said = error.what();
  }
  EXPECT_FALSE(moved);
  EXPECT_TRUE(std::isnan(t.out.numbers[0]) && std::isnan(t.grad_k.numbers[0]));
  return said;
}

TEST(ParallelHeader, BadInputIsRefusedBeforeAnythingMoves) {
  using F = fovea::Forward;
  using B = fovea::Backward;
  using C = parallel::Collectives;
  const auto starts = [](const std::string& text, const std::string& with) {
    EXPECT_EQ(text.substr(0, with.size()), with);
  };
  std::vector<float> few(2 * 31 * 4 * 12);
  std::vector<double> slopes(4);
  std::vector<std::int32_t> used(2);
  starts(refusal([&](F& f, B&, C&) {
           return f.q = fovea::tensor(few, {2, 31, 4, 12}), false;
         }),
         "invalid argument: q: 31 rows; accepted: 32, those of rank 0");
  starts(refusal([&](F& f, B&, C&) { return f.k = {}, false; }), "invalid argument: k: absent; accepted: ");
  starts(refusal([&](F& f, B&, C&) {
           return f.q = fovea::tensor(few, {31, 8, 12}), false;
         }).substr(0, 50),
         "invalid argument: q: rank 3; accepted: 4 or 5");
  starts(refusal([&](F& f, B&, C&) {
           return f.lse = fovea::tensor(few, {2, 31, 48}), false;
         }),
         "invalid argument: lse: shape 2x31x48 on rank 0; accepted: 2x4x32, the heads and rows of q");
  starts(refusal([&](F&, B&, C& c) { return c.ranks = 3, false; }),
         "invalid argument: collectives: rank 0 of 3; accepted: ranks 0 to 1 of 2");
  starts(refusal([&](F&, B&, C& c) { return c.all_gather = nullptr, false; }),
         "invalid argument: collectives.all_gather: empty; accepted: a function");
  starts(refusal([&](F&, B&, C& c) { return c.reduce_scatter = nullptr, true; }),
         "invalid argument: collectives.reduce_scatter: empty");
  starts(refusal([&](F&, B&, C& c) { return c.all_to_all = nullptr, false; }, Move::kHeads),
         "invalid argument: collectives.all_to_all: empty");
  starts(refusal([&](F& f, B&, C&) { return f.options.device = fovea::Device::kCuda, false; }),
         "invalid argument: collectives.copy: empty");
  starts(refusal([&](F& f, B&, C&) { return f.options.position_q = 3, false; }), "invalid argument: position_q: given");
  starts(refusal([&](F& f, B&, C&) { return f.options.seqused_k = fovea::tensor(used, {2}), false; }),
         "unsupported: seqused_k: given");
  starts(refusal([&](F& f, B&, C&) { return f.accumulate = true, false; }), "unsupported: accumulate: true");
  starts(refusal([&](F&, B& b, C&) { return b.grads.accumulate = 4, true; }), "unsupported: grads.accumulate: given");
  starts(refusal([&](F&, B& b, C&) {
           b.grads.k = fovea::MutableTensor(few.data(), FOVEA_BF16, {2, 32, 2, 12});
           return true;
         }),
         "invalid type: grads.k: not fp32");
  starts(refusal([&](F&, B& b, C&) {
           b.q = {few.data(), FOVEA_FP64, {2, 32, 4, 12}};
           return true;
         }),
         "unsupported: grads.k: with fp64 q; accepted with Move::kKeys: other types");
  starts(refusal([&](F& f, B&, C&) { return f.options.alibi_slopes = fovea::tensor(slopes, {4}), false; }),
         "invalid type: alibi_slopes: ");  // the library's own, by the calls that are only measured
  std::vector<float> three(2 * 32 * 3 * 12);
  starts(refusal(
             [&](F& f, B&, C&) {
               return f.q = fovea::tensor(three, {2, 32, 3, 12}), false;
             },
             Move::kHeads),
         "unsupported: q: 3 heads; accepted with Move::kHeads: a multiple of 2");
}

// The calls of a rank see parts, so what is cut is checked whole.
TEST(ParallelHeader, ShapesThatAreCutAreRefusedByName) {
  using F = fovea::Forward;
  using B = fovea::Backward;
  using C = parallel::Collectives;
  std::vector<float> numbers(64 * 64 * 8);
  std::vector<std::int64_t> streams(16);
  const auto of = [&](const Dims& shape) { return fovea::MutableTensor(numbers.data(), shape); };
  const auto says = [](const std::string& text, const std::string& what) {
    EXPECT_EQ(text.substr(0, 18 + what.size()), "invalid argument: " + what);
  };
  using Option = fovea::Tensor fovea::Options::*;
  const auto option = [&](Option tensor, const Dims& shape, Move move) {
    return refusal([&](F& f, B&, C&) { return f.options.*tensor = of(shape), false; }, move);
  };
  const std::string all =
      " on rank 0; accepted with Move::kKeys: broadcastable to (B, 4, 32, 64): all heads, this rank's";
  says(option(&fovea::Options::bias, {1, 4, 64, 64}, Move::kKeys), "bias: shape 1x4x64x64" + all);
  says(option(&fovea::Options::bias, {1, 4, 16, 64}, Move::kKeys), "bias: shape 1x4x16x64" + all);
  says(option(&fovea::Options::bias2, {2, 32, 64}, Move::kKeys), "bias2: shape 2x32x64" + all);
  says(option(&fovea::Options::mask, {32, 32}, Move::kKeys), "mask: shape 32x32" + all);
  says(option(&fovea::Options::bias, {4, 1, 32}, Move::kKeys),
       "bias: shape 4x1x32 on rank 0; accepted with Move::kKeys: broadcastable to (B, 4, 1, 64): all heads, all "
       "keys");
  says(option(&fovea::Options::bias, {1, 4, 64, 64}, Move::kHeads),
       "bias: shape 1x4x64x64 on rank 0; accepted with Move::kHeads: broadcastable to (B, 2, 64, 64): this "
       "rank's");
  says(option(&fovea::Options::bias, {2, 1, 64}, Move::kHeads),
       "bias: shape 2x1x64 on rank 0; accepted with Move::kHeads: broadcastable to (B, 4, 1, 64): all heads, all");
  for (const Move move : {Move::kKeys, Move::kHeads}) {
    says(option(&fovea::Options::sink, {2}, move), "sink: shape 2 on rank 0; accepted: (4), all heads of q");
    says(option(&fovea::Options::sink, {}, move), "sink: shape () on rank 0; accepted: (4)");
    says(option(&fovea::Options::sink, {1, 4}, move), "sink: shape 1x4 on rank 0; accepted: (4)");
    says(option(&fovea::Options::alibi_slopes, {2, 2}, move), "alibi_slopes: shape 2x2 on rank 0; accepted: (..., 4)");
    says(refusal(
             [&](F& f, B&, C&) {
               return f.options.dropout_streams = fovea::tensor(streams, {2, 8}), false;
             },
             move),
         "dropout_streams: shape 2x8 on rank 0; accepted: (..., 4), all heads of q");
    says(refusal(
             [&](F& f, B&, C&) {
               return f.lse = of({2, 5, 32}), false;
             },
             move),
         "lse: shape 2x5x32 on rank 0; accepted: 2x4x32, the heads and rows of q");
    says(refusal([&](F&, B& b, C&) { return b.grad_lse = of({2, 5, 32}), true; }, move), "grad_lse: shape 2x5x32");
    says(refusal(
             [&](F&, B& b, C&) {
               return b.grads.q = of({2, 32, 5, 12}), true;
             },
             move),
         "grads.q: shape 2x32x5x12 on rank 0; accepted: 2x32x4x12, the shape of q");
    says(refusal(
             [&](F&, B& b, C&) {
               return b.grads.v = of({2, 32, 3, 20}), true;
             },
             move),
         "grads.v: shape 2x32x3x20 on rank 0; accepted: 2x32x2x20, the shape of v");
    says(refusal([&](F&, B& b, C&) { return b.grads.sink = of({4}), true; }, move), "grads.sink: given without sink");
    says(refusal([&](F&, B& b, C&) { return b.options.sink = of({4}), b.grads.sink = of({2}), true; }, move),
         "grads.sink: shape 2 on rank 0; accepted: 4, the shape of sink");
    const Dims shape = move == Move::kKeys ? Dims{1, 4, 32, 64} : Dims{1, 2, 64, 64};
    says(refusal(
             [&](F&, B& b, C&) {
               return b.options.bias = of(shape), b.grads.bias = of({1, 2, 16, 64}), true;
             },
             move),
         "grads.bias: shape 1x2x16x64 on rank 0; accepted: 1x");
    says(refusal(
             [&](F& f, B&, C&) {
               return f.q = of({2, 32, -4, 12}), false;
             },
             move),
         "q: shape 2x32x-4x12 on rank 0");
    says(refusal(
             [&](F& f, B&, C&) {
               return f.v = {nullptr, FOVEA_FP32, {2, 32, 2, 20}}, false;
             },
             move),
         "v: data is null on rank 0");
    says(refusal(
             [&](F&, B& b, C&) {
               return b.grads.k = {nullptr, FOVEA_FP32, {2, 32, 2, 12}}, true;
             },
             move),
         "grads.k: data is null on rank 0");
    says(refusal(
             [&](F& f, B&, C&) {
               return f.out = {numbers.data(), {2, 32, 4, 20}, {0, 80, 20, 1}}, false;
             },
             move),
         "out: strides 0x80x20x1 with shape 2x32x4x20 lead two elements to one address");
    says(refusal(
             [&](F&, B& b, C&) {
               return b.grads.k = {numbers.data(), {2, 32, 2, 12}, {768, 24, 0, 1}}, true;
             },
             move),
         "grads.k: strides 768x24x0x1");
  }
}

// What each rank says of the same call. A rank that is content would wait for the others.
template <class Change>
std::vector<std::string> refusals(const Rows& rows, const Problem& p, Change change) {
  std::vector<std::string> said;
  for (int rank = 0; rank < rows.ranks(); ++rank) {
    Tensors t = whole_of(p, rows);
    const std::vector<std::int64_t> index = index_of(rows, rank);
    for (Array* array : {&t.q, &t.k, &t.v, &t.out, &t.grad_out}) {
      *array = array->rows(1, index);
    }
    t.lse = t.lse.rows(2, index);
    add_gradients(t);
    fovea::Backward backward = backward_of(p, t);
    Group group(rows.ranks());
    said.emplace_back();
    try {
      if (change(rows.count(rank), backward)) {
        parallel::workspace(backward, rows, group.of(rank));
      } else {
        parallel::workspace(forward_of(p, t), rows, group.of(rank));
      }
    } catch (const fovea::Error& error) {
      said.back() = error.what();
    }
  }
  return said;
}

TEST(ParallelHeader, RanksRefuseTheSame) {
  const auto all_say = [](const std::vector<std::string>& said, const std::string& what) {
    for (const std::string& text : said) {
      EXPECT_EQ(text.substr(0, what.size()), what);
      EXPECT_EQ(text.empty(), what.empty()) << text;
    }
  };
  const auto forward = [](std::int64_t, fovea::Backward&) { return false; };
  Problem dropout;
  dropout.options.dropout_p = 0.5;
  all_say(refusals(Rows::zigzag(64, 2, 16), dropout, forward), "");
  all_say(
      refusals(Rows::zigzag(32, 2, 8), dropout, forward),
      "invalid argument: rows: a piece of rank 0 begins at row 24; accepted with dropout and Move::kKeys: multiples");
  all_say(refusals(Rows::contiguous(16, 2, 8), dropout, forward),
          "invalid argument: rows: a piece of rank 1 begins at row 8; ");

  // One of two ranks has no rows.
  Problem softcap;
  softcap.options.softcap = -1;
  EXPECT_EQ(Rows::contiguous(16, 2, 16).count(0), 0);
  all_say(refusals(Rows::contiguous(16, 2, 16), {}, forward), "");
  all_say(refusals(Rows::contiguous(16, 2, 16), softcap, forward), "invalid argument: softcap: -1");

  std::vector<std::uint16_t> bits(4 * 32 * 32);
  const auto halves = [&](std::int64_t total, bool with_queries) {
    return [&bits, total, with_queries](std::int64_t count, fovea::Backward& call) {
      const fovea::MutableTensor bias(bits.data(), FOVEA_BF16, {1, 4, with_queries ? count : 1, total});
      call.options.bias = bias;
      call.grads.bias = {bits.data(), FOVEA_BF16, {1, 4, with_queries ? count : 1, total}};
      return true;
    };
  };
  all_say(refusals(Rows::contiguous(32, 2, 16), {}, halves(32, true)), "");
  all_say(refusals(Rows::contiguous(32, 2, 16), {}, halves(32, false)),
          "invalid type: grads.bias: 16 bits, without queries; accepted with Move::kKeys: fp32");
  all_say(refusals(Rows::contiguous(17, 2, 16), {}, halves(17, true)),
          "invalid type: grads.bias: 16 bits, and rank 1 has one row; accepted with Move::kKeys: fp32");
  all_say(refusals(Rows::contiguous(17, 2, 16), {}, halves(17, false)),
          "invalid type: grads.bias: 16 bits, and rank 1 has one row; accepted with Move::kKeys: fp32");
}

TEST(ParallelHeader, NoRowsAtAll) {
  Problem p;
  p.options.causal = true;
  p.options.dropout_p = 0.5;
  p.with_bias2 = true;
  for (const Move move : {Move::kKeys, Move::kHeads}) {
    p.batch = {2};
    expect_one_process(p, Rows::zigzag(0, 2), move);
    expect_one_process(p, Rows::contiguous(1, 2), move);
    p.batch = {};
    p.with_bias2 = false;
    expect_one_process(p, Rows::packed({}, 2), move);
    expect_one_process(p, Rows::packed({0, 0}, 2), move);
    expect_one_process(p, Rows::packed({0, 1}, 2), move);
  }
}

TEST(ParallelHeader, AWorkspaceThatDoesNotGrow) {
  const Rows rows = Rows::zigzag(64, 1);
  Problem p;
  Tensors t = whole_of(p, rows);
  Group group(1);
  const parallel::Collectives collectives = group.of(0);
  const fovea::Forward call = forward_of(p, t);
  const std::size_t bytes = parallel::workspace(call, rows, collectives);
  std::vector<unsigned char> memory(bytes + 64, 0xA5);
  fovea::Workspace small(memory.data(), bytes - 1);
  EXPECT_THROW(parallel::run(call, rows, collectives, small), fovea::Error);
  EXPECT_TRUE(std::isnan(t.out.numbers[0]));
  fovea::Workspace enough(memory.data() + 1, bytes);  // any alignment
  parallel::run(call, rows, collectives, enough);
  EXPECT_FALSE(std::isnan(t.out.numbers.back()));
  EXPECT_EQ(memory[0], 0xA5);
  for (std::size_t n = bytes + 1; n < memory.size(); ++n) {
    EXPECT_EQ(memory[n], 0xA5);
  }
}

TEST(ParallelHeader, RowsAreThePlanOfC) {
  const Rows rows = Rows::zigzag(131072, 8);
  EXPECT_EQ(rows.ranks(), 8);
  EXPECT_EQ(rows.balance(), 1.0);
  EXPECT_EQ(rows.pieces(0)[1].start, 122880);
  EXPECT_EQ(rows.most(), 16384);
  EXPECT_NEAR(Rows::contiguous(131072, 8).balance(), 1.875, 1e-3);
  EXPECT_LT(Rows::contiguous(131072, 8).balance(false, {4095, 0}), 1.05);
  EXPECT_THROW(Rows::zigzag(-1, 8), fovea::Error);
  EXPECT_THROW(Rows::zigzag(8, 0), fovea::Error);
  EXPECT_THROW(Rows::zigzag(8, 1, 0), fovea::Error);
}

}  // namespace
