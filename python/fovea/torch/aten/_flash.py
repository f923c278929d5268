# SPDX-License-Identifier: Apache-2.0
"""The flash operators: _flash_attention_forward, _flash_attention_forward_no_dropout_inplace and _flash_attention_backward with
(B, S, H, D), or packed with (total, H, D), and _scaled_dot_product_flash_attention and _backward with (B, H, S, D).

Causal masks and windows are aligned at the bottom right, as in FlashAttention. logsumexp of a row without keys is -inf
(FlashAttention: +inf), and with alibi_slopes it is that of the scores (FlashAttention: plus a number for each row). The bits of
FlashAttention's dropout cannot be drawn, and there are no probabilities to return and no paged keys.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from . import _compute
from ._compute import named
from ._register import Result, operator

_WHY_NO_DROPOUT = "FlashAttention's random numbers cannot be drawn"


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise NotImplementedError(f"dropout_p: {dropout_p}, and {_WHY_NO_DROPOUT}; accepted: 0, or fovea.torch.attention")


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor], max_q: Any,
    max_k: Any, is_causal: bool, scale: Optional[float], window_size_left: Any, window_size_right: Any,
    seqused_k: Optional[Tensor] = None, alibi_slopes: Optional[Tensor] = None,
) -> Any:  # fmt: skip
    packed = cum_seq_q is not None or cum_seq_k is not None
    rank, dims = (3, "(total, H, D), as cum_seq_q is given") if packed else (4, "(B, S, H, D)")
    _compute.need_rank(rank, dims, query=query, key=key, value=value)
    lengths: dict[str, Any] = {}
    if packed:
        lengths = {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    left, right = (-1 if size is None or size < 0 else size for size in (window_size_left, window_size_right))
    return _compute.arguments(
        query, key, value, **lengths, causal=is_causal, align="bottom_right", window_left=left, window_right=right,
        scale=scale, seqused_k=seqused_k, alibi_slopes=alibi_slopes,
    )  # fmt: skip


def _new_logsumexp(query: Tensor, cum_seq_q: Optional[Tensor]) -> Tensor:
    *outer, rows, heads, _ = query.shape
    return torch.empty((*outer, heads, rows), dtype=torch.float32, device=query.device)


def _state(device: torch.device) -> tuple[Tensor, Tensor]:
    """Of random numbers, which nothing draws."""
    return tuple(torch.zeros(shape, dtype=torch.uint64, device=device) for shape in ((2,), ()))  # type: ignore[return-value]


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor], max_q: Any,
    max_k: Any, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: Optional[float] = None,
    window_size_left: Any = None, window_size_right: Any = None, seqused_k: Optional[Tensor] = None,
    alibi_slopes: Optional[Tensor] = None, block_table: Optional[Tensor] = None, num_splits: Optional[int] = None,
) -> Result:  # fmt: skip
    out = _compute.like(query, (*query.shape[:-1], value.shape[-1]))
    return out, _new_logsumexp(query, cum_seq_q), *_state(query.device), query.new_empty(0)


def _saved_forward(given: dict[str, Any], results: Result) -> dict[str, Any]:
    """The backward's arguments but the gradient."""
    out, logsumexp, rng_state, unused, _ = results
    for name in ("seqused_k", "alibi_slopes"):
        if given[name] is not None:
            raise NotImplementedError(f"{name}: given with a gradient, which PyTorch's backward has no argument for; accepted: None")
    kept = ("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "scale",
            "window_size_left", "window_size_right")  # fmt: skip
    return {**{name: given[name] for name in kept}, "out": out, "logsumexp": logsumexp, "rng_state": rng_state, "unused": unused}


@operator(
    "(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, "
    "float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, "
    "SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None, Tensor? block_table=None, "
    "int? num_splits=None) -> (Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, "
    "Tensor debug_attn_mask)",
    _fake_forward, "_flash_attention_backward", _saved_forward,
)  # fmt: skip
def _flash_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor], max_q: Any,
    max_k: Any, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: Optional[float] = None,
    window_size_left: Any = None, window_size_right: Any = None, seqused_k: Optional[Tensor] = None,
    alibi_slopes: Optional[Tensor] = None, block_table: Optional[Tensor] = None, num_splits: Optional[int] = None,
) -> Result:  # fmt: skip
    out = _compute.like(query, (*query.shape[:-1], value.shape[-1]))
    logsumexp = _flash_attention_forward_no_dropout_inplace(
        out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale=scale,
        window_size_left=window_size_left, window_size_right=window_size_right, seqused_k=seqused_k,
        alibi_slopes=alibi_slopes, block_table=block_table, num_splits=num_splits,
    )  # fmt: skip
    return out, logsumexp, *_state(query.device), query.new_empty(0)


