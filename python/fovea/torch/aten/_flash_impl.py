# SPDX-License-Identifier: Apache-2.0
"""The implementation "fovea" of PyTorch's flash operators, for torch.nn.attention.activate_flash_attention_impl("fovea").

Newer versions of PyTorch have a registry of such implementations (2.9 does not, 2.11 does). Where it is missing, nothing is registered.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from . import _owners
from ._register import OPERATORS

NAME = "fovea"
_OWNER = f"activate_flash_attention_impl('{NAME}')"
_WHY = ""
_warned: set[str] = set()


class _Handle:
    """What PyTorch keeps while the implementation is active."""

    def remove(self) -> None:
        _owners.release(_OWNER)


def _activate() -> _Handle:
    owner = _owners.Owner(_OWNER, lambda name, args, kwargs: "", lambda name: None, _warn)
    names = [name for name in OPERATORS if "flash" in name]
    _owners.take(owner, names, ("cuda", "cpu"))
    return _Handle()


def _warn(name: str, why: str, device: torch.device) -> None:
    if why not in _warned:
        _warned.add(why)
        warnings.warn(f"fovea: {name} is handed back to PyTorch: {why} (said once)", stacklevel=4)


def register() -> None:
    """Tells PyTorch of the implementation."""
    global _WHY
    from torch.nn import attention

    found: Any = getattr(attention, "register_flash_attention_impl", None)
    if found is None:
        _WHY = f"not registered, as PyTorch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl"
        return
    found(NAME, register_fn=_activate)
    _WHY = f"registered; torch.nn.attention.activate_flash_attention_impl('{NAME}') activates it"


def flash_impl() -> str:
    """Says whether PyTorch knows fovea as an implementation of its flash operators.

    Returns:
        A sentence that begins with "registered" or with "not registered".

    >>> import fovea.torch
    >>> fovea.torch.aten.flash_impl().split(",")[0].split(";")[0] in ("registered", "not registered")
    True
    """
    return _WHY


register()
