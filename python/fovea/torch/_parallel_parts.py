# SPDX-License-Identifier: Apache-2.0
"""What the calls of context_parallel with move="keys" compute: the parts of a rank's rows, and the operands of a group of heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from . import _attention
from ._call import Shard
from ._parallel_call import PLANES, Call, arguments_of, entries_of, has_queries, streams_of
from ._parallel_copies import copy
from ._parallel_fetch import fetch_plan, start_fetch
from ._parallel_positions import Span, keys_of, moved_by_lengths, positions_of, some, used_among
from ._rows import Piece, Rows

NAMED = ("q", "k", "v", "bias", "bias2", "sink")
OfRows = tuple[Tensor, Optional[Tensor], Tensor, Tensor]  # the gradients of out and lse, out and lse


def shapes_of(tensors: Iterable[Tensor], rows_dim: int) -> list[torch.Size]:
    """Of a row."""
    return [x.movedim(rows_dim, 0).shape[1:] for x in tensors]


def width(shapes: list[torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes)


def put(whole: Tensor, rows_dim: int, tensors: Sequence[Tensor]) -> None:
    """Copies tensors so that each row has the elements of the first one, then those of the next one."""
    for room, x in zip(split(whole, rows_dim, shapes_of(tensors, rows_dim)), tensors):
        copy(room, x)


def split(whole: Any, rows_dim: int, shapes: list[torch.Size]) -> list[Tensor]:
    """k and v, or their gradients, with all dimensions."""
    parts = whole.split([shape.numel() for shape in shapes], 1)
    return [part.unflatten(1, shape).movedim(0, rows_dim) for part, shape in zip(parts, shapes)]


class Part(NamedTuple):
    """What one call computes: some adjacent rows of this rank, of some heads."""

    first: int  # of this rank's rows
    rows: int
    keys: Span  # that it has, in natural order
    options: dict[str, Any]
    shard: Shard = Shard()
    own: bool = False  # whether these are this rank's keys where they lie, and not fetched ones
    starts: Optional[Tensor] = None  # of packed rows: the position of each sequence's first row
    longest: int = 0  # of packed rows: the most of a sequence


def parts_of(call: Call) -> list[Part]:
    """One for each piece of a dense rank; for packed rows one for the first pieces of all sequences, and one for the second ones."""
    if call.rows.kind == "packed":
        return _packed_parts(call)
    moved = moved_by_lengths(call.rows, call.options, call.q.device)
    edge = fetch_plan(call.rows, call.options, call.q.device).edge
    if edge is not None:
        (piece,) = call.rows.pieces[call.rank]
        own = Span(piece.start, piece.start + piece.rows)
        if edge == 0 or piece.start == 0:
            return [dense_part(call, moved, piece, 0, own)]
        # The rows that need no fetched keys first: meanwhile these come.
        behind = piece._replace(start=piece.start + edge, rows=piece.rows - edge)
        return [dense_part(call, moved, behind, edge, own), dense_part(call, moved, piece._replace(rows=edge), 0)]
    return [dense_part(call, moved, piece, at) for piece, at in with_places(some(call.rows.pieces[call.rank]))]


def with_places(pieces: tuple[Piece, ...]) -> Iterator[tuple[Piece, int]]:
    at = 0
    for piece in pieces:
        yield piece, at
        at += piece.rows


def dense_part(call: Call, moved: Optional[Tensor], piece: Piece, at: int, own: Optional[Span] = None) -> Part:
    rows, o, device = call.rows, call.options, call.q.device
    first, end = own or (fetch_plan(rows, o, device).mine.first, keys_of(rows, o, device, piece).end)
    shard = positions_of(o, moved, piece.start)
    if first > 0:  # so there is a window, which positions are for
        shard = shard._replace(position_k=(shard.position_k or 0) + first)
    used = {
        "seqused_q": used_among(o["seqused_q"], piece.start, piece.rows), "seqused_k": used_among(o["seqused_k"], first, end - first),
    }  # fmt: skip
    return Part(at, piece.rows, Span(first, end), used, shard, own is not None)


class Numbers(NamedTuple):
    """One piece of each sequence that a rank has, of packed rows: the first ones or the second ones."""

    first: int  # of the rank's rows
    rows: int
    longest: int
    ends: Tensor  # cu_seqlens
    starts: Tensor  # the position of each sequence's first row
    lengths: Tensor  # the rows of each sequence


def packed_numbers(rows: Rows, rank: int, device: Any) -> list[Numbers]:
    def made() -> list[Numbers]:
        seen: set[int] = set()
        numbers: list[list[tuple[Piece, int]]] = [[], []]
        for piece, at in with_places(some(rows.pieces[rank]) if rows.lengths else ()):
            numbers[piece.sequence in seen].append((piece, at))
            seen.add(piece.sequence)
        found = []
        for pieces in numbers:
            if pieces:
                lengths, starts = [0] * len(rows.lengths), [0] * len(rows.lengths)
                for piece, _ in pieces:
                    lengths[piece.sequence], starts[piece.sequence] = piece.rows, piece.start
                ends = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
                each = [torch.tensor(numbers, device=device) for numbers in (starts, lengths)]
                found.append(Numbers(pieces[0][1], sum(lengths), max(lengths), ends, *each))
        return found

    known: list[Numbers] = rows._cached(("packed numbers", rank, device), made)
    return known


def _packed_parts(call: Call) -> list[Part]:
    rows, device, o = call.rows, call.q.device, call.options
    keys, moved = rows._ends(device), moved_by_lengths(rows, o, device)
    shape = o["batch_shape"]
    outer = 0 if shape is None else _attention._batch_outer(shape, keys, keys)
    parts = []
    for n in packed_numbers(rows, call.rank, device):
        more = {"cu_seqlens_q": n.ends, "cu_seqlens_k": keys, "max_seqlen_q": n.longest, "max_seqlen_k": rows.longest, "batch_outer": outer}
        if o["seqused_q"] is not None:
            more["seqused_q"] = used_among(o["seqused_q"], n.starts, n.lengths)
        shard = positions_of(o, moved, 0, n.starts)
        parts.append(Part(n.first, n.rows, Span(0, rows.total), more, shard, starts=n.starts, longest=n.longest))
    return parts


class Group:
    """The operands of one group of heads."""

    def __init__(self, call: Call, number: int) -> None:
        self.call, self.number = call, number
        self.queries = call.heads(call.q) // call.groups
        self.keys = call.heads(call.k) // call.groups
        self.first_query = number * self.queries
        self.first_key = number * self.keys
        self.plan = fetch_plan(call.rows, call.options, call.q.device)
        self.pending: Any = None
        self.fetched: list[Tensor] = []  # k and v of this rank's span

    def start(self) -> Group:
        """Begins to fetch its keys and values, if they are not there."""
        call = self.call
        mine = [self.of_keys(x) for x in (call.k, call.v)]
        self.shapes = shapes_of(mine, call.rows_dim)
        if call.kept is not None and self.number < len(call.kept):
            self.fetched = self.split(call.kept[self.number])
            return self

        def own(room: Tensor, first: int, rows: int) -> None:
            put(room, call.rows_dim, [x.narrow(call.rows_dim, first, rows) for x in mine])

        self.pending = start_fetch(self.plan, width(self.shapes), call.k, own, "keys and values")
        return self

    def end(self) -> None:
        if self.pending is not None:
            whole = self.pending.wait()
            if self.plan.edge is not None and self.call.kept is not None:  # these are few rows
                self.call.kept.append(whole)
            self.fetched = self.split(whole)
            self.pending = None

    def of_keys(self, x: Tensor) -> Tensor:
        return x.narrow(self.call.heads_dim, self.first_key, self.keys)

    def split(self, whole: Any) -> list[Tensor]:
        return split(whole, self.call.rows_dim, self.shapes)

    def of_queries(self, x: Optional[Tensor], part: Part, heads_dim: int, rows_dim: int) -> Any:
        """This group's heads and this part's rows; those that are broadcast, whole."""
        if x is None:
            return None
        if x.dim() >= -heads_dim and x.shape[heads_dim] != 1:
            x = x.narrow(heads_dim, self.first_query, self.queries)
        if x.dim() >= -rows_dim and x.shape[rows_dim] != 1:
            x = x.narrow(rows_dim, part.first, part.rows)
        return x

    def plane(self, x: Optional[Tensor], part: Part) -> Any:
        """A view; of packed rows with queries a copy."""
        if has_queries(x) and self.call.rows.kind == "packed":
            whole, index = self.rows_of_entries(x, part)
            rows = whole[index].movedim(-1, 1)
            return rows.view(*entries_of(self.call), *rows.shape[1:])
        x = self.of_queries(x, part, -3, -2)
        if x is not None and x.dim() >= 1 and x.shape[-1] != 1 and self.call.rows.kind != "packed":
            x = x.narrow(-1, part.keys.first, part.keys.rows)
        return x

    def other_keys(self, x: Tensor, part: Part) -> list[Tensor]:
        """Of a part's rows, the columns that plane() leaves out."""
        if x.shape[-1] == 1:
            return []
        x = self.of_queries(x, part, -3, -2)
        return [x[..., : part.keys.first], x[..., part.keys.end :]]

    def add_plane(self, into: Tensor, part: Part, grad: Tensor) -> None:
        """Adds the gradient of what plane() returns."""
        if has_queries(into) and self.call.rows.kind == "packed":
            whole, index = self.rows_of_entries(into, part)
            whole.index_put_(index, grad.flatten(0, -4).movedim(1, -1).to(into.dtype), accumulate=True)
        else:
            self.plane(into, part).add_(grad)

    def rows_of_entries(self, x: Any, part: Part) -> tuple[Tensor, tuple[Any, ...]]:
        """The plane of packed rows with this group's heads last, and an index of it: (sequences, rows, keys, heads) of this part's rows."""
        entries, starts = entries_of(self.call), part.starts
        assert starts is not None
        x = x[(None,) * (len(entries) + 3 - x.dim())]
        rows = (starts[:, None] + torch.arange(part.longest, device=starts.device)).clamp_max(x.shape[-2] - 1)
        numbers = torch.unravel_index(torch.arange(starts.shape[0], device=starts.device), entries)
        levels = [number[:, None] if size != 1 else torch.zeros_like(rows) for number, size in zip(numbers, x.shape)]
        heads = x if x.shape[-3] == 1 else x.narrow(-3, self.first_query, self.queries)
        return heads.movedim(-3, -1), (*levels, rows)

    def of_heads(self, x: Optional[Tensor]) -> Any:
        return None if x is None else x.narrow(-1, self.first_query, self.queries)

    def arguments(self, part: Part, q: Optional[Tensor] = None) -> tuple[Any, ...]:
        """q: of a part whose rows are not all of this rank."""
        call, o = self.call, self.call.options
        q = self.of_queries_alone(call.q, part) if q is None else q
        k, v = self.keys_of_part(part)
        planes = {name: self.plane(o[name], part) for name in PLANES}
        slopes, sink = self.of_heads(o["alibi_slopes"]), self.of_heads(o["sink"])
        arguments = arguments_of(q, k, v, o, **planes, alibi_slopes=slopes, sink=sink, **part.options)
        streams = streams_of(entries_of(call), call.heads(call.q), o, self.first_query, self.queries, q.device)
        shard = part.shard._replace(dropout_streams=streams)
        return arguments if all(given is None for given in shard) else (*arguments, *shard)

    def keys_of_part(self, part: Part) -> list[Tensor]:
        if part.own:
            return [self.of_own_keys(x, part) for x in (self.call.k, self.call.v)]
        self.end()
        return self.of_part(self.fetched, part)

    def of_own_keys(self, x: Tensor, part: Part) -> Tensor:
        """Of a tensor with this rank's rows, the keys of a part that reads them where they lie."""
        (piece,) = self.call.rows.pieces[self.call.rank]
        return self.of_keys(x).narrow(self.call.rows_dim, part.keys.first - piece.start, part.keys.rows)

    def of_part(self, of_keys: list[Tensor], part: Part) -> list[Tensor]:
        """Of this rank's keys, or of their gradients, those that a part has."""
        if part.own or self.call.rows.kind == "packed":
            return of_keys
        return [x.narrow(self.call.rows_dim, 0, part.keys.end - self.plan.mine.first) for x in of_keys]

    def of_queries_alone(self, x: Tensor, part: Part) -> Tensor:
        """The same of q, out or their gradients, which are never broadcast."""
        call = self.call
        return x.narrow(call.heads_dim, self.first_query, self.queries).narrow(call.rows_dim, part.first, part.rows)

    def of_lse(self, x: Tensor, part: Part) -> Tensor:
        return x.narrow(-2, self.first_query, self.queries).narrow(-1, part.first, part.rows)

    def of_rows(self, part: Part, grad_out: Tensor, grad_lse: Optional[Tensor], out: Tensor, lse: Tensor) -> OfRows:
        """What a backward is given beside the operands."""
        numbers = [None if x is None else self.of_lse(x, part).contiguous() for x in (grad_lse, lse)]
        assert numbers[1] is not None
        return self.of_queries_alone(grad_out, part), numbers[0], self.of_queries_alone(out, part), numbers[1]
