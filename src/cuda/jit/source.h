// SPDX-License-Identifier: Apache-2.0
//
// The text of the kernels, inside the library: src/math/*.h and whatever stands in src/cuda/device. Nothing is read
// from the file system when a kernel is compiled (but with FOVEA_KERNEL_TEXT); NVRTC is handed these files as named
// headers, and their text includes nothing but each other. cmake/embed.cmake turns the files into embedded_files().
//
// NVRTC looks an #include up by the very string in it, whatever file it stands in. So a file goes by two names: its
// path below src ("math/band.h", as host code includes it, too) and its path below its own folder ("band.h", as its
// neighbours do). Include guards see to it that both mean one definition.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fovea::cuda::jit {

struct TextFile {
  std::string_view name;  // as an #include has it
  std::string_view text;
  // Of the text, made by the build: it takes a millisecond for all that a kernel includes. Without it the text counts.
  std::string_view hash = {};
};

// Every file by each of its names.
std::span<const TextFile> embedded_files();

// FOVEA_KERNEL_TEXT, for work on kernels: the same files read from a folder as `src` is, instead of those in the
// library; embedded_files() where it is not set. Read once, and kept for the process. Throws
// Error(FOVEA_INVALID_ARGUMENT) where the folder is not such a one.
std::span<const TextFile> text_from_environment();
std::vector<TextFile> read_text(const std::string& folder);  // never freed

// A hash, in hexadecimal, of a file and of everything that it includes, directly or not: a part of a cache key. What
// other kernels are made of is not in it, so that a change to one leaves the machine code of the others where it is.
std::string hash_of(std::span<const TextFile> files, std::string_view name);

}  // namespace fovea::cuda::jit
