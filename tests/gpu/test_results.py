# SPDX-License-Identifier: Apache-2.0
"""Results of fp32 beside inputs of 16 bits, and results that are combined with what is there: gradients are added, out and lse are merged.
Every kernel that stores a result, then random problems. FOVEA_RANDOM says how many."""

import os
import random

import pytest
import torch

from fovea.torch import _call, attention
from fovea.torch._parallel_call import arguments_of
from problem import Problem, parse
from test_backward_edges import FEW, FULL, MANY, SHAPES
from test_random import random_problem
from trial import Trial

COUNT = int(os.environ.get("FOVEA_RANDOM", 150))

# What the backward's lines leave out: few keys and few queries, wide heads, columns apart, one query, keys in parts.
FORWARD = [
    "b=2 hq=4 hk=2 sq=300 sk=500 d=128 bf16 causal",
    "b=2 hq=4 sq=300 sk=500 d=64 fp16 window=70,10 dropout=0.1 seed=3",
    "b=2 hq=2 sq=200 sk=300 d=256 bf16 sink",
    "b=1 hq=2 sq=200 sk=300 d=320 bf16 bias=1,h,q,k",
    "b=1 hq=2 sq=130 sk=140 d=600 fp16",
    "b=1 hq=2 sq=130 sk=140 d=600 fp32 sink",
    "b=2 hq=2 sq=130 sk=300 d=80 fp32 causal",
    "b=1 hq=8 hk=2 sq=1 sk=3000 d=128 bf16 causal",
    "b=1 hq=2 sq=5 sk=4000 d=64 bf16 sink",
    "b=3 hq=2 sq=49 sk=49 d=32 bf16",
    "b=2 hq=2 sq=77 sk=90 d=7 bf16 skew=1",
    "b=3 hq=2 d=128 bf16 seqs_q=70,0,131 seqs_k=170,60,0 causal",
    "b=2 hq=2 sq=50 sk=60 d=64 bf16 used_k=0,60",
    "b=6 hq=24 sq=1000 sk=300 d=64 bf16 alibi=h",
    "b=3 hq=3 d=128 bf16 causal seqs_q=900,0,1500 seqs_k=2100,3,1500",
    "b=1 hq=15 sq=1800 sk=2100 d=64 bf16 sink",
]
# A bias's gradient that is made of chunks, of one chunk, by columns and by rows.
BIASES = [
    f"b={b} hq=4 sq={rows} sk=200 d={d} {kind} bias={extents}:{of} need=q,k,v,bias"
    for b, rows, d, kind in ((3, 200, 64, "bf16"), (1, 130, 128, "fp16 softcap=3"), (40, 49, 32, "bf16"), (2, 70, 320, "bf16"), (2, 70, 64, "fp32"))
    for extents, of in (("1,h,q,k", "bf16"), ("b,h,q,k", "fp16"), ("1,1,q,k", "fp32"), ("b,1,1,k", "bf16"), ("1,h,q,1", "fp16"), ("b,h,1,1", "fp32"))
]


def with_results(line: str, wide: bool, add: bool) -> Problem:
    """A line with all of its results of fp32, added or not."""
    p = parse(line if line.startswith("bwd") else f"bwd {line}")
    short = p.type in ("bf16", "fp16")
    if wide:
        of_16_bits = [n for n in p.need if (short if n in "qkv" else n != "sink" and getattr(p, n).type in ("bf16", "fp16"))]
        p.wide = tuple(["out"] * short + of_16_bits)
    if add:
        p.add = tuple(n for n in p.need if can_add(p, n))
    p.text = ""
    return p


def can_add(p: Problem, name: str) -> bool:
    """Results of fp32 alone are added."""
    of = p.type if name in "qkv" else "fp32" if name == "sink" else getattr(p, name).type
    return of not in ("bf16", "fp16") or name in p.wide


def random_results(seed: int) -> Problem:
    p = random_problem(1000 + seed)
    r = random.Random(seed)
    of_16_bits = {n for n in ("out", *p.need) if (p.type if n in ("out", "q", "k", "v") else "" if n == "sink" else getattr(p, n).type) in ("bf16", "fp16")}
    p.wide = tuple(n for n in ("out", "q", "k", "v", "bias", "bias2") if n in of_16_bits and r.random() < 0.7)
    p.add = tuple(n for n in p.need if can_add(p, n) and r.random() < 0.6)
    return p


