# SPDX-License-Identifier: Apache-2.0
"""The exchange between rows and heads without copies: each message is a block of memory that is adjacent on both sides.

Where a head's rows are adjacent (heads before rows), a block is a piece's rows of one head, and nothing is copied. Where the heads of a row
are adjacent, a block is a piece's rows of one rank's heads: adjacent only where a rank has just these heads. The other side copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ._parallel_fetch import Segment, segments_of, send_and_receive
from ._rows import Rows

LEAST_BYTES = 2**21  # of a message, on average; smaller ones are packed together
MOST_MESSAGES = 64  # of a tensor, to and from all ranks


class Place(NamedTuple):
    """Dimensions from the end. `heads_first`: in memory a head's rows are adjacent, whatever the dimensions are."""

    heads: int
    rows: int
    heads_first: bool


def from_place_to_place(rows: Rows, tensors: Sequence[Tensor], places: Sequence[Place], to_heads: bool) -> bool:
    """Every rank decides from what is equal on all of them."""
    x, place, times = tensors[0], places[0], 1 if to_heads else rows.ranks
    outer, rest = x.shape[: min(place.heads, place.rows) + x.dim()], x.shape[max(place.heads, place.rows) + x.dim() + 1 :]
    heads = x.shape[place.heads] * times
    messages = outer.numel() * (heads if place.heads_first else rows.ranks) * sum(map(len, rows.pieces))
    size = outer.numel() * heads * rows.total * rest.numel() * x.element_size()
    return rows.ranks > 1 and 0 < messages <= MOST_MESSAGES * rows.ranks and size >= LEAST_BYTES * messages


def exchanged(rows: Rows, what: str, tensors: Sequence[Tensor], places: Sequence[Place], to_heads: bool) -> tuple[Tensor, ...]:
    """This rank's rows of all heads to all rows of this rank's heads, in natural order; or the way back."""
    me, ranks = rows.rank or 0, range(rows.ranks)
    pieces = [segments_of(rows, rank) for rank in ranks]
    by_head: list[list[Tensor]] = [[] for _ in ranks]  # blocks of these rows, by the rank that has their heads
    by_row: list[list[Tensor]] = [[] for _ in ranks]  # blocks of these heads, by the rank that has their rows
    finishes = []
    for x, place in zip(tensors, places):
        sides = _Sides(rows, x, place, to_heads)
        for rank in ranks:
            by_head[rank] += sides.of_these_rows(rank, pieces[me])
            by_row[rank] += sides.of_these_heads(pieces[rank])
        finishes.append(sides.result)
    sent, found = (by_head, by_row) if to_heads else (by_row, by_head)
    for there, here in zip(found[me], sent[me]):
        there.copy_(here)
    others = [rank for rank in ranks if rank != me]
    moving = send_and_receive(
        rows, [(rank, sent[rank]) for rank in others], [(rank, found[rank]) for rank in others], tensors[0].device, what,
        lambda: tuple(finish() for finish in finishes),
    )  # fmt: skip
    results: tuple[Tensor, ...] = moving.wait()
    return results


class _Sides:
    """A tensor's memory on both sides of the exchange. One of them is there, the other one is new."""

    def __init__(self, rows: Rows, x: Tensor, place: Place, to_heads: bool) -> None:
        self.place, self.to_heads, self.dims = place, to_heads, (place.heads + x.dim(), place.rows + x.dim())
        self.first = first = min(self.dims)
        in_order = x.movedim(self.dims if place.heads_first else self.dims[::-1], (first, first + 1))
        self.outer, self.rest = x.shape[:first], x.shape[first + 2 :]
        outer, rest = self.outer.numel(), self.rest.numel()
        ranks, count, total = rows.ranks, rows.count, rows.total
        own = x.shape[place.heads] // (ranks if to_heads else 1)
        # Of these rows: by entry, rank and head, or by rank and entry. Of these heads: by entry and head, or by entry.
        if place.heads_first:
            these_rows, these_heads = (outer, ranks, own, count, rest), (outer, own, total, rest)
        else:
            these_rows, these_heads = (ranks, outer, count, own * rest), (outer, total, own * rest)
        if not to_heads:
            self.rows, self.heads = x.new_empty(these_rows), in_order.reshape(these_heads).contiguous()
        elif place.heads_first:
            self.rows, self.heads = in_order.reshape(these_rows).contiguous(), x.new_empty(these_heads)
        else:
            by_rank = in_order.reshape(outer, count, ranks, own * rest).movedim(2, 0)
            self.rows, self.heads = by_rank.contiguous(), x.new_empty(these_heads)
        self.own = own

    def of_these_rows(self, rank: int, pieces: list[Segment]) -> list[Tensor]:
        blocks = [head for entry in self.rows[:, rank] for head in entry] if self.place.heads_first else self.rows[rank]
        return [block.narrow(0, one.local, one.rows) for block in blocks for one in pieces]

    def of_these_heads(self, pieces: list[Segment]) -> list[Tensor]:
        blocks = self.heads.flatten(0, 1) if self.place.heads_first else self.heads
        return [block.narrow(0, one.natural, one.rows) for block in blocks for one in pieces]

    def result(self) -> Tensor:
        """With the dimensions of the tensor that was given."""
        if self.place.heads_first:
            found = self.heads if self.to_heads else self.rows.flatten(1, 2)
            order = self.dims
        else:
            order = self.dims[::-1]
            if self.to_heads:
                found = self.heads.unflatten(2, (self.own, self.rest.numel()))
            else:
                found = self.rows.unflatten(3, (self.own, self.rest.numel())).movedim(0, 2).flatten(2, 3)  # a copy
        shape = (*self.outer, *found.shape[1:3], *self.rest)
        return found.reshape(shape).movedim((self.first, self.first + 1), order)
