# SPDX-License-Identifier: Apache-2.0
"""The exchange between rows and heads with few copies: the memory of one side is sent, or received, as it is. Heads move in groups: the
messages of the next group are on their way while one is computed.

On a GPU a message is a kernel of NCCL's, which needs multiprocessors on both sides, and a kernel of attention takes all that it finds free
until it ends. A message that becomes ready after that waits, and where its other side has begun, that one spins meanwhile on
multiprocessors which attention lacks (two H200, packed rows: 7 to 10 ms at a time, 32 of a step's 62 ms). So one message at most is under
way when a group is computed, and it is ready before: what would be a second one goes with it, or later.

Where a head's rows are adjacent (heads before rows), a message is a rank's heads of another rank's rows, as the side of the rows has them;
the side of the heads puts its rows in order. Messages for each head and piece would need no copy, but NCCL took 1.25 ms for 48 of them and
0.7 ms for 3 that were as long together (two H200). Where the heads of a row are adjacent, a message is a piece's rows of one rank's heads,
as the side of the heads has them; the side of the rows copies. With many pieces, as packed rows have, it is all rows of a rank, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ._parallel_copies import as_matrices, copy, copy_all, copy_each, rows_of
from ._parallel_fetch import Moving, has_few_segments, segments, send_and_receive
from ._rows import Rows, first_derivatives

LEAST_BYTES = 2**21  # of a message, on average; smaller ones are packed together
MOST_MESSAGES = 64  # of a tensor, to and from all ranks
AT_ONCE = 2  # groups whose messages begin at once
MOST_COPIES = 512  # of a tensor; more pieces are put in order by the numbers of their rows, in twice the GPU's time and less of the host's


class Place(NamedTuple):
    """Dimensions from the end. `heads_first`: in memory a head's rows are adjacent, whatever the dimensions are."""

    heads: int
    rows: int
    heads_first: bool


def from_place_to_place(rows: Rows, x: Tensor, place: Place, groups: int) -> bool:
    """Whether the messages of `x`, this rank's rows, are few and long. Every rank decides from what is equal on all of them."""
    heads, at = place.heads + x.dim(), place.rows + x.dim()
    outer = x.shape[: min(heads, at)].numel()
    each = rows.ranks if place.heads_first or not has_few_segments(rows) else sum(map(len, segments(rows)))
    messages = outer * rows.ranks * each * groups
    size = x.shape[:at].numel() * rows.total * x.shape[at + 1 :].numel() * x.element_size()
    return rows.ranks > 1 and 0 < messages <= MOST_MESSAGES * rows.ranks and size >= LEAST_BYTES * messages


