// SPDX-License-Identifier: Apache-2.0
#include "core/text_fields.h"

#include <algorithm>
#include <limits>
#include <string>

#include "core/nearest.h"
#include "core/text.h"

namespace fovea {
namespace {

// In the order in which they are printed.
constexpr LineKey kKeys[] = {
    {"fwd", ""},
    {"bwd", ""},
    {"b", "=B|=B1xB2"},
    {"hq", "=N"},
    {"hk", "=N"},
    {"sq", "=N"},
    {"sk", "=N"},
    {"d", "=N"},
    {"dv", "=N"},
    {"fp32", ""},
    {"fp16", ""},
    {"bf16", ""},
    {"fp64", ""},
    {"layout", "=bshd|bhsd|qkv3|strided"},
    {"skew", "=N"},
    {"seqs_q", "=N[xTIMES],..."},
    {"seqs_k", "=N[xTIMES],..."},
    {"total_q", "=N"},
    {"total_k", "=N"},
    {"max_q", "=N"},
    {"max_k", "=N"},
    {"used_q", "[=N[xTIMES],...]"},
    {"used_k", "[=N[xTIMES],...]"},
    {"causal", "[=br|tl]"},
    {"align", "=br|tl"},
    {"window", "=LEFT,RIGHT"},
    {"pos", "=Q,K"},
    {"pos_q", "[=N[xTIMES],...]"},
    {"pos_k", "[=N[xTIMES],...]"},
    {"scale", "=X"},
    {"softcap", "=X"},
    {"alibi", "=h|b,h"},
    {"sink", ""},
    {"bias", "=b|b1|b2|1,h|1,q|1,k|1[:TYPE]"},
    {"bias2", "=b|b1|b2|1,h|1,q|1,k|1[:TYPE]"},
    {"mask", "=b|b1|b2|1,h|1,q|1,k|1"},
    {"dropout", "=P"},
    {"rng", "=fovea|torch_mem_efficient"},
    {"seed", "=N"},
    {"offset", "=N"},
    {"streams", "=b|b1|b2|1,h|1"},
    {"need", "=all|q,k,v,bias,bias2,sink"},
    {"wide", "=out,q,k,v,bias,bias2"},
    {"add", "=out,q,k,v,bias,bias2,sink"},
    {"det", ""},
    {"clear", ""},
    {"lse", ""},
    {"dlse", ""},
    {"device", "=cpu|cuda"},
    {"backend", "=NAME"},
};

[[noreturn]] void refuse_unknown(std::string_view key) {
  std::vector<std::string> names;
  for (const LineKey& known : kKeys) {
    names.emplace_back(known.name);
  }
  throw Error(
      FOVEA_INVALID_ARGUMENT,
      fmt::format("problem line: {}: not a word of it{} (fovea explain --help lists them)", key, hint(key, names)));
}

std::string_view form_of(std::string_view key) {
  return std::find_if(std::begin(kKeys), std::end(kKeys), [&](const LineKey& k) { return k.name == key; })->form;
}

}  // namespace

std::span<const LineKey> line_keys() { return kKeys; }

namespace line {

void refuse(std::string_view key, std::string_view was, std::string_view accepted) {
  throw Error(FOVEA_INVALID_ARGUMENT, fmt::format("problem line: {}: '{}'; accepted: {}", key, was, accepted));
}

void missing(std::string_view key, std::string_view accepted) {
  throw Error(FOVEA_INVALID_ARGUMENT, fmt::format("problem line: {}: missing; accepted: {}", key, accepted));
}

std::int64_t parse_count(std::string_view key, std::string_view text) {
  return parse_number<std::int64_t>(key, text, 0, std::numeric_limits<std::int64_t>::max(), "an integer, 0 or more");
}

Fields::Fields(std::string_view line) {
  constexpr std::string_view kBlanks = " \t\r\n";
  for (std::size_t begin = line.find_first_not_of(kBlanks); begin != line.npos;) {
    const std::size_t end = std::min(line.find_first_of(kBlanks, begin), line.size());
    add(line.substr(begin, end - begin));
    begin = line.find_first_not_of(kBlanks, end);
  }
}

std::optional<std::string_view> Fields::value(std::string_view key) const {
  const Field* field = find(key);
  if (field == nullptr) {
    return std::nullopt;
  }
  if (!field->value) {
    throw Error(FOVEA_INVALID_ARGUMENT,
                fmt::format("problem line: {}: without a value; accepted: {}{}", key, key, form_of(key)));
  }
  return field->value;
}

std::optional<std::string_view> Fields::optional_value(std::string_view key) const {
  const Field* field = find(key);
  return field != nullptr ? field->value : std::nullopt;
}

bool Fields::flag(std::string_view key) const {
  const Field* field = find(key);
  if (field != nullptr && field->value) {
    refuse(key, *field->value, fmt::format("{} alone, without a value", key));
  }
  return field != nullptr;
}

std::int64_t Fields::count(std::string_view key, std::int64_t otherwise) const {
  const auto text = value(key);
  return text ? parse_count(key, *text) : otherwise;
}

void Fields::add(std::string_view word) {
  const std::size_t equals = word.find('=');
  const std::string_view key = word.substr(0, equals);
  if (std::none_of(std::begin(kKeys), std::end(kKeys), [&](const LineKey& known) { return known.name == key; })) {
    refuse_unknown(key);
  }
  if (has(key)) {
    refuse(key, word, "each key once");
  }
  fields_.push_back({key, equals == word.npos ? std::nullopt : std::optional(word.substr(equals + 1))});
}

const Fields::Field* Fields::find(std::string_view key) const {
  const auto found = std::find_if(fields_.begin(), fields_.end(), [&](const Field& f) { return f.key == key; });
  return found == fields_.end() ? nullptr : &*found;
}

std::string_view one_of(const Fields& fields, std::initializer_list<std::string_view> keys,
                        std::string_view otherwise) {
  std::optional<std::string_view> found;
  for (const std::string_view key : keys) {
    if (fields.flag(key)) {
      if (found) {
        throw Error(FOVEA_INVALID_ARGUMENT, fmt::format("problem line: {}: beside {}; accepted: one of {}", key, *found,
                                                        fmt::join(keys, ", ")));
      }
      found = key;
    }
  }
  return found.value_or(otherwise);
}

}  // namespace line
}  // namespace fovea
