# SPDX-License-Identifier: Apache-2.0
"""A library of arrays that is not NumPy: it gives and takes memory by DLPack alone, bfloat16 among the types, as
PyTorch does on the CPU. The tests ask that what fovea returns is of this library."""

import ctypes

import numpy as np


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_get = ctypes.pythonapi.PyCapsule_GetPointer
_get.restype = ctypes.c_void_p
_get.argtypes = (ctypes.py_object, ctypes.c_char_p)

_TYPES = {"f": 2, "V": 4, "b": 6, "i": 0, "u": 1}  # NumPy's kinds (V: bfloat16, as ml_dtypes makes it)


class FakeArray:
    """Holds a NumPy array; gives it away by DLPack only. `versioned`: as DLPack 1.0 does, with a read-only flag."""

    versioned = False
    null_strides = False  # a contiguous tensor may leave them out
    offset = 0  # in bytes: data points so much too low, byte_offset makes up for it
    lanes = 1
    device = (1, 0)
    on_drop = None  # what to call when a capsule is dropped

    def __init__(self, array):
        self.array = array
        self.alive = []  # what capsules point to
        self.exported = 0

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if options and not self.versioned:
            raise TypeError(f"__dlpack__() got unexpected keywords {sorted(options)}")
        self.exported += 1
        managed = _ManagedVersioned() if self.versioned else _Managed()
        array, tensor = self.array, managed.tensor
        tensor.data = array.__array_interface__["data"][0] - self.offset
        tensor.byte_offset = self.offset
        tensor.device[:] = self.device
        tensor.ndim = array.ndim
        tensor.code = _TYPES[array.dtype.kind]
        tensor.bits = 8 * array.dtype.itemsize
        tensor.lanes = self.lanes
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        tensor.shape = shape
        if not (self.null_strides and array.flags.c_contiguous):
            tensor.strides = (ctypes.c_int64 * array.ndim)(*(stride // array.itemsize for stride in array.strides))
        if self.versioned:
            managed.version[:] = (1, 0)
            managed.flags = 0 if array.flags.writeable else 1
        drop = self.on_drop and _Destructor(lambda capsule: self.on_drop())
        self.alive.append((managed, shape, drop))
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return _new(ctypes.addressof(managed), name, ctypes.cast(drop, ctypes.c_void_p) if drop else None)


class VersionedArray(FakeArray):
    versioned = True


class BareArray(FakeArray):
    null_strides = True
    offset = 64


class DeviceArray(FakeArray):
    device = (2, 0)  # CUDA


class PairArray(FakeArray):
    """Its elements are said to be pairs."""

    lanes = 2


class NegatedArray(FakeArray):
    """As PyTorch's lazy negations: its memory holds the negatives of its numbers, and __dlpack__ does not say so."""

    def is_neg(self):
        return True


class GradArray(FakeArray):
    def __dlpack__(self, **options):
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")


def from_dlpack(producer):
    """A FakeArray on the producer's memory, which it keeps alive."""
    assert producer.__dlpack_device__() == (1, 0)
    capsule = producer.__dlpack__()
    tensor = _Managed.from_address(_get(capsule, b"dltensor")).tensor
    kind = {code: kind for kind, code in _TYPES.items()}[tensor.code]
    if kind == "V":
        import ml_dtypes

        dtype = np.dtype(ml_dtypes.bfloat16)
    else:
        dtype = np.dtype("bool" if kind == "b" else f"{kind}{tensor.bits // 8}")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(stride * dtype.itemsize for stride in tensor.strides[: tensor.ndim]) if tensor.strides else None
    count = 1 + sum((n - 1) * s for n, s in zip(shape, strides)) // dtype.itemsize if strides and all(shape) else 0
    memory = (ctypes.c_char * ((count if strides else int(np.prod(shape))) * dtype.itemsize)).from_address(
        (tensor.data or 0) + tensor.byte_offset
    )
    result = FakeArray(np.ndarray(shape, dtype, memory, strides=strides))
    result.alive.append((capsule, producer))
    return result
