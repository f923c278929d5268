// SPDX-License-Identifier: Apache-2.0
//
// draw() makes a right problem of bounded size, in the order of include/fovea/c.h. spoil() then does one of kWays
// ways of harm, most of which the library must refuse; some leave a problem that is right after all, and that is as
// well: the caller asks the library, and the memory that the problem needs is there or the call is not made.
#include "subject.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "core/element.h"

namespace fovea::fuzz {
namespace {

constexpr std::size_t kSlotBytes = std::size_t{1} << 23;  // gaps between dimensions of 1 count: 13 times the elements
constexpr std::int64_t kMostElements = std::int64_t{1} << 15;
constexpr std::int64_t kMostScores = std::int64_t{1} << 15;
constexpr unsigned char kPoison = 0xFF;  // NaN in every floating type

std::size_t width_of(const fovea_tensor& tensor) { return size_of(static_cast<DType>(tensor.dtype)); }

// Calls use(element offset) for every element, in logical order.
template <class Use>
void for_each_element(const fovea_tensor& tensor, Use use) {
  std::int64_t index[FOVEA_MAX_RANK] = {};
  if (std::any_of(tensor.shape, tensor.shape + tensor.rank, [](std::int64_t n) { return n == 0; })) {
    return;
  }
  for (;;) {
    std::int64_t offset = 0;
    for (int i = 0; i < tensor.rank; ++i) {
      offset += index[i] * tensor.stride[i];
    }
    use(offset);
    int d = tensor.rank - 1;
    while (d >= 0 && ++index[d] == tensor.shape[d]) {
      index[d--] = 0;
    }
    if (d < 0) {
      return;
    }
  }
}

// A matrix unit rounds P and dS to bf16. Where their products nearly cancel, what that leaves is no longer near the
// reference: `fovea check --random` has the bounds for it. So bf16 is compared where FOVEA_CPU_ISA excludes such units.
bool may_round_products() {
  const char* isa = std::getenv("FOVEA_CPU_ISA");
  return isa == nullptr || std::strstr(isa, "bf16") != nullptr || std::strstr(isa, "amx") != nullptr;
}

// How far two backends may be apart, relative to the largest number of the tensor.
double tolerance_of(DType type) {
  switch (type) {
    case DType::kFp64:
      return 1e-10;
    case DType::kFp32:
      return 2e-4;
    case DType::kFp16:
      return 1e-2;
    default:
      return 6e-2;
  }
}

}  // namespace

Subject::Subject() {
  const auto slot = [&](const char* name, const fovea_tensor* fovea_problem::*member, int written_by) {
    slots_.emplace_back(name, member, written_by, kSlotBytes);
  };
  slot("q", &fovea_problem::q, -1);
  slot("k", &fovea_problem::k, -1);
  slot("v", &fovea_problem::v, -1);
  slot("bias", &fovea_problem::bias, -1);
  slot("bias2", &fovea_problem::bias2, -1);
  slot("mask", &fovea_problem::mask, -1);
  slot("alibi_slopes", &fovea_problem::alibi_slopes, -1);
  slot("sink", &fovea_problem::sink, -1);
  slot("cu_seqlens_q", &fovea_problem::cu_seqlens_q, -1);
  slot("cu_seqlens_k", &fovea_problem::cu_seqlens_k, -1);
  slot("seqused_q", &fovea_problem::seqused_q, -1);
  slot("seqused_k", &fovea_problem::seqused_k, -1);
  slot("positions_q", &fovea_problem::positions_q, -1);
  slot("positions_k", &fovea_problem::positions_k, -1);
  slot("dropout_streams", &fovea_problem::dropout_streams, -1);
  slot("out", &fovea_problem::out, FOVEA_FORWARD);
  slot("lse", &fovea_problem::lse, FOVEA_FORWARD);
  slot("grad_out", &fovea_problem::grad_out, -1);
  slot("grad_lse", &fovea_problem::grad_lse, -1);
  slot("grad_q", &fovea_problem::grad_q, FOVEA_BACKWARD);
  slot("grad_k", &fovea_problem::grad_k, FOVEA_BACKWARD);
  slot("grad_v", &fovea_problem::grad_v, FOVEA_BACKWARD);
  slot("grad_bias", &fovea_problem::grad_bias, FOVEA_BACKWARD);
  slot("grad_bias2", &fovea_problem::grad_bias2, FOVEA_BACKWARD);
  slot("grad_sink", &fovea_problem::grad_sink, FOVEA_BACKWARD);
}

Slot& Subject::slot(const char* name) {
  return *std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return std::strcmp(s.name, name) == 0; });
}

