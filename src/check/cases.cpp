// SPDX-License-Identifier: Apache-2.0
//
// The generator of the case table: the features, what excludes what, and how a row becomes a problem line. covering.h
// chooses the rows.
#include "check/cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <random>
#include <utility>

#include "check/covering.h"
#include "core/text_words.h"

namespace fovea::check {
namespace {

constexpr std::pair<Values, std::string_view> kValues[] = {
    {Values::kNormal, "normal"},
    {Values::kLargeScores, "large_scores"},
    {Values::kOneHot, "one_hot"},
    {Values::kDeadRows, "dead_rows"},
    {Values::kMinusInfinity, "minus_infinity"},
    {Values::kHuge, "huge"},
    {Values::kLowest, "lowest"},
    {Values::kDenormal, "denormal"},
    {Values::kNanWhereMasked, "nan_where_masked"},
};

// Behind the covering: masks of so many keys that kernels take them in a way of their own, masks of queries alone over
// a bias of NaN, and biases of keys or queries alone that are NaN where no pair takes part.
constexpr std::pair<std::string_view, Values> kMasks[] = {
    {"b=2 hq=2 hk=1 sq=120 sk=1100 d=64 bf16 causal mask=b,1,1,k", Values::kNormal},
    {"b=1x3 hq=1 sq=40 sk=1030 d=128 fp16 mask=b1,b2,1,1,k sink dlse", Values::kLargeScores},
    {"b=1 hq=2 sq=33 sk=1300 d=256 bf16 mask=b,h,1,k window=300,100 bias=b,h,q,k", Values::kNanWhereMasked},
    {"b=2 hq=2 sq=20 sk=1200 d=192 dv=96 bf16 used_k=1150,30 mask=b,1,1,k det", Values::kOneHot},
    {"b=2 hq=1 d=128 bf16 seqs_q=100,3 seqs_k=700,1090 softcap=2 causal mask=b,1,1,k", Values::kNormal},
    {"b=2 hq=1 sq=33 sk=2000 d=80 dv=48 fp32 layout=bhsd skew=3 alibi=h mask=1,1,1,k", Values::kNormal},
    {"b=2 hq=2 sq=33 sk=1030 d=5 fp64 bias=b,1,1,k mask=b,1,1,k", Values::kMinusInfinity},
    {"b=2 hq=2 sq=100 sk=90 d=64 bf16 bias=b,h,q,k mask=b,1,q,1", Values::kNanWhereMasked},
    {"b=2 hq=2 hk=1 sq=70 sk=130 d=128 fp16 bias=b,h,q,k mask=b,h,q,1", Values::kNanWhereMasked},
    {"b=3 hq=2 sq=40 sk=80 d=64 bf16 bias=b,h,q,k:fp32 bias2=b,1,1,k mask=1,h,q,1 causal", Values::kNanWhereMasked},
    {"b=1 hq=2 sq=50 sk=90 d=64 bf16 causal align=tl bias=b,h,1,k", Values::kNanWhereMasked},
    {"b=2 hq=1 sq=50 sk=190 d=256 fp16 causal align=tl bias=b,1,1,k need=q,k,v", Values::kNanWhereMasked},
    {"b=3 hq=2 hk=1 sq=65 sk=260 d=192 bf16 window=-1,40 align=tl softcap=20 bias=1,h,1,k:fp32",
     Values::kNanWhereMasked},
    {"b=2 hq=2 sq=100 sk=90 d=64 bf16 used_q=50,0 bias=b,h,1,k mask=b,1,q,k", Values::kNanWhereMasked},
    {"b=2 hq=2 sq=70 sk=90 d=32 fp32 bias=b,h,q,1 bias2=b,h,1,k mask=b,h,q,1", Values::kNanWhereMasked},
    {"b=2 hq=1 sq=100 sk=90 d=64 bf16 bias=1,h,q,k bias2=b,1,1,k mask=b,1,q,1", Values::kNanWhereMasked},
    {"b=2 hq=1 sq=100 sk=190 d=256 fp16 bias=b,1,q,1 mask=b,h,1,k", Values::kNanWhereMasked},
    {"b=2 hq=1 sq=100 sk=70 d=32 fp32 used_q=30,100 causal align=tl bias=1,1,q,k bias2=b,1,1,k",
     Values::kNanWhereMasked},
    {"b=2 hq=1 sq=100 sk=70 d=640 dv=16 bf16 used_q=30,100 causal align=tl bias=1,1,q,k:fp32 bias2=b,1,1,k need=bias",
     Values::kNanWhereMasked},
    {"b=3 hq=1 d=40 fp16 seqs_q=70,129,129 seqs_k=129,33,33 window=0,0 align=tl alibi=h bias=1,h,1,k bias2=b,1,q,k",
     Values::kNanWhereMasked},
};

// In the order of features().
enum Id {
  kType,
  kHeadDim,
  kMemory,
  kRows,
  kSize,
  kHeads,
  kUsed,
  kCausal,
  kWindow,
  kAlign,
  kScale,
  kSoftcap,
  kBias,
  kBiasType,
  kBias2,
  kMask,
  kAlibi,
  kSink,
  kDropout,
  kNeed,
  kGradLse,
  kDeterministic,
  kFamily,
  kShifted,
  kStreams,
  kResults
};

static_assert(kResults + 1 - kShifted == kCoveredByPairs);

std::vector<Feature> make_features() {
  std::vector<Feature> all = {
      {"type", {"fp32", "bf16", "fp16", "fp64"}},
      {"head_dim", {"d=64", "d=5", "d=80 dv=48", "d=128", "d=24 dv=200", "d=256"}},
      {"memory", {"", "layout=bhsd", "layout=qkv3", "layout=strided", "skew=1", "layout=bhsd skew=3"}},
      {"rows", {"dense", "two-level", "packed", "packed two-level"}},
      {"size", {"48x48", "129x129", "33x150", "150x33", "1x100", "100x1"}},  // Sq x Sk; of the longest sequence
      {"heads", {"hq=2", "hq=4 hk=2", "hq=3 hk=1", "hq=1"}},
      {"used", {"", "q", "k", "qk"}},
      {"causal", {"", "causal"}},
      {"window", {"", "window=16,0", "window=-1,7", "window=20,-1", "window=5,9", "window=0,0"}},
      {"align", {"", "align=tl"}},
      {"scale", {"", "scale=-0.3"}},
      {"softcap", {"", "softcap=2"}},
      {"bias", {"", "b,h,q,k", "1,h,q,k", "b,1,1,k", "b,h,q,1", "1,1,q,k", "b1,h,q,k"}},
      {"bias_type", {"fp32", "bf16", "fp16", "fp64"}},
      {"bias2", {"", "bias2=1,1,q,k:bf16", "bias2=b,1,1,k:fp32", "bias2=b,h,q,k:fp16"}},
      {"mask", {"", "mask=b,h,q,k", "mask=b,1,1,k", "mask=1,1,q,k"}},
      {"alibi", {"", "alibi=h", "alibi=b,h"}},
      {"sink", {"", "sink"}},
      {"dropout",
       {"", "dropout=0.1 seed=7 offset=11",
        "dropout=0.6 rng=torch_mem_efficient seed=0x123456789abcdef offset=0xfffffffe", "dropout=0.9", "dropout=1e-9"}},
      {"need", {"all", "q", "k,v", "bias", "bias2,sink"}},
      {"grad_lse", {"", "dlse"}},
      {"deterministic", {"", "det"}},
      {"values", {}},
      {"shifted", {"", "pos=64,32", "pos=-7,5", "pos_q"}},  // pos_q: positions of each sequence, of queries and keys
      {"streams", {"", "streams=b,h", "streams=1,h"}},
      {"results", {"", "fp32", "k,v added", "all added"}},  // fp32: of 16-bit inputs; added ones are of fp32, too
  };
  for (const auto& [value, name] : kValues) {
    all[kFamily].values.push_back(name);
  }
  return all;
}

std::string_view chosen(const std::vector<int>& choice, Id id) {
  return choice[id] < 0 ? "?" : features()[id].values[static_cast<std::size_t>(choice[id])];
}

// ---- from a row to a problem ----

// Lengths for packed sequences, the longest of them `longest`; one is empty.
std::vector<std::int64_t> packed_lengths(std::int64_t longest, std::size_t count, std::size_t turn) {
  const std::int64_t pattern[] = {longest, (longest + 1) / 2, 0, std::min<std::int64_t>(longest, 17)};
  std::vector<std::int64_t> lengths;
  for (std::size_t n = 0; n < count; ++n) {
    lengths.push_back(pattern[(n + turn) % std::size(pattern)]);
  }
  lengths[0] = longest;  // the longest is always there
  return lengths;
}

// seqused: all, most, none, about a half of each sequence.
std::vector<std::int64_t> used_lengths(const std::vector<std::int64_t>& lengths, std::size_t turn) {
  std::vector<std::int64_t> used;
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    const std::int64_t length = lengths[n];
    const std::int64_t choices[] = {length - length / 7, length / 2, length, 0};
    used.push_back(choices[(n + turn) % std::size(choices)]);
  }
  return used;
}

// `words`: what stands in a row in place of the chosen values of some features.
std::string line_of(const std::vector<int>& choice, const std::map<Id, std::string>& words = {}) {
  const auto text = [&](Id id) -> std::string_view {
    const auto found = words.find(id);
    return found == words.end() ? chosen(choice, id) : found->second;
  };
  const std::string_view rows = text(kRows);
  const bool packed = rows.starts_with("packed");
  const bool two_level = rows.ends_with("two-level");
  const std::size_t batch = packed ? 4 : two_level ? 3 : 2;
  const std::string_view size = text(kSize);
  const std::size_t cross = size.find('x');
  const std::int64_t sq = std::atoll(std::string(size.substr(0, cross)).c_str());
  const std::int64_t sk = std::atoll(std::string(size.substr(cross + 1)).c_str());

  std::string line = fmt::format("bwd b={} {} {} {}", two_level ? (packed ? "2x2" : "1x3") : std::to_string(batch),
                                 text(kHeads), text(kHeadDim), text(kType));
  std::vector<std::int64_t> lengths_q(batch, sq);
  std::vector<std::int64_t> lengths_k(batch, sk);
  if (packed) {
    const bool one_tensor = text(kMemory) == "layout=qkv3";
    lengths_q = packed_lengths(sq, batch, 0);
    lengths_k = packed_lengths(sk, batch, one_tensor ? 0 : 1);
    const auto sum = [](const std::vector<std::int64_t>& lengths) {
      std::int64_t total = 0;
      for (const std::int64_t length : lengths) {
        total += length;
      }
      return total;
    };
    // Rows past the last sequence, and room in bias and mask beyond the longest.
    line += fmt::format(" seqs_q={} seqs_k={} total_q={} total_k={} max_q={} max_k={}", fmt::join(lengths_q, ","),
                        fmt::join(lengths_k, ","), sum(lengths_q) + 3, sum(lengths_k) + 3, sq + 2, sk + 5);
  } else {
    line += fmt::format(" sq={} sk={}", sq, sk);
  }
  for (const auto& [letter, lengths, turn] : {std::tuple('q', &lengths_q, 0), std::tuple('k', &lengths_k, 1)}) {
    if (text(kUsed).find(letter) != std::string_view::npos) {
      line += fmt::format(" used_{}={}", letter, fmt::join(used_lengths(*lengths, turn), ","));
    }
  }
  for (const Id id : {kMemory, kCausal, kWindow, kAlign, kScale, kSoftcap, kBias2, kMask, kAlibi, kSink, kDropout,
                      kStreams, kGradLse, kDeterministic}) {
    if (!text(id).empty()) {
      line += fmt::format(" {}", text(id));
    }
  }
  if (text(kShifted) == "pos_q") {
    constexpr std::int64_t kQueries[] = {32, 0, 160, 16};
    constexpr std::int64_t kKeys[] = {16, 48, 0, 16};
    line += fmt::format(" pos=48,16 pos_q={} pos_k={}", fmt::join(kQueries, kQueries + batch, ","),
                        fmt::join(kKeys, kKeys + batch, ","));
  } else if (!text(kShifted).empty()) {
    line += fmt::format(" {}", text(kShifted));
  }
  if (!text(kBias).empty()) {
    line += fmt::format(" bias={}:{}", text(kBias), text(kBiasType));
  }
  line += fmt::format(" need={}", text(kNeed));
  return line;
}

// Which results are of fp32 beside inputs of 16 bits, and which are combined with what is there.
void choose_results(Problem& p, std::string_view which) {
  if (which.empty()) {
    return;
  }
  const auto chosen_of = [&](const Results& all) {
    Results some;
    some.k = all.k;
    some.v = all.v;
    return which == "k,v added" ? some : all;
  };
  p.wide = chosen_of(line::can_be_wide(p));
  if (which != "fp32") {
    p.accumulate = chosen_of(line::can_accumulate(p));
  }
}

Case case_of(const std::vector<int>& choice, const std::string& line) {
  Case c;
  c.problem = parse(line);
  choose_results(c.problem, chosen(choice, kResults));
  c.values = kValues[choice[kFamily]].first;
  return c;
}

}  // namespace

