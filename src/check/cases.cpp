// SPDX-License-Identifier: Apache-2.0
//
// The generator of the case table: the features, what excludes what, the greedy covering, and how a row becomes a
// problem line.
#include "check/cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <utility>

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

// Behind the covering: masks of so many keys that kernels take them in a way of their own.
constexpr std::pair<std::string_view, Values> kLongMasks[] = {
    {"b=2 hq=2 hk=1 sq=120 sk=1100 d=64 bf16 causal mask=b,1,1,k", Values::kNormal},
    {"b=1x3 hq=1 sq=40 sk=1030 d=128 fp16 mask=b1,b2,1,1,k sink dlse", Values::kLargeScores},
    {"b=1 hq=2 sq=33 sk=1300 d=256 bf16 mask=b,h,1,k window=300,100 bias=b,h,q,k", Values::kNanWhereMasked},
    {"b=2 hq=2 sq=20 sk=1200 d=192 dv=96 bf16 used_k=1150,30 mask=b,1,1,k det", Values::kOneHot},
    {"b=2 hq=1 d=128 bf16 seqs_q=100,3 seqs_k=700,1090 softcap=2 causal mask=b,1,1,k", Values::kNormal},
    {"b=2 hq=1 sq=33 sk=2000 d=80 dv=48 fp32 layout=bhsd skew=3 alibi=h mask=1,1,1,k", Values::kNormal},
    {"b=2 hq=2 sq=33 sk=1030 d=5 fp64 bias=b,1,1,k mask=b,1,1,k", Values::kMinusInfinity},
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
  kFamily
};

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
  };
  for (const auto& [value, name] : kValues) {
    all.back().values.push_back(name);
  }
  return all;
}

std::string_view chosen(const std::vector<int>& choice, Id id) {
  return choice[id] < 0 ? "?" : features()[id].values[static_cast<std::size_t>(choice[id])];
}

// ---- the covering ----

// A set of (value, value, value), each a value of another feature, numbered through all features.
class Triples {
 public:
  Triples() {
    int count = 0;
    for (const Feature& feature : features()) {
      first_.push_back(count);
      count += static_cast<int>(feature.values.size());
    }
    count_ = count;
    bits_.resize(static_cast<std::size_t>(count) * count * count);
  }
  std::vector<bool>::reference at(int feature1, int value1, int feature2, int value2, int feature3, int value3) {
    const int a = first_[feature1] + value1;
    const int b = first_[feature2] + value2;
    const int c = first_[feature3] + value3;
    return bits_[(static_cast<std::size_t>(a) * count_ + b) * count_ + c];
  }

 private:
  std::vector<int> first_;
  int count_ = 0;
  std::vector<bool> bits_;
};

// Calls f(s, a, b) for every structural feature s and pair a < b of others; all three differ. Pairs alone, where
// the table is reduced, are the triples whose structural feature is not looked at: s == a.
template <class F>
void for_each_goal(Table table, F&& f) {
  const int count = static_cast<int>(features().size());
  for (int a = 0; a < count; ++a) {
    for (int b = a + 1; b < count; ++b) {
      if (table == Table::kReduced) {
        f(a, a, b);
        continue;
      }
      for (int s = 0; s < kStructural; ++s) {
        if (s != a && s != b) {
          f(s, a, b);
        }
      }
    }
  }
}

class Covering {
 public:
  explicit Covering(Table table) : table_(table) {
    if (table == Table::kFull) {
      cross_structural(std::vector<int>(features().size(), -1), 0);
    }
    for_each_goal(table_, [&](int s, int a, int b) {
      for_each_value(s, a, b, [&](int vs, int va, int vb) {
        std::vector<int> choice(features().size(), -1);
        choice[s] = vs;
        choice[a] = va;
        choice[b] = vb;
        if (legal(choice) && !covered_.at(s, vs, a, va, b, vb)) {
          complete(choice);
        }
      });
    });
  }

  std::vector<std::vector<int>> rows;

