# SPDX-License-Identifier: Apache-2.0
"""The rows of the GPU benchmark: a case says what is computed, not which library computes it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # imported where it is needed: the rows can be listed without it

MIXED = (128, 256, 384, 512, 640, 1024, 1536, 2048, 2816, 4992, 8064)  # lengths of one packed batch
SHORTER = (2048, 1024, 512, 1792, 1536, 2048, 768, 1280, 2048, 1328, 2000)


@dataclass(frozen=True)
class Case:
    name: str
    group: str
    batch: int
    hq: int
    sq: int
    d: int
    hk: int = 0  # 0: hq
    sk: int = 0  # 0: sq
    dv: int = 0  # 0: d
    outer: int = 0  # a batch of two levels: outer x batch / outer
    dtype: str = "bf16"
    causal: bool = False
    window: tuple = (-1, -1)
    bias: tuple = ()  # (b, h) that it really has; of two levels b is the outer one
    bias_rows: bool = True  # whether it has queries, keys
    bias_keys: bool = True
    bias_grad: bool = True
    bias_type: str = ""  # "": that of q
    bias_pad: int = 0  # elements by which a bias row is longer than its keys
    bias2: bool = False  # B, 1, 1, Sk
    mask: str = ""  # "full" (B, 1, Sq, Sk) or "key" (B, 1, 1, Sk), bool, nine tenths true
    dropout: float = 0.0
    softcap: float = 0.0
    sink: bool = False
    alibi: bool = False
    lengths: tuple = ()  # packed sequences
    deterministic: bool = False
    need: tuple = ()  # the gradients asked for; (): all
    beside: str = ""  # the row of ours that a feature's cost is measured by
    target: tuple = ()  # what is to be reached, forward and backward, in the row's unit; 0: nothing
    target_of: tuple = ()  # the same as a part of our speed on the row `beside`
    unit: str = "TFLOP/s"  # or "ms", "GB/s"
    graph: bool = False  # under a CUDA graph, in microseconds
    forward_only: bool = False
    flex: bool = False  # FlexAttention, which compiles for many seconds, takes part too

    @property
    def heads_k(self) -> int:
        return self.hk or self.hq

    @property
    def rows_k(self) -> int:
        return self.sk or self.sq

    @property
    def dim_v(self) -> int:
        return self.dv or self.d

    @property
    def levels(self) -> tuple:
        return (self.outer, self.batch // self.outer) if self.outer else (self.batch,)

    @property
    def entries(self) -> int:
        return len(self.lengths) or self.batch

    @property
    def type(self) -> torch.dtype:
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.dtype]

    @property
    def gradients(self) -> tuple:
        there = ["q", "k", "v"] + ["bias"] * bool(self.bias and self.bias_grad) + ["bias2"] * self.bias2 + ["sink"] * self.sink
        return tuple(name for name in there if not self.need or name in self.need)

    def lines(self) -> list[str]:
        """The problem's one-line forms, one for each direction."""
        words = [f"hq={self.hq}", f"hk={self.heads_k}", f"d={self.d}", f"dv={self.dim_v}", self.dtype]
        if self.lengths:
            lengths = ",".join(map(str, self.lengths))
            words += [f"b={len(self.lengths)}", f"seqs_q={lengths}", f"seqs_k={lengths}"]
        else:
            words += ["b=" + "x".join(map(str, self.levels)), f"sq={self.sq}", f"sk={self.rows_k}"]
        words += ["causal"] * self.causal + ["det"] * self.deterministic + ["sink"] * self.sink + ["alibi=h"] * self.alibi
        words += [f"window={self.window[0]},{self.window[1]}"] * (self.window != (-1, -1))
        words += [f"softcap={self.softcap}"] * (self.softcap != 0) + [f"dropout={self.dropout}"] * (self.dropout != 0)
        batch = "b1,b2" if self.outer else "b"
        if self.bias:
            has = zip(("b1,1" if self.outer else "b", *"hqk"), (*self.bias, self.bias_rows, self.bias_keys))
            none = "1,1" if self.outer else "1"
            named = [name if there else (none if name.startswith("b") else "1") for name, there in has]
            words.append(f"bias={','.join(named)}:{self.bias_type or self.dtype}")
        words += [f"bias2={batch},1,1,k"] * self.bias2
        words += [f"mask={batch},1,{'q' if self.mask == 'full' else '1'},k"] * (self.mask != "")
        line = " ".join(words)
        return [f"fwd {line}"] + [f"bwd {line} need={','.join(self.gradients)}"] * (not self.forward_only)

    def pairs(self) -> float:
        """(query, key) pairs that take part, over the batch and the query heads; masks are not looked into."""
        sequences = [(n, n) for n in self.lengths] or [(self.sq, self.rows_k)] * self.batch
        counted: dict = {}
        total = 0
        for rows, keys in sequences:
            if (rows, keys) not in counted:
                counted[rows, keys] = self._pairs(rows, keys)
            total += counted[rows, keys]
        return float(total) * self.hq

    def _pairs(self, rows: int, keys: int) -> int:
        if not self.causal and self.window == (-1, -1):
            return rows * keys
        import torch

        i = torch.arange(rows, dtype=torch.int64) + keys - rows
        right = 0 if self.causal else self.window[1]
        last = i + right if right >= 0 else torch.full_like(i, keys - 1)
        first = i - self.window[0] if self.window[0] >= 0 else torch.zeros_like(i)
        return int((last.clamp(max=keys - 1) - first.clamp(min=0) + 1).clamp(min=0).sum())

    def flops(self, backward: bool) -> float:
        """Of allowed pairs alone: two products of rows forward, five backward, whichever gradients are asked for."""
        each = 2 * (3 * self.d + 2 * self.dim_v) if backward else 2 * (self.d + self.dim_v)
        return each * self.pairs()

    def bytes_read_and_written(self) -> float:
        """Of the forward: q, k, v and out once."""
        rows_q, rows_k = (sum(self.lengths),) * 2 if self.lengths else (self.batch * self.sq, self.batch * self.rows_k)
        size = 4 if self.dtype == "fp32" else 2
        return size * (rows_q * self.hq * (self.d + self.dim_v) + rows_k * self.heads_k * (self.d + self.dim_v))