bool Subject::is_used(const Slot& slot) const {
  const bool of_backward = std::strncmp(slot.name, "grad_", 5) == 0;
  return problem_.*slot.member != nullptr && (!of_backward || direction_ == Direction::kBackward);
}

// ---- a problem that is right ----

// Strides in any order, with gaps, backwards, and for inputs 0; then a place against one of the two guard pages.
void Subject::lay_out(Random& random, Slot& slot, DType type, const Ints& shape, bool output) {
  fovea_tensor& tensor = slot.tensor;
  tensor = {};
  tensor.size = sizeof(tensor);
  tensor.dtype = static_cast<std::int32_t>(type);
  tensor.rank = static_cast<std::int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), tensor.shape);
  tensor.flags = random.once_in(3) ? 0 : FOVEA_TENSOR_STRIDED;

  std::vector<std::size_t> order(shape.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const bool plain = tensor.flags == 0 || random.once_in(2);
  if (!plain) {
    for (std::size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[random.next() % i]);
    }
  }
  Ints strides(shape.size());
  std::int64_t next = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = next;
    next = next * std::max<std::int64_t>(shape[order[i]], 1) + (plain ? 0 : random.pick({0, 0, 0, 1, 3}));
  }
  if (!plain) {
    for (std::int64_t& stride : strides) {
      stride = random.once_in(8) ? -stride : !output && random.once_in(12) ? 0 : stride;
    }
  }
  place(random, slot, strides);
}

void Subject::place(Random& random, Slot& slot, const Ints& strides) {
  fovea_tensor& tensor = slot.tensor;
  const auto width = static_cast<std::int64_t>(width_of(tensor));
  std::int64_t low = 0;
  std::int64_t high = 0;
  std::int64_t count = 1;
  for (int i = 0; i < tensor.rank; ++i) {
    tensor.stride[i] = strides[static_cast<std::size_t>(i)];
    count *= tensor.shape[i];
    (tensor.stride[i] < 0 ? low : high) += tensor.stride[i] * std::max<std::int64_t>(tensor.shape[i] - 1, 0);
  }
  const std::int64_t bytes = count == 0 ? 0 : (high - low + 1) * width;
  if (bytes > static_cast<std::int64_t>(slot.memory.size())) {
    throw std::length_error(fmt::format("{}: {} bytes where there are {}", slot.name, bytes, slot.memory.size()));
  }
  slot.used_begin = random.once_in(2) ? slot.memory.begin() : slot.memory.end() - bytes;
  slot.used_end = slot.used_begin + bytes;
  tensor.data = count == 0 ? nullptr : slot.used_begin - low * width;
  problem_.*slot.member = &tensor;
}

// Normal numbers in the elements, NaN between them; `special` is the share of -inf.
void Subject::fill(Random& random, Slot& slot, double special) {
  std::fill(slot.used_begin, slot.used_end, kPoison);
  const auto type = static_cast<DType>(slot.tensor.dtype);
  for_each_element(slot.tensor, [&](std::int64_t offset) {
    if (type == DType::kBool) {
      static_cast<unsigned char*>(slot.tensor.data)[offset] = random.once_in(4) ? 0 : random.once_in(9) ? 255 : 1;
    } else {
      const double value = random.uniform() < special ? -std::numeric_limits<double>::infinity() : random.normal();
      store(slot.tensor.data, type, offset, value);
    }
  });
}

void Subject::add(Random& random, const char* name, DType type, const Ints& shape, double special) {
  Slot& s = slot(name);
  lay_out(random, s, type, shape, s.written_by >= 0);
  fill(random, s, special);
}

void Subject::stretch(const char* name, int dim, std::int64_t length) {
  fovea_tensor& tensor = slot(name).tensor;
  tensor.shape[dim] = length;
  tensor.stride[dim] = 0;
  tensor.flags = FOVEA_TENSOR_STRIDED;
}

