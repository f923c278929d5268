# SPDX-License-Identifier: Apache-2.0
"""Against torch.nn.functional.scaled_dot_product_attention's math path, for every problem that it can express."""

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import naive
from fovea.torch import attention

B, H, D, DV = 2, 4, 16, 8
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# The shapes to which an attn_mask may broadcast, bool or float.
MASKS = [(33, 33), (1, 33), (33, 1), (B, 1, 33, 33), (1, H, 33, 33), (B, H, 33, 33), (B, 1, 1, 33), (H, 1, 33)]


def math_sdpa(q, k, v, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v, **options)


def compare(q, k, v, ours, theirs, plain, bias=None):
    """Three functions of q, k, v and bias: ours, SDPA's math path, which is the reference in float64, and the naive
    evaluation in q's type that the tolerance is made of."""
    given = {"q": q, "k": k, "v": v} if bias is None else {"q": q, "k": k, "v": v, "bias": bias}
    weights = None
    results = []
    for function, convert in ((ours, lambda x: x), (theirs, lambda x: x.double()), (plain, lambda x: x)):
        inputs = {name: convert(x.detach()).requires_grad_() for name, x in given.items()}
        out = function(**inputs)
        if weights is None:
            weights = torch.randn(out.shape, dtype=out.dtype)
        grads = torch.autograd.grad((out * weights.to(out.dtype)).sum(), list(inputs.values()))
        results.append({"out": out, **{f"grad_{name}": grad for name, grad in zip(inputs, grads)}})
    for name in results[0]:
        naive.assert_as_good_as_naive(name, *(result[name] for result in results))


def compare_options(q, k, v, theirs, bias=None, rows=True, **options):
    """The same options for ours and the naive evaluation; `rows`: those whose result is of interest."""
    compare(
        q, k, v,
        lambda **inputs: attention(**inputs, **options) * rows,
        lambda **inputs: theirs(**inputs) * rows,
        lambda **inputs: naive.attention(**inputs, **options)[0] * rows,
        bias=bias,
    )  # fmt: skip


