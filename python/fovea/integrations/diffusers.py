# SPDX-License-Identifier: Apache-2.0
"""set_attention_backend("fovea") for the models of diffusers.

>>> import fovea.integrations.diffusers
>>> fovea.integrations.diffusers.register()  # doctest: +SKIP

docs/integrations/diffusers.md has every argument.
"""

# The names of diffusers that this file uses, most of them private, are those of _NEEDED; register() raises an ImportError
# without one of them. A name of a backend is a member of the enumeration AttentionBackendName, which Python does not
# extend: the member is added to its tables.

from __future__ import annotations

import importlib
import sys
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..torch import attention
from . import _counts, _flash, _needs
from ._needs import Needed

__all__ = ["register"]

_NAME = "diffusers"
_BACKEND = "fovea"
_MEMBER = "FOVEA"
_MODULE = "diffusers.models.attention_dispatch"
_VERSIONS = "diffusers from 0.35 on"
_CHECKS = ("_check_device", "_check_shape", "_check_attn_mask_or_causal")
_NEEDED = (
    *(Needed(_MODULE, name) for name in _CHECKS),
    *(Needed(_MODULE, f"AttentionBackendName.{name}") for name in ("NATIVE", "_member_map_", "_member_names_", "_value2member_map_")),
    Needed(_MODULE, "_AttentionBackendRegistry.register", ("backend", "constraints")),
    Needed(_MODULE, "_AttentionBackendRegistry._active_backend"),
)


def register() -> None:
    """Makes the attention backend "fovea" known to diffusers.

    After it, ``model.set_attention_backend("fovea")`` and ``with attention_backend("fovea")`` make fovea compute the attention of
    the models that call diffusers' dispatcher. fovea.torch.enable() reaches the others as well.

    Raises:
        ImportError: diffusers is not installed, or has no table of attention backends (added in 0.35) as it is known here.

    Example:
        >>> import fovea.integrations.diffusers
        >>> fovea.integrations.diffusers.register()  # doctest: +SKIP
        >>> pipe.transformer.set_attention_backend("fovea")  # doctest: +SKIP
    """
    _needs.require(_NAME, _VERSIONS, _NEEDED)
    dispatch: Any = importlib.import_module(_MODULE)
    names: Any = dispatch.AttentionBackendName
    if _BACKEND not in names._value2member_map_:
        member = str.__new__(names, _BACKEND)
        member._name_, member._value_ = _MEMBER, _BACKEND
        setattr(names, _MEMBER, member)
        names._member_map_[_MEMBER] = names._value2member_map_[_BACKEND] = member
        names._member_names_.append(_MEMBER)
    checks = [getattr(dispatch, name) for name in _CHECKS]
    dispatch._AttentionBackendRegistry.register(names(_BACKEND), constraints=checks)(_attention)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """A backend of diffusers: (B, S, H, D) in and out, with return_lse also (B, S, H)."""
    if _parallel_config is not None:
        _flash.refuse(_NAME, "_parallel_config", "a context-parallel model", "None")
    options: dict[str, Any] = {}
    if attn_mask is not None:
        if attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):  # one row of keys for each sequence
            attn_mask = attn_mask[:, None, None, :]
        options["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask
    options.update(causal=is_causal, align="top_left", dropout_p=dropout_p, scale=scale, layout="bshd")
    out: Tensor
    lse: Tensor
    if return_lse:
        out, lse = _counts.call(_NAME, attention, query, key, value, names=_NAMES, return_lse=True, **options)
        return out, lse.transpose(1, 2)
    out = _counts.call(_NAME, attention, query, key, value, names=_NAMES, **options)
    return out


_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_mask", "mask": "attn_mask", "causal": "is_causal"}  # of fovea's arguments

# ---- for fovea.integrations.install() ----


def _install(force: bool) -> None:
    register()


def _uninstall() -> None:
    dispatch: Any = sys.modules.get(_MODULE)
    names: Any = getattr(dispatch, "AttentionBackendName", None)
    member = names and names._value2member_map_.pop(_BACKEND, None)
    if not member:
        return
    names._member_map_.pop(_MEMBER)
    names._member_names_.remove(_MEMBER)
    type.__delattr__(names, _MEMBER)
    registry = dispatch._AttentionBackendRegistry
    if registry._active_backend == member:
        registry._active_backend = names.NATIVE  # before 0.36 there is no function that sets it
    # The function stays in the registry's tables: models on which the backend is set keep working.
