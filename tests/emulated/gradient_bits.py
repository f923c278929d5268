#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gradient_bits.py D: the bits of dq, as a hash, of a deterministic call on the emulated GPU, whose memory is the host's.

900 keys of two key heads with two query heads each: five blocks of keys and more, whose sums meet in each row of dq.
"""

import hashlib
import sys

import numpy as np
from calls import call, problem, tensor
from fovea import _abi


def main(d):
    random = np.random.default_rng(1)
    q, k = (1, 200, 4, d), (1, 900, 2, d)
    normal = lambda shape: tensor(random.standard_normal(shape, np.float32).astype(np.float16), _abi.FP16)  # noqa: E731
    of = problem(_abi.DETERMINISTIC)
    of.q, of.k, of.v = normal(q), normal(k), normal(k)
    of.out, of.lse = tensor(np.zeros(q, np.float16), _abi.FP16), tensor(np.zeros((1, 4, 200), np.float32), _abi.FP32)
    call(of, _abi.FORWARD)
    grad_q = np.full(q, np.nan, np.float16)
    of.grad_out, of.grad_q = normal(q), tensor(grad_q, _abi.FP16)
    of.grad_k, of.grad_v = (tensor(np.zeros(k, np.float16), _abi.FP16) for _ in range(2))
    call(of, _abi.BACKWARD)
    if np.isnan(grad_q).any():
        sys.exit("NaN in dq")
    print("bits", hashlib.sha256(grad_q.tobytes()).hexdigest())


main(int(sys.argv[1]))
