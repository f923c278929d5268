# SPDX-License-Identifier: Apache-2.0
"""fovea.torch.aten on the CPU: schemas, numbers against the formula (naive.py), sizes and strides against PyTorch's meta
functions, dropout's bits, autograd, tracing, and which of PyTorch's operators fovea computes. tests/gpu/test_aten.py compares with PyTorch's
own kernels."""

import itertools
import os
import subprocess
import sys

import naive
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.flop_counter import FlopCounterMode

import fovea
from conftest import restore_flash_impl
from fovea.torch import aten, disable, enable, enabled, reset_stats, stats
from fovea.torch.aten import _owners
from fovea.torch.aten._register import OPERATORS

NAMES = sorted(OPERATORS)
PYTORCH = torch.ops.aten
HAS_IMPL = hasattr(torch.nn.attention, "register_flash_attention_impl")


@pytest.fixture(autouse=True)
def off():
    yield
    disable()
    reset_stats()
    if HAS_IMPL and torch.nn.attention.current_flash_attention_impl() is not None:
        restore_flash_impl()
    assert aten.owners() == {}


def normal(*shape, dtype=torch.float32, grad=False):
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


def swap(*tensors):
    """(B, S, H, D) and (B, H, S, D)"""
    return [x.transpose(1, 2) for x in tensors]


# ---- schemas ----


def test_every_operator_of_the_list_is_there():
    families = ("efficient_attention", "flash_attention", "cudnn_attention")
    for family in families:
        for name in (f"_{family}_forward", f"_{family}_backward", f"_scaled_dot_product_{family}",
                     f"_scaled_dot_product_{family}_backward"):  # fmt: skip
            assert name in NAMES
    assert set(NAMES) < set(aten.__all__) == set(dir(aten))
    with pytest.raises(AttributeError, match="no attribute '_nothing'"):
        aten._nothing  # noqa: B018


@pytest.mark.parametrize("name", NAMES)
def test_schemas(name):
    """Argument for argument. An older PyTorch lacks some of the last ones, which have a default."""
    if not _owners.exists(name):
        pytest.skip(f"PyTorch {torch.__version__} has no aten::{name}")
    ours, theirs = (namespace._schema for namespace in (getattr(aten, name), getattr(PYTORCH, name).default))
    text = lambda x: (x.name, str(x.type), x.default_value, x.kwarg_only, x.is_write)  # noqa: E731
    known = {x.name for x in theirs.arguments}
    more = [x for x in ours.arguments if x.name not in known]
    assert [text(x) for x in ours.arguments if x.name in known] == [text(x) for x in theirs.arguments]
    assert all(x.kwarg_only and x.default_value is None for x in more)
    assert [(x.name, str(x.type)) for x in ours.returns] == [(x.name, str(x.type)) for x in theirs.returns]
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
        assert str(ours).replace("fovea::", "aten::") == str(theirs)


# ---- numbers ----

MASKS = {
    "none": {}, "top left": {"causal": True, "align": "top_left"}, "bottom right": {"causal": True},
    "window, top left": {"causal": True, "align": "top_left", "window": (2, 0)}, "window": {"causal": True, "window": (2, 0)},
}  # fmt: skip
EFFICIENT_MASKS = {"none": (0, 0), "top left": (1, 0), "bottom right": (2, None), "window, top left": (1, 3), "window": (2, 3)}
TYPES = [torch.float64, torch.float32, torch.bfloat16]