# What the best of cuDNN, FlashAttention-3 and FlashAttention-4 was worth in cuDNN, forward and backward, in runs of all
# three on an H200 (FlashAttention-3 is not in these runs): what a dense cell is to reach.
BEST_OF_CUDNN = {
    64: {1024: ((1.00, 1.20), (1.00, 1.25)), 2048: ((1.07, 1.17), (1.04, 1.23)), 4096: ((1.16, 1.16), (1.08, 1.27)),
         8192: ((1.20, 1.18), (1.18, 1.27)), 16384: ((1.19, 1.18), (1.17, 1.24))},
    128: {1024: ((1.05, 1.07), (1.07, 1.15)), 2048: ((1.07, 1.10), (1.13, 1.09)), 4096: ((1.08, 1.12), (1.16, 1.14)),
          8192: ((1.15, 1.15), (1.20, 1.16)), 16384: ((1.17, 1.15), (1.15, 1.15))},
    256: {1024: ((1.07, 1.25), (1.06, 1.18)), 2048: ((1.08, 1.18), (1.09, 1.19)), 4096: ((1.10, 1.19), (1.13, 1.20)),
          8192: ((1.11, 1.27), (1.19, 1.18)), 16384: ((1.10, 1.29), (1.18, 1.21))},
}  # fmt: skip


def dense() -> list[Case]:
    """16,384 tokens, 2,048 columns; the target: so many times cuDNN."""
    return [
        Case(f"dense d{d} s{s} {'c' if causal else 'f'}", "dense", 16384 // s, 2048 // d, s, d, causal=causal,
             target=BEST_OF_CUDNN[d][s][causal])
        for d in (64, 128, 256)
        for s in (1024, 2048, 4096, 8192, 16384)
        for causal in (False, True)
    ]  # fmt: skip


