# SPDX-License-Identifier: Apache-2.0
"""Heads wider than 256, whose kernels cut K, V and the work otherwise: rows of the case table with 16 bits, widened."""

import pytest

from problem import Problem, parse
from table import rows
from trial import Trial

# (head_dim, head_dim_v): whole parts of 128 and 256 columns, one more than that, and one of them narrow.
DIMS = [(512, 512), (264, 264), (384, 300), (512, 64), (96, 512), (259, 257), (320, 448)]
EVERY = 5  # of the rows
LARGER = [
    "bwd b=3 hq=4 hk=2 sq=700 sk=900 d=512 bf16 causal need=q,k,v",
    "bwd b=3 hq=4 hk=2 sq=500 sk=700 d=512 fp16 bias=1,h,q,k dropout=0.1 need=q,k,v,bias",
    "bwd b=3 hq=4 hk=2 sq=500 sk=700 d=512 bf16 mask=b,1,1,k need=q,k,v",
    "bwd b=20 hq=4 sq=640 sk=640 d=384 dv=512 bf16 window=100,0 need=q,k,v",
    "bwd b=2 hq=4 sq=500 sk=2500 d=512 bf16 softcap=3 alibi=h sink need=q,k,v",
    "bwd b=2 hq=4 sq=300 sk=300 d=512 bf16 need=q,k,v values=large_scores",
    "bwd b=4 hq=40 sq=500 sk=300 d=264 dv=264 bf16 bias=1,h,q,k:fp32 need=q,k,v",
    "bwd b=3 hq=4 hk=2 sq=300 sk=300 d=512 bf16 used_q=300,129,40 used_k=300,70,130 bias=b,h,q,k need=q,k,v",
    "bwd b=3 hq=4 sq=300 sk=300 d=512 dv=64 fp16 used_q=300,100,1 used_k=100,300,0 bias=1,h,q,k:fp32 need=q,k,v",
    "bwd b=3 hq=2 d=384 bf16 seqs_q=300,0,129 seqs_k=200,33,290 causal bias=b,1,1,k need=q,k,v",
    "bwd b=1 hq=3 sq=300 sk=90 d=512 bf16 causal need=q,k,v",
    "bwd b=1 hq=67 sq=300 sk=700 d=320 bf16 causal align=tl need=q,k,v",
    "bwd b=1 hq=1 sq=200 sk=20000 d=512 bf16 sink need=q,k,v",  # keys in parts, by generic_combine
    "bwd b=1 hq=1 sq=100 sk=9000 d=300 dv=270 fp16 skew=1 causal wide=out need=q,k,v",
    "bwd b=1 hq=30 sq=300 sk=5000 d=512 bf16 need=q,k,v",  # the last tiles in parts
    "bwd b=2 hq=4 sq=2000 sk=2100 d=512 bf16 causal window=40,0 need=q,k,v",
    "bwd b=2 hq=4 hk=1 sq=300 sk=500 d=64 dv=512 bf16 softcap=20 alibi=h bias=b,h,q,k bias2=1,1,1,k mask=b,1,q,k dropout=0.1 causal need=q,k,v",
    "bwd b=2 hq=4 sq=300 sk=500 d=288 bf16 dropout=0.2 rng=torch_mem_efficient need=q,k,v",
    "bwd b=1 hq=2 sq=130 sk=200 d=335 fp16 layout=strided need=q,k,v",
]


def wide_rows() -> list[Problem]:
    rows_ = [(n, p) for n, p in enumerate(rows()) if p.type in ("bf16", "fp16") and p.d != 5][::EVERY]
    chosen = []
    for place, (n, p) in enumerate(rows_):
        d, dv = DIMS[place % len(DIMS)]
        if p.layout == "qkv3":
            d = dv = max(d, dv)
        wide = Problem(**{**vars(p), "d": d, "dv": dv, "text": ""})
        wide.case_seed = n + 1
        chosen.append(wide)
    return chosen


@pytest.mark.parametrize("n", range(len(wide_rows())))
def test_row(n, device):
    p = wide_rows()[n]
    faults = Trial(p, device).test()
    assert not faults, "\n".join([p.line(), *faults])


@pytest.mark.parametrize("line", LARGER)
def test_larger(line, device):
    p = parse(line)
    p.case_seed = 8
    faults = Trial(p, device).test()
    assert not faults, "\n".join([p.line(), *faults])
