# SPDX-License-Identifier: Apache-2.0
"""Calls of plain tensors in eager mode: from _attention.py straight to _call.py, and back from autograd's engine.

A call may come here if survey() finds plain tensors and is_watched() finds nothing that has to see an operator. All others
go through the dispatcher (_operators.py), because taking thirty arguments through it costs as much as all the rest of a call.
_fast.py has the same in C.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _ahead, _call, _operators
from ._call import DIFFERENTIABLE, DIFFERENTIABLE_AT, TENSORS

_SIX = operator.itemgetter(*DIFFERENTIABLE_AT)


# ---- which calls ----

_PLAIN = (Tensor, torch.nn.Parameter)
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_profiler = torch._C._autograd._profiler_enabled
_tracing = torch._C._get_tracing_state
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # by is_grads_batched=True, which is not torch.func's vmap


def _has_no_memory(tensor: Tensor) -> bool:
    return tensor._is_zerotensor() or _is_batched(tensor)


def survey(tensors: Iterable[Optional[Tensor]]) -> tuple[bool, bool]:
    """Whether all are dense tensors of PyTorch's own type without a pending negation; and, if so, whether one of them
    requires a gradient."""
    strided = torch.strided
    learns = False
    for tensor in tensors:
        if tensor is not None:
            if type(tensor) not in _PLAIN or tensor.layout is not strided or tensor.is_neg() or tensor.is_nested:
                return False, False
            if tensor.requires_grad:
                learns = True
    return True, learns


def is_watched() -> bool:
    """Whether a mode, a transform, the profiler or tracing needs to see the operator."""
    return (
        _modes() > 0 or _transforms() or _profiler() or forward_ad._current_level >= 0 or _tracing() is not None
    )


# ---- autograd ----


def direct_attention(arguments: tuple[Any, ...], return_lse: bool) -> Any:
    """out, or out and lse. Each further result or argument would cost the host a microsecond."""
    # Without bias, bias2 and sink.
    if arguments[3] is None and arguments[4] is None and arguments[7] is None:
        return DirectAttention.apply((arguments, return_lse), *arguments[:3])
    return DirectAttention.apply((arguments, return_lse), *_SIX(arguments))


class DirectAttention(torch.autograd.Function):
    """_operators.Attention without the dispatcher and without setup_context, for which PyTorch 2.9 inspects signatures in each
    call. apply() inspects each of its arguments several times. So it gets all arguments of the operator as one tuple, which forward()
    reads, and the differentiable tensors once more, which autograd needs to see."""

    @staticmethod
    def forward(ctx: Any, given: tuple[tuple[Any, ...], bool], *_: Optional[Tensor]) -> Any:
        arguments, return_lse = given
        out, lse = _call.compute(arguments, with_lse=True, first=_ahead.begin_backward)
        ctx.set_materialize_grads(False)
        last = TENSORS
        while arguments[last - 1] is None:
            last -= 1
        ctx.save_for_backward(*arguments[:last], out, lse)
        ctx.rest = arguments[last:]
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, grad_out: Optional[Tensor], grad_lse: Optional[Tensor] = None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        return (None, *direct_gradients(ctx.needs_input_grad[1:], grad_out, grad_lse, out, lse, (*tensors, *ctx.rest)))

    jvp = _operators.Attention.jvp


def packed_attention(arguments: tuple[Any, ...], return_lse: bool, qkv: Tensor, dim: int) -> Any:
    """direct_attention() for q, k and v that qkv.unbind(dim) has made."""
    return PackedAttention.apply((arguments, return_lse, dim), qkv, *_SIX(arguments)[3:])


class PackedAttention(torch.autograd.Function):
    """DirectAttention for q, k and v that are views of one tensor, whose gradient is one tensor, too: with three, PyTorch would
    copy them together."""

    @staticmethod
    def forward(ctx: Any, given: tuple[tuple[Any, ...], bool, int], qkv: Tensor, *_: Optional[Tensor]) -> Any:
        arguments, return_lse, dim = given
        out, lse = _call.compute(arguments, with_lse=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(qkv, *arguments[3:TENSORS], out, lse)
        ctx.rest = arguments[TENSORS:]
        ctx.dim = dim
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, grad_out: Optional[Tensor], grad_lse: Optional[Tensor] = None) -> tuple[Any, ...]:
        qkv, *tensors, out, lse = ctx.saved_tensors
        packed = torch.empty_like(qkv)
        into = dict(zip("qkv", packed.unbind(ctx.dim)))
        if into["q"].stride(-1) != 1 and packed.device.type != "cpu":
            into = {}
        need = (True, True, True, *ctx.needs_input_grad[2:])
        arguments = (*qkv.unbind(ctx.dim), *tensors, *ctx.rest)
        grads = direct_gradients(need, grad_out, grad_lse, out, lse, arguments, into)
        if grads[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        if not into or grads[0] is not into["q"]:
            packed = torch.stack(list(grads[:3]), ctx.dim)  # type: ignore[arg-type]
        return (None, packed if ctx.needs_input_grad[1] else None, *grads[3:])

    jvp = _operators.Attention.jvp


def direct_gradients(
    need: Sequence[bool], grad_out: Optional[Tensor], grad_lse: Optional[Tensor], out: Tensor, lse: Tensor,
    arguments: tuple[Any, ...], into: Optional[dict[str, Tensor]] = None,
) -> Sequence[Optional[Tensor]]:  # fmt: skip
    """The gradients of the first of DIFFERENTIABLE, for which `need` is given; None where it is false. Those of
    `into` are written there, unless something watches."""
    if grad_out is None and grad_lse is None:
        return (None,) * len(need)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    all_six = [*need, *[False] * (len(DIFFERENTIABLE) - len(need))]
    if torch.compiler.is_compiling():  # compiled autograd: Dynamo traces this function, and cannot trace what the next lines ask
        six = _operators.attention_backward(grad_out, grad_lse, out, lse, all_six, *arguments)
        return [grad if wanted else None for grad, wanted in zip(six, need)]
    if (
        torch.is_grad_enabled() or is_watched() or not survey((grad_out, grad_lse))[0] or _has_no_memory(grad_out)
        or (grad_lse is not None and _has_no_memory(grad_lse))
    ):  # fmt: skip
        six = _operators.through_dispatcher(grad_out, grad_lse, out, lse, all_six, *arguments)
        return [grad if wanted else None for grad, wanted in zip(six, need)]
    found = _call.backward(grad_out, grad_lse, out, lse, need, *arguments, into=into)
    if len(found) == len(need):
        return found
    each = iter(found)
    return [next(each) if wanted else None for wanted in need]
