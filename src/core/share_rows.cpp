// SPDX-License-Identifier: Apache-2.0
#include "core/share_rows.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <tuple>

#include "core/structs.h"

namespace fovea {
namespace {

constexpr std::int64_t kMostRows = std::int64_t{1} << 31;  // so that pairs are below 2^63
constexpr std::int64_t kMostRanks = std::int64_t{1} << 16;
constexpr std::int64_t kDefaultBlock = 128;

// ---- what is asked ----

struct Asked {
  std::int32_t kind;
  std::int64_t ranks;
  std::int64_t head_ranks;
  std::int64_t block;
  std::vector<std::int64_t> lengths;
  std::int64_t left;   // -1: unbounded
  std::int64_t right;  // likewise
};

void require_between(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value < least || value > most) {
    refuse("{}: {}; accepted: {} to {}", name, value, least, most);
  }
}

Asked checked(const fovea_rows& rows) {
  if (rows.kind != FOVEA_ROWS_ZIGZAG && rows.kind != FOVEA_ROWS_CONTIGUOUS && rows.kind != FOVEA_ROWS_PACKED) {
    refuse("kind: {}; accepted: FOVEA_ROWS_ZIGZAG (0), FOVEA_ROWS_CONTIGUOUS (1) or FOVEA_ROWS_PACKED (2)", rows.kind);
  }
  if ((rows.flags & ~(FOVEA_CAUSAL | FOVEA_WINDOW)) != 0) {
    refuse("flags: {:#x}; accepted: FOVEA_CAUSAL ({:#x}) and FOVEA_WINDOW ({:#x})", rows.flags, FOVEA_CAUSAL,
           FOVEA_WINDOW);
  }
  require_between("ranks", rows.ranks, 1, kMostRanks);
  const std::int64_t head_ranks = rows.head_ranks == 0 ? 1 : rows.head_ranks;
  require_between("head_ranks", head_ranks, 1, kMostRanks);
  if (rows.ranks * head_ranks > kMostRanks) {
    refuse("ranks: {} with head_ranks {}; accepted: a product of at most {}", rows.ranks, head_ranks, kMostRanks);
  }
  const std::int64_t block = rows.block == 0 ? kDefaultBlock : rows.block;
  require_between("block", block, 1, kMostRows);
  if (rows.kind == FOVEA_ROWS_ZIGZAG && rows.sequences != 1) {
    refuse("sequences: {}; accepted: 1, or kind FOVEA_ROWS_PACKED or FOVEA_ROWS_CONTIGUOUS", rows.sequences);
  }
  require_between("sequences", rows.sequences, 0, kMostRows);
  if (rows.sequences > 0 && rows.lengths == nullptr) {
    refuse("lengths: NULL; accepted: {} numbers", rows.sequences);
  }
  Asked asked{rows.kind, rows.ranks, head_ranks, block, {}, -1, -1};
  std::int64_t total = 0;
  for (std::int64_t sequence = 0; sequence < rows.sequences; ++sequence) {
    const std::int64_t length = rows.lengths[sequence];
    if (length < 0 || length > kMostRows - total) {
      refuse("lengths: {} at place {}; accepted: 0 or more, and at most {} rows in all", length, sequence, kMostRows);
    }
    total += length;
  }
  asked.lengths.assign(rows.lengths, rows.lengths + rows.sequences);
  if ((rows.flags & FOVEA_WINDOW) != 0) {
    for (const auto& [name, value] :
         {std::pair("window_left", rows.window_left), {"window_right", rows.window_right}}) {
      if (value < -1) {
        refuse("{}: {}; accepted: -1 (unbounded), 0 or more", name, value);
      }
    }
    asked.left = rows.window_left;
    asked.right = rows.window_right;
  }
  if ((rows.flags & FOVEA_CAUSAL) != 0) {
    asked.right = 0;
  }
  return asked;
}

// ---- the plan ----

// Pairs of the rows of a piece: row i meets the keys from i - left to i + right that the sequence has.
std::int64_t pairs_of(std::int64_t start, std::int64_t rows, std::int64_t length, std::int64_t left,
                      std::int64_t right) {
  const std::int64_t stop = start + rows;
  const std::int64_t before = left < 0 ? length : std::min(left, length);
  const std::int64_t behind = right < 0 ? length : std::min(right, length);
  const auto sum = [](std::int64_t from, std::int64_t to) { return (from + to - 1) * (to - from) / 2; };  // [from, to)
  const std::int64_t ends =
      std::clamp(length - 1 - behind, start, stop);  // from here on the last key is the sequence's
  const std::int64_t last = sum(start, ends) + behind * (ends - start) + (length - 1) * (stop - ends);
  const std::int64_t begins = std::clamp(before, start, stop);  // from here on the window begins after key 0
  const std::int64_t first = sum(begins, stop) - before * (stop - begins);
  return last - first + rows;
}

// Where so many parts of a sequence begin and end, all but the last at multiples of a block.
std::vector<std::int64_t> cuts(std::int64_t length, std::int64_t parts, std::int64_t block) {
  const std::int64_t blocks = (length + block - 1) / block;
  std::vector<std::int64_t> ends;
  for (std::int64_t part = 0; part <= parts; ++part) {
    ends.push_back(std::min(length, block * (part * blocks / parts)));
  }
  return ends;
}

// The same of several sequences in a row: a part begins at a multiple of a block within its sequence.
std::vector<std::int64_t> cuts(const std::vector<std::int64_t>& lengths, std::int64_t parts, std::int64_t block) {
  const std::int64_t total = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  std::vector<std::int64_t> ends = cuts(total, parts, block);
  std::int64_t first = 0;
  auto end = ends.begin();
  for (const std::int64_t length : lengths) {
    for (; end != ends.end() && *end < first + length; ++end) {
      *end = first + (*end - first) / block * block;
    }
    first += length;
  }
  return ends;
}

// Of the rows of pieces, in their order, those from `begin` to `end`.
std::vector<Piece> between(const std::vector<Piece>& whole, std::int64_t begin, std::int64_t end) {
  std::vector<Piece> found;
  std::int64_t at = 0;
  for (const Piece& piece : whole) {
    const std::int64_t from = std::max(begin, at);
    const std::int64_t to = std::min(end, at + piece.rows);
    if (from < to) {
      found.push_back({piece.sequence, piece.start + from - at, to - from});
    }
    at += piece.rows;
  }
  return found;
}

// Adds the pieces of a sequence that these ranks share: the first has the first and the last part, and so on.
void add_zigzag(std::int64_t sequence, std::int64_t length, const std::vector<std::int64_t>& members,
                std::int64_t block, Pieces& pieces) {
  const auto parts = static_cast<std::int64_t>(2 * members.size());
  const std::vector<std::int64_t> ends = cuts(length, parts, block);
  for (std::int64_t number = 0; number < parts / 2; ++number) {
    for (const std::int64_t part : {number, parts - 1 - number}) {
      pieces[members[number]].push_back({sequence, ends[part], ends[part + 1] - ends[part]});
    }
  }
}

std::vector<std::int64_t> counted(std::int64_t count) {
  std::vector<std::int64_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), std::int64_t{0});
  return numbers;
}

