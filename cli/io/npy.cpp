// SPDX-License-Identifier: Apache-2.0
#include "io/npy.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>

#include "core/problem.h"
#include "fault.h"
#include "io/file.h"

namespace fovea::cli {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::uint64_t kLongestHeader = 1 << 20;  // a dictionary of three entries: more is a broken file

struct Descr {
  std::string_view text;
  fovea_dtype dtype;
};
constexpr std::array<Descr, 6> kDescrs = {{{"<f4", FOVEA_FP32},
                                           {"<f2", FOVEA_FP16},
                                           {"<f8", FOVEA_FP64},
                                           {"|b1", FOVEA_BOOL},
                                           {"<i4", FOVEA_INT32},
                                           {"<i8", FOVEA_INT64}}};

// A reader of the header's dictionary: of Python's grammar just strings, True, False and tuples of integers.
class Header {
 public:
  Header(const InputFile& file, std::string_view text) : file_(file), rest_(text) {
    expect('{');
    while (!take('}')) {
      const std::string key = string();
      expect(':');
      if (key == "descr") {
        descr = next() == '[' ? refuse("it has fields (a structured type)") : string();
      } else if (key == "fortran_order") {
        fortran_order = boolean();
      } else if (key == "shape") {
        shape = tuple();
      } else {
        refuse(fmt::format("unknown key '{}'", key));
      }
      if (!take(',')) {
        expect('}');
        break;
      }
    }
    if (!descr || !fortran_order || !shape) {
      refuse("one of descr, fortran_order and shape is missing");
    }
  }

  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<std::int64_t>> shape;

 private:
  [[noreturn]] std::string refuse(const std::string& why) const {
    file_.refuse(fmt::format("not a readable .npy header: {}", why));
  }

  char next() {
    while (!rest_.empty() && std::isspace(static_cast<unsigned char>(rest_.front())) != 0) {
      rest_.remove_prefix(1);
    }
    return rest_.empty() ? '\0' : rest_.front();
  }
  bool take(char c) {
    if (next() != c) {
      return false;
    }
    rest_.remove_prefix(1);
    return true;
  }
  void expect(char c) {
    if (!take(c)) {
      refuse(fmt::format("'{}' is missing", c));
    }
  }
  std::string string() {
    const char quote = next();
    const std::size_t end = quote == '\'' || quote == '"' ? rest_.find(quote, 1) : rest_.npos;
    if (end == rest_.npos) {
      refuse("a string is missing");
    }
    std::string value(rest_.substr(1, end - 1));
    rest_.remove_prefix(end + 1);
    return value;
  }
  bool boolean() {
    next();
    for (const auto& [word, value] : {std::pair<std::string_view, bool>("True", true), {"False", false}}) {
      if (rest_.starts_with(word)) {
        rest_.remove_prefix(word.size());
        return value;
      }
    }
    refuse("fortran_order is neither True nor False");
  }
  std::vector<std::int64_t> tuple() {
    std::vector<std::int64_t> values;
    expect('(');
    while (!take(')')) {
      next();
      std::int64_t value = 0;
      const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
      if (error != std::errc() || value < 0) {
        refuse("the shape is not a tuple of counts");
      }
      rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
      values.push_back(value);
      if (!take(',')) {
        expect(')');
        break;
      }
    }
    return values;
  }

  const InputFile& file_;
  std::string_view rest_;
};

fovea_dtype dtype_of(const InputFile& file, const std::string& descr) {
  for (const Descr& known : kDescrs) {
    if (known.text == descr) {
      return known.dtype;
    }
  }
  if (descr == "|V2" || descr == "<V2" || descr == "bfloat16") {
    file.refuse(fmt::format("type '{}': .npy cannot carry bf16; give it as .safetensors", descr));
  }
  std::string accepted;
  for (const Descr& known : kDescrs) {
    accepted +=
        fmt::format("{}'{}' ({})", accepted.empty() ? "" : ", ", known.text, name_of(static_cast<DType>(known.dtype)));
  }
  if (descr.starts_with('>')) {
    file.refuse(fmt::format("type '{}' is big-endian; accepted: {}", descr, accepted));
  }
  file.refuse(fmt::format("type '{}'; accepted: {}", descr, accepted));
}

}  // namespace

