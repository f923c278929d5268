#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compiles instances with NVRTC's sibling and prints registers, spills and serialisation warnings. No GPU needed.
cd "$(dirname "$0")" && out=${OUT_DIR:-/tmp} && : > "$out/try.cu"
printf '#include "ptx.cuh"\n#include "wgmma.cuh"\n#include "backward.cuh"\n#include "bias_gradient.cuh"\n#include "backward_small.cuh"\n' > "$out/try.cu"
for name in "$@"; do printf 'template __global__ decltype(%s) %s;\n' "$name" "$name" >> "$out/try.cu"; done
nvcc -std=c++20 -O3 -I. -gencode arch=compute_90a,code=sm_90a -cubin -Xptxas -v -o "$out/try.cubin" "$out/try.cu" 2>&1 | grep -E "error|warning|C75|registers|spill|Compiling" | grep -v "^$"
