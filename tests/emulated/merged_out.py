#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""merged_out.py D: an out and a logsumexp that a call on the emulated GPU, whose memory is the host's, merges with what
is there, against the formula in fp64. `fovea check` has no results that are there before.

Half of the rows meet no key, and a sink; some of what is there has no key either.
"""

import sys

import numpy as np
from calls import call, problem, tensor
from fovea import _abi

SQ, SK, HEADS = 200, 100, 2


def main(d):
    random = np.random.default_rng(1)
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

    of = problem(_abi.CAUSAL)
    of.q, of.k, of.v = (tensor(x, _abi.FP16) for x in (q, k, v))
    of.sink = tensor(sink, _abi.FP32)
    of.out, of.lse = tensor(out, _abi.FP32), tensor(lse, _abi.FP32)
    of.accumulate = _abi.ACCUMULATE_OUT
    call(of, _abi.FORWARD)
    error = np.abs(out - wanted).max()
    print("largest error of out", error)
    if not error < 5e-3:
        sys.exit("out differs")
    with np.errstate(invalid="ignore"):
        if not np.array_equal(np.isneginf(lse), np.isneginf(both)) or not np.nanmax(np.abs(np.where(np.isneginf(both), 0, lse - both))) < 1e-3:
            sys.exit("lse differs")


main(int(sys.argv[1]))
