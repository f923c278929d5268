# SPDX-License-Identifier: Apache-2.0
"""Calls of the C library on the tensors of tensors.py, on the CPU or on a device."""

from __future__ import annotations

import ctypes
import math

import torch

from fovea import _abi
from fovea._library import check, lib
from tensors import CODES, MARGIN, Tensors, pattern

_ALL = (*_abi.INPUTS, *_abi.RESULTS, *_abi.SHARDS)


class Call:
    """A fovea_problem over Tensors, with workspaces that have margins of their own."""

    def __init__(self, tensors: Tensors, backend: str = "") -> None:
        p = tensors.problem
        self.tensors = tensors
        self.device = device = tensors.device
        self.raw = raw = _abi.Problem(ctypes.sizeof(_abi.Problem))
        self._views = (ctypes.c_char * (_abi.TENSOR.size * len(_ALL)))()
        for at, name in enumerate(_ALL):
            if name not in tensors:
                continue
            t = tensors[name]
            rank = len(t.shape)
            padding = (0,) * (_abi.MAX_RANK - rank)
            offset = at * _abi.TENSOR.size
            _abi.TENSOR.pack_into(
                self._views, offset, _abi.TENSOR.size, t.address if math.prod(t.shape) else 0, CODES[t.type], rank,
                _abi.TENSOR_STRIDED, 0, *t.shape, *padding, *t.strides, *padding,
            )  # fmt: skip
            setattr(raw, name, ctypes.addressof(self._views) + offset)
        flags = _abi.WINDOW
        flags |= _abi.CAUSAL if p.causal else 0
        flags |= _abi.DETERMINISTIC if p.det else 0
        if p.scale is not None:
            flags |= _abi.SCALE
            raw.scale = p.scale
        raw.flags = flags
        raw.align = _abi.TOP_LEFT if p.top_left else _abi.BOTTOM_RIGHT
        raw.window_left, raw.window_right = p.window
        if p.has_positions:
            raw.flags |= _abi.POSITIONS
            raw.position_q, raw.position_k = p.position or (0, 0)
        raw.softcap = p.softcap
        raw.dropout_p = p.dropout
        raw.rng = _abi.RNG_FOVEA if p.rng == "fovea" else _abi.RNG_TORCH_MEM_EFFICIENT
        raw.seed, raw.offset = p.seed % 2**64, p.offset % 2**64
        if p.packed:
            raw.max_seqlen_q, raw.max_seqlen_k = p.sq, p.sk
            raw.batch_outer = p.batch[0] if len(p.batch) == 2 else 0
        if backend:
            raw.backend = backend.encode()
        if device.type == "cuda":
            raw.device = 1
            raw.device_index = device.index or 0
        self._workspaces: dict[bool, tuple[torch.Tensor, int]] = {}

    def workspace(self, backward: bool) -> tuple[torch.Tensor, int]:
        """(memory with a margin on either side, the bytes asked for); full of NaN."""
        if backward not in self._workspaces:
            self._accumulate(backward)
            needed = ctypes.c_size_t()
            check(lib.fovea_workspace(ctypes.byref(self.raw), int(backward), ctypes.byref(needed)))
            memory = pattern(needed.value + 2 * MARGIN, 1, self.device)
            self._workspaces[backward] = memory, needed.value
        return self._workspaces[backward]

    def _accumulate(self, backward: bool) -> None:
        adds = self.tensors.problem.adds(backward)
        self.raw.accumulate = sum(_abi.ACCUMULATE_GRADS[name] for name in adds) if backward else _abi.ACCUMULATE_OUT * bool(adds)

    def prepare(self, backward: bool) -> None:
        self.tensors.prepare(backward)
        memory, needed = self.workspace(backward)
        memory[MARGIN : MARGIN + needed] = 0xFF

    def run(self, backward: bool) -> None:
        """On PyTorch's current stream; nothing else is allocated or waited for."""
        memory, needed = self.workspace(backward)
        self._accumulate(backward)
        if self.device.type == "cuda":
            self.raw.stream = torch.cuda.current_stream(self.device).cuda_stream
        function = lib.fovea_backward if backward else lib.fovea_forward
        check(function(ctypes.byref(self.raw), memory.data_ptr() + MARGIN, needed))

    def trespass(self, backward: bool) -> list[tuple[str, torch.Tensor]]:
        memory, needed = self.workspace(backward)
        written = memory != pattern(memory.numel(), 1, self.device)
        written[MARGIN : MARGIN + needed] = False
        return [*self.tensors.trespass(), ("workspace", written.sum())]