def features() -> list[Case]:
    f = "features"
    plain64 = Case("dense d64 s2048", f, 8, 16, 2048, 64)
    bias64 = Case("bias[1,H] s2048 d64", f, 8, 16, 2048, 64, bias=(False, True), target=(340, 290), flex=True)
    causal128 = Case("dense d128 s4096 c b4", f, 4, 16, 4096, 128, causal=True)
    gqa128 = Case("gqa 32/8 s4096 d128 c", f, 4, 32, 4096, 128, hk=8, causal=True, target=(620, 500))
    mixed = Case("varlen mixed d128 c", f, 1, 16, 0, 128, causal=True, lengths=MIXED, beside="dense d128 s4096 c", target=(590, 520))
    msa = Case("MSA rows s384 h8 d32, two biases", f, 512, 8, 384, 32, bias=(False, True), bias2=True, target=(0, 120))
    part = [
        Case(f"varlen, window, gqa d{d}", f, 1, 32, 0, d, hk=8, causal=True, window=(1024, 0), lengths=SHORTER) for d in (64, 128)
    ]
    deterministic = lambda case, least=0.92: replace(  # noqa: E731
        case, name=f"deterministic {case.name}", deterministic=True, beside=case.name, target=(), target_of=(0, least), flex=False
    )
    dense_of = {case.name: replace(case, group=f, target=()) for case in dense()}
    return [
        plain64,
        bias64,
        Case("bias[B,H] s2048 d64", f, 8, 16, 2048, 64, bias=(True, True), target=(310, 320)),
        Case("bias[1,H] nograd s2048 d64", f, 8, 16, 2048, 64, bias=(False, True), bias_grad=False),
        Case("bias[1,H] s4096 d128", f, 4, 16, 4096, 128, bias=(False, True), target=(470, 350), flex=True),
        Case("bias[1,H] s4096 d128 c", f, 4, 16, 4096, 128, causal=True, bias=(False, True)),
        Case("bias[1,1] s4096 d128", f, 4, 16, 4096, 128, bias=(False, False)),
        Case("T5 s512 d64, bias[1,H], dropout.1", f, 32, 12, 512, 64, bias=(False, True), dropout=0.1),
        replace(bias64, name="T5 s2048 d64, bias[1,H], dropout.1", dropout=0.1, target=(), flex=False),
        Case("T5 s4096 d128, bias[1,H], dropout.1", f, 4, 16, 4096, 128, bias=(False, True), dropout=0.1),
        Case("triangle N256 h8 d32", f, 256, 8, 256, 32, bias=(False, True)),
        Case("triangle N384 h4 d32", f, 384, 4, 384, 32, bias=(False, True), target=(150, 120)),
        Case("triangle N512 h4 d64", f, 512, 4, 512, 64, bias=(False, True)),
        Case("triangle N768 h4 d32", f, 768, 4, 768, 32, bias=(False, True), target=(175, 145), flex=True),
        msa,
        replace(msa, name="MSA rows in two levels 3x128", batch=384, outer=3, bias=(True, True)),
        Case("dropout.1 s4096 d64", f, 4, 32, 4096, 64, dropout=0.1, target=(330, 390)),
        Case("dropout.1 s4096 d128", f, 4, 16, 4096, 128, dropout=0.1, target=(480, 460)),
        Case("dropout.1 causal s4096 d128", f, 4, 16, 4096, 128, dropout=0.1, causal=True, target=(440, 420)),
        gqa128,
        Case("d192/dv128 s4096 c", f, 4, 16, 4096, 192, dv=128, causal=True, target=(615, 435)),
        Case("d96 s4096 f", f, 4, 20, 4096, 96, target=(570, 525)),
        Case("d32 s4096 f", f, 4, 64, 4096, 32, target=(345, 380)),
        Case("odd s2047 d80 c", f, 8, 16, 2047, 80, causal=True, target=(400, 380)),
        Case("d72 s1024 b32 f", f, 32, 16, 1024, 72),
        Case("d512 s2048 f", f, 8, 4, 2048, 512, target=(200, 90)),
        Case("d512 s2048 c", f, 8, 4, 2048, 512, causal=True),
        Case("d512 s2048 c, bias[1,H], dropout.1", f, 8, 4, 2048, 512, causal=True, bias=(False, True), dropout=0.1),
        Case("fp32 s2048 d64", f, 4, 16, 2048, 64, dtype="fp32", target=(70, 60)),
        Case("fp16 s4096 d128", f, 4, 16, 4096, 128, dtype="fp16"),
        Case("dense d128 s4096 f b4", f, 4, 16, 4096, 128),
        causal128,
        Case("window512 s16384 d128", f, 1, 16, 16384, 128, window=(512, 0), unit="ms", target=(0.17, 0.49), flex=True),
        Case("varlen 8x2048 d128 c", f, 1, 16, 0, 128, causal=True, lengths=(2048,) * 8, beside="dense d128 s2048 c", target=(530, 465),
             target_of=(0.94, 0.94)),
        mixed,
        replace(causal128, name="softcap30 s4096 d128 c", softcap=30.0, beside=causal128.name, target_of=(0.75, 0.85), flex=True),
        replace(causal128, name="sinks s4096 d128 c", sink=True, beside=causal128.name, target_of=(0.97, 0)),
        replace(causal128, name="alibi s4096 d128 c", alibi=True, beside=causal128.name, flex=True),
        deterministic(dense_of["dense d64 s4096 c"]),
        deterministic(causal128),
        deterministic(dense_of["dense d256 s4096 c"]),
        deterministic(bias64, 0.87),
        deterministic(gqa128, 0.87),
        deterministic(mixed, 0.87),
        *part,
        *(Case(f"varlen 8x1024 d128, bias[1,H]{', dropout.1' * (p > 0)}", f, 1, 16, 0, 128, lengths=(1024,) * 8, bias=(False, True), dropout=p)
          for p in (0.0, 0.1)),
        *(replace(case, name=f"all at once d{case.d}", bias=(False, True), dropout=0.1, alibi=True, softcap=30.0, beside=case.name,
                  target_of=(0.5, 0.5))
          for case in part),
        Case("d60 s2048", f, 8, 16, 2048, 60, beside=plain64.name, target_of=(0.7, 0)),
        replace(bias64, name="odd-stride bias[1,H] s2048 d64", bias_pad=1, beside=bias64.name, target=(), target_of=(0.6, 0), flex=False),
        replace(bias64, name="fp32 bias[1,H] s2048 d64", bias_type="fp32", beside=bias64.name, target=(), target_of=(0.8, 0), flex=False),
        replace(plain64, name="full mask s2048 d64", mask="full", beside=plain64.name, target_of=(0.8, 0), flex=True),
        replace(plain64, name="key mask s2048 d64", mask="key", beside=plain64.name, target_of=(0.95, 0), flex=True),
        Case("cross 4096x77 d64", f, 16, 16, 4096, 64, sk=77, target=(0, 180)),
        Case("cross 4096x77 d64, bytes", f, 16, 16, 4096, 64, sk=77, forward_only=True, unit="GB/s", target=(0.75, 0)),
        Case("few 64x3412 d192", f, 2, 16, 64, 192, sk=3412),
        Case("decode 1x65536 8/8 d128", f, 1, 8, 1, 128, sk=65536, forward_only=True, unit="GB/s", target=(0.80, 0)),
        Case("decode 1x65536 32/8 d128", f, 1, 32, 1, 128, hk=8, sk=65536, forward_only=True, unit="GB/s", target=(0.80, 0)),
        Case("decode 1x8192 32/8 d64", f, 1, 32, 1, 64, hk=8, sk=8192, forward_only=True, unit="GB/s"),
        Case("decode 4x16384 32/8 d128", f, 4, 32, 1, 128, hk=8, sk=16384, forward_only=True, unit="GB/s"),
        Case("decode 64x4096 32/8 d128", f, 64, 32, 1, 128, hk=8, sk=4096, forward_only=True, unit="GB/s"),
        Case("BERT s512 h12 d64 dropout.1, key mask", f, 64, 12, 512, 64, dropout=0.1, mask="key", unit="ms"),
        Case("ViT s197 h12 d64", f, 256, 12, 197, 64, unit="ms"),
        Case("Swin s49 h4 d32, bias[1,H]", f, 4096, 4, 49, 32, bias=(False, True), unit="ms"),
    ]  # fmt: skip


