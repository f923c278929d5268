# SPDX-License-Identifier: Apache-2.0
"""From tensors to a fovea_problem, and the call of the C library: one file for the CPU and for CUDA.

The arguments are those of the operator fovea::attention (_operators.py), in its order, so that forward and backward
read the same tuple. Addresses come from data_ptr(): no DLPack capsule is made, and nothing waits for the device. On
CUDA the work goes to PyTorch's current stream of the tensors' device, and workspace comes from PyTorch's allocator.

new_out(), new_lse() and new_grad() make results; the fake implementations call them as well, so that a traced graph
sees the shapes and strides of the real ones.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, Optional

import torch
from torch import Tensor

from fovea import _abi
from fovea._library import check, lib
from fovea._problem import _ALIGN, _FLOATS, _RNG, _ZEROS, _scratch

# Values of the operator's argument `deterministic`.
ANY_ORDER = 0
DETERMINISTIC = 1
DETERMINISTIC_OR_WARN = 2  # torch.use_deterministic_algorithms(True, warn_only=True)

_CODES = {
    torch.float32: _abi.FP32,
    torch.float16: _abi.FP16,
    torch.bfloat16: _abi.BF16,
    torch.float64: _abi.FP64,
    torch.bool: _abi.BOOL,
    torch.int32: _abi.INT32,
    torch.int64: _abi.INT64,
}
_PROBLEM_SIZE = ctypes.sizeof(_abi.Problem)
_TENSOR_SIZE = _abi.TENSOR.size
_TENSORS = ctypes.c_char * (_TENSOR_SIZE * len(_abi.INPUTS + _abi.RESULTS))
_pack = _abi.TENSOR.pack_into
_DEVICES = {"cpu": 0, "cuda": 1}  # fovea_device


class Arguments(NamedTuple):
    """The arguments of fovea::attention by name."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Optional[Tensor]
    bias2: Optional[Tensor]
    mask: Optional[Tensor]
    alibi_slopes: Optional[Tensor]
    sink: Optional[Tensor]
    cu_seqlens_q: Optional[Tensor]
    cu_seqlens_k: Optional[Tensor]
    seqused_q: Optional[Tensor]
    seqused_k: Optional[Tensor]
    seed_tensor: Optional[Tensor]
    offset_tensor: Optional[Tensor]
    seed: int
    offset: int
    scale: Optional[float]
    causal: bool
    window_left: int
    window_right: int
    align: Optional[str]
    softcap: float
    dropout_p: float
    rng: str
    max_seqlen_q: int
    max_seqlen_k: int
    batch_outer: int
    layout: str
    deterministic: int
    backend: Optional[str]

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None or self.cu_seqlens_k is not None

    @property
    def partial(self) -> bool:
        """Whether there may be rows that no sequence owns; the library leaves those as they are."""
        return self.packed or self.seqused_q is not None or self.seqused_k is not None

    @property
    def heads_first(self) -> bool:
        return self.layout == "bhsd" and not self.packed


TENSORS = 14  # so many of the arguments are tensors
DIFFERENTIABLE = ("q", "k", "v", "bias", "bias2", "sink")


# ---- results ----


def check_ranks(a: Arguments) -> None:
    for name, tensor in (("q", a.q), ("k", a.k), ("v", a.v)):
        if tensor.dim() == 3 if a.packed else tensor.dim() in (4, 5):
            continue
        heads, last = ("Hq" if name == "q" else "Hk"), ("Dv" if name == "v" else "D")
        if a.packed:
            accepted = f"(total, {heads}, {last}), as cu_seqlens are given"
        else:
            rows = f"{heads}, S, {last}" if a.heads_first else f"S, {heads}, {last}"
            accepted = f"(B, {rows}) or (B1, B2, {rows})"
        given = "x".join(map(str, tensor.shape)) or "()"
        raise ValueError(f"{name}: shape {given}; accepted: {accepted}")


def new_out(a: Arguments) -> Tensor:
    """In memory a row's heads lie together, whatever the layout, as in the result of PyTorch's fused kernels: joining
    the heads, which comes next in a model, then copies nothing."""
    q, last = a.q, a.v.shape[-1]
    if not a.heads_first:
        out = q.new_empty((*q.shape[:-1], last))
    elif q.dim() == 4:
        batch, heads, rows, _ = q.shape
        step = heads * last
        out = q.new_empty_strided((batch, heads, rows, last), (rows * step, last, step, 1))
    else:
        outer, inner, heads, rows, _ = q.shape
        step = heads * last
        out = q.new_empty_strided(
            (outer, inner, heads, rows, last), (inner * rows * step, rows * step, last, step, 1)
        )
    return out.zero_() if a.partial else out


