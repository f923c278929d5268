# SPDX-License-Identifier: Apache-2.0
"""context_parallel with move="keys": each rank keeps its rows of q and gathers the keys and values of all rows, some heads at a time.

The call for a piece of its rows is an ordinary one with the piece's position and the keys up to the end that the piece sees. The
gradients are formed by the same calls. Those of the keys are summed over pieces and ranks in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    o = call.options
    call = call._replace(options={**o, "seed": draw_seed(call)})
    out, lse = _Keys.apply(call, call.q, call.k, call.v, o["bias"], o["bias2"], o["sink"])
    return out, lse


NAMED = ("q", "k", "v", "bias", "bias2", "sink")


def with_tensors(call: Call, tensors: Any) -> Call:
    """The call with other tensors in place of those that have gradients."""
    return call._replace(q=tensors[0], k=tensors[1], v=tensors[2], options={**call.options, **dict(zip(NAMED[3:], tensors[3:]))})


def joined(tensors: Iterable[Tensor], rows_dim: int, rows: int) -> tuple[Tensor, list[torch.Size]]:
    """Of each row those of k, then those of v, and what split() needs."""
    first = [x.movedim(rows_dim, 0) for x in tensors]
    return torch.cat([x.reshape(rows, x.shape[1:].numel()) for x in first], 1), [x.shape[1:] for x in first]


def split(whole: Any, rows_dim: int, shapes: list[torch.Size]) -> list[Tensor]:
    """k and v, or their gradients, with all dimensions."""
    parts = whole.split([shape.numel() for shape in shapes], 1)
    return [part.unflatten(1, shape).movedim(0, rows_dim) for part, shape in zip(parts, shapes)]


class _Keys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> Any:
        out, lse = keys_forward(with_tensors(call, tensors))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.call = with_tensors(call, (None,) * len(NAMED))
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Optional[Tensor], grad_lse: Optional[Tensor]) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        need = ctx.needs_input_grad[1:]
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        call = with_tensors(ctx.call, tensors)
        with saying_rank(call.rows):
            return (None, *keys_backward(call, need, grad_out, grad_lse, out, lse))


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
    return [_dense_part(call, piece, at) for piece, at in with_places(call.rows.mine)]


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
        for piece, at in with_places(rows.pieces[rank]):
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
        self.shapes: list[torch.Size] = []

    def start(self) -> _Group:
        """Begins to gather its keys and values."""
        call = self.call
        mine = (x.narrow(call.heads_dim, self.first_key, self.keys) for x in (call.k, call.v))
        here, self.shapes = joined(mine, call.rows_dim, call.rows.count)
        self.pending = _rows.start_gather(call.rows, here, "keys and values")
        return self

    def gathered(self) -> tuple[Tensor, Tensor]:
        whole = _rows.end_gather(self.pending)
        self.pending = None
        k, v = self.split(whole)
        return k, v

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

    def arguments(self, part: Part, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        call, o = self.call, self.call.options
        q = self.of_queries_alone(call.q, part)
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
    """The groups of heads. The next one's gather is started before one is computed."""
    following: Optional[_Group] = _Group(call, 0).start()
    for number in range(call.groups):
        group: Any = following
        following = _Group(call, number + 1).start() if number + 1 < call.groups else None
        yield group


def keys_forward(call: Call) -> tuple[Tensor, Tensor]:
    packed = {"cu_seqlens_q": call.q} if call.rows.kind == "packed" else {}
    whole = arguments_of(call.q, call.k, call.v, call.options, **packed)
    out = _call.new_out(whole, _call.out_layout(whole))
    lse = _call.new_lse(whole, _call.lse_shape(whole))
    parts = _parts(call)
    for group in _groups_ahead(call):
        k, v = group.gathered()
        for part in parts:
            found, found_lse = _call.compute(group.arguments(part, k, v), with_lse=True)
            group.of_queries_alone(out, part).copy_(found)
            assert found_lse is not None
            group.of_lse(lse, part).copy_(found_lse)
    return out, lse


def keys_backward(
    call: Call, need: Any, grad_out: Tensor, grad_lse: Optional[Tensor], out: Tensor, lse: Tensor
) -> list[Optional[Tensor]]:
    o, rows = call.options, call.rows
    wants = dict(zip(NAMED, need))
    sums = _rows.wide(call.q.dtype)
    grad_q = torch.empty_like(call.q) if wants["q"] else None
    # Of biases and the sink: what parts write each once, and what is summed over them.
    written: dict[str, Tensor] = {}
    summed: dict[str, Tensor] = {}
    for name in NAMED[3:]:
        if wants[name]:
            if name != "sink" and has_queries(o[name]) and rows.kind != "packed":
                written[name] = torch.zeros_like(o[name])
            else:
                summed[name] = torch.zeros_like(o[name], dtype=_rows.wide(o[name].dtype))
    of_keys = wants["k"] or wants["v"]
    parts = _parts(call)
    scattered = []
    # A broadcast over heads is summed over groups, too; _groups() avoids that where it would cost bits.
    for group in _groups_ahead(call):
        k, v = group.gathered()
        if of_keys:
            total = torch.zeros(rows.total, sum(shape.numel() for shape in group.shapes), dtype=sums, device=call.q.device)
            grads_of_keys = group.split(total)
        for part in parts:
            arguments = group.arguments(part, k, v)
            into: dict[str, Tensor] = {}
            if of_keys and _call.has_sums(call.q.device.type):
                whole = rows.kind == "packed"
                views = (x if whole else x.narrow(call.rows_dim, 0, part.end) for x in grads_of_keys)
                into = {name: view for name, view in zip("kv", views) if wants[name]}
            found = iter(_call.backward(
                group.of_queries_alone(grad_out, part), None if grad_lse is None else group.of_lse(grad_lse, part).contiguous(),
                group.of_queries_alone(out, part), group.of_lse(lse, part).contiguous(), list(need), *arguments,
                sums=into,
            ))  # fmt: skip
            if grad_q is not None:
                group.of_queries_alone(grad_q, part).copy_(next(found))
            for index, name in enumerate(("k", "v")):
                grad = next(found) if wants[name] else None
                if grad is not None and name not in into:
                    total_of = grads_of_keys[index]
                    (total_of if rows.kind == "packed" else total_of.narrow(call.rows_dim, 0, part.end)).add_(grad)
            for name in NAMED[3:]:
                if wants[name]:
                    grad = next(found)
                    if name in written:
                        group.plane(written[name], part).add_(grad)
                    elif name == "sink":
                        group.of_heads(summed[name]).add_(grad)
                    else:
                        group.add_plane(summed[name], part, grad)
        if of_keys:
            scattered.append((group, _rows.start_scatter(rows, total, "the gradients of keys and values")))
    grads: dict[str, Any] = {"q": grad_q, **written}
    grads.update({name: total.to(o[name].dtype) for name, total in summed.items()})
    for name, like in (("k", call.k), ("v", call.v)):
        grads[name] = torch.empty_like(like) if wants[name] else None
    for group, pending in scattered:
        mine = _rows.end_scatter(pending)
        for name, found_grad in zip("kv", group.split(mine)):
            if wants[name]:
                grads[name].narrow(call.heads_dim, group.first_key, group.keys).copy_(found_grad)
    return [grads.get(name) for name in NAMED]
