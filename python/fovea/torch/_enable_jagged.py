# SPDX-License-Identifier: Apache-2.0
"""Nested tensors of layout torch.jagged: they reach no operator, so enable() puts this in the place of PyTorch's function for them."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from . import _ahead, _sdpa
from ._attention import _autocast, attention
from ._enable_decisions import known_jagged
from ._enable_kernel import TRACED, by_pytorch, why_not_now
from ._enable_state import Counted, count_handed_back, count_served, hand_back, refusal, state

_COMPILED = "nested tensors in compiled code"


def _count_compiled() -> None:
    count_handed_back(_COMPILED)


# As torch.compiler.assume_constant_result() does, which imports torch._dynamo: where Dynamo would trace it, and put guards on the
# counts, it calls it.
_count_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def in_the_place_of(theirs: Any) -> Any:
    """For nested tensors of layout torch.jagged, which reach no operator. `theirs` is PyTorch's function, which is kept here
    because a program may keep this one for longer than it is in force."""

    def jagged_scaled_dot_product_attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: Optional[float] = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        settings = state.settings
        in_force = state.jagged is jagged_scaled_dot_product_attention
        if settings is None or not in_force or query.device.type not in settings.devices:
            return theirs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if _ahead.is_traced() or any(type(getattr(x, "_values", None)) in TRACED for x in (query, key, value)):
            _count_compiled()
            if settings.strict:
                raise RuntimeError(refusal(_COMPILED))
            return theirs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        why = why_not_now() or _why_not_jagged(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if not why:
            if torch.is_autocast_enabled(query.device.type):
                query, key, value = _autocast(query, key, value)
            why = known_jagged(query, key, value, dropout_p, is_causal, scale).why_not
        if why:
            try:
                hand_back(why, query.device)
            except NotImplementedError as error:
                # NestedTensor would take that for a function that it has not got, and call the next one.
                raise RuntimeError(*error.args) from None
            with by_pytorch(why):
                return theirs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        with Counted(count_served):
            return attention(query, key, value, dropout_p=dropout_p, causal=is_causal, align="top_left", scale=scale)

    return jagged_scaled_dot_product_attention


def _why_not_jagged(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, is_causal: bool, scale: Any, enable_gqa: bool
) -> str:
    all_three = (query, key, value)
    if not all(isinstance(x, Tensor) and x.is_nested and x.layout is torch.jagged for x in all_three):
        return _sdpa.MALFORMED
    if attn_mask is not None:
        return "nested tensors with a mask"
    q, k, v = rows = [x._values for x in all_three]  # an attribute of a nested tensor takes microseconds, of these it does not
    if any(x._ragged_idx != 2 for x in all_three) or any(x.dim() != 3 for x in rows):
        return "nested tensors that are not of (B, H, j, D)"
    if any(x.lengths() is not None for x in all_three):
        return "nested tensors with gaps"
    if q.dtype not in _sdpa.FLOATS or any(x.dtype != q.dtype or x.device != q.device for x in rows):
        return _sdpa.MALFORMED
    if q.dtype == torch.float64 and q.device.type != "cpu":
        return "float64 on a GPU"
    ends = query.offsets().shape  # one more than the sequences
    if key.offsets().shape != ends or value.offsets().shape != ends or q.shape[2] != k.shape[2]:
        return _sdpa.MALFORMED
    if any(x.numel() == 0 for x in rows):
        return "empty tensors"
    if value.offsets() is not key.offsets():
        return "nested keys and values with offsets of their own"
    if q.shape[0] != k.shape[0] and not (enable_gqa and q.shape[0] % k.shape[0] == 0):
        return _sdpa.MALFORMED
    if k.shape[0] != v.shape[0]:
        return "keys and values with different numbers of heads"
    return _sdpa.why_not_numbers(dropout_p, scale) or ""


def nested_module() -> Any:
    """Where NestedTensor finds its attention; None if this version of PyTorch has it elsewhere."""
    try:
        from torch.nested._internal import ops
    except ImportError:
        return None
    module: Any = ops
    return module if hasattr(module, "jagged_scaled_dot_product_attention") else None

