# SPDX-License-Identifier: Apache-2.0
"""Turns the keywords of the API into a fovea_problem.

The C library checks the problem, with its own messages. The checks here are of what it cannot see: Python's types,
choices that have a default in C and none in Python (align, seed), and element types without a name in C.
"""

from __future__ import annotations

import ctypes
import operator
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Callable, Optional

import numpy as np

from . import _abi, _help
from ._arrays import Fresh, Maker, Place, Shape, View, place_of, read
from ._library import check, encoded, lib, text

_CODES = {
    "float32": _abi.FP32,
    "float16": _abi.FP16,
    "bfloat16": _abi.BF16,
    "float64": _abi.FP64,
    "bool": _abi.BOOL,
    "int32": _abi.INT32,
    "int64": _abi.INT64,
}
_FLOATS = "float32, float16, bfloat16 or float64"
BOOL_ALONE = "bool; mask != 0 makes one of a mask of 0 and 1"  # floating-point types: validate_planes.cpp
_ACCEPTED = {
    "mask": BOOL_ALONE,
    "alibi_slopes": "float32 (float64 with float64 q)",
    "sink": "float32 (float64 with float64 q)",
    "lse": "float32 (float64 with float64 q)",
    "grad_lse": "float32 (float64 with float64 q)",
    "cu_seqlens_q": "int32 or int64",
    "cu_seqlens_k": "int32 or int64",
    "seqused_q": "int32",
    "seqused_k": "int32",
    "positions_q": "int64",
    "positions_k": "int64",
    "dropout_streams": "int64",
}
_ALIGN = {"bottom_right": _abi.BOTTOM_RIGHT, "top_left": _abi.TOP_LEFT, None: _abi.BOTTOM_RIGHT}
_RNG = {"fovea": _abi.RNG_FOVEA, "torch_mem_efficient": _abi.RNG_TORCH_MEM_EFFICIENT}
_SWAP = {"bshd": False, "bhsd": True}

DIFFERENTIABLE = ("q", "k", "v", "bias", "bias2", "sink")
_OPTIONAL = ("bias", "bias2", "mask", "alibi_slopes", "sink")
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
_SMALL = frozenset((*_LENGTHS, *_abi.SHARDS, "alibi_slopes"))  # on the CPU these are converted from other types
# Tensors with a row for each query or key: `layout` is the order of their dimensions.
_ROWS = frozenset(("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v"))

_PROBLEM_SIZE = ctypes.sizeof(_abi.Problem)
_TENSOR_SIZE = _abi.TENSOR.size
_TENSORS = ctypes.c_char * (_TENSOR_SIZE * len(_abi.INPUTS + _abi.RESULTS + _abi.SHARDS))
_ZEROS = (0,) * _abi.MAX_RANK


class _Scratch(threading.local):
    """Workspaces on the CPU. A small one is kept for the thread's next call: fresh memory costs a fault for each page,
    which in some states of the heap takes as long as a backward of 64 rows.

    Python code may call fovea again in the middle of a call: a signal handler, a finalizer, a trace function. It never
    runs while C uses the workspace, but it may replace the one that is kept. Hence `kept` is read once in a call, and
    the caller holds what it read until C has returned.
    """

    LARGEST_KEPT = 4 << 20

    def __init__(self) -> None:
        self.kept: tuple[int, int, Optional[np.ndarray[Any, Any]]] = (0, 0, None)  # address, bytes, its owner

    def of(self, size: int) -> tuple[int, int, Optional[np.ndarray[Any, Any]]]:
        """Address, bytes and owner of a workspace of at least `size` bytes."""
        kept = self.kept
        if size <= kept[1]:
            return kept
        owner = np.empty(size, np.uint8)
        fresh = (owner.ctypes.data, size, owner)  # ctypes.data takes as long as reading a tensor
        if size <= self.LARGEST_KEPT:
            self.kept = fresh
        return fresh


_scratch = _Scratch()

# What a call needs grows with the number of threads, which another thread may change between the question and the call, up
# and down. Where memory is what is missing, each attempt fails at once.
_ATTEMPTS = 100