// Longest first, each sequence to the ranks that have the least so far. One of more than a quarter of a rank's share of
// the rows is cut for as many ranks as have two blocks of it.
Pieces packed(const Asked& asked) {
  struct Load {
    double rows = 0;  // each as a part of a rank's share
    double pairs = 0;
  };
  const auto causal_pairs = [](std::int64_t start, std::int64_t rows, std::int64_t length) {
    return static_cast<double>(pairs_of(start, rows, length, -1, 0));
  };
  const auto& lengths = asked.lengths;
  const auto ranks = static_cast<double>(asked.ranks);
  const std::int64_t total = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  std::int64_t all_pairs = 0;
  for (const std::int64_t length : lengths) {
    all_pairs += pairs_of(0, length, length, -1, 0);
  }
  const Load share{std::max(1.0, static_cast<double>(total) / ranks),
                   std::max(1.0, static_cast<double>(all_pairs) / ranks)};
  std::vector<Load> loads(asked.ranks);
  Pieces pieces(asked.ranks);
  std::vector<std::int64_t> longest_first = counted(asked.lengths.size());
  std::stable_sort(longest_first.begin(), longest_first.end(),
                   [&](std::int64_t a, std::int64_t b) { return lengths[a] > lengths[b]; });
  const auto order = [&](std::int64_t a, std::int64_t b) {
    const auto key = [&](std::int64_t rank) {
      const Load& load = loads[rank];
      return std::tuple(std::max(load.rows, load.pairs), load.rows + load.pairs, rank);
    };
    return key(a) < key(b);
  };
  for (const std::int64_t sequence : longest_first) {
    const std::int64_t length = lengths[sequence];
    if (length == 0) {
      break;
    }
    std::int64_t wanted = 1;
    if (4.0 * static_cast<double>(length) > share.rows) {
      wanted = std::clamp((length + asked.block - 1) / asked.block / 2, std::int64_t{1}, asked.ranks);
    }
    std::vector<std::int64_t> members = counted(asked.ranks);
    std::partial_sort(members.begin(), members.begin() + wanted, members.end(), order);
    members.resize(wanted);
    std::sort(members.begin(), members.end());
    std::vector<std::size_t> before;
    before.reserve(members.size());
    for (const std::int64_t rank : members) {
      before.push_back(pieces[rank].size());
    }
    if (wanted == 1) {
      pieces[members.front()].push_back({sequence, 0, length});
    } else {
      add_zigzag(sequence, length, members, asked.block, pieces);
    }
    for (std::size_t member = 0; member < members.size(); ++member) {
      const std::int64_t rank = members[member];
      std::int64_t rows = 0;
      double pairs = 0;
      for (std::size_t piece = before[member]; piece < pieces[rank].size(); ++piece) {
        rows += pieces[rank][piece].rows;
        pairs += causal_pairs(pieces[rank][piece].start, pieces[rank][piece].rows, length);
      }
      loads[rank].rows += static_cast<double>(rows) / share.rows;
      loads[rank].pairs += pairs / share.pairs;
    }
  }
  return pieces;
}

