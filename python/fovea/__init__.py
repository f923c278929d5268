# SPDX-License-Identifier: Apache-2.0
"""fovea: exact fused attention, forward and backward, for NumPy and every library with DLPack.

>>> import numpy as np, fovea
>>> q = k = v = np.ones((1, 4, 2, 8), np.float32)      # batch, sequence, heads, head dimension
>>> fovea.attention(q, k, v, causal=True).shape
(1, 4, 2, 8)

attention() computes the forward and attention_backward() the gradients. An Attention keeps the options of both. pack()
and unpack() join and part sequences of different lengths. explain() says which backend computes a problem, and without
arguments what this machine has; prepare() compiles GPU kernels ahead of a call. fovea.torch.attention is the same
operator for PyTorch with autograd; there the default layout is (B, H, S, D), here it is (B, S, H, D).
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

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
from ._library import get_include
from ._library import version as _version

__version__ = _version()

if not TYPE_CHECKING:  # for a type checker any misspelt name would exist

    def __getattr__(name: str) -> Any:
        """Imports fovea.torch, and PyTorch with it, when it is first used; fovea.integrations and fovea.jax likewise."""
        if name not in ("integrations", "jax", "torch"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return _import_module(f".{name}", __name__)
        except ImportError as error:
            raise AttributeError(str(error)) from error


__all__ = [
    "Attention",
    "Gradients",
    "attention",
    "attention_backward",
    "backends",
    "dropout_mask",
    "explain",
    "get_include",
    "num_threads",
    "pack",
    "prepare",
    "set_num_threads",
    "unpack",
]

for _name in __all__:  # help(), documentation and pickles name what users import
    globals()[_name].__module__ = __name__
del _name
