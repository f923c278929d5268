// SPDX-License-Identifier: Apache-2.0
//
// fovea rows: which rows of a sequence each rank of a group has, what it sends and receives, and how balanced that is.
// The plan is the library's, fovea_rows_plan(), which fovea.torch.Rows and fovea/parallel.h have, too.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <memory>
#include <numeric>

#include "commands.h"
#include "core/nearest.h"
#include "fault.h"
#include "work.h"

namespace fovea::cli {
namespace {

const std::vector<std::string> kWords = {"s",      "seqs",       "ranks",  "causal", "window",
                                         "zigzag", "contiguous", "packed", "block"};
constexpr std::int64_t kMostSequences = std::int64_t{1} << 22;  // more are a slip of the keyboard

[[noreturn]] void refuse_word(std::string_view word, std::string_view accepted) {
  throw Fault(kBadInput, fmt::format("{}; accepted: {}", word, accepted));
}

// text: a part of what was `given`.
std::int64_t number(const std::string& key, std::string_view text, std::int64_t least, std::string_view given = {}) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < least) {
    refuse_word(fmt::format("{}={}", key, given.empty() ? text : given),
                fmt::format("{}={} or more, an integer", key, least));
  }
  return value;
}

// The parts between separators.
std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts{""};
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

// What a line asks.
struct Asked {
  fovea_rows rows{};
  std::vector<std::int64_t> lengths;

  bool packed = false;  // several sequences

  // "zigzag", "contiguous" or "packed".
  std::string kind() const {
    return rows.kind == FOVEA_ROWS_PACKED ? "packed" : rows.kind == FOVEA_ROWS_ZIGZAG ? "zigzag" : "contiguous";
  }
};

std::map<std::string, std::string> by_key(const std::vector<std::string>& words) {
  std::map<std::string, std::string> found;
  for (const std::string& word : words) {
    const std::size_t equals = word.find('=');
    const std::string key = word.substr(0, equals);
    if (std::find(kWords.begin(), kWords.end(), key) == kWords.end()) {
      throw Fault(kBadInput, fmt::format("'{}' is no word of a line of rows{}", word, hint(key, kWords)));
    }
    const bool is_flag = key == "causal" || key == "zigzag" || key == "contiguous" || key == "packed";
    if (is_flag != (equals == word.npos)) {
      refuse_word(word, is_flag ? key : key + "=, with a value");
    }
    if (!found.emplace(key, is_flag ? "" : word.substr(equals + 1)).second) {
      refuse_word(word, fmt::format("{} once", key));
    }
  }
  return found;
}

std::vector<std::int64_t> lengths_of(const std::string& text) {
  std::vector<std::int64_t> lengths;
  for (const std::string& part : split(text, ',')) {
    const std::size_t cross = part.find('x');
    const std::int64_t length = number("seqs", std::string_view(part).substr(0, cross), 0, part);
    const std::int64_t times =
        cross == part.npos ? 1 : number("seqs", std::string_view(part).substr(cross + 1), 1, part);
    if (times > kMostSequences - static_cast<std::int64_t>(lengths.size())) {
      refuse_word("seqs=" + part, fmt::format("LENGTHxTIMES, at most {} sequences", kMostSequences));
    }
    lengths.insert(lengths.end(), static_cast<std::size_t>(times), length);
  }
  return lengths;
}

