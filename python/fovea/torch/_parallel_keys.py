# SPDX-License-Identifier: Apache-2.0
"""context_parallel with move="keys": each rank keeps its rows of q and fetches the keys and values that they see, some heads at a time.

The call for a piece of its rows is an ordinary one with the piece's position and the keys up to the end that the piece sees. The
gradients are formed by the same calls. Those of the keys are summed over pieces and ranks in fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _attention, _call, _rows
from ._call import Shard
from ._parallel_call import (
    PLANES, Call, arguments_of, draw_seed, entries_of, has_queries, saying_rank, streams_of,
)  # fmt: skip
from ._parallel_copies import clear, copy
from ._parallel_fetch import Add, Moving, fetch_plan, start_fetch, start_return
from ._parallel_positions import Span, keys_of, moved_by_lengths, positions_of, some, used_among
from ._rows import Piece, Rows


def by_keys(call: Call) -> tuple[Tensor, Tensor]:
    call = call._replace(options={**call.options, "seed": draw_seed(call)})
    return differentiable(call, "keys", keys_forward, keys_backward)


NAMED = ("q", "k", "v", "bias", "bias2", "sink")


def differentiable(call: Call, way: str, forward: Any, backward: Any) -> tuple[Tensor, Tensor]:
    """out and lse, by the two functions that compute a call and its gradients."""
    o = call.options
    if call.through is not None:
        forward, backward = call.through.ways(way)
    out, lse = _Moved.apply(call, forward, backward, call.q, call.k, call.v, o["bias"], o["bias2"], o["sink"])
    return out, lse


def _with_tensors(call: Call, tensors: Any, others: dict[str, Optional[Tensor]]) -> Call:
    """The call with other tensors in place of those that have gradients, and some in place of others."""
    named = dict(zip(NAMED[3:], tensors[3:]))
    return call._replace(q=tensors[0], k=tensors[1], v=tensors[2], options={**call.options, **named, **others})


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


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, forward: Any, backward: Any, *tensors: Any) -> Any:
        others = {name: x for name, x in call.options.items() if isinstance(x, Tensor) and name not in NAMED}
        kept: list[Tensor] = []
        out, lse = forward(_with_tensors(call._replace(kept=kept), tensors, {}))
        ctx.set_materialize_grads(False)
        # All of the call's tensors, so that PyTorch refuses a backward after one of them was changed in place.
        ctx.save_for_backward(*tensors, out, lse, *others.values(), *kept)
        ctx.others = list(others)
        ctx.call = _with_tensors(call, (None,) * len(NAMED), dict.fromkeys(others))
        ctx.gradients = backward
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Optional[Tensor], grad_lse: Optional[Tensor]) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        tensors, (out, lse), others = saved[: len(NAMED)], saved[len(NAMED) :][:2], saved[len(NAMED) + 2 :]
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        kept = list(others[len(ctx.others) :])
        call = _with_tensors(ctx.call._replace(kept=kept), tensors, dict(zip(ctx.others, others)))
        with saying_rank(call.rows):
            return (None, None, None, *ctx.gradients(call, ctx.needs_input_grad[3:], grad_out, grad_lse, out, lse))


class Part(NamedTuple):
    """What one call computes: some adjacent rows of this rank, of some heads."""

    first: int  # of this rank's rows
    rows: int
    keys: Span  # that it has, in natural order
    options: dict[str, Any]
    shard: Shard = Shard()
    own: bool = False  # whether these are this rank's rows where they lie, and not fetched ones
    starts: Optional[Tensor] = None  # of packed rows: the position of each sequence's first row
    longest: int = 0  # of packed rows: the most of a sequence


def _parts(call: Call) -> list[Part]:
    """One for each piece of a dense rank; for packed rows one for the first pieces of all sequences, and one for the second ones."""
    if call.rows.kind == "packed":
        return _packed_parts(call)
    moved = moved_by_lengths(call.rows, call.options, call.q.device)
    edge = fetch_plan(call.rows, call.options, call.q.device).edge
    if edge is not None:
        (piece,) = call.rows.pieces[call.rank]
        own = Span(piece.start, piece.start + piece.rows)
        if edge == 0 or piece.start == 0:
            return [_dense_part(call, moved, piece, 0, own)]
        # The rows that need no fetched keys first: meanwhile these come.
        behind = piece._replace(start=piece.start + edge, rows=piece.rows - edge)
        return [_dense_part(call, moved, behind, edge, own), _dense_part(call, moved, piece._replace(rows=edge), 0)]
    return [_dense_part(call, moved, piece, at) for piece, at in with_places(some(call.rows.pieces[call.rank]))]


def with_places(pieces: tuple[Piece, ...]) -> Iterator[tuple[Piece, int]]:
    at = 0
    for piece in pieces:
        yield piece, at
        at += piece.rows


def _dense_part(call: Call, moved: Optional[Tensor], piece: Piece, at: int, own: Optional[Span] = None) -> Part:
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


class _Group:
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

    def start(self) -> _Group:
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

    def arguments(self, part: Part) -> tuple[Any, ...]:
        call, o = self.call, self.call.options
        q = self.of_queries_alone(call.q, part)
        k, v = self.keys_of_part(part)
        planes = {name: self.plane(o[name], part) for name in PLANES}
        slopes, sink = self.of_heads(o["alibi_slopes"]), self.of_heads(o["sink"])
        arguments = arguments_of(q, k, v, o, **planes, alibi_slopes=slopes, sink=sink, **part.options)
        streams = streams_of(entries_of(call), call.heads(call.q), o, self.first_query, self.queries, q.device)
        shard = part.shard._replace(dropout_streams=streams)
        return arguments if all(given is None for given in shard) else (*arguments, *shard)

    def keys_of_part(self, part: Part) -> list[Tensor]:
        if part.own:
            return [self.of_keys(x) for x in (self.call.k, self.call.v)]
        self.end()
        return self.of_part(self.fetched, part)

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


def _groups_ahead(call: Call) -> Generator[_Group]:
    """The groups of heads. The next one's keys are on their way while one is computed, but only when this one's are there and in order:
    so there are never more than two groups' keys and values."""
    group = following = _Group(call, 0).start()
    try:
        for number in range(1, call.groups + 1):
            if group.plan.edge is None:
                group.end()
            following = _Group(call, number).start() if number < call.groups else group
            yield group
            group.end()
            group.fetched = []
            group = following
    finally:  # after an error, too: what is on its way would meet the group's next calls
        group.end()
        following.end()


