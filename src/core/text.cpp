// SPDX-License-Identifier: Apache-2.0
//
// The one-line text form of a problem, read: parse(). text_print.cpp writes it.
//
//     bwd b=1x4 hq=32 hk=8 sq=128 sk=256 d=64 dv=128 bf16 causal align=tl bias=1,1,h,q,k:fp32 need=q,k,v det
//
// A line is words separated by blanks: `key` or `key=value`, in any order, each at most once (text_fields.cpp
// lists them). parse() first splits the line into a Fields, then takes the fields one by one (the batch before the
// biases, whose form depends on it).
// parse(print(p)) == p for every p that validate() or parse() can give, as long as a line says no more than
// kMostSequences lengths and no blank stands in the backend's name.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "core/problem.h"
#include "core/text_fields.h"
#include "core/text_words.h"

namespace fovea {
namespace {

using namespace line;  // NOLINT(google-build-using-namespace)

constexpr std::string_view kTypes[] = {"fp32", "fp16", "bf16", "fp64"};

// A line that claims more sequences than this is a slip of the keyboard, not a problem.
constexpr std::int64_t kMostSequences = std::int64_t{1} << 22;

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == text.npos) {
      return parts;
    }
    text.remove_prefix(at + 1);
  }
}

// As validate() accepts them.
std::int64_t parse_position(std::string_view key, std::string_view text) {
  constexpr std::int64_t kMost = (std::int64_t{1} << 40) - 1;
  return parse_number<std::int64_t>(key, text, -kMost, kMost, "integers under 2^40 in size");
}

// "128x3,77"
std::vector<std::int64_t> parse_lengths(std::string_view key, std::string_view text,
                                        std::int64_t (*parse_one)(std::string_view, std::string_view) = parse_count) {
  std::vector<std::int64_t> lengths;
  for (const std::string_view part : split(text, ',')) {
    const std::size_t cross = part.find('x');
    const std::int64_t length = parse_one(key, part.substr(0, cross));
    const std::int64_t times = cross == part.npos ? 1 : parse_count(key, part.substr(cross + 1));
    if (times < 1 || times > kMostSequences - static_cast<std::int64_t>(lengths.size())) {
      refuse(key, part, fmt::format("LENGTHxTIMES, at most {} sequences", kMostSequences));
    }
    lengths.insert(lengths.end(), static_cast<std::size_t>(times), length);
  }
  return lengths;
}

// of_pairs: with a query and a key behind batch and head.
Extents parse_extents(std::string_view key, std::string_view text, bool two_level, bool of_pairs = true) {
  const std::string_view pairs = of_pairs ? ",(q|1),(k|1)" : "";
  const std::string accepted = two_level ? fmt::format("(b1|1),(b2|1),(h|1){0} or (b|b1|b2|1),(h|1){0}", pairs)
                                         : fmt::format("(b|1),(h|1){}", pairs);
  const std::size_t one_level = of_pairs ? 4 : 2;
  std::vector<std::string_view> parts = split(text, ',');
  const auto take = [&](std::string_view letter) {
    const std::string_view part = parts.front();
    if (part != letter && part != "1") {
      refuse(key, text, accepted);
    }
    parts.erase(parts.begin());
    return part == letter;
  };
  Extents extents;
  if (parts.size() == one_level + 1 && two_level) {
    extents.batch1 = take("b1");
    extents.batch2 = take("b2");
  } else if (parts.size() == one_level && two_level && (parts.front() == "b1" || parts.front() == "b2")) {
    extents.batch1 = parts.front() == "b1";
    extents.batch2 = !extents.batch1;
    parts.erase(parts.begin());
  } else if (parts.size() == one_level) {
    extents.batch1 = take("b");
    extents.batch2 = two_level && extents.batch1;
  } else {
    refuse(key, text, accepted);
  }
  extents.head = take("h");
  if (of_pairs) {
    extents.query = take("q");
    extents.key = take("k");
  }
  return extents;
}

DType parse_type(std::string_view key, std::string_view text) {
  for (const DType type : {DType::kFp32, DType::kFp16, DType::kBf16, DType::kFp64}) {
    if (text == name_of(type)) {
      return type;
    }
  }
  refuse(key, text, fmt::format("{}", fmt::join(kTypes, ", ")));
}

template <class T, std::size_t kCount>
T parse_choice(std::string_view key, std::string_view text, const std::pair<T, std::string_view> (&choices)[kCount]) {
  std::string accepted;
  for (const auto& [value, name] : choices) {
    if (text == name) {
      return value;
    }
    accepted += fmt::format("{}{}", accepted.empty() ? "" : " | ", name);
  }
  refuse(key, text, accepted);
}

