# SPDX-License-Identifier: Apache-2.0
"""DS4Sci_EvoformerAttention of DeepSpeed, computed by fovea, without its limits on types, lengths and head dimensions.

install("evoformer") patches it where DeepSpeed is installed. Programs that find a package `deepspeed` import the rest of it,
so there is no stand-in; without DeepSpeed call the function here. docs/integrations/triangle.md has its arguments.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, Optional

from torch import Tensor

from .._problem import shape_text
from ..torch import attention
from . import _counts, _needs
from ._needs import Needed
from ._stand_in import Patches

__all__ = ["DS4Sci_EvoformerAttention"]

_NAME = "evoformer"


def DS4Sci_EvoformerAttention(Q: Tensor, K: Tensor, V: Tensor, biases: Sequence[Optional[Tensor]]) -> Tensor:
    """deepspeed.ops.deepspeed4science.DS4Sci_EvoformerAttention.

    Args:
        Q: (B, N, L, H, D): float32, float16, bfloat16 or, on the CPU, float64.
        K: The same.
        V: The same.
        biases: At most two: (B, N, 1, 1, L) and (B, 1, H, L, L), either of which may be None. Both have gradients. The list is
            not changed.

    Returns:
        (B, N, L, H, D).

    Raises:
        ValueError: A shape is not accepted, or there are more than two biases.
        TypeError: A type is not accepted.
    """
    if len(biases) > 2:
        raise ValueError(f"biases: {len(biases)}; accepted: at most two")
    if Q.dim() != 5:
        raise ValueError(f"Q: shape {shape_text(Q.shape)}; accepted: (B, N, L, H, D)")
    batch, outer, length, heads, _ = Q.shape
    given: list[Any] = [*biases, None, None]
    for at, shape in enumerate(((batch, outer, 1, 1, length), (batch, 1, heads, length, length))):
        if given[at] is not None and tuple(given[at].shape) != shape:
            raise ValueError(f"biases[{at}]: shape {tuple(given[at].shape)}; accepted: {shape}")
    out: Tensor = _counts.call(_NAME, attention, Q, K, V, names=_NAMES, bias=given[1], bias2=given[0], layout="bshd")
    return out


_NAMES = {"q": "Q", "k": "K", "v": "V", "bias": "biases[1]", "bias2": "biases[0]"}  # of fovea's arguments
_MODULES = ("deepspeed.ops.deepspeed4science", "deepspeed.ops.deepspeed4science.evoformer_attn")
_patches = Patches()


def _install(force: bool) -> None:
    if _patches.before:
        return
    if importlib.util.find_spec("deepspeed") is None:
        raise ImportError(
            "install: deepspeed is not installed; accepted: the package with its DeepSpeed4Science, or a call of "
            "fovea.integrations.evoformer.DS4Sci_EvoformerAttention"
        )
    _needs.require(_NAME, "DeepSpeed with DeepSpeed4Science", [Needed(name, "DS4Sci_EvoformerAttention") for name in _MODULES])
    for name in _MODULES:
        _patches.put(importlib.import_module(name), "DS4Sci_EvoformerAttention", DS4Sci_EvoformerAttention)


def _uninstall() -> None:
    _patches.undo()