def call_on_cpu(library: Any, raw: Any, direction: int) -> int:
    """The status of a forward or a backward. The workspace that the thread has kept is nearly always large enough. So
    fovea_workspace() is called only if the library refuses that one as too small, which it does before it writes."""
    call = library.fovea_backward if direction == _abi.BACKWARD else library.fovea_forward
    address, size, _owner = _scratch.kept
    status: int = call(raw, address, size)
    for _ in range(_ATTEMPTS):
        if status != _abi.OUT_OF_MEMORY:
            break
        needed = ctypes.c_size_t()
        status = library.fovea_workspace(raw, direction, ctypes.byref(needed))
        if status != _abi.OK:
            return status
        size = max(size, needed.value)
        address, size, _owner = _scratch.of(size)
        status = call(raw, address, size)
    return status


class Problem:
    """A fovea_problem, which keeps alive what it points to."""

    def __init__(self, q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> None:
        """`options` holds every keyword that forward and backward share."""
        self.raw = _abi.Problem(_PROBLEM_SIZE)
        self.views: dict[str, View] = {}  # every tensor that was given
        self._tensors = _TENSORS()  # the fovea_tensors that raw points to
        self._base = ctypes.addressof(self._tensors)
        self._used = 0
        stream = options["stream"]
        self._place = place = place_of("q", q, None if stream is None else _stream(stream))
        if place is not None:
            self.raw.device = 1  # FOVEA_CUDA
            self.raw.device_index = place.index
        self._maker = Maker("q", q, place)
        self._packed = options["cu_seqlens_q"] is not None or options["cu_seqlens_k"] is not None
        self._swap = choose("layout", options["layout"], _SWAP)
        if self._swap and self._packed:
            raise ValueError("layout: 'bhsd' with cu_seqlens; accepted: 'bshd', as packed tensors are (total, H, D)")

        for name, array in (("q", q), ("k", k), ("v", v)):
            self._set(name, self._ranked(name, read(name, array, place)))
        for name in (*_OPTIONAL, *_LENGTHS, *_abi.SHARDS):
            array = options[name]
            if array is not None:
                small = place is None and name in _SMALL
                if small and isinstance(array, (list, tuple)):
                    array = _of_list(name, array)
                view = read(name, array, place)
                self._set(name, self._converted(name, view) if small else view)
        self._set_batch(options["batch_shape"])
        self._set_scalars(options)
        if options["align"] is None:
            self._need_no_align()

    # ---- inputs ----

    def _converted(self, name: str, view: View) -> View:
        """A small input in the type that the library accepts: NumPy makes int64 and float64 by default."""
        if name == "alibi_slopes":
            if view.type != "float64" or self.views["q"].type == "float64":
                return view
            wanted = "float32"
        elif name.startswith("seqused") and view.type == "int64":
            wanted = "int32"
        else:
            return view
        array = view.numpy()
        if wanted == "int32":
            beyond = np.flatnonzero(array.astype(wanted) != array)
            if beyond.size:
                index = beyond[0]
                raise ValueError(f"{name}: {array.reshape(-1)[index]} at index {index}; accepted: 0 to {2**31 - 1}")
        return read(name, array.astype(wanted))

    def give(self, name: str, array: Any) -> None:
        """An input of the backward."""
        view = read(name, array, self._place)
        self._set(name, self._ranked(name, view) if name in _ROWS else view)

    def _ranked(self, name: str, view: View) -> View:
        if len(view.shape) != 3 if self._packed else len(view.shape) not in (4, 5):
            dims = {"q": "S, H, D", "k": "S, Hk, D", "v": "S, Hk, Dv"}.get(name, "S, H, Dv")
            if self._packed:
                accepted = f"({dims.replace('S', 'total')}), as cu_seqlens are given"
            else:
                rows, heads, last = dims.split(", ")
                dims = ", ".join((heads, rows, last)) if self._swap else dims
                accepted = f"(B, {dims}) or (B1, B2, {dims})"
            raise ValueError(f"{name}: shape {shape_text(view.shape)}; accepted: {accepted}")
        return view

    def _set(self, name: str, view: View) -> None:
        self.views[name] = view
        setattr(self.raw, name, self._tensor(name, view.address, view.type, view.shape, view.strides))

    def _tensor(self, name: str, address: int, kind: str, shape: Shape, strides: Optional[Shape]) -> int:
        """The address of a new fovea_tensor, contiguous if there are no strides."""
        code = _CODES.get(kind)
        if code is None:
            raise TypeError(f"{name}: {kind}; accepted: {_ACCEPTED.get(name, _FLOATS)}")
        rank = len(shape)
        if rank > _abi.MAX_RANK:
            raise ValueError(f"{name}: shape {shape_text(shape)}; accepted: at most {_abi.MAX_RANK} dimensions")
        flags = 0 if strides is None else _abi.TENSOR_STRIDED
        padding = _ZEROS[rank:]
        at = self._used * _TENSOR_SIZE
        self._used += 1
        _abi.TENSOR.pack_into(
            self._tensors,
            at,
            _TENSOR_SIZE,
            address,
            code,
            rank,
            flags,
            0,
            *self._canonical(name, shape),
            *padding,
            *self._canonical(name, strides or _ZEROS[:rank]),
            *padding,
        )
        return self._base + at

    def _canonical(self, name: str, dims: Shape) -> Shape:
        """Exchanges S and H if the layout is "bhsd"."""
        if self._swap and name in _ROWS:
            return (*dims[:-3], dims[-2], dims[-3], dims[-1])
        return dims

    # ---- options ----

    def _set_batch(self, batch_shape: Optional[Sequence[int]]) -> None:
        if batch_shape is None:
            return
        if not self._packed:
            raise ValueError("batch_shape: given without cu_seqlens; accepted: None, five dimensions say it")
        try:
            outer, inner = map(operator.index, batch_shape)
        except (TypeError, ValueError):
            raise TypeError(f"batch_shape: {batch_shape!r}; accepted: a pair of integers (B1, B2)") from None
        lengths = self.views.get("cu_seqlens_q") or self.views["cu_seqlens_k"]
        batch = lengths.shape[0] - 1 if len(lengths.shape) == 1 else 0
        if outer < 1 or outer * inner != batch:
            raise ValueError(f"batch_shape: {outer}x{inner}; accepted: B1 x B2 = {batch}, the number of sequences")
        self.raw.batch_outer = outer

    def _set_scalars(self, options: Mapping[str, Any]) -> None:
        raw = self.raw
        flags = 0
        if flag("causal", options["causal"]):
            flags |= _abi.CAUSAL
        if flag("deterministic", options["deterministic"]):
            flags |= _abi.DETERMINISTIC
        if options["scale"] is not None:
            flags |= _abi.SCALE
            raw.scale = real("scale", options["scale"])
        left, right = _window(options["window"])
        if left != -1 or right != -1:
            flags |= _abi.WINDOW
            raw.window_left = left
            raw.window_right = right
        for name in ("position_q", "position_k"):
            if options[name] is not None:
                flags |= _abi.POSITIONS
                setattr(raw, name, _integer(name, options[name]))
        if raw.positions_q or raw.positions_k:
            flags |= _abi.POSITIONS
        raw.flags = flags
        raw.align = choose("align", options["align"], _ALIGN)
        raw.softcap = real("softcap", options["softcap"])
        raw.dropout_p = real("dropout_p", options["dropout_p"])
        raw.rng = choose("rng", options["rng"], _RNG)
        if options["seed"] is not None:
            self._set_word("seed", options["seed"])
        elif raw.dropout_p != 0:
            need_seed(raw.dropout_p)
        self._set_word("offset", options["offset"])
        raw.max_seqlen_q = _length("max_seqlen_q", options["max_seqlen_q"])
        raw.max_seqlen_k = _length("max_seqlen_k", options["max_seqlen_k"])
        if options["backend"] is not None:
            if not isinstance(options["backend"], str):
                raise TypeError(f"backend: {options['backend']!r}; accepted: a name that fovea.backends() has")
            raw.backend = encoded(options["backend"])
        if self._place is not None:
            raw.stream = self._place.stream
        elif options["stream"] is not None:
            raw.stream = _stream(options["stream"])

    def _set_word(self, name: str, value: Any) -> None:
        """seed or offset: an integer, or an array of one that the kernel reads."""
        if isinstance(value, Integral):
            setattr(self.raw, name, word(name, value))
            return
        view = word_view(name, value, self._place)
        self.views[name] = view
        setattr(self.raw, name + "_ptr", view.address)

    def _need_no_align(self) -> None:
        """Refuses a missing alignment, unless queries and keys have the same lengths."""
        raw = self.raw
        if raw.flags & _abi.POSITIONS:
            return
        if raw.flags & _abi.CAUSAL:
            what = "causal"
        elif raw.flags & _abi.WINDOW:
            what = "window"
        elif raw.alibi_slopes:
            what = "alibi_slopes"
        else:
            return
        if self._place is not None and any(name in self.views for name in _LENGTHS):
            if self._same_lengths():
                return
            raise ValueError(need_align(what, "lengths that lie on the device"))
        lengths_q, lengths_k = self._lengths("q"), self._lengths("k")
        if isinstance(lengths_q, int) and isinstance(lengths_k, int):
            if lengths_q == lengths_k:
                return
            given = f"Sq={lengths_q} and Sk={lengths_k}"
        else:
            try:
                each_q, each_k = np.broadcast_arrays(lengths_q, lengths_k)
            except ValueError:
                return  # not the same number of sequences: the library reports that
            differing = np.flatnonzero(each_q != each_k)
            if not differing.size:
                return
            b = int(differing[0])
            given = f"Sq={each_q[b]} and Sk={each_k[b]} in sequence {b}"
        raise ValueError(need_align(what, given, raw, "bhsd" if self._swap else "bshd"))

    def _same_lengths(self) -> bool:
        """Whether queries and keys have their lengths in the same memory. Reading it would wait for the device."""
        for kind in ("cu_seqlens", "seqused"):
            q, k = self.views.get(f"{kind}_q"), self.views.get(f"{kind}_k")
            if (q is None) != (k is None) or (q is not None and k is not None and q.address != k.address):
                return False
        return self._packed or self._canonical("q", self.views["q"].shape)[-3] == self._canonical(
            "k", self.views["k"].shape)[-3]  # fmt: skip

    def _lengths(self, side: str) -> Any:
        """Dense: an int; packed or seqused: a vector, one for each sequence."""
        used = self.views.get(f"seqused_{side}")
        if used is not None:
            return used.numpy().reshape(-1)
        packed = self.views.get(f"cu_seqlens_{side}")
        if packed is not None:
            return np.diff(packed.numpy().reshape(-1))
        return self._canonical(side, self.views[side].shape)[-3]

    # ---- results ----

    def shape_of(self, name: str) -> Shape:
        """The shape of a result, in the caller's layout."""
        q = self.views["q"]
        if name == "out":
            return (*q.shape[:-1], self.views["v"].shape[-1])
        if name == "lse":
            rows = self._canonical("q", q.shape)
            return (rows[1], rows[0]) if self._packed else (*rows[:-3], rows[-2], rows[-3])
        return self.views[name[len("grad_") :]].shape

    def type_of(self, name: str) -> str:
        if name == "lse":
            return "float64" if self.views["q"].type == "float64" else "float32"
        return self.views["q" if name == "out" else name[len("grad_") :]].type

    def expect(self, name: str) -> None:
        """Adds a result of which only the shape is known, for explain."""
        setattr(self.raw, name, self._tensor(name, 0, self.type_of(name), self.shape_of(name), None))

    def into(self, name: str, array: Any) -> None:
        """Writes a result into the caller's array."""
        view = read(name, array, self._place)
        if name in _ROWS:
            self._ranked(name, view)
        if view.readonly:
            raise ValueError(f"{name}: a read-only array; accepted: one that can be written")
        self._set(name, view)

    def new(self, name: str) -> Fresh:
        """Makes the array of a result, of q's library, with S and H in memory as its model has them."""
        model = self.views["q" if name in ("out", "lse") else name[len("grad_") :]]
        swapped = False
        if name in _ROWS and not self._packed:
            outer, inner = abs(model.strides[-3]), abs(model.strides[-2])
            swapped = 0 < outer < inner and model.shape[-3] > 1 and model.shape[-2] > 1
        # Rows that belong to no sequence are not written: new arrays hold there what a row without keys has.
        fill = None
        if self._packed or "seqused_q" in self.views or "seqused_k" in self.views:
            fill = -np.inf if name == "lse" else 0
        fresh = self._maker.empty(self.shape_of(name), self.type_of(name), swapped, fill)
        self._set(name, fresh.view)
        return fresh

    # ---- calls ----

    def run(self, direction: int) -> None:
        try:
            check(self._call(direction))
        except ValueError as error:
            self._name_layout(error)
            raise

    def _call(self, direction: int) -> int:
        raw = ctypes.byref(self.raw)
        place = self._place
        if place is None:
            return call_on_cpu(lib, raw, direction)
        needed = ctypes.c_size_t()
        status = lib.fovea_workspace(raw, direction, ctypes.byref(needed))
        if status != _abi.OK:
            return int(status)
        workspace = place.memory.empty(place.index, place.stream, (needed.value,), "uint8")
        call = lib.fovea_backward if direction == _abi.BACKWARD else lib.fovea_forward
        return int(call(raw, place.memory.layout(workspace)[0], needed.value))

    def prepare(self, direction: int) -> None:
        try:
            check(lib.fovea_prepare(ctypes.byref(self.raw), direction))
        except ValueError as error:
            self._name_layout(error)
            raise

    def explain(self, direction: int) -> str:
        try:
            return text(lib.fovea_explain, ctypes.byref(self.raw), direction, tolerate=_abi.UNSUPPORTED)
        except ValueError as error:
            self._name_layout(error)
            raise

    def describe(self, direction: int) -> str:
        """The problem's one-line form."""
        try:
            return text(lib.fovea_describe, ctypes.byref(self.raw), direction)
        except ValueError as error:
            self._name_layout(error)
            raise

    def _name_layout(self, error: ValueError) -> None:
        text = str(error)
        hint = _help.layout_hint(self.raw, "bhsd" if self._swap else "bshd", text)
        error.args = ((heads_first(text) if self._swap else text) + hint,)


_SHAPES = re.compile(r"(?<![\w.-])((?:-?\d+x){1,2})(-?\d+x)(-?\d+x)(-?\d+)(?![\w.])")
_DIMS = re.compile(r"\((B1, B2|B), (S\w?), (H\w?), (Dv?)\)")


def heads_first(text: str) -> str:
    """An error of the library, whose shapes are (B, S, H, D), with the shapes of layout='bhsd'."""
    if text.partition(":")[0] not in _ROWS:
        return text
    return _DIMS.sub(r"(\1, \3, \2, \4)", _SHAPES.sub(r"\1\3\2\4", text))


def _of_list(name: str, values: Any) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "bi" and all(isinstance(value, Integral) for value in values):
        for index, value in enumerate(values):
            if not -(2**63) <= value < 2**63:
                raise ValueError(f"{name}: {value} at index {index}; accepted: integers of 64 bits")
    if array.dtype.kind not in "iuf" and array.size:
        raise TypeError(
            f"{name}: a {type(values).__name__} of other things than numbers; accepted: numbers, or an array"
        )
    if name == "alibi_slopes":
        return array.astype(np.float64)
    return array if array.dtype.kind == "f" and array.size else array.astype(np.int64)


def need_align(what: str, given: str, raw: Optional[_abi.Problem] = None, layout: str = "") -> str:
    """The text that requires an alignment."""
    text = (
        f"align: None with {what}, {given}; accepted: 'bottom_right' (the last query meets the last key, as in "
        "FlashAttention) or 'top_left' (the first meets the first, as PyTorch's is_causal)"
    )
    return text if raw is None else text + _help.layout_hint(raw, layout, text)


def need_seed(dropout_p: float) -> None:
    """Refuses dropout without a seed."""
    if dropout_p != 0:
        raise ValueError(
            f"seed: None with dropout_p={dropout_p:g}; accepted: an integer of up to 64 bits, the same "
            "for forward and backward, another one (or another offset) for each call that is to have its own mask"
        )


def choose(name: str, value: Any, choices: Mapping[Any, Any]) -> Any:
    try:
        return choices[value]
    except (KeyError, TypeError):
        raise ValueError(f"{name}: {value!r}; accepted: {', '.join(repr(c) for c in choices)}") from None


WORD = "an integer of up to 64 bits, a negative one as its two's complement"


def word(name: str, value: Any) -> int:
    """An integer as the 64 unsigned bits of the C ABI."""
    if isinstance(value, bool):
        raise TypeError(f"{name}: {value}; accepted: an integer of up to 64 bits")
    number = int(value)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"{name}: {number}; accepted: {WORD}")
    return number % 2**64


