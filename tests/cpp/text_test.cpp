// SPDX-License-Identifier: Apache-2.0
//
// The one-line text form: parse(print(p)) == p over random problems, every key in and out, every refusal by name,
// and lines that are broken at random.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "core/problem.h"
#include "core/text.h"

namespace fovea {
namespace {

class RandomProblems {
 public:
  explicit RandomProblems(std::uint64_t seed) : engine_(seed) {}

  // Any problem that validate() or parse() could give.
  Problem next() {
    Problem p;
    p.direction = coin() ? Direction::kForward : Direction::kBackward;
    p.two_level = coin();
    p.batch1 = count(4);
    p.batch2 = p.two_level ? count(4) : 1;
    p.heads_k = count(3);
    p.heads_q = p.heads_k * count(4);
    p.head_dim = count(256);
    p.head_dim_v = coin() ? p.head_dim : count(256);
    p.type = pick({DType::kFp32, DType::kFp16, DType::kBf16, DType::kFp64});
    p.layout = pick({Layout::kBshd, Layout::kBhsd, Layout::kQkv3, Layout::kStrided});
    p.skew = coin() ? 0 : count(8);
    p.packed = coin();
    if (p.packed) {
      side(p, p.lengths_q, p.total_q, p.seqlen_q);
      side(p, p.lengths_k, p.total_k, p.seqlen_k);
    } else {
      p.seqlen_q = count(5000);
      p.seqlen_k = count(5000);
    }
    used(p, p.lengths_q, p.seqlen_q, p.has_used_q, p.used_q);
    used(p, p.lengths_k, p.seqlen_k, p.has_used_k, p.used_k);
    if (coin()) {
      p.scale = any_double();
    }
    p.softcap = coin() ? 0 : std::abs(any_double());
    p.causal = coin();
    p.top_left = coin();
    p.window_left = count(100) - 1;
    p.window_right = count(100) - 1;
    p.bias = plane(p);
    p.bias2 = plane(p);
    p.mask = plane(p);
    p.mask.type = p.mask ? DType::kBool : DType::kNone;
    p.alibi = pick({Alibi::kNone, Alibi::kPerHead, Alibi::kPerBatchAndHead});
    p.sink = coin();
    p.dropout = coin() ? 0 : std::uniform_real_distribution<double>(0, 1)(engine_);
    p.rng = pick({math::Rng::kFovea, math::Rng::kTorchMemEfficient});
    p.seed = coin() ? 0 : engine_();
    p.offset = coin() ? 0 : engine_();
    p.deterministic = coin();
    p.clear_rows = coin();
    if (p.direction == Direction::kForward) {
      p.lse = coin();
    } else {
      p.grad_lse = coin();
      p.need = {false, coin(), coin(), coin(), p.bias && coin(), p.bias2 && coin(), p.sink && coin()};
      p.need.q = p.need.q || p.need == Results{};  // one at least
    }
    p.device = pick({FOVEA_CPU, FOVEA_CUDA});
    p.backend = pick<std::string>({"", "", "reference", "cpu"});
    return p;
  }

  // The line with a character removed, doubled, replaced or exchanged for another's.
  std::string broken(std::string line) {
    constexpr std::string_view kCharacters = "=,x:-+. 019bhkqdetn\0\t\xff";
    for (int i = 0; i < 1 + static_cast<int>(engine_() % 3) && !line.empty(); ++i) {
      const std::size_t at = engine_() % line.size();
      switch (engine_() % 4) {
        case 0:
          line.erase(at, 1);
          break;
        case 1:
          line.insert(at, 1, line[at]);
          break;
        case 2:
          line[at] = kCharacters[engine_() % kCharacters.size()];
          break;
        default:
          std::swap(line[at], line[engine_() % line.size()]);
      }
    }
    return line;
  }