void Subject::add_plane(Random& random, const char* name, DType type, const Ints& scores) {
  Ints given = scores;
  for (std::int64_t& dim : given) {
    dim = random.once_in(3) ? 1 : dim;
  }
  if (random.once_in(3)) {
    given.erase(given.begin(), given.begin() + random.between(0, static_cast<std::int64_t>(given.size())));
  }
  // What max_seqlen makes huge is one row or column in memory.
  Ints shape = given;
  std::replace_if(
      shape.begin(), shape.end(), [](std::int64_t dim) { return dim > kMostElements; }, 1);
  add(random, name, type, shape, random.once_in(4) ? 0.2 : 0);
  for (std::size_t dim = 0; dim < given.size(); ++dim) {
    if (given[dim] != shape[dim]) {
      stretch(name, static_cast<int>(dim), given[dim]);
    }
  }
}

// next() gives the elements in logical order.
template <class Next>
void Subject::add_integers(Random& random, const char* name, DType type, const Ints& shape, Next next) {
  Slot& s = slot(name);
  lay_out(random, s, type, shape, true);
  for_each_element(s.tensor, [&](std::int64_t offset) {
    const auto value = static_cast<std::int64_t>(next());
    if (type == DType::kInt32) {
      static_cast<std::int32_t*>(s.tensor.data)[offset] = static_cast<std::int32_t>(value);
    } else {
      static_cast<std::int64_t*>(s.tensor.data)[offset] = value;
    }
  });
}

void Subject::add_lengths(Random& random, const char* name, DType type, const Ints& values) {
  std::size_t at = 0;
  add_integers(random, name, type, {static_cast<std::int64_t>(values.size())}, [&] { return values[at++]; });
}

// Near 0, near 2^31 in size, or as large as they may be; with dropout multiples of 16 from 0 on.
void Subject::draw_positions(Random& random, std::int64_t batch) {
  const bool dropout = problem_.dropout_p > 0;
  problem_.flags |= FOVEA_POSITIONS;
  problem_.align = FOVEA_BOTTOM_RIGHT;
  problem_.rng = dropout ? FOVEA_RNG_FOVEA : problem_.rng;
  const std::int64_t large = std::int64_t{1} << (dropout ? 31 : 39);
  const std::int64_t centre = random.pick<std::int64_t>({0, 0, std::int64_t{1} << 31, large - 1000});
  const auto position = [&](std::int64_t around) {
    const std::int64_t near = around + random.between(-40, 40);
    return dropout ? std::max<std::int64_t>(near / 16 * 16, 0) : random.once_in(8) ? -near : near;
  };
  problem_.position_q = position(centre);
  problem_.position_k = position(random.once_in(8) ? 0 : centre);
  for (const char* name : {"positions_q", "positions_k"}) {
    if (random.once_in(2)) {
      add_integers(random, name, DType::kInt64, {batch}, [&] { return position(0); });
    }
  }
}

// What outputs hold before a call differs from one call to the next.
void Subject::accumulate(Random& random, DType type, std::uint64_t bit) {
  if (size_of(type) > 2 && random.once_in(4)) {
    problem_.accumulate |= bit;
    comparable_ = false;
  }
}

Subject::Ints Subject::draw_lengths(Random& random, std::int64_t batch, std::int64_t longest) {
  Ints lengths;
  for (std::int64_t b = 0; b < batch; ++b) {
    lengths.push_back(random.between(0, longest));
  }
  return lengths;
}

bool Subject::comparable() const {
  if (!comparable_ || problem_.alibi_slopes == nullptr) {
    return comparable_;
  }
  constexpr double kExact = 1 << 16;  // slope * distance, in fp32
  bool near = std::abs(static_cast<double>(problem_.position_q) - static_cast<double>(problem_.position_k)) < kExact;
  for (const fovea_tensor* positions : {problem_.positions_q, problem_.positions_k}) {
    if (positions != nullptr) {
      for_each_element(*positions, [&](std::int64_t offset) {
        const auto position = static_cast<double>(static_cast<const std::int64_t*>(positions->data)[offset]);
        near = near && std::abs(position) < kExact;
      });
    }
  }
  return near;
}