std::string lacks(const Problem& p, Values values) {
  const Extents& bias = p.bias.extents;
  const bool by_query = p.bias && bias.query;
  switch (values) {
    case Values::kMinusInfinity:
    case Values::kHuge:
      return p.bias ? "" : "a bias";
    case Values::kLowest:
      return by_query ? "" : "a bias with queries (bias=1,1,q,k)";
    case Values::kDeadRows:
      return by_query || (p.mask && p.mask.extents.query) ? "" : "a mask or a bias with queries (mask=1,1,q,k)";
    case Values::kNanWhereMasked:
      return !p.bias && !p.bias2      ? "a bias"
             : !p.mask && !p.banded() ? "a mask or a band that leaves scores out (causal)"
                                      : "";
    default:
      return "";
  }
}

std::string_view name_of(Values values) {
  return std::find_if(std::begin(kValues), std::end(kValues), [&](const auto& v) { return v.first == values; })->second;
}

Problem forward_of(const Problem& row) {
  Problem forward = row;
  forward.direction = Direction::kForward;
  forward.need = {};
  forward.grad_lse = false;
  forward.lse = true;
  forward.wide = {};
  forward.wide.out = row.wide.out;
  forward.accumulate = {};
  forward.accumulate.out = row.accumulate != Results{} && (size_of(row.type) > 2 || row.wide.out);
  return forward;
}

