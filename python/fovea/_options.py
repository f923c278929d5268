# SPDX-License-Identifier: Apache-2.0
"""The keywords of a call, for type checkers: each keyword's type stands here once.

attention() and attention_backward() spell the same keywords out with their defaults; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Optional, TypedDict

Align = Literal["bottom_right", "top_left"]
Layout = Literal["bshd", "bhsd"]
Rng = Literal["fovea", "torch_mem_efficient"]
Direction = Literal["forward", "backward"]


class CallOptions(TypedDict, total=False):
    """Tensors, and what goes with them: an Attention takes these when it is made or in each call."""

    bias: Any
    bias2: Any
    mask: Any
    alibi_slopes: Any
    sink: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_q: Any
    seqused_k: Any
    max_seqlen_q: Optional[int]
    max_seqlen_k: Optional[int]
    batch_shape: Optional[Sequence[int]]
    position_q: Optional[int]
    position_k: Optional[int]
    positions_q: Any
    positions_k: Any
    dropout_streams: Any
    stream: Optional[int]


class Options(CallOptions, total=False):
    """The keywords that attention() and attention_backward() share."""

    scale: Optional[float]
    causal: bool
    window: tuple[int, int]
    align: Optional[Align]
    softcap: float
    dropout_p: float
    seed: Any
    offset: Any
    rng: Rng
    layout: Layout
    deterministic: bool
    backend: Optional[str]


class PlannedOptions(Options, total=False):
    """The keywords of explain() and prepare()."""

    return_lse: bool
