# SPDX-License-Identifier: Apache-2.0
"""Prints the wgmma wrappers: overloads by the accumulator's length, so that a kernel names no width."""


def wrapper(n, register_a, kind="bf16"):
    r = n // 2
    accumulators = ", ".join(f"%{i}" for i in range(r))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(r))
    if register_a:
        name, signature = "wgmma_rs", "const u32* a, u64 b, int accumulate"
        operands, inputs = f"{{%{r}, %{r+1}, %{r+2}, %{r+3}}}, %{r+4}", '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)'
        predicate, tail = r + 5, "p, 1, 1, 1"  # B is MN-major: V as it lies
    else:
        name, signature = "wgmma_ss", "u64 a, u64 b, int accumulate"
        operands, inputs = f"%{r}, %{r+1}", '"l"(a), "l"(b), "r"(accumulate)'
        predicate, tail = r + 2, "p, 1, 1, 0, 0"
    return f"""__device__ __forceinline__ void {name}(float (&d)[{r}], {signature}) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{predicate}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{accumulators}}}, {operands}, {tail};\\n}}"
               : {outputs} : {inputs});
}}
"""


def text(keys, dv):
    head = "typedef unsigned int u32;\ntypedef unsigned long long u64;\n"
    return head + wrapper(keys, False) + wrapper(dv, True)