Array read_npy(const std::filesystem::path& path) {
  InputFile file(path);
  std::array<char, 8> start{};
  const std::uint64_t there = std::min<std::uint64_t>(start.size(), file.size());
  file.read(start.data(), there, "the beginning");
  if (!kMagic.starts_with(std::string_view(start.data(), std::min<std::uint64_t>(there, kMagic.size()))) ||
      file.size() == 0) {
    file.refuse("not an .npy file: it does not begin with \\x93NUMPY");
  }
  file.require(0, start.size(), "the beginning");
  const int major = static_cast<unsigned char>(start[6]);
  if (major < 1 || major > 3) {
    file.refuse(fmt::format(".npy of version {}.{}; accepted: 1, 2 and 3", major, static_cast<int>(start[7])));
  }
  std::array<unsigned char, 4> length{};
  file.read(length.data(), major == 1 ? 2 : 4, "the header's length");
  const std::uint64_t header_bytes = length[0] | length[1] << 8 | length[2] << 16 | std::uint64_t{length[3]} << 24;
  if (header_bytes > kLongestHeader) {
    file.refuse(fmt::format("not a readable .npy header: {} bytes long", header_bytes));
  }
  std::string text(header_bytes, '\0');
  file.read(text.data(), header_bytes, "the header");
  const Header header(file, text);

  Array array;
  array.dtype = dtype_of(file, *header.descr);
  array.shape = *header.shape;
  std::uint64_t bytes = size_of(static_cast<DType>(array.dtype));
  for (const std::int64_t dim : array.shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(dim), &bytes)) {
      file.refuse("its shape has more elements than memory has addresses");
    }
  }
  array.strides = row_major_strides(array.shape);
  if (*header.fortran_order) {
    std::vector<std::int64_t> reversed(array.shape.rbegin(), array.shape.rend());
    array.strides = row_major_strides(reversed);
    std::reverse(array.strides.begin(), array.strides.end());
  }
  const std::uint64_t data_at = 8 + (major == 1 ? 2 : 4) + header_bytes;
  file.require(data_at, bytes, "the array");
  if (file.size() - data_at != bytes) {
    file.refuse(fmt::format("{} bytes follow the array that its header describes", file.size() - data_at - bytes));
  }
  array.bytes.resize(bytes);
  file.read(array.bytes.data(), bytes, "the array");
  return array;
}

bool npy_carries(fovea_dtype dtype) {
  return std::any_of(kDescrs.begin(), kDescrs.end(), [&](const Descr& known) { return known.dtype == dtype; });
}

void write_npy(const std::filesystem::path& path, const Array& array) {
  const auto descr =
      std::find_if(kDescrs.begin(), kDescrs.end(), [&](const Descr& known) { return known.dtype == array.dtype; });
  if (descr == kDescrs.end()) {
    throw Fault(kBadInput, fmt::format("{}: .npy cannot carry {}; write .safetensors", path.string(),
                                       name_of(static_cast<DType>(array.dtype))));
  }
  std::string header = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}", descr->text,
                                   fmt::join(array.shape, ", "), array.shape.size() == 1 ? "," : "");
  constexpr std::size_t kStart = 10;  // magic, version, length
  constexpr std::size_t kAlignment = 64;
  header.append(kAlignment - (kStart + header.size() + 1) % kAlignment, ' ');
  header += '\n';
  write_file(path, [&](std::ostream& out) {
    out << kMagic << '\1' << '\0' << static_cast<char>(header.size() & 0xFF) << static_cast<char>(header.size() >> 8)
        << header;
    out.write(reinterpret_cast<const char*>(array.bytes.data()), static_cast<std::streamsize>(array.bytes.size()));
  });
}

}  // namespace fovea::cli
