# SPDX-License-Identifier: Apache-2.0
"""Calls of the C ABI on the emulated GPU, whose memory is the host's: its tensors are arrays of NumPy."""

import ctypes
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from fovea import _abi, _library  # noqa: E402

CUDA = 1  # fovea_device
_kept = []  # what the library has addresses of


def tensor(array: np.ndarray, kind: int) -> int:
    """The address of a fovea_tensor."""
    shape = (*array.shape, *[0] * (_abi.MAX_RANK - array.ndim))
    _kept.append((array, ctypes.create_string_buffer(
        _abi.TENSOR.pack(_abi.TENSOR.size, array.ctypes.data, kind, array.ndim, 0, 0, *shape, *[0] * _abi.MAX_RANK))))  # fmt: skip
    return ctypes.addressof(_kept[-1][1])


def problem(flags: int) -> _abi.Problem:
    return _abi.Problem(ctypes.sizeof(_abi.Problem), flags, device=CUDA)


def call(of: _abi.Problem, direction: int) -> None:
    lib = _library.lib
    needed = ctypes.c_size_t()
    _library.check(lib.fovea_workspace(ctypes.byref(of), direction, ctypes.byref(needed)))
    space = ctypes.create_string_buffer(needed.value + 256)
    first = (ctypes.addressof(space) + 255) // 256 * 256
    run = lib.fovea_forward if direction == _abi.FORWARD else lib.fovea_backward
    _library.check(run(ctypes.byref(of), first, needed.value))
