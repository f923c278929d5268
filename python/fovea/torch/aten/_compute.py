# SPDX-License-Identifier: Apache-2.0
"""One call of the C library with results that the caller has made: PyTorch's operators say which strides they have.

forward() and backward() take the arguments of fovea::attention by name, and leave out those that PyTorch's operators
lack. The rest of this file is what these operators have and fovea's own has not: an lse in fp32 whatever q's type, random numbers
of PyTorch's generator, and PyTorch's names in errors.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ... import _abi
from ..._library import lib
from .. import _call

RESULTS = ("q", "k", "v", "bias")  # whose gradients there are

# PyTorch's names of the library's tensors.
_NAMES = {"q": "query", "k": "key", "v": "value"}


def arguments(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> _call.Arguments:
    """Those of fovea::attention; what is not given has its default."""
    return _call.Arguments(**{
        **dict.fromkeys(_call.Arguments._fields), "seed": 0, "offset": 0, "causal": False, "window_left": -1,
        "window_right": -1, "align": "top_left", "softcap": 0.0, "dropout_p": 0.0, "rng": "fovea", "max_seqlen_q": 0,
        "max_seqlen_k": 0, "batch_outer": 0, "layout": "bshd", "deterministic": _call.order(), "q": q, "k": k, "v": v,
        **given,
    })  # fmt: skip


def forward(a: _call.Arguments, out: Tensor, lse: Optional[Tensor]) -> None:
    """Writes out, and lse unless it is None."""
    wide = lse
    if lse is not None and a.q.dtype == torch.float64:
        wide = torch.empty(lse.shape, dtype=torch.float64, device=lse.device)
    target = _with_adjacent_columns(out)
    _compute(_abi.FORWARD, a, {}, {"out": target} if wide is None else {"out": target, "lse": wide})
    if target is not out:
        out.copy_(target)
    if lse is not None and wide is not None and wide is not lse:
        lse.copy_(wide)


def check(a: _call.Arguments, out: Tensor) -> None:
    """Raises what forward() would raise, and computes nothing: before random numbers are drawn, which nobody gives back."""
    problem: Any = _call._Problem(a)
    problem.set_rows("out", out)
    status = int(lib.fovea_workspace(problem._pointer, _abi.FORWARD, ctypes.byref(ctypes.c_size_t())))
    if status != _abi.OK:
        problem._refuse(status)


def backward(a: _call.Arguments, grad_out: Tensor, out: Tensor, lse: Tensor, grads: dict[str, Tensor]) -> None:
    """Writes the gradients, by the names of RESULTS."""
    if grad_out.stride(-1) != 1 and grad_out.device.type != "cpu":
        grad_out = grad_out.contiguous()
    lse = lse.to(torch.float64 if a.q.dtype == torch.float64 else torch.float32)
    targets = {f"grad_{name}": _with_adjacent_columns(grad) for name, grad in grads.items()}
    _compute(_abi.BACKWARD, a, {"grad_out": grad_out, "out": out, "lse": lse}, targets)
    for grad, target in zip(grads.values(), targets.values()):
        if target is not grad:
            grad.copy_(target)


def _with_adjacent_columns(tensor: Tensor) -> Tensor:
    """A tensor to write to: on a device the columns of a row are adjacent, as kernels require."""
    if tensor.device.type == "cpu" or tensor.stride(-1) == 1 or tensor.numel() == 0:
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


_ROWS = ("out", "grad_out", "grad_q", "grad_k", "grad_v")


def _compute(direction: int, a: _call.Arguments, read: dict[str, Tensor], written: dict[str, Tensor]) -> None:
    tensors: Any = a[: _call.TENSORS]
    there, key = _call.tensors_and_key(
        (direction, tuple(read), tuple((name, x.stride()) for name, x in written.items())), a,
        (*tensors, *read.values()),
    )  # fmt: skip
    pool = _call._pool(key)
    problem = _call._taken(pool)
    if problem is None:
        problem = _call._Problem(a)
        for name, tensor in {**read, **written}.items():
            (problem.set_rows if name in _ROWS else problem.set)(name, tensor)
    problem.place(a, there + list(written.values()))
    if problem.run(direction, a.deterministic == _call.DETERMINISTIC_OR_WARN):
        pool.append(problem)


# ---- results ----


def like(query: Tensor, shape: Sequence[Any]) -> Tensor:
    """A tensor of this shape whose dimensions lie in memory in query's order."""
    if tuple(query.shape) == tuple(shape):
        return torch.empty_like(query)
    return torch.empty_permuted(shape, _order(query), dtype=query.dtype, device=query.device)


