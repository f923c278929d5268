# SPDX-License-Identifier: Apache-2.0
"""fovea: exact fused attention, forward and backward.

>>> import numpy as np, fovea
>>> q = k = v = np.ones((1, 4, 2, 8), np.float32)      # batch, sequence, heads, head dimension
>>> fovea.attention(q, k, v, causal=True).shape
(1, 4, 2, 8)
"""

from ._api import (
    Attention,
    Gradients,
    attention,
    attention_backward,
    backends,
    dropout_mask,
    explain,
    num_threads,
    pack,
    prepare,
    set_num_threads,
    unpack,
)
from ._library import version as _version

__version__ = _version()

__all__ = [
    "Attention",
    "Gradients",
    "attention",
    "attention_backward",
    "backends",
    "dropout_mask",
    "explain",
    "num_threads",
    "pack",
    "prepare",
    "set_num_threads",
    "unpack",
]
