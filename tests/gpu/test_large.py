# SPDX-License-Identifier: Apache-2.0
"""Sizes past what 16, 31 and 32 bits count: batch times heads over 65,535, tensors past 2^31 elements (compared on
sampled rows), offsets past 2^31 by strides alone."""

import math

import pytest
import torch

from fovea.torch import attention

pytestmark = [pytest.mark.alone, pytest.mark.cuda]
HALF = 2**31


def expected(q, k, v, grad_out, bias=None, window=None):
    """out and gradients in fp64, by autograd; (..., S, D)."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    b = None if bias is None else bias.detach().double().requires_grad_()
    s = leaves[0] @ leaves[1].mT / math.sqrt(q.shape[-1]) + (0 if b is None else b)
    if window is not None:
        s = s.masked_fill(~window, -math.inf)
    out = torch.softmax(s, -1) @ leaves[2]
    (out * grad_out.double()).sum().backward()
    return [out, *(x.grad for x in leaves), *([] if b is None else [b.grad])]


def close(actual, right, what):
    error = (actual.double() - right).abs().max().item()
    assert error <= 0.02 * right.abs().max().item() + 1e-6, f"{what}: {error}"


@pytest.mark.parametrize("batch, heads", [(70_000, 1), (1, 70_000), (300, 300)])
@pytest.mark.parametrize("with_bias", ["", "full", "broadcast"])
def test_many_heads(batch, heads, with_bias, device):
    shape = (batch, heads, 9, 16)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bias = None
    if with_bias:
        lead = (batch, heads) if with_bias == "full" else (1, 1)
        bias = torch.randn(*lead, 9, 9, device=device, dtype=torch.float32, requires_grad=True)
    out = attention(q, k, v, bias=bias)
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    found = [out, q.grad, k.grad, v.grad, *([] if bias is None else [bias.grad])]
    for name, actual, right in zip(("out", "q", "k", "v", "bias"), found, expected(q, k, v, grad_out, bias)):
        close(actual, right, name)


@pytest.mark.parametrize("deterministic", [False, True])
def test_many_sequences(deterministic, device):
    count, length = 70_000, 5
    cu_seqlens = torch.arange(count + 1, device=device, dtype=torch.int32) * length
    q, k, v = (torch.randn(count * length, 2, 16, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=length, max_seqlen_k=length,
                    deterministic=deterministic)  # fmt: skip
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    each = lambda x: x.detach().reshape(count, length, 2, 16).transpose(1, 2)  # noqa: E731
    right = expected(each(q), each(k), each(v), each(grad_out))
    for name, actual, one in zip(("out", "q", "k", "v"), (out, q.grad, k.grad, v.grad), right):
        close(each(actual), one, name)


def test_tensors_past_2_to_31_elements(device):
    """q, k, v, out and every gradient; a window keeps it quick. Compared: the first and the last rows of some heads."""
    rows, heads, dim, left = 65_600, 257, 128, 63
    assert rows * heads * dim > HALF
    q, k, v = (torch.empty(1, rows, heads, dim, device=device, dtype=torch.bfloat16).normal_() for _ in range(3))
    for x in (q, k, v):
        x.requires_grad_()
    grad_out = torch.empty(1, rows, heads, dim, device=device, dtype=torch.bfloat16).normal_()
    out = attention(q, k, v, layout="bshd", window=(left, 0))
    out.backward(grad_out)
    i = torch.arange(400, device=device)
    window = (i[None] <= i[:, None]) & (i[None] >= i[:, None] - left)
    for head in (0, 128, heads - 1):
        for first in (0, 33_000, rows - 400):
            part = lambda x: x.detach()[0, first : first + 400, head]  # noqa: B023, E731
            right = expected(part(q), part(k), part(v), part(grad_out), window=window)
            # Rows near the piece's ends meet others outside of it.
            queries = slice(left if first else 0, None)
            keys = slice(left if first else 0, None if first + 400 == rows else 400 - left)
            for name, actual, one, inner in zip(("out", "q", "k", "v"), (out, q.grad, k.grad, v.grad), right,
                                                (queries, queries, keys, keys)):  # fmt: skip
                close(part(actual)[inner], one[inner], f"{name}, head {head}, row {first}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bias_past_2_to_31_elements(dtype, device):
    heads, rows = 33, 8192
    assert heads * rows * rows > HALF
    q, k, v = (torch.randn(1, heads, rows, 32, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bias = torch.empty(1, heads, rows, rows, device=device, dtype=dtype).normal_().requires_grad_()
    out = attention(q, k, v, bias=bias)
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    for head in (0, 16, heads - 1):
        one = lambda x: x.detach()[0, head]  # noqa: B023, E731
        right = expected(one(q), one(k), one(v), one(grad_out), one(bias))
        found = [one(out), one(q.grad), one(k.grad), one(v.grad), one(bias.grad)]
        for name, actual, truth in zip(("out", "q", "k", "v", "bias"), found, right):
            close(actual, truth, f"{name}, head {head}")


def test_offsets_past_2_to_31_by_strides(device):
    """Few rows that lie far apart: batch entries, heads and rows each more than 2^31 elements on."""
    memory = torch.empty(3 * HALF + 10_000, device=device, dtype=torch.bfloat16)
    for strides in ((HALF + 64, 4096, 64, 1), (4096, HALF + 64, 64, 1), (4096, 2048, HALF // 8 + 8, 1)):
        shape = (2, 2, 9, 64)
        views = []
        for place in range(3):
            x = memory.as_strided(shape, strides, place * 128 if strides[2] != 64 else place * 1024 * 8)
            x.normal_()
            views.append(x)
        q, k, v = views
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = attention(q, k, v)
        grad_out = torch.randn_like(out)
        grads = torch.autograd.grad(out, (q, k, v), grad_out)
        for name, actual, right in zip(("out", "q", "k", "v"), (out, *grads), expected(q, k, v, grad_out)):
            close(actual, right, f"{name}, strides {strides}")