def _order(query: Tensor) -> list[int]:
    """The dimensions from the outermost to the innermost. One without a stride of its own is an outermost one."""
    strides = query.stride()
    inner_first = sorted(range(query.dim()), key=lambda at: strides[at] if strides[at] else float("inf"))
    return inner_first[::-1]


def padded(length: Any, multiple: int) -> Any:
    return (length + multiple - 1) // multiple * multiple


def no_numbers(query: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """In the place of seed and offset; with dropout, for tracing, where these lie."""
    device = "cpu" if dropout_p else query.device
    return torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), dtype=torch.int64, device=device)


# ---- random numbers ----

_generator = threading.Lock()


def capturing(query: Tensor) -> bool:
    return query.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def draw(query: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Seed and offset, as PyTorch's memory-efficient kernel takes them from the generator of query's device: the seed is
    the generator's, and it goes on by `count` numbers. The CPU's has no offset: there a seed is drawn."""
    if query.device.type == "cpu":
        return torch.empty((), dtype=torch.int64).random_(), torch.zeros((), dtype=torch.int64)
    if capturing(query):
        raise NotImplementedError(
            "dropout_p: not 0 while a CUDA graph is captured, where the generator cannot be read; accepted: 0, or "
            "fovea.torch.attention, which draws by an operator"
        )
    generator: Any = torch.cuda.default_generators[query.device.index]
    with _generator:
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + padded(count, 4))
    return _number(seed), _number(offset)


def _number(value: int) -> Tensor:
    return torch.tensor(value - 2**64 if value >= 2**63 else value, dtype=torch.int64)


def random_numbers(query: Tensor, dropout_p: float, seed: Tensor, offset: Tensor) -> dict[str, Any]:
    """The arguments about dropout. Seeds that lie on the CPU are read, those on query's device stay there."""
    if dropout_p == 0:
        return {}
    found: dict[str, Any] = {"dropout_p": dropout_p, "rng": "torch_mem_efficient"}
    for name, tensor in (("seed", seed), ("offset", offset)):
        if tensor.device == query.device and query.device.type != "cpu":
            found[f"{name}_tensor"] = tensor
        else:
            found[name] = int(tensor.item())
    return found


# ---- errors ----


@contextlib.contextmanager
def named(**names: str) -> Iterator[None]:
    """The library's errors begin with the name of an argument: this puts PyTorch's there."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        name, colon, rest = str(error).partition(": ")
        theirs = {**_NAMES, **names}.get(name)
        if colon and theirs:
            error.args = (f"{theirs}: {rest}",)
        raise


def refuse(name: str, given: Any, accepted: str) -> ValueError:
    return ValueError(f"{name}: {given}; accepted: {accepted}")


def shape(tensor: Tensor) -> str:
    return "shape " + ("x".join(map(str, tensor.shape)) or "()")


def need_rank(rank: int, dims: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != rank:
            raise refuse(name, shape(tensor), dims)


def need_heads_first(query: Tensor, key: Tensor, value: Tensor) -> None:
    """(B, H, S, D) that belong together: said of the tensors as they are given, not as the library gets them."""
    need_rank(4, "(B, H, S, D)", query=query, key=key, value=value)
    batch, _, _, dim = query.shape
    _, heads, rows, _ = key.shape
    if key.shape[0] != batch or key.shape[3] != dim:
        raise refuse("key", shape(key), f"(B, Hk, Sk, D), {batch}x{heads}x{rows}x{dim}")
    if value.shape[:3] != (batch, heads, rows):
        raise refuse("value", shape(value), f"(B, Hk, Sk, Dv), {batch}x{heads}x{rows}x{value.shape[3]}")


def refuse_given(**options: Any) -> None:
    """Options of PyTorch's operators that fovea has not."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}: given, and fovea has not got it; accepted: without it")
