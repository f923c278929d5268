# SPDX-License-Identifier: Apache-2.0
"""Backward passes at the edges of what is legal: adversarial numbers, hidden values of any size, hundreds of packed
sequences, many of them empty, lengths that contradict each other."""

import pytest
import torch

from fovea.torch import attention
from problem import parse
from trial import Trial

# A shape for each kernel of a backward, with every gradient that there is.
SHAPES = [
    "b=3 hq=4 hk=2 sq=200 sk=330 d=64 bf16 bias=1,h,q,k need=q,k,v,bias",
    "b=3 hq=4 sq=200 sk=330 d=128 fp16 causal bias=1,h,q,k need=q,k,v,bias det",
    "b=2 hq=4 sq=200 sk=200 d=64 bf16 bias=b,h,q,k dropout=0.1 seed=3 sink need=q,k,v,bias,sink",
    "b=4 hq=4 hk=2 d=128 bf16 seqs_q=70,0,131,200 seqs_k=70,3,131,150 bias=1,h,q,k bias2=b,1,1,k need=q,k,v,bias,bias2",
    "b=2 hq=2 sq=150 sk=200 d=192 dv=128 bf16 bias=b,1,q,k need=q,k,v,bias",
    "b=2 hq=2 sq=150 sk=200 d=256 bf16 bias=1,h,q,k need=q,k,v,bias",
    "b=40 hq=4 sq=49 sk=49 d=32 bf16 bias=1,h,q,k need=q,k,v,bias",
    "b=2 hq=2 sq=130 sk=150 d=64 fp32 bias=1,h,q,k need=q,k,v,bias",
    "b=2 hq=2 sq=130 sk=150 d=320 bf16 bias=1,h,q,k need=q,k,v,bias",
    "b=8 hq=8 sq=200 sk=330 d=128 bf16 bias=1,h,q,k need=q,k,v,bias",
    "b=12 hq=8 hk=4 sq=200 sk=330 d=128 fp16 causal need=q,k,v",
    "b=8 hq=8 sq=2100 sk=330 d=128 bf16 need=q,k,v",
    "b=9 hq=8 sq=400 sk=330 d=128 bf16 causal need=q,k,v",
]
FAMILIES = ["large_scores", "one_hot", "dead_rows", "minus_infinity", "huge", "lowest", "denormal"]
OF_BIASES = {"dead_rows", "lowest"}


def check(line, seed, device):
    p = parse(line)
    p.case_seed = seed
    faults = Trial(p, device).test()
    assert not faults, "\n".join([p.line(), *faults])


@pytest.mark.parametrize(
    "shape, family", [(shape, family) for shape in SHAPES for family in FAMILIES if "bias" in shape or family not in OF_BIASES]
)
def test_adversarial_numbers(shape, family, device):
    check(f"bwd {shape} values={family}", 8, device)


# At head_dim 128 a kernel of its own, which the case table's problems are too small for.
FULL = [
    *(f"b=8 hq=8 sq={sq} sk={sk} d=128 {kind} need=q,k,v"
      for sq, sk, kind in ((333, 517, "bf16"), (1, 400, "fp16"), (64, 300, "bf16"), (700, 260, "bf16 sink"))),
    "b=8 hq=8 sq=333 sk=517 d=120 dv=128 bf16 need=q,k,v",
    *(f"b=6 hq=12 sq=330 sk=201 d=128 bf16 bias={bias} need=q,k,v,bias" for bias in ("1,h,q,k", "b,1,q,k", "1,1,q,k")),
    "b=6 hq=12 sq=330 sk=208 d=128 bf16 bias=b,h,q,k need=q,k,v",
    "b=4 hq=32 hk=16 sq=330 sk=330 d=128 bf16 need=q,k,v",
    *(f"b=9 hq={8 * group} hk=8 sq=330 sk=330 d=128 {kind} causal need=q,k,v" for group, kind in ((2, "bf16"), (5, "fp16"))),
    "b=9 hq=16 hk=8 sq=200 sk=330 d=128 bf16 causal need=q,k,v",
    "b=9 hq=16 hk=8 sq=400 sk=200 d=128 bf16 causal=tl need=q,k,v",
    "b=70 hq=4 hk=1 sq=300 sk=300 d=128 bf16 causal need=q,k,v",
    # 80 queries a step
    *(f"b=8 hq=8 sq={sq} sk={sk} d=128 {kind} need=q,k,v"
      for sq, sk, kind in ((2085, 517, "bf16"), (2170, 300, "fp16 sink"), (2048, 700, "bf16"), (2049, 260, "bf16"))),
    "b=4 hq=32 hk=16 sq=2300 sk=330 d=120 dv=128 bf16 need=q,k,v",
]  # fmt: skip


