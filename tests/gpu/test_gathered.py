# SPDX-License-Identifier: Apache-2.0
"""Backwards whose clusters have all keys of a head: sm90_summed_backward sums dQ in shared memory and stores it."""

import pytest
import torch

from problem import parse
from trial import Trial

LINES = [
    "bwd b=2 hq=40 sq=200 sk=500 d=64 bf16 need=q,k,v",
    "bwd b=3 hq=30 sq=64 sk=400 d=32 fp16 need=q,k,v",
    "bwd b=8 hq=16 hk=4 sq=150 sk=1000 d=64 bf16 dlse need=q,k,v",
    "bwd b=16 hq=6 sq=300 sk=500 d=64 bf16 dropout=0.2 mask=b,1,1,k need=q,k,v",
    "bwd b=16 hq=6 sq=130 sk=450 d=48 dv=64 bf16 softcap=3 alibi=h need=q,k,v",
    "bwd b=16 hq=6 sq=100 sk=512 d=64 bf16 mask=b,1,q,k need=q,k,v",
    "bwd b=4x4 hq=6 sq=70 sk=440 d=16 bf16 need=q,k,v values=one_hot",
    "bwd b=16 hq=6 sq=130 sk=500 d=64 fp16 wide=k,v add=k need=q,k,v",
    "bwd b=20 hq=6 sq=500 sk=500 d=64 bf16 layout=bhsd need=q,k,v values=large_scores",
    "bwd b=16 hq=16 sq=1024 sk=1024 d=32 bf16 need=q,k,v",
    "bwd b=64 hq=12 sq=1 sk=500 d=64 bf16 need=q,k,v",
    "bwd b=64 hq=12 sq=512 sk=512 d=64 bf16 dropout=0.1 mask=b,1,1,k need=q,k,v",
]


@pytest.mark.parametrize("line", LINES)
def test_gathered(line, device):
    p = parse(line)
    p.case_seed = 12
    faults = Trial(p, device).test()
    assert not faults, "\n".join([p.line(), *faults])


def test_the_same_bits_every_time(device):
    """dQ is summed in the order of the blocks of keys, whatever block comes first."""
    trial = Trial(parse("bwd b=8 hq=16 sq=512 sk=512 d=64 bf16 need=q,k,v"), device)
    trial.prepare(True)
    trial.run(True)
    first = trial.tensors["grad_q"].values()
    for _ in range(100):
        trial.tensors["grad_q"].poison()
        trial.run(True)
        assert torch.equal(trial.tensors["grad_q"].values(), first)