def tensors(dtype, heads_k=H, keys=33, rows=33):
    return (torch.randn(B, h, n, d).to(dtype) for h, n, d in ((H, rows, D), (heads_k, keys, D), (heads_k, keys, DV)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale,heads_k", [(None, H), (0.3, 2), (None, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows,keys", [(33, 33), (7, 33), (33, 7), (1, 33), (33, 1)])
def test_plain(dtype, scale, heads_k, causal, rows, keys):
    theirs = lambda q, k, v: math_sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=heads_k != H)  # noqa: E731
    compare_options(*tensors(dtype, heads_k, keys, rows), theirs, causal=causal, align="top_left", scale=scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_bool_mask(dtype, shape):
    mask = torch.rand(shape) < 0.6
    compare_options(*tensors(dtype), lambda q, k, v: math_sdpa(q, k, v, attn_mask=mask), mask=mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_float_mask_and_its_gradient(dtype, shape):
    theirs = lambda q, k, v, bias: math_sdpa(q, k, v, attn_mask=bias)  # noqa: E731
    compare_options(*tensors(dtype), theirs, bias=torch.randn(shape).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_keys(dtype):
    """SDPA gives 0 there, too."""
    q, k, v = tensors(dtype)
    mask = torch.rand(33, 33) < 0.6
    mask[::4] = False
    compare_options(q, k, v, lambda q, k, v: math_sdpa(q, k, v, attn_mask=mask), mask=mask)
    bias = torch.zeros(33, 33, dtype=dtype).masked_fill(~mask, -torch.inf)
    out = attention(q, k, v, bias=bias)
    assert (out[:, :, ::4] == 0).all() and out.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_of_lowest_numbers(dtype):
    """A padded batch as Hugging Face has it: lowest finite numbers, in the rows of padding nothing else. Such a row is
    uniform, and takes no part in the loss."""
    q, k, v = tensors(dtype)
    lowest = torch.zeros(B, 1, 33, 33, dtype=dtype)
    lowest[1, :, :, 20:] = torch.finfo(dtype).min
    lowest[1, :, 25:] = torch.finfo(dtype).min
    tokens = torch.ones(B, 1, 33, 1)
    tokens[1, :, 25:] = 0
    theirs = lambda q, k, v: math_sdpa(q, k, v, attn_mask=lowest.to(q.dtype))  # noqa: E731
    compare(q, k, v, lambda q, k, v: attention(q, k, v, bias=lowest) * tokens.to(dtype),
            lambda q, k, v: theirs(q, k, v) * tokens,
            lambda q, k, v: naive.attention(q, k, v, bias=lowest)[0] * tokens.to(dtype))  # fmt: skip
    uniform = v[1].double().mean(-2, keepdim=True).expand(-1, 8, -1)
    if dtype == torch.float16:  # whose lowest number leaves room for scores in float32
        return
    naive.assert_as_good_as_naive("uniform", attention(q, k, v, bias=lowest)[1, :, 25:], uniform,
                                  v[1].mean(-2, keepdim=True).expand(-1, 8, -1))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_padded_batch(dtype, causal):
    """Sequences of different lengths, padded at the right: a key mask, seqused and packing agree with SDPA's mask
    wherever there is a token, and no gradient comes from the padding."""
    lengths = torch.tensor([33, 20])
    exists = torch.arange(33) < lengths[:, None]
    keys = exists[:, None, None, :]
    band = torch.ones(33, 33, dtype=torch.bool).tril() if causal else torch.ones(33, 33, dtype=torch.bool)
    rows = exists[:, None, :, None]
    q, k, v = tensors(dtype)
    theirs = lambda q, k, v: math_sdpa(q, k, v, attn_mask=keys & band) * rows  # noqa: E731
    plain = lambda q, k, v: naive.attention(q, k, v, mask=keys & band)[0] * rows  # noqa: E731
    compare_options(q, k, v, theirs, mask=keys, causal=causal, rows=rows)

    used = lengths.int()
    compare(q, k, v, lambda q, k, v: attention(q, k, v, causal=causal, seqused_q=used, seqused_k=used), theirs, plain)

    def packed(q, k, v):
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        q, k, v = (x.transpose(1, 2)[exists] for x in (q, k, v))
        out = attention(q, k, v, causal=causal, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
        return torch.zeros(B, 33, H, DV, dtype=out.dtype).masked_scatter(exists[..., None, None], out).transpose(1, 2)

    compare(q, k, v, packed, theirs, plain)


# ---- nested tensors of layout torch.jagged ----


def jagged(lengths, heads, dim, dtype, offsets=None):
    values = torch.randn(sum(lengths), heads, dim).to(dtype)
    if offsets is None:
        offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    return values, offsets


def nest(values, offsets):
    return torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_jagged(dtype, causal):
    """SDPA is asked sequence by sequence: its own path for jagged tensors is not its math path on every device."""
    lengths = [5, 17, 1, 9]
    q, offsets = jagged(lengths, H, D, dtype)
    k, _ = jagged(lengths, H, D, dtype, offsets)
    v, _ = jagged(lengths, H, DV, dtype, offsets)

    def ours(q, k, v):
        out = attention(*(nest(x, offsets) for x in (q, k, v)), causal=causal)
        assert out.is_nested and out.shape[1] == H and out.shape[3] == DV
        return out.transpose(1, 2).values()

    def each(function):
        def run(q, k, v):
            parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)))
            return torch.cat([function(*part) for part in parts], dim=1).transpose(0, 1)

        return run

    theirs = each(lambda q, k, v: math_sdpa(q, k, v, is_causal=causal))
    compare(q, k, v, ours, theirs, each(lambda q, k, v: naive.attention(q, k, v, causal=causal)[0]))


def test_jagged_against_their_jagged():
    lengths = [5, 17, 1, 9]
    q, offsets = jagged(lengths, H, D, torch.float32)
    nested = nest(q.requires_grad_(), offsets)
    ours = attention(nested, nested, nested)
    theirs = sdpa(nested, nested, nested)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours.transpose(1, 2).values(), theirs.transpose(1, 2).values())
    assert (ours + theirs).shape == theirs.shape  # of the same ragged size, so that they go on together


def test_jagged_options():
    """Keys of other lengths, rows first, a bias over the longest, the logsumexp."""
    q, offsets = jagged([3, 5], H, D, torch.float64)
    k, offsets_k = jagged([4, 2], H, D, torch.float64)
    bias = torch.randn(2, 1, 5, 4, dtype=torch.float64)
    q_j, k_j = (torch.nested.nested_tensor_from_jagged(*x) for x in ((q, offsets), (k, offsets_k)))
    out, lse = attention(q_j, k_j, k_j, layout="bshd", bias=bias, return_lse=True)
    want, want_lse = attention(q, k, k, cu_seqlens_q=offsets, cu_seqlens_k=offsets_k, bias=bias, return_lse=True)
    assert torch.equal(out.values(), want)
    assert lse.shape == (2, H, q_j.shape[1])
    assert torch.equal(lse.transpose(1, 2).values(), want_lse.T)