@pytest.mark.parametrize("line", FULL)
def test_blocks_that_fill_the_chip(line, device):
    check(f"bwd {line}", 9, device)


# With more blocks of keys than multiprocessors the main kernel makes dq of its own sums, and begins with the longest of
# several sequences.
MANY = [
    *(f"b=9 hq=8 sq=400 sk=330 d={d} {kind} need=q,k,v"
      for d in (64, 96, 128) for kind in ("bf16 causal", "fp16 causal=tl", "bf16 window=60,0", "bf16 softcap=2 alibi=h det")),
    "b=9 hq=16 sq=400 sk=200 d=128 bf16 causal need=q,k,v",  # queries that meet no key
    "b=9 hq=16 sq=700 sk=130 d=64 bf16 causal window=20,0 need=q,k,v",
    "b=9 hq=16 hk=4 sq=300 sk=300 d=64 bf16 causal need=q,k,v",
    "b=9 hq=16 sq=300 sk=300 d=64 bf16 layout=strided need=q,k,v",
    "b=9 hq=16 sq=300 sk=300 d=72 bf16 causal need=q,k,v",
    *(f"b=9 hq={hq} sq=400 sk=330 d={d} {kind} need=q,k,v" for hq, d, kind in (
        (8, 72, "bf16"), (8, 80, "fp16 causal=tl"), (8, 80, "bf16 window=60,0"), (8, 80, "bf16 softcap=2 alibi=h"), (16, 80, "bf16 causal sink"))),
    "b=9 hq=16 sq=400 sk=200 d=80 bf16 causal need=q,k,v",  # queries that meet no key
    "b=9 hq=16 sq=300 sk=300 d=80 bf16 used_q=300,0,17,128,64,65,1,200,299 used_k=0,300,1,64,200,17,129,300,5 causal need=q,k,v",
    *(f"b=9 hq=16 sq=300 sk=300 d={d} dv={dv} {kind} need=q,k,v"  # computed with 128 columns of Q and K
      for d, dv, kind in ((112, 128, "bf16 causal"), (104, 128, "fp16"), (112, 120, "bf16 softcap=2 alibi=h causal det"))),
    "b=9 hq=16 sq=300 sk=300 d=60 bf16 causal need=q,k,v",  # dq that 16-byte stores cannot write
    "b=9 hq=16 sq=300 sk=300 d=64 bf16 causal need=q",
    "b=9 hq=16 sq=300 sk=300 d=64 bf16 mask=b,1,q,k sink need=q,k,v,sink",
    "b=9 hq=16 sq=300 sk=300 d=64 fp16 mask=b,1,1,k bias=1,h,1,k need=q,k,v,bias",
    "b=9 hq=16 sq=300 sk=300 d=128 bf16 used_q=300,0,17,128,64,65,1,200,299 used_k=0,300,1,64,200,17,129,300,5 causal need=q,k,v",
    *(f"b=14 hq={hq} hk=8 d={d} bf16 seqs_q=100,0,300,17,1,64,128,500,0,65,90,33,400,12 seqs_k=100,7,300,0,1,64,130,500,3,65,80,33,200,12"
      f"{kind} need=q,k,v" for hq, d in ((8, 64), (8, 80), (16, 128), (8, 256)) for kind in (" causal", "", " window=70,0", " causal det")),
    # Packed sequences that fill the tensors, whose last heads take turns, with such lengths and with others.
    *(f"b=9 hq={hq} hk=16 d={d} bf16 causal {lengths}{kind} need=q,k,v" for hq, d, kind in (
        (16, 128, ""), (16, 64, ""), (16, 80, ""), (32, 128, ""), (32, 64, ""), (16, 128, " dropout=0.2"), (16, 96, " window=-1,60 softcap=20"))
      for lengths in ("seqs_q=330x9 seqs_k=400x9", "seqs_q=330x9 seqs_k=400x9 used_k=0,400,100,1,128,129,260,256,5",
                      "seqs_q=10,330,0,70,230,64,1,130,129 total_q=2970 max_q=330 seqs_k=400,0,100,1,128,129,260,256,5 total_k=3600 max_k=400")),
]  # fmt: skip


