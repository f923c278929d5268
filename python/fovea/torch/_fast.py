# SPDX-License-Identifier: Apache-2.0
"""The fast path: calls in C instead of Python, which takes less time of the host.

src/python/fast.c is an extension for CPython's limited API, in the file _fast.abi3.so beside the shared library. It
computes ordinary calls of plain tensors, and declines all others, which the code in Python then computes from the
beginning. It reads tensors by DLPack's exchange API, which PyTorch 2.11 has, and makes them by C functions of libtorch, which
are looked up here; without these it uses the methods of tensors. Where it cannot be used, nothing else changes.

The environment variable FOVEA_TORCH_FAST is read when fovea.torch is imported:
    1         C, as without it
    methods   the same, and tensors are read and made by methods, as with PyTorch 2.9
    0         Python alone
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import checkpoint

from .. import _abi, _library
from . import _ahead, _call, _eager, _operators

_FILE = "_fast.abi3.so"
_OLDEST = (3, 10)  # Py_LIMITED_API in fast.c
_CHOICES = ("1", "methods", "0")
# What makes an object of a tensor: a stable function of PyTorch 2.14 and newer, or THPVariable_Wrap of C++, which takes
# a const at::TensorBase& or, by the address of a copy, an at::TensorBase.
_WRAPPERS = ("torch_tensor_to_pyobject", "_Z16THPVariable_WrapRKN2at10TensorBaseE", "_Z16THPVariable_WrapN2at10TensorBaseE")
_EXTENSION: Any = None
_STARTED: Any = None  # the extension, once it is in use
_WHY = ""


def _declined(q: Any, k: Any, v: Any, keywords: dict[str, Any]) -> Any:
    """The result of fovea.torch.attention, or None where Python has to compute it. load() puts C's function in its place."""
    return None


attention: Callable[..., Any] = _declined
sdpa: Optional[Callable[..., Any]] = None  # C's kernel of scaled_dot_product_attention, for enable()


def switch_off() -> None:
    """For tests of the path in Python."""
    global attention, sdpa
    attention, sdpa = _declined, None


def connect(in_python: Callable[..., Any], *connections: Any) -> Any:
    """The kernel of scaled_dot_product_attention that enable() registers: C's, connected with _enable.py, or Python's."""
    if sdpa is None:
        return in_python
    _STARTED.connect(in_python, *connections)
    return sdpa


def counts(reset: bool = False) -> tuple[int, dict[str, int]]:
    """How many calls of scaled_dot_product_attention C has computed since the last reset, and by the reason how many it has left to
    PyTorch."""
    return (0, {}) if _STARTED is None else _STARTED.counts(reset)


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
    """DirectAttention of _eager.py for calls that C has computed. forward() is C's."""

    @staticmethod
    def backward(ctx: Any, grad_out: Optional[Tensor], grad_lse: Optional[Tensor] = None) -> tuple[Any, ...]:
        """For compiled autograd. The engine calls apply(), which is C's."""
        return FastAttention.in_python(ctx, ctx.saved_tensors, grad_out, grad_lse)

    @staticmethod
    def in_python(
        ctx: Any, saved: Sequence[Tensor], grad_out: Optional[Tensor], grad_lse: Optional[Tensor]
    ) -> tuple[Any, ...]:
        *there, out, lse = saved
        need = ctx.needs_input_grad[1:]
        return (None, *_eager.direct_gradients(need, grad_out, grad_lse, out, lse, _arguments(there, ctx.call)))

    jvp = _operators.Attention.jvp


def _unpack(call: bytes) -> tuple[int, tuple[Any, ...]]:
    found: tuple[int, tuple[Any, ...]] = _STARTED.unpack(call)
    return found


