# SPDX-License-Identifier: Apache-2.0
"""Attention and its gradients as plain formulas on padded tensors, written down from docs/semantics.md.

Two evaluations: the reference, in fp64; and the naive one in the roundings that a backend has (P and dS in the type of q,
sums in fp32), which the tolerance is made of. So that the naive one is never right by luck, it is given the errors
that another order of summation could have made: of a dot product half a unit in the last place of the sum of its terms' magnitudes, of an
exponential or tanh one of its own (in fp64, where the reference errs as well, twice that), with random signs; the worst of a few
draws counts. dp and delta err by one unit, against each other: where they cancel, all that is left is their rounding.
On a GPU sums of 16-bit numbers are formed by tensor cores, which cut off what is beyond the sum's last place at each 16
terms, always towards 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import dropout
from tensors import DTYPES, Tensors


class Formula:
    def __init__(self, tensors: Tensors, naive: bool, draw: int = 0) -> None:
        self.t = tensors
        self.p = p = tensors.problem
        self.naive = naive
        self.type = DTYPES[p.type]
        self.wide = torch.float32 if naive and p.type != "fp64" else torch.float64
        self.unit = torch.finfo(self.wide).eps if naive else 0.0
        self.units = 2 if p.type == "fp64" else 1
        self.device = tensors.device
        self.generator = torch.Generator(self.device)
        self.generator.manual_seed(p.case_seed * 16 + draw)
        self.group = p.hq // max(p.hk, 1)
        self.allowed = tensors.allowed()
        self.keep = self._keep()
        self.q = self._wide("q")
        self.k = self._wide("k").repeat_interleave(self.group, dim=1)
        self.v = self._wide("v").repeat_interleave(self.group, dim=1)

    # ---- the definition ----

    def forward(self) -> dict[str, Tensor]:
        """out (B, H, Sq, Dv) and lse (B, H, Sq)."""
        s, _ = self._scores()
        sink = self._sink()
        maximum = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
        maximum = torch.maximum(maximum, sink)
        reference = torch.where(maximum == -math.inf, 0.0, maximum)
        weight = self._of_function(torch.exp(s - reference))
        total = weight.sum(-1, keepdim=True) + torch.exp(sink - reference)
        # Relative to the maximum of a row its largest weight is 1, which no type rounds; kernels take other references.
        out = (self._round_rows(weight, "out") * self.keep) @ self.v
        out = self._round(torch.where(total == 0, 0.0, out / total), "out")
        exactly = reference + torch.log(total)
        lse = self._of_sum(exactly, reference.abs() + (exactly - reference).abs())
        return {"out": out, "lse": torch.where(total == 0, -math.inf, lse).squeeze(-1)}

    def backward(self) -> dict[str, Tensor]:
        """The gradients that are asked for, padded; of a bias in the shape it was given. Reads out and lse."""
        p, t = self.p, self.t
        s, derivative = self._scores()
        out, grad_out = self._wide("out"), self._wide("grad_out")
        lse = self._wide("lse").unsqueeze(-1)
        grad_lse = self._wide("grad_lse").unsqueeze(-1) if p.dlse else 0.0
        alive = lse != -math.inf
        lse = torch.where(alive, lse, 0.0)
        sign = self._signs(lse.shape)
        delta = (grad_out * out).sum(-1, keepdim=True)
        delta_size = (grad_out * out).abs().sum(-1, keepdim=True)
        delta = delta + sign * self.unit * delta_size - grad_lse
        probability = self._of_function(torch.where(alive, torch.exp(s - lse), 0.0))
        dp = grad_out @ self.v.transpose(-1, -2)
        if self.naive:  # dp and delta err against each other
            dp = dp - sign * self.unit * (grad_out.abs() @ self.v.abs().transpose(-1, -2))
        dp = torch.where(self.keep == 0, 0.0, dp * self.keep) if torch.is_tensor(self.keep) else dp * self.keep
        there = alive & self.allowed
        ds = torch.where(there, probability * (dp - delta), 0.0)
        ds_of_dot = self._round_rows(torch.where(there, ds * derivative, 0.0), "grad_q", "grad_k")
        found = {}
        if "q" in p.need:
            found["q"] = self._round(ds_of_dot @ self.k, "grad_q")
        if "k" in p.need:
            found["k"] = self._round(self._of_group(ds_of_dot.transpose(-1, -2) @ self.q), "grad_k")
        if "v" in p.need:
            weight = self._round_rows(torch.where(there, probability * self.keep, 0.0), "grad_v")
            found["v"] = self._round(self._of_group(weight.transpose(-1, -2) @ grad_out), "grad_v")
        for name in ("bias", "bias2"):
            if name in p.need:
                found[name] = self._round(self._of_plane(ds, t[name].shape), f"grad_{name}")
        if "sink" in p.need:
            p_sink = torch.where(alive, torch.exp(self._sink() - lse), 0.0)
            share = -(p_sink * delta)
            size = share.abs() + p_sink * delta_size
            exist = t.rows_exist_q[:, None, :, None]
            total, size = (torch.where(exist, x, 0.0).sum((0, 2, 3)) for x in (share, size))
            found["sink"] = self._of_sum(total, size)
        return found

    # ---- results that are combined with what is there ----

    def combined(self, found: dict[str, Tensor], backward: bool) -> dict[str, Tensor]:
        """forward()'s results, or backward()'s, as the call leaves them."""
        t = self.t
        if not backward and self.p.adds(False):
            out, lse = (t.padded_of(name, t.before(name)).to(self.wide) for name in ("out", "lse"))
            reference = torch.maximum(lse, found["lse"])
            reference = torch.where(reference == -math.inf, 0.0, reference)
            weights = [torch.exp(x - reference) for x in (lse, found["lse"])]
            total = sum(weights)
            both = weights[0].unsqueeze(-1) * out + weights[1].unsqueeze(-1) * found["out"]
            found = {
                "out": torch.where(total.unsqueeze(-1) == 0, 0.0, both / total.unsqueeze(-1)),
                "lse": torch.where(total == 0, -math.inf, reference + torch.log(total)),
            }
        for name in self.p.adds(True) if backward else ():
            before = t.before(f"grad_{name}").to(self.wide)
            found[name] = found[name] + (t.padded_of(f"grad_{name}", before) if name in "qkv" else before.reshape(found[name].shape))
        return found

    # ---- parts ----

    def _wide(self, name: str) -> Tensor:
        return self.t.padded(name).to(self.wide)

    def _scores(self) -> tuple[Tensor, Tensor | float]:
        """(B, H, Sq, Sk), -inf where a pair takes no part, and the derivative by the dot product."""
        p, t = self.p, self.t
        s = self.q @ self.k.transpose(-1, -2)
        if self.naive:
            cut = 0.0
            if self.device.type == "cuda" and p.type in ("bf16", "fp16"):
                cut = self.unit / 2 * ((p.d + 15) // 16) * s
            s = self._of_sum(s, self.q.abs() @ self.k.abs().transpose(-1, -2)) - cut
        scale = p.scale_or_default
        s = s * scale
        derivative: Tensor | float = scale
        if p.softcap:
            tanh = self._of_function(torch.tanh(s * (1 / p.softcap)))
            s = tanh * p.softcap
            derivative = (1 - tanh * tanh) * scale
        for name in ("bias", "bias2"):
            if name in t:
                s = s + t.plane(name).to(self.wide)
        if p.alibi:
            slopes = t["alibi_slopes"].values().to(self.wide).expand(p.batch_size, p.hq)[:, :, None, None]
            shift = t.shift()[:, None, None, None]
            i = torch.arange(p.sq, device=self.device)[:, None]
            j = torch.arange(p.sk, device=self.device)
            s = s - slopes * (i + shift - j).abs().to(self.wide)
        return torch.where(self.allowed, s, -math.inf), derivative

    def _sink(self) -> Tensor:
        if not self.p.sink:
            return torch.full((1, 1, 1, 1), -math.inf, dtype=self.wide, device=self.device)
        return self.t["sink"].values().to(self.wide)[None, :, None, None]

    def _keep(self) -> Tensor | float:
        """keep / (1 - p_drop)"""
        p = self.p
        if p.dropout == 0:
            return 1.0
        row = self.t.len_k if p.packed else torch.full_like(self.t.len_k, p.rows_k)
        kept = dropout.kept(p.rng, p.dropout, p.seed, p.offset, self.t.streams(), p.sq, p.sk, row, self.t.first("q"), self.t.first("k"))
        return kept.to(self.wide) * dropout.factor(p.rng, p.dropout)

    def _of_group(self, x: Tensor) -> Tensor:
        """Sums over the query heads of each key head."""
        return x.unflatten(1, (self.p.hk, self.group)).sum(2)

    def _of_plane(self, ds: Tensor, shape: tuple) -> Tensor:
        """Sums over what a bias was broadcast over."""
        ds = ds.reshape(*self.p.batch, *ds.shape[1:])
        over = [d for d, (n, m) in enumerate(zip(shape, ds.shape)) if n != m]
        return ds.sum(over, keepdim=True) if over else ds

    # ---- roundings and errors of the naive evaluation ----

    def _round(self, x: Tensor, result: str = "") -> Tensor:
        """To the type of q, or to that of a result."""
        return x.to(DTYPES[self.t[result].type] if result else self.type).to(self.wide) if self.naive else x

    def _round_rows(self, x: Tensor, *results: str) -> Tensor:
        """Of P or dS. Kernels round it before or after it is multiplied with what a row or a call has in common, and results wider than
        q show which: there rows are rounded at any scale."""
        if not self.naive or all(self.t[name].type == self.p.type for name in results if name in self.t):
            return self._round(x)
        scale = 1 - torch.rand((*x.shape[:-1], 1), generator=self.generator, device=self.device, dtype=x.dtype) / 2
        return self._round(x * scale) / scale

    def _signs(self, shape: tuple) -> Tensor | float:
        if not self.naive:
            return 0.0
        return torch.randint(0, 2, shape, generator=self.generator, device=self.device).to(self.wide) * 2 - 1

    def _of_sum(self, x: Tensor, size: Tensor) -> Tensor:
        return x + self._signs(x.shape) * (self.unit * self.units / 2 * size) if self.naive else x

    def _of_function(self, x: Tensor) -> Tensor:
        return x * (1 + self._signs(x.shape) * (self.units * self.unit)) if self.naive else x


# ---- what counts as right ----

# The distance from 1 to the next number, and what is lost among denormals.
_PRECISION = {
    torch.float16: (2.0**-10, 2.0**-24),
    torch.bfloat16: (2.0**-7, 2.0**-133),
    torch.float32: (2.0**-23, 32 * 2.0**-149),
    torch.float64: (2.0**-45, 32 * 5e-324),  # on the CPU: there the reference has the same precision
}
# A GPU's exponentials and tensor cores make 0 of what is smaller than fp32's normal numbers; dropout multiplies that.
_FLUSHED = 16 * 2.0**-126


def compare(actual: Tensor, reference: Tensor, naive: list[Tensor]) -> Tensor:
    """Five numbers on the device: elements that are not finite where they have to be or the other way round, maximum
    error and what is allowed, mean error and what is allowed. One dimension each; `actual` has the output's type."""
    if actual.numel() == 0:
        return torch.zeros(5, dtype=torch.float64, device=actual.device)
    unit, least = _PRECISION[actual.dtype]
    if actual.device.type == "cuda" and actual.dtype != torch.float16:
        least = _FLUSHED
    should = reference.to(actual.dtype)
    finite = should.isfinite()
    same = (actual == should) | (actual.isnan() & should.isnan())
    wrong = (torch.where(finite, ~actual.isfinite(), ~same)).sum()
    both = finite & actual.isfinite()
    reference = torch.where(both, reference, 0.0)
    error = torch.where(both, (actual.double() - reference).abs(), 0.0)
    draws = torch.stack([x.double() for x in naive])
    theirs = torch.where(both & draws.isfinite(), (draws - reference).abs(), 0.0).flatten(1)
    size = reference.abs()
    count = both.sum().clamp(min=1)
    mean = lambda x: x.sum() / count  # noqa: E731
    return torch.stack([
        wrong.double(), error.max(), 2 * theirs.max() + unit * size.max() + least,
        mean(error), 2 * theirs.sum(1).max() / count + unit * mean(size) + least,
    ])  # fmt: skip


def verdict(name: str, five: list) -> str:
    """What is wrong with an output, "" if nothing is."""
    wrong, error, allowed, mean, mean_allowed = five
    if wrong:
        return f"{name}: {wrong:.0f} elements are infinite or NaN and must not be, or the other way round"
    if not error <= allowed or not mean <= mean_allowed:
        return f"{name}: maximum error {error:.3g} of {allowed:.3g} allowed, mean {mean:.3g} of {mean_allowed:.3g}"
    return ""
