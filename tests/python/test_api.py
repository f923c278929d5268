# SPDX-License-Identifier: Apache-2.0
"""fovea's Python package: every option against plain NumPy formulas, every way to pass arrays in and out.

Most of it is in float64, where a right answer is right to eleven digits. What the numbers of each type come to is
checked by the case table of the C++ tests; here it is the keywords, layouts and libraries that are under test.
"""

import contextlib
import copy
import dis
import gc
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import fake_dlpack
import formulas
import fovea
from fake_dlpack import BareArray, FakeArray, VersionedArray
from fovea import _arrays, _problem
from fovea._abi import BACKWARD, FORWARD, OUT_OF_MEMORY
from fovea._problem import _Scratch

B, SQ, SK, HQ, HK, D, DV = 2, 19, 23, 4, 2, 8, 5
TIGHT = 1e-11
bfloat16 = np.dtype(ml_dtypes.bfloat16)
NAMES = fovea.Gradients._fields


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def qkv(dtype=np.float64, sq=SQ, sk=SK, batch=(B,), hq=HQ, hk=HK, d=D, dv=DV):
    q = normal(*batch, sq, hq, d, seed=1, dtype=dtype)
    k = normal(*batch, sk, hk, d, seed=2, dtype=dtype)
    v = normal(*batch, sk, hk, dv, seed=3, dtype=dtype)
    return q, k, v


def close(got, want, tolerance=TIGHT):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance)


def keep_of(p, seed, offset=0, rng="fovea", shape=(B, HQ, SQ, SK)):
    return fovea.dropout_mask(*shape, p, seed=seed, offset=offset, rng=rng)


RNG = np.random.default_rng(5)
BIAS = normal(B, HQ, SQ, SK, seed=6)
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625])
MASK = RNG.random((B, HQ, SQ, SK)) < 0.6
DEAD = MASK.copy()
DEAD[0, 1, 3] = False
INFINITE = np.where(MASK, BIAS, -np.inf)
KEEP_16 = 65536 / (65536 - round(0.25 * 65536))

