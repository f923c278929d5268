# SPDX-License-Identifier: Apache-2.0
"""Memory is linear in the sequence length: measured as the peak of a child process that computes, minus that of
one that only holds the inputs and outputs."""

import os
import subprocess
import sys

import pytest

CHILD = """
import resource, sys
import numpy as np
import fovea

compute, seqlen, dim = sys.argv[1] == "compute", int(sys.argv[2]), 64
rng = np.random.default_rng(0)
shape = (1, seqlen, 1, dim)
q, k, v, grad_out = (rng.standard_normal(shape, dtype=np.float32) for _ in range(4))
out, lse = np.ones(shape, np.float32), np.ones((1, 1, seqlen), np.float32)
grads = {name: np.ones(shape, np.float32) for name in "qkv"}
# A window bounds the time, not the memory: blocks, accumulators and buffers are those of the whole sequence.
options = dict(window=(int(sys.argv[3]), 0)) if len(sys.argv) > 3 else {}
if compute:
    got, lse = fovea.attention(q, k, v, return_lse=True, out=out, **options)
    fovea.attention_backward(grad_out, q, k, v, out, lse, grads_out=grads, **options)
    assert np.isfinite(grads["q"]).all() and np.isfinite(out).all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak(mode, seqlen, *window):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, mode, str(seqlen), *map(str, window)],
        env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) * 1024


LONG = [(65536, ())] if os.environ.get("FOVEA_LONG") else []  # minutes


@pytest.mark.parametrize("seqlen, window", [(65536, (2048,)), (16384, ()), *LONG])
def test_peak_memory_is_under_200_mb_beyond_inputs_and_outputs(seqlen, window):
    extra = peak("compute", seqlen, *window) - peak("hold", seqlen, *window)
    print(f"S={seqlen}, one head, D=64, forward and backward: {extra / 1e6:.1f} MB beyond inputs and outputs")
    assert extra < 200e6
