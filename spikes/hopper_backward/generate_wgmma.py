# SPDX-License-Identifier: Apache-2.0
"""Writes wgmma.cuh: one wrapper for each wgmma shape and operand form that the kernels here use (PTX ISA 9.7.15)."""
import sys

def wrapper(form, n):
    r = n // 2
    acc = ",".join(f"%{i}" for i in range(r))
    outs = ",".join(f'"+f"(d[{i}])' for i in range(r))
    rs, transposed, a_transposed = form.startswith("rs"), form.endswith("t"), form.endswith("a")
    if rs:
        a, p = f"{{%{r},%{r+1},%{r+2},%{r+3}}}, %{r+4}", r + 5
        sig, ins = "const u32* a, u64 b, int keep", '"r"(a[0]),"r"(a[1]),"r"(a[2]),"r"(a[3]),"l"(b),"r"(keep)'
        tail = f"p, 1, 1, {int(transposed)}"
    else:
        a, p = f"%{r}, %{r+1}", r + 2
        sig, ins = "u64 a, u64 b, int keep", '"l"(a),"l"(b),"r"(keep)'
        tail = f"p, 1, 1, {int(a_transposed)}, {int(transposed)}"
    return (f"FOVEA_DEVICE void mma_{form}(float (&d)[{r}], {sig}) {{\n"
            f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{p}, 0;\\nwgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{acc}}}, {a}, {tail};\\n}}" : {outs} : {ins});\n}}\n')

text = ("// SPDX-License-Identifier: Apache-2.0\n// Written by generate_wgmma.py. d += a b (keep = 0: d = a b). ss: both operands in shared memory; rs: a in registers; t: b is MN-major; a: a is.\n#pragma once\n")
for form, widths in (("ss", (64, 80, 128)), ("ss_a", (80,)), ("ss_t", (32, 64, 128)), ("rs_t", (32, 64, 128))):
    for n in widths:
        text += wrapper(form, n)
open(sys.argv[1] if len(sys.argv) > 1 else "wgmma.cuh", "w").write(text)
