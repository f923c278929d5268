# SPDX-License-Identifier: Apache-2.0
"""What PyTorch calls at the end of `import torch`: it honours FOVEA_TORCH, so that a program runs on fovea unedited.

PyTorch calls every entry point of the group torch.backends. This one imports nothing of fovea unless FOVEA_TORCH is set.
That is why it is a package of its own: an import of fovea.anything would load fovea's library.
"""

import atexit
import os

_WORDS = ("1", "sdpa", "cpu", "cuda", "prefer=none", "prefer=fastest", "strict", "operators", "stats")
_PACKAGES = ("flash_attn", "flash_attn_3", "flash_attn_4")
_ACCEPTED = f"0 alone, or words of {', '.join((*_WORDS, *_PACKAGES))}, separated by commas"


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
    import fovea.integrations
    import fovea.torch

    fovea.torch.enable(
        devices=[name for name in ("cuda", "cpu") if name in words] or ("cuda", "cpu"),
        prefer=None if "prefer=none" in words else "fastest",
        strict="strict" in words,
        operators="operators" in words,
    )
    if "stats" in words:
        atexit.register(fovea.torch._enable.print_stats)
    fovea.integrations._set_up([name for name in _PACKAGES if name in words])
