# SPDX-License-Identifier: Apache-2.0
"""memory_efficient_attention of xFormers, computed by fovea, with its bias classes. install("xformers") patches the installed
package.

There is no stand-in: programs that import xFormers make its bias objects. docs/integrations/xformers.md has every class.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..torch import attention
from . import _counts, _flash, _needs
from ._needs import Needed
from ._stand_in import Patches

__all__ = [
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
]

_NAME = "xformers"
_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_bias", "dropout_p": "p"}  # of fovea's arguments

# ---- bias classes: options of fovea by the class's name ----

_TOP_LEFT = {"causal": True, "align": "top_left"}
_BOTTOM_RIGHT = {"causal": True, "align": "bottom_right"}


def _plain(options: dict[str, Any]) -> Callable[[Any, Tensor], dict[str, Any]]:
    return lambda bias, q: dict(options)


def _sized(options: dict[str, Any]) -> Callable[[Any, Tensor], dict[str, Any]]:
    """A window of so many keys, the query's own among them."""
    return lambda bias, q: {**options, "window": (bias._window_size - 1, 0)}


def _sides(bias: Any, q: Tensor) -> dict[str, Any]:
    return {"window": (bias.window_left, bias.window_right), "align": "bottom_right"}


def _packed(of: Callable[[Any, Tensor], dict[str, Any]], used: bool = False) -> Callable[[Any, Tensor], dict[str, Any]]:
    """Sequences one after the other; `used`: keys have gaps or padding between them, and say how many exist."""

    def read(bias: Any, q: Tensor) -> dict[str, Any]:
        queries, keys = bias.q_seqinfo, bias.k_seqinfo
        options = {
            "cu_seqlens_q": queries.seqstart.to(q.device), "cu_seqlens_k": keys.seqstart.to(q.device),
            "max_seqlen_q": int(queries.max_seqlen), "max_seqlen_k": int(keys.max_seqlen), **of(bias, q),
        }  # fmt: skip
        if used:
            options["seqused_k"] = keys.seqlen.to(q.device)
        return options

    return read


_READERS: dict[str, Callable[[Any, Tensor], dict[str, Any]]] = {
    "LowerTriangularMask": _plain(_TOP_LEFT),
    "LowerTriangularMaskWithTensorBias": lambda bias, q: {**_TOP_LEFT, **_options(bias._bias, q)},
    "LowerTriangularFromBottomRightMask": _plain(_BOTTOM_RIGHT),
    "LowerTriangularFromBottomRightLocalAttentionMask": _sized(_BOTTOM_RIGHT),
    "LocalAttentionFromBottomRightMask": _sides,
    "BlockDiagonalMask": _packed(_plain({})),
    "BlockDiagonalCausalMask": _packed(_plain(_TOP_LEFT)),
    "BlockDiagonalCausalFromBottomRightMask": _packed(_plain(_BOTTOM_RIGHT)),
    "BlockDiagonalCausalLocalAttentionMask": _packed(_sized(_TOP_LEFT)),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _packed(_sized(_BOTTOM_RIGHT)),
    "BlockDiagonalPaddedKeysMask": _packed(_plain({}), used=True),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": _packed(_plain(_BOTTOM_RIGHT), used=True),
    "BlockDiagonalLocalAttentionPaddedKeysMask": _packed(_sides, used=True),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _packed(_sized(_BOTTOM_RIGHT), used=True),
    "BlockDiagonalGappyKeysMask": _packed(_plain({}), used=True),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": _packed(_plain(_BOTTOM_RIGHT), used=True),
}


def _options(attn_bias: Any, query: Tensor) -> dict[str, Any]:
    if attn_bias is None:
        return {}
    if isinstance(attn_bias, Tensor):
        if attn_bias.dtype == torch.bool:
            raise TypeError("attn_bias: a tensor of bool; accepted: one of a floating-point type, -inf where a key is hidden, or an object")
        if query.dim() == 5 and attn_bias.dim() == 5:  # (B, G, H, M, N)
            return {"bias": attn_bias.flatten(1, 2)}
        return {"bias": attn_bias.unsqueeze(1) if query.dim() == 3 and attn_bias.dim() == 3 else attn_bias}
    name = type(attn_bias).__name__
    reader = _READERS.get(name)
    if reader is None:
        raise NotImplementedError(
            f"attn_bias: {name}, which fovea does not have; accepted: a tensor, None, {', '.join(sorted(_READERS))}"
        )
    try:
        return reader(attn_bias, query)
    except AttributeError as error:  # a private name of another version
        raise NotImplementedError(f"attn_bias: {name} as fovea does not know it: {error}; accepted: that of xFormers 0.0.35") from error


# ---- layouts ----