std::string to_text(const Case& c) { return fmt::format("{} values={}", print(c.problem), name_of(c.values)); }

const std::vector<Feature>& features() {
  static const std::vector<Feature> all = make_features();
  return all;
}

bool legal(const std::vector<int>& choice) {
  const auto is = [&](Id id, std::string_view value) { return chosen(choice, id) == value; };
  const auto open = [&](Id id) { return choice[id] < 0; };
  const auto open_or = [&](Id id, bool condition) { return open(id) || condition; };
  const auto has = [&](Id id, std::string_view part) {
    return chosen(choice, id).find(part) != std::string_view::npos;
  };
  const bool no_bias = is(kBias, "");

  // q, k and v of one tensor have as many rows.
  if (is(kMemory, "layout=qkv3") && !open_or(kSize, is(kSize, "48x48") || is(kSize, "129x129"))) {
    return false;
  }
  // Only a batch of two levels has a bias over one of them.
  if (is(kBias, "b1,h,q,k") && !open_or(kRows, has(kRows, "two-level"))) {
    return false;
  }
  if (!open(kBiasType)) {
    // A bias that is not there has the first type; fp64 goes with fp64 alone.
    if (no_bias && !is(kBiasType, "fp32")) {
      return false;
    }
    if (is(kBiasType, "fp64") && !open_or(kType, is(kType, "fp64"))) {
      return false;
    }
  }
  // Gradients of what is there.
  if (is(kNeed, "bias") && no_bias) {
    return false;
  }
  if (is(kNeed, "bias2,sink") && (is(kBias2, "") || is(kSink, ""))) {
    return false;
  }
  // Positions align queries and keys, and with dropout they are multiples of 16 and of rule fovea.
  if (!open(kShifted) && !is(kShifted, "")) {
    const bool is_unaligned = is(kShifted, "pos=-7,5");
    const bool has_dropout = has(kDropout, "dropout") || has(kStreams, "streams");
    if (is(kAlign, "align=tl") || has(kDropout, "torch") || (is_unaligned && has_dropout)) {
      return false;
    }
  }
  if (has(kStreams, "streams") && is(kDropout, "")) {
    return false;
  }
  // Results that there are; gradients of one tensor have one type.
  if (is(kResults, "fp32") && (!open_or(kType, is(kType, "bf16") || is(kType, "fp16")) || is(kBiasType, "fp64"))) {
    return false;
  }
  if (is(kResults, "k,v added") && !open_or(kNeed, is(kNeed, "all") || is(kNeed, "k,v"))) {
    return false;
  }
  if (!open(kResults) && !is(kResults, "") && is(kMemory, "layout=qkv3")) {
    return false;
  }
  // Families that need a bias or a mask to lie in.
  const bool bias_by_query = open_or(kBias, has(kBias, "q"));
  const bool mask_by_query = open_or(kMask, has(kMask, "q"));
  if ((is(kFamily, "minus_infinity") || is(kFamily, "huge")) && no_bias) {
    return false;
  }
  if (is(kFamily, "lowest") && !bias_by_query) {
    return false;
  }
  if (is(kFamily, "dead_rows") && !bias_by_query && !mask_by_query) {
    return false;
  }
  // NaN needs a bias of an element each, and something that leaves elements out.
  if (is(kFamily, "nan_where_masked")) {
    const bool each = open_or(kBias, is(kBias, "b,h,q,k"));
    const bool left_out = open_or(kMask, !is(kMask, "")) || open_or(kCausal, is(kCausal, "causal"));
    if (!each || !left_out) {
      return false;
    }
  }
  return true;
}

