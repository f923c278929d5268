# SPDX-License-Identifier: Apache-2.0
"""The backward of context_parallel under a window of few rows: each rank forms the gradients of its own keys, so none is a sum over ranks.

Its last keys are seen by the next rank's first rows, too. That rank sends these rows of q, out, lse and the gradients of out and lse, and
this one makes up to three calls. Each gradient is then what one call wrote, rounded once, where a sum over ranks needs all gradients
of keys in fp32 (_parallel_keys.py), which costs memory and time for every key, also those that nobody else sees.

    own      all rows and keys of this rank: the gradients that the others do not write
    first    its first rows, with the fetched keys before them: their gradients of q
    last     its last rows and the next rank's first ones, with its last keys: the gradients of these keys
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from . import _call
from ._parallel_call import Call
from ._parallel_fetch import Messages, Moving, fetch_plan, send_and_receive
from ._parallel_parts import NAMED, Group, OfRows, Part, dense_part, put, shapes_of, split, width
from ._parallel_positions import Span


class Edges(NamedTuple):
    own: Part
    first: Optional[Part]
    last: Optional[Part]


def edges_of(call: Call) -> Edges:
    edge: Any = fetch_plan(call.rows, call.options, call.q.device).edge
    (piece,) = call.rows.pieces[call.rank]
    end = piece.start + piece.rows
    own = dense_part(call, None, piece, 0, Span(piece.start, end))
    first = dense_part(call, None, piece._replace(rows=edge), 0) if edge and piece.start > 0 else None
    across = piece._replace(start=end - edge, rows=2 * edge)
    last = dense_part(call, None, across, piece.rows - edge, Span(end - edge, end)) if edge and end < call.rows.total else None
    return Edges(own, first, last)


def gradients(
    call: Call, need: Sequence[bool], groups: Iterable[Group], grads: dict[str, Tensor], grad_out: Tensor, grad_lse: Optional[Tensor],
    out: Tensor, lse: Tensor, add_sink: Callable[[Group, Tensor], None],
) -> None:  # fmt: skip
    """Writes those of q, k and v into `grads`, and hands a group's gradient of the sink over. A bias has none here."""
    wants = dict(zip(NAMED, need))
    own, first, last = edges_of(call)

    def form(part: Part, names: str, group: Group, arguments: tuple[Any, ...], of_rows: OfRows, with_sink: bool = False) -> None:
        into = {name: group.of_queries_alone(grads[name], part) if name == "q" else group.of_own_keys(grads[name], part)
                for name in names if wants[name]}  # fmt: skip
        needed = [name in into or (with_sink and name == "sink" and wants[name]) for name in NAMED]
        if any(needed):
            found = _call.backward(*of_rows, needed, *arguments, into=into, sums={})
            if needed[-1]:
                add_sink(group, found[-1])

    def form_all(group: Group) -> None:
        across = _Across(group, (call.q, out, grad_out), lse, grad_lse)
        try:
            form(own, "qkv", group, group.arguments(own), group.of_rows(own, grad_out, grad_lse, out, lse), with_sink=True)
            if first is not None and wants["q"]:
                form(first, "q", group, group.arguments(first), group.of_rows(first, grad_out, grad_lse, out, lse))
        finally:  # after an error, too: what is on its way would meet the group's next calls
            across.end()
        if last is not None:
            q, of_rows = across.operands()
            form(last, "kv", group, group.arguments(last, q), of_rows)

    for group in groups:
        form_all(group)


class _Across:
    """A group's rows on both sides of this rank's end: its last ones, and the next rank's first ones, which that rank sends."""

    def __init__(self, group: Group, of_rows: Sequence[Tensor], lse: Tensor, grad_lse: Optional[Tensor]) -> None:
        call, rows = group.call, group.call.rows
        edge: Any = group.plan.edge
        self.group = group
        taken = [x.narrow(call.heads_dim, group.first_query, group.queries) for x in of_rows]
        self.shapes = shapes_of(taken, call.rows_dim)
        behind = rows.counts[call.rank] - edge

        def rows_from(at: int, room: Tensor) -> None:
            put(room, call.rows_dim, [x.narrow(call.rows_dim, at, edge) for x in taken])

        def numbers_from(at: int) -> Tensor:
            own = [x.narrow(-2, group.first_query, group.queries).narrow(-1, at, edge) for x in (lse, grad_lse) if x is not None]
            return torch.stack(own if grad_lse is not None else [*own, torch.zeros_like(own[0])])

        sent: Messages = []
        found: Messages = []
        for other in group.plan.others if edge else ():
            (piece,), (own,) = rows.pieces[other], rows.mine
            if piece.start + piece.rows == own.start:
                room = call.q.new_empty(edge, width(self.shapes))
                rows_from(0, room)
                sent.append((other, [room, numbers_from(0)]))
            elif piece.start == own.start + own.rows:
                self.room = call.q.new_empty(2 * edge, width(self.shapes))
                rows_from(behind, self.room[:edge])
                self.numbers = [numbers_from(behind)]
                self.numbers.append(torch.empty_like(self.numbers[0]))
                found.append((other, [self.room[edge:], self.numbers[1]]))
        self.pending: Moving = send_and_receive(rows, sent, found, call.q.device, "rows at the edges", lambda: None)

    def end(self) -> None:
        self.pending.wait()

    def operands(self) -> tuple[Tensor, OfRows]:
        q, out, grad_out = split(self.room, self.group.call.rows_dim, self.shapes)
        lse, grad_lse = torch.cat(self.numbers, -1)
        return q, (grad_out, grad_lse, out, lse)
