# SPDX-License-Identifier: Apache-2.0
"""The fast path: calls in C instead of Python, which takes less time of the host.

src/python/fast.c is an extension for CPython's limited API, in the file _fast.abi3.so beside the shared library. It
computes ordinary calls of plain tensors, and declines all others, which the code in Python then computes from the
beginning. From PyTorch 2.14 on it reads and makes tensors by the stable C functions of libtorch, which are looked up
here; before that by the methods of tensors. Where it cannot be used, nothing else changes.

The environment variable FOVEA_TORCH_FAST is read when fovea.torch is imported:
    1         C, as without it
    methods   the same, and tensors by their methods, as with PyTorch before 2.14
    0         Python alone
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from typing import Any, Callable, Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _abi, _library
from . import _call, _operators

_FILE = "_fast.abi3.so"
_OLDEST = (3, 10)  # Py_LIMITED_API in fast.c
_CHOICES = ("1", "methods", "0")
_EXTENSION: Any = None
_STARTED: Any = None  # the extension, once it is in use
_WHY = ""


def _declined(q: Any, k: Any, v: Any, keywords: dict[str, Any]) -> Any:
    """The result of fovea.torch.attention, or None where Python has to compute it. load() puts C's function in its place."""
    return None


attention: Callable[..., Any] = _declined


def switch_off() -> None:
    """For tests of the path in Python."""
    global attention
    attention = _declined


def fast_path() -> str:
    """Says how calls of fovea.torch.attention reach the C library in this process, and why.

    Returns:
        A sentence that begins with "C" or, where the fast path is not used, with "Python". docs/torch.md says what
        decides.

    >>> import fovea.torch
    >>> fovea.torch.fast_path().split(",")[0] in ("C", "Python")
    True
    """
    return _WHY


class FastAttention(torch.autograd.Function):
    """DirectAttention of _operators.py for calls that C has computed. forward() is C's."""

    @staticmethod
    def backward(ctx: Any, grad_out: Optional[Tensor], grad_lse: Optional[Tensor] = None) -> tuple[Any, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors  # once: hooks see it
        if not torch.compiler.is_compiling():
            found: Optional[tuple[Any, ...]] = _STARTED.backward(ctx, saved, grad_out, grad_lse)
            if found is not None:
                return found
        given, rest = _STARTED.unpack(ctx.call)
        *there, out, lse = saved
        each = iter(there)
        tensors = [next(each) if given >> index & 1 else None for index in range(_call.TENSORS)]
        need = ctx.needs_input_grad[1:]
        return (None, *_operators.direct_gradients(need, grad_out, grad_lse, out, lse, (*tensors, *rest)))

    jvp = _operators.Attention.jvp


# What C calls, by the names it has there. Most are private: any of them may be missing in a version of PyTorch.
_OBJECTS: dict[str, Callable[[], Any]] = {
    "Tensor": lambda: torch.Tensor,
    "Parameter": lambda: torch.nn.Parameter,
    "strided": lambda: torch.strided,
    "dtypes": lambda: (*_call.TYPES, torch.uint8),
    "modes": lambda: torch._C._len_torch_dispatch_stack,
    "transforms": lambda: torch._C._are_functorch_transforms_active,
    "profiler": lambda: torch._C._autograd._profiler_enabled,
    "tracing": lambda: torch._C._get_tracing_state,
    "forward_ad": lambda: (forward_ad._current_level, forward_ad)[1],
    "any_autocast": lambda: torch._C._is_any_autocast_enabled,
    "autocast_enabled": lambda: torch.is_autocast_enabled,
    "autocast_dtype": lambda: torch.get_autocast_dtype,
    "grad_enabled": lambda: torch.is_grad_enabled,
    "deterministic": lambda: torch._C._get_deterministic_algorithms,
    "warn_only": lambda: torch.is_deterministic_algorithms_warn_only_enabled,
    "stream": lambda: _call._current_stream,
    "draw_seed": lambda: _operators.draw_seed,
    "apply": lambda: _apply(),
    "empty_like": lambda: torch.empty_like,
    "zeros_like": lambda: torch.zeros_like,
    "empty_strided": lambda: torch.empty_strided,
}


def _apply() -> Any:
    """torch.autograd.Function.apply() without its part in Python, which is for torch.func and setup_context."""
    base: Any = torch._C._FunctionBase
    for name in ("to_save", "materialize_grads", "needs_input_grad", "saved_tensors"):
        getattr(base, name)
    return base.__dict__["apply"].__get__(None, FastAttention)


def _address(library: Any, name: str) -> Optional[int]:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError:
        return None


def _extension() -> Any:
    global _EXTENSION
    if _EXTENSION is not None:
        return _EXTENSION
    path = _library.path.with_name(_FILE)
    if not path.is_file():
        raise ImportError(f"{path} does not exist; a build makes it that finds a CPython with headers (python3-dev)")
    if sys.implementation.name != "cpython" or sys.version_info < _OLDEST:
        raise ImportError(f"it needs CPython {'.'.join(map(str, _OLDEST))} or newer")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise ImportError("this Python has no global lock, on which it relies")
    loader = importlib.machinery.ExtensionFileLoader("fovea.torch._fast_extension._fast", str(path))
    spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None
    extension = importlib.util.module_from_spec(spec)
    loader.exec_module(extension)
    theirs = (_abi.VERSION_MAJOR, ctypes.sizeof(_abi.Problem))
    if (extension.VERSION, extension.PROBLEM) != theirs:
        raise ImportError(f"{path} is of another version than this package")
    _EXTENSION = extension
    return extension


def _start(choice: str) -> tuple[Any, str]:
    """The extension, ready for use, and how it reads tensors. Raises ImportError where it cannot be used."""
    extension = _extension()
    objects = {}
    for name, find in _OBJECTS.items():
        try:
            objects[name] = find()
        except (AttributeError, KeyError) as error:
            raise ImportError(f"PyTorch {torch.__version__} differs from what it knows: {error}") from error
    addresses = {name: _address(_library.lib, name) for name in ("fovea_forward", "fovea_backward", "fovea_workspace")}
    how = "tensors by their methods, as FOVEA_TORCH_FAST is 'methods'"
    if choice != "methods":
        libtorch = ctypes.CDLL(torch._C.__file__, mode=os.RTLD_NOLOAD)
        found = {name: _address(libtorch, name) for name in extension.STABLE}
        missing = [name for name, address in found.items() if address is None]
        how = "tensors by the stable C functions of libtorch"
        if missing:
            how = f"tensors by their methods, as libtorch lacks {missing[0]}"
        else:
            addresses.update(found)
    extension.start(objects, {name: address for name, address in addresses.items() if address is not None})
    return extension, how


def load() -> None:
    """Decides which path calls take. Again after another library was put into _library.lib, which C then calls."""
    global attention, _STARTED, _WHY
    switch_off()
    choice = os.environ.get("FOVEA_TORCH_FAST", "1")
    if choice not in _CHOICES:
        raise ImportError(f"fovea: FOVEA_TORCH_FAST is {choice!r}; accepted: {', '.join(_CHOICES)}")
    if choice == "0":
        _WHY = "Python, as FOVEA_TORCH_FAST is 0"
        return
    try:
        _STARTED, how = _start(choice)
    except (ImportError, KeyError, OSError) as error:
        _WHY = f"Python, as the fast path cannot be used: {error}"
        return
    _WHY = f"C, {how}"
    FastAttention.forward = staticmethod(_STARTED.forward)  # type: ignore[method-assign]
    attention = _STARTED.attention


load()