def new_lse(a: Arguments) -> Tensor:
    q = a.q
    shape = q.shape
    if a.packed:
        shape = (shape[1], shape[0])
    elif a.heads_first:
        shape = shape[:-1]
    else:
        shape = (*shape[:-3], shape[-2], shape[-3])
    lse = q.new_empty(shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return lse.fill_(-torch.inf) if a.partial else lse


def new_grad(a: Arguments, name: str) -> Tensor:
    tensor = getattr(a, name)
    return torch.zeros_like(tensor) if a.partial else torch.empty_like(tensor)


# ---- the problem ----


class _Problem:
    """A fovea_problem; whoever makes it keeps the tensors alive."""

    def __init__(self, a: Arguments) -> None:
        check_ranks(a)
        self.raw = raw = _abi.Problem(_PROBLEM_SIZE)
        self._tensors = _TENSORS()
        self._base = ctypes.addressof(self._tensors)
        self._used = 0
        self._heads_first = a.heads_first

        for name, tensor in zip(("q", "k", "v"), a):
            self.set_rows(name, tensor)
        for name, tensor in zip(_abi.INPUTS[3:], a[3:12]):
            if tensor is not None:
                self.set(name, tensor)
        if a.seed_tensor is not None:
            raw.seed_ptr = self._word("seed", a.seed_tensor)
        if a.offset_tensor is not None:
            raw.offset_ptr = self._word("offset", a.offset_tensor)
        raw.seed = a.seed  # ctypes takes it modulo 2^64
        raw.offset = a.offset

        flags = 0
        if a.causal:
            flags |= _abi.CAUSAL
        if a.deterministic:
            flags |= _abi.DETERMINISTIC
        if a.scale is not None:
            flags |= _abi.SCALE
            raw.scale = a.scale
        if a.window_left != -1 or a.window_right != -1:
            flags |= _abi.WINDOW
            raw.window_left = a.window_left
            raw.window_right = a.window_right
        raw.flags = flags
        raw.softcap = a.softcap
        if a.dropout_p != 0:
            raw.dropout_p = a.dropout_p
            raw.rng = _RNG[a.rng]
        if a.packed:
            raw.max_seqlen_q = a.max_seqlen_q
            raw.max_seqlen_k = a.max_seqlen_k
            raw.batch_outer = a.batch_outer
        if a.align is None:
            _need_no_align(a)
        else:
            raw.align = _ALIGN[a.align]
        if a.backend is not None:
            raw.backend = a.backend.encode()

        self._device = device = a.q.device
        self._on_cpu = device.type == "cpu"
        if not self._on_cpu:
            raw.device = _DEVICES[device.type]
            raw.device_index = device.index
            raw.stream = torch.cuda.current_stream(device).cuda_stream

    def set(self, name: str, tensor: Tensor) -> None:
        rank = tensor.dim()
        if rank > _abi.MAX_RANK:
            given = "x".join(map(str, tensor.shape))
            raise ValueError(f"{name}: shape {given}; accepted: at most {_abi.MAX_RANK} dimensions")
        padding = _ZEROS[rank:]
        self._put(name, tensor, rank, *tensor.shape, *padding, *tensor.stride(), *padding)

    def set_rows(self, name: str, tensor: Tensor) -> None:
        """A tensor with a row for each query or key: the library has its dimensions as (..., S, H, D)."""
        if not self._heads_first:
            self.set(name, tensor)
        elif tensor.dim() == 4:
            b, h, s, d = tensor.shape
            along_b, along_h, along_s, along_d = tensor.stride()
            self._put(name, tensor, 4, b, s, h, d, 0, along_b, along_s, along_h, along_d, 0)
        else:
            outer, inner, h, s, d = tensor.shape
            along_outer, along_inner, along_h, along_s, along_d = tensor.stride()
            self._put(name, tensor, 5, outer, inner, s, h, d, along_outer, along_inner, along_s, along_h, along_d)

    def _put(self, name: str, tensor: Tensor, rank: int, *dims: int) -> None:
        """`dims`: shape and strides, each filled up with zeros."""
        code = _CODES.get(tensor.dtype)
        if code is None:
            accepted = "bool; numbers that are added to scores go into bias" if name == "mask" else _FLOATS
            raise TypeError(f"{name}: {_type(tensor)}; accepted: {accepted}")
        at = self._used
        self._used = at + _TENSOR_SIZE
        _pack(self._tensors, at, _TENSOR_SIZE, tensor.data_ptr(), code, rank, _abi.TENSOR_STRIDED, 0, *dims)
        setattr(self.raw, name, self._base + at)

    def _word(self, name: str, tensor: Tensor) -> int:
        if tensor.dtype not in (torch.int64, torch.uint64):
            raise TypeError(f"{name}: a tensor of {_type(tensor)}; accepted: an integer, or a tensor of one int64")
        if tensor.numel() != 1:
            given = "x".join(map(str, tensor.shape))
            raise ValueError(f"{name}: a tensor of shape {given}; accepted: an integer, or a tensor of one int64")
        return tensor.data_ptr()

    def run(self, direction: int, or_warn: bool) -> None:
        raw = ctypes.byref(self.raw)
        needed = ctypes.c_size_t()
        status = lib.fovea_workspace(raw, direction, ctypes.byref(needed))
        if status == _abi.UNSUPPORTED and or_warn:
            why = lib.fovea_last_error().decode()
            self.raw.flags &= ~_abi.DETERMINISTIC
            status = lib.fovea_workspace(raw, direction, ctypes.byref(needed))
            if status == _abi.OK:
                warnings.warn(f"fovea.torch.attention: not deterministic here: {why}", stacklevel=2)
        if status == _abi.OK:
            call = lib.fovea_backward if direction == _abi.BACKWARD else lib.fovea_forward
            if self._on_cpu:
                address, _keep = _scratch.of(needed.value)
            else:
                _keep = torch.empty(needed.value, dtype=torch.uint8, device=self._device)
                address = _keep.data_ptr()
            status = call(raw, address, needed.value)
        if status != _abi.OK:
            self._refuse(status)

    def _refuse(self, status: int) -> NoReturn:
        try:
            check(status)
        except ValueError as error:
            if self._heads_first and "shape" in str(error):
                error.args = (f"{error} (layout='bhsd': shapes are given here as B, S, H, D)",)
            raise
        raise AssertionError("check() raises for every status but OK")


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _need_no_align(a: Arguments) -> None:
    """Bottom-right is the default only where it cannot surprise."""
    if a.causal:
        what = "causal"
    elif a.window_left != -1 or a.window_right != -1:
        what = "window"
    elif a.alibi_slopes is not None:
        what = "alibi_slopes"
    else:
        return
    used_q, used_k = a.seqused_q, a.seqused_k
    if a.partial:
        if used_q is used_k and a.cu_seqlens_q is a.cu_seqlens_k and (a.packed or _rows(a, a.q) == _rows(a, a.k)):
            return
        if a.q.device.type != "cpu":
            given = "lengths that lie on the device"
        else:
            lengths_q, lengths_k = _lengths(a, "q"), _lengths(a, "k")
            if len(lengths_q) != len(lengths_k):
                return  # not the same number of sequences: the library says so
            differing = [b for b, (n, m) in enumerate(zip(lengths_q, lengths_k)) if n != m]
            if not differing:
                return
            b = differing[0]
            given = f"Sq={lengths_q[b]} and Sk={lengths_k[b]} in sequence {b}"
    else:
        sq, sk = _rows(a, a.q), _rows(a, a.k)
        if sq == sk:
            return
        given = f"Sq={sq} and Sk={sk}"
    raise ValueError(
        f"align: None with {what}, {given}; accepted: 'bottom_right' (the last query meets the last key, as in "
        "FlashAttention) or 'top_left' (the first meets the first, as PyTorch's is_causal)"
    )


def _rows(a: Arguments, tensor: Tensor) -> int:
    return tensor.shape[-2 if a.heads_first else -3]


def _lengths(a: Arguments, side: str) -> list[int]:
    used = getattr(a, f"seqused_{side}")
    if used is not None:
        return used.reshape(-1).tolist()
    cu_seqlens = getattr(a, f"cu_seqlens_{side}")
    if cu_seqlens is not None:
        return cu_seqlens.reshape(-1).diff().tolist()
    sequences = a.q.shape[:-3].numel()
    return [_rows(a, a.q if side == "q" else a.k)] * sequences


# ---- the calls ----


def forward(*arguments: Any, with_lse: bool = True) -> tuple[Tensor, Optional[Tensor]]:
    """fovea::attention"""
    a = Arguments._make(arguments)
    problem = _Problem(a)
    out = new_out(a)
    problem.set_rows("out", out)
    lse = None
    if with_lse:
        lse = new_lse(a)
        problem.set("lse", lse)
    problem.run(_abi.FORWARD, a.deterministic == DETERMINISTIC_OR_WARN)
    return out, lse


def forward_without_lse(*arguments: Any) -> tuple[Tensor, None]:
    return forward(*arguments, with_lse=False)


def backward(
    grad_out: Tensor, grad_lse: Optional[Tensor], out: Tensor, lse: Tensor, need: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    """fovea::attention_backward: the gradients that `need` asks for, of DIFFERENTIABLE in its order."""
    a = Arguments(*arguments)
    problem = _Problem(a)
    if grad_out.device.type != "cpu" and grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    problem.set_rows("grad_out", grad_out)
    problem.set_rows("out", out)
    problem.set("lse", lse)
    if grad_lse is not None:
        problem.set("grad_lse", grad_lse)
    grads = []
    for name, wanted in zip(DIFFERENTIABLE, need):
        if wanted:
            grad = new_grad(a, name)
            put = problem.set_rows if name in ("q", "k", "v") else problem.set
            put(f"grad_{name}", grad)
            grads.append(grad)
    problem.run(_abi.BACKWARD, a.deterministic == DETERMINISTIC_OR_WARN)
    return grads