# name: (options of fovea, options of the formulas)
OPTIONS = {
    "none": ({}, {}),
    "scale": (dict(scale=-0.7), dict(scale=-0.7)),
    "scale 0": (dict(scale=0.0), dict(scale=0.0)),
    "causal bottom right": (dict(causal=True, align="bottom_right"), dict(causal=True)),
    "causal top left": (dict(causal=True, align="top_left"), dict(causal=True, top_left=True)),
    "window": (dict(window=(5, 3), align="bottom_right"), dict(window=(5, 3))),
    "window left": (dict(window=(4, -1), align="top_left"), dict(window=(4, -1), top_left=True)),
    "window right": (dict(window=(-1, 0), align="top_left"), dict(window=(-1, 0), top_left=True)),
    "window and causal": (dict(window=(7, 9), causal=True, align="bottom_right"), dict(window=(7, 9), causal=True)),
    "softcap": (dict(softcap=1.5), dict(softcap=1.5)),
    "softcap as integer": (dict(softcap=2, scale=1), dict(softcap=2, scale=1)),
    "alibi per head": (dict(alibi_slopes=SLOPES, align="bottom_right"), dict(alibi_slopes=SLOPES)),
    "alibi per batch and head": (
        dict(alibi_slopes=np.stack([SLOPES, SLOPES[::-1]]), align="top_left"),
        dict(alibi_slopes=np.stack([SLOPES, SLOPES[::-1]]), top_left=True),
    ),
    "bias": (dict(bias=BIAS), dict(bias=BIAS)),
    "bias, a row of one": (dict(bias=BIAS[:1, :, :1]), dict(bias=BIAS[:1, :, :1])),
    "bias, two dimensions": (dict(bias=BIAS[0, 0]), dict(bias=BIAS[0, 0])),
    "bias, one number": (dict(bias=np.array([[0.5]])), dict(bias=np.array([[0.5]]))),
    "bias of float32": (dict(bias=BIAS.astype(np.float32)), dict(bias=BIAS.astype(np.float32))),
    "both biases": (dict(bias=BIAS[:, :1], bias2=BIAS[:1, :, :, :1]), dict(bias=BIAS[:, :1], bias2=BIAS[:1, :, :, :1])),
    "bias of -inf": (dict(bias=INFINITE), dict(bias=INFINITE)),
    "mask": (dict(mask=MASK), dict(mask=MASK)),
    "mask per key": (dict(mask=MASK[:, :1, :1]), dict(mask=MASK[:, :1, :1])),
    "dead rows": (dict(mask=DEAD), dict(mask=DEAD)),
    "sink": (dict(sink=SLOPES), dict(sink=SLOPES)),
    "sink and dead rows": (dict(sink=SLOPES, mask=DEAD), dict(sink=SLOPES, mask=DEAD)),
    "dropout": (
        dict(dropout_p=0.25, seed=7, offset=9),
        lambda: dict(keep=keep_of(0.25, 7, 9), keep_scale=KEEP_16),
    ),
    "dropout of PyTorch": (
        dict(dropout_p=0.3, seed=7, offset=8, rng="torch_mem_efficient"),
        lambda: dict(keep=keep_of(0.3, 7, 8, "torch_mem_efficient"), keep_scale=1 / np.float32(1 - np.float32(0.3))),
    ),
    "dropout of all": (dict(dropout_p=1.0, seed=1), lambda: dict(keep=np.zeros((B, HQ, SQ, SK)), keep_scale=0)),
    "deterministic": (dict(deterministic=True), {}),
    "everything": (
        dict(bias=BIAS[:1], bias2=BIAS[:, :, :1], mask=MASK, scale=0.4, causal=True, window=(9, -1), align="top_left",
             softcap=3.0, alibi_slopes=SLOPES, sink=SLOPES, dropout_p=0.25, seed=2**63 + 5, offset=2**40),
        lambda: dict(bias=BIAS[:1], bias2=BIAS[:, :, :1], mask=MASK, scale=0.4, causal=True, window=(9, -1),
                     top_left=True, softcap=3.0, alibi_slopes=SLOPES, sink=SLOPES,
                     keep=keep_of(0.25, 2**63 + 5, 2**40), keep_scale=KEEP_16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", OPTIONS)
def test_option(name, layout):
    ours, theirs = OPTIONS[name]
    theirs = theirs() if callable(theirs) else theirs
    # PyTorch's own factor is a float32; everything else is exact.
    tolerance = 1e-6 if "PyTorch" in name else TIGHT
    q, k, v = qkv()
    grad_out, grad_lse = normal(B, SQ, HQ, DV, seed=4), normal(B, HQ, SQ, seed=5)
    want = formulas.attention(q, k, v, grad_out, grad_lse, **theirs)

    def turn(x):
        return np.swapaxes(x, 1, 2) if layout == "bhsd" else x

    out, lse = fovea.attention(turn(q), turn(k), turn(v), layout=layout, return_lse=True, **ours)
    close(turn(out), want.out, tolerance)
    close(lse, want.lse, tolerance)
    grads = fovea.attention_backward(
        turn(grad_out), turn(q), turn(k), turn(v), out, lse, grad_lse=grad_lse, layout=layout, **ours
    )
    for gradient in NAMES:
        got = getattr(grads, gradient)
        if gradient not in want.grads:
            assert got is None
            continue
        is_bias32 = gradient == "bias" and name == "bias of float32"
        assert got.dtype == (np.float32 if is_bias32 else np.float64)
        got = turn(got) if gradient in "qkv" else got
        close(got, want.grads[gradient], 1e-6 if is_bias32 else tolerance)


def test_dead_rows_whose_gradients_are_not_finite():
    """Nothing comes through a row that meets no key, not even NaN."""
    q, k, v = qkv()
    grad_out, grad_lse = normal(B, SQ, HQ, DV, seed=4), normal(B, HQ, SQ, seed=5)
    out, lse = fovea.attention(q, k, v, mask=DEAD, return_lse=True)
    dead = np.isneginf(lse)
    assert dead.any()
    want = fovea.attention_backward(grad_out, q, k, v, out, lse, grad_lse=grad_lse, mask=DEAD)
    for spoilt in (np.nan, np.inf):
        grad_lse[dead] = spoilt
        np.swapaxes(grad_out, 1, 2)[dead] = spoilt
        got = fovea.attention_backward(grad_out, q, k, v, out, lse, grad_lse=grad_lse, mask=DEAD)
        for name in "qkv":
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16], ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_types(dtype, direction):
    """At most twice the error of the same formula with that type's roundings, in the maximum and in the mean."""
    q, k, v = qkv(dtype)
    grad_out = normal(B, SQ, HQ, DV, seed=4, dtype=dtype)
    want = formulas.attention(q, k, v, grad_out, causal=True)
    out, lse = fovea.attention(q, k, v, causal=True, align="bottom_right", return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == np.float32
    pairs = [(out, want.out)]
    if direction == "backward":
        grads = fovea.attention_backward(grad_out, q, k, v, out, lse, causal=True, align="bottom_right")
        assert all(getattr(grads, name).dtype == dtype for name in "qkv")
        pairs = [(getattr(grads, name), want.grads[name]) for name in "qkv"]
    # P and dS are rounded to the type, and so is the result: two roundings of numbers of the size of the result.
    rounding = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[np.dtype(dtype).name]
    for got, wanted in pairs:
        error = np.abs(got.astype(np.float64) - wanted)
        size = np.abs(wanted).max()
        assert error.max() <= 8 * rounding * size
        assert error.mean() <= 2 * rounding * size


# ---- shapes ----


def test_two_level_batch():
    b1, b2, s = 3, 2, 7
    q, k, v = qkv(batch=(b1, b2), sq=s, sk=s)
    bias = normal(b1, 1, HQ, s, s, seed=7)
    bias2 = normal(b1, b2, 1, 1, s, seed=8)
    mask = np.random.default_rng(1).random((b2, 1, 1, s)) < 0.7
    grad_out = normal(b1, b2, s, HQ, DV, seed=9)
    options = dict(bias=bias, bias2=bias2, mask=mask)
    want = formulas.attention(q, k, v, grad_out, **options)
    out, lse = fovea.attention(q, k, v, return_lse=True, **options)
    close(out, want.out)
    close(lse, want.lse)
    assert lse.shape == (b1, b2, HQ, s)
    grads = fovea.attention_backward(grad_out, q, k, v, out, lse, **options)
    for name in ("q", "k", "v", "bias", "bias2"):
        close(getattr(grads, name), want.grads[name])

    # The other layout, and k and v shared by the inner batch without a copy.
    turned = [np.swapaxes(x, -3, -2) for x in (q, k, v)]
    close(np.swapaxes(fovea.attention(*turned, layout="bhsd", **options), -3, -2), want.out)
    shared = [np.broadcast_to(x[:, :1], x.shape) for x in (k, v)]
    close(fovea.attention(q, *shared, **options), formulas.attention(q, *shared, **options).out)


def packed_problem(lengths_q=(5, 0, 9, 1), lengths_k=(7, 3, 9, 0)):
    cu_q, cu_k = (np.cumsum([0, *lengths], dtype=np.int32) for lengths in (lengths_q, lengths_k))
    q = normal(cu_q[-1], HQ, D, seed=1)
    k = normal(cu_k[-1], HK, D, seed=2)
    v = normal(cu_k[-1], HK, DV, seed=3)
    return q, k, v, cu_q, cu_k


def by_sequence(q, k, v, grad_out, cu_q, cu_k, bias=None, mask=None, keep=None, used_q=None, used_k=None, **options):
    """The formulas, a sequence at a time."""
    out = np.zeros((len(q), HQ, DV))
    lse = np.full((HQ, len(q)), -np.inf)
    grads = {"q": np.zeros_like(q), "k": np.zeros_like(k), "v": np.zeros_like(v)}
    if bias is not None:
        grads["bias"] = np.zeros_like(bias)
    if options.get("sink") is not None:
        grads["sink"] = np.zeros(HQ)
    for b in range(len(cu_q) - 1):
        nq = cu_q[b + 1] - cu_q[b] if used_q is None else used_q[b]
        nk = cu_k[b + 1] - cu_k[b] if used_k is None else used_k[b]
        rows, keys = slice(cu_q[b], cu_q[b] + nq), slice(cu_k[b], cu_k[b] + nk)
        part = dict(options)
        if bias is not None:
            at = b if bias.shape[0] > 1 else 0
            part["bias"] = bias[at, :, :nq, :nk]
        if mask is not None:
            part["mask"] = mask[b, :, :nq, :nk]
        if keep is not None:
            part["keep"] = keep[b, :, :nq, :nk]
        answer = formulas.attention(q[rows], k[keys], v[keys], grad_out[rows], **part)
        out[rows], lse[:, rows] = answer.out, answer.lse
        grads["q"][rows] = answer.grads["q"]
        grads["k"][keys] = answer.grads["k"]
        grads["v"][keys] = answer.grads["v"]
        if bias is not None:
            grads["bias"][at, :, :nq, :nk] += answer.grads["bias"]
        if "sink" in grads:
            grads["sink"] += answer.grads["sink"]
    return formulas.Answer(out, lse, grads)


@pytest.mark.parametrize("integer", [np.int32, np.int64])
def test_packed(integer):
    q, k, v, cu_q, cu_k = packed_problem()
    bias = normal(1, HQ, 9, 9, seed=4)
    mask = np.random.default_rng(2).random((4, 1, 9, 9)) < 0.8
    grad_out = normal(len(q), HQ, DV, seed=5)
    keep = keep_of(0.25, 3, shape=(4, HQ, 9, 9))
    want = by_sequence(
        q, k, v, grad_out, cu_q, cu_k, bias, mask, keep, causal=True, softcap=2.0, sink=SLOPES, keep_scale=KEEP_16
    )
    options = dict(
        bias=bias, mask=mask, causal=True, align="bottom_right", softcap=2.0, sink=SLOPES, dropout_p=0.25, seed=3,
        cu_seqlens_q=cu_q.astype(integer), cu_seqlens_k=cu_k.astype(integer), max_seqlen_q=9, max_seqlen_k=9,
    )  # fmt: skip
    out, lse = fovea.attention(q, k, v, return_lse=True, **options)
    close(out, want.out)
    close(lse, want.lse)
    assert lse.shape == (HQ, len(q))
    grads = fovea.attention_backward(grad_out, q, k, v, out, lse, **options)
    for name in ("q", "k", "v", "bias", "sink"):
        close(getattr(grads, name), want.grads[name])


def test_small_arguments_may_be_lists():
    """On the CPU: lengths and slopes as lists, int64 lengths and float64 slopes, which NumPy makes by itself."""
    q, k, v, cu_q, cu_k = (x.astype(np.float32) if x.dtype == np.float64 else x for x in packed_problem())
    slopes = [0.5, 0.3, 1, 0.0625]
    used_q, used_k = (4, 0, 9, 1), [7, 3, 2, 0]
    options = dict(align="bottom_right", causal=True)
    exact = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_q=np.array(used_q, np.int32),
                 seqused_k=np.array(used_k, np.int32), alibi_slopes=np.array(slopes, np.float32), **options)  # fmt: skip
    lists = dict(cu_seqlens_q=cu_q.tolist(), cu_seqlens_k=tuple(cu_k.tolist()), seqused_q=used_q, seqused_k=used_k,
                 alibi_slopes=slopes, **options)  # fmt: skip
    wide = dict(lists)
    wide.update({name: np.array(lists[name]) for name in ("seqused_q", "seqused_k", "alibi_slopes")})
    assert wide["alibi_slopes"].dtype == np.float64
    assert wide["seqused_q"].dtype == np.int64
    out, lse = fovea.attention(q, k, v, return_lse=True, **exact)
    grads = fovea.attention_backward(out, q, k, v, out, lse, **exact)
    assert out.any()
    for given in (lists, wide, {n: FakeArray(x) if isinstance(x, np.ndarray) else x for n, x in wide.items()}):
        assert np.array_equal(fovea.attention(q, k, v, **given), out)
        again = fovea.attention_backward(out, q, k, v, out, lse, **given)
        assert all(np.array_equal(getattr(again, name), getattr(grads, name)) for name in "qkv")
        assert fovea.explain(q, k, v, **given) == fovea.explain(q, k, v, **exact)
    doubles = [x.astype(np.float64) for x in (q, k, v)]  # slopes of float64 stay what they are
    exact["alibi_slopes"] = np.array(slopes)
    assert np.array_equal(fovea.attention(*doubles, **lists), fovea.attention(*doubles, **exact))


def test_packed_without_max_seqlen():
    q, k, v, cu_q, cu_k = packed_problem()
    want = by_sequence(q, k, v, np.zeros((len(q), HQ, DV)), cu_q, cu_k)
    close(fovea.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k), want.out)


def test_packed_rows_past_the_end():
    """New arrays are 0 (lse -inf) where no sequence is; given ones are left as they were."""
    q, k, v, cu_q, cu_k = packed_problem()
    want = by_sequence(q, k, v, np.zeros((len(q), HQ, DV)), cu_q, cu_k).out
    q, k, v = (np.concatenate([x, np.full((3, *x.shape[1:]), np.nan)]) for x in (q, k, v))
    options = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    out, lse = fovea.attention(q, k, v, return_lse=True, **options)
    close(out[:-3], want)
    assert not out[-3:].any()
    assert np.isneginf(lse[:, -3:]).all()
    given = np.full(out.shape, 7.0)
    assert fovea.attention(q, k, v, out=given, **options) is given
    close(given[:-3], want)
    assert (given[-3:] == 7).all()
    grads = fovea.attention_backward(np.ones_like(out), q, k, v, out, lse, **options)
    for name in "qkv":
        assert np.isfinite(getattr(grads, name)).all()
        assert not getattr(grads, name)[-3:].any()


def test_packed_two_level_batch():
    lengths = (3, 5, 2, 4, 1, 6)
    cu = np.cumsum([0, *lengths], dtype=np.int32)
    q, k, v = normal(cu[-1], HQ, D, seed=1), normal(cu[-1], HK, D, seed=2), normal(cu[-1], HK, DV, seed=3)
    bias = normal(3, 1, HQ, 6, 6, seed=4)  # shared by the inner batch of two
    out = fovea.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, bias=bias, batch_shape=(3, 2))
    flat = np.broadcast_to(bias, (3, 2, HQ, 6, 6)).reshape(6, HQ, 6, 6)
    close(out, by_sequence(q, k, v, np.zeros((len(q), HQ, DV)), cu, cu, flat).out)