@pytest.mark.parametrize("line", MANY)
def test_many_blocks(line, device):
    check(f"bwd {line}", 10, device)


# dS is made of P as rounded for a product: by the other warpgroup of a cluster that stays for several blocks of keys
# (D=256), by the same one (D=192 with Dv=128).
WIDE = [
    *(f"b=9 hq=8 sq={sq} sk={sk} d={d} dv={dv} {kind} need=q,k,v" for d, dv in ((256, 256), (192, 128), (208, 160)) for sq, sk, kind in (
        (400, 330, "bf16 causal"), (330, 400, "fp16 causal=tl"), (400, 330, "bf16 window=60,0"), (333, 517, "bf16"), (400, 200, "bf16 causal"))),
    "b=1 hq=8 sq=2100 sk=2100 d=256 bf16 causal need=q,k,v",
    "b=3 hq=8 hk=2 sq=300 sk=700 d=256 bf16 causal need=q,k,v",
    "b=9 hq=8 sq=300 sk=300 d=256 bf16 used_q=300,0,17,128,64,65,1,200,299 used_k=0,300,1,64,200,17,129,300,5 causal need=q,k,v",
    *(f"b=2 hq=5 sq=300 sk=321 d={d} dv={dv} fp16 causal need=q,k,v values={family}"
      for d, dv in ((256, 256), (192, 128)) for family in ("one_hot", "huge", "denormal", "large_scores")),
]  # fmt: skip


@pytest.mark.parametrize("line", WIDE)
def test_gradients_of_rounded_weights(line, device):
    check(f"bwd {line}", 14, device)


# Long blocks of keys, whose dk and dv leave by tensor stores.
LONG = [
    "b=1 hq=3 sq=8192 sk=8192 d=128 bf16 causal need=q,k,v",
    "b=1 hq=3 sq=8196 sk=8300 d=128 fp16 causal=tl need=q,k,v",
    "b=1 hq=3 sq=8400 sk=8193 d=128 bf16 causal need=q,k,v",
    "b=1x3 hq=2 sq=8200 sk=8207 d=96 dv=128 bf16 causal need=q,k,v",
    "b=2 hq=3 sq=8207 sk=8296 d=120 dv=128 bf16 causal layout=bhsd need=q,k,v",
    "b=2 hq=3 sq=8193 sk=8193 d=128 bf16 causal layout=strided need=q,k,v",
    "b=1 hq=3 sq=8192 sk=8192 d=128 bf16 causal layout=qkv3 need=q,k,v",
    "b=2 hq=3 sq=8192 sk=8192 d=128 dv=88 fp16 causal need=q,k,v",
    *(f"b=1 hq=5 sq=8192 sk=8192 d=128 bf16 causal need={need}" for need in ("q,k", "q,v")),
    *(f"b=1 hq=5 sq=8192 sk=8196 d=128 bf16 causal need=q,k,v values={family}" for family in ("one_hot", "huge", "denormal")),
]  # fmt: skip


@pytest.mark.parametrize("line", LONG)
def test_long_blocks_of_keys(line, device):
    check(f"bwd {line}", 13, device)


@pytest.mark.cuda
def test_many_blocks_with_other_work_beside(device):
    """No warp waits for a block that cannot begin: another kernel has the device meanwhile."""
    p = parse("bwd b=9 hq=16 sq=512 sk=512 d=128 bf16 causal need=q,k,v")
    other = torch.cuda.Stream(device)
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    with torch.cuda.stream(other):
        for _ in range(50):
            x = (x @ x).clamp(-1, 1)
    faults = Trial(p, device).test()
    torch.cuda.synchronize()
    assert not faults, "\n".join(faults)


