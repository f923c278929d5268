# SPDX-License-Identifier: Apache-2.0
"""A call as JAX's primitives have it: the options, which are static, and which tensors are given and wanted."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from .. import _abi, _help
from .._library import check, lib, text
from .._problem import _ACCEPTED, _ALIGN, _CODES, _FLOATS, _ROWS, heads_first, shape_text

Shape = tuple[int, ...]
Aval = tuple[Shape, str]  # a shape and the name of an element type

SEED = "seed"  # four words of 32 bits: seed and offset
STREAMS = "dropout_streams"  # two words of 32 bits for each number, which need no 64-bit types of JAX: the low one first
TENSORS = (*_abi.INPUTS, *_abi.RESULTS, STREAMS)
_PROBLEM_SIZE = ctypes.sizeof(_abi.Problem)
_ZEROS = (0,) * _abi.MAX_RANK
_ADDRESS = 4096  # of no memory: nothing is read before a call


class Call(NamedTuple):
    """The static part of a forward or a backward. `given` are the names of the operands, in the order of the C ABI, the
    seed last; `results` those of the results."""

    direction: int
    given: tuple[str, ...]
    results: tuple[str, ...]
    causal: bool
    left: int
    right: int
    align: Optional[str]
    scale: Optional[float]
    softcap: float
    dropout_p: float
    max_seqlen_q: int
    max_seqlen_k: int
    batch_outer: int
    heads_first: bool
    deterministic: bool
    backend: Optional[str]

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed."""
        return "cu_seqlens_q" in self.given or "cu_seqlens_k" in self.given

    def backward(self, need: Sequence[str], with_grad_lse: bool) -> Call:
        """The backward of this forward, for the gradients of `need`."""
        of_rows = ("out", "lse", "grad_out", "grad_lse") if with_grad_lse else ("out", "lse", "grad_out")
        names = {*self.given, *of_rows}
        given = tuple(name for name in (*TENSORS, SEED) if name in names)
        results = tuple(f"grad_{name}" for name in need)
        return self._replace(direction=_abi.BACKWARD, given=given, results=results)

    def with_streams(self) -> Call:
        """This call with the numbers of dropout's streams as one more operand, before the seed."""
        return self._replace(given=(*self.given[:-1], STREAMS, SEED))

    # ---- shapes ----

    def entries(self, shapes: Mapping[str, Shape]) -> Shape:
        """The batch's levels: (B,) or (B1, B2)."""
        if not self.packed:
            return shapes["q"][:-3]
        batch = shapes["cu_seqlens_q" if "cu_seqlens_q" in self.given else "cu_seqlens_k"][0] - 1
        return (self.batch_outer, batch // self.batch_outer) if self.batch_outer else (batch,)

    def rows_first(self, shape: Shape) -> Shape:
        """The shape (..., S, H, D) of a tensor of rows, or the reverse."""
        return (*shape[:-3], shape[-2], shape[-3], shape[-1]) if self.heads_first else shape

    def results_of(self, avals: Mapping[str, Aval]) -> list[Aval]:
        """The shapes and types of the results."""
        q, dtype = avals["q"]
        found: list[Aval] = []
        for name in self.results:
            if name == "out":
                found.append(((*q[:-1], avals["v"][0][-1]), dtype))
            elif name == "lse":
                rows = self.rows_first(q)
                shape = (rows[1], rows[0]) if self.packed else (*rows[:-3], rows[-2], rows[-3])
                found.append((shape, "float64" if dtype == "float64" else "float32"))
            else:
                found.append(avals[name[len("grad_") :]])
        return found

    # ---- the C ABI ----

    def flags(self) -> int:
        """fovea_problem::flags"""
        flags = 0
        if self.causal:
            flags |= _abi.CAUSAL
        if self.deterministic:
            flags |= _abi.DETERMINISTIC
        if self.scale is not None:
            flags |= _abi.SCALE
        if self.left != -1 or self.right != -1:
            flags |= _abi.WINDOW
        if self.packed or "seqused_q" in self.given or "seqused_k" in self.given:
            flags |= _abi.CLEAR_ROWS  # memory of results has any content
        return flags

    def window(self) -> tuple[int, int]:
        """window_left and window_right, 0 where the flag is not set."""
        return (self.left, self.right) if self.left != -1 or self.right != -1 else (0, 0)

    def attributes(self) -> dict[str, Any]:
        """The attributes that src/python/xla.c reads."""
        integers = (
            sum(1 << TENSORS.index(name) for name in self.given if name != SEED),
            sum(1 << TENSORS.index(name) for name in self.results),
            int(SEED in self.given),
            self.flags(),
            _ALIGN[self.align],
            *self.window(),
            self.max_seqlen_q,
            self.max_seqlen_k,
            self.batch_outer,
            int(self.heads_first),
        )
        numbers = (0.0 if self.scale is None else self.scale, self.softcap, self.dropout_p)
        return {
            "integers": np.array(integers, np.int64),
            "numbers": np.array(numbers, np.float64),
            "backend": self.backend or "",
        }


class Problem:
    """A fovea_problem without data, for what the library says of shapes, types and options."""

    def __init__(self, call: Call, avals: Mapping[str, Aval], device: Optional[int] = None) -> None:
        self._call = call
        self._on_cuda = device is not None
        self._kept: list[Any] = []
        raw = self.raw = _abi.Problem(_PROBLEM_SIZE)
        raw.flags = call.flags()
        raw.align = _ALIGN[call.align]
        raw.window_left, raw.window_right = call.window()
        raw.scale = 0.0 if call.scale is None else call.scale
        raw.softcap = call.softcap
        raw.dropout_p = call.dropout_p
        raw.max_seqlen_q = call.max_seqlen_q
        raw.max_seqlen_k = call.max_seqlen_k
        if device is None and call.packed:  # on the CPU the call reads them from cu_seqlens
            raw.max_seqlen_q = call.max_seqlen_q or _longest(avals, "q", -2)
            raw.max_seqlen_k = call.max_seqlen_k or _longest(avals, "k", -1)
        raw.batch_outer = call.batch_outer
        if call.backend is not None:
            raw.backend = call.backend.encode()
        if device is not None:
            raw.device = 1  # FOVEA_CUDA
            raw.device_index = device
        tensors = {name: avals[name] for name in call.given if name != SEED}
        tensors.update(zip(call.results, call.results_of(avals)))
        for name, (shape, dtype) in tensors.items():
            if name == STREAMS:
                self._set(name, shape[:-1], "int64")
            else:
                self._set(name, shape, dtype)

    def _set(self, name: str, shape: Shape, dtype: str) -> None:
        code = _CODES.get(dtype)
        if code is None:
            raise TypeError(f"{name}: {dtype}; accepted: {_ACCEPTED.get(name, _FLOATS)}")
        rank = len(shape)
        if rank > _abi.MAX_RANK:
            raise ValueError(f"{name}: shape {shape_text(shape)}; accepted: at most {_abi.MAX_RANK} dimensions")
        if name in _ROWS:
            shape = self._call.rows_first(shape)
        padding = _ZEROS[rank:]
        # So that the kernels are prepared that clear rows: lengths without an address count as absent.
        address = _ADDRESS if self._on_cuda and name.startswith(("cu_seqlens", "seqused")) else 0
        packed = _abi.TENSOR.pack(_abi.TENSOR.size, address, code, rank, 0, 0, *shape, *padding, *_ZEROS)
        memory = ctypes.create_string_buffer(packed, _abi.TENSOR.size)
        self._kept.append(memory)
        setattr(self.raw, name, ctypes.addressof(memory))

    def check(self) -> None:
        """Refuses what the library refuses, whatever the device."""
        self._or_refuse(lambda: text(lib.fovea_describe, ctypes.byref(self.raw), self._call.direction))

    def workspace(self) -> int:
        """Prepares the kernels on a CUDA device; the bytes that the call needs there."""
        needed = ctypes.c_size_t()
        raw, direction = ctypes.byref(self.raw), self._call.direction
        self._or_refuse(lambda: check(lib.fovea_workspace(raw, direction, ctypes.byref(needed))))
        self._or_refuse(lambda: check(lib.fovea_prepare(raw, direction)))
        return needed.value

    def _or_refuse(self, function: Any) -> None:
        try:
            function()
        except ValueError as error:
            said = str(error)
            hint = _help.layout_hint(self.raw, "bhsd" if self._call.heads_first else "bshd", said)
            error.args = ((heads_first(said) if self._call.heads_first else said) + hint,)
            raise


def _longest(avals: Mapping[str, Aval], side: str, dim: int) -> int:
    """A length that the longest sequence may have: the one that biases and masks are for, else that of all rows."""
    planes = [avals[name][0] for name in ("bias", "bias2", "mask") if name in avals]
    found = max((shape[dim] for shape in planes if len(shape) >= -dim), default=1)
    return found if found > 1 else avals[side][0][0]