void Subject::draw_options(Random& random) {
  problem_.flags = static_cast<std::uint32_t>(random.next() & (FOVEA_CAUSAL | FOVEA_DETERMINISTIC | FOVEA_CLEAR_ROWS));
  problem_.align = static_cast<std::int32_t>(random.between(0, 1));
  problem_.rng = static_cast<std::int32_t>(random.between(0, 1));
  if (random.once_in(3)) {
    problem_.flags |= FOVEA_SCALE;
    problem_.scale = random.uniform() - 0.3;
  }
  if (random.once_in(3)) {
    problem_.flags |= FOVEA_WINDOW;
    problem_.window_left = random.between(-1, 30);
    problem_.window_right = random.between(-1, 30);
  }
  problem_.softcap = random.once_in(3) ? 0.5 + 20 * random.uniform() : 0;
  problem_.dropout_p = random.once_in(3) ? random.pick({0.1, 0.5, random.uniform(), 1.0, 1e-9}) : 0;
  problem_.seed = random.next();
  problem_.offset = random.once_in(2) ? 0 : random.next();
  seed_value_ = random.next();
  problem_.seed_ptr = random.once_in(4) ? &seed_value_ : nullptr;
  problem_.offset_ptr = random.once_in(4) ? &seed_value_ : nullptr;
}