Results parse_need(std::string_view text, const Problem& problem) {
  const Results possible = every_gradient(problem);
  if (text == "all") {
    return possible;
  }
  Results need;
  for (const std::string_view part : split(text, ',')) {
    const auto found = std::find_if(kNeeds.begin(), kNeeds.end(), [&](auto& n) { return n.second == part; });
    if (found == kNeeds.end()) {
      refuse("need", part, "all, or some of q,k,v,bias,bias2,sink");
    }
    if (!(possible.*(found->first))) {
      refuse("need", part, fmt::format("a gradient of what the problem has; it has no {}", part));
    }
    need.*(found->first) = true;
  }
  return need;
}

Results parse_results(const Fields& fields, std::string_view key, const Results& possible, std::string_view which) {
  Results results;
  if (const auto text = fields.value(key)) {
    for (const std::string_view part : split(*text, ',')) {
      const auto found =
          std::find_if(std::begin(kResults), std::end(kResults), [&](auto& n) { return n.second == part; });
      if (found == std::end(kResults) || !(possible.*(found->first))) {
        refuse(key, part, fmt::format("some of out,q,k,v,bias,bias2,sink: {}", which));
      }
      results.*(found->first) = true;
    }
  }
  return results;
}

// The side of the queries or of the keys in a packed problem.
struct Side {
  std::vector<std::int64_t> lengths;
  std::int64_t total = 0;
  std::int64_t longest = 0;
};

Side parse_side(const Fields& fields, std::string_view seqs_key, std::string_view total_key, std::string_view max_key,
                std::string_view used_key) {
  Side side;
  if (const auto text = fields.value(seqs_key)) {
    side.lengths = parse_lengths(seqs_key, *text);
    const std::optional<std::int64_t> sum = sum_of(side.lengths);
    if (!sum) {
      refuse(seqs_key, *text, "lengths whose sum fits 63 bits");
    }
    side.total = fields.count(total_key, *sum);
    if (side.total < *sum) {
      refuse(total_key, *fields.value(total_key), fmt::format("at least the sum of {}, {}", seqs_key, *sum));
    }
    const std::int64_t longest = longest_of(side.lengths);
    side.longest = fields.count(max_key, longest);
    if (side.longest < longest && !fields.has(used_key)) {
      refuse(max_key, *fields.value(max_key), fmt::format("at least the longest of {}, {}", seqs_key, longest));
    }
    return side;
  }
  if (!fields.has(total_key) || !fields.has(max_key)) {
    missing(seqs_key, fmt::format("{}=LENGTHS, or both {}=N and {}=N", seqs_key, total_key, max_key));
  }
  side.total = fields.count(total_key, 0);
  side.longest = fields.count(max_key, 0);
  return side;
}

void parse_batch(const Fields& fields, Problem& problem) {
  const auto text = fields.value("b");
  if (!text) {
    return;
  }
  const std::size_t cross = text->find('x');
  problem.batch1 = parse_count("b", text->substr(0, cross));
  if (cross != text->npos) {
    problem.two_level = true;
    problem.batch2 = parse_count("b", text->substr(cross + 1));
  }
  std::int64_t product = 0;
  if (__builtin_mul_overflow(problem.batch1, problem.batch2, &product)) {
    refuse("b", *text, "B1xB2 whose product fits 63 bits");
  }
}

