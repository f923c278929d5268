# SPDX-License-Identifier: Apache-2.0
"""The same bits in 1,000 runs, with other work on the device: the forward always, gradients with deterministic=True."""

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


LONGER = [  # more blocks than run at once
    "bwd b=600 hq=4 sq=49 sk=49 d=32 bf16 bias=1,h,q,k need=q,k,v,bias det",
    "bwd b=3 hq=8 sq=300 sk=300 d=64 bf16 bias=b,h,q,k need=q,k,v,bias det",
    "bwd b=2 hq=8 hk=2 sq=300 sk=430 d=128 bf16 causal bias=b,1,q,k sink need=q,k,v,bias,sink det",
    "bwd b=1 hq=8 hk=2 sq=1 sk=9000 d=128 bf16 need=q,k,v det",
    "bwd b=2 hq=16 hk=4 sq=700 sk=700 d=128 bf16 causal need=q,k,v det",
    "bwd b=8 hq=8 sq=520 sk=520 d=64 bf16 bias=1,h,q,k need=q,k,v,bias det",
    "bwd b=64 hq=4 sq=200 sk=200 d=32 bf16 bias=1,h,q,k bias2=b,1,1,k need=q,k,v,bias,bias2 det",
    "bwd b=2 hq=8 sq=600 sk=600 d=256 bf16 causal need=q,k,v det",
    "bwd b=4 hq=16 sq=1000 sk=1000 d=128 bf16 causal bias=1,h,q,k need=q,k,v,bias det",
    "bwd b=4 hq=16 sq=1000 sk=1000 d=128 bf16 causal need=q,k,v det",
    "bwd b=9 hq=16 sq=700 sk=700 d=64 bf16 need=q,k,v det",
    "bwd b=9 hq=16 sq=500 sk=500 d=64 bf16 causal mask=b,1,1,k need=q,k,v det",
    "bwd b=4 hq=4 d=64 bf16 seqs_q=300,0,131,200 seqs_k=300,3,131,200 bias=1,h,q,k bias2=b,h,q,1 dropout=0.1 seed=3 need=q,k,v,bias,bias2 det",
    "bwd b=1 hq=8 hk=1 sq=900 sk=900 d=64 bf16 causal dropout=0.1 seed=3 need=q,k,v det",
    "bwd b=5 hq=8 hk=2 d=128 fp16 seqs_q=700,0,131,400,612 seqs_k=700,3,131,400,612 causal window=200,0 dropout=0.1 seed=3 need=q,k,v det",
]


class Other:
    """Work of somebody else's on another stream, more and less of it, which moves the order of blocks about."""

    def __init__(self, device):
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.noise = torch.randn(700, 700, device=device)

    def step(self, n):
        if self.stream and n % 3 == 0:
            with torch.cuda.stream(self.stream):
                for _ in range(n % 7):
                    self.noise = torch.nn.functional.normalize(self.noise @ self.noise)


def differing(trial, backward, device):
    """Of so many runs beside other work, how many outputs differ in a bit from those of the first."""
    outputs = trial.tensors.outputs(backward)
    trial.prepare(backward)
    trial.run(backward)
    first = [t.buffer.clone() for t in outputs]
    count = torch.zeros((), dtype=torch.int64, device=device)
    other = Other(device)
    for n in range(RUNS if device.type == "cuda" else 3):
        other.step(n)
        trial.run(backward)
        for t, bits in zip(outputs, first):
            count += (t.buffer.view(torch.uint8) != bits.view(torch.uint8)).any()
    return count.item()


@pytest.mark.parametrize("line", [*LINES, *LONGER])
def test_same_bits(line, device):
    p = parse(line)
    p.case_seed = 4
    trial = Trial(p, device)
    assert not trial.test()
    assert differing(trial, True, device) == 0


@pytest.mark.parametrize("line", [*LINES, *LONGER])
def test_forward_has_the_same_bits_always(line, device):
    """There is nothing in it that order could change, asked or not."""
    trial = Trial(parse(line.replace(" det", "")), device)
    assert differing(trial, False, device) == 0
