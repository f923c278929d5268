// SPDX-License-Identifier: Apache-2.0
//
// NVRTC, NVIDIA's run-time compiler, as a library that may or may not be there: where it is sought, which of several is
// taken, and one call that turns text into machine code with a report of what the compiler made of it. No GPU is
// needed.
//
// Candidates, in this order; the first that is new enough and not too new is taken:
//   1. FOVEA_NVRTC, a file or a folder; where it is set nothing else is looked at
//   2. the folders of set_nvrtc_folders() (Python gives sys.path, and conda's prefix), then of FOVEA_NVRTC_FOLDERS
//   3. the folder above the library's own: site-packages, for a program in C that links to the library of a wheel
//   4. the CUDA toolkit and conda: CUDA_HOME, CUDA_PATH, CONDA_PREFIX, /usr/local/cuda
//   5. LD_LIBRARY_PATH and the system's library folders
//   6. whatever the dynamic loader says for the name libnvrtc.so.13 or .12
// New enough: 12.4, or what first knew the architecture. Too new: a later major version than the driver's, which could
// not load the code. Of several in one folder the newest is taken.
//
// What the process has loaded already is not looked at (but for step 6): the choice, and with it the names of the
// entries in the cache, would depend on whether PyTorch was imported first.
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

struct NvrtcFolder {
  std::string path;  // the library is in it, or where a wheel, a toolkit or conda put it below it
  std::string name;  // why it is looked at: "CUDA_HOME"
};

struct NvrtcSearch {
  std::string forced;                // a file or folder; empty: none
  std::vector<NvrtcFolder> folders;  // in order
  bool loader = true;                // by the dynamic loader at the end
  int driver_major = 0;              // 0: no driver, so no limit
  Version least = {12, 4};           // see least_nvrtc_for

  // What the environment and set_nvrtc_folders() say; of the driver nothing.
  static NvrtcSearch from_environment();
};

// `folders` separated by ':', looked at before all others; "" is none. What was compiled or chosen before stays.
void set_nvrtc_folders(std::string_view folders);

struct NvrtcFile {
  std::string path;
  Version version;
  std::string found;  // where it was found and what was passed over before, for people
};

// The file from which the code or data at this address was loaded; empty where the loader does not know.
std::string loaded_from(const void* address);

// Throws Error(FOVEA_UNSUPPORTED) with every candidate, why it was passed over, and what to install; where FOVEA_NVRTC
// names one that will not do, Error(FOVEA_INVALID_ARGUMENT). A library is loaded only where its file does not tell the
// version.
NvrtcFile find_nvrtc(const NvrtcSearch& search);

// ---- compiling ----

struct Source {
  std::string text;                   // usually one #include
  std::span<const TextFile> headers;  // what it may include
  std::string expression;             // the kernel: "fovea::forward<fovea::ForwardSpec{...}>"
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
