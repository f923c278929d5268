# SPDX-License-Identifier: Apache-2.0
"""Rows: which rows of a sequence each rank of a group has, and the collectives that move rows.

A piece is a range of adjacent rows of one sequence. A rank has at most two pieces of each sequence. Its rows lie in memory piece
by piece: first the first piece of every sequence, then the second ones. So the rows that one call computes are adjacent.
Everything about a plan is known on the host. No length is read from a device after Rows has been made.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import operator
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _abi, _library
from .._problem import _window


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

    def __init__(self, kind: str, lengths: Sequence[int], group: Any, ranks: int, block: int, head_ranks: int = 1) -> None:
        """kind: of _KINDS."""
        self._asked = (kind, tuple(lengths), ranks, head_ranks, block)
        plan = _plan(*self._asked)
        self.kind = kind.split()[0]
        self.lengths = tuple(lengths)
        self.total = sum(lengths)
        self.longest = max(lengths, default=0)
        self.ranks = ranks * head_ranks
        self.pieces = plan.pieces
        # Of a mesh of two dimensions: the plan over its first one, and the one that shares out the rows of this rank's place there.
        self.over_keys: Optional[Rows] = None
        self.over_heads: Optional[Rows] = None
        self.part_of: Optional[Rows] = None  # of these two: the plan over both, by whose ranks errors are named
        self.counts = plan.counts
        self.group = None if isinstance(group, int) else group
        self.rank: Optional[int] = None if isinstance(group, int) else dist.get_rank(group)
        first = [0]
        for length in lengths:
            first.append(first[-1] + length)
        self.first = tuple(first)  # of each sequence, among the rows of all
        self._tensors: dict[Any, Any] = {}
        self._name_groups(self.group)

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
        return cls("zigzag", (_number("seqlen", seqlen, 0),), group, ranks, _number("block", block, 1))

    @classmethod
    def contiguous(cls, seqlen: int, group: Any = None, *, block: int = 128) -> Rows:
        """One piece a rank, in the order of the ranks: balanced for full attention and for windows, not for causal attention.

        Arguments, result and errors are those of zigzag.
        """
        if _is_mesh(group):
            return _over_mesh(lambda part: cls.contiguous(seqlen, part, block=block), group, block)
        group, ranks = _group(group)
        return cls("contiguous", (_number("seqlen", seqlen, 0),), group, ranks, _number("block", block, 1))

    @classmethod
    def packed(cls, cu_seqlens: Union[Tensor, Sequence[int]], group: Any = None, *, block: int = 128, contiguous: bool = False) -> Rows:
        """Sequences that are packed one after the other. Long ones are cut, short ones are given whole, the longest first, so that
        ranks have about as many rows and as many pairs of queries and keys.

        Args:
            cu_seqlens: (B + 1,): sequence b has the rows cu_seqlens[b] to cu_seqlens[b + 1]. A tensor on a device is read, once.
            group: See Rows.
            block: See zigzag.
            contiguous: Each rank has adjacent rows of all, about as many as the others. Then move="heads" puts no rows in order, and
                move="keys" is not balanced.

        Returns:
            Rows: The plan. Its tensors are packed: (rows, H, D).

        Raises:
            ValueError: cu_seqlens do not begin at 0 or decrease, or a block is not accepted.
            RuntimeError: torch.distributed is not initialised.
        """
        if _is_mesh(group):
            return _over_mesh(lambda part: cls.packed(cu_seqlens, part, block=block, contiguous=contiguous), group, block)
        group, ranks = _group(group)
        ends = [_number("cu_seqlens", n, 0) for n in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)]
        lengths = [b - a for a, b in zip(ends, ends[1:])]
        if not ends or ends[0] != 0 or min(lengths, default=0) < 0:
            raise ValueError(f"cu_seqlens: {ends}; accepted: B + 1 numbers from 0 on that never decrease")
        return cls("packed contiguous" if contiguous else "packed", lengths, group, ranks, _number("block", block, 1))

    def __repr__(self) -> str:
        what = f"{len(self.lengths)} sequences of {self.total} rows" if self.kind == "packed" else f"{self.total} rows"
        where = "" if self.rank is None else f", rank {self.rank}"
        how = ", contiguous" if self._asked[0] == "packed contiguous" else ""
        return f"Rows.{self.kind}: {what} over {self.ranks} ranks{where}{how}"

    def __deepcopy__(self, memo: Any) -> Rows:
        return self  # as a module that keeps its plan is copied; a plan does not change

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

        Raises:
            TypeError, ValueError: window is no pair of integers of 64 bits, or one is less than -1.
        """
        sides = _window(window)
        found: float = self._cached(("balance", causal, sides), lambda: _balance(*self._asked, causal, sides))
        return found

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
        _dimension(self, "take", x, dim)
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
        _dimension(self, "give", x, dim)
        if x.shape[dim] != self.count:
            raise ValueError(
                f"{_name(self)}: give: {x.shape[dim]} rows along dimension {dim}; accepted: {self.count}, the rows of this rank"
            )
        found: Tensor = _Give.apply(self, x, dim)
        return found

    # ---- for the code of this package ----

    def _name_groups(self, *groups: Any) -> None:
        """`handle` names this plan in a graph. PyTorch keeps compiled graphs for other processes, by their text: so it also has what the
        graph of a call depends on, the rank first of all."""
        names = [group.group_name for group in groups if group is not None]
        more = (self.rank, os.environ.get("LOCAL_WORLD_SIZE"), _library.version())
        self.handle = json.dumps([*self._asked, names, *more])
        if names:
            _known[self.handle] = self

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

    def _ends(self, device: Any) -> Tensor:
        """cu_seqlens of all rows."""
        found: Tensor = self._cached(("ends", device), lambda: torch.tensor(self.first, dtype=torch.int32, device=device))
        return found

    def _lengths(self, device: Any) -> Tensor:
        found: Tensor = self._cached(("lengths", device), lambda: torch.tensor(self.lengths, device=device))
        return found

    def _in_order(self, stride: Optional[int] = None) -> bool:
        """Whether rows that lie one rank after the other, as _where() says, are in natural order."""
        found: bool = self._cached(("in order", stride), lambda: torch.equal(self._where("cpu", stride), torch.arange(self.total)))
        return found

    def _cached(self, key: Any, make: Any) -> Any:
        if key not in self._tensors:
            with torch.inference_mode(False):  # a tensor that is made in inference mode could not be used in training later
                self._tensors[key] = make()
        return self._tensors[key]


