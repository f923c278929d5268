# SPDX-License-Identifier: Apache-2.0
"""Memory and streams of CUDA devices, from PyTorch or CuPy.

fovea allocates no CUDA memory itself. The library of q allocates results and workspace if it is PyTorch or CuPy.
Otherwise (JAX, Numba, ...) one of these two does, which must be imported already; results are then converted by the
from_dlpack of q's library, if it has one. All memory and all work belong to one stream: the caller's, or the current
stream of the library that allocates. Nothing here waits for a device, and no call changes the current device.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Optional

LEGACY_STREAM = 1  # DLPack's name for stream 0
_LIBRARIES = ("torch", "cupy")


def library_of(name: str, model: Any) -> Memory:
    """The library that allocates memory on the device of the array `model`. Errors call the array `name`."""
    own = type(model).__module__.partition(".")[0]
    for library in (own, *_LIBRARIES):
        if library in _LIBRARIES and library in sys.modules:
            return _Torch() if library == "torch" else _Cupy()
    raise NotImplementedError(
        f"{name}: a {type(model).__name__} on a CUDA device; accepted: arrays of PyTorch or CuPy, or others while one "
        "of those is imported, as results and workspace are made by it"
    )


class Memory:
    """The interface of both libraries. A stream is an address, 0 the legacy default stream; `index` is a device."""

    name: str

    def owns(self, array: Any) -> bool:
        return type(array).__module__.partition(".")[0] == self.name

    def current_device(self) -> int:
        raise NotImplementedError

    def on(self, index: int) -> AbstractContextManager[Any]:
        """Makes a device the current one for a while."""
        raise NotImplementedError

    def current_stream(self, index: int) -> int:
        raise NotImplementedError

    def wait(self, index: int, stream: int, other: int) -> None:
        """Work that is put on `stream` from now on waits for the work that is on `other` now."""
        raise NotImplementedError

    def empty(self, index: int, stream: int, shape: Sequence[int], kind: str, fill: Optional[float] = None) -> Any:
        raise NotImplementedError

    def swapped(self, array: Any) -> Any:
        """The array with its dimensions -3 and -2 exchanged."""
        return array.swapaxes(-3, -2)

    def layout(self, array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Address, shape, strides in elements."""
        raise NotImplementedError

    def join(self, arrays: Sequence[Any]) -> Any:
        raise NotImplementedError

    def integers(self, index: int, values: Sequence[int], kind: str) -> Any:
        raise NotImplementedError


class _Torch(Memory):
    name = "torch"

    def __init__(self) -> None:
        self.torch = sys.modules["torch"]

    def _stream(self, index: int, stream: int) -> Any:
        cuda = self.torch.cuda
        if stream == cuda.current_stream(index).cuda_stream:
            return cuda.current_stream(index)
        return cuda.ExternalStream(stream, device=index) if stream else cuda.default_stream(index)

    def current_device(self) -> int:
        return int(self.torch.cuda.current_device())

    def on(self, index: int) -> AbstractContextManager[Any]:
        device: AbstractContextManager[Any] = self.torch.cuda.device(index)
        return device

    def current_stream(self, index: int) -> int:
        return int(self.torch.cuda.current_stream(index).cuda_stream)

    def wait(self, index: int, stream: int, other: int) -> None:
        self._stream(index, stream).wait_stream(self._stream(index, other))

    def empty(self, index: int, stream: int, shape: Sequence[int], kind: str, fill: Optional[float] = None) -> Any:
        torch = self.torch
        with torch.cuda.stream(self._stream(index, stream)):
            array = torch.empty(tuple(shape), dtype=getattr(torch, kind), device=torch.device("cuda", index))
            return array if fill is None else array.fill_(fill)

    def layout(self, array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        return array.data_ptr(), tuple(array.shape), tuple(array.stride())

    def join(self, arrays: Sequence[Any]) -> Any:
        return self.torch.cat(list(arrays))

    def integers(self, index: int, values: Sequence[int], kind: str) -> Any:
        torch = self.torch
        return torch.tensor(list(values), dtype=getattr(torch, kind), device=torch.device("cuda", index))


class _Cupy(Memory):
    name = "cupy"

    def __init__(self) -> None:
        self.cupy = sys.modules["cupy"]

    def _stream(self, stream: int) -> Any:
        return self.cupy.cuda.ExternalStream(stream)

    def current_device(self) -> int:
        return int(self.cupy.cuda.runtime.getDevice())

    def on(self, index: int) -> AbstractContextManager[Any]:
        device: AbstractContextManager[Any] = self.cupy.cuda.Device(index)
        return device

    def current_stream(self, index: int) -> int:
        with self.cupy.cuda.Device(index):
            return int(self.cupy.cuda.get_current_stream().ptr)

    def wait(self, index: int, stream: int, other: int) -> None:
        with self.cupy.cuda.Device(index):
            self._stream(stream).wait_event(self._stream(other).record())

    def empty(self, index: int, stream: int, shape: Sequence[int], kind: str, fill: Optional[float] = None) -> Any:
        if kind == "bfloat16":
            kind = importlib.import_module("ml_dtypes").bfloat16
        with self.cupy.cuda.Device(index), self._stream(stream):
            array = self.cupy.empty(tuple(shape), dtype=kind)
            if fill is not None:
                array.fill(fill)
            return array

    def layout(self, array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        return array.data.ptr, array.shape, tuple(stride // array.itemsize for stride in array.strides)

    def join(self, arrays: Sequence[Any]) -> Any:
        return self.cupy.concatenate(list(arrays))

    def integers(self, index: int, values: Sequence[int], kind: str) -> Any:
        with self.cupy.cuda.Device(index):
            return self.cupy.array(list(values), dtype=kind)