def formula(q, k, v, grad_out, options, bias=None):
    """out, lse and gradients of the leaves, (B, H, S, D), of the definition in the leaves' type."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, *(() if bias is None else (bias,)))]
    out, lse = naive.attention(*leaves[:3], bias=leaves[3] if bias is not None else None, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))]


def in_other_orders(q, k, v, grad_out, options, bias):
    """formula() once for each order in which columns are summed: a result of a few terms is right by luck in one of them."""
    for seed in range(8):
        order = torch.Generator().manual_seed(seed)
        of_q, of_v = (torch.randperm(x.shape[-1], generator=order) for x in (q, v))
        found = formula(q[..., of_q], k[..., of_q], v[..., of_v], grad_out[..., of_v], options, bias)
        back = {0: of_v, 2: of_q, 3: of_q, 4: of_v}  # out and the gradients of q, k and v have columns
        yield [x[..., back[n].argsort()] if n in back else x for n, x in enumerate(found)]


def compare(got, q, k, v, grad_out, options, bias=None):
    """`got`: out, lse, grad_q, grad_k, grad_v and perhaps grad_bias."""
    reference = formula(*(x.double() for x in (q, k, v, grad_out)), options, None if bias is None else bias.double())
    rough = list(zip(*in_other_orders(q, k, v, grad_out, options, bias)))
    names = ("out", "lse", "grad_q", "grad_k", "grad_v", "grad_bias")
    assert len(got) <= len(reference)
    for name, x, right, roughly in zip(names, got, reference, rough):
        if q.dtype == torch.float64:  # logsumexp is float32: so are the weights of the backward
            dead = right.isinf()
            torch.testing.assert_close(x.double()[~dead], right[~dead], rtol=3e-6, atol=3e-6)
            assert torch.equal(x.double()[dead], right[dead])
        else:
            naive.assert_as_good_as_naive(name, x, right, roughly, through=q.dtype)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sq, sk, dim_v", [(33, 33, 8), (5, 40, 16), (40, 7, 8)])
def test_efficient(sq, sk, dim_v, dtype, mask):
    q, k, v = normal(2, 4, sq, 8, dtype=dtype), normal(2, 4, sk, 8, dtype=dtype), normal(2, 4, sk, dim_v, dtype=dtype)
    bias, grad_out = normal(2, 4, sq, sk, dtype=dtype), normal(2, 4, sq, dim_v, dtype=dtype)
    kind, window = EFFICIENT_MASKS[mask]
    for with_bias in (False, True):
        given = bias if with_bias else None
        q_, k_, v_, grad_ = swap(q, k, v, grad_out)
        out, lse, seed, offset, max_q, max_k = aten._efficient_attention_forward(
            q_, k_, v_, given, None, None, None, None, 0.0, kind, True, scale=0.4, window_size=window
        )
        assert (max_q, max_k) == (sq, sk) and lse.shape == (2, 4, (sq + 31) // 32 * 32) and lse.dtype == torch.float32
        assert bool((lse[:, :, sq:] == float("inf")).all())
        *grads, grad_bias = aten._efficient_attention_backward(
            grad_, q_, k_, v_, given, out, None, None, max_q, max_k, lse, 0.0, seed, offset, kind, with_bias, scale=0.4,
            window_size=window, num_splits_key=2,
        )  # fmt: skip
        got = [out.transpose(1, 2), lse[:, :, :sq], *swap(*grads), *((grad_bias,) if with_bias else ())]
        assert (grad_bias is not None) == with_bias
        compare(got, q, k, v, grad_out, {**MASKS[mask], "scale": 0.4}, given)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("family", ["efficient", "flash", "cudnn"])
def test_scaled(family, causal, dtype):
    """(B, H, S, D): each family's backward gets what its forward returned."""
    sq, sk = 20, 27
    q, k, v = normal(2, 4, sq, 8, dtype=dtype), normal(2, 4, sk, 8, dtype=dtype), normal(2, 4, sk, 8, dtype=dtype)
    grad_out, bias = normal(2, 4, sq, 8, dtype=dtype), None if family == "flash" else normal(2, 4, sq, sk, dtype=dtype)
    forward, backward = (getattr(aten, f"_scaled_dot_product_{family}_attention{end}") for end in ("", "_backward"))
    if family == "efficient":
        out, lse, seed, offset = forward(q, k, v, bias, True, 0.0, causal)
        *grads, grad_bias = backward(grad_out, q, k, v, bias, out, lse, seed, offset, 0.0, [True] * 4, causal)
        grads.append(grad_bias)
        lse = lse[:, :, :sq]
    else:
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward(q, k, v, *(() if family == "flash" else (bias, True)), 0.0, causal)
        assert cum_q is None and cum_k is None and (max_q, max_k) == (sq, sk)
        if family == "flash":
            grads = backward(grad_out, q, k, v, out, lse, None, None, max_q, max_k, 0.0, causal, seed, offset)
        else:
            grads = backward(grad_out, q, k, v, out, lse, seed, offset, bias, None, None, max_q, max_k, 0.0, causal)
            assert lse.shape == (2, 4, sq, 1)
            lse = lse.squeeze(-1)
    options = {"causal": causal, "align": "bottom_right" if family == "flash" else "top_left"}
    compare([out, lse, *grads], q, k, v, grad_out, options, bias)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("causal, left, right", [(False, None, None), (True, None, None), (True, 3, 0), (False, 3, 2), (False, -1, 0)])
def test_flash(causal, left, right, dtype):
    q, k, v = normal(2, 4, 12, 8, dtype=dtype), normal(2, 2, 15, 8, dtype=dtype), normal(2, 2, 15, 8, dtype=dtype)
    grad_out = normal(2, 4, 12, 8, dtype=dtype)
    q_, k_, v_, grad_ = swap(q, k, v, grad_out)
    sizes = {"window_size_left": left, "window_size_right": right, "scale": 0.3}
    out, lse, state, unused, debug = aten._flash_attention_forward(q_, k_, v_, None, None, 12, 15, 0.0, causal, False, num_splits=3, **sizes)
    assert state.shape == (2,) and state.dtype == torch.uint64 and unused.shape == () and debug.shape == (0,)
    grads = aten._flash_attention_backward(grad_, q_, k_, v_, out, lse, None, None, 12, 15, 0.0, causal, state, unused, **sizes)
    window = tuple(-1 if size is None else size for size in (left, right))
    compare([out.transpose(1, 2), lse, *swap(*grads)], q, k, v, grad_out, {"causal": causal, "window": window, "scale": 0.3})
    into = torch.full_like(out, float("nan"))
    again = aten._flash_attention_forward_no_dropout_inplace(into, q_, k_, v_, None, None, 12, 15, 0.0, causal, False, **sizes)
    assert torch.equal(into, out) and torch.equal(again, lse)


def test_flash_with_slopes_and_used_lengths():
    q, k, v = normal(2, 4, 6, 8), normal(2, 4, 9, 8), normal(2, 4, 9, 8)
    slopes, used = torch.rand(2, 4), torch.tensor([9, 7], dtype=torch.int32)
    out, lse, *_ = aten._flash_attention_forward(*swap(q, k, v), None, None, 6, 9, 0.0, True, False, seqused_k=used, alibi_slopes=slopes)
    for b, n in enumerate(used.tolist()):
        want, want_lse = naive.attention(q[b], k[b, :, :n], v[b, :, :n], causal=True, alibi_slopes=slopes[b])
        torch.testing.assert_close(out[b].transpose(0, 1), want)
        torch.testing.assert_close(lse[b], want_lse)


# ---- packed ----

LENGTHS_Q, LENGTHS_K = [5, 1, 0, 40], [7, 3, 4, 33]


