# SPDX-License-Identifier: Apache-2.0
"""What the three versions of flash_attn share: (B, S, H, D), causal masks and windows at the bottom right, and forward
and backward as functions of their own, which packages for several GPUs call."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NoReturn, Optional, Union

import torch
from torch import Tensor

from .._problem import shape_text
from ..torch import _call
from ..torch import _operators as _torch_operators
from ..torch._ahead import is_traced
from ..torch import attention, attention_qkv
from . import _counts

Window = tuple[Optional[int], Optional[int]]

LOOKS_ONCE = "xformers.ops"  # it takes whatever it can import as flash_attn for the compiled package
NAMES = {"scale": "softmax_scale", "window": "window_size", "sink": "learnable_sink"}  # of fovea's arguments
NAMES_OF_A_CACHE = {**NAMES, "k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens"}

_operators: Any = _torch_operators.operators


def refuse(function: str, argument: str, why: str, accepted: str) -> NoReturn:
    raise NotImplementedError(f"{function}: {argument}: {why}; accepted: {accepted}")


def refuse_given(function: str, **given: Any) -> None:
    """Raises NotImplementedError for the first argument that is not None."""
    for name, value in given.items():
        if value is not None:
            refuse(function, name, "given, and fovea has no such feature", "None")


def refuse_chunk(function: str, attention_chunk: int) -> None:
    if attention_chunk != 0:
        refuse(function, "attention_chunk", f"{attention_chunk}, and fovea has no such mask", "0")


def pair(window: Window) -> Window:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window_size: {window!r}; accepted: (left, right)")
    return window


def unbounded(window: Window) -> tuple[int, int]:
    """A window as fovea has it: None and every negative number become -1."""
    left, right = pair(window)
    return _side(left), _side(right)


def _side(side: Optional[int]) -> int:
    return -1 if side is None or side < 0 else int(side)


def number(length: Union[int, Tensor, None]) -> Optional[int]:
    """A longest length, which programs also give as a tensor of one element."""
    return int(length) if isinstance(length, Tensor) else length


def each_head(values: Optional[Tensor], q: Tensor) -> Optional[Tensor]:
    """Slopes or sinks in the type that fovea takes, and without a gradient: flash_attn's slopes have none either."""
    if values is None:
        return None
    return values.detach().to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def mapped(
    q: Tensor, *, softmax_scale: Optional[float], causal: bool, window_size: Window, softcap: Optional[float], return_lse: bool,
    alibi_slopes: Optional[Tensor] = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """fovea's options of the names and conventions that all versions share."""
    return {
        "scale": softmax_scale, "causal": bool(causal), "window": unbounded(window_size), "align": "bottom_right",
        "softcap": max(softcap or 0.0, 0.0), "alibi_slopes": each_head(alibi_slopes, q), "layout": "bshd",
        "return_lse": return_lse, **options,
    }  # fmt: skip


def compute(integration: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return _counts.call(integration, attention, q, k, v, names=NAMES, **mapped(q, **options))


def compute_qkv(integration: str, qkv: Tensor, **options: Any) -> Any:
    """(..., 3, H, D): its gradient is written as one tensor."""
    return _counts.call(integration, attention_qkv, qkv, -3, names=NAMES, **mapped(qkv, **options))


def new_seed(q: Tensor) -> Any:
    """One random number of the device's generator."""
    return _operators.seed([q])


def append(cache: Tensor, new: Tensor, lengths: Tensor, rows: Optional[Tensor]) -> None:
    """Writes `new`, (B, n, H, D), into the cache, behind the first lengths[b] keys of each sequence."""
    steps = torch.arange(new.shape[1], device=new.device)
    sequences = torch.arange(new.shape[0], device=new.device) if rows is None else rows.long()
    cache[sequences[:, None], lengths.long()[:, None] + steps] = new.to(cache.dtype)


def _need_to_fit(
    function: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Any, rows: Optional[Tensor]
) -> None:
    """Before anything is written: what PyTorch would broadcast or write a part of, and what the call would refuse behind it."""

    def refuse_shape(name: str, x: Tensor, accepted: str) -> NoReturn:
        raise ValueError(f"{function}: {name}: shape {shape_text(x.shape)}; accepted: {accepted}")

    if k_cache.dim() != 4:
        refuse_shape("k_cache", k_cache, "(B, S, Hk, D)")
    if v_cache.dim() != 4 or v_cache.shape[:3] != k_cache.shape[:3]:
        refuse_shape("v_cache", v_cache, f"({', '.join(map(str, k_cache.shape[:3]))}, Dv), as k_cache has it")
    heads, head_dim = k_cache.shape[2:]
    if q.dim() != 4 or q.shape[3] != head_dim or q.shape[2] % max(heads, 1) != 0:
        refuse_shape("q", q, f"(B, Sq, a multiple of {heads}, {head_dim}), as k_cache has it")
    batch = q.shape[0]
    new: Any = k.shape[1] if k.dim() == 4 else "n"
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x.dim() != 4 or x.shape != (batch, new, *cache.shape[2:]):
            refuse_shape(name, x, f"({batch}, {new}, {heads}, {cache.shape[3]}), as {name}_cache has it")
    for name, numbers in (("cache_seqlens", lengths), ("cache_batch_idx", rows)):
        if numbers is None:
            continue
        if not isinstance(numbers, Tensor) or numbers.dtype not in (torch.int32, torch.int64):
            what = numbers.dtype if isinstance(numbers, Tensor) else f"a {type(numbers).__name__}"
            raise TypeError(f"{function}: {name}: {what}; accepted: a tensor of int32")
        if numbers.shape != (batch,):
            refuse_shape(name, numbers, f"({batch},)")
    if rows is None and batch > k_cache.shape[0]:
        refuse_shape("q", q, f"at most the {k_cache.shape[0]} sequences of k_cache")
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dtype != q.dtype:
            raise TypeError(f"{function}: {name}: {x.dtype}; accepted: {q.dtype}, as q has it")


def _need_within(function: str, name: str, numbers: Tensor, most: int, why: str) -> None:
    """On a GPU reading the numbers would wait for it; there PyTorch's own check stops the program."""
    if numbers.device.type == "cpu" and not is_traced() and numbers.numel():
        for number in (int(numbers.max()), int(numbers.min())):
            if not 0 <= number <= most:
                raise ValueError(f"{function}: {name}: {number}, {why}; accepted: 0 to {most}")


@torch.no_grad()
def with_cache(
    integration: str, function: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Optional[Tensor], v: Optional[Tensor],
    cache_seqlens: Union[int, Tensor, None], cache_batch_idx: Optional[Tensor], return_lse: bool, **options: Any,
) -> Any:  # fmt: skip
    """flash_attn_with_kvcache without pages, rotary embedding and padding at the left."""
    batch = q.shape[0]
    lengths = cache_seqlens
    options = mapped(q, return_lse=return_lse, **options)  # what it refuses is refused before anything is written
    if isinstance(options["scale"], Tensor):
        raise TypeError(f"{function}: softmax_scale: a Tensor; accepted: a number, or None")
    if isinstance(lengths, int):
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
    sequences = k_cache.shape[0]
    need_rows = functools.partial(_need_within, function, "cache_batch_idx", most=sequences - 1, why=f"and the cache has {sequences} sequences")
    if (k is None) != (v is None):
        raise ValueError(f"{function}: {'k' if k is None else 'v'}: None; accepted: k and v, or neither")
    if k is not None and v is not None:
        if lengths is None:
            raise ValueError(f"{function}: cache_seqlens: None with k; accepted: the lengths before k")
        _need_to_fit(function, q, k_cache, v_cache, k, v, lengths, cache_batch_idx)
        size, new = k_cache.shape[1], k.shape[1]
        _need_within(function, "cache_seqlens", lengths, size - new, f"with {new} new keys in a cache of {size}")
        if cache_batch_idx is not None:
            need_rows(cache_batch_idx)
        append(k_cache, k, lengths, cache_batch_idx)
        append(v_cache, v, lengths, cache_batch_idx)
        lengths = lengths + k.shape[1]
    elif cache_batch_idx is not None:
        need_rows(cache_batch_idx)
    if cache_batch_idx is not None:
        rows = cache_batch_idx.long()
        k_cache, v_cache = k_cache[rows], v_cache[rows]
    return _counts.call(
        integration, attention, q, k_cache[:batch], v_cache[:batch], names=NAMES_OF_A_CACHE, seqused_k=lengths, **options
    )


# ---- forward and backward as functions of their own ----


def operator_arguments(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: Optional[float], causal: bool, window_size: Window,
    softcap: Optional[float], alibi_slopes: Optional[Tensor] = None, dropout_p: float = 0.0,
    seed: Optional[Tensor] = None, cu_seqlens_q: Optional[Tensor] = None, cu_seqlens_k: Optional[Tensor] = None,
    seqused_q: Optional[Tensor] = None, seqused_k: Optional[Tensor] = None, max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None, deterministic: bool = False, bias: Optional[Tensor] = None,
    sink: Optional[Tensor] = None, align: Optional[str] = "bottom_right", position_q: Optional[int] = None,
    positions_q: Optional[Tensor] = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of the operators fovea::attention and fovea::attention_backward."""
    left, right = unbounded(window_size)
    return (
        q, k, v, bias, None, None, each_head(alibi_slopes, q), each_head(sink, q), cu_seqlens_q, cu_seqlens_k,
        seqused_q, seqused_k, seed, None, 0, 0, softmax_scale, bool(causal), left, right, align,
        max(softcap or 0.0, 0.0), float(dropout_p), "fovea", max_seqlen_q or 0, max_seqlen_k or 0, 0, "bshd",
        _call.DETERMINISTIC if deterministic else _call.order(), None, position_q, None, positions_q, None, None,
    )  # fmt: skip


@torch.no_grad()
def forward(integration: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """out and lse, which has -inf for rows without keys."""
    out, lse = _counts.call(integration, _operators.attention, *operator_arguments(q, k, v, **options), names=NAMES)
    return out, lse


@torch.no_grad()
def gradients(
    integration: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
    dlse: Optional[Tensor] = None, sink: Optional[Tensor] = None, names: Mapping[str, str] = NAMES, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Those of q, k and v, and of the sink if there is one."""
    need = [True, True, True, False, False, sink is not None]
    found: tuple[Tensor, ...] = _counts.call(
        integration, _operators.attention_backward, dout, dlse, out, lse, need,
        *operator_arguments(q, k, v, sink=sink, **options), names=names,
    )  # fmt: skip
    return found[:3] if sink is None else (*found[:3], found[5].to(sink.dtype))


@torch.no_grad()
def backward(
    integration: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Optional[Tensor],
    dk: Optional[Tensor], dv: Optional[Tensor], **options: Any,
) -> None:  # fmt: skip
    """The gradients, written into those of dq, dk and dv that are given. `lse` may have +inf for rows without keys."""
    lse = lse.masked_fill(lse == math.inf, -math.inf)
    for grad, into in zip(gradients(integration, dout, q, k, v, out, lse, **options), (dq, dk, dv)):
        if into is not None:
            into.copy_(grad)