void parse_lengths_of_problem(const Fields& fields, Problem& problem) {
  constexpr std::string_view kQ[] = {"seqs_q", "total_q", "max_q"};
  constexpr std::string_view kK[] = {"seqs_k", "total_k", "max_k"};
  const auto given = [&](std::string_view key) { return fields.has(key); };
  const bool packed_q = std::any_of(std::begin(kQ), std::end(kQ), given);
  const bool packed_k = std::any_of(std::begin(kK), std::end(kK), given);
  problem.packed = packed_q || packed_k;
  if (!problem.packed) {
    if (!given("sq") && !given("sk")) {
      missing("sq", "sq=N (and sk=N where it differs), or seqs_q=LENGTHS");
    }
    problem.seqlen_q = given("sq") ? fields.count("sq", 0) : fields.count("sk", 0);
    problem.seqlen_k = fields.count("sk", problem.seqlen_q);
    return;
  }
  for (const std::string_view key : {"sq", "sk"}) {
    if (given(key)) {
      refuse(key, *fields.value(key), "not with sequences of their own lengths: say max_q and max_k");
    }
  }
  if (!packed_q) {
    missing("seqs_q", "seqs_q=LENGTHS, or total_q=N max_q=N, beside those of the keys");
  }
  const Side q = parse_side(fields, "seqs_q", "total_q", "max_q", "used_q");
  const Side k = packed_k ? parse_side(fields, "seqs_k", "total_k", "max_k", "used_k") : q;
  if (!given("b")) {
    if (q.lengths.empty() && k.lengths.empty()) {
      missing("b", "b=N where neither seqs_q nor seqs_k says how many sequences there are");
    }
    problem.batch1 = static_cast<std::int64_t>(q.lengths.empty() ? k.lengths.size() : q.lengths.size());
  }
  for (const auto& [key, lengths] : {std::pair("seqs_q", &q.lengths), std::pair("seqs_k", &k.lengths)}) {
    if (!lengths->empty() && static_cast<std::int64_t>(lengths->size()) != problem.batch()) {
      refuse(key, fmt::format("{} sequences", lengths->size()),
             fmt::format("as many as the batch, {}", problem.batch()));
    }
  }
  problem.lengths_q = q.lengths;
  problem.lengths_k = k.lengths;
  problem.total_q = q.total;
  problem.total_k = k.total;
  problem.seqlen_q = q.longest;
  problem.seqlen_k = k.longest;
}

void parse_used(const Fields& fields, std::string_view key, const Problem& problem,
                const std::vector<std::int64_t>& lengths, std::int64_t longest, bool& has,
                std::vector<std::int64_t>& used) {
  has = fields.has(key);
  const auto text = fields.optional_value(key);
  if (!text) {
    return;
  }
  used = parse_lengths(key, *text);
  if (static_cast<std::int64_t>(used.size()) != problem.batch()) {
    refuse(key, *text, fmt::format("a length for each batch entry, {}", problem.batch()));
  }
  for (std::size_t b = 0; b < used.size(); ++b) {
    const std::int64_t most = lengths.empty() ? longest : std::min(lengths[b], longest);
    if (used[b] > most || used[b] > std::numeric_limits<std::int32_t>::max()) {
      refuse(key, fmt::format("{} for batch entry {}", used[b], b),
             fmt::format("at most its length, {}, and what int32 holds", most));
    }
  }
}

void parse_positions(const Fields& fields, Problem& problem) {
  if (const auto text = fields.value("pos")) {
    const auto parts = split(*text, ',');
    if (parts.size() != 2) {
      refuse("pos", *text, "Q,K, the positions of query 0 and key 0");
    }
    problem.position_q = parse_position("pos", parts[0]);
    problem.position_k = parse_position("pos", parts[1]);
  }
  for (const auto& [key, has, values] : {std::tuple("pos_q", &problem.has_positions_q, &problem.positions_q),
                                         std::tuple("pos_k", &problem.has_positions_k, &problem.positions_k)}) {
    *has = fields.has(key);
    if (const auto text = fields.optional_value(key)) {
      *values = parse_lengths(key, *text, parse_position);
      if (static_cast<std::int64_t>(values->size()) != problem.batch()) {
        refuse(key, *text, fmt::format("a position for each batch entry, {}", problem.batch()));
      }
    }
  }
  problem.positions = fields.has("pos") || problem.has_positions_q || problem.has_positions_k;
}

PlaneTraits parse_plane(const Fields& fields, std::string_view key, const Problem& problem) {
  PlaneTraits plane;
  if (const auto text = fields.value(key)) {
    const std::size_t colon = text->find(':');
    plane.extents = parse_extents(key, text->substr(0, colon), problem.two_level);
    plane.type = colon == text->npos ? problem.type : parse_type(key, text->substr(colon + 1));
  }
  return plane;
}

}  // namespace

