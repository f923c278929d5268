# SPDX-License-Identifier: Apache-2.0
"""What PyTorch calls at the end of `import torch`: it honours FOVEA_TORCH, so that a program runs on fovea unedited.

PyTorch calls every entry point of the group torch.backends. This one imports nothing of fovea unless FOVEA_TORCH is set.
That is why it is a package of its own: an import of fovea.anything would load fovea's library.
"""

import atexit
import importlib
import os
import sys

_WORDS = ("1", "sdpa", "cpu", "cuda", "prefer=none", "prefer=fastest", "strict", "operators", "stats")
_PACKAGES = ("flash_attn", "flash_attn_3", "flash_attn_4")
_ACCEPTED = f"0 alone, or words of {', '.join((*_WORDS, *_PACKAGES))}, separated by commas"


_waiting = None  # what load() found, while a module is being imported that it needs


def load() -> None:
    """Calls fovea.torch.enable() if FOVEA_TORCH says so, and makes the integrations known.

    Raises:
        ValueError: FOVEA_TORCH has a word that is not accepted.
    """
    value = os.environ.get("FOVEA_TORCH", "")
    if value in ("", "0"):
        return
    words = [word.strip().lower() for word in value.split(",")]
    unknown = [word for word in words if word not in _WORDS + _PACKAGES]
    if unknown:
        raise ValueError(f"FOVEA_TORCH={value}: {unknown[0]!r} is unknown; accepted: {_ACCEPTED}")
    preferences = [word for word in words if word.startswith("prefer=")]
    if len(set(preferences)) > 1:
        raise ValueError(f"FOVEA_TORCH={value}: {' and '.join(preferences)}; accepted: one of them")
    global _waiting
    _waiting = words
    resume()


def resume(ending: str = "") -> None:
    """Does what load() found, unless a module that it needs is being imported: a program may import fovea before torch, whose import
    calls load(). `ending` is the module that calls this at the end of its own import."""
    global _waiting
    begun = [sys.modules.get(name) for name in ("fovea.torch", "fovea.integrations") if name != ending]
    if _waiting is None or any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in begun):
        return
    words, _waiting = _waiting, None
    # By name: a package has a module as an attribute only when its import has ended.
    ours, integrations = (importlib.import_module(name) for name in ("fovea.torch", "fovea.integrations"))
    ours.enable(
        devices=[name for name in ("cuda", "cpu") if name in words] or ("cuda", "cpu"),
        prefer=None if "prefer=none" in words else "fastest",
        strict="strict" in words,
        operators="operators" in words,
    )
    if "stats" in words:
        atexit.register(ours._enable.print_stats)
    integrations._set_up([name for name in _PACKAGES if name in words])