def test_seqused():
    q, k, v = qkv()
    used_q, used_k = np.array([4, SQ], np.int32), np.array([SK, 6], np.int32)
    grad_out = normal(B, SQ, HQ, DV, seed=4)
    options = dict(seqused_q=used_q, seqused_k=used_k, causal=True, align="bottom_right")
    poisoned = [x.copy() for x in (q, k, v)]
    poisoned[0][0, 4:] = poisoned[1][1, 6:] = poisoned[2][1, 6:] = np.nan
    out, lse = fovea.attention(*poisoned, return_lse=True, **options)
    grads = fovea.attention_backward(grad_out, *poisoned, out, lse, **options)
    for b in range(B):
        rows, keys = slice(used_q[b]), slice(used_k[b])
        want = formulas.attention(q[b, rows], k[b, keys], v[b, keys], grad_out[b, rows], causal=True)
        close(out[b, rows], want.out)
        close(lse[b, :, rows], want.lse)
        close(grads.q[b, rows], want.grads["q"])
        close(grads.k[b, keys], want.grads["k"])
        close(grads.v[b, keys], want.grads["v"])
    assert not out[0, 4:].any()
    assert not grads.q[0, 4:].any()
    assert not grads.k[1, 6:].any()


def test_pack():
    sequences = [normal(n, HQ, D, seed=n, dtype=np.float32) for n in (3, 0, 5)]
    packed, cu_seqlens, longest = fovea.pack(sequences)
    assert packed.dtype == np.float32
    assert cu_seqlens.dtype == np.int32
    assert cu_seqlens.tolist() == [0, 3, 3, 8]
    assert longest == 5
    assert np.array_equal(packed, np.concatenate(sequences))
    out = fovea.attention(packed, packed, packed, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True)
    alone = fovea.attention(*[sequences[2][None]] * 3, causal=True)
    close(out[3:], alone[0], 1e-6)


def test_unpack():
    """The inverse of pack(): views, of arrays and of results."""
    sequences = [normal(n, HQ, D, seed=n) for n in (3, 0, 5)]
    packed, cu_seqlens, _ = fovea.pack(sequences)
    for ends in (cu_seqlens, cu_seqlens.tolist(), FakeArray(cu_seqlens)):
        parts = fovea.unpack(packed, ends)
        assert len(parts) == 3
        assert all(np.array_equal(part, sequence) for part, sequence in zip(parts, sequences))
        assert parts[2].base is not None
    _, lse = fovea.attention(packed, packed, packed, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, return_lse=True)
    alone = fovea.attention(*[sequences[2][None]] * 3, return_lse=True)[1]
    close(fovea.unpack(lse.T, cu_seqlens)[2].T, alone[0])
    assert fovea.unpack(packed, [0]) == []


@pytest.mark.parametrize("kind", [FakeArray, VersionedArray])
def test_pack_of_another_library(kind):
    packed, cu_seqlens, _ = fovea.pack([kind(normal(n, HQ, D, seed=n).astype(bfloat16)) for n in (3, 2)])
    assert isinstance(packed, FakeArray)
    assert packed.array.dtype == bfloat16
    assert np.array_equal(packed.array[3:], normal(2, HQ, D, seed=2).astype(bfloat16))
    mixed, _, _ = fovea.pack([packed.array[:3], kind(packed.array[3:])])
    assert np.array_equal(mixed, packed.array)
    assert cu_seqlens.array.tolist() == [0, 3, 5]


@pytest.mark.parametrize("shape", [(0, 5, 5, 2), (2, 0, 5, 2), (2, 5, 0, 2), (2, 5, 5, 0)], ids=str)
def test_empty(shape):
    b, sq, sk, h = shape
    q, k, v = normal(b, sq, h, 4), normal(b, sk, h, 4), normal(b, sk, h, 4)
    out, lse = fovea.attention(q, k, v, return_lse=True)
    assert out.shape == q.shape
    assert not out.any() or sk
    assert np.isneginf(lse).all() or sk
    grads = fovea.attention_backward(np.ones_like(out), q, k, v, out, lse)
    assert all(getattr(grads, name).shape == x.shape for name, x in (("q", q), ("k", k), ("v", v)))
    assert not grads.k.any() or sq


# ---- memory ----


def strided(array, how):
    """The same numbers in memory laid out otherwise."""
    if how == "read-only":
        array = array.copy()
        array.flags.writeable = False
    elif how == "negative strides":
        array = array[::-1, ::-1, :, ::-1].copy()[::-1, ::-1, :, ::-1]
        assert min(array.strides) < 0
    elif how == "padded rows":
        wide = np.full((*array.shape[:-1], array.shape[-1] + 3), np.nan, array.dtype)
        wide[..., : array.shape[-1]] = array
        array = wide[..., : array.shape[-1]]
    elif how == "every second":
        wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), np.nan, array.dtype)
        wide[..., ::2] = array
        array = wide[..., ::2]
    elif how == "Fortran order":
        array = np.asfortranarray(array)
    return array


@pytest.mark.parametrize("how", ["read-only", "negative strides", "padded rows", "every second", "Fortran order"])
def test_input_memory(how):
    q, k, v = qkv()
    grad_out = normal(B, SQ, HQ, DV, seed=4)
    options = dict(bias=BIAS, mask=MASK)
    want = formulas.attention(q, k, v, grad_out, **options)
    options = {name: strided(array, how) for name, array in options.items() if how != "padded rows"}
    if how == "padded rows":
        padded = np.full((B, HQ, SQ, SK + 1), np.nan)
        padded[..., :SK] = BIAS
        options = dict(bias=padded[..., :SK], mask=MASK)
    q, k, v, grad_out = (strided(x, how) for x in (q, k, v, grad_out))
    out, lse = fovea.attention(q, k, v, return_lse=True, **options)
    close(out, want.out)
    out, lse = strided(out, how), strided(lse[..., None], how)[..., 0] if how != "negative strides" else lse
    grads = fovea.attention_backward(grad_out, q, k, v, out, lse, **options)
    for name in ("q", "k", "v", "bias"):
        close(getattr(grads, name), want.grads[name])


def test_broadcast_views_are_inputs():
    q, k, v = qkv()
    k = np.broadcast_to(k[:1, :, :1], (B, SK, HK, D))
    bias = np.broadcast_to(BIAS[:1, :1], BIAS.shape)
    want = formulas.attention(q, k, v, bias=bias)
    close(fovea.attention(q, k, v, bias=bias), want.out)