// First the first piece of each sequence, then the second ones. Pieces that touch are one, empty ones are none.
std::vector<Piece> in_memory_order(std::vector<Piece> pieces) {
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return std::tie(a.sequence, a.start, a.rows) < std::tie(b.sequence, b.start, b.rows);
  });
  std::vector<Piece> first, second;
  for (const Piece& piece : pieces) {
    if (piece.rows == 0) {
      continue;
    }
    const bool follows = !first.empty() && first.back().sequence == piece.sequence;
    if (!follows) {
      first.push_back(piece);
    } else if (first.back().start + first.back().rows == piece.start) {
      first.back().rows += piece.rows;
    } else {
      second.push_back(piece);
    }
  }
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

std::int64_t rows_of(const std::vector<Piece>& pieces) {
  return std::accumulate(pieces.begin(), pieces.end(), std::int64_t{0},
                         [](std::int64_t sum, const Piece& piece) { return sum + piece.rows; });
}

Pieces by_keys(const Asked& asked) {
  Pieces pieces(asked.ranks);
  if (asked.kind == FOVEA_ROWS_PACKED) {
    pieces = packed(asked);
  } else if (asked.kind == FOVEA_ROWS_ZIGZAG) {
    add_zigzag(0, asked.lengths[0], counted(asked.ranks), asked.block, pieces);
  } else {
    std::vector<Piece> whole;
    for (const std::int64_t length : asked.lengths) {
      whole.push_back({static_cast<std::int64_t>(whole.size()), 0, length});
    }
    const std::vector<std::int64_t> ends = cuts(asked.lengths, asked.ranks, asked.block);
    for (std::int64_t rank = 0; rank < asked.ranks; ++rank) {
      pieces[rank] = between(whole, ends[rank], ends[rank + 1]);
    }
  }
  for (std::vector<Piece>& mine : pieces) {
    mine = in_memory_order(std::move(mine));
  }
  return pieces;
}

