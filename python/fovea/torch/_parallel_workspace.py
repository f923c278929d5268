# SPDX-License-Identifier: Apache-2.0
"""The workspace of the calls that a rank of context_parallel makes, which explain_context_parallel() names. It is asked of the library for
problems with the same shapes, strides and results as theirs, whose tensors have no memory.

A rank makes one call after the other, and each gives its workspace back: so it is the largest that counts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .. import _abi
from .._library import lib
from . import _ahead, _attention, _call, _rows
from ._call import Shard
from ._parallel_call import PLANES, Call, arguments_of, has_queries
from ._parallel_edges import edges_of
from ._parallel_fetch import fetch_plan
from ._parallel_heads import _from_place, groups_of_heads, own_heads
from ._parallel_parts import NAMED, Group, parts_of, shapes_of, split, width
from ._parallel_ring import _keys, _Pair, _queries

ALIGNED = 256  # bytes; the library asks no address for more


class Asked(NamedTuple):
    """A call: its arguments, what it writes, and the gradients that it adds to what is there."""

    direction: int
    arguments: tuple[Any, ...]
    tensors: dict[str, Tensor]
    adds: tuple[str, ...] = ()


def needed(call: Call, device: Optional[torch.device] = None) -> Optional[tuple[int, int]]:
    """Bytes of the forward's and of the backward's. None of tensors of "meta", unless `device` says which it is about: workspace depends
    on the device."""
    device = call.q.device if device is None else device
    if device.type == "meta":
        return None
    learns = [x is not None and x.requires_grad for x in _differentiable(call)]
    need = dict(zip(NAMED, learns if any(learns) else [True] * 3 + [False] * 3))
    found = {_abi.FORWARD: 0, _abi.BACKWARD: 0}
    for asked in _CALLS[call.move](call, need):
        try:
            found[asked.direction] = max(found[asked.direction], _bytes(asked, device))
        except (NotImplementedError, ValueError):
            if asked.direction == _abi.FORWARD or any(learns):
                raise  # as the call will
    return found[_abi.FORWARD], found[_abi.BACKWARD]


def _differentiable(call: Call) -> tuple[Optional[Tensor], ...]:
    return (call.q, call.k, call.v, *map(call.options.get, NAMED[3:]))


class _Placed(_ahead.Shape):
    """A tensor of "meta" as one of a device, at an address that is aligned as its own will be. Lengths and positions are where they are:
    of the CPU's the library reads them."""

    def __init__(self, x: Tensor, device: torch.device) -> None:
        super().__init__(x, x.shape, x.stride())
        self.device = device
        self._address = ALIGNED + int(x.storage_offset()) * x.element_size() % ALIGNED if x.is_meta else int(x.data_ptr())

    def data_ptr(self) -> int:
        return self._address


def _bytes(asked: Asked, device: torch.device) -> int:
    a: Any
    a, shard = _call.split(asked.arguments)
    placed = [None if x is None else _Placed(x, device) for x in a[: _call.TENSORS]]
    problem: Any = _call._Problem(a._make((*placed, *a[_call.TENSORS :])))
    problem.set_shard(shard)
    there = [x for x in placed if x is not None]
    there += [] if shard is None else [_Placed(x, device) for x in shard[2:] if x is not None]
    for name, x in asked.tensors.items():
        put = problem.set_rows if name.removeprefix("grad_") in ("out", "q", "k", "v") else problem.set
        there.append(_Placed(x, device))
        put(name, there[-1])
    for name in asked.adds:
        problem.raw.accumulate |= _abi.ACCUMULATE_OUT if name == "out" else _abi.ACCUMULATE_GRADS[name]
    for slot, tensor in zip(problem._slots, there):
        problem._words[slot] = tensor.data_ptr()
    size = ctypes.c_size_t()
    status = int(lib.fovea_workspace(problem._pointer, asked.direction, ctypes.byref(size)))
    if status == _abi.UNSUPPORTED and a.deterministic == _call.DETERMINISTIC_OR_WARN:
        problem.raw.flags &= ~_abi.DETERMINISTIC
        status = int(lib.fovea_workspace(problem._pointer, asked.direction, ctypes.byref(size)))
    if status != _abi.OK:
        problem._refuse(status)
    return size.value


def _without_memory(call: Call) -> Call:
    """The same with tensors of "meta". Lengths and positions stay: what is made of them needs their device."""
    o = dict(call.options)
    for name in (*PLANES, "sink", "alibi_slopes", "dropout_streams"):
        o[name] = None if o[name] is None else _meta(o[name])
    q, k, v = (_meta(x, dense=True) for x in (call.q, call.k, call.v))
    return call._replace(q=q, k=k, v=v, options=o)


