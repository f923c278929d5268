# SPDX-License-Identifier: Apache-2.0
"""Attention as plain PyTorch, written down from docs/semantics.md and differentiated by autograd; it imports nothing
of fovea. In float64 it is the reference; in another type it is the naive evaluation that the tolerance is made of.

Layout (..., H, S, D). `lengths` are one sequence's (queries, keys) where fewer rows exist than the tensors have.
"""

import math

import torch


def attention(q, k, v, *, bias=None, bias2=None, mask=None, scale=None, causal=False, window=(-1, -1),
              align="bottom_right", softcap=0.0, alibi_slopes=None, sink=None, keep=None, keep_factor=1.0):
    """(out, lse); alibi_slopes broadcast to (..., H), `keep` are dropout's decisions."""
    group = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(group, dim=-3) for x in (k, v))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    s = (q @ k.transpose(-1, -2)).to(wide) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    for addend in (bias, bias2):
        if addend is not None:
            s = s + addend.to(wide)
    rows, keys = s.shape[-2:]
    shift = keys - rows if align == "bottom_right" else 0
    i, j = torch.arange(rows)[:, None] + shift, torch.arange(keys)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(wide)[..., None, None] * (i - j).abs()
    allowed = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        allowed = allowed & (j <= i)
    if window[0] >= 0:
        allowed = allowed & (j >= i - window[0])
    if window[1] >= 0:
        allowed = allowed & (j <= i + window[1])
    if mask is not None:
        allowed = allowed & mask
    s = s.masked_fill(~allowed, -math.inf)
    logits = s
    if sink is not None:
        logits = torch.cat([s, sink.to(wide)[:, None, None].expand(*s.shape[:-1], 1)], dim=-1)
    dead = (logits == -math.inf).all(dim=-1)
    lse = logits.masked_fill(dead[..., None], 0).logsumexp(dim=-1)
    p = torch.exp(s - lse[..., None]).masked_fill(dead[..., None], 0)
    if keep is not None:
        p = p * keep * keep_factor
    return p.to(v.dtype) @ v, lse.masked_fill(dead, -math.inf)


def unit(dtype):
    return torch.finfo(dtype).eps


def assert_as_good_as_naive(name, actual, reference, naive):
    """The specification's rule, in the maximum and in the mean: at most twice the naive evaluation's error, plus two
    units in the last place at the size of the largest (mean) element. What is infinite has to be so exactly."""
    assert actual.shape == reference.shape, name
    dtype = actual.dtype
    actual, reference, naive = (x.detach().double() for x in (actual, reference, naive))
    finite = reference.isfinite()
    assert torch.equal(actual[~finite], reference[~finite]), name
    if not finite.any():
        return
    if dtype == torch.float64:  # the reference is no better than what it judges
        torch.testing.assert_close(actual, reference, rtol=1e-11, atol=1e-13, msg=lambda text: f"{name}: {text}")
        return
    error = (actual - reference)[finite].abs()
    theirs = (naive - reference)[finite].abs()
    size = reference[finite].abs()
    for what in ("max", "mean"):
        of = lambda x: getattr(x, what)().item()  # noqa: B023
        allowed = 2 * of(theirs) + 2 * (unit(dtype) * of(size) + torch.finfo(dtype).tiny)
        assert of(error) <= allowed, f"{name}: {what} error {of(error):.3g} of {allowed:.3g} allowed"
