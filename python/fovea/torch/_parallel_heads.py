# SPDX-License-Identifier: Apache-2.0
"""context_parallel with move="heads": an all-to-all gives each rank all rows of some heads, another one brings the results back. What
lies between them is an ordinary, differentiable call, or one for each of two groups of heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from . import _attention, _parallel_call, _rows
from ._parallel_blocks import Exchange, Place, from_place_to_place, learns
from ._parallel_call import PLANES, Call, draw_seed, entries_of, prepare, streams_of
from ._parallel_keys import by_keys
from ._rows import Rows, first_derivatives


def by_heads(call: Call) -> tuple[Tensor, Tensor]:
    rows, packed = call.rows, {}
    if rows.kind == "packed":
        ends = rows._ends(call.q.device)
        packed = {"max_seqlen_q": rows.longest, "max_seqlen_k": rows.longest, "cu_seqlens_q": ends, "cu_seqlens_k": ends}

    def attend(q: Tensor, k: Tensor, v: Tensor, o: dict[str, Any]) -> tuple[Tensor, Tensor]:
        out, lse = _attention.attention(q, k, v, return_lse=True, **{**o, **packed})
        return out, lse

    return _between(call, rows, groups_of_heads(call, rows), attend)


def by_heads_then_keys(call: Call) -> tuple[Tensor, Tensor]:
    """Over a mesh of two dimensions: heads along the second one, and within them keys along the first."""
    inner: Any = call.rows.over_heads
    keys: Any = call.rows.over_keys

    def attend(q: Tensor, k: Tensor, v: Tensor, o: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return by_keys(prepare(q, k, v, keys, None if keys.ranks == 1 else "keys", o, call.through))

    return _between(call, inner, 1, attend)


Attend = Callable[[Tensor, Tensor, Tensor, dict[str, Any]], tuple[Tensor, Tensor]]
MOST_GROUPS = 4
LEAST_HEADS = 2  # that a call has
WAYS = "q, k and v to heads", "out to rows"


def _between(call: Call, rows: Rows, groups: int, attend: Attend) -> tuple[Tensor, Tensor]:
    """The exchange, the calls of this rank's heads, and the exchange back."""
    o = {**call.options, "seed": draw_seed(call)}
    there, given = _there(call), (call.q, call.k, call.v)
    back = there._replace(heads_first=False), Place(-2, -1, True)
    if groups > 1 or _from_place(call, rows, 1):
        to_heads, to_rows = Exchange.pair(Exchange(rows, WAYS[0], (there,) * 3, groups), Exchange(rows, WAYS[1], back, groups))
        try:
            marks = to_heads.begins(None, *given)
            sent: list[Tensor] = []
            for group in range(groups):
                q, k, v = to_heads.ends(group, to_heads.marks_of(group, marks))
                results = attend(q, k, v, own_heads(call, o, rows, group, groups))
                del q, k, v  # without gradients nothing else keeps them
                sent += to_rows.begins(group, *results)
            out, lse = to_rows.ends(None, sent)
        finally:
            to_heads.end()
            to_rows.end()
        return out, lse
    exchange = exchanged if call.through is None else call.through.exchange
    q, k, v = _ToHeads.apply(rows, exchange, WAYS[0], (there,) * 3, *given)
    results = attend(q, k, v, own_heads(call, o, rows))
    del q, k, v
    out, lse = _ToRows.apply(rows, exchange, WAYS[1], back, *results)
    return out, lse


def _there(call: Call) -> Place:
    return Place(call.heads_dim, call.rows_dim, call.heads_dim < call.rows_dim)


def _from_place(call: Call, rows: Rows, groups: int) -> bool:
    return call.through is None and from_place_to_place(rows, call.q, _there(call), groups)


def groups_of_heads(call: Call, rows: Rows) -> int:
    """Some, if one's messages are long enough to be worth hiding behind another one's computation. One if a bias has a gradient, which
    would be put together from those of the groups; and if a key head has several query heads, since two calls gained nothing (two H200, 16
    and 4 heads of 128k keys)."""
    heads, o = call.heads(call.k), call.options
    if any(x is not None and x.requires_grad for x in (o["bias"], o["bias2"])) or call.heads(call.q) > heads:
        return 1
    if call.sizes.exchanged_bytes <= _parallel_call.FEW_BYTES:
        return 1
    for groups in MOST_GROUPS, MOST_GROUPS // 2:
        if heads % (groups * rows.ranks) == 0 and heads // (groups * rows.ranks) >= LEAST_HEADS and _from_place(call, rows, groups):
            return groups
    return 1


def own_heads(call: Call, o: dict[str, Any], rows: Rows, group: int = 0, groups: int = 1) -> dict[str, Any]:
    """The options of a group of this rank's heads."""
    o, own = dict(o), call.heads(call.q) // rows.ranks
    heads = own // groups
    first = (rows.rank or 0) * own + group * heads
    o["dropout_streams"] = streams_of(entries_of(call), call.heads(call.q), o, first, heads, call.q.device)
    if o["sink"] is not None:
        o["sink"] = o["sink"].narrow(0, first, heads)
    if o["alibi_slopes"] is not None:
        o["alibi_slopes"] = o["alibi_slopes"].narrow(-1, first, heads)
    for name in PLANES:
        plane = o[name]
        # With queries it has this rank's heads. Not narrowed to all of them: autograd would copy the gradient.
        if plane is not None and plane.dim() >= 3 and plane.shape[-3] not in (1, heads):
            o[name] = plane.narrow(-3, first if plane.shape[-3] == call.heads(call.q) else group * heads, heads)
    return o


class _ToHeads(torch.autograd.Function):
    """This rank's rows of all heads, to all rows of this rank's heads. `dims` are the places of heads and rows of each tensor."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, exchange: Any, what: str, dims: Any, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.given = rows, exchange, what, dims
        found = _to_heads(rows, exchange, what, dims, tensors)
        learns(ctx, found, ctx.needs_input_grad[4:])
        return found

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Any:
        return (None, None, None, None, *_back(_to_rows, grads, *ctx.given))


class _ToRows(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, exchange: Any, what: str, dims: Any, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.given = rows, exchange, what, dims
        found = _to_rows(rows, exchange, what, dims, tensors)
        learns(ctx, found, ctx.needs_input_grad[4:])
        return found

    @staticmethod
    @first_derivatives
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
    parts: list[Any] = []
    for x, (heads, at, _) in zip(tensors, dims):
        heads, at = heads + x.dim(), at + x.dim()
        split = x.unflatten(heads, (rows.ranks, x.shape[heads] // rows.ranks))
        parts.append(split.movedim((heads, at + (at > heads)), (0, 1)))
    shapes = [part.shape[2:] for part in parts]
    each = _columns(exchange(rows, what, True, parts), parts, shapes)
    return tuple(y.unflatten(1, shape).movedim(0, at + 1 + len(shape)) for y, shape, (_, at, _) in zip(each, shapes, dims))


def _to_rows(rows: Rows, exchange: Any, what: str, dims: Any, tensors: Any) -> tuple[Tensor, ...]:
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
