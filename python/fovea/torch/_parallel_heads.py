# SPDX-License-Identifier: Apache-2.0
"""context_parallel with move="heads": an all-to-all gives each rank all rows of some heads, another one brings the results back. What
lies between them is an ordinary, differentiable call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _attention, _parallel_blocks, _rows
from ._parallel_call import PLANES, Call, draw_seed, entries_of, prepare, streams_of
from ._parallel_blocks import Place
from ._parallel_keys import by_keys
from ._rows import Rows


def by_heads(call: Call) -> tuple[Tensor, Tensor]:
    rows, o = call.rows, dict(call.options)
    o["seed"] = draw_seed(call)
    there = Place(call.heads_dim, call.rows_dim, call.heads_dim < call.rows_dim)
    exchange = exchanged if call.through is None else call.through.exchange
    q, k, v = _ToHeads.apply(rows, exchange, "q, k and v to heads", (there,) * 3, call.q, call.k, call.v)
    own_heads(call, o, rows)
    if rows.kind == "packed":
        ends = rows._cached(("ends", q.device), lambda: torch.tensor(rows.first, dtype=torch.int32, device=q.device))
        o.update(max_seqlen_q=rows.longest, max_seqlen_k=rows.longest, cu_seqlens_q=ends, cu_seqlens_k=ends)
    out, lse = _attention.attention(q, k, v, return_lse=True, **o)
    del q, k, v  # without gradients nothing else keeps them
    out, lse = _ToRows.apply(rows, exchange, "out to rows", (there._replace(heads_first=False), Place(-2, -1, True)), out, lse)
    return out, lse


def by_heads_then_keys(call: Call) -> tuple[Tensor, Tensor]:
    """Over a mesh of two dimensions: heads along the second one, and within them keys along the first."""
    inner: Any = call.rows.over_heads
    o = dict(call.options)
    o["seed"] = draw_seed(call)
    there = Place(call.heads_dim, call.rows_dim, call.heads_dim < call.rows_dim)
    exchange = exchanged if call.through is None else call.through.exchange
    q, k, v = _ToHeads.apply(inner, exchange, "q, k and v to heads", (there,) * 3, call.q, call.k, call.v)
    own_heads(call, o, inner)
    keys: Any = call.rows.over_keys
    within = prepare(q, k, v, keys, None if keys.ranks == 1 else "keys", o, call.through)
    out, lse = by_keys(within)
    out, lse = _ToRows.apply(inner, exchange, "out to rows", (there._replace(heads_first=False), Place(-2, -1, True)), out, lse)
    return out, lse


def own_heads(call: Call, o: dict[str, Any], rows: Rows) -> None:
    """Cuts what every rank has of all heads."""
    heads = call.heads(call.q) // rows.ranks
    first = (rows.rank or 0) * heads
    o["dropout_streams"] = streams_of(entries_of(call), call.heads(call.q), o, first, heads, call.q.device)
    if o["sink"] is not None:
        o["sink"] = o["sink"].narrow(0, first, heads)
    if o["alibi_slopes"] is not None:
        o["alibi_slopes"] = o["alibi_slopes"].narrow(-1, first, heads)
    for name in PLANES:
        plane = o[name]
        if plane is not None and plane.dim() >= 3 and plane.shape[-3] == call.heads(call.q):  # with queries it has this rank's heads
            o[name] = plane.narrow(-3, first, heads)


class _ToHeads(torch.autograd.Function):
    """This rank's rows of all heads, to all rows of this rank's heads. `dims` are the places of heads and rows of each tensor."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, exchange: Any, what: str, dims: Any, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.given = rows, exchange, what, dims
        return _to_heads(rows, exchange, what, dims, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Any:
        return (None, None, None, None, *_back(_to_rows, grads, *ctx.given))


class _ToRows(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, exchange: Any, what: str, dims: Any, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.given = rows, exchange, what, dims
        return _to_rows(rows, exchange, what, dims, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Any:
        return (None, None, None, None, *_back(_to_heads, grads, *ctx.given))


def _back(way: Any, grads: Any, rows: Rows, exchange: Any, what: str, dims: Any) -> list[Any]:
    """The gradients that there are go the other way."""
    there = [n for n, grad in enumerate(grads) if grad is not None]
    found: list[Any] = [None] * len(grads)
    if there:
        moved = way(rows, exchange, f"the gradient of {what}", [dims[n] for n in there], [grads[n] for n in there])
        for n, grad in zip(there, moved):
            found[n] = grad
    return found


def _to_heads(rows: Rows, exchange: Any, what: str, dims: Any, tensors: Any) -> tuple[Tensor, ...]:
    if exchange is exchanged and _parallel_blocks.from_place_to_place(rows, tensors, dims, True):
        return _parallel_blocks.exchanged(rows, what, tensors, dims, True)
    parts: list[Any] = []
    for x, (heads, at, _) in zip(tensors, dims):
        heads, at = heads + x.dim(), at + x.dim()
        split = x.unflatten(heads, (rows.ranks, x.shape[heads] // rows.ranks))
        parts.append(split.movedim((heads, at + (at > heads)), (0, 1)))
    shapes = [part.shape[2:] for part in parts]
    each = _columns(exchange(rows, what, True, parts), parts, shapes)
    return tuple(y.unflatten(1, shape).movedim(0, at + 1 + len(shape)) for y, shape, (_, at, _) in zip(each, shapes, dims))


def _to_rows(rows: Rows, exchange: Any, what: str, dims: Any, tensors: Any) -> tuple[Tensor, ...]:
    if exchange is exchanged and _parallel_blocks.from_place_to_place(rows, tensors, dims, False):
        return _parallel_blocks.exchanged(rows, what, tensors, dims, False)
    parts: list[Any] = [y.movedim(at, 0) for y, (_, at, _) in zip(tensors, dims)]
    shapes = [part.shape[1:] for part in parts]
    each = _columns(exchange(rows, what, False, parts), parts, shapes)
    results = []
    for x, shape, (heads, at, _) in zip(each, shapes, dims):
        size = len(shape) + 1  # dimensions of the result
        heads, at = heads + size, at + size
        split = x.unflatten(2, shape).movedim((0, 1), (heads, at + (at > heads)))
        results.append(split.flatten(heads, heads + 1))
    return tuple(results)


def exchanged(rows: Rows, what: str, to_heads: bool, parts: Sequence[Any]) -> list[Tensor]:
    """(ranks, count, ...), this rank's rows of every rank's heads: returns all rows of this rank's heads in natural order; or the way back.
    One exchange and one tensor for each type: of a row, the elements of all tensors one after the other. In a graph it is one operator,
    as the order of two could be another one on each rank."""
    return [_exchanged(rows, what, to_heads, [parts[n] for n in group]) for group in by_type(parts)]


def _exchanged(rows: Rows, what: str, to_heads: bool, parts: Sequence[Any]) -> Tensor:
    outer = 2 if to_heads else 1
    shapes = [part.shape[outer:] for part in parts]

    def send() -> Any:  # which nothing here keeps
        whole = parts[0].new_empty(*parts[0].shape[:outer], sum(map(math.prod, shapes)))
        for room, part, shape in zip(_split(whole, shapes), parts, shapes):
            if to_heads:
                room.unflatten(2, shape).copy_(part)
            else:
                _rows.rank_by_rank(rows, room.unflatten(1, shape), part)
        return whole

    if to_heads:
        return _rows.natural(rows, _rows.exchange_to_heads(rows, send(), what))
    return _rows.exchange_to_rows(rows, send(), what)


def by_type(parts: Sequence[Any]) -> list[list[int]]:
    return [[n for n, part in enumerate(parts) if part.dtype == dtype] for dtype in dict.fromkeys(part.dtype for part in parts)]


def _split(x: Any, shapes: Sequence[torch.Size]) -> Any:
    return x.split([math.prod(shape) for shape in shapes], -1)


def _columns(found: Sequence[Any], parts: Sequence[Any], shapes: Sequence[torch.Size]) -> list[Any]:
    """Of each part, what exchanged() has of it."""
    each: list[Any] = [None] * len(parts)
    for whole, group in zip(found, by_type(parts)):
        for n, columns in zip(group, _split(whole, [shapes[n] for n in group])):
            each[n] = columns
    return each