def _four(query: Tensor, key: Tensor, value: Tensor, share: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(B, M, H, K) of each. With `share` keys whose heads of a group are one in memory become one head."""
    if query.dim() == 3:
        return query.unsqueeze(2), key.unsqueeze(2), value.unsqueeze(2)
    if query.dim() != 5:
        for name, x in (("key", key), ("value", value)):
            if x.dim() == query.dim() == 4 and x.shape[2] != query.shape[2]:  # fovea would take them for groups; xFormers refuses them, too
                raise ValueError(f"{name}: {x.shape[2]} heads, and query has {query.shape[2]}; accepted: as many, or five dimensions")
        return query, key, value

    def heads(x: Tensor) -> Tensor:
        # Where a program asks for the gradient of the expanded tensor itself, each of its heads has its own.
        one = x.shape[3] == 1 or (x.stride(3) == 0 and not (x.requires_grad and x.is_leaf))
        return x[:, :, :, 0] if one else x.flatten(2, 3)

    if share and heads(key).shape == heads(value).shape:
        return query.flatten(2, 3), heads(key), heads(value)
    return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)


def _need_one_batch(attn_bias: Any, *tensors: Tensor) -> None:
    for name, x in zip(("query", "key", "value"), tensors):
        if x.shape[0] != 1:
            raise ValueError(f"{name}: batch {x.shape[0]} with {type(attn_bias).__name__}; accepted: 1, the sequences one after the other")


def _compute(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, p: float, scale: Optional[float],
    output_dtype: Optional[torch.dtype],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out as xFormers has it, and lse: (B, H, M), with groups (B, G, H, M); of packed sequences B is 1."""
    options = _options(attn_bias, query)
    q, k, v = _four(query, key, value, share=True)
    packed = "cu_seqlens_q" in options
    if packed:
        _need_one_batch(attn_bias, q, k, v)
        q, k, v = q[0], k[0], v[0]
    else:
        options["layout"] = "bshd"
    out: Tensor
    out, lse = _counts.call(_NAME, attention, q, k, v, names=_NAMES, dropout_p=p, scale=scale, return_lse=True, **options)
    out = out.reshape(*query.shape[:-1], value.shape[-1])
    if packed:
        lse = lse.unsqueeze(0)
    if query.dim() == 5:
        lse = lse.reshape(lse.shape[0], *query.shape[2:4], lse.shape[-1])
    return out if output_dtype is None else out.to(output_dtype), lse


# ---- the functions ----


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: Optional[float] = None,
    *,
    op: Any = None,
    output_dtype: Optional[torch.dtype] = None,
) -> Tensor:
    """xformers.ops.memory_efficient_attention.

    Args:
        query: (B, M, H, K), (B, M, K) or (B, M, G, H, K): float32, float16, bfloat16 or, on the CPU, float64.
        key: (B, N, H, K), or as query. With groups, a stride of 0 over H makes one key head of them.
        value: (B, N, H, Kv), or as query.
        attn_bias: None; a tensor that broadcasts to (B, H, M, N), which has a gradient in its own shape; or an object of a class
            of xformers.ops.fmha.attn_bias that is not paged.
        p: Probability of dropout. The masks are not xFormers'; the seed comes from PyTorch's generator.
        scale: None is 1 / sqrt(K).
        op: Of no effect.
        output_dtype: The result is converted to it.

    Returns:
        The result, in query's shape with Kv.

    Raises:
        NotImplementedError: attn_bias is of a class that fovea does not have.
        ValueError: A shape or a value is not accepted.
        TypeError: A type is not accepted.
    """
    return _compute(query, key, value, attn_bias, p, scale, output_dtype)[0]


@torch.no_grad()
def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: Optional[float] = None,
    *,
    op: Any = None,
    output_dtype: Optional[torch.dtype] = None,
) -> Tensor:
    """xformers.ops.memory_efficient_attention_forward, without gradients. The rest is as in memory_efficient_attention()."""
    return _compute(query, key, value, attn_bias, p, scale, output_dtype)[0]


@torch.no_grad()
def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: Optional[float] = None,
    *,
    op: Any = None,
    output_dtype: Optional[torch.dtype] = None,
) -> tuple[Tensor, Tensor]:
    """xformers.ops.memory_efficient_attention_forward_requires_grad: the result and the logsumexp, (B, H, M), with groups
    (B, G, H, M), for memory_efficient_attention_backward(). p is refused unless 0, as a backward would need the seed.

    The rest is as in memory_efficient_attention()."""
    _refuse_dropout("memory_efficient_attention_forward_requires_grad", p)
    return _compute(query, key, value, attn_bias, p, scale, output_dtype)


def memory_efficient_attention_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: Optional[float] = None,
    *,
    op: Any = None,
    output_dtype: Optional[torch.dtype] = None,
) -> tuple[Tensor, Tensor]:
    """xformers.ops.fmha.memory_efficient_attention_partial: the result and the logsumexp, (B, H, M), with groups
    (B, G, H, M), for merge_attentions(). Both have gradients. p is refused unless 0.

    The rest is as in memory_efficient_attention()."""
    _refuse_dropout("memory_efficient_attention_partial", p)
    return _compute(query, key, value, attn_bias, p, scale, output_dtype)


def _refuse_dropout(function: str, p: float) -> None:
    if p != 0.0:
        _flash.refuse(function, "p", f"{p}, and the seed has no place in the result", "0.0")


