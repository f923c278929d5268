// SPDX-License-Identifier: Apache-2.0
//
// NVRTC, NVIDIA's run-time compiler, as a library that may or may not be there: where it is sought, which of several is
// taken, and one call that turns text into machine code with a report of what the compiler made of it. No GPU is
// needed.
//
// Candidates, in this order; the first that is new enough and not too new is taken, and an error lists them all:
//   1. FOVEA_NVRTC, a file or a folder; where it is set nothing else is looked at
//   2. what is loaded already (PyTorch loads one)
//   3. folders given by the caller, or known to it (site-packages): nvidia/cuda_nvrtc/lib and nvidia/cu*/lib of the
//      pip wheels, or the folder itself
//   4. the CUDA toolkit: CUDA_HOME, CUDA_PATH, /usr/local/cuda
//   5. wherever the dynamic loader finds libnvrtc.so
// New enough: 12.4, or what first knew the architecture. Too new: a later major version than the driver's, which could
// not load the code.
#pragma once

#include <compare>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/jit/source.h"

namespace fovea::cuda::jit {

struct Version {
  int major = 0;
  int minor = 0;
  // NOLINTNEXTLINE(modernize-use-nullptr): the check mistakes the operator for one with 0
  friend auto operator<=>(const Version&, const Version&) = default;
};

std::string to_text(Version version);  // "12.4"

// ---- architectures: "sm_80", "sm_90a" ----

// sm_90a is the code of 9.0 alone, with wgmma and setmaxnreg; sm_90 runs on 9.x.
std::string architecture(int major, int minor, bool specific);

// The first NVRTC that knows it, and never less than 12.4.
Version least_nvrtc_for(std::string_view architecture);

// ---- finding it ----

struct NvrtcSearch {
  std::string forced;                // a file or folder; empty: none
  std::vector<std::string> folders;  // site-packages, or folders that hold the library itself
  std::vector<std::string> toolkits;
  bool loaded = true;       // among the objects of this process
  bool loader = true;       // by the dynamic loader's path
  int driver_major = 0;     // 0: no driver, so no limit
  Version least = {12, 4};  // see least_nvrtc_for

  // FOVEA_NVRTC, the folder beside which this library lies (site-packages in a Python installation) and the toolkits'
  // places; of the driver nothing.
  static NvrtcSearch from_environment();
};

struct NvrtcFile {
  std::string path;
  Version version;
};

// Throws Error(FOVEA_UNSUPPORTED) with every candidate, why it was passed over, and what to install; where FOVEA_NVRTC
// names one that will not do, Error(FOVEA_INVALID_ARGUMENT). A library is loaded only where its file does not tell the
// version.
NvrtcFile find_nvrtc(const NvrtcSearch& search);

// ---- compiling ----

struct Source {
  std::string text;                   // usually one #include
  std::span<const TextFile> headers;  // what it may include
  std::string expression;             // the kernel: "fovea::forward<fovea::Spec{...}>"
  std::string architecture;           // "sm_90a"
  std::vector<std::string> options;   // beyond default_options()
};

// --std=c++20 and what follows from the text having no headers of anyone else's.
std::span<const std::string_view> default_options();

// What ptxas said about the machine code.
struct Report {
  struct Message {
    std::string code;  // "C7510"
    std::string text;
    bool loss = false;  // serialised products, an ignored setmaxnreg; otherwise a remark, such as an added wait
  };

  int registers = 0;  // the kernel's; the rest is the sum over it and the functions that it calls
  int barriers = 0;
  int stack_bytes = 0;
  int spill_bytes = 0;  // stores and loads
  int local_bytes = 0;
  int shared_bytes = 0;
  std::vector<Message> messages;

  // Why this code is slower than its text means it to be: one line each. Empty is good.
  std::vector<std::string> faults() const;
};

Report parse_log(std::string_view log);

struct Binary {
  std::string cubin;
  std::string symbol;  // the kernel's name in it
  std::string log;
  Report report;  // of that log
};

// NVRTC's functions, as in nvrtc.h.
struct NvrtcApi {
  using Program = struct ProgramObject*;
  const char* (*get_error_string)(int result);
  int (*version)(int* major, int* minor);
  int (*create_program)(Program* program, const char* text, const char* name, int headers, const char* const* texts,
                        const char* const* names);
  int (*destroy_program)(Program* program);
  int (*compile_program)(Program program, int count, const char* const* options);
  int (*add_name_expression)(Program program, const char* expression);
  int (*get_lowered_name)(Program program, const char* expression, const char** name);
  int (*get_log_size)(Program program, std::size_t* bytes);
  int (*get_log)(Program program, char* log);
  int (*get_cubin_size)(Program program, std::size_t* bytes);
  int (*get_cubin)(Program program, char* cubin);
  int (*get_ptx_size)(Program program, std::size_t* bytes);
  int (*get_ptx)(Program program, char* ptx);
};

template <class Visit>
void for_each_function(NvrtcApi& api, Visit visit) {
  visit(api.get_error_string, "nvrtcGetErrorString");
  visit(api.version, "nvrtcVersion");
  visit(api.create_program, "nvrtcCreateProgram");
  visit(api.destroy_program, "nvrtcDestroyProgram");
  visit(api.compile_program, "nvrtcCompileProgram");
  visit(api.add_name_expression, "nvrtcAddNameExpression");
  visit(api.get_lowered_name, "nvrtcGetLoweredName");
  visit(api.get_log_size, "nvrtcGetProgramLogSize");
  visit(api.get_log, "nvrtcGetProgramLog");
  visit(api.get_cubin_size, "nvrtcGetCUBINSize");
  visit(api.get_cubin, "nvrtcGetCUBIN");
  visit(api.get_ptx_size, "nvrtcGetPTXSize");
  visit(api.get_ptx, "nvrtcGetPTX");
}

// A loaded one. It stays loaded: unloading a compiler gains nothing.
class Nvrtc {
 public:
  explicit Nvrtc(const std::string& path);  // throws Error(FOVEA_UNSUPPORTED)

  Version version() const { return version_; }
  const std::string& path() const { return path_; }

  // May be called by several threads at once. Text that does not compile is Error(FOVEA_INTERNAL_ERROR) with the log;
  // an architecture that this NVRTC does not know is FOVEA_UNSUPPORTED. Where `ptx` is given it gets the PTX, too.
  Binary compile(const Source& source, std::string* ptx = nullptr) const;

 private:
  NvrtcApi api_{};
  std::string path_;
  Version version_;
};

}  // namespace fovea::cuda::jit
