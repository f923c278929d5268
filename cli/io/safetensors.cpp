// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "core/problem.h"
#include "fault.h"
#include "io/file.h"

namespace fovea::cli {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kLongestHeader = 100'000'000;  // the format's own limit
constexpr std::size_t kMostDimensions = 32;
constexpr int kDeepest = 3;  // the header, an entry in it, and that entry's shape or data_offsets

constexpr std::array<std::pair<std::string_view, fovea_dtype>, 7> kTypes = {{{"F32", FOVEA_FP32},
                                                                             {"F16", FOVEA_FP16},
                                                                             {"BF16", FOVEA_BF16},
                                                                             {"F64", FOVEA_FP64},
                                                                             {"BOOL", FOVEA_BOOL},
                                                                             {"I32", FOVEA_INT32},
                                                                             {"I64", FOVEA_INT64}}};

struct Entry {
  std::string name;
  Array array;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

// The header; a name that stands twice would otherwise hide a tensor. What is nested more deeply than the format nests
// is refused while it is read: the parser keeps its own stack, but to print such a value takes the thread's.
Json parse_header(const InputFile& file, const std::string& text) {
  std::set<std::string> names;
  std::string twice;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth >= kDeepest &&
        (event == Json::parse_event_t::array_start || event == Json::parse_event_t::object_start)) {
      file.refuse(
          fmt::format("not a .safetensors file: its header nests lists or objects more than {} deep", kDeepest));
    }
    if (depth == 1 && event == Json::parse_event_t::key && !names.insert(value.get<std::string>()).second) {
      twice = value.get<std::string>();
    }
    return true;
  };
  Json header;
  try {
    header = Json::parse(text, watch);
  } catch (const Json::parse_error& error) {
    file.refuse(fmt::format("not a .safetensors file: its header is not JSON, from byte {} on", error.byte));
  } catch (const Json::exception&) {  // JSON all the same, such as 1e999
    file.refuse("not a .safetensors file: its header has a number that is too large for one of 64 bits");
  }
  if (!header.is_object()) {
    file.refuse("not a .safetensors file: its header is not a JSON object");
  }
  if (!twice.empty()) {
    file.refuse(fmt::format("two tensors are called '{}'", twice));
  }
  return header;
}

bool is_count(const Json& value) { return value.is_number_unsigned(); }

Entry parse_entry(const InputFile& file, const std::string& name, const Json& value) {
  const auto refuse = [&](const std::string& why) { file.refuse(fmt::format("tensor '{}': {}", name, why)); };
  if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") || !value.contains("data_offsets")) {
    refuse("its entry has not dtype, shape and data_offsets");
  }
  const Json& dtype = value["dtype"];
  const Json& shape = value["shape"];
  const Json& offsets = value["data_offsets"];
  const auto type = std::find_if(kTypes.begin(), kTypes.end(), [&](const auto& t) { return dtype == t.first; });
  if (type == kTypes.end()) {
    std::vector<std::string> accepted;
    accepted.reserve(std::size(kTypes));
    for (const auto& [known, unused] : kTypes) {
      accepted.emplace_back(known);
    }
    refuse(fmt::format("dtype {}; accepted: {}", dtype.dump(), fmt::join(accepted, ", ")));
  }
  if (!shape.is_array() || shape.size() > kMostDimensions || !std::all_of(shape.begin(), shape.end(), is_count)) {
    refuse("its shape is not a list of counts");
  }
  if (!offsets.is_array() || offsets.size() != 2 || !is_count(offsets[0]) || !is_count(offsets[1])) {
    refuse("its data_offsets are not two counts");
  }
  Entry entry;
  entry.name = name;
  entry.array.dtype = type->second;
  entry.begin = offsets[0].get<std::uint64_t>();
  entry.end = offsets[1].get<std::uint64_t>();
  std::uint64_t bytes = size_of(static_cast<DType>(type->second));
  for (const Json& dim : shape) {
    const auto count = dim.get<std::uint64_t>();
    if (count > INT64_MAX || __builtin_mul_overflow(bytes, count, &bytes)) {
      refuse("its shape has more elements than memory has addresses");
    }
    entry.array.shape.push_back(static_cast<std::int64_t>(count));
  }
  if (entry.end < entry.begin || entry.end - entry.begin != bytes) {
    refuse(fmt::format("data_offsets [{}, {}) do not hold its {} bytes", entry.begin, entry.end, bytes));
  }
  entry.array.strides = row_major_strides(entry.array.shape);
  return entry;
}

}  // namespace

Arrays read_safetensors(const std::filesystem::path& path) {
  InputFile file(path);
  std::array<unsigned char, 8> length{};
  if (file.size() < length.size()) {
    file.refuse(
        fmt::format("not a .safetensors file, or truncated: it ends after {} bytes, within the length of its "
                    "header",
                    file.size()));
  }
  file.read(length.data(), length.size(), "the header's length");
  std::uint64_t header_bytes = 0;
  for (std::size_t n = length.size(); n-- > 0;) {
    header_bytes = header_bytes << 8 | length[n];
  }
  if (header_bytes > kLongestHeader) {
    file.refuse(fmt::format("not a .safetensors file: its header would be {} bytes long", header_bytes));
  }
  if (header_bytes > file.size() - length.size() && !(file.size() > length.size() && file.peek() == '{')) {
    file.refuse("not a .safetensors file: no header begins after its first 8 bytes");
  }
  file.require(length.size(), header_bytes, "the header");
  std::string text(header_bytes, '\0');
  file.read(text.data(), header_bytes, "the header");
  const Json header = parse_header(file, text);

  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name != "__metadata__") {
      entries.push_back(parse_entry(file, name, value));
    }
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  const std::uint64_t data_at = length.size() + header_bytes;
  std::uint64_t at = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != at) {
      file.refuse(fmt::format("tensor '{}': data_offsets begin at {}, {} the tensor before it, which ends at {}",
                              entry.name, entry.begin, entry.begin < at ? "within" : "past", at));
    }
    at = entry.end;
  }
  file.require(data_at, at, "what the header describes");
  if (file.size() - data_at != at) {
    file.refuse(fmt::format("{} bytes follow the tensors that the header describes", file.size() - data_at - at));
  }
  Arrays arrays;
  for (Entry& entry : entries) {
    entry.array.bytes.resize(entry.end - entry.begin);
    file.seek(data_at + entry.begin);
    file.read(entry.array.bytes.data(), entry.array.bytes.size(), "a tensor");
    arrays.emplace(entry.name, std::move(entry.array));
  }
  return arrays;
}

void write_safetensors(const std::filesystem::path& path, const Arrays& arrays) {
  Json header = Json::object();
  std::uint64_t at = 0;
  for (const auto& entry : arrays) {
    const Array& array = entry.second;
    const auto type =
        std::find_if(kTypes.begin(), kTypes.end(), [&array](const auto& t) { return t.second == array.dtype; });
    header[entry.first] = {
        {"dtype", type->first}, {"shape", array.shape}, {"data_offsets", {at, at + array.bytes.size()}}};
    at += array.bytes.size();
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // the tensors begin at a multiple of eight
  write_file(path, [&](std::ostream& out) {
    for (int shift = 0; shift < 64; shift += 8) {
      out << static_cast<char>(text.size() >> shift & 0xFF);
    }
    out << text;
    for (const auto& [name, array] : arrays) {
      out.write(reinterpret_cast<const char*>(array.bytes.data()), static_cast<std::streamsize>(array.bytes.size()));
    }
  });
}

}  // namespace fovea::cli
