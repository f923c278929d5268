# SPDX-License-Identifier: Apache-2.0
"""The keywords of fovea.torch.attention, for type checkers; a test compares them with its signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, TypedDict, Union

from torch import Tensor

from .._options import Align, Layout, Rng


class Options(TypedDict, total=False):
    """All but return_lse, which decides the type of the result."""

    bias: Optional[Tensor]
    bias2: Optional[Tensor]
    mask: Optional[Tensor]
    scale: Optional[float]
    causal: bool
    window: tuple[int, int]
    align: Optional[Align]
    softcap: float
    alibi_slopes: Optional[Tensor]
    sink: Optional[Tensor]
    dropout_p: float
    seed: Union[int, Tensor, None]
    offset: Union[int, Tensor]
    rng: Rng
    cu_seqlens_q: Optional[Tensor]
    cu_seqlens_k: Optional[Tensor]
    max_seqlen_q: Optional[int]
    max_seqlen_k: Optional[int]
    seqused_q: Optional[Tensor]
    seqused_k: Optional[Tensor]
    batch_shape: Optional[Sequence[int]]
    position_q: Optional[int]
    position_k: Optional[int]
    positions_q: Optional[Tensor]
    positions_k: Optional[Tensor]
    dropout_streams: Optional[Tensor]
    layout: Layout
    deterministic: bool
    backend: Optional[str]