void Subject::draw(Random& random, Direction direction) {
  problem_ = {};
  problem_.size = sizeof(problem_);
  direction_ = direction;
  comparable_ = true;
  draw_options(random);

  const DType type = random.pick({DType::kFp32, DType::kFp32, DType::kFp16, DType::kBf16, DType::kFp64});
  comparable_ = comparable_ && (type != DType::kBf16 || !may_round_products());
  const DType sums = type == DType::kFp64 ? DType::kFp64 : DType::kFp32;
  const bool packed = random.once_in(3);
  const bool two_level = random.once_in(4);
  std::int64_t batch1 = random.pick<std::int64_t>({0, 1, 1, 1, 2, 3});
  std::int64_t batch2 = two_level ? random.between(1, 3) : 1;
  std::int64_t heads_k = random.pick<std::int64_t>({0, 1, 1, 2, 3});
  const std::int64_t group = random.pick<std::int64_t>({0, 1, 1, 1, 2, 4});
  std::int64_t seqlen_q = random.once_in(6) ? random.between(0, 160) : random.between(0, 24);
  std::int64_t seqlen_k = random.once_in(6) ? random.between(0, 160) : random.between(0, 24);
  const std::int64_t head_dim = random.once_in(8) ? random.between(0, 130) : random.pick<std::int64_t>({1, 3, 8, 16});
  const std::int64_t head_dim_v = random.once_in(2) ? head_dim : random.between(0, 40);
  const bool wide = random.once_in(256);  // a head_dim beyond all memory, of one column
  const auto too_large = [&] {
    const std::int64_t heads = batch1 * batch2 * std::max(heads_k * group, heads_k);
    return heads * std::max(seqlen_q, seqlen_k) * std::max({head_dim, head_dim_v, std::int64_t{1}}) > kMostElements ||
           heads * seqlen_q * seqlen_k > kMostScores;
  };
  while (too_large()) {
    std::int64_t& larger = seqlen_q > seqlen_k ? seqlen_q : seqlen_k;
    larger = std::max<std::int64_t>(larger / 2, 1);
    batch1 = std::max<std::int64_t>(batch1 - 1, 1);
    batch2 = std::max<std::int64_t>(batch2 - 1, 1);
    heads_k = std::max<std::int64_t>(heads_k - 1, 1);
  }
  const std::int64_t heads_q = heads_k * group;
  const std::int64_t batch = batch1 * batch2;

  const Ints lengths_q = draw_lengths(random, batch, seqlen_q);
  const Ints lengths_k = draw_lengths(random, batch, seqlen_k);
  Ints prefix{batch1};
  if (two_level) {
    prefix.push_back(batch2);
  }
  std::int64_t rows_q = seqlen_q;
  std::int64_t rows_k = seqlen_k;
  Ints longest_q(static_cast<std::size_t>(batch), seqlen_q);
  Ints longest_k(static_cast<std::size_t>(batch), seqlen_k);
  Ints scores = prefix;
  if (packed) {
    Ints cu_q{0};
    Ints cu_k{0};
    std::partial_sum(lengths_q.begin(), lengths_q.end(), std::back_inserter(cu_q));
    std::partial_sum(lengths_k.begin(), lengths_k.end(), std::back_inserter(cu_k));
    rows_q = cu_q.back() + random.pick<std::int64_t>({0, 0, 2});
    rows_k = cu_k.back() + random.pick<std::int64_t>({0, 0, 2});
    add_lengths(random, "cu_seqlens_q", random.pick({DType::kInt32, DType::kInt64}), cu_q);
    add_lengths(random, "cu_seqlens_k", random.pick({DType::kInt32, DType::kInt64}), cu_k);
    const bool maximum = random.once_in(2);
    if (maximum && !wide && random.once_in(4)) {  // a bound far beyond what there is
      (random.once_in(2) ? seqlen_q : seqlen_k) += std::int64_t{1} << random.between(16, 36);
    }
    problem_.max_seqlen_q = maximum ? seqlen_q : 0;
    problem_.max_seqlen_k = maximum ? seqlen_k : 0;
    problem_.batch_outer = two_level ? batch1 : 0;
    longest_q = lengths_q;
    longest_k = lengths_k;
    if (problem_.max_seqlen_q == 0) {
      seqlen_q = batch > 0 ? *std::max_element(lengths_q.begin(), lengths_q.end()) : 0;
    }
    if (problem_.max_seqlen_k == 0) {
      seqlen_k = batch > 0 ? *std::max_element(lengths_k.begin(), lengths_k.end()) : 0;
    }
    if (two_level && batch1 == 0) {
      scores.assign(1, 0);
      problem_.batch_outer = 0;
    }
    prefix.clear();
  }
  scores.insert(scores.end(), {heads_q, seqlen_q, seqlen_k});
  const auto used = [&](const char* name, const Ints& longest) {
    if (random.once_in(4)) {
      Ints values;
      std::transform(longest.begin(), longest.end(), std::back_inserter(values),
                     [&](std::int64_t length) { return random.between(0, length); });
      add_lengths(random, name, DType::kInt32, values);
    }
  };
  used("seqused_q", longest_q);
  used("seqused_k", longest_k);
  if (random.once_in(4)) {
    draw_positions(random, batch);
  }
  if (random.once_in(6)) {
    Ints shape = two_level ? Ints{batch1, batch2, heads_q} : Ints{batch, heads_q};
    if (packed && two_level && problem_.batch_outer == 0) {
      shape = {batch, heads_q};
    }
    for (std::int64_t& dim : shape) {
      dim = random.once_in(3) ? 1 : dim;
    }
    add_integers(random, "dropout_streams", DType::kInt64, shape, [&] { return random.next(); });
  }

  const auto rows = [&](std::int64_t count, std::int64_t heads, std::int64_t columns) {
    Ints shape = prefix;
    shape.insert(shape.end(), {count, heads, columns});
    return shape;
  };
  Ints statistics = prefix;
  statistics.insert(statistics.end(), {heads_q, rows_q});
  const auto bias_type = [&] {
    return sums == DType::kFp64 && random.once_in(2) ? sums : random.pick({DType::kFp32, DType::kFp16, DType::kBf16});
  };
  add(random, "q", type, rows(rows_q, heads_q, wide ? 1 : head_dim));
  add(random, "k", type, rows(rows_k, heads_k, wide ? 1 : head_dim));
  if (wide) {
    const std::int64_t columns = std::int64_t{1} << random.between(8, 32);
    stretch("q", problem_.q->rank - 1, columns);
    stretch("k", problem_.k->rank - 1, columns);
    comparable_ = false;
  }
  add(random, "v", type, rows(rows_k, heads_k, head_dim_v));
  for (const char* name : {"bias", "bias2"}) {
    if (random.once_in(3)) {
      add_plane(random, name, bias_type(), scores);
    }
  }
  if (random.once_in(4)) {
    add_plane(random, "mask", DType::kBool, scores);
  }
  if (random.once_in(4)) {
    add(random, "alibi_slopes", sums, random.once_in(2) ? Ints{heads_q} : Ints{batch, heads_q});
  }
  if (random.once_in(4)) {
    add(random, "sink", sums, {heads_q});
  }
  // Of 16 bits, results may be fp32.
  const auto result_type = [&](DType of) { return size_of(of) == 2 && random.once_in(4) ? DType::kFp32 : of; };
  const DType out_type = result_type(type);
  add(random, "out", out_type, rows(rows_q, heads_q, head_dim_v));
  if (direction == Direction::kForward) {
    if (random.once_in(2)) {
      add(random, "lse", sums, statistics);
      accumulate(random, out_type, FOVEA_ACCUMULATE_OUT);
    }
    return;
  }
  add(random, "lse", sums, statistics);
  add(random, "grad_out", type, rows(rows_q, heads_q, head_dim_v));
  if (random.once_in(4)) {
    add(random, "grad_lse", sums, statistics);
  }
  bool is_any = false;
  const auto gradient = [&](const char* name, const fovea_tensor* of, bool is_sure = false) {
    const bool is_stretched =
        of != nullptr && std::any_of(of->shape, of->shape + of->rank, [](auto dim) { return dim > kMostElements; });
    if (of != nullptr && !is_stretched && (is_sure || !random.once_in(5))) {
      is_any = true;
      const DType found = name == std::string_view("grad_sink") ? sums : result_type(static_cast<DType>(of->dtype));
      add(random, name, found, Ints(of->shape, of->shape + of->rank));
      constexpr std::string_view kNames[] = {"grad_q", "grad_k", "grad_v", "grad_bias", "grad_bias2", "grad_sink"};
      const auto at = std::find(std::begin(kNames), std::end(kNames), name) - std::begin(kNames);
      accumulate(random, found, std::uint64_t{FOVEA_ACCUMULATE_GRAD_Q} << at);
    }
  };
  if (!wide) {
    gradient("grad_q", problem_.q);
    gradient("grad_k", problem_.k);
  }
  gradient("grad_v", problem_.v);
  gradient("grad_bias", problem_.bias);
  gradient("grad_bias2", problem_.bias2);
  gradient("grad_sink", problem_.sink);
  // A backward of no gradient is refused.
  if (!is_any) {
    gradient("grad_v", problem_.v, true);
  }
  if (!is_any && !wide) {
    gradient("grad_q", problem_.q, true);
  }
}

