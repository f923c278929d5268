# SPDX-License-Identifier: Apache-2.0
"""context_parallel with move="keys": each rank keeps its rows of q and fetches the keys and values that they see, some heads at a time.

The call for a piece of its rows is an ordinary one with the piece's position and the keys up to the end that the piece sees. The
gradients are formed by the same calls. Those of the keys are summed over pieces and ranks in fp32; under a window of few rows each rank
forms those of its own keys (_parallel_edges.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, Optional

import torch
from torch import Tensor

from . import _call, _parallel_edges, _rows
from ._parallel_call import Call, arguments_of, draw_seed, has_queries, saying_rank
from ._parallel_copies import clear
from ._parallel_fetch import Add, Moving, start_return
from ._parallel_parts import NAMED, Group, Part, parts_of, shapes_of, split, width


def by_keys(call: Call) -> tuple[Tensor, Tensor]:
    call = call._replace(options={**call.options, "seed": draw_seed(call)})
    return differentiable(call, "keys", keys_forward, keys_backward)


def differentiable(call: Call, way: str, forward: Any, backward: Any) -> tuple[Tensor, Tensor]:
    """out and lse, by the two functions that compute a call and its gradients."""
    o = call.options
    if call.through is not None:
        forward, backward = call.through.ways(way)
    out, lse = _Moved.apply(call, forward, backward, call.q, call.k, call.v, o["bias"], o["bias2"], o["sink"])
    return out, lse


def _with_tensors(call: Call, tensors: Any, others: dict[str, Optional[Tensor]]) -> Call:
    """The call with other tensors in place of those that have gradients, and some in place of others."""
    named = dict(zip(NAMED[3:], tensors[3:]))
    return call._replace(q=tensors[0], k=tensors[1], v=tensors[2], options={**call.options, **named, **others})


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, forward: Any, backward: Any, *tensors: Any) -> Any:
        others = {name: x for name, x in call.options.items() if isinstance(x, Tensor) and name not in NAMED}
        kept: list[Tensor] = []
        out, lse = forward(_with_tensors(call._replace(kept=kept), tensors, {}))
        ctx.set_materialize_grads(False)
        # All of the call's tensors, so that PyTorch refuses a backward after one of them was changed in place.
        ctx.save_for_backward(*tensors, out, lse, *others.values(), *kept)
        ctx.others = list(others)
        ctx.call = _with_tensors(call, (None,) * len(NAMED), dict.fromkeys(others))
        ctx.gradients = backward
        return out, lse

    @staticmethod
    @_rows.first_derivatives
    def backward(ctx: Any, grad_out: Optional[Tensor], grad_lse: Optional[Tensor]) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        tensors, (out, lse), others = saved[: len(NAMED)], saved[len(NAMED) :][:2], saved[len(NAMED) + 2 :]
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        kept = list(others[len(ctx.others) :])
        call = _with_tensors(ctx.call._replace(kept=kept), tensors, dict(zip(ctx.others, others)))
        with saying_rank(call.rows):
            return (None, None, None, *ctx.gradients(call, ctx.needs_input_grad[3:], grad_out, grad_lse, out, lse))


def _groups_ahead(call: Call) -> Generator[Group]:
    """The groups of heads. The next one's keys are on their way while one is computed, but only when this one's are there and in order:
    so there are never more than two groups' keys and values."""
    group = following = Group(call, 0).start()
    try:
        for number in range(1, call.groups + 1):
            if group.plan.edge is None:
                group.end()
            following = Group(call, number).start() if number < call.groups else group
            yield group
            group.end()
            group.fetched = []
            group = following
    finally:  # after an error, too: what is on its way would meet the group's next calls
        group.end()
        following.end()


def keys_forward(call: Call) -> tuple[Tensor, Tensor]:
    packed = {"cu_seqlens_q": call.q} if call.rows.kind == "packed" else {}
    whole = arguments_of(call.q, call.k, call.v, call.options, **packed)
    out = _call.new_out(whole, _call.out_layout(whole))
    lse = _call.new_lse(whole, _call.lse_shape(whole))
    parts = parts_of(call)
    with contextlib.closing(_groups_ahead(call)) as groups:
        for group in groups:
            for part in parts:
                _call.compute(group.arguments(part), with_lse=True, into=(group.of_queries_alone(out, part), group.of_lse(lse, part)))
    return out, lse