_known: weakref.WeakValueDictionary[str, Rows] = weakref.WeakValueDictionary()


def of_handle(handle: str) -> Rows:
    """The plan that a graph names. It is made again where it is gone, or where the graph is from another process."""
    found = _known.get(handle)
    if found is None:
        kind, lengths, ranks, head_ranks, block, names, *_ = json.loads(handle)
        c10d: Any = dist.distributed_c10d
        groups = [c10d._resolve_process_group(name) for name in names]
        if len(groups) > 1:
            return _over_groups(Rows(kind, lengths, groups[1], ranks, block), *groups)
        found = Rows(kind, lengths, groups[0], ranks, block)
    return found


# ---- plans ----


class _Plan(NamedTuple):
    pieces: tuple[tuple[Piece, ...], ...]
    counts: tuple[int, ...]


_KINDS = {
    "zigzag": _abi.ROWS_ZIGZAG, "contiguous": _abi.ROWS_CONTIGUOUS, "packed": _abi.ROWS_PACKED, "packed contiguous": _abi.ROWS_CONTIGUOUS,
}  # fmt: skip


def _plan(kind: str, lengths: Sequence[int], ranks: int, head_ranks: int, block: int) -> _Plan:
    """By the library, whose planner C, C++ and the command have, too."""
    asked = _asked(kind, lengths, ranks, head_ranks, block)
    needed = _planned(asked, lengths)
    array: Any = ctypes.c_int64 * (ranks * head_ranks)
    rows, piece_counts, numbers = array(), array(), (ctypes.c_int64 * (3 * needed))()
    asked.rows, asked.piece_counts = ctypes.addressof(rows), ctypes.addressof(piece_counts)
    asked.pieces, asked.piece_capacity = ctypes.addressof(numbers), needed
    _planned(asked, lengths)
    pieces = map(Piece._make, zip(*[iter(numbers)] * 3))
    return _Plan(tuple(tuple(itertools.islice(pieces, count)) for count in piece_counts), tuple(rows))


def _balance(
    kind: str, lengths: Sequence[int], ranks: int, head_ranks: int, block: int, causal: bool, window: tuple[int, int]
) -> float:  # fmt: skip
    balance = ctypes.c_double()
    asked = _asked(kind, lengths, ranks, head_ranks, block)
    asked.flags = _abi.WINDOW | (_abi.CAUSAL if causal else 0)
    asked.window_left, asked.window_right = (min(max(side, -(2**62)), 2**62) for side in window)
    asked.balance = ctypes.addressof(balance)
    _planned(asked, lengths)
    return balance.value


