# SPDX-License-Identifier: Apache-2.0
"""A bias that many entries share: sm90_summed_backward, whose clusters sum its gradient in shared memory, and additions
in memory."""

import pytest
import torch

from problem import parse
from trial import Trial, hopper_plan

LINES = [
    "bwd b=8 hq=5 sq=512 sk=512 d=64 bf16 bias=1,h,q,k need=q,k,v,bias",
    "bwd b=4 hq=9 sq=500 sk=600 d=128 bf16 bias=1,h,q,k need=q,k,v,bias",
    "bwd b=2 hq=17 sq=300 sk=520 d=96 fp16 bias=1,h,q,k need=q,k,v,bias",
    "bwd b=2x4 hq=6 hk=3 sq=450 sk=700 d=80 dv=48 bf16 bias=1,h,q,k need=q,k,v,bias",
    "bwd b=32 hq=3 sq=256 sk=260 d=64 bf16 bias=1,h,q,k dropout=0.1 need=q,k,v,bias",
    "bwd b=24 hq=3 sq=100 sk=400 d=128 bf16 bias=1,h,q,k dropout=0.6 need=q,k,v,bias",
    "bwd b=8 hq=5 sq=512 sk=512 d=64 bf16 bias=1,h,q,k causal need=q,k,v,bias",
    "bwd b=4 hq=9 sq=700 sk=500 d=128 bf16 bias=1,h,q,k causal need=q,k,v,bias",
    "bwd b=4 hq=9 sq=500 sk=700 d=64 fp16 bias=1,h,q,k causal align=tl dropout=0.2 need=q,k,v,bias",
    "bwd b=32 hq=3 sq=400 sk=392 d=64 bf16 bias=1,h,q,k window=40,10 dropout=0.2 need=q,k,v,bias",
    "bwd b=8 hq=5 sq=512 sk=512 d=64 bf16 bias=1,h,q,k mask=b,1,1,k alibi=h sink need=q,k,v,bias,sink",
    "bwd b=8 hq=5 sq=512 sk=512 d=128 bf16 bias=1,h,q,k mask=b,h,q,k dlse need=q,k,v,bias",
    "bwd b=4 hq=9 sq=500 sk=600 d=64 bf16 bias=1,h,q,k wide=q,k,v add=k need=q,k,v,bias",
    "bwd b=4 hq=9 sq=500 sk=600 d=64 bf16 bias=1,h,q,k pos=16,0 causal dropout=0.1 need=q,k,v,bias",
    "bwd b=8 hq=5 sq=512 sk=512 d=64 bf16 bias=1,h,q,k need=q,k,v,bias values=large_scores",
    "bwd b=8 hq=5 sq=512 sk=512 d=64 bf16 bias=1,h,q,k need=q,k,v,bias values=one_hot",
    "bwd b=8 hq=5 sq=513 sk=508 d=64 bf16 bias=1,h,q,k need=q,k,v,bias",
    # Several rounds of a cluster, several clusters a plane, planes of an outer batch, and of all heads.
    "bwd b=32 hq=12 sq=256 sk=512 d=64 bf16 bias=1,h,q,k window=100,9 dropout=0.1 need=q,k,v,bias",
    "bwd b=16 hq=50 sq=511 sk=512 d=64 bf16 bias=1,h,q,k window=100,9 dropout=0.1 need=q,k,v,bias",
    "bwd b=16 hq=50 sq=400 sk=384 d=128 bf16 bias=1,h,q,k causal dropout=0.1 need=q,k,v,bias",
    "bwd b=24 hq=8 sq=200 sk=300 d=32 fp16 bias=1,h,q,k causal dropout=0.2 need=q,k,v,bias",
    "bwd b=1x96 hq=2 sq=280 sk=280 d=32 bf16 bias=b1,1,h,q,k mask=b1,b2,1,1,k dropout=0.2 need=q,k,v,bias",
    "bwd b=3x16 hq=4 sq=300 sk=260 d=32 bf16 bias=b1,1,h,q,k dropout=0.2 need=q,k,v,bias",
    "bwd b=4 hq=16 sq=500 sk=400 d=128 bf16 bias=1,1,q,k need=q,k,v,bias",
    "bwd b=2x4 hq=16 sq=300 sk=500 d=64 bf16 bias=b1,1,1,q,k causal dropout=0.2 need=q,k,v,bias",
]
ADDED = [
    "bwd b=4 hq=8 sq=1000 sk=900 d=128 bf16 bias=1,1,q,k need=q,k,v,bias",
    "bwd b=32 hq=4 sq=384 sk=384 d=32 bf16 bias=1,h,q,k need=q,k,v,bias",
    "bwd b=32 hq=4 sq=385 sk=383 d=32 fp16 bias=1,h,q,k causal need=q,k,v,bias",
    "bwd b=48 hq=4 sq=256 sk=300 d=64 bf16 bias=1,h,q,k:fp32 need=q,k,v,bias",
    "bwd b=16 hq=4 sq=512 sk=500 d=64 bf16 bias=1,1,q,k dropout=0.2 softcap=10 sink need=q,k,v,bias,sink",
    "bwd b=16 hq=4 sq=500 sk=512 d=96 bf16 bias=1,1,q,k window=100,0 alibi=h need=q,k,v,bias",
    "bwd b=2x16 hq=4 sq=300 sk=512 d=80 dv=48 bf16 bias=b1,1,h,q,k mask=b1,b2,1,1,k need=q,k,v,bias",
    "bwd b=4 hq=32 hk=8 sq=600 sk=500 d=128 bf16 bias=1,1,q,k causal need=q,k,v,bias",
    "bwd b=24 hq=16 sq=100 sk=100 d=64 bf16 bias=1,h,q,k need=q,k,v,bias",
    "bwd b=24 hq=11 sq=70 sk=190 d=64 bf16 bias=1,h,q,k mask=b,1,q,k need=q,k,v,bias",
    "bwd b=24 hq=4 sq=600 sk=70 d=32 bf16 bias=1,h,q,k need=q,k,v,bias",
    "bwd b=16 hq=4 sq=300 sk=300 d=32 bf16 bias=1,h,q,k need=q,k,v,bias",
    "bwd b=16 hq=8 sq=300 sk=140 d=64 bf16 bias=1,h,q,k need=q,k,v,bias",
    "bwd b=2 hq=8 sq=1000 sk=700 d=64 bf16 bias=1,1,q,k need=q,k,v,bias",
    "bwd b=8 hq=8 sq=500 sk=512 d=64 bf16 bias=1,1,q,k mask=1,1,q,k softcap=3 need=q,k,v,bias values=nan_where_masked",
    "bwd b=24 hq=8 sq=384 sk=384 d=32 bf16 bias=1,h,q,k bias2=b,1,1,k need=q,k,v,bias,bias2",
    "bwd b=24 hq=8 sq=384 sk=384 d=64 bf16 bias=1,h,q,k bias2=b,h,q,1 need=q,k,v,bias,bias2",
    "bwd b=8 hq=4 sq=500 sk=512 d=64 bf16 bias=1,1,q,k wide=bias,q need=q,k,v,bias",
    "bwd b=8 hq=4 sq=500 sk=512 d=128 bf16 bias=1,1,q,k wide=bias add=bias need=q,k,v,bias",
    "bwd b=16 hq=4 sq=300 sk=301 d=64 fp16 bias=1,h,q,k skew=1 need=q,k,v,bias",
    "bwd b=5 hq=4 d=64 bf16 seqs_q=300,0,131,500,64 seqs_k=201,3,131,500,64 causal bias=1,1,q,k need=q,k,v,bias",
    "bwd b=5 hq=4 hk=2 d=128 bf16 seqs_q=300,0,131,500,64 seqs_k=201,3,131,500,64 bias=1,1,q,k dropout=0.1 need=q,k,v,bias",
    *(f"bwd b=16 hq=4 sq=300 sk=301 d=64 bf16 bias=1,h,q,k mask=b,1,1,k need=q,k,v,bias values={family}"
      for family in ("large_scores", "one_hot", "huge", "denormal", "dead_rows", "nan_where_masked")),
    "bwd b=8 hq=4 sq=500 sk=512 d=128 bf16 bias=1,1,q,k values=lowest need=q,k,v,bias",
]
LINES += ADDED


@pytest.mark.parametrize("line", ADDED)
def test_sums_in_memory(line, device):
    """Other tests of these lines would pass as well if some other kernel computed them."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("kernels of Hopper alone add to sums of a bias")
    plan = hopper_plan(line)
    assert "by additions in memory" in plan, plan


@pytest.mark.parametrize("line", LINES)
def test_shared(line, device):
    p = parse(line)
    p.case_seed = 11
    faults = Trial(p, device).test()
    assert not faults, "\n".join([p.line(), *faults])


def test_the_same_bits_every_time(device):
    """The gradient is summed in the order of the batch entries, whatever block comes first."""
    trial = Trial(parse("bwd b=8 hq=16 sq=512 sk=512 d=64 bf16 bias=1,h,q,k need=q,k,v,bias"), device)
    trial.prepare(True)
    trial.run(True)
    first = trial.tensors["grad_bias"].values()
    for _ in range(100):
        trial.tensors["grad_bias"].poison()
        trial.run(True)
        assert torch.equal(trial.tensors["grad_bias"].values(), first)