def test_packed_qkv_and_its_gradient():
    qkv_ = normal(B, SQ, 3, HQ, D, seed=1)
    grad_qkv = np.full(qkv_.shape, np.nan)
    q, k, v = (qkv_[:, :, i] for i in range(3))
    grad_out = normal(B, SQ, HQ, D, seed=2)
    want = formulas.attention(q, k, v, grad_out)
    out, lse = fovea.attention(q, k, v, return_lse=True)
    into = {name: grad_qkv[:, :, i] for i, name in enumerate("qkv")}
    grads = fovea.attention_backward(grad_out, q, k, v, out, lse, grads_out=into)
    for i, name in enumerate("qkv"):
        assert getattr(grads, name) is into[name]
        close(grad_qkv[:, :, i], want.grads[name])


def test_out():
    q, k, v = qkv()
    want = formulas.attention(q, k, v).out
    wide = np.full((B, SQ, HQ, DV + 2), 7.0)
    out = wide[..., 1:-1]
    assert fovea.attention(q, k, v, out=out) is out
    close(out, want)
    assert (wide[..., 0] == 7).all()
    assert (wide[..., -1] == 7).all()
    out, lse = fovea.attention(q, k, v, out=out, return_lse=True)
    assert lse.shape == (B, HQ, SQ)
    turned = np.empty((B, HQ, SQ, DV))
    assert fovea.attention(*(x.swapaxes(1, 2) for x in (q, k, v)), layout="bhsd", out=turned) is turned
    close(turned.swapaxes(1, 2), want)


def test_layout_of_results():
    """Rows of a result lie as those of its model do, so that turning it back costs nothing."""
    q, k, v = qkv()
    turned = [x.swapaxes(1, 2) for x in (q, k, v)]
    assert fovea.attention(*turned, layout="bhsd").swapaxes(1, 2).flags.c_contiguous
    assert fovea.attention(*map(np.ascontiguousarray, turned), layout="bhsd").flags.c_contiguous
    assert fovea.attention(q, k, v).flags.c_contiguous
    assert fovea.attention(*(np.ascontiguousarray(x).swapaxes(1, 2) for x in turned)).swapaxes(1, 2).flags.c_contiguous


# ---- gradients ----


SUBSETS = [["q"], ["k"], ["v"], ["bias"], ["bias2"], ["sink"], ["k", "v"], ["q", "bias"], ["v", "bias2", "sink"]]


@pytest.mark.parametrize("need", SUBSETS, ids="-".join)
def test_need(need):
    q, k, v = qkv()
    options = dict(bias=BIAS, bias2=BIAS[:1, :1], sink=SLOPES)
    grad_out = normal(B, SQ, HQ, DV, seed=4)
    want = formulas.attention(q, k, v, grad_out, **options)
    out, lse = fovea.attention(q, k, v, return_lse=True, **options)
    for spelled in (need, tuple(need), ",".join(need), (name for name in need)):
        grads = fovea.attention_backward(grad_out, q, k, v, out, lse, need=spelled, **options)
        for name in NAMES:
            if name in need:
                close(getattr(grads, name), want.grads[name])
            else:
                assert getattr(grads, name) is None


def test_grads_out():
    q, k, v = qkv()
    grad_out = normal(B, SQ, HQ, DV, seed=4)
    out, lse = fovea.attention(q, k, v, bias=BIAS, return_lse=True)
    want = fovea.attention_backward(grad_out, q, k, v, out, lse, bias=BIAS)
    given = fovea.Gradients(q=np.full(q.shape, np.nan), bias=np.full(BIAS.shape, np.nan))
    grads = fovea.attention_backward(grad_out, q, k, v, out, lse, bias=BIAS, grads_out=given)
    assert grads.q is given.q
    assert grads.bias is given.bias
    for name in ("q", "k", "v", "bias"):
        assert np.array_equal(getattr(grads, name), getattr(want, name))
    only = {"bias": np.full(BIAS.shape, np.nan)}
    grads = fovea.attention_backward(grad_out, q, k, v, out, lse, bias=BIAS, need="bias", grads_out=only)
    assert grads.q is None
    assert np.array_equal(only["bias"], want.bias)


def test_gradients_are_a_tuple_and_show_shapes():
    q, k, v = qkv(np.float32)
    out, lse = fovea.attention(q, k, v, return_lse=True)
    grads = fovea.attention_backward(np.ones_like(out), q, k, v, out, lse, need="q,v")
    grad_q, grad_k, grad_v, *others = grads
    assert grad_q is grads.q
    assert grad_v is grads.v
    assert [grad_k, *others] == [None] * 4
    assert repr(grads) == (
        f"Gradients(q=<{B}x{SQ}x{HQ}x{D} float32>, k=None, v=<{B}x{SK}x{HK}x{DV} float32>, "
        "bias=None, bias2=None, sink=None)"
    )
    assert "q=<object>" in repr(fovea.Gradients(q=object()))


# ---- dropout ----


def masks_from_the_kernel(dropout_p, rng, seed, offset, shape=(2, 3, 37, 21)):
    """What attention drops, read out of the forward (v one-hot) and of the backward (grad_v, grad_out one-hot)."""
    b, h, sq, sk = shape
    q, k = np.zeros((b, sq, h, 4)), np.zeros((b, sk, h, 4))
    options = dict(dropout_p=dropout_p, rng=rng, seed=seed, offset=offset)
    v = np.zeros((b, sk, h, sk))
    v[:, np.arange(sk), :, np.arange(sk)] = 1
    forward = fovea.attention(q, k, v, **options).transpose(0, 2, 1, 3)
    v = np.zeros((b, sk, h, sq))
    grad_out = np.zeros((b, sq, h, sq))
    grad_out[:, np.arange(sq), :, np.arange(sq)] = 1
    out, lse = fovea.attention(q, k, v, return_lse=True, **options)
    grads = fovea.attention_backward(grad_out, q, k, v, out, lse, need="v", **options)
    return forward > 0, grads.v.transpose(0, 2, 3, 1) > 0


@pytest.mark.parametrize("rng", ["fovea", "torch_mem_efficient"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5, 0.9])
def test_dropout_mask_is_what_attention_uses(rng, dropout_p):
    shape, seed, offset = (2, 3, 37, 21), 2**63 + 11, 12345678901234
    mask = fovea.dropout_mask(*shape, dropout_p, seed=seed, offset=offset, rng=rng)
    assert mask.dtype == np.bool_
    assert mask.shape == shape
    assert abs(mask.mean() - (1 - dropout_p)) < 0.05
    forward, backward = masks_from_the_kernel(dropout_p, rng, seed, offset, shape)
    assert np.array_equal(forward, mask)
    assert np.array_equal(backward, mask)


def test_dropout_known_answers():
    """From the specification: element (seed, offset, n, i, j) has the 16-bit value u, and is kept iff u >= T."""
    for seed, offset, n, i, j, u in [
        (0, 0, 0, 0, 0, 9096), (0, 0, 0, 0, 8, 1702), (0, 0, 0, 8, 0, 31516), (0, 0, 0, 8, 8, 25864),
        (1, 0, 0, 0, 0, 18188), (0, 1, 0, 0, 0, 63250), (0, 0, 1, 0, 0, 47424), (42, 7, 5, 100, 200, 45306),
    ]:  # fmt: skip
        for threshold, kept in ((u, True), (u + 1, False)):
            mask = fovea.dropout_mask(1, n + 1, i + 1, j + 1, threshold / 65536, seed=seed, offset=offset)
            assert mask[0, n, i, j] == kept


@pytest.mark.parametrize("seed", [3, -1, np.int64(-1), np.uint64(2**64 - 1), 2**64 - 1], ids=repr)
def test_seeds(seed):
    """Integers of up to 64 bits, negative ones as their two's complement; arrays of one are the same."""
    q, k, v = qkv()
    number = int(seed) % 2**64
    want = fovea.attention(q, k, v, dropout_p=0.5, seed=number, offset=number)
    assert np.array_equal(fovea.attention(q, k, v, dropout_p=0.5, seed=seed, offset=seed), want)
    for array in (
        np.array([number], np.uint64),
        np.array(number, np.uint64),
        np.array([number], np.uint64).view(np.int64),
    ):
        assert np.array_equal(fovea.attention(q, k, v, dropout_p=0.5, seed=array, offset=array), want)
        fake = FakeArray(array)
        assert np.array_equal(fovea.attention(q, k, v, dropout_p=0.5, seed=fake, offset=fake), want)
        assert np.array_equal(
            fovea.dropout_mask(1, 2, 3, 4, 0.5, seed=array, offset=fake),
            fovea.dropout_mask(1, 2, 3, 4, 0.5, seed=number, offset=number),
        )
    assert not np.array_equal(fovea.attention(q, k, v, dropout_p=0.5, seed=number ^ 1, offset=number), want)


