// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "core/status.h"
#include "cuda/jit/folder.h"
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

// Of a folder and those below it.
void add_files(std::deque<std::string>& kept, std::vector<TextFile>& files, const std::filesystem::path& folder,
               const std::string& name, const std::string& short_name) {
  for_each_entry(folder, [&](const std::filesystem::path& path) {
    const std::string file = path.filename().string();
    std::error_code error;
    if (std::filesystem::is_directory(path, error)) {
      add_files(kept, files, path, name + file + "/", short_name + file + "/");
    } else if (path.extension() == ".h" || path.extension() == ".cuh") {
      std::ifstream stream(path, std::ios::binary);
      const std::string& text =
          kept.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
      files.push_back({kept.emplace_back(name + file), text});
      files.push_back({kept.emplace_back(short_name + file), text});
    }
  });
}

}  // namespace

std::vector<TextFile> read_text(const std::string& folder) {
  static auto* const kept = new std::deque<std::string>;  // whose elements stay where they are
  std::vector<TextFile> files;
  for (const std::string part : {"math/", "cuda/device/"}) {
    const std::size_t before = files.size();
    add_files(*kept, files, std::filesystem::path(folder) / part, part, "");
    if (files.size() == before) {
      throw Error(
          FOVEA_INVALID_ARGUMENT,
          fmt::format("FOVEA_KERNEL_TEXT: '{}' has no {} with the text of kernels; accepted: the folder src of a "
                      "checkout of fovea, or a copy",
                      folder, part));
    }
  }
  std::sort(files.begin(), files.end(), [](const TextFile& a, const TextFile& b) { return a.name < b.name; });
  return files;
}

std::span<const TextFile> text_from_environment() {
  const char* const folder = std::getenv("FOVEA_KERNEL_TEXT");
  if (folder == nullptr || *folder == '\0') {
    return embedded_files();
  }
  static auto* const files = new std::vector<TextFile>(read_text(folder));
  return *files;
}

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