def word_view(name: str, array: Any, place: Optional[Place] = None) -> View:
    accepted = "accepted: an integer of up to 64 bits, or an array of one int64 or uint64"
    protocols = ("__dlpack__", "__array_interface__", "__cuda_array_interface__")
    if not any(hasattr(array, protocol) for protocol in protocols):
        raise TypeError(f"{name}: {array!r}; {accepted}")
    view = read(name, array, place)
    if view.type not in ("int64", "uint64"):
        raise TypeError(f"{name}: an array of type {view.type}; {accepted}")
    if any(length != 1 for length in view.shape):
        raise ValueError(f"{name}: an array of shape {shape_text(view.shape)}; {accepted}")
    return view


def needed(need: Any, given: Sequence[str]) -> list[str]:
    """The names of the requested gradients; `given` are the inputs that have one."""
    if need is None:
        return list(given)
    if isinstance(need, str):
        names = need.split(",")
    elif isinstance(need, Iterable):
        names = list(need)
    else:
        raise TypeError(f"need: {need!r}; accepted: names of {', '.join(DIFFERENTIABLE)}")
    if not names:
        raise ValueError(f"need: {need!r}, which requests nothing; accepted: None, or names of {', '.join(given)}")
    for name in names:
        if name not in DIFFERENTIABLE:
            raise ValueError(f"need: {name!r}, which has no gradient; accepted: {', '.join(DIFFERENTIABLE)}")
        if name not in given:
            raise ValueError(f"need: {name!r}, which is not given; accepted: {', '.join(given)}")
    return [name for name in DIFFERENTIABLE if name in names]


