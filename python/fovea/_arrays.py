# SPDX-License-Identifier: Apache-2.0
"""Reads the arrays of a call, and makes those of its results.

read() takes a NumPy array, or one with __dlpack__, __array_interface__ or __cuda_array_interface__. It returns a View:
the address, type, shape and strides of memory that the caller keeps. DLPack capsules are read here, because NumPy
refuses bfloat16. A capsule is never consumed, so dropping it returns the memory to its producer.

Maker.empty() allocates memory, with NumPy on the CPU and with _cuda.py on a CUDA device. Fresh.result() returns it as
an array of a given library, through the from_dlpack of that library.

All arrays of a call are on the CPU, or all on q's CUDA device, which place_of() finds.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from typing import Any, Callable, NoReturn, Optional

import numpy as np

from . import _cuda

CPU = 1  # DLPack's number for memory that the processor reads
_CUDA = (2, 13)  # a device's own memory, and managed memory
_CUDA_HOST = 3  # pinned memory: the processor reads it as well
_DEVICES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed", 14: "oneAPI"}

_NUMPY_NAMES = {np.dtype(name): name for name in ("float32", "float16", "float64", "bool", "int32", "int64", "uint64")}
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}  # DLPack's type codes
_BFLOAT = 4

Shape = tuple[int, ...]


class View:
    """Memory of the caller. Strides count elements; `owner` keeps the memory alive."""

    __slots__ = ("address", "owner", "readonly", "shape", "strides", "type")

    def __init__(self, address: int, type: str, shape: Shape, strides: Shape, readonly: bool, owner: Any) -> None:
        self.address = address
        self.type = type
        self.shape = shape
        self.strides = strides
        self.readonly = readonly
        self.owner = owner

    def numpy(self) -> np.ndarray[Any, Any]:
        """The same memory as a NumPy array; bfloat16 as uint16 unless it came from NumPy."""
        if isinstance(self.owner, np.ndarray):
            return self.owner
        return np.asarray(_Interface(self))


class Place:
    """The CUDA device of a call: its number, the stream of all work, and the library that allocates memory there."""

    __slots__ = ("index", "memory", "stream")

    def __init__(self, index: int, stream: int, memory: _cuda.Memory) -> None:
        self.index = index
        self.stream = stream
        self.memory = memory


def place_of(name: str, array: Any, stream: Optional[int]) -> Optional[Place]:
    """The CUDA device of an array, None on the CPU. `stream` replaces the current stream of the array's library."""
    if isinstance(array, np.ndarray):
        return None
    if hasattr(array, "__dlpack_device__"):
        device, index = array.__dlpack_device__()
        if int(device) not in _CUDA:
            return None
        memory = _cuda.library_of(name, array)
        index = int(index)
    elif hasattr(array, "__cuda_array_interface__"):  # it does not name the device
        memory = _cuda.library_of(name, array)
        index = memory.current_device()
    else:
        return None
    return Place(index, memory.current_stream(index) if stream is None else stream, memory)


class _Interface:
    """A View for NumPy."""

    def __init__(self, view: View) -> None:
        dtype = np.dtype(np.uint16 if view.type == "bfloat16" else view.type)
        self.view = view
        self.__array_interface__ = {
            "version": 3,
            "data": (view.address, view.readonly),
            "typestr": dtype.str,
            "shape": view.shape,
            "strides": tuple(stride * dtype.itemsize for stride in view.strides),
        }


def read(name: str, array: Any, place: Optional[Place] = None) -> View:
    """The View of an argument, which must lie on the device `place`. Errors call it `name`."""
    if type(array) is np.ndarray and place is None:
        return _of_numpy(name, array)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__") and not isinstance(array, np.ndarray):
        return _of_dlpack(name, array, place)
    if hasattr(array, "__cuda_array_interface__"):
        return _of_cuda_interface(name, array, place)
    if isinstance(array, np.ndarray) or hasattr(array, "__array_interface__"):
        if place is not None:
            _refuse_place(name, "the CPU", place)
        if hasattr(array, "filled"):  # numpy.ma: the mask would be ignored
            raise TypeError(f"{name}: a masked array; accepted: the data here, and the mask as an array of its own")
        return _of_numpy(name, array.view(np.ndarray) if isinstance(array, np.ndarray) else _of_interface(name, array))
    kind = type(array)
    if kind.__module__.partition(".")[0] == "jax" and kind.__name__.endswith("Tracer"):
        raise TypeError(
            f"{name}: a {kind.__name__}, which stands for an array while JAX traces a function and has no memory; "
            "accepted: an array, so call fovea outside of jax.jit, jax.grad and jax.vmap, or in jax.pure_callback"
        )
    raise TypeError(
        f"{name}: a {kind.__name__}; accepted: an array, NumPy's or one with __dlpack__, __array_interface__ or "
        "__cuda_array_interface__"
    )


