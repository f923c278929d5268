# SPDX-License-Identifier: Apache-2.0
"""The memory that context_parallel needs on a rank besides inputs, results and their gradients, as explain_context_parallel() names it.

Left out are what a collective needs inside, and tensors of some numbers for each head or sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from . import _rows
from ._parallel_call import PLANES, Call, entries_of, has_queries, learning, prepare, short
from ._parallel_fetch import fetch_plan, has_few_segments
from ._parallel_heads import groups_of_heads, own_heads
from ._parallel_parts import NAMED, packed_numbers
from ._parallel_workspace import needed
from ._rows import Rows

Buffers = list[tuple[int, str]]  # bytes, and what has them
Moments = tuple[Buffers, Buffers, Buffers]  # the forward's, what is kept until the backward, the backward's


def lines(call: Call) -> list[str]:
    found = [
        f"{when}: " + ", ".join(f"{size} bytes {what}" for size, what in buffers if size)
        for when, buffers in zip(("buffers of the forward", "kept for the backward", "buffers of the backward"), _OF[call.move](call))
        if any(size for size, _ in buffers)
    ]
    return [*found, NOT_NAMED] if found and call.q.is_meta else found


NOT_NAMED = "not named: the workspace of attention, as it depends on the device"


def _workspace(call: Call) -> tuple[Buffers, Buffers]:
    """Of the forward and of the backward."""
    each = needed(call) or (0, 0)
    return [(each[0], "of attention's workspace")], [(each[1], "of attention's workspace")]


class _Sizes(NamedTuple):
    """Bytes of a row."""

    q: int
    keys: int  # and values
    out: int
    lse: int
    wide_q: int  # in the type in which sums are formed
    wide_keys: int
    wide_out: int


def _sizes(call: Call) -> _Sizes:
    q, keys, values = (_of_row(call, x) for x in (call.q, call.k, call.v))
    rows_of_heads = q // max(1, call.q.shape[-1])
    out, item, wide = rows_of_heads * call.v.shape[-1], call.q.element_size(), _bytes(_rows.wide(call.q.dtype))
    return _Sizes(
        q * item, (keys + values) * item, out * item, rows_of_heads * wide, q * wide, (keys + values) * wide, out * wide
    )  # fmt: skip


def _of_row(call: Call, x: Tensor) -> int:
    """Elements."""
    return x.shape[: call.rows_dim].numel() * x.shape[call.rows_dim + 1 :].numel()


def _bytes(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def _learns(call: Call) -> bool:
    return any(x is not None and x.requires_grad for x in (call.q, call.k, call.v, *map(call.options.get, NAMED[3:])))


def _wide(x: Optional[Tensor]) -> int:
    """Bytes of a sum that becomes a gradient with fewer bits."""
    wide = 0 if x is None or not x.requires_grad else _bytes(_rows.wide(x.dtype))
    return 0 if x is None or wide <= x.element_size() else x.numel() * wide


def _of_a_call(call: Call) -> tuple[int, Buffers, Buffers]:
    """The rows of the longest call, and what a call needs of biases and masks."""
    packed = call.rows.kind == "packed"
    parts = packed_numbers(call.rows, call.rank, "cpu") if packed else call.rows.pieces[call.rank]
    rows, longest = (max((getattr(part, name) for part in parts), default=0) for name in ("rows", "longest" if packed else "rows"))
    forward, backward = 0, 0
    for name in PLANES:
        x = call.options[name]
        if x is None:
            continue
        copied = packed and has_queries(x)
        *levels, heads, queries, keys = (1, 1, 1, *x.shape)[-max(3, x.dim()) :]
        entries = torch.Size(entries_of(call) if copied else levels).numel()
        size = entries * (heads // call.groups if heads > 1 else 1) * (longest if has_queries(x) else queries) * keys
        forward += size * x.element_size() * copied
        if name != "mask" and x.requires_grad and (packed or call.move == "ring" or not has_queries(x)):  # others are written in place
            backward += size * x.element_size() + copied * (size * _wide(x) // max(1, x.numel()))
    copies: Buffers = [(forward, "of biases and masks of a call")]
    return rows, copies, [*copies, (backward, "of gradients of biases of a call")]


def _sums(call: Call) -> Buffers:
    o, packed = call.options, call.rows.kind == "packed"
    names = [name for name in NAMED[3:] if call.move == "ring" or packed or name == "sink" or not has_queries(o[name])]
    return [(sum(_wide(o[name]) for name in names), "of sums of biases")]


def _keys(call: Call) -> Moments:
    s, rows, several = _sizes(call), call.rows, call.groups > 1
    plan = fetch_plan(rows, call.options, call.q.device)
    # Rows that are put in order are there twice. So are keys of which the next group's are on their way, and sums that are.
    copies = 2 if several or not (plan.from_place or rows._in_order()) else 1
    longest, of_forward, of_backward = _of_a_call(call)
    what = f"of keys and values of {copies} groups" if several else f"of keys and values, {copies} times"
    # Where a rank's own keys are read where they lie, what it sends is copied, what it fetches is kept for the backward, and its own
    # gradients are summed apart.
    at_edge = plan.edge is not None
    sent, own = (plan.returned(plan.rank), rows.counts[plan.rank]) if at_edge else (0, 0)
    kept: Buffers = [(plan.mine.rows * s.keys, "of keys and values that were fetched")] if at_edge and _learns(call) else []
    fetched = [(copies * ((0 if kept else plan.mine.rows) + sent) * (s.keys // call.groups), what)]
    summed = copies * (plan.mine.rows + own) + plan.returned(plan.rank)
    wide = short(_rows.wide(call.q.dtype))
    sums = (summed * (s.wide_keys // call.groups), f"of gradients {what} in {wide}, and those that others send")
    if not {"k", "v"} & set(learning(call.q, call.k, call.v, call.options)):
        sums = (0, "")
    elif call.owns:
        first, last = (plan.edge or 0) * (plan.rank > 0), (plan.edge or 0) * (plan.rank < rows.ranks - 1)
        rows_at_edges = (first + 2 * last) * (s.q + 2 * s.out) + 2 * (first + 4 * last) * s.lse
        sums = (rows_at_edges // call.groups, "of rows at this rank's edges that are sent and received")
    slices = (2 * longest * s.lse // call.groups, "of a call's lse and its gradient")
    again = [] if kept else fetched
    forward, backward = _workspace(call)
    return [*kept, *fetched, *of_forward, *forward], kept, [*kept, *again, sums, slices, *of_backward, *_sums(call), *backward]


def _ring(call: Call) -> Moments:
    s, ranks, most = _sizes(call), call.rows.ranks, max(call.rows.counts)
    longest, mine, wide = _of_a_call(call)[0], call.rows.counts[call.rank], short(_rows.wide(call.q.dtype))
    narrow, (forward, backward) = s.q < s.wide_q, _workspace(call)
    sums = (3 * most * s.wide_keys, f"of gradients of keys and values of three ranks in {wide}")
    here = 2 if ranks > 2 else 1  # with two ranks no more keys are on their way when gradients are
    return (
        [(2 * most * s.keys, "of keys and values of two ranks"), (narrow * mine * s.wide_out, f"of out in {wide}"), *forward],
        [],
        [(here * most * s.keys, "of keys and values of " + ("two ranks" if here == 2 else "a rank")), sums,
         (2 * longest * s.lse, "of a call's lse and its gradient"), (narrow * mine * s.wide_q, f"of the gradient of q in {wide}"),
         *_sums(call), *backward],
    )  # fmt: skip


def _heads(call: Call) -> Moments:
    forward, backward = _workspace(call)
    return _over_heads(call, call.rows, (forward, [], backward))


def _both(call: Call) -> Moments:
    """Keys of this rank's heads, between two exchanges of heads."""
    inner, keys = call.rows.over_heads, call.rows.over_keys
    assert inner is not None and keys is not None
    o = own_heads(call, call.options, inner)
    q, k, v = (_of_heads(call, x, inner.ranks, keys) for x in (call.q, call.k, call.v))
    return _over_heads(call, inner, _keys(prepare(q, k, v, keys, None if keys.ranks == 1 else "keys", o)))