# ---- libraries ----


def in_library(kind, **arrays):
    return {name: kind(array) for name, array in arrays.items()}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, bfloat16], ids=str)
@pytest.mark.parametrize("kind", [FakeArray, VersionedArray, BareArray])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_dlpack(kind, dtype, layout):
    q, k, v = qkv(dtype)
    if layout == "bhsd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    bias = BIAS[:1].astype(dtype if dtype == np.float64 else np.float32)
    options = dict(layout=layout, bias=bias, mask=MASK)
    want, want_lse = fovea.attention(q, k, v, return_lse=True, **options)
    theirs = {**options, **in_library(kind, bias=bias, mask=MASK)}
    out, lse = fovea.attention(kind(q), kind(k), kind(v), return_lse=True, **theirs)
    assert isinstance(out, FakeArray)
    assert isinstance(lse, FakeArray)
    assert out.array.dtype == dtype
    assert np.array_equal(out.array, want)
    assert np.array_equal(lse.array, want_lse)
    grad_out = np.ones_like(want)
    want_grads = fovea.attention_backward(grad_out, q, k, v, want, want_lse, **options)
    grads = fovea.attention_backward(kind(grad_out), kind(q), kind(k), kind(v), out, lse, **theirs)
    for name in ("q", "k", "v", "bias"):
        assert isinstance(getattr(grads, name), FakeArray)
        assert getattr(grads, name).array.dtype == getattr(want_grads, name).dtype
        assert np.array_equal(getattr(grads, name).array, getattr(want_grads, name))


def test_dlpack_memory_outlives_the_call():
    """Results own their memory, whatever is collected in between."""
    q, k, v = qkv(bfloat16)
    want = fovea.attention(q, k, v)
    outs = [fovea.attention(FakeArray(q), FakeArray(k), FakeArray(v)) for _ in range(20)]
    gc.collect()
    noise = [np.full(want.shape, 3.0) for _ in range(50)]
    assert all(np.array_equal(out.array, want) for out in outs)
    del noise


def test_dlpack_memory_is_held_during_the_call():
    """A capsule is what keeps its memory: here it is poisoned as soon as the capsule is dropped."""

    class Lent(FakeArray):
        def __dlpack__(self, **options):
            lent = FakeArray(self.array.copy())
            lent.on_drop = lambda: lent.array.fill(np.nan)
            self.alive.append(lent)
            return lent.__dlpack__(**options)

    q, k, v = qkv()
    assert np.array_equal(fovea.attention(Lent(q), Lent(k), Lent(v)), fovea.attention(q, k, v))
    lent = Lent(q[0])
    fovea.pack([lent])
    assert np.isnan(lent.alive[0].array).all()  # it was given back


def test_dlpack_outputs():
    q, k, v = qkv(bfloat16)
    want, lse = fovea.attention(q, k, v, return_lse=True)
    out = FakeArray(np.zeros_like(want))
    assert fovea.attention(q, k, v, out=out) is out
    assert np.array_equal(out.array, want)
    into = {"k": VersionedArray(np.zeros_like(k))}
    grads = fovea.attention_backward(np.ones_like(want), q, k, v, want, lse, grads_out=into)
    assert grads.k is into["k"]
    assert into["k"].array.any()
    assert isinstance(grads.q, np.ndarray)


def test_libraries_can_be_mixed():
    q, k, v = qkv()
    want = fovea.attention(q, k, v, mask=MASK)
    out = fovea.attention(q, FakeArray(k), VersionedArray(v), mask=FakeArray(MASK))
    assert isinstance(out, np.ndarray)
    assert np.array_equal(out, want)
    assert isinstance(fovea.attention(FakeArray(q), k, v, mask=MASK), FakeArray)


class Interface:
    """Has __array_interface__ and nothing else."""

    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self._keep = array


def test_array_interface():
    q, k, v = qkv()
    want = fovea.attention(q, k, v)
    out = fovea.attention(Interface(q), Interface(k), Interface(v))
    assert isinstance(out, np.ndarray)
    assert np.array_equal(out, want)


def test_subclasses_of_ndarray(tmp_path):
    q, k, v = qkv()
    mapped = np.memmap(tmp_path / "q", np.float64, "w+", shape=q.shape)
    mapped[...] = q
    out = fovea.attention(mapped, k, v)
    assert type(out) is np.ndarray
    assert np.array_equal(out, fovea.attention(q, k, v))


def test_array_namespace():
    """Where an array names its library itself (the array API standard), that library's from_dlpack is taken."""

    class Named(FakeArray):
        def __array_namespace__(self):
            return fake_dlpack

    Named.__module__ = "elsewhere"
    q, k, v = qkv()
    assert isinstance(fovea.attention(Named(q), k, v), FakeArray)


def test_library_without_from_dlpack():
    class Stray(FakeArray):
        pass

    Stray.__module__ = "no.such.module"
    q, k, v = qkv()
    assert isinstance(fovea.attention(Stray(q), k, v), np.ndarray)
    q, k, v = qkv(bfloat16)
    assert fovea.attention(Stray(q), k, v).dtype == bfloat16


# ---- Attention ----


def test_attention_object():
    q, k, v = qkv()
    grad_out = normal(B, SQ, HQ, DV, seed=4)
    options = dict(causal=True, align="top_left", dropout_p=0.2, seed=4)
    attend = fovea.Attention(**options)
    out, lse = attend(q, k, v, bias=BIAS, return_lse=True)
    want, want_lse = fovea.attention(q, k, v, bias=BIAS, return_lse=True, **options)
    assert np.array_equal(out, want)
    assert np.array_equal(lse, want_lse)
    assert np.array_equal(attend(q, k, v, bias=BIAS), want)
    grads = attend.backward(grad_out, q, k, v, out, lse, bias=BIAS, need="q,bias")
    want_grads = fovea.attention_backward(grad_out, q, k, v, out, lse, bias=BIAS, **options)
    assert np.array_equal(grads.q, want_grads.q)
    assert np.array_equal(grads.bias, want_grads.bias)
    assert grads.k is None
    assert "dropout=0.2" in attend.explain(q, k, v, bias=BIAS)
    assert attend.options == options
    assert repr(attend) == "fovea.Attention(causal=True, align='top_left', dropout_p=0.2, seed=4)"
    given = np.empty_like(out)
    assert attend(q, k, v, bias=BIAS, out=given) is given


def test_attention_object_rejects_changes():
    q, k, v = qkv()
    attend = fovea.Attention(causal=True, align="top_left", bias=BIAS)
    with pytest.raises(TypeError, match=r"bias: fixed when this Attention was made; with_\(bias=\.\.\.\)"):
        attend(q, k, v, bias=BIAS)
    with pytest.raises(TypeError, match="causal: fixed when"):
        attend.backward(q, q, k, v, q, q, causal=True)
    with pytest.raises(TypeError, match=r"scale: not accepted in a call; with_\(scale=\.\.\.\) makes"):
        attend(q, k, v, scale=1.0)
    for call in (lambda: attend(q, k, v, scael=1.0), lambda: fovea.Attention(scael=1.0)):
        with pytest.raises(TypeError, match=r"scael: not an option; did you mean scale\?"):
            call()
    with pytest.raises(ValueError, match=r"seed: None with dropout_p=0\.1; accepted: an integer"):
        fovea.Attention(dropout_p=0.1)
    with pytest.raises(AttributeError, match=r"causl: neither an option nor a method of fovea.Attention; did you mean causal\?"):
        attend.causl  # noqa: B018
    with pytest.raises(AttributeError, match=r"causl: not an option, and .* fixed when .* made; did you mean causal\?"):
        attend.causl = True
    with pytest.raises(AttributeError, match=r"is_causal: not an option, .*; causal=True, with align="):
        attend.is_causal = True
    with pytest.raises(AttributeError, match=r"xyzzy: not an option, .*; accepted: bias, bias2, mask"):
        attend.xyzzy = True
    with pytest.raises(AttributeError, match=r"causal: fixed when this Attention was made; with_\(causal=\.\.\.\)"):
        attend.causal = False
    with pytest.raises(AttributeError, match=r"softcap: fixed when .* with_\(softcap"):
        attend.softcap = 30.0  # not given before
    assert attend.causal is True and attend.softcap == 0
    attend.options["causal"] = False  # a copy
    assert attend.options["causal"] is True