def _refuse_place(name: str, where: str, place: Optional[Place]) -> NoReturn:
    accepted = "the CPU" if place is None else f"CUDA device {place.index}"
    raise ValueError(f"{name}: lies on {where}; accepted: {accepted}, where q lies")


def _of_interface(name: str, array: Any) -> np.ndarray:
    try:
        return np.asarray(array)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: a {type(array).__name__} whose __array_interface__ NumPy refuses: {error}; accepted: the address, "
            "shape and type of an array"
        ) from error


def _of_numpy(name: str, array: np.ndarray) -> View:
    dtype = array.dtype
    kind = _NUMPY_NAMES.get(dtype)
    if kind is None:
        kind = str(dtype)  # ">f4" where the bytes are swapped, which is no type that the library has
        if kind == "bfloat16":
            _NUMPY_NAMES[dtype] = kind
    size = dtype.itemsize or 1
    flags = array.flags
    strides = array.strides
    if not flags.aligned:  # of the types that pass, NumPy aligns each to its size
        raise ValueError(
            f"{name}: strides of {strides} bytes, or an address, that do not fall on its {size}-byte elements; "
            "accepted: those that do, as of a copy by numpy.ascontiguousarray"
        )
    return View(
        array.__array_interface__["data"][0],
        kind,
        array.shape,
        tuple([stride // size for stride in strides]),
        not flags.writeable,
        array,
    )


# ---- DLPack ----


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


_READ_ONLY = 1  # _Versioned.flags

_is_capsule = ctypes.pythonapi.PyCapsule_IsValid
_is_capsule.restype = ctypes.c_int
_is_capsule.argtypes = (ctypes.py_object, ctypes.c_char_p)
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)

_takes_version: dict[type, bool] = {}  # whether the __dlpack__ of a type accepts max_version


def _capsule(array: Any, options: dict[str, int]) -> Any:
    kind = type(array)
    if _takes_version.get(kind, True):
        try:
            return array.__dlpack__(max_version=(1, 0), **options)  # a versioned capsule has a read-only flag
        except TypeError:
            _takes_version[kind] = False
    return array.__dlpack__(**options)


def _exported(array: Any, options: dict[str, int], place: Optional[Place]) -> Any:
    """A capsule of an array on any CUDA device: PyTorch exports tensors of the current device only, and JAX's export leaves the
    array's device the current one."""
    if place is None:
        return _capsule(array, options)
    current = place.memory.current_device()
    try:
        if place.memory.owns(array):
            return _capsule(array, options)
        with place.memory.on(current):
            return _capsule(array, options)
    except BufferError:
        if current == place.index:
            raise
        with place.memory.on(place.index):
            return _capsule(array, options)


def _tensor_of(capsule: Any) -> tuple[_DLTensor, bool]:
    if _is_capsule(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer_of(capsule, b"dltensor_versioned"))
        return versioned.tensor, bool(versioned.flags & _READ_ONLY)
    return _DLTensor.from_address(_pointer_of(capsule, b"dltensor")), False


def _of_dlpack(name: str, array: Any, place: Optional[Place]) -> View:
    device, index = map(int, array.__dlpack_device__())
    options: dict[str, int] = {}
    if device in _CUDA:
        if place is None or index != place.index:
            _refuse_place(name, f"CUDA device {index}", place)
        options["stream"] = place.stream or _cuda.LEGACY_STREAM  # the producer orders its own work before that stream's
    elif device not in (CPU, _CUDA_HOST):
        raise NotImplementedError(
            f"{name}: lies on a {_DEVICES.get(device, device)} device; this build of fovea computes on the CPU and on "
            "CUDA devices"
        )
    elif place is not None:
        _refuse_place(name, "the CPU", place)
    is_negative = getattr(array, "is_neg", None)  # PyTorch exports such memory as it is
    if is_negative is not None and is_negative():
        raise ValueError(
            f"{name}: a {type(array).__name__} whose memory holds the negatives of its numbers; accepted: what "
            "resolve_neg() makes of it"
        )
    try:
        capsule = _exported(array, options, place)
    except (BufferError, RuntimeError) as error:  # such as PyTorch's for what requires a gradient
        instead = "; fovea.torch.attention has gradients" if getattr(array, "requires_grad", False) is True else ""
        raise ValueError(
            f"{name}: a {type(array).__name__} that does not give its memory away: {error}{instead}"
        ) from error
    tensor, readonly = _tensor_of(capsule)
    rank = tensor.ndim
    shape = tuple(tensor.shape[:rank])
    strides = tuple(tensor.strides[:rank]) if tensor.strides else _contiguous(shape)
    kind = _KINDS.get(tensor.code, "unknown")
    if kind != "bool" or tensor.bits != 8:
        kind = f"{kind}{tensor.bits}"
    if tensor.lanes != 1:
        kind = f"{kind}x{tensor.lanes}"
    return View((tensor.data or 0) + tensor.byte_offset, kind, shape, strides, readonly, (array, capsule))


def _of_cuda_interface(name: str, array: Any, place: Optional[Place]) -> View:
    if place is None:
        _refuse_place(name, "a CUDA device", place)
    interface = array.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise TypeError(f"{name}: a masked array; accepted: the data here, and the mask as an array of its own")
    stream = interface.get("stream")
    if stream is not None:
        stream = 0 if stream == _cuda.LEGACY_STREAM else int(stream)
        if stream != place.stream:
            place.memory.wait(place.index, place.stream, stream)
    dtype = np.dtype(interface["typestr"])
    address, readonly = interface["data"]
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is not None and any(stride % dtype.itemsize for stride in strides):
        raise ValueError(f"{name}: strides of {strides} bytes, that do not fall on its {dtype.itemsize}-byte elements")
    steps = _contiguous(shape) if strides is None else tuple(stride // dtype.itemsize for stride in strides)
    return View(address or 0, _NUMPY_NAMES.get(dtype, str(dtype)), shape, steps, bool(readonly), array)


def _contiguous(shape: Shape) -> Shape:
    strides = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


class _BFloat16:
    """A NumPy array of uint16 that exports bfloat16: NumPy's capsule with another type written into it."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._array.__dlpack__(**options)
        tensor, _ = _tensor_of(capsule)
        tensor.code = _BFLOAT
        return capsule


# ---- results ----


class Fresh:
    """New memory: `view` to compute into, result() to return to the caller."""

    __slots__ = ("_array", "_hand_over", "view")

    def __init__(self, array: Any, view: View, hand_over: Optional[Callable[[Any], Any]]) -> None:
        self._array = array
        self._hand_over = hand_over
        self.view = view

    def result(self) -> Any:
        if self._hand_over is None:
            return self._array
        if self.view.type == "bfloat16" and isinstance(self._array, np.ndarray):
            return self._hand_over(_BFloat16(self._array))
        return self._hand_over(self._array)


class Maker:
    """Makes arrays of the library of a model array."""

    def __init__(self, name: str, model: Any, place: Optional[Place] = None) -> None:
        self._name = name
        self._place = place
        own = isinstance(model, np.ndarray) if place is None else place.memory.owns(model)
        self._hand_over = None if own else _from_dlpack(model)
        if place is not None and self._hand_over is not None:
            self._hand_over = _on_its_device(place, self._hand_over)

    def empty(self, shape: Shape, kind: str, swapped: bool = False, fill: Optional[float] = None) -> Fresh:
        """`swapped` stores the dimensions in the order (..., -2, -3, -1)."""
        if swapped:
            shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
        place = self._place
        if place is not None:
            array = place.memory.empty(place.index, place.stream, shape, kind, fill)
            if swapped:
                array = place.memory.swapped(array)
            address, shape, strides = place.memory.layout(array)
            return Fresh(array, View(address, kind, shape, strides, False, array), self._hand_over)
        dtype = np.dtype(np.uint16) if kind == "bfloat16" and self._hand_over else self._dtype(kind)
        if fill is None:
            array = np.empty(shape, dtype)
        elif fill == 0:
            array = np.zeros(shape, dtype)
        else:
            array = np.full(shape, fill, dtype)
        if swapped:
            array = array.swapaxes(-3, -2)
        view = _of_numpy("result", array)
        view.type = kind
        return Fresh(array, view, self._hand_over)

    def _dtype(self, kind: str) -> np.dtype[Any]:
        if kind != "bfloat16":
            return np.dtype(kind)
        try:
            ml_dtypes = importlib.import_module("ml_dtypes")
        except ImportError:
            raise TypeError(
                f"{self._name}: bfloat16, for which NumPy needs the package ml_dtypes: pip install ml_dtypes"
            ) from None
        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype


def _on_its_device(place: Place, hand_over: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def there(array: Any) -> Any:
        with place.memory.on(place.index):
            return hand_over(array)

    return there


def _from_dlpack(model: Any) -> Optional[Callable[[Any], Any]]:
    """The from_dlpack of an array's library, if it has one."""
    if hasattr(model, "__array_namespace__"):
        library = model.__array_namespace__()
    else:
        library = sys.modules.get(type(model).__module__.partition(".")[0])
    return getattr(library, "from_dlpack", None)
