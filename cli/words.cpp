// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "commands.h"
#include "fault.h"
#include "fovea/c.h"

namespace fovea::cli {

std::vector<std::string> words_of(std::string_view line) {
  std::istringstream stream{std::string(line)};
  std::vector<std::string> words;
  for (std::string word; stream >> word;) {
    words.push_back(word);
  }
  return words;
}

bool matches(std::string_view line, const std::vector<std::string>& filter) {
  const std::vector<std::string> words = words_of(line);
  return std::all_of(filter.begin(), filter.end(), [&](const std::string& entry) {
    const bool wanted = !entry.starts_with('!');
    const std::string part = wanted ? entry : entry.substr(1);
    const bool found = std::any_of(words.begin(), words.end(), [&](const std::string& word) {
      return word == part || word.starts_with(part + "=");
    });
    return found == wanted;
  });
}

void refuse_gpu(std::string_view command, std::int32_t device, std::string_view backend) {
  if (device == FOVEA_CUDA || backend == "cuda") {
    throw Fault(kUnsupported,
                fmt::format("{}: fovea {} computes on the CPU. For a GPU: fovea check --device cuda, fovea explain "
                            "and fovea precompile; bench/gpu/run.py measures (docs/platforms.md)",
                            device == FOVEA_CUDA ? "device=cuda" : "backend=cuda", command));
  }
}

std::string_view problem_line_help() {
  return "A problem line consists of these words, each at most once, in any order:\n"
         "  fwd bwd                          the direction\n"
         "  b=4 or b=2x2  hq=8  hk=2         batch (of one or two levels), query heads, key heads\n"
         "  sq=512  sk=512  d=64  dv=64      lengths and head dimensions\n"
         "  fp32 fp16 bf16 fp64              the type of q, k and v\n"
         "  layout=bshd|bhsd|qkv3|strided    the order of rows and heads in memory\n"
         "  skew=N                           elements by which tensors and rows are misaligned\n"
         "  seqs_q=128x3,77  seqs_k=...      lengths of packed sequences: three of 128, one of 77\n"
         "  total_q=N  total_k=N             number of packed rows, if larger than the sum of the lengths\n"
         "  max_q=N  max_k=N                 max_seqlen, if larger than the longest sequence\n"
         "  used_q=...  used_k=...           how many rows of each sequence exist\n"
         "  causal  window=L,R  scale=X  softcap=X  alibi=h|b,h  sink\n"
         "  align=br|tl                      if sq and sk differ: br aligns the last query with the last key\n"
         "                                   (default), tl the first with the first (PyTorch's is_causal)\n"
         "  pos=Q,K                          positions of query 0 and key 0 in a larger problem, in place of align\n"
         "  pos_q=...  pos_k=...             numbers for each sequence that are added to them\n"
         "  bias=1,h,q,k[:TYPE]  bias2=...  mask=b,1,1,k        1: broadcast\n"
         "  dropout=P  seed=N  offset=N  rng=fovea|torch_mem_efficient\n"
         "  streams=b,h                      dropout_streams is given, by batch and head; 1: broadcast\n"
         "  need=q,k,v,bias,bias2,sink       the gradients that a bwd computes\n"
         "  wide=out,q,k,v,bias,bias2        results of fp32 beside inputs of 16 bits\n"
         "  add=out,q,k,v,bias,bias2,sink    results that are combined with what their memory holds\n"
         "  det  lse  dlse                   deterministic; a fwd returns lse; a bwd has a gradient of lse\n"
         "  device=cpu|cuda  backend=NAME\n"
         "  clear                            rows that belong to no sequence are set to 0 (lse: -inf)\n";
}

}  // namespace fovea::cli
