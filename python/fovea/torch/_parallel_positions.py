# SPDX-License-Identifier: Apache-2.0
"""Where rows of context_parallel are: what results depend on their positions, the positions of a piece, and the keys that it can see."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from . import _call
from ._call import Shard
from ._rows import Piece, Rows

TILE = 128  # of keys: where a rank's do not begin with the first one, they begin at a multiple of it

Options = dict[str, Any]  # all of attention()'s


class Span(NamedTuple):
    """The rows first to end - 1, in natural order."""

    first: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.first


def has_band(o: Options) -> bool:
    return bool(o["causal"] or o["window"] != (-1, -1))


def is_positional(o: Options) -> bool:
    """Whether results depend on where queries and keys are."""
    return has_band(o) or o["alibi_slopes"] is not None or o["dropout_p"] != 0


def has_positions(o: Options) -> bool:
    return any(o[name] is not None for name in _call.Shard._fields[:4])


def moves_by_lengths(o: Options) -> bool:
    """Whether the sequences' lengths give each a shift of its own."""
    if not (has_band(o) or o["alibi_slopes"] is not None) or o["align"] != "bottom_right" or has_positions(o):
        return False
    return not _same_lengths(o["seqused_q"], o["seqused_k"])


def _same_lengths(a: Optional[Tensor], b: Optional[Tensor]) -> bool:
    if a is None or b is None or a is b:
        return a is b
    return type(a) is type(b) is Tensor and a.device.type == "cpu" and torch.equal(a.long(), b.long())


def moved_by_lengths(rows: Rows, o: Options, device: Any) -> Optional[Tensor]:
    """The shift of each sequence. The same for all parts of a call."""
    if not moves_by_lengths(o):
        return None
    whole = rows._lengths(device)
    lengths = [whole if used is None else torch.minimum(used.long(), whole) for used in (o["seqused_q"], o["seqused_k"])]
    return lengths[1] - lengths[0]


def positions_of(o: Options, moved: Optional[Tensor], start: int, starts: Optional[Tensor] = None) -> Shard:
    """Where a part's rows are, by a number or for each sequence. Its streams are those of a group of heads."""
    if not is_positional(o):
        return Shard()
    each_q, each_k = o["positions_q"] if moved is None else moved, o["positions_k"]
    if starts is not None:
        each_q = starts if each_q is None else starts + each_q
    return Shard((o["position_q"] or 0) + start, o["position_k"] or 0, each_q, each_k)


def used_among(used: Optional[Tensor], start: Any, rows: Any) -> Optional[Tensor]:
    """How many of the rows that each sequence uses are among so many from `start` on. Both are numbers, or have one for each sequence."""
    return None if used is None else (used.long() - start).clamp_min(0).clamp_max(rows).int()


def some(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """A rank without rows has a call, too. It computes nothing, but refuses what those of the other ranks refuse: nobody waits for it."""
    return pieces or (Piece(0, 0, 0),)


def may_begin_later(device: Any) -> bool:
    """Whether a rank's keys may begin with another one than the first. Where the bits of one process are promised, they do not."""
    later: bool = device.type != "cpu"
    return later


def keys_of(rows: Rows, o: Options, device: Any, piece: Piece) -> Span:
    """The keys that the rows of a piece can see, as far as the host knows."""
    total = rows.total
    left, right = o["window"]
    right = 0 if o["causal"] else right
    if o["positions_q"] is not None or o["positions_k"] is not None or moves_by_lengths(o):
        return Span(0, total)
    shard = positions_of(o, None, piece.start)
    start = (shard.position_q or 0) - (shard.position_k or 0)
    end = max(0, min(total, start + piece.rows + right)) if right >= 0 else total
    first = 0
    if left >= 0 and may_begin_later(device):
        first = max(0, min(end, start - left)) // TILE * TILE
    return Span(first, end)


def edge_of(rows: Rows, o: Options, device: Any) -> Optional[int]:
    """Under a window to the left most rows of a rank see keys of this rank alone, which a call can read where they lie. The number of rows
    at the beginning of a rank's that see others' keys; None where that is not so, or where it would leave few rows."""
    left, right = o["window"]
    if not may_begin_later(device) or rows.kind == "packed" or left < 0 or not (o["causal"] or right == 0):
        return None
    moved = o["positions_q"] is not None or o["positions_k"] is not None or (o["position_q"] or 0) != (o["position_k"] or 0)
    if moved or moves_by_lengths(o):
        return None
    edge: int = -(-left // TILE) * TILE
    if any(len(mine) != 1 or mine[0].start % TILE or mine[0].rows < 2 * edge for mine in rows.pieces):
        return None
    return edge
