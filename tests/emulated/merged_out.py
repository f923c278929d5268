#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""merged_out.py D: an out and a logsumexp that a call on the emulated GPU, whose memory is the host's, merges with what
is there, against the formula in fp64. `fovea check` has no results that are there before.

Half of the rows meet no key, and a sink; some of what is there has no key either.
"""

import ctypes
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from fovea import _abi, _library  # noqa: E402

CUDA = 1  # fovea_device
SQ, SK, HEADS = 200, 100, 2


def main(d):
    lib = _library.lib
    random = np.random.default_rng(1)
    kept = []

    def tensor(array, kind):
        shape = (*array.shape, *[0] * (_abi.MAX_RANK - array.ndim))
        kept.append((array, ctypes.create_string_buffer(
            _abi.TENSOR.pack(_abi.TENSOR.size, array.ctypes.data, kind, array.ndim, 0, 0, *shape, *[0] * _abi.MAX_RANK))))  # fmt: skip
        return ctypes.addressof(kept[-1][1])

    q, k, v = (random.standard_normal((1, rows, HEADS, d), np.float32).astype(np.float16) for rows in (SQ, SK, SK))
    out = random.standard_normal((1, SQ, HEADS, d), np.float32)
    lse = random.standard_normal((1, HEADS, SQ), np.float32)
    lse[:, :, ::7], out[:, ::7] = -np.inf, 0
    sink = np.array([0.5, -np.inf], np.float32)

    s = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), k.astype(np.float64)) / np.sqrt(d)
    s = np.where(np.arange(SK) <= np.arange(SQ)[:, None] + SK - SQ, s, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        all_scores = np.concatenate([s, np.broadcast_to(sink[None, :, None, None], (1, HEADS, SQ, 1))], -1)
        own = np.log(np.exp(all_scores).sum(-1))
        both = np.logaddexp(own, lse)
        weight = lambda x: np.where(np.isneginf(x), 0, np.exp(x - np.where(np.isneginf(both), 0, both)))  # noqa: E731
        p = np.where(np.isneginf(s), 0, np.exp(s - np.where(np.isneginf(both), 0, both)[..., None]))
        wanted = np.einsum("bhij,bjhd->bihd", p, v.astype(np.float64)) + out * weight(lse).transpose(0, 2, 1)[..., None]

    problem = _abi.Problem(ctypes.sizeof(_abi.Problem), _abi.CAUSAL, device=CUDA)
    problem.q, problem.k, problem.v = (tensor(x, _abi.FP16) for x in (q, k, v))
    problem.sink = tensor(sink, _abi.FP32)
    problem.out, problem.lse = tensor(out, _abi.FP32), tensor(lse, _abi.FP32)
    problem.accumulate = _abi.ACCUMULATE_OUT
    needed = ctypes.c_size_t()
    _library.check(lib.fovea_workspace(ctypes.byref(problem), _abi.FORWARD, ctypes.byref(needed)))
    space = ctypes.create_string_buffer(needed.value + 256)
    first = (ctypes.addressof(space) + 255) // 256 * 256
    _library.check(lib.fovea_forward(ctypes.byref(problem), first, needed.value))
    error = np.abs(out - wanted).max()
    print("largest error of out", error)
    if not error < 5e-3:
        sys.exit("out differs")
    with np.errstate(invalid="ignore"):
        if not np.array_equal(np.isneginf(lse), np.isneginf(both)) or not np.nanmax(np.abs(np.where(np.isneginf(both), 0, lse - both))) < 1e-3:
            sys.exit("lse differs")


main(int(sys.argv[1]))
