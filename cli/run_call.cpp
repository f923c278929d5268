// SPDX-License-Identifier: Apache-2.0
#include "run_call.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <string_view>

#include "commands.h"
#include "core/fields.h"
#include "fault.h"
#include "work.h"

namespace fovea::cli {
namespace {

// "sq" of "sq=128"; the types, which exclude one another, have the same one.
std::string key_of(const std::string& word) {
  const std::string key = word.substr(0, word.find('='));
  for (const char* type : {"fp32", "fp16", "bf16", "fp64"}) {
    if (key == type) {
      return "type";
    }
  }
  return key == "fwd" || key == "bwd" ? "direction" : key;
}

// What a line says for the tensors themselves to confirm; all else it says is a choice.
bool is_about_tensors(const std::string& key) {
  constexpr std::array<const char*, 23> kKeys = {
      "b",     "hq",    "hk",     "sq",     "sk",    "d",    "dv",   "type",  "seqs_q", "seqs_k", "total_q", "total_k",
      "max_q", "max_k", "used_q", "used_k", "alibi", "sink", "bias", "bias2", "pos_q",  "pos_k",  "streams"};
  return std::find(kKeys.begin(), kKeys.end(), key) != kKeys.end() || key == "mask" || key == "dlse";
}

std::string with_word(const std::string& line, const std::string& word) {
  std::string result = word;
  for (const std::string& other : words_of(line)) {
    if (key_of(other) != key_of(word)) {
      result += " " + other;
    }
  }
  return result;
}

bool is_rows(const std::string& name) {
  return std::any_of(kInputs.begin(), kInputs.end(), [&](const Input& i) { return i.name == name && i.is_rows; });
}

}  // namespace

FileCall::FileCall(Arrays inputs, const RunSettings& settings) : inputs_(std::move(inputs)) {
  problem_.size = sizeof problem_;
  read_line_for_tensors(settings.line);
  for (const Input& input : kInputs) {
    const auto found = inputs_.find(input.name);
    if (found != inputs_.end()) {
      problem_.*input.member = view(found->first, found->second);
    }
  }
  if (problem_.positions_q != nullptr || problem_.positions_k != nullptr) {
    problem_.flags |= FOVEA_POSITIONS;
  }
  add_output("out", &fovea_problem::out, shape_of_out());
  add_output("lse", &fovea_problem::lse, shape_of_lse());
  agree(settings);
}

std::vector<std::pair<std::string, fovea_dtype>> FileCall::outputs() const {
  std::vector<std::pair<std::string, fovea_dtype>> all;
  for (const auto& [name, array] : outputs_) {
    all.emplace_back(name, array.dtype);
  }
  return all;
}

void FileCall::read_line_for_tensors(const std::string& line) {
  for (const std::string& word : words_of(line)) {
    const std::string key = key_of(word);
    if (key == "layout") {
      if (word != "layout=bshd" && word != "layout=bhsd") {
        throw Fault(kBadInput, fmt::format("problem line: '{}'; accepted of files: layout=bshd, layout=bhsd", word));
      }
      swapped_ = word == "layout=bhsd";
    }
    const std::string value = word.find('=') == word.npos ? "" : word.substr(word.find('=') + 1);
    const auto count = [&](const std::string& text) -> std::int64_t {
      char* end = nullptr;
      const std::int64_t number = std::strtoll(text.c_str(), &end, 10);
      if (text.empty() || *end != '\0' || number < 0) {
        throw Fault(kBadInput, fmt::format("problem line: '{}'; accepted: {}=N", word, key));
      }
      return number;
    };
    if (key == "max_q") {
      problem_.max_seqlen_q = count(value);
    } else if (key == "max_k") {
      problem_.max_seqlen_k = count(value);
    } else if (key == "b" && inputs_.contains("cu_seqlens_q") && value.find('x') != value.npos) {
      problem_.batch_outer = count(value.substr(0, value.find('x')));
    }
  }
  if (swapped_ && inputs_.contains("cu_seqlens_q")) {
    throw Fault(kBadInput, "problem line: layout=bhsd, but packed sequences (cu_seqlens_q) have rows before heads");
  }
}

void FileCall::agree(const RunSettings& settings) {
  const bool has_gradients = problem_.grad_out != nullptr || problem_.grad_lse != nullptr;
  if (settings.backward && problem_.grad_out == nullptr) {
    throw Fault(kBadInput, "grad_out is missing: --backward starts from it");
  }
  if (!settings.backward && has_gradients) {
    throw Fault(kBadInput, "grad_out and grad_lse are read by --backward alone; give it, or leave them out");
  }
  std::string from_tensors = describe(Direction::kForward);
  if (inputs_.contains("grad_lse")) {
    from_tensors += " dlse";
  }
  from_tensors = with_word(from_tensors, settings.backward ? "bwd" : "fwd");
  const Problem given = parse(from_tensors);
  std::string line = from_tensors;
  std::set<std::string> seen;
  for (const std::string& word : words_of(settings.line)) {
    if (!seen.insert(key_of(word)).second) {
      throw Fault(kBadInput, fmt::format("problem line: '{}' stands beside another word of its kind; accepted: each "
                                         "once",
                                         word));
    }
    if (key_of(word) == "layout") {
      continue;
    }
    if (is_about_tensors(key_of(word))) {
      Problem claimed = parse(with_word(from_tensors, word));
      if (claimed != given) {
        throw Fault(kBadInput, fmt::format("problem line: '{}' does not agree with the tensors, which are '{}'", word,
                                           from_tensors));
      }
      continue;
    }
    if (key_of(word) == "direction" && word != (settings.backward ? "bwd" : "fwd")) {
      throw Fault(kBadInput,
                  word == "bwd" ? "problem line: 'bwd' without --backward; give both, or neither"
                                : "problem line: 'fwd' with --backward; accepted: bwd, or no word about the direction");
    }
    line = with_word(line, word);
  }
  settled_ = parse(line);
  if (settled_.wide != Results{} || settled_.accumulate != Results{}) {
    throw Fault(
        kBadInput,
        "problem line: wide and add; accepted: lines without them, as files are written anew, in the inputs' types");
  }
  refuse_gpu("run", settled_.device, settled_.backend);
  line_ = line;
  apply();
  refuse_what_is_not_passed_on(parse(with_word(describe(Direction::kForward), settings.backward ? "bwd" : "fwd")));
  if (settings.backward) {
    for (const Gradient& gradient : kGradients) {
      if (settled_.need.*gradient.need) {
        add_output(gradient.name, gradient.member, inputs_.at(gradient.of).shape, gradient.of);
      }
    }
  }
}

// apply() copies one field after another; one that it lacks would be ignored.
void FileCall::refuse_what_is_not_passed_on(const Problem& called) const {
  for_each_pair_of_fields(
      settled_, called, [](std::string_view name, Role role, const auto& settled, const auto& passed) {
        if (role == Role::kNumber && !(passed == settled)) {
          throw Fault(kBadInput,
                      fmt::format("problem line: {}, which fovea run does not pass on; accepted: fovea check, or "
                                  "the library",
                                  name));
        }
      });
}

void FileCall::apply() {
  const Problem& p = settled_;
  problem_.flags = (p.causal ? FOVEA_CAUSAL : 0U) | (p.deterministic ? FOVEA_DETERMINISTIC : 0U) |
                   (p.scale ? FOVEA_SCALE : 0U) | (p.clear_rows ? FOVEA_CLEAR_ROWS : 0U) |
                   (p.positions ? FOVEA_POSITIONS : 0U) | FOVEA_WINDOW;
  problem_.align = p.top_left ? FOVEA_TOP_LEFT : FOVEA_BOTTOM_RIGHT;
  problem_.rng = static_cast<std::int32_t>(p.rng);
  problem_.device = p.device;
  problem_.backend = p.backend.empty() ? nullptr : p.backend.c_str();
  problem_.scale = p.scale.value_or(0);
  problem_.window_left = p.window_left;
  problem_.window_right = p.window_right;
  problem_.position_q = p.position_q;
  problem_.position_k = p.position_k;
  problem_.softcap = p.softcap;
  problem_.dropout_p = p.dropout;
  problem_.seed = p.seed;
  problem_.offset = p.offset;
}

std::string FileCall::describe(Direction direction) const {
  std::size_t needed = 0;
  require(fovea_describe(&problem_, static_cast<fovea_direction>(direction), nullptr, 0, &needed));
  std::string text(needed, '\0');
  require(fovea_describe(&problem_, static_cast<fovea_direction>(direction), text.data(), text.size(), &needed));
  text.resize(needed - 1);
  // Files of B, H, S, D are seen through strides; the line that the user knows does not say how rows lie.
  std::string line;
  for (const std::string& word : words_of(text)) {
    if (key_of(word) != "layout" && key_of(word) != "skew" && word != "lse") {
      line += (line.empty() ? "" : " ") + word;
    }
  }
  return line;
}

const fovea_tensor* FileCall::view(const std::string& name, const Array& array) {
  if (array.shape.size() > FOVEA_MAX_RANK) {
    throw Fault(kBadInput,
                fmt::format("{}: {} dimensions; accepted: at most {}", name, array.shape.size(), FOVEA_MAX_RANK));
  }
  fovea_tensor tensor{};
  tensor.size = sizeof tensor;
  tensor.data = const_cast<std::byte*>(array.bytes.data());
  tensor.dtype = array.dtype;
  tensor.rank = static_cast<std::int32_t>(array.shape.size());
  tensor.flags = FOVEA_TENSOR_STRIDED;
  std::copy(array.shape.begin(), array.shape.end(), tensor.shape);
  std::copy(array.strides.begin(), array.strides.end(), tensor.stride);
  const bool rows = is_rows(name) || name == "out" || name == "grad_q" || name == "grad_k" || name == "grad_v";
  if (swapped_ && rows && tensor.rank >= 4) {
    std::swap(tensor.shape[tensor.rank - 3], tensor.shape[tensor.rank - 2]);
    std::swap(tensor.stride[tensor.rank - 3], tensor.stride[tensor.rank - 2]);
  }
  views_.push_back(std::make_unique<fovea_tensor>(tensor));
  return views_.back().get();
}

void FileCall::add_output(const std::string& name, Member member, std::vector<std::int64_t> shape,
                          const std::string& of) {
  Array& array = outputs_[name];
  array.dtype = inputs_.at(of).dtype;
  if (name == "lse" && array.dtype != FOVEA_FP64) {
    array.dtype = FOVEA_FP32;
  }
  array.shape = std::move(shape);
  array.strides = row_major_strides(array.shape);
  std::uint64_t bytes = size_of(static_cast<DType>(array.dtype));
  for (const std::int64_t dim : array.shape) {
    bytes *= static_cast<std::uint64_t>(dim);  // no more than its inputs have, which fit memory
  }
  array.bytes.resize(bytes);
  problem_.*member = view(name, array);
}

std::vector<std::int64_t> FileCall::shape_of_out() const {
  std::vector<std::int64_t> shape = inputs_.at("q").shape;
  const std::vector<std::int64_t>& v = inputs_.at("v").shape;
  if (!shape.empty() && !v.empty()) {
    shape.back() = v.back();
  }
  return shape;
}

std::vector<std::int64_t> FileCall::shape_of_lse() const {
  std::vector<std::int64_t> shape = inputs_.at("q").shape;
  if (shape.size() >= 3) {  // anything else is refused when the call is described
    shape.pop_back();
    if (!swapped_) {
      std::swap(shape[shape.size() - 2], shape[shape.size() - 1]);
    }
  }
  return shape;
}

}  // namespace fovea::cli
