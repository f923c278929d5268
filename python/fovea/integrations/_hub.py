# SPDX-License-Identifier: Apache-2.0
"""flash_attn's two functions with sinks besides, for programs that load this package with `kernels`. transformers reads their
signatures to learn what they take: attn_implementation="owner/name" of such a repository. tools/hub.py makes its folder."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor

from . import _flash
from .flash_attn import _result

_NAME = "hub"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Optional[Tensor] = None,
) -> Any:
    """fovea.integrations.flash_attn.flash_attn_func(), and s_aux: (Hq,), a sink of each head, with its gradient."""
    found = _flash.compute(
        _NAME, q, k, v, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=bool(deterministic), return_lse=bool(return_attn_probs), sink=s_aux,
    )  # fmt: skip
    return _result(found, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Optional[Tensor] = None,
) -> Any:
    """fovea.integrations.flash_attn.flash_attn_varlen_func(), and s_aux: (Hq,), a sink of each head, with its gradient."""
    found = _flash.compute(
        _NAME, q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=_flash.number(max_seqlen_q),
        max_seqlen_k=_flash.number(max_seqlen_k), dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=bool(deterministic),
        return_lse=bool(return_attn_probs), sink=s_aux,
    )  # fmt: skip
    return _result(found, return_attn_probs)
