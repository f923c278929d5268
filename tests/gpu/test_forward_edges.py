# SPDX-License-Identifier: Apache-2.0
"""Forward passes at the edges of what is legal: what masked keys hold, head_dims whose results lie over the queries of
other warps in shared memory."""

import math

import pytest
import torch

import fovea
from fovea.torch import attention
from problem import parse
from trial import Trial


def normal(*shape, device, dtype, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def right(q, k, v, allowed):
    s = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    return torch.softmax(s.masked_fill(~allowed, -torch.inf), -1) @ v.double()


HIDDEN = {
    "end": lambda n: torch.arange(n) >= n * 3 // 4,
    "beginning": lambda n: torch.arange(n) < n // 3,
    "hole": lambda n: (torch.arange(n) // 150) % 2 == 1,
    "all but a few late ones": lambda n: (torch.arange(n) < n - 40) | (torch.arange(n) % 16 < 9),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("keys", [300, 1500])
@pytest.mark.parametrize("dims", [64, 128])
@pytest.mark.parametrize("full", [False, True], ids=["mask of keys", "mask"])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_what_masked_keys_hold_does_not_matter(hidden, full, dims, keys, dtype, device):
    """NaN and infinities in k, which a product cannot hide."""
    q = normal(2, 2, 200, dims, device=device, dtype=dtype)
    k, v = (normal(2, 2, keys, dims, device=device, dtype=dtype, seed=n) for n in (1, 2))
    is_hidden = HIDDEN[hidden](keys).to(device)
    mask = (~is_hidden)[None, None, None]
    want = right(q, k, v, mask)
    for value in (torch.nan, torch.inf):
        k[:, :, is_hidden] = value
        out = attention(q, k, v, mask=mask.expand(1, 1, 200, keys).contiguous() if full else mask)
        torch.testing.assert_close(out.double(), want, rtol=0.02, atol=0.02)


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (200, 100)}], ids=str)
@pytest.mark.parametrize("dim, dim_v", [(128, 32), (32, 128), (96, 64), (64, 96), (160, 128), (192, 96), (80, 224)])
def test_other_columns_in_out_than_in_q(dim, dim_v, options, device):
    """The same bits in every run: results leave through the memory of queries that other warps may still need."""
    q, k = (normal(8, 8, 1000, dim, device=device, dtype=torch.bfloat16, seed=n) for n in (0, 1))
    v = normal(8, 8, 1000, dim_v, device=device, dtype=torch.bfloat16, seed=2)
    out = attention(q, k, v, **options)
    distance = torch.arange(1000, device=device)[None] - torch.arange(1000, device=device)[:, None]
    left, end = options.get("window", (1000, 0 if "causal" in options else 1000))
    allowed = (distance >= -left) & (distance <= end)
    torch.testing.assert_close(out[3:5].double(), right(q[3:5], k[3:5], v[3:5], allowed), rtol=0.02, atol=0.02)
    for _ in range(30):
        assert torch.equal(attention(q, k, v, **options), out)


