# SPDX-License-Identifier: Apache-2.0
"""Attention as plain vectorised NumPy in float64, for the tests of the Python package: what a user would write down
to check an answer. Layout (..., S, H, D); it imports nothing of fovea."""

from typing import NamedTuple

import numpy as np


class Answer(NamedTuple):
    out: np.ndarray
    lse: np.ndarray
    grads: dict


def unbroadcast(full, shape):
    """The sum over the dimensions in which something of `shape` was broadcast to `full`."""
    full = full.sum(axis=tuple(range(full.ndim - len(shape))))
    axes = tuple(axis for axis, length in enumerate(shape) if length == 1)
    return full.sum(axis=axes, keepdims=True).reshape(shape)


def allowed_pairs(sq, sk, causal, window, top_left):
    shift = 0 if top_left else sk - sq
    diagonal = np.arange(sq)[:, None] + shift
    j = np.arange(sk)
    allowed = np.ones((sq, sk), bool)
    if causal:
        allowed &= j <= diagonal
    left, right = window
    if left >= 0:
        allowed &= j >= diagonal - left
    if right >= 0:
        allowed &= j <= diagonal + right
    return allowed, np.abs(diagonal - j)


def attention(
    q, k, v, grad_out=None, grad_lse=None, *, bias=None, bias2=None, mask=None, scale=None, causal=False,
    window=(-1, -1), top_left=False, softcap=0.0, alibi_slopes=None, sink=None, keep=None, keep_scale=1.0,
):  # fmt: skip
    """`keep` are dropout's decisions, (..., H, Sq, Sk); alibi_slopes broadcast to (..., H)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    heads, group = q.shape[-2], q.shape[-2] // k.shape[-2]
    k_all, v_all = (np.repeat(x, group, axis=-2) for x in (k, v))
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale

    raw = scale * np.einsum("...qhd,...khd->...hqk", q, k_all)
    capped = softcap * np.tanh(raw / softcap) if softcap else raw
    allowed, distance = allowed_pairs(q.shape[-3], k.shape[-3], causal, window, top_left)
    s = capped
    for addend in (bias, bias2):
        if addend is not None:
            s = s + np.asarray(addend, np.float64)
    if alibi_slopes is not None:
        s = s - np.asarray(alibi_slopes, np.float64)[..., None, None] * distance
    take_part = np.broadcast_to(allowed if mask is None else allowed & mask, s.shape)
    s = np.where(take_part, s, -np.inf)
    sinks = np.full(heads, -np.inf) if sink is None else np.asarray(sink, np.float64)
    sinks = np.broadcast_to(sinks[:, None], s.shape[:-1])

    top = np.maximum(s.max(axis=-1, initial=-np.inf), sinks)
    top = np.where(np.isfinite(top), top, 0)
    denominator = np.exp(s - top[..., None]).sum(-1) + np.exp(sinks - top)
    with np.errstate(divide="ignore"):
        lse = np.log(denominator) + top
    dead = ~np.isfinite(lse)
    p = np.where(dead[..., None], 0, np.exp(s - np.where(dead, 0, lse)[..., None]))
    dropped = p if keep is None else p * keep * keep_scale
    out = np.einsum("...hqk,...khd->...qhd", dropped, v_all)
    if grad_out is None:
        return Answer(out, lse, {})

    grad_out = np.asarray(grad_out, np.float64)
    delta = np.einsum("...qhd,...qhd->...hq", grad_out, out)
    if grad_lse is not None:
        delta = delta - grad_lse
    grad_v = np.einsum("...hqk,...qhd->...khd", dropped, grad_out)
    dp = np.einsum("...qhd,...khd->...hqk", grad_out, v_all)
    if keep is not None:
        dp = dp * keep * keep_scale
    ds = p * (dp - delta[..., None])
    d_raw = ds * (1 - (capped / softcap) ** 2) if softcap else ds
    grad_q = scale * np.einsum("...hqk,...khd->...qhd", d_raw, k_all)
    grad_k = scale * np.einsum("...hqk,...qhd->...khd", d_raw, q)
    by_group = (*k.shape[:-1], group)
    grads = {
        "q": grad_q,
        "k": grad_k.reshape(*by_group, k.shape[-1]).sum(-2),
        "v": grad_v.reshape(*by_group, v.shape[-1]).sum(-2),
    }
    for name, addend in (("bias", bias), ("bias2", bias2)):
        if addend is not None:
            grads[name] = unbroadcast(ds, np.shape(addend))
    if sink is not None:
        weight = np.where(dead, 0, np.exp(sinks - np.where(dead, 0, lse)))
        grads["sink"] = -(weight * delta).sum(axis=(*range(lse.ndim - 2), lse.ndim - 1))
    return Answer(out, lse, grads)