Asked parse_rows(const std::vector<std::string>& words) {
  const std::map<std::string, std::string> given = by_key(words);
  const auto has = [&](const char* key) { return given.count(key) != 0; };
  Asked asked;
  fovea_rows& rows = asked.rows;
  rows.size = sizeof(rows);
  if (has("s") == has("seqs")) {
    throw Fault(kBadInput, fmt::format("{} seqs=; accepted: s=LENGTH for one sequence, or seqs=LENGTHS for packed "
                                       "ones, such as 'fovea rows s=131072 causal ranks=8'",
                                       has("s") ? "both s= and" : "neither s= nor"));
  }
  if (!has("ranks")) {
    throw Fault(kBadInput, "no ranks=; accepted: ranks=N, or ranks=KxH where K ranks exchange keys and H heads");
  }
  if (has("zigzag") + has("contiguous") + has("packed") > 1) {
    throw Fault(kBadInput, "zigzag, contiguous, packed: more than one of them; accepted: one at most");
  }
  if (has("packed") && !has("seqs")) {
    refuse_word("packed, with s=", "packed with seqs=, the lengths of the packed sequences");
  }
  if (has("seqs") && has("zigzag")) {
    refuse_word("seqs=, with zigzag", "zigzag for one sequence, s=LENGTH; packed or contiguous for seqs=");
  }
  asked.packed = has("seqs");
  asked.lengths = has("seqs") ? lengths_of(given.at("seqs")) : std::vector{number("s", given.at("s"), 0)};
  rows.sequences = static_cast<std::int64_t>(asked.lengths.size());
  const std::vector<std::string> ranks = split(given.at("ranks"), 'x');
  if (ranks.size() > 2) {
    refuse_word("ranks=" + given.at("ranks"), "ranks=N, or ranks=KxH");
  }
  rows.ranks = number("ranks", ranks.front(), 1, given.at("ranks"));
  rows.head_ranks = ranks.size() == 2 ? number("ranks", ranks.back(), 1, given.at("ranks")) : 1;
  rows.block = has("block") ? number("block", given.at("block"), 1) : 0;
  rows.flags = has("causal") ? FOVEA_CAUSAL : 0;
  if (has("window")) {
    const std::vector<std::string> sides = split(given.at("window"), ',');
    if (sides.size() != 2) {
      refuse_word("window=" + given.at("window"), "window=LEFT,RIGHT, where -1 is unbounded");
    }
    rows.flags |= FOVEA_WINDOW;
    rows.window_left = number("window", sides[0], -1);
    rows.window_right = number("window", sides[1], -1);
  }
  const bool is_triangle = has("causal") && (!has("window") || rows.window_left < 0);
  rows.kind = has("contiguous")              ? FOVEA_ROWS_CONTIGUOUS
              : has("seqs")                  ? FOVEA_ROWS_PACKED
              : has("zigzag") || is_triangle ? FOVEA_ROWS_ZIGZAG
                                             : FOVEA_ROWS_CONTIGUOUS;
  return asked;
}

// "0..8192 122880..131072"; of packed sequences "#3 0..8192", no more than fits a line.
std::string text_of(const std::int64_t* pieces, std::int64_t count, bool packed) {
  constexpr std::int64_t kMost = 4;
  std::string text;
  for (std::int64_t piece = 0; piece < std::min(count, kMost); ++piece) {
    const auto [sequence, start, rows] = std::tuple(pieces[3 * piece], pieces[3 * piece + 1], pieces[3 * piece + 2]);
    text += text.empty() ? "" : " ";
    text += packed ? fmt::format("#{}:", sequence) : "";
    text += fmt::format("{}..{}", start, start + rows);
  }
  return count > kMost ? fmt::format("{} and {} more", text, count - kMost) : text;
}