def packed(heads_k=4, dtype=torch.float32):
    """q, k, v, grad_out as (total, H, D), offsets, and one (q, k, v, grad_out) of (H, S, D) for each sequence. Some rows belong to none."""
    ends = [torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) for lengths in (LENGTHS_Q, LENGTHS_K)]
    total_q, total_k = (int(end[-1]) + 3 for end in ends)
    q, grad_out = (normal(total_q, 4, 8, dtype=dtype) for _ in range(2))
    k, v = (normal(total_k, heads_k, 8, dtype=dtype) for _ in range(2))
    parts = [
        tuple(x[e[b] : e[b + 1]].transpose(0, 1) for x, e in zip((q, k, v, grad_out), (ends[0], ends[1], ends[1], ends[0])))
        for b in range(len(LENGTHS_Q))
    ]
    return (q, k, v, grad_out), ends, parts


def compare_packed(out, lse_of, grads, ends, parts, options):
    for b, (q, k, v, grad_out) in enumerate(parts):
        rows, keys = slice(ends[0][b], ends[0][b + 1]), slice(ends[1][b], ends[1][b + 1])
        if rows.start == rows.stop:
            assert not grads[1][keys].any() and not grads[2][keys].any()
            continue
        got = [out[rows], *(grad[at] for grad, at in zip(grads, (rows, keys, keys)))]
        out_, *grads_ = (x.transpose(0, 1) for x in got)
        compare([out_, lse_of(b, rows), *grads_], q, k, v, grad_out, options)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_efficient_packed(dtype, mask):
    (q, k, v, grad_out), ends, parts = packed(dtype=dtype)
    kind, window = EFFICIENT_MASKS[mask]
    one = lambda *tensors: [x[None] for x in tensors]  # noqa: E731
    out, lse, seed, offset, max_q, max_k = aten._efficient_attention_forward(
        *one(q, k, v), None, *ends, 40, 33, 0.0, kind, True, window_size=window
    )
    assert (max_q, max_k) == (40, 33) and lse.shape == (4, 4, 64)
    assert all(bool((lse[b, :, n:] == float("inf")).all()) for b, n in enumerate(LENGTHS_Q))
    *grads, none = aten._efficient_attention_backward(
        *one(grad_out, q, k, v), None, out, *ends, 40, 33, lse, 0.0, seed, offset, kind, False, window_size=window
    )
    assert none is None
    compare_packed(out[0], lambda b, rows: lse[b, :, : rows.stop - rows.start], [grad[0] for grad in grads], ends, parts, MASKS[mask])