// ---- harm ----

void Subject::spoil(Random& random) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const auto number = [&] {
    return random.pick({nan, infinity, -infinity, -1.0, 1e-300, 1e300, -1e30, 1e30, 0.0, 2.0, random.normal()});
  };
  const auto integer = [&]() -> std::int64_t {
    const std::int64_t power = std::int64_t{1} << random.between(0, 62);
    return random.pick<std::int64_t>({-1, 0, 1, 2, 5, power, -power, power - 1, power + 1,
                                      std::numeric_limits<std::int64_t>::max(),
                                      std::numeric_limits<std::int64_t>::min(), random.between(-40, 40)});
  };
  std::vector<Slot*> given;
  for (Slot& s : slots_) {
    if (is_used(s)) {
      given.push_back(&s);
    }
  }
  Slot& any = given.empty() ? slots_.front() : *given[random.next() % given.size()];
  Slot& other = slots_[random.next() % slots_.size()];
  fovea_tensor& tensor = any.tensor;
  const auto dim = static_cast<std::size_t>(random.between(0, FOVEA_MAX_RANK - 1));
  const std::int64_t way = random.between(0, 28);
  if (way <= 15) {
    comparable_ = false;  // what lies between the elements is NaN
  }
  switch (way) {
    case 0:
      problem_.*any.member = nullptr;
      break;
    case 1:
      tensor.data = nullptr;
      break;
    case 2:
      tensor.dtype = static_cast<std::int32_t>(random.between(-1, 9));
      break;
    case 3:
      tensor.rank = static_cast<std::int32_t>(random.between(-1, 6));
      break;
    case 4:
      tensor.shape[dim] += random.pick<std::int64_t>({-1, 1});
      break;
    case 5:
      tensor.shape[dim] = integer();
      break;
    case 6:
      tensor.flags = FOVEA_TENSOR_STRIDED;
      tensor.stride[dim] = integer();
      break;
    case 7:
      tensor.flags ^= 1u << random.between(0, 31);
      break;
    case 8:
      tensor.size = static_cast<std::size_t>(integer());
      break;
    case 9:
      tensor.reserved = static_cast<std::uint32_t>(integer());
      break;
    case 10:
      tensor.data = reinterpret_cast<void*>(reinterpret_cast<std::intptr_t>(tensor.data) + random.between(-9, 9));
      break;
    case 11:  // two tensors in one place
      tensor.data = other.tensor.data;
      break;
    case 12:
      std::swap(tensor.stride[dim], tensor.stride[0]);
      break;
    case 13:
      std::swap(tensor.shape[dim], tensor.shape[0]);
      break;
    case 14:  // a struct in which bits have flipped
      reinterpret_cast<unsigned char*>(&tensor)[random.next() % sizeof(tensor)] ^= 1u << random.between(0, 7);
      break;
    case 15:  // an argument of another kind, or one that does not belong here
      problem_.*any.member = &other.tensor;
      break;
    case 16:
    case 17:
    case 18: {
      Slot& lengths =
          slot(random.pick({"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "positions_q", "positions_k"}));
      const std::ptrdiff_t bytes = lengths.used_end - lengths.used_begin;
      const std::ptrdiff_t width = random.pick<std::ptrdiff_t>({4, 8});
      if (problem_.*lengths.member == &lengths.tensor && bytes >= width) {
        const std::int64_t value = random.once_in(2) ? random.between(-2, 30) : integer();
        std::memcpy(lengths.used_begin + width * random.between(0, bytes / width - 1), &value,
                    static_cast<std::size_t>(width));
      }
      break;
    }
    case 19:
      problem_.scale = number();
      problem_.flags |= random.once_in(2) ? FOVEA_SCALE : 0;
      comparable_ = false;
      break;
    case 20:
      problem_.softcap = number();
      comparable_ = false;
      break;
    case 21:
      problem_.dropout_p = number();
      break;
    case 22:
      (random.once_in(2) ? problem_.window_left : problem_.window_right) = integer();
      problem_.flags |= random.once_in(2) ? FOVEA_WINDOW : 0;
      break;
    case 23:
      (random.once_in(2) ? problem_.max_seqlen_q : problem_.max_seqlen_k) = integer();
      break;
    case 24:
      problem_.batch_outer = integer();
      break;
    case 25: {
      std::int32_t fovea_problem::*const fields[] = {&fovea_problem::align, &fovea_problem::rng, &fovea_problem::device,
                                                     &fovea_problem::device_index, &fovea_problem::reserved};
      problem_.*fields[random.next() % std::size(fields)] = static_cast<std::int32_t>(random.between(-2, 3));
      break;
    }
    case 26:
      problem_.flags ^= 1u << random.between(0, 31);
      problem_.accumulate ^= random.once_in(4) ? std::uint64_t{1} << random.between(0, 8) : 0;
      problem_.size += random.once_in(4) ? 8 : 0;
      problem_.backend = random.pick<const char*>({nullptr, "", "cpu", "cuda", "nothing"});
      break;
    case 28:
      (random.once_in(2) ? problem_.position_q : problem_.position_k) = integer();
      problem_.flags |= random.once_in(2) ? FOVEA_POSITIONS : 0;
      break;
    case 27: {  // numbers that are no numbers
      if (any.used_end > any.used_begin && static_cast<DType>(tensor.dtype) <= DType::kFp64) {
        any.used_begin[random.next() % static_cast<std::uint64_t>(any.used_end - any.used_begin)] = 0xFF;
        comparable_ = false;
      }
      break;
    }
  }
}

// ---- what there is to know about a subject ----

Subject::Span Subject::span_of(const Slot& slot) const {
  __extension__ typedef __int128 Wide;  // a spoilt tensor reaches anywhere
  Span span{slot.name, *(problem_.*slot.member), nullptr, nullptr, true};
  fovea_tensor& tensor = span.tensor;
  if (tensor.data == nullptr || tensor.rank < 0 || tensor.rank > FOVEA_MAX_RANK || width_of(tensor) == 0) {
    return span;
  }
  Wide low = 0;
  Wide high = 0;
  Wide next = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    if (tensor.shape[i] <= 0) {
      return span;
    }
    const Wide stride = (tensor.flags & FOVEA_TENSOR_STRIDED) != 0 ? Wide(tensor.stride[i]) : next;
    tensor.stride[i] = static_cast<std::int64_t>(stride);
    (stride < 0 ? low : high) += stride * (tensor.shape[i] - 1);
    next = std::min(next * tensor.shape[i], Wide(1) << 62);
  }
  const auto width = static_cast<Wide>(width_of(tensor));
  const Wide begin = reinterpret_cast<std::intptr_t>(tensor.data) + low * width;
  const Wide end = reinterpret_cast<std::intptr_t>(tensor.data) + (high + 1) * width;
  span.exists = std::any_of(slots_.begin(), slots_.end(), [&](const Slot& home) {
    return begin >= reinterpret_cast<std::intptr_t>(home.memory.begin()) &&
           end <= reinterpret_cast<std::intptr_t>(home.memory.end());
  });
  if (span.exists) {
    span.begin = reinterpret_cast<unsigned char*>(static_cast<std::intptr_t>(begin));
    span.end = reinterpret_cast<unsigned char*>(static_cast<std::intptr_t>(end));
  }
  return span;
}

bool Subject::in_memory(bool lengths_only) const {
  return std::all_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    const bool is_lengths = std::strncmp(slot.name, "cu_", 3) == 0 || std::strncmp(slot.name, "seqused", 7) == 0 ||
                            std::strncmp(slot.name, "positions", 9) == 0;
    return !is_used(slot) || (lengths_only && !is_lengths) || span_of(slot).exists;
  });
}