SQ, SK, SEEN = 150, 300, 100  # keys from SEEN on are hidden


def gradients(device, way, dim, dim_v, spoilt, deterministic):
    """Of q, k, v where keys from SEEN on are hidden; spoilt: their values are so large that <do, v> overflows."""
    generator = torch.Generator(device).manual_seed(4)
    q, k, v, do = (
        torch.randn(2, 2, rows, columns, device=device, dtype=torch.bfloat16, generator=generator)
        for rows, columns in ((SQ, dim), (SK, dim), (SK, dim_v), (SQ, dim_v))
    )
    hidden = torch.arange(SK, device=device) >= SEEN
    v[:, :, SEEN:] = 3e38 if spoilt else 0
    options = {}
    if way == "causal":
        q, do = q[:, :, :SEEN].contiguous(), do[:, :, :SEEN].contiguous()
        options = dict(causal=True, align="top_left")
    elif way == "key mask":
        options = dict(mask=~hidden[None, None, None])
    elif way == "mask":
        options = dict(mask=(~hidden[None, None, None]).expand(1, 1, SQ, SK).contiguous())
    else:
        shape = (1, 1, 1, SK) if way == "key bias" else (1, 2, SQ, SK)
        bias = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
        options = dict(bias=bias.masked_fill(hidden, -torch.inf))
    for x in (q, k, v):
        x.requires_grad_()
    out = attention(q, k, v, deterministic=deterministic, **options)
    return torch.autograd.grad(out, (q, k, v), do)


