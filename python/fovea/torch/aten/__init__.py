# SPDX-License-Identifier: Apache-2.0
"""PyTorch's operators of fused attention, computed by fovea: the same names, arguments and results.

>>> import torch, fovea.torch
>>> q = k = v = torch.ones(1, 4, 2, 8)                          # batch, sequence, heads, head dimension
>>> out, logsumexp, *_ = fovea.torch.aten._efficient_attention_forward(
...     q, k, v, None, None, None, None, None, 0.0, 1, True)    # 1: causal
>>> out.shape, logsumexp.shape
(torch.Size([1, 4, 2, 8]), torch.Size([1, 2, 32]))

Each is an operator of PyTorch, torch.ops.fovea.<name>, with the schema of torch.ops.aten.<name>. enable(operators=True) puts them
in the place of PyTorch's. docs/operators.md says what is equal, and what is not.
"""

# _efficient.py   the memory-efficient operators: PyTorch's dropout bit for bit
# _flash.py       the flash operators
# _cudnn.py       the cuDNN operators
# _compute.py     one call of the C library with results that the caller has made
# _register.py    makes them operators of PyTorch, with autograd
# _owners.py      puts them in the place of PyTorch's, for whom, and hands calls back
# _flash_impl.py  fovea as an implementation for torch.nn.attention.activate_flash_attention_impl

from typing import Any

from . import _cudnn, _efficient, _flash  # noqa: F401  (each registers its operators)
from ._flash_impl import flash_impl
from ._owners import owners
from ._register import OPERATORS

__all__ = ["flash_impl", "owners", *OPERATORS]


def __getattr__(name: str) -> Any:
    try:
        return OPERATORS[name].overload
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return __all__