@pytest.mark.parametrize("line", [
    "b=2 hq=8 hk=2 sq=1 sk=100 d=64 bf16 causal align=tl need=q,k,v",
    "b=2 hq=8 hk=2 sq=1 sk=100 d=64 fp16 window=3,40 align=tl need=q,k,v",
    "b=2 hq=8 hk=2 sq=1 sk=100 d=128 bf16 causal need=q,k,v",
])  # fmt: skip
def test_one_query_and_many_keys(line, device):
    """Top left it meets the first key alone, bottom right all of them. The heads of a group become queries of one head
    where nothing tells them apart, which top left a band does."""
    p = parse(f"bwd {line}")
    p.case_seed = 9
    faults = Trial(p, device).test()
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [64, 128])
@pytest.mark.parametrize("by", ["products", "bias", "bias of 16 bits", "products, dropout", "bias, dropout"])
@pytest.mark.parametrize("growth", [2, 6, 40, 95, 300])
def test_scores_that_grow(growth, by, dims, dtype, device):
    """By so much over every 128 keys, in every other row; in the others they fall. The reference that a row's weights are
    relative to is left behind: a little, by more than a sum over a step may have, and by more than fp32 has."""
    queries, keys, dropout_p = 200, 1500, 0.25
    q, k, v = (normal(2, 2, n, dims, device=device, dtype=dtype, seed=s) for s, n in enumerate((queries, keys, keys)))
    sign = 1 - 2 * (torch.arange(queries, device=device, dtype=torch.float32) % 2)
    ramp = growth / 128 * torch.arange(keys, device=device, dtype=torch.float32)
    options, bias = {}, torch.zeros(queries, keys, device=device)
    if by.startswith("bias"):
        bias = sign[:, None] * ramp
        options["bias"] = bias = bias.to(dtype) if by == "bias of 16 bits" else bias
    else:
        q[..., 0] = 8 * sign
        k[..., 0] = ramp / 8 * math.sqrt(dims)
    keep = 1
    if by.endswith("dropout"):
        options.update(dropout_p=dropout_p, seed=7)
        keep = torch.from_numpy(fovea.dropout_mask(2, 2, queries, keys, dropout_p, seed=7)).to(device) / (1 - dropout_p)
    s = q.double() @ k.double().mT / math.sqrt(dims) + bias.double()
    out, lse = attention(q, k, v, return_lse=True, **options)
    torch.testing.assert_close(lse.double(), s.logsumexp(-1), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(out.double(), (torch.softmax(s, -1) * keep) @ v.double(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("line", [
    "b=3 hq=4 hk=2 sq=300 sk=1500 d=64 bf16 mask=b,1,1,k causal need=q,k,v",
    "b=2x2 hq=2 sq=200 sk=1100 d=128 fp16 mask=b1,1,1,1,k sink need=q,k,v",
    "b=2 hq=3 sq=700 sk=1300 d=256 bf16 mask=b,h,1,k window=300,100 need=q,k,v",
    "b=2 hq=2 sq=500 sk=1200 d=192 dv=96 bf16 mask=b,1,1,k causal align=tl need=q,k,v",
    "b=3 hq=2 d=128 bf16 seqs_q=200,3,1100 seqs_k=1090,700,1300 mask=b,1,1,k causal need=q,k,v",
    "b=2 hq=2 sq=130 sk=2000 d=64 bf16 mask=1,1,1,k need=q,k,v values=large_scores",
    "b=2 hq=2 sq=130 sk=1030 d=64 fp16 mask=b,h,1,k need=q,k,v",
])  # fmt: skip
def test_masks_of_many_keys(line, device):
    """From a thousand keys on they are made columns of k, and steps that they hide at either end are passed over."""
    p = parse(f"bwd {line}")
    p.case_seed = 8
    faults = Trial(p, device).test()
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("line", [
    "b=2 hq=4 sq=300 sk=300 d=256 bf16 used_k=300,250 bias=b,h,q,k:fp32 need=q,k,v",
    "b=2 hq=4 sq=200 sk=300 d=256 bf16 used_k=300,250 bias=b,h,q,k bias2=1,h,q,k need=q,k,v",
    "b=2 hq=4 sq=200 sk=300 d=256 fp16 used_k=75,290 bias=b,h,q,k:fp32 bias2=1,h,q,k:fp32 need=q,k,v",
    "b=2 hq=4 sq=300 sk=200 d=192 bf16 used_q=300,129 causal bias=b,h,q,k:fp32 bias2=1,h,q,k:fp32 need=q,k,v",
    "b=2 hq=4 sq=300 sk=300 d=256 bf16 causal bias=b,h,q,k:fp32 need=q,k,v",
    "b=2 hq=4 sq=200 sk=300 d=256 fp16 causal align=tl bias=b,h,q,k bias2=1,h,q,k need=q,k,v",
    "b=2 hq=4 sq=500 sk=300 d=256 bf16 window=70,3 bias=b,h,q,k:fp32 bias2=1,h,q,k:fp32 need=q,k,v",
    "b=2 hq=4 sq=50 sk=300 d=256 bf16 bias=b,h,q,k:fp32 need=q,k,v",
])  # fmt: skip
def test_biases_that_have_one_buffer(line, device):
    """V is loaded after the biases of the step that follows. Whoever waits for V before it releases those waits for ever:
    to clear rows behind the end of a sequence, or in a turn in which it passes over steps."""
    p = parse(f"bwd {line}")
    p.case_seed = 7
    faults = Trial(p, device).test()
    assert not faults, "\n".join(faults)