double Subject::work() const {
  double product = 1;
  for (const fovea_tensor* tensor : {problem_.q, problem_.k}) {
    // Of k without its columns, which are q's.
    const int rank = tensor != nullptr ? std::clamp(tensor->rank, 0, FOVEA_MAX_RANK) : 0;
    for (int i = 0; i < (tensor == problem_.q ? rank : rank - 1); ++i) {
      product *= std::max(1.0, static_cast<double>(tensor->shape[i]));
    }
  }
  return product;
}

double Subject::most_workspace() const {
  double columns = 1;
  for (const fovea_tensor* tensor : {problem_.q, problem_.v}) {
    if (tensor != nullptr && tensor->rank > 0) {
      columns += static_cast<double>(tensor->shape[tensor->rank - 1]);
    }
  }
  return 0x1p28 + 0x1p14 * columns;
}

std::vector<Subject::Span> Subject::output_spans(Direction direction) const {
  std::vector<Span> spans;
  for (const Slot& slot : slots_) {
    if (problem_.*slot.member != nullptr && slot.written_by == static_cast<int>(direction)) {
      spans.push_back(span_of(slot));
    }
  }
  return spans;
}

Subject::Bytes Subject::outputs(Direction direction) const {
  Bytes bytes;
  for (const Span& span : output_spans(direction)) {
    bytes.emplace_back(span.begin, span.end);
  }
  return bytes;
}

