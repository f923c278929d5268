# SPDX-License-Identifier: Apache-2.0
"""The cuDNN operators: _cudnn_attention_forward and _backward with (B, H, S, D), or packed with (total, H, D), and
_scaled_dot_product_cudnn_attention and _backward with (B, H, S, D).

is_causal is aligned at the top left; with seqused_k at the bottom right, as cuDNN does. attn_bias has no gradient, as in PyTorch.
The bits of cuDNN's dropout cannot be drawn, and there are no paged keys.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from . import _compute
from ._compute import named, refuse
from ._register import Result, operator

_FORWARD = (
    "Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor philox_seed, "
    "Tensor philox_offset, Tensor debug_attn_mask"
)
_BACKWARD = (
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor philox_seed, "
    "Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
    "float dropout_p, bool is_causal, *, float? scale=None) -> (Tensor, Tensor, Tensor)"
)


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Optional[Tensor], cum_seq_q: Optional[Tensor],
    cum_seq_k: Optional[Tensor], max_q: Any, max_k: Any, dropout_p: float, is_causal: bool, scale: Optional[float],
    seqused_k: Optional[Tensor] = None,
) -> Any:  # fmt: skip
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p: {dropout_p}, and cuDNN's random numbers cannot be drawn; accepted: 0, or fovea.torch.attention"
        )
    packed = cum_seq_q is not None or cum_seq_k is not None
    rank, dims = (3, "(total, H, D), as cum_seq_q is given") if packed else (4, "(B, H, S, D)")
    _compute.need_rank(rank, dims, query=query, key=key, value=value)
    lengths: dict[str, Any] = {}
    if packed:
        lengths = {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    return _compute.arguments(
        query, key, value, **lengths, bias=attn_bias, causal=is_causal,
        align="top_left" if seqused_k is None else "bottom_right", scale=scale, seqused_k=seqused_k, layout="bhsd",
    )  # fmt: skip


def _named(**more: str) -> Any:
    return named(
        bias="attn_bias", cu_seqlens_q="cum_seq_q", cu_seqlens_k="cum_seq_k", max_seqlen_q="max_q", max_seqlen_k="max_k", **more
    )


def _results(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor], max_q: Any,
    max_k: Any, wanted: bool,
) -> Result:  # fmt: skip
    """logsumexp is (B, H, S, 1), packed (total, H, 1); None if it is not wanted. The lengths are copies: an operator does
    not return what it was given."""
    shape = (*query.shape[:-1], value.shape[-1])
    out = _compute.like(query, shape) if cum_seq_q is None else query.new_empty(shape)
    logsumexp = torch.empty((*query.shape[:-1], 1), dtype=torch.float32, device=query.device) if wanted else None
    seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
    lengths = (None if x is None else x.clone() for x in (cum_seq_q, cum_seq_k))
    return out, logsumexp, *lengths, max_q, max_k, seed, offset, None


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Optional[Tensor], cum_seq_q: Optional[Tensor],
    cum_seq_k: Optional[Tensor], max_q: Any, max_k: Any, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: Optional[float] = None,
    seqused_k: Optional[Tensor] = None, block_table: Optional[Tensor] = None,
) -> Result:  # fmt: skip
    return _results(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, compute_log_sumexp)


def _saved(given: dict[str, Any], results: Result) -> dict[str, Any]:
    """The backward's arguments but the gradient."""
    out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, seed, offset, _ = results
    if given.get("seqused_k") is not None:
        raise NotImplementedError("seqused_k: given with a gradient, which PyTorch's backward has no argument for; accepted: None")
    kept = ("query", "key", "value", "attn_bias", "dropout_p", "is_causal", "scale")
    return {
        **{name: given[name] for name in kept}, "out": out, "logsumexp": logsumexp, "cum_seq_q": cum_seq_q,
        "cum_seq_k": cum_seq_k, "max_q": max_q, "max_k": max_k, "philox_seed": seed, "philox_offset": offset,
    }  # fmt: skip


@operator(
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, "
    "SymInt max_k, bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
    f"float? scale=None, Tensor? seqused_k=None, Tensor? block_table=None) -> ({_FORWARD})",
    _fake_forward, "_cudnn_attention_backward", _saved,
)  # fmt: skip
def _cudnn_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Optional[Tensor], cum_seq_q: Optional[Tensor],
    cum_seq_k: Optional[Tensor], max_q: Any, max_k: Any, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: Optional[float] = None,
    seqused_k: Optional[Tensor] = None, block_table: Optional[Tensor] = None,
) -> Result:  # fmt: skip
    results = _results(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, compute_log_sumexp)
    _forward_into(
        results[0], results[1], query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale,
        seqused_k, block_table,
    )  # fmt: skip
    return results


