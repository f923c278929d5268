# SPDX-License-Identifier: Apache-2.0
"""Rows: which rows of a sequence each rank of a group has, and the collectives that move rows.

A piece is a range of adjacent rows of one sequence. A rank has at most two pieces of each sequence. Its rows lie in memory piece
by piece: first the first piece of every sequence, then the second ones. So the rows that one call computes are adjacent.
Everything about a plan is known on the host. No length is read from a device after Rows has been made.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor


class Piece(NamedTuple):
    """Adjacent rows of one sequence."""

    sequence: int
    start: int  # the position of the first row within the sequence
    rows: int


class Rows:
    """Which rows of a sequence, or of packed sequences, each rank of a group has.

    ``zigzag``, ``contiguous`` and ``packed`` make one. Make it once for each length, or for each batch of packed sequences, and give
    it to all layers. Every rank of the group makes the same one. Queries, keys and values of a call have the same rows.

    ``group`` is a process group, a DeviceMesh, or None for all ranks. A mesh of two dimensions moves keys over its first one and heads over
    its second one, whose ranks are neighbours: ranks along the second share the rows that one rank of the first has. A number plans for so many ranks without a
    group: ``pieces``, ``counts`` and ``balance`` can be read from it.

    Attributes:
        kind (str): "zigzag", "contiguous" or "packed".
        lengths (tuple[int, ...]): The length of each sequence; one for zigzag and contiguous.
        total (int): The number of rows of all sequences.
        ranks (int): The number of ranks.
        rank (int | None): This rank's number within the group; None without a group.
        pieces (tuple): The pieces of each rank, in the order in which they lie in its memory. A piece is (sequence, start, rows).
        counts (tuple[int, ...]): The number of rows of each rank. It may be 0.
        longest (int): The length of the longest sequence.
        over_keys (Rows | None): Of a mesh of two dimensions: the plan over its first one. None otherwise.
        over_heads (Rows | None): The plan that shares out the rows of this rank's place there over the second one.

    Example:
        >>> from fovea.torch import Rows
        >>> rows = Rows.zigzag(1024, 2)
        >>> [[(piece.start, piece.rows) for piece in pieces] for pieces in rows.pieces]
        [[(0, 256), (768, 256)], [(256, 512)]]
        >>> rows.balance(causal=True)
        1.0
    """

    def __init__(self, kind: str, lengths: Sequence[int], pieces: Sequence[Sequence[Piece]], group: Any, ordered: bool = False) -> None:
        self.kind = kind
        self.lengths = tuple(lengths)
        self.total = sum(lengths)
        self.longest = max(lengths, default=0)
        self.ranks = len(pieces)
        self.pieces = tuple(tuple(mine) if ordered else _in_memory_order(mine) for mine in pieces)
        # Of a mesh of two dimensions: the plan over its first one, and the one that shares out the rows of this rank's place there.
        self.over_keys: Optional[Rows] = None
        self.over_heads: Optional[Rows] = None
        self.counts = tuple(sum(piece.rows for piece in mine) for mine in self.pieces)
        self.group = None if isinstance(group, int) else group
        self.rank: Optional[int] = None if isinstance(group, int) else dist.get_rank(group)
        first = [0]
        for length in lengths:
            first.append(first[-1] + length)
        self.first = tuple(first)  # of each sequence, among the rows of all
        self._tensors: dict[Any, Any] = {}

    @classmethod
    def zigzag(cls, seqlen: int, group: Any = None, *, block: int = 128) -> Rows:
        """Two pieces a rank, one from the front and one from the back: balanced for causal and for full attention.

        Args:
            seqlen: The length of the sequence, any number of rows.
            group: See Rows.
            block: Pieces begin at multiples of this number of rows. 128 is the tile of the kernels of a GPU.

        Returns:
            Rows: The plan.

        Raises:
            ValueError: A length or a block is not accepted.
            RuntimeError: torch.distributed is not initialised.
        """
        if _is_mesh(group):
            return _over_mesh(lambda part: cls.zigzag(seqlen, part, block=block), group, block)
        group, ranks = _group(group)
        length = _number("seqlen", seqlen, 0)
        return cls("zigzag", (length,), _zigzag(0, length, range(ranks), ranks, _number("block", block, 1)), group)

    @classmethod
    def contiguous(cls, seqlen: int, group: Any = None, *, block: int = 128) -> Rows:
        """One piece a rank, in the order of the ranks: balanced for full attention and for windows, not for causal attention.

        Arguments, result and errors are those of zigzag.
        """
        if _is_mesh(group):
            return _over_mesh(lambda part: cls.contiguous(seqlen, part, block=block), group, block)
        group, ranks = _group(group)
        length = _number("seqlen", seqlen, 0)
        ends = _cuts(length, ranks, _number("block", block, 1))
        pieces = [[Piece(0, ends[r], ends[r + 1] - ends[r])] for r in range(ranks)]
        return cls("contiguous", (length,), pieces, group)

    @classmethod
    def packed(cls, cu_seqlens: Union[Tensor, Sequence[int]], group: Any = None, *, block: int = 128) -> Rows:
        """Sequences that are packed one after the other. Long ones are cut, short ones are given whole, the longest first, so that
        ranks have about as many rows and as many pairs of queries and keys.

        Args:
            cu_seqlens: (B + 1,): sequence b has the rows cu_seqlens[b] to cu_seqlens[b + 1]. A tensor on a device is read, once.
            group: See Rows.
            block: See zigzag.

        Returns:
            Rows: The plan. Its tensors are packed: (rows, H, D).

        Raises:
            ValueError: cu_seqlens do not begin at 0 or decrease, or a block is not accepted.
            RuntimeError: torch.distributed is not initialised.
        """
        if _is_mesh(group):
            return _over_mesh(lambda part: cls.packed(cu_seqlens, part, block=block), group, block)
        group, ranks = _group(group)
        ends = [_number("cu_seqlens", n, 0) for n in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)]
        lengths = [b - a for a, b in zip(ends, ends[1:])]
        if not ends or ends[0] != 0 or min(lengths, default=0) < 0:
            raise ValueError(f"cu_seqlens: {ends}; accepted: B + 1 numbers from 0 on that never decrease")
        return cls("packed", lengths, _packed(lengths, ranks, _number("block", block, 1)), group)

    def __repr__(self) -> str:
        what = f"{len(self.lengths)} sequences of {self.total} rows" if self.kind == "packed" else f"{self.total} rows"
        where = "" if self.rank is None else f", rank {self.rank}"
        return f"Rows.{self.kind}: {what} over {self.ranks} ranks{where}"

    @property
    def mine(self) -> tuple[Piece, ...]:
        """The pieces of this rank."""
        return self.pieces[self._rank()]

    @property
    def count(self) -> int:
        """The number of rows of this rank."""
        return self.counts[self._rank()]

    @property
    def index(self) -> Tensor:
        """This rank's rows, (count,), int64, on the CPU: their numbers among the rows of all sequences."""
        rank = self._rank()
        start = sum(self.counts[:rank])
        return self._order("cpu").narrow(0, start, self.counts[rank])

    @property
    def positions(self) -> Tensor:
        """The positions of this rank's rows within their sequences, (count,), int64, on the CPU: for rotary embeddings."""
        ranges = [torch.arange(piece.start, piece.start + piece.rows) for piece in self.mine]
        return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)

    def balance(self, causal: bool = True, window: tuple[int, int] = (-1, -1)) -> float:
        """The pairs of queries and keys of the rank that has the most, over the mean of all ranks. 1.0 is perfect.

        Args:
            causal: See attention().
            window: See attention().

        Returns:
            float: At least 1.0.
        """
        left, right = window
        if causal:
            right = 0
        pairs = [
            sum(_pairs(piece.start, piece.rows, self.lengths[piece.sequence], left, right) for piece in mine) for mine in self.pieces
        ]
        return max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else 1.0

    def take(self, x: Tensor, dim: int) -> Tensor:
        """This rank's rows of a tensor that every rank has whole. Nothing is communicated.

        It is differentiable: the gradient of x is that of this rank's loss alone, 0 in the rows of other ranks.

        Args:
            x: A tensor with the rows of all sequences along `dim`.
            dim: That dimension.

        Returns:
            Tensor: The same with this rank's rows, in their order.

        Raises:
            ValueError: x has another number of rows.
        """
        if x.shape[dim] != self.total:
            raise ValueError(
                f"{_name(self)}: take: {x.shape[dim]} rows along dimension {dim}; accepted: {self.total}, the rows of all ranks"
            )
        parts = [x.narrow(dim, self.first[piece.sequence] + piece.start, piece.rows) for piece in self.mine]
        if not parts:
            return x.narrow(dim, 0, 0)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def give(self, x: Tensor, dim: int) -> Tensor:
        """The rows of all ranks, on every rank: what undoes take.

        It is differentiable: the gradient of x is the sum over the ranks of their gradients of this rank's rows, formed in fp32 (fp64 for
        fp64). So a loss that every rank computes from the whole result counts once a rank; divide it by ``ranks``.

        Args:
            x: This rank's rows along `dim`.
            dim: That dimension.

        Returns:
            Tensor: A tensor with the rows of all sequences along `dim`, in their order.

        Raises:
            ValueError: x has another number of rows than this rank.
            RuntimeError: The collective failed; the error names the rank.
        """
        if x.shape[dim] != self.count:
            raise ValueError(
                f"{_name(self)}: give: {x.shape[dim]} rows along dimension {dim}; accepted: {self.count}, the rows of this rank"
            )
        found: Tensor = _Give.apply(self, x, dim)
        return found

    # ---- for the code of this package ----

    def _rank(self) -> int:
        if self.rank is None:
            raise ValueError(f"{self!r} is a plan without a group; accepted: one made with a process group, or with None for all ranks")
        return self.rank

    def _order(self, device: Any) -> Tensor:
        """The rows of rank 0, then those of rank 1, and so on, by their numbers among all rows."""
        found: Tensor = self._cached(
            ("order", device),
            lambda: torch.cat([
                torch.arange(self.first[piece.sequence] + piece.start, self.first[piece.sequence] + piece.start + piece.rows)
                for mine in self.pieces for piece in mine
            ] or [torch.empty(0, dtype=torch.int64)]).to(device),
        )  # fmt: skip
        return found

    def _where(self, device: Any, stride: Optional[int] = None) -> Tensor:
        """Of each row, in natural order: where it lies if the ranks' rows lie one rank after the other; if `stride` is given, with so
        many rows for each rank, of which the last are padding."""

        def made() -> Tensor:
            order = self._order("cpu")
            at = torch.cat([
                torch.arange(count) + (sum(self.counts[:rank]) if stride is None else rank * stride)
                for rank, count in enumerate(self.counts)
            ])  # fmt: skip
            return torch.empty_like(order).index_copy_(0, order, at).to(device)

        found: Tensor = self._cached(("where", device, stride), made)
        return found

    def _cached(self, key: Any, make: Any) -> Any:
        if key not in self._tensors:
            self._tensors[key] = make()
        return self._tensors[key]


