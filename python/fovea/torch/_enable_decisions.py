# SPDX-License-Identifier: Apache-2.0
"""Whether fovea computes a kind of call of scaled_dot_product_attention, and how. It is decided for the first call of a kind:
by its shapes, strides, types and options."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor

from .. import _abi
from .._library import lib, text
from . import _ahead, _call, _dtensor, _enable_order, _fastest, _sdpa
from ._enable_state import ASKED_FOR, MOST_KEPT, SLOWER, UNMEASURED, is_one_too_many, note, state

_operator: Any = torch.ops.aten.scaled_dot_product_attention.default
composite: Any = _operator.decompose  # PyTorch's own: to call the operator again would come back here


class Decision(NamedTuple):
    """About a kind of call: how fovea computes it, or why it does not."""

    form: Optional[_sdpa.Form]
    why_not: str = ""
    problems: tuple[str, ...] = ()
    order: Optional[_enable_order.Order] = None  # of the result's dimensions in memory, where it is not fovea's own


def learns_of(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor]) -> tuple[bool, ...]:
    """Which gradients are wanted: of q, k, v and the mask."""
    if not torch.is_grad_enabled():
        return (False,) * 4
    return q.requires_grad, k.requires_grad, v.requires_grad, mask is not None and mask.requires_grad


def known(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], dropout_p: float, is_causal: bool, scale: Optional[float],
    enable_gqa: bool,
) -> Decision:  # fmt: skip
    """The decision about calls of this kind, which is made for the first of them."""
    kind = (
        *(x is not None and (x.shape, x.stride(), x.dtype, x.device) for x in (q, k, v, mask)), dropout_p, is_causal, scale,
        enable_gqa, learns_of(q, k, v, mask), _call.order(),
    )  # fmt: skip
    decisions = state.decisions  # those of other settings have a dictionary of their own
    decision: Optional[Decision] = decisions.get(kind)
    if decision is None:
        decision = decide(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
        _keep(decisions, kind, decision)
    return decision


def known_distributed(
    q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, scale: Optional[float], enable_gqa: bool,
    traced: bool,
) -> Decision:  # fmt: skip
    """The decision about a call on DTensors, which is that of all ranks."""
    if _dtensor.in_pytorchs_ring():
        return Decision(None, "DTensors within PyTorch's context parallelism")
    if not all(x is None or _dtensor.is_one(x) for x in (q, k, v, mask)):
        return Decision(None, "DTensors beside plain tensors")
    kind = (
        "distributed", q._spec, k._spec, v._spec, mask is not None and mask._spec, dropout_p, is_causal, scale, enable_gqa,
        learns_of(q, k, v, mask), _call.order(),
    )  # fmt: skip
    decisions = state.decisions
    decision: Optional[Decision] = None if traced else decisions.get(kind)
    if decision is None:
        decision = _decide_distributed(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
        if not traced:
            _keep(decisions, kind, decision)
    return decision


def _keep(decisions: dict[Any, Any], kind: Any, decision: Decision) -> None:
    if len(decisions) >= MOST_KEPT:
        decisions.clear()
    decisions[kind] = decision
    note(decision.problems)


def _decide_distributed(
    q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, scale: Optional[float], enable_gqa: bool
) -> Decision:
    form = _sdpa.read(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(form, str):
        return Decision(None, form)
    if form.batch is not None:
        return Decision(None, "DTensors of other than four or five dimensions, or whose batches or heads broadcast")
    if dropout_p:
        return Decision(None, "DTensors with dropout, whose masks would be equal or unrelated on the ranks")
    try:
        shapes = _dtensor.local_shapes(_arguments(q, k, v, mask, dropout_p, is_causal, scale))
    except NotImplementedError as error:
        return Decision(None, "DTensors: " + str(error).split("; accepted")[0])
    q_, k_, v_, bias_, _, mask_ = shapes[:6]
    return _decide(q_, k_, v_, mask_ if bias_ is None else bias_, dropout_p, is_causal, scale, enable_gqa, learns_of(q, k, v, mask))


def decide(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], dropout_p: float, is_causal: bool, scale: Optional[float],
    enable_gqa: bool, traced: bool = False,
) -> Decision:  # fmt: skip
    """`traced`: the tensors have no memory."""
    call = (q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
    decision = _decide(*call, learns_of(q, k, v, mask))
    if decision.form is None:
        return decision
    shape = decision.form.shape_of_result(q, v)
    own = _enable_order.own(len(shape), decision.form.has_heads())
    return decision._replace(order=_enable_order.wanted(call, shape, own, composite, traced))


def _decide(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], dropout_p: float, is_causal: bool, scale: Optional[float],
    enable_gqa: bool, learns: tuple[bool, ...],
) -> Decision:  # fmt: skip
    form = _sdpa.read(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(form, str):
        return Decision(None, form)
    why = _why_not_fastest(q, k, v, mask, dropout_p, is_causal, any(learns), learns[3])
    if why:
        return Decision(None, why)
    with torch.no_grad():
        given = form.inputs(q, k, v, mask)
    q_, k_, v_, mask_ = (_ahead.of(x) for x in given)
    return _planned(form, _arguments(q_, k_, v_, mask_, dropout_p, is_causal, scale), learns)


def _why_not_fastest(*call: Any) -> str:
    """Whether `prefer` leaves a call to PyTorch: the arguments are those of _fastest.slower()."""
    settings = state.settings
    if settings is None or settings.prefer != "fastest":
        return ""
    slower = _fastest.slower(*call)
    return "" if slower is False else SLOWER if slower else UNMEASURED


def _planned(form: Optional[_sdpa.Form], a: Any, learns: tuple[bool, ...]) -> Decision:
    """The decision for these arguments, whose tensors are shapes. A backward that the library refused after its forward would
    be too late."""
    try:
        return Decision(form, "", _plan(a, learns))
    except (NotImplementedError, ValueError) as error:  # ValueError: a scale that is too large for fp32
        return Decision(None, str(error).splitlines()[0])


def _plan(a: Any, learns: tuple[bool, ...]) -> tuple[str, ...]:
    """The one-line forms of the forward and of the backward that may follow. Raises an error if the library refuses one of
    them."""
    lines = []
    for direction in (_abi.FORWARD, _abi.BACKWARD) if any(learns) else (_abi.FORWARD,):
        problem = _ahead.problem_of(a, direction, learns)
        needed = ctypes.c_size_t()
        status = int(lib.fovea_workspace(problem._pointer, direction, ctypes.byref(needed)))
        if status != _abi.OK and not (status == _abi.UNSUPPORTED and a.deterministic == _call.DETERMINISTIC_OR_WARN):
            problem._refuse(status)
        lines.append(text(lib.fovea_describe, problem._pointer, direction))
    return tuple(lines)


def _arguments(q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, scale: Optional[float]) -> Any:
    """Those of the operator."""
    bias = None
    if mask is not None and mask.dtype is not torch.bool:
        mask, bias = None, mask
    number = float(scale) if isinstance(scale, float) else None
    tensors = [q, k, v, bias, None, mask, *[None] * (_call.TENSORS - 6)]
    rest = [0, 0, number, is_causal, -1, -1, "top_left", 0.0, float(dropout_p), "fovea", 0, 0, 0, "bhsd", _call.order(), None]
    return _call.Arguments._make([*tensors, *rest])


def known_jagged(query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool, scale: Any) -> Decision:
    """The decision about such tensors, by their rows: (H, all sequences' lengths together, D)."""
    q, k, v = query._values, key._values, value._values
    learns = learns_of(query, key, value, None)
    longest = query._get_max_seqlen(), key._get_max_seqlen()  # nested tensors keep them
    kind = (
        "jagged", query.shape[0], *((x.shape, x.stride()) for x in (q, k, v)), longest, q.dtype, q.device, dropout_p, is_causal,
        scale, learns, _call.order(),
    )  # fmt: skip
    decisions = state.decisions
    decision: Optional[Decision] = decisions.get(kind)
    if decision is None:
        decision = _decide_jagged(query, key, value, longest, dropout_p, is_causal, scale, learns)
        _keep(decisions, kind, decision)
    return decision


def _decide_jagged(
    query: Any, key: Any, value: Any, longest: tuple[int, int], dropout_p: float, is_causal: bool, scale: Any, learns: tuple[bool, ...]
) -> Decision:
    rows = [x._values for x in (query, key, value)]
    batch = query.shape[0]
    about = [_ahead.Shape(x, (batch, x.shape[0], max(1, x.shape[1] // batch), x.shape[2]), ()) for x in rows]
    why = _why_not_fastest(*about, None, dropout_p, is_causal, any(learns), False, True)
    if why:
        return Decision(None, why)
    q, k, v = (_ahead.of(x.transpose(0, 1)) for x in rows)
    a = _arguments(q, k, v, None, dropout_p, is_causal, scale)._replace(
        cu_seqlens_q=_ahead.of(query.offsets()), cu_seqlens_k=_ahead.of(key.offsets()),
        max_seqlen_q=longest[0], max_seqlen_k=longest[1],
    )  # fmt: skip
    return _planned(None, a, learns)


def for_c(*call: Any) -> Union[bool, int, str, None]:
    """The decision about a kind of call as C needs it: True if it is computed as it is, or the number of the order in which the result
    lies; the reason if PyTorch computes it; None if fovea is not enabled for it; False if Python has to look each time: tensors have to
    be reshaped, `strict` raises, or there are too many reasons."""
    settings = state.settings
    if settings is None or call[0].device.type not in settings.devices:
        return None
    decision = known(*call)
    why = decision.why_not
    if why and settings.strict and why not in ASKED_FOR:
        return False
    if why and is_one_too_many(why):
        return False
    if why or decision.form is None or decision.form.batch is not None:
        return why or False
    return True if decision.order is None else _enable_order.as_number(decision.order)
