# SPDX-License-Identifier: Apache-2.0
"""context_parallel with move="ring": keys and values go round the ranks, one rank's at a time, so that no rank ever has all of them.

Each step computes this rank's rows over the keys of one rank, by calls with the positions of both. out and lse are accumulated, out in
fp32 (fp64). In the backward the gradients of a rank's keys go round with them, in fp32, and come back to it as whole sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from . import _attention, _call, _rows
from ._call import Shard
from ._parallel_call import PLANES, Call, arguments_of, draw_seed
from ._parallel_keys import differentiable
from ._parallel_parts import NAMED, packed_numbers, put, shapes_of, split, width, with_places
from ._parallel_positions import is_positional, moved_by_lengths, positions_of, some, used_among


def by_ring(call: Call) -> tuple[Tensor, Tensor]:
    call = call._replace(options={**call.options, "seed": draw_seed(call)})
    return differentiable(call, "ring", ring_forward, ring_backward)


class Side(NamedTuple):
    """Adjacent rows of one rank that a call takes: a piece; of packed rows one piece of each sequence."""

    first: int  # of that rank's rows
    rows: int
    start: int  # the position of the first row
    starts: Optional[Tensor] = None  # of packed rows: of each sequence's first row
    ends: Optional[Tensor] = None  # of packed rows: cu_seqlens
    longest: int = 0
    used: Optional[Tensor] = None  # of each sequence, how many of these rows are used
    shard: Shard = Shard()  # of queries: where they are


def _sides(call: Call, rank: int, used: Optional[Tensor]) -> list[Side]:
    """Of a rank. What its calls share is computed once."""
    rows = call.rows
    if rows.kind != "packed":
        pieces = with_places(some(rows.pieces[rank]))
        return [Side(at, n.rows, n.start, used=used_among(used, n.start, n.rows)) for n, at in pieces]
    numbers = packed_numbers(rows, rank, call.q.device)
    return [Side(n.first, n.rows, 0, n.starts, n.ends, n.longest, used_among(used, n.starts, n.lengths)) for n in numbers]


def _queries(call: Call) -> list[Side]:
    o, moved = call.options, moved_by_lengths(call.rows, call.options, call.q.device)
    sides = _sides(call, call.rank, o["seqused_q"])
    return [side._replace(shard=positions_of(o, moved, side.start, side.starts)) for side in sides]


def _keys(call: Call, rank: int) -> list[Side]:
    return _sides(call, rank, call.options["seqused_k"])


class _Pair:
    """One call: some rows of this rank and some keys of one rank."""

    def __init__(self, call: Call, queries: Side, keys: Side) -> None:
        self.call = call
        self.queries = queries
        self.keys = keys
        given = queries.shard
        self.shard = Shard(dropout_streams=call.options["dropout_streams"])
        if is_positional(call.options):
            each_k = given.positions_k
            if keys.starts is not None:
                each_k = keys.starts if each_k is None else keys.starts + each_k
            self.shard = given._replace(position_k=(given.position_k or 0) + keys.start, positions_k=each_k, dropout_streams=self.shard[4])

    def is_empty(self) -> bool:
        """Whether the band has no pair, where that is known on the host."""
        o, s = self.call.options, self.shard
        if not is_positional(o) or s.positions_q is not None or s.positions_k is not None:
            return False
        left, right = o["window"]
        right = 0 if o["causal"] else right
        first = (s.position_q or 0) - (s.position_k or 0)  # of query 0, among these keys
        return (right >= 0 and first + self.queries.rows - 1 + right < 0) or (left >= 0 and first - left >= self.keys.rows)

    def rows(self, x: Tensor, dim: int) -> Tensor:
        return x.narrow(dim, self.queries.first, self.queries.rows)

    def of_keys(self, x: Tensor) -> Tensor:
        return x.narrow(self.call.rows_dim, self.keys.first, self.keys.rows)

    def plane(self, x: Any) -> Any:
        if x is not None and x.dim() >= 2 and x.shape[-2] != 1:
            x = self.rows(x, -2)
        if x is not None and x.dim() >= 1 and x.shape[-1] != 1:
            x = x.narrow(-1, self.keys.start, self.keys.rows)
        return x

    def arguments(self, k: Tensor, v: Tensor, with_sink: bool) -> tuple[Any, ...]:
        call, o, queries, keys = self.call, self.call.options, self.queries, self.keys
        more: dict[str, Any] = {name: self.plane(o[name]) for name in PLANES}
        more["sink"] = o["sink"] if with_sink else None
        more.update(seqused_q=queries.used, seqused_k=keys.used)
        if queries.ends is not None and keys.ends is not None:
            shape = o["batch_shape"]
            outer = 0 if shape is None else _attention._batch_outer(shape, keys.ends, keys.ends)
            more.update(cu_seqlens_q=queries.ends, cu_seqlens_k=keys.ends, max_seqlen_q=queries.longest, max_seqlen_k=keys.longest,
                        batch_outer=outer)  # fmt: skip
        arguments = arguments_of(self.rows(call.q, call.rows_dim), self.of_keys(k), self.of_keys(v), {**o, "sink": None}, **more)
        return arguments if all(given is None for given in self.shard) else (*arguments, *self.shard)


def _steps(call: Call) -> Iterator[tuple[int, list[Tensor], list[_Pair]]]:
    """The number of each step, the keys and values that this rank has in it, and its calls. The next ones are on their way meanwhile."""
    rows = call.rows
    shapes = shapes_of((call.k, call.v), call.rows_dim)
    here = call.k.new_empty(max(rows.counts), width(shapes))
    put(here[: rows.count], call.rows_dim, (call.k, call.v))
    mine = _queries(call)
    for step in range(rows.ranks):
        owner = (call.rank - step) % rows.ranks
        pending = _rows.start_round(rows, here, "keys and values", 0) if step + 1 < rows.ranks else None
        theirs = _keys(call, owner)
        pairs = [_Pair(call, queries, keys) for queries in mine for keys in theirs]
        try:
            yield step, split(here, call.rows_dim, shapes), pairs
        finally:  # after an error, too: what is on its way would meet the group's next calls
            if pending is not None:
                here = pending.wait()
                pending = None  # it has what was sent


def ring_forward(call: Call) -> tuple[Tensor, Tensor]:
    rows, sink = call.rows, call.options["sink"]
    packed = {"cu_seqlens_q": call.q} if rows.kind == "packed" else {}
    whole = arguments_of(call.q, call.k, call.v, call.options, **packed)
    shape, strides = _call.out_layout(whole)
    out = torch.empty_strided(shape, strides, dtype=_rows.wide(call.q.dtype), device=call.q.device).zero_()
    lse = _call.new_lse(whole, _call.lse_shape(whole)).fill_(-torch.inf)
    if sink is not None:  # a logit without a value: where results begin
        lse.copy_(sink[:, None].expand_as(lse))
    for _, (k, v), pairs in _steps(call):
        for pair in pairs:
            if not pair.is_empty():
                _call.merge(pair.arguments(k, v, False), pair.rows(out, call.rows_dim), pair.rows(lse, -1))
        del k, v  # before the next ones come
    if call.options["seqused_q"] is not None and sink is not None:
        _clear(call, lse)
    return out.to(call.q.dtype), lse


def _clear(call: Call, lse: Tensor) -> None:
    """Rows that no sequence has begin with the sink, too."""
    used, rows = call.options["seqused_q"].long(), call.rows
    device = lse.device
    if rows.kind == "packed":
        sequence = torch.cat([torch.full((piece.rows,), piece.sequence) for piece in rows.mine] or [torch.empty(0).long()]).to(device)
        lse[:, rows.positions.to(device) >= used[sequence]] = -torch.inf
    else:
        missing = rows.positions.to(device) >= used[:, None]
        lse.masked_fill_(missing.view(*lse.shape[:-2], 1, lse.shape[-1]), -torch.inf)


def ring_backward(
    call: Call, need: Any, grad_out: Tensor, grad_lse: Optional[Tensor], out: Tensor, lse: Tensor
) -> list[Optional[Tensor]]:
    rows, o = call.rows, call.options
    wants = dict(zip(NAMED, need))
    given = {"q": call.q, **{name: o[name] for name in NAMED[3:]}}
    totals = {
        name: torch.zeros(x.shape, dtype=_rows.wide(x.dtype), device=x.device) for name, x in given.items() if wants[name]
    }

    def add(pair: _Pair, k: Tensor, v: Tensor, of_keys: Any, with_sink: bool) -> None:
        into = {name: pair.of_keys(x) for name, x in zip("kv", of_keys) if wants[name]}
        for name, total in totals.items():
            if name == "q":
                into[name] = pair.rows(total, call.rows_dim)
            elif name != "sink":
                into[name] = pair.plane(total)
            elif with_sink:
                into[name] = total
        if not into:  # the sink alone has a gradient, and another call has it
            return
        _call.backward(
            pair.rows(grad_out, call.rows_dim), None if grad_lse is None else pair.rows(grad_lse, -1).contiguous(),
            pair.rows(out, call.rows_dim), pair.rows(lse, -1).contiguous(), [name in into for name in NAMED],
            *pair.arguments(k, v, with_sink), sums=into,
        )  # fmt: skip

    of_keys = wants["k"] or wants["v"]
    shapes = shapes_of((call.k, call.v), call.rows_dim)
    pending: Any = None
    try:
        for step, (k, v), pairs in _steps(call):
            sums = call.q.new_zeros(max(rows.counts), width(shapes), dtype=_rows.wide(call.q.dtype))
            done = set()
            for pair in pairs:
                # A row's share of the sink's gradient is that of all keys: one call has it.
                with_sink = wants["sink"] and step == 0 and pair.queries.first not in done
                if with_sink or not pair.is_empty():
                    done.add(pair.queries.first)
                    add(pair, k, v, split(sums, call.rows_dim, shapes), with_sink)
            if of_keys:
                if pending is not None:
                    sums += pending.wait()  # what the ranks before had for these keys
                    pending = None
                pending = _rows.start_round(rows, sums, "the gradients of keys and values", 1)
            del k, v, sums  # before the next ones are made
    except BaseException:  # what is on its way would meet the group's next calls
        if pending is not None:
            with contextlib.suppress(Exception):  # the first error says more
                pending.wait()
        raise
    grads: dict[str, Any] = {name: total.to(given[name].dtype) for name, total in totals.items()}
    if of_keys:
        mine = pending.wait()[: rows.count]
        for name, like, found in zip("kv", (call.k, call.v), split(mine, call.rows_dim, shapes)):
            grads[name] = torch.empty_like(like).copy_(found) if wants[name] else None
    return [grads.get(name) for name in NAMED]
