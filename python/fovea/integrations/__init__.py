# SPDX-License-Identifier: Apache-2.0
"""fovea.integrations: programs that call another attention library, run on fovea.

>>> import fovea.integrations
>>> sorted(fovea.integrations.available())[2:5]
['flash_attn', 'flash_attn_3', 'flash_attn_4']

Each integration maps the arguments of one library to those of fovea.torch.attention, and computes nothing itself. What
it cannot map it refuses with NotImplementedError, by the argument's name. docs/integrations.md has a page for each.
"""

# _stand_in.py    modules in the place of a package that is not installed, with its metadata
# _counts.py      how many calls each integration computed
# _needs.py       names of other libraries that may be missing
# _flash.py       what the three versions of flash_attn share
# _bert_padding.py, flash_attn.py, flash_attn_3.py, flash_attn_4.py, evoformer.py, triangle.py, xformers.py,
# transformers.py, diffusers.py, megatron.py one for each library; none imports its library before it is used

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

from .. import torch as _torch  # noqa: F401  (its error where PyTorch is missing)
from ._counts import Stats, reset_stats, stats
from .._imports import after

__all__ = ["Stats", "available", "install", "reset_stats", "stats", "uninstall"]

_AVAILABLE = {
    "diffusers": 'set_attention_backend("fovea") of diffusers, registered',
    "evoformer": "deepspeed.ops.deepspeed4science.DS4Sci_EvoformerAttention, patched where DeepSpeed is installed",
    "flash_attn": "the package flash_attn 2.8, replaced",
    "flash_attn_3": "the module flash_attn_interface (FlashAttention-3), replaced",
    "flash_attn_4": "the package flash_attn.cute (FlashAttention-4), replaced",
    "megatron": "the core_attention of Megatron-Core's specifications, patched where it is installed",
    "transformers": 'attn_implementation="fovea" of transformers, registered',
    "triangle": "cuequivariance_torch.triangle_attention, replaced, or patched where the package is installed",
    "xformers": "xformers.ops.memory_efficient_attention, patched where xFormers is installed",
}


_REGISTERED = ("diffusers", "transformers")
_replaced: set[str] = set()  # by install()


def available() -> dict[str, str]:
    """The integrations that install() knows.

    Returns:
        For each name what it replaces, patches or registers.
    """
    return dict(_AVAILABLE)


def install(*names: str, force: bool = False) -> None:
    """Makes programs that call another library call fovea. All of the names, or with an error none that was not before; but a name
    that was registered with transformers or diffusers stays, and does nothing until a program asks for it.

    Call it before the program imports that library, and before it imports libraries that look for it (transformers,
    diffusers and xformers look once). uninstall() takes it back.

    Args:
        names: Names that available() has.
        force: Also replaces a library that is imported already. Modules that have imported its functions by name keep
            them.

    Raises:
        ValueError: A name is unknown, or there is none.
        RuntimeError: The library that is replaced is imported already, and `force` is not set; or it is a part of another one,
            which is installed. A library whose functions are patched may be imported: what a program has imported by name stays.
        ImportError: The library that is to be patched is not installed.

    Example:
        >>> import fovea.integrations
        >>> fovea.integrations.install("flash_attn")
        >>> from flash_attn import flash_attn_func
        >>> fovea.integrations.uninstall("flash_attn")
    """
    fresh = []
    try:
        for name, module in zip(names, _modules(names)):
            if name not in _replaced:
                fresh.append((name, module))
            module._install(force)
    except BaseException:
        for name, module in fresh:
            if name not in _REGISTERED:  # these replace nothing, and may have been there
                module._uninstall()
        raise
    _replaced.update(names)


def uninstall(*names: str) -> None:
    """Takes back what install() did. Functions that a program has imported keep working.

    Args:
        names: Names that available() has. One that is not installed is no error.

    Raises:
        ValueError: A name is unknown, or there is none.
    """
    for name, module in zip(names, _modules(names)):
        module._uninstall()
        _replaced.discard(name)


def _modules(names: tuple[str, ...]) -> list[Any]:
    unknown = [name for name in names if not isinstance(name, str) or name not in _AVAILABLE]
    if unknown or not names:
        raise ValueError(f"names: {repr(unknown[0]) if unknown else 'none'}; accepted, each by itself: {', '.join(sorted(_AVAILABLE))}")
    return [importlib.import_module(f"{__name__}.{name}") for name in names]


def _set_up(names: list[str]) -> None:
    """For FOVEA_TORCH: the integrations that it names, and attn_implementation="fovea" if transformers is imported."""
    if names:
        install(*names)
    after("transformers.modeling_utils", _register)


def _register() -> None:
    from . import transformers

    try:
        transformers.register()
    except ImportError as error:
        warnings.warn(f"FOVEA_TORCH: {error}", stacklevel=2)

if "fovea_autoload" in sys.modules:  # FOVEA_TORCH; PyTorch may have been imported by this import
    sys.modules["fovea_autoload"].resume(__name__)
