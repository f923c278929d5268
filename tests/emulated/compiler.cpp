// SPDX-License-Identifier: Apache-2.0
//
// A libnvrtc.so that compiles kernels for the CPU, by the compiler that compiled this. The text is the library's own,
// or FOVEA_KERNEL_TEXT's, but for the wrappers of instructions (ptx/), in whose stead text/ has others, and for the few
// lines of kReplaced.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

namespace fs = std::filesystem;

// A file of the kernels' text, what stands there, and what is compiled instead. Assembly outside of ptx/, and shared
// memory, which is not a variable here but the block's.
struct Replaced {
  std::string_view file;  // its end; "" is every file
  std::string_view text;
  std::string_view by;
};
constexpr Replaced kReplaced[] = {
    {"", "extern __shared__ __align__(1024) unsigned char memory[];",
     "unsigned char* const memory = emulated::shared_memory();"},
    {"", "extern __shared__ __align__(128) unsigned char memory[];",
     "unsigned char* const memory = emulated::shared_memory();"},
    // GCC 12 crashes where generic lambdas read a constant of the function around them.
    {"sm90/wide_backward.cuh", "\n  constexpr Sm90WideBackwardSizes kSizes",
     "\n  static constexpr Sm90WideBackwardSizes kSizes"},
    {"sm90/backward_copy.cuh", "\n  constexpr Sm90BackwardSizes kSizes",
     "\n  static constexpr Sm90BackwardSizes kSizes"},
    {"sm90/backward_copy_bias.cuh", "\n  constexpr Sm90BackwardSizes kSizes",
     "\n  static constexpr Sm90BackwardSizes kSizes"},
    // GCC 12 refuses a field of a base of a template argument there.
    {"work/query_block.cuh", "requires { requires S.split; };",
     "[] { if constexpr (requires { S.split; }) { return S.split; } else { return false; } }();"},
    {"work/sm90_key_block.cuh", R"(asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));)", "thread = threadIdx.x;"},
    {"score/sm90_dropout.cuh", R"(asm("{\n.reg .b64 t;\nmul.wide.u32 t, %2, %3;\nmov.b64 {%1, %0}, t;\n}"
      : "=r"(high.bits), "=r"(low.bits)
      : "r"(a.bits), "r"(b));)",
     "high.bits = u32((u64(a.bits) * b) >> 32);\n  low.bits = a.bits * b;"},
    {"score/sm90_dropout.cuh",
     R"(asm("{\n.reg .b32 least, zero;\nmov.b32 zero, 0;\nmin.u16x2 least, %1, %2;\nsub.u32 least, %2, least;\n"
          "set.eq.u32.f16x2 %0, least, zero;\n}"
          : "=r"(below)
          : "r"(halves & 0x7fff7fffu), "r"(limit));)",
     "below = halves_at_least(halves & 0x7fff7fffu, limit);"},
    {"score/sm90_dropout.cuh", R"(asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(top) : "r"(halves));)",
     "top = (halves >> 31 != 0 ? 0xffff0000u : 0) | ((halves & 0x8000u) != 0 ? 0xffffu : 0);"},
};

void replace_all(std::string& text, std::string_view what, std::string_view by) {
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + by.size())) {
    text.replace(at, what.size(), by);
  }
}

// How many blocks a cluster of a kernel has, as its text says: a number, or an expression of the Spec S. `text`: of its
// file; `expression`: its name with the Spec.
std::string cluster_of(const std::string& text, const std::string& expression) {
  const std::size_t spec = expression.find('<');
  const std::string name = expression.substr(0, spec).substr(expression.rfind("::", spec) + 2);
  const std::size_t declared = text.find(" " + name + "(");
  const std::size_t begin = text.rfind("__global__", declared);
  constexpr std::string_view kWord = "__cluster_dims__(";
  const std::size_t at = declared == std::string::npos ? declared : text.find(kWord, begin);
  if (at == std::string::npos || at > declared) {
    return "1";
  }
  const std::size_t first = at + kWord.size();
  return "[]<auto S>() { using namespace fovea::cuda; return unsigned(" +
         text.substr(first, text.find(", 1, 1", first) - first) + "); }.template operator()<" +
         expression.substr(spec + 1, expression.rfind('>') - spec - 1) + ">()";
}

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// A folder that goes with its files.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "fovea-emulated-XXXXXX").string();
    if (mkdtemp(name.data()) != nullptr) {
      path_ = name;
    }
  }
  ~Folder() {
    std::error_code error;
    fs::remove_all(path_, error);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

}  // namespace