@pytest.mark.cuda
@pytest.mark.parametrize("dims, deterministic", [
    ((64, 64), False), ((64, 64), True), ((128, 128), False), ((128, 128), True), ((192, 128), False), ((256, 256), False),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("way", ["causal", "key mask", "mask", "key bias", "bias"])
def test_hidden_values_of_any_size(way, dims, deterministic, device):
    """P of a hidden pair is 0 and its dP may be infinite: dS is 0 all the same."""
    usual = gradients(device, way, *dims, False, deterministic)
    spoilt = gradients(device, way, *dims, True, deterministic)
    for name, x, y in zip("qkv", usual, spoilt):
        torch.testing.assert_close(y, x, rtol=0.02, atol=1e-3, msg=lambda text, name=name: f"d{name}: {text}")


@pytest.mark.parametrize("batch, queries, keys, causal", [
    (3, 150, 300, False), (3, 150, 300, True), (40, 49, 64, False), (40, 49, 49, True),
])  # fmt: skip
def test_hidden_values_of_any_size_beside_a_bias_gradient(batch, queries, keys, causal, device):
    found = []
    for value in (0, 3e38):
        generator = torch.Generator(device).manual_seed(4)
        q, k, v, do, bias = (
            torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)
            for shape in ((batch, 2, queries, 32), *[(batch, 2, keys, 32)] * 2, (batch, 2, queries, 32),
                          (1, 2, queries, keys))
        )  # fmt: skip
        hidden = torch.arange(keys, device=device) >= keys // 3
        v[:, :, keys // 3 :] = value
        leaves = [x.requires_grad_() for x in (q, k, v, bias.masked_fill_(hidden, -torch.inf))]
        out = attention(*leaves[:3], bias=bias, causal=causal, align="top_left")
        found.append(torch.autograd.grad(out, leaves, do))
    for name, x, y in zip(("q", "k", "v", "bias"), *found):
        torch.testing.assert_close(y, x, rtol=0.02, atol=1e-3, msg=lambda text, name=name: f"d{name}: {text}")


@pytest.mark.parametrize("rest", [
    "hq=4 hk=2 d=64 bf16 causal need=q,k,v",
    "hq=2 d=128 bf16 window=64,10 need=q,k,v",
    "hq=2 d=192 dv=128 bf16 causal need=q,k,v",
    "hq=2 d=80 bf16 need=q,k,v det",
    "hq=2 d=128 bf16 causal need=q,k,v det",
    "hq=4 hk=1 d=64 fp16 window=64,10 need=q,k,v det",
])  # fmt: skip
def test_hundreds_of_sequences(rest, device):
    """Blocks take their keys from a counter: most of 300 sequences are empty, or short, or have queries alone."""
    queries = [(0, 0, 1, 0, 97, 0, 0, 64, 0, 3, 0, 0, 130)[i * 7 % 13] if i != 150 else 300 for i in range(300)]
    keys = [(0, 5, 0, 0, 97, 0, 1, 128, 0, 0, 40, 0, 131)[i * 7 % 13] if i != 150 else 700 for i in range(300)]
    lengths = " ".join(f"seqs_{x}={','.join(map(str, of))}" for x, of in (("q", queries), ("k", keys)))
    p = parse(f"bwd b=300 {lengths} {rest}")
    p.case_seed = 8
    faults = Trial(p, device).test()
    assert not faults, "\n".join(faults)


FEW = [  # blocks of keys
    "b=4 hq=8 hk=1 sq=1254 sk=1254 d=40 fp16 causal need=q,k,v",
    "b=1 hq=8 hk=1 sq=1024 sk=1024 d=128 bf16 need=q,k,v",
    "b=1 hq=6 hk=2 sq=1024 sk=1024 d=128 bf16 causal dropout=0.1 seed=3 softcap=30 need=q,k,v",
    "b=2 hq=8 hk=1 sq=1000 sk=1000 d=64 bf16 causal dropout=0.1 seed=3 det need=q,k,v",
    "b=1 hq=8 hk=1 sq=700 sk=900 d=64 bf16 det need=q,k,v",
    "b=1 hq=8 hk=1 sq=900 sk=900 d=64 bf16 mask=b,1,1,k bias=b,1,q,k:fp32 need=q,k,v",
    "b=1 hq=8 hk=1 sq=900 sk=900 d=64 bf16 bias=b,1,q,1 need=q,k,v,bias",
    "b=1 hq=8 hk=4 sq=640 sk=641 d=128 bf16 bias=b,h,q,k need=q,k,v,bias",
    "b=4 hq=8 hk=2 d=128 bf16 seqs_q=128,500,0,77 seqs_k=300,1,44,77 causal det need=q,k,v",
    "b=3 hq=8 hk=2 d=128 bf16 seqs_q=128,900,77 seqs_k=128,900,77 window=100,0 need=q,k,v",
    "b=2 hq=8 hk=2 sq=900 sk=900 d=64 bf16 used_q=800,3 used_k=700,900 causal need=q,k,v",
    "b=1 hq=8 hk=1 sq=3000 sk=77 d=64 bf16 need=q,k,v",
    "b=1 hq=8 hk=1 sq=1024 sk=1024 d=64 bf16 need=q",
    "b=1 hq=8 hk=1 sq=1024 sk=1024 d=32 bf16 alibi=h need=v",
    "b=1 hq=8 hk=1 sq=1024 sk=1024 d=192 dv=128 bf16 causal need=q,k,v",
    "b=1 hq=4 hk=1 sq=1664 sk=1664 d=192 bf16 need=q,k,v",
    "b=1 hq=4 hk=1 sq=900 sk=1000 d=256 bf16 causal dropout=0.1 seed=3 det need=q,k,v",
    "b=3 hq=8 hk=2 d=256 bf16 seqs_q=128,900,77 seqs_k=428,500,77 causal need=q,k,v",
]


@pytest.mark.parametrize("line", FEW)
def test_few_keys_for_many_queries(line, device):
    """Several blocks share a block of keys, and the sums of each are added in the end."""
    p = parse(f"bwd {line}")
    p.case_seed = 5
    trial = Trial(p, device)
    faults = trial.test() + (trial.test_captured() if device.type == "cuda" else [])
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths_that_overlap_end(causal, device):
    """Sums in order count what came before: what wrong lengths say of it is never waited for for ever."""
    q, k, v, do = (torch.randn(600, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    lengths = torch.tensor([0, 500, 20, 520, 40, 600], device=device, dtype=torch.int32)
    options = dict(cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=500, max_seqlen_k=500)
    out = attention(q, k, v, causal=causal, deterministic=True, **options)
    assert len(torch.autograd.grad(out, (q, k, v), do)) == 3
    if device.type == "cuda":
        torch.cuda.synchronize()
