# SPDX-License-Identifier: Apache-2.0
"""What context_parallel is asked for: its arguments, checked; what each movement can compute, and which one is chosen."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _help
from .._problem import need_align, shape_text
from . import _attention, _call, _eager, _operators, _rows
from ._call import Arguments
from ._parallel_fetch import Plan, fetch_plan
from ._parallel_positions import Span, has_band, has_positions, moves_by_lengths
from ._rows import Rows

_MOVES = (None, "keys", "heads", "ring")
_OF_ROWS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")  # Rows has them
_CHECKED = ("scale", "causal", "window", "align", "softcap", "dropout_p", "rng")
PLANES = ("bias", "bias2", "mask")
BUFFER_BYTES = 2**30  # of the fetched keys and values of one group of heads, where more groups can make it smaller
FEW_BYTES = 2**25  # which are there before it pays to compute something else meanwhile
MOST_AGAIN = 512  # times a rank's rows: a window's square, of which 1.5 times as many pairs are computed again
MANY = 4  # times as many bytes make heads slower than keys, whose calls are shorter


class Sizes(NamedTuple):
    """Bytes that a rank receives, and of its buffers."""

    fetched_bytes: int
    exposed_bytes: int
    returned_bytes: int
    edge_bytes: int  # of the next rank's first rows, where a rank forms the gradients of its own keys
    group_bytes: int
    round_bytes: int
    exchanged_bytes: int
    exchanged_back_bytes: int
    ring_bytes: int


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
    through: Any = None  # in a graph: what it does by operators (_parallel_operators.py)
    owns: bool = False  # what forms_own() says of a backward of all that learns
    kept: Optional[list[Tensor]] = None  # by groups: keys and values that the forward fetched; empty, None: the backward fetches them again

    @property
    def rank(self) -> int:
        return self.rows.rank or 0

    @property
    def keeps(self) -> bool:
        """Whether the keys and values that the forward fetches are there in the backward: at a window's edge these are few rows."""
        return self.through is None and fetch_plan(self.rows, self.options, self.q.device).edge is not None

    def forms_own(self, wants: dict[str, bool]) -> bool:
        plan = fetch_plan(self.rows, self.options, self.q.device)
        return forms_own(self.rows, self.options, plan, self.heads(self.q) // max(1, self.heads(self.k)), wants)

    def heads(self, of: Tensor) -> int:
        return of.shape[self.heads_dim]


def prepare(q: Any, k: Any, v: Any, rows: Rows, move: Any, given: dict[str, Any], through: Any = None) -> Call:
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
        if through is None and isinstance(tensor, Tensor) and not _eager.survey((tensor,))[0]:
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
    _call.check_ranks(arguments_of(q, k, v, {}, layout=layout, cu_seqlens_q=q if packed else None))
    mine = rows.counts[rows.rank or 0]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[rows_dim] != mine:
            raise ValueError(f"{name}: {x.shape[rows_dim]} rows; accepted: {mine}, this rank's of {rows!r}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: {short(x.dtype)}; accepted: {short(q.dtype)}, which q has")
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
    checked = _attention._checked_options(*numbers)
    o.update(scale=checked[0], causal=checked[1], window=checked[2:4], softcap=checked[5], dropout_p=checked[6])

    if through is None:  # in a graph lengths have no values; the operators check them
        _check_align(rows, o)

    no_keys, no_heads = _why_not_keys(rows.over_keys or rows, o), _why_not_heads(k, rows, heads_dim)
    # Not torch.Size.numel(), which needs numbers where a graph has symbols.
    of_row = {name: math.prod((*x.shape[:rows_dim], *x.shape[rows_dim + 1 :])) for name, x in (("q", q), ("k", k), ("v", v))}
    # In a graph some numbers of a band are symbols: the operators plan with their values.
    known = through is None and rows.over_keys is None
    plan = fetch_plan(rows, o, q.device) if known else Plan(rows, [Span(0, rows.total)] * rows.ranks)
    groups = _groups(q, k, rows, o, heads_dim, (of_row["k"] + of_row["v"]) * q.element_size(), plan)
    learns = learning(q, k, v, o)
    owns = known and forms_own(rows, o, plan, heads_q // heads_k, dict.fromkeys(learns, True))
    sizes = _sizes(of_row, q, v, plan, groups, learns, owns)
    balance = rows.balance(o["causal"], o["window"])
    if move == "ring" and rows.ranks > 1:
        why_not = no_keys or _why_not_ring(rows, o)
        if why_not:
            raise NotImplementedError(f"{why_not.replace(_KEYS, _RING)}; accepted: move='keys' or 'heads', where they can compute it")
    move, reason = _choose(rows, move, no_keys, no_heads, sizes, balance, o)
    call = Call(q, k, v, rows, o, rows_dim, heads_dim, move, reason, groups, balance, sizes, through, owns)
    if move != "none":
        _check_sizes(call)
    return call


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_queries(plane: Optional[Tensor]) -> bool:
    """Whether a bias or mask has rows, instead of being broadcast over them."""
    return plane is not None and plane.dim() >= 2 and plane.shape[-2] != 1


def _may_have_queries(rows: Rows, plane: Optional[Tensor]) -> bool:
    """has_queries() as every rank sees it: a rank with one row cannot tell its row from one that is broadcast."""
    return has_queries(plane) or (plane is not None and plane.dim() >= 2 and rows.kind != "packed" and 1 in rows.counts)


_KEYS, _RING = "move='keys'", "move='ring'"


def _why_not_ring(rows: Rows, o: dict[str, Any]) -> str:
    for name in PLANES:
        if rows.kind == "packed" and o[name] is not None:
            return f"{name}: given, with move='ring' and packed rows: the sequences' pieces begin at different keys of it"
    return ""


def _check_align(rows: Rows, o: dict[str, Any]) -> None:
    """As attention() does, which has the whole lengths."""
    used_q, used_k = o["seqused_q"], o["seqused_k"]
    if o["align"] is not None or has_positions(o) or not (has_band(o) or o["alibi_slopes"] is not None) or used_q is used_k:
        return
    if (used_k if used_q is None else used_q).device.type == "cpu":
        each = [list(rows.lengths) if used is None else used.tolist() for used in (used_q, used_k)]
        if rows.kind != "packed":
            each = [one * (1 if used is not None else len(other)) for one, used, other in zip(each, (used_q, used_k), each[::-1])]
        if each[0] == each[1]:
            return
    what = "causal" if o["causal"] else "window" if has_band(o) else "alibi_slopes"
    raise ValueError(need_align(what, "other lengths of seqused_q than of seqused_k"))


def _why_not_keys(rows: Rows, o: dict[str, Any]) -> str:
    """Why a call for a piece cannot say this; empty if it can."""
    if o["dropout_p"] == 0:
        return ""
    if o["rng"] != "fovea":
        return f"rng: {o['rng']!r}, with move='keys': a row's random numbers depend on all rows and keys"
    for mine in rows.pieces:
        for piece in mine:
            if piece.start % 16:
                return (
                    f"dropout_p: {o['dropout_p']}, with move='keys' and a piece that begins at row {piece.start}: dropout decides about 16 "
                    "rows together; Rows with a block that is a multiple of 16 have such pieces"
                )
    if moves_by_lengths(o):
        return (
            "seqused_q and seqused_k: not the same tensor, with dropout, align='bottom_right' and a causal mask, a window or ALiBi, with "
            "move='keys': the mask of dropout would be moved, too"
        )
    return ""


def _why_not_heads(k: Tensor, rows: Rows, heads_dim: int) -> str:
    heads = k.shape[heads_dim]
    ranks = rows.ranks if rows.over_heads is None else rows.over_heads.ranks
    return f"k: {heads} heads, with move='heads' over {ranks} ranks: not a multiple" if heads % ranks else ""


def _groups(q: Tensor, k: Tensor, rows: Rows, o: dict[str, Any], heads_dim: int, of_row: int, plan: Plan) -> int:
    """How many groups of key heads are fetched one after the other: the fewest whose buffers are small enough, and at least two, so
    that one is on its way while another is computed, unless few bytes are. One if a bias sums its gradient over all heads."""
    heads = k.shape[heads_dim]
    for name in ("bias", "bias2"):
        plane = o[name]
        if plane is not None and plane.requires_grad and (plane.dim() < 3 or plane.shape[-3] == 1) and q.shape[heads_dim] > 1:
            return 1
    least = 1 if of_row * max(map(plan.received, range(rows.ranks))) <= FEW_BYTES else 2
    for groups in range(min(least, heads), heads):
        if heads % groups == 0 and of_row * max(span.rows for span in plan.spans) // groups <= BUFFER_BYTES:
            return groups
    return heads


def learning(q: Tensor, k: Tensor, v: Tensor, o: dict[str, Any]) -> list[str]:
    """What gets gradients in a backward: of a call that has none, q, k and v."""
    tensors = {"q": q, "k": k, "v": v, **{name: o[name] for name in ("bias", "bias2", "sink")}}
    return [name for name, x in tensors.items() if x is not None and x.requires_grad] or list("qkv")


def forms_own(rows: Rows, o: dict[str, Any], plan: Plan, queries: int, wants: dict[str, bool]) -> bool:
    """Whether a backward forms the gradients of each rank's keys there (_parallel_edges.py). That computes pairs of a window's rows and
    keys a second time, and spares work for each key: it pays where a rank has many rows. queries: heads of q for one of k."""
    if plan.edge is None or not (wants.get("k") or wants.get("v")) or wants.get("bias") or wants.get("bias2"):
        return False  # a bias's gradient would count the pairs that are computed twice
    if any(_may_have_queries(rows, o[name]) for name in PLANES):
        return False  # of the next rank's rows, which this one does not have
    return plan.edge**2 * queries <= MOST_AGAIN * min(rows.counts)


def _sizes(of_row: dict[str, int], q: Tensor, v: Tensor, plan: Plan, groups: int, learns: list[str], owns: bool) -> Sizes:
    """Of the rank that has or receives the most; `of_row` are the elements of a row, `owns` is what forms_own() says."""
    rows, item, wide = plan.rows, q.element_size(), torch.finfo(_rows.wide(q.dtype)).bits // 8
    most, each = max(rows.counts), range(rows.ranks)
    of_heads = of_row["q"] // max(1, q.shape[-1])
    of_keys, of_out = of_row["k"] + of_row["v"], of_heads * v.shape[-1]
    fetched = max(map(plan.received, each)) * of_keys * item
    at_edges = ((of_row["q"] + 2 * of_out) * item + 2 * of_heads * wide) * plan.edge if owns and plan.edge else 0
    return Sizes(
        fetched_bytes=fetched,
        exposed_bytes=fetched // groups,
        returned_bytes=0 if owns or not {"k", "v"} & set(learns) else max(map(plan.returned, each)) * of_keys * wide,
        edge_bytes=at_edges,
        group_bytes=max(span.rows for span in plan.spans) * of_keys // groups * item,
        round_bytes=most * of_keys * item,
        ring_bytes=rows.ranks * most * of_keys * wide,
        exchanged_bytes=(of_row["q"] + of_keys + of_out) * most * item * (rows.ranks - 1) // rows.ranks,
        exchanged_back_bytes=(sum(n for name, n in of_row.items() if name in learns) + of_out) * most * item * (rows.ranks - 1) // rows.ranks,
    )


def _choose(
    rows: Rows, move: Any, no_keys: str, no_heads: str, sizes: Sizes, balance: float, o: dict[str, Any]
) -> tuple[str, str]:  # fmt: skip
    """The movement, and why. Every rank decides from the same numbers."""
    if rows.over_keys is not None:
        if move is not None:
            raise ValueError(f"move: {move!r}, with rows of a mesh of two dimensions; accepted: None")
        if no_keys or no_heads:
            raise NotImplementedError(f"{no_keys or no_heads}; accepted: rows of a mesh of one dimension, or other options")
        return "both", "the mesh has two dimensions: heads move along the second one, keys along the first"
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
    planes = [name for name in PLANES if _may_have_queries(rows, o[name])]
    if planes:
        return "keys", f"{planes[0]} has queries, which are this rank's rows"
    if balance > 1.2:
        return "heads", f"the rows are unbalanced for keys, {balance:.2f}"
    if not _one_node(rows):
        return "keys", "the ranks are on several nodes"
    fetched, exchanged = sizes.fetched_bytes + sizes.returned_bytes + sizes.edge_bytes, 2 * sizes.exchanged_bytes
    if fetched * MANY < exchanged:
        return "keys", f"a rank receives far fewer bytes, {fetched}, than with heads, {exchanged}"
    return "heads", f"on one node it computes whole sequences; a rank receives {exchanged} bytes, with keys {fetched}"


def _instead(move: str, why_not: str) -> str:
    return f"move={move!r}" if not why_not else f"other options, as move={move!r} cannot either: {why_not}"


def _one_node(rows: Rows) -> bool:
    """As torchrun says. Without it, one node is assumed."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if local <= 0 or rows.group is None:
        return True
    return len({dist.get_global_rank(rows.group, r) // local for r in range(rows.ranks)}) == 1


def _check_sizes(call: Call) -> None:
    """Sizes that slices would otherwise hide or report as those of a part. Every rank checks them before the first collective: if one
    rank refuses them later, the others wait for it."""
    rows, o = call.rows, call.options
    packed, heads, entries = rows.kind == "packed", call.heads(call.q), entries_of(call)
    over_heads = rows.over_heads if call.move == "both" else rows if call.move == "heads" else None
    over_keys = rows.over_keys if call.move == "both" else None if call.move == "heads" else rows
    own_heads = heads if over_heads is None else heads // over_heads.ranks
    keys = rows.longest if packed else rows.total
    queries = keys if packed or over_keys is None else over_keys.counts[over_keys.rank or 0]
    which = "the rows and keys of whole sequences" if packed else f"{'all' if over_keys is None else 'these'} rows, all keys"
    for name in PLANES:
        plane = o[name]
        if plane is None:
            continue
        levels = tuple(plane.shape[:-3])
        sizes = (1,) * (3 - plane.dim()) + tuple(plane.shape[-3:])
        fits = sizes[1] == queries and sizes[0] in (1, own_heads) or sizes[1] == 1 and sizes[0] in (1, heads)
        fits &= sizes[2] in (1, keys) and len(levels) <= len(entries)
        if not fits or any(n not in (1, m) for n, m in zip(levels[::-1], entries[::-1])):
            whose = "all heads" if own_heads == heads else f"this rank's {own_heads} heads; of all {heads} heads without queries"
            wanted = ", ".join(map(str, (*entries, own_heads, queries, keys)))
            raise ValueError(
                f"{name}: shape {shape_text(plane.shape)}; accepted with move={call.move!r}: broadcastable to ({wanted}): {which}, {whose}"
            )
    for name in ("sink", "alibi_slopes", "dropout_streams"):
        x = o[name]
        if x is not None and (x.dim() == 0 or x.shape[-1] not in ((1, heads) if name == "dropout_streams" else (heads,))):
            raise ValueError(f"{name}: shape {shape_text(x.shape)}; accepted: {heads} heads, those of q on every rank")
    for name in ("seqused_q", "seqused_k"):
        x, count = o[name], math.prod(entries)
        if x is not None and x.shape != (count,):
            raise ValueError(f"{name}: shape {shape_text(x.shape)}; accepted: (B), {count}")


def arguments_of(q: Any, k: Any, v: Any, o: dict[str, Any], **more: Any) -> Arguments:
    """The operator's arguments for a call within a rank."""
    named: dict[str, Any] = dict.fromkeys(Arguments._fields[: _call.TENSORS])
    named.update({name: o.get(name) for name in ("bias", "bias2", "mask", "alibi_slopes", "sink", "seqused_q", "seqused_k")})
    for name in ("seed", "offset"):
        given = o.get(name)
        named[name] = 0 if given is None or isinstance(given, Tensor) else _attention._word(name, given)
        named[f"{name}_tensor"] = given if isinstance(given, Tensor) else None
    named.update(q=q, k=k, v=v, scale=o.get("scale"), causal=bool(o.get("causal")), align="bottom_right",
                 softcap=o.get("softcap", 0.0), dropout_p=o.get("dropout_p", 0.0), rng=o.get("rng", "fovea"), max_seqlen_q=0,
                 max_seqlen_k=0, batch_outer=0, layout=o.get("layout", "bhsd"), backend=o.get("backend"),
                 deterministic=_call.DETERMINISTIC if o.get("deterministic") else _call.order())  # fmt: skip
    named["window_left"], named["window_right"] = o.get("window", (-1, -1))
    named.update(more)
    return Arguments(**named)


def streams_of(entries: tuple[int, ...], heads: int, o: dict[str, Any], first: int, count: int, device: Any) -> Optional[Tensor]:
    """The streams of dropout of some of a call's heads."""
    streams: Optional[Tensor] = o["dropout_streams"]
    if streams is None:
        if o["dropout_p"] == 0 or count == heads:
            return None
        streams = torch.arange(math.prod(entries) * heads, device=device).view(*entries, heads)
    return streams if streams.shape[-1] == 1 else streams.narrow(-1, first, count)


def entries_of(call: Call) -> tuple[int, ...]:
    """The batch entries, in one level or two."""
    if call.rows.kind != "packed":
        return tuple(call.q.shape[:-3])
    return tuple(call.options["batch_shape"] or (len(call.rows.lengths),))


def draw_seed(call: Call) -> Any:
    """The first rank's, if one has to be drawn. Every rank draws, so that their generators stay in step."""
    if call.options["seed"] is not None or call.options["dropout_p"] == 0:
        return call.options["seed"]
    if call.through is not None:
        return call.through.draw_seed(call)
    return _rows.broadcast_first(call.rows, _operators.draw_seed([call.q]), "the seed of dropout")


# ---- errors ----


def of_rank(rows: Rows, error: Exception) -> Exception:
    text = str(error)
    if not text.startswith("rank "):
        error.args = (f"{_rows._name(rows)}: {text}",)
    return error


@contextlib.contextmanager
def saying_rank(rows: Rows) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, MemoryError) as error:
        of_rank(rows, error)
        raise
