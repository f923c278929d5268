# SPDX-License-Identifier: Apache-2.0
"""memory_efficient_attention and its forms against the formula, in float64. Bias objects are played here by classes of the
same names; tests/models/test_xformers.py has xFormers' own."""

import importlib
import inspect
import itertools
import math
import sys
import types

import pytest
import torch

import naive
from fovea.integrations import install, uninstall, xformers

FORWARD = "query, key, value, attn_bias=None, p=0.0, scale=None, *op=None, *output_dtype=None"
SIGNATURES = {
    "memory_efficient_attention": FORWARD,
    "memory_efficient_attention_forward": FORWARD,
    "memory_efficient_attention_forward_requires_grad": FORWARD,
    "memory_efficient_attention_partial": FORWARD,
    "memory_efficient_attention_backward": "grad, output, lse, query, key, value, attn_bias=None, p=0.0, scale=None, *op=None",
    "merge_attentions": "attn_split, lse_split, write_lse=True, output_dtype=None",
}


@pytest.mark.parametrize("function", SIGNATURES)
def test_signature(function):
    """As xFormers 0.0.35 has them. * marks what is given by name."""
    written = []
    for p in inspect.signature(getattr(xformers, function)).parameters.values():
        star = "*" if p.kind is p.KEYWORD_ONLY else ""
        written.append(star + (p.name if p.default is p.empty else f"{p.name}={p.default!r}"))
    assert ", ".join(written) == SIGNATURES[function]
    assert set(xformers.__all__) == set(SIGNATURES)


def tensor(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def close(got, want):
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def formula(q, k, v, **options):
    """(B, M, H, K) in and out, lse (B, H, M)."""
    out, lse = naive.attention(*(x.transpose(1, 2) for x in (q, k, v)), **options)
    return out.transpose(1, 2), lse


def compare(got, want, leaves):
    weights = torch.randn_like(want)
    close(got, want)
    mine, theirs = (torch.autograd.grad((x * weights).sum(), leaves, retain_graph=True) for x in (got, want))
    for one, other in zip(mine, theirs):
        close(one, other)


def made(name, **attributes):
    """An object of a class of this name."""
    return type(name, (), attributes)()


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def sequences(lengths, used=None):
    more = {} if used is None else {"seqlen": torch.tensor(used, dtype=torch.int32)}
    return types.SimpleNamespace(seqstart=offsets(lengths), max_seqlen=max(used or lengths), **more)


@pytest.mark.parametrize("bias, options", [
    (made("LowerTriangularMask"), {"causal": True, "align": "top_left"}),
    (made("LowerTriangularFromBottomRightMask"), {"causal": True}),
    (made("LowerTriangularFromBottomRightLocalAttentionMask", _window_size=3), {"causal": True, "window": (2, 0)}),
    (made("LocalAttentionFromBottomRightMask", window_left=2, window_right=1), {"window": (2, 1)}),
    (None, {}),
], ids=lambda x: type(x).__name__ if not isinstance(x, dict) else "")  # fmt: skip
def test_dense_classes(bias, options, computed):
    q, k, v = leaves = tensor(2, 5, 3, 8), tensor(2, 7, 3, 8), tensor(2, 7, 3, 6)
    compare(xformers.memory_efficient_attention(q, k, v, bias, scale=0.3), formula(q, k, v, scale=0.3, **options)[0], leaves)
    computed("xformers", 1)


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 3, 5, 7), (3, 5, 7), (5, 7), (2, 1, 1, 7)])
def test_tensors(shape, computed):
    q, k, v, bias = leaves = tensor(2, 5, 3, 8), tensor(2, 7, 3, 8), tensor(2, 7, 3, 8), tensor(*shape)
    compare(xformers.memory_efficient_attention(q, k, v, bias), formula(q, k, v, bias=bias)[0], leaves)
    computed("xformers", 1)


