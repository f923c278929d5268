# SPDX-License-Identifier: Apache-2.0
"""Few tiles of queries and many keys, whose parts several blocks compute and generic_combine puts together."""

import pytest

from problem import parse
from trial import Trial

LINES = [
    "bwd b=2 hq=16 sq=64 sk=3412 d=192 bf16 need=q,k,v",
    "bwd b=1 hq=3 sq=130 sk=2500 d=64 bf16 need=q,k,v",
    "bwd b=1 hq=4 sq=2496 sk=2496 d=64 bf16 causal need=q,k,v",
    "bwd b=1 hq=4 hk=2 sq=500 sk=2600 d=128 bf16 causal align=tl need=q,k,v",
    "bwd b=1 hq=4 hk=1 sq=300 sk=4000 d=128 fp16 causal dlse need=q,k,v",
    "bwd b=1 hq=3 sq=700 sk=2200 d=256 bf16 window=300,20 need=q,k,v",
    "bwd b=1 hq=2 sq=3000 sk=2100 d=80 bf16 window=64,0 need=q,k,v",
    "bwd b=2 hq=4 sq=200 sk=2300 d=64 bf16 bias=1,h,q,k need=q,k,v,bias",
    "bwd b=2 hq=4 sq=200 sk=2300 d=128 bf16 bias=b,h,q,k:fp32 bias2=1,h,1,k need=q,k,v,bias",
    "bwd b=2 hq=4 sq=200 sk=2300 d=96 fp16 mask=b,1,1,k need=q,k,v",
    "bwd b=2 hq=4 sq=200 sk=2300 d=64 bf16 mask=b,1,q,k need=q,k,v",
    "bwd b=2 hq=4 sq=100 sk=2300 d=64 bf16 dropout=0.3 need=q,k,v",
    "bwd b=2 hq=4 sq=100 sk=2300 d=128 bf16 dropout=0.7 rng=torch_mem_efficient causal need=q,k,v",
    "bwd b=1 hq=4 sq=300 sk=3000 d=128 bf16 softcap=3 sink alibi=h causal need=q,k,v,sink",
    "bwd b=1 hq=4 sq=90 sk=2900 d=40 dv=72 bf16 sink scale=-0.5 need=q,k,v,sink",
    "bwd b=1 hq=4 sq=64 sk=3000 d=64 dv=256 bf16 softcap=5 dropout=0.1 bias=1,h,q,k sink causal need=q,k,v,bias,sink",
    "bwd b=3 hq=2 seqs_q=0,70,30 seqs_k=2100,2500,0 total_q=120 max_k=2600 d=64 bf16 need=q,k,v",
    "bwd b=3 hq=2 seqs_q=100,0,30 seqs_k=2100,300,17 d=128 bf16 causal need=q,k,v",
    "bwd b=2 hq=4 sq=100 sk=4000 used_q=77,0 used_k=3333,4000 d=64 bf16 need=q,k,v",
    "bwd b=1 hq=4 sq=100 sk=2300 d=64 bf16 pos=500,0 causal alibi=h need=q,k,v",
    "bwd b=1 hq=4 sq=100 sk=2300 d=64 bf16 wide=out sink need=q,k,v,sink",
    "bwd b=1 hq=4 sq=100 sk=2300 d=128 bf16 layout=strided skew=1 need=q,k,v",
    "bwd b=1 hq=4 sq=100 sk=2300 d=64 bf16 values=large_scores need=q,k,v",
    "bwd b=1 hq=4 sq=100 sk=2300 d=128 fp16 values=one_hot need=q,k,v",
]


@pytest.mark.parametrize("line", LINES)
def test_split(line, device):
    p = parse(line)
    p.case_seed = 9
    faults = Trial(p, device).test()
    assert not faults, "\n".join([p.line(), *faults])
