# SPDX-License-Identifier: Apache-2.0
"""XLA captures calls of fovea in command buffers (CUDA graphs) and replays them, and the results have the same bits."""

import os
import subprocess
import sys

import jax
import pytest

from captured import RUNS
from conftest import ROOT

CALLS = 6  # three forwards and three backwards


def captured(kinds):
    """How often XLA called fovea, and a hash of the results, where it puts operations of these kinds into command buffers."""
    flags = f"--xla_gpu_enable_command_buffer={kinds} --xla_gpu_graph_min_graph_size=1"
    done = subprocess.run([sys.executable, str(ROOT / "tests/jax/captured.py")], env={**os.environ, "XLA_FLAGS": flags},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    calls, digest = done.stdout.split()
    return int(calls), digest


@pytest.mark.skipif(jax.default_backend() == "cpu", reason="command buffers exist on GPUs alone")
def test_replays_have_the_same_bits():
    plain, wanted = captured("")
    assert plain == CALLS * RUNS
    replayed, found = captured("FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL")
    print(f"fovea was called {plain} times without command buffers, {replayed} times with them")
    assert replayed < plain
    assert found == wanted