void Subject::poison(Direction direction) {
  for (const Span& span : output_spans(direction)) {
    std::fill(span.begin, span.end, kPoison);
  }
}

bool Subject::is_poisoned(Direction direction) const {
  const std::vector<Span> spans = output_spans(direction);
  return std::all_of(spans.begin(), spans.end(), [](const Span& span) {
    return std::all_of(span.begin, span.end, [](unsigned char byte) { return byte == kPoison; });
  });
}

std::string Subject::difference(Direction direction, const Bytes& found, const Bytes& expected) const {
  const std::vector<Span> spans = output_spans(direction);
  for (std::size_t s = 0; s < spans.size(); ++s) {
    const fovea_tensor& tensor = spans[s].tensor;
    if (found[s].empty()) {
      continue;
    }
    const auto type = static_cast<DType>(tensor.dtype);
    const auto width = static_cast<std::ptrdiff_t>(width_of(tensor));
    const std::int64_t base = (static_cast<unsigned char*>(tensor.data) - spans[s].begin) / width;
    double largest = 1;
    for_each_element(tensor, [&](std::int64_t offset) {
      const double value = std::abs(load(expected[s].data(), type, base + offset));
      largest = std::isfinite(value) ? std::max(largest, value) : largest;
    });
    std::string first;
    std::vector<unsigned char> rest = found[s];
    for_each_element(tensor, [&](std::int64_t offset) {
      std::fill_n(rest.begin() + (base + offset) * width, width, kPoison);
      const double x = load(found[s].data(), type, base + offset);
      const double y = load(expected[s].data(), type, base + offset);
      const bool equal = x == y || (std::isnan(x) && std::isnan(y)) || std::abs(x - y) <= tolerance_of(type) * largest;
      if (!equal && first.empty()) {
        first = fmt::format("{}: element at offset {} is {}, the reference has {}", spans[s].name, offset, x, y);
      }
    });
    if (!first.empty()) {
      return first;
    }
    if (std::any_of(rest.begin(), rest.end(), [](unsigned char byte) { return byte != kPoison; })) {
      return fmt::format("{}: written between its elements", spans[s].name);
    }
  }
  return "";
}

}  // namespace fovea::fuzz
