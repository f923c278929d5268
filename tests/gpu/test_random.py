# SPDX-License-Identifier: Apache-2.0
"""200 random problems, always the same: any shape, any feature, any combination. A failure's message is its line."""

import random

import pytest
import torch

from problem import Plane, Problem
from trial import Trial

COUNT = 200


def random_problem(seed: int) -> Problem:
    r = random.Random(seed)
    chance = lambda p: r.random() < p  # noqa: E731
    p = Problem(case_seed=10_000 + seed, type=r.choice(["bf16", "bf16", "fp16", "fp32"]))
    p.batch = r.choice([(1,), (2,), (3,), (2, 2), (1, 3)])
    p.hk = r.randint(1, 3)
    p.hq = p.hk * r.choice([1, 1, 2, 4])
    dims = [8, 16, 32, 40, 64, 64, 72, 80, 96, 128, 128, 160, 192, 256, r.randint(1, 130)]
    p.d = r.choice([*dims, 512]) if chance(0.9) else r.randint(257, 600)
    p.dv = p.d if chance(0.7) else r.choice(dims)
    most = 700 if p.d <= 128 else 200
    length = lambda: r.choice([r.randint(1, 20), r.randint(1, most), 64 * r.randint(1, most // 64), 128])  # noqa: E731
    p.sq = length()
    p.sk = p.sq if chance(0.4) else length()
    p.layout = r.choice(["bshd", "bshd", "bhsd", "strided"])
    p.skew = r.choice([0, 0, 0, 1, 4])
    if chance(0.25):
        batch = p.batch_size
        p.seqs_q, p.seqs_k = ([r.randint(0, n) for _ in range(batch)] for n in (p.sq, p.sk))
        p.total_q, p.total_k = sum(p.seqs_q) + r.choice([0, 3]), sum(p.seqs_k) + r.choice([0, 5])
        p.total_q, p.total_k = max(p.total_q, 1), max(p.total_k, 1)
    elif chance(0.1):
        p.layout, p.sk = "qkv3", p.sq
    for side, seqs, rows in (("q", p.seqs_q, p.sq), ("k", p.seqs_k, p.sk)):
        if chance(0.15):
            setattr(p, f"used_{side}", [r.randint(0, n) for n in (seqs or [rows] * p.batch_size)])
    p.causal = chance(0.4)
    p.top_left = chance(0.3)
    if chance(0.25):
        p.window = (r.choice([-1, 0, r.randint(1, 200)]), r.choice([-1, 0, r.randint(1, 200)]))
    p.scale = r.choice([None, None, None, 0.5, -0.1])
    p.softcap = r.choice([0.0, 0.0, 0.0, 3.0, 30.0])
    p.alibi = r.choice(["", "", "", "h", "b,h"])
    p.sink = chance(0.2)
    extents = lambda: (chance(0.5), len(p.batch) == 2 and chance(0.5), chance(0.5), chance(0.7), chance(0.8))  # noqa: E731
    if chance(0.4):
        p.bias = Plane(extents(), r.choice([p.type, p.type, "fp32", "bf16", "fp16"]))
    if chance(0.15):
        p.bias2 = Plane(extents(), r.choice([p.type, "fp32", "bf16", "fp16"]))
    if chance(0.25):
        p.mask = Plane(extents(), "bool")
    if chance(0.25):
        p.dropout, p.seed, p.offset = r.choice([0.1, 0.5]), r.getrandbits(64), r.getrandbits(64)
        p.rng = r.choice(["fovea", "torch_mem_efficient"])
    there = ["q", "k", "v", *(name for name in ("bias", "bias2", "sink") if getattr(p, name))]
    p.need = tuple(there) if chance(0.7) else tuple(name for name in there if chance(0.5)) or ("q",)
    p.det = chance(0.3)
    p.dlse = chance(0.15)
    return p


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_problem(seed, device, record_property):
    p = random_problem(seed)
    record_property("line", p.line())
    faults = Trial(p, device).test()
    for way in ("forward", "backward"):
        record_property(way, not any(fault.startswith(way) for fault in faults))
    assert not faults, "\n".join([p.line(), *faults])


def test_they_are_as_random_as_they_look():
    problems = [random_problem(seed) for seed in range(COUNT)]
    assert len({p.line() for p in problems}) == COUNT
    for feature in ("packed", "causal", "softcap", "alibi", "sink", "bias", "bias2", "mask", "dropout", "det", "used_q"):
        assert sum(bool(getattr(p, feature)) for p in problems) >= 10, feature
    assert torch.tensor([p.d > 256 for p in problems]).sum() >= 5