Problem parse(std::string_view line) {
  const Fields fields(line);
  Problem p;
  p.direction = one_of(fields, {"fwd", "bwd"}, "fwd") == "bwd" ? Direction::kBackward : Direction::kForward;

  parse_batch(fields, p);
  p.heads_q = fields.count("hq", 1);
  p.heads_k = fields.count("hk", p.heads_q);
  if (p.heads_q > 0 && (p.heads_k == 0 || p.heads_q % p.heads_k != 0)) {
    refuse("hk", fmt::format("{}", p.heads_k), fmt::format("a divisor of hq={}", p.heads_q));
  }
  parse_lengths_of_problem(fields, p);
  if (!fields.has("d")) {
    missing("d", "d=N, the head dimension");
  }
  p.head_dim = fields.count("d", 0);
  p.head_dim_v = fields.count("dv", p.head_dim);
  p.type = parse_type("type", one_of(fields, {"fp32", "fp16", "bf16", "fp64"}, "fp32"));
  if (const auto text = fields.value("layout")) {
    p.layout = parse_choice("layout", *text, kLayouts);
  }
  p.skew = fields.count("skew", 0);
  parse_used(fields, "used_q", p, p.lengths_q, p.seqlen_q, p.has_used_q, p.used_q);
  parse_used(fields, "used_k", p, p.lengths_k, p.seqlen_k, p.has_used_k, p.used_k);

  p.causal = fields.has("causal");
  const auto causal = fields.optional_value("causal");
  const auto align = fields.value("align");
  if (causal) {
    p.top_left = parse_choice("causal", *causal, kAlignments);
  }
  if (align) {
    p.top_left = parse_choice("align", *align, kAlignments);
    if (causal && *causal != *align) {
      refuse("align", *align, fmt::format("what causal={} says, or one of the two", *causal));
    }
  }
  if (const auto text = fields.value("window")) {
    const auto parts = split(*text, ',');
    if (parts.size() != 2) {
      refuse("window", *text, "LEFT,RIGHT, each -1 (unbounded) or more");
    }
    const auto side = [](std::string_view part) {
      return parse_number<std::int64_t>("window", part, -1, std::numeric_limits<std::int64_t>::max(),
                                        "LEFT,RIGHT, each -1 (unbounded) or more");
    };
    p.window_left = side(parts[0]);
    p.window_right = side(parts[1]);
  }
  parse_positions(fields, p);

  constexpr double kMost = std::numeric_limits<double>::max();
  if (const auto text = fields.value("scale")) {
    p.scale = parse_number<double>("scale", *text, -kMost, kMost, "a finite number");
  }
  if (const auto text = fields.value("softcap")) {
    p.softcap = parse_number<double>("softcap", *text, 0.0, kMost, "a finite number, 0 (none) or more");
  }
  if (const auto text = fields.value("alibi")) {
    p.alibi = parse_choice("alibi", *text, kAlibis);
  }
  p.sink = fields.flag("sink");
  p.bias = parse_plane(fields, "bias", p);
  p.bias2 = parse_plane(fields, "bias2", p);
  if (const auto text = fields.value("mask")) {
    p.mask = {DType::kBool, parse_extents("mask", *text, p.two_level)};
  }
  if (const auto text = fields.value("dropout")) {
    p.dropout = parse_number<double>("dropout", *text, 0.0, 1.0, "a probability, 0 <= p <= 1");
  }
  if (const auto text = fields.value("rng")) {
    p.rng = parse_choice("rng", *text, kRngs);
  }
  for (const auto& [key, number] : {std::pair("seed", &p.seed), std::pair("offset", &p.offset)}) {
    if (const auto text = fields.value(key)) {
      *number = parse_number<std::uint64_t>(key, *text, 0, std::numeric_limits<std::uint64_t>::max(),
                                            "an integer of 64 bits, decimal or 0x...");
    }
  }
  if (const auto text = fields.value("streams")) {
    p.streams = {DType::kInt64, parse_extents("streams", *text, p.two_level, /*of_pairs=*/false)};
  }

  const bool backward = p.direction == Direction::kBackward;
  if (backward) {
    p.need = parse_need(fields.value("need").value_or("all"), p);
  } else if (const auto text = fields.value("need")) {
    refuse("need", *text, "only with bwd");
  }
  p.deterministic = fields.flag("det");
  p.clear_rows = fields.flag("clear");
  p.lse = fields.flag("lse");
  if (p.lse && backward) {
    refuse("lse", "bwd lse", "only with fwd; bwd always reads it, and dlse gives its gradient");
  }
  p.grad_lse = fields.flag("dlse");
  if (p.grad_lse && !backward) {
    refuse("dlse", "fwd dlse", "only with bwd");
  }
  p.wide = parse_results(fields, "wide", can_be_wide(p), "those that this line has, where their inputs have 16 bits");
  p.accumulate = parse_results(fields, "add", can_accumulate(p),
                               "results of this line that do not have 16 bits; out with fwd and lse");
  if (const auto text = fields.value("device")) {
    p.device = parse_choice("device", *text, kDevices);
  }
  if (const auto text = fields.value("backend")) {
    p.backend = *text;
  }
  return p;
}

}  // namespace fovea