 private:
  bool coin() { return (engine_() & 1) != 0; }
  std::int64_t count(std::int64_t end) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(end));
  }

  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[engine_() % values.size()];
  }

  double any_double() {
    for (;;) {
      const std::uint64_t bits = engine_();
      double value = 0;
      std::memcpy(&value, &bits, sizeof(value));
      if (std::isfinite(value)) {
        return value;
      }
    }
  }

  void side(const Problem& p, std::vector<std::int64_t>& lengths, std::int64_t& total, std::int64_t& longest) {
    const bool readable = coin();
    for (std::int64_t b = 0; b < p.batch(); ++b) {
      const std::int64_t length = coin() && !lengths.empty() ? lengths.back() : count(300);
      total += length;
      longest = std::max(longest, length);
      lengths.push_back(length);
    }
    if (!readable) {
      lengths.clear();
    }
    total += coin() ? 0 : count(100);
    longest += coin() ? 0 : count(100);
  }

  void used(const Problem& p, const std::vector<std::int64_t>& lengths, std::int64_t longest, bool& has,
            std::vector<std::int64_t>& values) {
    has = coin();
    if (has && coin()) {
      for (std::int64_t b = 0; b < p.batch(); ++b) {
        values.push_back(count(1 + (lengths.empty() ? longest : lengths[static_cast<std::size_t>(b)])));
      }
    }
  }

  PlaneTraits plane(const Problem& p) {
    PlaneTraits traits;
    if (coin()) {
      traits.type = pick({DType::kFp32, DType::kFp16, DType::kBf16, DType::kFp64});
      traits.extents = {coin(), p.two_level && coin(), coin(), coin(), coin()};
    }
    return traits;
  }

  std::mt19937_64 engine_;
};

TEST(Text, EveryProblemComesBack) {
  RandomProblems problems(1);
  for (int i = 0; i < 150'000; ++i) {
    const Problem problem = problems.next();
    const std::string line = print(problem);
    ASSERT_EQ(parse(line), problem) << line;
  }
}