def subsets() -> list[Case]:
    """What a part of the gradients costs; the target: at most so much of the time of all."""
    causal = next(case for case in features() if case.name == "dense d128 s4096 c b4")
    bias = next(case for case in features() if case.name == "bias[1,H] s2048 d64")
    parts = {("q",): 0.75, ("k", "v"): 0.85, ("bias",): 0.6}
    return [
        replace(case, name=f"{', '.join(need)} of {case.name}", group="subsets", need=need, beside=case.name, target=(0, most))
        for case in (causal, bias)
        for need, most in parts.items()
        if need != ("bias",) or case.bias
    ]


def patterns() -> list[Case]:
    """The sixteen ways in which a bias can be broadcast, with its gradient, at a round length and at an odd one."""
    flags = (True, False)
    return [
        *(Case(f"bias none s{s}", "patterns", 8, 16, s, 64) for s in (2048, 2047)),
        *(Case(f"bias {'b' if b else 1},{'h' if h else 1},{'q' if q else 1},{'k' if k else 1} s{s}", "patterns", 8, 16, s, 64,
               bias=(b, h), bias_rows=q, bias_keys=k, beside=f"bias none s{s}", target_of=(0, 0.6))
          for s in (2048, 2047) for b in flags for h in flags for q in flags for k in flags),
    ]  # fmt: skip