// The rows of each rank, in their order, shared out among the ranks that exchange heads.
Pieces over_heads(const Pieces& whole, const Asked& asked) {
  Pieces shared;
  for (const std::vector<Piece>& mine : whole) {
    const std::vector<std::int64_t> ends = cuts(rows_of(mine), asked.head_ranks, asked.block);
    for (std::int64_t part = 0; part < asked.head_ranks; ++part) {
      shared.push_back(between(mine, ends[part], ends[part + 1]));
    }
  }
  return shared;
}

}  // namespace

void share_rows(const fovea_rows& given, std::int64_t* needed) {
  const fovea_rows rows = copied("rows", "fovea_rows", offsetof(fovea_rows, balance) + sizeof(double*), given);
  const Asked asked = checked(rows);
  const Pieces whole = by_keys(asked);
  const Pieces pieces = over_heads(whole, asked);
  std::int64_t count = 0;
  for (const std::vector<Piece>& mine : pieces) {
    count += static_cast<std::int64_t>(mine.size());
  }
  if (needed != nullptr) {
    *needed = count;
  }
  if (rows.pieces != nullptr && rows.piece_capacity < count) {
    refuse("piece_capacity: {}; accepted: at least {}", rows.piece_capacity, count);
  }
  const std::int64_t total = std::accumulate(asked.lengths.begin(), asked.lengths.end(), std::int64_t{0});
  std::int64_t* next = rows.pieces;
  std::int64_t most_pairs = 0, all_pairs = 0;  // of `ranks`; pairs of all ranks would not fit 64 bits
  const auto write = [](std::int64_t* array, std::size_t rank, std::int64_t value) {
    if (array != nullptr) {
      array[rank] = value;
    }
  };
  for (std::size_t rank = 0; rank < pieces.size(); ++rank) {
    // After heads were exchanged a rank has all rows of its neighbours, which it computes and whose keys it gathers.
    const std::vector<Piece>& computed = whole[rank / asked.head_ranks];
    std::int64_t pairs = 0;
    for (const Piece& piece : computed) {
      pairs += pairs_of(piece.start, piece.rows, asked.lengths[piece.sequence], asked.left, asked.right);
    }
    for (const Piece& piece : pieces[rank]) {
      if (next != nullptr) {
        *next++ = piece.sequence;
        *next++ = piece.start;
        *next++ = piece.rows;
      }
    }
    const std::int64_t gathered = rows_of(computed);
    write(rows.rows, rank, rows_of(pieces[rank]));
    write(rows.pairs, rank, pairs);
    write(rows.sends, rank, asked.ranks == 1 ? 0 : gathered);
    write(rows.receives, rank, total - gathered);
    write(rows.piece_counts, rank, static_cast<std::int64_t>(pieces[rank].size()));
    most_pairs = std::max(most_pairs, pairs);
    if (rank % asked.head_ranks == 0) {  // the neighbours' are the same
      all_pairs += pairs;
    }
  }
  if (rows.balance != nullptr) {
    const double product = static_cast<double>(most_pairs) * static_cast<double>(whole.size());
    // At least 1, which large numbers round to a little less.
    *rows.balance = all_pairs == 0 ? 1.0 : std::max(1.0, product / static_cast<double>(all_pairs));
  }
}

}  // namespace fovea