def flag(name: str, value: Any) -> bool:
    if isinstance(value, (Integral, np.bool_)):
        return bool(value)
    raise TypeError(f"{name}: {value!r}; accepted: True or False")


def real(name: str, value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name}: {value!r}; accepted: a number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: {value!r}; accepted: a number") from None
    except OverflowError:
        raise ValueError(f"{name}: an integer beyond all floating-point numbers; accepted: a finite one") from None


def _integer(name: str, value: Any) -> int:
    if hasattr(value, "__cuda_array_interface__"):
        raise TypeError(
            f"{name}: an array of a CUDA device, which every call would wait for; accepted: an integer, such as {name}.item()"
        )
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: {value!r}; accepted: an integer") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name}: {number}; accepted: an integer of 64 bits")
    return number


def _stream(value: Any) -> int:
    if not hasattr(value, "__index__"):
        accepted = "an integer, the address of a CUDA stream: torch.cuda.Stream.cuda_stream, cupy.cuda.Stream.ptr"
        raise TypeError(f"stream: {value!r}; accepted: {accepted}")
    return _integer("stream", value)


def _length(name: str, value: Any) -> int:
    return 0 if value is None else _integer(name, value)


def window_side(integer: Callable[[str, Any], int], value: Any) -> int:
    try:
        number = integer("window", value)
    except TypeError as error:
        raise TypeError(f"{error}, -1 for unbounded") from None
    if type(number) is int and number < -1:
        raise ValueError(f"window: {number}; accepted: -1 (unbounded) or more, on either side")
    return number


def _window(value: Any) -> tuple[int, int]:
    try:
        left, right = value
    except (TypeError, ValueError):
        raise TypeError(f"window: {value!r}; accepted: a pair (left, right) of integers, -1 for unbounded") from None
    return window_side(_integer, left), window_side(_integer, right)


def shape_text(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "()"