def small() -> list[Case]:
    """Under a CUDA graph: what a kernel takes when nobody waits for the host."""
    shapes = [(1, 8, 128, 64), (1, 16, 512, 64), (32, 12, 128, 64), (256, 4, 64, 32), (64, 12, 512, 64), (256, 12, 197, 64)]
    return [Case(f"small {b}x{h}x{s}x{d}", "small", b, h, s, d, graph=True) for b, h, s, d in shapes]


RANDOM = 200


def random_case(seed: int) -> Case:
    """Any shape of 4 to 400 GFLOP forward, any features that somebody else's kernel has, alone or together."""
    r = random.Random(seed)
    chance = lambda p: r.random() < p  # noqa: E731
    while True:
        d = r.choice([32, 40, 64, 64, 64, 80, 96, 128, 128, 128, 160, 192, 256])
        sq = r.choice([r.randint(50, 4096), 64 * r.randint(1, 64), 2 ** r.randint(6, 13)])
        sk = sq if chance(0.75) else r.choice([r.randint(50, 4096), 64 * r.randint(1, 64)])
        hk = r.choice([1, 2, 4, 6, 8, 12, 16])
        hq = hk * (r.choice([2, 4, 8]) if chance(0.2) else 1)
        case = Case(f"random {seed}", "random", r.choice([1, 2, 3, 4, 8, 16, 32, 64, 256]), hq, sq, d, hk=hk, sk=sk)
        if not (4e9 < case.flops(False) < 4e11 and case.batch * (sq * hq + sk * hk) * d < 2**28):
            continue
        case = replace(case, dtype=r.choice(["bf16", "bf16", "bf16", "fp16"]), dv=r.choice([32, 64, 128]) if chance(0.1) else 0)
        causal = sq == sk and chance(0.4)
        packed = sq == sk and not case.dv and chance(0.15)
        if packed:
            lengths = tuple(r.randint(1, 2 * sq) for _ in range(case.batch))
            return replace(case, causal=causal, batch=1, sq=0, sk=0, lengths=lengths)
        case = replace(case, causal=causal, dropout=0.1 if chance(0.2) else 0.0)
        planes = case.batch * hq * sq * sk
        if chance(0.35) and planes < 2**31:
            extents = (chance(0.5), chance(0.7))
            case = replace(case, bias=extents, bias_rows=chance(0.8), bias_grad=chance(0.7))
        elif chance(0.2) and not causal:
            case = replace(case, mask=r.choice(["full", "key"]))
        elif chance(0.1) and not causal and sq == sk and sq > 300:
            case = replace(case, window=(r.randint(64, 256), 0))
        return case


def all_cases() -> list[Case]:
    cases = [*dense(), *features(), *subsets(), *small(), *(random_case(seed) for seed in range(RANDOM)), *patterns()]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
    assert all(not case.beside or case.beside in names for case in cases)
    return cases


# What is measured where minutes count: one row of each kind.
QUICK = [
    "dense d64 s4096 f", "dense d64 s4096 c", "dense d128 s4096 f", "dense d128 s4096 c", "dense d256 s4096 f",
    "dense d64 s1024 c", "dense d128 s16384 c", "bias[1,H] s2048 d64", "bias[1,H] s4096 d128", "triangle N384 h4 d32",
    "triangle N768 h4 d32", "dropout.1 s4096 d64", "dropout.1 s4096 d128", "gqa 32/8 s4096 d128 c", "d512 s2048 f",
    "fp32 s2048 d64", "odd s2047 d80 c", "cross 4096x77 d64", "varlen mixed d128 c", "window512 s16384 d128",
    "dense d64 s2048", "d60 s2048", "odd-stride bias[1,H] s2048 d64", "fp32 bias[1,H] s2048 d64", "full mask s2048 d64",
    "key mask s2048 d64", "decode 1x65536 32/8 d128", "small 1x8x128x64", "small 256x4x64x32",
]  # fmt: skip
