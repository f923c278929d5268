# SPDX-License-Identifier: Apache-2.0
"""context_parallel with move="keys": each rank keeps its rows of q and gathers the keys and values of all rows, some heads at a time.

The call for a piece of its rows is an ordinary one with the piece's position and the keys up to the end that the piece sees. The
gradients are formed by the same calls. Those of the keys are summed over pieces and ranks in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _attention, _call, _rows
from ._call import Shard
from ._parallel_call import (
    PLANES, Call, arguments_of, draw_seed, entries_of, has_queries, is_positional, moves_by_lengths, saying_rank, streams_of,
)  # fmt: skip
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
        room.copy_(x)


def split(whole: Any, rows_dim: int, shapes: list[torch.Size]) -> list[Tensor]:
    """k and v, or their gradients, with all dimensions."""
    parts = whole.split([shape.numel() for shape in shapes], 1)
    return [part.unflatten(1, shape).movedim(0, rows_dim) for part, shape in zip(parts, shapes)]


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, forward: Any, backward: Any, *tensors: Any) -> Any:
        others = {name: x for name, x in call.options.items() if isinstance(x, Tensor) and name not in NAMED}
        out, lse = forward(_with_tensors(call, tensors, {}))
        ctx.set_materialize_grads(False)
        # All of the call's tensors, so that PyTorch refuses a backward after one of them was changed in place.
        ctx.save_for_backward(*tensors, out, lse, *others.values())
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
        call = _with_tensors(ctx.call, tensors, dict(zip(ctx.others, others)))
        with saying_rank(call.rows):
            return (None, None, None, *ctx.gradients(call, ctx.needs_input_grad[3:], grad_out, grad_lse, out, lse))


class Part(NamedTuple):
    """What one call computes: some adjacent rows of this rank, of some heads."""

    first: int  # of this rank's rows
    rows: int
    end: int  # the keys that it has, of dense rows
    options: dict[str, Any]
    shard: Shard = Shard()
    starts: Optional[Tensor] = None  # of packed rows: the position of each sequence's first row
    longest: int = 0  # of packed rows: the most of a sequence


def _parts(call: Call) -> list[Part]:
    """One for each piece of a dense rank; for packed rows one for the first pieces of all sequences, and one for the second ones."""
    if call.rows.kind == "packed":
        return _packed_parts(call)
    return [_dense_part(call, piece, at) for piece, at in with_places(some(call.rows.mine))]


def some(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """A rank without rows has a call, too. It computes nothing, but refuses what those of the other ranks refuse: nobody waits for it."""
    return pieces or (Piece(0, 0, 0),)


def with_places(pieces: tuple[Piece, ...]) -> Iterator[tuple[Piece, int]]:
    at = 0
    for piece in pieces:
        yield piece, at
        at += piece.rows


def positions_of(call: Call, start: int, starts: Optional[Tensor]) -> Shard:
    """Where a part's rows are, by a number or for each sequence. Its streams are those of a group of heads."""
    o = call.options
    if not is_positional(o):
        return Shard()
    each_q, each_k = o["positions_q"], o["positions_k"]
    if moves_by_lengths(o):
        whole = torch.tensor(call.rows.lengths, device=call.q.device)
        lengths = [whole if used is None else torch.minimum(used.long(), whole) for used in (o["seqused_q"], o["seqused_k"])]
        each_q = lengths[1] - lengths[0]
    if starts is not None:
        each_q = starts if each_q is None else starts + each_q
    return Shard((o["position_q"] or 0) + start, o["position_k"] or 0, each_q, each_k)


def _dense_part(call: Call, piece: Piece, at: int) -> Part:
    o, total = call.options, call.rows.total
    right = 0 if o["causal"] else o["window"][1]
    shard = positions_of(call, piece.start, None)
    end = total
    if right >= 0 and shard.positions_q is None and shard.positions_k is None:
        end = max(0, min(total, piece.rows + (shard.position_q or 0) - (shard.position_k or 0) + right))
    used_q, used_k = o["seqused_q"], o["seqused_k"]
    if used_q is not None:
        used_q = (used_q.long() - piece.start).clamp(0, piece.rows).int()
    if used_k is not None:
        used_k = used_k.long().clamp(0, end).int()
    return Part(at, piece.rows, end, {"seqused_q": used_q, "seqused_k": used_k}, shard)