@pytest.mark.parametrize("family", ["flash", "cudnn"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_k", [4, 2])
def test_packed(heads_k, causal, family):
    (q, k, v, grad_out), ends, parts = packed(heads_k)
    if family == "flash":
        out, lse, state, unused, _ = aten._flash_attention_forward(q, k, v, *ends, 40, 33, 0.0, causal, False)
        grads = aten._flash_attention_backward(grad_out, q, k, v, out, lse, *ends, 40, 33, 0.0, causal, state, unused)
        assert lse.shape == (4, 49)
    else:
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._cudnn_attention_forward(
            q, k, v, None, *ends, 40, 33, True, 0.0, causal
        )
        assert torch.equal(cum_q, ends[0]) and torch.equal(cum_k, ends[1]) and lse.shape == (49, 4, 1)
        into = torch.full_like(out, float("nan"))
        again = aten._cudnn_attention_forward_no_dropout_inplace(into, q, k, v, *ends, 40, 33, causal)
        assert torch.equal(into, out) and torch.equal(again, lse)
        grads = aten._cudnn_attention_backward(
            grad_out, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal
        )
        lse = lse.squeeze(-1).transpose(0, 1)
    options = {"causal": causal, "align": "bottom_right" if family == "flash" else "top_left"}
    compare_packed(out, lambda b, rows: lse[:, rows], grads, ends, parts, options)


def test_efficient_packed_with_used_lengths():
    (q, k, v, _), ends, parts = packed()
    used = torch.tensor([7, 1, 0, 20], dtype=torch.int32)
    out, *_ = aten._efficient_attention_forward(q[None], k[None], v[None], None, *ends, 40, 33, 0.0, 0, True, seqlen_k=used)
    for b, (q, k, v, _) in enumerate(parts):
        want, _ = naive.attention(q, k[:, : used[b]], v[:, : used[b]])
        torch.testing.assert_close(out[0, ends[0][b] : ends[0][b + 1]].transpose(0, 1), want)


def test_shared_storage():
    q, k, v, grad_out = (normal(2, 6, 3, 8) for _ in range(4))
    out, lse, seed, offset, *longest = aten._efficient_attention_forward(q, k, v, None, None, None, None, None, 0.0, 0, True)
    rest = (None, out, None, None, *longest, lse, 0.0, seed, offset, 0, False)
    apart = aten._efficient_attention_backward(grad_out, q, k, v, *rest)
    shared = aten._efficient_attention_backward(grad_out, q, k, v, *rest, shared_storage_dqdkdv=True)
    for index in range(3):
        assert torch.equal(shared[index], apart[index])
        assert shared[index].stride() == (6 * 9 * 8, 9 * 8, 8, 1) and shared[index].storage_offset() == index * 3 * 8
        assert shared[index].untyped_storage().data_ptr() == shared[0].untyped_storage().data_ptr()
    with pytest.raises(ValueError, match="shared_storage_dqdkdv: True with shape .*; accepted: query, key and value of one shape"):
        aten._efficient_attention_backward(grad_out[:, :5], q[:, :5], k, v, None, out[:, :5], *rest[2:], shared_storage_dqdkdv=True)


# ---- dropout ----


def one_hot_values(batch, heads, rows):
    return torch.eye(rows).expand(batch, heads, rows, rows)


@pytest.mark.parametrize("p", [0.3, 0.9])
def test_dropout_of_the_memory_efficient_kernel(p):
    """The decisions read back out of the forward and of the backward are those of fovea.dropout_mask for the seed that is returned."""
    q = torch.zeros(2, 3, 20, 24)
    v = one_hot_values(2, 3, 24)
    seeds = []
    for _ in range(2):
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, v * 0, v, None, True, p)
        keep = torch.from_numpy(fovea.dropout_mask(2, 3, 20, 24, p, seed=int(seed), offset=int(offset), rng="torch_mem_efficient"))
        assert torch.equal(out != 0, keep) and seed.shape == offset.shape == ()
        torch.testing.assert_close(out[keep], torch.full_like(out[keep], 1 / 24 / (1 - p)))
        grad_out = torch.eye(20, 24).expand(2, 3, 20, 24)  # of v: one query's weights
        _, _, grad_v, none = aten._scaled_dot_product_efficient_attention_backward(
            grad_out, q, v * 0, v, None, out, lse, seed, offset, p, [True, True, True, False]
        )
        assert none is None and torch.equal(grad_v[..., :20].transpose(-1, -2) != 0, keep)
        seeds.append(int(seed))
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize("heads_k", [4, 2, 1])
def test_dropout_of_packed_sequences(heads_k):
    """As PyTorch's kernel numbers them: every head of every sequence begins with the same random number. The gradient is the forward's."""
    p, heads, dim = 0.4, 4, 8
    ends = torch.tensor([0, 6, 9, 17], dtype=torch.int32)
    q, grad_out = normal(1, 17, heads, dim), normal(1, 17, heads, dim)
    k, v = normal(1, 17, heads_k, dim), normal(1, 17, heads_k, dim)
    out, lse, seed, offset, *longest = aten._efficient_attention_forward(q, k, v, None, ends, ends, 8, 8, p, 1, True)
    *grads, _ = aten._efficient_attention_backward(
        grad_out, q, k, v, None, out, ends, ends, *longest, lse, p, seed, offset, 1, False
    )
    for begin, end in itertools.pairwise(ends.tolist()):
        n = end - begin
        keep = torch.from_numpy(fovea.dropout_mask(1, 1, n, n, p, seed=int(seed), rng="torch_mem_efficient"))[0]
        leaves = [x[0, begin:end].transpose(0, 1).double().requires_grad_() for x in (q, k, v)]
        want, want_lse = naive.attention(*leaves, causal=True, keep=keep, keep_factor=1 / (1 - p))
        torch.testing.assert_close(out[0, begin:end].transpose(0, 1).double(), want, rtol=1e-5, atol=1e-5)
        sequence = ends.tolist().index(begin)
        torch.testing.assert_close(lse[sequence, :, :n].double(), want_lse, rtol=1e-5, atol=1e-5)
        for grad, right in zip(grads, torch.autograd.grad(want, leaves, grad_out[0, begin:end].transpose(0, 1).double())):
            torch.testing.assert_close(grad[0, begin:end].transpose(0, 1).double(), right, rtol=1e-4, atol=1e-4)


# ---- sizes and strides ----


def views(*shape):
    """Tensors of this shape as programs have them: contiguous, of another order in memory, of a packed one, expanded."""
    yield torch.empty(shape)
    for order in ((0, 2, 1, 3), (2, 0, 1, 3)):
        inverse = [order.index(at) for at in range(4)]
        yield torch.empty([shape[at] for at in order]).permute(inverse)
    yield torch.empty(*shape[:2], 3, *shape[2:])[:, :, 1]
    yield torch.empty(1, *shape[1:]).expand(*shape)


def layout(results):
    """Sizes, strides and types of the tensors. A stride of a dimension of one element says nothing."""
    found = []
    for x in results if isinstance(results, (tuple, list)) else (results,):
        if isinstance(x, torch.Tensor):
            x = (tuple(x.shape), tuple(s for s, n in zip(x.stride(), x.shape) if n > 1) if x.numel() else (), x.dtype)
        found.append(x)
    return found


def meta(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x


def compare_layouts(name, args, kwargs=None, without=()):
    """Ours, traced and computed, and PyTorch's meta function; `without` are results for which that one makes a tensor and none is returned."""
    if not _owners.exists(name):
        return  # an older PyTorch
    kwargs = kwargs or {}
    traced = layout(getattr(aten, name)(*map(meta, args), **kwargs))
    theirs = layout(getattr(PYTORCH, name)(*map(meta, args), **kwargs))
    computed = layout(getattr(aten, name)(*args, **kwargs))
    for at in without:
        assert traced[at] is None and computed[at] is None
        theirs[at] = None
    assert traced == theirs, name
    assert traced == computed, name


@pytest.mark.parametrize("sizes", [(2, 3, 5, 7, 8), (1, 1, 1, 1, 8), (3, 2, 64, 33, 16), (2, 2, 4, 4, 8)], ids=str)
def test_layouts(sizes):
    """Dense operators: of query's view and of its shape follow those of every result."""
    batch, heads, sq, sk, dim = sizes
    seed = torch.zeros((), dtype=torch.int64)
    state, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    for q, k, v in zip(views(batch, heads, sq, dim), views(batch, heads, sk, dim), views(batch, heads, sk, dim)):
        bias = torch.zeros(batch, heads, sq, sk + 3)[..., :sk]
        grad = torch.zeros(batch, heads, sq, dim)
        lse = torch.zeros(batch, heads, (sq + 31) // 32 * 32)
        for causal in (False, True):
            compare_layouts("_scaled_dot_product_efficient_attention", (q, k, v, bias, True, 0.0, causal))
            compare_layouts("_scaled_dot_product_efficient_attention", (q, k, v, None, False))
            compare_layouts("_scaled_dot_product_flash_attention", (q, k, v, 0.0, causal))
            compare_layouts("_scaled_dot_product_cudnn_attention", (q, k, v, bias, True, 0.0, causal))
        rest = (lse, seed, seed, 0.0)
        for mask in ([True] * 4, [True, True, True, False], [False] * 4):
            compare_layouts("_scaled_dot_product_efficient_attention_backward", (grad, q, k, v, bias, grad, *rest, mask))
        compare_layouts("_scaled_dot_product_flash_attention_backward",
                        (grad, q, k, v, grad, lse[..., :sq], None, None, sq, sk, 0.0, False, state, unused))  # fmt: skip
        compare_layouts("_scaled_dot_product_cudnn_attention_backward",
                        (grad, q, k, v, grad, lse[..., :sq, None], seed, seed, bias, None, None, sq, sk, 0.0, False))  # fmt: skip
        q_, k_, v_, grad_ = swap(q, k, v, grad)
        compare_layouts("_efficient_attention_forward", (q_, k_, v_, bias, None, None, None, None, 0.0, 1, True))
        compare_layouts("_flash_attention_forward", (q_, k_, v_, None, None, sq, sk, 0.0, False, False))
        compare_layouts("_flash_attention_forward_no_dropout_inplace", (grad_.clone(), q_, k_, v_, None, None, sq, sk, 0.0, False, False))
        compare_layouts("_flash_attention_backward", (grad_, q_, k_, v_, grad_, lse[..., :sq], None, None, sq, sk, 0.0, False, state, unused))
        given = (grad_, q_, k_, v_, bias, grad_, None, None, sq, sk, *rest[:1], 0.0, seed, seed, 0)
        compare_layouts("_efficient_attention_backward", (*given, True))
        compare_layouts("_efficient_attention_backward", (*given, False), without=(3,))
        if sq == sk:
            compare_layouts("_efficient_attention_backward", (*given, True), {"shared_storage_dqdkdv": True})


def test_layouts_of_packed_sequences():
    (q, k, v, grad), ends, _ = packed()
    one = [x[None] for x in (q, k, v)]
    seed = torch.zeros((), dtype=torch.int64)
    compare_layouts("_efficient_attention_forward", (*one, None, *ends, 40, 33, 0.0, 1, True))
    compare_layouts("_flash_attention_forward", (q, k, v, *ends, 40, 33, 0.0, True, False))
    lse = torch.zeros(4, 4, 64)
    compare_layouts("_efficient_attention_backward",
                    (grad[None], *one, None, grad[None], *ends, 40, 33, lse, 0.0, seed, seed, 0, False), without=(3,))  # fmt: skip


def test_opcheck():
    """Autograd, fake functions, dynamic shapes: PyTorch's own tests of operators."""
    q, k, v = (normal(2, 6, 3, 8, grad=True) for _ in range(3))
    bias = normal(2, 3, 6, 6, grad=True)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    check = lambda name, *args, **more: torch.library.opcheck(getattr(aten, name), args, more, test_utils=utilities)  # noqa: E731
    check("_efficient_attention_forward", q, k, v, bias, None, None, None, None, 0.0, 1, True)
    check("_flash_attention_forward", q, k, v, None, None, 6, 6, 0.0, True, False)
    check("_cudnn_attention_forward", *swap(q, k, v), None, None, None, 6, 6, True)
    check("_scaled_dot_product_efficient_attention", *swap(q, k, v), bias, True)
    check("_scaled_dot_product_flash_attention", *swap(q, k, v))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend):
    q, k, v = (normal(2, 3, 6, 8, grad=True) for _ in range(3))

    def call(q, k, v):
        return aten._scaled_dot_product_flash_attention(q * 2, k, v, 0.0, True)[0].sin()

    want = call(q, k, v)
    grads = torch.autograd.grad(want.sum(), (q, k, v))
    got = torch.compile(call, fullgraph=True, backend=backend)(q, k, v)
    torch.testing.assert_close(got, want)
    for x, y in zip(torch.autograd.grad(got.sum(), (q, k, v)), grads):
        torch.testing.assert_close(x, y)


# ---- autograd ----

CALLS = {
    "_efficient_attention_forward": lambda q, k, v, bias: aten._efficient_attention_forward(
        *swap(q, k, v), bias, None, None, None, None, 0.0, 2, True)[0].transpose(1, 2),
    "_scaled_dot_product_efficient_attention": lambda q, k, v, bias: aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, True)[0],
    "_flash_attention_forward": lambda q, k, v, bias: aten._flash_attention_forward(
        *swap(q, k, v), None, None, 6, 6, 0.0, True, False)[0].transpose(1, 2),
    "_scaled_dot_product_flash_attention": lambda q, k, v, bias: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0],
    "_cudnn_attention_forward": lambda q, k, v, bias: aten._cudnn_attention_forward(
        q, k, v, bias.detach(), None, None, 6, 6, True, 0.0, True)[0],
    "_scaled_dot_product_cudnn_attention": lambda q, k, v, bias: aten._scaled_dot_product_cudnn_attention(
        q, k, v, bias.detach(), True, 0.0, True)[0],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_autograd(name):
    leaves = [*(normal(2, 3, 6, 8, grad=True) for _ in range(3)), normal(2, 3, 6, 6, grad=True)]
    has_bias, learned = "flash" not in name, "efficient" in name
    want = naive.attention(*leaves[:3], bias=leaves[3] if has_bias else None, causal=True)[0]
    got = CALLS[name](*leaves)
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(want)
    used = leaves if learned else leaves[:3]
    for x, y in zip(torch.autograd.grad(got, used, grad), torch.autograd.grad(want, used, grad)):
        torch.testing.assert_close(x, y)


def test_autograd_of_some():
    q, k, v = normal(1, 2, 6, 8), normal(1, 2, 6, 8, grad=True), normal(1, 2, 6, 8)
    aten._scaled_dot_product_flash_attention(q, k, v)[0].sum().backward()
    assert k.grad is not None and q.grad is None
    with pytest.raises(NotImplementedError, match="alibi_slopes: given with a gradient"):
        aten._flash_attention_forward(*swap(q, k, v), None, None, 6, 6, 0.0, True, False, alibi_slopes=torch.ones(2))


@pytest.mark.parametrize("name", CALLS)
def test_a_second_derivative_is_refused_by_name(name):
    """As by PyTorch's own, and not lost. First ones have the same numbers with create_graph=True."""
    leaves = [normal(2, 6, 6, 8, grad=True) for _ in range(3)]
    out = CALLS[name](*leaves, torch.zeros(2, 6, 6, 6))
    want = torch.autograd.grad(out.cos().sum(), leaves, retain_graph=True)
    got = torch.autograd.grad(out.cos().sum(), leaves, create_graph=True)
    for x, y in zip(got, want):
        assert torch.equal(x, y)
    with pytest.raises(NotImplementedError, match=r"^_\w+_backward: differentiated; accepted: first derivatives"):
        torch.autograd.grad(got[0].square().sum(), leaves[2])


def test_what_writes_into_an_argument_has_no_derivative():
    q = normal(1, 6, 2, 8, grad=True)
    out = torch.empty(1, 6, 2, 8)
    lse = aten._flash_attention_forward_no_dropout_inplace(out, q, q, q, None, None, 6, 6, 0.0, True, False)
    torch.testing.assert_close(out, aten._flash_attention_forward(q, q, q, None, None, 6, 6, 0.0, True, False)[0].detach())
    with pytest.raises(NotImplementedError, match="_no_dropout_inplace: differentiated; accepted"):
        lse.sum().backward()


@pytest.mark.parametrize("name", CALLS)
def test_flops(name):
    """As PyTorch counts its own operators, forward and backward."""
    if "_cudnn_attention_forward" == name:
        pytest.skip("PyTorch has no formula for it")
    counts = []
    for namespace in (torch.ops.fovea, PYTORCH):
        leaves = [torch.empty(2, 3, 6, 8, device="meta", requires_grad=True) for _ in range(3)]
        leaves.append(torch.empty(2, 3, 6, 6, device="meta"))
        with FlopCounterMode(display=False) as counter, pytest.MonkeyPatch.context() as patch:
            if namespace is PYTORCH:
                patch.setattr(__name__ + ".aten", PYTORCH)
            CALLS[name](*leaves).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# ---- errors ----


@pytest.mark.parametrize("call, error, text", [
    (lambda q: aten._efficient_attention_forward(q[0], q, q, None, None, None, None, None, 0.0, 0), ValueError,
     r"query: shape 6x2x8; accepted: \(B, S, H, D\)"),
    (lambda q: aten._efficient_attention_forward(q, q[:, :, :, :7], q, None, None, None, None, None, 0.0, 0), ValueError, "key: shape"),
    (lambda q: aten._efficient_attention_forward(q, q, q, None, None, None, None, None, 0.0, 3), ValueError,
     "custom_mask_type: 3; accepted: 0"),
    (lambda q: aten._efficient_attention_forward(q, q, q, None, None, None, None, None, 0.0, 0, window_size=4), ValueError,
     "window_size: 4; accepted: 0 or None; with a causal custom_mask_type"),
    (lambda q: aten._efficient_attention_forward(q, q, q, None, torch.tensor([0, 6]), None, 6, 6, 0.0, 0), ValueError, "cu_seqlens_k: one of"),
    (lambda q: aten._efficient_attention_forward(q, q, q, torch.ones(1, 2, 6, 6), torch.tensor([0, 6]), torch.tensor([0, 6]), 6, 6, 0.0, 0),
     ValueError, "bias: given with cu_seqlens_q"),
    (lambda q: aten._efficient_attention_forward(q, q, q, None, torch.tensor([0, 6]), torch.tensor([0, 6]), None, None, 0.0, 0),
     ValueError, "max_seqlen_q: None; accepted"),
    (lambda q: aten._efficient_attention_forward(q.repeat(1, 1, 2, 1)[:, :, :3], q, q, None, *[torch.tensor([0, 6])] * 2, 6, 6, 0.5, 0), ValueError,
     "key: shape 1x6x2x8; accepted: a number of heads that divides query's 3"),
    (lambda q: aten._efficient_attention_forward(q, q, q, None, None, None, None, None, 0.0, 0, seqlen_k=torch.tensor([3])), ValueError,
     "seqlen_k: given without cu_seqlens_k"),
    (lambda q: aten._scaled_dot_product_efficient_attention(q, q, q, torch.ones(5), False), ValueError, "attn_bias: shape"),
    (lambda q: aten._flash_attention_forward(q, q, q, None, None, 6, 6, 0.1, False, False), NotImplementedError,
     "dropout_p: 0.1, and FlashAttention's random numbers cannot be drawn; accepted: 0, or fovea.torch.attention"),
    (lambda q: aten._scaled_dot_product_cudnn_attention(q, q, q, None, False, 0.1), NotImplementedError,
     "dropout_p: 0.1, and cuDNN's random numbers cannot be drawn"),
    (lambda q: aten._flash_attention_forward(q, q, q, None, None, 6, 6, 0.0, False, True), NotImplementedError, "return_debug_mask: given"),
    (lambda q: aten._flash_attention_forward(q, q, q, None, None, 6, 6, 0.0, False, False, block_table=torch.zeros(1, 1)),
     NotImplementedError, "block_table: given"),
    (lambda q: aten._efficient_attention_backward(q, q, q, q, None, q, None, None, 6, 6, torch.zeros(1, 2, 3), 0.0, torch.tensor(0),
                                                  torch.tensor(0), 0, False), ValueError, r"logsumexp: shape 1x2x3; accepted: \(B, H, at least 6\)"),
])  # fmt: skip
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call(normal(1, 6, 2, 8))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dropout_p, change", [(0.5, lambda q: q[..., :7]), (0.5, lambda q: q.double()), (1.5, lambda q: q),
                                               (0.5, lambda q: q[:, :, :0])])  # fmt: skip