def test_tensors_of_three_dimensions(computed):
    """(B, M, K), and a bias of (B, M, N)."""
    q, k, v, bias = leaves = tensor(3, 5, 8), tensor(3, 7, 8), tensor(3, 7, 6), tensor(3, 5, 7)
    want = formula(*(x[:, :, None] for x in (q, k, v)), bias=bias[:, None])[0][:, :, 0]
    compare(xformers.memory_efficient_attention(q, k, v, bias), want, leaves)
    computed("xformers", 1)


def test_a_causal_mask_with_a_bias(computed):
    q, k, v, bias = leaves = tensor(2, 5, 3, 8), tensor(2, 7, 3, 8), tensor(2, 7, 3, 8), tensor(1, 3, 5, 7)
    want = formula(q, k, v, bias=bias, causal=True, align="top_left")[0]
    compare(xformers.memory_efficient_attention(q, k, v, made("LowerTriangularMaskWithTensorBias", _bias=bias)), want, leaves)
    computed("xformers", 1)


LENGTHS_Q, LENGTHS_K, SPANS = [3, 5, 2], [4, 5, 6], [6, 8, 10]


def by_sequence(q, k, v, spans, **options):
    outs, lses = [], []
    starts = [0, *itertools.accumulate(spans)]
    for one, start, length in zip(q[0].split(LENGTHS_Q), starts, LENGTHS_K):
        out, lse = formula(one[None], k[:, start : start + length], v[:, start : start + length], **options)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=-1)


