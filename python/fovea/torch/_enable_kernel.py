# SPDX-License-Identifier: Apache-2.0
"""The kernel that enable() registers: fovea's in the place of PyTorch's composite scaled_dot_product_attention. src/python/fast.c does the
same for ordinary calls, and comes here with all others."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Optional

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend

from . import _ahead, _dtensor, _enable_order, _fastest
from ._attention import attention
from ._enable_decisions import composite, decide, known, known_distributed
from ._enable_state import ASKED_FOR, MATH, MOST_KEPT, SLOWER, Counted, count_served, count_traced, hand_back, note, state
from .aten import _owners
from .aten._register import OPERATORS

_transforms = torch._C._are_functorch_transforms_active
_order = torch._C._get_sdp_priority_order
_allowed = {
    SDPBackend.MATH.value: torch._C._get_math_sdp_enabled,
    SDPBackend.FLASH_ATTENTION.value: torch._C._get_flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION.value: torch._C._get_mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION.value: torch._C._get_cudnn_sdp_enabled,
}

_EAGER = (Tensor, torch.nn.Parameter)
TRACED = (FakeTensor, FunctionalTensor)


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Any:
    settings = state.settings
    if settings is None or query.device.type not in settings.devices:  # another thread's call, which began before a switch
        return composite(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    traced = distributed = False
    why = ""
    tensor: Any
    for tensor in (query, key, value, attn_mask):
        kind = type(tensor)
        if kind not in _EAGER and tensor is not None:
            if _dtensor.is_one(tensor):
                distributed = True
                kind = type(tensor._local_tensor)
                if kind in _EAGER:
                    continue
            traced = True
            if kind not in TRACED:
                why = f"a tensor of the type {kind.__name__}"
        if tensor is not None and not why:
            why = _why_not_dense(tensor)
    if not why:
        why = why_not_now()
    if not why:
        if distributed:
            decision = known_distributed(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, traced)
        elif traced:
            decision = decide(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, traced=True)
        else:
            decision = known(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        why = decision.why_not
        if traced and all(x is None or _ahead.has_known_sizes(x) for x in (query, key, value, attn_mask)):
            note(decision.problems)
    if why:
        return give_back(why, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, 4)
    form: Any = decision.form
    q, k, v, mask = form.inputs(query, key, value, attn_mask)
    bias = None
    if mask is not None and mask.dtype is not torch.bool:
        mask, bias = None, mask
    with Counted(count_traced if traced else count_served):
        out = attention(q, k, v, bias=bias, mask=mask, dropout_p=dropout_p, causal=is_causal, align="top_left", scale=scale)
    out = form.result(out)
    return out if decision.order is None else _enable_order.put_in(out, decision.order)


def give_back(
    why: str, q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], dropout_p: float, is_causal: bool,
    scale: Optional[float], enable_gqa: bool, level: int = 3,
) -> Any:  # fmt: skip
    """PyTorch's result. C, which has no frame, calls this for the first call of a kind. level: as hand_back() has it."""
    hand_back(why, q.device, level=level)
    with by_pytorch(why):
        return composite(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def by_pytorch(why: str) -> AbstractContextManager[None]:
    """For what PyTorch computes because it was asked to: the operators that it calls are PyTorch's as well."""
    return _owners.left_to_pytorch() if why in ASKED_FOR and _owners.in_force() else contextlib.nullcontext()


def _why_not_dense(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    return "a tensor of zeros without memory" if tensor._is_zerotensor() else ""


def why_not_now() -> str:
    """What stands against every call at this moment."""
    if _transforms():
        # An autograd.Function cannot be called where a transform's interpreter is at work already.
        return "a transform of torch.func"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    return MATH if _math_comes_first() else ""


def _math_comes_first() -> bool:
    """Whether the math path is the first that is allowed, in the order in which PyTorch tries its backends, or none is."""
    first = next((backend for backend in _order() if backend in _allowed and _allowed[backend]()), SDPBackend.MATH.value)
    return bool(first == SDPBackend.MATH.value)


# ---- the operators below it ----

OWNER = "enable(operators=True)"
_slower: dict[Any, bool] = {}


def why_not_operator(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Of a dense call on a GPU: whether PyTorch's kernel is faster."""
    settings = state.settings
    if settings is None or settings.prefer is None or not args[0].is_cuda:
        return ""
    given = OPERATORS[name].bind(args, kwargs)
    if given.get("cum_seq_q") is not None or given.get("cu_seqlens_q") is not None:
        return ""
    q, k, v = given["query"], given["key"], given["value"]
    if not name.startswith(("_scaled", "_cudnn")):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    bias = given.get("attn_bias", given.get("bias"))
    learned = given.get("bias_requires_grad", given.get("grad_input_mask", (False,) * 4)[3])
    backward = name.endswith("backward") or any(x.requires_grad for x in (q, k, v))
    causal = bool(given.get("is_causal", given.get("custom_mask_type")))
    kind = (q.shape, k.shape, v.shape, q.dtype, q.device, None if bias is None else bias.shape, given["dropout_p"] > 0,
            causal, backward, learned)  # fmt: skip
    slower = _slower.get(kind)
    if slower is None:
        if len(_slower) >= MOST_KEPT:
            _slower.clear()
        found = _fastest.slower(q, k, v, bias, given["dropout_p"], causal, backward, bool(learned))
        slower = _slower[kind] = found is not False
    return SLOWER if slower else ""
