// SPDX-License-Identifier: Apache-2.0
//
// fovea run: tensors from files, one forward and, when asked, one backward, results to files.
//
//   1. Read    every tensor by its name, from one .safetensors or from a file each.
//   2. Settle  what the tensors say about the problem is turned into its line; the user's line adds options to it, and
//              where it speaks of shapes it must agree.
//   3. Refuse  whatever could not be computed, or not be written afterwards, before anything is.
//   4. Run, and write.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "commands.h"
#include "core/nearest.h"
#include "core/problem.h"
#include "fault.h"
#include "io/file.h"
#include "io/npy.h"
#include "io/safetensors.h"
#include "progress.h"
#include "work.h"

namespace fovea::cli {
namespace {

namespace fs = std::filesystem;

using Member = const fovea_tensor* fovea_problem::*;

struct Input {
  const char* name;
  Member member;
  const char* help;
  bool is_rows;  // (B, S, H, D), to which layout= applies
};
constexpr std::array<Input, 14> kInputs = {{
    {"q", &fovea_problem::q, "B, Sq, Hq, D; packed: total_q, Hq, D", true},
    {"k", &fovea_problem::k, "B, Sk, Hk, D", true},
    {"v", &fovea_problem::v, "B, Sk, Hk, Dv", true},
    {"bias", &fovea_problem::bias, "broadcastable to B, Hq, Sq, Sk", false},
    {"bias2", &fovea_problem::bias2, "another one", false},
    {"mask", &fovea_problem::mask, "bool, true takes part", false},
    {"alibi_slopes", &fovea_problem::alibi_slopes, "Hq or B, Hq", false},
    {"sink", &fovea_problem::sink, "Hq", false},
    {"cu_seqlens_q", &fovea_problem::cu_seqlens_q, "B + 1: the sequences are packed", false},
    {"cu_seqlens_k", &fovea_problem::cu_seqlens_k, "B + 1", false},
    {"seqused_q", &fovea_problem::seqused_q, "B", false},
    {"seqused_k", &fovea_problem::seqused_k, "B", false},
    {"grad_out", &fovea_problem::grad_out, "as out; with --backward", true},
    {"grad_lse", &fovea_problem::grad_lse, "as lse; with --backward, optional", false},
}};

struct Gradient {
  const char* name;
  Member member;
  const char* of;
  bool Need::*need;
};
constexpr std::array<Gradient, 6> kGradients = {{
    {"grad_q", &fovea_problem::grad_q, "q", &Need::q},
    {"grad_k", &fovea_problem::grad_k, "k", &Need::k},
    {"grad_v", &fovea_problem::grad_v, "v", &Need::v},
    {"grad_bias", &fovea_problem::grad_bias, "bias", &Need::bias},
    {"grad_bias2", &fovea_problem::grad_bias2, "bias2", &Need::bias2},
    {"grad_sink", &fovea_problem::grad_sink, "sink", &Need::sink},
}};

struct Settings {
  std::string file;
  std::map<std::string, std::string> files;  // by tensor
  std::string line;
  std::string output;
  bool backward = false;
  bool force = false;
};

bool is_rows(const std::string& name) {
  return std::any_of(kInputs.begin(), kInputs.end(), [&](const Input& i) { return i.name == name && i.is_rows; });
}

// ---- 1. read ----

Array read_one(const std::string& name, const fs::path& path) {
  if (path.extension() == ".npy") {
    return read_npy(path);
  }
  if (fs::is_directory(path)) {
    throw Fault(kBadInput, fmt::format("--{} {}: a folder, where a file is expected", name, path.string()));
  }
  if (path.extension() != ".safetensors") {
    throw Fault(kBadInput, fmt::format("--{} {}: a name that does not say what the file is; accepted: .npy or "
                                       ".safetensors at its end",
                                       name, path.string()));
  }
  Arrays arrays = read_safetensors(path);
  const auto found = arrays.find(name);
  if (found == arrays.end()) {
    std::vector<std::string> there;
    there.reserve(arrays.size());
    for (const auto& [other, unused] : arrays) {
      there.push_back(other);
    }
    throw Fault(kBadInput, fmt::format("--{0} {1}: the file has no tensor '{0}'; it has: {2}", name, path.string(),
                                       fmt::join(there, ", ")));
  }
  return std::move(found->second);
}

Arrays read_inputs(const Settings& settings) {
  std::vector<std::string> known;
  known.reserve(kInputs.size());
  for (const Input& input : kInputs) {
    known.emplace_back(input.name);
  }
  Arrays arrays;
  if (!settings.file.empty()) {
    if (fs::path(settings.file).extension() == ".npy") {
      throw Fault(kBadInput, fmt::format("{}: an .npy file holds one array; say which tensor it is, as in --q {}",
                                         settings.file, settings.file));
    }
    arrays = read_safetensors(settings.file);
    for (const auto& [name, unused] : arrays) {
      if (std::find(known.begin(), known.end(), name) == known.end()) {
        throw Fault(kBadInput,
                    fmt::format("{}: tensor '{}' is not an input{}", settings.file, name, hint(name, known)));
      }
    }
  }
  for (const auto& [name, path] : settings.files) {
    if (arrays.contains(name)) {
      throw Fault(kBadInput,
                  fmt::format("--{0} {1}: {2} has a tensor '{0}' too; give it once", name, path, settings.file));
    }
    arrays.emplace(name, read_one(name, path));
  }
  for (const char* name : {"q", "k", "v"}) {
    if (!arrays.contains(name)) {
      throw Fault(kBadInput, fmt::format("{0} is missing: give --{0} FILE, or a .safetensors that holds it", name));
    }
  }
  return arrays;
}

// ---- 2. settle ----

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
  constexpr std::array<const char*, 20> kKeys = {"b",      "hq",     "hk",     "sq",      "sk",      "d",     "dv",
                                                 "type",   "seqs_q", "seqs_k", "total_q", "total_k", "max_q", "max_k",
                                                 "used_q", "used_k", "alibi",  "sink",    "bias",    "bias2"};
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

// A call's tensors and options, ready for the C functions.
class Call {
 public:
  Call(Arrays inputs, const Settings& settings) : inputs_(std::move(inputs)) {
    problem_.size = sizeof problem_;
    read_line_for_tensors(settings.line);
    for (const Input& input : kInputs) {
      const auto found = inputs_.find(input.name);
      if (found != inputs_.end()) {
        problem_.*input.member = view(found->first, found->second);
      }
    }
    add_output("out", &fovea_problem::out, shape_of_out());
    add_output("lse", &fovea_problem::lse, shape_of_lse());
    agree(settings);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const Problem& problem() const { return settled_; }
  const fovea_problem& get() const { return problem_; }

  // The outputs that a run will have written.
  std::vector<std::pair<std::string, fovea_dtype>> outputs() const {
    std::vector<std::pair<std::string, fovea_dtype>> all;
    for (const auto& [name, array] : outputs_) {
      all.emplace_back(name, array.dtype);
    }
    return all;
  }
  Arrays take_outputs() { return std::move(outputs_); }

 private:
  // Three things that the tensors' shapes alone do not say.
  void read_line_for_tensors(const std::string& line) {
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

  // The problem as the tensors give it, then the user's words on top.
  void agree(const Settings& settings) {
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
                    word == "bwd"
                        ? "problem line: 'bwd' without --backward; give both, or neither"
                        : "problem line: 'fwd' with --backward; accepted: bwd, or no word about the direction");
      }
      line = with_word(line, word);
    }
    settled_ = parse(line);
    refuse_gpu("run", settled_.device, settled_.backend);
    line_ = line;
    apply();
    if (settings.backward) {
      for (const Gradient& gradient : kGradients) {
        if (settled_.need.*gradient.need) {
          add_output(gradient.name, gradient.member, inputs_.at(gradient.of).shape, gradient.of);
        }
      }
    }
  }