# ---- plans ----


def _group(group: Any) -> tuple[Any, int]:
    """A process group, or a number; and the number of ranks."""
    if isinstance(group, int) and not isinstance(group, bool):
        return group, _number("group", group, 1)
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("Rows: torch.distributed is not initialised; call torch.distributed.init_process_group() first")
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(f"group: a DeviceMesh of {group.ndim} dimensions; accepted: one or two, such as mesh['context']")
        group = group.get_group()
    if group is None:
        group = dist.group.WORLD
    rank: Any = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: this process is not in it; accepted: a group of which it is a member")
    return group, dist.get_world_size(group)


def _is_mesh(group: Any) -> bool:
    return hasattr(group, "get_group") and group.ndim == 2


def _over_mesh(plan: Callable[[Any], Rows], mesh: Any, block: int) -> Rows:
    """The plan over the first dimension, with each rank's rows shared out, in their order, over the second one."""
    first = plan(mesh.get_group(0))
    members = mesh.shape[1]
    pieces: list[list[Piece]] = []
    for mine, count in zip(first.pieces, first.counts):
        ends = _cuts(count, members, block)
        for start, stop in zip(ends, ends[1:]):
            parts, at = [], 0
            for piece in mine:
                begin, end = max(start, at), min(stop, at + piece.rows)
                if begin < end:
                    parts.append(Piece(piece.sequence, piece.start + begin - at, end - begin))
                at += piece.rows
            pieces.append(parts)
    if mesh.size() == dist.get_world_size():
        whole: Any = dist.group.WORLD
    elif mesh.mesh_dim_names:
        whole = mesh._flatten().get_group()
    else:
        raise ValueError("group: a DeviceMesh of some of the ranks, without names; accepted: one with mesh_dim_names")
    rows = Rows(first.kind, first.lengths, pieces, whole, ordered=True)
    place = first._rank() * members + dist.get_rank(mesh.get_group(1))
    if rows.rank != place:
        raise ValueError(f"group: a DeviceMesh whose ranks are {mesh.mesh.tolist()}; accepted: ranks in rising order")
    ends = _cuts(first.count, members, block)
    shares = [[Piece(0, start, stop - start)] for start, stop in zip(ends, ends[1:])]
    rows.over_keys = first
    rows.over_heads = Rows("contiguous", (first.count,), shares, mesh.get_group(1))
    return rows


