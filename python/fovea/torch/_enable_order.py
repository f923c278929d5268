# SPDX-License-Identifier: Apache-2.0
"""In which order PyTorch's scaled_dot_product_attention would have stored the dimensions of its result.

Programs that were written for PyTorch's kernel may call .view() of its result, which needs that order. FlashAttention and cuDNN keep
the order that the dimensions have in q, the memory-efficient kernel has the heads of a row adjacent, as fovea has, and the math path the
order of the shape. Which of them PyTorch would take, it says itself.

Private names of PyTorch that this file uses: torch._fused_sdp_choice, torch._C._get_math_sdp_enabled, _get_flash_sdp_enabled and _get_cudnn_sdp_enabled,
torch.utils._python_dispatch._disable_current_modes. Where one is missing, results have the heads of a row adjacent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from . import _ahead

Order = tuple[int, ...]
"""The dimensions but the last one, the outermost in memory first. The last one's elements are adjacent."""

_KEEPS_Q = (SDPBackend.FLASH_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value)


def own(rank: int, has_heads: bool) -> Order:
    """That of fovea's results: (..., rows, heads) of (..., heads, rows, columns)."""
    return (*range(rank - 3), rank - 2, rank - 3) if has_heads else tuple(range(rank - 1))


def of_strides(shape: Sequence[Any], strides: Sequence[Any]) -> Order:
    """That of torch.empty_like, as PyTorch's kernels make their results."""
    sizes, steps = (tuple(_ahead.hint(n) for n in numbers) for numbers in (shape, strides))
    if 0 in steps:  # an expanded dimension, whose place is PyTorch's choice
        with _without_modes():
            steps = torch.empty_like(torch.empty_strided(sizes, steps, device="meta")).stride()
    return tuple(sorted(range(len(steps) - 1), key=lambda at: -steps[at]))


def same(one: Order, other: Order, shape: Sequence[Any]) -> bool:
    """Dimensions of one element lie anywhere."""
    left, right = ([at for at in order if _ahead.hint(shape[at]) != 1] for order in (one, other))
    return left == right


def wanted(call: Sequence[Any], shape: Sequence[Any], own: Order, composite: Callable[..., Tensor], traced: bool) -> Optional[Order]:
    """None if fovea's own order is PyTorch's, too. `call`: the operator's eight arguments. `shape`: the result's. `composite`:
    PyTorch's kernel, which computes without memory if the call is traced."""
    if len(shape) < 3:
        return None
    if traced and not all(_ahead.has_known_sizes(x) for x in call[:4] if x is not None):
        return None
    try:
        order = _of_traced(call, composite) if traced else _of(call, len(shape), composite)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # PyTorch refuses it, or has no such function
        return None
    return None if order is None or len(order) != len(own) or same(order, own, shape) else order


def _without_modes() -> Any:
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def _of(call: Sequence[Any], rank: int, composite: Callable[..., Tensor]) -> Optional[Order]:
    q, k, v, mask, dropout_p, is_causal, scale, enable_gqa = call
    if not torch._C._get_math_sdp_enabled():  # it would warn if it finds none
        keeping = torch._C._get_flash_sdp_enabled() or torch._C._get_cudnn_sdp_enabled()
        choice = _KEEPS_Q[0] if keeping else SDPBackend.EFFICIENT_ATTENTION.value
    else:

        def choose(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor]) -> int:
            return torch._fused_sdp_choice(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

        with _without_modes():
            choice = choose(q, k, v, mask)
            if rank == 3 and choice != SDPBackend.MATH.value:  # from 2.15 on it adds a dimension, and chooses again
                choice = choose(*(x[None] if x is not None and x.dim() == 3 else x for x in (q, k, v, mask)))
    if choice == SDPBackend.MATH.value:
        return tuple(range(rank - 1))
    keeps = choice in _KEEPS_Q and (q.device.type != "cpu" or _cpu_keeps_q(composite))
    return of_strides(q.shape, q.stride()) if keeps else None


@functools.lru_cache(None)
def _cpu_keeps_q(composite: Callable[..., Tensor]) -> bool:
    """As PyTorch does from 2.15 on."""
    with torch.no_grad():
        q = torch.zeros(1, 2, 2, 8, device="cpu")
        return composite(q, q, q).is_contiguous()


def _of_traced(call: Sequence[Any], composite: Callable[..., Tensor]) -> Order:
    def fake(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        sizes, strides = ([_ahead.hint(n) for n in numbers] for numbers in (x.shape, x.stride()))
        return torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)

    q, k, v, mask, dropout_p, is_causal, scale, enable_gqa = call
    with _without_modes(), FakeTensorMode():
        out = composite(*map(fake, (q, k, v, mask)), dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return of_strides(out.shape, out.stride())


def put_in(out: Tensor, order: Order) -> Tensor:
    """`out`, whose dimensions lie otherwise, in this order. A copy."""
    dims = (*order, out.dim() - 1)
    back = [dims.index(at) for at in range(out.dim())]
    return out.permute(dims).contiguous().permute(back)


def as_number(order: Order) -> int:
    """For C: an octal digit for each, behind a 1."""
    return int("1" + "".join(map(str, order)), 8)