class Numbers(NamedTuple):
    """One piece of each sequence that a rank has, of packed rows: the first ones or the second ones."""

    first: int  # of the rank's rows
    rows: int
    longest: int
    ends: Tensor  # cu_seqlens
    starts: Tensor  # the position of each sequence's first row


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
                found.append(Numbers(pieces[0][1], sum(lengths), max(lengths), ends, torch.tensor(starts, device=device)))
        return found

    known: list[Numbers] = rows._cached(("packed numbers", rank, device), made)
    return known


def _packed_parts(call: Call) -> list[Part]:
    rows, device, o = call.rows, call.q.device, call.options
    keys = rows._cached(("packed keys", device), lambda: torch.tensor(rows.first, dtype=torch.int32, device=device))
    shape = o["batch_shape"]
    outer = 0 if shape is None else _attention._batch_outer(shape, keys, keys)
    parts = []
    for n in packed_numbers(rows, call.rank, device):
        more = {"cu_seqlens_q": n.ends, "cu_seqlens_k": keys, "max_seqlen_q": n.longest, "max_seqlen_k": rows.longest, "batch_outer": outer}
        if o["seqused_q"] is not None:
            more["seqused_q"] = torch.minimum((o["seqused_q"].long() - n.starts).clamp_min(0), n.ends.diff()).int()
        parts.append(Part(n.first, n.rows, rows.total, more, positions_of(call, 0, n.starts), n.starts, n.longest))
    return parts


class _Group:
    """The operands of one group of heads."""

    def __init__(self, call: Call, number: int) -> None:
        self.call = call
        self.queries = call.heads(call.q) // call.groups
        self.keys = call.heads(call.k) // call.groups
        self.first_query = number * self.queries
        self.first_key = number * self.keys
        self.pending: Any = None
        self.gathered: list[Tensor] = []  # k and v

    def start(self) -> _Group:
        """Begins to gather its keys and values."""
        call = self.call
        mine = [self.of_keys(x) for x in (call.k, call.v)]
        self.shapes = shapes_of(mine, call.rows_dim)
        whole = _rows.by_ranks(call.rows, width(self.shapes), call.k)
        put(_rows.of_this_rank(call.rows, whole)[: call.rows.count], call.rows_dim, mine)
        self.pending = _rows.start_gather(call.rows, whole, "keys and values")
        return self

    def end(self) -> None:
        self.gathered = self.split(_rows.end_gather(self.pending))
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
            x = x.narrow(-1, 0, part.end)
        return x

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
        k, v = self.gathered
        if call.rows.kind != "packed":
            k, v = (x.narrow(call.rows_dim, 0, part.end) for x in (k, v))
        planes = {name: self.plane(o[name], part) for name in PLANES}
        slopes, sink = self.of_heads(o["alibi_slopes"]), self.of_heads(o["sink"])
        arguments = arguments_of(q, k, v, o, **planes, alibi_slopes=slopes, sink=sink, **part.options)
        streams = streams_of(entries_of(call), call.heads(call.q), o, self.first_query, self.queries, q.device)
        shard = part.shard._replace(dropout_streams=streams)
        return arguments if all(given is None for given in shard) else (*arguments, *shard)

    def of_queries_alone(self, x: Tensor, part: Part) -> Tensor:
        """The same of q, out or their gradients, which are never broadcast."""
        call = self.call
        return x.narrow(call.heads_dim, self.first_query, self.queries).narrow(call.rows_dim, part.first, part.rows)

    def of_lse(self, x: Tensor, part: Part) -> Tensor:
        return x.narrow(-2, self.first_query, self.queries).narrow(-1, part.first, part.rows)


