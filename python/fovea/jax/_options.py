# SPDX-License-Identifier: Apache-2.0
"""The keywords of fovea.jax.attention, for type checkers; a test compares them with its signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, TypedDict

from .._options import Align, Layout


class Options(TypedDict, total=False):
    """All but return_lse, which decides the type of the result."""

    bias: Optional[Any]
    bias2: Optional[Any]
    mask: Optional[Any]
    scale: Optional[float]
    causal: bool
    window: tuple[int, int]
    align: Optional[Align]
    softcap: float
    alibi_slopes: Optional[Any]
    sink: Optional[Any]
    dropout_p: float
    dropout_key: Optional[Any]
    cu_seqlens_q: Optional[Any]
    cu_seqlens_k: Optional[Any]
    max_seqlen_q: Optional[int]
    max_seqlen_k: Optional[int]
    seqused_q: Optional[Any]
    seqused_k: Optional[Any]
    batch_shape: Optional[Sequence[int]]
    layout: Layout
    deterministic: bool
    backend: Optional[str]