def _of_heads(call: Call, x: Tensor, ranks: int, keys: Rows) -> Tensor:
    shape = list(x.shape)
    shape[call.heads_dim] //= ranks
    shape[call.rows_dim] = keys.counts[keys.rank or 0]
    return x.new_empty(()).expand(shape).requires_grad_(x.requires_grad)  # without memory


def _over_heads(call: Call, rows: Rows, between: Moments) -> Moments:
    """The moments at which most is needed: before and after what is between the two exchanges, and during it."""
    s, count = _sizes(call), rows.counts[rows.rank or 0]
    most = max(rows.total, rows.ranks * count)  # what is on its way lies there twice: as it is sent, and as it comes
    inputs, out, lse = (rows.total * size // rows.ranks for size in (s.q + s.keys, s.out, s.lse))
    kept: Buffers = [(inputs, "of q, k and v of all rows of some heads"), (out + lse, "of their out and lse")]
    # Rows of many segments are there as these rows have them, by rank, and in order.
    times = 2 if has_few_segments(rows) else 3
    names = [name for name in learning(call.q, call.k, call.v, call.options) if name in "qkv"]
    learned = sum(_of_row(call, x) * x.element_size() for name, x in zip("qkv", (call.q, call.k, call.v)) if name in names)
    sent, back = (times * most * size // rows.ranks for size in (s.q + s.keys, learned))
    forward = [
        [(sent, f"of q, k and v of all rows of some heads, {times} times")], [*kept, (most * s.out // rows.ranks, "of out on its way")],
        [*kept, *between[0]],
    ]  # fmt: skip
    # Where heads are not first a copy is sent, and it is there until the last group has come.
    if call.move == "heads" and call.heads_dim > call.rows_dim and groups_of_heads(call, rows) > 1:
        forward.append([*kept, (sent // times, "of q, k and v as they are sent")])
    backward = [
        [*kept, (times * most * s.out // rows.ranks, "of the gradient of out on its way")],
        [(back, f"of gradients of {', '.join(names)} of all rows of some heads, {times} times")],
        [*kept, (rows.total * learned // rows.ranks + out + lse, "of their gradients"), *between[2]],
    ]
    return _largest(forward), [*kept, *between[1]] if _learns(call) else [], _largest(backward)


def _largest(moments: list[Buffers]) -> Buffers:
    return max(moments, key=lambda buffers: sum(size for size, _ in buffers))


_NOTHING: Moments = ([], [], [])
_OF: dict[str, Callable[[Call], Moments]] = {"keys": _keys, "ring": _ring, "heads": _heads, "both": _both, "none": lambda call: _NOTHING}