class Exchange:
    """Tensors with this rank's rows of all heads, and the same with all rows of this rank's heads, in natural order, by groups of heads.
    What the one side sends, the other one receives; a backward goes the other way. `side` is a group's number, or None for all rows' side.

    Two exchanges are a pair, there and back. Of all groups' messages the first two begin at once. The next one goes with that of the pair's
    other exchange, when a group has been computed.
    """

    def __init__(self, rows: Rows, what: str, places: Sequence[Place], groups: int) -> None:
        self.rows, self.what, self.places, self.groups = rows, what, places, groups
        self.sides: dict[int, _Sides] = {}  # by the tensor's number, of those that move
        self.moving: dict[int, Moving] = {}  # by group
        self.later: list[tuple[int, bool, str]] = []  # the arguments of _start(), in this order
        self.other: Any = lambda: None  # of the pair, if there is one: a weak reference

    @staticmethod
    def pair(there: Exchange, back: Exchange) -> tuple[Exchange, Exchange]:
        there.other, back.other = weakref.ref(back), weakref.ref(there)
        return there, back

    def send(self, side: Optional[int], tensors: Sequence[Optional[Tensor]], what: str, last_first: bool = False) -> None:
        """Begins to send. Those that are None do not move. `last_first`: the order in which autograd computes the groups' gradients."""
        to_heads = side is None
        if side is None:
            self.end()  # what an earlier backward left that failed
        elif side in self.moving:
            self.moving.pop(side).wait()
        for n, x in enumerate(tensors):
            if x is not None:
                if n not in self.sides:
                    self.sides[n] = _Sides(self.rows, x, self.places[n], self.groups, to_heads)
                if side is not None:
                    self.sides[n].give_heads(side, x)
        order = range(self.groups) if side is None else (side,)
        for number, group in enumerate(reversed(order) if last_first else order):
            if number < AT_ONCE:
                self._start(group, to_heads, what)
            else:
                self.later.append((group, to_heads, what))

    def _start(self, group: int, to_heads: bool, what: str) -> None:
        """Begins to send a group, and with it what the other exchange has for later."""
        sent, found = self._messages(group, to_heads)
        other = self.other()
        others = other.later.pop(0) if other is not None and other.later else None
        if others is not None:
            for messages, more in zip((sent, found), other._messages(*others[:2])):
                for rank, tensors in more.items():
                    messages[rank] += tensors
        device = next(iter(self.sides.values())).rows.device
        moving = send_and_receive(self.rows, list(sent.items()), list(found.items()), device, what, lambda: None)
        self.moving[group] = moving
        if others is not None:
            other.moving[others[0]] = moving

    def _messages(self, group: int, to_heads: bool) -> tuple[dict[int, list[Tensor]], dict[int, list[Tensor]]]:
        """What is sent to each of the other ranks, and what comes from them."""
        me, ranks, sides = self.rows.rank or 0, range(self.rows.ranks), self.sides.values()
        if to_heads:
            for side in sides:
                side.make_heads(group)
        by_head = [[block for side in sides for block in side.of_these_rows(group, rank)] for rank in ranks]
        by_row = [[block for side in sides for block in side.of_these_heads(group, rank)] for rank in ranks]
        sent, found = (by_head, by_row) if to_heads else (by_row, by_head)
        copy_all((there, here) for there, here in zip(found[me], sent[me]) if there.data_ptr() != here.data_ptr())  # else one is both
        return {rank: sent[rank] for rank in ranks if rank != me}, {rank: found[rank] for rank in ranks if rank != me}

    def receive(self, side: Optional[int]) -> list[Optional[Tensor]]:
        """What the other side has sent."""
        while self.later and (side is None or side not in self.moving):  # no group was sent in the other direction meanwhile
            self._start(*self.later.pop(0))
        for group in sorted(self.moving) if side is None else (side,):
            self.moving.pop(group).wait()
        found: list[Optional[Tensor]] = [None] * len(self.places)
        for n, one in self.sides.items():
            found[n] = one.all_rows() if side is None else one.heads_of(side)
        if not self.moving and not self.later:
            self.sides = {}
        return found

    def end(self) -> None:
        """After an error: waits for what is on its way, whose memory has to stay until then."""
        self.later = []
        while self.moving:
            self.moving.popitem()[1].wait()
        self.sides = {}

    # ---- under autograd: a function that begins, whose results have no elements, and one that ends ----

    def begins(self, side: Optional[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        marks: tuple[Tensor, ...] = _Begins.apply(self, side, *tensors)
        return marks

    def ends(self, side: Optional[int], marks: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """`marks` are those of a group, or of all groups in their order."""
        tensors: tuple[Tensor, ...] = _Ends.apply(self, side, *marks)
        return tensors

    def marks_of(self, group: int, marks: Sequence[Tensor]) -> Sequence[Tensor]:
        return marks[group * len(self.places) : (group + 1) * len(self.places)]

    def times(self, side: Optional[int]) -> int:
        return self.groups if side is None else 1


def learns(ctx: Any, tensors: Sequence[Any], needed: Sequence[bool]) -> None:
    """Says which results of an exchange have a gradient: those of which the given tensors need one. Autograd would have the others'
    computed, too, and they would move."""
    ctx.mark_non_differentiable(*(x for x, is_needed in zip(tensors, needed) if not is_needed))


class _Begins(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, side: Optional[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.given = exchange, side
        exchange.send(side, tensors, exchange.what)
        marks = tuple(x.new_empty(0) for _ in range(exchange.times(side)) for x in tensors)
        learns(ctx, marks, ctx.needs_input_grad[2:] * exchange.times(side))
        return marks

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, *marks: Optional[Tensor]) -> tuple[Any, ...]:
        exchange, side = ctx.given
        return (None, None, *exchange.receive(side))


class _Ends(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, side: Optional[int], *marks: Tensor) -> tuple[Optional[Tensor], ...]:
        ctx.set_materialize_grads(False)
        ctx.given = exchange, side
        found = exchange.receive(side)
        needed = ctx.needs_input_grad[2:]
        learns(ctx, found, [any(needed[n :: len(found)]) for n in range(len(found))])
        return tuple(found)

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, *grads: Optional[Tensor]) -> tuple[Any, ...]:
        exchange, side = ctx.given
        if any(grad is not None for grad in grads):
            exchange.send(side, grads, f"the gradient of {exchange.what}", last_first=True)
        marks = [None if grad is None else grad.new_empty(0) for grad in grads]
        return (None, None, *(marks * exchange.times(side)))


class _Pieces:
    """All pieces of all ranks, and their natural order."""

    def __init__(self, rows: Rows) -> None:
        self.of_ranks = segments(rows)
        self.sizes = [[one.rows for one in mine] for mine in self.of_ranks]
        one_after_another = [one for mine in self.of_ranks for one in mine]
        self.order = sorted(range(len(one_after_another)), key=lambda n: (one_after_another[n].natural, n))
        self.natural_sizes = [one_after_another[n].rows for n in self.order]

    def copy(self, natural: Tensor, by_rank: Sequence[Tensor], back: bool) -> None:
        """(..., total, width) from (..., count, width) of each rank; `back`: into these. The host needs long for many pieces, one
        view after the other (20 documents on two H200: several times as long as a group of heads takes to be computed)."""
        matrices: Any = as_matrices(natural, *by_rank)
        tensors: Any = matrices or (natural, *by_rank)
        whole, *parts = tensors
        ranked = [x for room, sizes in zip(parts, self.sizes) for x in room.split(sizes, -2)]
        here, there = list(whole.split(self.natural_sizes, -2)), [ranked[n] for n in self.order]
        intos, given = (there, here) if back else (here, there)
        if matrices:
            copy_each(intos, given)
        else:
            copy_all(zip(intos, given))


class _Sides:
    """A tensor's memory on both sides of the exchange. One of them is there, the other one is new."""

    def __init__(self, rows: Rows, x: Tensor, place: Place, groups: int, to_heads: bool) -> None:
        """`x` has this rank's rows, or all rows of a group of its heads."""
        self.plan, self.place, self.rank = rows, place, rows.rank or 0
        self.pieces: _Pieces = rows._cached("pieces in order", lambda: _Pieces(rows))
        self.by_pieces = not place.heads_first and has_few_segments(rows)
        self.dims = (place.heads + x.dim(), place.rows + x.dim())
        self.first = first = min(self.dims)
        self.outer, self.rest = x.shape[:first], x.shape[first + 2 :]
        self.own = x.shape[place.heads] // (rows.ranks * groups if to_heads else 1)  # heads of a group
        outer, own, rest, ranks, count = self.outer.numel(), self.own, self.rest.numel(), rows.ranks, rows.count
        # By entry, rank, group and head; or by rank, group and entry.
        shape = (outer, ranks, groups, own, count, rest) if place.heads_first else (ranks, groups, outer, count, own * rest)
        if to_heads and place.heads_first:
            self.rows = self.in_order(x).reshape(shape).contiguous()
        else:
            self.rows = x.new_empty(shape)
        self.given = self.in_order(x) if to_heads and not place.heads_first else None
        # Of a group's heads: by entry and head, or by entry; and, where a message is all rows of a rank, these.
        self.heads: dict[int, Tensor] = {}
        self.ranked: dict[int, list[Tensor]] = {}

    def in_order(self, x: Tensor) -> Tensor:
        """Heads and rows as they are in memory, behind the entries."""
        return x.movedim(self.dims if self.place.heads_first else self.dims[::-1], (self.first, self.first + 1))

    def by_row(self) -> Tensor:
        """These rows where a message has all of a rank's heads: (entries, rows, ranks, groups, heads, rest)."""
        rows: Any = self.rows
        found: Tensor = rows.unflatten(-1, (self.own, self.rest.numel())).movedim((0, 1), (2, 3))
        return found

    def make_heads(self, group: int) -> None:
        """A group's memory, and its rows where a message has them."""
        if self.given is not None:  # one group at a time: the first one's messages are on their way while the next one's are copied
            given, to = self.given.flatten(0, self.first - 1) if self.first else self.given[None], self.by_row()
            copy(to[:, :, :, group], given.reshape(*to.shape)[:, :, :, group])
        self.heads[group] = self.rows.new_empty(self.shape_of_heads())
        self.make_ranked(group)

    def give_heads(self, group: int, x: Tensor) -> None:
        heads = self.in_order(x).reshape(self.shape_of_heads())
        self.heads[group] = heads.contiguous() if self.by_pieces else heads
        self.make_ranked(group)
        self.put_in_order(group, back=True)

    def shape_of_heads(self) -> tuple[int, ...]:
        outer, own, total, rest = self.outer.numel(), self.own, self.plan.total, self.rest.numel()
        return (outer, own, total, rest) if self.place.heads_first else (outer, total, own * rest)

    def make_ranked(self, group: int) -> None:
        if self.by_pieces:
            return
        *before, _, width = self.shape_of_heads()
        self.ranked[group] = [self.rows.new_empty(*before, n, width) for n in self.plan.counts]
        self.ranked[group][self.rank] = self._blocks(group, self.rank)  # its own rows are there already, or are wanted there

    def put_in_order(self, group: int, back: bool = False) -> None:
        if self.by_pieces:
            return
        plan, heads, rooms = self.plan, self.heads[group], self.ranked[group]
        pieces = self.pieces
        # Not a head's rows of many segments, such as lse of packed rows.
        if len(pieces.order) > MOST_COPIES or (self.place.heads_first and not has_few_segments(plan)):
            if back:
                whole: Any = rows_of(heads, plan._order(heads.device))
                copy_all(zip(rooms, whole.split(list(plan.counts), -2)))
            else:
                self.heads[group] = rows_of(torch.cat(rooms, -2), plan._where(heads.device))
            return
        pieces.copy(heads, rooms, back)

    def _blocks(self, group: int, rank: int) -> Tensor:
        """Of these rows, a rank's heads."""
        return self.rows[:, rank, group] if self.place.heads_first else self.rows[rank, group]

    def of_these_rows(self, group: int, rank: int) -> list[Tensor]:
        entries = list(self._blocks(group, rank))
        if not self.by_pieces:
            return entries
        return [entry.narrow(0, one.local, one.rows) for entry in entries for one in self.pieces.of_ranks[self.rank]]

    def of_these_heads(self, group: int, rank: int) -> list[Tensor]:
        if not self.by_pieces:
            return list(self.ranked[group][rank])
        return [entry.narrow(0, one.natural, one.rows) for entry in self.heads[group] for one in self.pieces.of_ranks[rank]]

    def heads_of(self, group: int) -> Tensor:
        """With the dimensions of the tensor that was given."""
        self.put_in_order(group)
        self.ranked.pop(group, None)
        heads: Any = self.heads.pop(group)
        return self._shaped(heads if self.place.heads_first else heads.unflatten(-1, (self.own, self.rest.numel())))

    def all_rows(self) -> Tensor:
        """The same."""
        if self.place.heads_first:
            return self._shaped(self.rows.flatten(1, 3))
        each = self.by_row()
        found = torch.empty(each.shape, dtype=each.dtype, device=each.device)
        copy(found, each)
        return self._shaped(found.flatten(2, 4))

    def _shaped(self, x: Tensor) -> Tensor:
        order = self.dims if self.place.heads_first else self.dims[::-1]
        return x.reshape(*self.outer, *x.shape[1:3], *self.rest).movedim((self.first, self.first + 1), order)
