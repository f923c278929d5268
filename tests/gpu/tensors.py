# SPDX-License-Identifier: Apache-2.0
"""From a problem to memory on a device: a flat buffer for every tensor by the problem's layout and skew.

    inputs    NaN everywhere but in elements that exist: in gaps between rows, behind every sequence's end, past the
              last cu_seqlens, in the padding of a bias.
    outputs   a pattern wherever nothing is to be written, which has to be there afterwards; NaN where something is.

Tensors are addressed by flat element numbers (`index`, of the tensor's shape), so that strides may be what they like,
negative too. The tensors of one qkv3 layout share one buffer, and so do their gradients.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch

from fovea import _abi
from problem import Problem

MARGIN = 256  # bytes on either side of a buffer
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
    "bool": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}
CODES = {
    "fp32": _abi.FP32,
    "fp16": _abi.FP16,
    "bf16": _abi.BF16,
    "fp64": _abi.FP64,
    "bool": _abi.BOOL,
    "int32": _abi.INT32,
    "int64": _abi.INT64,
}
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
QUERIES, KEYS, STATISTICS, PLANE, VECTOR = range(5)  # by what the dimensions are
_POISON = 0x7F


@dataclass
class Tensor:
    name: str
    kind: int
    type: str
    shape: tuple
    strides: tuple
    base: int  # the element of the buffer that index 0, 0, ... is
    buffer: torch.Tensor  # flat, margins included
    index: torch.Tensor  # of `shape`: where each element lies in the buffer
    existing: torch.Tensor  # bool, of `shape`
    output: bool

    def values(self) -> torch.Tensor:
        """Of `shape`; what does not exist is 0."""
        return torch.where(self.existing, self.buffer[self.index], 0)

    def write(self, values: torch.Tensor) -> None:
        """Where the tensor has elements that exist."""
        at = self.index[self.existing]
        self.buffer[at] = values.expand(self.shape)[self.existing].to(self.buffer.dtype)

    @property
    def address(self) -> int:
        return self.buffer.data_ptr() + self.base * self.buffer.element_size()

    def poison(self) -> None:
        if self.buffer.dtype.is_floating_point:
            self.buffer.fill_(math.nan)
        else:
            self.buffer.view(torch.uint8).fill_(_POISON)


def pattern(count: int, width: int, device: torch.device) -> torch.Tensor:
    """Integers that follow from their place."""
    mixed = torch.arange(count, device=device) * -7046029254386353131 >> 29
    return mixed.to(_INTS[width])


class Tensors:
    """Every tensor of a problem, for both directions."""

    def __init__(self, p: Problem, device: torch.device) -> None:
        self.problem = p
        self.device = torch.device(device)
        self.all: dict[str, Tensor] = {}
        self._of_qkv: dict[tuple[bool, str], torch.Tensor] = {}
        arange = lambda n: torch.arange(n, device=self.device)  # noqa: E731
        self.len_q, self.len_k = (torch.tensor(p.lengths(side), device=self.device) for side in "qk")
        begins = lambda seqs: [sum(seqs[:b]) for b in range(len(seqs))]  # noqa: E731
        zeros = [0] * p.batch_size
        self.begin_q = torch.tensor(begins(p.seqs_q) if p.packed else zeros, device=self.device)
        self.begin_k = torch.tensor(begins(p.seqs_k) if p.packed else zeros, device=self.device)
        # Which rows of each batch entry exist: (B, max_seqlen).
        self.rows_exist_q = arange(p.sq) < self.len_q[:, None]
        self.rows_exist_k = arange(p.sk) < self.len_k[:, None]

        batch = () if p.packed else p.batch
        sums = "fp64" if p.type == "fp64" else "fp32"
        rows_q, rows_k = (*batch, p.rows_q, p.hq), (*batch, p.rows_k, p.hk)
        statistics = (*batch, p.hq, p.rows_q)
        self._add("q", QUERIES, p.type, (*rows_q, p.d))
        self._add("k", KEYS, p.type, (*rows_k, p.d))
        self._add("v", KEYS, p.type, (*rows_k, p.dv))
        for name in ("bias", "bias2", "mask"):
            plane = getattr(p, name)
            if plane is not None:
                self._add(name, PLANE, plane.type, self._plane_shape(plane))
        if p.alibi:
            self._add("alibi_slopes", VECTOR, sums, (p.hq,) if p.alibi == "h" else (p.batch_size, p.hq))
        if p.sink:
            self._add("sink", VECTOR, sums, (p.hq,))
        lengths = "int32" if p.case_seed % 2 == 0 else "int64"
        for side in "qk":
            seqs, used = getattr(p, f"seqs_{side}"), getattr(p, f"used_{side}")
            if seqs is not None:
                self._add(f"cu_seqlens_{side}", VECTOR, lengths, (p.batch_size + 1,), [*begins(seqs), sum(seqs)])
            if used is not None:
                self._add(f"seqused_{side}", VECTOR, "int32", (p.batch_size,), used)
            at = getattr(p, f"positions_{side}")
            if at is not None:
                self._add(f"positions_{side}", VECTOR, "int64", (p.batch_size,), at)
        if p.streams is not None:
            present = p.streams.extents if len(p.batch) == 2 else (p.streams.extents[0], p.streams.extents[2])
            self._add("dropout_streams", VECTOR, "int64", tuple(n if has else 1 for n, has in zip((*p.batch, p.hq), present)))
        self._add("out", QUERIES, "fp32" if "out" in p.wide else p.type, (*rows_q, p.dv), output=True)
        self._add("lse", STATISTICS, sums, statistics, output=True)
        self._add("grad_out", QUERIES, p.type, (*rows_q, p.dv))
        if p.dlse:
            self._add("grad_lse", STATISTICS, sums, statistics)
        for name in p.need:
            of = self.all[name]
            self._add(f"grad_{name}", of.kind, "fp32" if name in p.wide else of.type, of.shape, output=True)
        self._fill_family()

    def __getitem__(self, name: str) -> Tensor:
        return self.all[name]

    def __contains__(self, name: str) -> bool:
        return name in self.all

    def outputs(self, backward: bool) -> list[Tensor]:
        return [t for t in self.all.values() if t.output and t.name.startswith("grad_") == backward]

    # ---- making ----

    def _plane_shape(self, plane: object) -> tuple:
        p = self.problem
        batch = p.batch if len(p.batch) == 2 else (p.batch[0], 1)
        full = (*batch, p.hq, p.sq, p.sk)
        shape = tuple(n if has else 1 for n, has in zip(full, plane.extents))
        return shape if len(p.batch) == 2 else (shape[0], *shape[2:])

    def _add(self, name: str, kind: int, type_: str, shape: tuple, numbers: list | None = None, output=False) -> None:
        p = self.problem
        plain = name.removeprefix("grad_")
        part = ("q", "k", "v").index(plain) if plain in ("q", "k", "v") else 3
        rows = kind in (QUERIES, KEYS)
        one_tensor = p.layout == "qkv3" and part < 3
        rank = len(shape)
        order = list(range(rank - 1, -1, -1))  # from the innermost dimension outwards
        if rows and p.layout == "bhsd":
            order[1], order[2] = order[2], order[1]
        strided = p.layout == "strided"
        # On a device columns lie together (docs/semantics.md); those of q, k and v need not, they are copied first.
        together = rows and (output or part == 3) and self.device.type != "cpu"
        stride, strides = 2 if strided and not together else 1, [0] * rank
        for n, d in enumerate(order):
            strides[d] = stride
            stride *= max(shape[d], 1)
            if one_tensor and n == 1:
                stride = p.hq * p.d + p.hk * (p.d + p.dv)
            stride += (p.skew if n == (1 if rows and p.layout != "bhsd" else 0) else 0) + (3 if strided else 0)
        dtype = DTYPES[type_]
        margin = MARGIN // dtype.itemsize
        base = margin + p.skew
        if one_tensor:
            base += (0, p.hq * p.d, p.hq * p.d + p.hk * p.d)[part]
        if strided and rank > 1:  # the rows run backwards
            d = rank - 3 if rows else rank - 2
            base += max(shape[d] - 1, 0) * strides[d]
            strides[d] = -strides[d]

        if one_tensor and (output, type_) in self._of_qkv:
            buffer, fresh = self._of_qkv[output, type_], False
        else:
            buffer, fresh = torch.empty(stride + p.skew + 2 * margin, dtype=dtype, device=self.device), True
            if one_tensor:
                self._of_qkv[output, type_] = buffer
        index = torch.full(shape, base, device=self.device)
        for d in range(rank):
            along = torch.arange(shape[d], device=self.device) * strides[d]
            index += along.reshape(-1, *(1,) * (rank - 1 - d))
        tensor = Tensor(name, kind, type_, shape, tuple(strides), base, buffer, index, None, output)
        tensor.existing = self._existing(tensor)
        if fresh:
            tensor.poison()
        self.all[name] = tensor
        if numbers is not None:
            tensor.write(torch.tensor(numbers, device=self.device))
        elif not output:
            tensor.write(self._numbers(tensor))

    def _existing(self, t: Tensor) -> torch.Tensor:
        p = self.problem
        if t.kind == VECTOR or (t.kind == PLANE and t.output):  # of a bias's gradient every element is written
            return torch.ones(t.shape, dtype=torch.bool, device=self.device)
        if t.kind == PLANE:
            batch = p.batch if len(p.batch) == 2 else (p.batch[0],)
            covered = torch.ones((*batch, *t.shape[-2:]), dtype=torch.bool, device=self.device)
            for d, lengths in ((-2, self.len_q), (-1, self.len_k)):
                place = torch.arange(t.shape[d], device=self.device)
                inside = (place < lengths[:, None]).reshape(*batch, *((-1, 1) if d == -2 else (1, -1)))
                covered = covered & inside
            for level in range(len(batch)):
                if t.shape[level] == 1:
                    covered = covered.any(level, keepdim=True)
            return covered.unsqueeze(-3).expand(t.shape)
        rows, begin, lengths, heads_dim = (
            (p.rows_k, self.begin_k, self.len_k, -2) if t.kind == KEYS else (p.rows_q, self.begin_q, self.len_q, -2)
        )
        place = torch.arange(rows, device=self.device)
        owned = (place >= begin[:, None]) & (place < (begin + lengths)[:, None])  # (B, rows)
        owned = owned.any(0) if p.packed else owned.reshape(*p.batch, rows)
        if t.kind == STATISTICS:
            return owned.unsqueeze(-2).expand(t.shape)
        return owned[..., None, None].expand(t.shape)

    # ---- numbers ----

    def _numbers(self, t: Tensor) -> torch.Tensor:
        p = self.problem
        generator = torch.Generator(self.device)
        generator.manual_seed(p.case_seed * 1000003 + zlib.crc32(t.name.encode()))
        uniform = lambda: torch.rand(t.shape, generator=generator, device=self.device)  # noqa: E731
        if t.name == "mask":
            return uniform() < 0.7
        if t.name == "dropout_streams":  # any numbers
            return torch.randint(-(2**62), 2**62, t.shape, generator=generator, device=self.device)
        if t.name == "alibi_slopes":
            return uniform() / 4
        values = torch.randn(t.shape, generator=generator, device=self.device, dtype=torch.float64)
        if t.name in ("q", "k") and p.values == "large_scores":
            values *= 30
        elif p.values == "denormal" and (t.name == "v" or (t.name == "grad_out" and p.case_seed % 2 == 0)):
            values *= {"fp64": 1e-310, "fp16": 1e-6}.get(t.type, 1e-39)
        elif p.values == "one_sign" and t.name in ("v", "grad_out"):
            # dP is about the key's share of this, whatever the batch entry: terms of a bias's gradient that add up.
            rows = torch.linspace(-1, 1, t.shape[-3], device=self.device, dtype=torch.float64)[:, None, None]
            values = 0.1 * values + (rows if t.name == "v" else 1)
        elif t.name == "sink" and p.values == "large_sink":
            values += 30
        elif t.name == "bias" and p.values == "minus_infinity":
            values[uniform() < 1 / 3] = -math.inf
        elif t.name == "bias" and p.values == "huge":
            huge = torch.copysign(torch.tensor(6e4 if t.type == "fp16" else 1e30, dtype=torch.float64), values)
            values = torch.where(uniform() < 1 / 3, huge, values)
        return values

    def before(self, name: str) -> torch.Tensor:
        """What an output holds that a call combines with its result: of its shape. lse is -inf in every fifth row, and out 0 there."""
        t = self[name]
        values = self._numbers(t)
        rows = torch.arange(t.shape[-3 if name == "out" else -1], device=self.device) % 5 == 0
        if name == "out":
            values = torch.where(rows[:, None, None], 0.0, values)
        elif name == "lse":
            values = torch.where(rows, -math.inf, 2 * values)
        return values.to(t.buffer.dtype)

    def _fill_family(self) -> None:
        """What depends on coordinates."""
        p = self.problem
        if p.values in ("dead_rows", "lowest"):
            mask_by_query = "mask" in self and p.mask.extents[3]
            name = "mask" if p.values == "dead_rows" and mask_by_query else "bias"
            t = self[name]
            third = (torch.arange(t.shape[-2], device=self.device) % 3 == 0)[:, None]
            value = 0 if name == "mask" else -math.inf if p.values == "dead_rows" else torch.finfo(t.buffer.dtype).min
            t.write(torch.where(third, torch.tensor(value, dtype=t.buffer.dtype, device=self.device), t.values()))
        elif p.values == "nan_where_masked":
            if "mask" in self:  # of several entries and keys: so that some elements of smaller biases have no pair
                t = self["mask"]
                hidden = torch.zeros(t.shape, dtype=torch.bool, device=self.device)
                hidden[..., 2::5] = p.mask.extents[4]
                if p.batch_size > 1 and any(p.mask.extents[:2]):
                    hidden.flatten(0, -4)[-1] = True
                t.write(torch.where(hidden, False, t.values()))
            allowed = self.allowed().expand(p.batch_size, p.hq, p.sq, p.sk).reshape(*p.batch, p.hq, p.sq, p.sk)
            for name in ("bias", "bias2"):
                if name in self:
                    t = self[name]
                    broadcast = [dim for dim, size in enumerate(t.shape) if size != allowed.shape[dim]]
                    used = allowed.any(broadcast, keepdim=True) if broadcast else allowed
                    t.write(torch.where(used, t.values(), math.nan))
        elif p.values == "one_hot" and p.sk:
            # q_i is six times the key i mod Sk, so that this one stands out.
            k = self.padded("k").repeat_interleave(p.hq // p.hk, dim=1)  # (B, H, Sk, D)
            place = torch.arange(p.sq, device=self.device) % self.len_k.clamp(min=1)[:, None]
            chosen = k.gather(2, place[:, None, :, None].expand(-1, p.hq, -1, p.d))
            keep = (self.rows_exist_q & (self.len_k > 0)[:, None])[:, None, :, None]
            self.write_padded("q", torch.where(keep, 6 * chosen, self.padded("q")))

    # ---- padded: (B, H, max_seqlen, columns) of queries and keys, (B, H, max_seqlen) of statistics ----

    def _padded_index(self, t: Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(flat element numbers, whether they exist)"""
        p = self.problem
        keys = t.kind == KEYS
        exist = self.rows_exist_k if keys else self.rows_exist_q
        statistics = t.kind == STATISTICS
        if p.packed:
            row_dim = 1 if statistics else 0
            place = torch.arange(p.sk if keys else p.sq, device=self.device)
            row = ((self.begin_k if keys else self.begin_q)[:, None] + place).clamp(max=max(t.shape[row_dim] - 1, 0))
            index = t.index.movedim(row_dim, 0)[row]  # (B, L, H, D) or (B, L, H)
        else:
            index = t.index.reshape(p.batch_size, *t.shape[len(p.batch) :])
            if statistics:
                index = index.transpose(1, 2)  # (B, L, H)
        index = index.transpose(1, 2)
        exist = exist[:, None, :] if statistics else exist[:, None, :, None]
        return index, exist.expand(index.shape)

    def padded(self, name: str) -> torch.Tensor:
        t = self[name]
        index, exist = self._padded_index(t)
        return torch.where(exist, t.buffer[index], 0)

    def padded_of(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Other values of a tensor's shape."""
        t = self[name]
        index, exist = self._padded_index(t)
        buffer = torch.zeros(t.buffer.shape, dtype=values.dtype, device=self.device)
        buffer[t.index] = values
        return torch.where(exist, buffer[index], 0)

    def write_padded(self, name: str, values: torch.Tensor) -> None:
        t = self[name]
        index, exist = self._padded_index(t)
        t.buffer[index[exist]] = values.expand(index.shape)[exist].to(t.buffer.dtype)

    def plane(self, name: str) -> torch.Tensor:
        """A bias or mask, expanded to (B, H, Sq, Sk)."""
        p = self.problem
        full = (*p.batch, p.hq, p.sq, p.sk)
        t = self[name]
        return t.buffer[t.index.expand(full)].reshape(p.batch_size, *full[len(p.batch) :])

    def first(self, side: str) -> torch.Tensor:
        """The position of row 0 of each sequence: (B,); 0 without positions."""
        p = self.problem
        return torch.tensor(p.first_positions(side) if p.has_positions else [0] * p.batch_size, device=self.device)

    def shift(self) -> torch.Tensor:
        """What aligns query 0 of each sequence with its keys: (B,)."""
        if self.problem.has_positions:
            return self.first("q") - self.first("k")
        return torch.zeros_like(self.len_k) if self.problem.top_left else self.len_k - self.len_q

    def streams(self) -> torch.Tensor:
        """Of dropout, of each head: (B, Hq)."""
        p = self.problem
        if "dropout_streams" not in self:
            return torch.arange(p.batch_size * p.hq, device=self.device).reshape(p.batch_size, p.hq)
        return self["dropout_streams"].values().expand(*p.batch, p.hq).reshape(p.batch_size, p.hq)

    def allowed(self) -> torch.Tensor:
        """Which pairs take part: (B, 1 or H, Sq, Sk)."""
        p = self.problem
        i = torch.arange(p.sq, device=self.device)[None, :, None] + self.shift()[:, None, None]
        j = torch.arange(p.sk, device=self.device)[None, None, :]
        allowed = self.rows_exist_q[:, :, None] & self.rows_exist_k[:, None, :]
        if p.causal:
            allowed = allowed & (j <= i)
        if p.window[0] >= 0:
            allowed = allowed & (j >= i - p.window[0])
        if p.window[1] >= 0:
            allowed = allowed & (j <= i + p.window[1])
        allowed = allowed[:, None]
        return allowed & (self.plane("mask") != 0) if p.mask is not None else allowed

    # ---- sentinels ----

    def prepare(self, backward: bool) -> None:
        """Prepares a direction's outputs for the comparison."""
        adds = [f"grad_{name}" for name in self.problem.adds(True)] if backward else ["out", "lse"] * bool(self.problem.adds(False))
        self._allowed: dict[int, tuple[Tensor, torch.Tensor]] = {}
        for t in self.outputs(backward):
            key = t.buffer.data_ptr()
            if key not in self._allowed:
                width = t.buffer.element_size()
                t.buffer.view(_INTS[width]).copy_(pattern(t.buffer.numel(), width, self.device))
                self._allowed[key] = (t, torch.zeros(t.buffer.numel(), dtype=torch.bool, device=self.device))
            at = t.index[t.existing]
            self._allowed[key][1][at] = True
            t.buffer[at] = self.before(t.name)[t.existing] if t.name in adds else math.nan

    def trespass(self) -> list[tuple[str, torch.Tensor]]:
        """(output, how many elements were written that must not be), the numbers on the device."""
        found = []
        for t, allowed in self._allowed.values():
            width = t.buffer.element_size()
            written = t.buffer.view(_INTS[width]) != pattern(t.buffer.numel(), width, self.device)
            found.append((t.name, (written & ~allowed).sum()))
        return found
