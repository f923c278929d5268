# SPDX-License-Identifier: Apache-2.0
"""Blocks of keys of which the last would run alone: several blocks share these, and whichever ends last adds their sums of dk and dv up.
Lines are for 132 multiprocessors."""

import pytest

from problem import parse
from test_determinism import differing
from trial import Trial, hopper_plan

LINES = [
    "b=1 hq=10 sq=2048 sk=2048 d=128 bf16 need=q,k,v",
    "b=1 hq=10 sq=2100 sk=1930 d=128 fp16 need=q,k,v",
    "b=1 hq=10 sq=1024 sk=2040 d=128 bf16 need=q,k,v",
    "b=1 hq=17 sq=2049 sk=1000 d=64 bf16 need=q,k,v",
    "b=1 hq=17 sq=2048 sk=1000 d=64 bf16 need=k",
    "b=1 hq=17 sq=2048 sk=1000 d=128 bf16 need=v",
    "b=1 hq=17 sq=1700 sk=1000 d=128 bf16 need=q,v",
    "b=2 hq=5 sq=1500 sk=2000 d=32 fp16 need=q,k,v",
    "b=2 hq=5 sq=1500 sk=2000 d=80 bf16 need=q,k,v",
    "b=2 hq=5 sq=1500 sk=2000 d=96 dv=32 bf16 need=q,k,v",
    "b=2 hq=5 sq=1500 sk=2000 d=192 dv=128 bf16 need=q,k,v",
    "b=2 hq=5 sq=1500 sk=2000 d=256 bf16 need=q,k,v",
    "b=2 hq=5 sq=1500 sk=1950 d=200 dv=256 fp16 sink need=q,k,v,sink",
    "b=1 hq=40 hk=10 sq=700 sk=2048 d=128 bf16 need=q,k,v",
    "b=1 hq=50 hk=10 sq=700 sk=2000 d=64 bf16 dlse need=q,k,v",
    "b=1 hq=30 hk=10 sq=700 sk=2048 d=256 bf16 need=q,k,v",
    "b=2 hq=5 sq=1500 sk=2048 d=72 bf16 mask=b,1,q,k dropout=0.1 need=q,k,v",
    "b=2 hq=5 sq=1500 sk=2048 d=64 bf16 mask=b,1,1,k softcap=20 need=q,k,v",
    "b=2 hq=5 sq=1500 sk=2048 d=128 bf16 dropout=0.7 need=q,k,v",
    "b=2 hq=5 sq=1501 sk=2003 d=64 bf16 bias=b,h,q,k need=q,k,v,bias",
    "b=2 hq=5 sq=1504 sk=2000 d=128 bf16 bias=b,h,q,k need=q,k,v,bias",
    "b=2 hq=5 sq=1504 sk=2000 d=64 bf16 bias=1,h,q,1 need=q,k,v,bias",
    "b=16 hq=5 sq=1500 sk=333 d=64 bf16 bias=1,1,q,k need=q,k,v,bias",
    "b=8 hq=4 sq=1024 sk=640 d=128 bf16 bias=1,h,q,k need=q,k,v,bias",
    "b=4 hq=9 sq=1100 sk=640 d=64 bf16 bias=1,h,q,k need=q,k,v,bias",
    "b=8 hq=4 sq=1022 sk=638 d=96 fp16 bias=1,h,q,k dropout=0.2 need=q,k,v,bias",
    "b=1 hq=10 sq=1100 sk=2048 d=64 bf16 pos=500,20 alibi=h need=q,k,v",
    "b=1 hq=10 sq=1100 sk=2048 d=128 bf16 layout=strided skew=1 need=q,k,v",
    "b=1 hq=10 sq=1100 sk=2048 d=64 bf16 wide=k,v add=k need=q,k,v",
    "b=1 hq=10 sq=1100 sk=2048 d=256 bf16 wide=q,k,v add=q,v need=q,k,v",
    *(f"b=1 hq=10 sq=1100 sk=2048 d={d} bf16 values={family} need=q,k,v"
      for d in (64, 128, 256) for family in ("one_hot", "large_scores", "huge", "denormal")),
]  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_last_parts(line, device):
    assert "the last " in hopper_plan(f"bwd {line}")
    p = parse(f"bwd {line}")
    p.case_seed = 15
    faults = Trial(p, device).test()
    assert not faults, "\n".join([p.line(), *faults])


@pytest.mark.cuda
@pytest.mark.parametrize("d", [64, 128, 256])
def test_bits_of_dk_and_dv(d, device):
    """Parts are added in their order: dk and dv have the same bits in every run, although nobody asked for `deterministic`."""
    trial = Trial(parse(f"bwd b=1 hq=10 sq=1100 sk=2048 d={d} bf16 need=k,v"), device)
    assert not trial.test()
    assert differing(trial, True, device) == 0