Table table_of_environment() {
  const char* table = std::getenv("FOVEA_CASES");
  return table != nullptr && std::string_view(table) == "reduced" ? Table::kReduced : Table::kFull;
}

const std::vector<Case>& cases(Table table) {
  const auto make = [](Table which) {
    std::vector<Case> all;
    const auto add = [&](const std::vector<int>& choice) {
      Case c = case_of(choice, line_of(choice));
      c.seed = all.size() + 1;
      c.choice = choice;
      all.push_back(std::move(c));
    };
    Covering covering(which);
    std::for_each(covering.rows.begin(), covering.rows.end(), add);
    const auto before = static_cast<std::ptrdiff_t>(covering.rows.size());
    if (which == Table::kFull) {
      for (const auto& [line, values] : kMasks) {
        Case c;
        c.problem = parse(fmt::format("bwd {}", line));
        c.values = values;
        c.seed = all.size() + 1;
        all.push_back(std::move(c));
      }
    }
    covering.cover_pairs();
    std::for_each(covering.rows.begin() + before, covering.rows.end(), add);
    return all;
  };
  static const std::vector<Case> full = make(Table::kFull);
  static const std::vector<Case> reduced = make(Table::kReduced);
  return table == Table::kFull ? full : reduced;
}

Case random_case(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](std::uint64_t count) { return static_cast<std::int64_t>(random() % count); };
  std::vector<int> choice;
  do {
    choice.clear();
    for (const Feature& feature : features()) {  // half of them as the first value has it: mostly not there
      choice.push_back(below(2) == 0 ? 0 : static_cast<int>(below(feature.values.size())));
    }
  } while (!legal(choice));
  constexpr std::int64_t kLongest[] = {4, 40, 140, 300};
  constexpr std::int64_t kMostKeys = 700;  // more than two blocks of a kernel
  constexpr std::int64_t kWidest[] = {20, 136, 136, 300};
  const std::int64_t longest = kLongest[below(std::size(kLongest))];
  const std::int64_t widest = kWidest[below(std::size(kWidest))];
  const auto width = [&] {
    const std::int64_t columns = 1 + below(static_cast<std::uint64_t>(widest));
    return below(2) == 0 ? columns : (columns + 7) / 8 * 8;
  };
  const auto length = [&](std::int64_t most) {
    return below(30) == 0 ? 0 : 1 + below(static_cast<std::uint64_t>(most));
  };
  const std::int64_t sq = length(longest);
  const bool square = below(3) == 0 || chosen(choice, kMemory) == "layout=qkv3";
  const std::int64_t sk = square ? sq : length(below(8) == 0 ? kMostKeys : longest);
  const std::int64_t d = width();
  std::map<Id, std::string> words = {{kSize, fmt::format("{}x{}", sq, sk)}, {kHeadDim, fmt::format("d={}", d)}};
  if (below(2) == 0 && chosen(choice, kMemory) != "layout=qkv3") {
    words[kHeadDim] += fmt::format(" dv={}", width());
  }
  if (!chosen(choice, kWindow).empty()) {
    const auto keys = static_cast<std::uint64_t>(sk) + 2;
    words[kWindow] = fmt::format("window={},{}", below(keys) - 1, below(keys) - 1);
  }
  Case c = case_of(choice, line_of(choice, words));
  c.seed = seed;
  return c;
}

}  // namespace fovea::check
