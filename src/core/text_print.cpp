// SPDX-License-Identifier: Apache-2.0
//
// print(): a problem as its line. What has its default value is not printed.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "core/problem.h"
#include "core/text_words.h"

namespace fovea {
namespace {

using namespace line;  // NOLINT(google-build-using-namespace)

std::string print_lengths(const std::vector<std::int64_t>& lengths) {
  std::string text;
  for (auto at = lengths.begin(); at != lengths.end();) {
    const auto next = std::find_if(at, lengths.end(), [&](std::int64_t length) { return length != *at; });
    text += fmt::format("{}{}", text.empty() ? "" : ",", *at);
    if (next - at > 1) {
      text += fmt::format("x{}", next - at);
    }
    at = next;
  }
  return text;
}

std::string_view name(bool present, std::string_view letter) { return present ? letter : std::string_view("1"); }

// "b"; with a batch of two levels "b1,b2", a 1 wherever it is broadcast.
std::string print_batch(const Extents& extents, bool two_level) {
  return two_level ? fmt::format("{},{}", name(extents.batch1, "b1"), name(extents.batch2, "b2"))
                   : std::string(name(extents.batch1, "b"));
}

// The same with ",h,q,k".
std::string print_extents(const Extents& extents, bool two_level) {
  return fmt::format("{},{},{},{}", print_batch(extents, two_level), name(extents.head, "h"), name(extents.query, "q"),
                     name(extents.key, "k"));
}

template <class T, std::size_t kCount>
std::string_view print_choice(T value, const std::pair<T, std::string_view> (&choices)[kCount]) {
  return std::find_if(std::begin(choices), std::end(choices), [&](const auto& choice) { return choice.first == value; })
      ->second;
}

std::string print_some(const Results& some) {
  std::string text;
  for (const auto& [member, name] : kResults) {
    if (some.*member) {
      text += fmt::format("{}{}", text.empty() ? "" : ",", name);
    }
  }
  return text;
}

}  // namespace

std::string print(const Problem& p) {
  std::string line = p.direction == Direction::kForward ? "fwd" : "bwd";
  const auto word = [&]<class... T>(fmt::format_string<T...> format, T&&... arguments) {
    line += ' ';
    fmt::format_to(std::back_inserter(line), format, std::forward<T>(arguments)...);
  };
  word("b={}", p.batch1);
  if (p.two_level) {
    line += fmt::format("x{}", p.batch2);
  }
  word("hq={}", p.heads_q);
  if (p.heads_k != p.heads_q) {
    word("hk={}", p.heads_k);
  }
  if (!p.packed) {
    word("sq={} sk={}", p.seqlen_q, p.seqlen_k);
  }
  word("d={}", p.head_dim);
  if (p.head_dim_v != p.head_dim) {
    word("dv={}", p.head_dim_v);
  }
  word("{}", name_of(p.type));
  if (p.layout != Layout::kBshd) {
    word("layout={}", print_choice(p.layout, kLayouts));
  }
  if (p.skew != 0) {
    word("skew={}", p.skew);
  }
  if (p.packed) {
    const auto side = [&](std::string_view name, const std::vector<std::int64_t>& lengths, std::int64_t total,
                          std::int64_t longest) {
      if (!lengths.empty()) {
        word("seqs_{}={}", name, print_lengths(lengths));
      }
      if (lengths.empty() || sum_of(lengths) != total) {
        word("total_{}={}", name, total);
      }
      if (lengths.empty() || longest_of(lengths) != longest) {
        word("max_{}={}", name, longest);
      }
    };
    side("q", p.lengths_q, p.total_q, p.seqlen_q);
    side("k", p.lengths_k, p.total_k, p.seqlen_k);
  }
  const auto used = [&](std::string_view key, bool has, const std::vector<std::int64_t>& lengths) {
    if (has) {
      word("{}{}{}", key, lengths.empty() ? "" : "=", print_lengths(lengths));
    }
  };
  used("used_q", p.has_used_q, p.used_q);
  used("used_k", p.has_used_k, p.used_k);
  if (p.causal) {
    word("causal");
  }
  if (p.top_left) {
    word("align=tl");
  }
  if (p.window_left != -1 || p.window_right != -1) {
    word("window={},{}", p.window_left, p.window_right);
  }
  if (p.positions) {
    word("pos={},{}", p.position_q, p.position_k);
  }
  used("pos_q", p.has_positions_q, p.positions_q);
  used("pos_k", p.has_positions_k, p.positions_k);
  if (p.scale) {
    word("scale={}", *p.scale);
  }
  if (p.softcap != 0) {
    word("softcap={}", p.softcap);
  }
  if (p.alibi != Alibi::kNone) {
    word("alibi={}", print_choice(p.alibi, kAlibis));
  }
  if (p.sink) {
    word("sink");
  }
  for (const auto& [key, plane] : {std::pair("bias", &p.bias), std::pair("bias2", &p.bias2)}) {
    if (*plane) {
      word("{}={}", key, print_extents(plane->extents, p.two_level));
      if (plane->type != p.type) {
        line += fmt::format(":{}", name_of(plane->type));
      }
    }
  }
  if (p.mask) {
    word("mask={}", print_extents(p.mask.extents, p.two_level));
  }
  if (p.dropout != 0) {
    word("dropout={}", p.dropout);
  }
  if (p.rng != math::Rng::kFovea) {
    word("rng={}", print_choice(p.rng, kRngs));
  }
  if (p.seed != 0) {
    word("seed={}", p.seed);
  }
  if (p.offset != 0) {
    word("offset={}", p.offset);
  }
  if (p.streams) {
    word("streams={},{}", print_batch(p.streams.extents, p.two_level), p.streams.extents.head ? "h" : "1");
  }
  if (p.direction == Direction::kBackward && p.need != every_gradient(p)) {
    word("need={}", print_some(p.need));
  }
  for (const auto& [key, results] : {std::pair("wide", &p.wide), std::pair("add", &p.accumulate)}) {
    if (*results != Results{}) {
      word("{}={}", key, print_some(*results));
    }
  }
  if (p.deterministic) {
    word("det");
  }
  if (p.clear_rows) {
    word("clear");
  }
  if (p.lse) {
    word("lse");
  }
  if (p.grad_lse) {
    word("dlse");
  }
  if (p.device != FOVEA_CPU) {
    word("device={}", print_choice(p.device, kDevices));
  }
  if (!p.backend.empty()) {
    word("backend={}", p.backend);
  }
  return line;
}

}  // namespace fovea
