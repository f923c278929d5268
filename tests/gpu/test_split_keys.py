# SPDX-License-Identifier: Apache-2.0
"""Tiles of queries whose keys several blocks have in parts: few tiles and many keys, whose parts generic_combine puts together, and, where there
are two or three parts, or parts of the last tiles alone, the part that ends last. Lines are for 132 multiprocessors."""

import pytest

from problem import parse
from test_determinism import differing
from trial import Trial, hopper_plan

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

JOINED = [
    "fwd b=1 hq=4 sq=2496 sk=2496 d=64 bf16 causal lse",
    "fwd b=1 hq=3 sq=2400 sk=2600 d=128 fp16 window=900,0 lse",
    "fwd b=3 hq=4 seqs_q=900,70,1500 seqs_k=2100,3,1500 d=64 bf16 lse",
    "fwd b=3 hq=3 seqs_q=900,0,1500 seqs_k=2100,3,1500 d=128 bf16 causal wide=out lse",
    "fwd b=4 hq=8 sq=200 sk=2100 used_q=200,0,77,128 used_k=2100,2000,0,1 d=96 bf16 sink lse",
    "fwd b=1 hq=4 sq=1700 sk=2900 d=64 bf16 mask=b,1,1,k dropout=0.2 lse",
    "fwd b=4 hq=1 sq=2048 sk=3904 d=128 bf16 bias=b,h,q,k layout=strided skew=1 lse",
    *(f"fwd {line} lse" for line in (
        "b=1 hq=8 sq=3456 sk=3296 d=64 bf16 bias=1,h,q,k", "b=1 hq=10 sq=1800 sk=2100 d=128 bf16", "b=1 hq=10 sq=1800 sk=2100 d=128 fp16 sink",
        "b=2 hq=5 sq=1800 sk=2100 d=256 bf16 softcap=20", "b=2 hq=5 sq=1800 sk=2100 d=192 dv=128 bf16", "b=2 hq=5 sq=1800 sk=2100 d=72 fp16",
        "b=2 hq=5 sq=1800 sk=2100 d=40 dv=96 bf16 dropout=0.1", "b=2 hq=5 sq=1800 sk=2100 d=128 bf16 dropout=0.7",
        "b=2 hq=5 sq=1800 sk=2100 d=128 bf16 dropout=0.1 bias=1,h,q,k mask=b,1,q,k", "b=2 hq=5 sq=1800 sk=2100 d=128 bf16 mask=b,1,1,k",
        "b=1 hq=10 sq=1800 sk=2100 d=128 bf16 bias=b,h,q,k:fp32 bias2=1,h,1,k", "b=1 hq=20 hk=4 sq=900 sk=2100 d=128 bf16 alibi=h pos=300,10",
        "b=1 hq=10 sq=1800 sk=2100 d=128 bf16 layout=strided skew=1", "b=1 hq=15 sq=1800 sk=2100 d=64 bf16 wide=out sink",
        "b=1 hq=10 sq=1800 sk=2100 d=64 bf16 mask=b,h,q,1", "b=2 hq=5 sq=1800 sk=2100 d=64 fp16 rng=torch_mem_efficient dropout=0.3")),
    *(f"fwd b=1 hq={heads} sq=1800 sk=2100 d={d} bf16 {features} lse values={family}"
      for d, heads, features in ((64, 15, "bias=1,h,q,k"), (128, 10, "sink"), (256, 10, ""))
      for family in ("large_scores", "one_hot", "dead_rows", "minus_infinity", "huge", "lowest", "denormal")
      if "bias" in features or family not in ("dead_rows", "lowest")),
]  # fmt: skip


@pytest.mark.parametrize("line", [*LINES, *JOINED])
def test_split(line, device):
    if line in JOINED:
        plan = hopper_plan(line)
        assert "keys in " in plan or "the keys of the last " in plan, plan
    p = parse(line)
    p.case_seed = 9
    faults = Trial(p, device).test()
    assert not faults, "\n".join([p.line(), *faults])


@pytest.mark.cuda
@pytest.mark.parametrize("line", ["fwd b=1 hq=10 sq=1800 sk=2100 d=128 bf16 sink lse", "fwd b=1 hq=4 sq=2496 sk=2496 d=64 bf16 causal lse"])
def test_bits_of_joined_parts(line, device):
    """Parts are put together in their order, whichever ends last."""
    trial = Trial(parse(line), device)
    assert not trial.test()
    assert differing(trial, False, device) == 0