def _fake_inplace(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    logsumexp: Tensor = _fake_forward(*args, **kwargs)[1]
    return logsumexp


@operator(
    "(Tensor(a!) out, Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, "
    "SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, "
    "SymInt? window_size_left=None, SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None, "
    "Tensor? block_table=None, int? num_splits=None) -> Tensor softmax_logsumexp",
    _fake_inplace,
)  # fmt: skip
def _flash_attention_forward_no_dropout_inplace(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor],
    max_q: Any, max_k: Any, dropout_p: float, is_causal: bool, return_debug_mask: bool, *,
    scale: Optional[float] = None, window_size_left: Any = None, window_size_right: Any = None,
    seqused_k: Optional[Tensor] = None, alibi_slopes: Optional[Tensor] = None, block_table: Optional[Tensor] = None,
    num_splits: Optional[int] = None,
) -> Tensor:  # fmt: skip
    """num_splits is a hint about speed."""
    _refuse_dropout(dropout_p)
    _compute.refuse_given(return_debug_mask=return_debug_mask, block_table=block_table)
    a = _arguments(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, window_size_left, window_size_right,
        seqused_k, alibi_slopes,
    )  # fmt: skip
    logsumexp = _new_logsumexp(query, cum_seq_q)
    with named(cu_seqlens_q="cum_seq_q", cu_seqlens_k="cum_seq_k", max_seqlen_q="max_q", max_seqlen_k="max_k"):
        _compute.forward(a, out, logsumexp)
    return logsumexp


def _fake_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@operator(
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
    "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor rng_state, Tensor unused, *, "
    "float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)  # fmt: skip
def _flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor], max_q: Any, max_k: Any, dropout_p: float, is_causal: bool,
    rng_state: Tensor, unused: Tensor, *, scale: Optional[float] = None, window_size_left: Any = None,
    window_size_right: Any = None,
) -> Result:  # fmt: skip
    _refuse_dropout(dropout_p)
    a = _arguments(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, window_size_left, window_size_right
    )
    grads = _fake_backward(grad_out, query, key, value)
    with named(cu_seqlens_q="cum_seq_q", cu_seqlens_k="cum_seq_k", max_seqlen_q="max_q", max_seqlen_k="max_k", lse="logsumexp"):
        _compute.backward(a, grad_out, out, logsumexp, dict(zip(_compute.RESULTS, grads)))
    return grads


def _fake_scaled(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: Optional[float] = None,
) -> Result:  # fmt: skip
    q, v = query.transpose(1, 2), value.transpose(1, 2)
    out = _compute.like(q, (*q.shape[:-1], v.shape[-1])).transpose(1, 2)
    return (
        out, _new_logsumexp(q, None), None, None, query.shape[2], key.shape[2], *_state(query.device), query.new_empty(0)
    )  # fmt: skip


def _saved_scaled(given: dict[str, Any], results: Result) -> dict[str, Any]:
    out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, seed, offset, _ = results
    kept = ("query", "key", "value", "dropout_p", "is_causal", "scale")
    return {
        **{name: given[name] for name in kept}, "out": out, "logsumexp": logsumexp, "cum_seq_q": cum_seq_q,
        "cum_seq_k": cum_seq_k, "max_q": max_q, "max_k": max_k, "philox_seed": seed, "philox_offset": offset,
    }  # fmt: skip


@operator(
    "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, "
    "*, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
    "SymInt max_k, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)",
    _fake_scaled, "_scaled_dot_product_flash_attention_backward", _saved_scaled,
)  # fmt: skip
def _scaled_dot_product_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: Optional[float] = None,
) -> Result:  # fmt: skip
    _compute.need_heads_first(query, key, value)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, logsumexp, *state, debug = _flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return out.transpose(1, 2), logsumexp, None, None, q.shape[1], k.shape[1], *state, debug


@operator(
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
    "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, "
    "Tensor philox_offset, *, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    _fake_backward,
)  # fmt: skip
def _scaled_dot_product_flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor], max_q: Any, max_k: Any, dropout_p: float, is_causal: bool,
    philox_seed: Tensor, philox_offset: Tensor, *, scale: Optional[float] = None,
) -> Result:  # fmt: skip
    _compute.need_rank(4, "(B, H, S, D)", grad_out=grad_out, query=query, key=key, value=value, out=out)
    grad_out, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    grads = _flash_attention_backward(
        grad_out, q, k, v, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
        philox_offset, scale=scale,
    )  # fmt: skip
    return tuple(grad.transpose(1, 2) for grad in grads)