  // The options of settled_, as Shapes would say them.
  void apply() {
    const Problem& p = settled_;
    problem_.flags = (p.causal ? FOVEA_CAUSAL : 0U) | (p.deterministic ? FOVEA_DETERMINISTIC : 0U) |
                     (p.scale ? FOVEA_SCALE : 0U) | (p.clear_rows ? FOVEA_CLEAR_ROWS : 0U) | FOVEA_WINDOW;
    problem_.align = p.top_left ? FOVEA_TOP_LEFT : FOVEA_BOTTOM_RIGHT;
    problem_.rng = static_cast<std::int32_t>(p.rng);
    problem_.device = p.device;
    problem_.backend = p.backend.empty() ? nullptr : p.backend.c_str();
    problem_.scale = p.scale.value_or(0);
    problem_.window_left = p.window_left;
    problem_.window_right = p.window_right;
    problem_.softcap = p.softcap;
    problem_.dropout_p = p.dropout;
    problem_.seed = p.seed;
    problem_.offset = p.offset;
  }

  std::string describe(Direction direction) const {
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

  const fovea_tensor* view(const std::string& name, const Array& array) {
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

  // `of`: the input whose type it has; by default q.
  void add_output(const std::string& name, Member member, std::vector<std::int64_t> shape,
                  const std::string& of = "q") {
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

  // As q's, with v's columns.
  std::vector<std::int64_t> shape_of_out() const {
    std::vector<std::int64_t> shape = inputs_.at("q").shape;
    const std::vector<std::int64_t>& v = inputs_.at("v").shape;
    if (!shape.empty() && !v.empty()) {
      shape.back() = v.back();
    }
    return shape;
  }

  // (B, Hq, Sq), or packed (Hq, total_q): q's without columns, heads before rows.
  std::vector<std::int64_t> shape_of_lse() const {
    std::vector<std::int64_t> shape = inputs_.at("q").shape;
    if (shape.size() >= 3) {  // anything else is refused when the call is described
      shape.pop_back();
      if (!swapped_) {
        std::swap(shape[shape.size() - 2], shape[shape.size() - 1]);
      }
    }
    return shape;
  }

  Arrays inputs_;
  Arrays outputs_;
  std::vector<std::unique_ptr<fovea_tensor>> views_;
  fovea_problem problem_{};
  Problem settled_;
  std::string line_;
  bool swapped_ = false;  // the files hold B, H, S, D
};

// ---- 3. where it goes ----

bool is_one_file(const std::string& output) { return fs::path(output).extension() == ".safetensors"; }

std::map<std::string, fs::path> targets(const Call& call, const Settings& settings) {
  std::map<std::string, fs::path> paths;
  if (is_one_file(settings.output)) {
    paths[""] = settings.output;
  } else {
    const bool folder = settings.output.ends_with('/') || fs::is_directory(settings.output);
    if (!folder) {
      const bool bare = !fs::path(settings.output).has_extension() && !fs::exists(settings.output);
      throw Fault(
          kBadInput,
          fmt::format("--output {}: accepted: a name that ends in .safetensors, or a folder (for an .npy file a "
                      "tensor), which is there or ends in /{}",
                      settings.output, bare ? fmt::format("; did you mean {}/?", settings.output) : ""));
    }
    for (const auto& [name, dtype] : call.outputs()) {
      if (!npy_carries(dtype)) {
        throw Fault(kBadInput,
                    fmt::format("--output {}: {} is {}, which .npy cannot carry; give --output FILE.safetensors",
                                settings.output, name, name_of(static_cast<DType>(dtype))));
      }
      paths[name] = fs::path(settings.output) / (name + ".npy");
    }
    fs::create_directories(settings.output);
  }
  for (const auto& [name, path] : paths) {
    require_writable(path, settings.force);
  }
  return paths;
}

// ---- 4. run, and write ----

std::string text_of_time(double seconds) {
  return seconds < 1e-3 ? fmt::format("{:.0f} us", 1e6 * seconds) : fmt::format("{:.3f} ms", 1e3 * seconds);
}

// Nothing where the time is that of a call, not of its arithmetic.
std::string text_of_speed(double flops, double seconds) {
  constexpr double kFewestFlops = 1e7;
  return flops < kFewestFlops ? "" : fmt::format(", {:.1f} GFLOP/s of allowed pairs", 1e-9 * flops / seconds);
}

// What the line leaves to defaults that somebody may not expect.
void print_notes(const Problem& p, const std::string& line) {
  const std::vector<std::string> words = words_of(line);
  const bool aligned = std::any_of(words.begin(), words.end(), [](const std::string& word) {
    return word.starts_with("align=") || word.starts_with("causal=");
  });
  const bool lengths_differ = p.seqlen_q != p.seqlen_k || p.lengths_q != p.lengths_k || p.has_used_q || p.has_used_k;
  if (lengths_differ && !aligned && (p.banded() || p.alibi != Alibi::kNone)) {
    fmt::print(
        "note: bottom-right: the last query meets the last key; with align=tl (PyTorch's is_causal) the first "
        "meets the first\n");
  }
  if (p.dropout > 0) {
    fmt::print("dropout: seed={} offset={}; another seed draws another mask\n", p.seed, p.offset);
  }
}

void run(const Settings& settings) {
  Call call(read_inputs(settings), settings);
  Caller forward(call.get(), Direction::kForward);  // refuses what cannot be computed
  std::optional<Caller> backward;
  if (settings.backward) {
    backward.emplace(call.get(), Direction::kBackward);
  }
  const std::map<std::string, fs::path> paths = targets(call, settings);
  Problem problem = call.problem();
  const auto timed = [&](const char* what, Direction direction, Caller& caller) {
    const double expected = expected_seconds(problem, direction);
    const auto start = std::chrono::steady_clock::now();
    run_with_progress(what, expected, [&] { caller(); });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    fmt::print("{}: {}{}\n", what, text_of_time(seconds), text_of_speed(flops(problem, direction), seconds));
  };
  fmt::print("{}\n", print(problem));
  print_notes(problem, settings.line);
  timed("forward", Direction::kForward, forward);
  if (backward) {
    timed("backward", Direction::kBackward, *backward);
  }
  Arrays outputs = call.take_outputs();
  if (is_one_file(settings.output)) {
    write_safetensors(paths.at(""), outputs);
  }
  for (const auto& [name, array] : outputs) {
    if (!is_one_file(settings.output)) {
      write_npy(paths.at(name), array);
    }
    fmt::print("{:<10} {:<5} {:<20} {}\n", name, name_of(static_cast<DType>(array.dtype)),
               fmt::format("({})", fmt::join(array.shape, ", ")),
               (is_one_file(settings.output) ? paths.at("") : paths.at(name)).string());
  }
}

}  // namespace

void add_run(CLI::App& app) {
  auto settings = std::make_shared<Settings>();
  CLI::App* run_app = app.add_subcommand("run", "Attention of tensors in files, forward and backward");
  run_app->add_option("file", settings->file, "A .safetensors that holds q, k, v and whatever else below is meant")
      ->type_name("FILE");
  for (const Input& input : kInputs) {
    run_app
        ->add_option_function<std::string>(
            fmt::format("--{}", input.name),
            [settings, name = std::string(input.name)](const std::string& path) { settings->files[name] = path; },
            input.help)
        ->type_name("FILE")
        ->group("Tensors, each of an .npy or .safetensors file of its own");
  }
  run_app
      ->add_option("-o,--output", settings->output,
                   "FILE.safetensors for all results, or a folder for an .npy file each: out, lse, grad_q, ...")
      ->required()
      ->type_name("PATH");
  run_app
      ->add_option("-p,--problem", settings->line,
                   "Options, in the words of the problem line; what it says of shapes must agree with the tensors")
      ->type_name("LINE");
  run_app->add_flag("--backward", settings->backward, "The gradients too, from grad_out (and grad_lse)");
  run_app->add_flag("--force", settings->force, "Overwrite files that are there");
  run_app->footer(
      "Examples:\n"
      "  fovea run inputs.safetensors -o outputs.safetensors -p causal\n"
      "  fovea run --q q.npy --k k.npy --v v.npy --bias b.npy -o results/\n"
      "  fovea run in.safetensors --grad_out do.npy --backward -o out.safetensors -p 'window=512,0 softcap=30 "
      "need=q,k,v'\n"
      "  fovea run in.safetensors -o out.safetensors -p 'layout=bhsd dropout=0.1 seed=42'\n\n" +
      std::string(problem_line_help()) +
      "For run, layout=bhsd says that the files hold B, H, S, D instead of B, S, H, D.");
  run_app->callback([settings] { run(*settings); });
}

}  // namespace fovea::cli