struct Program {
  std::string text;
  std::vector<std::pair<std::string, std::string>> headers;
  std::string expression;
  std::string log;
  std::string code;
};

extern "C" {

const char* nvrtcGetErrorString(int result) { return result == 0 ? "none" : "the host's compiler fails"; }
int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
int nvrtcCreateProgram(Program** program, const char* text, const char*, int count, const char* const* texts,
                       const char* const* names) {
  *program = new Program;
  (*program)->text = text;
  for (int n = 0; n < count; ++n) {
    (*program)->headers.emplace_back(names[n], texts[n]);
  }
  return 0;
}
int nvrtcDestroyProgram(Program** program) {
  delete *program;
  return 0;
}
// $EMULATED_SPEC, "TEXT=>OTHER": a kernel that the host does not plan. The host's arguments and sizes stay as they are.
int nvrtcAddNameExpression(Program* program, const char* expression) {
  program->expression = expression;
  const char* const set = std::getenv("EMULATED_SPEC");
  const std::string_view change = set != nullptr ? set : "";
  if (const std::size_t at = change.find("=>"); at != std::string_view::npos) {
    replace_all(program->expression, change.substr(0, at), change.substr(at + 2));
  }
  return 0;
}
int nvrtcCompileProgram(Program* program, int, const char* const*) {
  const Folder folder;
  std::string cluster = "1";
  for (const auto& [name, text] : program->headers) {
    if (program->text.find('"' + name + '"') != std::string::npos) {
      cluster = cluster_of(text, program->expression);
    }
    if (!name.starts_with("math/") && (!name.starts_with("cuda/") || name.starts_with("cuda/device/ptx/"))) {
      continue;  // the same file by its other name, or one that text/ has
    }
    std::string changed = text;
    for (const Replaced& one : kReplaced) {
      if (name.ends_with(one.file)) {
        replace_all(changed, one.text, one.by);
      }
    }
    fs::create_directories((folder.path() / name).parent_path());
    std::ofstream(folder.path() / name) << changed;
  }
  std::ofstream(folder.path() / "kernel.cpp")
      << "#include <utility>\n#include \"cuda_words.h\"\n"
      << program->text << "template <class... T, std::size_t... kNumber>\n"
      << "void call(void (*kernel)(T...), void** parameters, std::index_sequence<kNumber...>) {\n"
      << "  kernel(*static_cast<T*>(parameters[kNumber])...);\n}\n"
      << "template <class... T>\n"
      << "void call(void (*kernel)(T...), void** parameters) {\n"
      << "  call(kernel, parameters, std::index_sequence_for<T...>());\n}\n"
      << "extern \"C\" void emulated_kernel(void** parameters) { call(" << program->expression << ", parameters); }\n"
      << "extern \"C\" const unsigned emulated_cluster = " << cluster << ";\n"
      << "extern \"C\" const char emulated_name[] = R\"(" << program->expression << ")\";\n";
  const std::string at = folder.path().string();
  const std::string command = "cd '" + at +
                              "' && " EMULATED_COMPILER " -std=c++20 -O1 -w -fPIC -shared -I'" EMULATED_SOURCE
                              "/text' -I'" EMULATED_SOURCE "' -I. -Icuda/device -Imath kernel.cpp '" EMULATED_LIBRARIES
                              "/libcuda.so.1' -o kernel.so 2>log";
  const int result = std::system(command.c_str());
  program->log = read(folder.path() / "log");
  if (result != 0) {
    return 6;  // NVRTC_ERROR_COMPILATION
  }
  const std::string library = read(folder.path() / "kernel.so");
  const std::uint64_t bytes = library.size();
  program->code.assign(reinterpret_cast<const char*>(&bytes), sizeof bytes);
  program->code += library;
  return 0;
}
int nvrtcGetLoweredName(Program*, const char*, const char** name) {
  *name = "emulated_kernel";
  return 0;
}
int nvrtcGetProgramLogSize(Program* program, std::size_t* bytes) {
  *bytes = program->log.size() + 1;
  return 0;
}
int nvrtcGetProgramLog(Program* program, char* log) {
  std::copy_n(program->log.c_str(), program->log.size() + 1, log);
  return 0;
}
int nvrtcGetCUBINSize(Program* program, std::size_t* bytes) {
  *bytes = program->code.size();
  return 0;
}
int nvrtcGetCUBIN(Program* program, char* code) {
  std::copy(program->code.begin(), program->code.end(), code);
  return 0;
}
int nvrtcGetPTXSize(Program*, std::size_t* bytes) {
  *bytes = 1;
  return 0;
}
int nvrtcGetPTX(Program*, char* text) {
  *text = '\0';
  return 0;
}
}
