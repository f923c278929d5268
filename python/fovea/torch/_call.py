# SPDX-License-Identifier: Apache-2.0
"""Turns tensors into a fovea_problem and calls the C library, for the CPU and for CUDA.

The arguments are those of the operator fovea::attention (_operators.py), in its order, so that forward and backward
read the same tuple. Addresses come from data_ptr(): no DLPack capsule is made, and nothing waits for the device. On
CUDA the work goes to PyTorch's current stream of the tensors' device, and workspace comes from PyTorch's allocator.

new_out(), new_lse() and new_grad() make results. The fake implementations call them as well, so that a traced graph has
the shapes and strides of the real results.

A problem that has been computed is kept for the next call with the same shapes, strides, types and options. That call
writes its addresses, seeds and stream into it. The library checks every call.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple, NoReturn, Optional

import torch
from torch import Tensor

from .. import _abi, _help
from .._library import check, encoded, lib, text
from .._problem import _ALIGN, _FLOATS, _RNG, _SWAP, _ZEROS, BOOL_ALONE, call_on_cpu, choose, heads_first, need_align

# Values of the operator's argument `deterministic`.
ANY_ORDER = 0
DETERMINISTIC = 1
DETERMINISTIC_OR_WARN = 2  # torch.use_deterministic_algorithms(True, warn_only=True)


def order() -> int:
    """That argument, as PyTorch's switch says."""
    if not torch.are_deterministic_algorithms_enabled():
        return ANY_ORDER
    return DETERMINISTIC_OR_WARN if torch.is_deterministic_algorithms_warn_only_enabled() else DETERMINISTIC


_CODES = {
    torch.float32: _abi.FP32,
    torch.float16: _abi.FP16,
    torch.bfloat16: _abi.BF16,
    torch.float64: _abi.FP64,
    torch.bool: _abi.BOOL,
    torch.int32: _abi.INT32,
    torch.int64: _abi.INT64,
}
TYPES = tuple(sorted(_CODES, key=lambda dtype: _CODES[dtype]))  # in the order of fovea_dtype
_PROBLEM_SIZE = ctypes.sizeof(_abi.Problem)
_TENSOR_SIZE = _abi.TENSOR.size
_MEMORY = ctypes.c_char * (_PROBLEM_SIZE + _TENSOR_SIZE * len(_abi.INPUTS + _abi.RESULTS + _abi.SHARDS))
# A problem's memory as words of 64 bits, in which these are numbers of words.
_WORD = 8
_DATA = ctypes.sizeof(ctypes.c_size_t) // _WORD  # of fovea_tensor
_STREAM = _abi.Problem.stream.offset // _WORD
_SEED = _abi.Problem.seed.offset // _WORD
_OFFSET = _abi.Problem.offset.offset // _WORD
_ALL_BITS = 2**64 - 1
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
        """Whether there may be rows that belong to no sequence, which the library then clears."""
        return self.packed or self.seqused_q is not None or self.seqused_k is not None

    @property
    def heads_first(self) -> bool:
        return self.layout == "bhsd" and not self.packed


TENSORS = 14  # the first arguments are tensors
DIFFERENTIABLE = ("q", "k", "v", "bias", "bias2", "sink")
DIFFERENTIABLE_AT = tuple(Arguments._fields.index(name) for name in DIFFERENTIABLE)
# Further arguments of the operators, which most calls leave out.
MORE = (
    "SymInt? position_q=None, SymInt? position_k=None, Tensor? positions_q=None, Tensor? positions_k=None, "
    "Tensor? dropout_streams=None"
)
# How errors call the tensors of a forward, and after them those that only a backward has.
NAMES = (*(name.removesuffix("_tensor") for name in Arguments._fields[:TENSORS]), "grad_out", "out", "lse", "grad_lse")