# As torch.compiler.assume_constant_result() does, which imports torch._dynamo: compiled autograd traces what calls this, and cannot
# trace C. It guards on the bytes.
_unpack._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _arguments(there: Sequence[Tensor], call: bytes) -> tuple[Any, ...]:
    """The operator's, of the tensors that C was given and of what else it keeps of a call."""
    given, rest = _unpack(call)
    each = iter(there)
    tensors = [next(each) if given >> index & 1 else None for index in range(_call.TENSORS)]
    return (*tensors, *rest)


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
    "node": lambda: _node(),
    "backward": lambda: FastAttention.in_python,
    "compiling": lambda: torch.compiler.is_compiling,
    "empty_like": lambda: torch.empty_like,
    "zeros_like": lambda: torch.zeros_like,
    "empty_strided": lambda: torch.empty_strided,
    "backend_order": lambda: torch._C._get_sdp_priority_order,
    "math_allowed": lambda: torch._C._get_math_sdp_enabled,
    "flash_allowed": lambda: torch._C._get_flash_sdp_enabled,
    "efficient_allowed": lambda: torch._C._get_mem_efficient_sdp_enabled,
    "cudnn_allowed": lambda: torch._C._get_cudnn_sdp_enabled,
    "begin_backward": lambda: lambda there, call: _ahead.begin_backward(_arguments(there, call)),
    "stop": lambda: getattr(checkpoint, "_StopRecomputationError", ()),
    "exchange": lambda: getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
}


def _apply() -> Any:
    """torch.autograd.Function.apply() without its part in Python, which is for torch.func and setup_context."""
    base: Any = torch._C._FunctionBase
    for name in ("to_save", "materialize_grads", "needs_input_grad", "saved_tensors"):
        getattr(base, name)
    return base.__dict__["apply"].__get__(None, FastAttention)


def _node() -> Any:
    """The class of FastAttention's nodes, whose apply() the engine calls."""
    node: Any = FastAttention._backward_cls
    node.apply  # noqa: B018
    return node


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
    # A build makes both, so nothing of the version differs. Before 1.0 another minor version may differ in anything.
    ours, theirs = _library.version(), extension.VERSION
    if ours != theirs:
        raise ImportError(f"{path} is of version {theirs}, and the library of {ours}")
    if extension.PROBLEM != ctypes.sizeof(_abi.Problem):
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
        except Exception as error:
            raise ImportError(f"PyTorch {torch.__version__} differs from what it knows: {error}") from error
    addresses = {name: _address(_library.lib, name) for name in ("fovea_forward", "fovea_backward", "fovea_workspace")}
    why = "as FOVEA_TORCH_FAST is 'methods'"
    if choice == "methods":
        objects["exchange"] = None
    else:
        libtorch = ctypes.CDLL(torch._C.__file__, mode=os.RTLD_NOLOAD)
        found = {name: _address(libtorch, name) for name in extension.STABLE}
        wrapper = next((name for name in _WRAPPERS if _address(libtorch, name) is not None), _WRAPPERS[0])
        found[wrapper if wrapper == _WRAPPERS[0] else "THPVariable_Wrap"] = _address(libtorch, wrapper)
        missing = [name for name, address in found.items() if address is None]
        why = f"as libtorch lacks {missing[0]}" if missing else ""
        if not missing:
            addresses.update(found)
    by_exchange, by_stable = extension.start(objects, {name: at for name, at in addresses.items() if at is not None})
    read = "read by DLPack's exchange API" if by_exchange else "read by methods"
    made = "made by C functions of libtorch" if by_stable else f"made by methods, {why}"
    return extension, f"tensors {read} and {made}"


def load() -> None:
    """Decides which path calls take. Again after another library was put into _library.lib, which C then calls."""
    global attention, sdpa, _STARTED, _WHY
    switch_off()
    choice = os.environ.get("FOVEA_TORCH_FAST", "1")
    if choice not in _CHOICES:
        raise ImportError(f"fovea: FOVEA_TORCH_FAST is {choice!r}; accepted: {', '.join(_CHOICES)}")
    if choice == "0":
        _WHY = "Python, as FOVEA_TORCH_FAST is 0"
        return
    try:
        _STARTED, how = _start(choice)
    except Exception as error:  # start() fails where PyTorch differs otherwise; fovea.torch works without it
        _WHY = f"Python, as the fast path cannot be used: {error}"
        return
    _WHY = f"C, {how}"
    FastAttention.forward = staticmethod(_STARTED.forward)  # type: ignore[method-assign]
    attention, sdpa = _STARTED.attention, _STARTED.sdpa


load()
