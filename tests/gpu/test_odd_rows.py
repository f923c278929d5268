# SPDX-License-Identifier: Apache-2.0
"""Biases of 16 bits whose rows begin anywhere, which no tensor map has: packed for the kernels, or moved within them, and
gradients that leave for such rows. Lengths around those of tiles (64 queries; 128 and 192 keys), of every remainder by 8."""

import pytest

from problem import parse
from trial import Trial

LENGTHS = [(129, 127), (65, 193), (63, 257), (1, 1023), (700, 3), (250, 386), (131, 517), (2047, 2047)]
KINDS = [
    "d=64 bf16 bias=b,h,q,k need=q,k,v,bias",
    "d=64 bf16 bias=b,h,q,k need=q,k,v,bias det",
    "d=64 bf16 bias=1,h,q,k need=q,k,v,bias",
    "d=64 bf16 bias=b,1,q,k need=q,k,v,bias det",
    "d=64 bf16 bias=b,1,q,1 need=q,k,v,bias",
    "d=64 fp16 bias=b,h,q,k need=k,v,bias skew=3",
    "d=32 bf16 bias=1,1,q,k need=q,k,v skew=1",
    "d=80 fp16 bias=b,h,q,k need=q,k,v,bias skew=1",
    "d=128 bf16 bias=b,h,q,k need=q,k,v,bias",
    "d=128 bf16 bias=b,h,q,k need=q,k,v,bias det",
    "d=128 fp16 bias=1,h,q,k need=q,k,v,bias skew=4",
    "d=128 bf16 bias=b,1,1,k need=q,k,v,bias det",
]
BESIDE = [  # other features beside such a bias
    "bwd b=2 hq=4 hk=2 sq=300 sk=301 d=64 bf16 bias=b,h,q,k need=q,k,v,bias",
    "bwd b=2 hq=4 hk=2 sq=300 sk=301 d=128 bf16 bias=b,h,q,k need=q,k,v,bias det",
    "bwd b=2 hq=2 sq=300 sk=301 d=64 bf16 bias=b,h,q,k mask=b,h,q,k need=q,k,v,bias",
    "bwd b=2 hq=2 sq=300 sk=301 d=128 bf16 bias=b,h,q,k mask=b,1,1,k need=q,k,v,bias",
    "bwd b=2 hq=2 sq=300 sk=301 d=64 bf16 bias=b,h,q,k dropout=0.2 seed=5 need=q,k,v,bias",
    "bwd b=2 hq=2 sq=300 sk=301 d=64 fp16 bias=b,h,q,k bias2=b,1,1,k need=q,k,v,bias,bias2",
    "bwd b=2 hq=2 sq=300 sk=301 d=64 bf16 bias=1,h,q,k causal need=q,k,v",
    "bwd b=2 hq=2 sq=300 sk=301 d=64 bf16 bias=b,h,q,k causal need=q,k,v",
    "bwd b=2 hq=4 hk=2 sq=300 sk=301 d=128 fp16 bias=b,h,q,k window=70,3 softcap=5 need=q,k,v",
    "bwd b=2 hq=2 sq=300 sk=301 d=112 bf16 bias=b,h,q,k need=q,k,v,bias",
    "bwd b=1 hq=4 hk=1 sq=700 sk=1301 d=64 bf16 bias=b,h,q,k mask=b,1,q,k dropout=0.2 seed=5 need=q,k,v,bias",
    "bwd b=2 hq=2 sq=300 sk=301 d=64 bf16 bias=1,h,q,k window=70,3 need=q,k,v det",
    "bwd b=2 hq=2 sq=300 sk=301 d=128 bf16 bias=b,h,q,k softcap=5 alibi=h need=q,k,v,bias",
    "bwd b=3 hq=2 d=64 bf16 seqs_q=300,0,131 seqs_k=201,3,131 bias=1,h,q,k need=q,k,v,bias",
    "bwd b=4 hq=2 d=64 bf16 seqs_q=300,50,0,17 seqs_k=300,50,3,17 causal alibi=h sink bias=1,h,q,k:fp16 bias2=b,h,q,k:fp16 mask=b,1,1,k det",
    "bwd b=2 hq=2 sq=300 sk=301 d=64 bf16 used_k=301,70 bias=1,h,q,k need=q,k,v",
    "bwd b=2 hq=2 sq=300 sk=301 d=192 bf16 bias=b,h,q,k need=q,k,v,bias",
    "bwd b=2x3 hq=2 sq=131 sk=131 d=64 bf16 bias=b1,1,h,q,k need=q,k,v,bias",
    "bwd b=2x3 hq=2 sq=131 sk=131 d=64 bf16 bias=b1,b2,h,q,k need=q,k,v,bias",
    "bwd b=3 hq=2 sq=49 sk=49 d=32 bf16 bias=b,h,q,k need=q,k,v,bias",
    # Clusters that sum the gradient, whose rows begin anywhere.
    "bwd b=4 hq=9 sq=500 sk=601 d=128 bf16 bias=1,h,q,k need=q,k,v,bias",
    "bwd b=8 hq=5 sq=513 sk=510 d=64 bf16 bias=1,h,q,k dropout=0.1 need=q,k,v,bias",
    "bwd b=8 hq=5 sq=512 sk=512 d=128 fp16 bias=1,h,q,k dropout=0.1 need=q,k,v,bias skew=3",
    "bwd b=2x4 hq=6 hk=3 sq=450 sk=699 d=96 bf16 bias=1,1,h,q,k causal need=q,k,v,bias",
    "bwd b=32 hq=3 sq=400 sk=393 d=64 fp16 bias=1,h,q,k window=40,10 dropout=0.2 need=q,k,v,bias",
]


def line_of(kind, queries, keys):
    batch = "b=1 hq=3" if queries * keys > 1e6 else "b=2 hq=3"
    return f"bwd {batch} sq={queries} sk={keys} {kind}"


LINES = [line_of(kind, *lengths) for kind in KINDS for lengths in LENGTHS] + BESIDE


@pytest.mark.parametrize("queries, keys", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_lengths(kind, queries, keys, device):
    assert not Trial(parse(line_of(kind, queries, keys)), device).test()


@pytest.mark.parametrize("line", BESIDE)
def test_beside(line, device):
    assert not Trial(parse(line), device).test()
