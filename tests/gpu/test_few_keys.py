# SPDX-License-Identifier: Apache-2.0
"""Backwards of so few keys that one block has them all: sm90_backward forms delta, and no other kernel is launched."""

import pytest

from problem import parse
from trial import Trial

LINES = [
    "bwd b=2 hq=3 sq=4096 sk=77 d=64 bf16 need=q,k,v",
    "bwd b=3 hq=70 sq=333 sk=128 d=64 fp16 need=q,k,v",
    "bwd b=2 hq=8 hk=2 sq=500 sk=256 d=64 bf16 dlse need=q,k,v",
    "bwd b=2 hq=8 hk=2 sq=700 sk=190 d=40 bf16 causal need=q,k,v",
    "bwd b=2 hq=4 sq=1000 sk=380 d=32 bf16 need=q,k,v",
    "bwd b=2 hq=4 sq=300 sk=100 d=128 bf16 causal align=tl need=q,k,v",
    "bwd b=2 hq=4 sq=300 sk=100 d=128 dv=64 fp16 window=30,5 dlse need=q,k,v",
    "bwd b=2 hq=4 sq=300 sk=100 d=96 bf16 dropout=0.3 need=q,k,v",
    "bwd b=2 hq=4 sq=300 sk=100 d=80 dv=16 bf16 softcap=3 alibi=h need=q,k,v",
    "bwd b=2 hq=4 sq=300 sk=100 d=64 bf16 mask=b,1,1,k need=q,k,v",
    "bwd b=2 hq=4 sq=300 sk=100 d=64 bf16 mask=b,1,q,k dropout=0.1 need=q,k,v",
    "bwd b=2 hq=4 sq=300 sk=100 d=64 bf16 bias=b,h,1,k need=q,k,v",
    "bwd b=2 hq=4 sq=300 sk=100 d=64 bf16 sink need=q,k,v",
    "bwd b=2 hq=4 sq=30 sk=100 d=64 bf16 det need=q,k,v",
    "bwd b=2 hq=4 sq=300 sk=100 d=64 bf16 wide=q,k,v add=q,k need=q,k,v",
    "bwd b=2 hq=4 sq=300 sk=100 d=64 bf16 pos=16,0 causal dropout=0.1 need=q,k,v",
    "bwd b=2 hq=4 sq=300 sk=100 d=64 bf16 layout=bhsd values=large_scores need=q,k,v",
    "bwd b=2x2 hq=4 sq=300 sk=100 d=64 bf16 values=one_hot need=q,k,v",
]


@pytest.mark.parametrize("line", LINES)
def test_few_keys(line, device):
    p = parse(line)
    p.case_seed = 10
    faults = Trial(p, device).test()
    assert not faults, "\n".join([p.line(), *faults])