def _asked(kind: str, lengths: Sequence[int], ranks: int, head_ranks: int, block: int) -> _abi.Rows:
    for name, number in (("ranks", ranks), ("block", block), ("rows", max(lengths, default=0))):
        if number >= 2**63:  # which ctypes would cut
            raise ValueError(f"{name}: {number}; accepted: at most 2^31")
    return _abi.Rows(
        size=ctypes.sizeof(_abi.Rows), kind=_KINDS[kind], ranks=ranks, head_ranks=head_ranks, block=block, sequences=len(lengths)
    )


def _planned(asked: _abi.Rows, lengths: Sequence[int]) -> int:
    """Fills the arrays of what is asked. Returns the number of pieces."""
    given, needed = (ctypes.c_int64 * len(lengths))(*lengths), ctypes.c_int64()
    asked.lengths = ctypes.addressof(given)
    _library.check(_library.lib.fovea_rows_plan(ctypes.byref(asked), ctypes.byref(needed)))
    return needed.value


def _group(group: Any) -> tuple[Any, int]:
    """A process group, or a number; and the number of ranks."""
    if group is not None and dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this process is not in it; accepted: a group of which it is a member")
    if isinstance(group, int) and not isinstance(group, bool):
        return group, _number("group", group, 1)
    if isinstance(group, (bool, str, float)):
        raise TypeError(f"group: {group!r}; accepted: a process group, a DeviceMesh, None for all ranks, or a number of ranks")
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
    if mesh.size() == dist.get_world_size():
        whole: Any = dist.group.WORLD
    elif mesh.mesh_dim_names:
        whole = mesh._flatten().get_group()
    else:
        raise ValueError("group: a DeviceMesh of some of the ranks, without names; accepted: one with mesh_dim_names")
    rows = _over_groups(first, whole, mesh.get_group(0), mesh.get_group(1))
    if rows.rank != first._rank() * members + dist.get_rank(mesh.get_group(1)):
        raise ValueError(f"group: a DeviceMesh whose ranks are {mesh.mesh.tolist()}; accepted: ranks in rising order")
    return rows


def _over_groups(first: Rows, whole: Any, keys: Any, heads: Any) -> Rows:
    (kind, *_, block), members = first._asked, dist.get_world_size(heads)
    rows = Rows(kind, first.lengths, whole, first.ranks, block, members)
    rows.over_keys = first
    rows.over_heads = Rows("contiguous", (first.count,), heads, members, block)
    first.part_of = rows.over_heads.part_of = rows
    rows._name_groups(whole, keys, heads)
    return rows


