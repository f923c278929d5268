// SPDX-License-Identifier: Apache-2.0
//
// What `fovea run` computes: tensors from files, the problem that they and the user's line make, outputs with memory.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/problem.h"
#include "fovea/c.h"
#include "io/array.h"

namespace fovea::cli {

using Member = const fovea_tensor* fovea_problem::*;

struct Input {
  const char* name;
  Member member;
  const char* help;
  bool is_rows;  // (B, S, H, D), to which layout= applies
};
inline constexpr std::array<Input, 17> kInputs = {{
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
    {"positions_q", &fovea_problem::positions_q, "B, int64: positions of each sequence's first query", false},
    {"positions_k", &fovea_problem::positions_k, "B, int64", false},
    {"dropout_streams", &fovea_problem::dropout_streams, "broadcastable to B, Hq, int64", false},
    {"grad_out", &fovea_problem::grad_out, "as out; with --backward", true},
    {"grad_lse", &fovea_problem::grad_lse, "as lse; with --backward, optional", false},
}};

struct Gradient {
  const char* name;
  Member member;
  const char* of;
  bool Results::*need;
};
inline constexpr std::array<Gradient, 6> kGradients = {{
    {"grad_q", &fovea_problem::grad_q, "q", &Results::q},
    {"grad_k", &fovea_problem::grad_k, "k", &Results::k},
    {"grad_v", &fovea_problem::grad_v, "v", &Results::v},
    {"grad_bias", &fovea_problem::grad_bias, "bias", &Results::bias},
    {"grad_bias2", &fovea_problem::grad_bias2, "bias2", &Results::bias2},
    {"grad_sink", &fovea_problem::grad_sink, "sink", &Results::sink},
}};

struct RunSettings {
  std::string file;
  std::map<std::string, std::string> files;  // by tensor
  std::string line;
  std::string output;
  bool backward = false;
  bool force = false;
};

// A call's tensors and options, ready for the C functions.
class FileCall {
 public:
  FileCall(Arrays inputs, const RunSettings& settings);
  FileCall(const FileCall&) = delete;
  FileCall& operator=(const FileCall&) = delete;

  const Problem& problem() const { return settled_; }
  const fovea_problem& get() const { return problem_; }

  // The outputs that a run will have written.
  std::vector<std::pair<std::string, fovea_dtype>> outputs() const;
  Arrays take_outputs() { return std::move(outputs_); }

 private:
  // Three things that the tensors' shapes alone do not say.
  void read_line_for_tensors(const std::string& line);
  // The problem as the tensors give it, then the user's words on top.
  void agree(const RunSettings& settings);
  // The options of settled_, as Shapes would say them.
  void apply();
  void refuse_what_is_not_passed_on(const Problem& called) const;

  std::string describe(Direction direction) const;

  const fovea_tensor* view(const std::string& name, const Array& array);
  // `of`: the input whose type it has; by default q.
  void add_output(const std::string& name, Member member, std::vector<std::int64_t> shape, const std::string& of = "q");
  // As q's, with v's columns.
  std::vector<std::int64_t> shape_of_out() const;
  // (B, Hq, Sq), or packed (Hq, total_q): q's without columns, heads before rows.
  std::vector<std::int64_t> shape_of_lse() const;

  Arrays inputs_;
  Arrays outputs_;
  std::vector<std::unique_ptr<fovea_tensor>> views_;
  fovea_problem problem_{};
  Problem settled_;
  std::string line_;
  bool swapped_ = false;  // the files hold B, H, S, D
};

}  // namespace fovea::cli