def _groups_ahead(call: Call) -> Iterator[_Group]:
    """The groups of heads. The next one's gather is started before one is computed, but only when this one's is done and put in order:
    so there are never more than two groups' keys and values."""
    group = _Group(call, 0).start()
    for number in range(1, call.groups + 1):
        group.end()
        following = _Group(call, number).start() if number < call.groups else group
        yield group
        group.gathered = []
        group = following


def keys_forward(call: Call) -> tuple[Tensor, Tensor]:
    packed = {"cu_seqlens_q": call.q} if call.rows.kind == "packed" else {}
    whole = arguments_of(call.q, call.k, call.v, call.options, **packed)
    out = _call.new_out(whole, _call.out_layout(whole))
    lse = _call.new_lse(whole, _call.lse_shape(whole))
    parts = _parts(call)
    for group in _groups_ahead(call):
        for part in parts:
            found, found_lse = _call.compute(group.arguments(part), with_lse=True)
            group.of_queries_alone(out, part).copy_(found)
            assert found_lse is not None
            group.of_lse(lse, part).copy_(found_lse)
            del found, found_lse  # before the next ones are made
    return out, lse


def keys_backward(
    call: Call, need: Any, grad_out: Tensor, grad_lse: Optional[Tensor], out: Tensor, lse: Tensor
) -> list[Optional[Tensor]]:
    o, rows = call.options, call.rows
    wants = dict(zip(NAMED, need))
    grads: dict[str, Tensor] = {}
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if wants[name]:  # kernels of a GPU write where the columns of a row are adjacent
            adjacent = x.stride(-1) == 1 or x.device.type == "cpu"
            grads[name] = torch.empty_like(x, memory_format=torch.preserve_format if adjacent else torch.contiguous_format)
    # Of biases and the sink: what parts write each once, and what is summed over them.
    summed: dict[str, Tensor] = {}
    for name in NAMED[3:]:
        if wants[name]:
            if name != "sink" and has_queries(o[name]) and rows.kind != "packed":
                grads[name] = torch.zeros_like(o[name])
            else:
                summed[name] = torch.zeros_like(o[name], dtype=_rows.wide(o[name].dtype))

    def add(group: _Group, part: Part, of_keys: list[Tensor]) -> None:
        """A part's gradients."""
        if rows.kind != "packed":
            of_keys = [x.narrow(call.rows_dim, 0, part.end) for x in of_keys]
        into = [group.of_queries_alone(grads["q"], part)] if wants["q"] else []
        sums = {name: x for name, x in zip("kv", of_keys) if wants[name]}
        found = _call.backward(
            group.of_queries_alone(grad_out, part), None if grad_lse is None else group.of_lse(grad_lse, part).contiguous(),
            group.of_queries_alone(out, part), group.of_lse(lse, part).contiguous(), list(need), *group.arguments(part),
            into=into, sums=sums,
        )  # fmt: skip
        for name, grad in zip([name for name in NAMED[3:] if wants[name]], found[len(into) + len(sums) :]):
            if name in grads:
                group.plane(grads[name], part).add_(grad)
            elif name == "sink":
                group.of_heads(summed[name]).add_(grad)
            else:
                group.add_plane(summed[name], part, grad)

    def end(group: _Group, pending: _rows.Pending) -> None:
        for name, grad in zip("kv", group.split(_rows.end_scatter(pending))):
            if wants[name]:
                group.of_keys(grads[name]).copy_(grad)

    parts = _parts(call)
    before: Any = None
    # A broadcast over heads is summed over groups, too; _groups() avoids that where it would cost bits.
    for group in _groups_ahead(call):
        if not (wants["k"] or wants["v"]):
            for part in parts:
                add(group, part, [])
            continue
        total = _rows.by_ranks(rows, width(group.shapes), call.q, _rows.wide(call.q.dtype)).zero_()
        for part in parts:
            add(group, part, group.split(total[: rows.total]))
        if before is not None:  # no more than two groups' sums
            end(*before)
            before = None
        before = group, _rows.start_scatter(rows, total, "the gradients of keys and values", own=True)
        del total
    if before is not None:
        end(*before)
    return [grads[name] if name in grads else summed[name].to(o[name].dtype) if name in summed else None for name in NAMED]