def check(p: Problem, device, record_property) -> None:
    record_property("line", p.line())
    trial = Trial(p, device)
    faults = trial.test()
    for way in ("forward", "backward"):
        record_property(way, not any(fault.startswith(way) for fault in faults))
    assert not faults, "\n".join([p.line(), *faults])


@pytest.mark.parametrize("add", [False, True], ids=["fp32", "added"])
@pytest.mark.parametrize("line", [*FORWARD, *SHAPES, *BIASES])
def test_every_kernel(line, add, device, record_property):
    p = with_results(line, True, add)
    p.case_seed = 8
    check(p, device, record_property)


@pytest.mark.parametrize("line", [*FULL, *MANY, *FEW])
def test_blocks_of_keys(line, device, record_property):
    p = with_results(line, True, True)
    p.case_seed = 9
    check(p, device, record_property)


@pytest.mark.parametrize("results", ["wide=k,v add=k", "wide=q add=q", "wide=v", "wide=out,k,v", "wide=q,k add=k"])
@pytest.mark.parametrize("line", [
    "b=2 hq=4 hk=2 sq=200 sk=330 d=128 bf16 causal", "b=2 hq=4 sq=200 sk=100 d=64 fp16", "b=1 hq=2 sq=130 sk=200 d=256 bf16", "b=9 hq=16 sq=300 sk=300 d=64 bf16 causal",
    "b=1 hq=2 sq=130 sk=200 d=600 bf16",
])  # fmt: skip
def test_some_results(line, results, device, record_property):
    """The others have q's type, from the same kernels."""
    check(parse(f"bwd {line} need=q,k,v {results}"), device, record_property)


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_results(seed, device, record_property):
    check(random_results(seed), device, record_property)


def test_they_are_as_random_as_they_look():
    problems = [random_results(seed) for seed in range(150)]
    for name in ("out", "q", "k", "v", "bias"):
        assert sum(name in p.wide for p in problems) >= 15, name
    for name in ("q", "k", "v", "bias", "sink"):
        assert sum(name in p.add for p in problems) >= 10, name
    assert sum(bool(p.adds(False)) for p in problems) >= 50


@pytest.mark.parametrize("dim, heads_k, options", [
    (128, 2, dict(causal=True)), (64, 4, dict(window=(200, 60), dropout_p=0.2, seed=5)), (192, 1, {}), (64, 2, dict(causal=True, sink=True)),
], ids=str)  # fmt: skip
def test_keys_in_pieces(dim, heads_k, options, device):
    """As context_parallel's ring calls the library: a result over some keys after another, then the gradients of all."""
    rows, cuts = 640, (0, 144, 384, 640)
    options = dict(options)
    q, do = (torch.randn(2, 4, rows, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(2, heads_k, rows, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    sink = torch.randn(4, device=device) if options.pop("sink", False) else None
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    whole, whole_lse = attention(*leaves, sink=sink, return_lse=True, align="top_left", **options)
    whole.backward(do)
    out = torch.zeros(q.shape, device=device)
    lse = torch.full(q.shape[:-1], -torch.inf, device=device)
    if sink is not None:
        lse.copy_(sink[:, None].expand_as(lse))
    sums = {name: torch.zeros(x.shape, device=device) for name, x in zip("qkv", (q, k, v))}

    def arguments(begin, end):
        a = arguments_of(q, k[:, :, begin:end], v[:, :, begin:end], options)
        return (*a, *_call.Shard(position_q=0, position_k=begin))

    for begin, end in zip(cuts, cuts[1:]):
        _call.merge(arguments(begin, end), out, lse)
    torch.testing.assert_close(out.to(q.dtype), whole, rtol=2**-6, atol=2**-8)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)
    for begin, end in zip(cuts, cuts[1:]):
        into = {name: x if name == "q" else x[:, :, begin:end] for name, x in sums.items()}
        _call.backward(do, None, out, lse, [True, True, True, False, False, False], *arguments(begin, end), sums=into)
    for name, x in zip("qkv", leaves):
        error = (sums[name] - x.grad.float()).norm() / x.grad.float().norm()
        assert error < 4e-3, f"d{name}: {error:.2g} of its size"
