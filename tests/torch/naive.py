# SPDX-License-Identifier: Apache-2.0
"""Attention as plain PyTorch, written down from docs/semantics.md; it imports nothing of fovea. In float64 it is the
reference; in another type it is the naive evaluation that the tolerance is made of, with the roundings that the
definition has: the backward knows the output as it was rounded, and sums are formed in float32.

Layout (..., H, S, D). `lengths` are one sequence's (queries, keys) where fewer rows exist than the tensors have.
"""

import math

import torch


def attention(q, k, v, *, bias=None, bias2=None, mask=None, scale=None, causal=False, window=(-1, -1),
              align="bottom_right", softcap=0.0, alibi_slopes=None, sink=None, keep=None, keep_factor=1.0, twice=False):
    """(out, lse); alibi_slopes broadcast to (..., H), `keep` are dropout's decisions. With `twice` the backward computes the weights
    again, from scores that are summed in the other order, as fused kernels do, whose blocks differ in the two directions."""
    group = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(group, dim=-3) for x in (k, v))
    options = {"bias": bias, "bias2": bias2, "mask": mask, "scale": scale, "causal": causal, "window": window, "align": align,
               "softcap": softcap, "alibi_slopes": alibi_slopes}  # fmt: skip
    s = scores(q, k, **options)
    with torch.no_grad():
        again = scores(q.flip(-1), k.flip(-1), **options) if twice else s
    wide = s.dtype
    sink = torch.full((s.shape[-3],), -math.inf, dtype=wide) if sink is None else sink.to(wide)
    return Weighting.apply(s, again, sink, v, 1.0 if keep is None else keep.to(wide) * keep_factor)


def scores(q, k, *, bias, bias2, mask, scale, causal, window, align, softcap, alibi_slopes):
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
    return s.masked_fill(~allowed, -math.inf)


class Weighting(torch.autograd.Function):
    """From scores to (out, lse)."""

    @staticmethod
    def forward(ctx, s, again, sink, v, keep):
        logits = torch.cat([s, sink[:, None, None].expand(*s.shape[:-1], 1)], dim=-1)
        dead = (logits == -math.inf).all(dim=-1, keepdim=True)
        lse = logits.masked_fill(dead, 0).logsumexp(dim=-1, keepdim=True)
        p = torch.exp(s - lse).masked_fill(dead, 0)
        out = (p * keep).to(v.dtype) @ v
        if again is not s:
            p = torch.exp(again - lse).masked_fill(dead, 0)
        ctx.save_for_backward(p, torch.exp(sink[:, None, None] - lse).masked_fill(dead, 0), v, out)
        ctx.keep = keep
        return out, lse.masked_fill(dead, -math.inf).squeeze(-1)

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        p, p_sink, v, out = ctx.saved_tensors
        delta = (grad_out.to(p.dtype) * out.to(p.dtype)).sum(-1, keepdim=True) - grad_lse[..., None]
        dp = (grad_out @ v.transpose(-1, -2)).to(p.dtype) * ctx.keep
        grad_v = (p * ctx.keep).to(v.dtype).transpose(-1, -2) @ grad_out
        grad_sink = -(p_sink * delta).squeeze(-1)
        grad_s = (p * (dp - delta)).to(v.dtype).to(p.dtype)
        return grad_s, None, grad_sink.sum(-1).reshape(-1, p.shape[-3]).sum(0), grad_v, None


def unit(dtype):
    return torch.finfo(dtype).eps


def assert_as_good_as_naive(name, actual, reference, naive, through=None):
    """The specification's rule, in the maximum and in the mean: at most twice the naive evaluation's error (of several, the
    largest), plus two units in the last place at the size of the largest (mean) element: of the result's own type, or, for a
    sum of few terms that were each rounded before, of the type `through`. What is infinite has to be so exactly."""
    assert actual.shape == reference.shape, name
    dtype = actual.dtype
    several = naive if isinstance(naive, (list, tuple)) else [naive]
    actual, reference, *several = (x.detach().double() for x in (actual, reference, *several))
    finite = reference.isfinite()
    assert torch.equal(actual[~finite], reference[~finite]), name
    if not finite.any():
        return
    if dtype == torch.float64:  # the reference has the same precision
        torch.testing.assert_close(actual, reference, rtol=1e-11, atol=1e-13, msg=lambda text: f"{name}: {text}")
        return
    error = (actual - reference)[finite].abs()
    theirs = [(x - reference)[finite].abs() for x in several]
    size = reference[finite].abs()
    for what in ("max", "mean"):
        of = lambda x: getattr(x, what)().item()  # noqa: B023
        allowed = 2 * max(map(of, theirs)) + 2 * (max(unit(dtype), unit(through or dtype)) * of(size) + torch.finfo(dtype).tiny)
        assert of(error) <= allowed, f"{name}: {what} error {of(error):.3g} of {allowed:.3g} allowed"
