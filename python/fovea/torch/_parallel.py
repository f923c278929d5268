# SPDX-License-Identifier: Apache-2.0
"""context_parallel: attention of sequences whose rows lie on several ranks (docs/several-gpus.md).

Two ways. "keys": each rank keeps its rows of q and gathers the keys and values of all rows, some heads at a time. Then the call for a
piece of its rows is an ordinary one with the keys up to the end that the piece sees: with bottom-right alignment the shift is the
piece's position. "heads": an all-to-all gives each rank all rows of some heads, and another one brings the results back.

The gradients of "keys" are formed by the same calls. Those of the keys are summed over pieces and ranks in fp32.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Optional, Union, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _help
from .._problem import shape_text
from . import _attention, _call, _operators, _rows
from ._call import Arguments
from ._rows import Piece, Rows

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import Options

Move = Literal["keys", "heads"]
_MOVES = (None, "keys", "heads")
_OF_ROWS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")  # Rows has them
_CHECKED = ("scale", "causal", "window", "align", "softcap", "dropout_p", "rng")
_PLANES = ("bias", "bias2", "mask")
_CHECK = "FOVEA_CHECK_RANKS"
BUFFER_BYTES = 2**30  # of the gathered keys and values of one group of heads, where more groups can make it smaller


@overload
def context_parallel(
    q: Tensor, k: Tensor, v: Tensor, *, rows: Rows, move: Optional[Move] = None, return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel(
    q: Tensor, k: Tensor, v: Tensor, *, rows: Rows, move: Optional[Move] = None, return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def context_parallel(
    q: Tensor, k: Tensor, v: Tensor, *, rows: Rows, move: Optional[Move] = None, return_lse: bool, **options: Unpack[Options]
) -> Union[Tensor, tuple[Tensor, Tensor]]: ...
def context_parallel(
    q: Tensor, k: Tensor, v: Tensor, *, rows: Rows, move: Optional[Move] = None, return_lse: bool = False, **options: Any
) -> Any:
    """Computes attention() of sequences whose rows lie on the ranks of a group; each rank has and gets its own rows.

    Every rank of the group calls it with equal options. On a CPU out, lse and the gradients of q and of biases with queries have the
    bits of one process, with the exceptions that docs/several-gpus.md names; gradients of k and v are summed over ranks in fp32. Gradients are those of the sum of the ranks' losses: what every
    rank has whole (sink, biases without queries) gets this rank's part, to be summed over the ranks like any parameter's gradient.

    With move="keys" the keys and values are gathered. A bias or mask with queries has this rank's rows and all keys, in natural
    order. It cannot compute dropout, and ALiBi only with causal or a window whose right side is 0. With move="heads" an
    all-to-all gives each rank all rows of some heads. The number of key heads is a multiple of the number of ranks. A bias or mask with queries has
    all rows, and this rank's Hq / ranks heads or one. Dropout's mask is that of one device.

    Args:
        q: This rank's rows of the queries, (B, Hq, rows.count, D) or another shape of attention(). With Rows.packed
            (rows.count, Hq, D).
        k: The same rows of the keys.
        v: The same rows of the values.
        rows: Which rows each rank has.
        move: "keys", "heads", or None to choose; explain_context_parallel() prints the choice and its reason.
        return_lse: Also returns this rank's rows of the logsumexp, differentiable.
        **options: Those of attention(). cu_seqlens and max_seqlen are not given: rows has the lengths. seqused has those of
            whole sequences. sink, alibi_slopes and biases without queries are whole on every rank. seed=None draws a
            seed on the group's first rank for all.

    Returns:
        This rank's rows of what attention() returns.

    Raises:
        ValueError: See attention(). Errors begin with the rank. With FOVEA_CHECK_RANKS=1 in the environment the ranks first compare
            their arguments, and all of them raise if these differ or if one rank's are wrong.
        TypeError: See attention().
        NotImplementedError: This movement cannot compute the problem; the error names the argument.
        RuntimeError: A collective failed: another rank is gone, or made another call.

    Example:
        >>> import torch, torch.distributed, fovea.torch
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> rows = fovea.torch.Rows.zigzag(6)
        >>> q, k, v = (rows.take(torch.randn(1, 2, 6, 8), dim=2) for _ in range(3))
        >>> fovea.torch.context_parallel(q, k, v, rows=rows, causal=True).shape
        torch.Size([1, 2, 6, 8])
        >>> torch.distributed.destroy_process_group()
    """
    return _outside_graphs(q, k, v, rows, move, return_lse, options)


def explain_context_parallel(
    q: Tensor, k: Tensor, v: Tensor, *, rows: Rows, move: Optional[Move] = None, **options: Unpack[Options]
) -> str:
    """Says how context_parallel() would compute a call, without computing or communicating.

    Args:
        q: See context_parallel(), like all other arguments. Tensors of the device "meta" are enough.
        k: The same.
        v: The same.
        rows: The same. A plan without a group is read as rank 0's.
        move: The same.
        **options: The same.

    Returns:
        str: Lines: the rows, the movement and why, the balance, the buffers and the bytes that a rank receives.

    Raises:
        ValueError: See context_parallel().
        TypeError: See context_parallel().
        NotImplementedError: See context_parallel().
    """
    call = prepare(q, k, v, rows, move, dict(options))
    s = call.sizes
    lines = [
        repr(rows),
        f"move: {call.move}, as {call.reason}",
        f"rows of a rank: {min(rows.counts)} to {max(rows.counts)}; pieces: {min(map(len, rows.pieces))} to {max(map(len, rows.pieces))}",
    ]
    if call.move == "keys":
        lines += [
            f"pairs of the busiest rank over the mean: {call.balance:.3f}",
            f"groups of heads: {call.groups}; each gathers {s.group_bytes} bytes of keys and values, of which two groups exist at once",
            f"received in the forward: {s.gathered_bytes} bytes, of which {s.exposed_bytes} before the first call",
            f"received in the backward: the same, and {s.scattered_bytes} bytes of gradients in {_short(_rows.wide(q.dtype))}",
        ]
    elif call.move == "heads":
        lines += [f"received in the forward: {s.exchanged_bytes} bytes; in the backward: the same"]
    return "\n".join(lines)


def _compute(q: Tensor, k: Tensor, v: Tensor, rows: Any, move: Any, return_lse: bool, options: dict[str, Any]) -> Any:
    if not isinstance(rows, Rows):
        raise TypeError(f"rows: a {type(rows).__name__}; accepted: what Rows.zigzag, Rows.contiguous or Rows.packed made")
    rows._rank()
    wrong: Optional[Exception] = None
    call: Any = None
    try:
        call = prepare(q, k, v, rows, move, options)
    except Exception as error:
        if os.environ.get(_CHECK, "0") != "1" or rows.ranks == 1:
            raise _of_rank(rows, error) from None
        wrong = error
    if os.environ.get(_CHECK, "0") == "1":
        _compare(rows, None if call is None else _line(call), wrong)
    with _saying_rank(rows):
        out, lse = _MOVERS[call.move](call)
    return (out, lse) if return_lse else out


_disable: Any = torch.compiler.disable
_outside_graphs = _disable(_compute)  # a compiled function has a break there


# ---- a call ----


class Sizes(NamedTuple):
    """Bytes that a rank receives, and of its buffers."""

    gathered_bytes: int
    exposed_bytes: int
    scattered_bytes: int
    group_bytes: int
    exchanged_bytes: int


class Call(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    rows: Rows
    options: dict[str, Any]  # all of attention()'s, checked, but return_lse
    rows_dim: int  # of q, k, v and out, from the end
    heads_dim: int
    move: str
    reason: str
    groups: int  # of heads, with move="keys"
    balance: float
    sizes: Sizes

    @property
    def rank(self) -> int:
        return self.rows.rank or 0

    def heads(self, of: Tensor) -> int:
        return of.shape[self.heads_dim]


def prepare(q: Any, k: Any, v: Any, rows: Rows, move: Any, given: dict[str, Any]) -> Call:
    unknown = {name: value for name, value in given.items() if name not in _attention._OPTIONS}
    if unknown:
        raise _help.refuse("context_parallel", "q, k, v", (), unknown, [*_attention._OPTIONS, "rows", "move"])
    o = {**_attention._OPTIONS, **given}
    o.pop("return_lse")
    if move not in _MOVES:
        raise ValueError(f"move: {move!r}; accepted: {', '.join(repr(name) for name in _MOVES)}")
    for name in _OF_ROWS:
        if o.pop(name) is not None:
            raise ValueError(f"{name}: given; accepted: None, rows={rows!r} has the lengths; Rows.packed is made of cu_seqlens")
    tensors = {"q": q, "k": k, "v": v, **{name: o[name] for name in _call.NAMES[3:12] if name in o}}
    for name, tensor in tensors.items():
        if tensor is not None and isinstance(tensor, Tensor) and not _operators.survey((tensor,))[0]:
            kind = type(tensor).__name__ if type(tensor) is not Tensor else f"tensor of layout {tensor.layout}"
            raise TypeError(f"{name}: a {kind}; accepted: a dense torch.Tensor with this rank's rows, such as x.to_local()")
    _attention._check_tensors((q, k, v, *(o.get(name) for name in _call.NAMES[3:12])))
    packed = rows.kind == "packed"
    if o["batch_shape"] is not None and not packed:
        raise ValueError("batch_shape: given; accepted: None, five dimensions say it, unless rows are packed")
    layout = o["layout"]
    if layout not in _attention._LAYOUTS:
        _attention._refuse_choice("layout", layout, _attention._LAYOUTS)
    rows_dim, heads_dim = (-3, -2) if packed or layout == "bshd" else (-2, -3)
    _call.check_ranks(_arguments(q, k, v, {}, layout=layout, cu_seqlens_q=q if packed else None))
    mine = rows.counts[rows.rank or 0]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[rows_dim] != mine:
            raise ValueError(f"{name}: {x.shape[rows_dim]} rows; accepted: {mine}, this rank's of {rows!r}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: {_short(x.dtype)}; accepted: {_short(q.dtype)}, which q has")
    heads_q, heads_k = q.shape[heads_dim], k.shape[heads_dim]
    if heads_k == 0 or heads_q % heads_k or v.shape[heads_dim] != heads_k:
        raise ValueError(
            f"heads: {heads_q} of q, {heads_k} of k, {v.shape[heads_dim]} of v; accepted: those of k and v are equal and divide those of q"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k: head dimension {k.shape[-1]}; accepted: {q.shape[-1]}, which q has")
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        q, k, v = _attention._autocast(q, k, v)
    for name in ("sink", "alibi_slopes"):  # under autograd, so that the gradient has the type that was given
        tensor = o[name]
        if tensor is not None and tensor.dtype in (_attention._HALVES if name == "sink" else _attention._CONVERTED_SLOPES):
            o[name] = _attention._wider(tensor, q)
    if o["alibi_slopes"] is not None and o["alibi_slopes"].requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes: requires_grad, and it has no gradient; accepted: alibi_slopes.detach()")
    numbers: Any = [*(o[name] for name in _CHECKED), None, None, 0, layout, o["deterministic"], o["backend"]]
    checked = _attention._options(*numbers)
    o.update(scale=checked[0], causal=checked[1], window=checked[2:4], softcap=checked[5], dropout_p=checked[6])

    no_keys, no_heads = _why_not_keys(rows, o), _why_not_heads(q, k, rows, o, heads_dim)
    of_row = {name: x.shape[:rows_dim].numel() * x.shape[rows_dim + 1 :].numel() for name, x in (("q", q), ("k", k), ("v", v))}
    groups = _groups(q, k, rows, o, heads_dim, (of_row["k"] + of_row["v"]) * rows.total * q.element_size())
    sizes = _sizes(of_row, q, v, rows, groups)
    balance = rows.balance(o["causal"], o["window"])
    move, reason = _choose(rows, move, no_keys, no_heads, sizes, balance, o)
    call = Call(q, k, v, rows, o, rows_dim, heads_dim, move, reason, groups, balance, sizes)
    if move == "keys":
        _check_planes(call)
    return call


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _queries(plane: Optional[Tensor]) -> bool:
    """Whether a bias or mask has rows, instead of being broadcast over them."""
    return plane is not None and plane.dim() >= 2 and plane.shape[-2] != 1


def _band(o: dict[str, Any]) -> bool:
    return bool(o["causal"] or o["window"] != (-1, -1))


def _ends_at_row(o: dict[str, Any]) -> bool:
    """Whether a query meets no key behind itself."""
    return bool(o["causal"] or o["window"][1] == 0)


def _why_not_keys(rows: Rows, o: dict[str, Any]) -> str:
    """Why a call for a piece cannot say this; empty if it can."""
    packed = rows.kind == "packed"
    if o["dropout_p"] != 0:
        return f"dropout_p: {o['dropout_p']}, with move='keys': dropout's mask depends on a row's number within its call"
    if o["alibi_slopes"] is not None and not _ends_at_row(o):
        return "alibi_slopes: given without causal, with move='keys': a call with keys behind its rows cannot say their distances"
    if packed:
        if _band(o) and not _ends_at_row(o):
            return f"window: {tuple(o['window'])}, with move='keys' and packed rows: sequences would need shifts of their own"
        for name in _PLANES:
            if _queries(o[name]):
                return f"{name}: has queries, with move='keys' and packed rows: the sequences' pieces begin at different rows of it"
        for name in ("seqused_q", "seqused_k"):
            if o[name] is not None:
                return f"{name}: given, with move='keys' and packed rows; Rows.packed of the used lengths has the same meaning"
    elif o["seqused_q"] is not None or o["seqused_k"] is not None:
        if (_band(o) or o["alibi_slopes"] is not None) and not _same_lengths(o["seqused_q"], o["seqused_k"]):
            return (
                "seqused_q and seqused_k: not the same tensor, with move='keys' and a causal mask, a window or ALiBi: a call needs "
                "equal lengths of both"
            )
        if _band(o) and not _ends_at_row(o):
            return f"window: {tuple(o['window'])}, with move='keys' and seqused: sequences would need shifts of their own"
    return ""


def _same_lengths(a: Optional[Tensor], b: Optional[Tensor]) -> bool:
    if a is None or b is None or a is b:
        return a is b
    return a.device.type == "cpu" and torch.equal(a.long(), b.long())


def _why_not_heads(q: Tensor, k: Tensor, rows: Rows, o: dict[str, Any], heads_dim: int) -> str:
    heads = k.shape[heads_dim]
    if heads % rows.ranks:
        return f"k: {heads} heads, with move='heads' over {rows.ranks} ranks: not a multiple"
    if o["dropout_p"] != 0 and (q.dim() == 5 or o["batch_shape"] is not None):
        return f"dropout_p: {o['dropout_p']}, with move='heads' and a batch of two levels: a call has no third level for the ranks"
    if o["dropout_p"] != 0 and o["rng"] != "fovea" and o["seqused_k"] is not None and rows.kind != "packed":
        return f"rng: {o['rng']!r}, with move='heads' and seqused_k: packed calls count the pairs of used lengths only"
    return ""


def _groups(q: Tensor, k: Tensor, rows: Rows, o: dict[str, Any], heads_dim: int, all_bytes: int) -> int:
    """How many groups of key heads are gathered one after the other: the fewest whose buffers are small enough, and at least two, so
    that one is gathered while another is computed. One if a bias sums its gradient over all heads."""
    heads = k.shape[heads_dim]
    for name in ("bias", "bias2"):
        plane = o[name]
        if plane is not None and plane.requires_grad and (plane.dim() < 3 or plane.shape[-3] == 1) and q.shape[heads_dim] > 1:
            return 1
    for groups in range(min(2, heads), heads):
        if heads % groups == 0 and all_bytes // groups <= BUFFER_BYTES:
            return groups
    return heads


def _sizes(of_row: dict[str, int], q: Tensor, v: Tensor, rows: Rows, groups: int) -> Sizes:
    """Of the rank that has the most rows; `of_row` are the elements of a row."""
    item, most = q.element_size(), max(rows.counts)
    of_keys, of_out = of_row["k"] + of_row["v"], of_row["q"] // max(1, q.shape[-1]) * v.shape[-1]
    gathered = (rows.ranks - 1) * most * of_keys
    return Sizes(
        gathered_bytes=gathered * item,
        exposed_bytes=gathered * item // groups,
        scattered_bytes=gathered * torch.finfo(_rows.wide(q.dtype)).bits // 8,
        group_bytes=rows.total * of_keys // groups * item,
        exchanged_bytes=(of_row["q"] + of_keys + of_out) * most * item * (rows.ranks - 1) // rows.ranks,
    )


def _choose(
    rows: Rows, move: Any, no_keys: str, no_heads: str, sizes: Sizes, balance: float, o: dict[str, Any]
) -> tuple[str, str]:  # fmt: skip
    """The movement, and why. Every rank decides from the same numbers."""
    if rows.ranks == 1:
        return "none", "there is one rank"
    if move == "keys" and no_keys:
        raise NotImplementedError(f"{no_keys}; accepted: {_instead('heads', no_heads)}")
    if move == "heads" and no_heads:
        raise NotImplementedError(f"{no_heads}; accepted: {_instead('keys', no_keys)}")
    if move is not None:
        return move, "it was given"
    if no_keys and no_heads:
        raise NotImplementedError(f"no movement computes this: {no_keys}; and {no_heads}")
    if no_keys:
        return "heads", f"keys cannot: {no_keys}"
    if no_heads:
        return "keys", f"heads cannot: {no_heads}"
    planes = [name for name in _PLANES if _queries(o[name])]
    if planes:
        return "keys", f"{planes[0]} has queries, which are this rank's rows"
    if balance > 1.2:
        return "heads", f"the rows are unbalanced for keys, {balance:.2f}"
    if not _one_node(rows):
        return "keys", "the ranks are on several nodes"
    if sizes.exchanged_bytes < sizes.exposed_bytes:
        return "heads", f"a rank receives fewer bytes, {sizes.exchanged_bytes}, than keys would wait for, {sizes.exposed_bytes}"
    return "keys", f"the first group's {sizes.exposed_bytes} bytes are no more than the {sizes.exchanged_bytes} of heads"


def _instead(move: str, why_not: str) -> str:
    return f"move={move!r}" if not why_not else f"other options, as move={move!r} cannot either: {why_not}"


def _one_node(rows: Rows) -> bool:
    """As torchrun says. Without it, one node is assumed."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if local <= 0 or rows.group is None:
        return True
    return len({dist.get_global_rank(rows.group, r) // local for r in range(rows.ranks)}) == 1


# ---- errors ----


def _of_rank(rows: Rows, error: Exception) -> Exception:
    text = str(error)
    if not text.startswith("rank "):
        error.args = (f"{_rows._name(rows)}: {text}",)
    return error


@contextlib.contextmanager
def _saying_rank(rows: Rows) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, MemoryError) as error:
        _of_rank(rows, error)
        raise


def _line(call: Call) -> str:
    """What has to be the same on every rank: all but the rows' own number."""
    parts = [f"rows={call.rows.kind} {call.rows.lengths} {call.rows.pieces}", f"move={call.move}", f"groups={call.groups}"]
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        shape = [str(n) for n in x.shape]
        shape[call.rows_dim] = "rows"
        parts.append(f"{name}={_short(x.dtype)} {'x'.join(shape)}{' with gradient' if x.requires_grad else ''}")
    for name, value in call.options.items():
        if isinstance(value, Tensor):
            shape = [str(n) for n in value.shape]
            if name in _PLANES and call.move == "keys" and len(shape) >= 2:
                shape[-2] = "rows"
            word = f" {int(value)}" if name in ("seed", "offset") else ""
            value = f"{_short(value.dtype)} {'x'.join(shape)}{' with gradient' if value.requires_grad else ''}{word}"
        parts.append(f"{name}={value}")
    return "; ".join(parts)


def _compare(rows: Rows, line: Optional[str], wrong: Optional[Exception]) -> None:
    """Gathers every rank's line or error. All ranks raise if one is wrong."""
    told: list[Any] = [None] * rows.ranks
    with _rows.naming(rows, f"{_CHECK}=1"):
        dist.all_gather_object(told, (line, None if wrong is None else f"{type(wrong).__name__}: {wrong}"), group=rows.group)
    if wrong is not None:
        raise _of_rank(rows, wrong)
    for rank, (_, error) in enumerate(told):
        if error is not None:
            raise ValueError(f"{_rows._name(rows)}: rank {rank} refuses its arguments: {error}")
    for rank, (other, _) in enumerate(told):
        if other != told[0][0]:
            mine, its = (set(text.split("; ")) for text in (told[0][0], other))
            raise ValueError(
                f"{_rows._name(rows)}: the ranks' arguments differ: rank 0 has {'; '.join(sorted(mine - its))}, rank {rank} has "
                f"{'; '.join(sorted(its - mine))}; accepted: the same on every rank"
            )


# ---- one rank ----


def _alone(call: Call) -> tuple[Tensor, Tensor]:
    o = dict(call.options)
    if call.rows.kind == "packed":
        ends = call.rows._cached(("ends", call.q.device), lambda: torch.tensor(call.rows.first, dtype=torch.int32, device=call.q.device))
        o.update(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=call.rows.longest, max_seqlen_k=call.rows.longest)
    out, lse = _attention.attention(call.q, call.k, call.v, return_lse=True, **o)
    return out, lse


# ---- heads ----


def _heads(call: Call) -> tuple[Tensor, Tensor]:
    rows, o = call.rows, dict(call.options)
    o["seed"] = _seed(call)
    there = (call.heads_dim, call.rows_dim)
    q, k, v = _ToHeads.apply(rows, "q, k and v to heads", (there,) * 3, call.q, call.k, call.v)
    mine = call.heads(call.q) // rows.ranks
    first = call.rank * mine
    if o["sink"] is not None:
        o["sink"] = o["sink"].narrow(0, first, mine)
    if o["alibi_slopes"] is not None:
        o["alibi_slopes"] = o["alibi_slopes"].narrow(-1, first, mine)
    for name in _PLANES:
        plane = o[name]
        if plane is not None and not _queries(plane) and plane.dim() >= 3 and plane.shape[-3] != 1:
            o[name] = plane.narrow(-3, first, mine)
    if rows.kind == "packed":
        ends = torch.tensor(rows.first, dtype=torch.int32)
        o.update(max_seqlen_q=rows.longest, max_seqlen_k=rows.longest)
        if o["dropout_p"] == 0:
            ends = ends.to(q.device)
            out, lse = _attention.attention(q, k, v, return_lse=True, cu_seqlens_q=ends, cu_seqlens_k=ends, **o)
        else:
            out, lse = _among_empty(call, [q, k, v], ends, o)
    elif o["dropout_p"] == 0:
        out, lse = _attention.attention(q, k, v, return_lse=True, **o)
    else:
        ends = torch.arange(q.shape[0] + 1, dtype=torch.int32) * rows.total
        packed = [_packs(x, call.heads_dim) for x in (q, k, v)]
        o.update(max_seqlen_q=rows.total, max_seqlen_k=rows.total)
        out, lse = _among_empty(call, packed, ends, o)
        shape = (q.shape[0], rows.total)
        out = out.view(*shape, *out.shape[1:])
        out = out.transpose(1, 2) if call.heads_dim == -3 else out
        lse = lse.view(-1, *shape).transpose(0, 1)
    (out,) = _ToRows.apply(rows, "out to rows", (there,), out)
    (lse,) = _ToRows.apply(rows, "lse to rows", ((-2, -1),), lse)
    return out, lse


def _packs(x: Tensor, heads_dim: int) -> Tensor:
    """(B * S, H, D) of a dense tensor."""
    return (x.transpose(1, 2) if heads_dim == -3 else x).flatten(0, 1)


def _among_empty(call: Call, operands: list[Tensor], ends: Tensor, o: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A packed call with dropout for some heads of all. Dropout's stream of head h of sequence b is b * Hq + h. Here b has become
    b * ranks + rank among `ranks` times as many sequences, of which those of the other ranks are empty, and Hq is Hq / ranks."""
    q, k, v = operands
    ranks, rank, batch = call.rows.ranks, call.rank, ends.numel() - 1
    starts = torch.empty(batch, ranks, dtype=torch.int32)
    starts[:, : rank + 1] = ends[:-1, None]
    starts[:, rank + 1 :] = ends[1:, None]
    among = torch.cat([starts.flatten(), ends[-1:]]).to(q.device)
    o = dict(o, batch_shape=(batch, ranks), cu_seqlens_q=among, cu_seqlens_k=among, layout="bhsd")
    for name in _PLANES:
        if o[name] is not None and o[name].dim() >= 4:
            o[name] = o[name].unsqueeze(-4)  # broadcast over the ranks
    if o["alibi_slopes"] is not None and o["alibi_slopes"].dim() == 2:
        o["alibi_slopes"] = o["alibi_slopes"].unsqueeze(1).expand(batch, ranks, -1)
    same = o["seqused_q"] is o["seqused_k"]
    for name in ("seqused_q", "seqused_k"):
        if o[name] is not None:
            used = o[name].new_zeros(batch, ranks)
            used[:, rank] = o[name]
            o[name] = o["seqused_q"] if same and name == "seqused_k" else used.flatten()
    out, lse = _attention.attention(q, k, v, return_lse=True, **o)
    return out, lse


def _seed(call: Call) -> Any:
    """The first rank's, if one has to be drawn. Every rank draws, so that their generators stay in step."""
    if call.options["seed"] is not None or call.options["dropout_p"] == 0:
        return call.options["seed"]
    return _rows.broadcast_first(call.rows, _operators.draw_seed([call.q]), "the seed of dropout")


class _ToHeads(torch.autograd.Function):
    """This rank's rows of all heads, to all rows of this rank's heads. `dims` are the dimensions of heads and rows of each tensor."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, what: str, dims: Any, *tensors: Tensor) -> Any:
        ctx.given = rows, what, dims
        return _to_heads(rows, what, dims, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, what, dims = ctx.given
        return (None, None, None, *_to_rows(rows, f"the gradient of {what}", dims, grads))


class _ToRows(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, what: str, dims: Any, *tensors: Tensor) -> Any:
        ctx.given = rows, what, dims
        return _to_rows(rows, what, dims, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, what, dims = ctx.given
        return (None, None, None, *_to_heads(rows, f"the gradient of {what}", dims, grads))


def _to_heads(rows: Rows, what: str, dims: Any, tensors: Any) -> tuple[Tensor, ...]:
    """One exchange for all tensors: of each row, the elements of all tensors one after the other."""
    parts, shapes = [], []
    for x, (heads, at) in zip(tensors, dims):
        heads, at = heads + x.dim(), at + x.dim()
        split = x.unflatten(heads, (rows.ranks, x.shape[heads] // rows.ranks))
        first = split.movedim((heads, at + (at > heads)), (0, 1))
        shapes.append(first.shape[2:])
        parts.append(first.reshape(rows.ranks, rows.count, first.shape[2:].numel()))
    whole: Any = _rows.exchange_to_heads(rows, torch.cat(parts, 2), what)
    found = whole.split([part.shape[2] for part in parts], 1)
    return tuple(y.unflatten(1, shape).movedim(0, at + 1 + len(shape)) for y, shape, (_, at) in zip(found, shapes, dims))


def _to_rows(rows: Rows, what: str, dims: Any, tensors: Any) -> tuple[Tensor, ...]:
    parts, shapes = [], []
    for y, (_, at) in zip(tensors, dims):
        first = y.movedim(at, 0)
        shapes.append(first.shape[1:])
        parts.append(first.reshape(rows.total, first.shape[1:].numel()))
    local: Any = _rows.exchange_to_rows(rows, torch.cat(parts, 1), what)
    found = local.split([part.shape[1] for part in parts], 2)
    results = []
    for x, shape, (heads, at) in zip(found, shapes, dims):
        size = len(shape) + 1  # dimensions of the result
        heads, at = heads + size, at + size
        split = x.unflatten(2, shape).movedim((0, 1), (heads, at + (at > heads)))
        results.append(split.flatten(heads, heads + 1))
    return tuple(results)


# ---- keys ----


def _keys(call: Call) -> tuple[Tensor, Tensor]:
    o = call.options
    out, lse = _Keys.apply(call._replace(q=None, k=None, v=None), call.q, call.k, call.v, o["bias"], o["bias2"], o["sink"])  # type: ignore[arg-type]
    return out, lse


_NAMED = ("q", "k", "v", "bias", "bias2", "sink")


def _arguments(q: Any, k: Any, v: Any, o: dict[str, Any], **more: Any) -> Arguments:
    """The operator's arguments for a call within a rank."""
    named: dict[str, Any] = dict.fromkeys(Arguments._fields[: _call.TENSORS])
    named.update({name: o.get(name) for name in ("bias", "bias2", "mask", "alibi_slopes", "sink", "seqused_q", "seqused_k")})
    named.update(q=q, k=k, v=v, seed=0, offset=0, scale=o.get("scale"), causal=bool(o.get("causal")), align="bottom_right",
                 softcap=o.get("softcap", 0.0), dropout_p=0.0, rng="fovea", max_seqlen_q=0, max_seqlen_k=0, batch_outer=0,
                 layout=o.get("layout", "bhsd"), backend=o.get("backend"),
                 deterministic=_call.DETERMINISTIC if o.get("deterministic") else _call.order())  # fmt: skip
    named["window_left"], named["window_right"] = o.get("window", (-1, -1))
    named.update(more)
    return Arguments(**named)


class _Keys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> Any:
        call = call._replace(q=tensors[0], k=tensors[1], v=tensors[2], options={**call.options, **dict(zip(_NAMED[3:], tensors[3:]))})
        out, lse = keys_forward(call)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.call = call._replace(q=None, k=None, v=None, options={**call.options, **dict.fromkeys(_NAMED[3:])})  # type: ignore[arg-type]
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Optional[Tensor], grad_lse: Optional[Tensor]) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        need = ctx.needs_input_grad[1:]
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        call = ctx.call
        call = call._replace(q=tensors[0], k=tensors[1], v=tensors[2], options={**call.options, **dict(zip(_NAMED[3:], tensors[3:]))})
        with _saying_rank(call.rows):
            return (None, *keys_backward(call, need, grad_out, grad_lse, out, lse))


class Part(NamedTuple):
    """What one call computes: some adjacent rows of this rank, of some heads."""

    first: int  # of this rank's rows
    rows: int
    end: int  # the keys that it has, of dense rows
    options: dict[str, Any]


def _parts(call: Call) -> list[Part]:
    """One for each piece of a dense rank; for packed rows one for the first pieces of all sequences, and one for the second ones."""
    return _packed_parts(call) if call.rows.kind == "packed" else [_dense_part(call, piece, at) for piece, at in _with_places(call.rows.mine)]


def _with_places(pieces: tuple[Piece, ...]) -> Iterator[tuple[Piece, int]]:
    at = 0
    for piece in pieces:
        yield piece, at
        at += piece.rows


def _dense_part(call: Call, piece: Piece, at: int) -> Part:
    o, total = call.options, call.rows.total
    left, right = o["window"]
    more: dict[str, Any] = {}
    stop = piece.start + piece.rows
    end = stop if _ends_at_row(o) else total if right < 0 else min(total, stop + right)
    if _band(o) and not o["causal"]:
        # With keys behind the piece's last row, bottom-right alignment shifts the band by their number. The window takes it back.
        more = {"window_left": left if left < 0 else left + end - stop, "window_right": right if right < 0 else right - (end - stop)}
    used_q, used_k = o["seqused_q"], o["seqused_k"]
    if used_q is not None:
        used_q = (used_q.long() - piece.start).clamp(0, piece.rows).int()
    if used_k is not None:
        # With a band the piece's last used row meets the key of its own number.
        used_k = used_q + piece.start if _ends_at_row(o) else used_k.long().clamp(0, total).int()
    more.update(seqused_q=used_q, seqused_k=used_k)
    return Part(at, piece.rows, end, more)


def _packed_parts(call: Call) -> list[Part]:
    rows, device = call.rows, call.q.device

    def made() -> list[Any]:
        seen: set[int] = set()
        numbers: list[list[tuple[Piece, int]]] = [[], []]
        for piece, at in _with_places(rows.mine):
            numbers[piece.sequence in seen].append((piece, at))
            seen.add(piece.sequence)
        found = []
        for pieces in numbers:
            if pieces:
                lengths, stops = [0] * len(rows.lengths), [0] * len(rows.lengths)
                for piece, _ in pieces:
                    lengths[piece.sequence], stops[piece.sequence] = piece.rows, piece.start + piece.rows
                ends = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
                whole = torch.tensor([n if length else 0 for n, length in zip(rows.lengths, lengths)], dtype=torch.int32, device=device)
                stop = torch.tensor(stops, dtype=torch.int32, device=device)
                found.append((pieces[0][1], sum(lengths), max(lengths), ends, stop, whole))
        return [torch.tensor(rows.first, dtype=torch.int32, device=device), found]

    keys, found = rows._cached(("packed parts", device), made)
    shape = call.options["batch_shape"]
    outer = 0 if shape is None else _attention._batch_outer(shape, keys, keys)
    return [
        Part(first, count, rows.total, {
            "cu_seqlens_q": ends, "cu_seqlens_k": keys, "seqused_k": stop if _ends_at_row(call.options) else whole,
            "max_seqlen_q": longest, "max_seqlen_k": rows.longest, "batch_outer": outer,
        })
        for first, count, longest, ends, stop, whole in found
    ]  # fmt: skip


class _Group:
    """The operands of one group of heads."""

    def __init__(self, call: Call, number: int) -> None:
        self.call = call
        self.queries = call.heads(call.q) // call.groups
        self.keys = call.heads(call.k) // call.groups
        self.first_query = number * self.queries
        self.first_key = number * self.keys
        self.pending: Any = None
        self.shapes: list[Any] = []

    def start(self) -> _Group:
        """Begins to gather its keys and values: of each row those of k, then those of v."""
        call = self.call
        parts = []
        for x in (call.k, call.v):
            first = x.narrow(call.heads_dim, self.first_key, self.keys).movedim(call.rows_dim, 0)
            self.shapes.append(first.shape[1:])
            parts.append(first.reshape(call.rows.count, first.shape[1:].numel()))
        self.pending = _rows.start_gather(call.rows, torch.cat(parts, 1), "keys and values")
        return self

    def gathered(self) -> tuple[Tensor, Tensor]:
        whole = _rows.end_gather(self.pending)
        self.pending = None
        k, v = self.split(whole)
        return k, v

    def split(self, whole: Any) -> list[Tensor]:
        """k and v, or their gradients, with all dimensions."""
        parts = whole.split([shape.numel() for shape in self.shapes], 1)
        return [part.unflatten(1, shape).movedim(0, self.call.rows_dim) for part, shape in zip(parts, self.shapes)]

    def of_queries(self, x: Optional[Tensor], part: Part, heads_dim: int, rows_dim: int) -> Any:
        """This group's heads and this part's rows; those that are broadcast, whole."""
        if x is None:
            return None
        if x.dim() >= -heads_dim and x.shape[heads_dim] != 1:
            x = x.narrow(heads_dim, self.first_query, self.queries)
        if x.dim() >= -rows_dim and x.shape[rows_dim] != 1:
            x = x.narrow(rows_dim, part.first, part.rows)
        return x

    def plane(self, x: Optional[Tensor], part: Part) -> Any:
        x = self.of_queries(x, part, -3, -2)
        if x is not None and x.dim() >= 1 and x.shape[-1] != 1 and self.call.rows.kind != "packed":
            x = x.narrow(-1, 0, part.end)
        return x

    def of_heads(self, x: Optional[Tensor]) -> Any:
        return None if x is None else x.narrow(-1, self.first_query, self.queries)

    def arguments(self, part: Part, k: Tensor, v: Tensor) -> Arguments:
        call, o = self.call, self.call.options
        q = self.of_queries_alone(call.q, part)
        if call.rows.kind != "packed":
            k, v = (x.narrow(call.rows_dim, 0, part.end) for x in (k, v))
        planes = {name: self.plane(o[name], part) for name in _PLANES}
        slopes, sink = self.of_heads(o["alibi_slopes"]), self.of_heads(o["sink"])
        return _arguments(q, k, v, o, **planes, alibi_slopes=slopes, sink=sink, **part.options)

    def of_queries_alone(self, x: Tensor, part: Part) -> Tensor:
        """The same of q, out or their gradients, which are never broadcast."""
        call = self.call
        return x.narrow(call.heads_dim, self.first_query, self.queries).narrow(call.rows_dim, part.first, part.rows)

    def of_lse(self, x: Tensor, part: Part) -> Tensor:
        return x.narrow(-2, self.first_query, self.queries).narrow(-1, part.first, part.rows)


def _groups_ahead(call: Call) -> Iterator[_Group]:
    """The groups of heads. The next one's gather is started before one is computed."""
    following: Optional[_Group] = _Group(call, 0).start()
    for number in range(call.groups):
        group: Any = following
        following = _Group(call, number + 1).start() if number + 1 < call.groups else None
        yield group


def keys_forward(call: Call) -> tuple[Tensor, Tensor]:
    packed = {"cu_seqlens_q": call.q} if call.rows.kind == "packed" else {}
    whole = _arguments(call.q, call.k, call.v, call.options, **packed)
    out = _call.new_out(whole, _call.out_layout(whole))
    lse = _call.new_lse(whole, _call.lse_shape(whole))
    parts = _parts(call)
    for group in _groups_ahead(call):
        k, v = group.gathered()
        for part in parts:
            found, found_lse = _call.compute(group.arguments(part, k, v), with_lse=True)
            group.of_queries_alone(out, part).copy_(found)
            assert found_lse is not None
            group.of_lse(lse, part).copy_(found_lse)
    return out, lse


def _check_planes(call: Call) -> None:
    """Sizes that slices would otherwise hide or report as those of a part."""
    mine, total = call.rows.counts[call.rank], call.rows.total if call.rows.kind != "packed" else call.rows.longest
    heads = call.heads(call.q)
    for name in _PLANES:
        plane = call.options[name]
        if plane is None:
            continue
        sizes = (plane.shape[-3:] if plane.dim() >= 3 else (1,) * (3 - plane.dim()) + tuple(plane.shape))
        if sizes[0] not in (1, heads) or sizes[1] not in (1, mine) or sizes[2] not in (1, total):
            raise ValueError(
                f"{name}: shape {shape_text(plane.shape)}; accepted with move='keys': broadcastable to (B, {heads}, {mine}, "
                f"{total}): all heads, this rank's rows, all keys"
            )
    for name in ("sink", "alibi_slopes"):
        x = call.options[name]
        if x is not None and (x.dim() == 0 or x.shape[-1] != heads):
            raise ValueError(f"{name}: shape {shape_text(x.shape)}; accepted: {heads} heads, those of q on every rank")


def keys_backward(
    call: Call, need: Any, grad_out: Tensor, grad_lse: Optional[Tensor], out: Tensor, lse: Tensor
) -> list[Optional[Tensor]]:
    o, rows = call.options, call.rows
    wants = dict(zip(_NAMED, need))
    sums = _rows.wide(call.q.dtype)
    grad_q = torch.empty_like(call.q) if wants["q"] else None
    # Of biases and the sink: what parts write each once, and what is summed over them.
    written: dict[str, Tensor] = {}
    summed: dict[str, Tensor] = {}
    for name in _NAMED[3:]:
        if wants[name]:
            if name != "sink" and _queries(o[name]):
                written[name] = torch.zeros_like(o[name])
            else:
                summed[name] = torch.zeros_like(o[name], dtype=_rows.wide(o[name].dtype))
    of_keys = wants["k"] or wants["v"]
    parts = _parts(call)
    scattered = []
    # A broadcast over heads is summed over groups, too; _groups() avoids that where it would cost bits.
    for group in _groups_ahead(call):
        k, v = group.gathered()
        if of_keys:
            total = torch.zeros(rows.total, sum(shape.numel() for shape in group.shapes), dtype=sums, device=call.q.device)
            grads_of_keys = group.split(total)
        for part in parts:
            arguments = group.arguments(part, k, v)
            found = iter(_call.backward(
                group.of_queries_alone(grad_out, part), None if grad_lse is None else group.of_lse(grad_lse, part).contiguous(),
                group.of_queries_alone(out, part), group.of_lse(lse, part).contiguous(), list(need), *arguments,
            ))  # fmt: skip
            if grad_q is not None:
                group.of_queries_alone(grad_q, part).copy_(next(found))
            for index, name in enumerate(("k", "v")):
                if wants[name]:
                    into = grads_of_keys[index]
                    (into if rows.kind == "packed" else into.narrow(call.rows_dim, 0, part.end)).add_(next(found))
            for name in _NAMED[3:]:
                if wants[name]:
                    grad = next(found)
                    if name in written:
                        group.plane(written[name], part).add_(grad)
                    elif name == "sink":
                        group.of_heads(summed[name]).add_(grad)
                    else:
                        group.plane(summed[name], part).add_(grad)
        if of_keys:
            scattered.append((group, _rows.start_scatter(rows, total, "the gradients of keys and values")))
    grads: dict[str, Any] = {"q": grad_q, **written}
    grads.update({name: total.to(o[name].dtype) for name, total in summed.items()})
    for name, like in (("k", call.k), ("v", call.v)):
        grads[name] = torch.empty_like(like) if wants[name] else None
    for group, pending in scattered:
        mine = _rows.end_scatter(pending)
        for name, found_grad in zip("kv", group.split(mine)):
            if wants[name]:
                grads[name].narrow(call.heads_dim, group.first_key, group.keys).copy_(found_grad)
    return [grads.get(name) for name in _NAMED]


_MOVERS = {"none": _alone, "keys": _keys, "heads": _heads}