def test_attention_object_of_a_class_of_ones_own():
    class Counting(fovea.Attention):
        calls = 0

        def __call__(self, *arguments, **options):
            self.calls += 1
            self.last = arguments
            return super().__call__(*arguments, **options)

    attend = Counting(causal=True, align="top_left")
    attend(*qkv())
    assert attend.calls == 1 and len(attend.last) == 3
    with pytest.raises(AttributeError, match=r"causl: .* did you mean causal\?"):
        attend.causl = True


def test_attention_object_shows_its_options():
    attend = fovea.Attention(causal=True, softcap=30.0)
    assert (attend.causal, attend.softcap) == (True, 30.0)
    assert (attend.scale, attend.window, attend.bias) == (None, (-1, -1), None)
    assert "window" in dir(attend)
    assert "explain" in dir(attend)
    assert copy.copy(attend).softcap == 30.0


def test_attention_object_with_changes():
    q, k, v = qkv()
    attend = fovea.Attention(dropout_p=0.5, seed=1)
    step = attend.with_(offset=3)
    assert np.array_equal(step(q, k, v), fovea.attention(q, k, v, dropout_p=0.5, seed=1, offset=3))
    assert np.array_equal(attend(q, k, v), fovea.attention(q, k, v, dropout_p=0.5, seed=1))


# ---- the rest ----


def test_align_has_to_be_said_only_where_it_matters():
    q, k, v = qkv()
    fovea.attention(q, k, v)
    same = qkv(sk=SQ)
    fovea.attention(*same, causal=True, window=(3, 3), alibi_slopes=SLOPES)
    want = formulas.attention(q, k, v, causal=True).out
    close(fovea.attention(q, k, v, causal=True, align="bottom_right"), want)
    q, k, v, cu_q, _ = packed_problem(lengths_k=(5, 0, 9, 1))
    fovea.attention(q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_q.copy())


def test_backends_and_reference():
    listed = fovea.backends()
    assert listed["cpu"] == "available"
    assert listed["reference"] == "available"
    q, k, v = qkv()
    for name in ("cpu", "reference"):
        close(fovea.attention(q, k, v, backend=name), formulas.attention(q, k, v).out)