def _number(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: {value!r}; accepted: an integer") from None
    if number < least:
        raise ValueError(f"{name}: {number}; accepted: {least} or more")
    return number


def _pairs(start: int, rows: int, length: int, left: int = -1, right: int = 0) -> int:
    """Pairs of a piece: row i meets the keys from i - left to i + right that exist; -1 is unbounded."""
    stop = start + rows
    behind = length if right < 0 else right
    before = length if left < 0 else left
    clipped = min(max(length - 1 - behind, start), stop)  # from here on the last key ends the range
    last = (start + clipped - 1) * (clipped - start) // 2 + behind * (clipped - start) + (length - 1) * (stop - clipped)
    inner = min(max(before, start), stop)  # from here on the window begins it
    first = (inner + stop - 1) * (stop - inner) // 2 - before * (stop - inner)
    return last - first + rows


def _cuts(length: int, parts: int, block: int) -> list[int]:
    """Where so many parts of a sequence begin and end, all but the last at multiples of a block."""
    blocks = -(-length // block)
    return [min(length, block * (part * blocks // parts)) for part in range(parts + 1)]


def _zigzag(sequence: int, length: int, members: Sequence[int], ranks: int, block: int) -> list[list[Piece]]:
    """The pieces of each rank if these ranks share a sequence."""
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    ends = _cuts(length, 2 * len(members), block)
    for number, rank in enumerate(members):
        for part in (number, 2 * len(members) - 1 - number):
            pieces[rank].append(Piece(sequence, ends[part], ends[part + 1] - ends[part]))
    return pieces


def _packed(lengths: Sequence[int], ranks: int, block: int) -> list[list[Piece]]:
    """Longest first, each sequence to the ranks that have the least so far. One of more than a quarter of a rank's share of the rows is
    cut for as many ranks as have two blocks of it."""
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
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


def _in_memory_order(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """First the first piece of each sequence, then the second ones. Pieces that touch are one, empty ones are none."""
    merged: list[Piece] = []
    for piece in sorted(piece for piece in pieces if piece.rows):
        last = merged[-1] if merged else None
        if last and last.sequence == piece.sequence and last.start + last.rows == piece.start:
            merged[-1] = Piece(last.sequence, last.start, last.rows + piece.rows)
        else:
            merged.append(piece)
    first = {piece.sequence: piece for piece in reversed(merged)}
    return (*(p for p in merged if first[p.sequence] is p), *(p for p in merged if first[p.sequence] is not p))


# ---- collectives ----

def _name(rows: Rows) -> str:
    return f"rank {rows.rank} of {rows.ranks}"


@contextlib.contextmanager
def naming(rows: Rows, what: str) -> Iterator[None]:
    """Errors of a collective name the rank and what it was for."""
    try:
        yield
    except RuntimeError as error:
        _fail(rows, what, error)


def _fail(rows: Rows, what: str, error: Exception) -> NoReturn:
    raise RuntimeError(
        f"{_name(rows)}: {what}: the collective failed: {error}; every rank has to make the same calls with equal arguments, "
        "which FOVEA_CHECK_RANKS=1 compares"
    ) from error


class Pending(NamedTuple):
    """A collective that has been started."""

    rows: Rows
    what: str
    work: Any
    result: Tensor

    def wait(self) -> Tensor:
        if self.work is not None:
            with naming(self.rows, self.what):
                self.work.wait()
        return self.result


def start_gather(rows: Rows, local: Tensor, what: str) -> Pending:
    """(count, F) of this rank: begins to gather those of all ranks, each padded to the largest number of rows."""
    if rows.ranks == 1:
        return Pending(rows, what, None, local)
    most = max(rows.counts)
    send = local
    if local.shape[0] != most or not local.is_contiguous():
        send = local.new_empty(most, local.shape[1])
        send[: local.shape[0]] = local
    found = send.new_empty(rows.ranks * most, local.shape[1])
    with naming(rows, what):
        work = dist.all_gather_into_tensor(found, send, group=rows.group, async_op=True)
    return Pending(rows, what, work, found)


def padded(rows: Rows, local: Tensor) -> Tensor:
    """(count, F) with as many rows as the rank that has the most."""
    found = local.new_zeros(max(rows.counts), local.shape[1])
    found[: local.shape[0]] = local
    return found


def start_round(rows: Rows, tensor: Tensor, what: str, tag: int) -> Pending:
    """Begins to send a tensor to the next rank, and to receive that of the one before."""
    found = torch.empty_like(tensor)
    group: Any = rows.group
    after, before = (dist.get_global_rank(group, ((rows.rank or 0) + by) % rows.ranks) for by in (1, -1))
    with naming(rows, what):
        sent = dist.P2POp(dist.isend, tensor, after, group, tag)
        works = dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, found, before, group, tag)])
    return Pending(rows, what, _All(works, tensor), found)


class _All(NamedTuple):
    """Several works as one, and what is sent, which has to stay until it is."""

    works: Any
    sent: Tensor

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def end_gather(pending: Pending) -> Tensor:
    """(total, F), in natural order."""
    found = pending.wait()
    rows = pending.rows
    return found.index_select(0, rows._where(found.device, max(rows.counts)))


def start_scatter(rows: Rows, whole: Tensor, what: str) -> Pending:
    """(total, F), each rank's part of a sum: begins to form the sum over the ranks, of which each gets its own rows."""
    most = max(rows.counts)
    padded = whole.new_zeros(rows.ranks * most, whole.shape[1])
    padded.index_copy_(0, rows._where(whole.device, most), whole)
    if rows.ranks == 1:
        return Pending(rows, what, None, padded)
    found = whole.new_empty(most, whole.shape[1])
    with naming(rows, what):
        work = dist.reduce_scatter_tensor(found, padded, group=rows.group, async_op=True)
    return Pending(rows, what, work, found)


def end_scatter(pending: Pending) -> Tensor:
    """(count, F)"""
    return pending.wait()[: pending.rows.count]


def exchange_to_heads(rows: Rows, local: Tensor, what: str) -> Tensor:
    """(ranks, count, F), this rank's rows of every rank's heads: returns (total, F), all rows of this rank's heads."""
    found = local.new_empty(rows.total, local.shape[2])
    _exchange(rows, found, local.flatten(0, 1), rows.counts, [local.shape[1]] * rows.ranks, what)
    return found.index_select(0, rows._where(found.device))


def exchange_to_rows(rows: Rows, whole: Tensor, what: str) -> Tensor:
    """The way back."""
    found = whole.new_empty(rows.ranks * rows.count, whole.shape[1])
    _exchange(rows, found, whole.index_select(0, rows._order(whole.device)), [rows.count] * rows.ranks, rows.counts, what)
    return found.view(rows.ranks, rows.count, whole.shape[1])


def _exchange(rows: Rows, found: Tensor, send: Tensor, receives: Sequence[int], sends: Sequence[int], what: str) -> None:
    with naming(rows, what):
        dist.all_to_all_single(found, send.contiguous(), list(receives), list(sends), group=rows.group)


def broadcast_first(rows: Rows, tensor: Tensor, what: str) -> Tensor:
    """The first rank's values."""
    if rows.ranks > 1 and rows.group is not None:
        with naming(rows, what):
            dist.broadcast(tensor, dist.get_global_rank(rows.group, 0), group=rows.group)
    return tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over ranks are formed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Rows, x: Tensor, dim: int) -> Tensor:
        ctx.rows, ctx.dim, ctx.dtype = rows, dim, x.dtype
        first = x.movedim(dim, 0)
        whole = end_gather(start_gather(rows, first.reshape(rows.count, _size(first)), "give"))
        return whole.view(rows.total, *first.shape[1:]).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows = ctx.rows
        first = grad.movedim(ctx.dim, 0).to(wide(ctx.dtype))
        whole = first.reshape(rows.total, _size(first))
        found = end_scatter(start_scatter(rows, whole, "the gradient of give")).to(ctx.dtype)
        return None, found.view(rows.count, *first.shape[1:]).movedim(0, ctx.dim), None


def _size(x: Tensor) -> int:
    """Elements of a row; reshape(-1) cannot tell where there are no rows."""
    return x.shape[1:].numel()
