# SPDX-License-Identifier: Apache-2.0
"""Rows of keys, fetched from the ranks that have them, and the way back of their gradients: messages between two ranks, which only have
the rows that are needed.

Under a window the rows behind a rank's first ones need no fetched keys (`edge`): they read its own where they lie.

A rank needs the keys of a span, some adjacent rows in natural order. Where ranks have few segments, a message has rows that are adjacent on
both sides, and goes from its place to its place. Packed rows can have hundreds of pieces: a rank then sends all of its rows at once, and
they are put in order by a copy.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from . import _rows
from ._parallel_positions import Options, Span, edge_of, has_band, keys_of, may_begin_later, moves_by_lengths, some
from ._rows import Piece, Rows

MOST_SEGMENTS = 4  # of a rank, for messages from place to place


class Segment(NamedTuple):
    """Rows that are adjacent on the rank that has them, and in natural order."""

    local: int
    natural: int
    rows: int


def segments(rows: Rows) -> list[list[Segment]]:
    """All rows of each rank. Pieces that touch are one."""

    def of_rank(pieces: tuple[Piece, ...]) -> list[Segment]:
        found: list[Segment] = []
        local = 0
        for piece in pieces:
            natural = rows.first[piece.sequence] + piece.start
            if found and found[-1].natural + found[-1].rows == natural:
                found[-1] = found[-1]._replace(rows=found[-1].rows + piece.rows)
            else:
                found.append(Segment(local, natural, piece.rows))
            local += piece.rows
        return found

    known: list[list[Segment]] = rows._cached("segments", lambda: list(map(of_rank, rows.pieces)))
    return known


def has_few_segments(rows: Rows) -> bool:
    """Whether messages can have the rows of a segment each."""
    return max(map(len, segments(rows))) <= MOST_SEGMENTS


class Plan:
    """Which rows each rank has and needs. Every rank makes the same one. edge: of edge_of(); then the spans are those of its rows alone."""

    def __init__(self, rows: Rows, spans: Sequence[Span], edge: Optional[int] = None) -> None:
        self.rows, self.spans, self.edge = rows, tuple(spans), edge
        self.rank = rows.rank or 0
        self.mine = self.spans[self.rank]
        self.from_place = has_few_segments(rows)
        self.others = [rank for rank in range(rows.ranks) if rank != self.rank]

    def segments(self, owner: int, user: int) -> list[Segment]:
        """What `owner` has of the span of `user`, in its order."""
        span, found = self.spans[user], []
        for one in segments(self.rows)[owner]:
            first, end = max(one.natural, span.first), min(one.natural + one.rows, span.end)
            if first < end:
                found.append(Segment(one.local + first - one.natural, first, end - first))
        return found

    def received(self, rank: int) -> int:
        """Rows of others that a rank needs."""
        return self.spans[rank].rows - sum(segment.rows for segment in self.segments(rank, rank))

    def returned(self, rank: int) -> int:
        """Rows of this rank that the others need, each counted."""
        return sum(segment.rows for other in range(self.rows.ranks) if other != rank for segment in self.segments(rank, other))

    def at(self, whole: Tensor, segment: Segment) -> Tensor:
        """A segment's rows of those of this rank's span."""
        return whole.narrow(0, segment.natural - self.mine.first, segment.rows)


def fetch_plan(rows: Rows, o: Options, device: Any) -> Plan:
    """What each rank needs: from the first to the last key that its rows can see, and the keys of these rows."""

    def span(pieces: tuple[Piece, ...]) -> Span:
        seen = [keys_of(rows, o, device, piece) for piece in some(pieces)]
        seen += [Span(piece.start, piece.start + piece.rows) for piece in pieces]
        return Span(min(each.first for each in seen), max(each.end for each in seen))

    if rows.kind == "packed" or not has_band(o) or o["positions_q"] is not None or o["positions_k"] is not None or moves_by_lengths(o):
        plan: Plan = rows._cached("fetch all", lambda: Plan(rows, [Span(0, rows.total)] * rows.ranks))
        return plan
    edge = edge_of(rows, o, device)

    def span_of_edge(piece: Piece) -> Span:
        return span((piece._replace(rows=edge),)) if edge and piece.start > 0 else Span(0, 0)

    if edge is not None:
        at_edges: Plan = rows._cached(("fetch", edge), lambda: Plan(rows, [span_of_edge(mine[0]) for mine in rows.pieces], edge))
        return at_edges
    band = (o["causal"], o["window"], o["position_q"], o["position_k"], may_begin_later(device))
    plan = rows._cached(("fetch", *band), lambda: Plan(rows, [span(pieces) for pieces in rows.pieces]))
    return plan


class Moving(NamedTuple):
    """Messages on their way."""

    rows: Rows
    what: str
    works: Any
    tensors: Any  # which have to stay until then
    finish: Callable[[], Any]

    def wait(self) -> Any:
        """Two groups of an Exchange share one, and wait for it twice."""
        with _rows.naming(self.rows, self.what):
            while self.works:
                self.works.pop(0).wait()  # once: gloo would wait for another one
        for messages in self.tensors:
            messages.clear()
        return self.finish()


def start_fetch(plan: Plan, width: int, like: Tensor, put: Callable[[Tensor, int, int], None], what: str) -> Moving:
    """Begins to fetch the rows of this rank's span. `put(room, first, rows)` copies some adjacent rows of this rank there. wait() returns
    (span, width)."""
    rows, rank = plan.rows, plan.rank
    if plan.from_place:
        whole = like.new_empty(plan.mine.rows, width)
        for own in plan.segments(rank, rank):
            put(plan.at(whole, own), own.local, own.rows)

        def of_other(one: Segment) -> Tensor:
            if plan.edge is None:
                return plan.at(whole, one)
            room = like.new_empty(one.rows, width)  # such rows are not among those that this rank fetches
            put(room, one.local, one.rows)
            return room

        sent = [(other, [of_other(one) for one in plan.segments(rank, other)]) for other in plan.others]
        found = [(other, [plan.at(whole, one) for one in plan.segments(other, rank)]) for other in plan.others]
        return send_and_receive(rows, sent, found, like.device, what, lambda: whole)
    ranked = like.new_empty(rows.total, width)
    own_rows = _of_rank(rows, ranked, rank)
    put(own_rows, 0, rows.count)
    found = [(other, [_of_rank(rows, ranked, other)]) for other in plan.others]
    sent = [(other, [own_rows]) for other in plan.others]
    return send_and_receive(rows, sent, found, like.device, what, lambda: _rows.natural(rows, ranked))


Add = Callable[[int, Tensor], None]


def start_return(plan: Plan, whole: Tensor, what: str, add: Optional[Add] = None) -> Moving:
    """(span, F), this rank's part of sums: begins to send the parts of rows that others have. wait() returns pairs of the first of some
    adjacent rows of this rank and their sum. Overwrites `whole`. With `add` the sums of this rank's rows are elsewhere: add(first, part)
    adds some adjacent rows there, and wait() returns nothing."""
    rows, rank, width = plan.rows, plan.rank, whole.shape[1]
    if plan.from_place:
        sent = [(other, [plan.at(whole, one) for one in plan.segments(other, rank)]) for other in plan.others]
        each = [(other, plan.segments(rank, other)) for other in plan.others]
        room = whole.new_empty(sum(one.rows for _, segments in each for one in segments), width)
        ends = iter(itertools.accumulate(one.rows for _, segments in each for one in segments))
        found = [(other, [room[(end := next(ends)) - one.rows : end] for one in segments]) for other, segments in each]
        own = [(one.local, plan.at(whole, one)) for one in plan.segments(rank, rank)]
        added = [(one, part) for (_, segments), (_, tensors) in zip(each, found) for one, part in zip(segments, tensors)]
    else:
        ranked = whole
        if not rows._in_order():
            ranked = torch.empty_like(whole)
            _rows.rank_by_rank(rows, ranked, whole)
        sent = [(other, [_of_rank(rows, ranked, other)]) for other in plan.others]
        room = whole.new_empty(len(plan.others), rows.count, width)
        found = [(other, [part]) for other, part in zip(plan.others, room)]
        own = [(0, _of_rank(rows, ranked, rank))]
        added = [(Segment(0, 0, rows.count), part) for part in room]

    def summed() -> list[tuple[int, Tensor]]:
        if add is not None:
            for first, part in [*own, *((one.local, part) for one, part in added)]:
                add(first, part)
            return []
        for one, part in added:  # in the order of the ranks
            for first, total in own:
                start, end = max(first, one.local), min(first + total.shape[0], one.local + one.rows)
                if start < end:
                    total[start - first : end - first].add_(part[start - one.local : end - one.local])
        return own

    return send_and_receive(rows, sent, found, whole.device, what, summed)


def _of_rank(rows: Rows, ranked: Tensor, rank: int) -> Tensor:
    return ranked.narrow(0, sum(rows.counts[:rank]), rows.counts[rank])


Messages = list[tuple[int, list[Tensor]]]


def send_and_receive(rows: Rows, sent: Messages, found: Messages, device: torch.device, what: str, finish: Callable[[], Any]) -> Moving:
    """Messages between two ranks have one order on both sides. NCCL finds them by it, gloo by numbers."""
    works: Any = []
    if rows.ranks > 1:
        group: Any = rows.group
        with _rows.naming(rows, what):
            _meet(group, device)
            operations = [
                dist.P2POp(way, tensor, dist.get_global_rank(group, other), group, number)
                for way, messages in ((dist.isend, sent), (dist.irecv, found))
                for other, tensors in messages for number, tensor in enumerate(tensors) if tensor.numel()
            ]  # fmt: skip
            works = list(dist.batch_isend_irecv(operations)) if operations else []
    return Moving(rows, what, works, (sent, found), finish)


_met: weakref.WeakSet[Any] = weakref.WeakSet()


def _meet(group: Any, device: torch.device) -> None:
    """NCCL connects the ranks of a group at its first call, which all of them have to make. A rank may have no messages."""
    if device.type == "cuda" and group not in _met:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _met.add(group)
