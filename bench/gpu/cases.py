# SPDX-License-Identifier: Apache-2.0
"""The rows of the GPU benchmark: a case says what is computed, not by whom."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

MIXED = [128, 256, 384, 512, 640, 1024, 1536, 2048, 2816, 4992, 8064]  # lengths of one packed batch


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
    dtype: str = "bf16"
    causal: bool = False
    window: tuple = (-1, -1)
    bias: tuple = ()  # (b, h) that it really has
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
    beside: str = ""  # the row of ours that a feature's cost is measured by
    graph: bool = False  # under a CUDA graph, in microseconds
    forward_only: bool = False

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
    def type(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.dtype]

    def line(self) -> str:
        """The problem's one-line form, without fwd or bwd."""
        words = [f"hq={self.hq}", f"hk={self.heads_k}", f"d={self.d}", f"dv={self.dim_v}", self.dtype]
        if self.lengths:
            lengths = ",".join(map(str, self.lengths))
            words += [f"b={len(self.lengths)}", f"seqs_q={lengths}", f"seqs_k={lengths}"]
        else:
            words += [f"b={self.batch}", f"sq={self.sq}", f"sk={self.rows_k}"]
        words += ["causal"] * self.causal + ["det"] * self.deterministic + ["sink"] * self.sink + ["alibi=h"] * self.alibi
        words += [f"window={self.window[0]},{self.window[1]}"] * (self.window != (-1, -1))
        words += [f"softcap={self.softcap}"] * (self.softcap != 0) + [f"dropout={self.dropout}"] * (self.dropout != 0)
        if self.bias:
            has = zip("bhqk", (*self.bias, self.bias_rows, self.bias_keys))
            words.append("bias=" + ",".join(name if there else "1" for name, there in has) + f":{self.bias_type or self.dtype}")
        words += ["bias2=b,1,1,k"] * self.bias2
        words += [f"mask=b,1,{'q' if self.mask == 'full' else '1'},k"] * (self.mask != "")
        return " ".join(words)

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
        i = torch.arange(rows, dtype=torch.int64) + keys - rows
        right = 0 if self.causal else self.window[1]
        last = i + right if right >= 0 else torch.full_like(i, keys - 1)
        first = i - self.window[0] if self.window[0] >= 0 else torch.zeros_like(i)
        return int((last.clamp(max=keys - 1) - first.clamp(min=0) + 1).clamp(min=0).sum())

    def flops(self, backward: bool) -> float:
        """Of allowed pairs alone: two products of rows forward, five backward."""
        each = 2 * (3 * self.d + 2 * self.dim_v) if backward else 2 * (self.d + self.dim_v)
        return each * self.pairs()

    def bytes_read_and_written(self) -> float:
        """Of the forward: q, k, v and out once."""
        rows_q, rows_k = (sum(self.lengths),) * 2 if self.lengths else (self.batch * self.sq, self.batch * self.rows_k)
        size = 4 if self.dtype == "fp32" else 2
        return size * (rows_q * self.hq * (self.d + self.dim_v) + rows_k * self.heads_k * (self.d + self.dim_v))