 private:
  template <class F>
  void for_each_value(int s, int a, int b, F&& f) const {
    const auto count = [](int feature) { return static_cast<int>(features()[feature].values.size()); };
    for (int va = 0; va < count(a); ++va) {
      for (int vb = 0; vb < count(b); ++vb) {
        for (int vs = s == a ? va : 0; vs < (s == a ? va + 1 : count(s)); ++vs) {
          f(vs, va, vb);
        }
      }
    }
  }

  void cross_structural(std::vector<int> choice, int feature) {
    if (feature == kStructural) {
      complete(std::move(choice));
      return;
    }
    for (int value = 0; value < static_cast<int>(features()[feature].values.size()); ++value) {
      choice[feature] = value;
      if (legal(choice)) {
        cross_structural(choice, feature + 1);
      }
    }
  }

  // Takes, feature by feature, the legal value that adds most goals; ties go round, so that none is favoured.
  void complete(std::vector<int> choice) {
    const int count = static_cast<int>(features().size());
    // Features that others depend on are chosen late in the list, so start at a place that moves from row to row.
    for (int step = 0; step < count; ++step) {
      const int feature = (step + static_cast<int>(rows.size())) % count;
      if (choice[feature] >= 0) {
        continue;
      }
      const int values = static_cast<int>(features()[feature].values.size());
      int best = -1;
      int best_gain = -1;
      for (int n = 0; n < values; ++n) {
        std::vector<int> with = choice;
        with[feature] = (n + static_cast<int>(rows.size())) % values;
        if (legal(with)) {
          const int gained = gain(with, feature);
          if (gained > best_gain) {
            best = with[feature];
            best_gain = gained;
          }
        }
      }
      choice[feature] = best;
    }
    for_each_goal(table_, [&](int s, int a, int b) { covered_.at(s, choice[s], a, choice[a], b, choice[b]) = true; });
    rows.push_back(std::move(choice));
  }

  int gain(const std::vector<int>& choice, int feature) {
    int gained = 0;
    const int count = static_cast<int>(features().size());
    const auto look = [&](int s, int a, int b) {
      gained +=
          !covered_.at(s, choice[s], std::min(a, b), choice[std::min(a, b)], std::max(a, b), choice[std::max(a, b)]);
    };
    for (int other = 0; other < count; ++other) {
      if (other == feature || choice[other] < 0) {
        continue;
      }
      if (table_ == Table::kReduced) {
        look(std::min(feature, other), feature, other);
        continue;
      }
      for (int s = 0; s < kStructural; ++s) {
        if (s != feature && s != other && choice[s] >= 0) {
          look(s, feature, other);
        }
      }
      if (feature < kStructural) {
        for (int third = other + 1; third < count; ++third) {
          if (third != feature && choice[third] >= 0) {
            look(feature, other, third);
          }
        }
      }
    }
    return gained;
  }

  Table table_;
  Triples covered_;
};

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

std::string line_of(const std::vector<int>& choice) {
  const auto text = [&](Id id) { return chosen(choice, id); };
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
                      kGradLse, kDeterministic}) {
    if (!text(id).empty()) {
      line += fmt::format(" {}", text(id));
    }
  }
  if (!text(kBias).empty()) {
    line += fmt::format(" bias={}:{}", text(kBias), text(kBiasType));
  }
  line += fmt::format(" need={}", text(kNeed));
  return line;
}

}  // namespace

std::string_view name_of(Values values) {
  return std::find_if(std::begin(kValues), std::end(kValues), [&](const auto& v) { return v.first == values; })->second;
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
    for (std::vector<int>& choice : Covering(which).rows) {
      Case c;
      c.problem = parse(line_of(choice));
      c.values = kValues[choice[kFamily]].first;
      c.seed = all.size() + 1;
      c.choice = std::move(choice);
      all.push_back(std::move(c));
    }
    if (which == Table::kFull) {
      for (const auto& [line, values] : kLongMasks) {
        Case c;
        c.problem = parse(fmt::format("bwd {}", line));
        c.values = values;
        c.seed = all.size() + 1;
        all.push_back(std::move(c));
      }
    }
    return all;
  };
  static const std::vector<Case> full = make(Table::kFull);
  static const std::vector<Case> reduced = make(Table::kReduced);
  return table == Table::kFull ? full : reduced;
}

}  // namespace fovea::check
