# SPDX-License-Identifier: Apache-2.0
"""Random problems, always the same: any shape, any feature, any combination; then larger ones, the forward alone. A
failure's message is its line. FOVEA_RANDOM says how many of each, FOVEA_KERNEL=sm80 takes the generic kernels.
"""

import os
import random

import pytest
import torch

from problem import Plane, Problem
from trial import Trial

COUNT = int(os.environ.get("FOVEA_RANDOM", 200))
LARGER = int(os.environ.get("FOVEA_RANDOM", 100))


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


def larger_problem(seed: int) -> Problem:
    """What the case table has no room for: many tiles a multiprocessor, many steps a tile, every head dimension up to 256."""
    r = random.Random(seed)
    chance = lambda p: r.random() < p  # noqa: E731
    p = Problem(case_seed=50_000 + seed, type=r.choice(["bf16", "bf16", "fp16"]))
    p.batch = r.choice([(1,), (2,), (3,), (2, 2), (7,)])
    p.hk = r.choice([1, 2, 3, 8])
    p.hq = p.hk * r.choice([1, 1, 2, 4])
    multiples = [16, 32, 48, 80, 96, 112, 144, 160, 176, 192, 208, 224, 240]
    p.d = r.choice([64, 64, 128, 128, 256, *multiples, r.randint(1, 256)])
    p.dv = p.d if chance(0.7) else r.choice([16, 32, 64, 80, 128, 192, 256, r.randint(1, 256)])
    length = lambda: r.choice([r.randint(1, 130), r.randint(1, 700), r.randint(700, 1500), 64 * r.randint(1, 20)])  # noqa: E731
    p.sq = length()
    p.sk = p.sq if chance(0.5) else length()
    while p.batch_size * p.hq * p.sq * p.sk > 4e7:
        p.hk, p.hq = 1, p.hq // p.hk
        p.batch = (2,)
        p.sq = (p.sq + 1) // 2 if p.sq * p.sk > 2e6 else p.sq
    p.layout = r.choice(["bshd", "bshd", "bhsd", "strided"])
    if chance(0.25):
        p.seqs_q, p.seqs_k = ([r.randint(0, n) for _ in range(p.batch_size)] for n in (p.sq, p.sk))
        p.total_q, p.total_k = max(sum(p.seqs_q) + 3, 1), max(sum(p.seqs_k) + 5, 1)
    for side, seqs, rows in (("q", p.seqs_q, p.sq), ("k", p.seqs_k, p.sk)):
        if chance(0.1):
            setattr(p, f"used_{side}", [r.randint(0, n) for n in (seqs or [rows] * p.batch_size)])
    p.causal = chance(0.4)
    p.top_left = chance(0.3)
    if chance(0.3):
        p.window = (r.choice([-1, 0, r.randint(1, 400)]), r.choice([-1, 0, r.randint(1, 400)]))
    p.scale = r.choice([None, None, None, None, 0.5, -0.1])
    p.softcap = r.choice([0.0, 0.0, 0.0, 3.0, 30.0])
    p.alibi = r.choice(["", "", "", "h", "b,h"])
    p.sink = chance(0.2)
    extents = lambda: (chance(0.5), len(p.batch) == 2 and chance(0.5), chance(0.5), chance(0.8), chance(0.8))  # noqa: E731
    if chance(0.4):
        p.bias = Plane(extents(), r.choice([p.type, p.type, p.type, "bf16", "fp16"]))
    if chance(0.15):
        p.bias2 = Plane(extents(), r.choice([p.type, "bf16", "fp16"]))
    if chance(0.25):
        p.mask = Plane(extents(), "bool")
    if chance(0.3):
        p.dropout, p.seed, p.offset = r.choice([0.1, 0.3, 0.5, 0.9]), r.getrandbits(64), r.getrandbits(64)
        p.rng = r.choice(["fovea", "fovea", "torch_mem_efficient"])
    if chance(0.1) and not p.seqs_q:  # few queries, whose heads may be packed
        p.sq = r.choice([1, 1, 2, 5])
        p.used_q = None
    return p


@pytest.mark.parametrize("seed", range(LARGER))
def test_larger_forward(seed, device, record_property):
    """Against fp64, then ten times more for equal bits."""
    p = larger_problem(seed)
    record_property("line", p.line())
    trial = Trial(p, device)
    trial.prepare(False)
    trial.run(False)
    faults = trial.faults(False)
    outputs = trial.tensors.outputs(False)
    first = [t.buffer.clone() for t in outputs]
    for _ in range(10):
        trial.prepare(False)
        trial.run(False)
        if not all(torch.equal(a.view(torch.uint8), t.buffer.view(torch.uint8)) for a, t in zip(first, outputs)):
            faults.append("bits differ between runs")
            break
    record_property("forward", not faults)
    assert not faults, "\n".join([p.line(), *faults])


def test_larger_problems_are_larger():
    problems = [larger_problem(seed) for seed in range(100)]
    assert len({p.line() for p in problems}) == 100
    assert sum(p.batch_size * p.hq * p.sq * p.sk > 1e7 for p in problems) >= 10 and max(p.sk for p in problems) > 1000
    for feature in ("packed", "causal", "softcap", "alibi", "sink", "bias", "bias2", "mask", "dropout", "used_q"):
        assert sum(bool(getattr(p, feature)) for p in problems) >= 5, feature


def test_they_are_as_random_as_they_look():
    problems = [random_problem(seed) for seed in range(200)]
    assert len({p.line() for p in problems}) == 200
    for feature in ("packed", "causal", "softcap", "alibi", "sink", "bias", "bias2", "mask", "dropout", "det", "used_q"):
        assert sum(bool(getattr(p, feature)) for p in problems) >= 10, feature
    assert torch.tensor([p.d > 256 for p in problems]).sum() >= 5
