# SPDX-License-Identifier: Apache-2.0
"""deterministic=True: the same bits in 1,000 runs, with other work on the device that moves the order of blocks about."""

import pytest
import torch

from problem import parse
from trial import Trial

RUNS = 1000
LINES = [
    "bwd b=2 hq=4 hk=2 sq=300 sk=300 d=64 bf16 causal need=q,k,v det",
    "bwd b=3 hq=4 sq=129 sk=257 d=64 bf16 bias=1,h,q,k bias2=b,1,1,k:fp32 sink need=q,k,v,bias,bias2,sink det",
    "bwd b=8 hq=2 sq=64 sk=64 d=32 fp16 bias=1,1,q,k:fp32 mask=b,1,1,k dropout=0.1 seed=3 need=q,k,v,bias det",
    "bwd b=2 hq=2 sq=100 sk=100 d=128 fp32 bias=b,1,q,k need=q,k,v,bias det dlse",
    "bwd b=4 hq=2 hk=1 d=80 bf16 seqs_q=70,0,131,17 seqs_k=70,3,131,40 softcap=5 alibi=h need=q,k,v det",
    "bwd b=1 hq=2 sq=200 sk=200 d=256 bf16 window=50,0 bias=1,1,q,k need=q,k,v,bias det",
    "bwd b=1 hq=2 sq=150 sk=150 d=512 bf16 need=q,k,v det",
]


@pytest.mark.parametrize("line", LINES)
def test_same_bits(line, device):
    p = parse(line)
    p.case_seed = 4
    trial = Trial(p, device)
    assert not trial.test()
    outputs = [*trial.tensors.outputs(False), *trial.tensors.outputs(True)]
    trial.prepare(False)
    trial.prepare(True)
    trial.run(False)
    trial._give_saved()
    trial.run(True)
    first = [t.buffer.clone() for t in outputs if t.name.startswith("grad")]
    differing = torch.zeros((), dtype=torch.int64, device=device)
    on_gpu = device.type == "cuda"
    other = torch.cuda.Stream() if on_gpu else None
    noise = torch.randn(700, 700, device=device)
    for n in range(RUNS if on_gpu else 3):
        if on_gpu and n % 3 == 0:
            with torch.cuda.stream(other):
                for _ in range(n % 7):
                    noise = torch.nn.functional.normalize(noise @ noise)
        trial.run(True)
        for t, bits in zip([t for t in outputs if t.name.startswith("grad")], first):
            differing += (t.buffer.view(torch.uint8) != bits.view(torch.uint8)).any()
    assert differing.item() == 0


@pytest.mark.parametrize("line", LINES[:2])
def test_forward_has_the_same_bits_always(line, device):
    """There is nothing in it that order could change."""
    p = parse(line.replace(" det", ""))
    trial = Trial(p, device)
    trial.prepare(False)
    trial.run(False)
    first = [t.buffer.clone() for t in trial.tensors.outputs(False)]
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(100):
        trial.run(False)
        for t, bits in zip(trial.tensors.outputs(False), first):
            differing += (t.buffer.view(torch.uint8) != bits.view(torch.uint8)).any()
    assert differing.item() == 0