@torch.no_grad()
def memory_efficient_attention_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: Optional[float] = None,
    *,
    op: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """xformers.ops.memory_efficient_attention_backward.

    Args:
        grad: The gradient of output.
        output: What the forward returned.
        lse: The forward's logsumexp, (B, H, M), with groups (B, G, H, M).
        query: As in the forward.
        key: As in the forward.
        value: As in the forward.
        attn_bias: As in the forward.
        p: Refused unless 0.
        scale: As in the forward.
        op: Of no effect.

    Returns:
        The gradients of query, key and value, in their shapes.

    Raises:
        NotImplementedError: p is not 0, or attn_bias is of a class that fovea does not have.
        ValueError: A shape or a value is not accepted.
        TypeError: A type is not accepted.
    """
    _refuse_dropout("memory_efficient_attention_backward", p)
    options = _options(attn_bias, query)
    q, k, v = _four(query, key, value, share=False)
    grad, output = (x.reshape(*q.shape[:-1], v.shape[-1]).to(q.dtype) for x in (grad, output))  # of another output_dtype, it may be
    if lse.dim() == 4:
        lse = lse.flatten(1, 2)
    if "cu_seqlens_q" in options:
        _need_one_batch(attn_bias, q, k, v)
        q, k, v, grad, output, lse = (x[0] for x in (q, k, v, grad, output, lse))
    causal, window = options.pop("causal", False), options.pop("window", (-1, -1))
    found = _flash.gradients(
        _NAME, grad, q, k, v, output, lse.contiguous(), softmax_scale=scale, causal=causal, window_size=window, softcap=0.0,
        names=_NAMES, **options,
    )
    shapes: list[Any] = [x.shape for x in (query, key, value)]
    dq, dk, dv = (x.reshape(shape) for x, shape in zip(found, shapes))
    return dq, dk, dv


def merge_attentions(
    attn_split: Union[Tensor, Sequence[Tensor]],
    lse_split: Union[Tensor, Sequence[Tensor]],
    write_lse: bool = True,
    output_dtype: Optional[torch.dtype] = None,
) -> tuple[Tensor, Optional[Tensor]]:
    """xformers.ops.fmha.merge_attentions: the attention over all keys from results over parts of them. PyTorch computes it. Both
    results have gradients.

    Args:
        attn_split: The results for each part, (B, M, H, K) or (B, M, G, H, K) each: a sequence, or one tensor with the parts in
            its first dimension.
        lse_split: The logsumexp of each part, (B, H, M) or (B, G, H, M), in the same form. -inf where a row has no keys there.
        write_lse: Whether to return the logsumexp.
        output_dtype: Of the result. None is that of attn_split.

    Returns:
        The result, and the logsumexp or None. A row without keys in any part is 0 and -inf.

    Raises:
        ValueError: The parts differ in number or in shape, or there is none.
    """
    outs, lses = list(attn_split), list(lse_split)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"lse_split: {len(lses)} parts, and attn_split has {len(outs)}; accepted: as many, at least one")
    for i, (out, lse) in enumerate(zip(outs, lses)):
        fits = out.dim() in (4, 5) and out.shape == outs[0].shape
        if not fits or lse.shape != (out.shape[0], *out.shape[2:-1], out.shape[1]):
            raise ValueError(
                f"attn_split, lse_split: part {i} has the shapes {list(out.shape)} and {list(lse.shape)}; accepted: "
                "(B, M, H, K) and (B, H, M), or (B, M, G, H, K) and (B, G, H, M), the same for all parts"
            )
    parts = torch.stack(lses)
    highest = parts.detach().amax(0)
    highest = highest.masked_fill(highest == -math.inf, 0.0)
    weights = (parts - highest).exp()
    total = weights.sum(0)
    dead = total == 0
    total = total.masked_fill(dead, 1.0)
    weights = (weights / total).movedim(-1, 2).unsqueeze(-1)
    merged = sum(w * out.to(torch.promote_types(w.dtype, out.dtype)) for w, out in zip(weights, outs))
    assert isinstance(merged, Tensor)
    whole = (total.log() + highest).masked_fill(dead, -math.inf) if write_lse else None
    return merged.to(output_dtype or outs[0].dtype), whole


# ---- in the package ----

_MODULE = "xformers.ops.fmha"
_VERSIONS = "xFormers as of 0.0.35"
_NEEDED = (Needed("xformers.ops", "memory_efficient_attention"), *(Needed(_MODULE, name) for name in __all__))
_functions: dict[str, Callable[..., Any]] = {name: globals()[name] for name in __all__}
_patches = Patches()


def _install(force: bool) -> None:
    if _patches.before:
        return
    if importlib.util.find_spec("xformers") is None:
        raise ImportError(
            "install: xformers is not installed; accepted: the package, or calls of the functions in "
            "fovea.integrations.xformers"
        )
    _needs.require(_NAME, _VERSIONS, _NEEDED)
    for name in ("xformers.ops", _MODULE):
        module = importlib.import_module(name)
        for function in __all__:
            if hasattr(module, function):
                _patches.put(module, function, _functions[function])


def _uninstall() -> None:
    _patches.undo()
