# SPDX-License-Identifier: Apache-2.0
"""context_parallel with move="heads": an all-to-all gives each rank all rows of some heads, another one brings the results back. What
lies between them is an ordinary, differentiable call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _attention, _rows
from ._parallel_call import PLANES, Call, draw_seed, entries_of, has_queries, prepare, streams_of
from ._parallel_keys import by_keys
from ._rows import Rows


def by_heads(call: Call) -> tuple[Tensor, Tensor]:
    rows, o = call.rows, dict(call.options)
    o["seed"] = draw_seed(call)
    there = (call.heads_dim, call.rows_dim)
    q, k, v = _ToHeads.apply(rows, "q, k and v to heads", (there,) * 3, call.q, call.k, call.v)
    _own_heads(call, o, rows)
    if rows.kind == "packed":
        ends = torch.tensor(rows.first, dtype=torch.int32, device=q.device)
        o.update(max_seqlen_q=rows.longest, max_seqlen_k=rows.longest, cu_seqlens_q=ends, cu_seqlens_k=ends)
    out, lse = _attention.attention(q, k, v, return_lse=True, **o)
    (out,) = _ToRows.apply(rows, "out to rows", (there,), out)
    (lse,) = _ToRows.apply(rows, "lse to rows", ((-2, -1),), lse)
    return out, lse


def by_heads_then_keys(call: Call) -> tuple[Tensor, Tensor]:
    """Over a mesh of two dimensions: heads along the second one, and within them keys along the first."""
    inner: Any = call.rows.over_heads
    o = dict(call.options)
    o["seed"] = draw_seed(call)
    there = (call.heads_dim, call.rows_dim)
    q, k, v = _ToHeads.apply(inner, "q, k and v to heads", (there,) * 3, call.q, call.k, call.v)
    _own_heads(call, o, inner)
    keys: Any = call.rows.over_keys
    within = prepare(q, k, v, keys, None if keys.ranks == 1 else "keys", o)
    out, lse = by_keys(within)
    (out,) = _ToRows.apply(inner, "out to rows", (there,), out)
    (lse,) = _ToRows.apply(inner, "lse to rows", ((-2, -1),), lse)
    return out, lse


def _own_heads(call: Call, o: dict[str, Any], rows: Rows) -> None:
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
        if plane is not None and not has_queries(plane) and plane.dim() >= 3 and plane.shape[-3] != 1:
            o[name] = plane.narrow(-3, first, heads)


class _ToHeads(torch.autograd.Function):
    """This rank's rows of all heads, to all rows of this rank's heads. `dims` are the dimensions of heads and rows of each tensor."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, what: str, dims: Any, *tensors: Tensor) -> Any:
        ctx.given = rows, what, dims
        return _to_heads(rows, what, dims, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, what, dims = ctx.given
        return (None, None, None, *_to_rows(rows, f"the gradient of {what}", dims, grads))


class _ToRows(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, what: str, dims: Any, *tensors: Tensor) -> Any:
        ctx.given = rows, what, dims
        return _to_rows(rows, what, dims, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, what, dims = ctx.given
        return (None, None, None, *_to_heads(rows, f"the gradient of {what}", dims, grads))


def _to_heads(rows: Rows, what: str, dims: Any, tensors: Any) -> tuple[Tensor, ...]:
    """One exchange for all tensors: of each row, the elements of all tensors one after the other."""
    parts, shapes = [], []
    for x, (heads, at) in zip(tensors, dims):
        heads, at = heads + x.dim(), at + x.dim()
        split = x.unflatten(heads, (rows.ranks, x.shape[heads] // rows.ranks))
        first = split.movedim((heads, at + (at > heads)), (0, 1))
        shapes.append(first.shape[2:])
        parts.append(first.reshape(rows.ranks, rows.count, first.shape[2:].numel()))
    whole: Any = _rows.exchange_to_heads(rows, torch.cat(parts, 2), what)
    found = whole.split([part.shape[2] for part in parts], 1)
    return tuple(y.unflatten(1, shape).movedim(0, at + 1 + len(shape)) for y, shape, (_, at) in zip(found, shapes, dims))


def _to_rows(rows: Rows, what: str, dims: Any, tensors: Any) -> tuple[Tensor, ...]:
    parts, shapes = [], []
    for y, (_, at) in zip(tensors, dims):
        first = y.movedim(at, 0)
        shapes.append(first.shape[1:])
        parts.append(first.reshape(rows.total, first.shape[1:].numel()))
    local: Any = _rows.exchange_to_rows(rows, torch.cat(parts, 1), what)
    found = local.split([part.shape[1] for part in parts], 2)
    results = []
    for x, shape, (heads, at) in zip(found, shapes, dims):
        size = len(shape) + 1  # dimensions of the result
        heads, at = heads + size, at + size
        split = x.unflatten(2, shape).movedim((0, 1), (heads, at + (at > heads)))
        results.append(split.flatten(heads, heads + 1))
    return tuple(results)