def _forward_into(
    out: Tensor, logsumexp: Optional[Tensor], query: Tensor, key: Tensor, value: Tensor, attn_bias: Optional[Tensor],
    cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor], max_q: Any, max_k: Any, dropout_p: float, is_causal: bool,
    scale: Optional[float], seqused_k: Optional[Tensor], block_table: Optional[Tensor],
) -> None:  # fmt: skip
    _compute.refuse_given(block_table=block_table)
    a = _arguments(
        query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale, seqused_k
    )
    with _named():
        _compute.forward(a, out, None if logsumexp is None else _rows(logsumexp, a.packed))


def _fake_inplace(out: Tensor, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty((*query.shape[:-1], 1), dtype=torch.float32, device=query.device)


@operator(
    "(Tensor(a!) out, Tensor query, Tensor key, Tensor value, Tensor cum_seq_q, Tensor? cum_seq_k, SymInt max_q, "
    "SymInt max_k, bool is_causal=False, *, float? scale=None, Tensor? seqused_k=None, Tensor? block_table=None) -> "
    "Tensor logsumexp",
    _fake_inplace,
)  # fmt: skip
def _cudnn_attention_forward_no_dropout_inplace(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Optional[Tensor], max_q: Any,
    max_k: Any, is_causal: bool = False, *, scale: Optional[float] = None, seqused_k: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
) -> Tensor:  # fmt: skip
    logsumexp = _fake_inplace(out, query)
    _forward_into(
        out, logsumexp, query, key, value, None, cum_seq_q, cum_seq_k, max_q, max_k, 0.0, is_causal, scale, seqused_k, block_table
    )
    return logsumexp


def _rows(logsumexp: Tensor, packed: bool) -> Tensor:
    """(B, H, S), packed (H, total): a view of what cuDNN calls (B, H, S, 1) or (total, H, 1)."""
    if packed:
        return logsumexp.squeeze(-1).transpose(0, 1) if logsumexp.dim() == 3 else logsumexp
    return logsumexp.squeeze(-1) if logsumexp.dim() == 4 else logsumexp


def _fake_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@operator(_BACKWARD, _fake_backward)
def _cudnn_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, philox_seed: Tensor,
    philox_offset: Tensor, attn_bias: Optional[Tensor], cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor],
    max_q: Any, max_k: Any, dropout_p: float, is_causal: bool, *, scale: Optional[float] = None,
) -> Result:  # fmt: skip
    if logsumexp is None:
        raise refuse("logsumexp", "None", "that of a forward with compute_log_sumexp=True")
    a = _arguments(query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale)
    grads = _fake_backward(grad_out, query, key, value)
    with _named(lse="logsumexp"):
        _compute.backward(a, grad_out, out, _rows(logsumexp, a.packed), dict(zip(_compute.RESULTS, grads)))
    return grads


def _fake_scaled(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Optional[Tensor], compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *, scale: Optional[float] = None,
) -> Result:  # fmt: skip
    return _results(query, key, value, None, None, query.shape[2], key.shape[2], compute_log_sumexp)


@operator(
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., "
    f"bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> ({_FORWARD})",
    _fake_scaled, "_scaled_dot_product_cudnn_attention_backward", _saved,
)  # fmt: skip
def _scaled_dot_product_cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Optional[Tensor], compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *, scale: Optional[float] = None,
) -> Result:  # fmt: skip
    _compute.need_rank(4, "(B, H, S, D)", query=query, key=key, value=value)
    results: Result = _cudnn_attention_forward(
        query, key, value, attn_bias, None, None, query.shape[2], key.shape[2], compute_log_sumexp, dropout_p, is_causal,
        return_debug_mask, scale=scale,
    )  # fmt: skip
    return results


@operator(_BACKWARD, _fake_backward)
def _scaled_dot_product_cudnn_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, philox_seed: Tensor,
    philox_offset: Tensor, attn_bias: Optional[Tensor], cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor],
    max_q: Any, max_k: Any, dropout_p: float, is_causal: bool, *, scale: Optional[float] = None,
) -> Result:  # fmt: skip
    grads: Result = _cudnn_attention_backward(
        grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k,
        dropout_p, is_causal, scale=scale,
    )  # fmt: skip
    return grads
