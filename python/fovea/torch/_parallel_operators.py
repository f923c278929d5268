# SPDX-License-Identifier: Apache-2.0
"""context_parallel() in graphs of torch.compile, but with packed rows (_parallel.py says why).

    fovea::context_parallel         what a compiled function calls. It is made of the others, and of fovea::attention
    fovea::rows_forward, _backward  move="keys" and "ring": out and lse, and six gradients as those of fovea::attention_backward
    fovea::exchange                 move="heads": rows of tensors to or from this rank's heads, as one tensor of each type
    fovea::from_first               the first rank's seed

They name a plan by Rows.handle. What else a call is made of is text in JSON, so that a graph can be kept for another process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from . import _attention, _call, _operators, _rows
from ._operators import library, operators
from ._parallel_call import Call, arguments_of, prepare, saying_rank
from ._parallel_heads import by_heads, by_heads_then_keys, by_type, exchanged
from ._parallel_keys import by_keys, keys_backward, keys_forward
from ._parallel_parts import NAMED
from ._parallel_ring import by_ring, ring_backward, ring_forward
from ._rows import Rows

_TENSORS = ("bias", "bias2", "mask", "alibi_slopes", "sink", "seqused_q", "seqused_k", "positions_q", "positions_k", "dropout_streams")
_NUMBERS = {
    "scale": "float?", "causal": "bool", "align": "str?", "softcap": "float", "dropout_p": "float", "rng": "str", "position_q": "SymInt?",
    "position_k": "SymInt?", "batch_shape": "SymInt[]?", "layout": "str", "deterministic": "bool", "backend": "str?",
}  # fmt: skip
_PAIRS = "Tensor? seed_tensor, SymInt? seed, Tensor? offset_tensor, SymInt offset, SymInt window_left, SymInt window_right"
_GIVEN = "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? bias2, Tensor? sink, Tensor[] others, str call"
_WAYS = {"keys": (keys_forward, keys_backward), "ring": (ring_forward, ring_backward)}

library.define(
    f"context_parallel(Tensor q, Tensor k, Tensor v, {', '.join(f'Tensor? {name}' for name in _TENSORS)}, {_PAIRS}, "
    f"{', '.join(f'{kind} {name}' for name, kind in _NUMBERS.items())}, str rows, str? move) -> (Tensor out, Tensor lse)"
)
library.define(f"rows_forward({_GIVEN}) -> (Tensor out, Tensor lse)")
library.define(
    f"rows_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool[] need, {_GIVEN}) "
    f"-> ({', '.join(f'Tensor grad_{name}' for name in NAMED)})"
)
library.define("exchange(Tensor[] parts, str rows, str what, bool to_heads) -> Tensor[]")
library.define("from_first(Tensor seed, str rows) -> Tensor")


def _alone(call: Call) -> tuple[Tensor, Tensor]:
    o = dict(call.options)
    if call.rows.kind == "packed":
        ends = call.rows._ends(call.q.device)
        o.update(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=call.rows.longest, max_seqlen_k=call.rows.longest)
    out, lse = _attention.attention(call.q, call.k, call.v, return_lse=True, **o)
    return out, lse


# How a call is computed, by Call.move, in a graph or not.
MOVERS = {"none": _alone, "keys": by_keys, "heads": by_heads, "ring": by_ring, "both": by_heads_then_keys}


def in_graph(q: Any, k: Any, v: Any, rows: Any, move: Any, return_lse: bool, options: dict[str, Any]) -> Any:
    """Dynamo reads this function."""
    for name, value in options.items():
        if name not in _attention._OPTIONS:
            raise TypeError(f"{name}: not an option of context_parallel")
        if "_seqlen" in name and value is not None:
            raise ValueError(f"{name}: given; accepted: None, rows has the lengths")
    rows._rank()
    o = {**_attention._OPTIONS, **options}
    pairs = []
    for name in ("seed", "offset"):
        given = o[name]
        is_tensor = isinstance(given, Tensor)
        pairs += [given if is_tensor else None, None if given is None else 0 if is_tensor else _attention._word(name, given)]
    tensors, numbers = [o[name] for name in _TENSORS], [o[name] for name in _NUMBERS]
    out, lse = operators.context_parallel(q, k, v, *tensors, *pairs, *o["window"], *numbers, rows.handle, move)
    return (out, lse) if return_lse else out


def _attend(*given: Any) -> tuple[Tensor, Tensor]:
    q, k, v, *more = given
    at = len(_TENSORS)
    o = {**dict(zip(_TENSORS, more)), **dict(zip(_NUMBERS, more[at + 6 :]))}
    seed_tensor, seed, offset_tensor, offset, *window = more[at : at + 6]
    o["seed"], o["offset"] = seed if seed_tensor is None else seed_tensor, offset if offset_tensor is None else offset_tensor
    o["window"] = tuple(window)
    rows = _rows.of_handle(more[-2])
    with saying_rank(rows):
        call = prepare(q, k, v, rows, more[-1], o, Through)
        out, lse = MOVERS[call.move](call)
    return out, lse


class Through:
    """What a call in a graph does by operators."""

    @staticmethod
    def ways(way: str) -> tuple[Any, Any]:
        def forward(call: Call) -> Any:
            return operators.rows_forward(*_given(call, way))

        def backward(call: Call, need: Any, grad_out: Tensor, grad_lse: Optional[Tensor], out: Tensor, lse: Tensor) -> Any:
            found = operators.rows_backward(grad_out, grad_lse, out, lse, list(need), *_given(call, way))
            return [grad if wanted else None for grad, wanted in zip(found, need)]

        return forward, backward

    @staticmethod
    def exchange(rows: Rows, what: str, to_heads: bool, parts: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor] = operators.exchange(list(parts), rows.handle, what, to_heads)
        return found

    @staticmethod
    def draw_seed(call: Call) -> Any:
        return operators.from_first(_operators.seed([call.q]), call.rows.handle)


def _given(call: Call, way: str) -> tuple[Any, ...]:
    o = call.options
    others = {name: x for name, x in o.items() if isinstance(x, Tensor) and name not in NAMED}
    numbers = {name: x for name, x in o.items() if x is not None and not isinstance(x, Tensor)}
    said = {"way": way, "rows": call.rows.handle, "groups": int(call.groups), "others": list(others), "options": numbers}
    return (call.q, call.k, call.v, *(o[name] for name in NAMED[3:]), list(others.values()), json.dumps(said, default=int))


def _call_of(q: Tensor, k: Tensor, v: Tensor, bias: Any, bias2: Any, sink: Any, others: Sequence[Tensor], text: str) -> tuple[Call, Any]:
    said = json.loads(text)
    o = {**said["options"], "bias": bias, "bias2": bias2, "sink": sink, **dict(zip(said["others"], others))}
    o["window"] = tuple(o["window"])
    rows = _rows.of_handle(said["rows"])
    call = prepare(q, k, v, rows, None if rows.ranks == 1 else said["way"], o)
    return call._replace(groups=said["groups"]), _WAYS[said["way"]]


def _forward(*given: Any) -> Any:
    call, ways = _call_of(*given)
    with saying_rank(call.rows):
        return ways[0](call)


def _backward(grad_out: Tensor, grad_lse: Optional[Tensor], out: Tensor, lse: Tensor, need: Sequence[bool], *given: Any) -> Any:
    call, ways = _call_of(*given)
    with saying_rank(call.rows):
        found = ways[1](call, need, grad_out, grad_lse, out, lse)
    return tuple(out.new_empty(0) if grad is None else grad for grad in found)


def _exchange(parts: Sequence[Tensor], rows: str, what: str, to_heads: bool) -> list[Tensor]:
    return exchanged(_rows.of_handle(rows), what, to_heads, parts)


def _from_first(seed: Tensor, rows: str) -> Tensor:
    return _rows.broadcast_first(_rows.of_handle(rows), seed.clone(), "the seed of dropout")


library.impl("context_parallel", _attend, "CompositeImplicitAutograd")
for _device in ("CPU", "CUDA"):
    for _name, _impl in (("rows_forward", _forward), ("rows_backward", _backward), ("exchange", _exchange), ("from_first", _from_first)):
        library.impl(_name, _impl, _device)


# ---- fake implementations, for tracing ----


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    whole = arguments_of(q, k, v, json.loads(more[-1])["options"])
    return _call.new_out(whole, _call.out_layout(whole)), _call.new_lse(whole, _call.lse_shape(whole))


def _fake_backward(grad_out: Tensor, grad_lse: Any, out: Tensor, lse: Tensor, need: Sequence[bool], *given: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) if wanted else out.new_empty(0) for x, wanted in zip(given, need))


def _fake_exchange(parts: Sequence[Tensor], rows: str, what: str, to_heads: bool) -> list[Tensor]:
    plan, found = _rows.of_handle(rows), []
    for group in by_type(parts):
        width = sum(math.prod(parts[n].shape[2 if to_heads else 1 :]) for n in group)
        found.append(parts[group[0]].new_empty((plan.total, width) if to_heads else (plan.ranks, plan.count, width)))
    return found


def _fake_from_first(seed: Tensor, rows: str) -> Tensor:
    return torch.empty_like(seed)


_registry: Any = torch.library
for _name, _impl in (
    ("rows_forward", _fake_forward), ("rows_backward", _fake_backward), ("exchange", _fake_exchange), ("from_first", _fake_from_first),
):  # fmt: skip
    _registry.register_fake(f"{_operators.NAMESPACE}::{_name}", _impl, lib=library)
