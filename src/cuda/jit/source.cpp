// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/source.h"

#include <algorithm>
#include <vector>

#include "cuda/jit/sha256.h"

namespace fovea::cuda::jit {
namespace {

// The names that stand in the #include lines of a text, in their order.
std::vector<std::string_view> included_by(std::string_view text) {
  constexpr std::string_view kInclude = "#include \"";
  std::vector<std::string_view> names;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.starts_with(kInclude)) {
      line.remove_prefix(kInclude.size());
      names.push_back(line.substr(0, line.find('"')));
    }
  }
  return names;
}

}  // namespace

std::string hash_of(std::span<const TextFile> files, std::string_view name) {
  Sha256 hash;
  std::vector<std::string_view> waiting = {name};
  std::vector<const char*> seen;  // a file has two names and one text
  while (!waiting.empty()) {
    const std::string_view wanted = waiting.back();
    waiting.pop_back();
    const auto file = std::find_if(files.begin(), files.end(), [&](const TextFile& one) { return one.name == wanted; });
    if (file == files.end() || std::find(seen.begin(), seen.end(), file->text.data()) != seen.end()) {
      continue;  // NVRTC will name what is missing
    }
    seen.push_back(file->text.data());
    hash.add_field(wanted).add_field(file->hash.empty() ? file->text : file->hash);
    const std::vector<std::string_view> names = included_by(file->text);
    waiting.insert(waiting.end(), names.rbegin(), names.rend());
  }
  return hash.hex();
}

}  // namespace fovea::cuda::jit
