# SPDX-License-Identifier: Apache-2.0
"""Random problems, whose features are drawn from the case table, and random cuts of their rows: calls with positions, as the ranks of
context_parallel make them, are together the whole call. On the CPU out, lse and the gradients of q and of biases with queries have its
bits, but where docs/several-gpus.md says otherwise. On a GPU, and of what is summed over the parts, the error is at most twice that of the
whole call, beside fp64 on the CPU.

FOVEA_RANDOM says how many. CI runs them on the CPU.
"""

import collections
import functools
import itertools
import math
import os
import random

import pytest
import torch

from fovea.torch import attention
from problem import Plane, Problem
from table import rows
from tensors import Tensors

COUNT = int(os.environ.get("FOVEA_RANDOM", 120))
LEARN = ("q", "k", "v", "bias", "bias2", "sink")
PLANES = ("bias", "bias2", "mask")
FEW = 8  # rows of a key head that the CPU computes as decoding (src/cpu/isa/forward_rows.h)
TILE = 128  # of keys: a part's begin at a multiple of it


def drawn(seed: int, on_cpu: bool) -> Problem:
    """Each feature is that of a random row of the case table; sizes are random."""
    r = random.Random(seed)
    row = lambda: r.choice(rows())  # noqa: E731
    p = Problem(case_seed=90_000 + seed)
    p.type = row().type
    p.type = "fp32" if p.type == "fp64" and not on_cpu else p.type  # CUDA has none
    dims = row()
    p.d, p.dv = min(dims.d, 256), min(dims.dv, 256)
    heads = row()
    p.hk = r.randint(1, 3)
    p.hq = p.hk * min(4, heads.hq // heads.hk)
    p.batch = r.choice([(1,), (2,), (3,), (2, 2)])
    most = 300 if on_cpu else 900  # up to which the CPU sums a row's keys in one order
    p.sq = r.choice([r.randint(1, 40), r.randint(1, most), 64 * r.randint(1, most // 64)])
    p.sk = p.sq if r.random() < 0.7 else r.randint(1, most)
    layout = row()
    p.layout, p.skew = ("bshd" if layout.layout == "qkv3" and p.sk != p.sq else layout.layout), layout.skew
    if r.random() < 0.3:
        p.seqs_q = [r.randint(0, p.sq) for _ in range(p.batch_size)]
        p.seqs_k = list(p.seqs_q) if r.random() < 0.7 else [r.randint(0, p.sk) for _ in range(p.batch_size)]
        p.sk = max(p.sk, p.sq)
        p.total_q, p.total_k = max(1, sum(p.seqs_q)), max(1, sum(p.seqs_k))
        p.layout = "bshd" if p.layout in ("qkv3", "bhsd") else p.layout
    used = row()
    for side, seqs, length in (("q", p.seqs_q, p.sq), ("k", p.seqs_k, p.sk)):
        if getattr(used, f"used_{side}") is not None:
            setattr(p, f"used_{side}", [r.randint(0, n) for n in seqs or [length] * p.batch_size])
    band = row()
    p.causal, p.window, p.top_left = band.causal, row().window, band.top_left
    if p.window != (-1, -1) and r.random() < 0.5:
        p.window = (r.choice([-1, r.randint(0, p.sk)]), r.choice([-1, 0, r.randint(0, p.sk)]))
    p.scale, p.softcap, p.alibi, p.sink = row().scale, row().softcap, row().alibi, row().sink
    for name in PLANES:
        plane = getattr(row(), name)
        if plane is not None:
            extents = (plane.extents[0], len(p.batch) == 2 and plane.extents[1], *plane.extents[2:])
            setattr(p, name, Plane(extents, "bool" if name == "mask" else p.type if plane.type == "fp64" else plane.type))
    dropout = row()
    if dropout.dropout:
        p.dropout, p.seed, p.offset = dropout.dropout, r.getrandbits(63), r.getrandbits(63)
        p.top_left = True  # else a shift by the lengths would move the mask, too
    if r.random() < 0.3:
        p.position = (16 * r.randint(0, 8), 16 * r.randint(0, 8))
        p.top_left = False
        if r.random() < 0.5:
            p.positions_q, p.positions_k = ([16 * r.randint(0, 4) for _ in range(p.batch_size)] for _ in range(2))
    p.dlse, p.det = row().dlse, row().det
    return p


# ---- the whole call ----


def view(t) -> torch.Tensor:
    """As it lies in memory, with its strides; a copy where rows run backwards, which PyTorch has not."""
    if min(t.strides, default=0) < 0:
        return t.values() if t.type != "bool" else t.values().bool()
    x = t.buffer.as_strided(t.shape, t.strides, t.base)
    return x.view(torch.bool) if t.type == "bool" else x


class Whole:
    """A problem's tensors, and what one call computes. Its leaves are what has gradients."""

    def __init__(self, p: Problem, device: torch.device) -> None:
        self.p = p
        tensors = Tensors(p, device)
        self.x = {name: view(t).detach() for name, t in tensors.all.items() if not t.output}
        self.lengths = [p.lengths(side) for side in "qk"]
        self.packed = {name: self.x[name] for name in ("cu_seqlens_q", "cu_seqlens_k") if name in self.x}
        if p.packed:
            self.packed.update(max_seqlen_q=p.sq, max_seqlen_k=p.sk, batch_shape=p.batch if len(p.batch) == 2 else None)
        self.options = {
            "causal": p.causal, "window": p.window, "scale": p.scale, "softcap": p.softcap, "dropout_p": p.dropout, "deterministic": p.det,
        }  # fmt: skip
        if p.dropout:
            self.options.update(seed=p.seed, offset=p.offset)
        self.leaves = {name: self.x[name].requires_grad_() for name in LEARN if name in self.x}
        self.others = {name: self.x[name] for name in ("mask", "alibi_slopes", "seqused_q", "seqused_k") if name in self.x}

    def placed(self) -> dict:
        """Where the whole is: by positions, or by the alignment of rows and keys."""
        if not self.p.has_positions:
            return {"align": "top_left" if self.p.top_left else "bottom_right"}
        q, k = self.p.position
        each = {name: self.x[name] for name in ("positions_q", "positions_k") if name in self.x}
        return {"position_q": q, "position_k": k, **each}

    def first(self) -> list[tuple[int, int]]:
        """The same by a position of query 0 and one of key 0 of each sequence."""
        if self.p.has_positions:
            return list(zip(self.p.first_positions("q"), self.p.first_positions("k")))
        shifts = [0 if self.p.top_left else m - n for n, m in zip(*self.lengths)]
        return [(max(shift, 0), max(-shift, 0)) for shift in shifts]

    def run(self, wide: bool = False) -> dict[str, torch.Tensor]:
        """out, lse and the gradients; `wide`: in fp64 on the CPU."""
        to = (lambda x: (x.double() if x.is_floating_point() else x).cpu()) if wide else lambda x: x
        move = lambda given: {name: to(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}  # noqa: E731
        leaves = {name: to(x.detach()).requires_grad_() for name, x in self.leaves.items()}
        named = {name: x for name, x in leaves.items() if name not in "qkv"}
        given = {**self.options, **move({**self.others, **self.packed, **self.placed()})}
        out, lse = attention(leaves["q"], leaves["k"], leaves["v"], return_lse=True, layout="bshd", **named, **given)
        grads = self.gradients((out, lse), tuple(to(x) for x in self.grad_outs()), leaves)
        return {"out": out.detach(), "lse": lse.detach(), **grads}

    def grad_outs(self) -> tuple[torch.Tensor, ...]:
        return (self.x["grad_out"], self.x["grad_lse"]) if self.p.dlse else (self.x["grad_out"],)

    @staticmethod
    def gradients(results, grads, leaves) -> dict[str, torch.Tensor]:
        found = torch.autograd.grad(results[: len(grads)], list(leaves.values()), grads)
        return {f"grad_{name}": grad for name, grad in zip(leaves, found)}


# ---- its parts ----


class Part:
    """Some adjacent rows of each sequence, by their beginnings and ends, and some heads."""

    def __init__(self, whole: Whole, pieces: list[tuple[int, int]], heads: range, r: random.Random) -> None:
        self.whole, self.pieces, self.heads = whole, pieces, heads
        p = self.p = whole.p
        self.index = None  # of packed rows: their numbers
        if p.packed:
            begins = [0, *itertools.accumulate(p.seqs_q)]
            self.index = torch.tensor([n for at, (a, b) in zip(begins, pieces) for n in range(at + a, at + b)], dtype=torch.int64)
            self.index = self.index.to(whole.x["q"].device)
        self.keys = self._keys(r.random() < 0.5)
        self.by_number = len(set(self._first())) == 1 and r.random() < 0.5

    def _first(self) -> list[tuple[int, int]]:
        return [(q + a, k + self.keys.start) for (q, k), (a, _) in zip(self.whole.first(), self.pieces)]

    def _keys(self, may_begin_later: bool) -> range:
        """As a rank of context_parallel fetches them: those that its rows can see."""
        p, first = self.p, set(self.whole.first())
        if p.packed or len(first) > 1:
            return range(p.sk)
        ((q, k),) = first
        (a, b), (left, right) = self.pieces[0], p.window
        right = 0 if p.causal and right < 0 else min(right, 0) if p.causal else right
        end = max(0, min(p.sk, q - k + b + right)) if right >= 0 else p.sk
        begin = max(0, min(end, q - k + a - left)) // TILE * TILE if left >= 0 and may_begin_later else 0
        return range(begin, end)

    def has_same_order(self) -> bool:
        """Whether the CPU sums as in the whole call: over keys that begin with the first one, and not by the way of few rows (decoding)."""
        few = lambda rows: rows * (self.p.hq // self.p.hk) <= FEW  # noqa: E731
        used = self.p.used_q or [self.p.sq] * self.p.batch_size
        counts = [max(0, min(n, b) - a) for n, (a, b) in zip(used, self.pieces)]
        alike = all(n == 0 or few(n) == few(m) for n, m in zip(counts, self.whole.lengths[0]))
        return alike and self.keys.start == 0 and self.whole.x["q"].device.type == "cpu"

    def rows(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if self.index is not None:
            return x.index_select(dim, self.index)
        a, b = self.pieces[0]
        return x.narrow(dim, a, b - a)

    def _heads(self, x: torch.Tensor, dim: int, group: int = 1) -> torch.Tensor:
        return x.narrow(dim, self.heads.start // group, len(self.heads) // group)

    def of_result(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """This part of out, of lse or of their gradients."""
        heads, at = (-2, -1) if name == "lse" else (-2, 0 if self.p.packed else -3)
        return self._heads(self.rows(x, at), heads)

    def _plane(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.shape[-3] == 1 else self._heads(x, -3)
        if x.shape[-1] != 1:
            x = x.narrow(-1, self.keys.start, len(self.keys))
        if x.shape[-2] == 1 or self.index is None:
            return x if x.shape[-2] == 1 else self.rows(x, -2)
        most = max(b - a for a, b in self.pieces)
        full = x.expand(*self.p.batch, *x.shape[-3:]).flatten(0, len(self.p.batch) - 1)
        each = []
        for one, (a, _) in zip(full, self.pieces):
            at = (a + torch.arange(most, device=x.device)).clamp_max(x.shape[-2] - 1)
            each.append(one.index_select(-2, at))
        return torch.stack(each).unflatten(0, self.p.batch)

    def run(self) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
        p, whole, device = self.p, self.whole, self.whole.x["q"].device
        x, group = whole.x, p.hq // p.hk
        keys = (lambda y: y) if p.packed else lambda y: y.narrow(-3, self.keys.start, len(self.keys))
        q = self._heads(self.rows(x["q"], 0 if p.packed else -3), -2)
        k, v = (self._heads(keys(x[name]), -2, group) for name in "kv")
        given = dict(whole.options)
        given.update({name: self._plane(x[name]) for name in PLANES if name in x})
        if p.sink:
            given["sink"] = self._heads(x["sink"], 0)
        if p.alibi:
            given["alibi_slopes"] = self._heads(x["alibi_slopes"], -1)
        if p.dropout:
            streams = torch.arange(p.batch_size * p.hq, device=device).view(*p.batch, p.hq)
            given["dropout_streams"] = self._heads(streams, -1) if len(self.heads) < p.hq else None
        if p.packed:
            ends = torch.tensor([0, *itertools.accumulate(b - a for a, b in self.pieces)], dtype=torch.int32, device=device)
            most = max(b - a for a, b in self.pieces)
            given.update({**whole.packed, "cu_seqlens_q": ends, "max_seqlen_q": most})
        for side, cuts in (("q", self.pieces), ("k", [(self.keys.start, self.keys.stop)] * p.batch_size)):
            used = getattr(p, f"used_{side}")
            if used is not None:
                counts = [max(0, min(n - a, b - a)) for n, (a, b) in zip(used, cuts)]
                given[f"seqused_{side}"] = torch.tensor(counts, dtype=torch.int32, device=device)
        first = self._first()
        if self.by_number:
            given["position_q"], given["position_k"] = first[0]
        else:
            given.update({f"positions_{side}": torch.tensor(each, device=device) for side, each in zip("qk", zip(*first))})
        out, lse = attention(q, k, v, return_lse=True, layout="bshd", **given)
        grads = tuple(self.of_result(grad, name) for name, grad in zip(("out", "lse"), whole.grad_outs()))
        # By the whole tensors: 0 where this part has none of them.
        return (out.detach(), lse.detach()), whole.gradients((out, lse), grads, whole.leaves)


def cut(whole: Whole, seed: int) -> list[Part]:
    """All rows, over two to four ranks, which may have none; and all heads, sometimes in two parts."""
    r, p = random.Random(-seed - 1), whole.p
    unit, ranks = 16 if p.dropout else 1, r.randint(2, 4)
    lengths = p.seqs_q if p.packed else [p.sq]
    ends = [sorted(min(n, unit * r.randint(0, n // unit + 1)) for _ in range(ranks - 1)) for n in lengths]
    ranges = [[(a, b) if a < b else (0, 0) for a, b in zip([0, *inner], [*inner, n])] for inner, n in zip(ends, lengths)]
    pieces = [[each[rank] for each in ranges] for rank in range(ranks)]
    pieces = pieces if p.packed else [one * p.batch_size for one in pieces]
    heads, group = [range(p.hq)], p.hq // p.hk
    if p.hk > 1 and r.random() < 0.4:
        at = group * r.randint(1, p.hk - 1)
        heads = [range(at), range(at, p.hq)]
    return [Part(whole, one, some, r) for one in pieces for some in heads]


# ---- the comparison ----


def within(name, got, one, exact, dtype, size=None) -> list[str]:
    """As tests/torch/parallel_cases.py has it: at most twice the error of one call, and some roundings of its size. In fp64 nothing is
    more exact than the call, and a sum of terms that cancel in part shows roundings of the terms: 1,200 problems had up to 11 of them."""
    got, one, exact = (x.detach().double().cpu() for x in (got, one, exact))
    alike = exact.isfinite()
    if not torch.equal(got.isfinite(), one.isfinite()):
        return [f"{name}: other elements are finite"]
    alike &= one.isfinite()
    if not alike.any():
        return []
    rms = lambda x: x[alike].square().mean().sqrt().item()  # noqa: E731
    error, of_one = rms(got - exact), rms(one - exact)
    size = rms(exact) if size is None else max(rms(exact), rms(size.cpu()))
    if error <= 2 * of_one + torch.finfo(dtype).eps * size * (64 if dtype == torch.float64 else 1):
        return []
    return [f"{name}: error {error:.3g}, of one call {of_one:.3g}, size {size:.3g}"]


def faults(whole: Whole, parts: list[Part]) -> list[str]:
    p, found = whole.p, []
    one, exact = whole.run(), whole.run(wide=True)
    got = {name: one[name].clone() for name in ("out", "lse")}  # every row of a sequence is written below
    assert sum(b - a for part in parts for a, b in part.pieces if part.heads.start == 0) == sum(p.seqs_q or [p.sq] * p.batch_size)
    sums = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in one.items() if name.startswith("grad_")}
    sizes = {name: x.clone() for name, x in sums.items()}
    for part in parts:
        results, grads = part.run()
        same = part.has_same_order()
        for name, x in zip(("out", "lse"), results):
            assert x.dtype == one[name].dtype
            wanted = part.of_result(one[name], name)
            if same and not torch.equal(x, wanted):
                found.append(f"{name} of rows {part.pieces} heads {part.heads} keys {part.keys}: {(x != wanted).sum()} of {x.numel()} differ")
            place(got[name], part, name, x)
        for name, x in grads.items():
            sums[name] += x.double()
            sizes[name] += x.double().abs()
        if same:
            wanted = part.of_result(one["grad_q"], "out")
            if not torch.equal(part.of_result(grads["grad_q"], "out"), wanted):
                found.append(f"grad_q of rows {part.pieces} heads {part.heads}: other bits")
    for name, x in got.items():
        found += within(name, x, one[name], exact[name], x.dtype)
    for name, x in sums.items():
        found += within(name, x, one[name], exact[name], one[name].dtype, sizes[name])
        plane = whole.x[name.removeprefix("grad_")]
        written_once = name.startswith("grad_bias") and not p.packed and plane.shape[-2] > 1 and plane.shape[-3] == p.hq > 1
        # A part of one row or one head cannot tell it from one that is broadcast.
        plain = all(part.has_same_order() and part.pieces[0][1] - part.pieces[0][0] != 1 and len(part.heads) > 1 for part in parts)
        if written_once and plain and not torch.equal(x.to(one[name].dtype), one[name]):
            found.append(f"{name}: other bits")
    return found


def place(into: torch.Tensor, part: Part, name: str, x: torch.Tensor) -> None:
    if part.index is None:
        part.of_result(into, name).copy_(x)
    else:
        part._heads(into, -2).index_copy_(-1 if name == "lse" else 0, part.index, x)


@pytest.mark.parametrize("seed", range(COUNT))
def test_parts_are_the_whole(seed, device, record_property):
    p = drawn(seed, device.type == "cpu")
    record_property("line", p.line())
    whole = Whole(p, device)
    wrong = faults(whole, cut(whole, seed))
    assert not wrong, "\n".join([p.line(), *wrong])


# ---- the test itself ----


@functools.cache
def problems() -> list[Problem]:
    return [drawn(seed, True) for seed in range(100)]


def test_every_feature_is_drawn():
    seen = collections.Counter()
    for p in problems():
        seen.update(name for name in ("packed", "causal", "alibi", "sink", "bias", "bias2", "mask", "dropout", "used_q", "used_k",
                                      "position", "positions_q", "softcap", "dlse", "det") if getattr(p, name))  # fmt: skip
        seen.update([p.type, f"batch {len(p.batch)}", f"layout {p.layout}"])
        seen.update(["window"] * (p.window != (-1, -1)) + ["GQA"] * (p.hq > p.hk > 1) + ["Sq is not Sk"] * (p.sq != p.sk))
    assert min(seen.values()) >= 5, seen
    assert {"packed", "causal", "window", "alibi", "sink", "bias", "bias2", "mask", "dropout", "used_q", "used_k", "position", "positions_q",
            "softcap", "dlse", "GQA", "batch 2", "fp32", "bf16", "fp16", "fp64", "det"} <= set(seen)  # fmt: skip


def test_cuts_are_random():
    seen = collections.Counter()
    for seed in range(240):  # of few a window ends a tile of keys early
        p = drawn(seed, True)
        parts = cut(Whole(p, torch.device("cpu")), seed)
        rows = [sum(b - a for a, b in part.pieces) for part in parts]
        seen["of rows"] += sum(n > 0 for n in rows) > len({part.heads for part in parts})
        seen["of heads"] += len(parts[0].heads) < p.hq
        seen["without rows"] += 0 in rows
        seen["keys end earlier"] += any(part.keys.stop < p.sk for part in parts)
        seen["keys begin later"] += any(part.keys.start > 0 for part in parts)
        seen["by number"] += any(part.by_number for part in parts)
        seen["equal bits"] += all(part.has_same_order() for part in parts)
    assert seen["of rows"] > 144 and seen["equal bits"] > 120 and min(seen.values()) >= 2, seen


@pytest.mark.parametrize("user", ["causal", "window", "alibi", "dropout"])
def test_a_wrong_position_is_seen(device, user):
    p = Problem(case_seed=1, type="fp32", batch=(2,), hq=2, hk=1, sq=96, sk=96, d=16, dv=16, top_left=True)
    p.causal, p.alibi, p.dropout = user == "causal", "h" * (user == "alibi"), 0.5 * (user == "dropout")
    p.window = (20, 5) if user == "window" else p.window
    whole = Whole(p, device)
    parts = [Part(whole, [piece] * 2, range(2), random.Random(0)) for piece in ((0, 48), (48, 96))]
    for part in parts:
        part.keys = range(96)
    assert faults(whole, parts) == []
    usual = parts[1]._first
    parts[1]._first = lambda: [(q + 16, k) for q, k in usual()]
    assert any(fault.startswith("out") for fault in faults(whole, parts))
    assert math.isfinite(whole.run()["out"].sum().item())