def test_what_is_refused_draws_nothing(packed, dropout_p, change):
    q = normal(1, 6, 2, 8)
    ends = [torch.tensor([0, 2, 6])] * 2 if packed else [None] * 2
    before = torch.get_rng_state()
    with pytest.raises((ValueError, TypeError)):
        aten._efficient_attention_forward(q, change(q), q, None, *ends, 4, 4, dropout_p, 0)
    assert torch.equal(torch.get_rng_state(), before)


# ---- in PyTorch's place ----


def run(name="_scaled_dot_product_flash_attention"):
    q, k, v = (normal(1, 2, 6, 8, grad=True) for _ in range(3))
    out = getattr(PYTORCH, name)(q, k, v, *(() if "flash" in name else (None, True)))[0]
    torch.testing.assert_close(out, naive.attention(q, k, v)[0])
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for x, y in zip(grads, torch.autograd.grad(naive.attention(q, k, v)[0].sum(), (q, k, v))):
        torch.testing.assert_close(x, y)


SCALED = [f"_scaled_dot_product_{family}_attention" for family in ("efficient", "flash", "cudnn")]


def test_enabled_operators():
    """PyTorch has no kernels of them for the CPU; with operators=True it has fovea's, and its own autograd calls fovea's backward."""
    with pytest.raises(NotImplementedError):
        run()
    enable("cpu", prefer=None, operators=True)
    assert set(aten.owners()) == {name for name in NAMES if _owners.exists(name)}
    assert set(aten.owners().values()) == {"enable(operators=True)"}
    for name in SCALED:
        run(name)
    assert stats()["operators"] == {name + end: 1 for name in SCALED for end in ("", "_backward")}
    enable("cpu", prefer=None)
    with pytest.raises(NotImplementedError):
        run()
    with enabled("cuda", operators=True), pytest.raises(NotImplementedError):
        run()
    with pytest.raises(TypeError, match="operators: 1; accepted: True or False"):
        enable(operators=1)


