// SPDX-License-Identifier: Apache-2.0
//
// Both questions are one: are there integers d_i with low_i <= d_i <= high_i such that the sum of d_i * stride_i
// lies in [begin, end]? For two footprints d_i runs over differences of indices, for one over those of which the
// first that is not 0 is positive. Terms are searched from the largest stride down; what the smaller ones can still
// reach leaves few choices for the larger: one or two where strides nest, as those of any real tensor do.
#include "core/overlap.h"

#include <algorithm>
#include <array>

namespace fovea {
namespace {

__extension__ typedef __int128 Wide;

struct Term {
  Wide stride;  // > 0
  Wide low;
  Wide high;
};

class Search {
 public:
  // Adds d * stride with low <= d <= high. Terms of equal stride are one term.
  void add(std::int64_t stride, Wide low, Wide high) {
    if (stride == 0) {
      return;
    }
    Term term{stride, low, high};
    if (stride < 0) {
      term = {-Wide(stride), -high, -low};
    }
    const auto end = terms_.begin() + count_;
    const auto same = std::find_if(terms_.begin(), end, [&](const Term& t) { return t.stride == term.stride; });
    if (same != end) {
      same->low += term.low;
      same->high += term.high;
    } else {
      terms_[count_++] = term;
    }
  }

  bool reaches(Wide begin, Wide end) {
    std::sort(terms_.begin(), terms_.begin() + count_,
              [](const Term& a, const Term& b) { return a.stride > b.stride; });
    return reaches_from(0, begin, end);
  }

 private:
  static Wide divide_down(Wide a, Wide b) { return a / b - (a % b != 0 && a < 0 ? 1 : 0); }

  bool reaches_from(int first, Wide begin, Wide end) {
    if (first == count_) {
      return begin <= 0 && 0 <= end;
    }
    Wide rest_low = 0;
    Wide rest_high = 0;
    for (int i = first + 1; i < count_; ++i) {
      rest_low += terms_[i].low * terms_[i].stride;
      rest_high += terms_[i].high * terms_[i].stride;
    }
    const Term& term = terms_[first];
    const Wide least = std::max(term.low, -divide_down(rest_high - begin, term.stride));
    const Wide most = std::min(term.high, divide_down(end - rest_low, term.stride));
    for (Wide d = least; d <= most; ++d) {
      if (++steps_ > kOverlapSteps || reaches_from(first + 1, begin - d * term.stride, end - d * term.stride)) {
        return true;
      }
    }
    return false;
  }

  std::array<Term, 2 * FOVEA_MAX_RANK> terms_{};
  int count_ = 0;
  int steps_ = 0;
};

// Whether each stride leads past all that the smaller ones reach together: then no two indices meet. So it is with the
// strides of nearly every tensor.
bool nests(const Footprint& a) {
  struct Reach {
    Wide stride;
    Wide all;
  };
  std::array<Reach, FOVEA_MAX_RANK> sorted{};  // by stride
  int count = 0;
  for (int i = 0; i < a.rank; ++i) {
    if (a.extent[i] > 1) {
      const Wide stride = a.stride[i] < 0 ? -Wide(a.stride[i]) : Wide(a.stride[i]);
      int at = count++;
      for (; at > 0 && sorted[at - 1].stride > stride; --at) {
        sorted[at] = sorted[at - 1];
      }
      sorted[at] = {stride, stride * (a.extent[i] - 1)};
    }
  }
  Wide reach = 0;
  for (int i = 0; i < count; ++i) {
    if (sorted[i].stride <= reach) {
      return false;
    }
    reach += sorted[i].all;
  }
  return true;
}

}  // namespace

Range range_of(const Footprint& a) {
  Range range{a.base, Wide(a.base) + a.width};
  for (int i = 0; i < a.rank; ++i) {
    const Wide reach = Wide(a.extent[i] - 1) * a.stride[i];
    (reach < 0 ? range.begin : range.end) += reach;
  }
  return range;
}

bool overlaps_itself(const Footprint& a) {
  if (nests(a)) {
    return false;
  }
  for (int leading = 0; leading < a.rank; ++leading) {
    if (a.extent[leading] == 1) {
      continue;
    }
    if (a.stride[leading] == 0) {
      return true;
    }
    Search search;
    for (int i = leading + 1; i < a.rank; ++i) {
      search.add(a.stride[i], -Wide(a.extent[i] - 1), a.extent[i] - 1);
    }
    search.add(a.stride[leading], 1, a.extent[leading] - 1);
    if (search.reaches(0, 0)) {
      return true;
    }
  }
  return false;
}

bool overlap(const Footprint& a, const Footprint& b) {
  if (!range_of(a).meets(range_of(b))) {
    return false;
  }
  Search search;
  for (int i = 0; i < a.rank; ++i) {
    search.add(a.stride[i], 0, a.extent[i] - 1);
  }
  for (int i = 0; i < b.rank; ++i) {
    search.add(b.stride[i], -Wide(b.extent[i] - 1), 0);
  }
  // Elements at a and b share a byte where -width_a < a - b < width_b.
  const Wide difference = Wide(a.base) - b.base;
  return search.reaches(1 - a.width - difference, b.width - 1 - difference);
}

}  // namespace fovea