class Shard(NamedTuple):
    """The arguments of MORE: where a call's rows are in a larger problem, and which streams of random numbers its heads have."""

    position_q: Optional[int] = None
    position_k: Optional[int] = None
    positions_q: Optional[Tensor] = None
    positions_k: Optional[Tensor] = None
    dropout_streams: Optional[Tensor] = None

    @property
    def has_positions(self) -> bool:
        return any(given is not None for given in self[:4])


_COUNT = len(Arguments._fields)


def split(arguments: tuple[Any, ...]) -> tuple[Arguments, Optional[Shard]]:
    """The operator's arguments by name. PyTorch leaves out the last ones that have their default."""
    if len(arguments) == _COUNT:
        return Arguments._make(arguments), None
    more = arguments[_COUNT:]
    shard = Shard(*more) if any(given is not None for given in more) else None
    return Arguments._make(arguments[:_COUNT]), shard


def shortest(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operator's arguments, without those of MORE or with all of them."""
    a, shard = split(arguments)
    return arguments[:_COUNT] if shard is None else (*a, *shard)


def known(arguments: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    """The operator's arguments without those of MORE, which are refused."""
    for name, value in zip(Shard._fields, arguments[_COUNT:]):
        if value is not None:
            raise NotImplementedError(f"{name}: given, {where}; accepted: None")
    return arguments[:_COUNT]


# ---- results ----

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


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


def out_layout(a: Arguments) -> Layout:
    """Shape and strides. In memory the heads of a row are adjacent, whatever the layout, so that joining the heads, which a model
    does next, copies nothing. It does not depend on q's strides, which a compiler may choose otherwise than a trace had them."""
    *outer, heads_or_rows, rows_or_heads, _ = a.q.shape
    last = a.v.shape[-1]
    heads_first = a.heads_first
    rows, heads = (rows_or_heads, heads_or_rows) if heads_first else (heads_or_rows, rows_or_heads)
    step = heads * last
    strides = [last, step, 1] if heads_first else [step, last, 1]
    distance = rows * step
    for length in reversed(outer):
        strides.insert(0, distance)
        distance = distance * length
    return (*outer, heads_or_rows, rows_or_heads, last), tuple(strides)


def lse_shape(a: Arguments) -> tuple[int, ...]:
    *outer, heads, rows, _ = a.q.shape
    if a.packed or not a.heads_first:
        rows, heads = heads, rows
    return (heads, rows) if a.packed else (*outer, heads, rows)


def new_out(a: Arguments, layout: Layout) -> Tensor:
    return a.q.new_empty_strided(*layout)


def new_lse(a: Arguments, shape: tuple[int, ...]) -> Tensor:
    return a.q.new_empty(shape, dtype=torch.float64 if a.q.dtype == torch.float64 else torch.float32)


def nothing_to_launch(a: Arguments) -> bool:
    sequences = [lengths.numel() - 1 for lengths in (a.cu_seqlens_q, a.cu_seqlens_k) if lengths is not None]
    return min(a.q.numel(), a.k.numel(), a.v.numel(), *sequences) <= 0


def new_grad(a: Arguments, name: str, partial: bool) -> Tensor:
    """A gradient with the strides of its tensor. On a device the columns of a row are adjacent, as kernels require. The
    library clears rows that belong to no sequence. It does not clear a bias's gradient behind the lengths: kernels of a
    GPU write that part, on the CPU it starts as zeros."""
    tensor = getattr(a, name)
    if tensor is None:
        there = ", ".join(other for other in DIFFERENTIABLE if getattr(a, other) is not None)
        raise ValueError(f"need: {name!r}, which is not given; accepted: {there}")
    if name not in ("q", "k", "v"):
        written = not partial or (tensor.device.type != "cpu" and not nothing_to_launch(a))
        return torch.empty_like(tensor) if written else torch.zeros_like(tensor)
    grad = torch.empty_like(tensor)
    if grad.stride(-1) != 1 and grad.device.type != "cpu":
        grad = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return grad


# ---- the problem ----


class _Problem:
    """A fovea_problem and the fovea_tensors that it points to, in one block of memory. place() writes the addresses of
    tensors into it; the caller keeps these tensors alive."""

    def __init__(self, a: Arguments) -> None:
        choose("layout", a.layout, _SWAP)
        check_ranks(a)
        self._memory = _MEMORY()
        self._words = memoryview(self._memory).cast("B").cast("Q")
        self._used = _PROBLEM_SIZE
        self._slots: list[int] = []  # the words that hold addresses, in the order in which the tensors were set
        self.raw = raw = _abi.Problem.from_buffer(self._memory)
        self._pointer = ctypes.pointer(raw)
        self._heads_first = a.heads_first
        self._on_cpu = a.q.device.type == "cpu"
        self._device = a.q.device
        self._needed: Any = None  # bytes of workspace, on a device
        # Of each gradient: the index and the name of its argument, and its layout, None if new_grad() decides it anew.
        self.grads: list[tuple[int, str, Optional[Layout]]] = []
        # Of results: whether there may be rows of no sequence, and the layouts.
        self.partial = a.partial
        self.out_layout = out_layout(a)
        self.lse_shape = lse_shape(a)

        for name, tensor in zip(("q", "k", "v"), a[:3]):
            self.set_rows(name, tensor)
        for name, given in zip(_abi.INPUTS[3:], a[3:12]):
            if given is not None:
                self.set(name, given)
        for name, given in (("seed", a.seed_tensor), ("offset", a.offset_tensor)):
            if given is not None:
                self._set_word(name, given)

        raw.size = _PROBLEM_SIZE
        raw.max_seqlen_q = a.max_seqlen_q
        raw.max_seqlen_k = a.max_seqlen_k
        raw.batch_outer = a.batch_outer
        flags = 0
        if a.causal:
            flags |= _abi.CAUSAL
        if a.deterministic:
            flags |= _abi.DETERMINISTIC
        if a.partial:
            flags |= _abi.CLEAR_ROWS
        if a.scale is not None:
            flags |= _abi.SCALE
            raw.scale = a.scale
        if a.window_left != -1 or a.window_right != -1:
            flags |= _abi.WINDOW
            raw.window_left = a.window_left
            raw.window_right = a.window_right
        raw.flags = flags
        raw.softcap = a.softcap
        raw.dropout_p = a.dropout_p
        raw.rng = choose("rng", a.rng, _RNG)
        raw.align = choose("align", a.align, _ALIGN)
        if a.backend is not None:
            raw.backend = encoded(a.backend)
        if not self._on_cpu:
            device = _DEVICES.get(self._device.type)
            if device is None:
                raise NotImplementedError(f"q: lies on {self._device}; accepted: the CPU or a CUDA device")
            raw.device = device
            raw.device_index = self._device.index

    def set_shard(self, shard: Optional[Shard]) -> None:
        """After the tensors that tensors_and_key() has before these."""
        if shard is None:
            return
        raw = self.raw
        if shard.has_positions:
            raw.flags |= _abi.POSITIONS
            raw.position_q = shard.position_q or 0
            raw.position_k = shard.position_k or 0
        for name in _abi.SHARDS:
            tensor = getattr(shard, name)
            if tensor is not None:
                self.set(name, tensor)

    def set(self, name: str, tensor: Tensor) -> None:
        rank = tensor.dim()
        if rank > _abi.MAX_RANK:
            given = "x".join(map(str, tensor.shape))
            raise ValueError(f"{name}: shape {given}; accepted: at most {_abi.MAX_RANK} dimensions")
        padding = _ZEROS[rank:]
        self._put(name, tensor, rank, *tensor.shape, *padding, *tensor.stride(), *padding)

    def set_rows(self, name: str, tensor: Tensor) -> None:
        """Sets a tensor with a row for each query or key. The library has its dimensions as (..., S, H, D)."""
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
        """`dims` are shape and strides, each padded with zeros."""
        code = _CODES.get(tensor.dtype)
        if code is None:
            if name == "mask":
                accepted = BOOL_ALONE
            else:
                accepted = "int32 or int64" if name.startswith(("cu_seqlens", "seqused")) else _FLOATS
                accepted = "int64" if name in _abi.SHARDS else accepted
            raise TypeError(f"{name}: {_type(tensor)}; accepted: {accepted}")
        at = self._used
        self._used = at + _TENSOR_SIZE
        _pack(self._memory, at, _TENSOR_SIZE, 0, code, rank, _abi.TENSOR_STRIDED, 0, *dims)
        setattr(self.raw, name, ctypes.addressof(self._memory) + at)
        self._slots.append(at // _WORD + _DATA)

    def _set_word(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype not in (torch.int64, torch.uint64):
            raise TypeError(f"{name}: a tensor of {_type(tensor)}; accepted: an integer, or a tensor of one int64")
        if tensor.numel() != 1:
            given = "x".join(map(str, tensor.shape))
            raise ValueError(f"{name}: a tensor of shape {given}; accepted: an integer, or a tensor of one int64")
        self._slots.append(getattr(_abi.Problem, f"{name}_ptr").offset // _WORD)

    def place(self, a: Arguments, tensors: Iterable[Tensor]) -> None:
        """Writes what is new in each call. `tensors` are those that were set, in that order."""
        words = self._words
        for slot, tensor in zip(self._slots, tensors):
            words[slot] = tensor.data_ptr()
        words[_SEED] = a.seed & _ALL_BITS
        words[_OFFSET] = a.offset & _ALL_BITS
        if not self._on_cpu:
            words[_STREAM] = _current_stream(self._device.index)

    def run(self, direction: int, or_warn: bool) -> bool:
        """Computes. Returns whether the problem is unchanged, so that another call may use it."""
        status = self._call_library(direction)
        if status == _abi.OK:
            return True
        as_it_was = True
        if status == _abi.UNSUPPORTED and or_warn:
            why = lib.fovea_last_error().decode()
            self.raw.flags &= ~_abi.DETERMINISTIC
            as_it_was = False
            status = self._call_library(direction)
            if status == _abi.OK:
                warnings.warn(f"fovea.torch.attention: not deterministic here: {why}", stacklevel=2)
        if status != _abi.OK:
            self._refuse(status)
        return as_it_was

    def _call_library(self, direction: int) -> int:
        if self._on_cpu:
            return call_on_cpu(lib, self._pointer, direction)
        call: Callable[..., int] = lib.fovea_backward if direction == _abi.BACKWARD else lib.fovea_forward
        if self._needed is not None:
            workspace = self._workspace()
            status = call(self._pointer, workspace.data_ptr(), self._needed)
            if status != _abi.OUT_OF_MEMORY:
                return status
        # The first call, or addresses less aligned than those that the kept number is of.
        needed = ctypes.c_size_t()
        status = int(lib.fovea_workspace(self._pointer, direction, ctypes.byref(needed)))
        if status != _abi.OK:
            return status
        self._needed = needed.value
        workspace = self._workspace()
        return call(self._pointer, workspace.data_ptr(), self._needed)

    def _workspace(self) -> Tensor:
        """A workspace from PyTorch's allocator, which tracks streams and the memory pools of graphs. The caller holds
        it until it has called the library; dropping it makes the memory free for work that follows on the stream."""
        return torch.empty(self._needed, dtype=torch.uint8, device=self._device)

    def _refuse(self, status: int) -> NoReturn:
        try:
            check(status)
        except ValueError as error:
            text = str(error)
            hint = _help.layout_hint(self.raw, "bhsd" if self._heads_first else "bshd", text)
            error.args = ((heads_first(text) if self._heads_first else text) + hint,)
            raise
        raise AssertionError("check() raises for every status but OK")


# torch.cuda.current_stream(device).cuda_stream without its objects; PyTorch without CUDA has neither this nor tensors there.
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# ---- problems that are kept ----

Key = tuple[Any, ...]
_MOST_KEPT = 512  # keys: a problem has 3 KB
# The key is everything in a problem but addresses, seeds and the stream. Each key has a list, because several threads
# may compute such a problem at the same time: a call takes one out of the list, and puts it back.
_kept: dict[Key, list[_Problem]] = {}


def _pool(key: Key) -> list[_Problem]:
    pool = _kept.get(key)
    if pool is None:
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        pool = _kept.setdefault(key, [])
    return pool


def _taken(pool: list[_Problem]) -> Optional[_Problem]:
    try:
        return pool.pop()
    except IndexError:
        return None


def tensors_and_key(
    kind: Any, a: Arguments, tensors: Iterable[Optional[Tensor]], shard: Optional[Shard] = None
) -> tuple[list[Tensor], Key]:
    """The tensors that are not None, those of the shard last, and the key of their problem. Refuses tensors of another
    device than q's."""
    device = a.q.device
    there: list[Tensor] = []
    key = [kind, device, a[TENSORS + 2 :]]
    absent = 0  # before this one: so the key tells which are there
    for tensor in tensors:
        if tensor is None:
            absent += 1
            continue
        if tensor.device != device:
            name = NAMES[len(there) + absent]
            raise ValueError(f"{name}: on {tensor.device}; accepted: {device}, where q lies")
        there.append(tensor)
        key += (absent, tensor.dtype, tensor.shape, tensor.stride())
    if shard is not None:
        key += ("shard", shard.position_q, shard.position_k)
        for name, given in zip(_abi.SHARDS, shard[2:]):
            if given is not None:
                if given.device != device:
                    raise ValueError(f"{name}: on {given.device}; accepted: {device}, where q lies")
                there.append(given)
                key += (name, given.dtype, given.shape, given.stride())
    return there, tuple(key)


# ---- the alignment ----


def _need_no_align(a: Arguments, raw: Optional[_abi.Problem] = None) -> None:
    """Refuses a missing alignment, unless queries and keys have the same lengths."""
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
                return  # not the same number of sequences: the library reports that
            differing = [b for b, (n, m) in enumerate(zip(lengths_q, lengths_k)) if n != m]
            if not differing:
                return
            b = differing[0]
            given = f"Sq={lengths_q[b]} and Sk={lengths_k[b]} in sequence {b}"
    else:
        sq, sk = _rows(a, a.q), _rows(a, a.k)
        if sq == sk:
            return
        raise ValueError(need_align(what, f"Sq={sq} and Sk={sk}", raw, a.layout))
    raise ValueError(need_align(what, given))


def _rows(a: Arguments, tensor: Tensor) -> int:
    return tensor.shape[-2 if a.heads_first else -3]


def _lengths(a: Arguments, side: str) -> list[int]:
    used = getattr(a, f"seqused_{side}")
    if used is not None:
        return list(used.reshape(-1).tolist())
    cu_seqlens = getattr(a, f"cu_seqlens_{side}")
    if cu_seqlens is not None:
        return list(cu_seqlens.reshape(-1).diff().tolist())
    sequences = a.q.shape[:-3].numel()
    return [_rows(a, a.q if side == "q" else a.k)] * sequences


# ---- the calls ----


def compute(
    arguments: tuple[Any, ...], with_lse: bool, first: Optional[Callable[[tuple[Any, ...]], None]] = None,
    into: Optional[tuple[Tensor, Tensor]] = None,
) -> tuple[Tensor, Optional[Tensor]]:  # fmt: skip
    """The forward, whose results are written `into` out and lse if these are given. `first` is called before the first one of
    its kind on a device."""
    a, shard = split(arguments)
    there, key = tensors_and_key((with_lse, *(x.stride() for x in into or ())), a, arguments[:TENSORS], shard)
    pool = _pool(key)
    problem: Any = _taken(pool)
    is_new = problem is None
    if is_new:
        problem = _Problem(a)
        problem.set_shard(shard)
    if a.align is None and (is_new or problem.partial) and not (shard is not None and shard.has_positions):
        _need_no_align(a, problem.raw)
    lse: Any = None
    if into is not None:
        out, lse = into
        there += into
    else:
        out = new_out(a, problem.out_layout)
        there.append(out)
    if with_lse and into is None:
        lse = new_lse(a, problem.lse_shape) if is_new else problem.lse_model.new_empty(problem.lse_shape)
        there.append(lse)
    if is_new:
        problem.set_rows("out", out)
        if with_lse:
            problem.set("lse", lse)
            problem.lse_model = lse.new_empty(0)  # a tensor of this type and device: saying them takes a microsecond
        if first is not None and shard is None and not problem._on_cpu:
            first(arguments)
    problem.place(a, there)
    if problem.run(_abi.FORWARD, a.deterministic == DETERMINISTIC_OR_WARN):
        pool.append(problem)
    return out, lse


def merge(arguments: tuple[Any, ...], out: Tensor, lse: Tensor) -> None:
    """The forward of a result over other keys, out and lse, which become that over those keys and these."""
    a, shard = split(arguments)
    there, _ = tensors_and_key("merge", a, arguments[:TENSORS], shard)
    problem = _Problem(a)
    problem.set_shard(shard)
    problem.set_rows("out", out)
    problem.set("lse", lse)
    problem.raw.accumulate = _abi.ACCUMULATE_OUT
    problem.place(a, [*there, out, lse])
    problem.run(_abi.FORWARD, a.deterministic == DETERMINISTIC_OR_WARN)


def forward(*arguments: Any) -> tuple[Tensor, Any]:
    """fovea::attention"""
    return compute(arguments, with_lse=True)


def backward(
    grad_out: Tensor, grad_lse: Optional[Tensor], out: Tensor, lse: Tensor, need: Sequence[bool], *arguments: Any,
    into: Optional[dict[str, Tensor]] = None, sums: Optional[dict[str, Tensor]] = None,
) -> list[Tensor]:  # fmt: skip
    """The gradients of DIFFERENTIABLE for which `need` is true, in that order. Those of `into` are written into its tensors, also of
    fp32 where inputs have 16 bits. Those of `sums` are added to its tensors, of fp32 or fp64."""
    sums, into = sums or {}, into or {}
    given = {**into, **sums}
    a, shard = split(arguments)
    if grad_out.stride(-1) != 1 and grad_out.device.type != "cpu":
        grad_out = grad_out.contiguous()
    kind: Any = tuple(need)
    if given:
        kind = (*kind, *((name, name in sums, tensor.dtype, tensor.stride()) for name, tensor in given.items()))
    there, key = tensors_and_key(kind, a, (*arguments[:TENSORS], grad_out, out, lse, grad_lse), shard)
    pool = _pool(key)
    problem: Any = _taken(pool)
    is_new = problem is None
    if is_new:
        problem = _Problem(a)
        problem.set_rows("grad_out", grad_out)
        problem.set_rows("out", out)
        problem.set("lse", lse)
        if grad_lse is not None:
            problem.set("grad_lse", grad_lse)
        problem.set_shard(shard)
    if is_new:
        grads: list[Tensor] = []
        for name, index, wanted in zip(DIFFERENTIABLE, DIFFERENTIABLE_AT, need):
            if wanted:
                grad = given[name] if name in given else new_grad(a, name, problem.partial)
                if name in sums:
                    problem.raw.accumulate |= _abi.ACCUMULATE_GRADS[name]
                put = problem.set_rows if name in ("q", "k", "v") else problem.set
                put(f"grad_{name}", grad)
                grads.append(grad)
                may_keep = not problem.partial or name in ("q", "k", "v")
                problem.grads.append((index, name, (tuple(grad.shape), grad.stride()) if may_keep else None))
    else:
        grads = [
            given[name] if name in given
            else arguments[index].new_empty_strided(*layout) if layout else new_grad(a, name, problem.partial)
            for index, name, layout in problem.grads
        ]
    problem.place(a, there + grads)
    if problem.run(_abi.BACKWARD, a.deterministic == DETERMINISTIC_OR_WARN):
        pool.append(problem)
    return grads
