# SPDX-License-Identifier: Apache-2.0
"""The exchange between rows and heads with few copies: the memory of one side is sent, or received, as it is.

Where a head's rows are adjacent (heads before rows), a message is a rank's heads of another rank's rows, as the side of the rows has them;
the side of the heads puts its rows in order. Messages for each head and piece would need no copy, but NCCL took 1.25 ms for 48 of them and
0.7 ms for 3 that were as long together (two H200). Where the heads of a row are adjacent, a message is a piece's rows of one rank's heads,
as the side of the heads has them; the side of the rows copies.
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
    messages = outer.numel() * (rows.ranks**2 if place.heads_first else rows.ranks * sum(map(len, rows.pieces)))
    size = outer.numel() * x.shape[place.heads] * times * rows.total * rest.numel() * x.element_size()
    return rows.ranks > 1 and 0 < messages <= MOST_MESSAGES * rows.ranks and size >= LEAST_BYTES * messages


def exchanged(rows: Rows, what: str, tensors: Sequence[Tensor], places: Sequence[Place], to_heads: bool) -> tuple[Tensor, ...]:
    """This rank's rows of all heads to all rows of this rank's heads, in natural order; or the way back."""
    me, ranks = rows.rank or 0, range(rows.ranks)
    sides = [_Sides(rows, x, place, to_heads) for x, place in zip(tensors, places)]
    by_head = [[block for side in sides for block in side.of_these_rows(rank)] for rank in ranks]
    by_row = [[block for side in sides for block in side.of_these_heads(rank)] for rank in ranks]
    sent, found = (by_head, by_row) if to_heads else (by_row, by_head)
    for there, here in zip(found[me], sent[me]):
        if there.data_ptr() != here.data_ptr():  # else one memory is both
            there.copy_(here)
    others = [rank for rank in ranks if rank != me]
    moving = send_and_receive(
        rows, [(rank, sent[rank]) for rank in others], [(rank, found[rank]) for rank in others], tensors[0].device, what,
        lambda: tuple(side.result() for side in sides),
    )  # fmt: skip
    results: tuple[Tensor, ...] = moving.wait()
    return results


class _Sides:
    """A tensor's memory on both sides of the exchange. One of them is there, the other one is new."""

    def __init__(self, rows: Rows, x: Tensor, place: Place, to_heads: bool) -> None:
        self.place, self.to_heads, self.dims = place, to_heads, (place.heads + x.dim(), place.rows + x.dim())
        self.first = first = min(self.dims)
        self.pieces, self.rank = [segments_of(rows, rank) for rank in range(rows.ranks)], rows.rank or 0
        in_order = x.movedim(self.dims if place.heads_first else self.dims[::-1], (first, first + 1))
        self.outer, self.rest = x.shape[:first], x.shape[first + 2 :]
        outer, rest = self.outer.numel(), self.rest.numel()
        ranks, count, total = rows.ranks, rows.count, rows.total
        self.own = own = x.shape[place.heads] // (ranks if to_heads else 1)
        these_rows: tuple[int, ...]
        these_heads: tuple[int, ...]
        # Of these rows: by entry, rank and head, or by rank and entry. Of these heads: by entry and head, or by entry.
        if place.heads_first:
            these_rows, these_heads = (outer, ranks, own, count, rest), (outer, own, total, rest)
        else:
            these_rows, these_heads = (ranks, outer, count, own * rest), (outer, total, own * rest)
        if not to_heads:
            self.rows, self.heads = x.new_empty(these_rows), in_order.reshape(these_heads)
        elif place.heads_first:
            self.rows, self.heads = in_order.reshape(these_rows).contiguous(), x.new_empty(these_heads)
        else:
            by_rank = in_order.reshape(outer, count, ranks, own * rest).movedim(2, 0)
            self.rows, self.heads = by_rank.contiguous(), x.new_empty(these_heads)
        self.ranked: list[Tensor] = []  # of these heads, by rank: the rows of each one
        if place.heads_first:
            self.ranked = [x.new_empty(outer, own, n, rest) for n in rows.counts]
            self.ranked[self.rank] = self.rows[:, self.rank]
            if not to_heads:
                self.put_in_order(back=True)
        elif not to_heads:
            self.heads = self.heads.contiguous()

    def put_in_order(self, back: bool = False) -> None:
        for room, pieces in zip(self.ranked, self.pieces):
            for one in pieces:
                natural, ranked = self.heads.narrow(2, one.natural, one.rows), room.narrow(2, one.local, one.rows)
                ranked.copy_(natural) if back else natural.copy_(ranked)

    def of_these_rows(self, rank: int) -> list[Tensor]:
        if self.place.heads_first:
            return list(self.rows[:, rank])
        return [entry.narrow(0, one.local, one.rows) for entry in self.rows[rank] for one in self.pieces[self.rank]]

    def of_these_heads(self, rank: int) -> list[Tensor]:
        if self.place.heads_first:
            return list(self.ranked[rank])
        return [entry.narrow(0, one.natural, one.rows) for entry in self.heads for one in self.pieces[rank]]

    def result(self) -> Tensor:
        """With the dimensions of the tensor that was given."""
        if self.place.heads_first:
            if self.to_heads:
                self.put_in_order()
            found = self.heads if self.to_heads else self.rows.flatten(1, 2)
            order = self.dims
        else:
            order = self.dims[::-1]
            if self.to_heads:
                found = self.heads.view(*self.heads.shape[:2], self.own, self.rest.numel())
            else:
                found = self.rows.view(*self.rows.shape[:3], self.own, self.rest.numel()).movedim(0, 2).flatten(2, 3)  # a copy
        shape = (*self.outer, *found.shape[1:3], *self.rest)
        return found.reshape(shape).movedim((self.first, self.first + 1), order)