def keys_backward(
    call: Call, need: Any, grad_out: Tensor, grad_lse: Optional[Tensor], out: Tensor, lse: Tensor
) -> list[Optional[Tensor]]:
    o, rows = call.options, call.rows
    wants = dict(zip(NAMED, need))
    grads: dict[str, Tensor] = {}
    on_cpu = call.q.device.type == "cpu"
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if wants[name]:  # kernels of a GPU write where the columns of a row are adjacent
            adjacent = x.stride(-1) == 1 or on_cpu
            grads[name] = torch.empty_like(x, memory_format=torch.preserve_format if adjacent else torch.contiguous_format)
    # Of biases and the sink: what parts write each once, and what is summed over them.
    summed: dict[str, Tensor] = {}
    planes: list[str] = []
    for name in NAMED[3:]:
        if wants[name]:
            if name != "sink" and has_queries(o[name]) and rows.kind != "packed":
                grads[name] = torch.zeros_like(o[name]) if on_cpu else torch.empty_like(o[name])
                planes.append(name)
            else:
                summed[name] = torch.zeros_like(o[name], dtype=_rows.wide(o[name].dtype))

    def results() -> list[Optional[Tensor]]:
        return [grads[name] if name in grads else summed[name].to(o[name].dtype) if name in summed else None for name in NAMED]

    if call.forms_own(wants):

        def add_sink(group: Group, grad: Tensor) -> None:
            group.of_heads(summed["sink"]).add_(grad)

        with contextlib.closing(_groups_ahead(call)) as groups:
            _parallel_edges.gradients(call, need, groups, grads, grad_out, grad_lse, out, lse, add_sink)
        return results()

    def add(group: Group, part: Part, of_keys: list[Tensor], is_first: bool) -> None:
        """A part's gradients. Those of keys are written by the first part, to which the others add."""
        sums = {name: x for name, x in zip("kv", group.of_part(of_keys, part)) if wants[name]} if of_keys else {}
        into = {name: group.plane(grads[name], part) for name in planes}
        for name in () if on_cpu else planes:
            for rest in group.other_keys(grads[name], part):
                clear(rest)
        if wants["q"]:
            into["q"] = group.of_queries_alone(grads["q"], part)
        if is_first:
            into, sums = {**into, **sums}, {}
        of_rows = group.of_rows(part, grad_out, grad_lse, out, lse)
        found = _call.backward(*of_rows, list(need), *group.arguments(part), into=into, sums=sums)
        for name, grad in zip([name for name in NAMED if wants[name]], found):
            if name == "sink":
                group.of_heads(summed[name]).add_(grad)
            elif name in summed:
                group.add_plane(summed[name], part, grad)

    def end(group: Group, pending: Moving, own: list[Tensor]) -> None:
        for first, rows in pending.wait():
            for name, grad in zip("kv", group.split(rows)):
                if wants[name]:
                    group.of_keys(grads[name]).narrow(call.rows_dim, first, rows.shape[0]).copy_(grad)
        for name, grad in zip("kv", own):
            if wants[name]:
                group.of_keys(grads[name]).copy_(grad)

    def adding(group: Group, own: list[Tensor]) -> Optional[Add]:
        def add_rows(first: int, part: Tensor) -> None:
            for total, grad in zip(own, group.split(part)):
                total.narrow(call.rows_dim, first, part.shape[0]).add_(grad)

        return add_rows if own else None

    # The part with the most keys first: it writes the gradients of all keys that this rank has.
    parts = sorted(parts_of(call), key=lambda part: -part.keys.end)
    before: list[tuple[Group, Moving, list[Tensor]]] = []  # at most one: no more than two groups' sums
    # A broadcast over heads is summed over groups, too; _groups() avoids that where it would cost bits.
    with contextlib.closing(_groups_ahead(call)) as groups:
        try:
            for group in groups:
                if not (wants["k"] or wants["v"]):
                    for part in parts:
                        add(group, part, [], False)
                    continue
                span, at_edge = group.plan.mine, group.plan.edge is not None
                written = bool(parts) and (at_edge or rows.kind == "packed" or parts[0].keys.end == span.end)
                make = torch.empty if written else torch.zeros
                total = make(span.rows, width(group.shapes), dtype=_rows.wide(call.q.dtype), device=call.q.device)
                own = [torch.empty_like(group.of_keys(x), dtype=total.dtype) for x in (call.k, call.v) if at_edge]
                for part in parts:
                    if not part.own:
                        add(group, part, group.split(total), at_edge or (written and part is parts[0]))
                while before:
                    end(*before.pop())
                before.append((group, start_return(group.plan, total, "the gradients of keys and values", adding(group, own)), own))
                for part in parts:  # whose keys nobody else fetched: these are computed while the others' gradients move
                    if part.own:
                        add(group, part, own, True)
                del total, own
        finally:  # after an error, too, as in _groups_ahead()
            while before:
                end(*before.pop())
    return results()