def keys_forward(call: Call) -> tuple[Tensor, Tensor]:
    packed = {"cu_seqlens_q": call.q} if call.rows.kind == "packed" else {}
    whole = arguments_of(call.q, call.k, call.v, call.options, **packed)
    out = _call.new_out(whole, _call.out_layout(whole))
    lse = _call.new_lse(whole, _call.lse_shape(whole))
    parts = _parts(call)
    with contextlib.closing(_groups_ahead(call)) as groups:
        for group in groups:
            for part in parts:
                _call.compute(group.arguments(part), with_lse=True, into=(group.of_queries_alone(out, part), group.of_lse(lse, part)))
    return out, lse


def keys_backward(
    call: Call, need: Any, grad_out: Tensor, grad_lse: Optional[Tensor], out: Tensor, lse: Tensor
) -> list[Optional[Tensor]]:
    o, rows = call.options, call.rows
    wants = dict(zip(NAMED, need))
    grads: dict[str, Tensor] = {}
    on_cpu = call.q.device.type == "cpu"
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if wants[name]:  # kernels of a GPU write where the columns of a row are adjacent
            adjacent = x.stride(-1) == 1 or on_cpu
            grads[name] = torch.empty_like(x, memory_format=torch.preserve_format if adjacent else torch.contiguous_format)
    # Of biases and the sink: what parts write each once, and what is summed over them.
    summed: dict[str, Tensor] = {}
    planes: list[str] = []
    for name in NAMED[3:]:
        if wants[name]:
            if name != "sink" and has_queries(o[name]) and rows.kind != "packed":
                grads[name] = torch.zeros_like(o[name]) if on_cpu else torch.empty_like(o[name])
                planes.append(name)
            else:
                summed[name] = torch.zeros_like(o[name], dtype=_rows.wide(o[name].dtype))

    def add(group: _Group, part: Part, of_keys: list[Tensor], is_first: bool) -> None:
        """A part's gradients. Those of keys are written by the first part, to which the others add."""
        sums = {name: x for name, x in zip("kv", group.of_part(of_keys, part)) if wants[name]} if of_keys else {}
        into = {name: group.plane(grads[name], part) for name in planes}
        for name in () if on_cpu else planes:
            for rest in group.other_keys(grads[name], part):
                clear(rest)
        if wants["q"]:
            into["q"] = group.of_queries_alone(grads["q"], part)
        if is_first:
            into, sums = {**into, **sums}, {}
        found = _call.backward(
            group.of_queries_alone(grad_out, part), None if grad_lse is None else group.of_lse(grad_lse, part).contiguous(),
            group.of_queries_alone(out, part), group.of_lse(lse, part).contiguous(), list(need), *group.arguments(part),
            into=into, sums=sums,
        )  # fmt: skip
        for name, grad in zip([name for name in NAMED if wants[name]], found):
            if name == "sink":
                group.of_heads(summed[name]).add_(grad)
            elif name in summed:
                group.add_plane(summed[name], part, grad)

    def end(group: _Group, pending: Moving, own: list[Tensor]) -> None:
        for first, rows in pending.wait():
            for name, grad in zip("kv", group.split(rows)):
                if wants[name]:
                    group.of_keys(grads[name]).narrow(call.rows_dim, first, rows.shape[0]).copy_(grad)
        for name, grad in zip("kv", own):
            if wants[name]:
                group.of_keys(grads[name]).copy_(grad)

    def adding(group: _Group, own: list[Tensor]) -> Optional[Add]:
        def add_rows(first: int, part: Tensor) -> None:
            for total, grad in zip(own, group.split(part)):
                total.narrow(call.rows_dim, first, part.shape[0]).add_(grad)

        return add_rows if own else None

    # The part with the most keys first: it writes the gradients of all keys that this rank has.
    parts = sorted(_parts(call), key=lambda part: -part.keys.end)
    before: list[tuple[_Group, Moving, list[Tensor]]] = []  # at most one: no more than two groups' sums
    # A broadcast over heads is summed over groups, too; _groups() avoids that where it would cost bits.
    with contextlib.closing(_groups_ahead(call)) as groups:
        try:
            for group in groups:
                if not (wants["k"] or wants["v"]):
                    for part in parts:
                        add(group, part, [], False)
                    continue
                span, at_edge = group.plan.mine, group.plan.edge is not None
                written = bool(parts) and (at_edge or rows.kind == "packed" or parts[0].keys.end == span.end)
                make = torch.empty if written else torch.zeros
                total = make(span.rows, width(group.shapes), dtype=_rows.wide(call.q.dtype), device=call.q.device)
                own = [torch.empty_like(group.of_keys(x), dtype=total.dtype) for x in (call.k, call.v) if at_edge]
                for part in parts:
                    if not part.own:
                        add(group, part, group.split(total), at_edge or (written and part is parts[0]))
                while before:
                    end(*before.pop())
                before.append((group, start_return(group.plan, total, "the gradients of keys and values", adding(group, own)), own))
                for part in parts:  # whose keys nobody else fetched: these are computed while the others' gradients move
                    if part.own:
                        add(group, part, own, True)
                del total, own
        finally:  # after an error, too, as in _groups_ahead()
            while before:
                end(*before.pop())
    return [grads[name] if name in grads else summed[name].to(o[name].dtype) if name in summed else None for name in NAMED]