PACKED = {
    "BlockDiagonalMask": {},
    "BlockDiagonalCausalMask": {"causal": True, "align": "top_left"},
    "BlockDiagonalCausalFromBottomRightMask": {"causal": True},
    "BlockDiagonalCausalLocalAttentionMask": {"causal": True, "align": "top_left", "window": (2, 0)},
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": {"causal": True, "window": (2, 0)},
    "BlockDiagonalPaddedKeysMask": {},
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": {"causal": True},
    "BlockDiagonalLocalAttentionPaddedKeysMask": {"window": (2, 1)},
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": {"causal": True, "window": (2, 0)},
    "BlockDiagonalGappyKeysMask": {},
    "BlockDiagonalCausalWithOffsetGappyKeysMask": {"causal": True},
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_classes(name, computed):
    """Values, gradients, the logsumexp, and the backward as a function of its own."""
    gaps = "Keys" in name
    spans = SPANS if gaps else LENGTHS_K
    bias = made(name, q_seqinfo=sequences(LENGTHS_Q), k_seqinfo=sequences(spans, LENGTHS_K if gaps else None),
                _window_size=3, window_left=2, window_right=1)  # fmt: skip
    q, k, v = leaves = tensor(1, sum(LENGTHS_Q), 2, 8), tensor(1, sum(spans), 2, 8), tensor(1, sum(spans), 2, 8)
    want, want_lse = by_sequence(q, k, v, spans, **PACKED[name])
    compare(xformers.memory_efficient_attention(q, k, v, bias), want, leaves)
    out, lse = xformers.memory_efficient_attention_forward_requires_grad(q, k, v, bias)
    close(out, want)
    close(lse, want_lse)
    grad = torch.randn_like(out)
    found = xformers.memory_efficient_attention_backward(grad, out, lse, q, k, v, bias)
    for one, other in zip(found, torch.autograd.grad((want * grad).sum(), leaves)):
        close(one, other)
    computed("xformers", 3)


def test_every_class_is_tested():
    dense = {name for name in xformers._READERS if not name.startswith("BlockDiagonal")}
    assert set(PACKED) == set(xformers._READERS) - dense and len(dense) == 5


@pytest.mark.parametrize("shared", [False, True])
def test_groups(shared, computed):
    """(B, M, G, H, K): keys whose heads of a group are one in memory are read once."""
    q = tensor(2, 5, 2, 3, 8)
    base = [tensor(2, 7, 2, 1 if shared else 3, 8) for _ in range(2)]
    k, v = (x.expand(2, 7, 2, 3, 8) for x in base)
    bias = tensor(2, 2, 3, 5, 7)
    want, want_lse = formula(*(x.flatten(2, 3) for x in (q, k, v)), bias=bias.flatten(1, 2))
    want, want_lse = want.unflatten(2, (2, 3)), want_lse.unflatten(1, (2, 3))
    compare(xformers.memory_efficient_attention(q, k, v, bias), want, [q, *base, bias])
    assert [x.shape[2] for x in xformers._four(q, k, v, True)] == ([6, 2, 2] if shared else [6, 6, 6])
    out, lse = xformers.memory_efficient_attention_partial(q, k, v, bias)
    compare(lse, want_lse, [q, base[0], bias])
    grad = torch.randn_like(out)
    found = xformers.memory_efficient_attention_backward(grad, out.detach(), lse.detach(), q, k, v, bias)
    for one, other in zip(found, torch.autograd.grad((want * grad).sum(), [q, k, v])):
        close(one, other)
    computed("xformers", 3)


def test_keys_that_are_expanded_and_want_a_gradient_themselves():
    """Each of their heads has its own."""
    q = tensor(1, 5, 2, 3, 8)
    k, v = (tensor(1, 7, 2, 1, 8).detach().expand(1, 7, 2, 3, 8).requires_grad_() for _ in range(2))
    compare(xformers.memory_efficient_attention(q, k, v), formula(*(x.flatten(2, 3) for x in (q, k, v)))[0].unflatten(2, (2, 3)), [q, k, v])


@pytest.mark.parametrize("shape, bias_shape", [((2, 5, 8), (2, 5, 5)), ((2, 5, 2, 3, 8), (2, 2, 3, 5, 5))])
def test_a_causal_mask_with_a_bias_in_other_layouts(shape, bias_shape):
    q, bias = tensor(*shape), tensor(*bias_shape)
    plain = bias.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    got = xformers.memory_efficient_attention(q, q, q, made("LowerTriangularMaskWithTensorBias", _bias=bias))
    compare(got, xformers.memory_efficient_attention(q, q, q, plain), [q, bias])


def test_a_backward_in_another_type():
    """output_dtype is that of the result, and of its gradient."""
    q = torch.randn(1, 4, 2, 8, dtype=torch.bfloat16)
    out, lse = xformers.memory_efficient_attention_forward_requires_grad(q, q, q, output_dtype=torch.float32)
    assert out.dtype == torch.float32
    found = xformers.memory_efficient_attention_backward(torch.randn_like(out), out, lse, q, q, q)
    assert [x.dtype for x in found] == [torch.bfloat16] * 3


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_parts_are_merged(groups, stacked):
    """Parts of the keys, of which the second has none for the first two queries: as all keys at once, with gradients."""
    q, k, v = leaves = [tensor(2, 5, *((2, 3) if groups else (6,)), 8) for _ in range(3)]
    causal = made("LowerTriangularFromBottomRightMask")
    want, want_lse = xformers.memory_efficient_attention_partial(q, k, v, causal)
    parts = [
        xformers.memory_efficient_attention_partial(q, k[:, :2], v[:, :2], made("LowerTriangularMask")),
        xformers.memory_efficient_attention_partial(q, k[:, 2:], v[:, 2:], causal),
    ]
    assert (parts[1][1][..., :2] == -math.inf).all() and parts[1][1][..., 2:].isfinite().all()
    outs, lses = zip(*parts)
    got, lse = xformers.merge_attentions(torch.stack(outs) if stacked else outs, torch.stack(lses) if stacked else list(lses))
    compare(got, want, leaves)
    compare(lse, want_lse, [q, k])
    for first in (outs, torch.stack(outs)):
        half, none = xformers.merge_attentions(first, lses, write_lse=False, output_dtype=torch.float32)
        assert none is None and half.dtype == torch.float32


def test_merged_rows_without_keys():
    out, lse = tensor(1, 2, 1, 4), tensor(1, 1, 2)
    with torch.no_grad():
        lse[..., 0], out[:, 0] = -math.inf, 0
    merged, whole = xformers.merge_attentions([out, out], [lse, lse])
    assert torch.equal(merged[:, 0], torch.zeros(1, 1, 4, dtype=torch.float64)) and whole[0, 0, 0] == -math.inf
    for grad in torch.autograd.grad(merged.sum() + whole[..., 1:].sum(), [out, lse]):
        assert grad.isfinite().all()


def test_parts_that_do_not_fit():
    out, lse = tensor(1, 3, 2, 4), tensor(1, 2, 3)
    with pytest.raises(ValueError, match="^lse_split: 1 parts, and attn_split has 2"):
        xformers.merge_attentions([out, out], [lse])
    for other in (out[:, :2], out[0]):
        with pytest.raises(ValueError, match="^attn_split, lse_split: part 1 has the shapes"):
            xformers.merge_attentions([out, other], [lse, lse])
    with pytest.raises(ValueError, match="part 0 has the shapes"):
        xformers.merge_attentions([out], [lse.mT])


def test_results():
    q, k, v = tensor(1, 4, 2, 8), tensor(1, 4, 2, 8), tensor(1, 4, 2, 8)
    assert xformers.memory_efficient_attention(q, k, v, output_dtype=torch.float32).dtype == torch.float32
    assert not xformers.memory_efficient_attention_forward(q, k, v).requires_grad
    torch.manual_seed(1)
    first = xformers.memory_efficient_attention(q, k, v, p=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, xformers.memory_efficient_attention(q, k, v, p=0.5))


def test_what_is_refused():
    q = tensor(1, 4, 2, 8)
    for name in ("PagedBlockDiagonalPaddedKeysMask", "MaskOfTheirOwn"):
        with pytest.raises(NotImplementedError, match=f"attn_bias: {name}, which fovea does not have; accepted: a tensor"):
            xformers.memory_efficient_attention(q, q, q, made(name))
    for function in ("memory_efficient_attention_partial", "memory_efficient_attention_forward_requires_grad"):
        with pytest.raises(NotImplementedError, match=f"^{function}: p: 0.5"):
            getattr(xformers, function)(q, q, q, p=0.5)
    with pytest.raises(NotImplementedError, match="^memory_efficient_attention_backward: p: 0.5"):
        xformers.memory_efficient_attention_backward(q, q, q, q, q, q, p=0.5)
    with pytest.raises(TypeError, match="^attn_bias: a tensor of bool"):
        xformers.memory_efficient_attention(q, q, q, torch.ones(1, 2, 4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="^key: 4 heads, and query has 2; accepted: as many"):  # a transpose is missing
        xformers.memory_efficient_attention(q, q.transpose(1, 2), q.transpose(1, 2))
    with pytest.raises(ValueError, match="^query: batch 2 with BlockDiagonalMask; accepted: 1"):
        two = tensor(2, 4, 2, 8)
        xformers.memory_efficient_attention(two, two, two, made("BlockDiagonalMask", q_seqinfo=sequences([4]), k_seqinfo=sequences([4])))
    with pytest.raises(ValueError, match="^attn_bias: "):
        xformers.memory_efficient_attention(q, q, q, torch.zeros(1, 2, 4, 5))


def test_the_package_is_patched(monkeypatch):
    with pytest.raises(ImportError, match="install: xformers is not installed"):
        install("xformers")
    own = dict.fromkeys(SIGNATURES, "theirs")
    for name in ("xformers", "xformers.ops", "xformers.ops.fmha"):
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__dict__.update(own)
        monkeypatch.setitem(sys.modules, name, module)
    del sys.modules["xformers.ops"].memory_efficient_attention_partial  # which is in fmha alone
    install("xformers")
    install("xformers")
    for name in ("xformers.ops", "xformers.ops.fmha"):
        assert sys.modules[name].memory_efficient_attention is xformers.memory_efficient_attention
    assert not hasattr(sys.modules["xformers.ops"], "memory_efficient_attention_partial")
    uninstall("xformers")
    assert sys.modules["xformers.ops"].memory_efficient_attention == "theirs"