def test_what_has_no_kernel_to_go_back_to_raises():
    enable("cpu", prefer=None, operators=True)
    q = normal(1, 2, 6, 8)
    with pytest.raises(NotImplementedError, match="dropout_p: 0.1, and FlashAttention's random numbers"):
        PYTORCH._scaled_dot_product_flash_attention(q, q, q, 0.1)
    with pytest.raises(ValueError, match="custom_mask_type: 7"):
        PYTORCH._efficient_attention_forward(q, q, q, None, None, None, None, None, 0.0, 7)


class Kernel:
    """In the place of PyTorch's own, which there is none of on the CPU."""

    def __init__(self, then=None):
        self.calls = 0
        self.then = then

    def call_boxed(self, keys, *args, **kwargs):
        self.calls += 1
        if self.then:
            return self.then(*args, **kwargs)
        return aten._scaled_dot_product_flash_attention(*args[:3])


@pytest.fixture
def theirs(monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(_owners, "_kernel_in_force", lambda name, key: kernel)
    return kernel


def test_what_is_handed_back(theirs):
    """With a reason, by name; where fovea refuses the arguments, PyTorch has the last word."""
    enable("cpu", prefer=None, operators=True)
    q = normal(1, 2, 6, 8)
    PYTORCH._scaled_dot_product_flash_attention(q, q, q, 0.1)
    reason = ("_scaled_dot_product_flash_attention: dropout_p: 0.1, and FlashAttention's random numbers cannot be drawn; accepted: 0, "
              "or fovea.torch.attention")  # fmt: skip
    assert stats()["handed_back"] == {reason: 1} and theirs.calls == 1 and not stats()["operators"]
    enable("cpu", prefer=None, operators=True, strict=True)
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention: dropout_p: 0.1"):
        PYTORCH._scaled_dot_product_flash_attention(q, q, q, 0.1)


def test_operators_that_a_kernel_of_pytorch_calls_are_pytorchs(theirs):
    """Its memory-efficient kernel calls another operator, which fovea has taken as well: that one is neither fovea's then, nor counted."""
    q = normal(1, 2, 6, 8)
    given = (q, q, q, None, None, None, None, None, 0.0, 0)
    theirs.then = lambda *args, **kwargs: (
        PYTORCH._efficient_attention_forward(*given)[:4] if theirs.calls == 1 else aten._efficient_attention_forward(*given)
    )
    enable("cpu", prefer=None, operators=True)
    with _owners.left_to_pytorch():
        PYTORCH._scaled_dot_product_efficient_attention(q, q, q, None, False)
    assert theirs.calls == 2 and not stats()["operators"] and not stats()["handed_back"]
    PYTORCH._scaled_dot_product_efficient_attention(q, q, q, None, False)
    assert theirs.calls == 2 and stats()["operators"] == {"_scaled_dot_product_efficient_attention": 1}


def test_calls_that_are_left_to_pytorch_stay_there(monkeypatch):
    """SDPA's composite, handed back because PyTorch is faster, calls operators that fovea has taken: these are PyTorch's then."""
    seen = []
    monkeypatch.setattr("fovea.torch._enable_kernel.composite", lambda *args, **kwargs: seen.append(_owners._here.theirs))
    monkeypatch.setattr("fovea.torch._fastest.slower", lambda *args: True)
    enable("cpu", operators=True)
    q = normal(1, 2, 6, 8)
    sdpa(q, q, q)
    assert seen == [True] and not _owners._here.theirs


# ---- the implementation of flash operators ----

needs_impl = pytest.mark.skipif(not HAS_IMPL, reason=aten.flash_impl())
FLASH = {name for name in NAMES if "flash" in name and _owners.exists(name)}
IMPL = "activate_flash_attention_impl('fovea')"


def test_flash_impl_says_whether_it_is_there():
    assert aten.flash_impl().startswith("registered;" if HAS_IMPL else "not registered, as PyTorch")


@needs_impl
def test_flash_impl():
    from torch.nn import attention

    assert "fovea" in attention.list_flash_attention_impls()
    attention.activate_flash_attention_impl("fovea")
    assert attention.current_flash_attention_impl() == "fovea"
    assert aten.owners() == dict.fromkeys(FLASH, IMPL)
    run()
    restore_flash_impl()
    with pytest.raises(NotImplementedError):
        run()


@needs_impl
@pytest.mark.parametrize("first", ["enable", "activate"])
@pytest.mark.parametrize("undone", ["enable", "activate"])
def test_owners(first, undone):
    """Each operator has one owner, the first; the other one keeps it, whichever goes first."""
    from torch.nn import attention

    put = {"enable": lambda: enable("cpu", prefer=None, operators=True), "activate": lambda: attention.activate_flash_attention_impl("fovea")}
    undo = {"enable": disable, "activate": restore_flash_impl}
    all_names = {name for name in NAMES if _owners.exists(name)}
    put[first]()
    put["activate" if first == "enable" else "enable"]()
    owners = aten.owners()
    assert set(owners) == all_names
    assert {name for name, owner in owners.items() if owner == IMPL} == (set() if first == "enable" else FLASH)
    run()
    undo[undone]()
    left = dict.fromkeys(FLASH, IMPL) if undone == "enable" else dict.fromkeys(all_names, "enable(operators=True)")
    assert aten.owners() == left
    run()
    undo["activate" if undone == "enable" else "enable"]()
    assert aten.owners() == {}
    with pytest.raises(NotImplementedError):
        run()


@needs_impl
def test_each_device_has_an_owner_of_its_own():
    """enable() that names CUDA alone neither counts nor judges the CPU's calls."""
    from torch.nn import attention

    enable("cuda", prefer=None, operators=True, strict=True)
    attention.activate_flash_attention_impl("fovea")
    assert aten.owners()["_flash_attention_forward"] == f"{IMPL}, enable(operators=True)"
    run()
    q = normal(1, 2, 6, 8)
    with pytest.raises(NotImplementedError, match="dropout_p: 0.1, and FlashAttention's random numbers cannot be drawn"):
        PYTORCH._scaled_dot_product_flash_attention(q, q, q, 0.1)
    assert not stats()["operators"] and not stats()["handed_back"]
    restore_flash_impl()


@pytest.mark.parametrize("with_theirs", [True, False])
def test_a_call_while_another_thread_releases_the_operator(with_theirs, theirs, monkeypatch):
    """PyTorch's kernel computes it; where there is none, fovea."""
    if not with_theirs:
        monkeypatch.setattr(_owners, "_kernel_in_force", lambda name, key: None)
    q = normal(1, 2, 6, 8)
    enable("cpu", prefer=None, operators=True)
    with monkeypatch.context() as patch:
        patch.setattr(_owners, "_taken", {})
        out = PYTORCH._scaled_dot_product_flash_attention(q, q, q)[0]
    torch.testing.assert_close(out, naive.attention(q, q, q)[0])
    assert theirs.calls == with_theirs and not stats()["operators"]


def test_without_the_registry():
    """An older PyTorch: importing fovea.torch works, and a sentence says what is missing."""
    code = (
        "import torch.nn.attention as a\n"
        "if hasattr(a, 'register_flash_attention_impl'): del a.register_flash_attention_impl\n"
        "import fovea.torch; print(fovea.torch.aten.flash_impl())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.startswith(f"not registered, as PyTorch {torch.__version__} has no torch.nn.attention.register_flash")


def test_fovea_torch_variable():
    """FOVEA_TORCH=operators"""
    code = "import fovea_autoload as a; a.load(); import fovea.torch; print(len(fovea.torch.aten.owners()))"
    env = {**os.environ, "FOVEA_TORCH": "1,operators,cpu"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert found.stdout.strip() == str(len([name for name in NAMES if _owners.exists(name)]))


@pytest.mark.parametrize("name", ["_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"])
@pytest.mark.parametrize("shapes, text", [
    (((2, 4, 33, 16), (2, 4, 3, 16), (2, 4, 33, 16)), r"value: shape 2x4x33x16; accepted: \(B, Hk, Sk, Dv\), 2x4x3x16"),
    (((2, 4, 33, 16), (2, 4, 33, 8), (2, 4, 33, 16)), r"key: shape 2x4x33x8; accepted: \(B, Hk, Sk, D\), 2x4x33x16"),
    (((2, 4, 33, 16), (1, 4, 33, 16), (1, 4, 33, 16)), r"key: shape 1x4x33x16; accepted: \(B, Hk, Sk, D\), 2x4x33x16"),
])  # fmt: skip
def test_shapes_are_named_as_they_were_given(name, shapes, text):
    more = [None, True] if "efficient" in name else []
    with pytest.raises(ValueError, match=text):
        getattr(fovea.torch.aten, name)(*(torch.randn(s) for s in shapes), *more)
