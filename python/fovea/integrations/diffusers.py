# SPDX-License-Identifier: Apache-2.0
"""set_attention_backend("fovea") for the models of diffusers.

>>> import fovea.integrations.diffusers
>>> fovea.integrations.diffusers.register()  # doctest: +SKIP

docs/integrations/diffusers.md has every argument.
"""

# Private names of diffusers that this file uses, each checked by tests/models/test_diffusers.py with version 0.42.1:
# _AttentionBackendRegistry with its _active_backend, and the checks. A name of a backend is a member of the enumeration
# AttentionBackendName, which Python does not extend: the member is added to its tables.

from __future__ import annotations

import importlib
import sys
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..torch import attention
from . import _counts, _flash

__all__ = ["register"]

_NAME = "diffusers"
_BACKEND = "fovea"
_MEMBER = "FOVEA"
_MODULE = "diffusers.models.attention_dispatch"


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
    try:
        dispatch: Any = importlib.import_module(_MODULE)
        names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
        checks = [dispatch._check_device, dispatch._check_shape, dispatch._check_attn_mask_or_causal]
        tables = names._member_map_, names._member_names_, names._value2member_map_
    except (ImportError, AttributeError) as error:
        raise ImportError(f"fovea.integrations.diffusers needs diffusers from 0.35 on: {error}") from error
    if _BACKEND not in tables[2]:
        member = str.__new__(names, _BACKEND)
        member._name_, member._value_ = _MEMBER, _BACKEND
        setattr(names, _MEMBER, member)
        tables[0][_MEMBER] = tables[2][_BACKEND] = member
        tables[1].append(_MEMBER)
    registry.register(names(_BACKEND), constraints=checks)(_attention)


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
        out, lse = _counts.call(_NAME, attention, query, key, value, return_lse=True, **options)
        return out, lse.transpose(1, 2)
    out = _counts.call(_NAME, attention, query, key, value, **options)
    return out


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
        registry.set_active_backend(names.NATIVE)
    # The function stays in the registry's tables: models on which the backend is set keep working.