TEST(Text, BrokenLinesAreRefusedOrMeanSomething) {
  RandomProblems problems(2);
  int refused = 0;
  int accepted = 0;
  for (int i = 0; i < 100'000; ++i) {
    const std::string line = problems.broken(print(problems.next()));
    try {
      const Problem problem = parse(line);
      ASSERT_EQ(parse(print(problem)), problem) << line;
      ++accepted;
    } catch (const Error& error) {
      ASSERT_EQ(error.status(), FOVEA_INVALID_ARGUMENT) << line;
      ASSERT_EQ(std::string(error.what()).rfind("problem line: ", 0), 0u) << error.what();
      ++refused;
    }
  }
  EXPECT_GT(refused, 10'000);
  EXPECT_GT(accepted, 5'000);
}

TEST(Text, TheSpecificationsLine) {
  const std::string line =
      "bwd b=1x4 hq=32 hk=8 d=64 dv=128 bf16 layout=qkv3 seqs_q=128x3,77 seqs_k=256x3,80 causal align=tl "
      "window=512,0 softcap=30 alibi=h sink bias=1,1,h,q,k:fp32 bias2=b1,b2,1,1,k:bf16 mask=b1,1,1,k dropout=0.1 "
      "rng=fovea need=q,k,v,bias det dlse";
  const Problem p = parse(line);
  EXPECT_EQ(p.direction, Direction::kBackward);
  EXPECT_EQ(p.batch1, 1);
  EXPECT_EQ(p.batch2, 4);
  EXPECT_TRUE(p.two_level);
  EXPECT_EQ(p.heads_q, 32);
  EXPECT_EQ(p.heads_k, 8);
  EXPECT_EQ(p.head_dim, 64);
  EXPECT_EQ(p.head_dim_v, 128);
  EXPECT_EQ(p.type, DType::kBf16);
  EXPECT_EQ(p.layout, Layout::kQkv3);
  EXPECT_EQ(p.lengths_q, (std::vector<std::int64_t>{128, 128, 128, 77}));
  EXPECT_EQ(p.lengths_k, (std::vector<std::int64_t>{256, 256, 256, 80}));
  EXPECT_EQ(p.total_q, 461);
  EXPECT_EQ(p.seqlen_k, 256);
  EXPECT_TRUE(p.causal);
  EXPECT_TRUE(p.top_left);
  EXPECT_EQ(p.window_left, 512);
  EXPECT_EQ(p.window_right, 0);
  EXPECT_EQ(p.softcap, 30);
  EXPECT_EQ(p.alibi, Alibi::kPerHead);
  EXPECT_TRUE(p.sink);
  EXPECT_EQ(p.bias, (PlaneTraits{DType::kFp32, {false, false, true, true, true}}));
  EXPECT_EQ(p.bias2, (PlaneTraits{DType::kBf16, {true, true, false, false, true}}));
  EXPECT_EQ(p.mask, (PlaneTraits{DType::kBool, {true, false, false, false, true}}));
  EXPECT_EQ(p.dropout, 0.1);
  EXPECT_EQ(p.need, (Results{false, true, true, true, true, false, false}));
  EXPECT_TRUE(p.deterministic);
  EXPECT_TRUE(p.grad_lse);
  EXPECT_EQ(print(p),
            "bwd b=1x4 hq=32 hk=8 d=64 dv=128 bf16 layout=qkv3 seqs_q=128x3,77 seqs_k=256x3,80 causal align=tl "
            "window=512,0 softcap=30 alibi=h sink bias=1,1,h,q,k:fp32 bias2=b1,b2,1,1,k mask=b1,1,1,1,k dropout=0.1 "
            "need=q,k,v,bias det dlse");
}

TEST(Text, TheBackwardOfAForward) {
  const std::string problem = "b=2 hq=4 sq=9 sk=8 d=16 bf16 bias=1,h,q,k sink align=tl";
  const std::string backward = print(parse("bwd wide=out " + problem));
  EXPECT_EQ(print(backward_of(parse("fwd lse wide=out add=out " + problem))), backward);
  EXPECT_EQ(print(backward_of(parse("fwd wide=out " + problem))), backward);
  const std::string some = print(parse("bwd need=q " + problem));
  EXPECT_EQ(print(backward_of(parse(some))), some);
  const Problem all = backward_of(parse("fwd b=1 sq=2 d=4 bias=1,1,q,k bias2=1,1,1,k"));
  EXPECT_EQ(all.need, (Results{false, true, true, true, true, true, false}));
}

TEST(Text, PrintsOnlyWhatIsNotDefault) {
  const std::pair<const char*, const char*> kLines[] = {
      {"sq=3 d=4", "fwd b=1 hq=1 sq=3 sk=3 d=4 fp32"},
      {"sk=3 d=4", "fwd b=1 hq=1 sq=3 sk=3 d=4 fp32"},
      {"fwd b=2 hq=32 hk=8 sq=4096 sk=4096 d=128 bf16 causal=br softcap=30",
       "fwd b=2 hq=32 hk=8 sq=4096 sk=4096 d=128 bf16 causal softcap=30"},
      {"d=4 causal=tl sq=3", "fwd b=1 hq=1 sq=3 sk=3 d=4 fp32 causal align=tl"},
      {"sq=3 d=4 window=-1,-1 scale=0.5", "fwd b=1 hq=1 sq=3 sk=3 d=4 fp32 scale=0.5"},
      {"bwd sq=3 d=4 need=all", "bwd b=1 hq=1 sq=3 sk=3 d=4 fp32"},
      {"bwd sq=3 d=4 bias=1,1,q,k need=q,k,v", "bwd b=1 hq=1 sq=3 sk=3 d=4 fp32 bias=1,1,q,k need=q,k,v"},
      {"d=4 seqs_q=5,5,6", "fwd b=3 hq=1 d=4 fp32 seqs_q=5x2,6 seqs_k=5x2,6"},
      {"d=4 seqs_q=5,5,6 total_q=20 max_q=7 seqs_k=1x3",
       "fwd b=3 hq=1 d=4 fp32 seqs_q=5x2,6 total_q=20 max_q=7 seqs_k=1x3"},
      {"b=7 d=4 total_q=20 max_q=7 total_k=30 max_k=8", "fwd b=7 hq=1 d=4 fp32 total_q=20 max_q=7 total_k=30 max_k=8"},
      {"sq=3 d=4 b=2 used_k=1,2 used_q", "fwd b=2 hq=1 sq=3 sk=3 d=4 fp32 used_q used_k=1,2"},
      {"sq=3 d=4 bias=b,1,q,k:fp32 mask=1,1,1,k", "fwd b=1 hq=1 sq=3 sk=3 d=4 fp32 bias=b,1,q,k mask=1,1,1,k"},
      {"sq=3 d=4 b=2x3 bias=b,1,q,k bias2=b2,h,1,1:fp16",
       "fwd b=2x3 hq=1 sq=3 sk=3 d=4 fp32 bias=b1,b2,1,q,k bias2=1,b2,h,1,1:fp16"},
      {"sq=3 d=4 seed=0xff offset=10", "fwd b=1 hq=1 sq=3 sk=3 d=4 fp32 seed=255 offset=10"},
      {"sq=3 d=4 rng=torch_mem_efficient alibi=b,h device=cuda backend=cpu lse",
       "fwd b=1 hq=1 sq=3 sk=3 d=4 fp32 alibi=b,h rng=torch_mem_efficient lse device=cuda backend=cpu"},
  };
  for (const auto& [line, canonical] : kLines) {
    EXPECT_EQ(print(parse(line)), canonical) << line;
  }
}

TEST(Text, AWordThatIsMistypedHasAShortAnswer) {
  for (const LineKey& key : line_keys()) {
    // Two letters exchanged, which is no other key.
    std::string word(key.name);
    if (word.size() < 4) {
      continue;
    }
    std::swap(word[1], word[2]);
    if (word == key.name) {
      std::swap(word[2], word[3]);
    }
    try {
      parse("sq=3 d=4 " + word);
      ADD_FAILURE() << "accepted: " << word;
    } catch (const Error& error) {
      const std::string what = error.what();
      EXPECT_NE(what.find("did you mean "), what.npos) << what;
      EXPECT_NE(what.find(key.name), what.npos) << what;
      EXPECT_EQ(what.find(word), what.rfind(word)) << what;  // once
      EXPECT_LT(what.size(), 150u) << what;
    }
  }
}

TEST(Text, EveryRefusalNamesItsKey) {
  const std::tuple<const char*, const char*, const char*> kLines[] = {
      {"sq=3 d=4 cousal", "cousal", "not a word of it; did you mean causal? (fovea explain --help lists them)"},
      {"sq=3 d=4 xyzzy=3", "xyzzy", "not a word of it; accepted: fwd, bwd, b, hq"},
      {"sq=3 d=4 =", "", "not a word of it; accepted: fwd, bwd, b, hq"},
      {"sq=3 d=4 d=4", "d", "each key once"},
      {"fwd bwd sq=3 d=4", "bwd", "one of fwd, bwd"},
      {"sq=3 d=4 fp16 bf16", "bf16", "one of fp32"},
      {"d=4", "sq", "sq: missing; accepted: sq=N (and sk=N where it differs), or seqs_q"},
      {"sq=3", "d", "d: missing; accepted: d=N, the head dimension"},
      {"sq=x d=4", "sq", "integer"},
      {"sq=-1 d=4", "sq", "0 or more"},
      {"sq= d=4", "sq", "integer"},
      {"sq d=4", "sq", "sq: without a value; accepted: sq=N"},
      {"sq=99999999999999999999 d=4", "sq", "integer"},
      {"sq=3 d=4 b=2y3", "b", "integer"},
      {"sq=3 d=4 b=4000000000x4000000000", "b", "63 bits"},
      {"sq=3 d=4 hq=3 hk=2", "hk", "divisor of hq=3"},
      {"sq=3 d=4 hq=3 hk=0", "hk", "divisor of hq=3"},
      {"sq=3 d=4 layout=sbhd", "layout", "bshd | bhsd | qkv3 | strided"},
      {"sq=3 d=4 skew=-1", "skew", "integer"},
      {"sq=3 d=4 seqs_q=1,2", "sq", "max_q"},
      {"d=4 seqs_k=1,2", "seqs_q", "total_q"},
      {"d=4 seqs_q=1,2 seqs_k=1", "seqs_k", "as many as the batch, 2"},
      {"d=4 b=3 seqs_q=1,2", "seqs_q", "as many as the batch, 3"},
      {"d=4 seqs_q=1x0", "seqs_q", "LENGTHxTIMES"},
      {"d=4 seqs_q=1x99999999999", "seqs_q", "LENGTHxTIMES"},
      {"d=4 seqs_q=9000000000000000000x2", "seqs_q", "63 bits"},
      {"d=4 seqs_q=5,5 total_q=9", "total_q", "at least the sum of seqs_q, 10"},
      {"d=4 seqs_q=5,5 max_q=4", "max_q", "at least the longest of seqs_q, 5"},
      {"d=4 total_q=9 max_q=4", "b", "neither seqs_q nor seqs_k"},
      {"d=4 total_q=9", "seqs_q", "total_q=N and max_q=N"},
      {"sq=3 d=4 b=2 used_q=1", "used_q", "each batch entry, 2"},
      {"sq=3 d=4 b=2 used_q=1,4", "used_q", "at most its length, 3"},
      {"sq=9999999999 d=4 used_k=3000000000", "used_k", "what int32 holds"},
      {"sq=3 d=4 causal=yes", "causal", "br | tl"},
      {"sq=3 d=4 causal=br align=tl", "align", "causal=br"},
      {"sq=3 d=4 align=left", "align", "br | tl"},
      {"sq=3 d=4 window=1", "window", "LEFT,RIGHT"},
      {"sq=3 d=4 window=1,-2", "window", "-1 (unbounded) or more"},
      {"sq=3 d=4 scale=inf", "scale", "finite"},
      {"sq=3 d=4 scale=nan", "scale", "finite"},
      {"sq=3 d=4 softcap=-1", "softcap", "0 (none) or more"},
      {"sq=3 d=4 alibi=q", "alibi", "h | b,h"},
      {"sq=3 d=4 sink=1", "sink", "without a value"},
      {"sq=3 d=4 bias=h,q,k", "bias", "(b|1),(h|1),(q|1),(k|1)"},
      {"sq=3 d=4 bias=b1,1,h,q,k", "bias", "(b|1),(h|1),(q|1),(k|1)"},
      {"sq=3 d=4 b=1x2 bias=1,1,q,h,k", "bias", "(b1|1),(b2|1)"},
      {"sq=3 d=4 bias=1,1,q,k:int8", "bias", "fp32, fp16, bf16, fp64"},
      {"sq=3 d=4 mask=1,1,q,k:fp32", "mask", "(b|1),(h|1),(q|1),(k|1)"},
      {"sq=3 d=4 dropout=1.5", "dropout", "0 <= p <= 1"},
      {"sq=3 d=4 rng=mt19937", "rng", "fovea | torch_mem_efficient"},
      {"sq=3 d=4 seed=-1", "seed", "64 bits"},
      {"sq=3 d=4 seed=0x", "seed", "64 bits"},
      {"sq=3 d=4 need=q", "need", "only with bwd"},
      {"bwd sq=3 d=4 need=x", "need", "q,k,v,bias,bias2,sink"},
      {"bwd sq=3 d=4 need=bias", "need", "it has no bias"},
      {"bwd sq=3 d=4 lse", "lse", "only with fwd"},
      {"sq=3 d=4 dlse", "dlse", "only with bwd"},
      {"sq=3 d=4 device=tpu", "device", "cpu | cuda"},
  };
  for (const auto& [line, key, accepted] : kLines) {
    try {
      parse(line);
      ADD_FAILURE() << "accepted: " << line;
    } catch (const Error& error) {
      const std::string what = error.what();
      EXPECT_EQ(what.rfind("problem line: " + std::string(key) + ": ", 0), 0u) << line << " -> " << what;
      EXPECT_NE(what.find(accepted), what.npos) << line << " -> " << what;
    }
  }
}

}  // namespace
}  // namespace fovea
