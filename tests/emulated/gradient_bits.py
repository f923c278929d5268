#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gradient_bits.py D: the bits of dq, as a hash, of a deterministic call on the emulated GPU, whose memory is the host's.

900 keys of two key heads with two query heads each: five blocks of keys and more, whose sums meet in each row of dq.
"""

import ctypes
import hashlib
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from fovea import _abi, _library  # noqa: E402

CUDA = 1  # fovea_device


def main(d):
    lib = _library.lib
    random = np.random.default_rng(1)
    kept = []

    def tensor(array, kind):
        shape = (*array.shape, *[0] * (_abi.MAX_RANK - array.ndim))
        kept.append((array, ctypes.create_string_buffer(
            _abi.TENSOR.pack(_abi.TENSOR.size, array.ctypes.data, kind, array.ndim, 0, 0, *shape, *[0] * _abi.MAX_RANK))))  # fmt: skip
        return ctypes.addressof(kept[-1][1])

    q, k = (1, 200, 4, d), (1, 900, 2, d)
    normal = lambda shape: tensor(random.standard_normal(shape, np.float32).astype(np.float16), _abi.FP16)  # noqa: E731
    problem = _abi.Problem(ctypes.sizeof(_abi.Problem), _abi.DETERMINISTIC, device=CUDA)
    problem.q, problem.k, problem.v = normal(q), normal(k), normal(k)
    problem.out, problem.lse = tensor(np.zeros(q, np.float16), _abi.FP16), tensor(np.zeros((1, 4, 200), np.float32), _abi.FP32)
    grad_q = np.full(q, np.nan, np.float16)
    for direction, call in ((_abi.FORWARD, lib.fovea_forward), (_abi.BACKWARD, lib.fovea_backward)):
        if direction == _abi.BACKWARD:
            problem.grad_out, problem.grad_q = normal(q), tensor(grad_q, _abi.FP16)
            problem.grad_k, problem.grad_v = (tensor(np.zeros(k, np.float16), _abi.FP16) for _ in range(2))
        needed = ctypes.c_size_t()
        _library.check(lib.fovea_workspace(ctypes.byref(problem), direction, ctypes.byref(needed)))
        space = ctypes.create_string_buffer(needed.value + 256)
        first = (ctypes.addressof(space) + 255) // 256 * 256
        _library.check(call(ctypes.byref(problem), first, needed.value))
    if np.isnan(grad_q).any():
        sys.exit("NaN in dq")
    print("bits", hashlib.sha256(grad_q.tobytes()).hexdigest())


main(int(sys.argv[1]))