def test_explain():
    q, k, v = qkv(np.float32)
    text = fovea.explain(q, k, v, causal=True, align="top_left", softcap=5.0, bias=BIAS.astype(np.float32))
    assert f"fwd b={B} hq={HQ} hk={HK}" in text
    assert "causal" in text
    assert "softcap=5" in text
    assert "cpu" in text
    assert "reference" in text
    assert "lse" in fovea.explain(q, k, v, return_lse=True).splitlines()[0].split()
    backward = fovea.explain(q, k, v, direction="backward", need="v", grad_lse=np.ones((B, HQ, SQ), np.float32))
    assert f"bwd b={B}" in backward
    assert "need=v" in backward
    assert "dlse" in backward
    assert fovea.explain(q, k, v, need="v", grad_lse=np.ones((B, HQ, SQ), np.float32)) == backward
    assert "bwd" in fovea.explain(q, k, v, grad_lse=np.ones((B, HQ, SQ), np.float32)).splitlines()[0]
    assert "need=q" in fovea.Attention(causal=True, align="top_left").explain(q, k, v, need="q")
    line = fovea.explain("fwd b=2 hq=4 hk=2 sq=19 sk=23 d=8 fp32 causal")
    assert "fwd b=2 hq=4 hk=2" in line
    packed_q, packed_k, packed_v, cu_q, cu_k = packed_problem()
    assert "seqs_q=5,0,9,1" in fovea.explain(packed_q, packed_k, packed_v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    assert "det" in fovea.explain(q, k, v, deterministic=True).splitlines()[0].split()


def test_explain_for_a_gpu_that_need_not_be_there():
    q, k, v = qkv(np.float32)
    text = fovea.explain(q, k, v, bias=BIAS.astype(np.float32), need="bias", arch="sm_90")
    first, second, *_ = text.splitlines()
    assert first.startswith(f"problem: bwd b={B} hq={HQ}") and "need=bias" in first and first.endswith("device=cuda")
    assert second.startswith("cuda: used: for sm_90: ") and "sm90_bias_gradient: fp32" in second
    assert fovea.explain(first.removeprefix("problem: "), arch="sm_90") == text
    assert "cuda: used: generic_forward for sm_80" in fovea.Attention().explain(q, k, v, arch="sm_80")
    assert "cuda: not used: q: fp64 on a CUDA device" in fovea.explain("fwd sq=2 d=4 fp64", arch="sm_90")
    with pytest.raises(ValueError, match="architecture: 'sm_9'; accepted: sm_80, "):
        fovea.explain("fwd sq=2 d=4", arch="sm_9")
    with pytest.raises(TypeError, match="arch: 90; accepted: an architecture's name, such as 'sm_90'"):
        fovea.explain("fwd sq=2 d=4", arch=90)
    with pytest.raises(TypeError, match="arch: explain\\(\\) without a problem"):
        fovea.explain(arch="sm_90")
    with pytest.raises(TypeError, match=r"archi: not an option; did you mean arch\?"):
        fovea.explain(q, k, v, archi="sm_90")


def test_explain_is_never_cut():
    lengths = np.random.default_rng(0).integers(1, 9, 3000)
    cu_seqlens = np.cumsum([0, *lengths], dtype=np.int32)
    q = np.zeros((cu_seqlens[-1], 1, 4), np.float32)
    text = fovea.explain(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    assert len(text) > 4096
    assert text.splitlines()[-1].startswith("workspace: ")


def test_explain_the_machine():
    text = fovea.explain()
    assert re.search(rf"^fovea +{re.escape(fovea.__version__)}$", text, re.M)
    assert re.search(r"^library +/.*libfovea\.so", text, re.M)
    assert re.search(rf"^threads +{fovea.num_threads()} ", text, re.M)
    assert re.search(r"^backend +cpu +available$", text, re.M)
    assert re.search(r"^instruction set +\w+ +in use$", text, re.M)
    assert re.search(r"^FOVEA_NVRTC +not set +NVRTC's file or folder$", text, re.M)
    assert {line.split()[0] for line in text.splitlines()} >= {"GPU", "NVRTC", "kernel"}
    done = subprocess.run(
        [sys.executable, "-c", "import fovea; print(fovea.explain())"],
        env={**os.environ, "FOVEA_KERNEL": "sm75", "FOVEA_LOG": "jit"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert re.search(r"^FOVEA_KERNEL +REFUSED +'sm75'; accepted: generic, sm80, sm90$", done.stdout, re.M)
    assert re.search(r"^FOVEA_LOG +jit +jit: a line for each kernel", done.stdout, re.M)


def test_explain_says_how_a_bias_lies_where_its_line_cannot():
    q, k, v = qkv(np.float32)
    bias = BIAS.astype(np.float32)
    assert "strides" not in fovea.explain(q, k, v, bias=bias)
    permuted = np.ascontiguousarray(bias.swapaxes(-1, -2)).swapaxes(-1, -2)
    lines = fovea.explain(q, k, v, bias=permuted).splitlines()
    rows = bias.shape[-2]
    assert lines[0] == fovea.explain(q, k, v, bias=bias).splitlines()[0]
    assert re.fullmatch(rf"bias: strides of .*, 1, {rows} elements along b1, b2, h, q, k, where the line means it contiguous", lines[1])


def test_prepare_refuses_what_a_call_would():
    """On the CPU there is nothing else to it; tests/gpu has the rest."""
    q, k, v = qkv(np.float32)
    assert fovea.prepare(q, k, v, causal=True, align="top_left", return_lse=True) is None
    assert fovea.prepare(q, k, v, direction="backward", need="q", softcap=5.0) is None
    assert fovea.Attention(softcap=5.0).prepare(q, k, v, need="bias", bias=BIAS.astype(np.float32)) is None
    with pytest.raises(ValueError, match="k: shape"):
        fovea.prepare(q, k[:, :, :, 1:], v)
    with pytest.raises(ValueError, match="direction: 'both'"):
        fovea.prepare(q, k, v, direction="both")
    with pytest.raises(TypeError, match="casual: not an option; did you mean causal"):
        fovea.prepare(q, k, v, casual=True)


def test_version():
    assert [part.isdigit() for part in fovea.__version__.split(".")] == [True] * 3


def test_signatures_agree():
    """Whatever the forward takes the backward takes, with the same default."""
    forward, backward = fovea.attention.__kwdefaults__, fovea.attention_backward.__kwdefaults__
    assert set(forward) - set(backward) == {"return_lse", "out", "lse"}
    assert set(backward) - set(forward) == {"grad_lse", "need", "grads_out"}
    each = {"accumulate"}  # of their own results
    assert all(forward[name] == backward[name] for name in set(forward) & set(backward) - each)


def test_everything_is_exported():
    assert set(fovea.__all__) <= set(dir(fovea))
    assert all(getattr(fovea, name).__doc__ for name in fovea.__all__)
    assert all(getattr(fovea, name).__module__ == "fovea" for name in fovea.__all__)
    attend = pickle.loads(pickle.dumps(fovea.Attention(causal=True)))
    assert attend.options == dict(causal=True) and b"_api" not in pickle.dumps(attend)


class Device2:
    """Stands for PyTorch's memory on two CUDA devices, of which one is current."""

    def __init__(self):
        self.current, self.entered = 0, []

    def current_device(self):
        return self.current

    @contextlib.contextmanager
    def on(self, index):
        before, self.current = self.current, index
        self.entered.append(index)
        yield
        self.current = before

    def owns(self, array):
        return False


def test_arrays_of_another_device_than_the_current_one():
    """PyTorch exports tensors of its current device alone: an array is read, and a result handed over, with its device
    as the current one, and the current device is then what it was."""
    memory = Device2()

    class Tensor(VersionedArray):
        def __dlpack_device__(self):
            return (2, 1)

        def __dlpack__(self, *, stream, **options):
            if memory.current != 1:
                raise BufferError("Can't export tensors on a different CUDA device index")
            return super().__dlpack__(**options)

    array = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
    place = _arrays.Place(1, 0, memory)
    assert _arrays.read("q", array, place).shape == (2, 3)
    assert memory.current == 0 and memory.entered == [0, 1]
    with pytest.raises(ValueError, match="a Tensor that does not give its memory away: Can't export"):
        _arrays.read("q", array, _arrays.Place(1, 0, type("Stuck", (Device2,), {"on": lambda *_: contextlib.nullcontext()})()))

    class Jax(VersionedArray):
        __dlpack_device__ = Tensor.__dlpack_device__

        def __dlpack__(self, *, stream, **options):
            memory.current = 1  # as JAX leaves it
            return super().__dlpack__(**options)

    assert _arrays.read("q", Jax(np.arange(6, dtype=np.float32).reshape(2, 3)), place).shape == (2, 3)
    assert memory.current == 0

    seen = []
    maker = _arrays.Maker("q", type("Elsewhere", (), {"__array_namespace__": lambda self: types.SimpleNamespace(
        from_dlpack=lambda x: seen.append(memory.current))})(), place)  # fmt: skip
    maker._hand_over(None)
    assert seen == [1] and memory.current == 0


def test_the_longest_used_length_is_enough():
    """max_seqlen may be the longest used length, which is less than the longest span of cu_seqlens: that is what callers
    with a cache know. Biases are then as small."""
    ends_q, ends_k, used_q, used_k = [0, 9, 16, 20], [0, 12, 20, 31], [4, 5, 3], [7, 2, 6]
    q, k, v = normal(20, HQ, D, seed=1), normal(31, HK, D, seed=2), normal(31, HK, DV, seed=3)
    bias = normal(1, HQ, 12, 12, seed=4)
    options = dict(cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, seqused_q=used_q, seqused_k=used_k, causal=True,
                   align="bottom_right")  # fmt: skip
    results = []
    for longest_q, longest_k in ((9, 12), (5, 7)):
        given = dict(max_seqlen_q=longest_q, max_seqlen_k=longest_k, bias=bias[..., :longest_q, :longest_k])
        out, lse = fovea.attention(q, k, v, return_lse=True, **options, **given)
        grads = fovea.attention_backward(np.ones_like(out), q, k, v, out, lse, **options, **given)
        results.append([out, lse, grads.q, grads.k, grads.v, grads.bias[..., :5, :7]])
    for whole, used in zip(*results):
        close(used, whole)
    for changes, said in (
        (dict(max_seqlen_q=4), "max_seqlen_q: 4; accepted: at least the longest sequence of seqused_q, 5"),
        (dict(max_seqlen_k=6), "max_seqlen_k: 6; accepted: at least the longest sequence of seqused_k, 7"),
        (dict(max_seqlen_k=11, seqused_k=None), "max_seqlen_k: 11; accepted: at least the longest sequence of cu_seqlens_k, 12"),
    ):
        with pytest.raises(ValueError, match=said):
            fovea.attention(q, k, v, **{**options, **changes})
    line = fovea.explain(q, k, v, max_seqlen_q=5, max_seqlen_k=7, **options).splitlines()[0].removeprefix("problem: ")
    assert " max_q=5 " in line and " max_k=7 " in line
    assert fovea.explain(line).splitlines()[0].removeprefix("problem: ") == line
    with pytest.raises(ValueError, match="used_k: '7 for batch entry 0'; accepted: at most its length, 6"):
        fovea.explain(line.replace("max_k=7", "max_k=6"))


def test_fovea_torch_without_pytorch():
    """Importing fovea imports no PyTorch, and where there is none, fovea.torch says so."""
    said = run(
        "import json, sys\n"
        "sys.modules['torch'] = None\n"
        "import fovea\n"
        "try:\n"
        "    fovea.torch.attention\n"
        "except AttributeError as error:\n"
        "    print(json.dumps([str(error), hasattr(fovea, 'torch'), hasattr(fovea, 'tensor')]))\n"
    )
    assert said[0].startswith("fovea.torch needs PyTorch, which cannot be imported here: ") and said[1:] == [False, False]


def test_workspaces():
    """Small ones are kept for the next call of the thread, large ones are not."""
    scratch = _Scratch()
    address, size, small = scratch.of(1000)
    assert size == small.nbytes >= 1000 and address == small.ctypes.data
    assert scratch.of(500)[2] is small
    _, _, larger = scratch.of(2000)
    assert larger.nbytes >= 2000
    assert scratch.of(_Scratch.LARGEST_KEPT + 1)[2].nbytes > _Scratch.LARGEST_KEPT
    assert scratch.of(1)[2] is larger


def test_a_workspace_that_has_become_too_small(monkeypatch):
    """What a call needs grows with the number of threads, which another thread may set between the question and the call, up
    or down. A lack of memory that a larger workspace does not cure is reported."""
    monkeypatch.setattr(_problem, "_scratch", _Scratch())
    needs = [1000, 500, 3000]

    class Library:
        @staticmethod
        def fovea_forward(raw, address, size):
            return 0 if size >= 3000 else OUT_OF_MEMORY

        @staticmethod
        def fovea_workspace(raw, direction, needed):
            needed._obj.value = needs.pop(0)
            return 0

        fovea_backward = staticmethod(lambda raw, address, size: OUT_OF_MEMORY)

    assert _problem.call_on_cpu(Library, None, FORWARD) == 0 and not needs
    needs = [4000] * _problem._ATTEMPTS
    assert _problem.call_on_cpu(Library, None, BACKWARD) == OUT_OF_MEMORY and not needs


def test_a_workspace_outlives_calls_in_the_middle_of_a_call(monkeypatch):
    """A trace function (as a signal handler or a finalizer could) calls fovea again, with a larger problem, before each
    instruction of call_on_cpu in turn. What C is given is the address and the size of one array that is still alive."""
    made = {}  # address: (size, the array)
    given = []

    def empty(shape, dtype):
        array = np.zeros(shape, dtype)
        made[array.ctypes.data] = (array.nbytes, weakref.ref(array))
        return array

    class Library:
        """Needs 3000 bytes, and notes what it is given."""

        @staticmethod
        def fovea_forward(raw, address, size):
            given.append((address, size, made.get(address, (0, lambda: None))))
            assert address == 0 or (made[address][0] >= size and made[address][1]() is not None), "freed, or too small"
            return 0 if size >= 3000 else OUT_OF_MEMORY

        @staticmethod
        def fovea_workspace(raw, direction, needed):
            needed._obj.value = 3000
            return 0

    monkeypatch.setattr(_problem.np, "empty", empty)
    code = _problem.call_on_cpu.__code__
    positions = [instruction.offset for instruction in dis.get_instructions(code)]
    for kept in (0, 1000, 4000):
        for position in positions:
            scratch = _Scratch()
            monkeypatch.setattr(_problem, "_scratch", scratch)
            scratch.of(kept)

            def trace(frame, event, _, position=position, scratch=scratch):
                if frame.f_code is not code:
                    return None
                frame.f_trace_opcodes = True
                if event == "opcode" and frame.f_lasti == position:
                    scratch.of(5000)
                    [bytearray(n) for n in (3000, 4000, 5000)]
                return trace

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                assert _problem.call_on_cpu(Library, None, 0) == 0
            finally:
                sys.settrace(before)
    assert len(given) > 2 * len(positions)


# ---- threads and processes ----


@pytest.fixture
def threads():
    yield fovea.set_num_threads
    fovea.set_num_threads(0)


def test_same_bits_for_any_number_of_threads(threads):
    q, k, v = qkv(np.float32, sq=150, sk=150, d=32, dv=32)
    bias = normal(1, HQ, 150, 150, dtype=np.float32)
    results = []
    for n in (1, 2, 3, 7):
        threads(n)
        assert fovea.num_threads() == n
        out, lse = fovea.attention(q, k, v, bias=bias, return_lse=True)
        grads = fovea.attention_backward(np.ones_like(out), q, k, v, out, lse, bias=bias)
        results.append([out, lse, grads.q, grads.k, grads.v, grads.bias])
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other))


def test_default_number_of_threads(threads):
    start = fovea.num_threads()
    assert 1 <= start <= len(os.sched_getaffinity(0))
    threads(3)
    threads(0)
    assert fovea.num_threads() == start


def test_concurrent_calls():
    """Calls from several Python threads at once, and errors that stay with the thread that made them."""
    q, k, v = qkv(np.float32, sq=64, sk=64)
    want = fovea.attention(q, k, v)
    problems = []

    def work(index):
        for _ in range(30):
            if not np.array_equal(fovea.attention(q, k, v), want):
                problems.append(f"thread {index}: another answer")
            try:
                fovea.attention(q, k[:, : index + 1], v)
            except ValueError as error:
                if f"{index + 1}" not in str(error):
                    problems.append(f"thread {index}: {error}")

    pool = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    assert not problems


def test_the_gil_is_released():
    """Another Python thread runs while a call computes."""
    q, k, v = qkv(np.float32, batch=(1,), sq=2048, sk=2048, hq=8, hk=8, d=64, dv=64)
    ticks, done = [], threading.Event()

    def tick():
        while not done.wait(0.001):
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    fovea.attention(q, k, v)
    done.set()
    thread.join()
    assert ticks


def run(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts the threads of a process in /proc")
def test_import_makes_no_thread():
    counts = run(
        "import json, os\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "import numpy\n"
        "before = count()\n"
        "import fovea\n"
        "fovea.num_threads(); fovea.backends(); fovea.explain()\n"
        "print(json.dumps([before, count()]))"
    )
    assert counts[0] == counts[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_fork_after_threads_were_used():
    """A child of fork computes, with threads of its own, after its parent has used some; and so does the parent."""
    outcome = run(
        "import json, os, warnings\n"
        "import numpy as np, fovea\n"
        "warnings.simplefilter('ignore', DeprecationWarning)  # Python 3.12 warns of fork beside threads\n"
        "q = np.random.default_rng(0).standard_normal((2, 200, 4, 32)).astype(np.float32)\n"
        "fovea.set_num_threads(3)\n"
        "want = fovea.attention(q, q, q)\n"
        "children = []\n"
        "for _ in range(3):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        same = all(np.array_equal(fovea.attention(q, q, q), want) for _ in range(3))\n"
        "        os._exit(0 if same else 1)\n"
        "    children.append(child)\n"
        "codes = [os.waitpid(child, 0)[1] for child in children]\n"
        "print(json.dumps([codes, bool(np.array_equal(fovea.attention(q, q, q), want))]))"
    )
    assert outcome == [[0, 0, 0], True]


def test_an_instruction_set_that_is_none():
    done = subprocess.run(
        [sys.executable, "-c", "import fovea, numpy; q = numpy.ones((1, 1, 1, 8)); fovea.attention(q, q, q)"],
        env={**os.environ, "FOVEA_CPU_ISA": "junk"},
        capture_output=True,
        text=True,
    )
    assert "ValueError: FOVEA_CPU_ISA: 'junk'; accepted: " in done.stderr


REFUSED_TILES = """
import ctypes, mmap
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = mmap.mmap(-1, 1 << 16)
stack = Stack(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, 4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0  # too small for a signal frame with tiles in it
import fovea
print(fovea.explain())
print(fovea.explain("b=1 hq=1 sq=64 sk=64 d=64 bf16"))
"""


@pytest.mark.parametrize("forced", ["", "amx"])
def test_tiles_that_linux_refuses_are_not_in_use(forced):
    flags = re.search(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    if flags is None or not {"amx_tile", "amx_bf16", "avx512_bf16"} <= set(flags[1].split()):
        pytest.skip("this processor has no AMX")
    done = subprocess.run([sys.executable, "-c", REFUSED_TILES], env={**os.environ, "FOVEA_CPU_ISA": forced}, capture_output=True, text=True)
    assert re.search(r"^instruction set +amx +not here: needs tiles, which the operating system does not let this process use$", done.stdout, re.M)
    if forced:
        assert "FOVEA_CPU_ISA: 'amx', whose tiles the operating system does not let this process use; accepted: " in done.stderr + done.stdout
    else:
        assert re.search(r"^instruction set +avx512 +in use$", done.stdout, re.M)
        assert "avx512, " in done.stdout


def test_only_numpy_is_imported():
    modules = run(
        "import json, sys, numpy\n"
        "before = set(sys.modules)\n"
        "import fovea\n"
        "new = [sys.modules[name] for name in set(sys.modules) - before]\n"
        "print(json.dumps(sorted(m.__name__ for m in new if '-packages' in str(getattr(m, '__file__', '')))))"
    )
    assert [name for name in modules if not name.startswith(("numpy", "fovea"))] == []


def test_library_that_is_not_there():
    done = subprocess.run(
        [sys.executable, "-c", "import fovea"],
        env={**os.environ, "FOVEA_LIBRARY": "/no/such/libfovea.so"},
        capture_output=True,
        text=True,
    )
    assert "ImportError: fovea: FOVEA_LIBRARY is '/no/such/libfovea.so', and no such file exists" in done.stderr


def test_library_that_is_not_ours():
    done = subprocess.run(
        [sys.executable, "-c", "import fovea"],
        env={**os.environ, "FOVEA_LIBRARY": os.path.abspath(__file__)},
        capture_output=True,
        text=True,
    )
    assert f"ImportError: fovea: {os.path.abspath(__file__)} cannot be used: " in done.stderr


def test_package_without_a_library(tmp_path):
    """The places that were looked at are named, and what to do: for a checkout, and for an installed package."""
    package = os.path.dirname(fovea.__file__)
    for place, header, advice in (
        (tmp_path / "checkout" / "python", True, "make build"),
        (tmp_path / "installed", False, "install fovea-attention again"),
    ):
        shutil.copytree(package, place / "fovea", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        if header:
            (place.parent / "include" / "fovea").mkdir(parents=True)
            (place.parent / "include" / "fovea" / "c.h").write_text("")
        environment = {**os.environ, "PYTHONPATH": str(place)}
        environment.pop("FOVEA_LIBRARY", None)
        done = subprocess.run([sys.executable, "-c", "import fovea"], env=environment, capture_output=True, text=True)
        assert "ImportError: fovea: its shared library is not at" in done.stderr
        assert str(place / "fovea") in done.stderr
        assert advice in done.stderr