def _meta(x: Tensor, dense: bool = False) -> Tensor:
    """`dense`: one that was expanded to say a shape is as if it had been made so."""
    if dense and 0 in x.stride() and x.numel() > 1:
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    offset = 0 if x.is_meta else x.data_ptr() % ALIGNED // x.element_size()
    return torch.empty(0, dtype=x.dtype, device="meta").as_strided(x.shape, x.stride(), offset)


def _results(call: Call, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    a, _ = _call.split(arguments)
    return _call.new_out(a, _call.out_layout(a)), _call.new_lse(a, _call.lse_shape(a))


def _whole(call: Call) -> tuple[Any, ...]:
    return arguments_of(call.q, call.k, call.v, call.options, **({"cu_seqlens_q": call.q} if call.rows.kind == "packed" else {}))


def _backwards(arguments: tuple[Any, ...], out: Tensor, lse: Tensor, grads: dict[str, Tensor], adds: tuple[str, ...]) -> Iterator[Asked]:
    """With a gradient of lse and without one, which only the loss knows."""
    if not grads:
        return
    tensors = {"grad_out": out, "out": out, "lse": lse.contiguous(), **{f"grad_{name}": grad for name, grad in grads.items()}}
    for more in ({}, {"grad_lse": lse.contiguous()}):
        yield Asked(_abi.BACKWARD, arguments, {**tensors, **more}, adds)


# ---- the ways: as keys_forward() and keys_backward() and the others call the library ----


def _of_keys(call: Call, need: dict[str, bool]) -> Iterator[Asked]:
    plain, rows = _without_memory(call), call.rows
    group, o = Group(plain, 0), plain.options
    group.plan = plan = fetch_plan(rows, call.options, call.q.device)
    group.shapes = shapes_of([group.of_keys(x) for x in (plain.k, plain.v)], call.rows_dim)
    group.fetched = group.split(plain.k.new_empty(plan.mine.rows, width(group.shapes)))
    out, lse = _results(call, _whole(plain))
    wide, at_edge = _rows.wide(call.q.dtype), plan.edge is not None
    total = plain.q.new_empty(plan.mine.rows, width(group.shapes), dtype=wide)
    own = [torch.empty_like(group.of_keys(x), dtype=wide) for x in (plain.k, plain.v)]
    grad_q = torch.empty_like(plain.q)
    parts = sorted(parts_of(call), key=lambda part: -part.keys.end)
    written = bool(parts) and (at_edge or rows.kind == "packed" or parts[0].keys.end == plan.mine.end)
    owns = call.forms_own(need)
    if owns:
        yield from _of_own_keys(plain, group, need, out, lse, grad_q)
    for part in parts:
        if part.starts is not None:
            part = part._replace(starts=part.starts.to("meta"))
        arguments = group.arguments(part)
        into = {"out": group.of_queries_alone(out, part), "lse": group.of_lse(lse, part)}
        yield Asked(_abi.FORWARD, arguments, into)
        if owns:
            continue
        grads = {"q": group.of_queries_alone(grad_q, part)} if need["q"] else {}
        sums = {}
        if need["k"] or need["v"]:
            sums = {name: x for name, x in zip("kv", group.of_part(own if part.own else group.split(total), part)) if need[name]}
        grads.update(sums)
        for name in NAMED[3:]:
            if need[name]:
                in_place = name != "sink" and has_queries(o[name]) and rows.kind != "packed"
                of_part = group.of_heads(o[name]) if name == "sink" else group.plane(o[name], part)
                grads[name] = of_part if in_place else torch.empty_like(of_part)
        is_first = part.own or at_edge or (written and part.first == parts[0].first)
        yield from _backwards(arguments, into["out"], into["lse"], grads, () if is_first else tuple(sums))


def _of_own_keys(call: Call, group: Group, need: dict[str, bool], out: Tensor, lse: Tensor, grad_q: Tensor) -> Iterator[Asked]:
    """The backward's calls of _parallel_edges.py."""
    own, first, last = edges_of(call)
    of_keys = {name: torch.empty_like(x) for name, x in (("k", call.k), ("v", call.v)) if need[name]}
    for part in (own, first):
        if part is not None:
            grads = {"q": group.of_queries_alone(grad_q, part)} if need["q"] else {}
            if part is own:
                grads.update({name: group.of_own_keys(x, part) for name, x in of_keys.items()})
                grads.update({"sink": group.of_heads(call.options["sink"])} if need["sink"] else {})
            yield from _backwards(group.arguments(part), group.of_queries_alone(out, part), group.of_lse(lse, part), grads, ())
    if last is not None:
        taken = [x.narrow(call.heads_dim, group.first_query, group.queries) for x in (call.q, out, out)]
        shapes = shapes_of(taken, call.rows_dim)
        q, out_rows, _ = split(call.q.new_empty(last.rows, width(shapes)), call.rows_dim, shapes)
        numbers = lse.new_empty(*lse.shape[:-2], group.queries, last.rows)
        grads = {name: group.of_own_keys(x, last) for name, x in of_keys.items()}
        yield from _backwards(group.arguments(last, q), out_rows, numbers, grads, ())


def _of_heads(call: Call, need: dict[str, bool]) -> Iterator[Asked]:
    plain, rows = _without_memory(call), call.rows
    groups = groups_of_heads(call, rows)
    o = own_heads(plain, plain.options, rows, 0, groups)
    given, shapes = (plain.q, plain.k, plain.v), []
    for x in given:
        shape = list(x.shape)
        shape[call.heads_dim] //= rows.ranks * groups
        shape[call.rows_dim] = rows.total
        shapes.append(shape)
    if groups > 1 or _from_place(call, rows, 1):
        q, k, v = (x.new_empty(shape) for x, shape in zip(given, shapes))
    else:  # a row has all three
        of_row = [torch.Size(shape[: call.rows_dim] + shape[call.rows_dim + 1 :]) for shape in shapes]
        q, k, v = split(plain.q.new_empty(rows.total, width(of_row)), call.rows_dim, of_row)
    more: dict[str, Any] = {"align": o["align"] or "bottom_right"}
    if rows.kind == "packed":
        ends, shape = rows._ends(call.q.device), o["batch_shape"]
        more.update(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=rows.longest, max_seqlen_k=rows.longest,
                    batch_outer=0 if shape is None else _attention._batch_outer(shape, ends, ends))  # fmt: skip
    shard = Shard(*(o[name] for name in Shard._fields))
    a = arguments_of(q, k, v, o, **more)
    arguments: tuple[Any, ...] = a if all(given is None for given in shard) else (*a, *shard)
    out, lse = _results(call, arguments)
    yield Asked(_abi.FORWARD, arguments, {"out": out, "lse": lse})
    grads = {name: _call.new_grad(a, name, a.partial) for name in NAMED if need[name]}
    yield from _backwards(arguments, out, lse, grads, ())


def _of_ring(call: Call, need: dict[str, bool]) -> Iterator[Asked]:
    plain, rows, wide = _without_memory(call), call.rows, _rows.wide(call.q.dtype)
    shapes = shapes_of((plain.k, plain.v), call.rows_dim)
    k, v = split(plain.k.new_empty(max(rows.counts), width(shapes)), call.rows_dim, shapes)
    of_keys = split(plain.k.new_empty(max(rows.counts), width(shapes), dtype=wide), call.rows_dim, shapes)
    result, lse = _results(call, _whole(plain))
    given = {"q": plain.q, **{name: plain.options[name] for name in NAMED[3:]}}
    totals = {name: x.new_empty(x.shape, dtype=_rows.wide(x.dtype)) for name, x in given.items() if need[name]}
    out = torch.empty_like(result, dtype=wide)
    mine, theirs = _queries(call), [(owner, keys) for owner in range(rows.ranks) for keys in _keys(call, owner)]
    for queries in mine:
        for owner, keys in theirs:
            pair = _Pair(call, queries, keys)
            if pair.is_empty() and not (need["sink"] and owner == call.rank):
                continue
            pair.call = plain
            sides = {"out": pair.rows(out, call.rows_dim), "lse": pair.rows(lse, -1)}
            if not pair.is_empty():
                yield Asked(_abi.FORWARD, pair.arguments(k, v, False), sides, ("out",))
            grads = {name: pair.of_keys(x) for name, x in zip("kv", of_keys) if need[name]}
            with_sink = need["sink"] and owner == call.rank
            for name, total in totals.items():
                if name == "q":
                    grads[name] = pair.rows(total, call.rows_dim)
                elif name != "sink":
                    grads[name] = pair.plane(total)
                elif with_sink:
                    grads[name] = total
            yield from _backwards(pair.arguments(k, v, with_sink), pair.rows(result, call.rows_dim), sides["lse"], grads, tuple(grads))


_CALLS: dict[str, Callable[[Call, dict[str, bool]], Iterator[Asked]]] = {
    "keys": _of_keys, "none": _of_keys, "heads": _of_heads, "ring": _of_ring,
}  # fmt: skip
