# SPDX-License-Identifier: Apache-2.0
"""Problems that are planned and not computed yet: enable() asks the library about them, and the kernels of a backward
are compiled while its forward runs.

A backward needs two to four kernels, each of which takes NVRTC 0.5 to 1.5 s where the cache has none. The first forward
of a kind whose result wants gradients begins with them on another thread. A guess that is wrong costs that time of a
core alone: the backward compiles what it lacks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from .. import _abi
from .._library import lib
from . import _call


class Shape:
    """Of a tensor, what a problem that is planned and not computed needs to know."""

    def __init__(self, like: Any, shape: Sequence[Any], strides: Sequence[Any]) -> None:
        self.dtype = like.dtype
        self.device = like.device
        self.shape = torch.Size(hint(n) for n in shape)
        self._strides = tuple(hint(n) for n in strides)

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def data_ptr(self) -> int:
        return 0


def hint(size: Any) -> int:
    """The size for which a graph is traced; 8192 where PyTorch does not know one."""
    if isinstance(size, int):
        return size
    known = size.node.hint
    return 8192 if known is None else int(known)


def has_known_sizes(tensor: Any) -> bool:
    return all(isinstance(size, int) or size.node.hint is not None for size in tensor.shape)


def is_traced() -> bool:
    """Whether the code of this thread is traced. torch.compiler.is_compiling() says it of the process: so all threads would be, while
    one compiles. A mode of the caller's own, such as a counter of FLOPs, is taken for a trace then."""
    return torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0)


def of(tensor: Any) -> Any:
    return None if tensor is None else Shape(tensor, tensor.shape, tensor.stride())


def _contiguous(shape: Sequence[int]) -> list[int]:
    return [torch.Size(shape[at + 1 :]).numel() for at in range(len(shape))]


def _dense(tensor: Any) -> Shape:
    """A gradient as it is allocated: without the strides of 0 of a tensor that is expanded."""
    strides = tensor.stride()
    return Shape(tensor, tensor.shape, strides if all(strides) else _contiguous(tensor.shape))


def problem_of(a: Any, direction: int, need: Sequence[bool]) -> Any:
    """The problem of Arguments whose tensors may be Shapes, with results to match. `need` is of the first ones of
    DIFFERENTIABLE. The gradient of out is taken to have out's strides."""
    problem: Any = _call._Problem(a)
    out = Shape(a.q, *_call.out_layout(a))
    shape = _call.lse_shape(a)
    lse = Shape(a.q, shape, _contiguous(shape))
    lse.dtype = torch.float64 if a.q.dtype == torch.float64 else torch.float32
    problem.set_rows("out", out)
    if any(need):
        problem.set("lse", lse)
    if direction == _abi.BACKWARD:
        problem.set_rows("grad_out", out)
        for name, at, wanted in zip(_call.DIFFERENTIABLE, _call.DIFFERENTIABLE_AT, need):
            if wanted:
                (problem.set_rows if name in ("q", "k", "v") else problem.set)(f"grad_{name}", _dense(a[at]))
    return problem


_begun: set[Any] = set()


def begin_backward(arguments: Sequence[Any]) -> None:
    """Compiles the kernels of these arguments' backward on another thread, once for each kind of them."""
    a: Any = _call.Arguments._make(arguments)
    need = [tensor is not None and tensor.requires_grad for tensor in (a[at] for at in _call.DIFFERENTIABLE_AT)]
    # Mostly the same kernels serve all sizes.
    kind = (
        a.q.device, *need, a.q.shape[-1], a.v.shape[-1], a.causal, a.window_left < 0, a.window_right < 0, a.softcap > 0,
        a.dropout_p > 0, a.rng, a.layout, a.deterministic, a.backend,
        *(None if x is None else (x.dtype, *(n == 1 for n in x.shape[:-1])) for x in a[: _call.TENSORS]),
    )  # fmt: skip
    if kind in _begun:
        return
    _begun.add(kind)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return  # nothing may be loaded for this stream now
    try:
        problem = problem_of(a._make([of(x) if at < _call.TENSORS else x for at, x in enumerate(a)]), _abi.BACKWARD, need)
        problem.place(a, [x for x in a[: _call.TENSORS] if x is not None])  # for their alignment
    except (ValueError, TypeError, NotImplementedError):
        return  # which the forward reports
    try:
        # Not a daemon: Python waits for it at exit, as NVRTC must not run while its library is taken down.
        threading.Thread(target=_prepare, args=(problem,), name="fovea: kernels of a backward").start()
    except RuntimeError:
        pass  # no further thread


def _prepare(problem: Any) -> None:
    lib.fovea_prepare(problem._pointer, _abi.BACKWARD)  # the backward reports what is wrong
