# SPDX-License-Identifier: Apache-2.0
"""Arrays in and out.

In: read() turns a NumPy array, or whatever has __dlpack__ or __array_interface__, into a View: address, type,
shape and strides of memory that stays the caller's. DLPack capsules are read here rather than by NumPy, which
refuses bfloat16; a capsule is never consumed, so dropping it gives the memory back to its producer.

Out: empty() makes memory with NumPy, and Fresh.result() hands it over in the library of a model array, through that
library's own from_dlpack.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Callable, Optional

import numpy as np

CPU = 1  # DLPack's number for memory that the processor reads
_CUDA_HOST = 3  # pinned memory: the processor reads it as well
_DEVICES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed", 14: "oneAPI"}

_NUMPY_NAMES = {np.dtype(name): name for name in ("float32", "float16", "float64", "bool", "int32", "int64", "uint64")}
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}  # DLPack's type codes
_BFLOAT = 4


class View:
    """Memory of the caller's: strides count elements, `owner` keeps it alive."""

    __slots__ = ("address", "owner", "readonly", "shape", "strides", "type")

    def __init__(self, address: int, type: str, shape: tuple, strides: tuple, readonly: bool, owner: Any) -> None:
        self.address = address
        self.type = type
        self.shape = shape
        self.strides = strides
        self.readonly = readonly
        self.owner = owner

    def numpy(self) -> np.ndarray:
        """The same memory as a NumPy array; bfloat16 as uint16 unless it came from NumPy."""
        if isinstance(self.owner, np.ndarray):
            return self.owner
        return np.asarray(_Interface(self))


class _Interface:
    """A View as NumPy takes it."""

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


def read(name: str, array: Any) -> View:
    """The View of an argument; `name` is what errors call it."""
    if type(array) is np.ndarray:
        return _of_numpy(name, array)
    if isinstance(array, np.ndarray):
        if hasattr(array, "filled"):  # numpy.ma: its mask would be lost without a word
            raise TypeError(f"{name}: a masked array; accepted: the data here, and the mask as an array of its own")
        return _of_numpy(name, array.view(np.ndarray))
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _of_dlpack(name, array)
    if hasattr(array, "__array_interface__"):
        return _of_numpy(name, np.asarray(array))
    raise TypeError(
        f"{name}: a {type(array).__name__}; accepted: an array, NumPy's or one with __dlpack__ or __array_interface__"
    )


def _of_numpy(name: str, array: np.ndarray) -> View:
    dtype = array.dtype
    kind = _NUMPY_NAMES.get(dtype)
    if kind is None:
        kind = str(dtype)  # ">f4" for what is not in native order, so that it matches nothing
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

_takes_version: dict[type, bool] = {}  # whether a type's __dlpack__ knows max_version


def _capsule(array: Any) -> Any:
    kind = type(array)
    if _takes_version.get(kind, True):
        try:
            return array.__dlpack__(max_version=(1, 0))  # a versioned capsule tells what is read-only
        except TypeError:
            _takes_version[kind] = False
    return array.__dlpack__()


def _tensor_of(capsule: Any) -> tuple[_DLTensor, bool]:
    if _is_capsule(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer_of(capsule, b"dltensor_versioned"))
        return versioned.tensor, bool(versioned.flags & _READ_ONLY)
    return _DLTensor.from_address(_pointer_of(capsule, b"dltensor")), False


def _of_dlpack(name: str, array: Any) -> View:
    device = int(array.__dlpack_device__()[0])
    if device not in (CPU, _CUDA_HOST):
        raise NotImplementedError(
            f"{name}: lies on a {_DEVICES.get(device, device)} device; this build of fovea computes on the CPU"
        )
    try:
        capsule = _capsule(array)
    except (BufferError, RuntimeError) as error:  # such as PyTorch's for what requires a gradient
        raise ValueError(f"{name}: a {type(array).__name__} that does not give its memory away: {error}") from error
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


def _contiguous(shape: tuple) -> tuple:
    strides = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


class _BFloat16:
    """uint16 memory of NumPy's as a DLPack producer of bfloat16: NumPy's own capsule with the type written over."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._array.__dlpack__(**options)
        tensor, _ = _tensor_of(capsule)
        tensor.code = _BFLOAT
        return capsule


# ---- results ----


class Fresh:
    """New memory: `view` to compute into, result() to hand over."""

    __slots__ = ("_array", "_hand_over", "view")

    def __init__(self, array: np.ndarray, kind: str, hand_over: Optional[Callable[[Any], Any]]) -> None:
        self._array = array
        self._hand_over = hand_over
        self.view = _of_numpy("result", array)
        self.view.type = kind

    def result(self) -> Any:
        if self._hand_over is None:
            return self._array
        if self.view.type == "bfloat16":
            return self._hand_over(_BFloat16(self._array))
        return self._hand_over(self._array)


class Maker:
    """Makes arrays of the library that a model array comes from."""

    def __init__(self, name: str, model: Any) -> None:
        self._name = name
        self._hand_over = None if isinstance(model, np.ndarray) else _from_dlpack(model)

    def empty(self, shape: tuple, kind: str, swapped: bool = False, fill: Optional[float] = None) -> Fresh:
        """`swapped`: memory in the order (..., -2, -3, -1) of the dimensions."""
        dtype = np.dtype(np.uint16) if kind == "bfloat16" and self._hand_over else self._dtype(kind)
        if swapped:
            shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
        if fill is None:
            array = np.empty(shape, dtype)
        elif fill == 0:
            array = np.zeros(shape, dtype)
        else:
            array = np.full(shape, fill, dtype)
        return Fresh(array.swapaxes(-3, -2) if swapped else array, kind, self._hand_over)

    def _dtype(self, kind: str) -> np.dtype:
        if kind != "bfloat16":
            return np.dtype(kind)
        try:
            import ml_dtypes
        except ImportError:
            raise TypeError(
                f"{self._name}: bfloat16, for which NumPy needs the package ml_dtypes: pip install ml_dtypes"
            ) from None
        return np.dtype(ml_dtypes.bfloat16)


def _from_dlpack(model: Any) -> Optional[Callable[[Any], Any]]:
    """What the library of an array makes arrays from DLPack with, if there is such a function."""
    if hasattr(model, "__array_namespace__"):
        library = model.__array_namespace__()
    else:
        library = sys.modules.get(type(model).__module__.partition(".")[0])
    return getattr(library, "from_dlpack", None)