def _dimension(rows: Rows, what: str, x: Any, dim: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{_name(rows)}: {what}: a {type(x).__name__}; accepted: a torch.Tensor")
    if not -x.dim() <= _number("dim", dim, -64) < x.dim():
        raise ValueError(f"{_name(rows)}: {what}: dim={dim} of a tensor of {x.dim()} dimensions; accepted: that of its rows")


def _number(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: {value!r}; accepted: an integer") from None
    if number < least:
        raise ValueError(f"{name}: {number}; accepted: {least} or more")
    return number


# ---- collectives ----

def _name(rows: Rows) -> str:
    rows = rows.part_of or rows
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
        "and FOVEA_CHECK_RANKS=1 compares those of context_parallel()"
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


def by_ranks(rows: Rows, width: int, like: Tensor) -> Tensor:
    """Memory for the rows of all ranks, one rank after the other, each with as many as the rank that has the most. Collectives work in
    it, so that no rank has its own rows twice."""
    return like.new_empty(rows.ranks * max(rows.counts), width)


def of_this_rank(rows: Rows, whole: Tensor) -> Tensor:
    """This rank's place in by_ranks()."""
    most = max(rows.counts)
    return whole.narrow(0, (rows.rank or 0) * most, most)


def start_gather(rows: Rows, whole: Tensor, what: str) -> Pending:
    """by_ranks() with this rank's rows in their place: begins to gather those of the others."""
    work: Any = None
    if rows.ranks > 1:
        with naming(rows, what):
            work = dist.all_gather_into_tensor(whole, of_this_rank(rows, whole), group=rows.group, async_op=True)
    return Pending(rows, what, work, whole)


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
    return natural(pending.rows, pending.wait(), max(pending.rows.counts))


def natural(rows: Rows, found: Tensor, stride: Optional[int] = None) -> Tensor:
    """(total, F) in natural order, of rows that lie one rank after the other. A copy, where they do not lie so already."""
    if rows._in_order(stride):
        return found.narrow(0, 0, rows.total)
    return found.index_select(0, rows._where(found.device, stride))


def start_scatter(rows: Rows, whole: Tensor, what: str) -> Pending:
    """(total, F), each rank's part of a sum: begins to form the sum over the ranks, of which each gets its own rows."""
    ranked = by_ranks(rows, whole.shape[1], whole).index_copy_(0, rows._where(whole.device, max(rows.counts)), whole)
    mine, work = of_this_rank(rows, ranked), None
    if rows.ranks > 1:
        with naming(rows, what):
            work = dist.reduce_scatter_tensor(mine, ranked, group=rows.group, async_op=True)
    return Pending(rows, what, work, mine)


def end_scatter(pending: Pending) -> Tensor:
    """(count, F)"""
    return pending.wait()[: pending.rows.count]


def rank_by_rank(rows: Rows, room: Tensor, whole: Tensor) -> None:
    """The way back: copies rows in natural order into memory where they lie one rank after the other."""
    if rows._in_order():
        room.copy_(whole)
    else:
        room.index_copy_(0, rows._where(room.device), whole)


def exchange_to_heads(rows: Rows, send: Tensor, what: str) -> Tensor:
    """(ranks, count, F), this rank's rows of every rank's heads: returns (total, F), all rows of this rank's heads, rank by rank."""
    found = send.new_empty(rows.total, send.shape[2])
    _exchange(rows, found, send.flatten(0, 1), rows.counts, [rows.count] * rows.ranks, what)
    return found


def exchange_to_rows(rows: Rows, send: Tensor, what: str) -> Tensor:
    """The way back, from (total, F) rank by rank."""
    found = send.new_empty(rows.ranks * rows.count, send.shape[1])
    _exchange(rows, found, send, [rows.count] * rows.ranks, rows.counts, what)
    return found.view(rows.ranks, rows.count, send.shape[1])


def _exchange(rows: Rows, found: Tensor, send: Tensor, receives: Sequence[int], sends: Sequence[int], what: str) -> None:
    with naming(rows, what):
        dist.all_to_all_single(found, send, list(receives), list(sends), group=rows.group)


def broadcast_first(rows: Rows, tensor: Tensor, what: str) -> Tensor:
    """The first rank's values."""
    if rows.ranks > 1 and rows.group is not None:
        with naming(rows, what):
            dist.broadcast(tensor, dist.get_global_rank(rows.group, 0), group=rows.group)
    return tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over ranks are formed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def first_derivatives(backward: Any) -> Any:
    """As once_differentiable, but what is not computed is refused by name."""

    @functools.wraps(backward)
    def named(ctx: Any, *grads: Any) -> Any:
        tensors = [grad for grad in grads if isinstance(grad, Tensor)]
        if any(map(torch._C._functorch.is_legacy_batchedtensor, tensors)):
            raise NotImplementedError("context_parallel, Rows.give: is_grads_batched=True; accepted: gradients one after the other")
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled() or not any(grad.requires_grad for grad in tensors):
            return found
        refuse: Any = torch._C._functions
        said = b"context_parallel, Rows.give: double backward (the gradient of a gradient); accepted: first derivatives"
        error = refuse.DelayedError(said, len(found))
        return error(*(None if x is None else x.detach().requires_grad_() for x in found))

    return named


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Rows, x: Tensor, dim: int) -> Tensor:
        ctx.rows, ctx.dim, ctx.dtype = rows, dim, x.dtype
        first = x.movedim(dim, 0)
        ranked = by_ranks(rows, _size(first), first)
        of_this_rank(rows, ranked)[: rows.count].view(first.shape).copy_(first)
        whole = end_gather(start_gather(rows, ranked, f"give of {str(x.dtype).removeprefix('torch.')}"))
        return whole.view(rows.total, *first.shape[1:]).movedim(0, dim)

    @staticmethod
    @first_derivatives
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows = ctx.rows
        first = grad.movedim(ctx.dim, 0).to(wide(ctx.dtype))
        whole = first.reshape(rows.total, _size(first))
        found = end_scatter(start_scatter(rows, whole, "the gradient of give")).to(ctx.dtype)
        return None, found.view(rows.count, *first.shape[1:]).movedim(0, ctx.dim), None


def _size(x: Tensor) -> int:
    """Elements of a row; reshape(-1) cannot tell where there are no rows."""
    return x.shape[1:].numel()