def dense() -> list[Case]:
    """16,384 tokens, 2,048 columns."""
    return [
        Case(f"dense d{d} s{s} {'c' if causal else 'f'}", "dense", 16384 // s, 2048 // d, s, d, causal=causal)
        for d in (64, 128, 256)
        for s in (1024, 2048, 4096, 8192, 16384)
        for causal in (False, True)
    ]


def features() -> list[Case]:
    f = "features"
    plain64 = Case("dense d64 s2048", f, 8, 16, 2048, 64)
    bias64 = Case("bias[1,H] s2048 d64", f, 8, 16, 2048, 64, bias=(False, True))
    causal128 = Case("dense d128 s4096 c b4", f, 4, 16, 4096, 128, causal=True)
    return [
        bias64,
        Case("bias[B,H] s2048 d64", f, 8, 16, 2048, 64, bias=(True, True)),
        Case("bias[1,H] nograd s2048 d64", f, 8, 16, 2048, 64, bias=(False, True), bias_grad=False),
        Case("bias[1,H] s4096 d128", f, 4, 16, 4096, 128, bias=(False, True)),
        Case("triangle N256 h8 d32", f, 256, 8, 256, 32, bias=(False, True)),
        Case("triangle N384 h4 d32", f, 384, 4, 384, 32, bias=(False, True)),
        Case("triangle N512 h4 d64", f, 512, 4, 512, 64, bias=(False, True)),
        Case("triangle N768 h4 d32", f, 768, 4, 768, 32, bias=(False, True)),
        Case("MSA rows s384 h8 d32, two biases", f, 512, 8, 384, 32, bias=(False, True), bias2=True),
        Case("dropout.1 s4096 d64", f, 4, 32, 4096, 64, dropout=0.1),
        Case("dropout.1 s4096 d128", f, 4, 16, 4096, 128, dropout=0.1),
        Case("dropout.1 causal s4096 d128", f, 4, 16, 4096, 128, dropout=0.1, causal=True),
        Case("gqa 32/8 s4096 d128 c", f, 4, 32, 4096, 128, hk=8, causal=True),
        Case("d192/dv128 s4096 c", f, 4, 16, 4096, 192, dv=128, causal=True),
        Case("d96 s4096 f", f, 4, 20, 4096, 96),
        Case("d32 s4096 f", f, 4, 64, 4096, 32),
        Case("d512 s2048 f", f, 8, 4, 2048, 512),
        Case("cross 4096x77 d64", f, 16, 16, 4096, 64, sk=77),
        Case("odd s2047 d80 c", f, 8, 16, 2047, 80, causal=True),
        Case("fp32 s2048 d64", f, 4, 16, 2048, 64, dtype="fp32"),
        Case("fp16 s4096 d128", f, 4, 16, 4096, 128, dtype="fp16"),
        Case("dense d128 s4096 f b4", f, 4, 16, 4096, 128),
        causal128,
        Case("window512 s16384 d128", f, 1, 16, 16384, 128, window=(512, 0)),
        Case("varlen 8x2048 d128 c", f, 1, 16, 0, 128, causal=True, lengths=(2048,) * 8, beside="dense d128 s2048 c"),
        Case("varlen mixed d128 c", f, 1, 16, 0, 128, causal=True, lengths=tuple(MIXED)),
        replace(causal128, name="softcap30 s4096 d128 c", softcap=30.0, beside=causal128.name),
        replace(causal128, name="sinks s4096 d128 c", sink=True, beside=causal128.name),
        replace(causal128, name="alibi s4096 d128 c", alibi=True, beside=causal128.name),
        replace(causal128, name="deterministic s4096 d128 c", deterministic=True, beside=causal128.name),
        replace(bias64, name="deterministic bias[1,H] s2048 d64", deterministic=True, beside=bias64.name),
        plain64,
        Case("d60 s2048", f, 8, 16, 2048, 60, beside=plain64.name),
        replace(bias64, name="odd-stride bias[1,H] s2048 d64", bias_pad=1, beside=bias64.name),
        replace(bias64, name="fp32 bias[1,H] s2048 d64", bias_type="fp32", beside=bias64.name),
        replace(plain64, name="full mask s2048 d64", mask="full", beside=plain64.name),
        replace(plain64, name="key mask s2048 d64", mask="key", beside=plain64.name),
        Case("decode 1x65536 8/8 d128", f, 1, 8, 1, 128, sk=65536, forward_only=True),
        Case("decode 1x65536 32/8 d128", f, 1, 32, 1, 128, hk=8, sk=65536, forward_only=True),
        Case("BERT s512 h12 d64 dropout.1, key mask", f, 64, 12, 512, 64, dropout=0.1, mask="key"),
        Case("ViT s197 h12 d64", f, 256, 12, 197, 64),
        Case("Swin s49 h4 d32, bias[1,H]", f, 4096, 4, 49, 32, bias=(False, True)),
    ]


def patterns() -> list[Case]:
    """The sixteen ways in which a bias can be broadcast, with its gradient, at a round length and at an odd one."""
    flags = (True, False)
    return [
        Case(f"bias {'b' if b else 1},{'h' if h else 1},{'q' if q else 1},{'k' if k else 1} s{s}", "patterns", 8, 16, s, 64,
             bias=(b, h), bias_rows=q, bias_keys=k)
        for s in (2048, 2047) for b in flags for h in flags for q in flags for k in flags
    ]  # fmt: skip


def small() -> list[Case]:
    """Under a CUDA graph: what a kernel takes when nobody waits for the host."""
    shapes = [(1, 8, 128, 64), (1, 16, 512, 64), (32, 12, 128, 64), (256, 4, 64, 32), (64, 12, 512, 64), (256, 12, 197, 64)]
    return [Case(f"small {b}x{h}x{s}x{d}", "small", b, h, s, d, graph=True) for b, h, s, d in shapes]


def all_cases() -> list[Case]:
    cases = [*dense(), *features(), *patterns(), *small()]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
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
