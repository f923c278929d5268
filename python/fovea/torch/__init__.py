# SPDX-License-Identifier: Apache-2.0
"""fovea.torch: exact fused attention as a differentiable PyTorch operator.

>>> import torch, fovea.torch
>>> q = k = v = torch.ones(1, 2, 4, 8, requires_grad=True)      # batch, heads, sequence, head dimension
>>> fovea.torch.attention(q, k, v, causal=True).sum().backward()

docs/torch.md describes how it works together with the rest of PyTorch.
"""

# _attention.py   the function that users call: arguments, autocast, nested tensors, seeds
# _eager.py       calls of plain tensors, which need no dispatcher: which these are, and autograd around them
# _operators.py   the operators fovea::attention, fovea::attention_backward and fovea::seed, and autograd around them
# _vmap.py        their rules for torch.vmap
# _fast.py        the same in C where it can be had: decides, loads it, and says which path calls take
# _call.py        turns tensors into a fovea_problem of the C library, and calls it
# _options.py     the types of the keywords
# _enable.py      enable(): fovea in the place of scaled_dot_product_attention; _enable_kernel.py, _enable_decisions.py, _enable_order.py
# _sdpa.py        its arguments as those of attention()
# _parallel.py    context_parallel(): sequences whose rows lie on several ranks; its first lines name the other _parallel_*.py
# _rows.py        which rows each rank has, and the collectives that move them
# _dtensor.py     DTensor's rules for the operators
# _pytorch_cp.py  register_with_pytorch(): PyTorch's own context parallelism
# aten/           PyTorch's operators of fused attention, computed by fovea
# _fastest.py     for which of its calls PyTorch is faster, by fastest.json

import sys

try:
    import torch
except ImportError as error:
    raise ImportError(f"fovea.torch needs PyTorch, which cannot be imported here: {error}") from error

_OLDEST = (2, 9)


def _refuse_old(version: str) -> None:
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ImportError(f"fovea.torch: PyTorch {version}; accepted: {'.'.join(map(str, _OLDEST))} or newer")


_refuse_old(torch.__version__)

from . import aten  # noqa: E402
from ._attention import attention, attention_qkv  # noqa: E402  (older versions lack what it imports)
from ._enable import (  # noqa: E402
    SAVE_IN_CHECKPOINTS,
    disable,
    enable,
    enabled,
    is_enabled,
    reset_stats,
    stats,
)
from ._enable_state import Stats  # noqa: E402
from ._fast import fast_path  # noqa: E402
from ._parallel import context_parallel, explain_context_parallel  # noqa: E402
from ._pytorch_cp import register_with_pytorch  # noqa: E402
from ._rows import Piece, Rows  # noqa: E402

__all__ = [
    "SAVE_IN_CHECKPOINTS",
    "Piece",
    "Rows",
    "Stats",
    "aten",
    "attention",
    "attention_qkv",
    "context_parallel",
    "disable",
    "enable",
    "enabled",
    "explain_context_parallel",
    "fast_path",
    "is_enabled",
    "register_with_pytorch",
    "reset_stats",
    "stats",
]

if "fovea_autoload" in sys.modules:  # FOVEA_TORCH; PyTorch may have been imported by this import
    sys.modules["fovea_autoload"].resume(__name__)