void print_rows(const std::vector<std::string>& words) {
  Asked asked = parse_rows(words);
  fovea_rows& rows = asked.rows;
  const auto ranks = static_cast<std::size_t>(rows.ranks) * static_cast<std::size_t>(rows.head_ranks);
  rows.lengths = asked.lengths.data();
  std::int64_t needed = 0;
  require(fovea_rows_plan(&rows, &needed));  // refuses what is too large for the memory below
  std::vector<std::int64_t> counts(ranks), pairs(ranks), sends(ranks), receives(ranks), piece_counts(ranks);
  std::vector<std::int64_t> pieces(static_cast<std::size_t>(3 * needed));
  double balance = 0;
  rows.rows = counts.data();
  rows.pairs = pairs.data();
  rows.sends = sends.data();
  rows.receives = receives.data();
  rows.piece_counts = piece_counts.data();
  rows.pieces = pieces.data();
  rows.piece_capacity = needed;
  rows.balance = &balance;
  require(fovea_rows_plan(&rows, &needed));

  const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  const double all_pairs = std::accumulate(pairs.begin(), pairs.end(), 0.0);
  const bool packed = asked.packed;
  fmt::print("{}: {} rows{} over {} ranks{}; pieces begin at multiples of {} rows\n\n", asked.kind(), total,
             packed ? fmt::format(" of {} sequences", rows.sequences) : "", ranks,
             rows.head_ranks > 1 ? fmt::format(" ({} for keys x {} for heads)", rows.ranks, rows.head_ranks) : "",
             rows.block == 0 ? 128 : rows.block);
  fmt::print("{:>5}{:>11}{:>18}{:>11}{:>11}{:>11}  {}\n", "rank", "rows", "pairs", "over mean", "sends", "receives",
             packed ? "pieces: #sequence:first row..end" : "pieces: first row..end");
  const std::int64_t* mine = pieces.data();
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const double part =
        all_pairs == 0 ? 1.0 : static_cast<double>(pairs[rank]) * static_cast<double>(ranks) / all_pairs;
    fmt::print("{:>5}{:>11}{:>18}{:>11.3f}{:>11}{:>11}  {}\n", rank, counts[rank], pairs[rank], part, sends[rank],
               receives[rank], text_of(mine, piece_counts[rank], packed));
    mine += 3 * piece_counts[rank];
  }
  const std::int64_t most_rows = *std::max_element(counts.begin(), counts.end());
  fmt::print(
      "\nbalance: {:.3f} in pairs, {:.3f} in rows (the busiest rank over the mean; 1 is perfect)\n", balance,
      total == 0 ? 1.0 : static_cast<double>(most_rows) * static_cast<double>(ranks) / static_cast<double>(total));
  if (balance > 1.2 && asked.kind() == "contiguous") {
    fmt::print("hint: {}, in place of contiguous, balances causal attention over keys\n", packed ? "packed" : "zigzag");
  }
}

}  // namespace

void add_rows(CLI::App& app) {
  auto words = std::make_shared<std::vector<std::string>>();
  CLI::App* rows_app =
      app.add_subcommand("rows", "Print which rows each of several GPUs has, and how balanced that is");
  rows_app->add_option("rows", *words, "A line of rows (below)")->type_name("LINE")->required();
  rows_app->footer(
      "Examples:\n"
      "  fovea rows s=131072 causal ranks=8\n"
      "  fovea rows 's=131072 window=4095,0 ranks=8 contiguous'\n"
      "  fovea rows 'seqs=65536,16384x3,1024x16 causal ranks=8'\n"
      "  fovea rows 's=1048576 causal ranks=4x8'\n\n"
      "A line of rows consists of these words, each at most once, in any order:\n"
      "  s=N                     the length of the one sequence\n"
      "  seqs=4096x3,77          in its place: lengths of packed sequences, three of 4096 and one of 77\n"
      "  ranks=N                 so many ranks exchange keys and values\n"
      "  ranks=KxH               K times H ranks: H neighbours exchange heads, K places exchange keys and values\n"
      "  causal  window=L,R      which pairs are counted, as in a problem line\n"
      "  zigzag                  each rank has a piece from the front and one from the back (default with causal)\n"
      "  contiguous              each rank has adjacent rows (default for s= without causal, or with a window to the "
      "left)\n"
      "  packed                  long sequences are cut, short ones given whole (default for seqs=)\n"
      "  block=N                 pieces begin at multiples of N rows (128); dropout needs a multiple of 16\n\n"
      "In the output `pairs` counts the pairs of a query that the rank computes and a key that causal and window\n"
      "allow: for each of its heads, with those of its H neighbours. `sends` counts the rows of keys and values that "
      "a\n"
      "rank gives to each other rank if keys are gathered, `receives` those that it gets from all of them. A row is\n"
      "Hk * (D + Dv) elements for each batch entry. The plan is that of fovea.torch.Rows and of fovea/parallel.h\n"
      "(docs/several-gpus.md).");
  rows_app->callback([words] { print_rows(words_of(fmt::format("{}", fmt::join(*words, " ")))); });
}

}  // namespace fovea::cli
