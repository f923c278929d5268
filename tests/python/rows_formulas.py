# SPDX-License-Identifier: Apache-2.0
"""The planner of rows once more, in plain Python: what fovea_rows_plan() is compared with. It imports nothing of fovea."""

from collections import namedtuple

Piece = namedtuple("Piece", "sequence start rows")


def plan(kind, lengths, ranks, block=128, head_ranks=1):
    """The pieces of each rank, in the order in which they lie in its memory."""
    if kind == "packed":
        pieces = _packed(lengths, ranks, block)
    elif kind == "zigzag":
        pieces = _zigzag(0, lengths[0], range(ranks), ranks, block)
    else:
        starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        ends = _cuts(starts[-1], ranks, block)
        for r, end in enumerate(ends):
            for start, next_start in zip(starts, starts[1:]):
                if start <= end < next_start:
                    ends[r] = end - (end - start) % block
        whole = [Piece(n, 0, length) for n, length in enumerate(lengths)]
        pieces = [list(_between(whole, *span)) for span in zip(ends, ends[1:])]
    pieces = [_in_memory_order(mine) for mine in pieces]
    return pieces if head_ranks == 1 else [share for mine in pieces for share in _shares(mine, head_ranks, block)]


def count_of_pairs(pieces, lengths, left, right):
    """By counting."""
    count = 0
    for piece in pieces:
        last = lengths[piece.sequence] - 1
        for i in range(piece.start, piece.start + piece.rows):
            first_key = 0 if left < 0 else max(0, i - left)
            last_key = last if right < 0 else min(last, i + right)
            count += max(0, last_key - first_key + 1)
    return count


def _shares(mine, members, block):
    ends = _cuts(sum(piece.rows for piece in mine), members, block)
    for start, stop in zip(ends, ends[1:]):
        yield tuple(_between(mine, start, stop))


def _between(mine, start, stop):
    at = 0
    for piece in mine:
        begin, end = max(start, at), min(stop, at + piece.rows)
        if begin < end:
            yield Piece(piece.sequence, piece.start + begin - at, end - begin)
        at += piece.rows


def _pairs(start, rows, length, left=-1, right=0):
    """Pairs of a piece: row i meets the keys from i - left to i + right that exist; -1 is unbounded."""
    stop = start + rows
    behind = length if right < 0 else right
    before = length if left < 0 else left
    clipped = min(max(length - 1 - behind, start), stop)  # from here on the last key ends the range
    last = (start + clipped - 1) * (clipped - start) // 2 + behind * (clipped - start) + (length - 1) * (stop - clipped)
    inner = min(max(before, start), stop)  # from here on the window begins it
    first = (inner + stop - 1) * (stop - inner) // 2 - before * (stop - inner)
    return last - first + rows


def _cuts(length, parts, block):
    """Where so many parts of a sequence begin and end, all but the last at multiples of a block."""
    blocks = -(-length // block)
    return [min(length, block * (part * blocks // parts)) for part in range(parts + 1)]


def _zigzag(sequence, length, members, ranks, block):
    """The pieces of each rank if these ranks share a sequence."""
    pieces = [[] for _ in range(ranks)]
    ends = _cuts(length, 2 * len(members), block)
    for number, rank in enumerate(members):
        for part in (number, 2 * len(members) - 1 - number):
            pieces[rank].append(Piece(sequence, ends[part], ends[part + 1] - ends[part]))
    return pieces


def _packed(lengths, ranks, block):
    """Longest first, each sequence to the ranks that have the least so far. One of more than a quarter of a rank's share of the rows is
    cut for as many ranks as have two blocks of it."""
    pieces = [[] for _ in range(ranks)]
    share = max(1.0, sum(lengths) / ranks), max(1.0, sum(_pairs(0, length, length) for length in lengths) / ranks)
    load = [[0.0, 0.0] for _ in range(ranks)]  # rows and pairs, each as a part of a rank's share
    for sequence in sorted(range(len(lengths)), key=lambda b: -lengths[b]):
        length = lengths[sequence]
        if length == 0:
            continue
        cut = 4 * length > share[0]
        wanted = min(ranks, max(1, -(-length // block) // 2)) if cut else 1
        members = sorted(range(ranks), key=lambda r: (max(load[r]), sum(load[r]), r))[:wanted]
        given = [[Piece(sequence, 0, length)] if r == members[0] else [] for r in range(ranks)]
        if wanted > 1:
            given = _zigzag(sequence, length, sorted(members), ranks, block)
        for rank, found in enumerate(given):
            pieces[rank] += found
            load[rank][0] += sum(piece.rows for piece in found) / share[0]
            load[rank][1] += sum(_pairs(piece.start, piece.rows, length) for piece in found) / share[1]
    return pieces


def _in_memory_order(pieces):
    """First the first piece of each sequence, then the second ones. Pieces that touch are one, empty ones are none."""
    merged = []
    for piece in sorted(piece for piece in pieces if piece.rows):
        last = merged[-1] if merged else None
        if last and last.sequence == piece.sequence and last.start + last.rows == piece.start:
            merged[-1] = Piece(last.sequence, last.start, last.rows + piece.rows)
        else:
            merged.append(piece)
    first = {piece.sequence: piece for piece in reversed(merged)}
    return (*(p for p in merged if first[p.sequence] is p), *(p for p in merged if first[p.sequence] is not p))
